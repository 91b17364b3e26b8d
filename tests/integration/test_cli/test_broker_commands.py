"""The commands of operators over `penstock://`, against a real broker (rows T8, T9, T10)."""

from __future__ import annotations

import json
import os
import pwd
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.model.settings import Auth
from penstock.server.auth import Authenticator
from penstock.testing.broker_process import BrokerProcess

SECRET = "a secret of this test, as long as it has to be"
TOPIC = "orders.created.v1.acme"
WHY = ("--reason", "fixed the bug")


def token(*roles: str) -> str:
    return Authenticator(Auth(jwt_secret=SECRET)).issue("acme", "ann", roles, 600)


class Shell:
    """The command with the rights of a token, at one broker."""

    def __init__(self, cli: Any, broker: BrokerProcess, token: str = "") -> None:
        self.broker = broker
        self._cli = cli
        self._env = {"PENSTOCK_URL": broker.url()}
        if token:
            self._env |= {"PENSTOCK_CLIENT_TOKEN": token, "PENSTOCK_IDENTITY_TENANT": "acme"}

    def __call__(self, *words: str) -> Any:
        return self._cli(*words, "--json", env=self._env)

    def ok(self, *words: str) -> Any:
        result = self(*words)
        assert result.code == 0, result
        return result

    def rest(self, path: str, token: str) -> Any:
        where = f"http://127.0.0.1:{self.broker.ports['http']}{path}"
        request = urllib.request.Request(where, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "served").start() as running:
        yield running


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "served").start(auth__jwt_secret=SECRET) as running:
        yield running


async def kill(bus: penstock.Bus, topic: str, count: int) -> None:
    """Dead letters of group billing."""
    async with bus.subscribe(topic, group="billing", start="earliest") as events:
        for number in range(count):
            await bus.publish(topic, {"number": number})
            event = await events.get(timeout_s=20)
            assert event is not None
            await event.reject("cannot be billed")
        await bus.flush()


async def test_a_walk_through_the_desks(cli: Any, broker: BrokerProcess) -> None:
    """T8, T9, Y3: topic, group, dlq and audit over the wire, as on a folder."""
    shell = Shell(cli, broker)
    shell.ok("topic", "create", "orders", "--partitions", "2")
    async with penstock.connect(broker.url()) as bus:
        await kill(bus, "orders", 3)
    assert shell.ok("topic", "info", "orders").row["name"] == "orders"
    assert [row["name"] for row in shell.ok("group", "list").rows] == ["billing"]
    assert shell.ok("group", "info", "billing").row["lag"] == 0

    newest, second, oldest = [row["id"] for row in shell.ok("dlq", "list").rows]
    page = shell.ok("dlq", "list", "--limit", "1", "--offset", "1").rows
    assert [row["id"] for row in page] == [second]
    assert shell.ok("dlq", "inspect", "--id", oldest).row["value"] == {"number": 0}
    target = ("--target-consumer", "billing", "--target-topic", "orders", "--confirm", "REPLAY")
    replay = ("dlq", "replay", "--ids", f"{oldest},{second}", *target, *WHY)
    assert shell.ok(*replay, "--actor", "bob").row["done"] == 2
    assert [row["id"] for row in shell.ok("dlq", "list").rows] == [newest]
    shown = [row["id"] for row in shell.ok("dlq", "list", "--everything").rows]
    assert shown == [newest, second, oldest]
    by = ("--actor", "bob", *WHY)
    shell.ok("dlq", "purge", "--ids", newest, *by, "--confirm", "PURGE")
    handmade = ("--consumer", "billing", "--topic", "orders", "--payload", "p")
    shell.ok("dlq", "dead-letter", "--id", "x", *handmade, *by)
    assert shell("dlq", "dead-letter", "--id", "x", *handmade, *by).code == 4, "it is there already"
    shell.ok("dlq", "dead-letter", "--id", "y", *handmade, *WHY)
    many = shell(
        "dlq", "purge", *by, "--confirm", "PURGE", "--ids", ",".join(map(str, range(1_001)))
    )
    assert many.code == 2
    assert many.row["error"]["data"]["parameter"] == "ids"

    operations = [row["operation"] for row in shell.ok("audit", "query", "--actor", "bob").rows]
    assert operations == ["dlq.replay", "dlq.replay", "dlq.purge", "dlq.dead-letter"]
    me = f"local:{pwd.getpwuid(os.getuid()).pw_name}"
    operations = [row["operation"] for row in shell.ok("audit", "query", "--actor", me).rows]
    assert operations == ["dlq.dead-letter"], "who says no name is known by that of the system"
    assert shell.ok("audit", "verify").row["ok"]
    relative = shell("audit", "export", "copy")
    assert relative.code == 2
    assert "absolute path" in relative.row["error"]["message"]
    copy = cli.folder / "copy"
    assert shell.ok("audit", "export", str(copy)).row["host"] == "the broker's"
    assert list(copy.rglob("manifest-*.json"))

    shell.ok("group", "reset", "billing", "--to", "latest", "--confirm", "RESET")
    shell.ok("group", "delete", "billing", "--confirm", "DELETE")
    shell.ok("topic", "delete", "orders", "--confirm", "DELETE")
    assert shell.ok("topic", "list").rows == []


