"""Health over HTTP: whether the broker is alive, and whether clients may come."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.admin_endpoint import Answered, Call, Endpoint

UNAVAILABLE = 503


class Health(msgspec.Struct, frozen=True):
    """The loop turns."""

    alive: bool


class Readiness(msgspec.Struct, frozen=True):
    """Whether clients may come: not while starting, not while draining."""

    ready: bool


async def health(call: Call) -> Health:
    """Whoever can answer is alive."""
    return Health(True)


async def readiness(call: Call) -> Any:
    """For load balancers and rolling restarts."""
    ready = call.surface.ready()
    return Readiness(True) if ready else Answered(UNAVAILABLE, Readiness(False))


ENDPOINTS = (
    Endpoint("GET", "/health", "Whether the broker is alive.", health, Health),
    Endpoint("GET", "/ready", "Whether the broker serves clients.", readiness, Readiness),
)
