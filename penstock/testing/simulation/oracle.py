"""The oracle: knows what producers were told and what anybody saw, and judges the log by it.

It lives outside the simulated machine, so no crash makes it forget. Each thing it insists on has a
name, which a failure prints and docs/guide/simulation.md explains.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.core.partition import partition_of
from penstock.model.event import Receipt

if TYPE_CHECKING:
    from penstock.model.batch import EventBatch

Place = tuple[str, int]

PENDING = "pending"  # the call has not returned
STORED = "stored"  # the call returned a receipt
UNKNOWN = "unknown"  # the process died, or the writer failed, before it returned
REFUSED = "refused"  # the call said that nothing was stored
ABSENT = "absent"  # unknown, and the next life found no trace of it

LAST_OPERATIONS = 60  # shown with a failure


class Finding(Exception):
    """A broken promise."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class Sent:
    """One event somebody tried to publish."""

    __slots__ = ("due_us", "headers", "key", "number", "payload", "place", "status", "token", "topic", "tx")  # fmt: skip

    def __init__(self, number: int, topic: str, payload: bytes) -> None:
        self.number = number
        self.topic = topic
        self.payload = payload
        self.key: bytes | None = None
        self.headers: dict[str, str] = {}
        self.token: str | None = None
        self.due_us = 0
        self.status = PENDING
        self.place: tuple[int, int] | None = None
        self.tx: Deal | None = None

    def __repr__(self) -> str:
        return f"event {self.number} ({self.status}) of {self.topic} at {self.place}"


class Deal:
    """A transaction: what it was to publish, to ack and to commit."""

    __slots__ = ("acks", "cursors", "sent", "status")

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.acks: list[Any] = []
        self.cursors: list[tuple[str, Place, int]] = []
        self.status = PENDING