async def test_a_token_says_who_does_it(cli: Any, guarded: BrokerProcess) -> None:
    """T8, T10: nobody need say it again; somebody else's name is refused, over the wire as over HTTP."""
    shell = Shell(cli, guarded, token("operator"))
    own = {"identity__tenant": "acme", "client__token": token("operator")}
    async with penstock.connect(guarded.url(), **own) as bus:
        await kill(bus, TOPIC, 2)
    first, second = [row["id"] for row in shell.ok("dlq", "list").rows]
    purge = ("dlq", "purge", *WHY, "--confirm", "PURGE", "--ids")
    denied = shell(*purge, first, "--actor", "eve")
    assert denied.row["error"]["code"] == "access.denied"
    shell.ok(*purge, first)
    shell.ok(*purge, second, "--actor", "ann")
    shell.ok("group", "reset", "billing", "--to", "latest", "--confirm", "RESET")
    shell.ok("topic", "delete", TOPIC, "--confirm", "DELETE")
    records = shell.ok("audit", "query").rows
    assert {row["actor"] for row in records} == {"ann"}
    operations = [row["operation"] for row in records]
    assert operations == ["dlq.purge", "dlq.purge", "group.reset", "topic.delete"]
    with_none = Shell(cli, guarded, token("reader"))(*purge, first)
    assert with_none.row["error"]["code"] == "access.denied"


async def test_the_admin_token_signs_as_admin(cli: Any, tmp_path: Path) -> None:
    """T9, T10: over the wire as over HTTP, and whoever is turned away stands in the log."""
    shown, log = "the-admin-token-of-this-test", tmp_path / "broker.log"
    with (
        log.open("wb") as written,
        BrokerProcess(tmp_path / "served", log=written).start(auth__admin_token=shown) as running,
    ):
        shell = Shell(cli, running)
        assert shell("topic", "list").row["error"]["code"] == "access.unauthenticated"
        shell = Shell(cli, running, shown)
        shell.ok("topic", "create", TOPIC)
        shell.ok("dlq", "dead-letter", "--id", "x", "--consumer", "billing", "--topic", TOPIC, "--payload", "p", *WHY)  # fmt: skip
        shell.ok("topic", "delete", TOPIC, "--confirm", "DELETE")
        records = shell.rest("/api/admin/audit/events", shown)["items"]
    assert {record["actor"] for record in records} == {"admin"}
    assert [record["operation"] for record in records] == ["dlq.dead-letter", "topic.delete"]
    (line,) = [text for text in log.read_text().splitlines() if "client refused" in text]
    assert "a token is needed" in line
    assert "127.0.0.1:" in line


