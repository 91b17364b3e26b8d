"""What is fuzzed: functions that take any bytes, and raise when the code does what it must not.

`stream`, `frame` and `message` are the pure parts: on hostile bytes they raise ProtocolViolation or
nothing. `connection` is a whole broker, under virtual time and on a disk in memory: whatever one
client sends, it is answered or ignored; the broker stays up, another client is served, and the
folder can be opened again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.log.memory_disk import MemoryDisk
from penstock.model.errors import PenstockError, ProtocolViolation, WrongProtocolVersion
from penstock.model.settings import Settings
from penstock.model.settings_loader import load
from penstock.server.auth import Authenticator
from penstock.server.broker import Broker, Connection
from penstock.server.metrics.counters import Counters
from penstock.server.reload import broker_settings
from penstock.testing.simulation.loop import LoopRuntime, SimClock, SimLoop, kill
from penstock.wire import message as say
from penstock.wire.encodings import MESSAGES, from_mark
from penstock.wire.frame import MAX_PARTS, Frame, Kind
from penstock.wire.stream import StreamReader, decode_frame, encode_frame

LIMIT_BYTES = 1 << 20
MAX_FRAMES = 40  # of one input: more only make it slow
# Virtual seconds after each frame: commits, sends and short timers happen meanwhile.
PAUSE_S = 0.05
# And after the last: leases of a second run out, a session that nobody resumes ends.
AFTER_S = 12.0
MAX_STEPS = 200_000  # callbacks of one input; an honest one needs a few thousand
TOPIC, CONTROL = "orders.created", "control.topic"
# What somebody else works with. No input names it: an admin may harm whom it knows.
UNTOUCHED, UNTOUCHED_GROUP = "untouched.topic", "untouched"


class Finding(AssertionError):
    """The code did what it must not do."""


# -- the pure parts ------------------------------------------------------------------------------


def stream(data: bytes) -> None:
    """A TCP stream in pieces: the first byte says how large they are."""
    if not data:
        return
    step, data = data[0] + 1, data[1:]
    pieces, whole = StreamReader(LIMIT_BYTES), StreamReader(LIMIT_BYTES)
    found: list[Any] = []
    for at in range(0, len(data), step):
        found += pieces.feed(data[at : at + step])
    together = whole.feed(data)
    if [(command, bytes(body)) for command, body in found] != [
        (command, bytes(body)) for command, body in together
    ]:
        raise Finding("the pieces of a stream decide what is in it")
    for each in found:
        _there_and_back(each)


def _there_and_back(each: Any) -> None:
    try:
        first = decode_frame(each, LIMIT_BYTES)
    except ProtocolViolation:
        return
    if first.size_bytes > LIMIT_BYTES:
        raise Finding("a frame is larger than the limit")
    [again] = StreamReader(2 * LIMIT_BYTES).feed(b"".join(encode_frame(first)))
    if decode_frame(again, 2 * LIMIT_BYTES) != first:
        raise Finding("a frame does not survive being sent on")


def frame(data: bytes) -> None:
    """A ZeroMQ message, its parts cut where the data says; and the same bytes as a TCP body."""
    if not data:
        return
    parts: list[bytes] = []
    at = 0
    while at < len(data) and len(parts) <= MAX_PARTS + 2:
        size = data[at]
        parts.append(data[at + 1 : at + 1 + size])
        at += 1 + size
    for read in (lambda: Frame.of_multipart(parts), lambda: Frame.parse(data[0], data[1:])):
        try:
            found = read()
        except (ProtocolViolation, WrongProtocolVersion):
            continue
        _readable(found)


def _readable(found: Frame) -> None:
    try:
        found = from_mark(found)
    except ProtocolViolation:
        return
    kind = MESSAGES.get(found.kind)
    if kind is not None:
        message(bytes([list(MESSAGES).index(found.kind)]) + bytes(found.meta))


def message(data: bytes) -> None:
    """A message: the first byte says of which kind."""
    if not data:
        return
    kind = list(MESSAGES.values())[data[0] % len(MESSAGES)]
    try:
        found = say.decode(data[1:], kind)
    except PenstockError:
        return
    if repr(say.decode(say.encode(found), kind)) != repr(found):  # NaN differs from itself
        raise Finding("a message does not survive being sent on")


# -- a whole broker ------------------------------------------------------------------------------


class Wire:
    """A link that keeps what is sent, and loses its connection when it is closed."""

    peer = "127.0.0.1:1"
    loopback = True

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.closed = False
        self.connection: Connection

    def send(self, frame: Frame) -> None:
        if not self.closed:
            encode_frame(frame)  # raises what the TCP transport would raise
            self.frames.append(frame)

    def pending_bytes(self) -> int:
        return 0

    def rest(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.connection.lost, "closed")


class _Complaints(logging.Handler):
    """Errors that the broker only logs: each is a bug that somebody can trigger from outside."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self.records.append(text)


