"""Admission: whether a batch may come in now, by the limits that an operator sets.

Every limit counts events, in batches of any size. A batch is taken whole or not at all. Every
refusal is answered at once. The answer is ADMITTED or says which limit was reached and when to try
again:

    deferred    a queue is full for the moment
    throttled   a rate or a quota is used up; `retry_after_s` says when it no longer is
    dropped     the batch is larger than the limit itself, so that trying again cannot help

`TenantCredit` limits what consumers hold: each of them alone, and those of one tenant together.

docs/reference/admission.md describes each limit and how the shared one is kept fair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.core.lease import Member
from penstock.model.errors import (
    Deferred,
    Dropped,
    InvalidSettings,
    Rejected,
    ReplayLimited,
    Throttled,
)

if TYPE_CHECKING:
    from penstock.core.delivery import QueueGroup

SLACK = 1e-6
"""Tokens forgiven, so that a caller who waits exactly as long as told is never refused by the last
bit of a float: a millionth of one event or byte."""

SWEEP_TENANTS = 10_000
"""Tenants remembered before the idle ones are forgotten; each takes about 1 KB."""

INGRESS_RETRY_S = 0.005
"""When to try again after too many events waited for the disk: a commit takes about this long."""

QUEUE_RETRY_S = 0.1
"""When to try again after a queue was full: consumers empty it in batches, about this often."""

STORAGE_RETRY_S = 60.0
"""When to try again after the storage quota was full: retention frees space about this often."""

RATE_RETRY_S = 0.25
"""When to try again after a rate was used up, at the least: fewer and larger batches come then, and
each refusal in between would cost other tenants time."""

AHEAD_S = 0.1
"""How much of its rate a tenant may use in advance before other tenants go first."""

INGRESS_CEILING = 2
"""How far fair shares may carry the total above `max_global_ingress`: to twice the limit."""

MAX_HELD_EVENTS = 1_000_000
"""Of one consumer without a limit: its leases must still fit the memory."""

Kind: TypeAlias = Literal["admitted", "deferred", "throttled", "dropped"]
_ERRORS: dict[str, type[Rejected]] = {
    "deferred": Deferred,
    "throttled": Throttled,
    "dropped": Dropped,
}
_RATES = ("events_per_s", "bytes_per_s")


# -- limits ----------------------------------------------------------------------------------------


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one tenant; None leaves a measure to the limits of the bus.

    >>> TenantLimits(events_per_s=100).burst_s
    1.0
    """

    max_inflight: int | None = None
    max_queued: int | None = None
    max_ingress: int | None = None
    events_per_s: float | None = None
    bytes_per_s: float | None = None
    storage_bytes: int | None = None
    replays_per_minute: float | None = None
    burst_s: float = 1.0
    """A rate may be used up to this many seconds in advance, and no batch may exceed that."""


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a bus; None switches one off.

    >>> AdmissionLimits().max_global_ingress
    8192
    """

    max_inflight_per_consumer: int | None = 1024
    max_per_topic_queue: int | None = 256
    max_queued_direct: int | None = 4096
    max_global_ingress: int | None = 8192
    tenants: dict[str, TenantLimits] = {}
    default: TenantLimits = TenantLimits()
    """For tenants that `tenants` does not name."""


def check_limits(limits: AdmissionLimits) -> None:
    """Raise InvalidSettings for a limit that is negative or no number."""
    for owner, group in (("", limits), ("default.", limits.default), *limits.tenants.items()):
        for name in group.__struct_fields__:
            value = getattr(group, name)
            if isinstance(value, int | float) and not 0 <= value < inf:
                raise InvalidSettings(
                    f"{owner} {name} is {value}; the limits in force were kept; use 0 or more, or none",
                    name=name,
                    value=value,
                )


def setting_of(limit: str, tenant: str) -> str:
    """The name of the setting of a limit: in the tenant's table, or in that of the bus.

    >>> setting_of("storage_bytes", "acme"), setting_of("max_global_ingress", "acme")
    ('admission.tenants.acme.storage_bytes', 'admission.max_global_ingress')
    """
    own = limit in TenantLimits.__struct_fields__
    return f"admission.tenants.{tenant}.{limit}" if own else f"admission.{limit}"


# -- questions and answers -------------------------------------------------------------------------


class Waiting(NamedTuple):
    """Events that wait for direct consumers."""

    of_topic: int
    """Of one topic, for the consumer that is furthest behind."""
    of_consumer: int
    """Of all topics, for that consumer."""
    of_tenant: int = 0
    """Of all topics of a tenant that has a `max_queued`, for all consumers together."""


class Incoming(NamedTuple):
    """One batch of a transaction."""

    tenant: str
    topic: str
    events: int
    size_bytes: int
    waiting: Waiting | None = None
    stored_bytes: int | None = None


class Refusal(NamedTuple):
    """Which limit a batch reached, and when or how it would fit."""

    kind: Kind
    limit: str
    value: float
    """The value of the limit's setting."""
    retry_after_s: float = 0.0
    most: int | None = None
    """The most that the limit ever admits at once, where trying again may not help."""
    most_events: int | None = None
    most_bytes: int | None = None
    """The most that the tenant's rates admit at once: a larger batch never fits."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one batch or replay; compare it with ADMITTED by identity."""

    kind: Kind
    tenant: str = ""
    topic: str = ""
    refusal: Refusal | None = None

    @property
    def limit(self) -> str:
        """The limit that was reached."""
        return "" if self.refusal is None else self.refusal.limit

    @property
    def retry_after_s(self) -> float:
        """When to try again; 0 when that cannot help."""
        return 0.0 if self.refusal is None else self.refusal.retry_after_s

    def error(self) -> Rejected:
        """The error to raise for a refusal: which limit, its setting, and what to do.

        >>> refusal = Refusal("deferred", "max_ingress", 10, 0.005)
        >>> error = Decision(kind="deferred", tenant="acme", refusal=refusal).error()
        >>> error.code, error.data["setting"]
        ('rejected.deferred', 'admission.tenants.acme.max_ingress')
        """
        assert self.refusal is not None, "an admitted batch has no error"
        kind, limit, value, retry_after_s, most, *_ = self.refusal
        replay = limit == "replays_per_minute"
        what = "a replay" if replay else f"a batch for {self.topic!r}"
        setting = setting_of(limit, self.tenant)
        again = "replay" if replay else "publish"
        if kind == "dropped":
            unit = "bytes" if limit.startswith(("bytes", "storage")) else "events"
            at_once = f"{again} at most {most} {unit} at once" if most else f"do not {again}"
            why = f"it can never fit into {limit}"
            advice = f"{at_once}, or raise the setting"
        else:
            why = f"{limit} is reached"
            advice = f"{again} again after {retry_after_s:.3g} s, or raise the setting"
        more = {
            name: number
            for name in ("most", "most_events", "most_bytes")
            if (number := getattr(self.refusal, name)) is not None
        }
        return (ReplayLimited if replay else _ERRORS[kind])(
            f"{what} of tenant {self.tenant!r} was {kind}: {why} ({setting} = {value:.15g}); nothing "
            f"was stored; {advice}",
            limit=limit,
            setting=setting,
            value=value,
            tenant=self.tenant,
            topic=self.topic,
            retry_after_s=retry_after_s,
            **more,
        )


