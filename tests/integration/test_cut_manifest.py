"""A manifest that lost acknowledged records is blamed itself, not the files it used to name (C18)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import penstock
from penstock.model.errors import Corrupted
from tests.conftest import small_settings


async def sealed(folder: Path, rounds: int) -> None:
    """Events of so many rounds, each sealed; the journal of the earlier ones is reclaimed."""
    settings = small_settings(sealing__grace_s=0.0)
    async with penstock.connect(folder, settings=settings) as bus:
        for _ in range(rounds):
            for _ in range(12):
                await bus.publish("orders", random.Random(7).randbytes(100_000))
            await bus.engine.maintenance.settle()  # type: ignore[attr-defined]


@pytest.mark.parametrize("rounds", [3, 9])
@pytest.mark.parametrize("share", [0.2, 0.35, 0.5])
async def test_the_manifest_is_named(rounds: int, share: float, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    await sealed(folder, rounds)
    (manifest,) = (folder / "segments").glob("manifest-*.log")
    data = manifest.read_bytes()
    manifest.write_bytes(data[: int(len(data) * share)])
    for url in (f"{folder}?mode=ro", str(folder)):
        with pytest.raises(Corrupted, match="is cut, or an older copy") as caught:
            async with penstock.connect(url):
                pass
        assert caught.value.path == f"segments/{manifest.name}"
    manifest.write_bytes(data)
    async with penstock.connect(folder) as bus:
        assert len([event async for event in bus.replay("orders")]) == rounds * 12


async def test_a_missing_journal_file_is_still_blamed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    settings = small_settings(sealing__enabled=False)
    async with penstock.connect(folder, settings=settings) as bus:
        for _ in range(30):
            await bus.publish("orders", bytes(100_000))
    first, *_ = sorted((folder / "journal").glob("*.jnl"))
    first.unlink()
    with pytest.raises(Corrupted, match="is missing") as caught:
        async with penstock.connect(folder):
            pass
    assert caught.value.path == f"journal/{first.name}"