class House:
    """A broker on a disk in memory, with a topic, a group and somebody who uses it properly."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or _settings()
        self.disk = MemoryDisk()
        self.loop = SimLoop(1, max_steps=MAX_STEPS, thread_delay_s=0.0)
        self.clock = SimClock(self.loop)
        self.problems: list[str] = []
        self.complaints = _Complaints()
        self.loop.set_exception_handler(self._stray)

    def _stray(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def open(self) -> None:
        runtime = LoopRuntime()
        runtime.wall_us = self.clock.wall_us  # type: ignore[method-assign]
        self.engine = EmbeddedEngine(self.disk, self.settings, runtime)
        self.engine.lease_hold_s = self.settings.server.session_s
        await self.engine.open()
        authenticator = Authenticator(self.settings.auth)
        self.broker = Broker(self.engine, self.settings, authenticator, Counters())
        self.broker.now = self.loop.time  # type: ignore[method-assign]
        self.broker.start()

    async def close(self) -> None:
        await self.broker.drain(1.0)
        await self.engine.close()

    def connect(self) -> Wire:
        wire = Wire()
        wire.connection = self.broker.connected(wire)
        return wire

    async def hello(self, wire: Wire, client: str) -> None:
        wire.connection.received(Frame(Kind.HELLO, 0, say.encode(say.Hello(client))))
        await asyncio.sleep(PAUSE_S)

    async def call(self, wire: Wire, kind: Kind, request: int, meta: say.Message) -> Frame:
        """A request of somebody who behaves: it must be answered well."""
        wire.connection.received(Frame(kind, request, say.encode(meta)))
        await asyncio.sleep(4 * PAUSE_S)
        found = [each for each in wire.frames if each.request == request]
        if len(found) != 1 or found[0].kind != Kind.RESULT:
            raise Finding(f"a well-behaved client got {found} for {meta}")
        return found[0]


def _settings() -> Settings:
    flags = {
        "sealing.enabled": False, "journal.file_bytes": 1 << 20, "server.session_s": 5.0,
        "server.heartbeat_s": 2.0, "server.max_frame_bytes": LIMIT_BYTES, "limits.max_batch_events": 1_000,
    }  # fmt: skip
    return broker_settings(load(None, {}, flags))


SPEC = GroupSpec((TOPIC,), retry=Retry((0,), 3), lease_s=1.0)


def connection(data: bytes) -> None:
    """Frames of one client, as they stand in a TCP stream behind the negotiation."""
    play(frames_of(data))


def frames_of(data: bytes) -> list[Frame]:
    """What the transport makes of a stream: frames up to the first broken one."""
    found: list[Frame] = []
    for each in StreamReader(LIMIT_BYTES).feed(data):
        try:
            found.append(from_mark(decode_frame(each, LIMIT_BYTES)))
        except ProtocolViolation:
            break
    return found[:MAX_FRAMES]


def play(frames: Sequence[Frame]) -> None:
    """Let one client send frames to a broker; raises Finding when that harms anything."""
    house = House()
    logger = logging.getLogger("penstock")
    before = logger.propagate
    logger.addHandler(house.complaints)
    logger.propagate = False
    try:
        house.loop.run_until_complete(_life(house, frames))
        house.loop.run_until_complete(_next_life(house))
    finally:
        logger.removeHandler(house.complaints)
        logger.propagate = before
        house.engine.runtime.close()
        kill(house.loop)
    problems = house.problems + house.complaints.records
    if problems:
        raise Finding("\n".join(problems))


async def _life(house: House, frames: Sequence[Frame]) -> None:
    await house.open()
    control = house.connect()
    await house.hello(control, "control")
    drafts = [say.DraftMeta(TOPIC, payloads=[b"%d" % number for number in range(5)])]
    await house.call(control, Kind.PUBLISH, 1, say.Publish(1, drafts))
    await house.call(control, Kind.SUBSCRIBE, 2, say.Subscribe(1, "idle", SPEC, "control", 1))

    guest = house.connect()
    if not frames or frames[0].kind != Kind.HELLO:
        await house.hello(guest, "guest")
    for each in frames:
        if guest.closed:
            break
        guest.connection.received(each)
        await asyncio.sleep(PAUSE_S)
    control.connection.received(Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat())))
    if not guest.closed:
        guest.connection.lost("the test is over")
    await _still_served(house, control)
    control.connection.received(Frame(Kind.BYE, 0, b""))
    await asyncio.sleep(AFTER_S)
    stuck = [each for each in house.broker.sessions.values() if each.link is not None]
    if len(house.broker.connections) or stuck:
        raise Finding(f"{len(stuck)} sessions are attached to connections that are gone")
    await house.close()


async def _still_served(house: House, control: Wire) -> None:
    if house.engine.commits.failed is not None:
        raise Finding(f"the writer was stopped: {house.engine.commits.failed}")
    if control.closed:
        raise Finding("somebody else's connection was closed")
    drafts = [say.DraftMeta(UNTOUCHED, payloads=[b"alive"])]
    await house.call(control, Kind.PUBLISH, 1_001, say.Publish(1_001, drafts))
    spec = GroupSpec((UNTOUCHED,), lease_s=1.0)
    wish = say.Subscribe(1_000, UNTOUCHED_GROUP, spec, "control", 10)
    await house.call(control, Kind.SUBSCRIBE, 1_002, wish)
    delivered = [
        say.decode(each.meta, say.Deliver) for each in control.frames if each.kind == Kind.DELIVER
    ]
    mine = [each for each in delivered if each.feed == 1_000]
    if len(mine) != 1:
        raise Finding(f"a published event was delivered {len(mine)} times")
    done = say.Settle(1, [say.Settlement(mine[0].delivery, 1, [0, 1])])
    control.connection.received(Frame(Kind.SETTLE, 0, say.encode(done)))
    await house.call(control, Kind.FLUSH, 1_003, say.Beat())
    for each in control.frames:
        if each.kind == Kind.REFUSED:
            refused = say.decode(each.meta, say.Refused)
            if refused.delivery == mine[0].delivery:
                raise Finding(f"an ack of somebody else was refused: {refused.fault}")


async def _next_life(house: House) -> None:
    """What the client left behind in the journal must not keep the broker from starting."""
    await house.open()
    control = house.connect()
    await house.hello(control, "control")
    await house.call(control, Kind.READ, 1, say.Read(UNTOUCHED, 0, 0))
    await asyncio.sleep(AFTER_S)
    await house.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "stream": stream,
    "frame": frame,
    "message": message,
    "connection": connection,
}
