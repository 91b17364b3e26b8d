"""Respite: a client whose rate is used up asks again when there is something to be had, not before.

A bucket only fills with time, so whoever asks for as much as was refused gets the same answer until
`retry_after_s` has passed. Given here, it costs the broker nothing, and other tenants wait for
nobody's refusals. A smaller batch may fit and is sent, and so is one that never fits: waiting does
not help it, so it must not be told to wait. Who was refused lately is at its limit, and
gains nothing by haste.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.errors import Throttled

RATES = ("events_per_s", "bytes_per_s")
MOST_TENANTS = 1_000
# A tenant is at its limit for so long after a refusal is over: at half as much again as its rate it has
# had the next one by then.
LATELY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Refusal:
    until_s: float
    events: int
    size_bytes: int
    error: Throttled


class Respite:
    """The last refusal of each tenant that a client publishes for.

    >>> respite = Respite()
    >>> refusal = Throttled("too fast", limit="events_per_s", retry_after_s=2.0)
    >>> respite.refused("acme", 100, 5_000, refusal, now_s=10.0)
    >>> respite.answer("acme", 100, 5_000, now_s=11.5).retry_after_s
    0.5
    >>> respite.answer("acme", 1, 50, now_s=11.5), respite.answer("acme", 100, 5_000, now_s=12.0)
    (None, None)
    >>> respite.withheld()
    {'events_per_s acme': 1}
    >>> respite.lately("acme", now_s=12.4), respite.lately("acme", now_s=12.5), bool(respite)
    (True, False, False)
    """

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}
        self._withheld: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to be asked: most clients are never refused."""
        return bool(self._refusals)

    def refused(
        self, tenant: str, events: int, size_bytes: int, error: Throttled, now_s: float
    ) -> None:
        """A broker refused a batch; remember it if only time can change that."""
        if error.data.get("limit") not in RATES:
            return
        if len(self._refusals) >= MOST_TENANTS:
            self._refusals.clear()
        until_s = now_s + error.retry_after_s
        self._refusals[tenant] = _Refusal(until_s, events, size_bytes, error)

    def answer(self, tenant: str, events: int, size_bytes: int, now_s: float) -> Throttled | None:
        """What the broker would say to a batch, if that is known."""
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
        """Whether a tenant is at its limit."""
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
