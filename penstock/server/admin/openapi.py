"""The OpenAPI document of the admin API, built from the table of endpoints and their types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec

from penstock.engines.requests import QueryAudit, VerifyAudit
from penstock.server.admin.endpoint import Endpoint
from penstock.server.admin.request import MEANINGS, Problem

OPENAPI = "3.1.0"
API_VERSION = "1"  # raised when an old client would be misunderstood
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"adminToken": []}]
REFERENCE = "#/components/schemas/{name}"
_CONVERTER = re.compile(r"\{(\w+)(?::\w+)?\}")
Schemas = dict[Any, dict[str, Any]]


class Other(NamedTuple):
    """A route outside the tables of endpoints: a page, or one that another module added."""

    method: str
    path: str
    summary: str
    role: str


def plain_path(path: str) -> str:
    """A path in the notation of OpenAPI.

    >>> plain_path("/api/admin/dlq/{id:path}")
    '/api/admin/dlq/{id}'
    """
    return _CONVERTER.sub(r"{\1}", path)


def document(endpoints: Sequence[Endpoint], others: Iterable[Other]) -> dict[str, Any]:
    """The OpenAPI document of all endpoints and other routes."""
    types: list[Any] = [Problem]
    for each in endpoints:
        types += [kind for kind in (each.answer, each.body) if kind is not None]
    references, components = msgspec.json.schema_components(types, ref_template=REFERENCE)
    schemas: Schemas = dict(zip(types, references, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        paths.setdefault(plain_path(endpoint.path), {})[endpoint.method.lower()] = operation
    for other in others:
        operation = _other(other, schemas)
        paths.setdefault(plain_path(other.path), {})[other.method.lower()] = operation
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "Penstock admin API",
            "version": API_VERSION,
            "description": "The operations of the command line, with the same rules. "
            "`penstock docs admin-api` has examples.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
                "adminToken": {"type": "apiKey", "in": "header", "name": "X-Admin-Token"},
            },
        },
    }


def _operation(endpoint: Endpoint, schemas: Schemas) -> dict[str, Any]:
    described = _described(endpoint.needs)
    if endpoint.confirms:
        described += f" Needs confirm={endpoint.confirms}."
    responses: dict[str, Any] = {"200": _json("Done.", schemas[endpoint.answer])}
    if endpoint.partial:
        responses["207"] = _json("Some records failed; see failures.", schemas[endpoint.answer])
    for status in _statuses(endpoint):
        kind = schemas[endpoint.answer] if not endpoint.needs else schemas[Problem]
        responses[str(status)] = _json(MEANINGS[status], kind)
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "description": described,
        "tags": [_tag(endpoint.path)],
        "parameters": _parameters(endpoint),
        "responses": responses,
    }
    if endpoint.needs:
        operation["security"] = SECURITY
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[endpoint.body]}},
        }
    return operation


def _statuses(endpoint: Endpoint) -> list[int]:
    """The errors an endpoint can answer with."""
    if not endpoint.needs:
        return [503] if endpoint.path == "/ready" else []
    found = {400, 401, 403, 404, 431, 500, 503}
    if endpoint.method != "GET":
        found |= {409, 429}
    if endpoint.method != "GET" or endpoint.asks in (QueryAudit, VerifyAudit):
        found.add(507)  # the audit trail is shown whole or not at all
    if endpoint.body is not None:
        found |= {408, 413}
    if endpoint.confirms:
        found.add(428)
    return sorted(found)


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": "Percent-encode it; slashes may stay.",
        }
        for name in _CONVERTER.findall(endpoint.path)
    ]
    if endpoint.query is not None:
        schema = msgspec.json.schema(endpoint.query)["$defs"][endpoint.query.__name__]
        for name, field in schema["properties"].items():
            parameters.append(
                {
                    "name": name,
                    "in": "query",
                    "required": name in schema.get("required", ()),
                    "schema": field,
                    "description": field.get("description", ""),
                }
            )
    return parameters


def _other(other: Other, schemas: Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": other.summary,
        "description": _described(other.role),
        "tags": [_tag(other.path)],
        "responses": {"200": {"description": "Done."}},
    }
    if other.role:
        operation["security"] = SECURITY
        for code in (401, 403):
            operation["responses"][str(code)] = _json(MEANINGS[code], schemas[Problem])
    return operation


def _described(role: str) -> str:
    return f"Needs role {role}." if role else "Open to everybody."


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _operation_id(endpoint: Endpoint) -> str:
    words = re.findall(r"\w+", plain_path(endpoint.path).removeprefix("/api/admin"))
    return "_".join([endpoint.method.lower(), *words])


def _tag(path: str) -> str:
    return path.removeprefix("/api/admin").strip("/").partition("/")[0]


def as_html(found: dict[str, Any]) -> str:
    """The document as an HTML page, without scripts and without other hosts."""
    rows = "".join(
        f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation['summary'])} {escape(operation['description'])}</td></tr>"
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
    )
    title = escape(found["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<h1>{title}</h1><p>The whole of it: <a href="/openapi.json">openapi.json</a></p>'
        f"<table>{rows}</table></html>"
    )
