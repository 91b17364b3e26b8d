"""Sample evidence: reports of discovery jobs, scanners and vulnerability checks of several tenants.

Among the good events are duplicates, late ones and bad ones, and it is known exactly how many of
each were made. The same seed gives the same events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from penstock.pipelines.builtin.risk_rules import KINDS

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

TENANTS = {"acme": 0.6, "globex": 0.3, "initech": 0.1}
"""Each tenant and its share of the events."""
TOPICS = {
    "job": "evidence.jobs.v1",
    "fingerprint": "evidence.fingerprints.v1",
    "vulnerability": "evidence.vulnerabilities.v1",
}
LATE_BY_US = 2 * 3_600 * 1_000_000  # far beyond what the pipeline allows
REMEMBERED = 256  # good events of a topic that may be sent again
FORGET_US = 60 * 1_000_000  # none is sent again after so long: it would be late, not a duplicate
TURNS_PER_S = 10

_SERVICES = ("https", "ssh", "postgresql", "mysql", "redis", "telnet", "ftp", "vnc")
_PORTS = (443, 22, 5432, 3306, 6379, 23, 21, 5901)
_PRODUCTS = ("openssl", "nginx", "openssh")
_VERSIONS = ("1.1.1", "3.0.2", "3.0.12", "3.1", "9.6", "1.25.3")
_STATES = ("finished", "finished", "finished", "failed", "timed-out")
_BAD = (
    b"<html>502 Bad Gateway</html>",
    b'{"evidence_id": "cut-off", "kind": "finger',
    b'{"evidence_id": "wrong-type", "kind": "fingerprint", "port": "eighty"}',
    b'{"kind": "job", "asset": "nobody", "state": "finished"}',
    b'{"evidence_id": "odd", "kind": "rumour", "asset": "nobody"}',
)


class Mix(msgspec.Struct, frozen=True):
    """Which part of the events is not simply good."""

    duplicates: float = 0.03
    late: float = 0.01
    bad: float = 0.01


@dataclass
class Counts:
    """How many events of each sort.

    >>> (Counts(good=5, bad=1) + Counts(good=2, duplicates=3)).events
    11
    """

    good: int = 0
    duplicates: int = 0
    late: int = 0
    bad: int = 0

    @property
    def events(self) -> int:
        """All of them."""
        return self.good + self.duplicates + self.late + self.bad

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.good + other.good,
            self.duplicates + other.duplicates,
            self.late + other.late,
            self.bad + other.bad,
        )


class Made(NamedTuple):
    """Events for one topic, ready for `publish_many`."""

    topic: str
    payloads: list[bytes]
    keys: list[str]
    event_times: list[int]
    counts: Counts


@dataclass
class Sample:
    """Evidence of some tenants.

    >>> first, second = Sample(seed=7), Sample(seed=7)
    >>> first.make("acme", 100, now_us=10**15) == second.make("acme", 100, now_us=10**15)
    True
    """

    seed: int = 0
    mix: Mix = field(default_factory=Mix)
    run: str = ""
    """Goes into every evidence id: name a run on a bus that holds evidence of an earlier one."""
    _random: dict[str, Any] = field(default_factory=dict)
    _number: dict[str, int] = field(default_factory=dict)
    _recent: dict[str, deque[tuple[int, bytes, str, int]]] = field(default_factory=dict)

    def make(self, tenant: str, count: int, now_us: int) -> list[Made]:
        """The next `count` events of a tenant, by topic; good ones happen up to a second before now."""
        if tenant not in self._random:
            name = list(f"{tenant}/{self.run}".encode())
            self._random[tenant] = np.random.default_rng([self.seed, *name])
        random = self._random[tenant]
        kinds = random.integers(0, len(KINDS), count)
        made = []
        for index, kind in enumerate(KINDS):
            share = int((kinds == index).sum())
            if share:
                made.append(self._of_kind(random, kind, tenant, share, now_us))
        return made

    def _of_kind(self, random: Any, kind: str, tenant: str, count: int, now_us: int) -> Made:
        topic = f"{TOPICS[kind]}.{tenant}"
        mix = self.mix
        edges = np.cumsum([mix.duplicates, mix.late, mix.bad])
        sorts = np.searchsorted(edges, random.random(count), side="right").tolist()
        times = (now_us - random.integers(0, 1_000_000, count)).tolist()
        fresh = _WRITERS[kind](random, count, self._ids(tenant, count))
        recent = self._recent.setdefault(topic, deque(maxlen=REMEMBERED))
        picks = random.integers(0, 1 << 30, count).tolist()
        made = Made(topic, [], [], [], counts := Counts())
        for sort, time_us, pick, (payload, asset) in zip(sorts, times, picks, fresh, strict=True):
            while recent and recent[0][0] < now_us - FORGET_US:
                recent.popleft()
            if sort == 0 and recent:
                _, payload, asset, time_us = recent[pick % len(recent)]
                counts.duplicates += 1
            elif sort == 1:
                time_us -= LATE_BY_US
                counts.late += 1
            elif sort == 2:
                payload = _BAD[pick % len(_BAD)]
                counts.bad += 1
            else:
                recent.append((now_us, payload, asset, time_us))
                counts.good += 1
            made.payloads.append(payload)
            made.keys.append(asset)
            made.event_times.append(time_us)
        return made

    def _ids(self, tenant: str, count: int) -> Iterator[str]:
        first = self._number.get(tenant, 0)
        self._number[tenant] = first + count
        prefix = f"{self.run}-{self.seed:x}" if self.run else f"{self.seed:x}"
        return (f"{prefix}-{number}" for number in range(first, first + count))


def _assets(random: Any, count: int) -> list[str]:
    return [f"host-{number}.example" for number in random.integers(0, 500, count).tolist()]


def _flags(random: Any, count: int, chance: float) -> list[str]:
    return ["true" if hit else "false" for hit in (random.random(count) < chance).tolist()]


def _picked(random: Any, choices: Sequence[Any], count: int) -> list[Any]:
    return [choices[at] for at in random.integers(0, len(choices), count).tolist()]


Written = list[tuple[bytes, str]]


# Payloads are written as text: building and encoding objects would take most of a core at 100 k/s.
def _jobs(random: Any, count: int, ids: Iterator[str]) -> Written:
    columns = zip(
        ids, _assets(random, count), _picked(random, _STATES, count),
        random.integers(0, 130, count).tolist(), strict=True,
    )  # fmt: skip
    return [
        (
            b'{"evidence_id":"%b","kind":"job","asset":"%b","state":"%b","open_ports":%d}'
            % (id_.encode(), asset.encode(), state.encode(), ports),
            asset,
        )
        for id_, asset, state, ports in columns
    ]


def _fingerprints(random: Any, count: int, ids: Iterator[str]) -> Written:
    columns = zip(
        ids, _assets(random, count), random.integers(0, len(_SERVICES), count).tolist(),
        _picked(random, _PRODUCTS, count), _picked(random, _VERSIONS, count),
        _flags(random, count, 0.3), strict=True,
    )  # fmt: skip
    return [
        (
            (
                f'{{"evidence_id":"{id_}","kind":"fingerprint","asset":"{asset}",'
                f'"port":{_PORTS[at]},"service":"{_SERVICES[at]}","product":"{product}",'
                f'"version":"{version}","exposed":{exposed}}}'
            ).encode(),
            asset,
        )
        for id_, asset, at, product, version, exposed in columns
    ]


def _vulnerabilities(random: Any, count: int, ids: Iterator[str]) -> Written:
    columns = zip(
        ids, _assets(random, count), random.integers(2015, 2027, count).tolist(),
        random.integers(1000, 40_000, count).tolist(), random.integers(10, 101, count).tolist(),
        _flags(random, count, 0.05), strict=True,
    )  # fmt: skip
    return [
        (
            (
                f'{{"evidence_id":"{id_}","kind":"vulnerability","asset":"{asset}",'
                f'"cve":"CVE-{year}-{number}","score":{score / 10},"exploited":{exploited}}}'
            ).encode(),
            asset,
        )
        for id_, asset, year, number, score, exploited in columns
    ]


_WRITERS: dict[str, Any] = {
    "job": _jobs,
    "fingerprint": _fingerprints,
    "vulnerability": _vulnerabilities,
}


class Producer:
    """Publishes sample evidence at a rate; `published` counts what the bus acknowledged."""

    def __init__(
        self,
        bus: Bus,
        sample: Sample,
        rate: float,
        tenants: Mapping[str, float] = TENANTS,
    ) -> None:
        self.published: dict[str, Counts] = {tenant: Counts() for tenant in tenants}
        self._bus = bus
        self._sample = sample
        self._rate = rate
        self._tenants = tenants

    async def run(self, stopping: asyncio.Event) -> None:
        """Publish for all tenants until told to stop."""
        async with asyncio.TaskGroup() as group:
            for tenant, share in self._tenants.items():
                group.create_task(self._produce(tenant, share * self._rate / TURNS_PER_S, stopping))

    async def publish(self, tenant: str, count: int) -> None:
        """Publish some events of a tenant at once."""
        for made in self._sample.make(tenant, count, self._bus.wall_us()):
            times = [datetime.fromtimestamp(at_us / 1e6, UTC) for at_us in made.event_times]
            await self._bus.publish_many(
                made.topic, made.payloads, keys=made.keys, event_times=times
            )
            self.published[tenant] += made.counts

    async def _produce(self, tenant: str, per_turn: float, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due, owed = loop.time(), 0.0
        while not stopping.is_set():
            owed += per_turn
            count, owed = int(owed), owed % 1
            if count:
                await self.publish(tenant, count)
            due += 1 / TURNS_PER_S
            try:
                await asyncio.wait_for(stopping.wait(), max(0.0, due - loop.time()))
            except TimeoutError:
                continue
