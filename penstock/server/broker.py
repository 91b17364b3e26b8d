"""The embedded engine, shared by many clients.

`Broker` knows sessions and no transports: a transport calls `connected`, then `received` and `lost` on the
`Connection` that it gets. A connection becomes part of a session with its Hello; the broker resumes
sessions after a reconnect or a restart, ends those whose clients stay away, and lets a member that joins
a group again replace its former self.

`drain` stops it: consumers finish the events they were handed, and their settlements become durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from penstock.core.admission import Admission
from penstock.core.entry import SessionGone
from penstock.engines import requests
from penstock.engines.embedded.engine import CAPABILITIES, EmbeddedEngine
from penstock.engines.engine import LogFeed, QueueFeed, Request, Subscribe
from penstock.engines.requests import SessionInfo, TenantInfo
from penstock.model.batch import EventBatch
from penstock.model.errors import (
    AccessDenied,
    BusClosed,
    ConnectionLost,
    Deferred,
    Fenced,
    PenstockError,
    ProtocolViolation,
    Rejected,
)
from penstock.model.event import Identity
from penstock.model.settings import Settings
from penstock.server.admin.gate import Authorizer
from penstock.server.client_bytes import ClientBytes, limit_of
from penstock.server.fastpath import FastPath
from penstock.server.logs import LogQuota
from penstock.server.metrics.counters import Counters
from penstock.server.metrics.engine_stats import quotas, troubles_of
from penstock.server.publish import Courtesy
from penstock.server.session import Session
from penstock.server.subscriptions import QueueSubscription
from penstock.server.validation import check_hello, check_join, check_request
from penstock.wire.frame import Frame, Kind
from penstock.wire.limits import MAX_MESSAGE_BYTES, MAX_VALUES
from penstock.wire.message import (
    TRANSACTION_KEYS,
    Hello,
    Refused,
    Welcome,
    decode,
    encode,
    to_fault,
)

if TYPE_CHECKING:
    from penstock.server.transports.link import Link

log = logging.getLogger("penstock.server")

# Heartbeats that a client may miss.
SILENT_BEATS = 3
# Frames behind a Hello that let other tenants' publishes go first. More are taken at once: while they
# waited still more would arrive, and a client that never stops could fill the memory.
COURTEOUS_FRAMES = 8
# Frames against the protocol after which a client is disconnected.
MAX_VIOLATIONS = 16
# A refusal counts as current for this long: clients try again within a minute.
LATELY_S = 60.0
# Rows of each list in `condition`: enough for an operator to see the problem.
MAX_ROWS = 100
# When the broker stops, settlements that clients sent before they were told arrive within this.
HEARD_S = 0.1
# The least time for making settlements durable, even when the time to drain is used up.
DURABLE_S = 1.0
# How often `drain` looks at the events that consumers still hold.
LOOK_AGAIN_S = 0.02


class IdentityCheck(Protocol):
    """Decides which identity a token stands for."""

    def identify(self, token: str, tenant: str, subject: str, *, loopback: bool) -> Identity:
        """The identity behind a token; raises NotAuthenticated or AccessDenied."""
        ...


class Broker:
    """Serves an engine to many clients."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        settings: Settings,
        authenticator: IdentityCheck,
        counters: Counters,
    ) -> None:
        self.engine = engine
        self.counters = counters
        self.id = uuid.uuid4().hex
        self.sessions: dict[str, Session] = {}
        self.connections: set[Connection] = set()
        self.draining = False
        self.obstacles: Callable[[], list[str]] = list
        """The reasons why a client cannot publish at the moment."""
        self.send_buffer_bytes = settings.server.send_buffer_bytes
        self._settings = settings.server
        self._authenticator = authenticator
        self.gate = Authorizer(engine, self.ask)
        self.fastpath = FastPath(settings.fastpath)
        self.courtesy = Courtesy()
        engine.pause_aside = self.courtesy.pause
        self.client_bytes = ClientBytes(limit_of(settings.server))
        self.max_frame_bytes = min(settings.server.max_frame_bytes, self.client_bytes.largest)
        self.refusals = LogQuota(log)
        self._group_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._checker: asyncio.Task[None] | None = None

    @staticmethod
    def now() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def start(self) -> None:
        """Restore the sessions of the journal, and begin to check connections for silence."""
        for id, state in self.engine.state.sessions.items():
            spec = state.spec
            hello = Hello(
                spec.client, subscriptions=list(spec.subscriptions),
                max_inflight=spec.max_inflight, supports_ack=spec.supports_ack,
            )  # fmt: skip
            identity = Identity(spec.tenant, spec.subject, spec.roles)
            session = self.sessions[id] = Session(self, id, hello, identity)
            session.restored = True
        self._checker = asyncio.create_task(self._check_silence(), name="penstock-sessions")

    # -- connections ---------------------------------------------------------------------------

    def connected(self, link: Link) -> Connection:
        """A client connected to a transport."""
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
            self.counters.rejected(full, "")
            raise full
        connection = Connection(self, link)
        self.connections.add(connection)
        self.counters.connection(1)
        return connection

    def failed(self, error: Exception) -> None:
        """Count a request that is answered with an error, or that a transport could not read."""
        self.counters.frame_error(to_fault(error).code)

    def refused(self, error: Rejected) -> None:
        """Count a request that a transport did not take because of a limit."""
        self.counters.rejected(error, "")
        self.failed(error)

    def disconnected(self, connection: Connection, reason: str, *, closed: bool = False) -> None:
        """A connection is gone, `closed` by the client's side; a resumable session waits for another."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.counters.connection(-1)
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
        """Return the leases of a client that closed its connection and has not reconnected."""
        gone = session.link is None and session.heard_at == since
        if gone and not self.draining and self.sessions.get(session.id) is session:
            log.info("leases returned", extra={"session": session.id})
            session.give_up()

    def goodbye(self, connection: Connection) -> None:
        """A client ends its session."""
        session, connection.session = connection.session, None
        self.connections.discard(connection)
        self.counters.connection(-1)
        if session is not None:
            self._end(session, connection)

    def _end(self, session: Session, connection: Connection | None = None) -> None:
        session.detach()  # now, so that nothing more is sent to it
        self.sessions.pop(session.id, None)
        self.engine.spawn(self._close(session, connection))

    async def _close(self, session: Session, connection: Connection | None = None) -> None:
        await self.courtesy.turn()
        await session.close()
        if connection is not None:
            connection.link.close()
        if session.id in self.engine.state.sessions and not self.draining:
            await self.engine.publisher.write_entries([SessionGone(session.id)])

    async def greet(self, connection: Connection, hello: Hello) -> Session:
        """Begin or resume a session."""
        check_hello(hello)
        identity = self._authenticator.identify(
            hello.token, hello.tenant, hello.subject, loopback=connection.link.loopback
        )
        session = self.sessions.get(hello.session) if hello.session else None
        if session is not None and session.identity.tenant != identity.tenant:
            raise Fenced(f"session {hello.session!r} belongs to another tenant")
        begins = session is None
        if session is None:
            session = Session(self, uuid.uuid4().hex, hello, identity)
            if hello.resumable:
                await self.engine.publisher.write_entries([session.entry()])
            self.sessions[session.id] = session
        async with (
            session.greeting_lock
        ):  # an earlier greeting may be under way on a broken connection
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

    async def _check_silence(self) -> None:
        """Drop silent connections, and sessions whose clients stayed away too long."""
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
                    continue  # the broker is not reading from it, so silence means nothing
                if now - connection.heard_at > allowed:
                    connection.link.close()
                    self.disconnected(connection, "silent")
            for session in list(self.sessions.values()):
                if session.link is None and now - session.heard_at > self._settings.session_s:
                    log.info("session expired", extra={"session": session.id})
                    self._end(session)

    # -- for sessions --------------------------------------------------------------------------

    def delivered(self, batch: EventBatch, events: int, fresh: int) -> None:
        """Count events sent to a client; for events new to their group, also the time since the append."""
        waited_s = None
        if fresh:
            waited_s = max(0.0, time.time() - batch.append_time(batch.count - 1) / 1e6)
        size = batch.payload_column.ends()
        self.counters.delivered(
            batch.tenant, batch.topic, events, size[batch.count] - size[0], waited_s, fresh
        )

    async def join(self, wanted: Subscribe) -> QueueFeed | LogFeed:
        """Join a group; a member that joins again under the same name replaces the earlier one.

        A restarted consumer joins while its last session still waits for the old one.
        """
        lock = self._group_locks.setdefault(wanted.group, asyncio.Lock())
        async with lock:  # two members of one name must not join at once
            check_join(self.engine, wanted.identity, wanted.group)
            if wanted.group not in self.engine.state.groups and not wanted.spec.ephemeral:
                # The group was deleted while its member was away: the member's leases mean nothing now.
                wanted = msgspec.structs.replace(wanted, handed={})
            await self.engine.groups.ensure(wanted.group, wanted.spec)
            queue = self.engine.dispatcher.groups.get(wanted.group)
            log_group = self.engine.groups.logs.get(wanted.group)
            if (queue is not None and wanted.member in queue.members) or (
                log_group is not None and wanted.member in log_group.readers
            ):
                await self._replace_member(wanted)
            return await self.engine.subscribe(wanted)

    async def _replace_member(self, wanted: Subscribe) -> None:
        for session in list(self.sessions.values()):
            for feed, subscription in list(session.feeds.items()):
                if (subscription.wanted.group, subscription.wanted.member) == (
                    wanted.group,
                    wanted.member,
                ):
                    words = f"another consumer joined {wanted.group!r} as {wanted.member!r}"
                    session.feeds.stopped(feed, Fenced(f"{words}; this one gets no more"))
                    await subscription.leave()

    async def ask(self, request: Request) -> Any:
        """Answer an administrative request; consumers of a group that is reset hear it before the answer."""
        if isinstance(request, requests.ListSessions):
            return self.session_infos()
        if isinstance(request, requests.ListTenants):
            return tenant_infos(self.engine.admission, self.counters.refusals)
        if isinstance(request, requests.Pressure):
            own = condition(self.engine, self.counters, self.obstacles())
            return await self.engine.ask(request) | own
        check_request(request)
        try:
            answer = await self.engine.ask(request)
        except Rejected as error:
            self.counters.rejected(error, "")
            raise
        if isinstance(request, requests.ResetGroup):
            self._fence(request.group)
        return answer

    def _fence(self, group: str) -> None:
        for session in self.sessions.values():
            for subscription in session.feeds.values():
                if (
                    isinstance(subscription, QueueSubscription)
                    and subscription.wanted.group == group
                ):
                    for number, leased in list(subscription.held.items()):
                        for index in range(leased.count):
                            if leased.lease.states[index + leased.shift]:
                                fault = to_fault(leased.lease.refusal(index + leased.shift))
                                meta = encode(Refused(number, index, fault))
                                session.send(Frame(Kind.REFUSED, 0, meta))
                        subscription.drop_settled(number)

    def session_infos(self) -> list[SessionInfo]:
        """All sessions, for operators."""
        now = self.now()
        return [
            SessionInfo(
                session.id, session.hello.client, session.identity.tenant,
                session.identity.subject, session.hello.agent,
                session.link.peer if session.link is not None else "",
                session.link is not None, session.hello.resumable,
                round(now - session.heard_at, 3), list(session.hello.subscriptions),
                sorted({subscription.wanted.group for subscription in session.feeds.values()}),
                sum(
                    leased.open
                    for subscription in session.feeds.values()
                    if isinstance(subscription, QueueSubscription)
                    for leased in subscription.held.values()
                ),
            )
            for session in self.sessions.values()
        ]  # fmt: skip

    # -- the end -------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Accept no new clients, let consumers finish events in hand, then end all connections."""
        self.draining = True
        self.engine.dispatcher.paused = True
        for session in self.sessions.values():
            session.send(Frame(Kind.DRAIN, 0, b""))
        end = self.now() + seconds
        await finish(self.sessions, end)
        if self._checker is not None:
            self._checker.cancel()
        for session in list(self.sessions.values()):
            # Leases survive a broker that stops, as they survive one that is killed.
            await (session.suspend() if session.hello.resumable else session.close())
        self.sessions.clear()
        for connection in list(self.connections):
            connection.link.close()
        self.connections.clear()
        self.fastpath.close()


