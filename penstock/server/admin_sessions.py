"""Sessions and tenants over HTTP: who is connected, and what each tenant may use and uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.model.event import Identity
from penstock.model.role import ADMIN, READER
from penstock.server.admin_endpoint import Call, Endpoint, Page, Paging, page

Row = dict[str, Any]


async def list_sessions(call: Call) -> Page[Row]:
    """Those of the caller's tenant; all for an admin."""
    rows = _own(call.identity, call.surface.sessions())
    return page(rows, call.query.limit, call.query.offset)


async def list_tenants(call: Call) -> Page[Row]:
    """The caller's own; all for an admin."""
    rows = _own(call.identity, call.surface.tenants())
    return page(rows, call.query.limit, call.query.offset)


def _own(identity: Identity, rows: Sequence[msgspec.Struct]) -> list[Row]:
    found: list[Row] = [msgspec.to_builtins(row) for row in rows]
    if ADMIN in identity.roles:
        return found
    return [row for row in found if row.get("tenant") == identity.tenant]


ENDPOINTS = (
    Endpoint("GET", "/api/admin/sessions", "List the sessions of clients.", list_sessions,
             Page[Row], role=READER, query=Paging),
    Endpoint("GET", "/api/admin/tenants", "List tenants, their limits in force and their use.",
             list_tenants, Page[Row], role=READER, query=Paging),
)  # fmt: skip
