"""What waits for the next commit, and how it becomes batches in the journal.

A `Submission` (drafts and entries that go into the journal together) waits in the queue of its tenant.
`CommitQueue` serves the tenants in turns: each gets at most its quantum of bytes in a commit while
others wait, so one tenant's flood costs the others one quantum and not the flood. A submission with
`patience_s` joins a commit that another one causes, if there is one soon: a sync of its own would
delay the commits of other tenants.

`Batcher` gives events their partition offsets and append times, and puts them into a commit as
batches. It runs when a commit is taken, so order and duplicates are decided once, in one place. Small
drafts of a topic that arrived meanwhile become one batch. A submission is laid out whole or not at
all: one with a value that cannot be written is refused, and the others go on.
"""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Protocol

from penstock.core.dedup import repeats
from penstock.core.entry import Entry, encode_checked
from penstock.core.lease import Lease
from penstock.log.disk import Bytes
from penstock.log.event_log import EventLog, PartitionLog
from penstock.log.journal import BATCH, CONTROL, GROUP, Commit, encode_group
from penstock.log.snapshot import PARTITION_SHIFT, Fold
from penstock.model.batch import EVENT_OVERHEAD_BYTES, EventBatch, event_bytes, payload_bytes
from penstock.model.compressor import compressors, worth_compressing
from penstock.model.draft import Draft
from penstock.model.errors import InvalidInput, PenstockError
from penstock.model.event import Receipt
from penstock.model.settings import Media
from penstock.model.token import TokenSource, token_at

# A commit that submissions with patience join is no larger than this: it is written as quickly as
# without them.
COMPANY_BYTES = 112 * 1024
# Drafts of fewer events wait until the commit is taken and share a batch; larger ones are laid out
# as soon as they arrive, while the disk is busy with the commit before.
MERGE_EVENTS = 64
# Head, names and padding of one batch, generously.
BATCH_OVERHEAD_BYTES = 640
_OFFSET_MASK = (1 << PARTITION_SHIFT) - 1


class Submission:
    """Drafts and entries that go into the journal together."""

    __slots__ = (
        "brings_news",
        "check",
        "drafts",
        "entries",
        "for_publish",
        "future",
        "partitions",
        "patience_s",
        "position",
        "receipts",
        "size",
        "tenant",
        "when_taken",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        tenant: str,
        drafts: list[Draft],
        partitions: list[int],
        size: int,
        future: asyncio.Future[Any],
    ) -> None:
        self.tenant = tenant
        self.drafts = drafts
        self.partitions = partitions
        self.size = size
        self.future = future
        self.patience_s = 0.0
        """How long it waits to join a commit that another submission causes; then 0."""
        self.entries: list[Entry] = []
        self.position = 0
        """Where it lies in the journal."""
        self.written: list[Entry] = []
        """All entries that went into the journal with it."""
        self.receipts: list[Receipt] = []
        self.check: Callable[[], None] | None = None
        """Called when a commit takes the submission: when it raises, nothing of it happens."""
        self.for_publish = bool(drafts)
        """Whether it holds events, or entries they need: it leaves the journal's reserve alone."""
        self.brings_news = False
        """Whether `when_taken` also returns what a group has settled and leased."""
        self.when_taken: Callable[[list[Receipt]], list[Entry]] | None = None
        """Makes the entries that need the offsets of the drafts."""


class Source(Protocol):
    """Gives entries that no caller waits for: the delivery machines do."""

    def drain(self) -> tuple[list[Entry], list[Lease]]:
        """Entries to write, and the leases that may be handed out when they are durable."""
        ...

    def news_bytes(self) -> int:
        """An upper bound on what the entries of `drain` would take in the journal."""
        ...


