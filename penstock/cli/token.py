"""`penstock token`: tokens that let clients and operators into a broker."""

from __future__ import annotations

import click

from penstock.cli import output
from penstock.cli.arguments import DURATION
from penstock.cli.invocation import Invocation, Noun
from penstock.model.role import ROLES


@click.group("token", cls=Noun)
def command() -> None:
    """Make tokens for clients and operators of a broker."""


@command.command("create")
@click.option("--tenant", required=True, help="The tenant it speaks for.")
@click.option("--subject", required=True, help="Who shows it, as the audit trail names them.")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True, help="What it opens; repeat for several.")  # fmt: skip
@click.option("--ttl", "ttl_s", type=DURATION, default="1h", show_default=True, help="How long it is good for.")  # fmt: skip
@click.pass_obj
def create(
    invocation: Invocation, tenant: str, subject: str, roles: tuple[str, ...], ttl_s: float
) -> None:
    """Print a token signed with auth.jwt_secret of the settings.

    The broker needs the same secret. A token cannot be called back: keep its time short.
    """
    from penstock.server.auth import Authenticator  # loads Arrow, which --help need not

    token = Authenticator(invocation.settings().auth).issue(tenant, subject, roles, ttl_s)
    if invocation.json:
        output.print_json(
            {"token": token, "tenant": tenant, "subject": subject, "roles": list(roles), "ttl_s": ttl_s}
        )  # fmt: skip
    else:
        output.print_text(token)
