"""Log groups: their members read partitions in order; the group has one committed cursor in each.

`LogGroup` gives each partition to one member (`core.assignment` decides which) and moves partitions when
members join or leave. `LogReader` is one member: it reads the batches of its partitions, remembers what
the consumer has marked as done, and commits it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from penstock.core.assignment import Changes, Rebalance
from penstock.core.entry import Committed, Entry
from penstock.core.state import GroupState, Place
from penstock.engines.embedded.reader import READ_EVENTS, load
from penstock.engines.embedded.runtime import Runtime
from penstock.engines.engine import Handed, ReadRange
from penstock.log.event_log import EventLog
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, Fenced, PenstockError

# How long a member may keep a partition that another is to take over.
REVOKE_S = 30.0
NOTHING: Mapping[Place, ReadRange] = MappingProxyType({})  # what a new consumer was handed before


class LogReader:
    """One member of a log group."""

    def __init__(self, member: str, group: LogGroup) -> None:
        self.member = member
        self.generation = 0
        self._group = group
        self._next: dict[Place, int] = {}
        """The offset to read next, for each partition held."""
        self._marked: dict[Place, tuple[int, int]] = {}
        """The end of what the consumer has done and not committed, with the epoch it was read in."""
        self._revoked: list[Place] = []
        """Partitions to give back when the consumer asks for more."""
        self._turns: deque[Place] = deque()
        """The partitions held, the next one to read first."""
        self._woken: asyncio.Future[None] | None = None
        """`receive` waits for it when there is nothing to read."""
        self._ready: deque[Handed] = deque()
        """Batches that were read and not handed out yet."""
        self._stopped: PenstockError | None = None

    def granted(self, place: Place, offset: int) -> None:
        """Read a partition from `offset`."""
        if place not in self._next:
            self._turns.append(place)
        # It may have been revoked and granted again before the consumer gave it back.
        self._revoked = [each for each in self._revoked if each != place]
        self._start_at(place, offset)
        self.ring()

    def asked_back(self, places: list[Place]) -> None:
        """Give partitions back as soon as the consumer has done what it has."""
        self._revoked += places
        self.ring()

    def moved(self, place: Place, offset: int) -> None:
        """The group was reset: read from another offset. The epoch of earlier marks makes them void."""
        if place in self._next:
            self._start_at(place, offset)

    def _start_at(self, place: Place, offset: int) -> None:
        self._next[place] = offset
        self._ready = deque(each for each in self._ready if _place(each.batch) != place)

    def ring(self) -> None:
        """There may be something to read: wake `receive`."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def stop(self, error: PenstockError) -> None:
        """End the reading; `receive` raises the error."""
        self._stopped = error
        self.ring()

    async def receive(self) -> Handed:
        """Wait for the next batch of any partition held."""
        while True:
            if self._stopped is not None:
                raise self._stopped
            if self._revoked:
                self._give_back()
            if self._ready:
                handed = self._ready.popleft()
                if _place(handed.batch) in self._next:
                    return handed
                continue
            if not await self._read_some():
                self._woken = asyncio.get_running_loop().create_future()
                await self._woken

    def _give_back(self) -> None:
        places, self._revoked = self._revoked, []
        for place in places:
            if self._next.pop(place, None) is not None:
                self._turns.remove(place)
            self._marked.pop(place, None)
        self._group.returned(self, places)

    async def _read_some(self) -> bool:
        log, runtime = self._group.log, self._group.runtime
        for _ in range(len(self._turns)):
            place = self._turns[0]
            self._turns.rotate(-1)
            offset = self._next[place]
            batches = await load(log, runtime, *place, offset, READ_EVENTS)
            if self._next.get(place) != offset:
                return True  # the group was reset, or the partition given back, during the read
            if not batches:
                continue
            self._next[place] = batches[-1].end_offset
            epoch = self.epoch(*place)
            self._ready += [Handed(batch, epoch) for batch in batches]
            return True
        return False

    def fresh(self, batch: EventBatch) -> int:
        """How many events of a batch that is handed out the group gets for the first time."""
        handed, place = self._group.handed, _place(batch)
        known = handed.get(place, 0)
        handed[place] = max(known, batch.end_offset)
        return max(0, batch.end_offset - max(known, batch.base_offset))

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer is done with everything before `offset` that was handed out in an epoch."""
        if (topic, partition) not in self._group.state.cursors:
            return  # its topic was deleted: nothing of it is left to commit
        _, newest = self._marked.get((topic, partition), (0, 0))
        if epoch >= newest:
            self._marked[topic, partition] = (offset, epoch)

    def epoch(self, topic: str, partition: int) -> int:
        """The newest epoch of a partition, for marks that name none."""
        return self._group.state.epochs.get((topic, partition), 0)

    def forget(self, place: Place) -> None:
        """The topic of a partition was deleted."""
        self._marked.pop(place, None)

    def pending_commit(self) -> list[Entry]:
        """Entries that commit the marked offsets; raises Fenced when a partition is not this member's."""
        group = self._group
        entries: list[Entry] = []
        for place, (offset, epoch) in self._marked.items():
            group.rebalance.check(self.member, place, self.generation)
            entries.append(Committed(group.name, *place, offset, self.generation, epoch))
        return entries

    def check_commit(self, entries: list[Entry]) -> None:
        """Raise Fenced unless this member still has the partitions of a commit, without a reset since."""
        for entry in entries:
            assert isinstance(entry, Committed)
            place = (entry.topic, entry.partition)
            self._group.rebalance.check(self.member, place, entry.generation)
            if entry.epoch != self.epoch(*place):
                self._marked.pop(place, None)  # so that the error is raised once
                raise Fenced(
                    f"group {self._group.name!r} was reset after {place} was read; nothing of this "
                    "happened. Read on: events come from where it was set to",
                    group=self._group.name,
                    partition=place,
                )

    def committed(self, entries: list[Entry]) -> None:
        """These entries are committed; later marks stay."""
        for entry in entries:
            assert isinstance(entry, Committed)
            place = (entry.topic, entry.partition)
            if self._marked.get(place) == (entry.offset, entry.epoch):
                del self._marked[place]
            if entry.epoch == self.epoch(*place):
                self._skip_to(place, entry.offset)

    def _skip_to(self, place: Place, offset: int) -> None:
        """Hand out nothing that is committed.

        A member that is back after a crash of this process may commit events it was handed before.
        """
        if place in self._next:
            self._next[place] = max(self._next[place], offset)
            rest = (_beyond(each, place, offset) for each in self._ready)
            self._ready = deque(each for each in rest if each is not None)

    async def commit(self) -> None:
        """Make the marked offsets the group's, durably."""
        entries = self.pending_commit()
        if entries:
            await self._group.write(entries)
            self.committed(entries)

    async def close(self) -> None:
        """Leave the group."""
        if self._stopped is None:
            self.stop(BusClosed("the subscription is closed; subscribe again"))
            self._group.left(self)


