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
    """Certificate and key: readable, fitting each other, not expired."""
    from penstock.server.tls import server_tls

    server = settings.server
    for field in ("tls_certificate", "tls_key", "tls_client_ca"):
        path = getattr(server, field)
        if server.tls_certificate and path and not os.access(path, os.R_OK):
            raise InvalidSettings(
                f"server.{field} = {path!r} cannot be read. Give a PEM file that this user can read",
                key=f"server.{field}",
            )
    if server_tls(server) is None:
        yield Check("tls", "ok", "off")
        return
    yield _check_expiry(server.tls_certificate)
    secret = Path(server.tls_key or server.tls_certificate)
    if secret.stat().st_mode & 0o077:
        yield Check("tls", "warn", f"{secret} can be read by others", f"chmod 600 {secret}")


def _check_expiry(path: str) -> Check:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    ends = certificate.not_valid_after_utc
    left = ends - datetime.datetime.now(datetime.UTC)
    found = f"{certificate.subject.rfc4514_string()}, valid until {ends:%Y-%m-%d %H:%M} UTC"
    if left < datetime.timedelta(0):
        raise InvalidSettings(
            f"the certificate {path} expired on {ends:%Y-%m-%d}: clients will refuse it. Get another",
            key="server.tls_certificate",
        )
    if left < datetime.timedelta(days=EXPIRES_SOON_DAYS):
        return Check("tls", "warn", found, f"it expires in {left.days} days: get another")
    return Check("tls", "ok", found)


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
