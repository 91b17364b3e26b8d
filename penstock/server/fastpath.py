"""Large payloads are compressed, expanded and checked by threads, so that the loop stays free.

`FastPath` owns the threads: compression, decompression and checks of payloads of `fastpath.cutover_bytes`
or more run there. Arrow's compressors and zlib's checksums release the interpreter lock, and nothing is
copied on the way to a thread.

`ThreadLane` keeps the order of one connection in one direction: while a thread works on a large frame,
the frames behind it wait. `expands` and `read_frame` use it for the frames of a client, which have to be
expanded and translated from the client's encoding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from penstock.model.errors import Deferred, PenstockError
from penstock.model.settings import FastPath as FastPathSettings
from penstock.wire.encodings import from_mark
from penstock.wire.frame import BODY_HEAD, Frame
from penstock.wire.limits import UNCOUNTED_BYTES, check_message
from penstock.wire.stream import COMPRESSOR_AT, RAW_SIZE, Message, decode_frame

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

# A publish that found all threads busy is tried again after this: about what a large payload takes.
RETRY_S = 0.05
# Where in a body its mark stands.
MARK_AT = 8


class FastPath:
    """Runs work on large payloads in threads, as the settings allow."""

    def __init__(self, settings: FastPathSettings) -> None:
        self.taken = 0
        """Payloads that a thread worked on."""
        self.fallen_back = 0
        """Payloads that the loop worked on because all threads were busy."""
        self._settings = settings
        self._busy = 0
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, size_bytes: int, work: Callable[..., T], *args: object) -> T:
        """Do the work, here or in a thread; `size_bytes` decides."""
        settings = self._settings
        if not self.wants(size_bytes):
            return work(*args)
        if self._busy >= settings.threads and settings.fall_back:
            if settings.require:
                raise Deferred(
                    "the fast path is busy and required for large payloads; nothing was stored. "
                    "Publish again in a moment",
                    retry_after_s=RETRY_S,
                    limit="fastpath.threads",
                )
            self.fallen_back += 1
            return work(*args)
        return await self.submit(work, *args)

    def wants(self, size_bytes: int) -> bool:
        """Whether work on so many bytes is for a thread."""
        settings = self._settings
        return settings.enabled and size_bytes >= settings.cutover_bytes and not self._closed

    def submit(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Have a thread do the work, as soon as one is free."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._settings.threads, "penstock-fastpath")
        self._busy += 1
        self.taken += 1
        done = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        done.add_done_callback(self._freed)
        return done

    def _freed(self, _: asyncio.Future[T]) -> None:
        self._busy -= 1

    def drop(self, held: list[Any], size_bytes: int) -> None:
        """Free something large in a thread; the caller must have no other reference to it.

        Giving 16 MiB back to the system takes milliseconds, too long for the loop.
        """
        if self._threads is not None and size_bytes >= self._settings.cutover_bytes:
            self._threads.submit(held.clear)
        else:
            held.clear()

    def close(self) -> None:
        """Let the threads end; the loop works on later payloads."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)


class ThreadLane(Generic[Item, Result]):
    """One direction of one connection: a thread works on one item, and later items wait in order."""

    def __init__(
        self,
        fastpath: FastPath | None,
        go_on: Callable[[asyncio.Future[Result], Item, list[Item]], None],
    ) -> None:
        self.busy = False
        self.waiting_bytes = 0
        """Of the item in the thread and of those behind it."""
        self._fastpath = fastpath
        self._go_on = go_on
        """Called with the finished work, its item, and the items that waited behind it."""
        self._waiting: list[Item] = []
        self._left = False

    def begin(
        self, item: Item, size_bytes: int, work: Callable[..., Result], *args: object
    ) -> bool:
        """Have a thread work on an item; False when it is too small to be worth it."""
        if self._fastpath is None or not self._fastpath.wants(size_bytes):
            return False
        self.follow(item, size_bytes, self._fastpath.submit(work, *args))
        return True

    def follow(self, item: Item, size_bytes: int, work: asyncio.Future[Result]) -> None:
        """Wait for work on an item that was started elsewhere."""
        self.busy = True
        self.waiting_bytes = size_bytes
        work.add_done_callback(lambda done: self._done(done, item))

    def waits(self, item: Item, size_bytes: int = 0) -> bool:
        """Keep an item back while another one is worked on."""
        if self.busy:
            self._waiting.append(item)
            self.waiting_bytes += size_bytes
        return self.busy

    def leave(self) -> None:
        """Drop everything: the connection is gone."""
        self._left = True
        self._waiting.clear()
        self.waiting_bytes = 0

    def _done(self, work: asyncio.Future[Result], item: Item) -> None:
        self.busy = False
        self.waiting_bytes = 0
        waiting, self._waiting = self._waiting, []
        if not work.cancelled():
            # Fetched here, or asyncio would log "exception was never retrieved" for each broken frame.
            work.exception()
        if not self._left:
            self._go_on(work, item, waiting)


Read = tuple[Frame, PenstockError | None]
"""A frame, and the error when its message cannot be read: the client gets the error, and stays connected."""
Expansion = ThreadLane[Message, Read]
"""The lane for frames that arrive from a client."""


def expanded_bytes(message: Message, limit_bytes: int) -> int:
    """The bytes of a message when expanded; 0 when it is not compressed, or too large to be accepted."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size or not body[COMPRESSOR_AT]:
        return 0
    (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
    return raw_bytes if raw_bytes <= limit_bytes else 0


def expands(expansion: Expansion, message: Message, limit_bytes: int) -> bool:
    """Expand and translate a message in a thread; False when it is small, or needs neither."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size:
        return False
    raw_bytes = expanded_bytes(message, limit_bytes)
    if not raw_bytes and (body[COMPRESSOR_AT] or not body[MARK_AT]):
        return False  # a message that is too large is refused without any work
    size_bytes = max(raw_bytes, len(body))
    return expansion.begin(message, size_bytes, read_frame, message, limit_bytes)


def translated(frame: Frame) -> Read:
    """A frame in the broker's own encoding, whichever mark it has; a message over the limits is not read."""
    if not frame.mark and len(frame.meta) <= UNCOUNTED_BYTES:
        return frame, None
    try:
        check_message(frame)
        return from_mark(frame), None
    except PenstockError as error:
        return frame, error


def read_frame(message: Message, limit_bytes: int) -> Read:
    """The frame in a message, expanded and translated."""
    try:
        return translated(decode_frame(message, limit_bytes))
    except PenstockError as error:
        # Its traceback would keep the expanded bytes for as long as the error lives.
        raise error.with_traceback(None) from None
