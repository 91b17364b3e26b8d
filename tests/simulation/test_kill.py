"""kill -9 on a real process and a real disk, in short; `--kills 200` is the long one (row T6)."""

from __future__ import annotations

from penstock.testing.simulation.kill import kill_rounds


def test_nothing_acknowledged_is_lost_by_kill_9() -> None:
    lines: list[str] = []
    assert kill_rounds(6, tell=lines.append) == 0, "\n".join(lines)
    assert lines, "the rounds report what they saw"
