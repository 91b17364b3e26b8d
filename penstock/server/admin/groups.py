"""Consumer groups over HTTP: the operations of `penstock group`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from penstock.engines import requests as ask
from penstock.engines.requests import GroupInfo
from penstock.model.parameter import place
from penstock.server.admin.endpoint import (
    Actor,
    Body,
    Call,
    Deleted,
    Deleting,
    DryRun,
    Endpoint,
    Page,
    Paging,
    Text,
    deleted,
    page,
)

PATH = "/api/admin/groups"


class Reset(Body, frozen=True):
    """Where a group shall go on."""

    to: Annotated[
        str,
        Meta(
            max_length=64,
            description="earliest, latest, offset:42, a time in ISO 8601, or how long ago (2h).",
        ),
    ]
    topic: Annotated[Text | None, Meta(description="Only in this topic.")] = None
    confirm: Annotated[str, Meta(description="Must be RESET; else nothing happens.")] = ""
    dry_run: DryRun = False
    actor: Actor = None


async def list_groups(call: Call) -> Page[GroupInfo]:
    """Groups by name, each with its lag."""
    found: list[Any] = await call.ask(ask.ListGroups())
    return page(found, call.query.limit, call.query.offset)


async def describe(call: Call) -> GroupInfo:
    """One group with its lanes."""
    group: GroupInfo = await call.ask(ask.DescribeGroup(call.path["name"]))
    return group


async def reset(call: Call) -> GroupInfo:
    """Set where a group goes on; after a dry run, the answer is the group as it would be."""
    body: Reset = call.body
    where = place("to", body.to, call.now_us)
    request = ask.ResetGroup(
        call.path["name"], where, body.topic, body.actor or "", body.confirm, body.dry_run
    )
    group: GroupInfo = await call.ask(request)
    return group


async def delete(call: Call) -> Deleted:
    """Delete a group and its position; its events stay."""
    name, wanted = call.path["name"], call.query
    request = ask.DeleteGroup(name, wanted.actor or "", wanted.confirm, wanted.dry_run)
    return deleted(name, await call.ask(request))


ENDPOINTS = (
    Endpoint("GET", PATH, "List the groups and how far each lags behind.", list_groups,
             Page[GroupInfo], ask.ListGroups, query=Paging),
    Endpoint("POST", f"{PATH}/{{name:path}}/reset", "Move a group to another place.", reset,
             GroupInfo, ask.ResetGroup, body=Reset, confirms="RESET"),
    Endpoint("GET", f"{PATH}/{{name:path}}", "Show a group and where it stands.", describe,
             GroupInfo, ask.DescribeGroup),
    Endpoint("DELETE", f"{PATH}/{{name:path}}", "Delete a group: its place is forgotten.", delete,
             Deleted, ask.DeleteGroup, query=Deleting, confirms="DELETE"),
)  # fmt: skip