class Connection:
    """One connection of a client: without a session until its Hello is accepted."""

    def __init__(self, broker: Broker, link: Link) -> None:
        self.link = link
        self.session: Session | None = None
        self.heard_at = broker.now()
        self._broker = broker
        self._greeting: asyncio.Task[None] | None = None
        self._greeted = False
        self._early: deque[Frame] = deque()
        self._violations = 0

    @property
    def tenant(self) -> str:
        """The client's tenant; "" before its Welcome."""
        return "" if self.session is None else self.session.identity.tenant

    def received(self, frame: Frame) -> None:
        """Take a frame; errors in it are answered at once."""
        self.heard_at = self._broker.now()
        if self._greeting is None or self._greeted:
            self._take(frame)
        else:
            self._early.append(frame)  # sent before the Welcome; few frames fit in that time

    def _take(self, frame: Frame) -> None:
        try:
            if self.session is not None:
                if frame.kind == Kind.BYE:
                    self._broker.goodbye(self)
                else:
                    self.session.received(frame)
            elif self._greeting is not None:
                pass  # the session has ended, or the client is gone
            elif frame.kind == Kind.HELLO:
                hello = decode(frame.meta, Hello)
                self._greeting = asyncio.create_task(self._greet(frame.request, hello))
            else:
                raise ProtocolViolation("the first frame of a client is HELLO")
        except PenstockError as error:
            self.fault(frame.request, error)

    async def _greet(self, request: int, hello: Hello) -> None:
        """Welcome a client, then take its early frames; publishes of known clients go first."""
        courtesy = self._broker.courtesy
        try:
            await courtesy.turn()
            self.session = await self._broker.greet(self, hello)
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("a greeting failed", extra={"peer": self.link.peer})
                error = PenstockError(
                    f"the broker failed: {type(error).__name__}; its log says more"
                )
            elif isinstance(error, AccessDenied):
                # Attempts with wrong tokens must show in the log; the reason never contains a token.
                self._broker.refusals.warning(
                    "client refused", peer=self.link.peer, reason=error.message
                )
            self.fault(request, error)
            self.link.close()
            return
        while self._early:
            if len(self._early) <= COURTEOUS_FRAMES:
                await courtesy.turn()
            if self._early:  # it is empty when the client has gone meanwhile
                self._take(self._early.popleft())
        self._greeted = True

    def fault(self, request: int, error: PenstockError) -> None:
        """Answer with an error; a client that keeps breaking the protocol is disconnected."""
        self._broker.failed(error)
        self.link.send(Frame(Kind.FAULT, request, encode(to_fault(error))))
        self._violations += isinstance(error, ProtocolViolation)
        if self._violations > MAX_VIOLATIONS:
            self._early.clear()
            self.link.close()

    def lost(self, reason: str, *, closed: bool = False) -> None:
        """The transport has lost the connection."""
        self._early.clear()
        self._broker.disconnected(self, reason, closed=closed)


