"""The admin API over real HTTP: a real engine on a folder, a real server on a free port (rows T8, T10)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import httpx
import jwt
import msgspec
import pytest
import pytest_asyncio
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import penstock
from penstock.bus.bus import Bus
from penstock.cli import dlq as cli_dlq
from penstock.cli import output
from penstock.cli import topic as cli_topic
from penstock.cli.invocation import Invocation
from penstock.engines import requests as ask
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.log.disk import RealDisk
from penstock.model.errors import (
    Deferred,
    DiskFull,
    InvalidSettings,
    MissingExtra,
    Throttled,
    WriterFailed,
)
from penstock.model.event import Identity
from penstock.server.admin import http
from penstock.server.admin import request as request_module
from penstock.server.admin.endpoint import AdminContext
from penstock.server.admin.http import ENDPOINTS, HttpServer, build_app
from penstock.server.admin.openapi import plain_path
from penstock.server.auth import Authenticator

SECRET = "integration-secret-of-32-bytes-.."
ADMIN_TOKEN = "the-admin-token"
DLQ = "/api/admin/dlq"
ACME, OTHER, SHARED = "orders.created.v1.acme", "orders.created.v1.other", "orders"
REPLAY = {"reason": "fixed", "confirm": "REPLAY"}


class Row(msgspec.Struct):
    """What a broker answers by itself: at least a tenant."""

    tenant: str
    number: int = 1


BROKERS_OWN = {
    ask.ListSessions: [Row("acme"), Row("other", 2)],
    ask.ListTenants: [Row("acme", 3), Row("other", 4)],
}


class Site:
    """An engine, a bus over it and the HTTP server before it."""

    def __init__(self, folder: Path, settings: penstock.Settings) -> None:
        self.folder = folder
        self.ready = True
        self.asked: list[Any] = []
        self.engine = EmbeddedEngine(RealDisk(folder), settings)
        self.bus = Bus(self.engine, settings, Identity(), self.engine.capabilities)
        self.authenticator = Authenticator(settings.auth)
        context = AdminContext(
            self.engine,
            settings,
            self.authenticator,
            lambda: [] if self.ready else ["draining"],
            self._ask,
        )

        async def extra(request: Request) -> PlainTextResponse:
            """Numbers for a scraper."""
            return PlainTextResponse("numbers")

        self.app = build_app(context, [Route("/metrics", extra)])
        self.server = HttpServer(self.app, "127.0.0.1", 0)
        self.port = 0

    async def _ask(self, request: Any) -> Any:
        self.asked.append(request)
        if type(request) in BROKERS_OWN:
            return BROKERS_OWN[type(request)]
        return await self.engine.ask(request)

    def client(self, token: str = "", **headers: str) -> httpx.AsyncClient:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, trust_env=False, timeout=20
        )

    def token(self, *roles: str, tenant: str = "acme", subject: str = "ann") -> str:
        return self.authenticator.issue(tenant, subject, roles, 60)

    async def dead(self, topic: str, count: int = 1, group: str = "billing") -> list[str]:
        """Dead letters the way they come about: a consumer rejects events."""
        before = {each.id for each in await self.bus.dead_letters.list(consumer=group, topic=topic)}
        async with self.bus.subscribe(topic, group=group) as subscription:
            for number in range(count):
                await self.bus.publish(topic, {"number": number}, key="k", headers={"h": "v"})
                event = await subscription.get(timeout_s=10)
                assert event is not None
                await event.reject("cannot be billed")
        async with asyncio.timeout(10):
            while True:
                found = await self.bus.dead_letters.list(consumer=group, topic=topic)
                ids = [each.id for each in found if each.id not in before]
                if len(ids) == count:
                    return ids[::-1]
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def site_on(folder: Path, settings: penstock.Settings) -> AsyncIterator[Site]:
    site = Site(folder, settings)
    async with site.bus:
        site.port = await site.server.start()
        try:
            yield site
        finally:
            await site.server.stop()


@pytest_asyncio.fixture
async def site(tmp_path: Path, small: Any) -> AsyncIterator[Site]:
    """Nothing configured: whoever is on this host is an admin."""
    async with site_on(tmp_path / "data", small()) as site:
        yield site


@pytest_asyncio.fixture
async def guarded(tmp_path: Path, small: Any) -> AsyncIterator[Site]:
    """Tokens needed."""
    auth = {"auth__jwt_secret": SECRET, "auth__admin_token": ADMIN_TOKEN}
    async with site_on(tmp_path / "data", small(**auth)) as site:
        yield site


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message", "data"}
    assert body["error"]["code"] == code, answer.text
    found: dict[str, Any] = body["error"]
    return found


def done(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def as_json(value: Any) -> Any:
    """What the command line would print."""
    return json.loads(msgspec.json.encode(output.plain(value)))


# -- dead letters ----------------------------------------------------------------------------------


async def test_list_filters_and_pages(site: Site) -> None:
    """T8: list by consumer, topic and tenant, newest first, as many as asked for."""
    ids = await site.dead(ACME, 3)
    await site.dead(OTHER, 1)
    await site.dead(SHARED, 1, group="sender")
    async with site.client() as client:
        assert len(done(await client.get(DLQ))["items"]) == 5
        found = done(await client.get(DLQ, params={"topic": ACME, "limit": 2}))
        assert ([each["id"] for each in found["items"]], found["more"]) == (ids[:0:-1], True)
        found = done(await client.get(DLQ, params={"topic": ACME, "limit": 2, "offset": 2}))
        assert ([each["id"] for each in found["items"]], found["more"]) == (ids[:1], False)
        for params, count in (
            ({"consumer": "sender"}, 1), ({"consumer": "nobody"}, 0), ({"tenant": "acme"}, 3),
            ({"tenant": "default"}, 1), ({"tenant": "acme", "consumer": "billing"}, 3),
        ):  # fmt: skip
            assert len(done(await client.get(DLQ, params=params))["items"]) == count, params
        for params, field in (
            ({"limit": "0"}, "limit"), ({"limit": "10001"}, "limit"), ({"limit": "many"}, "limit"),
            ({"color": "red"}, "color"), ({"everything": "perhaps"}, "everything"),
        ):  # fmt: skip
            wrong = error_of(await client.get(DLQ, params=params), 400, "invalid")
            assert wrong["data"]["field"] == field
        error_of(await client.get(f"{DLQ}?topic=a&topic=b"), 400, "invalid")


async def test_rest_and_command_line_show_the_same(site: Site) -> None:
    """T10: list and inspect give what `penstock dlq` gives, run against the same folder."""
    await site.dead(ACME)
    for payload, codec in ((b"\xff\x00", "raw"), (b"text", "raw"), (b"{broken", "json"),
                           (msgspec.msgpack.encode({"a": b"\xff", "b": [1]}), "msgpack")):  # fmt: skip
        draft = site.bus.draft(SHARED, payload, key=b"\xfe")
        draft.codec = codec
        await site.engine.publish(draft)
    async with site.bus.subscribe(SHARED, group="sorter") as subscription:
        for _ in range(4):
            event = await subscription.get(timeout_s=10)
            assert event is not None
            await event.reject("no")
    await site.bus.flush()
    letters = await site.bus.dead_letters.list()
    assert len(letters) == 5
    environment = {**os.environ, "PENSTOCK_URL": str(site.folder)}
    words = [sys.executable, "-m", "penstock.cli", "dlq", "list", "--json"]
    ran = await asyncio.to_thread(
        subprocess.run, words, env=environment, capture_output=True, check=True
    )
    async with site.client() as client:
        shown = done(await client.get(DLQ))["items"]
        assert shown == [json.loads(line) for line in ran.stdout.splitlines()]
        for letter in letters:
            detail = await site.bus.dead_letters.inspect(letter.id)
            path = f"{DLQ}/{letter.id}"
            assert done(await client.get(path)) == as_json(cli_dlq._detail(detail))
        topics = done(await client.get("/api/admin/topics"))["items"]
        assert topics == [as_json(cli_topic._row(each)) for each in await site.bus.topics.list()]
        groups = done(await client.get("/api/admin/groups"))["items"]
        assert groups == as_json(await site.bus.groups.list())


async def test_rest_and_command_line_do_the_same(site: Site, capfdbinary: Any) -> None:
    """T8, T10: replay and purge report each record alike, and leave the same behind."""
    mine, theirs = await site.dead(ACME, 4), await site.dead(OTHER, 4)

    async def by_command(verb: str, ids: list[str], **how: str) -> Any:
        outcome = await getattr(site.bus.dead_letters, verb)(ids, actor="ann", **how)
        with contextlib.suppress(click.exceptions.Exit):
            cli_dlq._report(Invocation(json=True), f"{verb}ed".replace("ee", "e"), ids, outcome)
        sys.stdout.flush()
        return json.loads(capfdbinary.readouterr().out)

    def like(found: Any, ids: list[str]) -> Any:
        text = json.dumps(found).replace(OTHER, ACME)
        for number, id in enumerate(ids):
            text = text.replace(id, f"id-{number}")
        return json.loads(text)

    async with site.client() as client:
        for verb, how in (
            ("replay", {"target_consumer": "billing", "reason": "r", "confirm": "REPLAY"}),
            ("purge", {"reason": "r", "confirm": "PURGE"}),
        ):
            targets = ({"target_topic": ACME}, {"target_topic": OTHER}) if verb == "replay" else ({}, {})  # fmt: skip
            asked, typed = [*mine[:2], "nosuch"], [*theirs[:2], "nosuch"]
            body = {"ids": asked, "actor": "ann", **how, **targets[0]}
            over_http = done(await client.post(f"{DLQ}/{verb}", json=body), 207)
            over_command = await by_command(verb, typed, **how, **targets[1])
            assert like(over_http, asked) == like(over_command, typed)
            assert (over_http["requested"], over_http["done"], over_http["failed"]) == (3, 2, 1)
            mine, theirs = mine[2:], theirs[2:]
    records = await site.bus.audit.query(actor="ann")
    assert [each.operation for each in records] == ["dlq.replay"] * 4 + ["dlq.purge"] * 4


async def test_replay_delivers_again(site: Site) -> None:
    """T8: counted, audited under the caller's name, and given back to its group."""
    (letter,) = await site.dead(ACME)
    async with site.client() as client:
        body = {
            "ids": [letter, letter],
            "target_consumer": "billing",
            "target_topic": ACME,
            **REPLAY,
        }
        found = done(await client.post(f"{DLQ}/replay", json=body))
        assert found == {
            "requested": 1, "done": 1, "failed": 0, "failures": [],
            "results": [{"id": letter, "result": "replayed", "code": None, "message": None}],
        }  # fmt: skip
        assert done(await client.get(DLQ))["items"] == []
        (back,) = done(await client.get(DLQ, params={"everything": "true"}))["items"]
        assert (back["status"], back["replay_count"]) == ("replayed", 1)
        async with site.bus.subscribe(ACME, group="billing") as subscription:
            event = await subscription.get(timeout_s=10)
            assert event is not None
            assert event.value() == {"number": 0}
            await event.ack()
        (record,) = done(await client.get("/api/admin/audit/events"))["items"]
        assert (record["actor"], record["operation"]) == ("local", "dlq.replay")
        assert (record["targets"], record["reason"]) == ([letter], "fixed")


