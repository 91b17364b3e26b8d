"""Cold lines: leased events that must be read from files, and reach each member in its order.

A member gets its leases in the order in which they were made (Y3), so one that is at hand waits behind
one that is not. Each is read on its own, the first ones side by side, and in pieces; the next piece is
put when the member has taken the last. So however much it was leased, little of it lies in memory (Q7).
Members do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

from penstock.core.delivery import QueueGroup
from penstock.core.lease import OUT, Lease
from penstock.engines.handle import Inbox, Unread
from penstock.engines.reading import load
from penstock.engines.runtime import Runtime
from penstock.log.eventlog import EventLog
from penstock.model.batch import EventBatch
from penstock.model.errors import OffsetExpired, PenstockError

T = TypeVar("T")
READ_AHEAD = 2  # leases of one member: the second is read while the first is sent
Put = Callable[[QueueGroup, Inbox, Lease, Sequence[EventBatch]], None]


class ColdLines:
    """The lines of all members of one engine; where each stands is in its inbox."""

    def __init__(
        self, log: EventLog, runtime: Runtime, put: Put, touched: Callable[[QueueGroup], None]
    ) -> None:
        self._log = log
        self._runtime = runtime
        self._put = put
        self._touched = touched
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, group: QueueGroup, inbox: Inbox, lease: Lease) -> None:
        """Begin to read a lease's events; they are put behind what the member was leased before."""
        inbox.line.append(Unread(lease))
        self._begin(inbox)
        if len(inbox.line) == 1:
            self._spawn(self._serve(group, inbox))

    def _begin(self, inbox: Inbox) -> None:
        for each in islice(inbox.line, READ_AHEAD):
            if each.reading is None:
                each.reading = self._spawn(self._read(each.lease, each.lease.start))

    async def _serve(self, group: QueueGroup, inbox: Inbox) -> None:
        line = inbox.line
        try:
            while line:
                await self._deliver(group, inbox, line[0])
                line.popleft()
                self._begin(inbox)
        except Exception as error:
            if not isinstance(error, PenstockError):
                error = PenstockError(
                    f"leased events could not be read: {error!r}. They return to the group"
                )
            inbox.stop(error)
        finally:
            for each in line:
                if each.reading is not None:
                    each.reading.cancel()
            line.clear()

    async def _deliver(self, group: QueueGroup, inbox: Inbox, unread: Unread) -> None:
        lease = unread.lease
        offset = lease.start
        while True:
            assert unread.reading is not None  # it is the first
            try:
                batches = await unread.reading
            except OffsetExpired as error:
                offset = self._skip(group, lease, offset, error)
            else:
                if not batches:
                    return  # the topic was deleted meanwhile, or the member is gone
                await inbox.emptied()
                self._put(group, inbox, lease, batches)
                offset = batches[-1].end_offset
                del batches  # they may be large, and the next ones are read meanwhile
            following = lease.states.find(OUT, offset - lease.start)
            if following < 0:
                return  # all was put, or what is left was taken back meanwhile
            offset = lease.start + following
            unread.reading = self._spawn(self._read(lease, offset))

    def _skip(self, group: QueueGroup, lease: Lease, offset: int, error: OffsetExpired) -> int:
        """Retention overtook the group: what is gone cannot be delivered. Returns where to go on."""
        first: int = min(lease.start + lease.count, max(error.first_offset, offset + 1))
        for index in range(offset - lease.start, first - lease.start):
            if lease.states[index] == OUT:
                group.ack(lease, index, self._runtime.now())
        self._touched(group)
        return first

    async def _read(self, lease: Lease, offset: int) -> list[EventBatch]:
        if not lease.open:
            return []
        lane, limit = lease.lane, lease.start + lease.count - offset
        return await load(self._log, self._runtime, lane.topic, lane.partition, offset, limit)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the line has told it, or has ended before anybody wanted to know

    async def close(self) -> None:
        """Read no more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
