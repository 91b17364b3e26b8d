"""`Courtesy` delays the publishes of tenants over their rate, `ReadPause` the reading of a client (T11, T13)."""

from __future__ import annotations

import asyncio
import threading
import time

from penstock.core.admission import Admission, AdmissionLimits, TenantLimits
from penstock.server.publish import PATIENCE_S, Courtesy
from penstock.server.transports.tcp import ReadPause

LIMITS = AdmissionLimits(tenants={"acme": TenantLimits(events_per_s=1_000)})


def test_a_tenant_is_ahead_when_it_used_a_tenth_of_a_second_in_advance() -> None:
    admission = Admission(LIMITS)
    assert not admission.ahead("acme", 0.0), "nobody knows it yet"
    admission.admit("acme", "t", 100, 10, 0.0)
    assert not admission.ahead("acme", 0.0)
    admission.admit("acme", "t", 50, 10, 0.0)
    assert admission.ahead("acme", 0.0)
    assert not admission.ahead("acme", 0.06)
    admission.admit("other", "t", 5_000, 10, 0.0)
    assert not admission.ahead("other", 0.0), "it has no rate to be ahead of"


def test_a_rate_of_nothing_is_no_reason_to_divide_by_it() -> None:
    admission = Admission(AdmissionLimits(tenants={"acme": TenantLimits(events_per_s=0)}))
    assert admission.admit("acme", "t", 1, 10, 0.0).kind == "dropped"
    assert not admission.ahead("acme", 0.0)


async def test_whoever_waits_goes_one_at_a_time_and_in_order() -> None:
    courtesy, seen = Courtesy(), []

    async def hasty(name: str) -> None:
        await courtesy.turn()
        seen.append(name)

    courtesy.begin()
    tasks = [asyncio.create_task(hasty(name)) for name in "abc"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not seen
    courtesy.end()
    turns = []
    while len(seen) < 3:
        turns.append(len(seen))
        await asyncio.sleep(0)
    assert seen == ["a", "b", "c"]
    assert set(turns) == {0, 1, 2}, "others may come in between"
    await asyncio.gather(*tasks)


async def test_what_others_have_sent_already_is_read_first() -> None:
    courtesy, seen = Courtesy(), []

    async def hasty() -> None:
        await courtesy.turn()
        seen.append("hasty")

    task = asyncio.create_task(hasty())

    async def patient() -> None:
        courtesy.begin()

    # Read in the same turn and behind it, and begun in the next, as a frame from a socket is.
    asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(patient()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not seen
    courtesy.end()
    await task


async def test_nobody_waits_for_ever() -> None:
    courtesy = Courtesy()
    courtesy.begin()
    began = time.monotonic()
    await asyncio.wait_for(courtesy.turn(), 10)
    assert time.monotonic() - began >= 0.9 * PATIENCE_S


async def test_one_that_gave_up_is_not_called() -> None:
    courtesy = Courtesy()
    courtesy.begin()
    gone, there = (asyncio.create_task(courtesy.turn()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    courtesy.end()
    await asyncio.wait_for(there, 10)
    assert gone.cancelled()
    await courtesy.turn()  # nothing is left behind


def test_a_thread_waits_for_a_publish_and_not_for_ever() -> None:
    courtesy = Courtesy()
    courtesy.pause()
    courtesy.begin()
    began = time.monotonic()
    courtesy.pause()
    assert time.monotonic() - began >= PATIENCE_S
    thread = threading.Thread(target=courtesy.pause)
    thread.start()
    courtesy.end()
    thread.join(10)
    assert not thread.is_alive()


async def test_a_client_rests_as_long_as_it_was_told_and_longer_for_others() -> None:
    courtesy, over = Courtesy(), asyncio.Event()
    rest = ReadPause(over.set, courtesy)
    courtesy.begin()
    for courteous, least_s in ((False, 0.002), (True, 0.002 + PATIENCE_S)):
        over.clear()
        began = time.monotonic()
        rest.begin(0.002, courteous=courteous)
        assert rest.on
        await asyncio.wait_for(over.wait(), 10)
        assert time.monotonic() - began >= 0.9 * least_s
        assert not rest.on
    over.clear()
    rest.begin(0.001)
    rest.cancel()
    await asyncio.sleep(0.01)
    assert not over.is_set()
