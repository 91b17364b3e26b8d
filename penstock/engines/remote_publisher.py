"""Remote publishing: what is published within one turn of the loop shares a frame."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from penstock.core.respite import Respite
from penstock.engines.channel import Channel
from penstock.engines.engine import Draft
from penstock.engines.layout import MERGE_EVENTS
from penstock.model.errors import PenstockError, Throttled
from penstock.model.event import Receipt
from penstock.wire.fault import to_error
from penstock.wire.frame import Bytes, Kind
from penstock.wire.message import DraftMeta, Publish, Published, decode

# Frames under way: below what a broker remembers of a session, so that none can be forgotten.
MAX_UNDER_WAY = 64
FRAME_DRAFTS = 1_024
FRAME_BYTES = 4 << 20
PART_BYTES = 64 << 10  # payloads of this size travel beside the message, not copied into it


class Waiting(NamedTuple):
    """A draft and who waits for it."""

    draft: Draft
    future: asyncio.Future[Receipt]


class RemotePublisher:
    """Bundles drafts into frames."""

    def __init__(self, channel: Channel, linger_ms: float) -> None:
        self._channel = channel
        self._linger_s = linger_ms / 1_000
        self._waiting: list[Waiting] = []
        self._scheduled = False
        self._sequence = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._respite = Respite()

    def next_sequence(self) -> int:
        """A number for a publish or transaction, larger than all before."""
        self._sequence += 1
        return self._sequence

    async def publish(self, draft: Draft) -> Receipt:
        """Send a draft with its neighbours; durable when it returns."""
        loop = asyncio.get_running_loop()
        if self._respite and draft.deliver_at_us is None:
            refusal = self._respite.answer(draft.tenant, draft.count, _size(draft), loop.time())
            if refusal is not None:
                raise refusal
        future: asyncio.Future[Receipt] = loop.create_future()
        self._waiting.append(Waiting(draft, future))
        if not self._scheduled:
            self._scheduled = True
            if self._linger_s:
                loop.call_later(self._linger_s, self._flush)
            else:
                loop.call_soon(self._flush)
        return await future

    def _flush(self) -> None:
        self._scheduled = False
        while self._waiting and len(self._under_way) < MAX_UNDER_WAY:
            task = asyncio.create_task(self._send(self._next_frame()))
            self._under_way.add(task)
            task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if self._waiting and not self._scheduled:
            self._flush()

    def _next_frame(self) -> list[Waiting]:
        taken = 0
        size = 0
        for waiting in self._waiting:
            if taken >= FRAME_DRAFTS or size >= FRAME_BYTES:
                break
            taken += 1
            size += _size(waiting.draft)
        frame, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return [waiting for waiting in frame if not waiting.future.done()]

    async def _send(self, drafts: list[Waiting]) -> None:
        if not drafts:
            return  # everybody who waited was cancelled
        parts: list[Bytes] = []
        try:
            metas = [described(waiting.draft, parts) for waiting in drafts]
            message = Publish(self.next_sequence(), metas, self._respite.withheld())
            answer = await self._channel.call(Kind.PUBLISH, message, parts)
            published: Published = decode(answer.meta, Published)
        except PenstockError as error:
            for waiting in drafts:
                if not waiting.future.done():
                    waiting.future.set_exception(_own(error, len(drafts)))
            return
        for number, waiting in enumerate(drafts):
            if waiting.future.done():
                continue
            receipt = published.receipts[number]
            if receipt is not None:
                waiting.future.set_result(receipt)
            else:
                refusal = to_error(published.faults[number])
                self._remember(waiting.draft, refusal)
                waiting.future.set_exception(refusal)

    def _remember(self, draft: Draft, error: PenstockError) -> None:
        if isinstance(error, Throttled) and draft.deliver_at_us is None:
            now = asyncio.get_running_loop().time()
            self._respite.refused(draft.tenant, draft.count, _size(draft), error, now)


def described(draft: Draft, parts: list[Bytes]) -> DraftMeta:
    """The message for a draft; a large one goes into `parts` as a batch."""
    large = draft.count >= MERGE_EVENTS or _size(draft) >= PART_BYTES
    if draft.batch is not None or (large and draft.tokens is None):
        batch = draft.batch if draft.batch is not None else draft.build()
        parts.append(batch.encode())
        return DraftMeta(
            draft.topic, draft.tenant, draft.codec, len(parts) - 1, partition=draft.partition,
            deliver_at_us=draft.deliver_at_us,
        )  # fmt: skip
    headers = draft.headers
    return DraftMeta(
        draft.topic, draft.tenant, draft.codec, -1, list(draft.payloads),
        None if draft.keys is None else list(draft.keys),
        None if headers is None else [None if each is None else dict(each) for each in headers],
        None if draft.tokens is None else list(draft.tokens),
        None if draft.times_us is None else list(draft.times_us),
        None if draft.expires_us is None else list(draft.expires_us),
        None if draft.priority is None else list(draft.priority),
        draft.partition, draft.deliver_at_us,
    )  # fmt: skip


def _size(draft: Draft) -> int:
    if draft.batch is not None:
        return draft.batch.size_bytes
    return sum(map(len, draft.payloads))


def _own(error: PenstockError, count: int) -> PenstockError:
    """An error for each caller: one object raised in several tasks would mix their tracebacks."""
    return error if count == 1 else type(error)(error.message, **error.data)
