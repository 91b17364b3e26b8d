"""Work: how many calls something takes. A busy machine changes how long they last, not how many they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Calls:
    """Calls of functions counted so far, of Python's and of extension modules'."""

    def __init__(self) -> None:
        self.count = 0

    def _seen(self, frame: Any, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count the calls of this thread, and of threads that start meanwhile.

    >>> with counted_calls() as calls:
    ...     _ = [abs(number) for number in range(100)]
    >>> 100 <= calls.count < 110
    True
    """
    calls = Calls()
    threading.setprofile(calls._seen)
    sys.setprofile(calls._seen)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
