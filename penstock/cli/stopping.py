"""Being asked to stop: by Ctrl-C, by SIGTERM, or because the time is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop(after_s: float | None = None) -> Iterator[threading.Event]:
    """Set by the first signal or when the time is over; a second signal does what it always does."""
    event = threading.Event()
    before: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[number])

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, stop)
    timer = threading.Timer(after_s or 0, event.set)
    timer.daemon = True
    if after_s is not None:
        timer.start()
    try:
        yield event
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
