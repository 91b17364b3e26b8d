"""Remote log feeds: batches in order from a broker, and the cursor that goes with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.engines.channel import Channel
from penstock.engines.engine import Handed, Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, PenstockError
from penstock.wire.frame import Kind
from penstock.wire.message import Commit, Feed, Fetched, decode


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
        self._stopped: PenstockError | None = None

    async def receive(self) -> Handed:
        """Wait for the next batch."""
        if self._stopped is not None:
            raise self._stopped
        # No deadline: an empty topic is no fault.
        answer = await self._channel.call(Kind.FETCH, Feed(self.number), again=True, deadline_s=0)
        return Handed(EventBatch.decode(answer.parts[0]), decode(answer.meta, Fetched).epoch)

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

    async def commit(self) -> None:
        """Make what was marked the group's place, durably."""
        commit = self.pending()
        if commit.marks:
            await self._channel.call(Kind.COMMIT, commit, again=True)
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
