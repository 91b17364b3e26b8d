"""Dead letters over HTTP: the operations of `penstock dlq`, with the same rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.core.state import DeadLetter
from penstock.engines import requests as ask
from penstock.engines.requests import DeadLetterDetail
from penstock.engines.requests import Outcome as EngineOutcome
from penstock.model.errors import InvalidInput
from penstock.model.parameter import MAX_IDS
from penstock.server.admin.endpoint import (
    Actor,
    Answered,
    Body,
    Call,
    DryRun,
    Endpoint,
    Limit,
    Offset,
    Page,
    Query,
    Text,
    page,
)
from penstock.server.admin.request import Base64, payload_fields, text_or_base64

MULTI_STATUS = 207
PATH = "/api/admin/dlq"

Ids = Annotated[
    list[Text],
    Meta(min_length=1, max_length=MAX_IDS, description="Ids as the list shows them."),
]
Done = Literal["replayed", "purged", "possible"]
"""`possible` is the result of a dry run."""
Reason = Annotated[Text, Meta(description="Why, for the audit trail.")]


class LetterQuery(Query, frozen=True):
    """Which dead letters."""

    consumer: Annotated[str | None, Meta(description="Only of this consumer group.")] = None
    topic: Annotated[str | None, Meta(description="Only of this topic.")] = None
    tenant: Annotated[str | None, Meta(description="Only of this tenant.")] = None
    everything: Annotated[bool, Meta(description="Those that were replayed, too.")] = False
    limit: Limit = 100
    offset: Offset = 0


class LetterView(DeadLetter, kw_only=True):
    """A dead letter with its event: `value` as its codec means it, or else `base64`."""

    token: str
    key: str | Base64 | None
    headers: dict[str, str]
    codec: str
    value: Any = UNSET
    base64: str | UnsetType = UNSET
    omitted_bytes: int | UnsetType = UNSET
    """The size of a payload that is too large to be shown."""


class Replay(Body, frozen=True):
    """Give dead letters back to the consumer they died in."""

    ids: Ids
    target_consumer: Annotated[str, Meta(description="The group they died in, restated.")]
    target_topic: Annotated[str, Meta(description="The topic they came from, restated.")]
    reason: Reason
    confirm: Annotated[str, Meta(description="Must be REPLAY; else nothing happens.")] = ""
    dry_run: DryRun = False
    actor: Actor = None


class Purge(Body, frozen=True):
    """Take dead letters out of the view; the log keeps its events."""

    ids: Ids
    reason: Reason
    confirm: Annotated[str, Meta(description="Must be PURGE; else nothing happens.")] = ""
    dry_run: DryRun = False
    actor: Actor = None


class Quarantine(Body, frozen=True):
    """Make a dead letter by hand."""

    id: Annotated[Text, Meta(description="topic/partition/offset; any id with a payload.")]
    consumer: Text
    topic: Text
    reason: Reason
    payload: Annotated[str | None, Meta(description="The message, when not in the log.")] = None
    payload_base64: Annotated[bytes | None, Meta(description="The same, for any bytes.")] = None
    actor: Actor = None


class Result(msgspec.Struct, frozen=True):
    """The result for one record."""

    id: str
    result: Done | Literal["failed"]
    code: str | None = None
    message: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """A record that could not be done, and why."""

    id: str
    code: str
    message: str


class Outcome(msgspec.Struct, frozen=True):
    """The result for each record, and the counts."""

    requested: int
    done: int
    failed: int
    results: list[Result]
    failures: list[Failure]


class Quarantined(msgspec.Struct, frozen=True):
    """The dead letter that was made."""

    requested: int
    done: int
    failed: int
    id: str


async def list_letters(call: Call) -> Page[DeadLetter]:
    """Dead letters, newest first."""
    wanted: LetterQuery = call.query
    found = await call.ask(
        ask.ListDead(
            wanted.consumer,
            wanted.topic,
            wanted.tenant,
            wanted.limit + 1,
            wanted.everything,
            wanted.offset,
        )
    )
    return page(found, wanted.limit, 0)


async def inspect_letter(call: Call) -> LetterView:
    """One dead letter with its event."""
    detail: DeadLetterDetail = await call.ask(ask.InspectDead(call.path["id"]))
    record = {name: getattr(detail.record, name) for name in DeadLetter.__struct_fields__}
    return LetterView(
        **record,
        token=detail.token,
        key=None if detail.key is None else text_or_base64(detail.key),
        headers=detail.headers,
        codec=detail.codec,
        **payload_fields(detail.payload, detail.codec),
    )


async def replay_letters(call: Call) -> Any:
    """Give each back to its consumer; a failure has the reason why not."""
    body: Replay = call.body
    ids = list(dict.fromkeys(body.ids))
    outcome = await call.ask(
        ask.ReplayDead(
            ids, body.target_consumer, body.target_topic, body.actor or "", body.reason,
            body.confirm, body.dry_run,
        )
    )  # fmt: skip
    return _report(ids, outcome, "possible" if body.dry_run else "replayed")


async def purge_letters(call: Call) -> Any:
    """Take each out of the view; a failure has the reason why not."""
    body: Purge = call.body
    ids = list(dict.fromkeys(body.ids))
    request = ask.PurgeDead(ids, body.actor or "", body.reason, body.confirm, body.dry_run)
    return _report(ids, await call.ask(request), "possible" if body.dry_run else "purged")


async def quarantine(call: Call) -> Quarantined:
    """Make a dead letter of an event of the log, or of a payload in the request."""
    body: Quarantine = call.body
    if body.payload is not None and body.payload_base64 is not None:
        raise InvalidInput("give payload or payload_base64, not both", field="payload")
    payload = body.payload_base64 if body.payload is None else body.payload.encode()
    letter = await call.ask(
        ask.Quarantine(body.id, body.consumer, body.topic, body.actor or "", body.reason, payload)
    )
    return Quarantined(1, 1, 0, letter.id)


def _report(ids: list[str], outcome: EngineOutcome, done: Done) -> Any:
    """One result for each record, then the counts; the status says whether any failed."""
    failures = {each["id"]: Failure(**each) for each in outcome.failures}
    results = []
    for id in ids:
        failure = failures.get(id)
        if failure is None:
            results.append(Result(id, done))
        else:
            results.append(Result(id, "failed", failure.code, failure.message))
    report = Outcome(
        outcome.requested, outcome.done, len(failures), results, list(failures.values())
    )
    return Answered(MULTI_STATUS, report) if failures else report


ENDPOINTS = (
    Endpoint("GET", PATH, "List dead letters, newest first.", list_letters, Page[DeadLetter],
             ask.ListDead, query=LetterQuery),
    Endpoint("POST", f"{PATH}/replay", "Give dead letters back to the consumer they died in.",
             replay_letters, Outcome, ask.ReplayDead, body=Replay, confirms="REPLAY", partial=True),
    Endpoint("POST", f"{PATH}/dead-letter", "Make a dead letter of a message by hand.",
             quarantine, Quarantined, ask.Quarantine, body=Quarantine),
    Endpoint("POST", f"{PATH}/purge", "Take dead letters out of the view; the log keeps its events.",
             purge_letters, Outcome, ask.PurgeDead, body=Purge, confirms="PURGE", partial=True),
    Endpoint("GET", f"{PATH}/{{id:path}}", "Show a dead letter with its payload.", inspect_letter,
             LetterView, ask.InspectDead),
)  # fmt: skip
