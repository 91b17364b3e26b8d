"""Read settings from a file, the environment and flags, the later one winning field by field.

Every value is checked where it comes from, so a problem names its source, its key, the value and
what is allowed. `load` stops the program on the first run; `check` lists everything at once.

    file         [durability]                      TOML, one table per group
                 fsync = "interval"
    environment  PENSTOCK_DURABILITY_FSYNC=interval
    flag         {"durability.fsync": "interval"}

Sizes and durations may carry a unit ("64MiB", "5m"); `none` lifts a limit that can be lifted.
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

from penstock.model.consistency import conflicts
from penstock.model.errors import InvalidSettings
from penstock.model.parameter import shown
from penstock.model.quantity import unit_of
from penstock.model.reference import allowed
from penstock.model.setting import MIB, field_types, in_unit
from penstock.model.settings import Settings, TenantLimits
from penstock.model.topic import TENANT_NAME, TENANT_RULE

MAX_FILE_BYTES = MIB  # thousands of tenants fit; a data file given by mistake does not
MAX_KEY_CHARS = 255  # what a tenant may be called, and far more than any setting is
PREFIX = "PENSTOCK_"
NOT_SETTINGS = frozenset({"PENSTOCK_URL", "PENSTOCK_CONFIG"})  # where the bus and this file are
ENVIRONMENT = "environment "
OF_A_SERVICE = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)\Z"
)
"""What Kubernetes sets in every container for each service, one called `penstock` included."""
TENANTS = "admission.tenants"
NO_KEY = "-"  # of a problem with the file as a whole
NOTHING: Mapping[str, Any] = MappingProxyType({})


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
        """Where it is and what is wrong, in a line."""
        where = self.source if self.key == NO_KEY else f"{self.source}: {self.key}"
        return f"{where}: {self.message}"


class Entry(NamedTuple):
    """One value somebody wrote, before it is understood."""

    source: str
    key: str
    value: Any
    text: bool  # everything is text in the environment, so "5" may be a number there


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


def unknown(env: Mapping[str, str]) -> list[Problem]:
    """The names in the environment that look like settings and are none: said, and not heeded.

    >>> names = {"PENSTOCK_DURABILITY_FSNC": "never", "PENSTOCK_PORT": "tcp://10.0.0.7:4711"}
    >>> [problem.source for problem in unknown(names)]
    ['environment PENSTOCK_DURABILITY_FSNC']
    """
    found = check(env=env)
    return [
        problem for problem in found if problem.severity == "warning" and _kind(problem.key) is None
    ]


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
            # What is in the environment need not be ours: it never stops a program.
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
            # The rule speaks about what somebody wrote, not about the default beside it.
            key = next((key for key in keys if key in sources), keys[0])
            problems.append(Problem(severity, sources.get(key, "default"), key, message))
    return settings, problems


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
