"""The load of a broker for an autoscaler: one document, and in it one number.

`History`, `Burn` and `total_pressure` are pure: times and totals go in, rates come out. `PressureMonitor`
feeds them from a running engine and answers `GET /pressure`. docs/guide/observability.md explains
the document field by field.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.model.errors import InvalidSettings, MissingExtra
from penstock.server.metrics.counters import Counters, added, quantile_s
from penstock.server.metrics.engine_stats import GroupStats, group_stats, pending_bytes, saturation

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

WINDOWS_S = {"5m": 300.0, "1h": 3_600.0}
"""The windows of a fast-burn alert: the long one shows that it matters, the short one that it goes on."""

PAGE_BURN = 14.4
"""Burn at which a page is due: 2 % of a 30-day budget within the hour. Pressure is 1 there."""

STEP_S = 5.0
"""Time between remembered totals: a window is longer than its name by less than this."""

LOOP_SPAN_S = 15.0
"""The loop's processor time is averaged over this: a shorter span is noise to an autoscaler."""

MAX_GROUPS_SHOWN = 1_000
"""Groups in one document, those with the most pressure; the document stays below 300 KB."""

BLAMED = frozenset({"deferred", "disk-full", "disk-refused", "writer-failed", "corrupted"})
"""Refusals caused by the broker: no room, or a failing disk. The caller causes all others: a quota that is
used up, a batch that can never fit, data that breaks a rule."""


class Objectives(msgspec.Struct, frozen=True):
    """The service level objectives of the broker."""

    publish_s: float = 0.1
    """A publish is durable within this, rounded up to the next bound of the latency buckets..."""
    publish_share: float = 0.99
    """... in this share of all cases."""
    accepted_share: float = 0.999
    """The share of publishes that the broker does not refuse (`BLAMED`)."""
    waiting_s: float = 30.0
    """An event is handed to a consumer within this; a group at twice this age has pressure 2."""


