"""The shell asks before it destroys something, and shows first what would go (row D2)."""

from __future__ import annotations

import os
import pty
import subprocess
from typing import Any

import pytest

FILL = """
import asyncio, sys, penstock
async def main():
    async with penstock.connect(sys.argv[1]) as bus:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing") as sub:
            await (await sub.get(timeout_s=20)).reject("broken")
            await bus.flush()
        await bus.routes.put(penstock.Route("orders", "billing"))
        await bus.schedules.put("tick", "orders", 1, every="1h")
asyncio.run(main())
"""
ACTS = {
    "DELETE": [["topic", "delete", "orders"], ["group", "delete", "billing"]],
    "RESET": [["group", "reset", "billing", "--to", "earliest"]],
    "REMOVE": [["route", "remove", "orders", "billing"], ["schedule", "remove", "tick"]],
}
WORDS = [(word, act) for word, acts in ACTS.items() for act in acts]


@pytest.fixture
def filled(cli: Any) -> Any:
    subprocess.run(
        [*cli.words[:3], "-c", FILL, str(cli.data)], check=True, env=cli.env, cwd=cli.folder
    )
    return cli


def typed(cli: Any, words: list[str], answer: str) -> tuple[int, str]:
    """Run a command on a terminal and type an answer; returns its exit code and all it showed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*cli.words, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=cli.env,
        cwd=cli.folder, close_fds=True,
    )  # fmt: skip
    cli.running.append(process)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    shown = b""
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:  # the other end is closed: the command has ended
        pass
    os.close(ours)
    return process.wait(), shown.decode()


def ids(cli: Any) -> list[str]:
    return [row["id"] for row in cli.ok("dlq", "list", "--json").rows]


@pytest.mark.parametrize(("word", "act"), WORDS, ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else each)  # fmt: skip
def test_a_script_restates_the_verb(filled: Any, word: str, act: list[str]) -> None:
    """D2: a pipe is never asked; without the word the exit code says so, and nothing changed."""
    refused = filled(*act)
    assert refused.code == 4, refused
    assert f"--confirm {word}" in refused.stderr
    assert "--dry-run" in refused.stderr
    dry = filled.ok(*act, "--dry-run")
    assert "nothing was changed" in dry.stderr
    filled.ok(*act, "--confirm", word)


def test_a_dry_run_counts_what_would_go(filled: Any) -> None:
    """D2: events, groups and lag, in JSON too; a dead letter has one result each."""
    row = filled.ok("topic", "delete", "orders", "--dry-run", "--json").row
    assert (row["deleted"], row["done"], row["events"]) == (None, False, 3)
    assert row["groups"] == [{"name": "billing", "lag_before": 2, "lag_after": 0}]
    row = filled.ok("group", "reset", "billing", "--to", "earliest", "--dry-run", "--json").row
    assert (row["lag_before"], row["lag"]) == (2, 3)
    [letter] = ids(filled)
    row = filled.ok("dlq", "purge", "--ids", letter, "--reason", "x", "--dry-run", "--json").row
    assert (row["done"], row["results"][0]["result"]) == (1, "possible")
    assert ids(filled) == [letter]


def test_a_terminal_is_asked(filled: Any) -> None:
    """D2: it sees what would go and types the word; anything else changes nothing."""
    code, shown = typed(filled, ["topic", "delete", "orders"], "no")
    assert code == 4, shown
    assert "would be deleted" in shown
    assert "type DELETE to go on" in shown
    assert filled.count("orders") == 3
    code, shown = typed(filled, ["topic", "delete", "orders"], "DELETE")
    assert code == 0, shown
    assert filled.count("orders") == 0
