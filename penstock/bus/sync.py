"""The blocking facade: the same bus for code that has no event loop.

A thread runs the loop; every call is handed to it and waited for. Nothing is written twice: the
facade delegates by name.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.bus.bus import Bus
from penstock.bus.connect import connect
from penstock.bus.desk import Desk
from penstock.bus.subscription import Subscription
from penstock.bus.transaction import Transaction
from penstock.model.event import Event

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-loop", daemon=True
        )
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function there and wait for it."""

        async def run() -> T:
            return function()

        return self.wait(run())

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Facade:
    """Any asynchronous object, made blocking: coroutines are waited for, iterators iterate."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self._target = target
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value) or isinstance(value, type):
            return self._wrap(value)

        def call(*args: Any, **options: Any) -> Any:
            args = tuple(arg._target if isinstance(arg, Facade) else arg for arg in args)
            if inspect.iscoroutinefunction(value):
                return self._wrap(self._thread.wait(value(*args, **options)))
            return self._wrap(self._thread.call(lambda: value(*args, **options)))

        call.__name__ = name
        call.__doc__ = value.__doc__
        return call

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, Desk | Subscription | Transaction | Event):
            return Facade(value, self._thread)
        if isinstance(value, AsyncIterator):
            return self._iterate(value)
        return value

    def _iterate(self, source: AsyncIterator[Any]) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(source, _END)

        while (value := self._thread.wait(following())) is not _END:
            yield self._wrap(value)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(aiter(self._target))

    def __enter__(self) -> Self:
        self._thread.wait(self._target.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.wait(self._target.__aexit__(kind, error, trace))


_END = object()


class SyncBus(Facade):
    """A blocking bus, made by `penstock.connect_sync`."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._thread.stop()


def connect_sync(url: str | Path, **options: Any) -> SyncBus:
    """The same as `connect`, blocking: every method waits for its result.

    >>> with connect_sync("mem:") as bus:
    ...     bus.publish("orders.created", {"id": 7}).offset
    0
    """
    thread = LoopThread()
    bus: Bus = thread.call(lambda: connect(url, **options))
    return SyncBus(bus, thread)
