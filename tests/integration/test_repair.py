"""Folders that an earlier release left unreadable: named by every command, repaired, and whole (A1)."""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.app import run
from penstock.log.disk import RealDisk
from penstock.log.recovery import open_for_writing
from penstock.log.repair import repair, unreadable_entries
from penstock.log.unreadable import SET_ASIDE
from penstock.model.errors import UnreadableEntry
from penstock.model.settings import Settings
from penstock.testing.simulation.disk import SimCrash, SimDisk
from tests.conftest import contents, hashes, small_settings

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "broken_folders.tar.xz"
with tarfile.open(RECORDED) as _archive:
    CASES = sorted(name.removesuffix(".json") for name in _archive.getnames() if "/" not in name and name.endswith(".json"))  # fmt: skip
LOSSLESS = {"ladder-of-floats", "partitions-as-a-float", "partitions-grown-to-a-float", "retention-bytes-as-a-float", "write-once-as-an-int"}  # fmt: skip


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """A recorded folder by its name, and what was in it."""

    def unpack(case: str) -> tuple[Path, dict[str, Any]]:
        with tarfile.open(RECORDED) as archive:
            names = (case, f"{case}.json")
            inside = [each for each in archive if each.name.partition("/")[0] in names]
            archive.extractall(tmp_path, inside)
        return tmp_path / case, json.loads((tmp_path / f"{case}.json").read_text())

    return unpack


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def found_in(folder: Path, known: dict[str, Any]) -> dict[str, Any]:
    """What is in a folder, in the words of the recording."""
    async with penstock.connect(folder) as bus:
        events = [
            [event.topic, event.partition, event.offset, event.token.bytes.hex(), event.value(), dict(event.headers)]
            for topic in ("orders.created", "orders.paid")
            async for event in bus.replay(topic)
        ]  # fmt: skip
        groups = {
            group.name: [
                [lane.topic, lane.partition, lane.cursor, lane.outstanding, lane.lag]
                for lane in group.lanes
            ]
            for group in await bus.groups.list()
        }
        dead = [[each.id, each.consumer, each.reason] for each in await bus.dead_letters.list()]
        audited = [record.operation for record in await bus.audit.query()]
        assert (await bus.audit.verify()).ok
        await bus.topics.list()
        receipt = await bus.publish("orders.created", {"n": 99}, key="1")
        assert receipt.offset == sum(e[:2] == ["orders.created", receipt.partition] for e in events)
    return known | {"events": events, "groups": groups, "dead": dead, "audited": audited}


