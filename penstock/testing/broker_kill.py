"""kill -9 of a broker at any moment, under load, again and again; every promise is checked.

Producers, consumers and a reader of the log talk to a broker in a process of its own, over TCP and
ZeroMQ, and note what they were promised. The broker is killed without warning and started again,
round after round, while they go on. In the end everything is drained, and the folder is examined
by a process that trusts nobody.

    python -m penstock.testing.broker_kill --rounds 200

It exits with 1 when something confirmed is lost, something is stored twice or was never sent, an ack
that was flushed is delivered again, or the log is read with a gap.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from penstock.testing.broker_process import BrokerProcess

TOPIC, GROUP, READERS = "kills.made", "killed", "readers"
LONGEST_LIFE_S = 1.5
# Short, so that what was under way when the broker died comes again within a round or two.
SESSION_S = 3.0
LEASE_S = 6.0
DRAIN_S = 120.0  # a loaded machine may take long to deliver the rest
FLAGS: dict[str, Any] = {
    "server__session_s": SESSION_S,
    "journal__file_bytes": 1 << 20,
    "sealing__process": False,
    "sealing__grace_s": 0.5,
}
PATIENT = penstock.Retry(ladder_ms=(0, 20, 100), max_attempts=1_000)
# A batch that was fetched behind one commit may be looked at after the next one, or after the next
# kill: the reader has others at hand. So it is held to the commits of this many lives.
FETCHED_LIVES = 3
MAX_BEHIND = 2_000  # events that are stored and were not delivered yet
MAX_SHOWN = 10  # findings that are printed; one is enough to know


def payload_of(number: int) -> bytes:
    """The payload of an event: its number and some weight."""
    return b"%d|" % number + b"x" * (number * 37 % 700)


@dataclass
class Ledger:
    """What the clients were promised, over all lives of the broker."""

    sent: set[int] = field(default_factory=set)
    confirmed: dict[int, int] = field(default_factory=dict)
    """Offset by number, from receipts."""
    unsent: set[int] = field(default_factory=set)
    """Publishes that failed with the assurance that nothing was sent."""
    unknown: set[int] = field(default_factory=set)
    """Publishes that failed without one: stored once or not at all."""
    attempts: dict[int, int] = field(default_factory=dict)
    """The last attempt handed out, by offset."""
    ends: dict[int, str] = field(default_factory=dict)
    """What the consumer last did with an offset: acked, nacked, or nothing yet."""
    flushed: set[int] = field(default_factory=set)
    again: Counter[str] = field(default_factory=Counter)
    """Deliveries beyond the first, by what had happened to the one before."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def delivered(self, event: penstock.Event) -> None:
        """A consumer was handed an event."""
        offset, attempt = event.offset, event.attempt
        self.counts["delivered"] += 1
        if offset in self.flushed:
            self.problems.append(f"offset {offset} was acked and flushed, and came again")
        if offset in self.attempts:
            self.again[self.ends[offset]] += 1
            if attempt <= self.attempts[offset]:
                before = self.attempts[offset]
                self.problems.append(f"offset {offset}: attempt {attempt} after {before}")
        self.attempts[offset] = attempt
        self.ends[offset] = "in hand"

    def examine(self, found: dict[int, bytes]) -> None:
        """Compare with what the log holds, by offset."""
        numbers = Counter(int(payload.partition(b"|")[0]) for payload in found.values())
        for number, offset in self.confirmed.items():
            if found.get(offset) != payload_of(number):
                self.problems.append(f"event {number}, confirmed at {offset}, is not there")
        for number, times in numbers.items():
            if times > 1:
                self.problems.append(f"event {number} is stored {times} times")
            if number not in self.sent:
                self.problems.append(f"event {number} is stored, and nobody sent it")
            elif number in self.unsent:
                self.problems.append(f"event {number} is stored, and was called not sent")
        if sorted(found) != list(range(len(found))):
            self.problems.append("offsets have holes")
        for offset in sorted(set(found) - set(self.attempts)):
            self.problems.append(f"offset {offset} was never delivered")
        for offset, end in self.ends.items():
            if end != "acked":
                self.problems.append(f"offset {offset} was last {end}, and did not come again")

    def report(self, stored: int, seconds: float) -> str:
        """Everything counted, as text."""
        again = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.again.items()))
        errors = ", ".join(
            f"{self.counts[kind]:,} {kind}" for kind in sorted(self.counts) if "fail" in kind
        )
        return (
            f"broker kills: {self.counts['kills']} rounds in {seconds:,.0f} s\n"
            f"  published confirmed {len(self.confirmed):,}, failed not sent {len(self.unsent):,}, "
            f"failed unknown {len(self.unknown):,}, stored {stored:,}\n"
            f"  delivered {self.counts['delivered']:,} of {len(self.attempts):,} events, "
            f"acked {sum(end == 'acked' for end in self.ends.values()):,}, "
            f"of these flushed {len(self.flushed):,}\n"
            f"  delivered again: {again or 'none'}; {errors or 'no flush or ack failed'}\n"
            f"  read from the log {self.counts['read']:,}, again {self.counts['read again']:,}\n"
            f"  findings {len(self.problems)}"
        )


