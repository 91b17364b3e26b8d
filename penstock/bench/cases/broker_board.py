"""Board: what a producer and its consumers know of each other across processes.

A small file that all of them map into memory. The producer writes when each batch was begun and, at
its end, how many events there are; each consumer writes how many it has. So the producer stays a
few batches ahead and no more, a consumer knows the age of a batch and when it has everything, and
no byte of that travels through what is measured.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from penstock.bench.measure import Meter

# Batches whose begin is remembered; far more than any case keeps ahead.
RING = 4_096
LOOK_S = 0.001  # between two looks at the board; event loops do not sleep shorter
STALLED_S = 10.0  # without any progress a consumer is stuck, and waiting longer shows nothing
OPEN = -1
_STARTED, _TOTAL, _RECEIVED = 0, 1, 2
_NUMBER_BYTES = 8


class Board:
    """Numbers of 64 bits in a file: batches begun, events in all, events had by each consumer.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     board = Board.make(Path(folder) / "board", consumers=1)
    ...     board.begin()
    ...     board.ahead(batch_events=10), board.total
    (1, -1)
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._numbers = memoryview(self._map).cast("q")
        self.consumers = len(self._numbers) - _RECEIVED - RING
        self._ring = _RECEIVED + self.consumers

    @classmethod
    def make(cls, path: Path, consumers: int) -> Self:
        """A new board in a file."""
        path.write_bytes(bytes(_NUMBER_BYTES * (_RECEIVED + consumers + RING)))
        board = cls(path)
        board._numbers[_TOTAL] = OPEN
        return board

    # -- the producer --------------------------------------------------------------------------

    def begin(self) -> None:
        """A batch is about to be published."""
        numbers = self._numbers
        numbers[self._ring + numbers[_STARTED] % RING] = time.perf_counter_ns()
        numbers[_STARTED] += 1

    def ahead(self, batch_events: int) -> int:
        """Batches begun that some consumer has not had in full."""
        return self._numbers[_STARTED] - min(self.received) // batch_events

    async def room(self, batches: int, batch_events: int) -> None:
        """Wait until fewer than that many batches are ahead."""
        seen, since = -1, time.perf_counter()
        while self.ahead(batch_events) >= batches:
            if (now_has := sum(self.received)) != seen:
                seen, since = now_has, time.perf_counter()
            elif time.perf_counter() - since > STALLED_S:
                raise self._stalled()
            await asyncio.sleep(LOOK_S)

    def finish(self, events: int) -> None:
        """Everything is published: so many events."""
        self._numbers[_TOTAL] = events

    # -- a consumer ----------------------------------------------------------------------------

    @property
    def received(self) -> list[int]:
        """Events that each consumer has had, in whole batches."""
        return self._numbers[_RECEIVED : self._ring].tolist()

    @property
    def total(self) -> int:
        """Events published, or OPEN while the producer goes on."""
        return self._numbers[_TOTAL]

    def counter(self, place: int, batch_events: int, meter: Meter) -> Counter:
        """Counts events for one consumer, and times each batch that is complete."""
        return Counter(self, place, batch_events, meter)

    def had(self, place: int, events: int) -> None:
        """A consumer has so many events by now."""
        self._numbers[_RECEIVED + place] = events

    def begun_ns(self, batch: int) -> int:
        """When a batch was begun."""
        return self._numbers[self._ring + batch % RING]

    async def everything(self, *places: int, look_s: float = LOOK_S) -> None:
        """Return when the producer is done and these consumers have all there is."""
        seen, since = -1, time.perf_counter()
        while True:
            received = self.received
            has = min(received[place] for place in places)
            if self.total != OPEN and has >= self.total:
                return
            if has != seen:
                seen, since = has, time.perf_counter()
            elif time.perf_counter() - since > STALLED_S:
                raise self._stalled()
            await asyncio.sleep(look_s)

    def _stalled(self) -> PenstockError:
        return PenstockError(
            f"consumers have {self.received} events of {self._numbers[_STARTED]} batches and got "
            f"nothing for {STALLED_S:g} s; run the case again, and look at the server if it stays",
            received=self.received,
        )


class Counter:
    """What one consumer has had; called with the number of events that came."""

    __slots__ = ("_batch_events", "_board", "_mark", "_meter", "_place", "events")

    def __init__(self, board: Board, place: int, batch_events: int, meter: Meter) -> None:
        self.events = 0
        self._board = board
        self._place = place
        self._batch_events = self._mark = batch_events
        self._meter = meter

    def __call__(self, events: int) -> None:
        self.events += events
        if self.events < self._mark:
            return
        now, size = time.perf_counter_ns(), self._batch_events
        while self.events >= self._mark:
            begun = self._board.begun_ns(self._mark // size - 1)
            self._meter.add((now - begun) / 1e9, size)
            self._mark += size
        self._board.had(self._place, self.events)
