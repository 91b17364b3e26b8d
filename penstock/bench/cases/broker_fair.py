"""Whether others are harmed: by a tenant far over its quota, and by very large payloads.

The same small publishes are timed twice, alone and beside the other publisher; which comes first
changes from round to round. The ratio of the two 99th percentiles is what counts.

Publishers are on other machines, as a rule, and do not take the broker's processors. Here the other
one gets a processor to itself, and everybody else the rest, alone and beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.bench.cases.broker_peer import PenstockBroker, stored_in
from penstock.bench.cases.workload import expect
from penstock.bench.client_process import ClientProcess, all_of, start_soon
from penstock.bench.measure import Sample
from penstock.model.errors import PenstockError
from penstock.model.setting import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.bench.case import Window

QUIET_PER_S = 500  # single events of the publisher that is timed: 1,000 latencies in a window
QUOTA_PER_S = 5_000
TIMES_QUOTA = 10
NOISY_BATCH_EVENTS = 100
LARGE_BYTES = 16 * MIB
QUIET, NOISY = "quiet", "noisy"
QUIET_TOPIC, NOISY_TOPIC = "bench.quiet", "bench.noisy"


async def neighbour(window: Window) -> Sample:
    """Publishes of one tenant, alone and while another publishes at ten times its quota."""
    limits = {NOISY: {"events_per_s": QUOTA_PER_S}}
    broker = PenstockBroker(admission__tenants=limits)

    def noise(client: ClientProcess, topic: str, start: float) -> Coroutine[Any, Any, Any]:
        return client.order(
            "pace", topic=topic, per_s=TIMES_QUOTA * QUOTA_PER_S, seconds=window.seconds,
            start=start, batch_events=NOISY_BATCH_EVENTS, seed=window.turn,
        )  # fmt: skip

    sample, other = await beside(broker, window, noise)
    accepted, refused = other["events"], other["refused"]
    # A bucket holds one second's worth when it is full; the window may end late.
    allowed = QUOTA_PER_S * (1 + other["seconds"]) + NOISY_BATCH_EVENTS
    if not refused or accepted > allowed:
        raise PenstockError(
            f"the noisy tenant got {accepted} events in and {refused} refused where its quota "
            f"allows {allowed:.0f}: the figure would mean nothing. Run the case again",
            accepted=accepted,
            refused=refused,
        )
    offered = (accepted + refused) / other["seconds"]
    sample.extra.update(accepted=accepted, refused=refused, times_quota=offered / QUOTA_PER_S)
    return sample


async def large(window: Window) -> Sample:
    """Publishes of 100 bytes, alone and beside a publisher of 16 MiB payloads."""

    def noise(client: ClientProcess, topic: str, start: float) -> Coroutine[Any, Any, Any]:
        return client.order(
            "repeat", topic=topic, payload_bytes=LARGE_BYTES, seconds=window.seconds, start=start
        )

    sample, other = await beside(PenstockBroker(), window, noise)
    figures = other["sample"]
    sample.extra.update(
        large=other["events"], large_mb_per_s=figures["mb_per_s"], large_p50_ms=figures["p50_ms"]
    )
    return sample


async def beside(
    broker: PenstockBroker,
    window: Window,
    noise: Callable[[ClientProcess, str, float], Coroutine[Any, Any, Any]],
) -> tuple[Sample, dict[str, Any]]:
    """Time the quiet publisher alone and beside the noisy one; the books of both must balance.

    One that cannot know how much of it was stored says nothing of `events`.
    """
    quiet, noisy = window.clients
    async with broker.serving(window):
        for topic in (QUIET_TOPIC, NOISY_TOPIC):
            await broker.bus.topics.create(topic)
        await quiet.order("connect", url=broker.url, tenant=QUIET)
        await noisy.order("connect", url=broker.url, tenant=NOISY)
        set_apart(noisy.pid, [quiet.pid, broker.pid])
        timed: dict[str, dict[str, Any]] = {}
        other: dict[str, Any] = {}
        phases = ["alone", "beside"] if window.turn % 2 == 0 else ["beside", "alone"]
        for phase in phases:
            start = start_soon()
            calls = [
                quiet.order(
                    "pace", topic=QUIET_TOPIC, per_s=QUIET_PER_S, seconds=window.seconds,
                    start=start, server_pid=broker.server_pid,
                )
            ]  # fmt: skip
            if phase == "beside":
                calls.append(noise(noisy, NOISY_TOPIC, start))
            timed[phase], *others = await all_of(*calls)
            other = others[0] if others else other
            expect(timed[phase]["refused"], 0, "refused to the quiet publisher")
        published = sum(each["events"] for each in timed.values())
        expect(await stored_in(broker.bus, QUIET_TOPIC), published, "stored")
        if "events" in other:
            expect(await stored_in(broker.bus, NOISY_TOPIC), other["events"], "stored")
    return _sample(timed["alone"]["sample"], timed["beside"]["sample"], other["sample"]), other


def set_apart(one: int, others: Iterable[int]) -> None:
    """Give a process a processor of its own; does nothing where there is only one."""
    *rest, last = sorted(os.sched_getaffinity(0))
    if not rest:
        return
    for process, processors in ((one, [last]), *((each, rest) for each in others)):
        for thread in os.listdir(f"/proc/{process}/task"):
            os.sched_setaffinity(int(thread), processors)


def _sample(alone: dict[str, Any], beside: dict[str, Any], other: dict[str, Any]) -> Sample:
    figures = {name: beside[name] for name in beside if name != "extra"}
    figures["cpu"] += other["cpu"]
    figures["rss_mb"] += other["rss_mb"]
    return Sample(
        **figures,
        extra={
            "alone_p50_ms": alone["p50_ms"],
            "alone_p99_ms": alone["p99_ms"],
            "p50_ratio": beside["p50_ms"] / alone["p50_ms"],
            "p99_ratio": beside["p99_ms"] / alone["p99_ms"],
        },
    )
