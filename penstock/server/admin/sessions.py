"""Sessions and tenants over HTTP: connected clients, and the limits and use of each tenant."""

from __future__ import annotations

from penstock.engines import requests as ask
from penstock.engines.requests import SessionInfo, TenantInfo
from penstock.server.admin.endpoint import Call, Endpoint, Page, Paging, page


async def list_sessions(call: Call) -> Page[SessionInfo]:
    """The sessions of the caller's tenant; all sessions for an admin."""
    return page(await call.ask(ask.ListSessions()), call.query.limit, call.query.offset)


async def list_tenants(call: Call) -> Page[TenantInfo]:
    """The caller's own tenant; all tenants for an admin."""
    return page(await call.ask(ask.ListTenants()), call.query.limit, call.query.offset)


ENDPOINTS = (
    Endpoint("GET", "/api/admin/sessions", "List the sessions of clients.", list_sessions,
             Page[SessionInfo], ask.ListSessions, query=Paging),
    Endpoint("GET", "/api/admin/tenants", "List tenants, their limits in force and their use.",
             list_tenants, Page[TenantInfo], ask.ListTenants, query=Paging),
)  # fmt: skip
