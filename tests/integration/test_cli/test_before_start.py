"""What `up --check`, `config check` and `doctor` say about a broker that could not start (T16)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ANY = ("--tcp", "127.0.0.1:0", "--zmq", "127.0.0.1:0", "--pub", "127.0.0.1:0", "--http", "127.0.0.1:0")  # fmt: skip


def failed(result: Any) -> dict[str, str]:
    return {row["name"]: row["found"] for row in result.rows if row["status"] == "fail"}


@pytest.fixture
def damaged(cli: Any) -> Path:
    """A folder whose journal lost bytes that were acknowledged."""
    for text in ("first", "precious", "last"):
        cli.ok("publish", "t", text)
    for journal in (cli.data / "journal").glob("*"):
        journal.write_bytes(journal.read_bytes().replace(b"precious", bytes(8)))
    return cli.data


def test_check_reads_the_journal_as_a_start_does(cli: Any, damaged: Path, hashes_of: Any) -> None:
    """T16: `up --check` finds a damaged journal, ends as `up` does, and changes nothing."""
    before = hashes_of(damaged)
    result = cli("up", str(damaged), *ANY, "--check", "--json")
    assert result.code == 6, result
    assert "damaged" in failed(result)["log"]
    assert hashes_of(damaged) == before
    assert cli("up", str(damaged), *ANY).code == 6


def _lose_a_line(folder: Path) -> None:
    (file,) = (folder / "audit").glob("*.ndjson")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], *lines[2:]]))


def _be_a_file(folder: Path) -> None:
    shutil.rmtree(folder / "audit")
    (folder / "audit").write_text("x")


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a line is missing": ("audit", _lose_a_line),
    "no head": ("audit", lambda folder: (folder / "audit" / "head.json").unlink()),
    "junk as head": ("audit", lambda folder: (folder / "audit" / "head.json").write_text("{}")),
    "a file for audit": ("audit", _be_a_file),
    "no key": ("audit", lambda folder: (folder / "audit" / "key").unlink()),
    "junk as key": ("audit", lambda folder: (folder / "audit" / "key").write_text("junk")),
    "junk as routes": ("routes", lambda folder: (folder / "routes.json").write_text("junk")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_reads_audit_and_routes_as_a_start_does(
    cli: Any, hashes_of: Any, damage: str
) -> None:
    """T16: what `up` ends with 6 for, `up --check` and `doctor` find, and they change nothing."""
    cli.ok("route", "add", "orders.*", "billing")
    name, break_it = DAMAGES[damage]
    break_it(cli.data)
    before = hashes_of(cli.data)
    result = cli("up", str(cli.data), *ANY, "--check", "--json")
    assert (result.code, [*failed(result)]) == (6, [name]), result
    assert name in failed(cli("doctor", "--json"))
    assert hashes_of(cli.data) == before
    assert cli("up", str(cli.data), *ANY).code == 6


def test_check_changes_nothing_where_the_audit_log_is_to_be_begun(cli: Any, hashes_of: Any) -> None:
    """T16: a start makes a key, a head and a file there; a check makes them nowhere."""
    cli.ok("publish", "t", "x")
    shutil.rmtree(cli.data / "audit")
    before = hashes_of(cli.data)
    cli.ok("up", str(cli.data), *ANY, "--check")
    cli.ok("doctor")
    assert hashes_of(cli.data) == before
    assert not (cli.data / "audit").exists()


def test_the_advice_about_a_damaged_journal_can_be_followed(cli: Any, damaged: Path) -> None:
    """T16: it names what helps, and not `?mode=ro`, which meets the same damage."""
    result = cli("up", str(damaged), *ANY)
    assert "mode=ro" not in result.stderr
    assert "backup" in result.stderr
    assert "doctor --deep" in result.stderr
    doctor = cli("doctor", "--deep", "--json")
    assert [row["status"] for row in doctor.rows if row["name"] == "segments"] == ["ok"]


def test_check_finds_a_place_that_takes_no_files(cli: Any) -> None:
    """T16: /proc looks writable to root, and no folder can be made there."""
    result = cli("up", "/proc/penstock", *ANY, "--check", "--json")
    assert result.code == 6, result
    assert "/proc" in failed(result)["folder"]
    assert cli("up", "/proc/penstock", *ANY).code == 6


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[server]\ntcp = "foo"', "server.tcp"),
        ('[server]\nzmq = "127.0.0.1:99999"', "server.zmq"),
        ('[server]\nhttp = "0.0.0.0:5558"', "server.http"),
        ('[server]\ntls_certificate = "missing.pem"', "server.tls_certificate"),
        ('[server]\ncurve_clients = ["a"]', "server.curve_clients"),
        ('[auth]\njwt_secret = "short"', "auth.jwt_secret"),
    ],
)
def test_config_check_finds_what_no_broker_starts_with(cli: Any, text: str, key: str) -> None:
    """T16: a file that passes is one with which `up` starts."""
    (cli.folder / "broker.toml").write_text(text)
    result = cli("config", "check", "broker.toml", "--json")
    assert result.code == 2, result
    assert [(row["key"], row["source"]) for row in result.rows] == [(key, "file broker.toml")]
    assert cli("--config", "broker.toml", "up", str(cli.data), "--check").code == 2


def test_config_check_passes_on_the_warnings_of_a_start(cli: Any) -> None:
    """T16: what `up` starts with and warns of is no error."""
    (cli.folder / "broker.toml").write_text('[auth]\nadmin_token = "short"')
    result = cli.ok("config", "check", "broker.toml")
    assert "auth.admin_token has 5 characters" in result.text
    assert "1 warnings" in result.stderr


@pytest.mark.parametrize(
    ("place", "name", "text"),
    [
        ("afile", "folder", "is no folder"),
        ("afile/sub", "folder", "afile is no folder"),
        ("/proc/nope", "folder", "nothing can be made in /proc"),
        ("http://127.0.0.1:1", "url", "no engine serves"),
        ("nats://x", "url", "later release"),
        ("penstock://127.0.0.1:notaport", "url", "notaport"),
        ("penstock://[::1", "url", "is no URL"),
    ],
)
def test_doctor_says_what_a_url_cannot_mean(cli: Any, place: str, name: str, text: str) -> None:
    """T16: what is no folder and no bus is a failure, in words."""
    (cli.folder / "afile").write_text("x")
    result = cli("doctor", place, "--json")
    assert result.code == 1, result
    assert text in failed(result)[name]


def test_doctor_takes_every_url_that_a_bus_has(cli: Any) -> None:
    """T16: memory has no folder, and `file:` names one."""
    cli.ok("publish", "t", "x")
    found = {row["name"]: row["found"] for row in cli.ok("doctor", "mem:", "--json").rows}
    assert "keeps nothing on disk" in found["folder"]
    found = {
        row["name"]: row["found"] for row in cli.ok("doctor", f"file:{cli.data}", "--json").rows
    }
    assert found["folder"] == str(cli.data)
    assert found["log"].startswith("1 partitions")


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "mem:", "up"],
        ["--url", "penstock://127.0.0.1:1", "up"],
        ["--url", "./shop?mode=ro", "up"],
        ["up", "./shop?mode=ro"],
        ["up", "mem:"],
        ["up", ""],
    ],
    ids=" ".join,
)
def test_up_refuses_what_is_no_folder_to_write(cli: Any, words: list[str]) -> None:
    """T16: a broker never starts on another folder than the one that was named."""
    result = cli(*words, *ANY, "--check")
    assert result.code == 2, result
    assert "folder" in result.stderr
    assert not list(cli.folder.iterdir())