ADMITTED = Decision(kind="admitted")


# -- batches and replays ---------------------------------------------------------------------------


class Admission:
    """Decides what comes in, from the limits in force and the gauges that the engine updates.

    `now_s` is monotonic time; while it runs backwards, no tokens flow in.

    >>> admission = Admission(AdmissionLimits(max_global_ingress=2))
    >>> admission.admit("acme", "orders", 2, 200, now_s=0.0) is ADMITTED
    True
    >>> admission.admit("acme", "orders", 1, 100, now_s=0.0).limit
    'max_global_ingress'
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        check_limits(limits)
        self.limits = limits
        self.on_reload: Callable[[AdmissionLimits], None] | None = None
        """Called with new limits; some are enforced elsewhere: `max_inflight`."""
        self._tenants: dict[str, _Tenant] = {}
        self._sweep_at = SWEEP_TENANTS
        self._ingress = 0
        self._active = 0

    def reload(self, limits: AdmissionLimits) -> None:
        """Put new limits in force at once; events and bytes in use stay counted."""
        check_limits(limits)
        self.limits = limits
        for name, tenant in self._tenants.items():
            tenant.set_limits(limits.tenants.get(name, limits.default))
        if self.on_reload is not None:
            self.on_reload(limits)

    def max_queued(self, tenant: str) -> int | None:
        """The tenant's own limit on events that wait for direct consumers, if it has one."""
        return self.limits.tenants.get(tenant, self.limits.default).max_queued

    def admit(
        self,
        tenant: str,
        topic: str,
        events: int,
        size_bytes: int,
        now_s: float,
        waiting: Waiting | None = None,
        stored_bytes: int | None = None,
    ) -> Decision:
        """Take a batch in, counting it as ingress until `ingress_done`, or say why not.

        `size_bytes` is the size of the payloads, which rates count; `stored_bytes` the size of the
        events in the log, which the storage quota counts, unless that is the same. `waiting` says how
        many events wait for direct consumers, when some read the topic. Events that only wait in the
        log have no queue limit.
        """
        if stored_bytes is None:
            stored_bytes = size_bytes
        state = self._tenants.get(tenant)
        if state is None:
            state = self._remember(tenant, now_s)
        refusal = self._full(state, events)
        if refusal is None and waiting is not None:
            refusal = self._behind(state, events, waiting)
        if refusal is None and state.metered:
            refusal = _metered(state, events, size_bytes, stored_bytes, now_s)
        if refusal is not None:
            return _refused(tenant, topic, refusal)
        self._take(state, events, stored_bytes)
        return ADMITTED

    def admit_together(self, batches: Sequence[Incoming], now_s: float) -> Decision:
        """Take the batches of a transaction in, all of them or none; each has its `ingress_done`.

        A tenant's batches are judged as one. A transaction cannot be sent in smaller pieces, so
        `max_global_ingress` lets it in, however large, as long as there is room for one event.
        """
        totals: dict[str, tuple[int, int, int]] = {}
        for tenant, topic, events, size_bytes, waiting, stored_bytes in batches:
            state = self._tenants.get(tenant) or self._remember(tenant, now_s)
            kept = size_bytes if stored_bytes is None else stored_bytes
            before = totals.get(tenant, (0, 0, 0))
            total = before[0] + events, before[1] + size_bytes, before[2] + kept
            totals[tenant] = total
            refusal = None if waiting is None else self._behind(state, events, waiting)
            refusal = refusal or self._full(state, total[0], whole=True)
            refusal = refusal or _metered(state, *total, now_s, take=False)
            if refusal is not None:
                return _refused(tenant, topic, refusal)
        for tenant, total in totals.items():
            _metered(self._tenant(tenant), *total, now_s)
            self._take(self._tenant(tenant), total[0], total[2])
        return ADMITTED

    def _take(self, state: _Tenant, events: int, stored_bytes: int) -> None:
        if not state.ingress and events:
            self._active += 1
        state.ingress += events
        state.ingress_bytes += stored_bytes
        self._ingress += events

    def peek(self, tenant: str, topic: str, events: int, now_s: float) -> Decision:
        """Check events whose size is not known yet against the tenant's own rates; takes nothing."""
        state = self._tenants.get(tenant)
        if state is None or not state.metered:
            return ADMITTED
        refusal = _metered(state, events, 0, 0, now_s, take=False)
        return ADMITTED if refusal is None else _refused(tenant, topic, refusal)

    def ahead(self, tenant: str, now_s: float) -> bool:
        """Whether a tenant has lately used more than its rates."""
        state = self._tenants.get(tenant)
        if state is None or not state.metered:
            return False
        return any(
            bucket is not None and bucket.ahead_s(now_s) > AHEAD_S
            for bucket in (state.by_events, state.by_bytes)
        )

    def admit_replay(self, tenant: str, now_s: float) -> Decision:
        """Let a replay start, or say why not."""
        state = self._tenants.get(tenant) or self._remember(tenant, now_s)
        bucket = state.by_replays
        if bucket is None:
            return ADMITTED
        name, allowed = "replays_per_minute", state.limits.replays_per_minute or 0.0
        wait_s = bucket.wait_s(1, now_s)
        if wait_s is None:
            return _refused(tenant, "", Refusal("dropped", name, allowed))
        if wait_s > 0:
            return _refused(tenant, "", Refusal("throttled", name, allowed, wait_s))
        bucket.take(1)
        return ADMITTED

    def ingress_done(self, tenant: str, events: int, stored_bytes: int) -> None:
        """An admitted batch is on disk, or failed for good."""
        state = self._tenant(tenant)
        state.ingress -= events
        state.ingress_bytes -= stored_bytes
        self._ingress -= events
        assert state.ingress >= 0 <= state.ingress_bytes, "more ingress ended than was admitted"
        if events and not state.ingress:
            self._active -= 1

    def stored(self, tenant: str, change_bytes: int) -> None:
        """The tenant's stored bytes grew by a commit, or shrank by retention."""
        self._tenant(tenant).stored_bytes += change_bytes

    def use(self) -> dict[str, tuple[int, int]]:
        """Stored bytes and events on their way to the disk, by tenant."""
        return {name: (each.stored_bytes, each.ingress) for name, each in self._tenants.items()}

    def _full(self, state: _Tenant, events: int, *, whole: bool = False) -> Refusal | None:
        limits, own = self.limits, state.limits
        cap = own.max_ingress
        if cap is not None and state.ingress + events > cap:
            return _over(events, cap, "max_ingress", INGRESS_RETRY_S)
        cap = limits.max_global_ingress
        if whole and cap is not None and self._ingress < cap:
            return None
        if cap is not None and self._ingress + events > cap:
            share = cap // (self._active + (not state.ingress))
            within = self._ingress + events <= INGRESS_CEILING * cap
            # A batch larger than the limit goes alone: it could never join others.
            if self._ingress and not (within and state.ingress + events <= share):
                return _over(events, cap, "max_global_ingress", INGRESS_RETRY_S)
        return None

    def _behind(self, state: _Tenant, events: int, waiting: Waiting) -> Refusal | None:
        limits, own = self.limits, state.limits.max_queued
        caps: tuple[tuple[str, int | None, int], ...] = (
            ("max_per_topic_queue", limits.max_per_topic_queue, waiting.of_topic),
            ("max_queued_direct", limits.max_queued_direct, waiting.of_consumer),
        )
        if own is not None:
            caps = (("max_queued", own, waiting.of_tenant),)
        for name, cap, queued in caps:
            # A batch larger than the queue goes in when the queue is empty, or it never could.
            if cap is not None and queued and queued + events > cap:
                return Refusal("deferred", name, cap, QUEUE_RETRY_S)
        return None

    def _tenant(self, name: str) -> _Tenant:
        state = self._tenants.get(name)
        if state is None:
            state = _Tenant(self.limits.tenants.get(name, self.limits.default))
            self._tenants[name] = state
        return state

    def _remember(self, name: str, now_s: float) -> _Tenant:
        if len(self._tenants) >= self._sweep_at:
            self._tenants = {
                other: state for other, state in self._tenants.items() if not state.idle(now_s)
            }
            # Doubling keeps the cost of sweeping small when most tenants really are busy.
            self._sweep_at = max(SWEEP_TENANTS, 2 * len(self._tenants))
        return self._tenant(name)


