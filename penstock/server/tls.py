"""TLS of the broker, as its settings want it."""

from __future__ import annotations

import ssl

from penstock.model.errors import InvalidSettings
from penstock.model.server_settings import Server


def server_tls(server: Server) -> ssl.SSLContext | None:
    """A context with the configured certificate; None when there is none."""
    if not server.tls_certificate:
        if server.tls_key or server.tls_client_ca:
            raise InvalidSettings(
                "server.tls_key and server.tls_client_ca need server.tls_certificate; set it, or "
                "clear them to speak plain TCP",
                key="server.tls_certificate",
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would ask the terminal for one, and wait.
        context.load_cert_chain(server.tls_certificate, server.tls_key or None, password="")
        if server.tls_client_ca:
            context.load_verify_locations(server.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettings(
            f"TLS cannot start: {error}; look at server.tls_certificate, server.tls_key and "
            "server.tls_client_ca: PEM files that belong together, the key without a password",
            key="server.tls_certificate",
        ) from error
    return context
