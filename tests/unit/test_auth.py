"""The door: who comes in with which token, and who does not (row T10)."""

from __future__ import annotations

import asyncio
import base64
import json
import sys

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.cli.invocation import Invocation
from penstock.cli.token import command
from penstock.core.entry import TopicSpec
from penstock.engines import requests
from penstock.engines.engine import Request
from penstock.model.errors import (
    AccessDenied,
    InvalidInput,
    InvalidSettings,
    MissingExtra,
    NotAuthenticated,
)
from penstock.model.event import Identity
from penstock.model.settings import Auth
from penstock.server.admin.gate import RIGHTS, Authorizer, require
from penstock.server.auth import MAX_TOKEN_BYTES, ROLES, Authenticator, check_listen, is_loopback

SECRET = "s" * 32
ADMIN = "let-me-administer"
NOW_S = 1_800_000_000.0
CLAIMS = {"tenant": "acme", "sub": "billing", "roles": ["reader"], "exp": NOW_S + 60}


def keeper(now_s: float = NOW_S, **auth: str) -> Authenticator:
    return Authenticator(Auth(**(auth or {"jwt_secret": SECRET})), lambda: now_s)


def signed(claims: dict, secret: str = SECRET, algorithm: str = "HS256") -> str:
    return jwt.encode(claims, secret, algorithm=algorithm)


def text(part: dict) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


# -- without tokens ----------------------------------------------------------------------------------


def test_with_nothing_configured_this_host_is_trusted_and_no_other():
    """T10: no token is needed on loopback with none configured; elsewhere nobody comes in."""
    door = Authenticator(Auth())
    assert door.identify("", "", "", loopback=True) == Identity("default", "local", ("admin",))
    assert door.identify("", "acme", "ann", loopback=True) == Identity("acme", "ann", ("admin",))
    for token in ("", "anything", signed(CLAIMS)):
        with pytest.raises(NotAuthenticated, match=r"auth\.jwt_secret"):
            door.identify(token, "", "", loopback=False)


@pytest.mark.parametrize("auth", [{"jwt_secret": SECRET}, {"admin_token": ADMIN}])
def test_with_anything_configured_everybody_shows_a_token(auth):
    """T10: also on loopback."""
    with pytest.raises(NotAuthenticated, match="a token is needed"):
        keeper(**auth).identify("", "acme", "billing", loopback=True)


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("127.0.0.1:5555", True), ("127.9.9.9:0", True), ("localhost:5555", True),
        ("LOCALHOST:1", True), ("[::1]:5555", True), ("[::ffff:127.0.0.1]:1", True), ("", True),
        ("0.0.0.0:5555", False), ("[::]:5555", False), ("10.0.0.1:5555", False), ("*:5555", False),
        ("broker.example:5555", False), (":5555", False), ("localhost.example:1", False),
    ],
)  # fmt: skip
def test_listening_for_other_hosts_wants_tokens(address, fine):
    """T10: the loopback rule, before a socket is opened."""
    for auth in (Auth(admin_token="x"), Auth(jwt_secret=SECRET)):
        check_listen(address, auth)
    if fine:
        check_listen(address, Auth())
    else:
        with pytest.raises(InvalidSettings, match=r"auth\.jwt_secret"):
            check_listen(address, Auth())


def test_loopback_is_this_host():
    assert not is_loopback("127.0.0.1.example")
    assert not is_loopback("::ffff:10.0.0.1")


# -- the admin token -----------------------------------------------------------------------------


def test_the_admin_token_opens_every_tenant():
    door = keeper(admin_token=ADMIN, jwt_secret=SECRET)
    assert door.identify(ADMIN, "", "", loopback=False) == Identity("default", "admin", ("admin",))
    assert door.identify(ADMIN, "acme", "ann", loopback=False).tenant == "acme"
    assert door.identify(signed(CLAIMS), "", "", loopback=False).roles == ("reader",)
    for wrong in (ADMIN[:-1], ADMIN + "x", "", "\udcff"):
        with pytest.raises(NotAuthenticated):
            keeper(admin_token=ADMIN).identify(wrong, "", "", loopback=True)


def test_secrets_are_compared_in_constant_time(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "penstock.server.auth.hmac.compare_digest", lambda a, b: seen.append((a, b)) or False
    )
    with pytest.raises(NotAuthenticated):
        keeper(admin_token=ADMIN).identify("guess", "", "", loopback=True)
    assert seen == [(b"guess", ADMIN.encode())]


