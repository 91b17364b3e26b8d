"""Remote log feeds: batches in order from a broker, and the cursor that goes with them."""

from __future__ import annotations

from penstock.engines.channel import Channel
from penstock.engines.engine import Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import BusClosed, PenstockError
from penstock.wire.frame import Kind
from penstock.wire.message import Commit, Feed


class RemoteLog:
    """A log feed of a broker: one batch is asked for at a time."""

    def __init__(self, number: int, wanted: Subscribe, channel: Channel) -> None:
        self.number = number
        self.wanted = wanted
        self._channel = channel
        self._marked: dict[tuple[str, int], int] = {}
        self._ends: dict[tuple[str, int], int] = {}
        """Where the newest batch of each partition ended."""
        self._stopped: PenstockError | None = None

    async def receive(self) -> EventBatch:
        """Wait for the next batch."""
        if self._stopped is not None:
            raise self._stopped
        # No deadline: an empty topic is no fault.
        answer = await self._channel.call(Kind.FETCH, Feed(self.number), again=True, deadline_s=0)
        batch = EventBatch.decode(answer.parts[0])
        place = (batch.topic, batch.partition)
        if self._ends.get(place, batch.base_offset) != batch.base_offset:
            self._marked.pop(place, None)  # it starts over: what was marked is of before
        self._ends[place] = batch.end_offset
        return batch

    def mark(self, topic: str, partition: int, offset: int) -> None:
        """The consumer is through with everything before `offset`."""
        self._marked[topic, partition] = offset

    def pending(self) -> Commit:
        """What was marked and is not committed, as a message."""
        marks = [(topic, partition, at) for (topic, partition), at in self._marked.items()]
        return Commit(self.number, marks)

    def committed(self, commit: Commit) -> None:
        """These are committed; what was marked meanwhile is not."""
        for topic, partition, offset in commit.marks:
            if self._marked.get((topic, partition)) == offset:
                del self._marked[topic, partition]

    async def commit(self) -> None:
        """Make what was marked the group's place, durably."""
        commit = self.pending()
        if commit.marks:
            await self._channel.call(Kind.COMMIT, commit, again=True)
            self.committed(commit)

    def stop(self, error: PenstockError) -> None:
        """Nothing will come any more."""
        self._stopped = self._stopped or error

    async def close(self) -> None:
        """Leave the group."""
        if self._stopped is None:
            self.stop(BusClosed("the subscription is closed; subscribe again"))
            await self._channel.call(Kind.UNSUBSCRIBE, Feed(self.number), again=True)
