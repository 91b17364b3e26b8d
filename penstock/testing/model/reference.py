"""What a user of a bus was promised, written from the documents alone: the model.

It holds what is stored, what waits for its time, who is owed what (`groups.py`), and the catalogue of
routes. Each method is told of one public call and what came of it, and raises `Contradiction` when no
outcome that the documents permit looks like that.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.testing.model.groups import (
    Contradiction,
    Group,
    GroupOptions,
    Letter,
    LogGroup,
    NotYet,
    Place,
    Sent,
    Window,
    compare,
    same,
    selects,
    specific,
)

Lane = tuple[str, int]


@dataclass
class Topic:
    """One topic: its events by partition and offset."""

    partitions: int
    events: dict[int, dict[int, Sent]] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    keys: dict[bytes, int] = field(default_factory=dict)
    """Where the events of a key go."""


@dataclass
class Recurring:
    """An event that is published again and again."""

    id: str
    topic: str
    payload: bytes
    every_s: float
    since: Window
    seen: int = 0
    """The last tick that a firing seen can have been of."""
    fired: int = 0


@dataclass
class Publish:
    """One publish call: what it asked for, and what of it was known before."""

    sents: list[Sent]
    known: list[Sent | None]


class Model:
    """One bus, as its documents describe it."""

    def __init__(
        self, slack_s: float, *, wire: bool = False, excused: frozenset[str] = frozenset()
    ) -> None:
        self.slack_s = slack_s
        self.wire = wire
        self.excused = excused
        self.tenant = "default"
        self.topics: dict[str, Topic] = {}
        self.floors: dict[Lane, int] = {}
        """Where deleted topics ended: their offsets are never given again."""
        self.waiting: list[Sent] = []
        """Published and not yet seen in their topics."""
        self.named: dict[tuple[str, str | uuid.UUID], Sent] = {}
        self.done_keys: set[str] = set()
        self.groups: dict[str, Group] = {}
        self.left: dict[str, dict[Place, Letter]] = {}
        """Dead letters of groups that were deleted."""
        self.logs: dict[str, LogGroup] = {}
        self.routes: dict[tuple[str, str], Any] = {}
        self.recurring: dict[str, Recurring] = {}
        self.retired: dict[tuple[str, bytes], str] = {}
        """What was declared as recurring before: a tick may have come just before that changed."""
        self.last_delayed: dict[Lane, Sent] = {}
        self.looked_at = 0.0

    # -- publishing --------------------------------------------------------------------------------

    def publishing(self, sents: Sequence[Sent], t0: float, t1: float) -> Publish:
        """A publish is about to be looked at: what of it is new is stored at its time."""
        known: list[Sent | None] = []
        for sent in sents:
            name = sent.name if sent.name is not None else sent.token
            before = None if name is None else self.named.get((sent.topic, name))
            known.append(before)
            if before is not None:
                continue
            if name is not None:
                self.named[sent.topic, name] = sent
            sent.tenant = tenant_of(sent.topic) or self.tenant
            if not sent.delayed:
                sent.due = Window(t0, t1)
            self.waiting.append(sent)
            if not sent.delayed:
                self.topics.setdefault(sent.topic, Topic(1))
        return Publish([*sents], known)

    def receipt(self, publish: Publish, receipt: Any) -> None:
        """What a publish returned. Called once its events were looked at."""
        new = [s for s, before in zip(publish.sents, publish.known, strict=True) if before is None]
        first = publish.sents[0] if publish.known[0] is None else publish.known[0]
        waits = all(
            (before or s).offset < 0 for s, before in zip(publish.sents, publish.known, strict=True)
        )
        fields: dict[str, tuple[Any, Any]] = {
            "topic": (publish.sents[0].topic, receipt.topic),
            "count": (len(publish.sents), receipt.count),
        }
        if not new or len(new) == len(publish.sents):
            fields["duplicate"] = (not new, receipt.duplicate)
        if new and len(new) == len(publish.sents):
            if new[0].delayed:
                fields["scheduled"], fields["offset"] = (
                    (True, receipt.scheduled),
                    (-1, receipt.offset),
                )
            else:
                fields["scheduled"] = (False, receipt.scheduled)
                got = [(each.topic, each.partition, each.offset) for each in receipt.ids()]
                fields["ids"] = (sorted(s.place for s in new), sorted(got))
        elif (
            not new
            and not waits
            and len(publish.sents) == 1
            and first is not None
            and not first.delayed
        ):
            fields["ids"] = ([first.place], [tuple(each) for each in receipt.ids()])
        if first is not None and first.token is not None and not first.delayed:
            fields["token"] = (first.token.bytes, receipt.token)
        compare("publishing.md: a receipt says where the events are, a second one where the first went",
                fields)  # fmt: skip

    # -- what is stored ----------------------------------------------------------------------------

    def stored(self, event: Any, now: float) -> None:
        """The next event of a partition was read."""
        topic, lane = self.topics[event.topic], (event.topic, event.partition)
        number, end = event.partition, topic.ends.get(event.partition, 0)
        if event.offset != end:
            raise Contradiction("glossary.md: offsets grow by one, and none is given twice",
                                f"{lane}/{end}", f"{lane}/{event.offset}")  # fmt: skip
        sent = self._expected(event, now)
        same(sent, event)
        if sent.key is not None and sent.partition is None:
            where = topic.keys.setdefault(sent.key, number)
            if where != number:
                raise Contradiction("publishing.md: events of one key go to one partition",
                                    f"{sent.key!r} of {event.topic} in {where}", number)  # fmt: skip
        if sent.partition is not None and sent.partition != number and not sent.delayed:
            raise Contradiction("conformance.md: a publish that names a partition goes there",
                                sent.partition, number)  # fmt: skip
        if sent.delayed:
            before = self.last_delayed.get(lane)
            if before is not None and before.due.first > sent.due.last:
                raise Contradiction("scheduling.md: delayed events come in the order of their times",
                                    f"{sent.payload!r} before {before.payload!r}", "after it")  # fmt: skip
            self.last_delayed[lane] = sent
        sent.partition, sent.offset, sent.token = number, event.offset, event.token
        sent.ready = Window(max(sent.due.first, self.looked_at if sent.delayed else 0.0), now)
        topic.events.setdefault(number, {})[event.offset] = sent
        topic.ends[number] = event.offset + 1
        for group in self.groups.values():
            if selects(group.options.pattern, event.topic):
                group.offer(sent)

    def _expected(self, event: Any, now: float) -> Sent:
        for index, sent in enumerate(self.waiting):
            if sent.topic == event.topic and sent.payload == event.payload:
                if sent.due.first > now:
                    raise Contradiction(
                        "scheduling.md: a delayed event is handed out when its time has come",
                        f"{sent.payload!r} not for {sent.due.first - now:.3f} s", "it is stored",
                    )  # fmt: skip
                return self.waiting.pop(index)
        for each in self.recurring.values():
            if (each.topic, each.payload) == (event.topic, event.payload):
                each.fired += 1
                each.seen = self._tick(each, now, first=True)
                if each.fired > each.seen:
                    raise Contradiction("scheduling.md: no tick fires twice",
                                        f"{each.seen} firings of {each.payload!r}", each.fired)  # fmt: skip
                return Sent(each.topic, each.payload, headers={"penstock-schedule": each.id},
                            tenant=tenant_of(each.topic) or self.tenant)  # fmt: skip
        retired = self.retired.get((event.topic, event.payload))
        if retired is not None:
            following = self.recurring.get(retired)
            if following is not None:
                following.seen = max(following.seen, self._tick(following, now, first=True))
            return Sent(event.topic, event.payload, headers={"penstock-schedule": retired},
                        tenant=tenant_of(event.topic) or self.tenant)  # fmt: skip
        raise Contradiction(
            "delivery.md: the bus invents nothing, and stores once what has a name",
            "nothing more in the topic",
            f"{event.topic}/{event.partition}/{event.offset}: {event.payload!r}",
        )

    @staticmethod
    def _tick(each: Recurring, moment: float, *, first: bool) -> int:
        since = each.since.first if first else each.since.last
        return max(0, math.floor((moment - since) / each.every_s))

    def looked(self, now: float) -> None:
        """All topics were read up to their ends: nothing that was due may be missing."""
        for sent in list(self.waiting):
            if sent.unsure and sent.due.last + self.slack_s < now:
                self.waiting.remove(sent)
                if sent.name is not None:
                    self.named.pop((sent.topic, sent.name), None)
            elif sent.due.last + (self.slack_s if sent.delayed else 0.0) <= now:
                raise NotYet(
                    "publishing.md: when publish returns, the event is stored; a delayed one at its time",
                    f"{sent.payload!r} in {sent.topic}", "it is not there",
                )  # fmt: skip
        for each in self.recurring.values():
            if self._tick(each, now - self.slack_s, first=False) > each.seen:
                raise NotYet("scheduling.md: a recurring event is published at its ticks",
                                    f"a firing of {each.payload!r}", "none")  # fmt: skip
        self.looked_at = now

    def replayed(
        self, events: Sequence[Any], names: Iterable[str], start: int | None, stop: int | None,
        partition: int | None, since: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """What a replay gave; `since` are the latest time left out and the earliest that must be in."""
        got: dict[Lane, list[int]] = {}
        for event in events:
            got.setdefault((event.topic, event.partition), []).append(event.offset)
            sent = self.topics[event.topic].events.get(event.partition, {}).get(event.offset)
            if sent is None:
                raise Contradiction("replay.md: replay gives what is stored", "nothing", event.id)
            same(sent, event)
        for name in names:
            for number in range(self.topics[name].partitions):
                if partition is not None and number != partition:
                    continue
                stored = self.topics[name].events.get(number, {})
                offsets = [
                    o for o in stored if (start or 0) <= o < (stop if stop is not None else 1 << 60)
                ]
                seen = got.pop((name, number), [])
                if since is not None:
                    offsets = [o for o in offsets if stored[o].ready.last >= since[0]]
                    optional = {o for o in offsets if stored[o].ready.first <= since[1]}
                    offsets = [o for o in offsets if o not in optional or o in seen]
                if seen != sorted(offsets):
                    raise Contradiction("replay.md: every event of the pattern, in order, once",
                                        f"{sorted(offsets)} of {name}/{number}", seen)  # fmt: skip
        if got:
            raise Contradiction("replay.md: only what the pattern selects", "nothing more", got)

    # -- topics ------------------------------------------------------------------------------------

    def topic_list(self, infos: Iterable[Any]) -> None:
        """What the list of topics says; partitions may have grown by what is not read yet."""
        found = {info.name: info for info in infos if not info.name.startswith("_")}
        unsure = {s.topic for s in self.waiting if s.unsure or s.delayed} | {
            e.topic for e in self.recurring.values()
        }
        missing, more = set(self.topics) - set(found) - unsure, set(found) - set(self.topics)
        if missing or more - unsure:
            raise NotYet("topics: the list names each topic there is",
                                sorted(self.topics), sorted(found))  # fmt: skip
        for name, info in found.items():
            topic = self.topics.setdefault(name, Topic(len(info.partitions)))
            compare("topics.create and grow: a topic has the partitions asked for",
                    {name: (topic.partitions, len(info.partitions))})  # fmt: skip
            for each in info.partitions:
                if each.partition not in topic.ends:
                    floor = self.floors.get((name, each.partition), 0)
                    if each.first_offset < floor:
                        raise Contradiction("glossary.md: an offset is never given twice",
                                            f"{name} from {floor}", each.first_offset)  # fmt: skip
                    topic.ends[each.partition] = topic.firsts[each.partition] = each.first_offset
                compare("topics.info: says where events begin and end",
                        {f"first offset of {name}": (topic.firsts[each.partition], each.first_offset)})  # fmt: skip

    def topic_created(self, name: str, partitions: int, error: str | None) -> None:
        """A topic was made."""
        expect("topics.create", {"AlreadyExists"} if name in self.topics else {None}, error)
        self.topics.setdefault(name, Topic(partitions))

    def topic_grown(self, name: str, partitions: int, error: str | None) -> None:
        """A topic got more partitions."""
        topic = self.topics.get(name)
        if topic is None:
            return expect("topics.grow", {"UnknownTopic"}, error)
        if partitions < topic.partitions:
            return expect(
                "topics.grow: a topic never gets fewer partitions", {"InvalidInput"}, error
            )
        if partitions == topic.partitions:
            return expect("topics.grow", {None, "InvalidInput"}, error)
        expect("topics.grow", {None}, error)
        topic.partitions = partitions
        topic.keys.clear()
        return None

    def topic_deleted(self, name: str, error: str | None) -> None:
        """A topic was deleted."""
        expect("topics.delete", {None} if name in self.topics else {"UnknownTopic"}, error)
        topic = self.topics.pop(name, None)
        if topic is None:
            return
        for number, end in topic.ends.items():
            self.floors[name, number] = end
            self.last_delayed.pop((name, number), None)
        for key in [key for key in self.named if key[0] == name]:
            if not (self.named[key].delayed and self.named[key].offset < 0):
                del self.named[key]
        for group in self.groups.values():
            group.forget_topic(name)
        for log in self.logs.values():
            log.committed = {lane: at for lane, at in log.committed.items() if lane[0] != name}
            for places in log.members.values():
                for lane in [lane for lane in places if lane[0] == name]:
                    del places[lane]

    # -- groups ------------------------------------------------------------------------------------

    def joined(self, name: str, options: GroupOptions, member: str, max_inflight: int, t0: float,
               t1: float) -> None:  # fmt: skip
        """A member joined; a group that was not there begins where it asked."""
        if options.mode == "log":
            log = self.logs.get(name)
            if log is None:
                log = self.logs[name] = LogGroup(name, options.pattern)
                for lane in self.lanes(options.pattern):
                    log.committed[lane] = {self._start(lane, options.start)}
            return log.join(member)
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = Group(name, options, self.slack_s, self.excused)
            group.wire = self.wire
            group.letters = self.left.pop(name, {})
            for event in self.events(options.pattern):
                if event.offset >= self._start(event.place[:2], options.start):
                    group.offer(event)
        group.join(member, max_inflight, t0, t1)
        return None

    def _start(self, lane: Lane, start: str | int) -> int:
        topic = self.topics[lane[0]]
        first, end = topic.firsts.get(lane[1], 0), topic.ends.get(lane[1], 0)
        if isinstance(start, int):
            return min(max(first, start), end)
        return end if start == "latest" else first

    def place_answers(self, lanes: Iterable[Lane], place: str | int) -> set[str | None]:
        """What beginning at a place may raise: an offset may be gone in some partition."""
        firsts = [self.topics[name].firsts.get(number, 0) for name, number in lanes]
        gone = isinstance(place, int) and any(place < first for first in firsts)
        return {None, "OffsetExpired"} if gone else {None}

    def lanes(self, pattern: str, topic: str | None = None) -> list[Lane]:
        """The partitions that a pattern selects."""
        return [
            (name, number)
            for name, each in sorted(self.topics.items())
            if selects(pattern, name) and topic in (None, name)
            for number in range(each.partitions)
        ]

    def events(self, pattern: str) -> list[Sent]:
        """What is stored of a pattern."""
        return [
            event
            for name, number in self.lanes(pattern)
            for event in self.topics[name].events.get(number, {}).values()
        ]

    def log_lag(self, log: LogGroup) -> tuple[int, int]:
        """The least and most events behind a log group's cursor."""
        least = most = 0
        for name, number in self.lanes(log.pattern):
            topic = self.topics[name]
            first, end = topic.firsts.get(number, 0), topic.ends.get(number, 0)
            behind = [
                end - max(first, place) for place in log.committed.get((name, number), {first})
            ]
            least, most = least + min(behind), most + max(behind)
        return least, most

    def group_list(self, infos: Iterable[Any], t0: float, t1: float) -> None:
        """What the list of groups says."""
        found = {info.name: info for info in infos if not info.name.startswith("_")}
        names = {name for name in self.groups if not name.startswith("_")} | {*self.logs}
        if set(found) != names:
            raise NotYet("groups: the list names each group there is", sorted(names),
                                sorted(found))  # fmt: skip
        for name, info in found.items():
            if name in self.logs:
                log = self.logs[name]
                least, most = self.log_lag(log)
                members, gone, mode, order = {*log.members}, set[str](), "log", "any"
                pattern = log.pattern
            else:
                group = self.groups[name]
                lags = group.lag(t0), group.lag(t1)
                least, most = min(lags[0][0], lags[1][0]), max(lags[0][1], lags[1][1])
                gone = {name for name, m in group.members.items() if m.gone_until is not None}
                members = {*group.members} - gone
                mode, order, pattern = "queue", group.options.order, group.options.pattern
            compare(f"groups.info of {name} says what it reads and how", {
                "mode": (mode, info.mode), "order": (order, info.order),
                "patterns": ([pattern], list(info.patterns)),
            })  # fmt: skip
            if {*info.members} - gone != members:
                raise NotYet(f"groups.info of {name} names its members", members, info.members)
            if not least <= info.lag <= most:
                raise NotYet(
                    f"glossary.md: lag of {name}: events a group has still to settle",
                    f"{least} to {most}" if most > least else least, info.lag,
                )  # fmt: skip

    def reset_answers(self, name: str, to: str | int, topic: str | None) -> set[str | None]:
        """What sending a group to a place may raise."""
        group = self.groups.get(name) or self.logs.get(name)
        if group is None:
            return {"UnknownGroup"}
        pattern = group.pattern if isinstance(group, LogGroup) else group.options.pattern
        if topic is not None and (topic not in self.topics or not selects(pattern, topic)):
            return {None, "UnknownTopic", "InvalidInput"}
        lanes = self.lanes(pattern, topic)
        return self.place_answers(lanes, to) | (set() if lanes else {"InvalidInput"})

    def group_reset(self, name: str, to: str | int, topic: str | None, error: str | None, t0: float,
                    t1: float) -> None:  # fmt: skip
        """A group was sent to a place."""
        expect("groups.reset", self.reset_answers(name, to, topic), error)
        if error is not None:
            return None
        group = self.groups.get(name) or self.logs[name]
        pattern = group.pattern if isinstance(group, LogGroup) else group.options.pattern
        lanes = self.lanes(pattern, topic)
        cursors = {lane: self._start(lane, to) for lane in lanes}
        if isinstance(group, LogGroup):
            return group.reset(cursors)
        group.reset(self.events(pattern), cursors, t0, t1)
        return None

    def group_deleted(self, name: str, error: str | None) -> None:
        """A group was deleted."""
        there = name in self.groups or name in self.logs
        expect("groups.delete", {None} if there else {"UnknownGroup"}, error)
        self.logs.pop(name, None)
        group = self.groups.pop(name, None)
        if group is not None:
            self.left[name] = group.letters
            for letter in group.letters.values():
                letter.certain = False
        for member in group.members.values() if group is not None else ():
            for hand in member.hands:
                hand.state = "closed"

    # -- routes ------------------------------------------------------------------------------------

    def resolved(self, topic: str, routes: Sequence[Any]) -> None:
        """What the catalogue says of a topic."""
        applies = [r for r in self.routes.values() if r.enabled and selects(r.pattern, topic)
                   and r.tenant is None]  # fmt: skip
        applies.sort(key=lambda r: (-r.priority, specific(r.pattern), r.destination))
        if list(routes) != applies:
            raise Contradiction("routing.md: by priority, then precedence, then destination",
                                applies, list(routes))  # fmt: skip

    # -- time and lives ----------------------------------------------------------------------------

    def pass_time(self, moment: float) -> None:
        """It is so late now."""
        for group in self.groups.values():
            group.pass_time(moment)

    def closed(self, t0: float, t1: float) -> None:
        """The bus was closed politely and is open again."""
        self._restarted(t1)
        for group in self.groups.values():
            group.process_closed(t0, t1)
        for log in self.logs.values():
            log.stopped()

    def killed(self, t0: float, t1: float, unwritten_s: float) -> None:
        """The process died, and another one opened the folder."""
        self._restarted(t1)
        for group in self.groups.values():
            group.process_killed(t0, t1, unwritten_s)
        for log in self.logs.values():
            log.stopped()

    def engine_restarted(self, t0: float, t1: float, unwritten_s: float) -> None:
        """The engine stopped and started, and its clients are connected again."""
        self._restarted(t1, listeners=False)
        for group in self.groups.values():
            group.engine_restarted(t0, t1, unwritten_s)
        for log in self.logs.values():
            log.shifted = {*log.members}

    def _restarted(self, t1: float, *, listeners: bool = True) -> None:
        for name in [name for name in self.groups if listeners and name.startswith("_")]:
            for member in self.groups.pop(name).members.values():  # listeners leave nothing behind
                for hand in member.hands:
                    hand.state = "closed"
        for sent in self.waiting:
            sent.due = Window(sent.due.first, max(sent.due.last, t1) + self.slack_s)
        for each in self.recurring.values():
            each.seen = max(each.seen, self._tick(each, t1, first=False) - 1)

    def forgets(self) -> Model:
        """What is left after a bus that keeps nothing was closed."""
        return Model(self.slack_s, wire=self.wire, excused=self.excused)


def tenant_of(topic: str) -> str | None:
    """The tenant that a topic names, if it has one: topics.md."""
    words = topic.split(".")
    named = len(words) == 4 and words[2][:1] == "v" and words[2][1:].isdecimal()
    return words[3] if named else None


def expect(promise: str, permitted: set[str | None], error: str | None) -> None:
    """Raise when a call did not end as it may."""
    if error not in permitted:
        raise Contradiction(promise, " or ".join(sorted(str(each or "it succeeds") for each in permitted)),
                            error or "it succeeded")  # fmt: skip
