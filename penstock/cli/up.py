"""`penstock up`: run the broker on a data folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli import exits, output
from penstock.cli.invocation import DEFAULT_URL, Invocation, folder_of, leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cli.checkup import Check
    from penstock.model.settings import Settings
    from penstock.server.ports import Listening

# How long one thread may keep the interpreter while others want it. The writer's thread wants it for
# moments only, and every publish waits for it: Python's 5 ms would show in each of them.
SWITCH_S = 0.001


@leaf("up")
@click.argument("place", metavar="[FOLDER]", required=False)
@click.option("--tcp", metavar="ADDR", help="Where `penstock://` clients connect; server.tcp.")
@click.option("--zmq", metavar="ADDR", help="ZeroMQ ROUTER; server.zmq.")
@click.option("--pub", metavar="ADDR", help="ZeroMQ PUB; server.pub.")
@click.option("--http", metavar="ADDR", help="Admin API, health and metrics; server.http.")
@click.option("--check", "only_check", is_flag=True, help="Validate everything, start nothing.")
@click.pass_obj
def command(
    invocation: Invocation, /, place: str | None, only_check: bool, **listen: str | None
) -> None:
    """Run the broker on FOLDER (./data) until SIGTERM or Ctrl-C.

    ADDR is HOST:PORT; port 0 takes a free one, an empty ADDR turns the service off. Where it listens
    is printed, and stands in FOLDER/ports.json while it runs. SIGHUP, or a change of the settings
    file, puts new admission limits in force.

    The first SIGTERM or Ctrl-C lets clients finish, and ends with 0; a second one stops at once,
    with 143 or 130. Nothing that was acknowledged is lost either way.

    --check lists what would keep the broker from starting or clients from publishing, such as a disk
    without room for a journal file, and ends as the broker would.
    """  # fmt: skip
    invocation.sets += [f"server.{name}={text}" for name, text in listen.items() if text is not None]  # fmt: skip
    folder = _folder(invocation, place)
    if only_check:
        _check(invocation, folder)
    else:
        _run(invocation, folder)


def _folder(invocation: Invocation, place: str | None) -> Path:
    """FOLDER, or the folder of --url, which is ./data where nobody said otherwise."""
    url = invocation.url if place is None else place
    named = "" if place is not None else " (from --url or PENSTOCK_URL)"
    found = folder_of(url)
    if found is None or not url:
        raise click.UsageError(
            f"{url!r}{named} is no folder, and a broker keeps its data in one on this machine. Name "
            f"it: penstock up {DEFAULT_URL}"
        )
    options = url.partition("?")[2]
    if options not in ("", "mode=rw"):
        raise click.UsageError(
            f"{url!r}{named}: a broker writes its folder, so '?{options}' cannot hold. Leave it out"
        )
    return found


def _load(invocation: Invocation) -> Settings:
    from penstock.server.reload import broker_settings

    return broker_settings(invocation.settings())


def _check(invocation: Invocation, folder: Path) -> None:
    checks = list(_examine(invocation, folder))
    rows = [output.plain(check) for check in checks]
    output.show_rows(invocation, rows, ["name", "status", "found", "advice"])
    failed = [check for check in checks if check.status == "fail"]
    if not invocation.json:
        output.note(
            f"{len(failed)} problems" if failed else "the broker can start, and take publishes"
        )
    if failed:
        raise click.exceptions.Exit(exits.exit_code(failed[0].code))


def _examine(invocation: Invocation, folder: Path) -> Iterator[Check]:
    from penstock.cli.checkup import check_config
    from penstock.cli.checkup_keys import check_settings_file
    from penstock.cli.preflight import examine

    found = list(check_config(invocation))
    yield from found
    if all(check.status != "fail" for check in found):
        yield from check_settings_file(invocation.config)
        yield from examine(folder, _load(invocation))


def _run(invocation: Invocation, folder: Path) -> None:
    from penstock.bus.connect import tell_unknown
    from penstock.cli.checkup_keys import check_settings_file
    from penstock.cli.preflight import require
    from penstock.cli.serving import Serving
    from penstock.server import logs

    settings = _load(invocation)
    warnings = [*check_settings_file(invocation.config), *require(folder, settings)]
    background = logs.configure(settings.server.log_format, settings.server.log_level)
    tell_unknown()
    for check in warnings:
        logging.getLogger("penstock.up").warning(check.name, extra={"found": check.found, "advice": check.advice})  # fmt: skip

    async def serve() -> None:
        await Serving(
            folder,
            settings,
            load=lambda: _load(invocation),
            config=invocation.config,
            announce=lambda record: _announce(invocation, record),
            output=background,
        ).run()

    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve())
    finally:
        background.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed (the extra `speed`)."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop  # type: ignore[no-any-return]
    return None


def _announce(invocation: Invocation, record: Listening) -> None:
    """Say where the services are: one object with --json, a line for each otherwise."""
    if invocation.json:
        output.print_json(record)
    else:
        rows = [
            {"service": name, "address": address, "url": record.urls[name]}
            for name, address in record.addresses.items()
        ]
        output.show_rows(invocation, rows, ["service", "address", "url"])
    sys.stdout.flush()
