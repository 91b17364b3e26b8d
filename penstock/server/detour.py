"""Detour: what is large on a connection goes by way of a thread, and nothing overtakes it (row T13)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.server.fastpath import FastPath

Item = TypeVar("Item")
Result = TypeVar("Result")


class Detour(Generic[Item, Result]):
    """Of one connection and one direction: one item at a time, the others behind it in their order."""

    def __init__(
        self,
        fastpath: FastPath | None,
        go_on: Callable[[asyncio.Future[Result], Item, list[Item]], None],
    ) -> None:
        self.busy = False
        self.waiting_bytes = 0
        """Of the item in the thread and of those behind it."""
        self._fastpath = fastpath
        self._go_on = go_on
        """Called with the work that is done, its item, and the items that waited behind it."""
        self._behind: list[Item] = []
        self._left = False

    def begin(
        self, item: Item, size_bytes: int, work: Callable[..., Result], *args: object
    ) -> bool:
        """Have a thread work on an item; False when it is too small to be worth it."""
        if self._fastpath is None or not self._fastpath.wants(size_bytes):
            return False
        self.follow(item, size_bytes, self._fastpath.submit(work, *args))
        return True

    def follow(self, item: Item, size_bytes: int, work: asyncio.Future[Result]) -> None:
        """Wait for work on an item that is under way elsewhere."""
        self.busy = True
        self.waiting_bytes = size_bytes
        work.add_done_callback(lambda done: self._done(done, item))

    def waits(self, item: Item, size_bytes: int = 0) -> bool:
        """Keep an item back while another one is worked on."""
        if self.busy:
            self._behind.append(item)
            self.waiting_bytes += size_bytes
        return self.busy

    def leave(self) -> None:
        """Nobody waits for any of it any more: the connection is gone."""
        self._left = True
        self._behind.clear()
        self.waiting_bytes = 0

    def _done(self, work: asyncio.Future[Result], item: Item) -> None:
        self.busy = False
        self.waiting_bytes = 0
        behind, self._behind = self._behind, []
        if not work.cancelled():
            # Looked at, for nobody may: the loop would complain, once for each broken frame.
            work.exception()
        if not self._left:
            self._go_on(work, item, behind)