# -- tokens that name a tenant ---------------------------------------------------------------------


def test_a_token_says_who_its_bearer_is():
    door = keeper()
    token = door.issue("acme", "billing", ["reader", "operator", "reader"], 60)
    expected = Identity("acme", "billing", ("reader", "operator"))
    assert door.identify(token, "", "", loopback=False) == expected
    assert door.identify(token, "acme", "somebody else", loopback=True) == expected
    claims = jwt.decode(token, SECRET, ["HS256"], options={"verify_exp": False, "verify_iat": False})  # fmt: skip
    assert claims == {
        "tenant": "acme", "sub": "billing", "roles": ["reader", "operator"],
        "iat": int(NOW_S), "exp": int(NOW_S) + 60,
    }  # fmt: skip


def test_a_token_is_for_one_tenant():
    """A token of tenant a that speaks for b is denied, not merely unknown."""
    with pytest.raises(AccessDenied, match="'acme'") as caught:
        keeper().identify(signed(CLAIMS), "other", "", loopback=True)
    assert not isinstance(caught.value, NotAuthenticated)


def test_a_token_ends_with_its_time():
    token = keeper().issue("acme", "billing", ["reader"], 60)
    assert keeper(NOW_S + 59).identify(token, "", "", loopback=True).subject == "billing"
    for later in (60, 61, 1e9):
        with pytest.raises(NotAuthenticated, match="expired"):
            keeper(NOW_S + later).identify(token, "", "", loopback=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exp": NOW_S}, "expired"),
        ({"exp": float("nan")}, "expired"),
        ({"nbf": NOW_S + 1}, "not valid yet"),
        ({"tenant": None}, "claim"),
        ({"tenant": ""}, "claim"),
        ({"tenant": "a.b"}, "no name"),
        ({"sub": "line\nbreak"}, "no name"),
        ({"sub": None}, "claim"),
        ({"sub": 7}, "malformed"),
        ({"roles": "admin"}, "claim"),
        ({"roles": None}, "claim"),
        ({"roles": ["x"] * 33}, "claim"),
        ({"exp": None}, "claim"),
        ({"exp": "never"}, "claim"),
        ({"aud": "another service"}, "malformed"),
    ],
)
def test_claims_are_checked(change, says):
    claims = {name: value for name, value in (CLAIMS | change).items() if value is not None}
    with pytest.raises(NotAuthenticated, match=says):
        keeper().identify(signed(claims), "", "", loopback=True)


def test_only_our_signature_counts():
    other = signed(CLAIMS, "o" * 32)
    with pytest.raises(NotAuthenticated, match="not signed with this broker's"):
        keeper().identify(other, "", "", loopback=True)
    head, body, _ = signed(CLAIMS).split(".")
    forged = text(CLAIMS | {"roles": ["admin"]})
    for token in (f"{head}.{forged}.{signed(CLAIMS).split('.')[2]}", f"{head}.{body}."):
        with pytest.raises(NotAuthenticated):
            keeper().identify(token, "", "", loopback=True)


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "HS512", "HS384", "RS256", ""])
def test_only_our_algorithm_counts(algorithm):
    """Also not `none`, which wants no signature at all."""
    if algorithm.startswith("HS"):
        tokens = [signed(CLAIMS, "s" * 64, algorithm)]
    else:
        tokens = [f"{text({'alg': algorithm, 'typ': 'JWT'})}.{text(CLAIMS)}.{end}" for end in ("", "x")]  # fmt: skip
    for token in tokens:
        with pytest.raises(NotAuthenticated):
            Authenticator(Auth(jwt_secret="s" * 64), lambda: NOW_S).identify(
                token, "", "", loopback=True
            )
    if algorithm == "none":
        with pytest.raises(NotAuthenticated, match="not signed with HS256"):
            keeper().identify(tokens[0], "", "", loopback=True)


@pytest.mark.parametrize(
    "token",
    ["x", "a.b.c", "...", "\x00", "\udcff.\udcff.\udcff", "é" * 10, "." * 5000, "a" * (MAX_TOKEN_BYTES + 1),
     f"{base64.urlsafe_b64encode(b'[' * 5000).decode()}.e30.x", f"{text({'alg': 'HS256', 'crit': ['b64'], 'b64': False})}..x"],
    ids=lambda token: ascii(token)[:20],
)  # fmt: skip
def test_malformed_tokens_are_refused(token):
    with pytest.raises(NotAuthenticated):
        keeper().identify(token, "", "", loopback=True)


