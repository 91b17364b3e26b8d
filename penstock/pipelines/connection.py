"""Connections of a Spark process to a bus: the loop they need runs in a thread beside."""

from __future__ import annotations

import base64
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

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


class _Claims(msgspec.Struct):
    tenant: str


def credentials(token: str | None) -> dict[str, Any]:
    """The settings that show a token to a broker; a tenant's token names the tenant it speaks for.

    Nothing is checked here: the broker does that.

    >>> credentials(None), credentials("the admin's")
    ({}, {'client__token': "the admin's"})
    """
    if token is None:
        return {}
    try:
        claims = base64.urlsafe_b64decode(token.split(".")[1] + "==")
        tenant = msgspec.json.decode(claims, type=_Claims).tenant
    except (IndexError, ValueError, msgspec.MsgspecError):  # a token of another kind
        return {"client__token": token}
    return {"client__token": token, "identity__tenant": tenant}


class Connection:
    """An open bus, for code that has no loop."""

    def __init__(self, url: str, token: str | None) -> None:
        self._thread = LoopThread()
        try:
            self.bus: Bus = self._thread.call(lambda: connect(url, **credentials(token)))
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
