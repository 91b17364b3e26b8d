"""`large_room` returns memory to the system when the last view of it is gone (T13)."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from penstock.transport import tcp

MIB = 1 << 20
DEADLINE_S = 20.0


def mapped_mb() -> float:
    """What the system has given this process for good, without files."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def test_a_view_keeps_it_and_the_last_one_gives_it_back():
    whole = tcp.large_room(64 * MIB)
    np.frombuffer(whole, dtype=np.uint8)[:] = 7
    full = mapped_mb()
    part = whole[MIB : MIB + 3]
    del whole
    gc.collect()
    assert bytes(part) == b"\x07\x07\x07"
    assert mapped_mb() > full - 32
    del part
    deadline = time.monotonic() + DEADLINE_S
    while mapped_mb() > full - 32:
        assert time.monotonic() < deadline, "the memory never went back"
        time.sleep(0.01)


def test_it_goes_back_from_any_thread():
    held = [tcp.large_room(MIB)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert held == []
    assert len(tcp.large_room(MIB)) == MIB


def test_too_much_is_an_error():
    with pytest.raises(OSError, match="memory"):
        tcp.large_room(1 << 60)
