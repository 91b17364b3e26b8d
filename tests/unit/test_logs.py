"""Log lines: one for each record, as text or JSON, whatever is in them and whoever reads them."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.server import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("penstock.server.test")


@pytest.fixture
def lines() -> Iterator[Callable[..., list[str]]]:
    """Configures logging, runs something, returns the lines."""
    root = logging.getLogger()
    before, level, own = root.handlers[:], root.level, logging.getLogger("penstock").level

    def run(work: Callable[[], None], form: Any = "text", level: Any = "info") -> list[str]:
        stream = io.StringIO()
        handler = logs.configure(form, level, stream)
        work()
        handler.close()
        return stream.getvalue().splitlines()

    yield run
    root.handlers[:] = before
    root.setLevel(level)
    logging.getLogger("penstock").setLevel(own)


def test_text(lines: Callable[..., list[str]]) -> None:
    (line,) = lines(lambda: log.info("client connected", extra={"peer": "10.0.0.7:1", "n": 2}))
    assert line[10] == "T"
    assert line[23:].split() == ["Z", "info", "client", "connected", "peer=10.0.0.7:1", "n=2"]


def test_json(lines: Callable[..., list[str]]) -> None:
    def work() -> None:
        log.warning("odd %s", "thing", extra={"level": 3, "tags": ["a"], "nothing": None})

    (line,) = lines(work, "json")
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning", "event": "odd thing", "logger": "penstock.server.test",
        "field_level": 3, "tags": ["a"], "nothing": None,
    }  # fmt: skip


def test_levels(lines: Callable[..., list[str]]) -> None:
    def work() -> None:
        log.debug("quiet")
        log.info("aloud")
        logging.getLogger("somebody").info("quiet")
        logging.getLogger("somebody").warning("aloud too")

    assert [line.split(maxsplit=2)[2] for line in lines(work)] == ["aloud", "aloud too"]
    assert len(lines(work, level="debug")) == 3


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exception_comes_with_its_traceback(lines: Callable[..., list[str]], form: str) -> None:
    def work() -> None:
        try:
            raise ValueError("the cause")
        except ValueError:
            log.exception("failed")

    found = lines(work, form)
    assert any("the cause" in line for line in found)
    assert any("Traceback" in line for line in found)
    if form == "json":
        assert "the cause" in json.loads(found[0])["error"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_field_cannot_make_lines_nor_steer_a_terminal(
    lines: Callable[..., list[str]], form: str
) -> None:
    bad = "a\nb\x1b[2J\u2028\x9bx" + "y" * 100_000
    (line,) = lines(lambda: log.info("e\nvent", extra={"peer": bad}), form)
    assert "\x1b" not in line
    assert len(line) < 5_000
    assert "\x9b" not in line
    if form == "json":
        assert json.loads(line)["peer"].startswith("a\nb\x1b[2J\u2028\x9bx")


def test_a_field_that_cannot_be_shown_is_told(lines: Callable[..., list[str]]) -> None:
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no")

    (line,) = lines(lambda: log.info("x", extra={"bad": Bad()}))
    assert "cannot be shown" in line


def test_configured_twice_writes_once(lines: Callable[..., list[str]]) -> None:
    logs.configure("text", "info", io.StringIO())
    assert len(lines(lambda: log.info("once"))) == 1


def test_nobody_waits_for_a_reader_who_does_not_read(lines: Callable[..., list[str]]) -> None:
    """A full pipe neither blocks the broker nor takes its memory; what was lost is told."""
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    handler = logs.configure("text", "info", stream)
    began = time.monotonic()
    for number in range(2 * logs.QUEUE_LINES):
        log.info("x" * 100, extra={"number": number})
    assert time.monotonic() - began < 20
    assert handler.dropped > 0
    got: list[bytes] = []

    def drain() -> None:
        while part := os.read(read, 1 << 16):
            got.append(part)

    reader = threading.Thread(target=drain)
    reader.start()
    deadline = time.monotonic() + 10
    while handler._lines.qsize() and time.monotonic() < deadline:
        time.sleep(0.01)
    log.info("read again")
    handler.close()
    stream.close()
    reader.join(10)
    os.close(read)
    text = b"".join(got).decode()
    assert "log lines were lost  count=" in text
    assert text.rstrip().endswith("read again")


def test_stderr_that_is_gone_stops_nothing(lines: Callable[..., list[str]]) -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    handler = logs.configure("text", "info", stream)
    for _ in range(10):
        log.info("into the void")
        time.sleep(0.01)
    handler.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_lines_that_come_together_are_written_together(lines: Callable[..., list[str]]) -> None:
    """T1: the thread that writes takes the interpreter from the loop, so it wakes up seldom."""

    class Counted(io.StringIO):
        writes = 0

        def write(self, text: str, /) -> int:
            self.writes += 1
            return super().write(text)

    stream = Counted()
    handler = logs.configure("text", "info", stream)
    for number in range(20):
        log.info("client connected", extra={"number": number})
    deadline = time.monotonic() + 10
    while "number=19" not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody has to close it to see them
    assert len(stream.getvalue().splitlines()) == 20
    assert stream.writes < 5
    began = time.monotonic()
    log.info("the last words")
    handler.close()
    assert time.monotonic() - began < 1
    assert "the last words" in stream.getvalue()


class FullDisk(io.StringIO):
    """A file on a disk without room, until there is some."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_full_disk_costs_lines_and_not_the_log() -> None:
    """The first line that found no room was the last: a broker said nothing more until it was restarted."""
    stream = FullDisk()
    handler = logs.Background(stream)
    handler.setFormatter(logs.TextLines())
    try:
        for number in range(2):
            handler.handle(logging.makeLogRecord({"msg": f"lost {number}", "levelname": "INFO"}))
            wait_until(lambda number=number: handler.unwritten == number + 1)
        stream.full = False
        handler.handle(logging.makeLogRecord({"msg": "kept", "levelname": "INFO"}))
        wait_until(lambda: "kept" in stream.getvalue())
    finally:
        handler.close()
    told, kept = (line[25:].split(None, 1)[1] for line in stream.getvalue().splitlines())
    assert told == 'log lines were lost  count=2 why="the disk was full"'
    assert kept == "kept"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
