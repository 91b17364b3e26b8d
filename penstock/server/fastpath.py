"""The fast path of large payloads: their compression and checks leave the broker's loop (row T13).

The work is done by threads: Arrow's compressors and zlib's checksums let go of the interpreter, so
the loop goes on serving small events meanwhile. Nothing is copied to get there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.model.errors import Deferred
from penstock.model.server_settings import FastPath as FastPathSettings

T = TypeVar("T")
RETRY_S = 0.05  # about what a large payload takes


class FastPath:
    """Runs work on large payloads in threads, as the settings allow."""

    def __init__(self, settings: FastPathSettings) -> None:
        self.taken = 0
        """Payloads that took it."""
        self.fallen_back = 0
        """Payloads that found it busy and were worked on by the loop."""
        self._settings = settings
        self._busy = 0
        self._closed = False
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, size_bytes: int, work: Callable[..., T], *args: object) -> T:
        """Do the work, here or in a thread; `size_bytes` decides."""
        settings = self._settings
        if not self.wants(size_bytes):
            return work(*args)
        if self._busy >= settings.threads and settings.fall_back:
            if settings.require:
                raise Deferred(
                    "the fast path is busy and required for large payloads; nothing was stored. "
                    "Publish again in a moment",
                    retry_after_s=RETRY_S,
                    limit="fastpath.threads",
                )
            self.fallen_back += 1
            return work(*args)
        return await self.submit(work, *args)

    def wants(self, size_bytes: int) -> bool:
        """Whether work on so much is for a thread."""
        settings = self._settings
        return settings.enabled and size_bytes >= settings.cutover_bytes and not self._closed

    def submit(self, work: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Have a thread do the work, as soon as one is free."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._settings.threads, "penstock-fastpath")
        self._busy += 1
        self.taken += 1
        done = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        done.add_done_callback(self._freed)
        return done

    def _freed(self, _: asyncio.Future[T]) -> None:
        self._busy -= 1

    def drop(self, held: list[Any], size_bytes: int) -> None:
        """Let go of something large; the caller must have no other reference to it.

        Giving 16 MiB back to the system takes milliseconds, which a thread has and the loop has not.
        """
        if self._threads is not None and size_bytes >= self._settings.cutover_bytes:
            self._threads.submit(held.clear)
        else:
            held.clear()

    def close(self) -> None:
        """Let the threads end; what comes now is worked on by the loop."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=False)
