"""Faults: errors of the tree on their way through a wire, code, words and data kept."""

from __future__ import annotations

import math
from typing import Any

from penstock.model import errors
from penstock.model.errors import PenstockError
from penstock.wire.message import Fault

_BY_CODE: dict[str, type[PenstockError]] = {
    getattr(errors, name).code: getattr(errors, name) for name in errors.__all__
}
MAX_TEXT = 4_096  # characters of a message; an error is no way to send a payload back


def to_fault(error: BaseException) -> Fault:
    """An error as a message; what is not of the tree becomes the root without its inner life.

    >>> to_fault(errors.UnknownTopic("no topic", topic="orders"))
    Fault(code='notfound.topic', message='no topic', data={'topic': 'orders'})
    """
    if not isinstance(error, PenstockError):
        return Fault("error", f"the broker failed: {type(error).__name__}; its log says more")
    data = {name: _plain(value) for name, value in error.data.items()}
    return Fault(error.code, error.message[:MAX_TEXT], data)


def to_error(fault: Fault) -> PenstockError:
    """The error a fault stands for; an unknown code becomes its family or the root.

    >>> type(to_error(Fault("notfound.brandnew", "?"))).__name__
    'NotFound'
    """
    family = fault.code.partition(".")[0]
    kind = _BY_CODE.get(fault.code) or _BY_CODE.get(family) or PenstockError
    # A name that the error's own constructor uses cannot be data; a peer may send anything.
    data = {name: value for name, value in fault.data.items() if name not in ("message", "self")}
    return kind(fault.message, **data)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return value[:MAX_TEXT]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value[:100]]
    return str(value)[:MAX_TEXT]
