"""The doctor says what the running broker says: refusals, its addresses, TLS; and survives broken folders (C4)."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest

import penstock
from penstock.cli import checks
from penstock.model.errors import Rejected
from penstock.testing.authority import Authority

ANY = [f"--{name}=127.0.0.1:0" for name in ("tcp", "zmq", "pub", "http")]


def rows(result: Any, name: str) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["name"] == name]


def up(cli: Any, wait: Any, *words: str) -> dict[str, Any]:
    """A running broker: what it wrote down about itself."""
    process = cli.start("up", str(cli.data), *ANY, *words)
    wait((cli.data / "ports.json").exists, "the broker is up")
    record: dict[str, Any] = json.loads((cli.data / "ports.json").read_text())
    record["process"] = process
    return record


@pytest.mark.parametrize("by", ["folder", "url"])
def test_the_doctor_warns_while_publishes_are_refused(cli: Any, wait: Any, by: str) -> None:
    """C4: a limit that refuses now, and a quota that is used up, are told with limit and tenant."""
    tenants = json.dumps({"acme": {"storage_bytes": 2_000}, "busy": {"events_per_s": 1}})
    record = up(cli, wait, "--set", f"admission.tenants={tenants}")
    url = record["urls"]["tcp"]
    asks = ["doctor", str(cli.data) if by == "folder" else url, "--json"]
    quiet = cli.ok(*asks)
    assert [row["status"] for row in rows(quiet, "broker state")] == ["ok"]

    async def refused() -> None:
        for tenant, size in (("acme", 640), ("busy", 1)):
            async with penstock.connect(url, identity__tenant=tenant) as bus:
                with pytest.raises(Rejected):
                    for _ in range(4):
                        await bus.publish(f"orders.created.v1.{tenant}", bytes(size))

    asyncio.run(refused())
    told = rows(cli.ok(*asks), "broker state")
    assert {row["status"] for row in told} == {"warn"}
    text = " ".join(row["found"] for row in told)
    assert "tenant acme were throttled" in text
    assert "storage_bytes" in text
    assert "tenant busy were throttled" in text
    assert "events_per_s" in text


def test_the_doctor_shows_where_the_broker_listens(cli: Any, wait: Any) -> None:
    """C4: not the addresses of the defaults; settings that differ from them are named."""
    record = up(cli, wait)
    result = cli.ok("doctor", str(cli.data), "--json")
    assert rows(result, "addresses")[0]["found"] == ", ".join(
        f"{name} {address}" for name, address in record["addresses"].items()
    )
    for name, address in record["addresses"].items():
        row = rows(result, f"port {name}")[0]
        assert row["status"] == "ok"
        assert address in row["found"]
    other = cli("doctor", str(cli.data), "--set", "server.tcp=127.0.0.1:1", "--json")
    row = rows(other, "port tcp")[0]
    assert row["status"] == "warn"
    assert record["addresses"]["tcp"] in row["found"]


def test_the_doctor_works_under_mutual_tls(cli: Any, wait: Any, tmp_path: Any) -> None:
    """C4: with the client's certificate it asks; without, it says what is missing, and never to restart."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("broker")
    own, own_key = authority.issue("doctor")
    record = up(
        cli, wait, "--set", f"server.tls_certificate={certificate}", "--set", f"server.tls_key={key}",
        "--set", f"server.tls_client_ca={authority.ca_file}",
    )  # fmt: skip
    client = [
        "--set", f"client.tls_ca={authority.ca_file}", "--set", f"client.tls_certificate={own}",
        "--set", f"client.tls_key={own_key}",
    ]  # fmt: skip
    for place in (str(cli.data), record["urls"]["tcp"]):
        result = cli.ok("doctor", place, *client, "--json")
        assert [row["status"] for row in rows(result, "broker state")] == ["ok"], result
        for name in ("broker /health", "broker /ready"):
            assert [row["status"] for row in rows(result, name)] in ([], ["ok"])
    bare = cli.ok("doctor", str(cli.data), "--json")
    for name in ("broker /health", "broker /ready", "broker state"):
        row = rows(bare, name)[0]
        assert row["status"] == "warn", row
        assert "client.tls_certificate" in row["advice"]
        assert "SIGTERM" not in row["advice"]
    away = cli("doctor", record["urls"]["tcp"], "--json")
    assert away.code == 1
    assert "client.tls_certificate" in rows(away, "broker")[0]["advice"]


def test_the_doctor_uses_the_keys_of_the_broker(cli: Any, wait: Any) -> None:
    """C4, C8: run with the broker's settings it needs no token of its own; without them it says so."""
    secret = cli.folder / "secret"
    secret.write_text("a-secret-of-more-than-32-bytes-......\n")
    how = ["--set", f"auth.jwt_secret_file={secret}"]
    up(cli, wait, *how)
    known = cli.ok("doctor", str(cli.data), *how, "--json")
    assert [row["status"] for row in rows(known, "broker state")] == ["ok"]
    row = rows(cli.ok("doctor", str(cli.data), "--json"), "broker state")[0]
    assert row["status"] == "warn"
    assert "client.token" in row["advice"]


def test_the_doctor_says_why_a_broker_is_not_ready(cli: Any, wait: Any) -> None:
    """C4: `/ready` and its reasons are shown."""
    record = up(cli, wait, "--set", "server.max_connections=1")

    async def alone() -> Any:
        async with penstock.connect(record["urls"]["tcp"]):
            return await asyncio.to_thread(cli, "doctor", str(cli.data), "--json")

    row = rows(asyncio.run(alone()), "broker /ready")[0]
    assert row["status"] == "warn"
    assert "all 1 clients" in row["found"]
    record["process"].send_signal(signal.SIGTERM)


@pytest.mark.parametrize("damage", ["journal", "routes", "about"])
def test_the_doctor_survives_a_broken_folder(cli: Any, damage: str) -> None:
    """C4: whatever a file holds, each check has a row, and the one that met it fails."""
    cli.ok("publish", "orders", "x")
    cli.ok("route", "add", "orders", "billing")
    if damage == "about":
        (cli.data / "penstock.json").write_text('{"format": "one"}')
    elif damage == "routes":
        (cli.data / "routes.json").write_text('{"routes": 7}')
    else:
        file = next((cli.data / "journal").glob("*.jnl"))
        content = bytearray(file.read_bytes())
        for at in range(40, len(content)):
            content[at] ^= 0x55
        file.write_bytes(bytes(content))
    for words in (["doctor", str(cli.data), "--json"], ["up", str(cli.data), "--check", "--json"]):
        result = cli(*words)
        assert result.code != 0, result
        assert "Traceback" not in result.stderr
        assert any(row["status"] == "fail" for row in result.rows)


def test_a_check_that_meets_something_unforeseen_fails_with_its_words() -> None:
    """C4: an error that is none of ours is a finding too, and the rest is examined."""

    def look() -> checks.Check:
        raise KeyError("no such entry")

    [row] = checks.guarded("log", look)
    assert (row.name, row.status) == ("log", "fail")
    assert "no such entry" in row.found
    assert row.advice