def _place(batch: EventBatch) -> Place:
    return batch.topic, batch.partition


def _beyond(handed: Handed, place: Place, offset: int) -> Handed | None:
    """What is left of a batch from an offset on; a batch of another partition stays as it is."""
    batch = handed.batch
    skipped = offset - batch.base_offset
    if _place(batch) != place or skipped <= 0:
        return handed
    if skipped >= batch.count:
        return None
    return handed._replace(batch=batch.slice(skipped, batch.count))


class LogGroup:
    """One group in log mode: who reads what, and from where."""

    def __init__(
        self,
        name: str,
        state: GroupState,
        log: EventLog,
        runtime: Runtime,
        write: Callable[[list[Entry]], Awaitable[None]],
    ) -> None:
        self.name = name
        self.state = state
        self.log = log
        self.runtime = runtime
        self.write = write
        self.readers: dict[str, LogReader] = {}
        self.handed: dict[Place, int] = {}
        """The end of what `LogReader.fresh` has counted, by partition."""
        self.rebalance: Rebalance[Place] = Rebalance(
            sorted(state.cursors),
            state.spec.assignment,
            REVOKE_S,
            state.generation,
        )
        self._timer: asyncio.TimerHandle | None = None

    def join(self, member: str, handed: Mapping[Place, ReadRange] = NOTHING) -> LogReader:
        """A consumer begins to read; a consumer with the same member name is stopped.

        `handed` is what it was handed before this process was restarted. That counts only for partitions
        granted now: other members had the ones granted later meanwhile.
        """
        former = self.readers.get(member)
        if former is not None:
            words = f"another consumer joined {self.name!r} as {member!r}"
            former.stop(Fenced(f"{words}; this one gets no more"))
        reader = self.readers[member] = LogReader(member, self)
        self._apply(self.rebalance.join(member, self.runtime.now()), member, handed)
        return reader

    def left(self, reader: LogReader) -> None:
        """A consumer left; by now another one may have its name, and that one stays."""
        if self.readers.get(reader.member) is reader:
            del self.readers[reader.member]
            self._apply(self.rebalance.leave(reader.member, self.runtime.now()))

    def returned(self, reader: LogReader, places: list[Place]) -> None:
        """A consumer gave partitions back."""
        self._apply(self.rebalance.revoked(reader.member, places, self.runtime.now()))

    def topic_gone(self, places: list[Place]) -> None:
        """These partitions were deleted with their topic."""
        for place in places:
            del self.state.cursors[place]
            for reader in self.readers.values():
                reader.forget(place)
        self.lanes_changed()

    def lanes_changed(self) -> None:
        """The group reads more or fewer partitions now: assign them again."""
        self._apply(self.rebalance.repartition(sorted(self.state.cursors), self.runtime.now()))

    def reset(self, place: Place, offset: int) -> None:
        """Read a partition from another offset; the member that holds it goes on there."""
        for reader in self.readers.values():
            reader.moved(place, offset)
            reader.ring()

    def arrived(self) -> None:
        """New events are committed."""
        for reader in self.readers.values():
            reader.ring()

    def _apply(
        self, changes: Changes[Place], joins: str = "", handed: Mapping[Place, ReadRange] = NOTHING
    ) -> None:
        for reader in self.readers.values():
            reader.generation = changes.generation
        for member, places in changes.revoke.items():
            if member in self.readers:
                self.readers[member].asked_back(places)
        for member, places in changes.grant.items():
            for place in places:
                before = handed.get(place) if member == joins else None
                self.readers[member].granted(place, self._start(place, before))
        self._set_timer()

    def _start(self, place: Place, handed: ReadRange | None) -> int:
        """Where a member reads a partition from: behind what it was handed, if no event is left out."""
        cursor = self.state.cursors[place]
        if handed is None or handed.epoch != self.state.epochs.get(place, 0):
            return cursor  # after a reset, events are to be delivered again
        if not handed.start <= cursor <= handed.stop <= self.log.partition(*place).end:
            return cursor
        return handed.stop

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(self.readers) > 1:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REVOKE_S / 2, self._tick)

    def _tick(self) -> None:
        now = self.runtime.now()
        for member in self.readers:  # members live in this process, so all of them are alive
            self.rebalance.heartbeat(member, now)
        self._apply(self.rebalance.tick(now))

    def stop(self, error: PenstockError) -> None:
        """The group was deleted, or the bus is closed: stop all members."""
        if self._timer is not None:
            self._timer.cancel()
        for reader in list(self.readers.values()):
            reader.stop(error)
        self.readers.clear()
