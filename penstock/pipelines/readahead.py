"""Reading ahead: the next piece is read while Spark still takes the one before.

A worker that hands a piece to Spark waits until Spark has room for it. Without a thread, reading
and taking would happen in turns, and a core would rest meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
AHEAD = 1  # pieces that wait; a second one would only take memory
LOOK_S = 0.05  # between two looks whether anybody still wants what is read


class _End(Exception):
    """There is no more."""


def read_ahead(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces in the same order, each read before it is asked for; errors come at their place.

    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    waiting: queue.Queue[T | BaseException] = queue.Queue(AHEAD)
    over = threading.Event()
    thread = threading.Thread(
        target=_fill, args=(pieces, waiting, over), name="penstock-read-ahead", daemon=True
    )
    thread.start()
    try:
        while True:
            piece = waiting.get()
            if isinstance(piece, _End):
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        # The thread uses the store, which the next task of this process needs for itself.
        over.set()
        thread.join()


def _fill(
    pieces: Iterator[T], waiting: queue.Queue[T | BaseException], over: threading.Event
) -> None:
    def put(piece: T | BaseException) -> bool:
        while not over.is_set():
            try:
                waiting.put(piece, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False

    try:
        for piece in pieces:
            if not put(piece):
                return
    except BaseException as error:
        put(error)
    else:
        put(_End())
