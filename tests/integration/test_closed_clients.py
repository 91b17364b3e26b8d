"""Closed, cancelled and refused subscriptions and deleted groups hold nothing (T4, T5, Q6, T11)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.core.entry import GroupSpec
from penstock.engines.broker.tcp import TcpLink
from penstock.server.subscriptions import QueueSubscription
from penstock.testing.broker_process import BrokerProcess, broker_inside
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind

ROOT = Path(penstock.__file__).resolve().parent.parent
BILLING = ROOT / "examples" / "billing.py"
DEADLINE_S = 20.0
SOON_S = 5.0
TOPIC = "orders.created"
PATIENT = penstock.Retry(ladder_ms=(0,), max_attempts=50)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Any]:
    daemon = broker_inside(tmp_path, {})
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.stop()


@pytest.fixture
def url(daemon: Any) -> str:
    return f"penstock://127.0.0.1:{daemon.ports['tcp']}"


async def nobody_is_left(daemon: Any, group: str) -> None:
    """Wait until the broker has no member of a group, or no such group."""
    async with asyncio.timeout(SOON_S):
        while True:
            known = {each.name: each.members for each in await ask_groups(daemon)}
            if not known.get(group):
                return
            await asyncio.sleep(0.01)


async def ask_groups(daemon: Any) -> Sequence[Any]:
    groups: Sequence[Any] = await daemon.engine.ask(penstock.engines.requests.ListGroups())
    return groups


async def test_a_deleted_group_leaves_nothing_to_settle(tmp_path: Path) -> None:
    """T5: an ack that comes after the group was made anew does not settle the new group's event."""
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish(TOPIC, b"1")
        async with bus.subscribe(TOPIC, group="billing") as former:
            event = await former.get(timeout_s=DEADLINE_S)
            assert event is not None
            await bus.groups.delete("billing", confirm="DELETE")
            async with bus.subscribe(TOPIC, group="billing") as sub:
                again = await sub.get(timeout_s=DEADLINE_S)
                assert again is not None
                with pytest.raises(errors.Fenced):
                    await event.ack()
                await bus.flush()
                shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    async with (
        penstock.connect(tmp_path / "crashed") as bus,
        bus.subscribe(TOPIC, group="billing") as sub,
    ):
        assert await sub.get(timeout_s=SOON_S) is not None


