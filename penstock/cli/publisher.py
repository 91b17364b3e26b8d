"""Sends input to a topic and counts, exactly, what was acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cli.intake import Intake, Stretch
from penstock.model.errors import DecodeFailed, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    import penstock

BLANK = object()  # stands for a line without a document, so that the others keep their numbers
PROGRESS_AFTER_S = 1.0  # shorter runs are over before anybody reads it
PROGRESS_EVERY_S = 0.2
PROGRESS_EVERY_PIPED_S = 5.0  # a log file gets a line, not a moving figure


@dataclass
class Plan:
    """What to publish, and how."""

    topic: str
    lines: bool
    ndjson: bool
    codec: str | None
    key: str | None
    headers: dict[str, str]
    delay_s: float | None
    deliver_at: datetime | None
    ttl_s: float | None
    priority: int
    idempotency_key: str | None
    batch: int

    @property
    def many(self) -> bool:
        """Whether each line is an event."""
        return self.lines or self.ndjson

    def values(self, stretch: Stretch) -> tuple[list[Any], str]:
        """The events in a stretch of input, and their codec."""
        codec = self.codec or ("json" if self.ndjson else "raw" if self.lines else None)
        if codec == "raw" and not self.ndjson:
            return list(stretch.pieces), codec
        if codec is None:
            values = [_json_or_bytes(data) for data in stretch.pieces]
            return values, "raw" if isinstance(values[0], bytes) else "json"
        read = _reader(codec)
        values = []
        for number, data in enumerate(stretch.pieces, stretch.first):
            try:
                values.append(read(data) if data.strip() or not self.ndjson else BLANK)
            except ValueError as error:
                raise DecodeFailed(
                    f"{stretch.source} line {number} is no JSON ({error}); use --codec raw to publish "
                    "the bytes as they are",
                    source=stretch.source,
                    line=number,
                ) from None
        return values, codec


def _reader(codec: str) -> Callable[[bytes], Any]:
    """How input for a codec is understood: JSON text where the codec takes values."""
    if codec == "raw":
        return bytes
    if codec == "json":
        return _json
    if codec == "msgpack":
        return msgspec.json.decode
    from penstock.model.codec import codecs

    return codecs.get(codec).decode


def understood(text: str) -> Any:
    """A value typed on the command line: JSON to the letter where it is JSON, its bytes otherwise.

    >>> understood("hello")
    b'hello'
    """
    return _json_or_bytes(text.encode(errors="surrogateescape"))


def _json_or_bytes(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return _json(data)
    return data


def _json(data: bytes) -> msgspec.Raw:
    """A JSON document checked and kept to the letter; ValueError when it is none."""
    data.decode()  # the check below does not look inside strings
    return msgspec.json.decode(data, type=msgspec.Raw)


@dataclass
class Tally:
    """What came of it so far; right at any moment, because only acknowledged events are added."""

    acknowledged: int = 0
    duplicates: int = 0
    bytes: int = 0
    pending: int = 0
    started: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    def add(self, receipt: penstock.Receipt, size: int) -> None:
        """Events were acknowledged."""
        self.acknowledged += receipt.count
        self.duplicates += receipt.count if receipt.duplicate else 0
        self.bytes += size

    def show_progress(self) -> None:
        """Counts on stderr, now and then."""
        now = time.monotonic()
        moving = sys.stderr.isatty()
        pause = PROGRESS_EVERY_S if moving else PROGRESS_EVERY_PIPED_S
        if now - self.started < PROGRESS_AFTER_S or now - self._shown < pause:
            return
        self._shown = now
        text = f"{self.acknowledged:,} events acknowledged, {self.rate:,.0f}/s"
        print(f"\r{text}\x1b[K" if moving else text, end="" if moving else "\n", file=sys.stderr, flush=True)  # fmt: skip

    def end_progress(self) -> None:
        """Leave the line with the moving figure."""
        if self._shown and sys.stderr.isatty():
            print(file=sys.stderr)

    @property
    def rate(self) -> float:
        """Events per second since the start."""
        return self.acknowledged / max(time.monotonic() - self.started, 1e-9)

    def record(self, topic: str) -> dict[str, Any]:
        """The summary with --json."""
        return {
            "topic": topic,
            "acknowledged": self.acknowledged,
            "duplicates": self.duplicates,
            "bytes": self.bytes,
            "seconds": round(time.monotonic() - self.started, 3),
        }


class Publisher:
    """Sends pieces of input and counts what was acknowledged."""

    def __init__(self, bus: penstock.Bus, plan: Plan) -> None:
        self.bus = bus
        self.plan = plan
        self.tally = Tally()
        self.receipt: penstock.Receipt | None = None
        self._sequence = 0

    async def send_one(self, stretch: Stretch) -> None:
        """Publish one event with everything the options say."""
        if stretch.source == "stdin" and not stretch.pieces[0]:
            raise InvalidInput(
                "nothing came in on stdin, so nothing was published. Give a VALUE ('' is an empty event), "
                "or --file"
            )
        values, codec = self.plan.values(stretch)
        self.tally.pending = 1
        self.receipt = await self._publish(values[0], codec, None)
        self.tally.add(self.receipt, len(stretch.pieces[0]))
        self.tally.pending = 0

    async def send_many(self, stretch: Stretch) -> None:
        """Publish lines together; blank lines of NDJSON are no events, but they count as lines."""
        first = self._sequence + 1
        self._sequence += len(stretch.pieces)
        values, codec = self.plan.values(stretch)
        numbers = list(range(first, first + len(values)))
        if self.plan.ndjson:
            there = [(value, number) for value, number in zip(values, numbers, strict=True) if value is not BLANK]  # fmt: skip
            values, numbers = [value for value, _ in there], [number for _, number in there]
        if not values:
            return
        self.tally.pending = len(values)
        size = sum(map(len, stretch.pieces))
        if self.plan.delay_s is not None or self.plan.deliver_at is not None:
            await self._send_later(values, codec, numbers, size)
        else:
            await self._send_batch(values, codec, numbers, size)
        self.tally.pending = 0
        self.tally.show_progress()

    async def _send_batch(self, values: list[Any], codec: str, numbers: list[int], size: int) -> None:  # fmt: skip
        plan, count = self.plan, len(values)
        keys = None
        if plan.idempotency_key is not None:
            keys = [f"{plan.idempotency_key}:{number}" for number in numbers]
        receipt = await self.bus.publish_many(
            plan.topic,
            values,
            codec=codec,
            keys=[plan.key] * count if plan.key is not None else None,
            headers=[plan.headers] * count if plan.headers else None,
            idempotency_keys=keys,
            ttl_s=plan.ttl_s,
            priorities=[plan.priority] * count if plan.priority else None,
        )
        self.tally.add(receipt, size)

    async def _send_later(self, values: list[Any], codec: str, numbers: list[int], size: int) -> None:  # fmt: skip
        """Events with a time of their own are single publishes; together they share a commit."""
        calls = [self._publish(value, codec, number) for value, number in zip(values, numbers, strict=True)]  # fmt: skip
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if not isinstance(result, BaseException):
                self.tally.add(result, size // len(values))
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _publish(self, value: Any, codec: str, number: int | None) -> penstock.Receipt:
        plan = self.plan
        key = plan.idempotency_key
        return await self.bus.publish(
            plan.topic,
            value,
            codec=codec,
            key=plan.key,
            headers=plan.headers or None,
            idempotency_key=key if key is None or number is None else f"{key}:{number}",
            delay_s=plan.delay_s,
            deliver_at=plan.deliver_at,
            ttl_s=plan.ttl_s,
            priority=plan.priority,
        )


class Interrupts:
    """Ctrl-C during a publish: the first lets what is on its way be acknowledged, the second not."""

    def __init__(self, intake: Intake) -> None:
        self.received: signal.Signals | None = None
        self._intake = intake
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Ignored from the start means somebody put us into the background: it stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.received is not None and self._task is not None:
            self._task.cancel()
        self.received = number
        self._intake.stop()


async def publish_all(
    publisher: Publisher, paths: Sequence[str], max_bytes: int
) -> signal.Signals | None:
    """Publish everything; returns the signal that ended it early."""
    intake = Intake(paths, max_bytes)
    with Interrupts(intake) as interrupts:
        try:
            if publisher.plan.many:
                async for stretch in intake.batches(publisher.plan.batch):
                    await publisher.send_many(stretch)
            else:
                async for stretch in intake.wholes():
                    await publisher.send_one(stretch)
        except asyncio.CancelledError:
            if interrupts.received is None:
                raise
        finally:
            publisher.tally.end_progress()
    return interrupts.received
