"""Topics over HTTP: the operations of `penstock topic`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.core.entry import MAX_TOPIC_PARTITIONS, TopicSpec
from penstock.engines import requests as ask
from penstock.engines.requests import PartitionInfo, TopicInfo
from penstock.model.errors import InvalidInput
from penstock.model.settings import Size, Span
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

PATH = "/api/admin/topics"
Partitions = Annotated[int, Meta(ge=1, le=MAX_TOPIC_PARTITIONS)]


class TopicQuery(Paging, frozen=True):
    """Which topics."""

    system: Annotated[bool, Meta(description="Also the bus's own, such as _dlq.default.")] = False


class TopicView(msgspec.Struct, frozen=True):
    """A topic, its partitions and what they hold together."""

    name: str
    tenant: str
    partitions: list[PartitionInfo]
    retention_age_s: float | None
    retention_bytes: int | None
    write_once: bool
    events: int
    sealed_bytes: int


class TopicPut(Body, frozen=True):
    """A topic to create."""

    name: Text
    partitions: Partitions = 1
    retention_age_s: Span | None = None
    retention_bytes: Size | None = None
    write_once: bool | None = None


class TopicPatch(Body, frozen=True):
    """The fields to change; fields left out stay as they are. Partitions can only be added."""

    partitions: Partitions | None = None
    retention_age_s: Span | None = None
    retention_bytes: Size | None = None
    write_once: bool | None = None
    actor: Actor = None


def view(info: TopicInfo) -> TopicView:
    """A topic as `penstock topic` shows it."""
    return TopicView(**{name: getattr(info, name) for name in TopicView.__struct_fields__})


async def list_topics(call: Call) -> Page[TopicView]:
    """Topics by name."""
    found: list[Any] = await call.ask(ask.ListTopics(call.query.system))
    return page(map(view, found), call.query.limit, call.query.offset)


async def describe(call: Call) -> TopicView:
    """One topic."""
    return view(await call.ask(ask.DescribeTopic(call.path["name"])))


async def create(call: Call) -> TopicView:
    """Create a topic before the first publish to it."""
    body: TopicPut = call.body
    spec = TopicSpec(body.partitions, body.retention_age_s, body.retention_bytes, body.write_once)
    return view(await call.ask(ask.CreateTopic(body.name, spec)))


async def configure(call: Call) -> TopicView:
    """Change retention, write-once, or the number of partitions."""
    body: TopicPatch = call.body
    changes = (body.partitions, body.retention_age_s, body.retention_bytes, body.write_once)
    if all(change is None for change in changes):
        raise InvalidInput("name at least one thing to change, such as retention_age_s")
    request = ask.ConfigureTopic(call.path["name"], *changes, body.actor or "")
    return view(await call.ask(request))


async def delete(call: Call) -> Deleted:
    """Delete a topic with all its events; refused inside write-once retention."""
    name, wanted = call.path["name"], call.query
    request = ask.DeleteTopic(name, wanted.actor or "", wanted.confirm, wanted.dry_run)
    return deleted(name, await call.ask(request))


ENDPOINTS = (
    Endpoint("GET", PATH, "List the topics.", list_topics, Page[TopicView], ask.ListTopics,
             query=TopicQuery),
    Endpoint("POST", PATH, "Create a topic.", create, TopicView, ask.CreateTopic, body=TopicPut),
    Endpoint("GET", f"{PATH}/{{name}}", "Show a topic and its partitions.", describe, TopicView,
             ask.DescribeTopic),
    Endpoint("PATCH", f"{PATH}/{{name}}", "Change what is configured for a topic.", configure,
             TopicView, ask.ConfigureTopic, body=TopicPatch),
    Endpoint("DELETE", f"{PATH}/{{name}}", "Delete a topic and its events.", delete, Deleted,
             ask.DeleteTopic, query=Deleting, confirms="DELETE"),
)  # fmt: skip
