"""RemotePublisher: sends drafts to a broker. Drafts published within one turn of the loop share a frame.

After a refusal for a tenant's rate, `RecentRefusals` answers the same request locally until its
`retry_after_s` has passed, since the broker's answer would be the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engines.broker.channel import Call, Channel
from penstock.engines.embedded.batching import MERGE_EVENTS, draft_payload_bytes
from penstock.model.draft import Draft
from penstock.model.errors import InvalidInput, PenstockError, Throttled
from penstock.model.event import Receipt
from penstock.wire.frame import MAX_PARTS, Bytes, Kind
from penstock.wire.message import DraftMeta, Publish, Published, decode, encode, to_error

# Frames without an answer: fewer than a broker remembers of a session, so that it forgets none.
MAX_UNDER_WAY = 64
FRAME_DRAFTS = 1_024
FRAME_BYTES = 4 << 20
# Bytes of the drafts inside one message; up to this size a broker decodes it without counting values.
MESSAGE_BYTES = 128 << 10
# Drafts from this size on travel beside the message and are not copied into it.
PART_BYTES = 64 << 10
# The same for drafts of a transaction, which cannot be split, when its message is full.
LEAST_PART_BYTES = 1 << 10
# What a message takes besides payloads: names and lengths of a draft, of an event; tokens and times.
DRAFT_BYTES, EVENT_BYTES, COLUMN_BYTES = 48, 6, 18
# A part of the deadline. The drafts of a frame share the deadline of the oldest, so none is younger by
# more. A draft with less time left is not sent: the outcome "not sent" helps more than "unknown".
SPREAD = 0.1
# The shortest deadline of a call; 0 would mean none.
LEAST_S = 0.001
# A tenant at its limit sends few, full frames: each costs the broker about the same, whatever it holds,
# and other tenants wait for it.
GATHER_S = 0.025
# Limits that only time changes; only their refusals are remembered.
RATES = ("events_per_s", "bytes_per_s")
# Tenants with a remembered refusal; when there are more, all are forgotten.
MOST_TENANTS = 1_000
# A tenant counts as being at its limit for so long after a refusal has ended: at half as much again as
# its rate it has had the next one by then.
LATELY_S = 0.5


class Waiting(NamedTuple):
    """A draft that is not sent yet, and the future of its publish."""

    draft: Draft
    future: asyncio.Future[Receipt]
    until_s: float
    """When the publish must have its answer, whether the draft was sent or not."""


class RemotePublisher:
    """Bundles drafts into frames and sends them."""

    def __init__(self, channel: Channel, linger_ms: float, deadline_s: float) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._spread_s = SPREAD * deadline_s
        half_s = deadline_s / 2  # the other half is for the broker
        self._linger_s, self._gather_s = min(linger_ms / 1_000, half_s), min(GATHER_S, half_s)
        self._waiting: deque[Waiting] = deque()
        """In the order of their deadlines."""
        self._due: asyncio.Handle | None = None
        self._due_s = 0.0
        """When the next frames go out, if `_due` is set."""
        self._sequence = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._recent = RecentRefusals()

    def next_sequence(self) -> int:
        """A number for a publish or transaction, larger than all before."""
        self._sequence += 1
        return self._sequence

    async def publish(self, draft: Draft) -> Receipt:
        """Send a draft, with others of this turn of the loop; its events are durable when it returns."""
        loop = asyncio.get_running_loop()
        now_s, linger_s = loop.time(), self._linger_s
        if self._recent and draft.deliver_at_us is None:
            size = draft_payload_bytes(draft)
            refusal = self._recent.answer(draft.tenant, draft.count, size, now_s)
            if refusal is not None:
                raise refusal
            if self._recent.lately(draft.tenant, now_s):
                linger_s = max(linger_s, self._gather_s)
        future: asyncio.Future[Receipt] = loop.create_future()
        self._waiting.append(Waiting(draft, future, now_s + self._deadline_s))
        self._flush_within(linger_s)
        return await future

    def _flush_within(self, seconds: float) -> None:
        """Send the waiting drafts within this time: the shortest linger of any of them counts."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + seconds
        if self._due is not None:
            if self._due_s <= due_s:
                return
            self._due.cancel()
        self._due_s = due_s
        self._due = (
            loop.call_later(seconds, self._flush) if seconds else loop.call_soon(self._flush)
        )

    def _flush(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        while self._waiting and len(self._under_way) < MAX_UNDER_WAY:
            task = asyncio.create_task(self._send(self._next_frame()))
            self._under_way.add(task)
            task.add_done_callback(self._arrived)

    def _refuse_late(self) -> None:
        """Fail drafts whose time is up; called when a frame ends.

        No timer is needed: frames under way are older than the waiting drafts, so they end first.
        """
        end_s = asyncio.get_running_loop().time() + self._spread_s
        while self._waiting and self._waiting[0].until_s <= end_s:
            late = self._waiting.popleft()
            if not late.future.done():
                late.future.set_exception(
                    self._channel.unsent("no answer from the broker to what was sent before this")
                )

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if self._waiting and self._due is None:
            self._refuse_late()
            self._flush()

    def _next_frame(self) -> list[Waiting]:
        queue, size, inside = self._waiting, 0, 0
        frame: list[Waiting] = []
        room = self._channel.frame_bytes // 2  # sizes of drafts are estimates
        last_s = queue[0].until_s + self._spread_s
        while queue and len(frame) < FRAME_DRAFTS and size < FRAME_BYTES:
            content = _content_bytes(queue[0].draft)
            own = content + _framing_bytes(queue[0].draft)
            message = 0 if _beside(queue[0].draft, content) else own
            full = size + own > room or inside + message > MESSAGE_BYTES
            if frame and (full or queue[0].until_s > last_s):
                break
            waiting = queue.popleft()
            if not waiting.future.done():  # otherwise its publish was cancelled
                frame.append(waiting)
                size += own
                inside += message
        return frame

    async def _send(self, drafts: list[Waiting]) -> None:
        if not drafts:
            return  # every publish was cancelled
        parts: list[Bytes] = []
        try:
            metas = [described(waiting.draft, parts) for waiting in drafts]
            message = Publish(self.next_sequence(), metas, self._recent.withheld())
            call = self._channel.begin(Kind.PUBLISH, message, parts)
        except PenstockError as error:
            _fail(drafts, error)
        except Exception as error:
            await self._send(_sendable(drafts, error))  # at once, before later drafts
        else:
            await self._finish(drafts, call)

    async def _finish(self, drafts: list[Waiting], call: Call) -> None:
        left_s = drafts[0].until_s - asyncio.get_running_loop().time()
        try:
            answer = await self._channel.finish(call, max(left_s, LEAST_S))
            published: Published = decode(answer.meta, Published)
        except PenstockError as error:
            _fail(drafts, error)
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
            size = draft_payload_bytes(draft)
            self._recent.refused(draft.tenant, draft.count, size, error, now)


def bundled(drafts: Sequence[Draft], parts: list[Bytes]) -> list[DraftMeta]:
    """The messages for drafts that have to share a frame."""
    metas, inside = [], 0
    reserved = sum(
        _beside(draft, _content_bytes(draft)) for draft in drafts
    )  # parts for large drafts
    for draft in drafts:
        content = _content_bytes(draft)
        size = content + _framing_bytes(draft)
        if _beside(draft, content):
            reserved -= 1
        full = inside + size > MESSAGE_BYTES and size >= LEAST_PART_BYTES
        beside = full and len(parts) + reserved < MAX_PARTS
        metas.append(described(draft, parts, beside=beside))
        inside += size if metas[-1].part < 0 else 0
    return metas


def described(draft: Draft, parts: list[Bytes], *, beside: bool = False) -> DraftMeta:
    """The message for a draft; a large one, or any with `beside`, goes into `parts` as a batch."""
    if beside or _beside(draft, _content_bytes(draft)):
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


def _beside(draft: Draft, size: int) -> bool:
    """Whether a draft travels beside the message, as a batch."""
    return draft.batch is not None or draft.count >= MERGE_EVENTS or size >= PART_BYTES


def _content_bytes(draft: Draft) -> int:
    """About the bytes of payloads, keys and headers in a frame."""
    if draft.batch is not None:
        return draft.batch.size_bytes
    size = sum(map(len, draft.payloads))
    for key in draft.keys or ():
        size += len(key or b"")
    for headers in draft.headers or ():
        for name, text in (headers or {}).items():
            size += EVENT_BYTES + len(name) + len(text)
    return size


def _framing_bytes(draft: Draft) -> int:
    """About the bytes of names, lengths and numbers in a message, besides the content."""
    columns = (draft.tokens, draft.times_us, draft.expires_us, draft.priority)
    each = EVENT_BYTES + COLUMN_BYTES * (4 - columns.count(None))
    return DRAFT_BYTES + len(draft.topic) + each * draft.count


def _sendable(drafts: list[Waiting], error: Exception) -> list[Waiting]:
    """The drafts of a frame that can be encoded; the others fail. When each one can, all fail."""
    good: list[Waiting] = []
    for waiting in drafts if len(drafts) > 1 else ():
        try:
            encode(Publish(0, [described(waiting.draft, [])]))
        except Exception as own:
            _fail([waiting], _unsendable(own))
        else:
            good.append(waiting)
    if len(good) < len(drafts) > 1:
        return good
    _fail(drafts, _unsendable(error))
    return []


def _unsendable(error: Exception) -> InvalidInput:
    return InvalidInput(f"this cannot be sent to a broker: {error}; nothing was stored")


def _fail(drafts: list[Waiting], error: PenstockError) -> None:
    for waiting in drafts:
        if not waiting.future.done():
            waiting.future.set_exception(_own(error, len(drafts)))


def _own(error: PenstockError, count: int) -> PenstockError:
    """A copy for each caller: one object raised in several tasks would mix their tracebacks."""
    return error if count == 1 else type(error)(error.message, **error.data)


@dataclass(frozen=True, slots=True)
class _Refusal:
    until_s: float
    events: int
    size_bytes: int
    error: Throttled


class RecentRefusals:
    """The last refusal of each tenant, so that no request is repeated before it can succeed.

    A token bucket only fills with time, so a request for at least as much as was refused is refused too
    until `retry_after_s` has passed. Refused here, it costs the broker nothing and does not delay other
    tenants. A smaller batch is sent, since it may fit. A batch that never fits is sent, too: waiting
    does not help it, so only the broker may refuse it.

    >>> refusals = RecentRefusals()
    >>> refusal = Throttled("too fast", limit="events_per_s", retry_after_s=2.0)
    >>> refusals.refused("acme", 100, 5_000, refusal, now_s=10.0)
    >>> refusals.answer("acme", 100, 5_000, now_s=11.5).retry_after_s
    0.5
    >>> refusals.answer("acme", 1, 50, now_s=11.5), refusals.answer("acme", 100, 5_000, now_s=12.0)
    (None, None)
    >>> refusals.withheld()
    {'events_per_s acme': 1}
    >>> refusals.lately("acme", now_s=12.4), refusals.lately("acme", now_s=12.5), bool(refusals)
    (True, False, False)
    """

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}
        self._withheld: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether any refusal is remembered: most clients are never refused."""
        return bool(self._refusals)

    def refused(
        self, tenant: str, events: int, size_bytes: int, error: Throttled, now_s: float
    ) -> None:
        """Remember that the broker refused a batch, if only time can change that."""
        if error.data.get("limit") not in RATES:
            return
        if len(self._refusals) >= MOST_TENANTS:
            self._refusals.clear()
        until_s = now_s + error.retry_after_s
        self._refusals[tenant] = _Refusal(until_s, events, size_bytes, error)

    def answer(self, tenant: str, events: int, size_bytes: int, now_s: float) -> Throttled | None:
        """The refusal that the broker would answer a batch with, if that is known."""
        known = self._refusals.get(tenant)
        if known is None or now_s >= known.until_s:
            return None
        if events < known.events or size_bytes < known.size_bytes:
            return None
        most = known.error.data
        if events > most.get("most_events", events) or size_bytes > most.get(
            "most_bytes", size_bytes
        ):
            return None  # it never fits, and only the broker may say so
        key = f"{known.error.data['limit']} {tenant}"
        self._withheld[key] = self._withheld.get(key, 0) + 1
        data = {**known.error.data, "retry_after_s": known.until_s - now_s}
        return Throttled(known.error.message, **data)

    def lately(self, tenant: str, now_s: float) -> bool:
        """Whether a tenant is at its limit: a refusal lasts, or ended less than LATELY_S ago."""
        known = self._refusals.get(tenant)
        if known is None:
            return False
        if now_s >= known.until_s + LATELY_S:
            del self._refusals[tenant]
            return False
        return True

    def withheld(self) -> dict[str, int]:
        """How many batches were refused here since the last call, by limit and tenant."""
        found, self._withheld = self._withheld, {}
        return found
