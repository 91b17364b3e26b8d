"""kill -9, for real: a process on a real folder is killed at any moment, and its folder examined.

A child publishes, consumes and tells its parent through a pipe what it was promised. The parent
kills it without warning, opens the folder itself and compares. The page cache survives a kill, so
this proves the code against real files and real signals, and the simulator proves it against power.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import penstock

TOPIC, GROUP = "kills.made", "killed"
LONGEST_LIFE_S = 1.2
READY_S = 30.0  # a loaded machine may take long to start an interpreter


@dataclass
class Promises:
    """What the child was told, over all its lives."""

    sent: dict[int, bytes] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    """Offset by number, from receipts."""
    attempts: dict[int, int] = field(default_factory=dict)
    """The last attempt handed out, by offset."""
    flushed: set[int] = field(default_factory=set)
    acked: set[int] = field(default_factory=set)
    redelivered: int = 0
    problems: list[str] = field(default_factory=list)

    def hear(self, line: str) -> None:
        """One line of the child: S number, R number offset, D offset attempt, A offset, F."""
        word, *numbers = line.split()
        values = [int(number) for number in numbers]
        if word == "S":
            self.sent[values[0]] = payload_of(values[0])
        elif word == "R":
            self.places[values[0]] = values[1]
        elif word == "D":
            self._delivered(*values)
        elif word == "A":
            self.acked.add(values[0])
        elif word == "F":
            self.flushed |= self.acked

    def _delivered(self, offset: int, attempt: int) -> None:
        if offset in self.flushed:
            self.problems.append(f"offset {offset} was acked and flushed, and came again")
        if attempt <= self.attempts.get(offset, 0):
            self.problems.append(
                f"offset {offset}: attempt {attempt} after {self.attempts[offset]}"
            )
        self.redelivered += offset in self.attempts
        self.attempts[offset] = attempt
        self.acked.discard(offset)


def payload_of(number: int) -> bytes:
    """The payload of an event: its number and some weight."""
    return b"%d|" % number + b"x" * (number * 37 % 900)


def kill_rounds(rounds: int, *, seed: int = 1, tell: Callable[[str], None] = print) -> int:
    """Kill a child so many times; 0 when every promise was kept."""
    rng = random.Random(seed)
    promises = Promises()
    number = 0
    with tempfile.TemporaryDirectory(prefix="penstock-kill-") as folder:
        for number in range(1, rounds + 1):
            _one_life(folder, number, promises, rng)
            asyncio.run(_examine(folder, promises))
            if promises.problems:
                break
    for problem in promises.problems[:10]:
        tell(f"FINDING {problem}")
    tell(
        f"kills: {number} rounds, {len(promises.places):,} acknowledged, {len(promises.flushed):,} "
        f"acked for good, {promises.redelivered:,} redelivered, {len(promises.problems)} findings"
    )
    return int(bool(promises.problems))


def _one_life(folder: str, number: int, promises: Promises, rng: random.Random) -> None:
    command = [sys.executable, "-m", __name__, folder, str(number)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        ready = child.stdout.readline()
        if ready != b"ready\n":
            promises.problems.append(f"round {number}: the child did not start: {ready!r}")
            return
        time.sleep(rng.random() * LONGEST_LIFE_S)
        child.send_signal(signal.SIGKILL)
        for line in child.stdout.read().decode().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be cut off
                promises.hear(line)
        promises.acked.clear()  # no later flush vouches for what was not flushed in this life
    finally:
        child.kill()
        child.wait(READY_S)
        child.stdout.close()


async def _examine(folder: str, promises: Promises) -> None:
    """Everything acknowledged is there, and nothing that nobody sent."""
    found: dict[int, bytes] = {}
    async with penstock.connect(f"{folder}?mode=ro") as bus:
        if TOPIC in [topic.name for topic in await bus.topics.list()]:
            async for event in bus.replay(TOPIC):
                found[event.offset] = event.payload
    for number, offset in promises.places.items():
        if found.get(offset) != promises.sent[number]:
            promises.problems.append(f"event {number}, acknowledged at {offset}, is not there")
    if sorted(found) != list(range(len(found))):
        promises.problems.append("offsets have holes")
    payloads = set(promises.sent.values())
    for offset, payload in found.items():
        if payload not in payloads:
            promises.problems.append(f"offset {offset} holds {payload[:30]!r}, which nobody sent")
    if len(set(found.values())) != len(found):
        promises.problems.append("an event is stored twice")


# -- the child ---------------------------------------------------------------------------------


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def _publish(bus: penstock.Bus, numbers: list[int], next_number: Callable[[], int]) -> None:
    while True:
        number = next_number()
        _say("S", number)
        receipt = await bus.publish(TOPIC, payload_of(number), idempotency_key=str(number))
        _say("R", number, receipt.offset)
        numbers.append(number)


async def _consume(bus: penstock.Bus, rng: random.Random) -> None:
    async with bus.subscribe(TOPIC, group=GROUP, lease_s=5.0) as events:
        async for event in events:
            _say("D", event.offset, event.attempt)
            if rng.random() < 0.9:
                await event.ack()
                _say("A", event.offset)
            else:
                await event.nack()
            if rng.random() < 0.02:
                covered = "F"
                await bus.flush()
                _say(covered)


async def _child(folder: str, life: int) -> None:
    rng = random.Random(life)
    count = 0

    def next_number() -> int:
        nonlocal count
        count += 1
        return life * 1_000_000 + count

    settings: dict[str, Any] = {
        "journal__file_bytes": 1 << 20,
        "sealing__process": False,
        "sealing__grace_s": 0.1,
    }
    async with penstock.connect(folder, **settings) as bus:
        _say("ready")
        numbers: list[int] = []
        producers = [_publish(bus, numbers, next_number) for _ in range(8)]
        await asyncio.gather(*producers, _consume(bus, rng))


if __name__ == "__main__":
    asyncio.run(_child(sys.argv[1], int(sys.argv[2])))
