"""Whether broken frames harm others: publishes are timed beside clients that send nothing but those.

What the hostile clients say is made from a seed: an honest conversation that was cut, changed or
given wrong sizes, or no conversation at all. They come at a bounded rate, because the question is
what a broken frame costs the others, not who can keep the machine busier.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.bench.cases.broker_fair import NOISY_TOPIC, beside
from penstock.bench.cases.broker_paced import PACED_PARTS
from penstock.bench.cases.broker_peer import PenstockBroker
from penstock.bench.client_process import ClientProcess, until
from penstock.bench.measure import Meter, Sample
from penstock.model.errors import PenstockError
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.negotiation import offer
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


# -- what hostile clients say ----------------------------------------------------------------------


def honest() -> list[bytes]:
    """The messages of a client that negotiates, says Hello and publishes."""
    hello = say.Hello("hostile", resumable=False)
    draft = say.DraftMeta(NOISY_TOPIC, payloads=[b"x" * 100] * 10)
    frames = [
        Frame(Kind.HELLO, 0, say.encode(hello)),
        Frame(Kind.PUBLISH, 1, say.encode(say.Publish(1, [draft]))),
        Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat())),
    ]
    return [offer(), *(b"".join(encode_frame(frame)) for frame in frames)]


def noise(rng: random.Random) -> bytes:
    """No conversation at all."""
    return rng.randbytes(rng.randint(1, NOISE_BYTES))


def truncated(rng: random.Random) -> bytes:
    """A conversation that ends anywhere, most often within a frame."""
    said = b"".join(honest())
    return said[: rng.randrange(1, len(said))]


def missized(rng: random.Random) -> bytes:
    """One frame claims to be shorter or longer than it is."""
    messages = honest()
    at = rng.randrange(len(messages))
    command, size = MESSAGE_HEAD.unpack_from(messages[at])
    claimed = rng.choice([0, rng.randrange(size), size + rng.randint(1, 1_000)])
    messages[at] = MESSAGE_HEAD.pack(command, claimed) + messages[at][MESSAGE_HEAD.size :]
    return b"".join(messages)


def oversized(rng: random.Random) -> bytes:
    """A frame that claims 4 GB, before the broker knows who that is or after."""
    messages = honest()
    kept = messages[: rng.randrange(1, len(messages))]
    return b"".join(kept) + MESSAGE_HEAD.pack(int(Kind.PUBLISH), MAX_BODY_BYTES) + noise(rng)


def flipped(rng: random.Random) -> bytes:
    """A conversation in which some bits are wrong."""
    said = bytearray(b"".join(honest()))
    for at in rng.sample(range(len(said)), rng.randint(1, MAX_FLIPS)):
        said[at] ^= 1 << rng.randrange(8)
    return bytes(said)


BROKEN: tuple[Callable[[random.Random], bytes], ...] = (
    noise, truncated, missized, oversized, flipped,
)  # fmt: skip


# -- in a client's process -------------------------------------------------------------------------


class HostilePart:
    """Hostile clients in a process of their own; each has one connection and one thing to say."""

    def __init__(self) -> None:
        self._address = ("", 0)
        self._hung_up = 0

    async def connect(self, url: str, tenant: str) -> None:
        """Know where the broker is; nothing is connected before the attack."""
        place = urlsplit(url)
        self._address = (str(place.hostname), int(place.port or 0))

    async def leave(self) -> None:
        """Nothing is connected any more."""

    async def attack(self, seconds: float, start: float, seed: int) -> dict[str, Any]:
        """Connect at a pace, each time with another kind of broken frame."""
        rng, due, begun = random.Random(seed), start, 0
        self._hung_up = 0
        under_way: set[asyncio.Task[None]] = set()
        with Meter(seconds) as meter:
            await until(start)
            async with asyncio.TaskGroup() as group:
                while meter.running:
                    if len(under_way) < MAX_OPEN:
                        said = BROKEN[begun % len(BROKEN)](rng)
                        begun += 1
                        task = group.create_task(self._bother(said, meter))
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

    async def _bother(self, said: bytes, meter: Meter) -> None:
        begun = time.perf_counter()
        # A broker that does not answer the door is an error of the case.
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(said)
                await writer.drain()
                await reader.read()
            self._hung_up += 1
        except ConnectionError:
            self._hung_up += 1
        except TimeoutError:
            pass  # it waits for more, as it should
        finally:
            writer.transport.abort()
        meter.add(time.perf_counter() - begun)


# -- in the benchmark's process --------------------------------------------------------------------


async def fuzzed(window: Window) -> Sample:
    """Publishes of one client, alone and while others send broken frames."""

    def hostile(client: ClientProcess, topic: str, start: float) -> Coroutine[Any, Any, Any]:
        return client.order("attack", seconds=window.seconds, start=start, seed=window.turn)

    sample, other = await beside(PenstockBroker(), window, hostile)
    connections, hung_up = other["connections"], other["hung_up"]
    if not hung_up:
        raise PenstockError(
            f"the broker hung up on none of {connections} hostile clients: the figure would mean "
            "nothing. Run the case again",
            connections=connections,
        )
    sample.extra.update(connections=connections, hung_up=hung_up)
    return sample
