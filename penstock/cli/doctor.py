"""`penstock doctor`: is this machine, this folder and its broker in order?

`--export` adds each result to a trend bundle. `trend_bundle.json` is the record; `trend_bundle.csv` is
written from it each time, so that a new check has a column from the first entry on.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import hashlib
import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import output
from penstock.cli.arguments import DURATION
from penstock.cli.invocation import FAILED, Invocation, folder_of, is_broker, leaf
from penstock.model.errors import Corrupted, InvalidSettings, PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.cli.checks import Check
    from penstock.cli.quota_simulation import TenantRehearsal
    from penstock.model.settings import Settings

DEFAULT_WINDOW_S = 3_600.0
REPAIR = "REPAIR"

JSON_FILE, CSV_FILE = "trend_bundle.json", "trend_bundle.csv"
FORMAT = 1
MAX_ENTRIES = 10_000
"""Entries kept, the newest: one an hour for more than a year."""
MAX_FILE_BYTES = 64 * 1024 * 1024
SEVERITY = ("ok", "warn", "fail")


@leaf("doctor")
@click.argument("place", metavar="[FOLDER]", required=False)
@click.option("--deep", is_flag=True, help="Read and hash every sealed file.")
@click.option(
    "--simulate",
    "file",
    metavar="FILE",
    help="Rehearse the limits of this settings file against recorded traffic; nothing is applied.",
)
@click.option(
    "--window",
    "window_s",
    type=DURATION,
    default=DEFAULT_WINDOW_S,
    help="How much of the log --simulate takes, back from its newest event. Default: 1h.",
)
@click.option(
    "--export",
    "bundle",
    metavar="DIR",
    help="Add the result to trend_bundle.json and trend_bundle.csv in this folder.",
)
@click.option("--repair", "mend", is_flag=True, help="Set aside journal entries that keep FOLDER from opening.")  # fmt: skip
@click.option("--confirm", default="", metavar=REPAIR, help=f"Must be {REPAIR}; without it --repair shows what it would do, and asks on a terminal.")  # fmt: skip
@click.pass_obj
def command(
    invocation: Invocation,
    place: str | None,
    deep: bool,
    file: str | None,
    window_s: float,
    bundle: str | None,
    mend: bool,
    confirm: str,
) -> None:
    """Check the machine, the settings, the data folder and its broker; ends with 1 when something fails.

    Reads only, apart from an unnamed file that measures the disk, and works beside a running writer.
    FOLDER is short for --url.

    With --repair, lists the journal entries that cannot be read and, once confirmed, sets them aside:
    they are kept in journal/set-aside.json, the audit chain names them, and everything else stays as
    it is. No writer may have the folder open.

    With --simulate, shows for each tenant how many recorded events the limits in force and those of
    FILE would have deferred, throttled or dropped.
    """  # fmt: skip
    if place is not None:
        invocation.url = place
    if mend:
        _repair(invocation, confirm)
    elif file is not None:
        _simulate(invocation, file, window_s, bundle)
    else:
        _check(invocation, deep, bundle)


def _check(invocation: Invocation, deep: bool, bundle: str | None) -> None:
    found = list(_examine(invocation, deep))
    rows = [output.plain(check) for check in found]
    output.show_rows(invocation, rows, ["name", "status", "found", "advice"])
    failed = sum(check.status == "fail" for check in found)
    if not invocation.json:
        warned = sum(check.status == "warn" for check in found)
        output.print_text(f"{len(found)} checks: {failed} failed, {warned} warnings")
    if bundle is not None:
        _export(invocation, bundle, "deep" if deep else "check", found)
    if failed:
        raise click.exceptions.Exit(FAILED)


def _examine(invocation: Invocation, deep: bool) -> Iterator[Check]:
    from penstock.cli import checks
    from penstock.cli.checks import Check, guarded

    watch = checks.ClockWatch()
    yield checks.check_python()
    yield checks.check_packages()
    yield from checks.check_extras()
    yield from checks.check_config(invocation)
    settings = _settings(invocation)
    folder = folder_of(invocation.url)
    yield from _examine_network(invocation, settings, folder)
    if folder is not None and folder.is_dir():
        yield Check("folder", "ok", str(folder.resolve()))
        yield from _examine_folder(folder, settings, deep)
        yield from guarded("broker", partial(checks.check_broker, folder, settings))
    elif folder is not None:
        found = list(guarded("folder", partial(checks.check_place, folder)))
        if found[0].status == "ok":
            found = [Check("folder", "warn", f"{folder} does not exist", "the first publish makes it; name another one with --url")]  # fmt: skip
        yield from found
    else:
        yield from guarded("url", partial(_examine_elsewhere, invocation.url, settings))
    yield watch.check()


def _examine_elsewhere(url: str, settings: Settings) -> Iterator[Check]:
    """Check a URL that names no folder: a broker, or a bus in memory."""
    import penstock
    from penstock.cli.checks import Check, check_condition, check_remote

    penstock.connect(url, settings=settings)  # opens nothing, but refuses an invalid URL
    if is_broker(url):
        found = list(check_remote(url, settings))
        yield from found
        if found[0].status == "ok":
            yield from check_condition(url, settings)
    else:
        yield Check("folder", "ok", f"{url} keeps nothing on disk here")


def _settings(invocation: Invocation) -> Settings:
    from penstock.model.settings import Settings

    try:
        return invocation.settings()
    except InvalidSettings:
        return Settings()  # reported by its own check; the other checks run with defaults


def _examine_network(
    invocation: Invocation, settings: Settings, folder: Path | None
) -> Iterator[Check]:
    from penstock.cli import checks
    from penstock.cli.checks import guarded
    from penstock.cli.config import origins

    running, written = None, frozenset[str]()
    with contextlib.suppress(PenstockError):  # reported by checks of their own
        written = frozenset(origins(invocation.config, os.environ, invocation.flags))
    with contextlib.suppress(PenstockError):
        running = None if folder is None else checks.running_broker(folder)
    if any(key.startswith(("server.", "auth.", "telemetry.")) for key in written):
        yield from guarded("needed extras", partial(checks.check_needed, settings))
    yield from guarded("addresses", partial(checks.check_addresses, settings, running))
    ports = partial(checks.check_ports, settings, running, written)
    yield from guarded("ports", partial(ports, defaults=not is_broker(invocation.url)))
    yield from guarded("access", partial(checks.check_access, settings))
    yield from guarded("secrets", partial(checks.check_settings_file, invocation.config))
    yield from guarded("secrets", partial(checks.check_secrets, settings))
    yield from guarded("tls", partial(checks.check_tls, settings))
    yield from guarded("client tls", partial(checks.check_client_tls, settings))
    yield from guarded("curve", partial(checks.check_curve, settings))
    yield from guarded("open files", partial(checks.check_descriptors, settings))


def _examine_folder(folder: Path, settings: Settings, deep: bool) -> Iterator[Check]:
    from penstock.cli import checks
    from penstock.cli.checks import guarded

    yield from guarded("disk", partial(checks.check_sync, folder))
    yield from guarded("space", partial(checks.check_space, folder, settings))
    formats = list(guarded("format", partial(checks.check_format, folder)))
    yield from formats
    if formats[0].status == "fail":
        return
    yield from guarded("lock", partial(checks.check_lock, folder))
    yield from guarded("log", partial(checks.check_log, folder, settings))
    yield from guarded("segments", partial(checks.check_segments, folder, deep=deep))
    yield from guarded("audit", partial(checks.check_audit, folder))
    yield from guarded("routes", partial(checks.check_routes, folder))


def _repair(invocation: Invocation, confirm: str) -> None:
    import getpass
    import time

    from penstock.cli.checks import check_free
    from penstock.log.disk import RealDisk
    from penstock.log.repair import repair, unreadable_entries
    from penstock.log.unreadable import SET_ASIDE
    from penstock.model.errors import ConfirmationNeeded

    folder = folder_of(invocation.url)
    if folder is None:
        raise click.UsageError("--repair needs a data folder on this machine: name it with --url")
    check_free(folder)
    settings, disk = invocation.settings(), RealDisk(folder)
    found = unreadable_entries(disk, settings)
    rows = [{"file": each.file, "offset": each.offset, "entry": each.named(), "why": each.why, "repair": each.plan()} for each in found]  # fmt: skip
    output.show_rows(invocation, rows, ["file", "offset", "entry", "why", "repair"])
    if not found:
        output.note("every entry of the journal can be read: there is nothing to repair")
        return
    if not confirm and sys.stdin.isatty() and not invocation.json:
        confirm = click.prompt(f"Type {REPAIR} to set aside {len(found)} entries", default="", show_default=False)  # fmt: skip
    if confirm != REPAIR:
        raise ConfirmationNeeded(
            f"this sets aside {len(found)} entries of the journal. Nothing was changed; repeat with "
            f"--confirm {REPAIR}",
            confirm=REPAIR,
        )
    done = repair(disk, settings, actor=getpass.getuser(), at_us=time.time_ns() // 1_000, entropy=os.urandom(32))  # fmt: skip
    output.note(f"{len(done)} entries are set aside, and kept in {folder / SET_ASIDE}")


def _simulate(invocation: Invocation, file: str, window_s: float, bundle: str | None) -> None:
    from penstock.cli.quota_simulation import read_traffic, rehearse
    from penstock.model.settings_loader import load
    from penstock.server.reload import broker_settings, limits_of

    settings = broker_settings(invocation.settings())
    proposed = broker_settings(load(file, os.environ, invocation.flags))
    folder = folder_of(invocation.url)
    if folder is None:
        raise click.UsageError("--simulate reads a data folder on this machine: name it with --url")
    traffic = read_traffic(folder, settings, window_s)
    rows = rehearse(traffic, limits_of(settings), limits_of(proposed))
    columns = ["tenant", "events", "bytes", "peak_per_s", "deferred", "throttled", "dropped", "limits"]  # fmt: skip
    shown = [output.plain(each) if invocation.json else each.row() for each in rows]
    output.show_rows(invocation, shown, columns)
    if not invocation.json and rows:
        output.print_text("events refused by the limits in force -> by those of the file; nothing was applied")  # fmt: skip
    if traffic.cut:
        output.note("there is more in this window than a rehearsal takes: the oldest was left out")
    if bundle is not None:
        _export(invocation, bundle, "simulate", [], rows, file)


def _export(invocation: Invocation, bundle: str, mode: str, checks: list[Check], rehearsal: list[TenantRehearsal] | None = None, proposed: str | None = None) -> None:  # fmt: skip
    settings = None
    with contextlib.suppress(InvalidSettings):  # reported by its own check
        settings = invocation.settings()
    hashes = config_hashes(settings, invocation.config, folder_of(invocation.url))
    if proposed is not None:
        hashes["proposed"] = config_hashes(None, proposed, None)["config"]
    written = export(Path(bundle), entry_of(mode, checks, hashes, rehearsal))
    output.note(f"{bundle}: {len(written.entries)} entries in trend_bundle.json and trend_bundle.csv")  # fmt: skip


# -- trend bundles --------------------------------------------------------------------------------


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
    """The entry of one run."""
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
    """Hashes that identify a configuration, without secrets: a hash of a weak secret can be guessed."""
    from penstock.model.settings_loader import read_file
    from penstock.server.reload import flat, hidden

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
    from penstock.server.reload import hidden

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
    from penstock.log.disk import RealDisk, write_file

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
    """The entries as a table: a line for each, a column for each check in any of them."""
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
