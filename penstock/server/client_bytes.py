"""Limits the bytes that the broker holds for its clients: for each client, and for all together.

Partial uploads, expanded frames, requests without an answer, unread answers, and leased events that wait
for room are counted where they are held. Above half of the limit, a client with more than an equal share
of that half must wait before it adds more. One such client at a time is exempt, so that its work ends.
At the limit, the client that holds most is disconnected. Clients below their share are not affected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from penstock.model.errors import Deferred, PayloadTooLarge
from penstock.model.settings import GIB, Server

LIMIT = "server.max_client_bytes"
# The kinds of bytes that an account counts: partial uploads, requests without an answer, expanded frames,
# unread answers, and answers kept for a repeated request.
ARRIVING, REQUESTS, EXPANDED, UNREAD, KEPT = range(5)
LEAST_BYTES = GIB  # of the default limit: room for two frames of the largest size
MEMORY_SHARE = 4  # the default limit is this part of the memory that the process may use
CGROUP = Path("/sys/fs/cgroup/memory.max")
# The exempt client moves so much between two looks, or it is disconnected: others wait for it.
LEAST_MOVED_BYTES = 1 << 20
RETRY_S = 1.0


def limit_of(settings: Server) -> int:
    """The configured limit, or a quarter of the memory that this process may use."""
    if settings.max_client_bytes is not None:
        return settings.max_client_bytes
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if CGROUP.exists() and (text := CGROUP.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return max(LEAST_BYTES, memory // MEMORY_SHARE)


class ClientBytes:
    """The accounts of all clients.

    >>> total = ClientBytes(1_000)
    >>> one, other = total.account(), total.account()
    >>> one.hold(ARRIVING, 600), one.waits()  # alone beyond its share: it goes first
    (None, False)
    >>> other.waits(100), other.waits(300), total.used
    (False, True, 600)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.used = 0
        self._half = limit_bytes // 2
        """Up to this many bytes, no client waits."""
        self._holders = 0
        self._accounts: set[Account] = set()
        self._waiting: dict[Account, None] = {}
        self._first: Account | None = None
        self._first_moved = 0
        self._waking = self._relieving = False

    @property
    def largest(self) -> int:
        """The most bytes of one request: of its frame, or of its batches when expanded."""
        return self._half

    def account(
        self,
        go_on: Callable[[], None] = lambda: None,
        cut: Callable[[Deferred], None] = lambda error: None,
    ) -> Account:
        """A new account; `go_on` is called when it may add bytes again, `cut` when it must end."""
        account = Account(self, go_on, cut)
        self._accounts.add(account)
        return account

    def look(self) -> None:
        """Disconnect the exempt client if it makes no progress; called every few seconds."""
        for account in [each for each in self._accounts if each.depends_on_client]:
            account.wake()  # it counts its unread bytes again
        first = self._first
        if first is None or not self._waiting:
            return
        if first.depends_on_client and first.moved - self._first_moved < LEAST_MOVED_BYTES:
            self._cut(first)
        else:
            self._first_moved = first.moved

    def _share(self, account: Account) -> int:
        return self._half // max(1, self._holders + (not account.bytes))

    def _must_wait(self, account: Account, extra: int) -> bool:
        if self.used + extra <= self._half or account.bytes + extra <= self._share(account):
            return False
        if self._first is None:
            self._first, self._first_moved = account, account.moved
        if self._first is account:
            return False
        self._waiting[account] = None
        return True

    def _moved(self, account: Account, delta: int) -> None:
        before, account.bytes = account.bytes, account.bytes + delta
        self.used += delta
        self._holders += (account.bytes > 0) - (before > 0)
        if delta < 0:
            self._wake_soon()
        elif self.used > self.limit and not self._relieving:
            self._relieving = True
            try:
                self._relieve()
            finally:
                self._relieving = False

    def _relieve(self) -> None:
        while self.used > self.limit:
            most = max(self._accounts, key=lambda each: each.bytes)
            if not most.bytes:
                return
            self._cut(most)

    def _cut(self, account: Account) -> None:
        held = account.bytes
        account.close()
        account.cut(
            Deferred(
                f"the broker's memory for clients is used up, and this client held {held} bytes of "
                f"it, more than any other or without going on; it was cut off, and what was not "
                f"answered was not taken. Send less at once, or raise {LIMIT}",
                retry_after_s=RETRY_S,
                limit=LIMIT,
            )
        )

    def _closed(self, account: Account) -> None:
        self._accounts.discard(account)
        self._waiting.pop(account, None)
        if self._first is account:
            self._first = None
            self._wake_soon()

    def _wake_soon(self) -> None:
        if self._waiting and not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        first = self._first
        if first is not None and (self.used <= self._half or first.bytes <= self._share(first)):
            self._first = None
        waiting, self._waiting = self._waiting, {}
        for account in waiting:
            account.wake()


class Account:
    """The bytes that the broker holds for one client, by kind."""

    __slots__ = ("_counts", "_go_on", "_total", "_waiters", "bytes", "closed", "cut", "moved")

    def __init__(
        self, total: ClientBytes, go_on: Callable[[], None], cut: Callable[[Deferred], None]
    ) -> None:
        self.bytes = 0
        self.moved = 0
        """Bytes that the client sent or read: its progress."""
        self.closed = False
        self.cut = cut
        self._total = total
        self._go_on = go_on
        self._counts = [0] * (KEPT + 1)
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def depends_on_client(self) -> bool:
        """Whether some of its bytes stay until the client sends or reads more."""
        return bool(self._counts[ARRIVING] or self._counts[UNREAD])

    def hold(self, what: int, size: int) -> None:
        """Set the bytes of one kind."""
        delta = size - self._counts[what]
        if delta and not self.closed:
            self._counts[what] = size
            if what in (ARRIVING, UNREAD):
                self.moved += abs(delta)
            self._total._moved(self, delta)

    def add(self, what: int, delta: int) -> None:
        """Change the bytes of one kind."""
        self.hold(what, self._counts[what] + delta)

    def waits(self, extra: int = 0) -> bool:
        """Whether it must not add so many bytes now; `go_on` is called when that may have changed."""
        return not self.closed and self._total._must_wait(self, extra)

    async def room(self, what: int, size: int) -> None:
        """Add bytes of one kind as soon as there is room; refuse a size that can never fit."""
        if size > self._total.largest:
            raise PayloadTooLarge(
                f"{size} bytes at once are over {self._total.largest}, the half of {LIMIT}; nothing "
                "was stored. Send less in one request, or raise that setting",
                size_bytes=size,
                limit_bytes=self._total.largest,
            )
        while self.waits(size):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        self.add(what, size)

    def wake(self) -> None:
        """Continue waiting requests, because there may be room."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._go_on()

    def close(self) -> None:
        """Release all bytes, and count no more."""
        if self.closed:
            return
        for what in range(len(self._counts)):
            self.hold(what, 0)
        self.closed = True
        self._total._closed(self)
        self.wake()
        self._go_on = lambda: None