class Oracle:
    """Everything that was submitted and everything that was seen."""

    def __init__(self, partitions: dict[str, int], halt: Callable[[BaseException], None]) -> None:
        self.events: list[Sent] = []
        self.open: dict[int, Sent] = {}
        """Those whose fate is not settled."""
        self.partitions = partitions
        self.places: dict[Place, dict[int, Sent]] = {}
        self.ends: dict[Place, int] = {}
        """Behind the highest offset that anybody was told of or saw."""
        self.firsts: dict[Place, int] = {}
        """The first offset that retention has left."""
        self.deals: list[Deal] = []
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.latest_us = 0
        """The latest time the clock showed before it was set back."""
        self.now: Callable[[], float] = lambda: 0.0
        self.recent: deque[str] = deque(maxlen=LAST_OPERATIONS)
        self.verbose: Callable[[str], None] | None = None
        self._halt = halt
        self._hash = hashlib.blake2b(digest_size=16)

    # -- the trace -----------------------------------------------------------------------------

    def note(self, kind: str, detail: str = "") -> None:
        """Count an operation and add it to the trace."""
        self.steps += 1
        self.counts[kind] += 1
        line = f"{self.steps} {self.now():.6f} {kind} {detail}"
        self.recent.append(line)
        self._hash.update(line.encode())
        if self.verbose is not None:
            self.verbose(line)

    def trace(self) -> str:
        """A hash of everything noted so far: the same seed gives the same one."""
        return self._hash.hexdigest()

    def fail(self, invariant: str, detail: str) -> NoReturn:
        """A promise is broken: end the run."""
        finding = Finding(invariant, detail)
        self._halt(finding)
        raise finding

    # -- publishing ----------------------------------------------------------------------------

    def submit(self, topic: str, filler: bytes) -> Sent:
        """A new event, with a payload that nobody else has."""
        number = len(self.events)
        sent = Sent(number, topic, b"%d|" % number + filler)
        self.events.append(sent)
        self.open[number] = sent
        return sent

    def stored(self, sents: Sequence[Sent], receipt: Receipt) -> None:
        """A publish returned: its events are where the receipt says, for good."""
        ids = receipt.ids()
        if len(ids) != len(sents):
            self.fail("receipt", f"{len(ids)} ids for {len(sents)} events")
        for sent, place in zip(self._by_partition(sents), ids, strict=True):
            sent.status = STORED
            self.open.pop(sent.number, None)
            self.saw(sent, place.partition, place.offset)

    def _by_partition(self, sents: Sequence[Sent]) -> Sequence[Sent]:
        """The order of a receipt: one partition after another, in each as they were given."""
        count = self.partitions.get(sents[0].topic, 1)
        if count == 1 or len(sents) == 1 or sents[0].key is None:
            return sents
        parts: dict[int, list[Sent]] = {}
        for sent in sents:
            parts.setdefault(partition_of(sent.key or b"", count), []).append(sent)
        return [sent for part in parts.values() for sent in part]

    def settle(self, sents: Iterable[Sent], status: str) -> None:
        """A publish ended without a receipt."""
        for sent in sents:
            if sent.status == PENDING:
                sent.status = status
                if status == REFUSED:
                    self.open.pop(sent.number, None)

    def again(self, sent: Sent) -> None:
        """Somebody publishes an event once more, with the same token."""
        if sent.status != STORED:
            sent.status = PENDING
            self.open[sent.number] = sent

    def ended(self) -> None:
        """A life is over: whatever was under way has an unknown outcome now."""
        for sent in self.open.values():
            sent.status = UNKNOWN
        for deal in self.deals:
            if deal.status == PENDING:
                deal.status = UNKNOWN

    # -- seeing --------------------------------------------------------------------------------

    def saw(self, sent: Sent, partition: int, offset: int) -> None:
        """Somebody was told that an event lies at an offset."""
        place = (sent.topic, partition)
        seen = self.places.setdefault(place, {})
        there = seen.get(offset)
        if there is not None and there is not sent:
            self.fail("offset-changed", f"{place}/{offset} was {there}, now it is {sent}")
        if sent.place is not None and sent.place != (partition, offset):
            self.fail("stored-twice", f"{sent} is at {partition}/{offset} too")
        if sent.status in (REFUSED, ABSENT):
            self.fail("invented", f"{sent} is at {partition}/{offset}")
        seen[offset] = sent
        sent.place = (partition, offset)
        if offset >= self.ends.get(place, 0):
            self.ends[place] = offset + 1

    def read(self, batch: EventBatch) -> list[Sent]:
        """Somebody read a batch of a topic of the workload: judge every event of it."""
        seen: list[Sent] = []
        place = (batch.topic, batch.partition)
        known = self.places.get(place, {})
        keys, headers = batch.keys(), batch.headers()
        for index, payload in enumerate(batch.payloads()):
            offset = batch.base_offset + index
            sent = known.get(offset)
            if sent is None or sent.payload != payload:
                sent = self._identify(place, offset, payload)
                self.saw(sent, batch.partition, offset)
            if sent.key != keys[index] or sent.headers != headers[index]:
                self.fail(
                    "changed",
                    f"{sent}: key {keys[index]!r}, headers {headers[index]!r} of {sent.key!r}, {sent.headers!r}",
                )
            if sent.due_us and max(batch.append_time(index), self.latest_us) < sent.due_us:
                self.fail("too-early", f"{sent} was due at {sent.due_us}")
            seen.append(sent)
        return seen

    def _identify(self, place: Place, offset: int, payload: bytes) -> Sent:
        number = payload.partition(b"|")[0]
        if not number.isdigit() or int(number) >= len(self.events):
            self.fail("invented", f"{place}/{offset} holds {payload[:40]!r}, which nobody sent")
        sent = self.events[int(number)]
        if sent.payload != payload or sent.topic != place[0]:
            self.fail("invented", f"{place}/{offset} holds {payload[:40]!r}, not quite {sent}")
        return sent

    # -- after a recovery ----------------------------------------------------------------------

    def bounds(self, place: Place, first: int, end: int, *, retention: bool) -> None:
        """The log says what it holds; everything anybody knows of must be inside."""
        if end < self.ends.get(place, 0):
            self.fail(
                "lost",
                f"{place} ends at {end}; offset {self.ends[place] - 1} was seen or acknowledged",
            )
        if first > self.firsts.get(place, 0):
            if not retention:
                self.fail("lost", f"{place} begins at {first}, and there is no retention")
            self.firsts[place] = first

    def _expired_unseen(self, topic: str) -> bool:
        """Whether retention took events of a topic that nobody had looked at."""
        return any(
            first > self.ends.get(place, 0)
            for place, first in self.firsts.items()
            if place[0] == topic
        )

    def resolve(self) -> None:
        """Everything stored was read: what is unknown and was not seen is absent for good."""
        for deal in self.deals:
            if deal.status == UNKNOWN:
                present = sum(sent.place is not None for sent in deal.sent)
                missing = [sent for sent in deal.sent if sent.place is None]
                if present and missing and not any(self._expired_unseen(s.topic) for s in missing):
                    self.fail(
                        "half-transaction", f"{present} of {len(deal.sent)} events: {deal.sent}"
                    )
                deal.status = STORED if present else ABSENT
                for held in deal.acks:
                    held.decided(acked=present > 0)
        self.deals = []
        for sent in list(self.open.values()):
            if sent.status == UNKNOWN and not sent.due_us:
                sent.status = STORED if sent.place is not None else ABSENT
                del self.open[sent.number]
