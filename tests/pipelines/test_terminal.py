"""A pipeline on a real terminal: its bars are drawn, and Ctrl-C ends it in order (S8)."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import penstock

EVENTS = 40
PATIENCE_S = 240.0
COLUMNS, LINES = 160, 40


class Terminal:
    """A command whose input and output are a terminal of its own; what it drew is in `screen`."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.screen = ""
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (LINES, COLUMNS))
        self._child = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, cwd=folder, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"}, preexec_fn=_own_terminal,
        )  # fmt: skip
        os.close(slave)

    def wait_for(self, pattern: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.screen):
            assert time.monotonic() < until, self.screen[-2000:]
            assert self._read(1.0) or self._child.poll() is None, self.screen[-2000:]

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> int:
        """Read until the command is over; its exit code."""
        until = time.monotonic() + PATIENCE_S
        while self._child.poll() is None:
            assert time.monotonic() < until, self.screen[-2000:]
            self._read(0.2)
        while self._read(0.2):
            pass
        os.close(self._master)
        return self._child.returncode

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # the other end is closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


def _own_terminal() -> None:
    """Make the terminal on standard input the one whose Ctrl-C reaches this process."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_bars_are_drawn_and_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("numbers.all", [{"n": n} for n in range(EVENTS)])
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "copied.py").write_text(
        "import penstock\n\n"
        "@penstock.pipeline('copied', reads='numbers.#', writes='copied.numbers', schema='n BIGINT')\n"
        "def copied(events):\n"
        "    return events.selectExpr('value.n AS n')\n"
    )
    words = [sys.executable, "-m", "penstock.cli", "--url", "data", "pipeline", "run", "copied"]
    terminal = Terminal([*words, "--path", "pipelines", "--master", "local[1]"], tmp_path)
    try:
        terminal.wait_for(r"caught up")
        terminal.wait_for(rf"copied.*100%\s+{EVENTS}\s")
        terminal.press_ctrl_c()
        assert terminal.end() == 0, terminal.screen[-2000:]
    finally:
        terminal.close()
    assert "Traceback" not in terminal.screen
    assert "\x1b[" in terminal.screen, "nothing was drawn over"
    assert re.search(rf"rows in\s+{EVENTS}\b", terminal.screen), terminal.screen[-1000:]
    with penstock.connect_sync(f"{tmp_path / 'data'}?mode=ro") as bus:
        assert sorted(event.value()["n"] for event in bus.replay("copied.#")) == list(range(EVENTS))
