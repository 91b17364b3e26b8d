"""Ledger: which events of one partition a queue group still owes, rebuilt from entries.

A cursor and the exceptions below it: everything before `high` was leased once; of these, the open
intervals are not settled yet. The live machine keeps leases instead; recovery, read-only readers
and snapshots speak in ledgers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

AT_ONCE_MS = 1
"""The delay of an event that comes again at once: 0 is that of one which somebody holds."""


class Open(NamedTuple):
    """A run of unsettled events with the same history."""

    start: int
    stop: int
    made: int
    """Attempts that count against the budget."""
    delay_ms: int
    """What is left to wait before the next one."""
    holder: str = ""
    """The member that has them; snapshots do not say."""


class Ledger:
    """Unsettled events of one partition for one group.

    >>> ledger = Ledger(0)
    >>> ledger.leased(0, 10, attempt=1)
    >>> ledger.acked(2, 3)
    >>> [(run.start, run.stop) for run in ledger.open()]
    [(0, 2), (5, 10)]
    """

    __slots__ = ("_runs", "_starts", "high")

    def __init__(self, start: int) -> None:
        self.high = start
        """Everything from here on was never leased."""
        self._starts: list[int] = []
        self._runs: list[Open] = []

    def leased(self, start: int, count: int, attempt: int, holder: str = "") -> None:
        """Events were handed out; events skipped on the way (held back by key or priority) stay open."""
        if start > self.high:
            self._put(Open(self.high, start, 0, 0))
        self.high = max(self.high, start + count)
        self._put(Open(start, start + count, attempt, 0, holder))

    def acked(self, start: int, count: int) -> None:
        """Events are settled."""
        self._cut(start, start + count)

    def retried(self, start: int, count: int, made: int, delay_ms: int) -> None:
        """Events wait for their next attempt."""
        if start > self.high:
            self._put(Open(self.high, start, 0, 0))
        self.high = max(self.high, start + count)
        self._put(Open(start, start + count, made, delay_ms))

    def open(self) -> list[Open]:
        """The unsettled runs, in order."""
        return self._runs

    def outstanding(self) -> int:
        """How many events were handed out and are not settled."""
        return sum(run.stop - run.start for run in self._runs)

    def floor(self) -> int:
        """Everything before this is settled."""
        return self._starts[0] if self._starts else self.high

    def _put(self, run: Open) -> None:
        if self._starts and run.start < self._runs[-1].stop:
            self._cut(run.start, run.stop)
        at = bisect_left(self._starts, run.start)
        if at and self._runs[at - 1].stop == run.start and self._runs[at - 1][2:] == run[2:]:
            run = self._runs[at - 1]._replace(stop=run.stop)
            self._runs[at - 1] = run
            return
        self._starts.insert(at, run.start)
        self._runs.insert(at, run)

    def _cut(self, start: int, stop: int) -> None:
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._runs[first].stop <= start:
            first += 1
        last = first
        kept: list[Open] = []
        while last < len(self._runs) and self._runs[last].start < stop:
            run = self._runs[last]
            if run.start < start:
                kept.append(run._replace(stop=start))
            if run.stop > stop:
                kept.append(run._replace(start=stop))
            last += 1
        self._runs[first:last] = kept
        self._starts[first:last] = [run.start for run in kept]

    def dump(self) -> list[int]:
        """The ledger as plain numbers, for a snapshot."""
        numbers = [self.high]
        for run in self._runs:
            numbers += run[:4]
        return numbers

    @classmethod
    def load(cls, numbers: list[int]) -> Ledger:
        """The opposite of `dump`."""
        ledger = cls(numbers[0])
        ledger._runs = [Open._make([*numbers[at : at + 4], ""]) for at in range(1, len(numbers), 4)]
        ledger._starts = [run.start for run in ledger._runs]
        return ledger

    def __iter__(self) -> Iterator[Open]:
        return iter(self._runs)
