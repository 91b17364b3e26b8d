"""Failpoints: named places where a test lets the process die, as if the power had gone."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

_passes: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Die here when `FAILPOINT` is this name, or `name:3` for the third pass.

    The file that `FAILPOINT_FIRED` names is made first: a test asserts that it is there.
    `FAILPOINT_ROOT` is the process id of a driver: it dies too, and all between it and here,
    because a stage of a batch may run in a worker.

    >>> failpoint("docs.nobody-asked")
    """
    wanted, _, number = os.environ.get("FAILPOINT", "").partition(":")
    if wanted != name:
        return
    _passes[name] += 1
    if _passes[name] != int(number or 1):
        return
    fired = os.environ.get("FAILPOINT_FIRED")
    if fired:
        Path(fired).touch()
    for pid in _up_to(os.environ.get("FAILPOINT_ROOT")):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _up_to(root: str | None) -> list[int]:
    """The processes above this one as far as `root`, the highest first."""
    if not root or int(root) == os.getpid():
        return []
    above, pid = [], os.getppid()
    while pid > 1:
        above.append(pid)
        if pid == int(root):
            return above[::-1]
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise RuntimeError(f"process {root} is not above {os.getpid()}")