class CommitQueue:
    """Submissions that wait for a commit, by tenant; tenants take turns.

    >>> waiting = CommitQueue()
    >>> waiting.bytes
    0
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._queues: dict[str, deque[Submission]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, submission: Submission) -> None:
        """Put a submission behind the others of its tenant."""
        queue = self._queues.get(submission.tenant)
        if queue is None:
            queue = self._queues[submission.tenant] = deque()
        queue.append(submission)
        self.bytes += submission.size

    def presses(self, busy: Collection[str] = ()) -> bool:
        """Whether a tenant that is not busy has a submission that needs a commit now."""
        return any(
            tenant not in busy and _needs_commit(queue) for tenant, queue in self._queues.items()
        )

    def first_size(self, busy: Collection[str] = ()) -> int:
        """Size of the submission that would be taken first."""
        for tenant in self._order(busy):
            return self._queues[tenant][0].size
        return 0

    def _order(self, busy: Collection[str]) -> list[str]:
        """Tenants in their turns; those that can wait for another commit come last."""
        order = [tenant for tenant in self._queues if tenant not in busy]
        order.sort(key=lambda tenant: not _needs_commit(self._queues[tenant]))
        return order

    def take(
        self,
        budget: int,
        quantum: int,
        fits: Callable[[Submission, int], bool],
        busy: Collection[str] = (),
    ) -> list[Submission]:
        """The submissions of one commit, none of a busy tenant; at least one, if it fits.

        `fits` is called with each submission and the bytes of the commit including it.
        """
        taken: list[Submission] = []
        if len(self._queues) == 1:
            quantum = budget
        spent = 0
        served: dict[str, deque[Submission]] = {}
        for tenant in self._order(busy):
            if not _needs_commit(self._queues[tenant]):
                budget = min(budget, COMPANY_BYTES)
            queue = self._queues.pop(tenant)
            share = 0
            while queue and (
                not taken
                or (spent + queue[0].size <= budget and share + queue[0].size <= quantum)
                or (share == 0 and spent + queue[0].size <= budget)
            ):
                if not fits(queue[0], spent + queue[0].size):
                    break
                submission = queue.popleft()
                spent += submission.size
                share += submission.size
                taken.append(submission)
            if queue and share:
                served[tenant] = queue
            elif queue:
                self._queues[tenant] = queue
        self._queues.update(served)  # at the back: they had their turn
        self.bytes -= spent
        return taken

    def drop(self) -> list[Submission]:
        """Take everything out, to be refused."""
        dropped = [submission for queue in self._queues.values() for submission in queue]
        self._queues.clear()
        self.bytes = 0
        return dropped


def _needs_commit(queue: deque[Submission]) -> bool:
    """Whether any of a tenant's submissions should not wait: those before it go with it."""
    return any(not each.patience_s for each in queue)


class Placed(NamedTuple):
    """A batch in a commit: its partition, its journal position, and where it lies in a group there."""

    batch: EventBatch
    log: PartitionLog
    position: int
    inner: int


