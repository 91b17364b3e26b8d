"""Asking: what a client of the broker fetches, reads and administers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.engines import request as requests
from penstock.engines.answers import REQUESTS
from penstock.model.errors import InvalidInput
from penstock.model.parameter import wrong_type
from penstock.server.client_bytes import EXPANDED
from penstock.wire import message as say
from penstock.wire.frame import MAX_PARTS, Frame, Kind
from penstock.wire.message import decode, encode

if TYPE_CHECKING:
    from penstock.server.broker import Broker
    from penstock.server.session import Session

MAX_CHUNK_BYTES = 16 << 20  # of one answer, whatever the client asks for: it is held in memory


class Asking:
    """Answers fetches, reads and administrative requests of one session."""

    def __init__(self, broker: Broker, session: Session) -> None:
        self._broker = broker
        self._session = session

    async def read(self, frame: Frame) -> Frame:
        """Stored batches, as many as fit into one answer."""
        wish = decode(frame.meta, say.Read)
        self._session.may_read((wish.topic,))
        most_bytes = max(0, min(wish.max_bytes, MAX_CHUNK_BYTES))
        account = self._session.account
        await account.room(EXPANDED, most_bytes)
        try:
            return await self._read(frame.request, wish, most_bytes)
        finally:
            account.add(EXPANDED, -most_bytes)

    async def _read(self, request: int, wish: say.Read, most_bytes: int) -> Frame:
        parts: list[bytes] = []
        size = 0
        end = True
        batches = self._broker.engine.read(wish.topic, wish.partition, wish.start, wish.stop)
        async for batch in batches:
            parts.append(batch.encode())
            self._broker.tally.replayed(batch.tenant, batch.topic, batch.count)
            size += len(parts[-1])
            if size >= most_bytes or len(parts) >= MAX_PARTS:
                end = False
                break
        await batches.aclose()  # type: ignore[attr-defined]
        return Frame(Kind.RESULT, request, encode(say.Chunk(end)), parts)

    async def fetch(self, frame: Frame) -> Frame:
        """The next batch of a log feed; the request may come again, and so does the batch then."""
        feed = decode(frame.meta, say.Feed).feed
        await self._session.feeds.opened(feed)
        outlet = self._session.feeds.log(feed)
        batch, epoch = await outlet.fetch(frame.request)
        self._session.keeps_batch(feed, batch.size_bytes)
        self._broker.delivered(batch, batch.count, outlet.reader.fresh(batch))
        return Frame(Kind.RESULT, frame.request, encode(say.Fetched(epoch)), (batch.encode(),))

    async def commit(self, frame: Frame) -> Frame:
        """How far a client is in a log feed."""
        commit = decode(frame.meta, say.Commit)
        await self._session.feeds.opened(commit.feed)
        outlet = self._session.feeds.log(commit.feed)
        outlet.mark(commit)
        await outlet.reader.commit()
        return Frame(Kind.RESULT, frame.request, b"")

    async def ask(self, frame: Frame) -> Frame:
        """Administration, within the rights of the client."""
        wish = decode(frame.meta, say.Ask)
        kind = REQUESTS.get(wish.request)
        if kind is None:
            raise InvalidInput(f"no request is called {wish.request!r}", request=wish.request)
        try:
            request = msgspec.convert(wish.fields, kind)
        except msgspec.ValidationError as error:
            raise wrong_type(error) from None
        answer = await self._broker.gate.ask(self._session.identity, request)
        if isinstance(request, requests.CreateTopic) and request.spec.ephemeral:
            self._session.own_topics.add(request.topic)
        return Frame(Kind.RESULT, frame.request, msgspec.msgpack.encode(answer))

    async def flush(self, frame: Frame) -> Frame:
        """Everything settled so far is durable when it is answered."""
        await self._broker.engine.flush()
        return Frame(Kind.RESULT, frame.request, b"")