async def test_replay_needs_the_exact_target(site: Site) -> None:
    """T8: the original consumer and topic restated to the letter, and the word."""
    (letter,) = await site.dead(ACME)
    right = {"ids": [letter], "target_consumer": "billing", "target_topic": ACME, **REPLAY}
    async with site.client() as client:
        for change in (
            {"target_consumer": "other"}, {"target_consumer": "Billing"}, {"target_topic": SHARED},
            {"target_topic": f"{ACME} "}, {"target_consumer": ""},
        ):  # fmt: skip
            found = done(await client.post(f"{DLQ}/replay", json=right | change), 207)
            assert (found["done"], found["failed"]) == (0, 1)
            assert found["failures"][0]["code"] == "refused.target-mismatch"
            assert found["results"][0]["result"] == "failed"
        for word in ("", "replay", "PURGE", "REPLAY "):
            answer = await client.post(f"{DLQ}/replay", json=right | {"confirm": word})
            error_of(answer, 428, "refused.confirmation")
        for missing in ("ids", "target_consumer", "target_topic", "reason"):
            body = {name: value for name, value in right.items() if name != missing}
            answer = await client.post(f"{DLQ}/replay", json=body)
            assert error_of(answer, 400, "invalid")["data"]["field"] == missing
    (kept,) = await site.bus.dead_letters.list()
    assert (kept.status, kept.replay_count) == ("dead", 0)
    assert await site.bus.audit.query() == []


