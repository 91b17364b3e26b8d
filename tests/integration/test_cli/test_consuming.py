"""Consuming, asking and answering from a shell, and what slips of the fingers are answered with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.broker_process import BrokerProcess


def test_consume_prints_and_acks_each_event_once(cli: Any) -> None:
    for number in range(5):
        cli.ok("publish", "orders", json.dumps({"id": number}))
    first = cli.ok("consume", "orders", "--group", "billing", "--max", "2", "--format", "value")
    assert first.stdout.splitlines() == [b'{"id": 0}', b'{"id": 1}']
    rest = cli.ok("consume", "orders", "--group", "billing", "--idle", "500ms", "--json")
    assert [row["offset"] for row in rest.rows] == [2, 3, 4]
    assert "3 events: 3 acked" in rest.stderr
    assert cli.ok("group", "info", "billing", "--json").row["lag"] == 0


def test_a_program_settles_its_event_by_its_exit_status(cli: Any) -> None:
    """T5, T8: 0 acks, 65 rejects, anything else is tried again; the event is in input and environment."""
    for value in ("good", "hopeless", "flaky"):
        cli.ok("publish", "jobs", value, "--key", f"k-{value}", "--header", f"trace-id={value}")
    program = (
        'read -r text; echo "$text $EVENT_TOPIC $EVENT_KEY $EVENT_ATTEMPT $EVENT_HEADER_TRACE_ID" >> seen; '
        'case "$text" in hopeless) exit 65;; flaky) [ "$EVENT_ATTEMPT" = 2 ];; esac'
    )
    ran = cli.ok(
        "consume", "jobs", "--group", "workers", "--idle", "2s", "--exec", program, "--json"
    )
    outcomes = sorted((row["id"], row["attempt"], row["outcome"]) for row in ran.rows)
    assert outcomes == [
        ("jobs/0/0", 1, "acked"),
        ("jobs/0/1", 1, "rejected"),
        ("jobs/0/2", 1, "nacked"),
        ("jobs/0/2", 2, "acked"),
    ]
    seen = sorted((cli.folder / "seen").read_text().splitlines())
    assert seen == [
        "flaky jobs k-flaky 1 flaky",
        "flaky jobs k-flaky 2 flaky",
        "good jobs k-good 1 good",
        "hopeless jobs k-hopeless 1 hopeless",
    ]
    (letter,) = cli.ok("dlq", "list", "--json").rows
    assert letter["reason"] == "exit status 65"


def test_a_program_keeps_its_event_longer_than_a_lease(cli: Any) -> None:
    cli.ok("publish", "jobs", "slow")
    words = ("--lease", "1s", "--idle", "500ms", "--exec", "sleep 4; echo $EVENT_ATTEMPT >> ran")
    cli.ok("consume", "jobs", "--group", "workers", *words)
    assert (cli.folder / "ran").read_text() == "1\n"


def test_ctrl_c_lets_the_program_finish_and_keeps_what_was_not_begun(cli: Any, wait: Any) -> None:
    for number in range(3):
        cli.ok("publish", "jobs", str(number))
    program = "read -r text; touch began-$text; sleep 2; touch done-$text"
    running = cli.start("consume", "jobs", "--group", "workers", "--exec", program)
    wait(lambda: (cli.folder / "began-0").exists(), "the first program begins")
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    assert (cli.folder / "done-0").exists()
    assert b"1 events: 1 acked" in errors
    assert b"Traceback" not in errors
    assert cli.ok("group", "info", "workers", "--json").row["lag"] == 2


def test_a_question_and_its_answer(cli: Any, tmp_path: Path, wait: Any) -> None:
    with BrokerProcess(tmp_path / "served") as broker:
        cli.env["PENSTOCK_URL"] = broker.url()
        answering = cli.start(
            "reply", "double", "--exec", "read -r n; echo $((2 * n))", "--max", "1"
        )
        wait(lambda: cli("group", "info", "reply").code == 0, "the answering group is there")
        assert cli.ok("request", "double", "21", "--timeout", "20s").text == "42\n"
        assert answering.wait(timeout=30) == 0
        silent = cli("request", "double", "21", "--timeout", "300ms")
        assert silent.code == 7, silent


def test_an_event_that_is_no_request_does_not_end_reply(
    cli: Any, tmp_path: Path, wait: Any
) -> None:
    """D3, B6: it becomes a dead letter, and the next request is answered."""
    with BrokerProcess(tmp_path / "served") as broker:
        cli.env["PENSTOCK_URL"] = broker.url()
        answering = cli.start("reply", "math.#", "42", "--max", "1")
        wait(lambda: cli("group", "info", "reply").code == 0, "the answering group is there")
        cli.ok("publish", "math.double", "no request")
        assert cli.ok("request", "math.double", "21", "--timeout", "20s").text == "42\n"
        _, errors = answering.communicate(timeout=30)
        assert answering.returncode == 0, errors
        assert b"math.double/0/0 attempt 1: math.double/0/0 is no request" in errors
        (letter,) = cli.ok("dlq", "list", "--json").rows
        assert "is no request" in letter["reason"]


def test_an_event_that_is_taken_away_does_not_end_consume(cli: Any, tmp_path: Path, wait: Any) -> None:  # fmt: skip
    """D3: a reset while the program runs costs that delivery and nothing else."""
    with BrokerProcess(tmp_path / "served") as broker:
        cli.env["PENSTOCK_URL"] = broker.url()
        cli.ok("publish", "jobs", "a")
        program = "read -r text; touch began-$EVENT_ATTEMPT; [ -e again ] || sleep 2"
        running = cli.start("consume", "jobs", "--group", "g", "--max", "2", "--lease", "600ms", "--exec", program)  # fmt: skip
        wait(lambda: (cli.folder / "began-1").exists(), "the program begins")
        cli.ok("group", "reset", "g", "--to", "earliest", "--confirm", "RESET")
        (cli.folder / "again").touch()
        _, errors = running.communicate(timeout=30)
        assert running.returncode == 0, errors
        assert b"2 events: 1 acked, 1 lost" in errors
        assert cli.ok("group", "info", "g", "--json").row["lag"] == 0


def test_a_broker_that_is_not_there_is_told_within_seconds(cli: Any) -> None:
    for url in ("penstock://127.0.0.1:9", "penstock://nosuch.invalid:5557"):
        failed = cli("topic", "list", "--timeout", "300ms", env={"PENSTOCK_URL": url})
        assert failed.code not in (0, 130)
        assert "within 0.3 s" in failed.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("publsh", "t"), "publish"),
        (("topic", "show", "t"), "info"),
        (("group", "lst"), "list"),
        (("dlq", "rm"), None),
    ],
)
def test_a_misspelt_command_is_answered_with_the_nearest(cli: Any, words: Any, hint: Any) -> None:
    failed = cli(*words)
    assert failed.code == 2
    assert "No such command" in failed.stderr
    if hint is not None:
        assert f"Did you mean {hint!r}?" in failed.stderr


def test_slips_of_publish_store_nothing(cli: Any) -> None:
    assert "nothing came in on stdin" in cli("publish", "orders").stderr
    (cli.folder / "order.json").write_text('{"id": 7}')
    slip = cli("publish", "orders", "order.json")
    assert (slip.code, "--file order.json" in slip.stderr) == (2, True)
    dash = cli("publish", "orders", "-", input=b"from a pipe")
    assert (dash.code, "leave VALUE out" in dash.stderr) == (2, True)
    assert cli.count("orders") == 0
    cli.ok("publish", "orders", "")
    cli.ok("publish", "orders", "order.json", "--codec", "raw")
    cli.ok("publish", "orders", "--file", "order.json")
    assert cli.values("orders") == [b"", b"order.json", b'{"id": 7}']


def test_a_foreign_folder_is_left_as_it_was(cli: Any) -> None:
    foreign = cli.folder / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"meow")
    refused = cli("publish", "orders", "x", env={"PENSTOCK_URL": str(foreign)})
    assert refused.code == 6
    assert [path.name for path in foreign.iterdir()] == ["cat.jpg"]


def test_ctrl_c_ends_a_tail_without_an_error(cli: Any, wait: Any) -> None:
    cli.ok("publish", "orders", "a")
    running = cli.start("tail", "orders", "--from", "earliest", "--format", "value")
    assert running.stdout.readline() == b"a\n"
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert (running.returncode, out, errors) == (130, b"", b"")


def test_durations_are_shown_as_people_write_them(cli: Any) -> None:
    shown = cli.ok("topic", "create", "orders", "--retention-age", "30d").text
    assert "retention age    30 d\n" in shown