class _Tenant:
    """The current use of one tenant."""

    __slots__ = (
        "by_bytes",
        "by_events",
        "by_replays",
        "ingress",
        "ingress_bytes",
        "limits",
        "metered",
        "stored_bytes",
    )

    def __init__(self, limits: TenantLimits) -> None:
        self.ingress = self.ingress_bytes = self.stored_bytes = 0
        self.by_events: Bucket | None = None
        self.by_bytes: Bucket | None = None
        self.by_replays: Bucket | None = None
        self.set_limits(limits)

    def set_limits(self, limits: TenantLimits) -> None:
        """Put new limits in force; a bucket keeps its tokens as far as they fit."""
        self.limits = limits
        self.by_events = Bucket.of(
            self.by_events, limits.events_per_s, (limits.events_per_s or 0) * limits.burst_s
        )
        self.by_bytes = Bucket.of(
            self.by_bytes, limits.bytes_per_s, (limits.bytes_per_s or 0) * limits.burst_s
        )
        replays = limits.replays_per_minute
        self.by_replays = Bucket.of(
            self.by_replays, None if replays is None else replays / 60, replays or 0
        )
        self.metered = not (
            self.by_events is None and self.by_bytes is None and limits.storage_bytes is None
        )

    def idle(self, now_s: float) -> bool:
        """Whether forgetting this tenant would change no later decision."""
        if self.ingress or self.stored_bytes:
            return False
        buckets = (self.by_events, self.by_bytes, self.by_replays)
        return all(bucket is None or bucket.full(now_s) for bucket in buckets)