async def test_purge_needs_its_word(site: Site) -> None:
    """T8: without confirmation nothing happens; with it the log still keeps its events."""
    (letter,) = await site.dead(ACME)
    async with site.client() as client:
        for body in ({"ids": [letter], "reason": "spam"}, {"ids": [letter], "reason": "spam", "confirm": "yes"}):  # fmt: skip
            error_of(await client.post(f"{DLQ}/purge", json=body), 428, "refused.confirmation")
        assert len(await site.bus.dead_letters.list()) == 1
        body = {"ids": [letter], "reason": "spam", "confirm": "PURGE", "actor": "eve"}
        assert (
            done(await client.post(f"{DLQ}/purge", json=body))["results"][0]["result"] == "purged"
        )
        error_of(await client.get(f"{DLQ}/{letter}"), 404, "notfound.dead-letter")
    assert len([event async for event in site.bus.replay(ACME)]) == 1
    assert [each.actor for each in await site.bus.audit.query()] == ["eve"], "an admin may say who"


async def test_two_operators_replay_the_same_record(site: Site) -> None:
    """Exactly one wins; each of the others gets a failure that says why."""
    (letter,) = await site.dead(ACME)
    body = {"ids": [letter], "target_consumer": "billing", "target_topic": ACME, **REPLAY}
    async with site.client() as one, site.client() as two:
        answers = await asyncio.gather(
            *(client.post(f"{DLQ}/replay", json=body) for client in (one, two) * 4)
        )
    assert sorted(answer.status_code for answer in answers) == [200] + [207] * 7
    outcomes = [answer.json() for answer in answers]
    assert sum(each["done"] for each in outcomes) == 1
    for lost in (each for each in outcomes if not each["done"]):
        (failure,) = lost["failures"]
        assert failure["code"] == "refused.replayed"
        assert "already back" in failure["message"]
    (kept,) = await site.bus.dead_letters.list(everything=True)
    assert kept.replay_count == 1
    assert len(await site.bus.audit.query(operation="dlq.replay")) == 1


async def test_dead_letters_by_hand(site: Site) -> None:
    """T8: an event of the log, or a payload given; ids with slashes can be asked for."""
    await site.bus.publish(SHARED, b"2", codec="raw")
    async with site.bus.subscribe(SHARED, group="billing") as subscription:
        assert await subscription.get(timeout_s=10) is not None
    body = {"id": f"{SHARED}/0/0", "consumer": "billing", "topic": SHARED, "reason": "poison"}
    async with site.client() as client:
        made = done(await client.post(f"{DLQ}/dead-letter", json=body))
        assert (made["requested"], made["done"], made["failed"]) == (1, 1, 0)
        assert done(await client.get(f"{DLQ}/{made['id']}"))["value"] == "2"
        slashed = body | {"id": "mail/7/x y", "payload": "lost and found"}
        made = done(await client.post(f"{DLQ}/dead-letter", json=slashed))
        assert made["id"] == "mail/7/x y@billing"
        for path in ("mail/7/x%20y@billing", "mail%2F7%2Fx%20y%40billing"):
            assert done(await client.get(f"{DLQ}/{path}"))["value"] == "lost and found"
        binary = body | {"id": "b", "payload_base64": base64.b64encode(b"\xff").decode()}
        made = done(await client.post(f"{DLQ}/dead-letter", json=binary))
        assert done(await client.get(f"{DLQ}/{made['id']}"))["base64"] == "/w=="
        both = await client.post(f"{DLQ}/dead-letter", json=binary | {"payload": "x"})
        error_of(both, 400, "invalid")
        for id, status, code in (
            (f"{SHARED}/0/99", 404, "notfound.message"),
            ("others/0/1", 409, "refused.target-mismatch"),
            ("nonsense", 400, "invalid"),
        ):
            error_of(await client.post(f"{DLQ}/dead-letter", json=body | {"id": id}), status, code)
        # `replay` is a verb for POST and an id like any other for GET.
        error_of(await client.get(f"{DLQ}/replay"), 404, "notfound.dead-letter")


async def test_dead_letters_by_hand_follow_the_rules_of_the_command_line(site: Site) -> None:
    """T8, T10: no record is written over, a reason says something, names can be named again."""
    path = f"{DLQ}/dead-letter"
    body = {"id": "x", "consumer": "billing", "topic": SHARED, "reason": "r", "payload": "one"}
    async with site.client() as client:
        done(await client.post(path, json=body))
        error_of(await client.post(path, json=body | {"payload": "two"}), 409, "refused.exists")
        assert done(await client.get(f"{DLQ}/x@billing"))["value"] == "one"
        for field, texts in {
            "id": ("", " ", "a,b", "x\ny", "x" * 301, "x" * 4_000),
            "consumer": ("", "no such", "a,b", "_own", "g" * 129),
            "reason": ("", "  ", "\n"),
        }.items():
            for text in texts:
                answer = await client.post(path, json=body | {"id": "y", field: text})
                error = error_of(answer, 400, "invalid")
                assert field in str(error["data"].get("field", error["message"])), (text, error)
        long_offset = body | {"id": f"{SHARED}/0/{'9' * 4_000}", "payload": None}
        error_of(await client.post(path, json=long_offset), 400, "invalid")
        for verb, how in (("purge", {"confirm": "PURGE"}), ("replay", {"confirm": "REPLAY", "target_consumer": "billing", "target_topic": SHARED})):  # fmt: skip
            blank = {"ids": ["x@billing"], "reason": "  ", **how}
            error = error_of(await client.post(f"{DLQ}/{verb}", json=blank), 400, "invalid")
            assert "the reason is empty" in error["message"]
    assert [letter.id for letter in await site.bus.dead_letters.list()] == ["x@billing"]
    assert len(await site.bus.audit.query()) == 1


async def test_a_large_payload_is_left_out(site: Site) -> None:
    big = b"x" * ((1 << 20) + 1)
    await site.bus.dead_letters.dead_letter(
        "big", consumer="billing", topic=SHARED, payload=big, actor="ann", reason="large"
    )
    async with site.client() as client:
        found = done(await client.get(f"{DLQ}/big@billing"))
        assert found["omitted_bytes"] == len(big)
        assert not {"value", "base64"} & set(found)


# -- audit -----------------------------------------------------------------------------------------


