"""What every group of settings is made of: units, ranges, and a check when it is made."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from penstock.model.errors import InvalidSettings
from penstock.model.parameter import shown
from penstock.model.quantity import parse, unit_of
from penstock.model.topic import TENANT_NAME

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
DAY_S = 86_400

# Upper ends are there to catch a slipped unit (bytes for MiB, ms for s), not to ration anyone.
MAX_SIZE_BYTES = 1024 * TIB
MAX_MEMORY_BYTES = 64 * GIB  # what one buffer of one process may sensibly hold
MAX_SPAN_S = 36_525 * DAY_S  # a hundred years
MAX_COUNT = 1_000_000_000

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]
Memory = Annotated[int, Meta(ge=1, le=MAX_MEMORY_BYTES)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Span = Annotated[float, Meta(ge=0, le=MAX_SPAN_S)]
DelayMs = Annotated[int, Meta(ge=0, le=7 * DAY_S * 1000)]
Rate = Annotated[float, Meta(gt=0, le=MAX_COUNT)]
ByteRate = Annotated[float, Meta(gt=0, le=TIB)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
TenantName = Annotated[str, Meta(pattern=TENANT_NAME)]


def about(text: str) -> Meta:
    """Attach the sentence that the reference prints for a field."""
    return Meta(description=text)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all groups share: a value outside its range is refused when the group is made.

    >>> class Tap(Group, frozen=True):
    ...     litres: Annotated[int, Meta(ge=1)] = 1
    >>> Tap(litres=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: Tap.litres = 0: ...
    """

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            value = getattr(self, name)
            try:
                checked = msgspec.convert(in_unit(value, unit_of(name), kind), kind)
            except ValueError as error:
                raise InvalidSettings(
                    f"{type(self).__name__}.{name} = {shown(value)}: {error}. "
                    "`penstock docs settings` lists what is allowed",
                    key=name,
                    value=shown(value),
                ) from None
            # A list becomes a tuple and a dict a copy: nobody changes a frozen group from outside.
            msgspec.structs.force_setattr(self, name, checked)


def in_unit(value: Any, unit: str, kind: Any) -> Any:
    """A value of a field as a number of the field's unit, from text or a timedelta; "none" is None.

    >>> in_unit("5m", "s", Span), in_unit(timedelta(seconds=1), "ms", DelayMs), in_unit(7, "s", Span)
    (300, 1000, 7)
    """
    shape = _shape(kind)
    if shape == "list" and isinstance(value, str):
        value = value.strip("[] ").split(",")
    if isinstance(value, list | tuple):
        return [_amount(item, unit) for item in value]
    if shape == "optional" and isinstance(value, str) and value.strip().lower() == "none":
        return None
    return _amount(value, unit)


def _amount(value: Any, unit: str) -> Any:
    return parse(value, unit) if unit and isinstance(value, str | timedelta) else value


@cache
def _shape(kind: Any) -> Literal["optional", "list", "single"]:
    info = inspect.type_info(kind)
    if isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType) and info.includes_none:
        return "optional"
    return "list" if isinstance(info, inspect.VarTupleType) else "single"


@cache
def field_types(group: type[msgspec.Struct]) -> dict[str, Any]:
    """The full type of each field of a group, ranges included."""
    return {field.name: field.type for field in msgspec.structs.fields(group)}