def _refused(tenant: str, topic: str, refusal: Refusal) -> Decision:
    return Decision(kind=refusal.kind, tenant=tenant, topic=topic, refusal=refusal)


def _metered(
    state: _Tenant, events: int, size_bytes: int, stored: int, now_s: float, *, take: bool = True
) -> Refusal | None:
    """Check rates and storage, and take from the buckets only when all of them agree."""
    quota = state.limits.storage_bytes
    if quota is not None and state.stored_bytes + state.ingress_bytes + stored > quota:
        if stored > quota:
            return Refusal("dropped", "storage_bytes", quota, most=quota)
        return Refusal("throttled", "storage_bytes", quota, STORAGE_RETRY_S)
    worst: Refusal | None = None
    buckets = (state.by_events, state.by_bytes)
    for bucket, amount, name in zip(buckets, (events, size_bytes), _RATES, strict=True):
        if bucket is None:
            continue
        wait_s, value = bucket.wait_s(amount, now_s), getattr(state.limits, name)
        if wait_s is None:
            return Refusal("dropped", name, value, most=int(bucket.capacity))
        if not wait_s:
            continue
        wait_s = max(wait_s, min(RATE_RETRY_S, bucket.ahead_s(now_s)))
        if worst is None or wait_s > worst.retry_after_s:
            most = [None if each is None else int(each.capacity) for each in buckets]
            worst = Refusal("throttled", name, value, wait_s, None, *most)
    if worst is None and take:
        if state.by_events is not None:
            state.by_events.take(events)
        if state.by_bytes is not None:
            state.by_bytes.take(size_bytes)
    return worst


