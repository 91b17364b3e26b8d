"""Remote log feeds: batches in order from a broker, and the cursor that goes with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.engines.channel import Channel
from penstock.engines.engine import Handed, Stretch, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, Fenced, PenstockError
from penstock.wire.frame import Kind
from penstock.wire.message import MAX_LOG_HELD, Commit, Feed, Fetched, LogHeld, decode

LOG_HELD_BYTES = 1_024  # more than one takes in a message, whatever its topic is called
# Places in one commit, well below MAX_SMALL_BYTES, and more bytes than one of them takes.
MOST_MARKS, MARK_BYTES = 2_048, 512


class RemoteLog:
    """A log feed of a broker: one batch is asked for at a time."""

    def __init__(
        self,
        number: int,
        wanted: Subscribe,
        channel: Channel,
        leave: Callable[[RemoteLog, bool], Awaitable[None]],
    ) -> None:
        self.number = number
        self.wanted = wanted
        self._channel = channel
        self._leave = leave
        self._marked: dict[tuple[str, int], tuple[int, int]] = {}
        self._has: dict[tuple[str, int], Stretch] = {}
        """What was handed out and is not committed, by partition; the latest comes last."""
        self._stopped: PenstockError | None = None

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        if self._stopped is not None:
            raise self._stopped
        # No deadline: an empty topic is no fault.
        answer = await self._channel.call(Kind.FETCH, Feed(self.number), again=True, deadline_s=0)
        handed = Handed(EventBatch.decode(answer.parts[0]), decode(answer.meta, Fetched).epoch)
        self._note(*handed)
        return handed

    def _note(self, batch: EventBatch, epoch: int) -> None:
        place, start = (batch.topic, batch.partition), batch.base_offset
        before = self._has.pop(place, None)
        if before and before.epoch == epoch and before.start <= start <= before.stop:
            start = before.start
        self._has[place] = Stretch(start, batch.end_offset, epoch)

    def in_hand(self) -> list[LogHeld]:
        """What a broker that was restarted need not hand out again; of too many, the latest."""
        most = min(MAX_LOG_HELD, self._channel.frame_bytes // LOG_HELD_BYTES)
        return [LogHeld(*place, *has) for place, has in [*self._has.items()][-most:]]

    def mark(self, topic: str, partition: int, offset: int, epoch: int) -> None:
        """The consumer is through with everything before `offset`, as handed out in an epoch."""
        self._marked[topic, partition] = (offset, epoch)

    def pending(self) -> Commit:
        """What was marked and is not committed, as a message."""
        marks = [(*place, offset) for place, (offset, _) in self._marked.items()]
        return Commit(self.number, marks, [epoch for _, epoch in self._marked.values()])

    def committed(self, commit: Commit) -> None:
        """These are committed; what was marked meanwhile is not."""
        for (topic, partition, offset), epoch in zip(commit.marks, commit.epochs, strict=True):
            if self._marked.get((topic, partition)) == (offset, epoch):
                del self._marked[topic, partition]
            has = self._has.get((topic, partition))
            if has is not None and has.epoch == epoch and has.stop <= offset:
                del self._has[topic, partition]

    def fenced(self, commit: Commit) -> None:
        """These were refused: whoever was told so counts on them to come again, here or elsewhere."""
        for topic, partition, _ in commit.marks:
            self._has.pop((topic, partition), None)

    async def commit(self) -> None:
        """Make what was marked the group's place, durably: each partition by itself."""
        pending, most = self.pending(), min(MOST_MARKS, self._channel.frame_bytes // MARK_BYTES)
        for at in range(0, len(pending.marks), most):
            span = slice(at, at + most)
            commit = Commit(self.number, pending.marks[span], pending.epochs[span])
            try:
                await self._channel.call(Kind.COMMIT, commit, again=True)
            except Fenced:
                self.fenced(commit)
                raise
            self.committed(commit)

    @property
    def stopped(self) -> bool:
        """Whether nothing will come any more."""
        return self._stopped is not None

    def stop(self, error: PenstockError) -> None:
        """Nothing will come any more."""
        self._stopped = self._stopped or error

    async def close(self) -> None:
        """Leave the group."""
        ended = self.stopped
        self.stop(BusClosed("the subscription is closed; subscribe again"))
        await self._leave(self, ended)
