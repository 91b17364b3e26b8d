"""`penstock demo`, which is `make run`: it runs, balances its books, and notices when they do not."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.cli.demo import TENANTS, Shop, command
from penstock.cli.invocation import Invocation

ROOT = Path(penstock.__file__).resolve().parent.parent
DEADLINE_S = 60


def demo(folder: Path, *words: str, **options: object) -> subprocess.Popen[str]:
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "penstock.cli", "demo", *words],
        cwd=folder, env=clean | {"PYTHONPATH": str(ROOT)}, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )  # fmt: skip


def test_it_ends_by_itself_and_balances(tmp_path: Path) -> None:
    """The summary says where every event went; a second run on the same folder counts its own."""
    for _ in range(2):
        process = demo(tmp_path, "--seconds", "1.5", "--json")
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        result = json.loads(out)
        assert result["balanced"] is True
        assert result["published"] == result["handled"] + result["dead"] == result["read"] > 1_000
        assert result["dead"] >= 2 * len(TENANTS)
        assert result["retried"] > 0
        assert [row["tenant"] for row in result["tenants"]] == list(TENANTS)
    assert (tmp_path / "demo-data" / "penstock.json").exists()


def test_plain_lines_in_a_pipe(tmp_path: Path) -> None:
    process = demo(tmp_path, "--seconds", "3", "--url", "mem:")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "\x1b" not in out
    assert "/s  published" in out
    assert " = handled " in out.splitlines()[-1]


def test_a_table_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = demo(tmp_path, "--seconds", "2", stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65_536):
            shown += piece
    except OSError:  # the other end of a terminal closed
        pass
    assert process.wait(DEADLINE_S) == 0
    assert b"read in order" in shown
    assert b"initech" in shown


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    process = demo(tmp_path, "--seconds", "600", "--json")
    deadline = time.monotonic() + DEADLINE_S
    while not list((tmp_path / "demo-data").glob("journal/*.jnl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["balanced"] is True


async def test_books_that_do_not_balance_are_noticed() -> None:
    """The check can fail: an event that vanished is not overlooked."""
    async with penstock.connect("mem:") as bus:
        shop = Shop(bus, rate=100)
        await shop.open()
        assert await shop.drain(5.0)
        shop.books["acme"].published += 1
        assert not await shop.drain(0.2)
        await shop.close()


def test_it_ends_with_1_when_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does with such books."""

    async def never(self: Shop, timeout_s: float) -> bool:
        return False

    monkeypatch.setattr(Shop, "drain", never)
    from click.testing import CliRunner

    result = CliRunner().invoke(command, ["--seconds", "0.2"], obj=Invocation(url="mem:"))
    assert result.exit_code == 1
    assert "NOT balanced" in result.output
