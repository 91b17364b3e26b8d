"""Log groups: members that read partitions in order and keep one committed cursor for the group."""

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

# How long a member may sit on a partition that another is to take over.
REVOKE_S = 30.0
NOTHING: Mapping[Place, ReadRange] = MappingProxyType({})


class LogReader:
    """One member of a log group."""

    def __init__(self, member: str, group: LogGroup) -> None:
        self.member = member
        self.generation = 0
        self._group = group
        self._next: dict[Place, int] = {}
        """Where to read on, for each partition held."""
        self._marked: dict[Place, tuple[int, int]] = {}
        """Behind what the consumer is through with and did not commit yet, and the epoch of that."""
        self._revoked: list[Place] = []
        self._turn: deque[Place] = deque()
        self._bell: asyncio.Future[None] | None = None
        self._ready: deque[Handed] = deque()
        self._stopped: PenstockError | None = None

    def granted(self, place: Place, offset: int) -> None:
        """Read a partition from `offset`."""
        if place not in self._next:
            self._turn.append(place)
        # It may have been taken and given again before the consumer came to give it back.
        self._revoked = [each for each in self._revoked if each != place]
        self._start_at(place, offset)
        self.ring()

    def asked_back(self, places: list[Place]) -> None:
        """Give partitions back as soon as the consumer is through with what it has."""
        self._revoked += places
        self.ring()

    def moved(self, place: Place, offset: int) -> None:
        """The group was reset: read on elsewhere. Marks of before are void by their epoch."""
        if place in self._next:
            self._start_at(place, offset)

    def _start_at(self, place: Place, offset: int) -> None:
        self._next[place] = offset
        self._ready = deque(each for each in self._ready if _place(each.batch) != place)

    def ring(self) -> None:
        """There may be something to read."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def stop(self, error: PenstockError) -> None:
        """Nothing will come any more."""
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
                self._bell = asyncio.get_running_loop().create_future()
                await self._bell

    def _give_back(self) -> None:
        places, self._revoked = self._revoked, []
        for place in places:
            if self._next.pop(place, None) is not None:
                self._turn.remove(place)
            self._marked.pop(place, None)
        self._group.returned(self, places)

    async def _read_some(self) -> bool:
        log, runtime = self._group.log, self._group.runtime
        for _ in range(len(self._turn)):
            place = self._turn[0]
            self._turn.rotate(-1)
            offset = self._next[place]
            batches = await load(log, runtime, *place, offset, READ_EVENTS)
            if self._next.get(place) != offset:
                return True  # reset or given away while it was read
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
        """The consumer is through with everything before `offset`, as handed out in an epoch."""
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
        """Entries that make what was marked the group's place; raises Fenced when it is not ours."""
        group = self._group
        entries: list[Entry] = []
        for place, (offset, epoch) in self._marked.items():
            group.rebalance.check(self.member, place, self.generation)
            entries.append(Committed(group.name, *place, offset, self.generation, epoch))
        return entries

    def check_commit(self, entries: list[Entry]) -> None:
        """Raise Fenced unless the partitions of a commit are ours as they were when it was made."""
        for entry in entries:
            assert isinstance(entry, Committed)
            place = (entry.topic, entry.partition)
            self._group.rebalance.check(self.member, place, entry.generation)
            if entry.epoch != self.epoch(*place):
                self._marked.pop(place, None)  # it is said once
                raise Fenced(
                    f"group {self._group.name!r} was reset after {place} was read; nothing of this "
                    "happened. Read on: events come from where it was set to",
                    group=self._group.name,
                    partition=place,
                )

    def committed(self, entries: list[Entry]) -> None:
        """These are committed; what was marked meanwhile is not."""
        for entry in entries:
            assert isinstance(entry, Committed)
            place = (entry.topic, entry.partition)
            if self._marked.get(place) == (entry.offset, entry.epoch):
                del self._marked[place]
            if entry.epoch == self.epoch(*place):
                self._skip_to(place, entry.offset)

    def _skip_to(self, place: Place, offset: int) -> None:
        """Hand out nothing that is committed: a member may know more than its reader.

        One that came back after a crash of this process commits what it was handed before it.
        """
        if place in self._next:
            self._next[place] = max(self._next[place], offset)
            rest = (_beyond(each, place, offset) for each in self._ready)
            self._ready = deque(each for each in rest if each is not None)

    async def commit(self) -> None:
        """Make what was marked the group's place, durably."""
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
    batch = handed.batch
    skipped = offset - batch.base_offset
    if _place(batch) != place or skipped <= 0:
        return handed
    return (
        handed._replace(batch=batch.slice(skipped, batch.count)) if skipped < batch.count else None
    )


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
        """Behind the last event of each partition that `fresh` was asked about."""
        self.rebalance: Rebalance[Place] = Rebalance(
            sorted(state.cursors),
            state.spec.assignment,
            REVOKE_S,
            state.generation,
        )
        self._alarm: asyncio.TimerHandle | None = None

    def join(self, member: str, handed: Mapping[Place, ReadRange] = NOTHING) -> LogReader:
        """A consumer begins to read; one that is there under its name gets no more.

        `handed` is what it has from before this process was restarted. That counts only for what it is
        given now: what it gets later was somebody else's meanwhile.
        """
        former = self.readers.get(member)
        if former is not None:
            words = f"another consumer joined {self.name!r} as {member!r}"
            former.stop(Fenced(f"{words}; this one gets no more"))
        reader = self.readers[member] = LogReader(member, self)
        self._tell(self.rebalance.join(member, self.runtime.now()), member, handed)
        return reader

    def left(self, reader: LogReader) -> None:
        """A consumer is gone; by now another may have its name, which stays."""
        if self.readers.get(reader.member) is reader:
            del self.readers[reader.member]
            self._tell(self.rebalance.leave(reader.member, self.runtime.now()))

    def returned(self, reader: LogReader, places: list[Place]) -> None:
        """A consumer gave partitions back."""
        self._tell(self.rebalance.revoked(reader.member, places, self.runtime.now()))

    def topic_gone(self, places: list[Place]) -> None:
        """These partitions are no more."""
        for place in places:
            del self.state.cursors[place]
            for reader in self.readers.values():
                reader.forget(place)
        self.lanes_changed()

    def lanes_changed(self) -> None:
        """The group reads more or fewer partitions now."""
        self._tell(self.rebalance.repartition(sorted(self.state.cursors), self.runtime.now()))

    def reset(self, place: Place, offset: int) -> None:
        """Read a partition from elsewhere; whoever holds it starts over there."""
        for reader in self.readers.values():
            reader.moved(place, offset)
            reader.ring()

    def arrived(self) -> None:
        """New events are committed."""
        for reader in self.readers.values():
            reader.ring()

    def _tell(
        self, changes: Changes[Place], joins: str = "", handed: Mapping[Place, ReadRange] = NOTHING
    ) -> None:
        for reader in self.readers.values():
            reader.generation = changes.generation
        for member, places in changes.revoke.items():
            if member in self.readers:
                self.readers[member].asked_back(places)
        for member, places in changes.grant.items():
            for place in places:
                has = handed.get(place) if member == joins else None
                self.readers[member].granted(place, self._start(place, has))
        self._arm()

    def _start(self, place: Place, has: ReadRange | None) -> int:
        """Where a member reads a partition from: behind what it has, if that leaves nothing out."""
        cursor = self.state.cursors[place]
        if has is None or has.epoch != self.state.epochs.get(place, 0):
            return cursor  # a reset since then is meant to bring events again
        if not has.start <= cursor <= has.stop <= self.log.partition(*place).end:
            return cursor
        return has.stop

    def _arm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if len(self.readers) > 1:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(REVOKE_S / 2, self._tick)

    def _tick(self) -> None:
        now = self.runtime.now()
        for member in self.readers:  # they live in this process: if it lives, so do they
            self.rebalance.heartbeat(member, now)
        self._tell(self.rebalance.tick(now))

    def stop(self, error: PenstockError) -> None:
        """The group is gone, or the bus is."""
        if self._alarm is not None:
            self._alarm.cancel()
        for reader in list(self.readers.values()):
            reader.stop(error)
        self.readers.clear()
