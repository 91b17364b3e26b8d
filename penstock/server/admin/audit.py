"""The audit trail over HTTP: who did what, and whether the record of it is complete and unchanged."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.core.audit import State, Verdict
from penstock.engines import requests as ask
from penstock.server.admin.endpoint import Call, Endpoint, Page, Paging, page

PATH = "/api/admin/audit"

When = Annotated[
    str | None,
    Meta(description="ISO 8601, in UTC without a zone; @1767225600; or how long ago, such as 2h."),
]


class AuditQuery(Paging, frozen=True):
    """Which records: those that match all that is given."""

    message: Annotated[str | None, Meta(description="About this message or name.")] = None
    actor: str | None = None
    operation: Annotated[str | None, Meta(description="Such as dlq.replay.")] = None
    since: When = None
    until: When = None


class AuditEvent(msgspec.Struct, frozen=True):
    """One record of the audit chain; docs/reference/audit.md tells how to verify it."""

    sequence: int
    batch: int
    ref: int
    at_us: int
    actor: str
    operation: str
    targets: list[str]
    reason: str
    prior: State
    result: State
    prev_hash: str
    hash: str


async def list_events(call: Call) -> Page[AuditEvent]:
    """The matching records, oldest first."""
    wanted: AuditQuery = call.query
    found = await call.ask(
        ask.QueryAudit(
            wanted.message, wanted.actor, call.moment_us("since", wanted.since),
            call.moment_us("until", wanted.until), wanted.operation,
        )
    )  # fmt: skip
    records = page(found, wanted.limit, wanted.offset)
    rows = [msgspec.convert(each, AuditEvent, from_attributes=True) for each in records.items]
    return Page(rows, records.more)


async def verify(call: Call) -> Verdict:
    """Verify the chain; the answer names the first broken link, if there is one."""
    verdict: Verdict = await call.ask(ask.VerifyAudit())
    return verdict


ENDPOINTS = (
    Endpoint("GET", f"{PATH}/events", "List what operators did, oldest first.", list_events,
             Page[AuditEvent], ask.QueryAudit, query=AuditQuery),
    Endpoint("GET", f"{PATH}/verify", "Check the whole audit chain.", verify, Verdict,
             ask.VerifyAudit),
)  # fmt: skip