@pytest.mark.parametrize("mode", ["queue", "log"])
async def test_a_listener_cancelled_while_it_opens_leaves_no_group(
    bus: penstock.Bus, mode: str
) -> None:
    """Without a broker, too: its group has a name that nobody else knows."""
    await bus.publish(TOPIC, b"1")
    opening = asyncio.create_task(bus.subscribe(TOPIC, mode=mode).open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await bus.publish(TOPIC, b"2")
    await bus.flush()
    assert not await bus.groups.list()


async def test_a_closed_log_feed_stays_closed_when_the_broker_is_back(tmp_path: Path) -> None:
    """Q6, T4: after a restart a client joins again what it has open, and nothing else."""
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    try:
        async with penstock.connect(broker.url()) as bus, penstock.connect(broker.url()) as other:
            await bus.publish(TOPIC, b"1")
            async with bus.subscribe(TOPIC, group="tail", mode="log"):
                pass
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            await bus.publish(TOPIC, b"2")  # it is connected again
            assert (await bus.groups.info("tail")).members == []
            async with other.subscribe(TOPIC, group="tail", mode="log") as sub:
                assert await sub.get(timeout_s=SOON_S) is not None
    finally:
        await asyncio.to_thread(broker.stop)


@pytest.mark.parametrize("mode", ["queue", "log"])
@pytest.mark.parametrize("group", ["billing", None], ids=["group", "listener"])
async def test_a_subscription_cancelled_while_it_opens_holds_nothing(
    daemon: Any, url: str, mode: str, group: str | None
) -> None:
    """T4: the broker may have joined the group already; the client leaves it again."""
    async with penstock.connect(url) as bus, penstock.connect(url) as other:
        await bus.publish(TOPIC, b"1")
        opening = asyncio.create_task(bus.subscribe(TOPIC, group=group, mode=mode).open())
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it is on its way
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        if group is None:
            await bus.publish(TOPIC, b"2")  # whatever was asked before is under way
            async with asyncio.timeout(SOON_S):
                while await ask_groups(daemon):
                    await asyncio.sleep(0.01)
            return
        async with other.subscribe(TOPIC, group=group, mode=mode) as sub:
            assert await sub.get(timeout_s=SOON_S) is not None


async def test_a_subscription_closed_without_a_connection_is_left_later(
    daemon: Any, url: str
) -> None:
    """T4: who gives up waiting for the broker has left all the same, once it is reached again."""
    async with penstock.connect(url) as bus:
        await bus.publish(TOPIC, b"1")
        sub = await bus.subscribe(TOPIC, group="billing").open()
        channel: Any = bus.engine.channel  # type: ignore[attr-defined]
        real, channel._make_link = channel._make_link, unreachable
        channel._link.close()
        channel._broken.set()
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await sub.close()
        channel._make_link = real
        await bus.publish(TOPIC, b"2")
        await nobody_is_left(daemon, "billing")


def unreachable() -> Any:
    raise errors.BrokerUnreachable("the cable is cut")


async def test_a_subscription_that_is_refused_late_holds_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T4: when what the client held cannot be read, it hears so, and the broker keeps no feed."""

    async def broken(self: QueueSubscription, held: list[Any], *, alone: bool = False) -> Any:
        raise errors.Corrupted("what was leased cannot be read")

    async with penstock.connect(url) as bus, penstock.connect(url) as other:
        await bus.publish(TOPIC, b"1")
        with monkeypatch.context() as patch:
            patch.setattr(QueueSubscription, "adopt", broken)
            with pytest.raises(errors.Corrupted):
                await bus.subscribe(TOPIC, group="billing").open()
        async with other.subscribe(TOPIC, group="billing") as sub:
            assert await sub.get(timeout_s=SOON_S) is not None


async def test_who_lost_its_place_hands_nothing_out_and_settles_nothing(url: str) -> None:
    """T5: what was on its way to it is the other's, and neither ack nor flush says otherwise."""
    async with penstock.connect(url) as bus, penstock.connect(url) as other:
        await bus.publish_many(TOPIC, [b"1", b"2", b"3"])
        async with bus.subscribe(TOPIC, group="billing", member="m", retry=PATIENT) as sub:
            event = await sub.get(timeout_s=DEADLINE_S)
            assert event is not None
            async with other.subscribe(TOPIC, group="billing", member="m", retry=PATIENT):
                with pytest.raises(errors.Fenced):
                    async with asyncio.timeout(DEADLINE_S):
                        while True:
                            await sub.get(timeout_s=0.1)
                            await asyncio.sleep(0.1)
                with pytest.raises(errors.LeaseExpired):
                    await event.ack()


async def test_an_ack_that_crosses_the_end_of_its_feed_is_refused(url: str) -> None:
    """T5: the broker says so even when the client has no other feed, and flush repeats it."""
    async with penstock.connect(url) as bus, penstock.connect(url) as other:
        await bus.publish(TOPIC, b"1")
        async with bus.subscribe(TOPIC, group="billing", member="m", retry=PATIENT) as sub:
            event = await sub.get(timeout_s=DEADLINE_S)
            assert event is not None
            channel: Any = bus.engine.channel  # type: ignore[attr-defined]
            pushed = channel.on_push
            channel.on_push = lambda frame: frame.kind == Kind.STOPPED or pushed(frame)
            async with other.subscribe(TOPIC, group="billing", member="m", retry=PATIENT):
                await event.ack()
                with pytest.raises(errors.LeaseExpired):
                    await bus.flush()


async def test_a_client_that_leaves_while_it_publishes_counts_for_nothing(
    daemon: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: events that were on their way in when their session ended are not on their way for ever."""
    bus = penstock.connect(url)
    await bus.open()
    await bus.topics.create(TOPIC)
    waits = asyncio.Event()

    async def put_aside(draft: Any) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(daemon.engine.publisher, "_put_aside", put_aside)
    calls = [asyncio.create_task(bus.publish(TOPIC, each)) for each in (b"1", bytes(2 << 20))]
    await asyncio.wait_for(waits.wait(), DEADLINE_S)
    assert daemon.engine.admission.use()["default"][1] == 1
    await bus.close()
    await asyncio.gather(*calls, return_exceptions=True)
    async with asyncio.timeout(SOON_S):
        while daemon.engine.admission.use()["default"][1]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["queue", "log"])
@pytest.mark.parametrize("group", ["billing", None], ids=["group", "listener"])
async def test_who_leaves_when_the_broker_is_gone_keeps_its_own_error(
    tmp_path: Path, mode: str, group: str | None
) -> None:
    """T4: what ended the block is what its caller hears, not that nobody could be told of it."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        async with penstock.connect(broker.url(), client__deadline_s=0.5) as bus:
            with pytest.raises(KeyError, match="no such order"):
                async with bus.subscribe(TOPIC, group=group, mode=mode):
                    await asyncio.to_thread(broker.kill)
                    raise KeyError("no such order")


async def test_ctrl_c_ends_a_handler_whose_broker_is_gone(tmp_path: Path) -> None:
    """T4: as it ends one whose broker is there, though only when it has waited for the broker."""
    with BrokerProcess(tmp_path / "data").start() as broker:
        program = await asyncio.create_subprocess_exec(
            sys.executable, str(BILLING), broker.url(), stdout=PIPE, stderr=STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PENSTOCK_CLIENT_DEADLINE_S": "1"},
        )  # fmt: skip
        assert program.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            assert await program.stdout.readline() == b"waiting for orders\n"
            await asyncio.to_thread(broker.kill)
            program.send_signal(signal.SIGINT)
            assert await program.stdout.read() == b"bye\n"
            assert await program.wait() == 0


@pytest.mark.parametrize("resumable", [True, False])
async def test_a_session_waits_for_its_client_only_where_it_may(
    daemon: Any, url: str, resumable: bool
) -> None:
    """T4: what a client held that will not resume goes to others as soon as its connection ends."""
    link = TcpLink("127.0.0.1", daemon.ports["tcp"])
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    wish = say.Subscribe(1, "billing", GroupSpec((TOPIC,)), "till", 10)
    async with penstock.connect(url) as bus:
        await bus.publish(TOPIC, b"1")
        await link.open(frames.put_nowait, lambda _: None)
        link.send(Frame(Kind.HELLO, 0, say.encode(say.Hello("till", resumable=resumable))))
        link.send(Frame(Kind.SUBSCRIBE, 1, say.encode(wish)))
        async with asyncio.timeout(DEADLINE_S):
            while (await frames.get()).kind != Kind.DELIVER:
                pass
        link.close()  # without a Bye
        async with bus.subscribe(TOPIC, group="billing") as sub:
            assert (await sub.get(timeout_s=1.0 if resumable else SOON_S) is None) == resumable
        assert (
            "till" in {each.hello.client for each in daemon.broker.sessions.values()}
        ) == resumable


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
async def test_one_client_too_many_hears_so(tmp_path: Path, transport: str) -> None:
    """T1, Q7: it costs nobody else anything, and comes in when another has left."""
    with BrokerProcess(tmp_path / "data").start(server__max_connections=1) as broker:
        url = broker.url(transport)
        async with penstock.connect(broker.url()) as bus:
            with pytest.raises(errors.BrokerUnreachable, match="1 clients are connected"):
                await penstock.connect(url, client__deadline_s=1.0).open()
            await bus.publish(TOPIC, b"1")
        async with penstock.connect(url) as bus:
            await bus.publish(TOPIC, b"2")
