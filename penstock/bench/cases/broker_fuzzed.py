"""Whether broken frames harm others: publishes are timed beside clients that send nothing but those.

What the hostile clients say is made from a seed: an honest conversation over TCP or ZeroMQ that was
cut, changed or given wrong sizes, or no conversation at all. They come at a bounded rate, because the
question is what a broken frame costs the others, not who can keep the machine busier.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from penstock.bench.cases.broker_fair import NOISY_TOPIC, Turn, beside
from penstock.bench.cases.broker_paced import PACED_PARTS
from penstock.bench.cases.broker_peer import PenstockBroker
from penstock.bench.client_process import ClientProcess, until
from penstock.bench.measure import Meter, Sample
from penstock.model.errors import PenstockError
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.negotiation import NEGOTIATE, offer
from penstock.wire.stream import MAX_BODY_BYTES, MESSAGE_HEAD, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.bench.case import Window

FUZZED_PARTS = (PACED_PARTS[0], "penstock.bench.cases.broker_fuzzed:HostilePart")
HOSTILE_PER_S = 200  # connections, at most
MAX_OPEN = 64
# Half a frame is no error yet: so long does a hostile client wait for the broker to hang up.
PATIENCE_S = 0.1
NOISE_BYTES = 4_096
MAX_FLIPS = 8
# How ZeroMQ begins, for a DEALER without encryption, and the flags of its frames, all of them "long".
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
ZMTP_HEAD = struct.Struct(">BQ")
LAST, MORE, COMMAND = 2, 3, 6


# -- what hostile clients say ----------------------------------------------------------------------


class Speech(NamedTuple):
    """A conversation, in pieces of a first byte and a body."""

    opening: bytes
    """Goes alone: the other side answers with as many bytes before it takes more."""
    head: struct.Struct
    """In front of each piece: its first byte and the size of its body."""
    pieces: list[tuple[int, bytes]]

    def said(self, pieces: list[tuple[int, bytes]] | None = None) -> bytes:
        """It as bytes; with other pieces, if there are any."""
        packed = [
            self.head.pack(first, len(body)) + body
            for first, body in (self.pieces if pieces is None else pieces)
        ]
        return self.opening + b"".join(packed)


def frames() -> list[Frame]:
    """What a client that says Hello and publishes sends."""
    hello = say.Hello("hostile", resumable=False)
    draft = say.DraftMeta(NOISY_TOPIC, payloads=[b"x" * 100] * 10)
    return [
        Frame(Kind.HELLO, 0, say.encode(hello)),
        Frame(Kind.PUBLISH, 1, say.encode(say.Publish(1, [draft]))),
        Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat())),
    ]


def over_tcp() -> Speech:
    """Negotiation and frames, as they stand in a TCP stream."""
    size = MESSAGE_HEAD.size
    bodies = [(each.kind, b"".join(encode_frame(each))[size:]) for each in frames()]
    return Speech(b"", MESSAGE_HEAD, [(NEGOTIATE, offer()[size:]), *bodies])


def over_zmq() -> Speech:
    """Handshake and multipart messages, as ZeroMQ puts them on the wire."""
    pieces = [(COMMAND, READY)]
    for each in frames():
        *parts, last = each.multipart()
        pieces += [*((MORE, bytes(part)) for part in parts), (LAST, bytes(last))]
    return Speech(GREETING, ZMTP_HEAD, pieces)


def noise(speech: Speech, rng: random.Random) -> bytes:
    """No conversation at all."""
    return rng.randbytes(rng.randint(1, NOISE_BYTES))


def truncated(speech: Speech, rng: random.Random) -> bytes:
    """A conversation that ends anywhere, most often within a frame."""
    said = speech.said()
    return said[: rng.randrange(1, len(said))]


def missized(speech: Speech, rng: random.Random) -> bytes:
    """One frame claims to be shorter or longer than it is."""
    at = rng.randrange(len(speech.pieces))
    first, body = speech.pieces[at]
    size = len(body)
    claimed = rng.choice([max(0, size - 1), rng.randrange(size), size + rng.randint(1, 1_000)])
    before, after = speech.said(speech.pieces[:at]), speech.said(speech.pieces[at + 1 :])
    return before + speech.head.pack(first, claimed) + body + after[len(speech.opening) :]


def oversized(speech: Speech, rng: random.Random) -> bytes:
    """A frame that claims 4 GB, before the broker knows who that is or after."""
    at = rng.randrange(1, len(speech.pieces))
    claim = speech.head.pack(speech.pieces[at][0], MAX_BODY_BYTES)
    return speech.said(speech.pieces[:at]) + claim + noise(speech, rng)


def flipped(speech: Speech, rng: random.Random) -> bytes:
    """A conversation in which some bits are wrong."""
    said = bytearray(speech.said())
    for at in rng.sample(range(len(said)), rng.randint(1, MAX_FLIPS)):
        said[at] ^= 1 << rng.randrange(8)
    return bytes(said)


def garbled(speech: Speech, rng: random.Random) -> bytes:
    """Frames of the right size, with noise in all but the first."""
    rest = [(first, rng.randbytes(len(body))) for first, body in speech.pieces[1:]]
    return speech.said([speech.pieces[0], *rest])


async def tell(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytes, opening_bytes: int
) -> None:
    """Say something to a broker as it wants to hear it."""
    if opening_bytes:
        writer.write(said[:opening_bytes])
        await reader.readexactly(opening_bytes)
    writer.write(said[opening_bytes:])
    await writer.drain()


SPEECHES: dict[str, Callable[[], Speech]] = {"tcp": over_tcp, "zmq": over_zmq}
BROKEN: tuple[Callable[[Speech, random.Random], bytes], ...] = (
    noise, truncated, missized, oversized, flipped, garbled,
)  # fmt: skip


# -- in a client's process -------------------------------------------------------------------------


class HostilePart:
    """Hostile clients in a process of their own; each has one connection and one thing to say."""

    def __init__(self) -> None:
        self._hung_up = 0

    async def connect(self, url: str, tenant: str) -> None:
        """Nothing is connected before the attack."""

    async def leave(self) -> None:
        """Nothing is connected any more."""

    async def attack(
        self, transport: str, url: str, seconds: float, start: float, seed: int
    ) -> dict[str, Any]:
        """Connect at a pace, each time with another kind of broken frame."""
        rng, due, begun = random.Random(seed), start, 0
        speech, place = SPEECHES[transport](), urlsplit(url)
        self._hung_up = 0
        under_way: set[asyncio.Task[None]] = set()
        with Meter(seconds) as meter:
            await until(start)
            async with asyncio.TaskGroup() as group:
                while meter.running:
                    if len(under_way) < MAX_OPEN:
                        said = BROKEN[begun % len(BROKEN)](speech, rng)
                        begun += 1
                        where = (str(place.hostname), int(place.port or 0))
                        call = self._bother(where, said, len(speech.opening), meter)
                        task = group.create_task(call)
                        under_way.add(task)
                        task.add_done_callback(under_way.discard)
                    # What was missed is not made up for: the rate is a bound.
                    due = max(due + 1 / HOSTILE_PER_S, time.perf_counter())
                    await until(due)
        return {
            "sample": meter.sample().as_dict(),
            "connections": meter.events,
            "hung_up": self._hung_up,
        }

    async def _bother(
        self, where: tuple[str, int], said: bytes, opening_bytes: int, meter: Meter
    ) -> None:
        begun = time.perf_counter()
        # A broker that does not answer the door is an error of the case.
        reader, writer = await asyncio.open_connection(*where)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await tell(reader, writer, said, opening_bytes)
                await reader.read()
            self._hung_up += 1
        except (ConnectionError, EOFError):
            self._hung_up += 1
        except TimeoutError:
            pass  # it waits for more, as it should
        finally:
            writer.transport.abort()
        meter.add(time.perf_counter() - begun)


# -- in the benchmark's process --------------------------------------------------------------------


async def fuzzed_tcp(window: Window) -> Sample:
    """Publishes of one client, alone and while others send broken frames over TCP."""
    return await _beside("tcp", window)


async def fuzzed_zmq(window: Window) -> Sample:
    """The same with hostile clients over ZeroMQ; the client that is timed speaks TCP."""
    return await _beside("zmq", window)


async def _beside(transport: str, window: Window) -> Sample:
    broker = PenstockBroker()

    def hostile(client: ClientProcess, topic: str, turn: Turn) -> Coroutine[Any, Any, Any]:
        return client.order(
            "attack", transport=transport, url=broker.urls[transport], seconds=turn.seconds,
            start=turn.start, seed=turn.seed,
        )  # fmt: skip

    sample, others = await beside(broker, window, hostile)
    connections, hung_up = (
        sum(each[name] for each in others) for name in ("connections", "hung_up")
    )
    if not hung_up:
        raise PenstockError(
            f"the broker hung up on none of {connections} hostile clients over {transport}: the "
            "figure would mean nothing. Run the case again",
            connections=connections,
        )
    sample.extra.update(connections=connections, hung_up=hung_up)
    return sample