async def test_audit_events(site: Site) -> None:
    """T9, T10: by message, actor, operation and time; the verdict on the chain."""
    await site.bus.topics.create("a")
    await site.bus.topics.create("b")
    async with site.client() as client:
        for name, actor in (("a", "ann"), ("b", "bob")):
            path = f"/api/admin/topics/{name}?confirm=DELETE&actor={actor}"
            assert done(await client.delete(path))["deleted"] == name
        path = "/api/admin/audit/events"
        shown = done(await client.get(path))["items"]
        assert shown == as_json(await site.bus.audit.query())
        for params, actors in (
            ({"actor": "ann"}, ["ann"]), ({"message": "b"}, ["bob"]), ({"operation": "dlq.purge"}, []),
            ({"operation": "topic.delete", "limit": 1}, ["ann"]), ({"offset": 1}, ["bob"]),
            ({"since": "1h"}, ["ann", "bob"]), ({"until": "1h"}, []),
            ({"since": f"@{int(time.time()) + 60}"}, []), ({"since": "2020-01-01T00:00:00Z"}, ["ann", "bob"]),
        ):  # fmt: skip
            found = done(await client.get(path, params=params))["items"]
            assert [each["actor"] for each in found] == actors, params
        error_of(await client.get(path, params={"since": "soon"}), 400, "invalid")
        verdict = done(await client.get("/api/admin/audit/verify"))
        assert (verdict["ok"], verdict["records"], verdict["broken"]) == (True, 2, None)
        assert verdict == as_json(await site.bus.audit.verify())


# -- catalogue ---------------------------------------------------------------------------------------


async def test_topics(site: Site) -> None:
    path = "/api/admin/topics"
    async with site.client() as client:
        made = done(
            await client.post(path, json={"name": "t", "partitions": 2, "write_once": False})
        )
        assert (made["name"], len(made["partitions"]), made["events"]) == ("t", 2, 0)
        error_of(await client.post(path, json={"name": "t"}), 409, "refused.exists")
        error_of(await client.post(path, json={"name": "t..u"}), 400, "invalid.topic")
        error_of(await client.post(path, json={"name": "u", "partitions": 0}), 400, "invalid")
        changed = done(
            await client.patch(f"{path}/t", json={"retention_age_s": 60, "partitions": 3})
        )
        assert (changed["retention_age_s"], len(changed["partitions"])) == (60, 3)
        error_of(await client.patch(f"{path}/t", json={}), 400, "invalid")
        error_of(await client.patch(f"{path}/t", json={"partitions": 1}), 400, "invalid")
        await site.bus.publish("t", {"x": 1})
        assert done(await client.get(f"{path}/t"))["events"] == 1
        error_of(await client.get(f"{path}/nosuch"), 404, "notfound.topic")
        error_of(await client.delete(f"{path}/t"), 428, "refused.confirmation")
        gone = done(await client.delete(f"{path}/t?confirm=DELETE"))
        assert (gone["deleted"], gone["effect"]["events"]) == ("t", 1)
        assert done(await client.get(path))["items"] == []
        await site.bus.topics.create("kept", write_once=True)
        error_of(await client.delete(f"{path}/kept?confirm=DELETE"), 409, "refused.write-once")
        await site.dead(SHARED)
        names = [each["name"] for each in done(await client.get(f"{path}?system=true"))["items"]]
        assert "_dlq.default" in names


async def test_groups(site: Site) -> None:
    path = "/api/admin/groups"
    for number in range(3):
        await site.bus.publish(SHARED, number)
    group = "team/billing"
    async with site.bus.subscribe(SHARED, group=group) as subscription:
        for _ in range(3):
            event = await subscription.get(timeout_s=10)
            assert event is not None
            await event.ack()
    await site.bus.flush()
    async with site.client() as client:
        assert done(await client.get(f"{path}/{group}"))["lag"] == 0
        for to, cursor in (
            ("earliest", 0),
            ("latest", 3),
            ("offset:1", 1),
            ("offset:2", 2),
            ("1h", 0),
        ):
            found = done(
                await client.post(f"{path}/{group}/reset", json={"to": to, "confirm": "RESET"})
            )
            assert found["lanes"][0]["cursor"] == cursor, to
        assert site.asked[-1] == ask.ResetGroup(group, site.asked[-1].to, None, "local", "RESET")
        wrong = {"to": "earliest", "topic": "elsewhere", "confirm": "RESET"}
        error_of(await client.post(f"{path}/{group}/reset", json=wrong), 400, "invalid")
        error_of(await client.post(f"{path}/{group}/reset", json={"to": "soon"}), 400, "invalid")
        error_of(
            await client.post(f"{path}/{group}/reset", json={"to": "9" * 5000}), 400, "invalid"
        )
        error_of(await client.get(f"{path}/nosuch"), 404, "notfound.group")
        error_of(await client.delete(f"{path}/{group}"), 428, "refused.confirmation")
        gone = done(await client.delete(f"{path}/{group}?confirm=DELETE"))
        assert (gone["deleted"], gone["effect"]["groups"][0]["lag_before"]) == (group, 3)
        assert done(await client.get(path))["items"] == []
    operations = [each.operation for each in await site.bus.audit.query(actor="local")]
    assert operations == ["group.reset"] * 5 + ["group.delete"]


async def test_routes(site: Site) -> None:
    path = "/api/admin/routes"
    pair = {"pattern": "orders.*", "destination": "billing"}
    async with site.client() as client:
        put = done(await client.put(path, json=pair | {"priority": 5}))
        assert put == {**pair, "type": "fanout", "priority": 5, "enabled": True, "tenant": None}
        assert done(await client.get(path)) == {"items": [put], "more": False}
        assert done(await client.get(f"{path}/resolve?topic=orders.made"))["items"] == [put]
        assert done(await client.post(f"{path}/disable", json=pair))["done"] == "disabled"
        assert done(await client.get(f"{path}/resolve?topic=orders.made"))["items"] == []
        assert done(await client.post(f"{path}/enable", json=pair))["done"] == "enabled"
        error_of(await client.put(path, json=pair | {"pattern": "a.b*"}), 400, "invalid.pattern")
        error_of(await client.put(path, json=pair | {"type": "odd"}), 400, "invalid")
        assert (
            done(await client.delete(path, params=pair | {"confirm": "REMOVE"}))["done"]
            == "removed"
        )
        error_of(
            await client.delete(path, params=pair | {"confirm": "REMOVE"}), 404, "notfound.route"
        )
    assert len(await site.bus.audit.query()) == 4


