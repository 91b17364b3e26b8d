"""Processes as the kernel sees them: who is below whom, what they used, what they hold."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def parents() -> dict[int, int]:
    """Every process there is, and the one that started it.

    >>> parents()[os.getpid()] == os.getppid()
    True
    """
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))):
            found[int(name)] = int(stat[1])
    return found


def tree(root: int, parents: dict[int, int]) -> set[int]:
    """A process and everything below it.

    >>> sorted(tree(2, {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}))
    [2, 3, 4]
    """
    found = {root}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def session_of(pid: int) -> int:
    """The session a process belongs to; -1 when it is gone."""
    stat = _stat(pid)
    return int(stat[3]) if stat else -1


def command_of(pid: int) -> str:
    """The words it was started with; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def cpu_s_of(pid: int) -> float:
    """User and system time, with that of children already reaped: never goes back for a tree."""
    stat = _stat(pid)
    return sum(int(ticks) for ticks in stat[11:15]) / TICKS_PER_S if stat else 0.0


def memory_mb(pid: int, what: str = "VmHWM") -> float:
    """Memory by the name it has in /proc/PID/status, the peak by default; 0 when it is gone.

    >>> 0 < memory_mb(os.getpid(), "VmRSS") <= memory_mb(os.getpid())
    True
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    for line in status.splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak(pid: int) -> None:
    """Make the kernel count a process's peak memory from now on, where it allows that."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name; empty when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
