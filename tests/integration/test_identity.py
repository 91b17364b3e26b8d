"""Who a caller is to a running broker: whose replays, whose signature, and who is turned away (rows T9, T10)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

import penstock
from penstock.core.routes import Route
from penstock.engines.broker import engine_for
from penstock.engines.broker.channel import Channel
from penstock.engines.broker.tcp import TcpLink
from penstock.engines.requests import QueryAudit
from penstock.model.errors import AccessDenied
from penstock.model.event import Identity
from penstock.model.settings import Auth
from penstock.model.settings_loader import load
from penstock.server.auth import Authenticator
from penstock.server.daemon import Daemon
from penstock.server.logs import LINES_PER_S
from penstock.testing.broker_process import broker_inside
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind

SECRET = "a secret of this test, as long as it has to be"
ADMIN_TOKEN = "the admin token of this test"
TOPIC = "orders.created.v1.acme"
SCHEMES = {"tcp": "penstock", "zmq": "penstock+zmq"}


class Guarded:
    """A broker that asks for tokens, inside the test."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def connect(self, token: str, transport: str = "tcp", **flags: Any) -> penstock.Bus:
        url = f"{SCHEMES[transport]}://127.0.0.1:{self.daemon.ports[transport]}"
        return penstock.connect(url, client__token=token, **flags)

    async def get(self, path: str, token: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        where = f"http://127.0.0.1:{self.daemon.ports['http']}{path}"
        async with httpx.AsyncClient(headers=headers, trust_env=False, timeout=20) as client:
            return await client.get(where)


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    auth = {"auth.jwt_secret": SECRET, "auth.admin_token": ADMIN_TOKEN}
    here = {f"server.{name}": "127.0.0.1:0" for name in ("zmq", "http")}
    daemon = broker_inside(tmp_path, {**auth, **here})
    await daemon.start()
    yield Guarded(daemon)
    await daemon.stop()


def token(*roles: str, tenant: str = "acme", secret: str = SECRET, age_s: float = 0.0) -> str:
    keeper = Authenticator(Auth(jwt_secret=secret), lambda: time.time() - age_s)
    return keeper.issue(tenant, "ann", roles, 600)


# -- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"identity__tenant": "acme"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("transport", SCHEMES)
async def test_a_tenant_replays_its_own_topic(
    guarded: Guarded, transport: str, flags: dict[str, str]
) -> None:
    """T10: whoever names no tenant replays for that of its token, and for no other."""
    async with guarded.connect(token("reader"), transport, **flags) as bus:
        await bus.publish(TOPIC, {"number": 1})
        assert [event.value() async for event in bus.replay(TOPIC)] == [{"number": 1}]
        with pytest.raises(AccessDenied):
            await anext(aiter(bus.replay("orders.created.v1.other")))


async def test_a_replay_counts_for_the_tenant_of_the_token(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: the limits of replays are those of whoever replays; an admin names the tenant it means."""
    admission = guarded.daemon.engine.admission
    counted: list[str] = []
    admit = admission.admit_replay

    def noted(tenant: str, now_s: float) -> Any:
        counted.append(tenant)
        return admit(tenant, now_s)

    monkeypatch.setattr(admission, "admit_replay", noted)
    for shown, flags in (
        (token("reader"), {}),
        (token("admin"), {}),
        (ADMIN_TOKEN, {}),
        (ADMIN_TOKEN, {"identity__tenant": "acme"}),
    ):
        async with guarded.connect(shown, **flags) as bus:
            await bus.publish(TOPIC, b"x")
            assert [event async for event in bus.replay(TOPIC)]
    assert counted == ["acme", "acme", "default", "acme"]


async def test_a_replay_needs_a_reader(guarded: Guarded) -> None:
    """T10: the tenant alone opens publishing and consuming; looking back needs a role."""
    async with guarded.connect(token("monitor")) as bus:
        await bus.publish(TOPIC, b"x")
        with pytest.raises(AccessDenied, match="role 'reader'"):
            await anext(aiter(bus.replay(TOPIC)))


# -- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["queue", "log"])
@pytest.mark.parametrize("made", ["lanes", "patterns"])
async def test_a_group_of_another_tenant_cannot_be_joined(
    guarded: Guarded, mode: str, made: str
) -> None:
    """T10: its members are given what is in the group, whatever they asked for themselves."""
    async with (
        guarded.connect(token("reader")) as bus,
        guarded.connect(token("reader", tenant="other")) as stranger,
        guarded.connect(ADMIN_TOKEN) as admin,
    ):
        if made == "lanes":
            await bus.publish(TOPIC, b"for acme alone")
        async with bus.subscribe("orders.*.v1.acme", group="billing", mode=mode):
            pass
        theirs = stranger.subscribe("orders.*.v1.other", group="billing", mode=mode)
        with pytest.raises(AccessDenied, match="group 'billing' is there already"):
            await theirs.__aenter__()
        assert (await admin.groups.info("billing")).patterns == ["orders.*.v1.acme"]
        async with bus.subscribe("orders.*.v1.acme", group="billing", mode=mode):
            pass  # its own tenant comes and goes
        async with admin.subscribe("orders.*.v1.acme", group="billing", mode=mode):
            pass


async def test_a_direct_consumer_of_another_tenant_is_left_alone(guarded: Guarded) -> None:
    """T4, T10: two tenants may call their clients alike, but only one of them gets the group."""

    def till(tenant: str, topic: str) -> Channel:
        settings = load(None, {}, {"client.token": token("reader", tenant=tenant)})
        address = f"127.0.0.1:{guarded.daemon.ports['tcp']}"
        channel = engine_for("penstock", address, settings, Identity(), "till").channel
        channel.hello = msgspec.structs.replace(channel.hello, subscriptions=[topic])
        return channel

    own = till("acme", TOPIC)
    await own.open()
    with pytest.raises(AccessDenied, match=r"group 'direct\.till' is there already"):
        await till("other", "orders.created.v1.other").open()
    await own.close()
    assert guarded.daemon.engine.state.groups["direct.till"].spec.patterns == (TOPIC,)


async def test_a_shared_topic_is_shared_by_the_members_of_a_group(guarded: Guarded) -> None:
    """T10: what has no tenant is for all, and so is a group that reads nothing else."""
    async with (
        guarded.connect(token("reader")) as bus,
        guarded.connect(token("reader", tenant="other")) as other,
        bus.subscribe("orders.created", group="shared"),
        other.subscribe("orders.created", group="shared") as events,
    ):
        for _ in range(20):
            await bus.publish("orders.created", b"x")
        assert await events.get(timeout_s=20.0) is not None


async def test_a_route_into_a_group_does_not_close_it(guarded: Guarded) -> None:
    """T10: who made the route has decided that the group gets those events."""
    async with (
        guarded.connect(ADMIN_TOKEN) as admin,
        guarded.connect(token("reader", tenant="other")) as other,
    ):
        async with other.subscribe("orders.*.v1.other", group="other.archive"):
            pass
        await admin.routes.put(Route(TOPIC, "other.archive"))
        await admin.publish(TOPIC, b"routed")
        async with other.subscribe("orders.*.v1.other", group="other.archive") as events:
            event = await events.get(timeout_s=20.0)
            assert event is not None
            assert event.payload == b"routed"


# -- who signs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "flags", "actor"),
    [
        (ADMIN_TOKEN, {}, "admin"),
        (ADMIN_TOKEN, {"identity__subject": "bob"}, "bob"),
        (token("admin"), {}, "ann"),
        (token("operator"), {"identity__subject": "bob"}, "ann"),
    ],
    ids=["admin-token", "admin-token-and-name", "admin", "operator"],
)
@pytest.mark.parametrize("transport", SCHEMES)
async def test_the_token_signs_every_change(
    guarded: Guarded, transport: str, shown: str, flags: dict[str, str], actor: str
) -> None:
    """T9, T10: a default subject is no claim, so the wire records whom REST records."""
    async with guarded.connect(shown, transport, **flags) as bus:
        async with bus.subscribe(TOPIC, group="billing"):
            await bus.publish(TOPIC, b"x")
        letter = await bus.dead_letters.dead_letter(
            "x1", consumer="billing", topic=TOPIC, payload=b"p", reason="test"
        )
        await bus.dead_letters.purge([letter.id], reason="test", confirm="PURGE")
        await bus.routes.put(Route(TOPIC, "printing", tenant="acme"))
        await bus.routes.disable(TOPIC, "printing")
        await bus.routes.remove(TOPIC, "printing", confirm="REMOVE")
        await bus.groups.reset("billing", "latest", confirm="RESET")
        await bus.topics.delete(TOPIC, confirm="DELETE")
    found = await guarded.daemon.engine.ask(QueryAudit())
    assert {record.actor for record in found} == {actor}
    kinds = {record.operation.partition(".")[0] for record in found}
    assert kinds == {"dlq", "route", "group", "topic"}


# -- who is turned away --------------------------------------------------------------------------

BAD_TOKENS = {
    "missing": ("", "a token is needed"),
    "malformed": ("geheim-geheim", "malformed"),
    "forged": (token("admin", secret="x" * 40), "not signed with this broker's"),
    "expired": (token("admin", age_s=3_600.0), "has expired"),
}


def refusals(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [each for each in caplog.records if each.getMessage() == "client refused"]


@pytest.mark.parametrize("transport", [*SCHEMES, "http", "metrics"])
@pytest.mark.parametrize("name", BAD_TOKENS)
async def test_a_refused_token_stands_in_the_log(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, transport: str, name: str
) -> None:
    """T10: one line with the peer and the reason, and never the token."""
    shown, reason = BAD_TOKENS[name]
    if transport in SCHEMES:
        with pytest.raises(AccessDenied):
            await guarded.connect(shown, transport).open()
    else:
        path = "/metrics" if transport == "metrics" else "/api/admin/topics"
        assert (await guarded.get(path, shown)).status_code == 401
    (line,) = refusals(caplog)
    assert line.levelno == logging.WARNING
    assert reason in line.reason
    assert line.peer.startswith("127.0.0.1:")
    assert not shown or shown not in str(vars(line))


async def test_a_denied_token_stands_in_the_log(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """T10: one of another tenant at the greeting, one without the role at the HTTP gate."""
    with pytest.raises(AccessDenied):
        await guarded.connect(token("reader"), identity__tenant="other").open()
    assert (await guarded.get("/metrics", token("reader"))).status_code == 403
    wrong_tenant, wrong_role = refusals(caplog)
    assert "cannot speak for 'other'" in wrong_tenant.reason
    assert "role 'monitor'" in wrong_role.reason


async def test_guessing_does_not_fill_the_log(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T10: so many lines a second for each door, and the guesses at one hide none at the other."""
    quota = guarded.daemon.broker.refusals
    monkeypatch.setattr(quota, "_now", lambda: quota._since_s)
    for _ in range(LINES_PER_S + 3):
        with contextlib.suppress(AccessDenied):
            await guarded.connect("guess").open()
    assert len(refusals(caplog)) == LINES_PER_S
    await guarded.get("/api/admin/topics", "guess")
    assert len(refusals(caplog)) == LINES_PER_S + 1


async def test_a_long_tenant_makes_no_long_line(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """T10: what a stranger calls itself is cut before it is written down."""
    link = TcpLink("127.0.0.1", guarded.daemon.ports["tcp"])
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    hello = say.Hello("c", token=token("reader"), tenant="t" * 100_000)
    async with asyncio.timeout(20):
        await link.open(frames.put_nowait, lambda _: None)
        link.send(Frame(Kind.HELLO, 0, say.encode(hello)))
        assert (await frames.get()).kind == Kind.FAULT
    link.close()
    (line,) = refusals(caplog)
    assert len(line.reason) < 1_000
