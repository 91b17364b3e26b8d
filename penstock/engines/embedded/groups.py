"""Consumer groups: made, changed, reset and deleted; which topics they read, and from which offset.

A group reads the topics that its patterns select and those that routes lead to it. For each partition
it has a lane: a cursor in a log group, a lane of the delivery machine in a queue group. The machines of
queue groups run in the dispatcher (`delivery.py`), log groups are held here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.core.admission import Waiting
from penstock.core.delivery import QueueGroup
from penstock.core.entry import (
    FIRST_FENCE,
    Entry,
    GroupGone,
    GroupPut,
    GroupSpec,
    LaneSet,
    as_recovered,
)
from penstock.core.routes import DIRECT
from penstock.core.routing import RouteTree, TopicTree
from penstock.core.state import GroupState, Place
from penstock.engines.embedded.log_groups import LogGroup
from penstock.model.errors import InvalidInput, OffsetExpired, PenstockError, UnknownGroup
from penstock.model.event import Receipt
from penstock.model.topic import check_pattern, is_system, matches, tenant_of

if TYPE_CHECKING:
    from penstock.core.routes import Route
    from penstock.engines.embedded.engine import EmbeddedEngine

MAX_DIGITS = 18  # of an offset or a time: more do not fit their column


class Groups:
    """All groups of an engine."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.logs: dict[str, LogGroup] = {}
        """The log groups, by name."""
        self._engine = engine
        self._patterns: RouteTree[str] = RouteTree()
        """The names of groups, by their patterns."""
        self._topics = TopicTree()

    # -- made, changed, deleted ----------------------------------------------------------------

    def restore(self) -> list[Entry]:
        """Start the groups that recovery found; returns entries that end those of the last process."""
        engine = self._engine
        gone: list[Entry] = []
        for topic in engine.state.topics:
            self._topics.add(topic)
        for name, group in list(engine.state.groups.items()):
            if group.spec.ephemeral:
                gone.append(GroupGone(name))
                del engine.state.groups[name]
                continue
            self._start(name, group)
        for machine in engine.dispatcher.groups.values():
            gone += machine.drain()  # leases of before the restart that count as attempts
        return gone

    def _start(self, name: str, group: GroupState) -> QueueGroup | LogGroup:
        engine = self._engine
        for pattern in group.spec.patterns:
            self._patterns.add(pattern, name)
        self._forget_readers(name)
        if group.spec.mode == "log":
            started = self.logs[name] = LogGroup(
                name, group, engine.log, engine.runtime, engine.publisher.write_entries
            )
            return started
        machine = engine.dispatcher.add(name, group.spec, group.fence)
        now = engine.runtime.now()
        hold_s = engine.lease_hold_s if engine.state.sessions else 0.0
        for (topic, partition), ledger in group.ledgers.items():
            log = engine.log.partition(topic, partition)
            handed = engine.handovers.handed(name, topic, partition)
            machine.restore(topic, partition, ledger, log.end, now, hold_s, handed, log.urgent_to)
        group.ledgers = {}  # from now on the machine has what they said
        return machine

    async def ensure(self, name: str, spec: GroupSpec) -> None:
        """Make a group that does not exist; one that does keeps its place and takes the new rules."""
        engine = self._engine
        for pattern in spec.patterns:
            check_pattern(pattern)
        spec = as_recovered(GroupPut(name, spec)).spec
        present = engine.state.groups.get(name)
        if present is None:
            try:
                await engine.publisher.submit([], when_taken=lambda _: self._create(name, spec))
            except asyncio.CancelledError:
                if spec.ephemeral:  # only the cancelled caller knows its name and would delete it
                    engine.spawn(self._forget(name))
                raise
            return
        old = present.spec
        if (old.mode, old.order) != (spec.mode, spec.order):
            if not old.patterns:
                await self._remake(name, spec)
                return
            raise InvalidInput(
                f"group {name!r} is a {old.mode} group with order {old.order!r}, not {spec.mode} "
                f"with {spec.order!r}. Use another group name, or delete the group first",
                group=name,
            )
        if old != msgspec.structs.replace(spec, start=old.start):
            await engine.publisher.submit([], when_taken=lambda _: self._change(name, spec))

    async def _remake(self, name: str, spec: GroupSpec) -> None:
        """Give a group that a route made the rules of its first consumer; it keeps its places."""
        machine = self._engine.dispatcher.groups[name]
        places = {place: lane.cursor for place, lane in machine.lanes.items()}
        await self._engine.publisher.submit(
            [], when_taken=lambda _: [*self._drop(name), *self._create(name, spec, places)]
        )

    def _create(
        self, name: str, spec: GroupSpec, places: Mapping[Place, int] | None = None
    ) -> list[Entry]:
        engine = self._engine
        if name in engine.state.groups:
            return []  # another caller made it first
        group = GroupState(spec)
        group.fence = FIRST_FENCE
        engine.state.groups[name] = group
        self._start(name, group)
        entries: list[Entry] = [GroupPut(name, spec)]
        try:
            for place, offset in (places or {}).items():
                if place[0] in engine.state.topics:
                    entries.append(self._open_lane(name, place, offset))
            for topic in self._read_by(name):
                entries += self._open_lanes(name, topic, spec.start)
        except PenstockError:  # its start is refused, and so is the group
            self._drop(name)
            del engine.state.groups[name]
            raise
        self._lanes_changed(name)
        return entries

    def _change(self, name: str, spec: GroupSpec) -> list[Entry]:
        engine = self._engine
        group = engine.state.groups[name]
        for pattern in group.spec.patterns:
            self._patterns.remove(pattern, name)
        self._forget_readers(name)
        for pattern in spec.patterns:
            self._patterns.add(pattern, name)
        group.spec = spec
        self._forget_readers(name)
        machine = engine.dispatcher.groups.get(name)
        if machine is not None:
            machine.spec = spec
        entries: list[Entry] = [GroupPut(name, spec)]
        for topic in self._read_by(name):
            entries += self._open_lanes(name, topic, "latest")
        self._lanes_changed(name)
        return entries

    async def remove(self, name: str, extra: list[Entry]) -> None:
        """Forget a group."""
        self.known(name)
        await self._forget(name, extra)

    async def _forget(self, name: str, extra: Sequence[Entry] = ()) -> None:
        await self._engine.publisher.submit([], when_taken=lambda _: [*self._drop(name), *extra])

    def _drop(self, name: str) -> list[Entry]:
        engine = self._engine
        group = engine.state.groups.get(name)
        if group is None:
            return []
        for pattern in group.spec.patterns:
            self._patterns.remove(pattern, name)
        self._forget_readers(name)
        gone = UnknownGroup(
            f"group {name!r} was deleted; subscribe again to make a new one", group=name
        )
        engine.dispatcher.remove(name, gone)
        engine.unread.forget(name)
        log = self.logs.pop(name, None)
        if log is not None:
            log.stop(gone)
        return [GroupGone(name)]

    def known(self, name: str) -> GroupState:
        """The state of a group; raises UnknownGroup when it does not exist."""
        group = self._engine.state.groups.get(name)
        if group is None:
            raise UnknownGroup(f"no group {name!r}; `penstock group list` shows them", group=name)
        return group

    def topics_of(self, name: str) -> set[str]:
        """Topics that a group has lanes in, without those that a route leads to it."""
        return {topic for topic in self._topics_read(name) if not self._routed(name, topic)}

    def _topics_read(self, name: str) -> set[str]:
        log, machine = self.logs.get(name), self._engine.dispatcher.groups.get(name)
        places = log.state.cursors if log is not None else machine.lanes if machine else ()
        return {place[0] for place in places}

    def _routed(self, name: str, topic: str) -> bool:
        routes = self._engine.routes.resolve(topic, tenant_of(topic))
        return any(route.group == name for route in routes)

    def routed(self, name: str) -> list[str]:
        """Topics that routes lead to a group, beside those of its patterns."""
        if not len(self._engine.routes):
            return []
        own = self._engine.state.groups[name].spec.patterns
        return sorted(
            topic
            for topic in self._topics_read(name)
            if self._routed(name, topic) and not any(matches(pattern, topic) for pattern in own)
        )

    def find_readers(self, topic: str) -> list[QueueGroup | LogGroup]:
        """The groups that read a topic, found by patterns and routes."""
        found = (
            (self.logs.get(n) or self._engine.dispatcher.groups.get(n))
            for n in self.names_for(topic)
        )
        return [group for group in found if group is not None]

    def waiting(self, direct: Iterable[QueueGroup], topic: str, tenant: str) -> Waiting:
        """How many events wait for direct consumers when a tenant publishes to a topic they read."""
        found = Waiting(0, 0)
        places = list(self._engine.topics.places(topic))
        for group in direct:
            own = sum(lane.unread for lane in map(group.lanes.get, places) if lane is not None)
            found = max(found, Waiting(own, group.unread))
        if self._engine.admission.max_queued(tenant) is not None:
            return found._replace(of_tenant=self.queued(tenant, topic))
        return found

    def queued(self, tenant: str, topic: str = "") -> int:
        """Events of a tenant's topics, and of one more, that wait for all direct consumers."""
        owner = self._engine.topics.tenant_for
        return sum(
            lane.end - lane.cursor
            for name, group in self._engine.dispatcher.groups.items()
            if name.startswith(DIRECT)
            for lane in group.lanes.values()
            if lane.end > lane.cursor and (lane.topic == topic or owner(lane.topic) == tenant)
        )

    # -- lanes ---------------------------------------------------------------------------------

    def _read_by(self, name: str) -> list[str]:
        """The topics that a group reads, by its patterns and by routes."""
        engine = self._engine
        found = dict.fromkeys(self.selected(engine.state.groups[name].spec.patterns))
        for topic in self.selected(engine.routes.leading_to(name)):
            if topic not in found and name in self.names_for(topic):
                found[topic] = None
        return list(found)

    def selected(self, patterns: Iterable[str]) -> Iterator[str]:
        """The topics that any of these patterns select."""
        topics = self._engine.state.topics
        for pattern in patterns:
            yield from (topic for topic in self._topics.select(pattern) if topic in topics)

    def _forget_readers(self, name: str) -> None:
        """Have the dispatcher find out again which groups read the topics of this one."""
        if self._engine.dispatcher.readers:
            for topic in self._read_by(name):
                self._engine.dispatcher.forget_readers(topic)

    def names_for(self, topic: str) -> list[str]:
        """Names of the groups that read a topic, by a pattern or by a route."""
        names = self._patterns.match(topic)
        if not is_system(topic):
            for route in self._engine.routes.resolve(topic, tenant_of(topic)):
                if route.group not in names and route.group in self._engine.state.groups:
                    names.append(route.group)
        return names

    def topic_made(self, topic: str, first: int, count: int) -> list[Entry]:
        """Partitions from `first` to `count` of a topic are new: its groups read them from the start."""
        self._topics.add(topic)
        self._engine.dispatcher.forget_readers(topic)
        entries: list[Entry] = []
        for name in self.names_for(topic):
            for partition in range(first, count):
                floor = self._engine.log.partition(topic, partition).floor
                entries.append(self._open_lane(name, (topic, partition), floor))
            self._lanes_changed(name)
        return entries

    def topic_gone(self, topic: str) -> None:
        """Stop reading a deleted topic."""
        self._topics.remove(topic)
        self._engine.dispatcher.forget_readers(topic)
        places = list(self._engine.topics.places(topic))
        for group in self.logs.values():
            read = [place for place in places if place in group.state.cursors]
            if read:
                group.topic_gone(read)

    def _open_lanes(self, name: str, topic: str, start: str) -> list[Entry]:
        engine = self._engine
        entries: list[Entry] = []
        for partition in range(engine.state.topics[topic].partitions):
            if not self._has_lane(name, (topic, partition)):
                offset = self.offset_for(topic, partition, start)
                entries.append(self._open_lane(name, (topic, partition), offset))
        return entries

    def _has_lane(self, name: str, place: Place) -> bool:
        if name in self.logs:
            return place in self.logs[name].state.cursors
        return place in self._engine.dispatcher.groups[name].lanes

    def _open_lane(self, name: str, place: Place, offset: int) -> Entry:
        if name in self.logs:
            self.logs[name].state.cursors[place] = offset
        else:
            log = self._engine.log.partition(*place)
            machine = self._engine.dispatcher.groups[name]
            machine.lane(*place, cursor=offset, end=max(log.end, offset), urgent_to=log.urgent_to)
        return LaneSet(name, *place, offset)

    def _lanes_changed(self, name: str) -> None:
        if name in self.logs:
            self.logs[name].lanes_changed()
        else:
            self._engine.dispatcher.touched(self._engine.dispatcher.groups[name])

    def offset_for(self, topic: str, partition: int, start: str) -> int:
        """The offset of "earliest", "latest", "offset:N" or "time:US" in a partition."""
        log = self._engine.log
        first, _ = log.bounds(topic, partition)
        end = log.partition(topic, partition).next
        if start == "earliest":
            return first
        if start == "latest":
            return end
        kind, _, number = start.partition(":")
        digits = number.removeprefix("-")
        numeric = digits.isdecimal() and len(digits) <= MAX_DIGITS
        if kind == "offset" and numeric and digits == number:
            offset = int(number)
            if offset < first:
                raise OffsetExpired(
                    f"{topic}/{partition}/{offset} is gone; the first offset kept is {first}",
                    topic=topic, partition=partition, first_offset=first, end_offset=end,
                )  # fmt: skip
            return min(offset, end)
        if kind == "time" and numeric:
            return log.find_time(topic, partition, int(number))
        raise InvalidInput(
            f"{start!r} is no place to start: use earliest, latest, an offset or a time",
            start=start,
        )

    def routes_changed(self, pattern: str, route: Route | None) -> list[Entry]:
        """A route was put or removed: open the lanes that are new, from the end of each partition.

        The group of a route that was put is made when it does not exist, so that events wait in it.
        """
        entries: list[Entry] = []
        changed: set[str] = set()
        if route is not None and route.enabled and route.group not in self._engine.state.groups:
            entries += self._create(route.group, GroupSpec(patterns=(), start="latest"))
        for topic in self.selected([pattern]):
            self._engine.dispatcher.forget_readers(topic)
            for name in self.names_for(topic):
                if opened := self._open_lanes(name, topic, "latest"):
                    entries += opened
                    changed.add(name)
        for name in sorted(changed):
            self._lanes_changed(name)
        return entries

    # -- reset ---------------------------------------------------------------------------------

    def offsets(self, name: str, to: str, topic: str | None) -> dict[Place, int]:
        """The offsets a reset would move a group to, in all its partitions or in those of a topic."""
        group = self.known(name)
        machine = self._engine.dispatcher.groups.get(name)
        places = list(group.cursors if name in self.logs else machine.lanes if machine else ())
        chosen = [place for place in places if topic is None or place[0] == topic]
        if not chosen:
            raise InvalidInput(f"group {name!r} does not read {topic!r}", group=name, topic=topic)
        return {place: self.offset_for(*place, to) for place in chosen}

    async def reset(self, name: str, to: str, topic: str | None, extra: list[Entry]) -> None:
        """Move a group to other offsets; `extra` entries are written with the change."""
        offsets = self.offsets(name, to, topic)
        log = self.logs.get(name)
        machine = self._engine.dispatcher.groups.get(name)

        def entries(_: list[Receipt]) -> list[Entry]:
            written: list[Entry] = list(machine.drain()) if machine is not None else []
            for place, offset in offsets.items():
                written.append(LaneSet(name, *place, offset))
                if log is not None:
                    log.reset(place, offset)
                elif machine is not None:
                    machine.reset(machine.lanes[place], offset)
                    self._engine.dispatcher.forget_handed(machine, place)
            return [*written, *extra]

        await self._engine.publisher.submit([], when_taken=entries, brings_news=True)
        if machine is not None:
            self._engine.dispatcher.touched(machine)
