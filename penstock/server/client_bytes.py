"""Client bytes: what clients make the broker hold, each and all together, against one limit.

Partial uploads, frames that were expanded, requests without an answer, answers that are not read,
leased events that wait for room: all of it is counted where it is held. Beyond half of the limit a
client that holds more than an equal share of that half adds nothing, but for one such client at a
time, which goes first so that something ends. At the limit the client that holds most is cut off.
Clients below their share notice none of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from penstock.model.errors import Deferred, PayloadTooLarge
from penstock.model.settings import GIB, Server

LIMIT = "server.max_client_bytes"
# What an account counts, apart from each other.
ARRIVING, REQUESTS, EXPANDED, UNREAD, KEPT = range(5)
LEAST_BYTES = GIB  # of the limit that nobody set: room for a frame of the largest size, and another
MEMORY_SHARE = 4  # that limit is this part of the memory the process may use
CGROUP = Path("/sys/fs/cgroup/memory.max")
# The client that goes first moves so much between two looks, or it is cut off: others wait for it.
LEAST_MOVED_BYTES = 1 << 20
RETRY_S = 1.0


def limit_of(settings: Server) -> int:
    """The limit that is set, or a quarter of the memory that this process may use."""
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
        self._calm = limit_bytes // 2
        """Up to here nobody waits."""
        self._holders = 0
        self._accounts: set[Account] = set()
        self._waiting: dict[Account, None] = {}
        self._first: Account | None = None
        self._first_moved = 0
        self._waking = self._relieving = False

    @property
    def largest(self) -> int:
        """The most that one request may take: a frame, or what a batch in it expands to."""
        return self._calm

    def account(
        self,
        go_on: Callable[[], None] = lambda: None,
        cut: Callable[[Deferred], None] = lambda error: None,
    ) -> Account:
        """A new account; `go_on` is called when it need not wait any more, `cut` when it must end."""
        account = Account(self, go_on, cut)
        self._accounts.add(account)
        return account

    def look(self) -> None:
        """Cut off the client that goes first if it stands still; called every few seconds."""
        for account in [each for each in self._accounts if each.depends_on_client]:
            account.wake()  # which counts again what is not read
        first = self._first
        if first is None or not self._waiting:
            return
        if first.depends_on_client and first.moved - self._first_moved < LEAST_MOVED_BYTES:
            self._cut(first)
        else:
            self._first_moved = first.moved

    def _share(self, account: Account) -> int:
        return self._calm // max(1, self._holders + (not account.bytes))

    def _must_wait(self, account: Account, extra: int) -> bool:
        if self.used + extra <= self._calm or account.bytes + extra <= self._share(account):
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
        if first is not None and (self.used <= self._calm or first.bytes <= self._share(first)):
            self._first = None
        waiting, self._waiting = self._waiting, {}
        for account in waiting:
            account.wake()


class Account:
    """What one client makes the broker hold."""

    __slots__ = ("_counts", "_go_on", "_total", "_wishes", "bytes", "closed", "cut", "moved")

    def __init__(
        self, total: ClientBytes, go_on: Callable[[], None], cut: Callable[[Deferred], None]
    ) -> None:
        self.bytes = 0
        self.moved = 0
        """Bytes that the client sent or read: whether it goes on."""
        self.closed = False
        self.cut = cut
        self._total = total
        self._go_on = go_on
        self._counts = [0] * (KEPT + 1)
        self._wishes: list[asyncio.Future[None]] = []

    @property
    def depends_on_client(self) -> bool:
        """Whether it holds something until its client sends or reads on."""
        return bool(self._counts[ARRIVING] or self._counts[UNREAD])

    def hold(self, what: int, size: int) -> None:
        """Of this it holds so much now."""
        delta = size - self._counts[what]
        if delta and not self.closed:
            self._counts[what] = size
            if what in (ARRIVING, UNREAD):
                self.moved += abs(delta)
            self._total._moved(self, delta)

    def add(self, what: int, delta: int) -> None:
        """Of this it holds so much more, or less."""
        self.hold(what, self._counts[what] + delta)

    def waits(self, extra: int = 0) -> bool:
        """Whether it must not take so much more now; `go_on` is called when that may have changed."""
        return not self.closed and self._total._must_wait(self, extra)

    async def room(self, what: int, size: int) -> None:
        """Hold so much more of this, as soon as there is room; what can never fit is refused."""
        if size > self._total.largest:
            raise PayloadTooLarge(
                f"{size} bytes at once are over {self._total.largest}, the half of {LIMIT}; nothing "
                "was stored. Send less in one request, or raise that setting",
                size_bytes=size,
                limit_bytes=self._total.largest,
            )
        while self.waits(size):
            wish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._wishes.append(wish)
            await wish
        self.add(what, size)

    def wake(self) -> None:
        """There may be room."""
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            if not wish.done():
                wish.set_result(None)
        self._go_on()

    def close(self) -> None:
        """It holds nothing any more, and will not."""
        if self.closed:
            return
        for what in range(len(self._counts)):
            self.hold(what, 0)
        self.closed = True
        self._total._closed(self)
        self.wake()
        self._go_on = lambda: None
