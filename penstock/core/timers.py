"""Timers: keys that come due at exact times, for leases, retries and delayed events alike.

The queue is a heap of bare due times with the keys of each time beside it. Bare numbers compare
several times faster than tuples, which is where such a queue spends its time. A moved or cancelled
timer leaves its old entry behind; entries that lead nowhere never outnumber the live ones.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, KeysView

COMPACT_MIN = 1_024
"""Entries below this number are never tidied up: it would cost more than it frees."""

K = TypeVar("K", bound="Hashable")


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
