"""Open files: how many a broker needs, and how many clients those it has leave room for.

A broker that ran out of them could neither open a journal file nor answer a probe. So clients never
get the last ones, whatever `server.max_connections` says.
"""

from __future__ import annotations

import os
import resource

import msgspec

from penstock.model.settings import Settings

STRANGERS = 256  # sockets that are still shaking hands
OWN = 1_024 - STRANGERS  # 512 HTTP connections, 64 open segments, journal, listeners, libraries
LEAST_OWN = 128  # without which a broker works badly: what is left is for clients


def wanted(settings: Settings) -> int:
    """Open files a broker needs when all its clients are there."""
    return settings.server.max_connections + STRANGERS + OWN


def raise_limit(settings: Settings) -> None:
    """Take as many open files as all clients together may need, as far as the system allows."""
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
    """Settings with as many clients as the open files of this process leave room for, and how many do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = room_for_clients(soft, len(os.listdir("/proc/self/fd")))
    most = max(1, min(settings.server.max_connections, room))
    server = msgspec.structs.replace(settings.server, max_connections=most)
    return msgspec.structs.replace(settings, server=server), room


def most_sockets(clients: int, strangers: int = STRANGERS) -> int:
    """How many sockets a listener lets be open: clients, those shaking hands, never the last open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(clients + strangers, room_for_clients(soft)))


def none_left() -> bool:
    """Whether this process can open no more files."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return True
    return False
