"""The client's engine between two lives of its broker: what it reports, and when (T4)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

import penstock
from penstock import errors
from penstock.core.entry import GroupSpec
from penstock.engines.broker.channel import Channel
from penstock.engines.broker.consumer import SWEEP_LEAST, RemoteDelivery, RemoteQueue
from penstock.engines.broker.engine import MAX_TRANSACTIONS, BrokerEngine
from penstock.engines.engine import Subscribe, Transaction
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.settings_loader import load
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.limits import MAX_VALUES, check_message


class Wire:
    """In place of a channel: notes what is said, and answers when the test wants it."""

    def __init__(self) -> None:
        self.frame_bytes = 1 << 20
        self.settled: list[say.Settlement] = []
        self.wishes: list[say.Subscribe] = []
        self.lost: list[say.Settlement] = []
        self.answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def settle(self, settlements: list[say.Settlement]) -> None:
        self.settled += settlements

    def push(self) -> None:
        pass

    def unconfirmed(self) -> list[say.Settlement]:
        return self.lost

    def begin(self, kind: Kind, message: Any, **_: Any) -> None:
        self.wishes.append(message)

    async def finish(self, call: None, **_: Any) -> Frame:
        return await self.answer

    async def flush(self) -> None:
        pass

    def join(self, adopted: dict[int, list[int]]) -> None:
        self.answer.set_result(Frame(Kind.RESULT, 1, say.encode(say.Joined(adopted))))


class Sent:
    """In place of a connection: notes what is sent."""

    def __init__(self) -> None:
        self.kinds: list[int] = []

    def send(self, frame: Frame) -> None:
        self.kinds.append(frame.kind)


async def test_a_feed_is_opened_before_it_is_asked_again() -> None:
    """The broker died twice, the second time before it had answered our Subscribe."""
    settings = load(None, {}, {})
    channel = Channel(lambda: None, settings.client, say.Hello("c"))  # type: ignore[arg-type, return-value]
    channel.renewed = lambda: None
    wire = channel._link = Sent()  # type: ignore[assignment]
    before = channel.welcome = say.Welcome("s", "b1")
    channel.begin(Kind.FETCH, say.Feed(1), again=True)
    channel.begin(Kind.SUBSCRIBE, say.Feed(1), again=True)
    wire.kinds.clear()
    channel._resume(say.Welcome("s", "b2"), before)
    assert wire.kinds == [Kind.SUBSCRIBE, Kind.FETCH]


class Faulty:
    """A connection that fails as nobody expects."""

    async def open(self, *_: Any) -> None:
        raise TypeError("no such thing")


async def test_a_defect_in_connecting_is_told_at_once() -> None:
    channel = Channel(Faulty, load(None, {}, {}).client, say.Hello("c"))  # type: ignore[arg-type]
    async with asyncio.timeout(1):
        with pytest.raises(errors.BrokerUnreachable, match="no such thing"):
            await channel.open()


class Client:
    """An engine with one delivery of four events, three of them handed out."""

    def __init__(self) -> None:
        self.engine = BrokerEngine(lambda: None, load(None, {}, {}), penstock.Identity(), "c")  # type: ignore[arg-type, return-value]
        self.wire = self.engine.channel = Wire()  # type: ignore[assignment]
        wanted = Subscribe("g", GroupSpec(("a.b",)), "m", 10)
        self.queue = RemoteQueue(
            1,
            wanted,
            self.engine._touched,
            self.engine._handed,
            self.engine._report,
            self.engine._leave,
        )
        self.engine._feeds[1] = self.queue
        batch = EventBatch.build("a.b", [b"%d" % number for number in range(4)])
        self.queue.delivered(say.Deliver(1, 7, 1), batch)
        self.delivery = self.queue.held[7]
        for _ in range(3):
            self.delivery.hand()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_acks_wait_until_the_broker_has_given_the_leases_back() -> None:
    """Before, it would refuse them as those of a delivery it does not hold."""
    client = Client()
    await turn()
    client.wire.settled.clear()
    client.engine._renewed()
    client.delivery.ack(0)
    await turn()
    assert client.wire.settled == []
    client.wire.join({7: [0, 1, 2, 3]})
    await turn()
    assert [each.acks for each in client.wire.settled] == [[0, 1]]
    client.delivery.ack(1)
    await turn()
    assert client.wire.settled[-1].acks == [1, 1]
    await client.engine.flush()


async def test_what_did_not_survive_the_broker_is_said_again() -> None:
    """An ack, a nack and a rejection that were on their way when it died."""
    client = Client()
    client.delivery.ack(0)
    client.delivery.nack(1, None, "no")
    client.delivery.reject(2, "bad")
    await turn()
    client.wire.lost = [say.Settlement(7, 3, [0, 1], [(1, None, "no")], [(2, "bad")])]
    client.wire.settled.clear()
    client.engine._renewed()
    client.wire.join({7: [0, 1, 2, 3]})
    await turn()
    (said,) = client.wire.settled
    assert said.acks == [0, 1]
    assert [nack[0] for nack in said.nacks] == [1]
    assert [reject[0] for reject in said.rejects] == [2]
    await client.engine.flush()


async def test_a_flush_does_not_vouch_for_what_the_broker_may_not_know() -> None:
    """The ack of an event that was not given back to us may be lost, and the event come again."""
    client = Client()
    client.delivery.ack(0)
    await turn()
    client.wire.lost = [say.Settlement(7, 1, [0, 1])]
    client.engine._renewed()
    client.wire.lost = []
    client.wire.join({7: [1, 2, 3]})
    with pytest.raises(errors.ConnectionLost):
        await client.engine.flush()
    await client.engine.flush()  # from here on it can


async def test_a_feed_is_joined_again_once() -> None:
    """However often the broker is restarted before it answers."""
    client = Client()
    client.engine._renewed()
    client.engine._renewed()
    assert [wish.feed for wish in client.wire.wishes] == [1]
    [held] = client.wire.wishes[0].held
    assert msgspec.structs.replace(held, left_s=None) == say.Held(7, "a.b", 0, 0, 4, 1, 3)
    assert held.left_s == pytest.approx(30.0, abs=29.0)
    client.wire.join({})
    await turn()
    client.engine._renewed()
    assert len(client.wire.wishes) == 2


async def test_deliveries_that_are_settled_are_not_asked_for_again() -> None:
    """Else a broker that has not heard of the acks would send them once more."""
    client = Client()
    for index in range(4):
        client.delivery.ack(index)
    assert client.queue.held == {}
    assert client.engine._held() == [7]
    await turn()
    client.wire.lost = [say.Settlement(8, 1, [0, 1])]
    assert client.engine._held() == [8]


async def test_a_client_that_holds_more_than_a_hello_names_is_let_in_again() -> None:
    """T4, found by review: it was refused for good, for the broker reads no message that long."""
    client, one = Client(), EventBatch.build("a.b", [b"x"])
    await turn()
    client.queue.held.clear()
    numbers = range(1 << 33, (1 << 33) + MAX_VALUES)
    for number in numbers:
        client.queue.held[number] = RemoteDelivery(client.queue, say.Deliver(1, number, 1), one)
    lost = client.queue.held[numbers[-1]]
    hello = say.Hello("c", deliveries=client.engine._held(), pending=[*range(1, 4_097)])
    check_message(Frame(Kind.HELLO, 0, say.encode(hello)))
    assert [*client.queue.held] == hello.deliveries == [*numbers[: say.MAX_NAMED]]
    with pytest.raises(errors.LeaseExpired):
        lost.ack(0)


async def test_a_flush_does_not_vouch_for_what_the_broker_refused() -> None:
    """Not even when everything of the delivery is settled here and nothing of it is kept."""
    client = Client()
    client.delivery.hand()
    for index in range(4):
        client.delivery.ack(index)
    await turn()
    assert 7 not in client.queue.held
    late = say.Fault("delivery.lease-expired", "too late")
    for index in (1, 2):
        client.engine._pushed(Frame(Kind.REFUSED, 0, say.encode(say.Refused(7, index, late))))
    again = say.Fault("delivery.already-settled", "acked before")
    client.engine._pushed(Frame(Kind.REFUSED, 0, say.encode(say.Refused(7, 3, again))))
    with pytest.raises(errors.LeaseExpired, match="2 settlements"):
        await client.engine.flush()
    await client.engine.flush()


class Silent:
    """In place of a connection: takes everything, and says nothing."""

    def __init__(self) -> None:
        self.max_frame_bytes = 1 << 20
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)


def transacting(link: Silent, count: int) -> tuple[Any, list[asyncio.Task[Any]]]:
    settings = load(None, {}, {"client.deadline_s": 1.0})
    engine = BrokerEngine(lambda: link, settings, penstock.Identity(), "c")  # type: ignore[arg-type, return-value]
    channel: Any = engine.channel
    channel._link, channel.welcome = link, say.Welcome("s", "b")
    draft = Draft("a.b", [b"x"], tenant="acme", codec="raw")
    tasks = [
        asyncio.create_task(engine.transact(Transaction([draft], [], []))) for _ in range(count)
    ]
    return channel, tasks


async def test_transactions_under_way_are_no_more_than_a_broker_remembers() -> None:
    """Q13: the others go when there is room, in their order."""
    link = Silent()
    channel, tasks = transacting(link, MAX_TRANSACTIONS + 10)
    await turn()
    assert len(link.sent) == MAX_TRANSACTIONS
    for frame in link.sent[:10]:
        channel._received(Frame(Kind.RESULT, frame.request, say.encode(say.Published([]))))
    await turn()
    assert len(link.sent) == MAX_TRANSACTIONS + 10
    sequences = [say.decode(frame.meta, say.Transact).sequence for frame in link.sent]
    assert sequences == sorted(sequences)
    for frame in link.sent[10:]:
        channel._received(Frame(Kind.RESULT, frame.request, say.encode(say.Published([]))))
    await asyncio.gather(*tasks)


async def test_a_transaction_behind_a_silent_broker_was_not_sent() -> None:
    """T4: nobody waits longer than its deadline, and who was not sent hears that."""
    link = Silent()
    _, tasks = transacting(link, MAX_TRANSACTIONS + 10)
    async with asyncio.timeout(1.6):
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    lost, unsent = answers[:MAX_TRANSACTIONS], answers[MAX_TRANSACTIONS:]
    assert {type(error) for error in lost} == {errors.ConnectionLost}
    assert {type(error) for error in unsent} == {errors.BrokerUnreachable}
    assert len(link.sent) == MAX_TRANSACTIONS


async def test_deliveries_that_nobody_settles_are_let_go_of_when_they_ran_out() -> None:
    """Q7, found by review: a consumer that never settles kept every delivery it ever got."""
    client, clock = Client(), [0.0]
    queue = client.queue
    queue.now = lambda: clock[0]
    queue.held.clear()
    batch = EventBatch.build("a.b", [b"1", b"2"])
    for number in range(1, 1_001):
        queue.delivered(say.Deliver(1, number, 1), batch)
        delivery = queue.held[number]
        delivery.hand()
        if number > 5:
            delivery.hand()  # of the first five, one event waits and cannot run out
        clock[0] += queue.lease_s
        assert len(queue.held) <= SWEEP_LEAST + 1
    assert [*queue.held][:5] == [1, 2, 3, 4, 5]
    with pytest.raises(errors.LeaseExpired):
        delivery.ack(1)
    queue.held[1].hand()
    queue.held[1].ack(1)
    assert 1 not in queue.held
    await turn()
