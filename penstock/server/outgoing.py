"""Outgoing: frames on their way to one client over TCP, as it likes them: its mark, its compressor.

A frame at or above `fastpath.cutover_bytes` that has to be compressed or translated is made ready by
a thread (row T13); those behind it wait, so that frames leave in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.engines.outbox import Outbox
from penstock.server.detour import Detour
from penstock.server.fastpath import FastPath
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.mark import for_mark
from penstock.wire.stream import encode_frame

Buffers = Sequence[Bytes]


class Outgoing:
    """What one client was sent and has not taken yet."""

    def __init__(
        self,
        outbox: Outbox,
        fastpath: FastPath | None,
        failed: Callable[[Frame, Exception], None],
        moved: Callable[[], None],
    ) -> None:
        self.mark = 0
        self.compressor = 0
        self.piled_bytes = 0
        """What was pending when something was last queued, without the largest frame of it."""
        self._outbox = outbox
        self._failed = failed
        """Called with a frame that cannot be made ready; what it sends goes out in its place."""
        self._moved = moved
        """Called when frames that waited for a thread have left."""
        self._detour: Detour[Frame, Buffers] = Detour(fastpath, self._ready)
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
        detour = self._detour
        if detour.waits(frame, size) or detour.begin(
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
