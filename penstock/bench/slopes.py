"""What things cost when there are N, 2 N and 4 N of them: does anything grow faster than they do?

    python -m penstock.bench.slopes
    python -m penstock.bench.slopes --only joining,sessions

Each case is measured at three sizes, in a folder and a broker of its own. `linear` may cost five times
as much at 4 N as at N, `flat` half as much again and a slack for what the system gives back late.
Ends with 1 when a case grows faster.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock.bench.soak import carry_out, children, disk_bytes, rss_mb
from penstock.model.compressor import compressors
from penstock.testing.broker_process import BrokerProcess
from penstock.wire import message as say
from penstock.wire.frame import BODY_HEAD, Frame, Kind
from penstock.wire.negotiation import offer
from penstock.wire.stream import COMPRESSORS, MESSAGE_HEAD, RAW_SIZE, StreamReader, encode_frame

MIB = 1 << 20
LINEAR_GROWTH = 5.0  # at four times as many: four, and some for what a machine does beside
FLAT_GROWTH = 1.5
WATCH_S = 0.02
FRAME_BYTES = 30 * MIB
CLIENT_BYTES = 64 * MIB
BOUND_BYTES = 64 * MIB
JOINS = 50
FIRING_S = 4.0


class Slope(NamedTuple):
    """One case: what it measures, of how many, and how it may grow."""

    measure: Callable[[Path, int], Awaitable[float]]
    unit: str
    first: int
    flat: bool = False
    slack: float = 0.0

    def holds(self, costs: list[float]) -> bool:
        """Whether costs at N, 2 N and 4 N grow as they may.

        >>> async def nothing(place: Path, count: int) -> float:
        ...     return 0.0
        >>> Slope(nothing, "s", 1).holds([1.0, 2.0, 4.1]), Slope(nothing, "s", 1).holds([1.0, 4.0, 16.0])
        (True, False)
        """
        return costs[-1] <= costs[0] * (FLAT_GROWTH if self.flat else LINEAR_GROWTH) + self.slack


@contextmanager
def largest(reading: Callable[[], float]) -> Iterator[list[float]]:
    """Take readings while the block runs; the list holds the largest so far."""
    found, over = [reading()], threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            found[0] = max(found[0], reading())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield found
    finally:
        over.set()
        watching.join()


# -- schedules, lanes, joins, dead letters ---------------------------------------------------------


async def _put_schedules(bus: penstock.Bus, count: int, **when: Any) -> None:
    async with asyncio.TaskGroup() as puts:
        for number in range(count):
            puts.create_task(bus.schedules.put(f"s{number}", f"tick.t{number % 7}", b"x", **when))


async def opening(place: Path, count: int) -> float:
    """Processor time to open a folder with so many recurring schedules."""
    async with penstock.connect(place) as bus:
        await _put_schedules(bus, count, cron="0 5 * * *")
    began = time.process_time()
    async with penstock.connect(place):
        return time.process_time() - began


async def firing(place: Path, count: int) -> float:
    """Processor time of some seconds in which so many schedules fire each second."""
    async with penstock.connect(place) as bus:
        await _put_schedules(bus, count, every="1s")
        await asyncio.sleep(1)
        began = time.process_time()
        await asyncio.sleep(FIRING_S)
        return time.process_time() - began


async def sharing(place: Path, count: int) -> float:
    """Processor time of two members that take one event from each of so many topics."""
    async with penstock.connect("mem:") as bus:
        for number in range(count):
            await bus.publish(f"work.t{number}", b"x")
        left, done = count, asyncio.Event()

        async def member() -> None:
            nonlocal left
            async with bus.subscribe("work.*", group="g", max_inflight=8) as events:
                async for event in events:
                    await event.ack()
                    left -= 1
                    if not left:
                        done.set()

        began = time.process_time()
        members = [asyncio.create_task(member()) for _ in range(2)]
        await done.wait()
        took = time.process_time() - began
        for each in members:
            each.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        return took


async def joining(place: Path, count: int) -> float:
    """Milliseconds of processor time to join a group of one topic, of so many."""
    async with penstock.connect("mem:") as bus:
        for number in range(count):
            await bus.topics.create(f"other.t{number}")
        await bus.topics.create("mine")
        began = time.process_time()
        for number in range(JOINS):
            async with bus.subscribe("mine", group=f"g{number}"):
                pass
        return 1e3 * (time.process_time() - began) / JOINS


async def burying(place: Path, count: int) -> float:
    """KB of state that stay of so many dead letters when retention took their copies."""
    settings: dict[str, Any] = {
        "retention.age_s": 1.0,
        "sealing.process": False,
        "sealing.grace_s": 0.0,
    }
    async with penstock.connect(place, **settings) as bus:
        async with bus.subscribe("work", group="g", retry=penstock.Retry.none()) as events:
            await bus.publish_many("work", [b"x"] * count)
            for _ in range(count):
                await (await anext(events)).reject("no")
        while await bus.dead_letters.list():
            await bus.topics.seal()
            await asyncio.sleep(1)
        await bus.publish("work", b"x")
        await bus.topics.seal()
    return max(path.stat().st_size for path in (place / "state").glob("*.snap")) / 1e3


# -- what clients make the broker hold -------------------------------------------------------------


async def _welcomed(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection as a client has it after Hello, to write bytes into."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream, seen = StreamReader(64 * MIB), 0
    writer.write(offer())
    while not seen:
        seen += len(stream.feed(await reader.read(1 << 16)))
    writer.writelines(encode_frame(Frame(Kind.HELLO, 0, say.encode(say.Hello("slopes")))))
    while seen < 2:
        seen += len(stream.feed(await reader.read(1 << 16)))
    return reader, writer


async def uploads(place: Path, count: int) -> float:
    """MB that a broker holds more when so many uploads broke off."""
    with BrokerProcess(place).start() as broker:
        before = rss_mb(broker.pid)
        for _ in range(count):
            _, writer = await _welcomed(broker.ports["tcp"])
            writer.write(MESSAGE_HEAD.pack(Kind.PUBLISH, FRAME_BYTES) + bytes(FRAME_BYTES // 2))
            await writer.drain()
            writer.transport.abort()
        await asyncio.sleep(3)
        return max(0.0, rss_mb(broker.pid) - before)


async def bombs(place: Path, count: int) -> float:
    """The most MB that a broker takes while so many clients send a frame that expands."""
    small = compressors.get("zstd").compress(bytes(FRAME_BYTES))
    body = BODY_HEAD.pack(9, 0, COMPRESSORS.index("zstd"), 0, 0) + RAW_SIZE.pack(FRAME_BYTES)
    frame = MESSAGE_HEAD.pack(Kind.PUBLISH, len(body) + len(small)) + body + small
    with BrokerProcess(place).start(server__max_client_bytes=CLIENT_BYTES) as broker:
        clients = [await _welcomed(broker.ports["tcp"]) for _ in range(count)]
        with largest(lambda: rss_mb(broker.pid)) as peak:
            for _, writer in clients:
                writer.write(frame)
            # Each is told that what its frame expands to is no message.
            await asyncio.gather(*(reader.read(1) for reader, _ in clients))
        for _, writer in clients:
            writer.transport.abort()
        return peak[0]


def _own_mb(pid: int) -> float:
    """Memory of a process without the files it reads: the journal is one of them."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    raise ValueError(f"/proc/{pid}/status has no RssAnon")


