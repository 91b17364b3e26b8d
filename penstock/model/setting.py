"""What every group of settings is made of: units, ranges, and a check when it is made."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.model.errors import InvalidSettings
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
                checked = msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise InvalidSettings(
                    f"{type(self).__name__}.{name} = {value!r}: {error}. "
                    "`penstock docs settings` lists what is allowed",
                    key=name,
                    value=value,
                ) from None
            # A list becomes a tuple and a dict a copy: nobody changes a frozen group from outside.
            msgspec.structs.force_setattr(self, name, checked)


@cache
def field_types(group: type[msgspec.Struct]) -> dict[str, Any]:
    """The full type of each field of a group, ranges included."""
    return {field.name: field.type for field in msgspec.structs.fields(group)}
