"""Ending: what a broker that stops waits for, so that clients can finish what they are at (T5)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.session import Session

HEARD_S = 0.1  # what clients did before they were told is here by then
HARDEN_S = 1.0  # at least, whatever is left of the time: what was settled should be durable
LOOK_AGAIN_S = 0.02  # at what consumers still have in hand


async def finished(sessions: Mapping[str, Session], end: float) -> None:
    """Wait for handlers and for requests, not beyond `end`; then make durable what was settled."""
    # What a client hands out just now, we hear of a moment later.
    heard = time.monotonic() + (HEARD_S if any(map(_holds, sessions.values())) else 0.0)
    while (now := time.monotonic()) < end:
        if now >= heard and not any(map(_at_work, sessions.values())):
            break
        await asyncio.sleep(LOOK_AGAIN_S)
    for session in list(sessions.values()):
        await session.finished(end - time.monotonic())
    hardening = asyncio.gather(
        *(session.harden() for session in sessions.values()), return_exceptions=True
    )
    # A disk that fails now is reported when the engine is closed. While it is full, dead letters wait.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hardening, max(HARDEN_S, end - time.monotonic()))


def _holds(session: Session) -> bool:
    """Whether a client that is there was sent events that are not settled."""
    return session.link is not None and any(outlet.held for outlet in session.feeds.queues())


def _at_work(session: Session) -> bool:
    """Whether its consumers were handed some of them: the others only wait at the client."""
    return _holds(session) and any(outlet.at_work() for outlet in session.feeds.queues())
