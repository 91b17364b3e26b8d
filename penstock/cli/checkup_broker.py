"""Checks of a broker that is running; part of penstock.cli.checkup."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

import penstock
from penstock.cli.checkup import Check
from penstock.model.errors import AccessDenied, PenstockError
from penstock.server.ports import Listening, read_ports, uptime_us, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.model.settings import Settings

ANSWER_S = 2.0  # a broker that is well answers in milliseconds
MAX_ANSWER_BYTES = 64 * 1024
MAX_SHOWN_CHARS = 300  # of an answer
MOVED_SLACK_US = 2_000_000  # a leap second and a little
SKEW_US = 1_000_000  # machines that are set by NTP agree within milliseconds
DEFAULT_PORTS = {"penstock": 5557, "penstocks": 5557, "penstock+zmq": 5555}


def running_broker(folder: Path) -> Listening | None:
    """The broker that serves this folder now; None without one, or with one that was killed."""
    return read_ports(folder) if writer_of(folder) is not None else None


def check_broker(folder: Path) -> Iterator[Check]:
    """The broker of this folder, asked through the ports it wrote down."""
    record, holder = read_ports(folder), writer_of(folder)
    if record is None:
        found = "not running" if holder is None else f"{holder} has the folder and serves nobody else, or is starting"  # fmt: skip
        yield Check("broker", "ok", found)
        return
    if holder is None:
        yield Check("broker", "warn", f"pid {record.pid} was killed, or its machine went down: it left ports.json", "nothing is lost: start it again with `penstock up`")  # fmt: skip
        return
    yield _check_moved(record)
    if "http" not in record.urls:
        yield Check("broker", "ok", f"pid {record.pid} is running; its HTTP service is off, so it cannot be asked")  # fmt: skip
        return
    for path in ("/health", "/ready"):
        yield _ask(record, path)


def _check_moved(record: Listening) -> Check:
    passed_us = uptime_us() - record.uptime_us
    moved_us = time.time_ns() // 1_000 - record.since_us - passed_us
    if abs(moved_us) <= MOVED_SLACK_US:
        return Check("broker clock", "ok", "the wall clock was not moved since the broker started")
    return Check("broker clock", "warn", f"the wall clock was moved by {moved_us / 1e6:+.0f} s since the broker started", "events keep their order; times of delayed and expiring ones follow the clock. Let NTP slew it")  # fmt: skip


def _ask(record: Listening, path: str) -> Check:
    name, url = f"broker {path}", record.urls["http"]
    try:
        status, text = http_get(url, path)
    except ssl.SSLError as error:
        return Check(name, "ok", f"{url} wants a client certificate, so it cannot be asked ({error.reason})")  # fmt: skip
    except (OSError, http.client.HTTPException) as error:
        return Check(name, "fail", f"{url}{path} does not answer: {error!r}, although pid {record.pid} has the folder", "look at the broker's log; if it hangs, stop it with SIGTERM, and start it again")  # fmt: skip
    if status == http.client.OK:
        return Check(name, "ok", f"pid {record.pid} at {url}: {text}")
    bad = path == "/health"
    return Check(name, "fail" if bad else "warn", f"{url}{path} answers {status}: {text}", "look at the broker's log" if bad else "it is starting or draining: wait, or look at its log")  # fmt: skip


def http_get(url: str, path: str) -> tuple[int, str]:
    """Ask an HTTP server on this machine; the answer's status and the beginning of its text."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port
    if where.scheme == "https":
        context = ssl.create_default_context()
        # The answer is shown and nothing is sent: whose certificate it is does not matter here.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=ANSWER_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(MAX_ANSWER_BYTES).decode(errors="replace")
    text = re.sub(r"\s+", " ", text).strip()
    return answer.status, text[:MAX_SHOWN_CHARS]


def check_remote(url: str, settings: Settings) -> Iterator[Check]:
    """Whether a broker answers where a `penstock://` URL leads, lets us in, and has our time."""
    where = urlsplit(url)
    place = f"{where.hostname}:{where.port or DEFAULT_PORTS.get(where.scheme, 0)}"
    try:
        ahead_us = asyncio.run(_greet(url, settings))
    except AccessDenied as error:
        yield Check("broker", "fail", f"{place} is a broker and does not let us in: {error.message}", "see `penstock docs security`", error.code)  # fmt: skip
    except PenstockError as error:
        yield Check("broker", "fail", f"no broker answers at {place}: {error.message}", "start the broker there with `penstock up`, and look at address, firewall and name resolution", error.code)  # fmt: skip
    else:
        yield Check("broker", "ok", f"the broker at {place} answers and lets us in")
        if ahead_us is not None:
            yield _check_skew(place, ahead_us)


def _check_skew(place: str, ahead_us: int) -> Check:
    if abs(ahead_us) <= SKEW_US:
        return Check("clock skew", "ok", f"the clocks here and at {place} are within {SKEW_US / 1e6:g} s")  # fmt: skip
    return Check("clock skew", "warn", f"the clock at {place} is {ahead_us / 1e6:+.1f} s from the one here", "set both by NTP: events have the broker's time, delays and deadlines that you compute have yours")  # fmt: skip


async def _greet(url: str, settings: Settings) -> int | None:
    """Connect, and leave; how far the broker's clock is ahead of ours, if it says."""
    client = msgspec.structs.replace(settings.client, deadline_s=ANSWER_S)
    before_us = time.time_ns() // 1_000
    async with penstock.connect(url, settings=msgspec.structs.replace(settings, client=client)) as bus:  # fmt: skip
        after_us, welcome = time.time_ns() // 1_000, bus.engine.channel.welcome  # type: ignore[attr-defined]
    if not welcome.now_us:
        return None
    if before_us <= welcome.now_us <= after_us:
        return 0
    return int(welcome.now_us - (after_us if welcome.now_us > after_us else before_us))