def _over(events: int, cap: int, name: str, retry_after_s: float) -> Refusal:
    if events > cap:
        return Refusal("dropped", name, cap, most=cap)
    return Refusal("deferred", name, cap, retry_after_s)


class Bucket:
    """Tokens flow in at a rate, up to a capacity; each admitted event or byte takes one out.

    >>> bucket = Bucket(rate_per_s=10, capacity=5)
    >>> bucket.wait_s(5, now_s=0.0); bucket.take(5)
    0.0
    >>> bucket.wait_s(1, now_s=0.0), bucket.wait_s(6, now_s=0.0)
    (0.1, None)
    """

    __slots__ = ("_at_s", "_tokens", "capacity", "rate_per_s")

    def __init__(self, rate_per_s: float, capacity: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._tokens = capacity
        self._at_s = -inf

    @classmethod
    def of(cls, before: Bucket | None, rate_per_s: float | None, burst: float) -> Bucket | None:
        """The bucket for a new setting: None without a rate, and never fuller than the one before."""
        if rate_per_s is None:
            return None
        # A rate below one event a burst still lets single events through, one at a time.
        made = cls(rate_per_s, max(burst, 1.0) if rate_per_s else 0.0)
        if before is not None:
            made._tokens = min(made.capacity, before._tokens)
            made._at_s = before._at_s
        return made

    def wait_s(self, amount: float, now_s: float) -> float | None:
        """How long until `amount` can be taken: 0 at once, None never."""
        if amount > self.capacity:
            return None
        self._earn(now_s)
        missing = amount - self._tokens
        if missing <= SLACK:
            return 0.0
        # After a step back, nothing is earned until the clock is where it had been.
        return missing / self.rate_per_s + (self._at_s - now_s)

    def _earn(self, now_s: float) -> None:
        if now_s > self._at_s:
            earned = (now_s - self._at_s) * self.rate_per_s
            self._tokens = min(self.capacity, self._tokens + earned)
            self._at_s = now_s

    def ahead_s(self, now_s: float) -> float:
        """How long the bucket takes to fill up if nothing is taken."""
        self._earn(now_s)
        return (self.capacity - self._tokens) / self.rate_per_s if self.rate_per_s else 0.0

    def take(self, amount: float) -> None:
        """Take out tokens that `wait_s` has just allowed."""
        self._tokens -= amount

    def full(self, now_s: float) -> bool:
        """Whether a new bucket would hold the same."""
        return self.wait_s(self.capacity, now_s) == 0.0


# -- events held by consumers ----------------------------------------------------------------------


class TenantCredit:
    """Tells every consumer how many events it may hold, by the limits in force.

    >>> limits = AdmissionLimits(tenants={"acme": TenantLimits(max_inflight=5)})
    >>> credit, worker, guest = TenantCredit(limits, print), Member("w", 0), Member("g", 0)
    >>> credit.joined(worker, "acme", 2000); credit.joined(guest, "globex", 2000)
    >>> worker.max_inflight, worker.window.limit, guest.max_inflight, guest.window
    (2000, 5, 1024, None)
    """

    def __init__(self, limits: AdmissionLimits, wake: Callable[[QueueGroup], None]) -> None:
        self.limits = limits
        self.by_tenant: dict[str, CreditWindow] = {}
        """The windows of tenants that have consumers and a `max_inflight`."""
        self._wake = wake
        self._wanted: dict[Member, tuple[str, int]] = {}

    def joined(self, member: Member, tenant: str, wanted: int) -> None:
        """A consumer of a tenant asks to hold up to `wanted` events."""
        self._wanted[member] = tenant, wanted
        own = self.limits.tenants.get(tenant, self.limits.default).max_inflight
        general = self.limits.max_inflight_per_consumer
        most = MAX_HELD_EVENTS if own is not None or general is None else general
        member.max_inflight = min(wanted, most)
        if own is None:
            return
        window = self.by_tenant.get(tenant)
        if window is None:
            window = self.by_tenant[tenant] = CreditWindow(own, self._wake)
        window.members += 1
        window.held += member.inflight
        member.window = window

    def left(self, member: Member) -> None:
        """A consumer is gone, and the events it held returned."""
        tenant, _ = self._wanted.pop(member, ("", 0))
        window, member.window = member.window, None
        if window is None:
            return
        window.members -= 1
        window.returned(member.inflight)
        if not window.members:
            del self.by_tenant[tenant]

    def reload(self, limits: AdmissionLimits) -> None:
        """Put new limits in force for all consumers; events they hold stay counted."""
        self.limits = limits
        self.by_tenant = {}
        former, self._wanted = self._wanted, {}
        for member, (tenant, wanted) in former.items():
            member.window = None
            self.joined(member, tenant, wanted)


class CreditWindow:
    """How many events the consumers of one tenant hold together, and the limit on that.

    Groups look at it when they make leases. A group that finds no room is called when the tenant's
    consumers settled something, in any group.
    """

    __slots__ = ("_waiting", "_wake", "held", "limit", "members")

    def __init__(self, limit: int, wake: Callable[[QueueGroup], None]) -> None:
        self.limit = limit
        self.held = self.members = 0
        self._waiting: dict[QueueGroup, None] = {}
        self._wake = wake

    def room(self, group: QueueGroup) -> int:
        """How many more events may be leased; a group that finds no room is called when there is some."""
        free = self.limit - self.held
        if free > 0:
            return free
        self._waiting[group] = None
        return 0

    def returned(self, count: int) -> None:
        """Consumers settled or lost that many events."""
        self.held -= count
        if self._waiting and self.held < self.limit:
            waiting, self._waiting = self._waiting, {}
            for group in waiting:  # the one that waits longest comes first
                self._wake(group)
