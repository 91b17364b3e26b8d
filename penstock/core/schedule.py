"""When events are delivered: durations, timers, delayed events and recurring ones.

Everything here is a machine: the wall clock comes in as microseconds since 1970 in UTC, and due
keys come out. Snapshots are plain data that the log stores beside its other state.

`Timers` is a heap of bare due times with the keys of each time beside it. Bare numbers compare
several times faster than tuples, and comparing takes most of the time of such a queue. A moved or
cancelled timer leaves its old entry behind; dead entries never outnumber the live ones.
"""

from __future__ import annotations

from datetime import timedelta
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from penstock.core.cron import Cron, parse_cron
from penstock.model.errors import Deferred, InvalidSchedule, UnknownSchedule
from penstock.model.parameter import MAX_SPAN_S, Seconds, microseconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, KeysView

COMPACT_MIN = 1_024
"""Entries below this number are never removed: it would cost more than it frees."""

K = TypeVar("K", bound="Hashable")

MAX_DURATION_US = MAX_SPAN_S * 1_000_000
"""The longest duration, a century: longer ones are slips of a unit."""

MIN_EVERY_US = 1_000
"""The shortest period of a recurring event, 1 ms: an event loop cannot keep a finer one."""

MAX_SCHEDULED = 10_000_000
"""Delayed events held at once. One takes about 200 bytes of memory, so these take 2 GB: a fuse
against a runaway producer, to be lowered where memory is short."""

MAX_RECURRING = 10_000
"""Recurring definitions; all of them due in one second is still a small batch."""

DELAYED_RETRY_S = 1.0
"""How long a producer waits when the limit is reached: room appears as events fall due."""


# -- delayed and recurring events -----------------------------------------------------------------


class Delayed:
    """Stored events that wait for their time; each is known by its offset in the log.

    An event that came due stays in the snapshot until `fired` confirms that its delivery is on
    disk, so a crash in between delivers it again instead of losing it.

    >>> delayed = Delayed()
    >>> delayed.add(7, due_us=1_000)
    >>> delayed.due(999), delayed.due(1_000), delayed.due(1_000)
    ([], [7], [])
    """

    def __init__(self, max_scheduled: int = MAX_SCHEDULED) -> None:
        self.max_scheduled = max_scheduled
        self._timers: Timers[int] = Timers()
        self._firing: dict[int, int] = {}

    def check_room(self, count: int) -> None:
        """Raise Deferred when `count` more would not fit; ask before the events are stored."""
        if len(self) + count > self.max_scheduled:
            raise Deferred(
                f"{len(self)} delayed events wait, and limits.max_scheduled = {self.max_scheduled}; "
                "nothing was stored; publish again later or without a delay, or raise the setting",
                limit="max_scheduled",
                setting="limits.max_scheduled",
                value=self.max_scheduled,
                retry_after_s=DELAYED_RETRY_S,
            )

    def add(self, offset: int, due_us: int) -> None:
        """Hold the event at `offset` back until `due_us`; adding it again moves it."""
        self._firing.pop(offset, None)
        self._timers.set(offset, due_us)

    def cancel(self, offset: int) -> bool:
        """Forget an event that is not to be delivered; says whether it waited."""
        return self._timers.cancel(offset) or self._firing.pop(offset, None) is not None

    def due(self, now_us: int, limit: int | None = None) -> list[int]:
        """Offsets whose time has come, earliest first; each is handed out once."""
        popped = self._timers.pop_due(now_us, limit)
        self._firing.update((offset, int(due_us)) for due_us, offset in popped)
        return [offset for _, offset in popped]

    def lowest(self) -> int | None:
        """The lowest offset that waits: from there on the log must keep what is delayed."""
        return min(chain(self._firing, self._timers.keys()), default=None)

    def put_back(self, offsets: Iterable[int]) -> None:
        """These could not be delivered now: they stay due."""
        for offset in offsets:
            if offset in self._firing:
                self._timers.set(offset, self._firing.pop(offset))

    def fired(self, offsets: Iterable[int]) -> None:
        """Confirm that these were delivered for good."""
        for offset in offsets:
            if self._firing.pop(offset, None) is None:
                self._timers.cancel(offset)

    def next_due_us(self) -> int | None:
        """When the next event comes due, or None."""
        due = self._timers.next_due()
        return None if due is None else int(due)

    def __len__(self) -> int:
        return len(self._timers) + len(self._firing)

    def snapshot(self) -> list[tuple[int, int]]:
        """(due_us, offset) of every event not yet confirmed, in the order they come due."""
        entries = [(due_us, offset) for offset, due_us in self._firing.items()]
        entries.extend((int(due_us), offset) for due_us, offset in self._timers.items())
        return sorted(entries, key=lambda entry: entry[0])

    def restore(self, entries: Iterable[tuple[int, int]]) -> None:
        """Replace the whole state by a snapshot."""
        self._timers, self._firing = Timers(), {}
        for due_us, offset in entries:
            self._timers.set(offset, due_us)


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """An event that is published again and again, by cron expression or by fixed period.

    >>> Definition(id="tick", topic="clock.tick.v1", every_us=parse_every("5m")).enabled
    True
    """

    id: str
    topic: str
    payload: bytes = b""
    codec: str = "raw"
    headers: dict[str, str] = {}
    cron: str | None = None
    every_us: int | None = None
    enabled: bool = True
    next_us: int = 0
    """When it fires next; filled in by `Recurring.put`."""
    missed: int = 0
    """Firings skipped because `due` was called too late."""


