"""`retention.max_bytes` bounds the folder at full rate, and readers find what moved (C7)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import penstock

MIB = 1 << 20
FILE_BYTES = 2 * MIB
MOST = 12 * MIB
# A grace time that would keep everything: the bound must not wait for it.
SETTINGS = {
    "journal.file_bytes": FILE_BYTES,
    "journal.side_file_bytes": 8 * MIB,
    "retention.max_bytes": MOST,
    "sealing.grace_s": 3_600.0,
    "sealing.process": False,
    "sealing.min_segment_bytes": 1 << 16,
    "sealing.target_segment_bytes": MIB,
    "limits.cache_bytes": 0,
}


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


async def fill(bus: penstock.Bus, folder: Path, megabytes: int) -> int:
    """Publish so much; returns the most that the folder held."""
    most = 0
    for _ in range(megabytes):
        await bus.publish_many("load", [os.urandom(64 << 10) for _ in range(16)])
        most = max(most, folder_bytes(folder))
    return most


async def test_the_folder_keeps_to_its_bound_whatever_the_grace_time(tmp_path: Path) -> None:
    async with penstock.connect(tmp_path, **SETTINGS) as bus:
        most = await fill(bus, tmp_path, 80)
    slack = 64 << 10
    # The journal file in use and the spare one are allocated before they are filled.
    beside = 2 * MIB  # a commit under way, the snapshot, the manifest
    assert most <= MOST + 2 * (FILE_BYTES + slack) + beside


async def test_a_reader_in_another_process_goes_on_while_files_are_reclaimed(
    tmp_path: Path,
) -> None:
    """One that lags finds what it had not read in segments, or is told that it is gone."""
    async with penstock.connect(tmp_path, **SETTINGS) as bus:
        await bus.publish("load", b"first")
        follower = penstock.connect(f"{tmp_path}?mode=ro")
        async with follower:
            assert len([event async for event in follower.replay("load")]) == 1
            # While it does not look, all of the journal it knows is sealed and reclaimed.
            await fill(bus, tmp_path, 30)
            info = await bus.topics.info("load")
            first = info.partitions[0].first_offset
            found = [event.offset async for event in follower.replay("load", from_offset=first)]
            assert found[0] >= first
            assert found == list(range(found[0], info.partitions[0].end_offset))


async def test_a_folder_without_a_bound_keeps_what_was_replaced_for_its_grace_time(
    tmp_path: Path,
) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "retention.max_bytes"}
    async with penstock.connect(tmp_path, **settings) as bus:
        await fill(bus, tmp_path, 8)
        async with asyncio.timeout(30):
            while not any((tmp_path / "segments").iterdir()):
                await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        assert len(list((tmp_path / "journal").glob("*.jnl"))) >= 4


async def test_a_small_disk_takes_publishes_as_long_as_retention_makes_room(
    small_disk: Path,
) -> None:
    """Sealed journal filled it, and publishes were refused until a clock had run down."""
    settings = {
        **SETTINGS,
        "journal.file_bytes": MIB,
        "retention.max_bytes": 3 * MIB,
        "sealing.target_segment_bytes": MIB // 2,
    }
    async with penstock.connect(small_disk / "data", **settings) as bus:
        for _ in range(200):
            await bus.publish_many("load", [os.urandom(32 << 10) for _ in range(8)])
