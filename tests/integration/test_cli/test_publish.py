"""`penstock publish`: every kind of input, exact counts, and what happens when it is cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest


def test_a_value(cli):
    result = cli.ok(
        "publish",
        "orders.created",
        '{"id": 7,  "sum": 1.10}',
        "--key",
        "k",
        "--header",
        "a=b=c",
        "--priority",
        "3",
    )
    assert result.text == "orders.created/0/0\n"
    event = cli.ok("replay", "orders.#", "--json").row
    assert (event["value"], event["codec"], event["key"]) == ({"id": 7, "sum": 1.1}, "json", "k")
    assert (event["headers"], event["priority"]) == ({"a": "b=c"}, 3)


def test_json_is_kept_to_the_letter(cli):
    text = '{"sum": 1.10, "big": 123456789012345678901234567890}'
    cli.ok("publish", "t", text)
    assert cli.values("t") == [text.encode()]


@pytest.mark.parametrize(
    ("value", "codec", "stored"),
    [
        ("hello", "raw", b"hello"),
        ("7", "json", b"7"),
        ('"quoted"', "json", b'"quoted"'),
        ("{broken", "raw", b"{broken"),
        ("", "raw", b""),
    ],
)
def test_what_is_json_is_json_and_the_rest_is_raw(cli, value, codec, stored):
    row = cli.ok("publish", "t", value, "--json").row
    assert row["id"] == "t/0/0"
    assert cli.ok("replay", "t", "--json").row["codec"] == codec
    assert cli.values("t") == [stored] or (stored == b"" and cli.values("t") == [b""])


def test_msgpack_from_json(cli):
    cli.ok("publish", "t", '{"id": 7}', "--codec", "msgpack")
    row = cli.ok("replay", "t", "--json").row
    assert (row["codec"], row["value"]) == ("msgpack", {"id": 7})


def test_a_value_that_is_not_what_the_codec_says(cli):
    result = cli("publish", "t", "{broken", "--codec", "json")
    assert result.code == 2
    assert "[invalid.decode]" in result.stderr


def test_stdin_whole_and_not_utf8(cli):
    cli.ok("publish", "t", input=b"\xff\xfe\x00\n\nend")
    row = cli.ok("replay", "t", "--json").row
    assert (row["codec"], row["base64"]) == ("raw", "//4ACgplbmQ=")


def test_lines_not_utf8_without_last_newline_and_crlf(cli):
    result = cli.ok("publish", "t", "--lines", input=b"a\r\n\xff\n\nlast")
    assert result.text == "4 events acknowledged\n"
    assert cli.values("t") == [b"a", b"\xff", b"", b"last"]


def test_empty_stdin_with_lines_publishes_nothing(cli):
    assert cli.ok("publish", "t", "--lines", "--json").row["acknowledged"] == 0


def test_ndjson_skips_blank_lines_and_reads_files(cli):
    (cli.folder / "one.ndjson").write_text('{"n": 1}\n\n{"n": 2}\n')
    (cli.folder / "two.ndjson").write_text('{"n": 3}')
    assert (
        cli.ok("publish", "t", "--ndjson", "one.ndjson", "two.ndjson", "--json").row["acknowledged"]
        == 3
    )
    assert [json.loads(line)["n"] for line in cli.values("t")] == [1, 2, 3]
    cli.ok("publish", "t", "--ndjson", "--file", "two.ndjson")
    cli.ok("publish", "--ndjson", "t", input=b'{"n": 4}\n')
    assert len(cli.values("t")) == 5


@pytest.mark.parametrize("bad", [b"{broken\n", b'{"a": "\xff"}\n', b"\xff\xfe\n"])
def test_a_bad_line_is_named_and_the_count_is_exact(cli, bad):
    lines = b'{"n": 1}\n' * 25 + bad + b'{"n": 2}\n' * 10
    result = cli("publish", "t", "--ndjson", "--batch", "10", input=lines)
    assert result.code == 2
    assert "stdin line 26" in result.stderr
    stored = cli.count("t")
    assert f"{stored} events were acknowledged before" in result.stderr
    assert (
        cli("publish", "u", "--ndjson", "--batch", "10", "--json", input=lines).row["error"][
            "data"
        ]["acknowledged"]
        == 20
    )


def test_files_are_one_event_each(cli):
    (cli.folder / "a.bin").write_bytes(b"\x00\x01")
    (cli.folder / "b.json").write_text('{"b": 1}')
    result = cli.ok("publish", "t", "--file", "a.bin", "--file", "b.json")
    assert result.text == "2 events acknowledged\n"
    assert [row["codec"] for row in cli.ok("replay", "t", "--json").rows] == ["raw", "json"]


def test_a_missing_file_stops_before_anything_is_published(cli):
    (cli.folder / "a").write_text("a")
    assert cli("publish", "t", "--file", "a", "--file", "missing").code == 2
    assert not cli.data.exists()


def test_lines_are_published_as_they_come(cli, wait):
    process = cli.start("publish", "t", "--lines")
    process.stdin.write(b"one\ntwo\nhal")
    process.stdin.flush()
    wait(lambda: cli.count("t") == 2, "two lines published while the input is still open")
    process.stdin.write(b"f\n")
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, b"3 events acknowledged\n")
    assert cli.values("t") == [b"one", b"two", b"half"]


def test_idempotency_key(cli):
    first = cli.ok("publish", "t", "x", "--idempotency-key", "k", "--json").row
    again = cli.ok("publish", "t", "x", "--idempotency-key", "k", "--json").row
    assert (first["duplicate"], again["duplicate"], again["id"]) == (False, True, first["id"])
    assert cli.count("t") == 1


def test_importing_a_file_again_stores_nothing_twice(cli):
    lines = b"".join(b"%d\n" % n for n in range(250))
    words = ("publish", "t", "--lines", "--batch", "100", "--idempotency-key", "import")
    cli.ok(*words, input=lines[: len(lines) // 2 + 1].rpartition(b"\n")[0] + b"\n")
    cli.ok(*words, input=lines)
    assert cli.values("t") == lines.splitlines()


def test_delay_is_scheduled_and_ttl_is_kept(cli):
    row = cli.ok("publish", "t", "later", "--delay", "1h", "--json").row
    assert (row["scheduled"], row["id"]) == (True, None)
    assert (
        cli.ok("publish", "t", "--lines", "--delay", "1h", input=b"a\nb\n").text
        == "2 events acknowledged\n"
    )
    cli.ok("publish", "t", "now", "--ttl", "1h")
    event = cli.ok("replay", "t", "--json").row
    assert event["value"] == "now"
    assert event["expires_us"] == pytest.approx(
        event["append_time_us"] + 3_600_000_000, abs=60_000_000
    )


def test_at_delivers_at_its_time(cli, wait):
    cli.ok("publish", "t", "soon", "--at", f"@{time.time() + 8:.3f}")
    assert cli.count("t") == 0

    def due() -> bool:
        cli.ok("publish", "other", "x")  # a writer must be there for the event to come due
        return cli.count("t") == 1

    wait(due, "the event came due")


def test_a_long_text_is_a_value_and_no_file(cli):
    cli.ok("publish", "t", "y" * 100_000)
    assert cli.values("t") == [b"y" * 100_000]


def test_too_large(cli):
    result = cli(
        "--set", "limits.max_payload_bytes=1KiB", "publish", "t", "--lines", input=b"x" * 5000
    )
    assert result.code == 2
    assert "[invalid.too-large]" in result.stderr
    assert cli("--set", "limits.max_payload_bytes=1KiB", "publish", "t", "y" * 2000).code == 2


def test_interrupt_while_waiting_for_input(cli, wait):
    """Ctrl-C in the middle: the count is exact and the exit code 130."""
    process = cli.start("publish", "t", "--lines")
    process.stdin.write(b"".join(b"%d\n" % n for n in range(2500)))
    process.stdin.flush()
    wait(lambda: cli.count("t") == 2500, "the lines so far are published")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=10)
    err = process.stderr.read()
    assert process.returncode == 130
    assert b"interrupted: 2500 events were acknowledged" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_under_full_load_counts_exactly(cli, wait, number, code):
    """Ctrl-C in the middle of publish_many: what is reported is what is stored, no more, no less."""
    path = cli.folder / "big"
    with path.open("wb") as file:
        for base in range(0, 500_000, 10_000):
            file.write(b"".join(b"%0100d\n" % n for n in range(base, base + 10_000)))
    process = cli.start("publish", "t", "--lines", "--json", "--batch", "20", "big")
    wait(lambda: cli.count("t") > 0, "publishing is under way")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    row = json.loads(out)
    assert row["interrupted"] is True
    assert row["unknown"] == 0
    assert 0 < row["acknowledged"] < 500_000
    values = cli.values("t")
    assert len(values) == row["acknowledged"]
    assert values[-1] == b"%0100d" % (row["acknowledged"] - 1)


def test_a_second_writer_is_refused_and_the_holder_named(cli, wait):
    process = cli.start("publish", "t", "--lines")
    process.stdin.write(b"one\n")
    process.stdin.flush()
    wait(lambda: cli.count("t") == 1, "the first writer has the folder")
    result = cli("publish", "t", "two")
    assert result.code == 6
    assert "[storage.locked]" in result.stderr
    assert str(process.pid) in result.stderr
    process.communicate(timeout=30)
    assert process.returncode == 0
    cli.ok("publish", "t", "two")
    assert cli.values("t") == [b"one", b"two"]


def test_progress_of_a_long_input(cli, wait):
    process = cli.start("publish", "t", "--lines")
    os.set_blocking(process.stderr.fileno(), False)
    seen = bytearray()

    def reported() -> bool:
        process.stdin.write(b"x\n")
        process.stdin.flush()
        seen.extend(process.stderr.read() or b"")
        return b"events acknowledged, " in seen

    wait(reported, "a line of progress")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.endswith(b" events acknowledged\n")


def test_the_pipeline_shell_users_write(cli):
    script = f"seq 1 5000 | {' '.join(cli.words)} publish t --lines && {' '.join(cli.words)} replay t --format value | tail -1"
    done = subprocess.run(
        ["bash", "-c", script],
        env=cli.env,
        cwd=cli.folder,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"5000 events acknowledged\n5000\n", done
