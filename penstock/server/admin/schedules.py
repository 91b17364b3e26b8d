"""Recurring events over HTTP: the operations of `penstock schedule`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from penstock.core.schedule import Definition, parse_every
from penstock.engines import requests as ask
from penstock.model.codec import codecs
from penstock.model.errors import InvalidInput
from penstock.server.admin.endpoint import (
    Actor,
    Body,
    Call,
    Deleted,
    Deleting,
    Endpoint,
    Page,
    Paging,
    Text,
    deleted,
    page,
)
from penstock.server.admin.request import Base64, text_or_base64

PATH = "/api/admin/schedules"


class SchedulePut(Body, frozen=True):
    """The event to publish again and again, and when: give `cron` or `every`, `value` or `base64`."""

    topic: Text
    cron: Annotated[str | None, Meta(description="In UTC, such as 0 9 * * 1-5.")] = None
    every: Annotated[str | float | None, Meta(description="Seconds, or text such as 90s.")] = None
    value: Annotated[Any, Meta(description="Any JSON value, encoded by the codec.")] = UNSET
    base64: Annotated[bytes | None, Meta(description="The payload as it is.")] = None
    codec: Annotated[str | None, Meta(description="media.codec, or raw for base64.")] = None
    headers: dict[str, str] = {}
    actor: Actor = None


class ScheduleView(msgspec.Struct, frozen=True):
    """A recurring event, and when it is published next."""

    id: str
    topic: str
    payload: str | Base64
    codec: str
    headers: dict[str, str]
    cron: str | None
    every_us: int | None
    enabled: bool
    next_us: int
    missed: int


def view(definition: Definition) -> ScheduleView:
    """A recurring event as `penstock schedule` shows it."""
    fields = {name: getattr(definition, name) for name in ScheduleView.__struct_fields__}
    return ScheduleView(**{**fields, "payload": text_or_base64(definition.payload)})


async def list_schedules(call: Call) -> Page[ScheduleView]:
    """Recurring events by id."""
    found: list[Any] = await call.ask(ask.ListSchedules())
    return page(map(view, found), call.query.limit, call.query.offset)


async def put(call: Call) -> ScheduleView:
    """Add a recurring event, or replace the one of that id."""
    body: SchedulePut = call.body
    if (body.value is UNSET) == (body.base64 is None):
        raise InvalidInput("give value or base64, one of them", field="value")
    if body.base64 is None:
        codec = body.codec or call.context.settings.media.codec
        payload = codecs.get(codec).encode(body.value)
    else:
        codec, payload = body.codec or "raw", body.base64
        codecs.get(codec)  # one that consumers can decode
    every_us = None if body.every is None else parse_every(body.every)
    request = ask.PutSchedule(
        call.path["id"], body.topic, payload, codec, dict(body.headers), body.cron, every_us,
        body.actor or "",
    )  # fmt: skip
    return view(await call.ask(request))


async def remove(call: Call) -> Deleted:
    """Remove a recurring event."""
    wanted: Deleting = call.query
    id = call.path["id"]
    request = ask.RemoveSchedule(id, wanted.actor or "", wanted.confirm, wanted.dry_run)
    return deleted(id, await call.ask(request))


ENDPOINTS = (
    Endpoint("GET", PATH, "List the recurring events.", list_schedules, Page[ScheduleView],
             ask.ListSchedules, query=Paging),
    Endpoint("PUT", f"{PATH}/{{id:path}}", "Publish something again and again.", put, ScheduleView,
             ask.PutSchedule, body=SchedulePut),
    Endpoint("DELETE", f"{PATH}/{{id:path}}", "Remove a recurring event.", remove, Deleted,
             ask.RemoveSchedule, query=Deleting, confirms="REMOVE"),
)  # fmt: skip
