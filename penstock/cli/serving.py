"""One life of a broker process: start, tell where it listens, wait for a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, NoReturn

from penstock.cli import exits
from penstock.model.errors import PenstockError
from penstock.server.descriptors import raise_limit
from penstock.server.ports import (
    Listening,
    clear_stale_ports,
    listening,
    remove_ports,
    write_ports,
)
from penstock.server.reload import Reloader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.model.settings import Settings
    from penstock.server.daemon import Daemon
    from penstock.server.logs import Background

log = logging.getLogger("penstock.up")

LOOK_S = 0.25  # between two looks whether the writer has failed: clients have their errors already
STOP_GRACE_S = 30.0  # beyond `server.drain_s`: the last commits, sealing under way, closing files
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_CODES = {signal.SIGTERM: exits.TERMINATED, signal.SIGINT: exits.INTERRUPTED}

# Allocations between two looks for cycles, by generation. A broker makes next to none, and with a thousand
# sessions a look at everything takes a tenth of a second, in which nobody is served.
COLLECT_AFTER = (10_000, 20, 50)


class Serving:
    """Runs a broker on a folder until it is told to stop or cannot go on."""

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
        """Serve; returns after a graceful stop, raises what the broker died of."""
        from penstock.server.daemon import Daemon

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
                # What is there now stays: the collector need not look at it while clients wait.
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

    # -- the beginning -------------------------------------------------------------------------

    async def _start(self, daemon: Daemon) -> bool:
        """Start, or give up when the signal to stop comes first; False then."""
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
        except OSError as error:  # whoever started us does not care to read where we listen
            log.warning("stdout cannot be written", extra={"problem": str(error)})

    # -- the middle ----------------------------------------------------------------------------

    async def _wait(self, daemon: Daemon) -> PenstockError | None:
        """Until a signal comes, or the engine cannot write any more; returns that error."""
        self._reloader = Reloader(
            daemon.engine.admission, self._settings, self._load, self._config, daemon.doorkeeper
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
        # Ignored from the start means that somebody put us into the background: it stays so.
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

    # -- the end -------------------------------------------------------------------------------

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
            self._leave(exits.FAILED if failure is None else exits.exit_code(failure.code))
        except PenstockError as error:
            if failure is None:
                raise
            log.warning("stopped with errors", extra={"problem": str(error)})
        else:
            log.info("stopped", extra={"seconds": round(time.monotonic() - began, 3)})

    def _leave(self, code: int) -> NoReturn:
        """End now, whatever threads are at: all that was acknowledged is durable."""
        remove_ports(self._folder)
        self._output.close()
        os._exit(code)


async def report_alive() -> None:
    """Tell systemd that the loop turns, twice in each time that it asks for (WatchdogSec)."""
    try:
        every_s = int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return
    while every_s > 0:
        notify("WATCHDOG=1")
        await asyncio.sleep(every_s)


def notify(state: str) -> None:
    """Tell systemd, when it has started us (Type=notify)."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(state.encode(), address)
    except OSError as error:
        log.warning("systemd cannot be told", extra={"state": state, "problem": str(error)})