class Clients:
    """Everybody who works while the broker is killed."""

    def __init__(self, ledger: Ledger, broker: BrokerProcess, rng: random.Random) -> None:
        self._ledger = ledger
        self._broker = broker
        self._rng = rng
        self._numbers: Iterator[int] = iter(range(1, sys.maxsize))
        self._publishing = True
        self._working = True
        self._tasks: list[asyncio.Task[None]] = []
        self._buses: list[penstock.Bus] = []
        self._committed = self._floor = 0
        """Where the reader's last commit stands, and below which it need not read again."""
        self._commits: deque[int] = deque(maxlen=FETCHED_LIVES)

    async def start(self) -> None:
        """Connect them and let them work."""
        # The second of the producers is impatient: its publishes fail while the broker is down.
        for transport, deadline_s in (("tcp", 60.0), ("zmq", 0.7)):
            bus = await self._connect(transport, deadline_s)
            self._tasks += [asyncio.create_task(self._produce(bus)) for _ in range(4)]
        for transport in ("tcp", "zmq"):
            bus = await self._connect(transport, 30.0)
            self._tasks.append(asyncio.create_task(self._consume(bus)))
        self._tasks.append(asyncio.create_task(self._read(await self._connect("tcp", 30.0))))

    async def _connect(self, transport: str, deadline_s: float) -> penstock.Bus:
        bus = penstock.connect(
            self._broker.url(transport), client__deadline_s=deadline_s, client__reconnect_max_s=0.2,
            client__heartbeat_s=0.5,
        )  # fmt: skip
        self._buses.append(await bus.open())
        return bus

    def check(self) -> None:
        """Raise what ended one of them: none may end by itself."""
        for task in self._tasks:
            if task.done():
                task.result()

    def brace(self) -> None:
        """The broker is about to be killed."""
        self._commits.append(self._committed)
        self._floor = min(self._commits)

    async def finish(self) -> None:
        """No more publishes; wait until all that is stored is delivered and acked."""
        self._publishing = False
        control, end = self._buses[0], time.monotonic() + DRAIN_S
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            self.check()
            info = await control.groups.info(GROUP)
            if not info.lag:
                break
        self._working = False
        await asyncio.gather(*self._tasks)
        for bus in self._buses:
            await bus.close()

    # -- what they do ----------------------------------------------------------------------------

    async def _produce(self, bus: penstock.Bus) -> None:
        ledger, rng = self._ledger, self._rng
        while self._publishing:
            if len(ledger.confirmed) - len(ledger.attempts) > MAX_BEHIND:
                await asyncio.sleep(0.05)  # the consumers are to see nearly everything
                continue
            numbers = [next(self._numbers) for _ in range(rng.choice((1, 1, 1, 1, 7)))]
            ledger.sent.update(numbers)
            payloads = [payload_of(number) for number in numbers]
            try:
                if len(numbers) == 1:
                    receipt = await bus.publish(TOPIC, payloads[0])
                else:
                    receipt = await bus.publish_many(TOPIC, payloads)
            except penstock.ConnectionFailed as error:
                kind = ledger.unsent if error.outcome == "not sent" else ledger.unknown
                kind.update(numbers)
                continue
            for number, offset in zip(numbers, range(receipt.offset, sys.maxsize), strict=False):
                ledger.confirmed[number] = offset

    async def _consume(self, bus: penstock.Bus) -> None:
        unflushed: set[int] = set()
        held: list[penstock.Event] = []
        subscription = bus.subscribe(
            TOPIC, group=GROUP, lease_s=LEASE_S, retry=PATIENT, max_inflight=32
        )
        async with subscription as events:
            while self._working:
                event = await events.get(timeout_s=0.1)
                if event is not None:
                    unflushed.discard(event.offset)
                    self._ledger.delivered(event)
                    held.append(event)
                if held and (event is None or self._rng.random() < 0.9):
                    await self._settle(held.pop(0), unflushed)
                if event is None or self._rng.random() < 0.03:
                    await self._flush(bus, unflushed)

    async def _settle(self, event: penstock.Event, unflushed: set[int]) -> None:
        ledger = self._ledger
        try:
            if self._rng.random() < 0.03:
                await event.nack()
                end = "nacked"
            else:
                await event.ack()
                end = "acked"
        except penstock.DeliveryError:
            ledger.counts["acks failed"] += 1
            return
        if ledger.attempts[event.offset] == event.attempt:  # else it came again before this
            ledger.ends[event.offset] = end
            if end == "acked":
                unflushed.add(event.offset)

    async def _flush(self, bus: penstock.Bus, unflushed: set[int]) -> None:
        covered = set(unflushed)
        try:
            await bus.flush()
        except (penstock.ConnectionFailed, penstock.DeliveryError):
            self._ledger.counts["flushes failed"] += 1
        else:
            self._ledger.flushed |= {
                offset for offset in covered if self._ledger.ends[offset] == "acked"
            }
        unflushed -= covered

    async def _read(self, bus: penstock.Bus) -> None:
        """Read the log in order and commit: after a restart it goes on from the last commit."""
        expected = 0
        async with bus.subscribe(TOPIC, group=READERS, mode="log") as events:
            while self._working:
                event = await events.get(timeout_s=0.1)
                if event is None:
                    continue
                self._ledger.counts["read"] += 1
                self._ledger.counts["read again"] += event.offset < expected
                if not self._floor <= event.offset <= expected:
                    self._ledger.problems.append(
                        f"offset {event.offset} was read after {expected - 1}, and {self._floor} was "
                        "committed long before the broker was killed"
                    )
                expected = max(expected, event.offset + 1)
                if self._rng.random() < 0.02:
                    here = event.offset + 1
                    try:
                        await events.commit()
                        self._committed = here
                    except penstock.PenstockError:
                        self._ledger.counts["commits failed"] += 1


