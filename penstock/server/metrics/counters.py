"""Counts what the broker does, as plain numbers: one addition for each batch.

Nothing here depends on Prometheus. Tenants, topics and groups become labels only while there is room: the
first of them have numbers of their own, the rest share "other", so that no client can make metrics grow.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from penstock.model.errors import PenstockError
from penstock.model.event import Receipt

OTHER = "other"
"""The label of all names that were seen when their table was full."""

MAX_TENANTS = 100
MAX_TOPICS = 100
MAX_GROUPS = 100
"""Names with series of their own. A Prometheus server handles some thousand series of one target well; a
hundred names in each of some twenty families stay within that."""

MAX_PAIRS = 200
"""Tenants and topics together, or groups and topics: a hundred of each could be ten thousand pairs."""

MAX_WORDS = 128
"""Kinds, limits, codes, reasons: there are about seventy in the code; a bug must not make more."""

BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    300.0, 3_600.0,
)  # fmt: skip
"""Upper bounds of the latency buckets: from half a commit on a fast disk to a group an hour behind."""


class Names:
    """Labels of one kind: the first `limit` names are labels themselves, all others are "other".

    >>> names = Names(1)
    >>> names.label("acme"), names.label("initech"), names.label("acme")
    ('acme', 'other', 'acme')
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        """The label of a name."""
        if name in self._known:
            return name
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name


class Labels:
    """The names with series of their own, the same for counters and for figures read at a scrape."""

    def __init__(self) -> None:
        self._tenants = Names(MAX_TENANTS)
        self._topics = Names(MAX_TOPICS)
        self._groups = Names(MAX_GROUPS)
        self._words = Names(MAX_WORDS)
        self._pairs: set[tuple[str, str]] = set()
        self._read: set[tuple[str, str]] = set()

    def tenant(self, name: str) -> str:
        """The label of a tenant."""
        return self._tenants.label(name)

    def group(self, name: str) -> str:
        """The label of a group; listeners have generated names, and share one label."""
        return self._groups.label(family(name))

    def word(self, name: str) -> str:
        """The label of a kind, limit, code or reason."""
        return self._words.label(name)

    def pair(self, tenant: str, topic: str) -> tuple[str, str]:
        """The labels of a tenant and a topic."""
        return _bounded(
            self._pairs, (self._tenants.label(tenant), self._topics.label(family(topic)))
        )

    def group_topic(self, group: str, topic: str) -> tuple[str, str]:
        """The labels of a group and a topic that it reads."""
        return _bounded(self._read, (self.group(group), self._topics.label(family(topic))))


def _bounded(known: set[tuple[str, str]], pair: tuple[str, str]) -> tuple[str, str]:
    """A pair of labels while there is room for new pairs; then the second is "other"."""
    if pair in known:
        return pair
    if len(known) >= MAX_PAIRS:
        return pair[0], OTHER
    known.add(pair)
    return pair


def family(name: str) -> str:
    """The name itself, or its first word when the bus generated it.

    >>> family("orders.created"), family("_inbox.4f1c")
    ('orders.created', '_inbox')
    """
    return name if not name.startswith("_") else name.partition(".")[0]


class Histogram:
    """Durations, counted in fixed buckets.

    >>> histogram = Histogram()
    >>> histogram.observe(0.002); histogram.observe(0.2, count=9)
    >>> histogram.above(0.1), sum(histogram.counts)
    (9, 10)
    """

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Observations in each bucket alone; the last one has no upper bound."""
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times; a negative one, after a clock step, counts as zero."""
        if seconds < 0.0:
            seconds = 0.0
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.sum_s += seconds * count

    def above(self, bound_s: float) -> int:
        """How many were longer than a bound, rounded up to the next bound of the buckets."""
        return sum(self.counts[bisect_left(BOUNDS_S, bound_s) + 1 :])


def added(histograms: Iterable[Histogram]) -> list[int]:
    """The sums of the buckets of several histograms."""
    total = [0] * (len(BOUNDS_S) + 1)
    for each in histograms:
        for index, count in enumerate(each.counts):
            total[index] += count
    return total


def quantile_s(counts: Sequence[int], share: float) -> float:
    """The duration below which `share` of all observations lie, spread evenly within a bucket; 0 without any.

    >>> quantile_s([0, 0, 0, 100] + [0] * 15, 0.5)
    0.00375
    """
    wanted = share * sum(counts)
    if not wanted:
        return 0.0
    before = 0
    for index, count in enumerate(counts[:-1]):
        if count and before + count >= wanted:
            low = BOUNDS_S[index - 1] if index else 0.0
            return low + (BOUNDS_S[index] - low) * (wanted - before) / count
        before += count
    return BOUNDS_S[-1]


class Flow:
    """Events and bytes of one topic of one tenant."""

    __slots__ = (
        "delivered_bytes", "delivered_events", "delivery", "duplicate_events", "publish",
        "published_bytes", "published_events", "replayed_events",
    )  # fmt: skip

    def __init__(self, publish: Histogram, delivery: Histogram) -> None:
        self.published_events = self.published_bytes = 0
        self.delivered_events = self.delivered_bytes = 0
        self.duplicate_events = self.replayed_events = 0
        self.publish = publish
        self.delivery = delivery
        """The histograms of the tenant: all its topics share them."""


