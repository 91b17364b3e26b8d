"""Reads settings from a file, the environment and flags, the later one winning field by field.

Every value is checked where it comes from, so a problem names its source, its key, the value and
what is allowed. `load` stops the program on the first run; `check` lists everything at once, with
contradictions between settings (errors) and doubtful choices (warnings).

    file         [durability]                      TOML, one table per group
                 fsync = "interval"
    environment  PENSTOCK_DURABILITY_FSYNC=interval
    flag         {"durability.fsync": "interval"}

Sizes and durations may carry a unit ("64MiB", "5m"); `none` lifts a limit that can be lifted.

docs/reference/settings.md is the output of `reference`; a test compares the two.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import inspect

from penstock.model.codec import codecs
from penstock.model.compressor import compressors
from penstock.model.errors import InvalidSettings
from penstock.model.parameter import show, shown, unit_of
from penstock.model.settings import MIB, Settings, TenantLimits, field_types, in_unit
from penstock.model.topic import TENANT_NAME, TENANT_RULE

MAX_FILE_BYTES = MIB  # thousands of tenants fit; a data file given by mistake does not
MAX_KEY_CHARS = 255  # the longest name of a tenant, and far more than any setting has
PREFIX = "PENSTOCK_"
NOT_SETTINGS = frozenset({"PENSTOCK_URL", "PENSTOCK_CONFIG"})  # where the bus and this file are
ENVIRONMENT = "environment "
OF_A_SERVICE = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)\Z"
)
"""Variables that Kubernetes sets in every container for each service, one called `penstock` included."""
TENANTS = "admission.tenants"
NO_KEY = "-"  # of a problem with the file as a whole
NOTHING: Mapping[str, Any] = MappingProxyType({})

# (the smaller, the larger): each pair is a bound that would otherwise be broken by the other.
AT_MOST = (
    ("journal.tenant_quantum_bytes", "journal.commit_max_bytes"),
    ("journal.side_file_bytes", "journal.commit_max_bytes"),
    ("journal.commit_max_bytes", "journal.pending_max_bytes"),
    ("sealing.min_segment_bytes", "sealing.target_segment_bytes"),
    ("limits.max_payload_bytes", "limits.max_batch_bytes"),
)


# -- loading ---------------------------------------------------------------------------------------


def load(
    path: str | None = None,
    env: Mapping[str, str] = NOTHING,
    flags: Mapping[str, Any] = NOTHING,
) -> Settings:
    """The settings of a bus, or InvalidSettings that says what to change where.

    >>> load(env={"PENSTOCK_JOURNAL_FILE_BYTES": "64MiB"}).journal.file_bytes
    67108864
    >>> load(flags={"durability.fsnc": "never"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: flag: durability.fsnc: ... did you mean durability.fsync...
    """
    settings, problems = _resolve(path, env, flags)
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return settings
    first = errors[0]
    more = f" ({len(errors) - 1} more: see `penstock config check`)" if len(errors) > 1 else ""
    raise InvalidSettings(
        f"{first.text}{more}",
        key=first.key,
        source=first.source,
        problems=problems,
    )


def check(
    path: str | None = None,
    env: Mapping[str, str] = NOTHING,
    flags: Mapping[str, Any] = NOTHING,
) -> list[Problem]:
    """Everything wrong or doubtful, errors first, without starting anything.

    >>> [str(problem) for problem in check(flags={"delivery.max_attempts": 0})]
    ['error: flag: delivery.max_attempts: 0 is not allowed; give 1 to 1000']
    """
    return sorted(_resolve(path, env, flags)[1], key=lambda problem: problem.severity)


def unknown(env: Mapping[str, str]) -> list[Problem]:
    """Names in the environment that look like settings and are none: reported and ignored.

    >>> names = {"PENSTOCK_DURABILITY_FSNC": "never", "PENSTOCK_PORT": "tcp://10.0.0.7:4711"}
    >>> [problem.source for problem in unknown(names)]
    ['environment PENSTOCK_DURABILITY_FSNC']
    """
    found = check(env=env)
    return [
        problem for problem in found if problem.severity == "warning" and _kind(problem.key) is None
    ]


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong, or doubtful, in a configuration."""

    severity: Literal["error", "warning"]
    source: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"

    @property
    def text(self) -> str:
        """Its source, its key and its message, in a line."""
        where = self.source if self.key == NO_KEY else f"{self.source}: {self.key}"
        return f"{where}: {self.message}"


# -- from text to settings -------------------------------------------------------------------------


def _resolve(
    path: str | None, env: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[Settings, list[Problem]]:
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for entry in _entries(path, env, flags, problems):
        try:
            value = _understood(entry)
        except ValueError as error:
            # A variable may belong to another program: an unknown one never stops this one.
            foreign = entry.source.startswith(ENVIRONMENT) and _kind(entry.key) is None
            severity: Literal["error", "warning"] = "warning" if foreign else "error"
            problems.append(Problem(severity, entry.source, entry.key, str(error)))
        else:
            values[entry.key] = value
            sources[entry.key] = entry.source
    settings = _build(values)
    faulty = {problem.key for problem in problems}
    for severity, keys, message in conflicts(settings):
        if faulty.isdisjoint(keys):
            # The problem is reported at a value that was written, not at the default beside it.
            key = next((key for key in keys if key in sources), keys[0])
            problems.append(Problem(severity, sources.get(key, "default"), key, message))
    return settings, problems


class Entry(NamedTuple):
    """One value as it was written, before it is checked."""

    source: str
    key: str
    value: Any
    text: bool  # everything is text in the environment, so "5" may be a number there


def _entries(
    path: str | None, env: Mapping[str, str], flags: Mapping[str, Any], problems: list[Problem]
) -> Iterator[Entry]:
    if path is not None:
        source = f"file {path}"
        try:
            tables = read_file(path)
        except InvalidSettings as error:
            problems.append(Problem("error", source, NO_KEY, error.message))
            tables = {}
        for group, table in tables.items():
            fields = table.items() if isinstance(table, dict) else [("", table)]
            for field, value in fields:
                yield from _split(Entry(source, f"{group}.{field}".rstrip("."), value, False))
    for name, text in sorted(env.items()):
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            group, _, field = name.removeprefix(PREFIX).lower().partition("_")
            key = f"{group}.{field}"
            if _kind(key) is not None or key == TENANTS or not OF_A_SERVICE.search(name):
                yield from _split(Entry(f"{ENVIRONMENT}{name}", key, text, True))
    for key, value in flags.items():
        yield from _split(Entry("flag", key, value, isinstance(value, str)))


def read_file(path: str) -> dict[str, Any]:
    """The tables of a TOML settings file. The only place in this layer that opens a file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is over {MAX_FILE_BYTES} bytes")
        return tomllib.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidSettings(
            f"cannot read the settings file {path}: {error}. Give a readable TOML file",
            path=path,
        ) from error


def _split(entry: Entry) -> Iterator[Entry]:
    """Take a table of tenants apart, so that each of their limits is one entry like any other."""
    tenants = entry.value
    if entry.key == TENANTS and entry.text:
        try:
            tenants = msgspec.json.decode(tenants)
        except (msgspec.DecodeError, RecursionError):
            tenants = None
    if entry.key != TENANTS or not isinstance(tenants, Mapping):
        yield entry
        return
    for tenant, limits in tenants.items():
        if isinstance(limits, TenantLimits):
            limits = msgspec.structs.asdict(limits)
        if not isinstance(limits, Mapping):
            yield entry._replace(key=f"{TENANTS}.{tenant}", value=limits)
            continue
        for field, value in limits.items():
            yield entry._replace(key=f"{TENANTS}.{tenant}.{field}", value=value)


def _understood(entry: Entry) -> Any:
    """The value as its field wants it; ValueError says what is wrong with it."""
    if len(entry.key) > MAX_KEY_CHARS:
        raise ValueError(f"the name is over {MAX_KEY_CHARS} characters; give a shorter one")
    kind = _kind(entry.key)
    if kind is None:
        raise ValueError(f"there is no such setting; did you mean {_nearest(entry.key)}?")
    if entry.key.startswith(TENANTS + "."):
        tenant = entry.key.removeprefix(TENANTS + ".").rpartition(".")[0]
        if not re.match(TENANT_NAME, tenant):
            raise ValueError(f"no tenant can be called {tenant!r}: {TENANT_RULE}")
    unit = unit_of(entry.key.rpartition(".")[2])
    try:
        value = in_unit(entry.value, unit, kind)
    except ValueError as error:
        raise ValueError(f"{shown(entry.value)} {error}; give {allowed(kind, unit)}") from None
    try:
        return msgspec.convert(value, kind, strict=not entry.text)
    except msgspec.ValidationError:
        message = f"{shown(entry.value)} is not allowed; give {allowed(kind, unit)}"
        raise ValueError(message) from None


def _kind(key: str) -> Any:
    """The type of the setting `key`, or None where there is no such setting."""
    if key.startswith(TENANTS + "."):
        tenant, _, field = key.removeprefix(TENANTS + ".").rpartition(".")
        return field_types(TenantLimits).get(field) if tenant else None
    group, _, field = key.partition(".")
    kind = field_types(Settings).get(group)
    return field_types(kind).get(field) if kind else None


def _nearest(key: str) -> str:
    if key.startswith(TENANTS + "."):
        tenant = key.removeprefix(TENANTS + ".").rpartition(".")[0] or "NAME"
        known = [f"{TENANTS}.{tenant}.{field}" for field in field_types(TenantLimits)]
    else:
        known = [f"{group}.{field}" for group in field_types(Settings) for field in _fields(group)]
        # The right field in the wrong group is nearer than any spelling.
        known = [name for name in known if name.partition(".")[2] == key.partition(".")[2]] or known
    return difflib.get_close_matches(key, known, n=1, cutoff=0)[0]


def _fields(group: str) -> dict[str, Any]:
    return field_types(field_types(Settings)[group])


def _build(values: Mapping[str, Any]) -> Settings:
    groups: dict[str, dict[str, Any]] = {name: {} for name in field_types(Settings)}
    tenants: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(TENANTS + "."):
            tenant, _, field = key.removeprefix(TENANTS + ".").rpartition(".")
            tenants.setdefault(tenant, {})[field] = value
        else:
            group, _, field = key.partition(".")
            groups[group][field] = value
    groups["admission"]["tenants"] = {
        name: TenantLimits(**limits) for name, limits in tenants.items()
    }
    return Settings(**{name: kind(**groups[name]) for name, kind in field_types(Settings).items()})


# -- checks between settings -----------------------------------------------------------------------


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Every contradiction (error) and doubtful choice (warning) in a set of valid values.

    >>> from penstock.model.settings import Durability
    >>> list(conflicts(Settings()))
    []
    >>> [found.keys for found in conflicts(Settings(durability=Durability(fsync="never")))]
    [('durability.fsync',)]
    """
    yield from _contradictions(settings)
    yield from _doubts(settings)
    yield from _missing_parts(settings)


class Conflict(NamedTuple):
    """One finding: how bad it is, the settings concerned, and an explanation."""

    severity: Literal["error", "warning"]
    keys: tuple[str, ...]
    message: str


def _contradictions(settings: Settings) -> Iterator[Conflict]:
    for small, large in AT_MOST:
        low, high = _value(settings, small), _value(settings, large)
        if low > high:
            low_shown, high_shown = show(low, "bytes"), show(high, "bytes")
            message = f"{small} ({low_shown}) must be at most {large} ({high_shown})"
            yield Conflict("error", (small, large), message)
    if settings.sealing.backlog_max_bytes < 2 * settings.journal.file_bytes:
        keys = ("sealing.backlog_max_bytes", "journal.file_bytes")
        message = f"{keys[0]} must hold two files of {keys[1]}: one open, one being sealed"
        yield Conflict("error", keys, message)
    if settings.fastpath.require and not settings.fastpath.enabled:
        keys = ("fastpath.require", "fastpath.enabled")
        yield Conflict("error", keys, f"{keys[0]} needs {keys[1]}: enable it, or do not require it")
    if settings.client.tls_key and not settings.client.tls_certificate:
        keys = ("client.tls_key", "client.tls_certificate")
        yield Conflict("error", keys, f"{keys[0]} needs {keys[1]}: set both, or none")
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        message = f"spans go to an http:// or https:// address, not to {endpoint!r}"
        yield Conflict("error", ("telemetry.otlp_endpoint",), message)


def _doubts(settings: Settings) -> Iterator[Conflict]:
    retries = settings.delivery.max_attempts - 1
    if len(settings.delivery.ladder_ms) > max(1, retries):
        keys = ("delivery.ladder_ms", "delivery.max_attempts")
        message = f"{keys[0]} has more steps than the {retries} retries that {keys[1]} allows; the last ones are never used"
        yield Conflict("warning", keys, message)
    if settings.durability.fsync == "never":
        message = "a power failure loses acknowledged events; `always` loses none"
        yield Conflict("warning", ("durability.fsync",), message)
    if not settings.sealing.enabled:
        message = "nothing is reclaimed, so the journal grows until the disk is full"
        yield Conflict("warning", ("sealing.enabled",), message)
    retention = settings.retention
    if retention.write_once and (retention.max_bytes or retention.topic_max_bytes):
        message = "size limits do not delete what write-once protects; the folder may pass them"
        yield Conflict("warning", ("retention.write_once",), message)


def _missing_parts(settings: Settings) -> Iterator[Conflict]:
    media = settings.media
    # Only a warning: the program may register its own part before it connects.
    if media.codec not in codecs:
        message = f"no codec {media.codec!r} is installed; there is {', '.join(codecs.names())}"
        yield Conflict("warning", ("media.codec",), message)
    if media.compressor not in compressors:
        known = ", ".join(compressors.names())
        message = f"no compressor {media.compressor!r} is installed; there is {known}"
        yield Conflict("warning", ("media.compressor",), message)


def _value(settings: Settings, key: str) -> int:
    group, _, field = key.partition(".")
    value: int = getattr(getattr(settings, group), field)
    return value


# -- the reference page ----------------------------------------------------------------------------


def allowed(kind: Any, unit: str) -> str:
    """The values that a field's type takes, in words.

    >>> from penstock.model.settings import Delivery
    >>> allowed(field_types(Delivery)["max_attempts"], "")
    '1 to 1000'
    """
    return _words(inspect.type_info(kind), unit)


def _words(info: Any, unit: str) -> str:
    match info:
        case inspect.Metadata(type=inner):
            return _words(inner, unit)
        case inspect.UnionType(types=types):
            return " or ".join(_words(inner, unit) for inner in types)
        case inspect.NoneType():
            return "none"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=low, max_length=high):
            return "text" if high is None else f"text of {low or 0} to {high} characters"
        case inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            many = "any number of" if high is None else f"{low or 0} to {high}"
            return f"{many} values, each {_words(item, unit)}"
        case inspect.IntType() | inspect.FloatType():
            least = f"more than {info.gt:g}" if info.gt is not None else show(info.ge, unit)
            return f"{least} to {show(info.le, unit)}"
        case _:
            return "a table"
