"""A real broker for tests and benchmarks, on free ports: a process of its own, or one to look into."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from penstock.model.settings_loader import load
from penstock.server.daemon import Daemon

START_S = 60.0
"""How long a broker may take to be ready: long, so that a busy machine fails no test."""
PORTS = "ports.json"


class BrokerProcess:
    """Starts, stops and kills a broker on one folder; a context manager that stops it.

    >>> BrokerProcess("data").url()
    Traceback (most recent call last):
    RuntimeError: the broker is not running
    """

    def __init__(self, folder: str | Path, *, log: IO[bytes] | int = subprocess.DEVNULL) -> None:
        self.folder = Path(folder)
        self.ports: dict[str, int] = {}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **flags: Any) -> Self:
        """Start it with settings such as `server__session_s=3`; returns when it is ready.

        It keeps its ports over restarts, so that clients find it again.
        """
        ports = self.folder / PORTS
        ports.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock.cli", "up", str(self.folder), "--json"]
        for service in ("zmq", "pub", "tcp", "http"):
            command += [f"--{service}", f"127.0.0.1:{self.ports.get(service, 0)}"]
        for name, value in flags.items():
            text = value if isinstance(value, str) else json.dumps(value)
            command += ["--set", f"{name.replace('__', '.', 1)}={text}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self._log)
        end = time.monotonic() + START_S
        while not ports.exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"the broker ended with {self._process.returncode}: {command}")
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"no broker within {START_S:g} s: {command}")
            time.sleep(0.01)
        self.ports = json.loads(ports.read_text())["ports"]
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the broker is not running")
        return self._process

    def url(self, transport: str = "tcp") -> str:
        """Where clients connect: `transport` is tcp or zmq."""
        self._running()
        scheme = "penstock" if transport == "tcp" else "penstock+zmq"
        return f"{scheme}://127.0.0.1:{self.ports[transport]}"

    def stop(self) -> int:
        """Let it drain; returns its exit code."""
        process, self._process = self._running(), None
        process.send_signal(signal.SIGTERM)
        return process.wait(START_S)

    def kill(self) -> None:
        """kill -9: the power cord of a process."""
        process, self._process = self._running(), None
        process.kill()
        process.wait(START_S)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.stop()


def broker_inside(folder: Path, flags: dict[str, Any]) -> Daemon:
    """A broker in this process, over TCP alone: one that a test can look into. Start it yourself."""
    off = {f"server.{name}": "" for name in ("zmq", "pub", "http")}
    return Daemon(folder / "data", load(None, {}, {**off, "server.tcp": "127.0.0.1:0", **flags}))
