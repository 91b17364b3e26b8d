"""A server of somebody else's: own ports, own folder, and no way to outlive whoever started it.

The server runs in a process group of its own below a shell that holds one end of a pipe. The
other end is ours: when we close it, or die in any way, kill -9 included, the shell reads the end
of the file and kills the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from penstock.model.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

START_TIMEOUT_S = 20.0  # RabbitMQ, the slowest, takes about 8 s on two cores
STOP_TIMEOUT_S = 5.0  # a killed group is gone in milliseconds; more means a stuck disk
POLL_S = 0.02
LOG_TAIL_CHARS = 2000

# A server that ends by itself takes the group with it, so that the start is not waited out.
_LEASH = '{ "$@"; kill -9 0; } </dev/null & read _; kill -9 0'


class Server:
    """One running server and the folder it may write to; `files` are put there first.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     server = Server("sleeper", ["sleep", "60"], Path(folder) / "data")
    ...     running = server.alive
    ...     server.stop()
    ...     running, server.alive
    (True, False)
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name_in_folder, text in (files or {}).items():
            path = folder / name_in_folder
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o400)
        self.name = name
        self.folder = folder
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _LEASH, "leash", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(env) if env is not None else None,
                # Ctrl-C on the terminal is for us; we stop the server in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Root of the server's process tree."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    async def wait_for_port(self, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the server accepts connections; raise with the end of its log if not."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                return
            if not self.alive or time.monotonic() > end:
                state = f"not ready within {timeout_s:g} s" if self.alive else "ended at once"
                raise PenstockError(
                    f"{self.name} was {state} when it was started; the end of its log: "
                    f"{self.log_tail()}",
                    peer=self.name,
                )
            await asyncio.sleep(POLL_S)

    def log_tail(self) -> str:
        """The last of what the server printed, to say why it failed."""
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
        return "(no log)"

    def stop(self) -> None:
        """Kill the process group and delete the folder. Safe to call twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on right now, all different.

    >>> len(set(free_ports(3)))
    3
    """
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(int(probe.getsockname()[1]))
        return found
