"""Connections of a Spark process to a bus: the loop they need runs in a thread beside."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.bus.bus import Bus
from penstock.bus.connect import BROKER, connect
from penstock.bus.sync import LoopThread

T = TypeVar("T")


def is_broker(url: str) -> bool:
    """Whether a URL names a broker, and not a folder.

    >>> is_broker("penstock://127.0.0.1"), is_broker("./data")
    (True, False)
    """
    scheme, found, _ = url.partition("://")
    return bool(found) and scheme in BROKER


def credentials(token: str | None) -> dict[str, Any]:
    """The settings that show a token to a broker, which knows the tenant it speaks for."""
    return {} if token is None else {"client__token": token}


class Connection:
    """An open bus, for code that has no loop."""

    def __init__(self, url: str, token: str | None, **more: Any) -> None:
        self._thread = LoopThread()
        try:
            self.bus: Bus = self._thread.call(lambda: connect(url, **credentials(token), **more))
            self.wait(self.bus.open())
        except BaseException:
            self._thread.stop()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the bus's loop and wait for it."""
        return self._thread.wait(work)

    def close(self) -> None:
        """Leave the bus."""
        self.wait(self.bus.close())
        self._thread.stop()
