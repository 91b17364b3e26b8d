"""Trend bundles: what `penstock doctor` found, again and again, as JSON and as CSV.

`trend_bundle.json` is the record; `trend_bundle.csv` is written from it each time, so that a check
that is new has a column from its first day on.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.log.disk import RealDisk, write_file
from penstock.model.errors import Corrupted, InvalidSettings, PenstockError
from penstock.model.loader import read_file
from penstock.server.reload import flat, hidden

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cli.checkup import Check
    from penstock.cli.rehearsal import TenantRehearsal
    from penstock.model.settings import Settings

JSON_FILE, CSV_FILE = "trend_bundle.json", "trend_bundle.csv"
FORMAT = 1
MAX_ENTRIES = 10_000
"""Entries kept, the newest: one an hour for more than a year."""
MAX_FILE_BYTES = 64 * 1024 * 1024
SEVERITY = ("ok", "warn", "fail")


class Entry(msgspec.Struct, kw_only=True):
    """One run of the doctor."""

    time: str
    mode: str
    status: str
    version: str
    checks: dict[str, str] = msgspec.field(default_factory=dict)
    hashes: dict[str, str] = msgspec.field(default_factory=dict)
    """SHA-256 of the settings in force, of the settings file and of the routes, without secrets."""
    simulation: dict[str, int] = msgspec.field(default_factory=dict)


class Bundle(msgspec.Struct, kw_only=True):
    """The content of `trend_bundle.json`."""

    format: int = FORMAT
    entries: list[Entry] = []


def entry_of(
    mode: str,
    checks: Iterable[Check],
    hashes: dict[str, str],
    rehearsal: Sequence[TenantRehearsal] | None = None,
) -> Entry:
    """What one run leaves in the bundle."""
    from penstock import __version__

    worst: dict[str, str] = {}
    for check in checks:
        before = worst.get(check.name, "ok")
        worst[check.name] = max(before, check.status, key=SEVERITY.index)
    now = datetime.datetime.now(datetime.UTC)
    return Entry(
        time=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        mode=mode,
        status=max(worst.values(), key=SEVERITY.index, default="ok"),
        version=__version__,
        checks=worst,
        hashes=hashes,
        simulation={} if rehearsal is None else _sums(rehearsal),
    )


def _sums(rehearsal: Sequence[TenantRehearsal]) -> dict[str, int]:
    return {
        "events": sum(each.events for each in rehearsal),
        "refused_now": sum(each.now.refused for each in rehearsal),
        "refused_new": sum(each.new.refused for each in rehearsal),
    }


def config_hashes(settings: Settings | None, config: str | None, folder: Path | None) -> dict[str, str]:  # fmt: skip
    """What tells one configuration from the next. Secrets do not go in: a hash of a weak one can be guessed."""
    found: dict[str, str] = {}
    if settings is not None:
        found["settings"] = _digest({key: value for key, value in flat(settings).items() if not hidden(key)})  # fmt: skip
    if config is not None:
        try:
            tables = read_file(config)
        except InvalidSettings:
            found["config"] = "unreadable"
        else:
            found["config"] = _digest(_without_secrets(tables))
    if folder is not None and (folder / "routes.json").is_file():
        found["routes"] = hashlib.sha256((folder / "routes.json").read_bytes()).hexdigest()
    return found


def _without_secrets(table: Any, key: str = "") -> Any:
    if not isinstance(table, dict):
        return table
    inner = {name: f"{key}.{name}" if key else name for name in table}
    return {
        name: _without_secrets(value, inner[name])
        for name, value in table.items()
        if not hidden(inner[name])
    }


def _digest(value: Any) -> str:
    text = msgspec.json.encode(value, order="deterministic", enc_hook=str)
    return hashlib.sha256(text).hexdigest()


def export(folder: Path, entry: Entry) -> Bundle:
    """Add an entry to the bundle in a folder, which is made when it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = read_bundle(folder)
    bundle.entries = [*bundle.entries, entry][-MAX_ENTRIES:]
    disk = RealDisk(folder)
    write_file(disk, JSON_FILE, [msgspec.json.format(msgspec.json.encode(bundle), indent=1), b"\n"])
    write_file(disk, CSV_FILE, [as_csv(bundle.entries).encode()])
    return bundle


def read_bundle(folder: Path) -> Bundle:
    """The bundle in a folder; an empty one when there is none."""
    path = folder / JSON_FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        bundle = msgspec.json.decode(data, type=Bundle)
    except FileNotFoundError:
        return Bundle()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_ours(path, str(error)) from None
    if bundle.format > FORMAT:
        raise _not_ours(path, f"format {bundle.format} is newer than {FORMAT}")
    return bundle


def _not_ours(path: Path, why: str) -> PenstockError:
    return Corrupted(
        f"{path} is no trend bundle that can be added to: {why}. Nothing was changed; export to "
        "another folder, or move the file away",
        path=str(path),
    )


def as_csv(entries: Sequence[Entry]) -> str:
    """The entries as a table: a line each, a column for each check there ever was."""
    parts = {"check": "checks", "sha256": "hashes", "simulation": "simulation"}
    columns = {
        f"{prefix}.{name}": (part, name)
        for prefix, part in parts.items()
        for name in sorted({name for entry in entries for name in getattr(entry, part)})
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", "mode", "status", "version", *columns])
    for entry in entries:
        cells = [getattr(entry, part).get(name, "") for part, name in columns.values()]
        writer.writerow([entry.time, entry.mode, entry.status, entry.version, *cells])
    return text.getvalue()