class Batcher:
    """Turns submissions into batches and entries of a commit."""

    def __init__(
        self,
        log: EventLog,
        fold: Fold,
        tokens: TokenSource,
        media: Media,
        wall_us: Callable[[], int],
    ) -> None:
        self._wall_us = wall_us
        self._log = log
        self._fold = fold
        self._tokens = tokens
        self._media = media
        compressors.get(media.compressor)  # one that is missing shows now, not in a commit
        self._merging: dict[tuple[str, int, str, str], list[Submission]] = {}
        self._moved: list[tuple[PartitionLog, int, int]] = []
        """Partitions of the submission that is being laid out, each with its end and time before it."""
        self._remembered: list[EventBatch] = []
        """Batches of that submission whose tokens deduplication has remembered."""
        self._now_us = 0

    def build(self, draft: Draft) -> EventBatch:
        """Lay a draft out as a batch, compressed when that pays."""
        batch = draft.batch if draft.batch is not None else draft.build()
        self.compress(batch)
        return batch

    def build_for_side_file(self, draft: Draft) -> EventBatch:
        """Lay out a draft of one whose payload goes to a file of its own, named by its token."""
        batch = draft.batch if draft.batch is not None else draft.build()
        batch.token_base = self._tokens.take(self._wall_us() // 1_000, 1)
        return batch

    def compress(self, batch: EventBatch) -> None:
        """Choose the configured compressor for a batch, when that pays."""
        name = self._media.compressor
        if batch.compressor == name:
            return  # done before, away from the commit
        body = batch.body()
        if name == "none" or len(body) < max(self._media.compress_min_bytes, 1):
            return
        if worth_compressing(body, compressors.get(name)):
            batch.compress_with(name)

    def lay(self, submissions: Iterable[Submission], commit: Commit, now_us: int) -> list[Placed]:
        """Place all submissions of a commit; one that cannot be laid out is refused, alone."""
        self._now_us = now_us
        placed: list[Placed] = []
        for submission in submissions:
            draft = submission.drafts[0] if len(submission.drafts) == 1 else None
            if (
                draft is not None
                and merges(draft)
                and not submission.entries
                and not submission.when_taken
            ):
                place = (draft.topic, submission.partitions[0], draft.tenant, draft.codec)
                self._merging.setdefault(place, []).append(submission)
            else:
                self._merge(commit, placed)
                self._lay_or_refuse(submission, commit, placed)
        self._merge(commit, placed)
        return placed

    def _merge(self, commit: Commit, placed: list[Placed]) -> None:
        for submissions in self._merging.values():
            try:
                with self._undone_on_error(commit, placed):
                    self._lay_joined(submissions, commit, placed)
            except Exception:  # of one submission: it shows when each is laid out by itself
                for submission in submissions:
                    self._lay_or_refuse(submission, commit, placed)
        self._merging = {}

    def _lay_joined(
        self, submissions: list[Submission], commit: Commit, placed: list[Placed]
    ) -> None:
        drafts = [submission.drafts[0] for submission in submissions]
        batch = self.build(drafts[0] if len(drafts) == 1 else joined(drafts))
        log = self._place(batch, drafts[0].topic, submissions[0].partitions[0])
        position = commit.add(BATCH, batch.encode_parts())
        placed.append(Placed(batch, log, position, 0))
        offset, index = batch.base_offset, 0
        for submission in submissions:
            count = submission.drafts[0].count
            token = token_at(batch.token_base, index)
            receipt = Receipt(batch.topic, batch.partition, offset + index, count, token)
            submission.receipts = [receipt]
            index += count

    def _lay_or_refuse(self, submission: Submission, commit: Commit, placed: list[Placed]) -> None:
        try:
            with self._undone_on_error(commit, placed):
                self._lay_one(submission, commit, placed)
        except Exception as error:
            submission.written = []
            if not submission.future.done():  # its caller may have been cancelled
                submission.future.set_exception(_unwritable(error))

    @contextmanager
    def _undone_on_error(self, commit: Commit, placed: list[Placed]) -> Iterator[None]:
        """Put commit, partitions and tokens back as they were when the block raises."""
        self._moved, self._remembered = [], []
        end, entries, batches = commit.end, len(commit.entries), len(placed)
        try:
            yield
        except Exception:
            commit.end = end
            del commit.entries[entries:], placed[batches:]
            for log, following, last_time_us in reversed(self._moved):
                log.next, log.last_time_us = following, last_time_us
            for batch in self._remembered:
                self._fold.forget(batch)
            raise

    def _lay_one(self, submission: Submission, commit: Commit, placed: list[Placed]) -> None:
        bodies: list[tuple[int, Sequence[Bytes]]] = []
        laid: list[tuple[EventBatch, PartitionLog]] = []
        receipts: list[Receipt] = []
        for draft, partition in zip(submission.drafts, submission.partitions, strict=True):
            known = self._known(draft)
            if known is None:
                batch: EventBatch | None = (
                    draft.batch if draft.batch is not None else self.build(draft)
                )
                assert batch is not None
                self._place(batch, draft.topic, partition)
                receipt = Receipt(
                    batch.topic, batch.partition, batch.base_offset, batch.count, batch.token(0)
                )
            else:
                receipt, batch = self._lay_unknown(draft, partition, known)
            receipts.append(receipt)
            if batch is not None:
                laid.append((batch, self._log.partition(draft.topic, partition)))
                bodies.append((BATCH, batch.encode_parts()))
        entries = list(submission.entries)
        if submission.when_taken is not None:
            entries += submission.when_taken(receipts)
        if entries:
            bodies.append((CONTROL, [encode_checked(entries)]))
        for entry in entries:
            self._fold.state.apply_live(entry)  # type: ignore[arg-type]
        submission.receipts, submission.written = receipts, entries
        submission.position = self._add(bodies, laid, commit, placed)

    def _add(
        self,
        bodies: list[tuple[int, Sequence[Bytes]]],
        laid: list[tuple[EventBatch, PartitionLog]],
        commit: Commit,
        placed: list[Placed],
    ) -> int:
        position = commit.end
        if len(bodies) == 1:
            kind, parts = bodies[0]
            position = commit.add(kind, parts)
            placed += [Placed(batch, log, position, 0) for batch, log in laid]
        elif bodies:
            position = commit.add(GROUP, encode_group(bodies))
            inner = 0
            for (batch, log), (_, parts) in zip(laid, bodies, strict=False):
                length = sum(map(len, parts))
                placed.append(Placed(batch, log, position, inner + 8))
                inner += 8 + length + (-length & 7)
        return position

    def _place(self, batch: EventBatch, topic: str, partition: int) -> PartitionLog:
        partition = operator.index(partition)  # 0.0 would find its log, and could not be written
        log = self._log.partition(topic, partition)
        self._moved.append((log, log.next, log.last_time_us))
        batch.partition = partition
        batch.base_offset = log.next
        # Append times never run backwards in a partition, whatever the clock does.
        batch.append_time_us = log.last_time_us = max(self._now_us, log.last_time_us)
        if batch.times is None and not batch.time_us:
            batch.time_us = self._now_us
        if batch.tokens is None and not batch.side_bytes:
            batch.token_base = self._tokens.take(self._now_us // 1_000, batch.count)
        elif batch.explicit_tokens:
            self._fold.remember(batch)
            self._remembered.append(batch)
        log.next += batch.count
        return log

    def _known(self, draft: Draft) -> list[int | None] | None:
        """Where each of the draft's tokens was stored before; None when all are new."""
        if draft.tokens is None:
            return None
        table = self._fold.dedup.get(draft.topic)
        known = table.find_many(draft.tokens) if table is not None else None
        if known is None and repeats(draft.tokens) is not None:
            known = [None] * draft.count
        return known

    def _lay_unknown(
        self, draft: Draft, partition: int, known: list[int | None]
    ) -> tuple[Receipt, EventBatch | None]:
        """Lay out the events with unknown tokens; the receipt has the old offsets of the others."""
        assert draft.tokens is not None
        fresh: dict[bytes, int] = {}
        for index, token in enumerate(draft.tokens):
            if known[index] is None and token not in fresh:
                fresh[token] = index
        batch = None
        places: dict[bytes, int] = {}
        if fresh:
            batch = self.build(draft.subset(list(fresh.values())))
            self._place(batch, draft.topic, partition)
            places = {token: batch.base_offset + at for at, token in enumerate(fresh)}
        parts: list[Receipt] = []
        for index, token in enumerate(draft.tokens):
            before = known[index]
            if before is None:
                where, offset = partition, places[token]
                duplicate = fresh[token] != index
            else:
                where, offset = before >> PARTITION_SHIFT, before & _OFFSET_MASK
                duplicate = True
            parts.append(Receipt(draft.topic, where, offset, 1, token, duplicate))
        if len(parts) == 1:
            return parts[0], batch
        first = parts[0]
        all_known = all(part.duplicate for part in parts)
        return Receipt(
            draft.topic, first.partition, first.offset, draft.count, first.token, all_known,
            parts=tuple(parts),
        ), batch  # fmt: skip


def draft_bytes(draft: Draft) -> int:
    """An upper bound on what a draft takes in the journal."""
    return draft_sizes(draft)[2]


def draft_sizes(draft: Draft) -> tuple[int, int, int]:
    """Its payload bytes (for rates), its event bytes (for quotas), and the most the journal needs.

    >>> draft_sizes(Draft("orders", [b"12345"], tenant="acme", codec="raw"))
    (5, 69, 717)
    """
    batch = draft.batch
    if batch is not None:
        bound = len(batch.stored_body()) + BATCH_OVERHEAD_BYTES
        return payload_bytes(batch), event_bytes(batch), bound
    payload = sum(map(len, draft.payloads))
    rest = bound = 0
    if draft.keys is not None:
        rest = bound = sum(len(key) for key in draft.keys if key is not None)
    for headers in draft.headers or ():
        for name, text in (headers or {}).items():
            rest += _utf8_bytes(name) + _utf8_bytes(text)
            bound += 4 * (len(name) + len(text)) + 16
    count = draft.count
    return (
        payload,
        payload + rest + EVENT_OVERHEAD_BYTES * count,
        payload + bound + BATCH_OVERHEAD_BYTES + 72 * count,
    )


def draft_payload_bytes(draft: Draft) -> int:
    """The bytes of a draft's payloads: rates and counters count them, on either side of a wire."""
    if draft.batch is not None:
        return payload_bytes(draft.batch)
    return sum(map(len, draft.payloads))


def _utf8_bytes(text: str) -> int:
    # Text that cannot be encoded is refused when the draft is laid out, with a better message.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def merges(draft: Draft) -> bool:
    """Whether a draft may share a batch with others of its topic."""
    return (
        draft.count < MERGE_EVENTS
        and draft.batch is None
        and draft.tokens is None
        and draft.times_us is None
        and draft.expires_us is None
        and draft.priority is None
    )


def joined(drafts: Sequence[Draft]) -> Draft:
    """Several drafts of one topic as one."""
    first = drafts[0]
    whole = Draft(
        first.topic,
        list(chain.from_iterable(draft.payloads for draft in drafts)),
        tenant=first.tenant,
        codec=first.codec,
    )
    if any(draft.keys is not None for draft in drafts):
        whole.keys = list(
            chain.from_iterable(draft.keys or [None] * draft.count for draft in drafts)
        )
    if any(draft.headers is not None for draft in drafts):
        whole.headers = list(
            chain.from_iterable(draft.headers or [None] * draft.count for draft in drafts)
        )
    return whole


def _unwritable(error: Exception) -> PenstockError:
    """The error for the caller of a submission that could not be laid out."""
    if isinstance(error, PenstockError):
        return error
    return InvalidInput(
        f"this cannot be stored: {type(error).__name__}: {error}. Nothing of it was; check the types "
        "of its values"
    )