class Counters:
    """Everything the broker counts. Plain calls on the loop, one for each batch.

    >>> counters = Counters()
    >>> counters.published("acme", "orders", events=100, size_bytes=12_000, seconds=0.004)
    >>> counters.flows["acme", "orders"].published_events
    100
    """

    def __init__(self) -> None:
        self.labels = Labels()
        self.flows: dict[tuple[str, str], Flow] = {}
        self.publish: dict[str, Histogram] = {}
        """By tenant: from the arrival of a publish until it was durable."""
        self.delivery: dict[str, Histogram] = {}
        """By tenant: from the append of an event until it was handed over."""
        self.settled_events: dict[str, int] = {}
        self.refusals: dict[tuple[str, str, str], int] = {}
        """By kind, limit and tenant."""
        self.refused_s: dict[tuple[str, str, str], float] = {}
        """Monotonic time at which each of these was last counted."""
        self.held_back: dict[str, int] = {}
        self.dead_letters: dict[tuple[str, str], int] = {}
        self.dead_letters_replayed: dict[tuple[str, str], int] = {}
        self.frame_errors: dict[str, int] = {}
        self.connections = 0
        self.connections_opened = 0

    def published(
        self, tenant: str, topic: str, events: int, size_bytes: int, seconds: float
    ) -> None:
        """One publish is durable, `seconds` after it arrived."""
        flow = self.flows.get((tenant, topic)) or self._flow(tenant, topic)
        flow.published_events += events
        flow.published_bytes += size_bytes
        flow.publish.observe(seconds)

    def duplicates(self, tenant: str, topic: str, events: int) -> None:
        """Events of a publish were stored before: deduplication recognised their tokens."""
        flow = self.flows.get((tenant, topic)) or self._flow(tenant, topic)
        flow.duplicate_events += events

    def delivered(
        self,
        tenant: str,
        topic: str,
        events: int,
        size_bytes: int = 0,
        seconds: float | None = None,
        fresh: int | None = None,
    ) -> None:
        """Events were handed to a consumer, `fresh` (all) for the first time, `seconds` after their append."""
        flow = self.flows.get((tenant, topic)) or self._flow(tenant, topic)
        flow.delivered_events += events
        flow.delivered_bytes += size_bytes
        if seconds is not None:
            flow.delivery.observe(seconds, events if fresh is None else fresh)

    def replayed(self, tenant: str, topic: str, events: int) -> None:
        """Stored events were read back."""
        flow = self.flows.get((tenant, topic)) or self._flow(tenant, topic)
        flow.replayed_events += events

    def dead_letter(self, tenant: str, topic: str) -> None:
        """An event became a dead letter."""
        pair = self.labels.pair(tenant, topic)
        self.dead_letters[pair] = self.dead_letters.get(pair, 0) + 1

    def dead_letter_replayed(self, tenant: str, topic: str) -> None:
        """A dead letter was given back to its consumer."""
        pair = self.labels.pair(tenant, topic)
        self.dead_letters_replayed[pair] = self.dead_letters_replayed.get(pair, 0) + 1

    def settled(self, kind: str, events: int) -> None:
        """Consumers settled events: `ack`, `nack`, `reject`, `extend`, or `late` when refused."""
        _add(self.settled_events, self.labels.word(kind), events)

    def refused(self, kind: str, limit: str, tenant: str, times: int = 1) -> None:
        """A publish or replay was refused: the last word of its error's code, and the limit."""
        labels = self.labels
        key = labels.word(kind), labels.word(limit), labels.tenant(tenant)
        self.refusals[key] = self.refusals.get(key, 0) + times
        self.refused_s[key] = time.monotonic()

    def rejected(self, error: PenstockError, tenant: str) -> None:
        """The same, for an error; it counts for `tenant` when the error names no tenant."""
        kind, limit = error.code.rpartition(".")[2], str(error.data.get("limit", "none"))
        self.refused(kind, limit, str(error.data.get("tenant", "")) or tenant)

    def backpressure(self, reason: str) -> None:
        """Deliveries to a client stopped because it does not keep up."""
        _add(self.held_back, self.labels.word(reason), 1)

    def connection(self, change: int) -> None:
        """A client connected (1) or disconnected (-1)."""
        self.connections += change
        if change > 0:
            self.connections_opened += change

    def frame_error(self, code: str) -> None:
        """A client sent bytes that are not a frame, or a frame that was answered with this error."""
        _add(self.frame_errors, self.labels.word(code), 1)

    def published_bytes(self) -> int:
        """Bytes of all publishes so far."""
        return sum(flow.published_bytes for flow in self.flows.values())

    def _flow(self, tenant: str, topic: str) -> Flow:
        pair = self.labels.pair(tenant, topic)
        flow = self.flows.get(pair)
        if flow is None:
            publish = self.publish.setdefault(pair[0], Histogram())
            delivery = self.delivery.setdefault(pair[0], Histogram())
            flow = self.flows[pair] = Flow(publish, delivery)
        return flow


def _add(table: dict[str, int], word: str, change: int) -> None:
    table[word] = table.get(word, 0) + change


def duplicates_in(receipt: Receipt) -> int:
    """How many events of a publish were stored before.

    >>> duplicates_in(Receipt("orders", 0, 7, 3, bytes(16), duplicate=True))
    3
    """
    if receipt.duplicate:
        return receipt.count
    return sum(map(duplicates_in, receipt.parts))