async def test_schedules(site: Site) -> None:
    path = "/api/admin/schedules"
    async with site.client() as client:
        made = done(await client.put(f"{path}/daily/report", json={"topic": "reports", "cron": "0 9 * * *", "value": {"a": 1}}))  # fmt: skip
        assert (made["id"], made["codec"], made["payload"]) == ("daily/report", "json", '{"a":1}')
        made = done(await client.put(f"{path}/tick", json={"topic": "t", "every": "90s", "base64": "/w=="}))  # fmt: skip
        assert (made["every_us"], made["codec"], made["payload"]) == (90_000_000, "raw", {"base64": "/w=="})  # fmt: skip
        shown = done(await client.get(path))["items"]
        assert shown == as_json(await site.bus.schedules.list())
        for change, code in (
            ({"every": "90s"}, "invalid.schedule"), ({"cron": None}, "invalid.schedule"), ({"cron": "x"}, "invalid.schedule"),
            ({"base64": "eA=="}, "invalid"), ({"codec": "nosuch"}, "missing.codec"), ({"topic": "_x"}, "invalid.topic"),
        ):  # fmt: skip
            body = {"topic": "t", "cron": "* * * * *", "value": 1} | change
            error_of(await client.put(f"{path}/bad", json=body), 400, code)
        gone = done(await client.delete(f"{path}/daily/report?confirm=REMOVE"))
        assert (gone["deleted"], gone["effect"]["topics"]) == ("daily/report", ["reports"])
        error_of(await client.delete(f"{path}/daily/report"), 404, "notfound.schedule")


async def test_sessions_and_tenants(site: Site) -> None:
    async with site.client() as client:
        rows = [{"tenant": "acme", "number": 1}, {"tenant": "other", "number": 2}]
        assert done(await client.get("/api/admin/sessions")) == {"items": rows, "more": False}
        assert len(done(await client.get("/api/admin/tenants"))["items"]) == 2


# -- health ------------------------------------------------------------------------------------------


async def test_health_and_readiness(guarded: Site) -> None:
    """Alive at once; ready only while it serves clients; neither wants a token."""
    async with guarded.client() as client:
        assert done(await client.get("/health")) == {"alive": True}
        assert done(await client.get("/ready")) == {"ready": True}
        guarded.ready = False
        assert done(await client.get("/ready"), 503) == {"ready": False, "reasons": ["draining"]}
        assert done(await client.get("/health")) == {"alive": True}
        assert (await client.head("/health")).status_code == 200


# -- tokens ------------------------------------------------------------------------------------------


