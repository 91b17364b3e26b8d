"""The fast path of large payloads: their compression and checks leave the broker's loop (row T13).

The work is done by threads: Arrow's compressors and zlib's checksums let go of the interpreter, so
the loop goes on serving small events meanwhile. Nothing is copied to get there.

Detour: what is large on a connection goes by way of a thread, and nothing overtakes it (row T13).

Expanding: which frames of a client are expanded and translated by a thread (row T13).

Outgoing: frames on their way to one client over TCP, as it likes them: its mark, its compressor.

A frame at or above `fastpath.cutover_bytes` that has to be compressed or translated is made ready by
a thread (row T13); those behind it wait, so that frames leave in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from penstock.model.errors import Deferred, PenstockError
from penstock.model.settings import FastPath as FastPathSettings
from penstock.transport.tcp import SendBuffer
from penstock.wire.encodings import for_mark, from_mark
from penstock.wire.frame import BODY_HEAD, Bytes, Frame, Kind
from penstock.wire.limits import UNCOUNTED_BYTES, check_message
from penstock.wire.stream import COMPRESSOR_AT, RAW_SIZE, Message, decode_frame, encode_frame

# -- fastpath -------------------------------------------------------------------------------------


T = TypeVar("T")
RETRY_S = 0.05  # about what a large payload takes


class FastPath:
    """Runs work on large payloads in threads, as the settings allow."""

    def __init__(self, settings: FastPathSettings) -> None:
        self.taken = 0
        """Payloads that took it."""
        self.fallen_back = 0
        """Payloads that found it busy and were worked on by the loop."""
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
        """Whether work on so much is for a thread."""
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
        """Let go of something large; the caller must have no other reference to it.

        Giving 16 MiB back to the system takes milliseconds, which a thread has and the loop has not.
        """
        if self._threads is not None and size_bytes >= self._settings.cutover_bytes:
            self._threads.submit(held.clear)
        else:
            held.clear()

    def close(self) -> None:
        """Let the threads end; what comes now is worked on by the loop."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)


# -- detour ---------------------------------------------------------------------------------------


Item = TypeVar("Item")
Result = TypeVar("Result")


class ThreadLane(Generic[Item, Result]):
    """Of one connection and one direction: one item at a time, the others behind it in their order."""

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
        """Called with the work that is done, its item, and the items that waited behind it."""
        self._behind: list[Item] = []
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
        """Wait for work on an item that is under way elsewhere."""
        self.busy = True
        self.waiting_bytes = size_bytes
        work.add_done_callback(lambda done: self._done(done, item))

    def waits(self, item: Item, size_bytes: int = 0) -> bool:
        """Keep an item back while another one is worked on."""
        if self.busy:
            self._behind.append(item)
            self.waiting_bytes += size_bytes
        return self.busy

    def leave(self) -> None:
        """Nobody waits for any of it any more: the connection is gone."""
        self._left = True
        self._behind.clear()
        self.waiting_bytes = 0

    def _done(self, work: asyncio.Future[Result], item: Item) -> None:
        self.busy = False
        self.waiting_bytes = 0
        behind, self._behind = self._behind, []
        if not work.cancelled():
            # Looked at, for nobody may: the loop would complain, once for each broken frame.
            work.exception()
        if not self._left:
            self._go_on(work, item, behind)


# -- expanding ------------------------------------------------------------------------------------


Read = tuple[Frame, PenstockError | None]
"""A frame, and why its message cannot be read: that costs the client an answer, not its connection."""
Expansion = ThreadLane[Message, Read]

MARK_AT = 8  # where in a body its mark stands


