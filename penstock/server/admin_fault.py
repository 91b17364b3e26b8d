"""Errors over HTTP: one body for all of them, and the status that each code gets."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from penstock.wire.message import Fault

INTERNAL = 500

STATUSES = {
    "invalid": 400,
    "invalid.too-large": 413,
    "missing": 400,
    "notfound": 404,
    "delivery": 409,
    "refused": 409,
    "refused.confirmation": 428,
    "rejected": 429,
    "rejected.deferred": 503,
    "rejected.disk-full": 507,
    "rejected.retention-full": 507,
    "rejected.disk-refused": 503,
    "storage": 503,
    "access.denied": 403,
    "access.unauthenticated": 401,
    "timeout": 408,
    "closed": 503,
}
"""By code, or by its family; every other error is a 500."""

MEANINGS = {
    400: "The request breaks a written rule; the message names the field.",
    401: "A token is missing, expired or not from here.",
    403: "This identity may not do that.",
    404: "No such name or id; what belongs to another tenant does not exist for you.",
    408: "The body did not arrive in time.",
    409: "Understood, and not allowed in the state that things are in.",
    413: "The body is too large.",
    428: "The confirmation word is missing; nothing was changed.",
    429: "A limit was reached; Retry-After says when to try again.",
    431: "Path and headers are too large.",
    500: "A defect of the broker; its log has the trace.",
    503: "Not now: starting, draining, too busy, or the storage failed.",
    507: "The disk is full, or a write-once topic is at its size limit.",
}


class Detail(msgspec.Struct, frozen=True):
    """An error: `code` is the contract (docs/reference/errors.md), `message` is for people."""

    code: str
    message: str
    data: dict[str, Any]


class Problem(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: Detail


def status_of(code: str) -> int:
    """The status of an error code.

    >>> status_of("refused.confirmation"), status_of("notfound.topic"), status_of("error")
    (428, 404, 500)
    """
    return STATUSES.get(code) or STATUSES.get(code.partition(".")[0], INTERNAL)


def problem(fault: Fault) -> Problem:
    """An error as the body of an answer."""
    return Problem(Detail(fault.code, fault.message, fault.data))


def headers_for(fault: Fault) -> dict[str, str]:
    """What a client should know before it reads the body.

    >>> headers_for(Fault("rejected.throttled", "", {"retry_after_s": 0.2}))
    {'Retry-After': '1'}
    """
    headers = {}
    if fault.code == "access.unauthenticated":
        headers["WWW-Authenticate"] = 'Bearer realm="penstock"'
    retry_after_s = fault.data.get("retry_after_s")
    if isinstance(retry_after_s, int | float):
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    return headers
