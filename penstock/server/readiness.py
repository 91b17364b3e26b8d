"""Readiness: what keeps a client from publishing now; `GET /ready` and the doctor say it."""

from __future__ import annotations

from penstock.engines.embedded import EmbeddedEngine
from penstock.server import descriptors
from penstock.server.metrics_engine import disk_full


def obstacles(engine: EmbeddedEngine, *, clients: int, most_clients: int, room: int) -> list[str]:
    """Why a new client could not publish; empty when it can. Each says what to do, and tells no data."""
    found: list[str] = []
    if engine.commits.failed is not None:
        found.append("the writer failed: look at the log, and start the broker again")
    if disk_full(engine):
        found.append("the disk cannot hold the next journal file: make room, or lower retention")
    if room < 1 or descriptors.none_left():
        found.append("no open files are left for clients: raise the limit (LimitNOFILE, ulimit -n)")
    elif clients >= most_clients:
        found.append(f"all {most_clients} clients that are allowed are connected")
    return found