async def finish(sessions: Mapping[str, Session], end: float) -> None:
    """Wait for handlers and for requests, not beyond `end`; then make durable what was settled."""
    # News of events that a client is handing out at this moment arrives a little later.
    heard = time.monotonic() + (HEARD_S if any(map(_holds, sessions.values())) else 0.0)
    while (now := time.monotonic()) < end:
        if now >= heard and not any(map(_at_work, sessions.values())):
            break
        await asyncio.sleep(LOOK_AGAIN_S)
    for session in list(sessions.values()):
        await session.finish(end - time.monotonic())
    durable = asyncio.gather(
        *(session.make_durable() for session in sessions.values()), return_exceptions=True
    )
    # A disk error is reported when the engine is closed. While the disk is full, dead letters wait.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(durable, max(DURABLE_S, end - time.monotonic()))


def _holds(session: Session) -> bool:
    """Whether a connected client holds events that are not settled."""
    return session.link is not None and any(
        subscription.held for subscription in session.feeds.queues()
    )


def _at_work(session: Session) -> bool:
    """Whether the client's consumers were handed some of them; the other events only wait there."""
    return _holds(session) and any(
        subscription.at_work() for subscription in session.feeds.queues()
    )


def tenant_infos(
    admission: Admission, refusals: Mapping[tuple[str, str, str], int]
) -> list[TenantInfo]:
    """Limits and use of each tenant that has limits of its own, stored events, or was refused.

    `refusals` are those of the metrics, by kind, limit and tenant, so that both say the same.

    >>> from penstock.core.admission import AdmissionLimits, TenantLimits
    >>> limits = AdmissionLimits(tenants={"acme": TenantLimits(max_ingress=10)})
    >>> [(each.tenant, each.limits.max_ingress) for each in tenant_infos(Admission(limits), {})]
    [('acme', 10)]
    """
    refused: dict[str, dict[str, int]] = {}
    for (kind, limit, tenant), count in refusals.items():
        refused.setdefault(tenant, {})[f"{kind} {limit}"] = count
    use = admission.use()
    names = {*admission.limits.tenants, *use, *refused}
    return [
        TenantInfo(
            name,
            admission.limits.tenants.get(name, admission.limits.default),
            *use.get(name, (0, 0)),
            refused.get(name, {}),
        )
        for name in sorted(names)
    ]


def condition(
    engine: EmbeddedEngine, counters: Counters, obstacles: Sequence[str]
) -> dict[str, Any]:
    """The broker's part of `penstock doctor`: why clients cannot publish, known problems, limits that
    refuse now, and limits that are used up.
    """
    since_s = time.monotonic() - LATELY_S
    refusing = [
        {"kind": kind, "limit": limit, "tenant": tenant, "refused": counters.refusals[key]}
        for key, at_s in counters.refused_s.items()
        if at_s >= since_s
        for kind, limit, tenant in (key,)
    ]
    full = [
        {"limit": each.quota, "tenant": each.tenant}
        for each in quotas(engine)
        if each.ratio >= 1 and each.quota == "storage_bytes"
    ]
    return {
        "obstacles": list(obstacles),
        "troubles": troubles_of(engine),
        "refusing": refusing[:MAX_ROWS],
        "used_up": full[:MAX_ROWS],
    }
