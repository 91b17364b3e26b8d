"""Order inside a group: events that wait for their key or for more urgent ones.

`KeyGate` lets one event of a key out at a time; only the others of that key wait.
`Priorities` looks ahead over a window and lets the most urgent out first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence

from penstock.core.lease import Lane, Run

# Offsets held back in memory for one group; beyond it the group stops looking ahead, so one key
# with a million events waiting costs 100 MB at most and then delays the others.
MAX_HELD_EVENTS = 1_000_000
# How far ahead of the cursor priorities are compared. Larger reorders more and holds more.
PRIORITY_WINDOW_EVENTS = 8_192
AGAIN = 1 << 62  # more events than a group ever looks at


class KeyGate:
    """One event of each key at a time, in order.

    >>> lane = Lane("orders", 0, 0, 3)
    >>> gate = KeyGate()
    >>> [run.start for run in gate.offer(lane, 0, 0, [b"a", b"a", b"b"])]
    [0, 2]
    >>> gate.settled(lane, 0).start
    1
    """

    def __init__(self) -> None:
        self.held = 0
        self._keys: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._waiting: dict[tuple[int, bytes], deque[Run]] = {}

    def offer(self, lane: Lane, start: int, made: int, keys: Sequence[bytes | None]) -> list[Run]:
        """Take events in; returns those that may go now, consecutive ones in one run."""
        free: list[Run] = []
        for offset, key in enumerate(keys, start):
            if key is not None:
                slot = (id(lane), key)
                self._keys[id(lane), offset] = slot
                queue = self._waiting.get(slot)
                if queue is not None:
                    queue.append(Run(lane, offset, 1, made))
                    self.held += 1
                    continue
                self._waiting[slot] = deque()
            if free and free[-1].start + free[-1].count == offset:
                free[-1] = free[-1]._replace(count=free[-1].count + 1)
            else:
                free.append(Run(lane, offset, 1, made))
        return free

    def occupy(self, lane: Lane, offset: int, key: bytes | None) -> None:
        """An event is out already: the others of its key wait for it."""
        if key is not None:
            slot = (id(lane), key)
            self._keys[id(lane), offset] = slot
            self._waiting.setdefault(slot, deque())

    def settled(self, lane: Lane, offset: int) -> Run | None:
        """An event is done for good; returns the next one of its key, if one waits."""
        slot = self._keys.pop((id(lane), offset), None)
        if slot is None:
            return None
        queue = self._waiting[slot]
        if queue:
            self.held -= 1
            return queue.popleft()
        del self._waiting[slot]
        return None

    def withdraw(self, lane: Lane, offset: int) -> bool:
        """Take out an event that waits for its key; False when it does not wait here."""
        queue = self._waiting.get(self._keys.get((id(lane), offset), (0, b"")))
        waiting = next((run for run in queue or () if run.start == offset), None)
        if queue is None or waiting is None:
            return False
        queue.remove(waiting)
        del self._keys[id(lane), offset]
        self.held -= 1
        return True

    def waiting(self) -> Iterator[Run]:
        """Everything held back."""
        for queue in self._waiting.values():
            yield from queue

    def forget(self, lane: Lane) -> None:
        """Drop all knowledge of a lane (it was reset)."""
        for slot in [slot for slot in self._waiting if slot[0] == id(lane)]:
            self.held -= len(self._waiting.pop(slot))
        for place in [place for place in self._keys if place[0] == id(lane)]:
            del self._keys[place]


class Priorities:
    """The most urgent event first, among those looked at.

    >>> lane = Lane("jobs", 0, 0, 3)
    >>> queue = Priorities()
    >>> queue.offer(lane, 0, 0, [0, 9, 9])
    >>> queue.pop(10), queue.pop(10)
    (Run(lane=Lane(jobs/0 0..3), start=1, count=2, made=0), Run(lane=Lane(jobs/0 0..3), start=0, count=1, made=0))
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def offer(
        self, lane: Lane, start: int, made: int, priorities: Sequence[int], *, again: bool = False
    ) -> None:
        """Take events in; those that come again go before others of their priority."""
        for offset, priority in enumerate(priorities, start):
            self._sequence += 1
            turn = self._sequence - AGAIN if again else self._sequence
            heapq.heappush(self._heap, (-priority, turn, Run(lane, offset, 1, made)))

    def pop(self, limit: int) -> Run | None:
        """The most urgent events that lie side by side, at most `limit`."""
        if not self._heap:
            return None
        urgency, _, run = heapq.heappop(self._heap)
        while self._heap and run.count < limit:
            following = self._heap[0]
            beside = following[2].start == run.start + run.count and following[2].lane is run.lane
            if following[0] != urgency or not beside or following[2].made != run.made:
                break
            heapq.heappop(self._heap)
            run = run._replace(count=run.count + 1)
        return run

    def withdraw(self, lane: Lane, offset: int) -> None:
        """Take one event out."""
        self._heap = [
            item for item in self._heap if item[2].lane is not lane or item[2].start != offset
        ]
        heapq.heapify(self._heap)

    def waiting(self) -> Iterator[Run]:
        """Everything held back."""
        return (run for _, _, run in self._heap)

    def forget(self, lane: Lane) -> None:
        """Drop the events of a lane (it was reset)."""
        self._heap = [item for item in self._heap if item[2].lane is not lane]
        heapq.heapify(self._heap)