async def sessions(place: Path, count: int) -> float:
    """MB that a broker holds more after so many short sessions that published and consumed."""
    # Without a cache of events: what each visit published is there to be kept.
    with BrokerProcess(place).start(
        server__session_s=1.0, limits__cache_bytes=0, delivery__lease_s=2.0
    ) as broker:

        async def visit() -> None:
            async with penstock.connect(broker.url()) as bus:
                await bus.publish("visits", b"x")
                async with bus.subscribe("visits", group="g") as events:
                    await (await anext(events)).ack()

        async def visits(number: int) -> None:
            for _ in range(number // 10):
                await asyncio.gather(*(visit() for _ in range(10)))
            await asyncio.sleep(4)

        await visits(WARM_SESSIONS)
        before = _own_mb(broker.pid)
        await visits(count)
        return max(0.0, _own_mb(broker.pid) - before)


WARM_SESSIONS = 2_000  # allocators settle in the first two thousand

# -- the folder and the sealing process ------------------------------------------------------------


async def folder(place: Path, megabytes: int) -> float:
    """The most MB on disk while so many are published at full rate, with a bound of 64 MiB."""
    settings: dict[str, Any] = {"retention.max_bytes": BOUND_BYTES, "journal.file_bytes": 8 * MIB}
    settings |= {"sealing.grace_s": 60, "sealing.target_segment_bytes": 4 * MIB}
    async with penstock.connect(place, **settings) as bus:
        with largest(lambda: disk_bytes(place) / 1e6) as peak:
            for _ in range(megabytes):
                await bus.publish_many("load", [os.urandom(64 << 10) for _ in range(16)])
        return peak[0]


async def sealing(place: Path, megabytes: int) -> float:
    """The most MB of the sealing process for so many that take next to nothing in the journal."""

    def sealer_mb() -> float:
        return max(map(rss_mb, children()), default=0.0)

    async with penstock.connect(place) as bus:
        for number in range(megabytes // 8):
            await bus.publish_many("much", [bytes([number % 256]) * MIB] * 8)
        with largest(sealer_mb) as peak:
            await bus.topics.seal()
        return peak[0]


SLOPES = {
    "opening": Slope(opening, "s", 500),
    "firing": Slope(firing, "s", 300),
    "sharing": Slope(sharing, "s", 1_000),
    "joining": Slope(joining, "ms", 1_000, flat=True, slack=0.2),
    "burying": Slope(burying, "KB", 1_000, flat=True, slack=2.0),
    "uploads": Slope(uploads, "MB", 10, flat=True, slack=40.0),
    "bombs": Slope(bombs, "MB", 8, flat=True, slack=CLIENT_BYTES / 1e6),
    "sessions": Slope(sessions, "MB", 500, flat=True, slack=1.0),
    "folder": Slope(folder, "MB", 250, flat=True),
    "sealing": Slope(sealing, "MB", 160, flat=True, slack=50.0),
}


async def slopes(place: Path, names: list[str]) -> dict[str, Any]:
    """Measure them, one after the other; returns the costs of each and whether all hold."""
    found: dict[str, Any] = {}
    for name in names:
        slope = SLOPES[name]
        counts = [slope.first * times for times in (1, 2, 4)]
        costs = [round(await slope.measure(place / f"{name}-{n}", n), 3) for n in counts]
        holds = slope.holds(costs)
        found[name] = {"counts": counts, "costs": costs, "unit": slope.unit, "holds": holds}
        shown = "  ".join(f"{cost:9.3f} at {n:,}" for n, cost in zip(counts, costs, strict=True))
        may = "flat" if slope.flat else "linear"
        print(f"{name:9} {slope.unit:3} {shown}  {may}: {'yes' if holds else 'NO'}", flush=True)
    return {
        "slopes": found,
        "holds": all(each["holds"] for each in found.values()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "penstock.bench.slopes", *sys.argv[1:]]),
    }


def main() -> int:
    """Run them, print the table, and say whether nothing grew faster than it may."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.slopes", description=__doc__)
    parser.add_argument("--only", default=",".join(SLOPES), help="cases, separated by commas")
    result = carry_out(parser, lambda given, place: slopes(place, given.only.split(",")))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