async def test_a_token_is_needed(guarded: Site) -> None:
    """T10: by either header; missing, expired, unsigned or foreign ones are told apart."""
    paths = {plain_path(each.path) for each in ENDPOINTS if each.needs} | {"/metrics"}
    async with guarded.client() as client:
        for path in paths:
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                answer = await client.request(method, path)
                assert answer.status_code in (401, 405), (method, path)
        answer = await client.get(DLQ)
        error_of(answer, 401, "access.unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        now_s = int(time.time())
        claims = {"tenant": "acme", "sub": "ann", "roles": ["admin"], "exp": now_s + 60}
        plain = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
        unsigned = f"{plain}.{base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b'=').decode()}."  # fmt: skip
        for token, says in (
            (jwt.encode(claims | {"exp": now_s - 1}, SECRET), "expired"),
            (unsigned, "HS256"),
            (jwt.encode(claims, "x" * 32), "not signed with this broker"),
            (jwt.encode({"sub": "ann", "exp": now_s + 60}, SECRET), "tenant"),
            ("nonsense", "malformed"),
        ):
            answer = await client.get(DLQ, headers={"Authorization": f"Bearer {token}"})
            assert says in error_of(answer, 401, "access.unauthenticated")["message"], token
        error_of(await client.get(DLQ, auth=("ann", "secret")), 401, "access.unauthenticated")
        for headers in ({"X-Admin-Token": ADMIN_TOKEN}, {"Authorization": f"bearer {ADMIN_TOKEN}"},
                        {"X-Admin-Token": guarded.token("reader")}):  # fmt: skip
            done(await client.get(DLQ, headers=headers))


async def test_roles(guarded: Site) -> None:
    """A reader reads, an operator changes, only an admin sees the whole; a monitor only scrapes."""
    await guarded.dead(ACME)
    calls = [
        ("GET", DLQ, None, {"reader", "operator", "admin"}),
        ("GET", "/api/admin/sessions", None, {"reader", "operator", "admin"}),
        ("POST", f"{DLQ}/purge", {"ids": ["x"], "reason": "r", "confirm": "PURGE"}, {"operator", "admin"}),
        ("GET", "/api/admin/audit/verify", None, {"admin"}),
        ("GET", "/metrics", None, {"monitor", "admin"}),
    ]  # fmt: skip
    for role in ("reader", "operator", "monitor", "admin"):
        async with guarded.client(guarded.token(role)) as client:
            for method, path, body, allowed in calls:
                answer = await client.request(method, path, json=body)
                if role in allowed:
                    assert answer.status_code in (200, 207), (role, path, answer.text)
                else:
                    error_of(answer, 403, "access.denied")
    assert (await guarded.bus.dead_letters.list())[0].topic == ACME


async def test_a_tenant_sees_its_own(guarded: Site) -> None:
    """T10: lists hold nothing of others, and what is theirs cannot be asked for by name."""
    (mine,), (theirs,) = await guarded.dead(ACME, group="mine"), await guarded.dead(OTHER, group="theirs")  # fmt: skip
    await guarded.bus.publish(SHARED, 1)
    await guarded.bus.schedules.put("mine", ACME, 1, every="1h")
    await guarded.bus.schedules.put("theirs", OTHER, 1, every="1h")
    for tenant in (None, "acme", "other"):
        await guarded.bus.routes.put(penstock.Route("orders.#", f"to-{tenant}", tenant=tenant))
    async with guarded.client(guarded.token("operator")) as client:
        expected = {
            DLQ: [("id", mine)], "/api/admin/groups": [("name", "mine"), ("name", "to-acme")], "/api/admin/routes": [("destination", "to-acme")],
            "/api/admin/schedules": [("id", "mine")], "/api/admin/sessions": [("tenant", "acme")],
            "/api/admin/tenants": [("tenant", "acme")], "/api/admin/topics": [("name", SHARED), ("name", ACME)],
        }  # fmt: skip
        for path, rows in expected.items():
            items = done(await client.get(path))["items"]
            assert [(field, each[field]) for (field, _), each in zip(rows, items, strict=True)] == rows  # fmt: skip
        system = done(await client.get("/api/admin/topics?system=true"))["items"]
        assert [each["name"] for each in system] == ["_dlq.acme", SHARED, ACME]
        done(await client.get(f"{DLQ}/{mine}"))
        for path, status, code in (
            (f"{DLQ}/{theirs}", 404, "notfound.dead-letter"),
            (f"{DLQ}?tenant=other", 403, "access.denied"),
            (f"/api/admin/topics/{OTHER}", 403, "access.denied"),
            ("/api/admin/topics/_dlq.other", 403, "access.denied"),
            ("/api/admin/groups/theirs", 404, "notfound.group"),
            (f"/api/admin/routes/resolve?topic={ACME}&tenant=other", 403, "access.denied"),
            (f"/api/admin/routes/resolve?topic={OTHER}", 403, "access.denied"),
        ):
            error_of(await client.get(path), status, code)
        resolved = done(await client.get(f"/api/admin/routes/resolve?topic={ACME}"))["items"]
        assert [each["destination"] for each in resolved] == ["to-None", "to-acme"]


async def test_a_tenant_touches_its_own(guarded: Site) -> None:
    """T10: an operator of one tenant changes nothing of another, whatever it tries."""
    (mine,), (theirs,) = await guarded.dead(ACME, group="mine"), await guarded.dead(OTHER, group="theirs")  # fmt: skip
    await guarded.bus.schedules.put("theirs", OTHER, 1, every="1h")
    await guarded.bus.routes.put(penstock.Route("orders.#", "both", tenant="other"))
    theirs_by_hand = {"consumer": "theirs", "topic": OTHER, "reason": "r"}
    route = {"pattern": "orders.#", "destination": "x", "tenant": "acme"}
    refused = [
        ("POST", f"{DLQ}/dead-letter", {"id": f"{OTHER}/0/0", **theirs_by_hand}, 403),
        ("POST", f"{DLQ}/dead-letter", {"id": theirs.partition("@")[0], "consumer": "theirs", "topic": ACME, "reason": "r", "payload": "over it"}, 403),
        ("POST", f"{DLQ}/purge", {"ids": [mine], "reason": "r", "confirm": "PURGE", "actor": "bob"}, 403),
        ("POST", "/api/admin/topics", {"name": "orders.made.v1.other"}, 403),
        ("POST", "/api/admin/topics", {"name": "nobodys"}, 403),
        ("PATCH", f"/api/admin/topics/{OTHER}", {"retention_age_s": 1}, 403),
        ("DELETE", f"/api/admin/topics/{OTHER}?confirm=DELETE", None, 403),
        ("DELETE", "/api/admin/topics/_dlq.other?confirm=DELETE", None, 403),
        ("POST", "/api/admin/groups/theirs/reset", {"to": "latest"}, 404),
        ("DELETE", "/api/admin/groups/theirs?confirm=DELETE", None, 404),
        ("PUT", "/api/admin/routes", route | {"tenant": "other"}, 403),
        ("PUT", "/api/admin/routes", route | {"tenant": None}, 403),
        ("PUT", "/api/admin/routes", route | {"destination": "both"}, 403),
        ("PUT", "/api/admin/routes", route | {"destination": "theirs"}, 403),
        ("POST", "/api/admin/routes/disable", {"pattern": "orders.#", "destination": "both"}, 404),
        ("DELETE", "/api/admin/routes?pattern=orders.%23&destination=both", None, 404),
        ("PUT", "/api/admin/schedules/theirs", {"topic": ACME, "every": "1h", "value": 1}, 403),
        ("PUT", "/api/admin/schedules/new", {"topic": OTHER, "every": "1h", "value": 1}, 403),
        ("DELETE", "/api/admin/schedules/theirs", None, 404),
    ]  # fmt: skip
    async with guarded.client(guarded.token("operator")) as client:
        for method, path, body, status in refused:
            answer = await client.request(method, path, json=body)
            assert answer.status_code == status, (method, path, answer.text)
        asked = {"ids": [theirs, mine], "reason": "r", "confirm": "PURGE"}
        found = done(await client.post(f"{DLQ}/purge", json=asked), 207)
        assert [each["result"] for each in found["results"]] == ["failed", "purged"]
        assert (found["requested"], found["done"], found["failed"]) == (2, 1, 1)
        assert found["failures"][0]["code"] == "notfound.dead-letter"
        target = {"ids": [theirs], "target_consumer": "theirs", "target_topic": OTHER, **REPLAY}
        assert done(await client.post(f"{DLQ}/replay", json=target), 207)["done"] == 0
        missing = await client.post(f"{DLQ}/purge", json=asked | {"confirm": ""})
        error_of(missing, 428, "refused.confirmation")
        for method, path, body in (
            ("POST", "/api/admin/topics", {"name": "orders.made.v1.acme"}),
            ("PUT", "/api/admin/routes", route),
            ("POST", "/api/admin/routes/disable", {"pattern": "orders.#", "destination": "x"}),
            ("PUT", "/api/admin/schedules/own", {"topic": ACME, "every": "1h", "value": 1}),
            ("DELETE", "/api/admin/schedules/own?confirm=REMOVE", None),
            (
                "POST",
                "/api/admin/groups/mine/reset",
                {"to": "latest", "actor": "ann", "confirm": "RESET"},
            ),
            ("DELETE", "/api/admin/groups/mine?confirm=DELETE", None),
            ("DELETE", "/api/admin/topics/orders.made.v1.acme?confirm=DELETE", None),
        ):
            done(await client.request(method, path, json=body))
        seen = done(await client.get("/api/admin/audit/events"))["items"]
    assert [each.id for each in await guarded.bus.dead_letters.list()] == [theirs]
    assert (await guarded.bus.dead_letters.inspect(theirs)).payload == b'{"number":0}'
    assert {each.actor for each in await guarded.bus.audit.query()} == {"ann", "local"}
    assert [each["operation"] for each in seen] == [
        "dlq.purge", "schedule.put", "schedule.remove", "group.reset", "group.delete", "topic.delete",
    ]  # fmt: skip


async def test_schedules_are_audited_under_the_callers_name(guarded: Site) -> None:
    """T9, T10: put and remove, and only to the tenant of the topic."""
    path, body = "/api/admin/schedules/tick", {"topic": ACME, "every": "90s", "value": 1}
    async with guarded.client(guarded.token("operator")) as client:
        error_of(await client.put(path, json=body | {"actor": "eve"}), 403, "access.denied")
        done(await client.put(path, json=body))
        done(await client.delete(f"{path}?confirm=REMOVE"))
        seen = done(await client.get("/api/admin/audit/events"))["items"]
    subjects = {each["actor"] for each in seen}
    assert [each["operation"] for each in seen] == ["schedule.put", "schedule.remove"]
    assert len(subjects) == 1
    assert not subjects & {"", "local", "eve"}
    async with guarded.client(guarded.token("reader", tenant="other")) as client:
        assert done(await client.get("/api/admin/audit/events"))["items"] == []


async def test_another_tenants_audit_is_not_shown(guarded: Site) -> None:
    (theirs,) = await guarded.dead(OTHER)
    await guarded.bus.dead_letters.purge([theirs], actor="bob", reason="secret", confirm="PURGE")
    async with guarded.client(guarded.token("reader")) as client:
        assert done(await client.get("/api/admin/audit/events"))["items"] == []
    async with guarded.client(guarded.token("reader", tenant="other")) as client:
        (record,) = done(await client.get("/api/admin/audit/events"))["items"]
        assert record["reason"] == "secret"


# -- callers on this host ----------------------------------------------------------------------------


async def test_a_web_page_cannot_use_its_readers_rights(site: Site) -> None:
    """With nothing configured this host is trusted, but not what a browser or a proxy forwards."""
    (letter,) = await site.dead(ACME)
    async with site.client() as client:
        for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example:80"}, {"Host": ""}, {"Host": "[::1"},
                        {"X-Forwarded-For": "10.0.0.9"}, {"Forwarded": "for=10.0.0.9"}):  # fmt: skip
            error_of(await client.get(DLQ, headers=headers), 401, "access.unauthenticated")
        for host in ("localhost", "localhost:99", "[::1]:5558", "127.0.0.1"):
            done(await client.get(DLQ, headers={"Host": host}))
        body = json.dumps({"ids": [letter], "reason": "csrf", "confirm": "PURGE"})
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await client.post(f"{DLQ}/purge", content=body, headers={"Content-Type": kind})
            assert error_of(answer, 400, "invalid")["data"]["field"] == "Content-Type"
        mixed = {"Content-Type": "Application/JSON; charset=utf-8"}
        answer = await client.post(f"{DLQ}/purge", content=b"{}", headers=mixed)
        assert error_of(answer, 400, "invalid")["data"]["field"] == "ids"
        preflight = await client.options(f"{DLQ}/purge", headers={"Origin": "http://evil.example"})
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in preflight.headers
    assert len(await site.bus.dead_letters.list()) == 1


# -- bad input -----------------------------------------------------------------------------------


async def test_bodies_are_checked(site: Site) -> None:
    """Malformed, of the wrong shape, with unknown fields: named, and nothing done."""
    good = {"ids": ["x"], "reason": "r", "confirm": "PURGE"}
    async with site.client(**{"Content-Type": "application/json"}) as client:
        for content in (b"", b"{", b"\xff", b'{"ids": NaN}', b"[" * 100_000, b'{"ids": ["\xff"]}'):
            answer = await client.post(f"{DLQ}/purge", content=content)
            assert answer.status_code == 400, content[:20]
            assert answer.json()["error"]["code"].startswith("invalid")
        error_of(await client.post(f"{DLQ}/purge", content=b"{"), 400, "invalid.decode")
        for change, field in (
            ({"ids": "x"}, "ids"), ({"ids": []}, "ids"), ({"ids": [1]}, "ids[0]"), ({"ids": [""]}, "ids[0]"),
            ({"ids": ["x"] * 1_001}, "ids"), ({"reason": ""}, "reason"), ({"reason": None}, "reason"),
            ({"confirm": True}, "confirm"), ({"force": True}, "force"), ({"actor": ""}, "actor"),
        ):  # fmt: skip
            answer = await client.post(f"{DLQ}/purge", json=good | change)
            assert error_of(answer, 400, "invalid")["data"]["field"] == field, change
        error_of(await client.request("DELETE", "/api/admin/topics/t?confirm=DELETE", json={}), 400, "invalid")  # fmt: skip
        error_of(await client.get("/api/admin/audit/verify?deep=1"), 400, "invalid")


@pytest.mark.parametrize("size", [(1 << 20) + 1, 20 << 20])
async def test_an_oversized_body_is_refused(site: Site, size: int) -> None:
    async with site.client(**{"Content-Type": "application/json"}) as client:
        body = b'{"ids": ["' + b"x" * size + b'"]}'
        found = error_of(await client.post(f"{DLQ}/purge", content=body), 413, "invalid.too-large")
        assert found["data"]["limit"] == 1 << 20

        async def drip() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]

        error_of(await client.post(f"{DLQ}/purge", content=drip()), 413, "invalid.too-large")
        done(await client.get("/health"))


