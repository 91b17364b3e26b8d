"""Turnstile: whoever has to wait goes on in the order they came, one at a time."""

from __future__ import annotations

import asyncio


class Turnstile:
    """A way in that is usually open: true while somebody waits, and who comes then must wait too.

    A lock alone would not do: between its release and the next holder's turn it looks free.

    >>> async def order() -> list[str]:
    ...     turnstile, seen = Turnstile(), []
    ...     async def come(name: str, seconds: float) -> None:
    ...         if seconds or turnstile:
    ...             async with turnstile:
    ...                 await asyncio.sleep(seconds)
    ...         seen.append(name)
    ...     await asyncio.gather(come("slow", 0.01), come("quick", 0))
    ...     return seen
    >>> asyncio.run(order())
    ['slow', 'quick']
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._lock = asyncio.Lock()

    def __bool__(self) -> bool:
        return self._waiting > 0

    async def __aenter__(self) -> None:
        self._waiting += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._waiting -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._waiting -= 1
