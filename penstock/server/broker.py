"""Broker: the embedded engine, shared by many clients.

It knows sessions and nothing of transports: those call `connected`, then `received` and `lost` on
what they get back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from penstock.core.entry import SessionGone
from penstock.engines import request as requests
from penstock.engines.embedded import CAPABILITIES, EmbeddedEngine
from penstock.engines.engine import LogFeed, QueueFeed, Request
from penstock.engines.engine import Subscribe as Wanted
from penstock.engines.views import SessionInfo
from penstock.model.batch import EventBatch
from penstock.model.errors import (
    BusClosed,
    ConnectionLost,
    Deferred,
    Fenced,
    Rejected,
)
from penstock.model.event import Identity
from penstock.model.settings import Settings
from penstock.server.admin_gate import Gate
from penstock.server.client_bytes import ClientBytes, limit_of
from penstock.server.condition import condition
from penstock.server.connection import Connection
from penstock.server.courtesy import Courtesy
from penstock.server.ending import finished
from penstock.server.fastpath import FastPath
from penstock.server.inbound import check_hello, check_join, check_request
from penstock.server.log_quota import LogQuota
from penstock.server.metrics_counters import Counters
from penstock.server.outlet import QueueOutlet
from penstock.server.session import Session
from penstock.server.tenants import tenants_view
from penstock.wire.bound import MAX_MESSAGE_BYTES, MAX_VALUES
from penstock.wire.fault import to_fault
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import TRANSACTION_KEYS, Hello, Refused, Welcome, encode

if TYPE_CHECKING:
    from penstock.server.link import Link

log = logging.getLogger("penstock.server")

SILENT_BEATS = 3  # heartbeats a client may miss


class Doorkeeper(Protocol):
    """Decides who somebody is."""

    def identify(self, token: str, tenant: str, subject: str, *, loopback: bool) -> Identity:
        """The identity behind a token; raises NotAuthenticated or AccessDenied."""
        ...


class Broker:
    """Serves an engine to many clients."""

    def __init__(
        self, engine: EmbeddedEngine, settings: Settings, doorkeeper: Doorkeeper, tally: Counters
    ) -> None:
        self.engine = engine
        self.tally = tally
        self.id = uuid.uuid4().hex
        self.sessions: dict[str, Session] = {}
        self.connections: set[Connection] = set()
        self.draining = False
        self.obstacles: Callable[[], list[str]] = list
        """What keeps a client that comes now from publishing."""
        self.send_buffer_bytes = settings.server.send_buffer_bytes
        self._settings = settings.server
        self._doorkeeper = doorkeeper
        self.gate = Gate(engine, self.ask)
        self.fastpath = FastPath(settings.fastpath)
        self.courtesy = Courtesy()
        engine.pause_aside = self.courtesy.pause
        self.client_bytes = ClientBytes(limit_of(settings.server))
        self.max_frame_bytes = min(settings.server.max_frame_bytes, self.client_bytes.largest)
        self.refusals = LogQuota(log)
        self._doors: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._minder: asyncio.Task[None] | None = None

    @staticmethod
    def now() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def start(self) -> None:
        """Take up the sessions the journal knows, and mind the clock from now on."""
        for id, state in self.engine.state.sessions.items():
            spec = state.spec
            hello = Hello(
                spec.client, subscriptions=list(spec.subscriptions),
                max_inflight=spec.max_inflight, supports_ack=spec.supports_ack,
            )  # fmt: skip
            identity = Identity(spec.tenant, spec.subject, spec.roles)
            session = self.sessions[id] = Session(self, id, hello, identity)
            session.restored = True
        self._minder = asyncio.create_task(self._mind(), name="penstock-sessions")

    # -- connections ---------------------------------------------------------------------------

    def connected(self, link: Link) -> Connection:
        """A client reached a transport."""
        if self.draining:
            raise BusClosed("the broker is stopping; connect again in a moment")
        if len(self.connections) >= self._settings.max_connections:
            full = Deferred(
                f"{self._settings.max_connections} clients are connected; try again later, or raise "
                "server.max_connections",
                limit="max_connections",
                setting="server.max_connections",
                value=self._settings.max_connections,
                retry_after_s=5.0,
            )
            self.tally.rejected(full, "")
            raise full
        connection = Connection(self, link)
        self.connections.add(connection)
        self.tally.connection(1)
        return connection

    def failed(self, error: Exception) -> None:
        """Count a request that is answered with an error, or what a transport could not read."""
        self.tally.frame_error(to_fault(error).code)

    def refused(self, error: Rejected) -> None:
        """Count a request that a transport did not take because of a limit."""
        self.tally.rejected(error, "")
        self.failed(error)

    def disconnected(self, connection: Connection, reason: str, *, closed: bool = False) -> None:
        """A connection is gone, `closed` by the client's side; its session waits, if it may."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.tally.connection(-1)
        session, connection.session = connection.session, None
        if session is not None and session.link is connection.link:
            log.info("client gone", extra={"session": session.id, "reason": reason})
            self._detach(session, closed=closed)

    def _detach(self, session: Session, *, closed: bool = False) -> None:
        session.detach()
        if not session.hello.resumable:
            self._end(session)
        elif closed:  # most likely its process is dead
            loop = asyncio.get_running_loop()
            grace_s = self._settings.lease_grace_s
            loop.call_later(grace_s, self._give_up, session, session.heard_at)

    def _give_up(self, session: Session, since: float) -> None:
        """A client that closed its connection is not back: its leases wait no longer."""
        gone = session.link is None and session.heard_at == since
        if gone and not self.draining and self.sessions.get(session.id) is session:
            log.info("leases returned", extra={"session": session.id})
            session.give_up()

    def goodbye(self, connection: Connection) -> None:
        """A client leaves for good."""
        session, connection.session = connection.session, None
        self.connections.discard(connection)
        self.tally.connection(-1)
        if session is not None:
            self._end(session, connection)

    def _end(self, session: Session, connection: Connection | None = None) -> None:
        session.detach()  # now, so that nothing is sent to it any more
        self.sessions.pop(session.id, None)
        self.engine.spawn(self._close(session, connection))

    async def _close(self, session: Session, connection: Connection | None = None) -> None:
        await self.courtesy.turn()
        await session.close()
        if connection is not None:
            connection.link.close()
        if session.id in self.engine.state.sessions and not self.draining:
            await self.engine.intake.write_entries([SessionGone(session.id)])

    async def greet(self, connection: Connection, hello: Hello) -> Session:
        """Begin or resume a session."""
        check_hello(hello)
        identity = self._doorkeeper.identify(
            hello.token, hello.tenant, hello.subject, loopback=connection.link.loopback
        )
        session = self.sessions.get(hello.session) if hello.session else None
        if session is not None and session.identity.tenant != identity.tenant:
            raise Fenced(f"session {hello.session!r} belongs to another tenant")
        begins = session is None
        if session is None:
            session = Session(self, uuid.uuid4().hex, hello, identity)
            if hello.resumable:
                await self.engine.intake.write_entries([session.entry()])
            self.sessions[session.id] = session
        async with session.door:  # its last connection may have broken in the middle of this
            if self.sessions.get(session.id) is not session:
                raise ConnectionLost("the session ended meanwhile; connect again")
            await self._welcome(connection, session, hello, identity, begins)
        return session

    async def _welcome(
        self,
        connection: Connection,
        session: Session,
        hello: Hello,
        identity: Identity,
        begins: bool,
    ) -> None:
        resumed = not begins and not session.restored
        session.hello, session.identity = hello, identity
        try:
            adopted = await session.feeds.open_direct()
        except BaseException:
            self._end(session)
            raise
        welcome = Welcome(
            session.id, self.id, resumed, self._settings.heartbeat_s, self._settings.session_s,
            identity.tenant, identity.subject, sorted(CAPABILITIES | {TRANSACTION_KEYS}),
            self.max_frame_bytes, bus=self.engine.audit.log.identity, adopted=adopted,
            now_us=self.engine.runtime.wall_us(), max_message_bytes=MAX_MESSAGE_BYTES, max_values=MAX_VALUES,
        )  # fmt: skip
        session.attach(connection.link, hello, welcome)
        if connection not in self.connections:  # it broke meanwhile
            self._detach(session)
        log.info(
            "client resumed" if resumed else "client connected",
            extra={"session": session.id, "client": hello.client, "peer": connection.link.peer},
        )

    async def _mind(self) -> None:
        """Drop connections that are silent, and sessions that nobody came back to."""
        beat_s = self._settings.heartbeat_s
        while True:
            await asyncio.sleep(beat_s / 2)
            self.client_bytes.look()
            now = self.now()
            for connection in list(self.connections):
                allowed = SILENT_BEATS * max(
                    beat_s, connection.session.hello.heartbeat_s if connection.session else 0.0
                )
                if getattr(connection.link, "holding", False):
                    continue  # we do not listen to it just now, so its silence is ours
                if now - connection.heard_at > allowed:
                    connection.link.close()
                    self.disconnected(connection, "silent")
            for session in list(self.sessions.values()):
                if session.link is None and now - session.heard_at > self._settings.session_s:
                    log.info("session expired", extra={"session": session.id})
                    self._end(session)

    # -- for sessions --------------------------------------------------------------------------

    def delivered(self, batch: EventBatch, events: int, fresh: int) -> None:
        """Count events sent to a client, and for those new to their group how long after the append."""
        waited_s = None
        if fresh:
            waited_s = max(0.0, time.time() - batch.append_time(batch.count - 1) / 1e6)
        size = batch.payload_column.ends()
        self.tally.delivered(
            batch.tenant, batch.topic, events, size[batch.count] - size[0], waited_s, fresh
        )

    async def join(self, wanted: Wanted) -> QueueFeed | LogFeed:
        """Join a group; who comes again under its name takes the place of its former self.

        A consumer that was restarted is back while its last session still waits for it.
        """
        lock = self._doors.setdefault(wanted.group, asyncio.Lock())
        async with lock:  # two under one name must not come in at once
            check_join(self.engine, wanted.identity, wanted.group)
            if wanted.group not in self.engine.state.groups and not wanted.spec.ephemeral:
                # It was deleted while its member was away: what that has in hand is of another group.
                wanted = msgspec.structs.replace(wanted, handed={})
            await self.engine.groups.ensure(wanted.group, wanted.spec)
            queue = self.engine.dispatcher.groups.get(wanted.group)
            log_group = self.engine.groups.logs.get(wanted.group)
            if (queue is not None and wanted.member in queue.members) or (
                log_group is not None and wanted.member in log_group.readers
            ):
                await self._make_room(wanted)
            return await self.engine.subscribe(wanted)

    async def _make_room(self, wanted: Wanted) -> None:
        for session in list(self.sessions.values()):
            for feed, outlet in list(session.feeds.items()):
                if (outlet.wanted.group, outlet.wanted.member) == (wanted.group, wanted.member):
                    words = f"another consumer joined {wanted.group!r} as {wanted.member!r}"
                    session.feeds.stopped(feed, Fenced(f"{words}; this one gets no more"))
                    await outlet.leave()

    async def ask(self, request: Request) -> Any:
        """Administer; whoever holds events of a group that is reset hears it before the answer."""
        if isinstance(request, requests.ListSessions):
            return self.sessions_view()
        if isinstance(request, requests.ListTenants):
            return tenants_view(self.engine.admission, self.tally.refusals)
        if isinstance(request, requests.Pressure):
            own = condition(self.engine, self.tally, self.obstacles())
            return await self.engine.ask(request) | own
        check_request(request)
        try:
            answer = await self.engine.ask(request)
        except Rejected as error:
            self.tally.rejected(error, "")
            raise
        if isinstance(request, requests.ResetGroup):
            self._fence(request.group)
        return answer

    def _fence(self, group: str) -> None:
        for session in self.sessions.values():
            for outlet in session.feeds.values():
                if isinstance(outlet, QueueOutlet) and outlet.wanted.group == group:
                    for number, leased in list(outlet.held.items()):
                        for index in range(leased.count):
                            if leased.lease.states[index + leased.shift]:
                                fault = to_fault(leased.lease.refusal(index + leased.shift))
                                meta = encode(Refused(number, index, fault))
                                session.send(Frame(Kind.REFUSED, 0, meta))
                        outlet.drop_settled(number)

    def sessions_view(self) -> list[SessionInfo]:
        """All sessions, for operators."""
        now = self.now()
        return [
            SessionInfo(
                session.id, session.hello.client, session.identity.tenant,
                session.identity.subject, session.hello.agent,
                session.link.peer if session.link is not None else "",
                session.link is not None, session.hello.resumable,
                round(now - session.heard_at, 3), list(session.hello.subscriptions),
                sorted({outlet.wanted.group for outlet in session.feeds.values()}),
                sum(
                    leased.open
                    for outlet in session.feeds.values()
                    if isinstance(outlet, QueueOutlet)
                    for leased in outlet.held.values()
                ),
            )
            for session in self.sessions.values()
        ]  # fmt: skip

    # -- the end -------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take no new clients, let the others finish what they are at, then end all connections."""
        self.draining = True
        self.engine.dispatcher.paused = True
        for session in self.sessions.values():
            session.send(Frame(Kind.DRAIN, 0, b""))
        end = self.now() + seconds
        await finished(self.sessions, end)
        if self._minder is not None:
            self._minder.cancel()
        for session in list(self.sessions.values()):
            # Leases outlive a broker that stops as they outlive one that dies.
            await (session.suspend() if session.hello.resumable else session.close())
        self.sessions.clear()
        for connection in list(self.connections):
            connection.link.close()
        self.connections.clear()
        self.fastpath.close()
