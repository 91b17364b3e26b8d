"""What an engine brings to the conformance suite, and what every test of the suite starts from."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest_asyncio

import penstock
from penstock import errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from penstock.core.state import DeadLetter

DEADLINE_S = 15.0
"""How long a test waits for something that must happen: long, so that a busy machine fails none."""

QUIET_S = 0.3
"""How long a test watches that nothing happens. Every test pays it, so it is short."""

SHORT_LEASE_S = 0.4
"""The lease of tests that let one run out: longer than a stall of the machine, most of the time."""

POLL_S = 0.02
"""Pause between two looks at a state that will change by itself."""

T = TypeVar("T")


class Harness(Protocol):
    """How the suite reaches one engine. Connections of one harness share the same data."""

    capabilities: frozenset[str]
    """What the engine declares, written down by hand: the suite compares it with the bus."""

    supports_second_connection: bool
    """Whether two connections may be open at the same time."""

    async def connect(self, **flags: Any) -> penstock.Bus:
        """A new, open connection to the same data, with settings such as `limits__max_headers`."""
        ...

    async def restart(self) -> None:
        """Close every connection, stop the engine cleanly and start it again."""
        ...


class UrlHarness:
    """The harness of an engine that a URL alone reaches, and that lives inside this process.

    Use it as a context manager around a test; leaving it closes every connection.
    """

    def __init__(
        self, url: str, capabilities: Iterable[str], *, supports_second_connection: bool = False
    ) -> None:
        self.url = url
        self.capabilities = frozenset(capabilities)
        self.supports_second_connection = supports_second_connection
        self._open: list[penstock.Bus] = []

    async def connect(self, **flags: Any) -> penstock.Bus:
        """Connect to the URL."""
        bus = penstock.connect(self.url, **flags)
        await bus.open()
        self._open.append(bus)
        return bus

    async def restart(self) -> None:
        """Close every connection; the next one opens the data again."""
        while self._open:
            await self._open.pop().close()

    async def __aenter__(self) -> UrlHarness:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.restart()


class Contract:
    """What every test class of the suite shares: a bus, and names nobody else uses.

    Names are fresh for each test, so a harness may serve many tests with the same data.
    """

    @pytest_asyncio.fixture
    async def bus(self, harness: Harness) -> AsyncIterator[penstock.Bus]:
        """An open connection."""
        bus = await harness.connect()
        yield bus
        await bus.close()

    @pytest_asyncio.fixture
    async def topic(self) -> str:
        """A topic that does not exist yet."""
        return f"t{uuid.uuid4().hex[:12]}.orders"

    @pytest_asyncio.fixture
    async def group(self) -> str:
        """A group that does not exist yet."""
        return f"g{uuid.uuid4().hex[:12]}"


async def take(
    sub: penstock.Subscription, count: int, *, ack: bool = True, deadline_s: float = DEADLINE_S
) -> list[penstock.Event]:
    """The next `count` events, acked as they come unless told otherwise."""
    events: list[penstock.Event] = []
    end = time.monotonic() + deadline_s
    while len(events) < count:
        event = await sub.get(timeout_s=max(0.0, end - time.monotonic()))
        assert event is not None, f"{len(events)} of {count} events came within {deadline_s} s"
        events.append(event)
        if ack and event.attempt:
            await event.ack()
    return events


async def nothing(sub: penstock.Subscription, for_s: float = QUIET_S) -> None:
    """Check that no event comes for a while."""
    event = await sub.get(timeout_s=for_s)
    assert event is None, f"nothing was due, and {event!r} came"


async def eventually(probe: Callable[[], Awaitable[T | None]], what: str) -> T:
    """Look until the probe gives something true, and return that."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = await probe()
        if found:
            return found
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        await asyncio.sleep(POLL_S)


async def entered(context: AbstractAsyncContextManager[object]) -> None:
    """Enter and leave, for calls that are expected to be refused."""
    async with context:
        pass


async def read(bus: penstock.Bus, pattern: str, **where: Any) -> list[penstock.Event]:
    """Everything a replay gives."""
    return [event async for event in bus.replay(pattern, **where)]


async def dead_letters(bus: penstock.Bus, group: str, count: int) -> list[DeadLetter]:
    """The dead letters of a group, once there are `count` of them."""

    async def enough() -> list[DeadLetter]:
        found = list(await bus.dead_letters.list(consumer=group))
        return found if len(found) >= count else []

    found = await eventually(enough, f"dead letter number {count}")
    assert len(found) == count
    return found


async def buried(bus: penstock.Bus, group: str, count: int) -> list[bytes]:
    """The payloads of a group's dead letters, once there are `count` of them."""
    letters = await dead_letters(bus, group, count)
    return [(await bus.dead_letters.inspect(letter.id)).payload for letter in letters]


async def stored(bus: penstock.Bus, topic: str) -> list[bytes]:
    """The payloads a topic holds: none when there is no such topic."""
    try:
        return payloads(await read(bus, topic))
    except errors.UnknownTopic:
        return []


def numbers(count: int, first: int = 0) -> list[bytes]:
    """Payloads that say which one they are."""
    return [str(number).encode() for number in range(first, first + count)]


def payloads(events: Iterable[penstock.Event]) -> list[bytes]:
    """The payloads, in order."""
    return [event.payload for event in events]


async def owes(bus: penstock.Bus, group: str, count: int) -> None:
    """Wait until the group has so many events left to settle."""

    async def there() -> bool:
        lags = {info.name: info.lag for info in await bus.groups.list()}
        return lags.get(group) == count

    await eventually(there, f"a lag of {count}")
