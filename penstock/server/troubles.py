"""Troubles: what is wrong with a broker that runs on, for its metrics and, when it changes, for its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from penstock.engines.embedded import EmbeddedEngine
from penstock.server.metrics_engine import disk_full

log = logging.getLogger("penstock.server")

LOOK_S = 0.5
PARTS = ("writer", "housekeeping", "disk", "retention", "audit")
SHOWN_TOPICS = 5


def troubles_of(engine: EmbeddedEngine) -> dict[str, str]:
    """What is wrong, by the part of the broker it is wrong with."""
    found: dict[str, str] = {}
    if engine.commits.failed is not None:
        found["writer"] = engine.commits.failed.message
    if engine.housekeeper.problem is not None:
        found["housekeeping"] = engine.housekeeper.problem
    if disk_full(engine):
        found["disk"] = "there is no room for more events: publishes are refused, the rest goes on"
    if full := _full_topics(engine):
        found["retention"] = full
    if engine.audit.failure is not None:
        found["audit"] = engine.audit.failure
    return found


def _full_topics(engine: EmbeddedEngine) -> str:
    """Which write-once topics take no publishes, and which limit that is; empty for none."""
    keeper = engine.housekeeper
    if keeper.shortage_bytes:
        return (
            f"write-once keeps {keeper.shortage_bytes} bytes over retention.max_bytes: publishes to "
            "write-once topics are refused, the rest goes on"
        )
    names = sorted(keeper.full_topics)
    shown = ", ".join(names[:SHOWN_TOPICS]) + (" and more" if names[SHOWN_TOPICS:] else "")
    return f"write-once topics at their size limit take no publishes: {shown}" if names else ""


class Troubles:
    """Says once that something is wrong, and once that it is over.

    >>> troubles = Troubles()
    >>> troubles.report({"disk": "it is full"}), troubles.report({"disk": "it is full"})
    (['disk'], [])
    >>> troubles.report({})
    ['disk']
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    async def watch(self, engine: EmbeddedEngine) -> None:
        """Look again and again, for as long as it is not cancelled."""
        while True:
            self.report(troubles_of(engine))
            await asyncio.sleep(LOOK_S)

    def report(self, now: Mapping[str, str]) -> list[str]:
        """Log what began and what ended since the last time; returns the parts it was about."""
        began, ended = sorted(now.keys() - self._known), sorted(self._known - now.keys())
        for part in began:
            log.warning("trouble", extra={"part": part, "problem": now[part]})
        for part in ended:
            log.info("trouble is over", extra={"part": part})
        self._known = set(now)
        return began + ended
