"""`penstock publish`: events from the command line, from files or from a pipe into a topic.

`InputReader` reads the input in a thread, so that the loop stays free for signals, and a slow input (a
pipe from a running program) is published as it arrives and not only when a batch is full. `Publisher`
sends it and counts exactly which events were acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from penstock.cli import output
from penstock.cli.arguments import DURATION, FUTURE
from penstock.cli.invocation import (
    INTERRUPTED,
    TERMINATED,
    Invocation,
    change,
    complete_topic,
    leaf,
)
from penstock.model.errors import DecodeFailed, InvalidInput, PayloadTooLarge, PenstockError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import datetime

    import penstock

DEFAULT_BATCH = 1_000  # lines in one commit: enough to be fast, few enough to report progress
MAX_BATCH = 100_000  # lines that one commit takes at once
BLOCK_BYTES = 1024 * 1024  # one read call; larger ones save nothing
MAX_BLOCKS_AHEAD = 8  # blocks that are read and not published yet: bounds memory at 8 MiB
STDIN = "-"
BLANK = object()  # replaces a line without a document, so that the others keep their numbers
PROGRESS_AFTER_S = 1.0  # a shorter run needs no progress
PROGRESS_EVERY_S = 0.2
PROGRESS_EVERY_PIPED_S = 5.0  # a log file gets a line, not a moving figure


def parse_headers(pairs: Sequence[str]) -> dict[str, str]:
    """Headers given as NAME=VALUE.

    >>> parse_headers(["source=shop", "query=a=b"])
    {'source': 'shop', 'query': 'a=b'}
    """
    headers = {}
    for text in pairs:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--header {text}: write it as NAME=VALUE")
        headers[name] = value
    return headers


@leaf("publish")
@click.argument("topic", shell_complete=complete_topic)
@click.argument("values", metavar="[VALUE]", nargs=-1)
@click.option(
    "--file", "files", multiple=True, metavar="FILE", help="Publish this file; repeat for several."
)
@click.option("--lines", is_flag=True, help="Each line is an event; VALUE is then a file to read.")
@click.option(
    "--ndjson", is_flag=True, help="Each line is a JSON document; VALUE is then a file to read."
)
@click.option("--key", help="Key of the events: equal keys stay in order.")
@click.option(
    "--header", "pairs", multiple=True, metavar="NAME=VALUE", help="A header; repeat for several."
)
@click.option(
    "--codec",
    help="json, msgpack, raw or a registered one. Default: json for what is JSON, else raw; raw with --lines.",
)
@click.option("--delay", "delay_s", type=DURATION, help="Deliver this much later.")
@click.option("--at", "deliver_at", type=FUTURE, help="Deliver at this time.")
@click.option("--ttl", "ttl_s", type=DURATION, help="Do not deliver after this much time.")
@click.option(
    "--priority", type=click.IntRange(0, 9), default=0, help="0 to 9; higher goes first in a queue."
)
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="Publishing again under this key stores nothing; with --lines or --ndjson the number of the line is added to it.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MAX_BATCH),
    default=DEFAULT_BATCH,
    show_default=True,
    help="Most lines in one commit.",
)
@click.pass_obj
def command(
    invocation: Invocation,
    /,
    values: tuple[str, ...],
    files: tuple[str, ...],
    pairs: tuple[str, ...],
    **options: Any,
) -> None:
    """Publish events to TOPIC; they are durable when the command ends.

    The event is VALUE, or each --file, or stdin. With --lines or --ndjson each line of the files
    named (or of stdin) is one. Ctrl-C in between ends after the commit under way and says exactly
    how many events were acknowledged.
    """
    plan = Plan(headers=parse_headers(pairs), **options)
    _check_usage(plan, values, files)
    paths = [*files, *values] if plan.many else list(files)
    if values == ("-",) and not plan.many and plan.codec is None:
        raise click.UsageError(
            "'-' is no way to name stdin: leave VALUE out to publish what comes in there, or publish this text "
            "with --codec raw"
        )
    if len(values) == 1 and not plan.many and plan.codec is None and os.path.isfile(values[0]):
        raise click.UsageError(
            f"{values[0]!r} is a file here. Publish what is in it with --file {shlex.quote(values[0])}, or "
            "this text with --codec raw"
        )
    direct = None if plan.many or not values else values[0].encode(errors="surrogateescape")
    check_sources(paths)
    if direct is None and not paths:
        paths = [STDIN]
        if sys.stdin.isatty():
            output.note("reading events from the terminal; end with Ctrl-D")
    _publish(invocation, plan, direct, paths)


def _check_usage(plan: Plan, values: Sequence[str], files: Sequence[str]) -> None:
    if plan.lines and plan.ndjson:
        raise click.UsageError("--lines and --ndjson exclude each other")
    if plan.delay_s is not None and plan.deliver_at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    if not plan.many and (len(values) > 1 or (values and files)):
        raise click.UsageError("give one VALUE, or files with --file, or use --lines or --ndjson")
    if plan.idempotency_key is not None and not plan.many and len(files) > 1:
        raise click.UsageError("--idempotency-key names one event; publish the files one by one")


def _publish(invocation: Invocation, plan: Plan, direct: bytes | None, paths: list[str]) -> None:
    max_bytes = invocation.settings().limits.max_payload_bytes
    publishers: list[Publisher] = []

    async def work(bus: penstock.Bus) -> signal.Signals | None:
        publisher = Publisher(bus, plan)
        publishers.append(publisher)
        if direct is not None:
            await publisher.send_one(InputChunk("the value", 1, [direct]))
            return None
        return await publish_all(publisher, paths, max_bytes)

    try:
        received = change(invocation, work, creates=True)
    except PenstockError as error:
        if plan.many and publishers:
            _add_count(error, publishers[0].tally)
        raise
    publisher = publishers[0]
    if received is not None:
        _report_interrupt(invocation, publisher)
        raise click.exceptions.Exit(INTERRUPTED if received == signal.SIGINT else TERMINATED)  # fmt: skip
    _report(invocation, publisher)


def _add_count(error: PenstockError, tally: Tally) -> None:
    """Add to an error how many events were stored before it."""
    error.data["acknowledged"] = tally.acknowledged
    error.message += f". {tally.acknowledged} events were acknowledged before"


def _report_interrupt(invocation: Invocation, publisher: Publisher) -> None:
    tally = publisher.tally
    if invocation.json:
        record = tally.record(publisher.plan.topic)
        output.print_json(record | {"interrupted": True, "unknown": tally.pending})
        return
    text = f"interrupted: {tally.acknowledged} events were acknowledged"
    if tally.pending:
        text += f"; {tally.pending} more were on their way and may or may not be stored"
    output.note(text)


def _report(invocation: Invocation, publisher: Publisher) -> None:
    tally, plan, receipt = publisher.tally, publisher.plan, publisher.receipt
    if plan.many or tally.acknowledged != 1 or receipt is None:
        if invocation.json:
            output.print_json(tally.record(plan.topic))
        else:
            again = f", {tally.duplicates} of them stored before" if tally.duplicates else ""
            output.print_text(f"{tally.acknowledged} events acknowledged{again}")
        return
    where = str(receipt.ids()[0]) if not receipt.scheduled else f"{receipt.topic}, scheduled"
    if not invocation.json:
        output.print_text(where + (" (stored before)" if receipt.duplicate else ""))
        return
    output.print_json(
        {
            "id": None if receipt.scheduled else where,
            "topic": receipt.topic,
            "partition": receipt.partition,
            "offset": receipt.offset,
            "count": receipt.count,
            "token": receipt.token.hex(),
            "duplicate": receipt.duplicate,
            "scheduled": receipt.scheduled,
        }
    )


# -- sending --------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The topic, the form of the input and the options of the events."""

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

    def values(self, chunk: InputChunk) -> tuple[list[Any], str]:
        """The events in a chunk of input, and their codec."""
        codec = self.codec or ("json" if self.ndjson else "raw" if self.lines else None)
        if codec == "raw" and not self.ndjson:
            return list(chunk.pieces), codec
        if codec is None:
            values = [_json_or_bytes(data) for data in chunk.pieces]
            return values, "raw" if isinstance(values[0], bytes) else "json"
        read = _decoder(codec)
        values = []
        for number, data in enumerate(chunk.pieces, chunk.first):
            try:
                values.append(read(data) if data.strip() or not self.ndjson else BLANK)
            except ValueError as error:
                raise DecodeFailed(
                    f"{chunk.source} line {number} is no JSON ({error}); use --codec raw to publish "
                    "the bytes as they are",
                    source=chunk.source,
                    line=number,
                ) from None
        return values, codec


