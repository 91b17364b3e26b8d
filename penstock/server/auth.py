"""Authentication: checks the tokens of callers, and makes new tokens.

Every transport uses the same checks. With neither `auth.admin_token` nor `auth.jwt_secret` set, callers
on this host are trusted and all others refused; with either set, every caller needs a token.
docs/guide/security.md explains the whole model.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from penstock.model.errors import (
    AccessDenied,
    InvalidInput,
    InvalidSettings,
    MissingExtra,
    NotAuthenticated,
)
from penstock.model.event import Identity
from penstock.model.role import ADMIN, ROLES
from penstock.model.settings import Auth
from penstock.model.topic import MAX_WORD_BYTES, TENANT_NAME, TENANT_RULE

ALGORITHM = "HS256"
MIN_SECRET_BYTES = 32  # RFC 7518, 3.2: a key for HS256 is at least as long as its hash
MAX_TOKEN_BYTES = 8_192  # a token of ours has about 300; a longer one is not worth parsing
MAX_SUBJECT_CHARACTERS = 255  # every audit record contains the subject
MAX_ROLES = 32  # in one token; there are four roles
MAX_TTL_S = 366 * 86_400.0  # a token cannot be revoked, so it is valid for a year at most

_TENANT = re.compile(TENANT_NAME)
_REMEDY = "make a new one with `penstock token create`"


class _Claims(msgspec.Struct, frozen=True):
    """The claims of a token; other claims are ignored."""

    tenant: Annotated[str, Meta(min_length=1, max_length=MAX_WORD_BYTES)]
    sub: Annotated[str, Meta(min_length=1, max_length=MAX_SUBJECT_CHARACTERS)]
    roles: Annotated[list[str], Meta(max_length=MAX_ROLES)]
    exp: float
    nbf: float = 0.0


class Keys(NamedTuple):
    """The keys in force. Several of each kind are valid at once, so that they can be changed one by one."""

    admin_tokens: tuple[str, ...]
    secrets: tuple[str, ...]
    """Secrets of tokens that name a tenant; the first signs new tokens."""


def keys_of(auth: Auth) -> Keys:
    """The keys in the settings and in the files they name, read now; raises InvalidSettings."""
    secrets = _listed("jwt_secret", auth.jwt_secret, auth.jwt_secret_file)
    for secret in secrets:
        if len(secret.encode()) < MIN_SECRET_BYTES:
            raise InvalidSettings(
                f"auth.jwt_secret has {len(secret.encode())} bytes and needs "
                f"{MIN_SECRET_BYTES}: a shorter one can be guessed from any token. Make one with "
                "`openssl rand -hex 32`",
                key="auth.jwt_secret",
            )
    return Keys(_listed("admin_token", auth.admin_token, auth.admin_token_file), secrets)


def _listed(name: str, value: str, path: str) -> tuple[str, ...]:
    """The lines of a file, without empty ones and comments, then the value of the setting."""
    lines: list[str] = []
    if path:
        try:
            lines = [line.strip() for line in Path(path).read_text().splitlines()]
        except (OSError, ValueError) as error:
            raise InvalidSettings(
                f"auth.{name}_file cannot be read: {error}. Name a text file with one key a line, "
                "which the broker's user can read",
                key=f"auth.{name}_file",
            ) from None
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise InvalidSettings(
                f"auth.{name}_file {path!r} holds no key, and everybody would be locked out. Put one "
                "on a line of its own",
                key=f"auth.{name}_file",
            )
    return (*dict.fromkeys([*lines, *([value] if value else [])]),)


class Authenticator:
    """Finds the identity behind a token, and makes tokens.

    >>> Authenticator(Auth()).identify("", "acme", "billing", loopback=True).tenant
    'acme'
    """

    def __init__(self, auth: Auth, wall_s: Callable[[], float] = time.time) -> None:
        self.keys = keys_of(auth)
        self._wall_s = wall_s

    @property
    def asks(self) -> bool:
        """Whether every caller must show a token."""
        return any(self.keys)

    def check_change(self, keys: Keys) -> None:
        """Raise InvalidSettings when new keys would begin or stop to require a token."""
        if any(keys) != self.asks:
            raise InvalidSettings(
                "whether a token is asked for cannot change while the broker runs: set or remove the "
                "keys of auth, and restart it",
                key="auth",
            )

    def change(self, keys: Keys) -> bool:
        """Use other keys from now on; False when they are the same. Open connections stay."""
        self.check_change(keys)
        before, self.keys = self.keys, keys
        return keys != before

    def identify(self, token: str, tenant: str, subject: str, *, loopback: bool) -> Identity:
        """The identity behind a token; raises NotAuthenticated, or AccessDenied for another tenant."""
        if not self.asks:
            return _trusted(tenant, subject, loopback)
        if not token:
            raise NotAuthenticated(
                "a token is needed here: send it as X-Admin-Token or Authorization: Bearer over "
                "HTTP, as client.token over the wire. `penstock token create` makes one"
            )
        shown = _bytes(token)
        # All of them are compared, so that the time does not reveal which one matched.
        found = [hmac.compare_digest(shown, _bytes(admin)) for admin in self.keys.admin_tokens]
        if any(found):
            return _named(tenant or "default", subject or "admin", (ADMIN,))
        if not self.keys.secrets:
            raise NotAuthenticated("that is not the admin token; nothing was done. See auth.admin_token")  # fmt: skip
        return self._identify_bearer(token, tenant)

    def _identify_bearer(self, token: str, tenant: str) -> Identity:
        claims = self._claims(token)
        now_s = self._wall_s()
        # `not <`, so that NaN counts as expired.
        if not now_s < claims.exp:
            raise NotAuthenticated(f"the token has expired; {_REMEDY}", exp=claims.exp)
        if not claims.nbf <= now_s:
            raise NotAuthenticated(
                "the token is not valid yet (nbf); check the clocks of both hosts", nbf=claims.nbf
            )
        if not _TENANT.fullmatch(claims.tenant) or not claims.sub.isprintable():
            raise NotAuthenticated(f"the token's tenant or subject is no name; {_REMEDY}")
        if tenant and tenant != claims.tenant:
            raise AccessDenied(
                f"the token is for tenant {claims.tenant!r} and cannot speak for "
                f"{tenant[:MAX_WORD_BYTES]!r}; use a "
                "token of that tenant, or leave the tenant out",
                tenant=tenant[:MAX_WORD_BYTES],
            )
        return Identity(claims.tenant, claims.sub, tuple(claims.roles))

    def _claims(self, token: str) -> _Claims:
        jwt = _pyjwt()
        if len(token) > MAX_TOKEN_BYTES:
            raise NotAuthenticated(f"the token has {len(token)} characters, which none of ours has")
        try:
            for secret in self.keys.secrets:
                with contextlib.suppress(jwt.InvalidSignatureError):
                    return msgspec.convert(_decoded(jwt, token, secret), _Claims)
            raise jwt.InvalidSignatureError
        except jwt.InvalidSignatureError:
            raise NotAuthenticated(
                f"the token is not signed with this broker's auth.jwt_secret; {_REMEDY} there"
            ) from None
        except jwt.InvalidAlgorithmError:
            raise NotAuthenticated(
                f"the token is not signed with {ALGORITHM}, and nothing else is taken; {_REMEDY}"
            ) from None
        except msgspec.ValidationError as error:
            raise NotAuthenticated(
                f"a claim of the token is missing or wrong: {error}; {_REMEDY}"
            ) from None
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise NotAuthenticated(f"the token is malformed: {error}; {_REMEDY}") from None

    def issue(self, tenant: str, subject: str, roles: Sequence[str], ttl_s: float) -> str:
        """A token that `identify` accepts for the next `ttl_s` seconds."""
        jwt = _pyjwt()
        if not self.keys.secrets:
            raise InvalidSettings(
                "auth.jwt_secret is not set, so there is nothing to sign tokens with. Make one with "
                "`openssl rand -hex 32` and give it to the broker too",
                key="auth.jwt_secret",
            )
        unknown = sorted(set(roles) - set(ROLES))
        if unknown or not roles:
            raise InvalidInput(
                f"a token has at least one role of {', '.join(ROLES)}; unknown: {unknown}",
                roles=list(roles),
            )
        if not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"a token lives up to {MAX_TTL_S / 86_400:g} days, not {ttl_s} s")
        try:
            identity = _named(tenant, subject, tuple(dict.fromkeys(roles)))
        except AccessDenied as error:  # nothing is denied here: a name is mistyped
            raise InvalidInput(error.message, **error.data) from None
        now_s = self._wall_s()
        claims = {
            "tenant": identity.tenant,
            "sub": identity.subject,
            "roles": list(identity.roles),
            "iat": int(now_s),
            "exp": math.ceil(now_s + ttl_s),
        }
        return str(jwt.encode(claims, self.keys.secrets[0], algorithm=ALGORITHM))


def check_listen(address: str, auth: Auth, key: str = "") -> None:
    """Raise InvalidSettings when other hosts can reach an address and no token is configured.

    >>> check_listen("127.0.0.1:5558", Auth())
    >>> check_listen("0.0.0.0:5558", Auth())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: 0.0.0.0:5558 can be reached from other hosts, ...
    """
    if not address or auth.asks:
        return
    host = address.rpartition(":")[0].strip("[]")
    if not is_loopback(host):
        raise InvalidSettings(
            f"{address} can be reached from other hosts, and nobody would have to show a token. Set "
            "auth.jwt_secret or auth.admin_token, or listen on 127.0.0.1",
            address=address,
            key=key,
        )


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, reached without a network.

    >>> is_loopback("::1"), is_loopback("127.8.8.8"), is_loopback("10.0.0.1"), is_loopback("")
    (True, True, False, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _trusted(tenant: str, subject: str, loopback: bool) -> Identity:
    if not loopback:
        raise NotAuthenticated(
            "without auth.jwt_secret or auth.admin_token only callers on the broker's own host come "
            "in. Set one of them there, and show a token"
        )
    return _named(tenant or "default", subject or "local", (ADMIN,))


def _named(tenant: str, subject: str, roles: tuple[str, ...]) -> Identity:
    """An identity whose names are valid in topics, logs and audit records."""
    if not _TENANT.fullmatch(tenant):
        raise AccessDenied(
            f"no tenant can be called {tenant[:MAX_WORD_BYTES]!r}: {TENANT_RULE}",
            tenant=tenant[:MAX_WORD_BYTES],
        )
    if not 0 < len(subject) <= MAX_SUBJECT_CHARACTERS or not subject.isprintable():
        raise AccessDenied(
            f"a subject has 1 to {MAX_SUBJECT_CHARACTERS} printable characters", tenant=tenant
        )
    return Identity(tenant, subject, roles)


def _decoded(jwt: Any, token: str, secret: str) -> Any:
    return jwt.decode(
        token,
        secret,
        algorithms=[ALGORITHM],
        # `_identify_bearer` checks times against the given clock, and msgspec the types of claims.
        options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
    )


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _pyjwt() -> Any:
    try:
        import jwt
    except ImportError as error:
        raise MissingExtra(
            "tokens that name a tenant need PyJWT: pip install 'penstock[server]'", extra="server"
        ) from error
    return jwt