async def _rounds(folder: Path, rounds: int, ledger: Ledger, rng: random.Random) -> int:
    """Kill so many times, then let everybody finish; returns how many events are stored."""
    broker = await asyncio.to_thread(BrokerProcess(folder).start, **FLAGS)
    try:
        clients = Clients(ledger, broker, rng)
        await clients.start()
        for _ in range(rounds):
            await asyncio.sleep(rng.random() * LONGEST_LIFE_S)
            ledger.counts["kills"] += 1
            clients.brace()
            await asyncio.to_thread(broker.kill)
            clients.check()
            await asyncio.to_thread(broker.start, **FLAGS)
            if ledger.problems:
                break
        await clients.finish()
    finally:
        await asyncio.to_thread(broker.stop)
    found: dict[int, bytes] = {}
    async with penstock.connect(f"{folder}?mode=ro") as bus:
        async for event in bus.replay(TOPIC):
            found[event.offset] = event.payload
    ledger.examine(found)
    return len(found)


def broker_kill_rounds(
    rounds: int, *, seed: int = 1, tell: Callable[[str], None] = print
) -> tuple[int, Ledger]:
    """Kill a broker so many times; 0 and the ledger when every promise was kept."""
    ledger, began = Ledger(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-broker-kill-") as folder:
        stored = asyncio.run(_rounds(Path(folder) / "data", rounds, ledger, random.Random(seed)))
    for problem in ledger.problems[:MAX_SHOWN]:
        tell(f"FINDING {problem}")
    tell(ledger.report(stored, time.monotonic() - began))
    return int(bool(ledger.problems)), ledger


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a broker under load and check its promises.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    sys.exit(broker_kill_rounds(chosen.rounds, seed=chosen.seed)[0])


if __name__ == "__main__":
    main()
