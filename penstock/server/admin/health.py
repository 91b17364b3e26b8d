"""Health over HTTP: whether the broker is alive, and whether clients can publish."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.admin.endpoint import Answered, Call, Endpoint

UNAVAILABLE = 503


class Health(msgspec.Struct, frozen=True):
    """The loop turns."""

    alive: bool


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether a client that comes now can publish; if not, why."""

    ready: bool
    reasons: list[str] = []


async def health(call: Call) -> Health:
    """A broker that answers is alive."""
    return Health(True)


async def readiness(call: Call) -> Any:
    """Readiness, for load balancers and rolling restarts."""
    reasons = call.context.obstacles()
    return Answered(UNAVAILABLE, Readiness(False, reasons)) if reasons else Readiness(True)


ENDPOINTS = (
    Endpoint("GET", "/health", "Whether the broker is alive.", health, Health),
    Endpoint("GET", "/ready", "Whether a client that comes now can publish.", readiness, Readiness),
)
