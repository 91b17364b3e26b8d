"""What the sealing process takes does not follow from how far a journal file expands (C17)."""

from __future__ import annotations

from pathlib import Path

import penstock

MIB = 1 << 20


def peak_bytes_of_children() -> int:
    """The most that a process started by this one ever had in memory."""
    found = [0]
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return max(found)


async def sealed_with(folder: Path, megabytes: int) -> int:
    """Seal so much that takes next to nothing in the journal; returns the peak of the sealing process."""
    async with penstock.connect(folder) as bus:
        for number in range(megabytes // 8):
            await bus.publish_many("much", [bytes([number]) * MIB] * 8)
        await bus.topics.seal()
        peak = peak_bytes_of_children()
        info = (await bus.topics.info("much")).partitions[0]
        assert info.end_offset - info.first_offset == megabytes // 8 * 8
        events = [event async for event in bus.replay("much")]
        assert [len(event.payload) for event in events] == [MIB] * len(events)
    return peak


async def test_the_sealing_process_decodes_a_file_of_events_at_a_time(tmp_path: Path) -> None:
    few = await sealed_with(tmp_path / "few", 160)
    assert few > 50 * MIB  # it was there when it was measured
    assert await sealed_with(tmp_path / "many", 640) < few + 100 * MIB
