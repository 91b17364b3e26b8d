"""Shell completion of names that live in the data folder."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from penstock.cli.invocation import Invocation, folder_of, read_only

if TYPE_CHECKING:
    import click


PATIENCE_S = 2.0  # a shell that hangs on Tab is worse than one that offers nothing


def complete_topic(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Topics that begin with what was typed."""
    return _names(context, "topics", incomplete)


def complete_group(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Groups that begin with what was typed."""
    return _names(context, "groups", incomplete)


def _names(context: click.Context, kind: str, incomplete: str) -> list[str]:
    invocation = context.ensure_object(Invocation)
    folder = folder_of(invocation.url)
    if folder is None or not folder.is_dir():
        return []

    async def ask() -> list[str]:
        from penstock import connect  # takes its time, which is not the folder's fault

        async with (
            asyncio.timeout(PATIENCE_S),
            connect(read_only(invocation.url), settings=invocation.settings()) as bus,
        ):
            catalogue: Any = getattr(bus, kind)
            return [each.name for each in await catalogue.list()]

    try:
        names = asyncio.run(ask())
    except Exception:  # whatever it is, it is no reason to disturb somebody who is typing
        return []
    return [name for name in names if name.startswith(incomplete)]
