"""`penstock up`: check the folder and the settings, then run the broker until a signal stops it.

`Serving` is the life of the broker process: start, print where it listens, wait for a signal, drain,
stop. Before that, `require` raises the error of the first check that fails; `up --check` lists all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import click
import msgspec

from penstock.cli import output
from penstock.cli.invocation import (
    DEFAULT_URL,
    FAILED,
    INTERRUPTED,
    TERMINATED,
    Invocation,
    exit_code,
    folder_of,
    leaf,
)
from penstock.model.errors import InvalidSettings, PenstockError
from penstock.server.ports import (
    Listening,
    addresses,
    clear_stale_ports,
    listening,
    remove_ports,
    write_ports,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cli.checks import Check
    from penstock.model.settings import Settings
    from penstock.server.daemon import Daemon
    from penstock.server.logs import Background
    from penstock.server.reload import Reloader

log = logging.getLogger("penstock.up")

Step: TypeAlias = "tuple[str, Callable[[], Check | Iterator[Check]]]"

# How long one thread may keep the interpreter while others want it. The writer's thread wants it for
# moments only, and every publish waits for it: Python's 5 ms would show in each of them.
SWITCH_S = 0.001
# Between two checks whether the writer has failed: clients have their errors already.
LOOK_S = 0.25
# Beyond `server.drain_s`: for the last commits, sealing under way, closing files.
STOP_GRACE_S = 30.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_CODES = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED}
# Allocations between two collections of cycles, by generation. A broker makes next to no cycles, and with
# a thousand sessions a full collection takes a tenth of a second, in which no client is served.
COLLECT_AFTER = (10_000, 20, 50)
# Checks whose failure does not keep a broker from starting: stored events can be read, and `/ready`
# names the problem.
READABLE = frozenset({"space", "open files"})


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
    """FOLDER, or the folder of --url, whose default is ./data."""
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
    found = list(_examine(invocation, folder))
    rows = [output.plain(check) for check in found]
    output.show_rows(invocation, rows, ["name", "status", "found", "advice"])
    failed = [check for check in found if check.status == "fail"]
    if not invocation.json:
        output.note(
            f"{len(failed)} problems" if failed else "the broker can start, and take publishes"
        )
    if failed:
        raise click.exceptions.Exit(exit_code(failed[0].code))


def _examine(invocation: Invocation, folder: Path) -> Iterator[Check]:
    from penstock.cli import checks

    found = list(checks.check_config(invocation))
    yield from found
    if all(check.status != "fail" for check in found):
        yield from checks.check_settings_file(invocation.config)
        yield from examine(folder, _load(invocation))


def _run(invocation: Invocation, folder: Path) -> None:
    from penstock.bus.connect import tell_unknown
    from penstock.cli import checks
    from penstock.server import logs

    settings = _load(invocation)
    warnings = [*checks.check_settings_file(invocation.config), *require(folder, settings)]
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
    """The loop of uvloop if it is installed (the extra `speed`)."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop  # type: ignore[no-any-return]
    return None


def _announce(invocation: Invocation, record: Listening) -> None:
    """Print the addresses of the services: one object with --json, otherwise a line for each."""
    if invocation.json:
        output.print_json(record)
    else:
        rows = [
            {"service": name, "address": address, "url": record.urls[name]}
            for name, address in record.addresses.items()
        ]
        output.show_rows(invocation, rows, ["service", "address", "url"])
    sys.stdout.flush()


# -- the life of a broker -------------------------------------------------------------------------


