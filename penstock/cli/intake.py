"""Reads what is to be published: whole inputs, or lines as they come.

A thread reads blocks with plain read calls, so that the loop stays free for signals and a slow
input (a pipe from a running program) is published as it arrives and not when a batch is full.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.model.errors import InvalidInput, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BLOCK_BYTES = 1024 * 1024  # one read call; larger ones save nothing
MAX_BLOCKS_AHEAD = 8  # read but not published yet: bounds memory at 8 MiB
STDIN = "-"


class Stretch(NamedTuple):
    """Pieces of input that follow one another: lines without their ends, or one whole source."""

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
    """The name of a source in messages."""
    return "stdin" if path == STDIN else path


class Intake:
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
        # A daemon: it may sit in a read call that never returns, and must not keep us alive.
        threading.Thread(target=self._read, name="penstock-intake", daemon=True).start()

    def stop(self) -> None:
        """End now."""
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

        What was read meanwhile is joined to it: fewer, larger commits under load.
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

    async def wholes(self) -> AsyncIterator[Stretch]:
        """Each source as one event."""
        parts: list[bytes] = []
        size = 0
        while (item := await self._block()) is not None:
            path, block = item
            size += len(block)
            self._check_size(path, 1, size)
            parts.append(block)
            if not block:
                yield Stretch(shown(path), 1, [b"".join(parts)])
                parts, size = [], 0

    async def batches(self, limit: int) -> AsyncIterator[Stretch]:
        """The lines that are there, at most `limit` at a time; waits only when there are none."""
        while (item := await self._block()) is not None:
            path, block = item
            lines = self._lines(path, block)
            first = self._number + 1
            self._number = self._number + len(lines) if block else 0
            for start in range(0, len(lines), limit):
                if not self._stopped:
                    yield Stretch(shown(path), first + start, lines[start : start + limit])

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
