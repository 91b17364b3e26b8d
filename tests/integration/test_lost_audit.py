"""An audit chain that lost its tail, a file or its whole folder is not whole, whatever is left (C3)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.cli.app import run
from penstock.core.audit import Verdict
from tests.conftest import small_settings


async def act(bus: penstock.Bus, first: int, count: int) -> None:
    for n in range(first, first + count):
        await bus.dead_letters.dead_letter(
            f"case-{n}", consumer="g", topic="orders", payload=b"x", actor="ann", reason="test"
        )


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder whose chain has seven records in two lives; a copy of the first is beside it."""
    data = tmp_path / "data"
    async with penstock.connect(data, settings=small_settings()) as bus:
        await act(bus, 0, 3)
    shutil.copytree(data / "audit", tmp_path / "older")
    async with penstock.connect(data, settings=small_settings()) as bus:
        await act(bus, 3, 4)
    return data


def removed_folder(data: Path) -> None:
    shutil.rmtree(data / "audit")


def removed_files(data: Path) -> None:
    for path in (data / "audit").iterdir():
        path.unlink()


def removed_chain(data: Path) -> None:
    (data / "audit" / f"{1:020d}.ndjson").unlink()
    (data / "audit" / "head.json").unlink()


def older_copy(data: Path) -> None:
    shutil.rmtree(data / "audit")
    shutil.copytree(data.parent / "older", data / "audit")


def removed_tail(data: Path) -> None:
    path = data / "audit" / f"{1:020d}.ndjson"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    shutil.copy(data.parent / "older" / "head.json", data / "audit")


DAMAGE: list[Callable[[Path], None]] = [removed_folder, removed_files, removed_chain, older_copy, removed_tail]  # fmt: skip


async def verdict(url: Path | str) -> Verdict:
    async with penstock.connect(url, settings=small_settings()) as bus:
        return await bus.audit.verify()  # type: ignore[no-any-return]


async def test_a_whole_chain_is_called_whole(folder: Path) -> None:
    found = await verdict(f"{folder}?mode=ro")
    assert (found.ok, found.records) == (True, 7)
    assert (await verdict(folder)).ok


@pytest.mark.parametrize("damage", DAMAGE)
async def test_what_was_removed_is_named(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    found = await verdict(f"{folder}?mode=ro")
    assert not found.ok
    assert found.broken is not None
    assert found.broken.kind in ("removed", "truncated")
    for words in (["audit", "verify"], ["doctor"]):
        assert await asyncio.to_thread(run, ["--url", str(folder), *words]) == 1


@pytest.mark.parametrize("damage", [removed_folder, removed_files])
async def test_a_chain_begun_again_does_not_hide_the_one_that_is_gone(
    damage: Callable[[Path], None], folder: Path
) -> None:
    """Not even when it is longer, and the journal no longer has the actions of the first."""
    damage(folder)
    for life in range(3):
        async with penstock.connect(folder, settings=small_settings()) as bus:
            await act(bus, 10 * (life + 1), 4)
            await bus.engine.maintenance.settle()  # type: ignore[attr-defined]
            found = await bus.audit.verify()
            assert not found.ok
            assert "7 records" in found.broken.explanation
            assert found.broken.kind == "removed"


async def test_an_older_copy_that_grew_is_no_longer_the_chain(folder: Path) -> None:
    older_copy(folder)
    # The journal still has the actions, and they are chained again, in other writes than before.
    for life in range(2):
        async with penstock.connect(folder, settings=small_settings()) as bus:
            await act(bus, 10 * (life + 1), 4)
            found = await bus.audit.verify()
        assert not found.ok
        assert found.broken.kind == "changed"