def _decoder(codec: str) -> Callable[[bytes], Any]:
    """A function that reads input for a codec: JSON text if the codec takes values."""
    if codec == "raw":
        return bytes
    if codec == "json":
        return _json
    if codec == "msgpack":
        return msgspec.json.decode
    from penstock.model.codec import codecs

    return codecs.get(codec).decode


def parse_value(text: str) -> Any:
    """A value from the command line: unchanged JSON if it is JSON, otherwise its bytes.

    >>> parse_value("hello")
    b'hello'
    """
    return _json_or_bytes(text.encode(errors="surrogateescape"))


def _json_or_bytes(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return _json(data)
    return data


def _json(data: bytes) -> msgspec.Raw:
    """A checked, unchanged JSON document; ValueError when it is none."""
    data.decode()  # the decoder below does not check strings
    return msgspec.json.decode(data, type=msgspec.Raw)


@dataclass
class Tally:
    """The counts so far; exact at any moment, because only acknowledged events are added."""

    acknowledged: int = 0
    duplicates: int = 0
    bytes: int = 0
    pending: int = 0
    started: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    def add(self, receipt: penstock.Receipt, size: int) -> None:
        """Add acknowledged events."""
        self.acknowledged += receipt.count
        self.duplicates += receipt.count if receipt.duplicate else 0
        self.bytes += size

    def show_progress(self) -> None:
        """Print the counts on stderr, if the last print was some time ago."""
        now = time.monotonic()
        moving = sys.stderr.isatty()
        pause = PROGRESS_EVERY_S if moving else PROGRESS_EVERY_PIPED_S
        if now - self.started < PROGRESS_AFTER_S or now - self._shown < pause:
            return
        self._shown = now
        text = f"{self.acknowledged:,} events acknowledged, {self.rate:,.0f}/s"
        print(f"\r{text}\x1b[K" if moving else text, end="" if moving else "\n", file=sys.stderr, flush=True)  # fmt: skip

    def end_progress(self) -> None:
        """End the line with the moving figure."""
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
    """Sends pieces of input and counts the acknowledged events."""

    def __init__(self, bus: penstock.Bus, plan: Plan) -> None:
        self.bus = bus
        self.plan = plan
        self.tally = Tally()
        self.receipt: penstock.Receipt | None = None
        self._sequence = 0

    async def send_one(self, chunk: InputChunk) -> None:
        """Publish one event with all the options."""
        if chunk.source == "stdin" and not chunk.pieces[0]:
            raise InvalidInput(
                "nothing came in on stdin, so nothing was published. Give a VALUE ('' is an empty event), "
                "or --file"
            )
        values, codec = self.plan.values(chunk)
        self.tally.pending = 1
        self.receipt = await self._publish(values[0], codec, None)
        self.tally.add(self.receipt, len(chunk.pieces[0]))
        self.tally.pending = 0

    async def send_many(self, chunk: InputChunk) -> None:
        """Publish lines together; a blank line of NDJSON is no event, but counts as a line."""
        first = self._sequence + 1
        self._sequence += len(chunk.pieces)
        values, codec = self.plan.values(chunk)
        numbers = list(range(first, first + len(values)))
        if self.plan.ndjson:
            there = [(value, number) for value, number in zip(values, numbers, strict=True) if value is not BLANK]  # fmt: skip
            values, numbers = [value for value, _ in there], [number for _, number in there]
        if not values:
            return
        self.tally.pending = len(values)
        size = sum(map(len, chunk.pieces))
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
        """Publish delayed events one by one, at the same time, so that they share a commit."""
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
    """Ctrl-C during a publish: the first waits for the events under way, the second does not."""

    def __init__(self, reader: InputReader) -> None:
        self.received: signal.Signals | None = None
        self._reader = reader
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A signal that is ignored from the start (a process in the background) stays ignored.
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
        self._reader.stop()


async def publish_all(
    publisher: Publisher, paths: Sequence[str], max_bytes: int
) -> signal.Signals | None:
    """Publish everything; returns the signal that ended it early."""
    reader = InputReader(paths, max_bytes)
    with Interrupts(reader) as interrupts:
        try:
            if publisher.plan.many:
                async for chunk in reader.batches(publisher.plan.batch):
                    await publisher.send_many(chunk)
            else:
                async for chunk in reader.whole_sources():
                    await publisher.send_one(chunk)
        except asyncio.CancelledError:
            if interrupts.received is None:
                raise
        finally:
            publisher.tally.end_progress()
    return interrupts.received


# -- reading the input ----------------------------------------------------------------------------


class InputChunk(NamedTuple):
    """Consecutive pieces of input: lines without their ends, or one whole source."""

    source: str
    first: int
    pieces: list[bytes]


Item = tuple[str, bytes] | OSError | None
"""A block and its source, empty at the source's end; an error; or the end of all."""


def check_sources(paths: Sequence[str]) -> None:
    """Refuse files that cannot be read before anything is published."""
    for path in paths:
        if path == STDIN:
            continue
        if not Path(path).exists() or Path(path).is_dir() or not os.access(path, os.R_OK):
            raise InvalidInput(f"cannot read the file {path}; nothing was published", path=path)


def shown(path: str) -> str:
    """The name of a source for messages."""
    return "stdin" if path == STDIN else path


class InputReader:
    """The inputs of one publish command, read once, in order.

    `stop` may be called at any time: the iteration ends without waiting for more input.
    """

    def __init__(self, paths: Sequence[str], max_event_bytes: int) -> None:
        self._paths = paths
        self._max_event_bytes = max_event_bytes
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self._room = threading.Semaphore(MAX_BLOCKS_AHEAD)
        self._stopped = False
        self._rest = b""
        self._number = 0
        # A daemon thread: a read call that never returns must not keep the process alive.
        threading.Thread(target=self._read, name="penstock-input", daemon=True).start()

    def stop(self) -> None:
        """End the iteration now."""
        self._stopped = True
        self._arrived.set()

    def _read(self) -> None:
        try:
            for path in self._paths:
                self._read_one(path)
            self._hand_over(None)
        except OSError as error:
            self._hand_over(error)

    def _read_one(self, path: str) -> None:
        descriptor = sys.stdin.fileno() if path == STDIN else os.open(path, os.O_RDONLY)
        try:
            while block := os.read(descriptor, BLOCK_BYTES):
                self._room.acquire()
                self._hand_over((path, block))
            self._hand_over((path, b""))
        finally:
            if path != STDIN:
                os.close(descriptor)

    def _hand_over(self, item: Item) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, item)
        except RuntimeError:
            return  # the loop is closed: the command has ended

    def _take(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()

    async def _block(self) -> tuple[str, bytes] | None:
        """The next block and its source; empty at the end of a source, None at the end of all.

        Blocks that were read meanwhile are joined to it: fewer, larger commits under load.
        """
        while not self._items and not self._stopped:
            self._arrived.clear()
            await self._arrived.wait()
        item = None if self._stopped else self._items.popleft()
        if isinstance(item, OSError):
            raise item
        if item is None or not item[1]:
            return item
        path, parts = item[0], [item[1]]
        self._room.release()
        while len(parts) < MAX_BLOCKS_AHEAD and self._items:
            following = self._items[0]
            if not isinstance(following, tuple) or following[0] != path or not following[1]:
                break
            parts.append(following[1])
            self._items.popleft()
            self._room.release()
        return path, b"".join(parts)

    async def whole_sources(self) -> AsyncIterator[InputChunk]:
        """Each source as one event."""
        parts: list[bytes] = []
        size = 0
        while (item := await self._block()) is not None:
            path, block = item
            size += len(block)
            self._check_size(path, 1, size)
            parts.append(block)
            if not block:
                yield InputChunk(shown(path), 1, [b"".join(parts)])
                parts, size = [], 0

    async def batches(self, limit: int) -> AsyncIterator[InputChunk]:
        """The lines read so far, at most `limit` at a time; waits only when there are none."""
        while (item := await self._block()) is not None:
            path, block = item
            lines = self._lines(path, block)
            first = self._number + 1
            self._number = self._number + len(lines) if block else 0
            for start in range(0, len(lines), limit):
                if not self._stopped:
                    yield InputChunk(shown(path), first + start, lines[start : start + limit])

    def _lines(self, path: str, block: bytes) -> list[bytes]:
        if block:
            *lines, self._rest = (self._rest + block).split(b"\n")
        else:
            lines, self._rest = ([self._rest] if self._rest else []), b""
        self._check_size(path, self._number + len(lines) + 1, len(self._rest))
        if b"\r" in block or not block:
            lines = [line.removesuffix(b"\r") for line in lines]
        return lines

    def _check_size(self, path: str, number: int, size: int) -> None:
        if size > self._max_event_bytes:
            raise PayloadTooLarge(
                f"{shown(path)} line {number} is over {self._max_event_bytes} bytes "
                "(limits.max_payload_bytes); split the input into lines with --lines, or raise the limit",
                source=shown(path),
                line=number,
            )
