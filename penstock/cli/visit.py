"""A command's time with a bus: open it, do the work, close it."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, TypeVar

from penstock.cli import output
from penstock.cli.invocation import folder_of, is_broker, read_only
from penstock.model.errors import NotADataFolder, Unsupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import penstock
    from penstock.cli.invocation import Invocation
    from penstock.model.settings import Settings

T = TypeVar("T")

NOTICE_S = 1.0
"""A broker that answers takes milliseconds."""

ABOUT_FILE = "penstock.json"
"""What makes a folder a data folder (penstock.log.recovery)."""


def look(invocation: Invocation, work: Callable[[penstock.Bus], Awaitable[T]]) -> T:
    """Do something that only reads; works while another process writes the folder."""
    _require_folder(invocation.url)
    return asyncio.run(_with_bus(invocation, read_only(invocation.url), work))


def change(
    invocation: Invocation, work: Callable[[penstock.Bus], Awaitable[T]], *, creates: bool = False
) -> T:
    """Do something that writes; `creates` says that a missing folder is made."""
    if not creates:
        _require_folder(invocation.url)
    return asyncio.run(_with_bus(invocation, invocation.url, work))


async def _with_bus(
    invocation: Invocation, url: str, work: Callable[[penstock.Bus], Awaitable[T]]
) -> T:
    import penstock
    from penstock.model.loader import unknown

    settings = invocation.settings()
    for problem in unknown(os.environ):
        output.note(f"{problem}; it is not heeded")
    notice = asyncio.get_running_loop().call_later(NOTICE_S, _tell_of_silence, url, settings)
    try:
        async with penstock.connect(url, settings=settings) as bus:
            notice.cancel()
            return await work(bus)
    finally:
        notice.cancel()


def _tell_of_silence(url: str, settings: Settings) -> None:
    """A folder is opened by ourselves, however long it takes."""
    if is_broker(url):
        limit_s = settings.client.connect_s or settings.client.deadline_s
        output.note(f"no broker has answered at {url} yet; trying for {limit_s:g} s (--timeout)")


def _require_folder(url: str) -> None:
    """A slip in a path must neither make a folder nor look like an empty bus."""
    folder = folder_of(url)
    if folder is not None and not (folder / ABOUT_FILE).exists():
        what = "holds no Penstock data" if folder.is_dir() else "does not exist"
        raise NotADataFolder(
            f"the folder {folder} {what}. Name the data folder with --url or PENSTOCK_URL, or make "
            "one with `penstock publish` or `penstock topic create`",
            path=str(folder),
        )


def require_broker(url: str, what: str) -> None:
    """Refuse what only a broker has."""
    if not is_broker(url):
        raise Unsupported(
            f"{url} is no broker, and only a broker has {what}. Name one with --url "
            "penstock://host:5557 or PENSTOCK_URL",
            capability=what,
        )
