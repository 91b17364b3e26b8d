"""Expanding: large compressed frames of a connection are expanded by a thread (row T13).

What comes behind such a frame waits for it, so that frames are taken in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.server.fastpath import FastPath
from penstock.wire.frame import BODY_HEAD, Frame
from penstock.wire.stream import COMPRESSOR_AT, RAW_SIZE, Message, decode_frame

Handle = Callable[[Message], None]
Work = asyncio.Future[Frame]
GoOn = Callable[[Work, Message, list[Message]], None]


class Expansion:
    """Of one connection: one frame at a time."""

    def __init__(self, fastpath: FastPath | None, go_on: GoOn) -> None:
        self.busy = False
        self._fastpath = fastpath
        self._go_on = go_on
        """Called with the frame to come, its message, and the messages that waited behind it."""
        self._behind: list[Message] = []

    def begin(self, message: Message, limit_bytes: int) -> bool:
        """Expand a message elsewhere; False when it is not worth it, or not compressed."""
        _, body = message
        if self._fastpath is None or len(body) < BODY_HEAD.size + RAW_SIZE.size:
            return False
        if not body[COMPRESSOR_AT]:
            return False
        (raw_bytes,) = RAW_SIZE.unpack_from(body, BODY_HEAD.size)
        # A size beyond the limit is refused without any work.
        if raw_bytes > limit_bytes or not self._fastpath.wants(max(raw_bytes, len(body))):
            return False
        self.busy = True
        work = self._fastpath.submit(decode_frame, message, limit_bytes)
        work.add_done_callback(lambda done: self._done(done, message))
        return True

    def waits(self, message: Message) -> bool:
        """Keep a message back while another one is expanded."""
        if self.busy:
            self._behind.append(message)
        return self.busy

    def _done(self, work: Work, message: Message) -> None:
        self.busy = False
        behind, self._behind = self._behind, []
        self._go_on(work, message, behind)
