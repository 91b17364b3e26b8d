"""Structured logs of the daemon: one line for each record on stderr, as text or as JSON.

A record is an event in a few words, and fields beside it, which `extra` carries:

    log = logging.getLogger("penstock.server")
    log.info("client connected", extra={"peer": "10.0.0.7:40112", "tenant": "acme"})

A thread writes the lines, so that a terminal or a pipe without a reader never stops the broker; lines
that do not fit its queue are counted, and a later line says how many. The thread writes a few times a
second, because the broker's loop waits whenever it wakes up.

`LogQuota` limits the lines about refused clients. A line costs the broker's loop about as much as an
event, and a client that sends broken frames all day must not be able to spend that;
`penstock_frame_errors_total` counts all of them.
"""

from __future__ import annotations

import datetime
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TextIO

import msgspec

from penstock.log.disk import NO_ROOM

ROOT = "penstock"
QUEUE_LINES = 10_000  # a few MB: minutes of a busy broker, and never more than that in memory
GATHER_S = 0.05  # the first line waits this long, so that one write takes all that follow it
FLUSH_S = 2.0  # how long an ending process waits for its reader; after that the lines are lost
MAX_FIELD_CHARS = 2_000  # a client may choose the text of a field, and gets no more room than this
LINES_PER_S = 10  # of one quota: enough to see who is refused, and why
OWN = frozenset({"time", "level", "event", "logger", "error"})
"""Names that every line has; a field with such a name is shown as `field_...`."""
_BARE = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
)
"""Attributes of every record, which are no fields; the last one is uvicorn's."""
_PLAIN = re.compile(r"[\w.:/@+,\[\]-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]


def configure(form: Format, level: Level, stream: TextIO | None = None) -> Background:
    """Set logging up for this process, our records and those of libraries; a second call replaces it.

    Libraries log from `warning` on. Close the returned handler before the process ends.
    """
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, Background)]:
        root.removeHandler(old)
        old.close()
    handler = Background(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    return handler


class Background(logging.Handler):
    """Hands lines to a thread that writes them; never waits."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped = 0
        """Lines lost because the queue was full, not reported yet."""
        self.unwritten = 0
        """Lines lost because the disk was full, not reported yet."""
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record; called with the handler's lock held."""
        try:
            line = self.format(record)
        except Exception as error:  # a field that cannot be shown must not fail the caller
            line = f"a log record of {record.name} cannot be shown: {error!r}"
        try:
            if self.dropped:
                why = "nobody read stderr fast enough"
                self._lines.put_nowait(self._loss_report(self.dropped, why))
                self.dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def _loss_report(self, count: int, why: str) -> str:
        fields = {"count": count, "why": why}
        about = {"name": ROOT, "msg": "log lines were lost", "levelname": "WARNING"}
        return self.format(logging.makeLogRecord({**about, **fields}))

    def _run(self) -> None:
        last = False
        while not last:
            lines = [self._lines.get()]
            if lines[0] is not None:
                self._ending.wait(GATHER_S)
            while not self._lines.empty():
                lines.append(self._lines.get())
            last = None in lines
            try:
                self._write([line for line in lines if line is not None])
            except (OSError, ValueError):
                # Stderr is gone, and nothing is left to report it to.
                return

    def _write(self, lines: list[str]) -> None:
        """Write these lines; on a full disk they are lost, and the next lines report how many."""
        told = [self._loss_report(self.unwritten, "the disk was full")] if self.unwritten else []
        try:
            self._stream.write("".join(f"{line}\n" for line in [*told, *lines]))
            self._stream.flush()
            self.unwritten = 0
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.unwritten += len(lines)

    def flush(self) -> None:
        """Does nothing: the thread flushes after each write."""

    def close(self) -> None:
        """Write the waiting lines, within FLUSH_S, and end the thread."""
        self._ending.set()
        deadline = time.monotonic() + FLUSH_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._lines.put(None, timeout=0.05)
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        super().close()


def _moment(record: logging.LogRecord) -> str:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        (f"field_{name}" if name in OWN else name): _bounded(value)
        for name, value in vars(record).items()
        if name not in _BARE
    }


def _bounded(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    if len(text) > MAX_FIELD_CHARS:
        return f"{text[:MAX_FIELD_CHARS]}... ({len(text)} characters)"
    return value


class TextLines(logging.Formatter):
    """`2026-01-31T09:00:00.000Z info    client connected  peer=10.0.0.7:40112 tenant=acme`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in the fields; a traceback follows on lines of its own."""
        head = f"{_moment(record)} {record.levelname.lower():<7} {record.getMessage()}"
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        # A client may choose the text of a field, which must not control the reader's terminal.
        line = _CONTROL.sub(_visible, f"{head}  {fields}".rstrip())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _visible(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _shown(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.isascii():
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return msgspec.json.encode(value, enc_hook=str).decode()


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, logger, and the fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is the field `error`."""
        entry: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        # JSON allows some control characters that terminals obey; they occur in strings only.
        text = msgspec.json.encode(entry, enc_hook=str).decode()
        return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class LogQuota:
    """Warnings through a log, at most LINES_PER_S; further ones are counted and left out.

    >>> quota = LogQuota(logging.getLogger("example"), now=lambda: 0.0)
    >>> [quota.warning("client refused", peer="10.0.0.1:5") for _ in range(12)].count(True)
    10
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._since_s = now()
        self._lines = self._left_out = 0

    def warning(self, message: str, **extra: object) -> bool:
        """Log it, unless this second has had enough; the next line says how many were left out."""
        now_s = self._now()
        if now_s - self._since_s >= 1.0:
            self._since_s, self._lines = now_s, 0
        if self._lines >= LINES_PER_S:
            self._left_out += 1
            return False
        self._lines += 1
        if self._left_out:
            extra["left_out"], self._left_out = self._left_out, 0
        self._log.warning("%s", message, extra=extra)
        return True
