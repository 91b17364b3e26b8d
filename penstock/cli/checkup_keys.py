"""Checks of certificates and keys; part of penstock.cli.checkup."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.checkup import Check
from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.model.settings import Settings

EXPIRES_SOON_DAYS = 14  # time to get another certificate without hurry


def check_tls(settings: Settings) -> Iterator[Check]:
    """Certificate and key of the broker: readable, fitting each other, not expired."""
    from penstock.server.tls import server_tls

    server = settings.server
    if server.tls_certificate:
        _require_readable(settings, "server", ("tls_certificate", "tls_key", "tls_client_ca"))
    if server_tls(server) is None:
        yield Check("tls", "ok", "off")
        return
    yield from _check_pair("tls", "server", server.tls_certificate, server.tls_key)


def check_client_tls(settings: Settings) -> Iterator[Check]:
    """What clients with these settings trust and show: the same questions."""
    from penstock.engines.link_tcp import client_tls

    client = settings.client
    _require_readable(settings, "client", ("tls_ca", "tls_certificate", "tls_key"))
    client_tls(client.tls_ca, client.tls_certificate, client.tls_key)
    if client.tls_certificate:
        yield from _check_pair("client tls", "client", client.tls_certificate, client.tls_key)
    elif client.tls_ca:
        yield Check("client tls", "ok", f"brokers are checked with {client.tls_ca}")


def check_secrets(settings: Settings) -> Iterator[Check]:
    """The files with tokens and secrets: nobody but their owner reads them."""
    files = {
        "auth.jwt_secret_file": settings.auth.jwt_secret_file,
        "auth.admin_token_file": settings.auth.admin_token_file,
        "client.token_file": settings.client.token_file,
    }
    for name, path in files.items():
        if path and Path(path).exists():
            yield _check_private("secrets", Path(path)) or Check("secrets", "ok", f"{name}: {path}")


def check_settings_file(path: str | None) -> Iterator[Check]:
    """A settings file that holds secrets itself: nobody but its owner reads it."""
    from penstock.model.loader import load

    if not path:
        return
    settings = load(path)
    held = [
        settings.auth.jwt_secret, settings.auth.admin_token, settings.client.token,
        settings.server.curve_secret_key, settings.client.curve_secret_key,
    ]  # fmt: skip
    if any(held) and (warning := _check_private("secrets", Path(path))):
        yield warning


def _check_private(name: str, path: Path) -> Check | None:
    if path.stat().st_mode & 0o077:
        return Check(name, "warn", f"{path} can be read by others", f"chmod 600 {path}")
    return None


def _require_readable(settings: Settings, group: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        path = getattr(getattr(settings, group), field)
        if path and not os.access(path, os.R_OK):
            raise InvalidSettings(
                f"{group}.{field} = {path!r} cannot be read. Give a PEM file that this user can read",
                key=f"{group}.{field}",
            )


def _check_pair(name: str, group: str, certificate: str, key: str) -> Iterator[Check]:
    yield _check_expiry(name, group, certificate)
    if private := _check_private(name, Path(key or certificate)):
        yield private


def _check_expiry(name: str, group: str, path: str) -> Check:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    ends = certificate.not_valid_after_utc
    left = ends - datetime.datetime.now(datetime.UTC)
    found = f"{certificate.subject.rfc4514_string()}, valid until {ends:%Y-%m-%d %H:%M} UTC"
    if left < datetime.timedelta(0):
        raise InvalidSettings(
            f"the certificate {path} expired on {ends:%Y-%m-%d}: the other side will refuse it. Get another",
            key=f"{group}.tls_certificate",
        )
    if left < datetime.timedelta(days=EXPIRES_SOON_DAYS):
        return Check(name, "warn", found, f"it expires in {left.days} days: get another")
    return Check(name, "ok", found)


def check_curve(settings: Settings) -> Check:
    """The keys of ZeroMQ: well formed, and used."""
    server = settings.server
    if server.curve_clients and not server.curve_secret_key:
        raise InvalidSettings(
            "server.curve_clients is set and server.curve_secret_key is not, so nobody would be "
            "kept out. Set both",
            key="server.curve_clients",
        )
    if not server.curve_secret_key:
        return Check("curve", "ok", "off")
    from penstock.engines.zmq_library import curve_key

    curve_key(server.curve_secret_key, "server.curve_secret_key")
    for key in server.curve_clients:
        curve_key(key, "server.curve_clients")
    if not server.zmq and not server.pub:
        return Check("curve", "warn", "a key is set, and ZeroMQ is off", "set server.zmq or remove server.curve_secret_key")  # fmt: skip
    known = len(server.curve_clients)
    return Check("curve", "ok", f"on; {known} client keys" if known else "on; any client key")
