"""Whether others are harmed: by a tenant far over its quota, and by very large payloads.

The same small publishes are timed twice, alone and beside the other publisher, by turns of a second.
The 99th percentile of a turn in the middle of all turns is what counts, alone and beside, and their
ratio. Taken over all calls together, it is decided by the machine: a pause of 20 ms in a second and a
half hits as many publishes as are above a p99.

Publishers are on other machines, as a rule, and do not take the broker's processors. Here the other
one gets a processor to itself, and everybody else the rest, alone and beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable
from itertools import chain
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.bench.cases.broker_peer import PenstockBroker, stored_in
from penstock.bench.cases.workload import expect
from penstock.bench.client_process import ClientProcess, all_of, start_soon
from penstock.bench.measure import Sample, percentile
from penstock.model.errors import PenstockError
from penstock.model.settings import MIB

if TYPE_CHECKING:
    from penstock.bench.case import Window

QUIET_PER_S = 500  # single events of the publisher that is timed: as many latencies in a turn
QUOTA_PER_S = 5_000
TIMES_QUOTA = 10
NOISY_BATCH_EVENTS = 100
LARGE_BYTES = 16 * MIB
TURN_S = 1.0  # what is timed of one phase
# Everybody begins at the same moment, out of a pause, and a bucket is full: what a tenant far over its
# quota does to others is told by what comes then. In 20 ms are as many publishes as decide a p99.
WARM_S = 0.25
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
QUIET, NOISY = "quiet", "noisy"
QUIET_TOPIC, NOISY_TOPIC = "bench.quiet", "bench.noisy"


async def neighbour(window: Window) -> Sample:
    """Publishes of one tenant, alone and while another publishes at ten times its quota."""
    limits = {NOISY: {"events_per_s": QUOTA_PER_S}}
    broker = PenstockBroker(admission__tenants=limits)

    def noise(client: ClientProcess, topic: str, turn: Turn) -> Coroutine[Any, Any, Any]:
        return client.order(
            "pace", topic=topic, per_s=TIMES_QUOTA * QUOTA_PER_S, seconds=turn.seconds,
            start=turn.start, batch_events=NOISY_BATCH_EVENTS, seed=turn.seed,
        )  # fmt: skip

    sample, others = await beside(broker, window, noise)
    accepted, refused, seconds = (
        sum(each[name] for each in others) for name in ("events", "refused", "seconds")
    )
    # A bucket holds one second's worth when it is full; a turn may end late.
    allowed = QUOTA_PER_S * (len(others) + seconds) + NOISY_BATCH_EVENTS
    if not refused or accepted > allowed:
        raise PenstockError(
            f"the noisy tenant got {accepted} events in and {refused} refused where its quota "
            f"allows {allowed:.0f}: the figure would mean nothing. Run the case again",
            accepted=accepted,
            refused=refused,
        )
    offered = (accepted + refused) / seconds
    sample.extra.update(accepted=accepted, refused=refused, times_quota=offered / QUOTA_PER_S)
    return sample


async def large(window: Window) -> Sample:
    """Publishes of 100 bytes, alone and beside a publisher of 16 MiB payloads."""

    def noise(client: ClientProcess, topic: str, turn: Turn) -> Coroutine[Any, Any, Any]:
        return client.order(
            "repeat", topic=topic, payload_bytes=LARGE_BYTES, seconds=turn.seconds, start=turn.start
        )

    sample, others = await beside(PenstockBroker(), window, noise)
    figures = [each["sample"] for each in others]
    sample.extra.update(
        large=sum(each["events"] for each in others),
        large_mb_per_s=mean(each["mb_per_s"] for each in figures),
        large_p50_ms=mean(each["p50_ms"] for each in figures),
    )
    return sample


class Turn(NamedTuple):
    """A stretch of one phase: how long with its warm-up, from when on, and how it differs from others."""

    seconds: float
    start: float
    seed: int


Noise = Callable[[ClientProcess, str, Turn], Coroutine[Any, Any, Any]]


async def beside(
    broker: PenstockBroker, window: Window, noise: Noise
) -> tuple[Sample, list[dict[str, Any]]]:
    """Time the quiet publisher alone and beside the noisy one; the books of both must balance.

    Long windows are cut into turns, alone and beside by turns, so that a machine that slows down for
    a while slows both. A noisy one that cannot know how much of it was stored says nothing of `events`.
    """
    quiet, noisy = window.clients
    timed: dict[str, list[dict[str, Any]]] = {"alone": [], "beside": []}
    others: list[dict[str, Any]] = []
    turns = max(1, round(window.seconds / TURN_S))
    async with broker.serving(window):
        for topic in (QUIET_TOPIC, NOISY_TOPIC):
            await broker.bus.topics.create(topic)
        await quiet.order("connect", url=broker.url, tenant=QUIET)
        await noisy.order("connect", url=broker.url, tenant=NOISY)
        set_apart(noisy.pid, [quiet.pid, broker.pid])
        for number, phase in enumerate(phases(turns, window.turn)):
            seed = turns * window.turn + number // 2
            turn = Turn(WARM_S + window.seconds / turns, start_soon(), seed)
            calls = [
                quiet.order(
                    "pace", topic=QUIET_TOPIC, per_s=QUIET_PER_S, seconds=turn.seconds,
                    start=turn.start, server_pid=broker.server_pid, warm_s=WARM_S,
                )
            ]  # fmt: skip
            if phase == "beside":
                calls.append(noise(noisy, NOISY_TOPIC, turn))
            found, *more = await all_of(*calls)
            expect(found["refused"], 0, "refused to the quiet publisher")
            timed[phase].append(found)
            others += more
        published = sum(each["events"] for found in timed.values() for each in found)
        expect(await stored_in(broker.bus, QUIET_TOPIC), published, "stored")
        if "events" in others[0]:
            stored = sum(each["events"] for each in others)
            expect(await stored_in(broker.bus, NOISY_TOPIC), stored, "stored")
    return _sample(timed["alone"], timed["beside"], others), others


def phases(turns: int, number: int) -> list[str]:
    """The order in which a round measures: as often alone as beside, neither always first.

    >>> phases(2, number=0), phases(1, number=1)
    (['alone', 'beside', 'beside', 'alone'], ['beside', 'alone'])
    """
    return ["beside" if (turn + 1) // 2 % 2 != number % 2 else "alone" for turn in range(2 * turns)]


def set_apart(one: int, others: Iterable[int]) -> None:
    """Give a process a processor of its own; does nothing where there is only one."""
    *rest, last = sorted(os.sched_getaffinity(0))
    if not rest:
        return
    for process, processors in ((one, [last]), *((each, rest) for each in others)):
        for thread in os.listdir(f"/proc/{process}/task"):
            os.sched_setaffinity(int(thread), processors)


def _sample(
    alone: list[dict[str, Any]], beside: list[dict[str, Any]], others: list[dict[str, Any]]
) -> Sample:
    """The figures beside the noisy one, with the ratios to those without it."""
    quiet, noisy = ([each["sample"] for each in found] for found in (beside, others))
    before, after = ([sorted(turn["latencies_s"]) for turn in found] for found in (alone, beside))
    all_before, all_after = (sorted(chain.from_iterable(turns)) for turns in (before, after))
    figures = {name: mean(each[name] for each in quiet) for name in quiet[0] if name != "extra"}
    for name in ("cpu", "rss_mb"):
        figures[name] += mean(each[name] for each in noisy)
    extra = {}
    for name, share in SHARES.items():
        usual_before, usual_after = (
            median(percentile(turn, share) for turn in turns) for turns in (before, after)
        )
        figures[f"{name}_ms"] = usual_after * 1000
        extra[f"alone_{name}_ms"] = usual_before * 1000
        extra[f"{name}_ratio"] = usual_after / usual_before
        extra[f"pooled_{name}_ratio"] = percentile(all_after, share) / percentile(all_before, share)
    return Sample(**figures, extra=extra)
