"""Line: what one client publishes to one topic is stored in the order it came.

Some publishes take long to prepare: large ones go to a thread, long ones make pauses, new topics are
made first, those of a tenant ahead of its rate let others go first. Whatever the same client sent behind one of them to the
same topic waits until it is on its way to the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import TracebackType


class Line:
    """The publishes of one client that are being prepared, by topic."""

    def __init__(self) -> None:
        self.last: dict[str, asyncio.Future[None]] = {}

    def join(self, topics: Collection[str]) -> Place:
        """Stand behind everybody who is there; leave it by `with`."""
        return Place(self, topics)


class Place:
    """One publish in line."""

    def __init__(self, line: Line, topics: Collection[str]) -> None:
        self._line = line
        self._topics = topics
        self._before = {line.last[topic] for topic in topics if topic in line.last}
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            line.last[topic] = self._left

    async def turn(self) -> None:
        """Wait until all who were there have left."""
        if self._before:
            await asyncio.wait(self._before)

    def leave(self) -> None:
        """It is on its way, or will never be; whoever stands behind still waits for those before it."""
        for each in self._before:
            if not each.done():
                each.add_done_callback(lambda _: self.leave())
                return
        if self._left.done():
            return
        self._left.set_result(None)
        last = self._line.last
        for topic in self._topics:
            if last.get(topic) is self._left:
                del last[topic]

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