def expanded_bytes(message: Message, limit_bytes: int) -> int:
    """What a message takes when it is expanded; 0 for one that is not compressed, or is refused."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size or not body[COMPRESSOR_AT]:
        return 0
    (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
    return raw_bytes if raw_bytes <= limit_bytes else 0


def expands(expansion: Expansion, message: Message, limit_bytes: int) -> bool:
    """Expand and translate a message elsewhere; False when it is not worth it, or needs neither."""
    _, body = message
    if len(body) < BODY_HEAD.size + RAW_SIZE.size:
        return False
    raw_bytes = expanded_bytes(message, limit_bytes)
    if not raw_bytes and (body[COMPRESSOR_AT] or not body[MARK_AT]):
        return False  # one that is too large is refused without any work
    size_bytes = max(raw_bytes, len(body))
    return expansion.begin(message, size_bytes, read_frame, message, limit_bytes)


def translated(frame: Frame) -> Read:
    """A frame as the broker knows it, whatever mark its client likes; too large a message is not read."""
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
        # A trace would hold what was expanded for as long as the error is talked about.
        raise error.with_traceback(None) from None


# -- outgoing -------------------------------------------------------------------------------------


Buffers = Sequence[Bytes]


class FrameWriter:
    """What one client was sent and has not taken yet."""

    def __init__(
        self,
        send_buffer: SendBuffer,
        fastpath: FastPath | None,
        failed: Callable[[Frame, Exception], None],
        moved: Callable[[], None],
    ) -> None:
        self.mark = 0
        self.compressor = 0
        self.piled_bytes = 0
        """What was pending when something was last queued, without the largest frame of it."""
        self._outbox = send_buffer
        self._failed = failed
        """Called with a frame that cannot be made ready; what it sends goes out in its place."""
        self._moved = moved
        """Called when frames that waited for a thread have left."""
        self._detour: ThreadLane[Frame, Buffers] = ThreadLane(fastpath, self._ready)
        self._largest_bytes = 0
        self._finished = False
        self._then: Callable[[], None] | None = None

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        if self._finished:
            return
        try:
            if not self.mark and not self.compressor:
                self.put(encode_frame(frame))
            elif not self._by_thread(frame):
                self.put(_buffers(frame, self.mark, self.compressor))
        except Exception as error:
            self._failed(frame, error)

    def _by_thread(self, frame: Frame) -> bool:
        size = frame.size_bytes
        thread_lane = self._detour
        if thread_lane.waits(frame, size) or thread_lane.begin(
            frame, size, _buffers, frame, self.mark, self.compressor
        ):
            self._count(size)
            return True
        return False

    def put(self, buffers: Buffers) -> None:
        """Queue bytes as they are."""
        self._count(self._outbox.put(buffers))

    def _count(self, size: int) -> None:
        pending = self.pending_bytes()
        # One frame may be as large as it likes; it is what piles up behind it that counts.
        if pending == size or size > self._largest_bytes:
            self._largest_bytes = size
        self.piled_bytes = pending - self._largest_bytes

    def pending_bytes(self) -> int:
        """Bytes that wait for a thread, or for the operating system to take them."""
        return self._outbox.pending_bytes() + self._detour.waiting_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for a thread: for the broker, and not for the client."""
        return self._detour.waiting_bytes

    def finish(self, then: Callable[[], None]) -> None:
        """Give everything to the transport, now or as soon as it is ready, and call `then`."""
        if self._detour.busy:
            self._then = then
        else:
            self._finished = True
            self._outbox.finish()
            then()

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        self._finished, self._then = True, None
        self._detour.leave()
        self._outbox.clear()

    def _ready(self, work: asyncio.Future[Buffers], frame: Frame, behind: list[Frame]) -> None:
        try:
            self.put(work.result())
        except Exception as error:
            self._failed(frame, error)
        for each in behind:
            self.send(each)
        if self._then is not None:
            self.finish(self._then)
        self._moved()


def _buffers(frame: Frame, mark: int, compressor: int) -> Buffers:
    """A frame in a client's mark, through its compressor. Runs in a thread when it is large."""
    if mark:
        frame = for_mark(frame, mark)
    # An error is small, and leaves whatever is wrong with the compressor.
    return encode_frame(frame, 0 if frame.kind == Kind.FAULT else compressor)
