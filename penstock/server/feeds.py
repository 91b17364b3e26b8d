"""Feeds: the subscriptions of one session, from Subscribe to their end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.engines.handle import Inbox, Stretch
from penstock.model.errors import BusClosed, InvalidInput, PenstockError
from penstock.server.direct import direct_wish
from penstock.server.inbound import check_subscribe, wanted_by
from penstock.server.outlet import LogOutlet, QueueOutlet, stopped_frame
from penstock.wire import message as say
from penstock.wire.fault import to_error
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import decode, encode

if TYPE_CHECKING:
    from penstock.server.broker import Broker
    from penstock.server.session import Session

MAX_FEEDS = 1_024  # of one session
DIRECT_FEED = 0  # clients number their own feeds from 1


class Feeds(dict[int, QueueOutlet | LogOutlet]):
    """Those that are open, by the number the client gave them."""

    def __init__(self, broker: Broker, session: Session) -> None:
        self.ended: dict[int, Frame] = {}
        """What the client is told of those that ended by themselves."""
        self._broker = broker
        self._session = session
        self._opening: dict[int, asyncio.Future[None]] = {}

    # -- opened and closed by the client -------------------------------------------------------

    async def subscribe(self, frame: Frame) -> Frame:
        """Open a feed."""
        wish = decode(frame.meta, say.Subscribe)
        check_subscribe(wish)
        taken = {*self, *self._opening}
        if wish.feed in taken or wish.feed == DIRECT_FEED or len(taken) >= MAX_FEEDS:
            raise InvalidInput(f"feed {wish.feed} is open already, or {MAX_FEEDS} are")
        wanted = wanted_by(wish, self._session.identity)
        self._session.may_read(wish.spec.patterns)
        self.ended.pop(wish.feed, None)
        opening = self._opening[wish.feed] = asyncio.get_running_loop().create_future()
        adopted: dict[int, list[int]] = {}
        try:
            feed = await self._broker.join(wanted)
            if isinstance(feed, Inbox):
                outlet = QueueOutlet(self._session, wish.feed, wanted, feed)
                adopted = await self._taken_up(outlet, wish.feed, wish.held)
            else:
                self[wish.feed] = LogOutlet(wanted, feed)  # type: ignore[arg-type]
        finally:
            del self._opening[wish.feed]
            opening.set_result(None)
        return Frame(Kind.RESULT, frame.request, encode(say.Joined(adopted)))

    async def _taken_up(
        self, outlet: QueueOutlet, feed: int, held: list[say.Held], *, alone: bool = False
    ) -> dict[int, list[int]]:
        """Open a feed with what its client held; a client that hears of an error has none."""
        self[feed] = outlet
        try:
            return await outlet.adopt(held, alone=alone)
        except BaseException:
            if self.get(feed) is outlet:
                del self[feed]
            await outlet.leave()
            raise

    async def open_direct(self) -> dict[int, list[int]]:
        """Serve what the client registered for: a group of its own, known by its name (row T4).

        Returns what it holds from before a restart of the broker, as Joined does.
        """
        session, outlet = self._session, self.get(DIRECT_FEED)
        hello = session.hello
        if isinstance(outlet, QueueOutlet) and session.restored:  # that Welcome did not arrive
            return outlet.in_hand(hello.held)
        # One that has ended stays so: its client was told, and another may have its name by now.
        if not hello.subscriptions or outlet is not None or DIRECT_FEED in self.ended:
            return {}
        session.may_read(hello.subscriptions)
        wanted = direct_wish(hello, session.identity, self._broker.engine.settings.delivery)
        inbox = await self._broker.join(wanted)
        assert isinstance(inbox, Inbox)
        outlet = QueueOutlet(session, DIRECT_FEED, wanted, inbox)
        return await self._taken_up(outlet, DIRECT_FEED, hello.held, alone=True)

    async def unsubscribe(self, frame: Frame) -> Frame:
        """Close a feed, if it is open."""
        feed = decode(frame.meta, say.Feed).feed
        await self.opened(feed)  # its client may have given up meanwhile
        if (outlet := self.pop(feed, None)) is not None:
            await outlet.close()
        return Frame(Kind.RESULT, frame.request, b"")

    async def opened(self, *feeds: int) -> None:
        """Wait for a subscribe that came just before; without a feed for all of them."""
        for feed in feeds or tuple(self._opening):
            if feed in self._opening:
                await asyncio.shield(self._opening[feed])

    async def close(self) -> list[str]:
        """Leave all groups; returns those that were only this session's."""
        for outlet in list(self.values()):
            await outlet.close()
        groups = [each.wanted.group for each in self.values() if each.wanted.spec.ephemeral]
        self.clear()
        return groups

    async def suspend(self) -> None:
        """Stop all, as the broker does; what queues have leased stays leased."""
        for outlet in list(self.values()):
            if isinstance(outlet, QueueOutlet):
                await outlet.suspend()
            else:
                await outlet.close()
        self.clear()

    # -- what is in them -----------------------------------------------------------------------

    def queues(self) -> list[QueueOutlet]:
        """Its feeds of leased events."""
        return [outlet for outlet in self.values() if isinstance(outlet, QueueOutlet)]

    def leased(self, delivery: int) -> Stretch | None:
        """A delivery of which something is not settled."""
        for outlet in self.queues():
            if delivery in outlet.held:
                return outlet.held[delivery]
        return None

    def drop_settled(self, deliveries: set[int]) -> None:
        """Forget those of these deliveries that are settled."""
        for outlet in self.queues():
            for number in deliveries:
                outlet.drop_settled(number)

    def log(self, feed: int) -> LogOutlet:
        """A log feed that is open."""
        outlet = self.get(feed)
        if not isinstance(outlet, LogOutlet):
            if feed in self.ended:
                raise to_error(decode(self.ended[feed].meta, say.Feed).fault)
            raise BusClosed("the subscription is closed; subscribe again")
        return outlet

    def stopped(self, feed: int, error: PenstockError) -> None:
        """A feed ended by itself: its group is gone, or the data cannot be read."""
        self.pop(feed, None)
        self.ended[feed] = stopped_frame(feed, error)
        while len(self.ended) > MAX_FEEDS:
            del self.ended[next(iter(self.ended))]
        self._session.send(self.ended[feed])