@pytest.mark.parametrize("case", CASES)
async def test_a_broken_folder_is_named_repaired_and_holds_all_else(
    case: str, recorded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, known = recorded(case)
    before = hashes(folder)

    with pytest.raises(UnreadableEntry, match=r"jnl: the entry at byte \d+ .*doctor FOLDER --repair") as caught:  # fmt: skip
        async with penstock.connect(folder):
            pass
    assert caught.value.code == "storage.unreadable-entry"
    assert (caught.value.path, caught.value.kind in ("group", "topic")) == ("journal/00000000000000000000.jnl", True)  # fmt: skip
    assert caught.value.offset > 0
    with pytest.raises(UnreadableEntry):
        async with penstock.connect(f"{folder}?mode=ro"):
            pass
    assert hashes(folder) == before

    disk, settings = RealDisk(folder), Settings()
    found = unreadable_entries(disk, settings)
    assert found[0].offset == caught.value.offset
    assert len(found) == (5 if case == "several" else 2 if case == "partitions-grown-to-a-float" else 1)  # fmt: skip
    if case != "several":
        assert {bool(each.lost) for each in found} == {case not in LOSSLESS}
    repair(disk, settings, actor="ann", at_us=1, entropy=bytes(32))
    after = hashes(folder)
    kept = {path: known for path, known in after.items() if not path.startswith("audit/")}
    assert kept.pop(SET_ASIDE)
    assert kept == {path: known for path, known in before.items() if not path.startswith("audit/")}
    assert repair(disk, settings, actor="ann", at_us=2, entropy=bytes(32)) == []
    assert hashes(folder) == after

    there = await found_in(folder, known)
    assert sorted(there["events"], key=str) == sorted(known["events"], key=str)
    assert there["groups"] == known["groups"]
    assert there["dead"] == known["dead"]
    # The chain of the old release had stopped at an action that it could not take.
    late = ["topic.configure"] if case in ("several", "partitions-grown-to-a-float") else []
    assert there["audited"] == [*known["audited"], "journal.repair", *late]
    async with penstock.connect(folder) as bus:
        assert len(await bus.audit.query(operation="journal.repair")) == 1


async def test_a_repaired_folder_is_sealed_and_opens_from_its_snapshot(recorded: Any) -> None:
    folder, known = recorded("several")
    repair(RealDisk(folder), Settings(), actor="ann", at_us=1, entropy=bytes(32))
    async with penstock.connect(folder, settings=small_settings()) as bus:
        for _ in range(12):
            await bus.publish("filler", random.Random(1).randbytes(200_000))
        await bus.engine.maintenance.settle()  # type: ignore[attr-defined]
    assert list((folder / "state").glob("*.snap"))
    async with penstock.connect(folder, settings=small_settings()) as bus:
        await bus.engine.maintenance.settle()  # type: ignore[attr-defined]
    assert not (folder / "journal" / f"{0:020d}.jnl").exists()
    there = await found_in(folder, known)
    assert sorted(there["events"], key=str) == sorted(known["events"], key=str)
    assert there["groups"] == known["groups"]


def test_the_commands_name_what_is_broken_and_repair_asks_first(
    recorded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = recorded("several")
    before = hashes(folder)
    assert run(["doctor", str(folder), "--json"]) == 1
    named = [row for row in rows(capsys) if row["name"] == "log"]
    assert [row["code"] for row in named] == ["storage.unreadable-entry"] * 5
    assert run(["up", str(folder), "--check", "--json"]) == 6
    assert [row for row in rows(capsys) if row["name"] == "log"] == named
    assert run(["topic", "list", "--url", str(folder)]) == 6
    assert "penstock doctor FOLDER --repair" in capsys.readouterr().err

    for words in ([], ["--confirm", "repair"]):
        assert run(["doctor", str(folder), "--repair", "--json", *words]) == 4
        shown = capsys.readouterr()
        shown_rows = [json.loads(line) for line in shown.out.splitlines()]
        assert [row["entry"] for row in shown_rows if "entry" in row] == [
            "group 'wrong'", "topic 'orders.wrong'", "topic 'stock.items'", "audited", "group 'wrong'",
        ]  # fmt: skip
        assert "refused.confirmation" in shown.out + shown.err
    assert hashes(folder) == before

    assert run(["doctor", str(folder), "--repair", "--confirm", "REPAIR"]) == 0
    assert SET_ASIDE in capsys.readouterr().err
    assert run(["doctor", str(folder), "--repair", "--json"]) == 0
    assert run(["doctor", str(folder), "--json"]) == 0
    aside = [row for row in rows(capsys) if row["name"] == "set aside"]
    assert [row["found"] for row in aside] == [f"5 entries, kept in {SET_ASIDE}"]
    assert run(["up", str(folder), "--check"]) == 0


async def test_a_folder_that_is_open_is_not_repaired(tmp_path: Path, capsys: Any) -> None:
    async with penstock.connect(tmp_path / "data"):
        assert run(["doctor", str(tmp_path / "data"), "--repair", "--confirm", "REPAIR"]) == 6
    assert "being written by" in capsys.readouterr().err


def on_sim_disk(files: dict[str, bytes], seed: int) -> SimDisk:
    disk = SimDisk(seed)
    for path, data in files.items():
        folder = path.rpartition("/")[0]
        if folder:
            disk.make_dir(folder)
        file = disk.open(path, create=True)
        file.append([data])
        file.sync()
        file.close()
        disk.sync_dir(folder)
    return disk


def test_a_repair_that_is_killed_leaves_the_folder_as_before_or_repaired(recorded: Any) -> None:
    folder, _ = recorded("several")
    files = contents(RealDisk(folder))
    settings = Settings()
    outcomes = set()
    for step in range(1, 200):
        disk = on_sim_disk(files, step)
        disk.crash_at(disk.operations + step)
        try:
            repair(disk, settings, actor="ann", at_us=1, entropy=bytes(32))
        except SimCrash:
            pass
        else:
            break
        disk = disk.crash()
        left = len(unreadable_entries(disk, settings))
        outcomes.add(left)
        assert left in (0, 5)
        repair(disk, settings, actor="ann", at_us=1, entropy=bytes(32))
        recovered = open_for_writing(disk, settings)
        assert set(recovered.fold.state.topics) >= {"orders.created", "orders.paid", "stock.items"}
        assert recovered.fold.state.topics["stock.items"].partitions == 4
    else:
        pytest.fail("the repair never ended")
    assert step > 10
    assert 5 in outcomes