def test_a_token_has_a_bound():
    """What is too long is not even parsed, however well it is signed."""
    with pytest.raises(NotAuthenticated, match="characters"):
        keeper().identify(signed(CLAIMS | {"x": "y" * MAX_TOKEN_BYTES}), "", "", loopback=True)


@given(st.text(max_size=200) | st.text("abcXYZ019-_.=", max_size=200))
def test_no_token_breaks_the_door(token):
    with pytest.raises(NotAuthenticated):
        keeper().identify(token, "acme", "billing", loopback=True)


@pytest.mark.parametrize(
    ("tenant", "subject"), [("a.b", "x"), ("a b", "x"), ("é", "x"), ("a" * 65, "x"), ("a", "x\n"), ("a", "x" * 256)]
)  # fmt: skip
def test_names_can_stand_in_topics_and_logs(tenant, subject):
    with pytest.raises(AccessDenied):
        Authenticator(Auth()).identify("", tenant, subject, loopback=True)
    with pytest.raises(InvalidInput):
        keeper().issue(tenant, subject, ["reader"], 60)


def test_issuing_says_what_is_wrong():
    with pytest.raises(InvalidSettings, match=r"auth\.jwt_secret is not set"):
        keeper(admin_token=ADMIN).issue("acme", "billing", ["reader"], 60)
    with pytest.raises(InvalidSettings, match="needs 32"):
        keeper(jwt_secret="short")
    for roles, ttl_s in ((["raeder"], 60), ([], 60), (["reader"], 0), (["reader"], 1e9)):
        with pytest.raises(InvalidInput):
            keeper().issue("acme", "billing", roles, ttl_s)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[server\]'"):
        keeper().identify("a.b.c", "", "", loopback=True)
    assert keeper(admin_token=ADMIN).identify(ADMIN, "", "", loopback=True)


# -- the command ---------------------------------------------------------------------------------


def create(words: list[str], *, json: bool = False, secret: str = SECRET) -> None:
    invocation = Invocation(sets=[f"auth.jwt_secret={secret}"] if secret else [], json=json)
    command.main(["create", *words], obj=invocation, standalone_mode=False)


def test_the_command_makes_a_token(capfdbinary):
    words = ["--tenant", "acme", "--subject", "billing", "--role", "reader", "--ttl", "1h"]
    create(words)
    token = capfdbinary.readouterr().out.decode().strip()
    found = Authenticator(Auth(jwt_secret=SECRET)).identify(token, "", "", loopback=False)
    assert found == Identity("acme", "billing", ("reader",))
    create([*words, "--role", "operator"], json=True)
    row = json.loads(capfdbinary.readouterr().out)
    assert (row["roles"], row["ttl_s"]) == (["reader", "operator"], 3600)
    with pytest.raises(InvalidSettings):
        create(words, secret="")


# -- rights --------------------------------------------------------------------------------------


def test_every_request_has_a_right():
    """A request that is added later cannot slip through without somebody deciding who may ask it."""
    kinds = {
        kind
        for kind in vars(requests).values()
        if isinstance(kind, type) and issubclass(kind, Request) and kind is not Request
    }
    assert set(RIGHTS) == kinds
    assert set(RIGHTS.values()) <= set(ROLES)


def test_roles_include_lower_ones():
    for role, enough in (
        ("reader", {"reader", "operator", "admin"}),
        ("operator", {"operator", "admin"}),
        ("monitor", {"monitor", "admin"}),
        ("admin", {"admin"}),
    ):
        for each in (*ROLES, "unknown"):
            if each in enough:
                require(Identity(roles=(each,)), role)
            else:
                with pytest.raises(AccessDenied, match=role):
                    require(Identity(roles=(each,)), role)


def test_a_client_may_run_its_own_errands():
    """Reply inboxes and listeners without a name work with the lowest role, and only those."""

    async def work() -> None:
        async with penstock.connect("mem:") as bus:
            gate, acme = Authorizer(bus.engine), Identity("acme", "app", ("reader",))
            inbox = requests.CreateTopic("_inbox.0123", TopicSpec(ephemeral=True))
            await gate.ask(acme, inbox)
            with pytest.raises(AccessDenied):
                await gate.ask(acme, requests.CreateTopic("_dlq.other", inbox.spec))
            with pytest.raises(AccessDenied):
                await gate.ask(acme, requests.DeleteGroup("billing", "app"))

    asyncio.run(work())
