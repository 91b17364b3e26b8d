"""A stalled consumer, in short; `tools/soak stall` runs the ten minutes (T11)."""

from __future__ import annotations

from pathlib import Path

from penstock.bench.stall import stall


async def test_others_work_on_beside_a_consumer_that_stalls(tmp_path: Path) -> None:
    result = await stall(tmp_path, seconds=12.0, every_s=1.0)
    readings = result["readings"]
    stalled = [each for each in readings if each["at_s"] > 0.2 * 12 + 1]
    assert len(stalled) >= 5
    handled = [each["events"] for each in stalled]
    assert handled == sorted(set(handled)), "somebody stood still"
    assert result["calm_per_s"] > 0 < result["stalled_per_s"]
    assert all(each["rss_mb"] > 0 for each in readings)
