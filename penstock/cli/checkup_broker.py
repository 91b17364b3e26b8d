"""Checks of a broker that is running; part of penstock.cli.checkup."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

import penstock
from penstock.cli.checkup import Check
from penstock.engines.request import Pressure
from penstock.model.errors import AccessDenied, PenstockError
from penstock.model.role import ADMIN
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
TOKEN_S = 60.0  # of a token that the doctor makes for itself
CERTIFICATE = "the broker may want a certificate of the client: set client.tls_ca, client.tls_certificate and client.tls_key"  # fmt: skip
DEFAULT_PORTS = {"penstock": 5557, "penstocks": 5557, "penstock+zmq": 5555}


def running_broker(folder: Path) -> Listening | None:
    """The broker that serves this folder now; None without one, or with one that was killed."""
    return read_ports(folder) if writer_of(folder) is not None else None


def check_broker(folder: Path, settings: Settings | None = None) -> Iterator[Check]:
    """The broker of this folder, asked through the ports it wrote down, with the settings given here."""
    from penstock.model.settings import Settings

    settings = settings or Settings()
    record, holder = read_ports(folder), writer_of(folder)
    if record is None:
        found = "not running" if holder is None else f"{holder} has the folder and serves nobody else, or is starting"  # fmt: skip
        yield Check("broker", "ok", found)
        return
    if holder is None:
        yield Check("broker", "warn", f"pid {record.pid} was killed, or its machine went down: it left ports.json", "nothing is lost: start it again with `penstock up`")  # fmt: skip
        return
    yield _check_moved(record)
    if "http" in record.urls:
        for path in ("/health", "/ready"):
            yield _ask(record, path, settings)
    else:
        yield Check("broker", "ok", f"pid {record.pid} is running; its HTTP service is off")
    if "tcp" in record.urls:
        yield from check_condition(record.urls["tcp"], _with_key(settings))


def _check_moved(record: Listening) -> Check:
    passed_us = uptime_us() - record.uptime_us
    moved_us = time.time_ns() // 1_000 - record.since_us - passed_us
    if abs(moved_us) <= MOVED_SLACK_US:
        return Check("broker clock", "ok", "the wall clock was not moved since the broker started")
    return Check("broker clock", "warn", f"the wall clock was moved by {moved_us / 1e6:+.0f} s since the broker started", "events keep their order; times of delayed and expiring ones follow the clock. Let NTP slew it")  # fmt: skip


def _ask(record: Listening, path: str, settings: Settings) -> Check:
    name, url = f"broker {path}", record.urls["http"]
    try:
        status, text = http_get(url, path, settings)
    except (OSError, http.client.HTTPException) as error:
        if _wants_certificate(url, error):
            return Check(name, "warn", f"{url} speaks TLS and did not let the doctor in: {error!r}", CERTIFICATE)  # fmt: skip
        return Check(name, "fail", f"{url}{path} does not answer: {error!r}, although pid {record.pid} has the folder", "look at the broker's log; if it hangs, stop it with SIGTERM, and start it again")  # fmt: skip
    if status == http.client.OK:
        return Check(name, "ok", f"pid {record.pid} at {url}: {text}")
    bad = path == "/health"
    return Check(name, "fail" if bad else "warn", f"{url}{path} answers {status}: {text}", "look at the broker's log" if bad else "clients cannot publish now: see `reasons`, and the broker's log")  # fmt: skip


def _wants_certificate(url: str, error: Exception) -> bool:
    """Whether a connection may have broken for want of a client certificate: TLS 1.3 says it late, or not."""
    broken = isinstance(error, ssl.SSLError | ConnectionError | http.client.HTTPException)
    refused = isinstance(error, ConnectionRefusedError)
    return url.startswith("https:") and broken and not refused


def _with_key(settings: Settings) -> Settings:
    """Settings with a token that opens the broker, where its own keys are among them."""
    from penstock.server.auth import Doorkeeper

    if settings.client.token or settings.client.token_file or not settings.auth.asks:
        return settings
    door = Doorkeeper(settings.auth)
    token = next(iter(door.keys.admin_tokens), "") or door.issue("default", "doctor", (ADMIN,), TOKEN_S)  # fmt: skip
    client = msgspec.structs.replace(settings.client, token=token)
    return msgspec.structs.replace(settings, client=client)


def check_condition(url: str, settings: Settings) -> Iterator[Check]:
    """What the broker says keeps clients from publishing, is wrong, or is refused."""
    try:
        found = asyncio.run(_condition(url, settings))
    except AccessDenied as error:
        yield Check("broker state", "warn", f"not known: {error.message}", "give the doctor the broker's settings, or an admin's token in client.token")  # fmt: skip
        return
    except PenstockError as error:
        yield Check("broker state", "warn", f"not known: {error.message}", _advice(url))
        return
    yield from _judged(found)


def _judged(found: dict[str, Any]) -> Iterator[Check]:
    problems = [
        *(Check("broker state", "warn", why) for why in found.get("obstacles", ())),
        *(
            Check("broker state", "warn", f"{part}: {why}", "look at the broker's log")
            for part, why in found.get("troubles", {}).items()
        ),
        *(
            Check("broker state", "warn", f"{each['refused']} publishes of tenant {each['tenant'] or '?'} were {each['kind']}, some within the last minute: {each['limit']} is reached", "`penstock docs admission` says what each limit is; raise it, or slow the tenant down")
            for each in found.get("refusing", ())
        ),
        *(
            Check("broker state", "warn", f"tenant {each['tenant']} has used up {each['limit']}", "raise it, or shorten the retention of its topics")
            for each in found.get("used_up", ())
        ),
    ]  # fmt: skip
    yield from problems or [Check("broker state", "ok", "clients can publish; nothing was refused within the last minute")]  # fmt: skip


async def _condition(url: str, settings: Settings) -> dict[str, Any]:
    client = msgspec.structs.replace(settings.client, deadline_s=ANSWER_S)
    async with penstock.connect(url, settings=msgspec.structs.replace(settings, client=client)) as bus:  # fmt: skip
        found: dict[str, Any] = await bus.ask(Pressure())
    return found


def _advice(url: str) -> str:
    """What to do when a broker does not answer: with TLS it is most often a certificate."""
    if url.startswith("penstocks:"):
        return f"{CERTIFICATE}; if no broker runs there, start it with `penstock up`"
    return "start the broker there with `penstock up`, and look at address, firewall and name resolution"  # fmt: skip


def http_get(url: str, path: str, settings: Settings | None = None) -> tuple[int, str]:
    """Ask an HTTP server on this machine; the answer's status and the beginning of its text."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port
    if where.scheme == "https":
        context = ssl.create_default_context()
        # The answer is shown and nothing is sent: whose certificate it is does not matter here.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if settings is not None and settings.client.tls_certificate:
            client = settings.client
            context.load_cert_chain(client.tls_certificate, client.tls_key or None)
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
        yield Check("broker", "fail", f"no broker answers at {place}: {error.message}", _advice(url), error.code)  # fmt: skip
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