class Recurring:
    """The recurring definitions and when each fires next.

    A definition only moves forward: each tick fires at most once, whatever the clock does, and
    after a pause it fires once, counting the ticks it skipped.
    """

    def __init__(self) -> None:
        self._definitions: dict[str, Definition] = {}
        self._crons: dict[str, Cron] = {}
        self._timers: Timers[str] = Timers()

    def put(self, definition: Definition, now_us: int) -> Definition:
        """Add a definition or replace the one with its id; gives back what is now in force.

        Declaring the same timing again, as services do at every start, keeps the next firing.

        >>> Recurring().put(Definition(id="a", topic="t", every_us=60_000_000), now_us=0).next_us
        60000000
        """
        if (definition.cron is None) == (definition.every_us is None):
            raise _invalid(definition.id, "it needs either cron or every, and not both")
        before = self._definitions.get(definition.id)
        if before is None and len(self._definitions) >= MAX_RECURRING:
            raise _invalid(definition.id, f"{MAX_RECURRING} definitions exist; remove one first")
        if definition.cron is not None:
            self._crons[definition.id] = parse_cron(definition.cron)
        elif definition.every_us is not None:
            parse_every(timedelta(microseconds=definition.every_us))
        next_us = self._first_tick(definition, before, now_us)
        missed = 0 if before is None else before.missed
        return self._store(msgspec.structs.replace(definition, next_us=next_us, missed=missed))

    def undo(self, put: Definition, before: Definition | None) -> None:
        """What was put could not be kept: have what was there before, unless it changed again."""
        if self.holds(put):
            self.remove(put.id)
            if before is not None:
                self.hold(before)

    def hold(self, definition: Definition) -> None:
        """Have this definition exactly as it is, in place of the one with its id."""
        if definition.cron is None:
            self._crons.pop(definition.id, None)
        else:
            self._crons[definition.id] = parse_cron(definition.cron)
        self._store(definition)

    def remove(self, id: str) -> Definition:
        """Forget a definition and give it back."""
        definition = self.get(id)
        del self._definitions[id]
        self._crons.pop(id, None)
        self._timers.cancel(id)
        return definition

    def get(self, id: str) -> Definition:
        """The definition with this id."""
        try:
            return self._definitions[id]
        except KeyError:
            raise UnknownSchedule(
                f"no recurring schedule {id!r}; nothing was changed; list them to see their ids",
                id=id,
            ) from None

    def definitions(self) -> list[Definition]:
        """All definitions, ordered by id."""
        return sorted(self._definitions.values(), key=lambda definition: definition.id)

    def due(self, now_us: int, limit: int | None = None) -> list[tuple[Definition, int]]:
        """(definition, due_us) of what fires now; each definition already holds its next firing."""
        found: list[tuple[Definition, int]] = []
        for due, id in self._timers.pop_due(now_us, limit):
            due_us, definition = int(due), self._definitions[id]
            missed = self._count(definition, due_us, now_us)
            next_us = self._tick_after(definition, due_us, now_us)
            definition = msgspec.structs.replace(
                definition, next_us=next_us, missed=definition.missed + missed
            )
            found.append((self._store(definition), due_us))
        return found

    def put_back(self, definition: Definition, due_us: int, now_us: int) -> None:
        """What `due` gave out at `now_us` could not be published: it stays due."""
        if self.holds(definition):
            missed = definition.missed - self._count(definition, due_us, now_us)
            self._store(msgspec.structs.replace(definition, next_us=due_us, missed=missed))

    def holds(self, definition: Definition) -> bool:
        """Whether a definition is in force as it stands here: not removed and not changed since."""
        return self._definitions.get(definition.id) == definition

    def next_due_us(self) -> int | None:
        """When the next definition fires, or None."""
        due = self._timers.next_due()
        return None if due is None else int(due)

    def __len__(self) -> int:
        return len(self._definitions)

    def restore(self, definitions: Iterable[Definition]) -> None:
        """Replace the whole state by what `definitions` gave."""
        self._definitions, self._crons, self._timers = {}, {}, Timers()
        for definition in definitions:
            self.hold(definition)

    def _store(self, definition: Definition) -> Definition:
        self._definitions[definition.id] = definition
        if definition.enabled:
            self._timers.set(definition.id, definition.next_us)
        else:
            self._timers.cancel(definition.id)
        return definition

    def _first_tick(self, definition: Definition, before: Definition | None, now_us: int) -> int:
        if before is None or (before.cron, before.every_us) != (
            definition.cron,
            definition.every_us,
        ):
            return self._tick_after(definition, now_us, now_us)
        # What passed while it was disabled is not made up for; a tick that is still to come is
        # kept even when the clock went back, since the one before it has fired.
        if before.enabled or before.next_us > now_us:
            return before.next_us
        return self._tick_after(definition, before.next_us, now_us)

    def _tick_after(self, definition: Definition, tick_us: int, now_us: int) -> int:
        """The first tick of the grid through `tick_us` that lies after `now_us`."""
        if definition.every_us is None:
            return self._crons[definition.id].next_after(now_us)
        return tick_us + ((now_us - tick_us) // definition.every_us + 1) * definition.every_us

    def _count(self, definition: Definition, due_us: int, now_us: int) -> int:
        if definition.every_us is None:
            return self._crons[definition.id].count(due_us, now_us)
        return (now_us - due_us) // definition.every_us


class ScheduleState(msgspec.Struct, frozen=True):
    """A snapshot of a Schedule, ready for any msgspec encoder."""

    delayed: list[tuple[int, int]]
    recurring: list[Definition]


class Schedule:
    """Everything that waits for the clock: delayed events and recurring definitions.

    >>> schedule = Schedule()
    >>> schedule.delayed.add(3, due_us=500)
    >>> copy = Schedule(); copy.restore(schedule.snapshot())
    >>> copy.next_due_us()
    500
    """

    def __init__(self, max_scheduled: int = MAX_SCHEDULED) -> None:
        self.delayed = Delayed(max_scheduled)
        self.recurring = Recurring()

    def next_due_us(self) -> int | None:
        """When to look again: the earliest time anything is due, or None."""
        times = (self.delayed.next_due_us(), self.recurring.next_due_us())
        return min((time for time in times if time is not None), default=None)

    def snapshot(self) -> ScheduleState:
        """All of it as plain data."""
        return ScheduleState(self.delayed.snapshot(), self.recurring.definitions())

    def restore(self, state: ScheduleState) -> None:
        """Replace all of it by a snapshot."""
        self.delayed.restore(state.delayed)
        self.recurring.restore(state.recurring)


# -- durations ------------------------------------------------------------------------------------


def parse_duration(value: Seconds) -> int:
    """Turn "90s", "1h30m", a number of seconds or a timedelta into microseconds.

    >>> parse_duration("1h30m"), parse_duration(0.25)
    (5400000000, 250000)
    """
    return microseconds("duration", value, kind=InvalidSchedule)


def parse_every(value: Seconds) -> int:
    """The period of a recurring event in microseconds, at least a millisecond.

    >>> parse_every("90s")
    90000000
    """
    return microseconds("every", value, least=MIN_EVERY_US / 1e6, kind=InvalidSchedule)


def _invalid(value: object, why: str) -> InvalidSchedule:
    return InvalidSchedule(
        f"{value!r} cannot be scheduled: {why}; nothing was stored", value=value, why=why
    )


# -- timers ---------------------------------------------------------------------------------------


class Timers(Generic[K]):
    """A queue of keys that come due at exact times; one key has at most one timer.

    >>> timers: Timers[str] = Timers()
    >>> timers.set("b", 2.0); timers.set("a", 1.0); timers.set("b", 0.5)
    >>> timers.pop_due(1.5)
    [(0.5, 'b'), (1.0, 'a')]
    """

    __slots__ = ("_at", "_entries", "_live", "_times")

    def __init__(self) -> None:
        self._live: dict[K, float] = {}
        # A time that one key waits for, the usual case, has the key itself instead of a list:
        # lists cannot be keys, so the two cannot be mistaken for each other.
        self._at: dict[float, K | list[K]] = {}
        self._times: list[float] = []
        self._entries = 0

    def set(self, key: K, due: float) -> None:
        """Start the timer of `key`, or move it when it already runs."""
        live = self._live
        if live.get(key) == due:
            return
        live[key] = due
        at = self._at
        if due in at:
            held = at[due]
            if type(held) is list:
                held.append(key)
            else:
                at[due] = [held, key]  # type: ignore[list-item]
        else:
            at[due] = key
            heappush(self._times, due)
        self._entries = entries = self._entries + 1
        if entries > COMPACT_MIN and entries > 2 * len(live):
            self._compact()

    def cancel(self, key: K) -> bool:
        """Stop the timer of `key`; says whether there was one."""
        if self._live.pop(key, None) is None:
            return False
        if self._entries > COMPACT_MIN and self._entries > 2 * len(self._live):
            self._compact()
        return True

    def due_of(self, key: K) -> float | None:
        """When `key` comes due, or None when it has no timer."""
        return self._live.get(key)

    def pop_due(self, now: float, limit: int | None = None) -> list[tuple[float, K]]:
        """Take out what is due at `now`, ordered by time and then by who was set to it first."""
        times, at, live = self._times, self._at, self._live
        found: list[tuple[float, K]] = []
        room = len(live) if limit is None else limit
        while times and times[0] <= now and len(found) < room:
            due = heappop(times)
            held = at.pop(due)
            if type(held) is list:
                self._take(due, held, room, found)
            else:
                self._entries -= 1
                was = live.pop(held, None)  # type: ignore[arg-type]
                if was == due:
                    found.append((due, held))  # type: ignore[arg-type]
                elif was is not None:
                    live[held] = was  # type: ignore[index]
        return found

    def next_due(self) -> float | None:
        """When the earliest timer comes due, or None when none runs."""
        times, at, live = self._times, self._at, self._live
        while times:
            due = times[0]
            held = at[due]
            keys: list[K] = held if type(held) is list else [held]  # type: ignore[list-item]
            if any(live.get(key) == due for key in keys):
                return due
            self._entries -= len(keys)
            del at[heappop(times)]
        return None

    def items(self) -> list[tuple[float, K]]:
        """Every timer as (due, key), in the order they will come due."""
        self._compact()
        found: list[tuple[float, K]] = []
        for due in sorted(self._times):
            held = self._at[due]
            keys: list[K] = held if type(held) is list else [held]  # type: ignore[list-item]
            found.extend((due, key) for key in keys)
        return found

    def keys(self) -> KeysView[K]:
        """Every key that has a timer."""
        return self._live.keys()

    def __len__(self) -> int:
        return len(self._live)

    def _take(self, due: float, keys: list[K], room: int, found: list[tuple[float, K]]) -> None:
        """Pop keys that share one time; what does not fit any more goes back."""
        live = self._live
        for index, key in enumerate(keys):
            if len(found) >= room:
                self._at[due] = keys[index:]
                heappush(self._times, due)
                return
            self._entries -= 1
            if live.get(key) == due:
                del live[key]
                found.append((due, key))

    def _compact(self) -> None:
        """Keep the entries that lead somewhere, each key once and in order."""
        live = self._live
        alive: dict[float, K | list[K]] = {}
        for due, held in self._at.items():
            if type(held) is not list:
                if live.get(held) == due:  # type: ignore[arg-type]
                    alive[due] = held
                continue
            waiting = list(dict.fromkeys(key for key in held if live.get(key) == due))
            if waiting:
                alive[due] = waiting
        self._at = alive
        self._times = list(alive)
        heapify(self._times)
        self._entries = len(live)