class History:
    """Growing totals, remembered a step apart, which give the amount added within a window.

    >>> history = History(span_s=60.0, step_s=10.0)
    >>> for at in range(0, 120, 10): history.note(float(at), [at])
    >>> history.added(110.0, 60.0)
    [60]
    """

    def __init__(self, span_s: float, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        # One more than fits the span, so that the oldest lies at or before its beginning.
        self._notes: deque[tuple[float, list[int]]] = deque(maxlen=int(span_s / step_s) + 2)
        self._newest: tuple[float, list[int]] | None = None

    def note(self, now_s: float, totals: Sequence[int]) -> None:
        """Remember the totals. A total that fell begins a new count, and clears the past."""
        newest = self._newest
        if newest is not None:
            if now_s < newest[0]:
                return  # time does not run back
            if any(now < then for now, then in zip(totals, newest[1], strict=True)):
                self._notes.clear()
        self._newest = (now_s, list(totals))
        if not self._notes or now_s - self._notes[-1][0] >= self._step_s:
            self._notes.append(self._newest)

    def added(self, now_s: float, window_s: float) -> list[int]:
        """The amount added in the last `window_s`, or since the first note when that is shorter."""
        if self._newest is None:
            return []
        since = self._notes[0][1]
        for at_s, totals in self._notes:
            if at_s > now_s - window_s:
                break
            since = totals
        return [now - then for now, then in zip(self._newest[1], since, strict=True)]


class Burn:
    """How fast the error budget of one objective is used: share of failures divided by the allowed share.

    >>> burn = Burn(share=0.99)
    >>> burn.note(0.0, total=0, bad=0); burn.note(10.0, total=100, bad=2)
    >>> round(burn.rate(10.0, 300.0), 6)
    2.0
    """

    def __init__(self, share: float) -> None:
        if not 0 <= share < 1:
            raise InvalidSettings(
                f"an objective of {share} leaves no budget to burn; use 0 or more and less than 1",
                value=share,
            )
        self._allowed = 1 - share
        self._history = History(max(WINDOWS_S.values()))

    def note(self, now_s: float, total: int, bad: int) -> None:
        """Remember that `bad` of `total` so far have failed."""
        self._history.note(now_s, (total, bad))

    def rate(self, now_s: float, window_s: float) -> float:
        """The burn rate over a window; 0 when nothing happened in it."""
        total, bad = self._history.added(now_s, window_s) or (0, 0)
        return bad / total / self._allowed if total else 0.0

    def rates(self, now_s: float) -> dict[str, float]:
        """The burn rate over every window."""
        return {name: self.rate(now_s, window_s) for name, window_s in WINDOWS_S.items()}


def alarm_of(rates: Mapping[str, float]) -> float:
    """The slowest window's burn as a share of `PAGE_BURN`; at 1 a page is due.

    >>> alarm_of({"5m": 28.8, "1h": 7.2})
    0.5
    """
    return min(rates.values()) / PAGE_BURN


class GroupPressure(GroupStats):
    """A group, and how much it needs more consumers."""

    pressure: float = 0.0
    """`waiting_s` divided by its objective."""


class Pressure(msgspec.Struct):
    """The document of `GET /pressure`."""

    pressure: float
    saturation: dict[str, float]
    burn: dict[str, dict[str, float]]
    """By objective and window."""
    publish_p99_s: float
    delivery_p99_s: float
    lag: int
    oldest_s: float
    backlog_bytes: int
    pending_bytes: int
    connections: int
    groups: dict[str, GroupPressure]
    groups_left_out: int = 0


def total_pressure(
    full: Mapping[str, float], burn: Mapping[str, Mapping[str, float]], groups: float
) -> float:
    """The one number: the highest of all resources, the slowest group and the alarms.

    `inflight` is left out: in a queue that works, consumers hold as many events as they may.
    """
    resources = (ratio for name, ratio in full.items() if name != "inflight")
    return max(*resources, *map(alarm_of, burn.values()), groups)


class PressureMonitor:
    """Watches a running engine, and makes the document of its pressure."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        counters: Counters,
        objectives: Objectives | None = None,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.objectives = objectives or Objectives()
        self._engine = engine
        self._counters = counters
        self._cpu_s = cpu_s
        self._latency = Burn(self.objectives.publish_share)
        self._errors = Burn(self.objectives.accepted_share)
        self._publish = History(WINDOWS_S["5m"])
        self._delivery = History(WINDOWS_S["5m"])
        self._loop: deque[tuple[float, float]] = deque(maxlen=int(LOOP_SPAN_S / STEP_S) + 1)
        self.tick()

    async def run(self) -> None:
        """Remember totals every few seconds while the broker runs, because the windows need them."""
        while True:
            await asyncio.sleep(STEP_S)
            self.tick()

    def tick(self) -> None:
        """Remember the current totals."""
        now_s, counters = self._engine.runtime.now(), self._counters
        publishes = counters.publish.values()
        buckets = added(publishes)
        total = sum(buckets)
        slow = sum(each.above(self.objectives.publish_s) for each in publishes)
        refused = sum(count for (kind, _, _), count in counters.refusals.items() if kind in BLAMED)
        self._latency.note(now_s, total, slow)
        self._errors.note(now_s, total + refused, refused)
        self._publish.note(now_s, buckets)
        self._delivery.note(now_s, added(counters.delivery.values()))
        if not self._loop or now_s - self._loop[-1][0] >= STEP_S:
            self._loop.append((now_s, self._cpu_s()))

    def _loop_share(self, now_s: float) -> float:
        """The share of one processor that the loop's thread uses; a thread uses at most one."""
        since_s, used_s = self._loop[0]
        passed_s = now_s - since_s
        return 0.0 if passed_s < STEP_S else (self._cpu_s() - used_s) / passed_s

    def read(self, known: Mapping[str, GroupStats] | None = None) -> Pressure:
        """The document, as of now; call it on the loop. With `known`, groups are not read again."""
        self.tick()
        engine = self._engine
        now_s = engine.runtime.now()
        groups = self._groups(group_stats(engine) if known is None else known)
        full = saturation(engine)
        full["connections"] = self._counters.connections / engine.settings.server.max_connections
        full["loop"] = self._loop_share(now_s)
        full["inflight"] = max(
            (each.held / each.credit for each in groups.values() if each.credit), default=0.0
        )
        burn = {"latency": self._latency.rates(now_s), "errors": self._errors.rates(now_s)}
        worst = max((each.pressure for each in groups.values()), default=0.0)
        shown = sorted(groups, key=lambda name: (-groups[name].pressure, name))[:MAX_GROUPS_SHOWN]
        return Pressure(
            pressure=total_pressure(full, burn, worst),
            saturation=full,
            burn=burn,
            publish_p99_s=quantile_s(self._publish.added(now_s, WINDOWS_S["5m"]), 0.99),
            delivery_p99_s=quantile_s(self._delivery.added(now_s, WINDOWS_S["5m"]), 0.99),
            lag=sum(each.lag for each in groups.values()),
            oldest_s=max((each.oldest_s for each in groups.values()), default=0.0),
            backlog_bytes=engine.sealing_backlog.backlog_bytes,
            pending_bytes=pending_bytes(engine),
            connections=self._counters.connections,
            groups={name: groups[name] for name in shown},
            groups_left_out=len(groups) - len(shown),
        )

    def _groups(self, known: Mapping[str, GroupStats]) -> dict[str, GroupPressure]:
        """The groups that an operator can scale, without the listeners that end with their client."""
        allowed_s = self.objectives.waiting_s
        return {
            name: GroupPressure(**msgspec.structs.asdict(each), pressure=each.waiting_s / allowed_s)
            for name, each in known.items()
            if not self._engine.state.groups[name].spec.ephemeral
        }


def pressure_routes(read: Callable[[], Pressure]) -> list[Route]:
    """`GET /pressure` for a Starlette application; `read` is `PressureMonitor.read`."""
    try:
        from starlette.responses import Response as Answer
        from starlette.routing import Route as Way
    except ImportError:
        raise MissingExtra(
            "the HTTP side of the broker needs Starlette: pip install 'penstock[server]'"
        ) from None

    async def answer(_: Request) -> Response:
        """How much pressure there is, for autoscalers."""
        return Answer(msgspec.json.encode(read()), media_type="application/json")

    return [Way("/pressure", answer, methods=["GET"])]