async def test_half_a_request_is_not_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a head nor half a body holds a connection, and others are served meanwhile."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(request_module, "BODY_TIMEOUT_S", 0.3)
    head = b"POST /api/admin/dlq/purge HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nContent-Type: application/json\r\n"  # fmt: skip
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for first, then, expected in (
        (b"", b"", b""), (head, b"", b""), (head + b"\r\n{", b"", b"408"), (health, head, b"200"),
        (b"nonsense\r\n\r\n", b"", b"400"),
    ):  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(first)
        async with site.client() as client:
            done(await client.get("/health"))
        async with asyncio.timeout(5):
            answer = await reader.readline()
            assert expected in answer, first
            writer.write(then)
            if expected != b"408":  # its body may still come; an idle connection ends by itself
                await reader.read()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("size", [17_000, 60_000])
async def test_a_head_over_the_limit_is_refused(site: Site, size: int) -> None:
    """It comes in one piece, of which h11 takes as much as there is."""
    async with site.client() as client:
        answer = await client.get("/health", headers={"X-Long": "x" * size})
        error_of(answer, 431, "invalid.too-large")
        done(await client.get("/health", headers={"X-Long": "x" * 15_000}))


async def test_a_client_that_does_not_read_is_cut_off(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 of them, without a token, kept everybody out for ever, probes of /health included."""
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.3)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.connect(("127.0.0.1", site.port))
    connection.settimeout(5)
    connection.sendall(request * 200)
    await asyncio.sleep(1.5)
    received = 0
    with connection, contextlib.suppress(ConnectionResetError):
        while data := await asyncio.to_thread(connection.recv, 1 << 20):
            received += len(data)
    async with site.client() as client:
        assert received < 100 * len((await client.get("/openapi.json")).content)


async def test_what_is_not_there(site: Site) -> None:
    async with site.client() as client:
        found = error_of(await client.get("/api/admin/nothing"), 404, "notfound")
        assert "/openapi.json" in found["message"]
        answer = await client.put(f"{DLQ}/purge", json={})
        error_of(answer, 405, "invalid")
        answer = await client.post("/api/admin/topics/t", json={})
        error_of(answer, 405, "invalid")
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "PATCH", "DELETE"}
        assert (await client.get("/api/admin/dlq/")).status_code == 404
        error_of(await client.get("/api/admin/topics/"), 404, "notfound")


async def test_errors_have_a_status_and_say_when_to_come_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, status, retry in (
        (Throttled("t", retry_after_s=1.2), 429, "2"), (Deferred("d", retry_after_s=0.005), 503, "1"),
        (DiskFull("f", retry_after_s=5), 507, "5"), (WriterFailed("w"), 503, None),
    ):  # fmt: skip

        async def fail(request: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(site.engine, "ask", fail)
        async with site.client() as client:
            answer = await client.get(DLQ)
            error_of(answer, status, error.code)
            assert answer.headers.get("retry-after") == retry


async def test_a_defect_is_no_leak(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody expected is a 500 without its inner life; the log has the trace."""

    async def fail(request: Any) -> Any:
        raise RuntimeError("inner life")

    monkeypatch.setattr(site.engine, "ask", fail)
    async with site.client() as client:
        answer = await client.get(DLQ)
        error_of(answer, 500, "error")
        assert "inner life" not in answer.text
        done(await client.get("/health"))
    assert "inner life" in caplog.text


# -- the document --------------------------------------------------------------------------------


def routes_of(site: Site) -> set[tuple[str, str]]:
    return {
        (plain_path(route.path), method.lower())
        for route in site.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


def operations_in(document: Any) -> set[tuple[str, str]]:
    return {(path, method) for path, methods in document["paths"].items() for method in methods}


async def test_the_document_lists_every_route(guarded: Site) -> None:
    """T10: OpenAPI 3.1, each operation with its answers and errors, what others added too."""
    async with guarded.client() as client:
        document = done(await client.get("/openapi.json"))
        page = await client.get("/docs-free")
    assert document["openapi"] == "3.1.0"
    assert operations_in(document) == routes_of(guarded)
    assert document["paths"]["/metrics"]["get"]["summary"] == "Numbers for a scraper."
    guarded.app.routes.append(Route("/forgotten", lambda request: None))
    assert operations_in(document) != routes_of(guarded), "the comparison can fail"
    for path, method in operations_in(document):
        operation = document["paths"][path][method]
        assert operation["summary"], path
        assert operation["responses"], path
        if "security" in operation:
            assert {"401", "403"} <= set(operation["responses"]), path
        assert path in page.text
    assert "<script" not in page.text


async def test_every_reference_in_the_document_leads_somewhere(site: Site) -> None:
    async with site.client() as client:
        text = (await client.get("/openapi.json")).text
    document = json.loads(text)
    names = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names
    assert names <= set(document["components"]["schemas"])
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values() if "operationId" in operation]  # fmt: skip
    assert len(ids) == len(set(ids)) == len(ENDPOINTS)
    replay = document["paths"]["/api/admin/dlq/replay"]["post"]
    assert {"200", "207", "400", "413", "428", "429"} <= set(replay["responses"])
    limit = next(each for each in document["paths"][DLQ]["get"]["parameters"] if each["name"] == "limit")  # fmt: skip
    assert limit["schema"]["maximum"] == 10_000


# -- the server ----------------------------------------------------------------------------------


async def test_the_server_leaves_signals_alone_and_stops(site: Site) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    server = HttpServer(site.app, "127.0.0.1", 0)
    port = await server.start()
    assert signal.getsignal(signal.SIGTERM) is before
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        async with asyncio.timeout(5):
            await server.stop()
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/health")
    await server.stop()


async def test_a_taken_port_is_named(site: Site) -> None:
    with pytest.raises(InvalidSettings, match="another port"):
        await HttpServer(site.app, "127.0.0.1", site.port).start()
    with pytest.raises(InvalidSettings, match="listen"):
        await HttpServer(site.app, "192.0.2.1", 0).start()


async def test_https(site: Site, tmp_path: Path) -> None:
    """With a certificate it speaks TLS, and asks clients for theirs when a CA is given."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(certificate))
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    for ca in ("", str(certificate)):
        server = HttpServer(site.app, "127.0.0.1", 0, **files, tls_client_ca=ca)
        url = f"https://127.0.0.1:{await server.start()}/health"
        if not ca:
            async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
                assert (await client.get(url)).status_code == 200
        else:
            async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get(url)
            trust.load_cert_chain(certificate, key)
            async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
                assert (await client.get(url)).status_code == 200
        await server.stop()
    with pytest.raises(InvalidSettings, match="tls_certificate"):
        HttpServer(site.app, "127.0.0.1", 0, tls_certificate=str(key), tls_key=str(certificate))
    with pytest.raises(InvalidSettings, match="tls_certificate"):
        HttpServer(site.app, "127.0.0.1", 0, tls_certificate="nosuch.pem", tls_key="nosuch.pem")


def test_the_page_lists_every_operation() -> None:
    """T10: docs/reference/admin-api.md has each operation with its role, and no other."""
    page = Path(penstock.__file__).parent.parent / "docs" / "reference" / "admin-api.md"
    lines = set(page.read_text().splitlines())
    rows = {
        f"| `{each.method}` | `{plain_path(each.path)}` | {each.needs or 'open'} | {each.summary} |"
        for each in ENDPOINTS
    }
    assert {line for line in lines if line.startswith(("| `GET", "| `P", "| `D"))} == rows


@pytest.mark.parametrize("gone", ["capture_signals", "serve"])
def test_a_uvicorn_without_what_is_needed_is_refused_by_name(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the middle of a request (C12)."""
    for owner in uvicorn.Server.__mro__:
        if gone in vars(owner):
            monkeypatch.delattr(owner, gone)
    with pytest.raises(MissingExtra, match=rf"uvicorn {uvicorn.__version__} has no {gone}.*pip install 'uvicorn>="):  # fmt: skip
        http.HttpServer(http.Starlette(), "127.0.0.1", 0)


def test_a_uvicorn_that_knows_an_option_no_longer_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uvicorn, "Config", lambda app: None)
    with pytest.raises(MissingExtra, match="h11_max_incomplete_event_size"):
        http.HttpServer(http.Starlette(), "127.0.0.1", 0)