async def test_a_tenant_replays_from_the_command_line(cli: Any, guarded: BrokerProcess) -> None:
    """T10, Y3: the token is enough; nobody need name its tenant."""
    async with penstock.connect(guarded.url(), client__token=token("reader")) as bus:
        await bus.publish(TOPIC, {"number": 7})
    env = {"PENSTOCK_URL": guarded.url(), "PENSTOCK_CLIENT_TOKEN": token("reader")}
    result = cli("replay", TOPIC, "--json", env=env)
    assert result.code == 0, result
    assert result.row["value"] == {"number": 7}


async def test_sessions_and_tenants(cli: Any, guarded: BrokerProcess) -> None:
    """T4, T11: what the admin API shows, each tenant its own."""
    shell = Shell(cli, guarded, token("reader"))
    own = {"identity__tenant": "acme", "client__token": token("operator")}
    async with (
        penstock.connect(f"{guarded.url()}?client=till", **own) as bus,
        bus.subscribe(TOPIC, group="billing") as events,
    ):
        await bus.publish(TOPIC, {"id": 7})
        await events.get(timeout_s=20)
        theirs = {"identity__tenant": "other", "client__token": other()}
        async with penstock.connect(f"{guarded.url()}?client=stranger", **theirs) as stranger:
            await stranger.publish("orders.created.v1.other", b"x")
            (till, *asking) = shell.ok("session", "list").rows
            (tenant,) = shell.ok("tenant", "list").rows
            rest = shell.rest("/api/admin/sessions", token("reader"))["items"]
            tenants = shell.rest("/api/admin/tenants", token("reader"))["items"]
            page = shell.ok("session", "list", "--limit", "1")
            assert len(page.rows) == 1
            assert f"{len(asking)} more: go on with --offset 1, or raise --limit" in page.stderr
    assert (till["client"], till["groups"], till["held"]) == ("till", ["billing"], 1)
    assert [each["client"] for each in asking if each["client"] == "stranger"] == []
    assert rest[0] | {"silent_s": 0} == till | {"silent_s": 0}
    assert tenants == [tenant]
    assert tenant["tenant"] == "acme"
    assert shell.ok("session", "list", "--offset", "1000").rows == []


def test_who_names_the_folder_of_a_broker_is_sent_to_the_broker(
    cli: Any, broker: BrokerProcess, tmp_path: Path
) -> None:
    """The mistake of everybody who has just started their first one."""
    folder = tmp_path / "served"
    result = cli("--url", str(folder), "publish", TOPIC, "x")
    assert (result.code, "storage.locked" in result.stderr) == (6, True)
    assert "ports.json" in result.stderr
    assert broker.url() in (folder / "ports.json").read_text()


def test_limits_and_refusals_that_are_none_are_dashes(cli: Any, broker: BrokerProcess) -> None:
    """T11: a tenant without a rate has no burst either."""
    at = {"PENSTOCK_URL": broker.url()}
    assert cli("publish", TOPIC, "x", env=at).code == 0
    _, line = cli("tenant", "list", env=at).text.splitlines()
    assert line.split()[-2:] == ["-", "-"]


def other() -> str:
    return Authenticator(Auth(jwt_secret=SECRET)).issue("other", "eve", ["operator"], 600)


def test_a_folder_has_neither(cli: Any) -> None:
    """A clear word instead of an empty list."""
    for noun in ("session", "tenant"):
        result = cli(noun, "list", "--json")
        assert (result.code, result.row["error"]["code"]) == (4, "refused.unsupported")
        assert "only a broker" in result.row["error"]["message"]


def test_a_command_says_that_nobody_answers_before_it_gives_up(cli: Any) -> None:
    """T16: ten silent seconds look like a command that hangs."""
    env = {"PENSTOCK_URL": "penstock://127.0.0.1:1", "PENSTOCK_CLIENT_CONNECT_S": "1.5"}
    result = cli("topic", "list", env=env)
    assert result.code != 0
    told, error = result.stderr.strip().splitlines()
    assert (
        told == "no broker has answered at penstock://127.0.0.1:1 yet; trying for 1.5 s (--timeout)"
    )
    assert error.count("`penstock up`") == 1, "the advice is given once"
