"""`penstock key`: pairs of CURVE keys for ZeroMQ."""

from __future__ import annotations

import click

from penstock.cli import output
from penstock.cli.invocation import Invocation, Noun


@click.group("key", cls=Noun)
def command() -> None:
    """Make keys for CURVE, the encryption of ZeroMQ."""


@command.command("create")
@click.pass_obj
def create(invocation: Invocation) -> None:
    """Print a new pair of keys, public and secret.

    A broker has its secret key in server.curve_secret_key and its clients' public keys in
    server.curve_clients; a client has the broker's public key in client.curve_server_key and its own
    secret key in client.curve_secret_key.
    """
    from penstock.server.transports.curve import make_keys  # loads ZeroMQ, which --help need not

    public, secret = make_keys()
    _print(invocation, public=public, secret=secret)


@command.command("public")
@click.pass_obj
def public(invocation: Invocation) -> None:
    """Print the public key that belongs to server.curve_secret_key of the settings."""
    from penstock.model.errors import InvalidSettings
    from penstock.server.transports.curve import public_key

    secret = invocation.settings().server.curve_secret_key
    if not secret:
        raise InvalidSettings(
            "server.curve_secret_key is not set. `penstock key create` makes a pair",
            key="server.curve_secret_key",
        )
    _print(invocation, public=public_key(secret))


def _print(invocation: Invocation, **keys: str) -> None:
    if invocation.json:
        output.print_json(keys)
    else:
        for name, key in keys.items():
            output.print_text(f"{name}  {key}")
