"""`QueueSubscription` sends deliveries at once, in order, within the credit of the client (T4, Q7)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.core.delivery import QueueGroup
from penstock.core.entry import GroupSpec
from penstock.core.lease import ACKED, EXPIRED, STATES, Member
from penstock.engines.embedded.delivery import Inbox, LeasedBatch, LeasedRange
from penstock.engines.engine import Subscribe
from penstock.model.batch import EventBatch
from penstock.model.errors import Corrupted, PenstockError
from penstock.model.event import Identity
from penstock.server.subscriptions import SWEEP_LEAST, QueueSubscription
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Settlement

FEED = 7


class Open(dict[int, QueueSubscription]):
    """The feeds of a session; notes which ended."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def stopped(self, feed: int, error: PenstockError) -> None:
        self._client.ended.append((feed, error))
        if self._client.link_fails:
            raise MemoryError


class Client:
    """A session whose connection takes more, or does not."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.ended: list[tuple[int, PenstockError]] = []
        self.link_fails = False
        self.feeds = Open(self)
        self.pumped: list[Any] = []
        self.taken: list[tuple[Inbox, list[Any]]] = []
        self._delivery = 0

    @property
    def has_room(self) -> bool:
        return self.open.is_set()

    async def room(self) -> None:
        await self.open.wait()

    def dispatcher(self) -> Any:
        return SimpleNamespace(
            touched=self.pumped.append,
            take_back=lambda inbox, kept: self.taken.append((inbox, list(kept))),
            back=lambda inbox: None,
        )

    def next_delivery(self) -> int:
        self._delivery += 1
        return self._delivery


class Subscription(QueueSubscription):
    """Notes what it would send; a delivery that is an error fails."""

    def __init__(self, client: Client, inbox: Inbox) -> None:
        self.sent: list[Any] = []
        wanted = Subscribe("g", GroupSpec(("t",)), "m", 10, Identity())
        super().__init__(cast(Any, client), FEED, wanted, inbox)
        client.feeds[FEED] = self

    def send(self, leased: Any) -> None:
        if isinstance(leased, Exception):
            raise leased
        self.held[self._session.next_delivery()] = leased
        self.sent.append(leased)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(cast(Any, None), Member("m", 10), lambda inbox: None)


def put(inbox: Inbox, *deliveries: Any) -> None:
    for each in deliveries:
        inbox.put(each)


async def test_what_arrives_goes_out_within_the_call(inbox: Inbox) -> None:
    subscription = Subscription(Client(), inbox)
    put(inbox, 1, 2)
    assert subscription.sent == [1, 2]
    await subscription.close()


async def test_without_room_it_waits_and_nothing_overtakes(inbox: Inbox) -> None:
    client = Client()
    subscription = Subscription(client, inbox)
    client.open.clear()
    put(inbox, 1)
    await asyncio.sleep(0.01)  # the task has it in hand
    client.open.set()
    put(inbox, 2, 3)  # there is room again, and the first is first
    assert subscription.sent == []
    async with asyncio.timeout(5):
        while len(subscription.sent) < 3:
            await asyncio.sleep(0)
    put(inbox, 4)
    assert subscription.sent == [1, 2, 3, 4]
    await subscription.close()


async def test_without_room_it_is_leased_no_more(inbox: Inbox) -> None:
    """Q7: what waits for a client that does not read stays in the log, and not in memory."""
    client = Client()
    subscription = Subscription(client, inbox)
    put(inbox, 1)
    assert not inbox.member.paused
    client.open.clear()
    put(inbox, 2, 3)
    assert inbox.member.paused
    assert client.pumped == []
    client.open.set()
    async with asyncio.timeout(5):
        while inbox.member.paused:
            await asyncio.sleep(0)
    assert subscription.sent == [1, 2, 3]
    assert client.pumped == [inbox.group]
    await subscription.close()


@pytest.mark.parametrize("room", [True, False])
async def test_a_delivery_that_fails_ends_the_feed_and_nothing_else(
    inbox: Inbox, caplog: pytest.LogCaptureFixture, room: bool
) -> None:
    client = Client()
    subscription = Subscription(client, inbox)
    if not room:
        client.open.clear()
    put(inbox, ValueError("no such number"))
    await asyncio.sleep(0.01)
    client.open.set()
    await asyncio.sleep(0.01)
    [(feed, error)] = client.ended
    assert (feed, "no such number" in error.message) == (FEED, True)
    assert "a feed failed" in caplog.text
    put(inbox, 5)
    await asyncio.sleep(0.01)
    assert subscription.sent == []
    await subscription.close()


async def test_whoever_puts_never_hears_of_it(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit loop puts, and serves all the others."""
    left: list[Inbox] = []
    inbox._leave = left.append
    client, troubles = Client(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    client.link_fails = True
    subscription = Subscription(client, inbox)
    put(inbox, ValueError("no such number"))
    await asyncio.sleep(0.01)
    assert (len(client.ended), len(troubles), left) == (1, 1, [inbox])
    monkeypatch.setattr(Client, "has_room", property(lambda client: 1 / 0))
    other = Inbox(cast(Any, None), Member("n", 10), left.append)
    Subscription(client, other)
    put(other, 1)
    await asyncio.sleep(0.01)
    assert left == [inbox, other]
    await subscription.close()


async def test_a_feed_that_fails_does_not_end_the_one_that_was_opened_since(inbox: Inbox) -> None:
    client = Client()
    subscription = Subscription(client, inbox)
    put(inbox, ValueError("no such number"))  # heard of in the next turn of the loop
    await subscription.leave()
    successor = Subscription(client, Inbox(cast(Any, None), Member("m", 10), lambda inbox: None))
    await asyncio.sleep(0.01)
    assert (client.ended, client.feeds) == ([], {FEED: successor})
    await subscription.close()
    await successor.close()


async def test_a_feed_that_cannot_be_read_leaves_its_group(inbox: Inbox) -> None:
    left: list[Inbox] = []
    inbox._leave = left.append
    client = Client()
    subscription = Subscription(client, inbox)
    inbox.stop(Corrupted("the entry fails its checksum", path="a", position=0))
    await asyncio.sleep(0.01)
    assert [type(error) for _, error in client.ended] == [Corrupted]
    assert left == [inbox]
    await subscription.close()
    assert left == [inbox]


async def test_after_leaving_nothing_goes_out(inbox: Inbox) -> None:
    subscription = Subscription(Client(), inbox)
    await subscription.leave()
    put(inbox, 1)
    await asyncio.sleep(0.01)
    assert subscription.sent == []


def leased_range(count: int) -> Any:
    """Leased events, nothing settled."""
    lease: Any = SimpleNamespace(states=bytearray(count), attempt=1)
    return LeasedRange(cast(Any, None), lease, 0, count, lambda: 0.0, lambda group: None)


async def test_what_ran_out_is_let_go_of_and_what_is_out_stays(inbox: Inbox) -> None:
    """Q7, found by review: each lease that ran out was kept until the feed ended."""
    subscription = Subscription(Client(), inbox)
    out = [leased_range(2) for _ in range(3 * SWEEP_LEAST)]
    for each in out:
        put(inbox, each)
        each.lease.states[0] = EXPIRED  # the other event is in somebody's hands
    for _ in range(2_000):
        put(inbox, gone := leased_range(2))
        gone.lease.states[:] = bytes((EXPIRED, EXPIRED))
        assert len(subscription.held) <= 2 * len(out) + 1
    assert list(subscription.held.values())[: len(out)] == out
    for each in out:
        each.lease.states[1] = EXPIRED
    for _ in range(2 * len(out) + 2):
        put(inbox, gone := leased_range(1))
        gone.lease.states[0] = EXPIRED
    assert len(subscription.held) <= SWEEP_LEAST + 1
    await subscription.close()


class Tally(Client):
    """A session that notes what it is told of deliveries."""

    def __init__(self) -> None:
        super().__init__()
        self.hello = SimpleNamespace(supports_ack=True)
        self.counted: list[tuple[int, int]] = []

    def send(self, frame: Frame) -> None:
        assert frame.kind == Kind.DELIVER

    def delivered(self, batch: EventBatch, events: int, fresh: int) -> None:
        self.counted.append((events, fresh))

    def count_settled(self, kind: str, events: int) -> None:
        pass


async def test_what_was_sent_is_not_kept(inbox: Inbox) -> None:
    """Q7: a client may take as long as it likes to settle, and its events may be large."""
    group = QueueGroup("g", GroupSpec(("t",)))
    group.lane("t", 0, cursor=0, end=2)
    group.join("m", 10)
    (lease,) = group.dispatch(0.0)
    batch = EventBatch.build("t", [b"1", b"2"])
    client = Tally()
    wanted = Subscribe("g", group.spec, "m", 10, Identity())
    subscription = QueueSubscription(cast(Any, client), FEED, wanted, inbox)
    inbox.put(LeasedBatch(group, lease, batch, lambda: 0.0, lambda group: None, lambda: 0))
    [(number, held)] = subscription.held.items()
    assert not hasattr(held, "batch")
    subscription.settle(Settlement(number, 2, [0, 1]))
    assert (held.open, client.counted) == (1, [(2, 2)])
    subscription.settle(Settlement(number, 2, [1, 1]))
    assert subscription.held == {}
    await subscription.close()


async def test_what_is_handed_out_after_later_events_of_its_lease_runs_out_too(
    inbox: Inbox,
) -> None:
    """T5, found by review: a client may be at work on several deliveries at a time."""
    group = QueueGroup("g", GroupSpec(("t",), lease_s=10.0))
    group.lane("t", 0, cursor=0, end=6)
    member, now = group.join("m", 10), 0.0
    (lease,) = group.dispatch(now)
    wanted = Subscribe("g", group.spec, "m", 10, Identity())
    subscription = QueueSubscription(cast(Any, Tally()), FEED, wanted, inbox)
    for base in (0, 3):
        batch = EventBatch.build("t", [b"x"] * 3)
        batch.base_offset = base
        inbox.put(LeasedBatch(group, lease, batch, lambda: now, lambda group: None, lambda: 0))
    early, late = subscription.held
    subscription.settle(Settlement(early, 1))
    subscription.settle(Settlement(late, 3, [0, 3]))
    now = 11.0
    assert group.dispatch(now) == []
    assert [STATES[state] for state in lease.states[:3]] == ["expired", "dispatched", "dispatched"]
    now = 100.0
    subscription.settle(Settlement(early, 2, extends=[(1, 50.0)]))
    subscription.settle(Settlement(early, 3))
    assert lease.deadlines[1:3] == [150.0, 110.0]
    group.dispatch(now := 111.0)
    assert [STATES[state] for state in lease.states[:3]] == ["expired", "dispatched", "expired"]
    group.leave(member.id, now)
    assert lease.open == 0
    await subscription.close()


async def test_what_a_client_came_back_without_is_taken_from_it(inbox: Inbox) -> None:
    client = Client()
    subscription = Subscription(client, inbox)
    put(inbox, first := leased_range(2), leased_range(1), done := leased_range(1))
    done.lease.states[0] = ACKED
    subscription.resume({1, 2})
    assert client.taken == []
    subscription.resume({1, 7})
    assert client.taken == [(inbox, [first])]
    assert list(subscription.held) == [1]
    await subscription.close()


@pytest.mark.parametrize(("known", "skip", "fresh"), [(0, [], 4), (10, [3], 3), (12, [0, 3], 1), (14, [0], 0), (99, [], 0)])  # fmt: skip
def test_what_a_group_had_before_is_not_fresh(known: int, skip: list[int], fresh: int) -> None:
    """X10: a batch may lie on both sides of the place that a group had reached."""
    group = QueueGroup("g", GroupSpec(("t",)))
    lane = group.lane("t", 0, cursor=10, end=14)
    group.join("m", 10)
    (lease,) = group.dispatch(0.0)
    batch = EventBatch.build("t", [b"x"] * 4)
    batch.base_offset = 10
    lane.known = known
    leased = LeasedBatch(group, lease, batch, lambda: 0.0, lambda group: None, lambda: 0)
    assert leased.fresh(skip) == fresh
    leased.attempt = 2
    assert leased.fresh(skip) == 0
