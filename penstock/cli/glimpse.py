"""The first results of the showcase: told as soon as they are on the bus, long before the books close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from penstock.cli import output
from penstock.model.errors import PenstockError
from penstock.pipelines.builtin.stock import TAGS

if TYPE_CHECKING:
    from penstock.model.event import Event

SHOWN = 3  # results with a tag: enough to see what a result is, few enough for a terminal
LOOK_S = 0.2  # between two looks at whether the showcase is over


class _Tag(msgspec.Struct):
    tag: str


class _Result(msgspec.Struct):
    tenant: str
    risk: str
    tags: list[_Tag]
    asset: str | None = None


class Glimpse(threading.Thread):
    """Listens on the bus for the pipeline's first results, and tells how long they took.

    What is on the bus already is of an earlier run and no result of this one.
    """

    def __init__(self, url: str, began: float, tell: Callable[[str], None] = output.note) -> None:
        super().__init__(name="glimpse", daemon=True)
        self._url, self._began, self._tell = url, began, tell
        self._listening, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self.start()
        self._listening.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Listen until enough was shown or the showcase is over; it goes on without us."""
        try:
            asyncio.run(self._listen())
        except PenstockError as error:
            self._tell(f"first results cannot be shown: {error.message}; the showcase goes on")
        finally:
            self._listening.set()

    async def _listen(self) -> None:
        import penstock

        seen = shown = 0
        async with (
            penstock.connect(self._url) as bus,
            bus.subscribe(f"{TAGS}.#", mode="log", start="latest") as results,
        ):
            self._listening.set()
            while shown < SHOWN and not self._over.is_set():
                event = await results.get(timeout_s=LOOK_S)
                if event is None:
                    continue
                if not seen:
                    self._tell(f"results   first after {time.monotonic() - self._began:.1f} s")
                seen += 1
                shown += self._show(event)

    def _show(self, event: Event) -> bool:
        """Tell a result that earned a tag; most earn none."""
        found = msgspec.json.decode(event.payload, type=_Result)
        if found.tags:
            tags = ", ".join(each.tag for each in found.tags)
            self._tell(f"          {found.tenant}  {found.asset}  {found.risk}: {tags}")
        return bool(found.tags)