class Serving:
    """Runs a broker on a folder until a signal stops it or the engine fails."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        load: Callable[[], Settings],
        config: str | None,
        announce: Callable[[Listening], None],
        output: Background,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._load = load
        self._config = config
        self._announce = announce
        self._output = output
        self._stopping = asyncio.Event()
        self._reloader: Reloader | None = None

    async def run(self) -> None:
        """Serve; returns after a graceful stop, raises the error that ended the broker."""
        from penstock.server.daemon import Daemon
        from penstock.server.readiness import raise_limit

        began = time.monotonic()
        log.info("starting", extra={"folder": str(self._folder), "pid": os.getpid()})
        raise_limit(self._settings)
        clear_stale_ports(self._folder)
        daemon = Daemon(self._folder, self._settings)
        watched = asyncio.ensure_future(report_alive())
        with self._signals():
            try:
                if not await self._start(daemon):
                    log.info("stopped before it was ready")
                    return
                # These objects stay, so the collector need not visit them while clients wait.
                gc.collect()
                gc.freeze()
                gc.set_threshold(*COLLECT_AFTER)
                self._publish(daemon, time.monotonic() - began)
                failure = await self._wait(daemon)
                await self._stop(daemon, failure)
            finally:
                watched.cancel()
                remove_ports(self._folder)
        if failure is not None:
            raise failure

    # -- starting ----------------------------------------------------------------------------

    async def _start(self, daemon: Daemon) -> bool:
        """Start the daemon; False when the signal to stop comes first."""
        starting = asyncio.ensure_future(daemon.start())
        signalled = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
            if starting.cancelled():
                return False
            starting.result()
            if self._stopping.is_set():
                await self._stop(daemon, None)
                return False
            return True
        finally:
            signalled.cancel()

    def _publish(self, daemon: Daemon, took_s: float) -> None:
        from penstock import __version__

        record = listening(self._settings.server, daemon.ports, __version__)
        write_ports(self._folder, record)
        for name, address in record.addresses.items():
            log.info("listening", extra={"service": name, "address": address})
        log.info("ready", extra={"seconds": round(took_s, 3)})
        notify("READY=1")
        try:
            self._announce(record)
        except OSError as error:  # the parent process has closed stdout
            log.warning("stdout cannot be written", extra={"problem": str(error)})

    # -- running -----------------------------------------------------------------------------

    async def _wait(self, daemon: Daemon) -> PenstockError | None:
        """Wait for a signal or for an engine that cannot write any more; returns its error."""
        from penstock.server.reload import Reloader

        self._reloader = Reloader(
            daemon.engine.admission, self._settings, self._load, self._config, daemon.authenticator
        )
        watching = asyncio.ensure_future(self._reloader.watch())
        try:
            while not self._stopping.is_set():
                failed = daemon.engine.commits.failed
                if failed is not None:
                    return failed
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._stopping.wait()
            return None
        finally:
            self._reloader = None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [*STOP_SIGNALS, signal.SIGHUP]
        # A signal that is ignored from the start (a process in the background) stays ignored.
        numbers = [each for each in numbers if each is signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]  # fmt: skip
        for number in numbers:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP:
            if self._reloader is not None:
                self._reloader.request()
        elif self._stopping.is_set():
            log.warning("stopping at once", extra={"signal": number.name})
            self._leave(EXIT_CODES[number])
        else:
            drain_s = self._settings.server.drain_s
            log.info("draining", extra={"signal": number.name, "at_most_s": drain_s})
            self._stopping.set()

    # -- stopping ----------------------------------------------------------------------------

    async def _stop(self, daemon: Daemon, failure: PenstockError | None) -> None:
        began = time.monotonic()
        notify("STOPPING=1")
        if failure is not None:
            log.error("cannot go on", extra={"problem": failure.message, "code": failure.code})
        try:
            async with asyncio.timeout(self._settings.server.drain_s + STOP_GRACE_S):
                await daemon.stop()
        except TimeoutError:
            log.error("stopping takes too long, given up; nothing acknowledged is lost")
            self._leave(FAILED if failure is None else exit_code(failure.code))
        except PenstockError as error:
            if failure is None:
                raise
            log.warning("stopped with errors", extra={"problem": str(error)})
        else:
            log.info("stopped", extra={"seconds": round(time.monotonic() - began, 3)})

    def _leave(self, code: int) -> NoReturn:
        """End the process without waiting for threads: all acknowledged events are durable."""
        remove_ports(self._folder)
        self._output.close()
        os._exit(code)


async def report_alive() -> None:
    """Tell systemd that the loop runs, twice in each period that it asks for (WatchdogSec)."""
    try:
        every_s = int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return
    while every_s > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


def notify(state: str) -> None:
    """Report a state to systemd, if it has started this process (Type=notify)."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(state.encode(), address)
    except OSError as error:
        log.warning("systemd cannot be told", extra={"state": state, "problem": str(error)})


# -- checks before the start ----------------------------------------------------------------------


def steps(folder: Path, settings: Settings) -> Iterator[Step]:
    """The checks in order, those that do not depend on the moment first. None changes anything."""
    from penstock.cli import checks

    yield "needed extras", partial(checks.check_needed, settings)
    yield from settings_steps(settings)
    yield "folder", partial(checks.check_place, folder)
    yield "format", partial(checks.check_format, folder, may_be_new=True)
    yield "space", partial(_check_space, folder, settings)
    yield "open files", partial(checks.check_descriptors, settings)
    yield "lock", partial(checks.check_free, folder)
    with contextlib.suppress(InvalidSettings):  # reported by the check of the addresses
        for name, address in addresses(settings.server).items():
            yield f"port {name}", partial(checks.check_port, name, address)


def settings_steps(settings: Settings) -> Iterator[Step]:
    """The checks of the settings and of the files that they name."""
    from penstock.cli import checks

    yield "addresses", partial(checks.check_addresses, settings)
    yield "access", partial(checks.check_access, settings)
    yield "secrets", partial(checks.check_secrets, settings)
    yield "tls", partial(checks.check_tls, settings)
    yield "curve", partial(checks.check_curve, settings)


def _check_space(folder: Path, settings: Settings) -> Check:
    from penstock.cli import checks

    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return checks.check_space(place, settings)


def require(folder: Path, settings: Settings) -> list[Check]:
    """Raise the error of the first check that fails; returns the warnings of the others."""
    from penstock.cli.checks import Check

    found: list[Check] = []
    for name, step in steps(folder, settings):
        result = step()
        these = [result] if isinstance(result, Check) else list(result)
        if name in READABLE:
            these = [msgspec.structs.replace(each, status="warn") if each.status == "fail" else each for each in these]  # fmt: skip
        found += these
    return [check for check in found if check.status == "warn"]


def examine(folder: Path, settings: Settings) -> Iterator[Check]:
    """Every check, with its finding."""
    from penstock.cli import checks
    from penstock.log.recovery import ABOUT

    fit = folder.is_dir()
    for name, step in steps(folder, settings):
        found = list(checks.guarded(name, step))
        yield from found
        if name in ("folder", "format"):
            fit = fit and all(check.status != "fail" for check in found)
    # Last, and in the order of a start, so that the first failure is the one that `up` ends with. A start
    # reads these itself, so `require` would read them a second time.
    if fit and (folder / ABOUT).exists():
        yield from checks.guarded("log", partial(checks.check_log, folder, settings))
    if fit:
        yield from checks.guarded("audit", partial(checks.check_audit_end, folder))
        yield from checks.guarded("routes", partial(checks.check_routes, folder))
