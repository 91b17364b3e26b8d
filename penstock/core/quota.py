"""Quotas: the limits an operator sets, and the token bucket that measures a rate against them."""

from __future__ import annotations

from math import inf

import msgspec

from penstock.model.errors import InvalidSettings

SLACK = 1e-6
"""Tokens forgiven, so that a caller who waits exactly as long as told is never refused by the last
bit of a float: a millionth of one event or byte."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant may use; None leaves that measure to the limits of everyone.

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


class Bucket:
    """Tokens that flow in at a rate, up to a capacity, and are taken out by what is let through.

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
        """The bucket for a setting: none without a rate, and never fuller than it was before."""
        if rate_per_s is None:
            return None
        # A rate below one event a burst still lets single events through, one at a time.
        made = cls(rate_per_s, max(burst, 1.0) if rate_per_s else 0.0)
        if before is not None:
            made._tokens = min(made.capacity, before._tokens)
            made._at_s = before._at_s
        return made

    def wait_s(self, amount: float, now_s: float) -> float | None:
        """How long until `amount` could be taken: 0 at once, None never."""
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
        """For how long nothing would have to be taken until the bucket is full."""
        self._earn(now_s)
        return (self.capacity - self._tokens) / self.rate_per_s if self.rate_per_s else 0.0

    def take(self, amount: float) -> None:
        """Take out what `wait_s` just allowed."""
        self._tokens -= amount

    def full(self, now_s: float) -> bool:
        """Whether a new bucket would hold the same."""
        return self.wait_s(self.capacity, now_s) == 0.0
