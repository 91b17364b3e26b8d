"""`penstock tail` and `penstock replay`: beside a writer, in stretches, in formats, into pipes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from datetime import UTC, datetime

import pytest

import penstock


def test_tail_follows_a_writer_in_another_process(cli, wait):
    cli.ok("publish", "orders.a", "before")
    tail = cli.start("tail", "orders.#", "--limit", "3", "--format", "value")
    time.sleep(1.5)
    writer = cli.start("publish", "orders.b", "--lines")
    for value in (b"1\n", b"2\n"):
        writer.stdin.write(value)
        writer.stdin.flush()
        time.sleep(0.2)
    writer.stdin.write(b"3\n")
    out, err = tail.communicate(timeout=30) if writer.stdin.flush() is None else (b"", b"")
    assert (tail.returncode, out) == (0, b"1\n2\n3\n"), err
    assert writer.poll() is None, "the tail did not disturb the writer"
    writer.communicate(timeout=30)
    assert cli.ok("group", "list", "--json").rows == [], "a tail leaves nothing behind"


def test_tail_from_the_beginning_and_since(cli):
    cli.ok("publish", "t", "--lines", input=b"a\nb\nc\n")
    assert (
        cli.ok("tail", "t", "--from", "earliest", "--limit", "3", "--format", "value").stdout
        == b"a\nb\nc\n"
    )
    assert (
        cli.ok("tail", "t", "--from", "offset:1", "--limit", "2", "--format", "value").stdout
        == b"b\nc\n"
    )
    assert (
        cli.ok("tail", "t", "--since", "1h", "--limit", "1", "--format", "value").stdout == b"a\n"
    )


def test_tail_ends_with_ctrl_c(cli):
    cli.ok("publish", "t", "x")
    tail = cli.start("tail", "t", "--from", "earliest")
    assert tail.stdout.readline().rstrip().endswith(b"x")
    tail.send_signal(signal.SIGINT)
    tail.wait(timeout=10)
    err = tail.stderr.read()
    assert tail.returncode == 130
    assert b"Traceback" not in err


def test_tail_ends_when_nobody_reads(cli):
    cli.ok("publish", "t", "x")
    tail = cli.start("tail", "t", "--from", "earliest")
    assert tail.stdout.readline()
    tail.stdout.close()
    assert tail.wait(timeout=10) == 0


def test_replay_by_offset_partition_and_limit(cli):
    cli.ok("topic", "create", "t", "--partitions", "2")
    cli.ok("publish", "t", "--lines", input=b"".join(b"%d\n" % n for n in range(10)))
    rows = cli.ok("replay", "t", "--json").rows
    assert len(rows) == 10
    partition = rows[0]["partition"]
    part = [row for row in rows if row["partition"] == partition]
    assert cli.ok("replay", "t", "--partition", str(partition), "--json").rows == part
    some = cli.ok(
        "replay",
        "t",
        "--partition",
        str(partition),
        "--from-offset",
        "1",
        "--to-offset",
        "3",
        "--json",
    ).rows
    assert some == part[1:3]
    assert len(cli.ok("replay", "t", "--limit", "4", "--json").rows) == 4


def test_replay_by_time(cli):
    cli.ok("publish", "t", "old")
    time.sleep(0.05)
    middle = datetime.now(UTC).isoformat()
    time.sleep(0.05)
    cli.ok("publish", "t", "new")
    assert cli.ok("replay", "t", "--since", middle, "--format", "value").stdout == b"new\n"
    assert cli.ok("replay", "t", "--until", middle, "--format", "value").stdout == b"old\n"
    assert cli.ok("replay", "t", "--since", "1h", "--format", "value").stdout == b"old\nnew\n"
    stored = cli.ok("replay", "t", "--since", "2026-01-01T00:00:00", "--format", "value")
    assert stored.stdout == b"old\nnew\n", "a time without a zone is in UTC"


def test_a_pattern_that_matches_nothing_prints_nothing(cli):
    cli.ok("publish", "t", "x")
    assert cli.ok("replay", "nosuch.#").stdout == b""


def test_formats(cli):
    cli.ok("publish", "t", '{"id": 7}', "--key", "k", "--header", "h=v")
    assert (
        cli.ok("replay", "t", "--format", "{topic} {offset} {key} {value}").text
        == 't 0 k {"id":7}\n'
    )
    line = cli.ok("replay", "t").text
    assert line.endswith('Z t/0/0 key=k h=v {"id":7}\n')
    assert json.loads(cli.ok("replay", "t", "--format", "json").text)["value"] == {"id": 7}


def test_broken_pipe_is_a_quiet_end(cli):
    cli.ok("publish", "t", "--lines", input=b"".join(b"%d\n" % n for n in range(50_000)))
    words = " ".join(cli.words)
    script = f"{words} replay t --format value | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script],
        env=cli.env,
        cwd=cli.folder,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"0\n0\n"
    assert done.stderr == b""


async def test_every_looking_command_works_beside_a_writer(cli):
    """The folder has a writer (this process); commands that look work, commands that change refuse."""
    async with penstock.connect(str(cli.data)) as bus:
        await bus.publish("t", b"x")
        async with bus.subscribe("t", group="g") as subscription:
            event = await subscription.get(timeout_s=5)
            assert event is not None
            await event.reject("bad")
        await bus.flush()
        for words in (
            ["topic", "list"], ["topic", "info", "t"], ["group", "list"], ["group", "info", "g"],
            ["route", "list"], ["route", "resolve", "t"], ["schedule", "list"], ["dlq", "list"],
            ["audit", "query"], ["audit", "verify"], ["replay", "t"], ["doctor"],
            ["tail", "t", "--from", "earliest", "--limit", "1"],
        ):  # fmt: skip
            result = cli(*words, "--json")
            assert result.code == 0, (words, result)
        for words in (
            ["topic", "create", "u"], ["topic", "grow", "t", "2"],
            ["topic", "delete", "t", "--confirm", "DELETE"], ["group", "reset", "g", "--to", "earliest", "--confirm", "RESET"],
            ["route", "add", "t", "d"], ["schedule", "add", "s", "t", "x", "--every", "5m"],
        ):  # fmt: skip
            result = cli(*words, "--json")
            assert (result.code, result.row["error"]["code"]) == (6, "storage.locked"), words


@pytest.mark.parametrize("text", ["someday", "2026-01-32", "1767225600", "99999999999999"])
def test_a_time_that_is_none_is_told_which_are(cli, text):
    """T16: somebody who only asks hears which times there are, and nothing of scheduling."""
    cli.ok("publish", "t", "x")
    for words in (["audit", "query", "--since", text], ["replay", "t", "--since", text]):
        result = cli(*words)
        assert result.code == 2, result
        assert "how long ago, such as '2h'" in " ".join(result.stderr.split())
        assert "scheduled" not in result.stderr


@pytest.mark.parametrize("text", ["1999-01-01", "1999-01-01T00:00:00", "@915148800", "2h"])
def test_a_time_needs_no_zone(cli, text):
    """A7: what has none is in UTC, in every command as in the API."""
    cli.ok("publish", "t", "x")
    assert len(cli.ok("replay", "t", "--since", text).text.splitlines()) == 1
    cli.ok("audit", "query", "--since", text)
