"""Whether a client can publish now (`GET /ready`, the doctor), and how many clients fit the open files.

A broker without open files could neither open a journal file nor answer a probe. So clients never get
the last ones, whatever `server.max_connections` says.
"""

from __future__ import annotations

import os
import resource

import msgspec

from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.model.settings import Settings
from penstock.server.metrics.engine_stats import disk_full

# Sockets that are still shaking hands.
UNWELCOMED = 256
# Open files of the broker itself: 512 HTTP connections, 64 open segments, journal, listeners, libraries.
OWN = 1_024 - UNWELCOMED
# The least of these that it needs to work: clients may have the rest.
LEAST_OWN = 128


def obstacles(engine: EmbeddedEngine, *, clients: int, most_clients: int, room: int) -> list[str]:
    """Why a new client could not publish; empty when it can. Each says what to do, and contains no data."""
    found: list[str] = []
    if engine.commits.failed is not None:
        found.append("the writer failed: look at the log, and start the broker again")
    if disk_full(engine):
        found.append("the disk cannot hold the next journal file: make room, or lower retention")
    if room < 1 or none_left():
        found.append("no open files are left for clients: raise the limit (LimitNOFILE, ulimit -n)")
    elif clients >= most_clients:
        found.append(f"all {most_clients} clients that are allowed are connected")
    return found


def wanted(settings: Settings) -> int:
    """Open files that a broker needs when all its clients are connected."""
    return settings.server.max_connections + UNWELCOMED + OWN


def raise_limit(settings: Settings) -> None:
    """Raise the limit to the open files that all clients together may need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted(settings) if hard == resource.RLIM_INFINITY else min(wanted(settings), hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def room_for_clients(limit: int, in_use: int = 0) -> int:
    """How many clients a limit of open files leaves room for.

    >>> room_for_clients(1_024), room_for_clients(100)
    (896, 0)
    """
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max(0, limit - in_use - LEAST_OWN)


def within_limit(settings: Settings) -> tuple[Settings, int]:
    """Settings with `max_connections` lowered to what the open files allow, and how many clients that is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = room_for_clients(soft, len(os.listdir("/proc/self/fd")))
    most = max(1, min(settings.server.max_connections, room))
    server = msgspec.structs.replace(settings.server, max_connections=most)
    return msgspec.structs.replace(settings, server=server), room


def most_sockets(clients: int, unwelcomed: int = UNWELCOMED) -> int:
    """How many sockets a listener may have open: clients and handshakes, but never the last open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(clients + unwelcomed, room_for_clients(soft)))


def none_left() -> bool:
    """Whether this process can open no more files."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return True
    return False
