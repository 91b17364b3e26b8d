"""Unreadable entries: what recovery says of them, and which of them were set aside.

An entry that passes its checksum and cannot be decoded was written by a release that took a wrong
value. Recovery refuses it with its place. `penstock doctor --repair` writes it down in
`journal/set-aside.json`; from then on it is passed over, or the entry that stands in for it is read.
The journal itself is never changed.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from penstock.core.entry import AnyEntry, decode_entries, decode_entry, encode_entries
from penstock.log.disk import Disk, read_file, write_file
from penstock.model.errors import Corrupted, FormatTooNew, PenstockError, UnreadableEntry

SET_ASIDE = "journal/set-aside.json"
FORMAT = 1
WHOLE = -1
"""The number of what is no list of entries: all of it is one."""

Place = tuple[int, int, int]
_FAULTS = (msgspec.MsgspecError, PenstockError, ValueError, TypeError, OverflowError)
_KINDS = {kind.__struct_config__.tag: kind for kind in get_args(AnyEntry)}


class Unreadable(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry that cannot be read, and what stands in for it when it is set aside."""

    file: str
    offset: int
    """Of its frame in the file."""
    position: int
    """Of its frame in the journal."""
    inner: int
    """Where its list of entries begins in the frame."""
    number: int
    """Which of the list it is."""
    kind: str
    name: str
    why: str
    entry: str
    """Its bytes, in base64."""
    instead: str = ""
    """The entry that is read in its place, in base64; empty when it is passed over."""
    lost: tuple[str, ...] = ()
    """What `instead` lacks of it: values that have no meaning, and take their defaults."""

    @property
    def place(self) -> Place:
        """What it is found by."""
        return self.position, self.inner, self.number

    def named(self) -> str:
        """The entry in a few words."""
        return f"{self.kind} {self.name!r}" if self.name else self.kind

    def plan(self) -> str:
        """What a repair does with it, in words."""
        if not self.instead:
            return "is set aside"
        if not self.lost:
            return "is read with the same values in their right types"
        return f"is read with the default of {', '.join(self.lost)}"

    def error(self) -> UnreadableEntry:
        """What recovery says."""
        newer = "" if self.kind in _KINDS else "If a newer Penstock wrote it, use that one. "
        return UnreadableEntry(
            f"{self.file}: the entry at byte {self.offset} ({self.named()}) cannot be read: "
            f"{self.why}. Nothing was changed. {newer}`penstock doctor FOLDER --repair` shows what "
            "can be done about it, and does it when that is confirmed: the entry is kept, and all "
            "else stays as it is",
            path=self.file,
            offset=self.offset,
            position=self.position,
            kind=self.kind,
        )


class _File(msgspec.Struct, frozen=True):
    format: int
    entries: list[Unreadable]


def load_set_aside(disk: Disk) -> list[Unreadable]:
    """What was set aside in a folder."""
    if not disk.exists(SET_ASIDE):
        return []
    try:
        found = msgspec.json.decode(read_file(disk, SET_ASIDE), type=_File)
    except msgspec.MsgspecError as error:
        raise Corrupted(
            f"{SET_ASIDE} cannot be read ({error}); nothing was changed. Restore it from a copy, or "
            "move it away and run `penstock doctor --repair` again",
            path=SET_ASIDE,
        ) from None
    if found.format > FORMAT:
        raise FormatTooNew(
            f"{SET_ASIDE} has format {found.format}, this Penstock reads up to {FORMAT}. Upgrade "
            "Penstock; nothing was changed",
            version=found.format,
        )
    return found.entries


def save_set_aside(disk: Disk, entries: list[Unreadable]) -> None:
    """Write down what is set aside: all of it or, after a crash, what was there before."""
    text = msgspec.json.format(msgspec.json.encode(_File(FORMAT, entries)), indent=1)
    write_file(disk, SET_ASIDE, [text, b"\n"])


class EntryReader:
    """Reads control entries, without those that were set aside; refuses what it cannot read."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.found: list[Unreadable] | None = None
        """Where unreadable entries are put instead of refusing them, for a repair."""
        self._disk = disk
        self._aside: dict[Place, Unreadable] = {}
        self._positions: set[int] = set()
        if disk is not None:
            for each in load_set_aside(disk):
                self._put_aside(each)

    def _put_aside(self, each: Unreadable) -> None:
        self._aside[each.place] = each
        self._positions.add(each.position)

    def read(self, body: memoryview, position: int, inner: int) -> Iterable[tuple[int, AnyEntry]]:
        """The entries of one control frame, or of one part of a group frame, with their numbers."""
        if position not in self._positions:
            try:
                return enumerate(decode_entries(body))
            except _FAULTS:
                pass  # each of them is looked at by itself
        return self._one_by_one(body, position, inner)

    def _one_by_one(
        self, body: memoryview, position: int, inner: int
    ) -> Iterator[tuple[int, AnyEntry]]:
        try:
            each_raw = msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        except _FAULTS as error:
            yield from self._resolve((position, inner, WHOLE), bytes(body), error)
            return
        for number, raw in enumerate(each_raw):
            place = (position, inner, number)
            if place in self._aside:
                yield from self._resolve(place, bytes(raw), None)
                continue
            try:
                entry = decode_entry(raw)
            except _FAULTS as error:
                yield from self._resolve(place, bytes(raw), error)
            else:
                yield number, entry

    def refuse(self, entry: AnyEntry, place: Place, error: Exception) -> None:
        """An entry that could be decoded cannot be applied: it is as good as unreadable."""
        data = encode_entries([entry])[1:]  # behind the head of a list of one
        unreadable = self._unreadable(place, data, error, mend=False)
        if self.found is None:
            raise unreadable.error() from error
        self.found.append(unreadable)

    def _resolve(
        self, place: Place, data: bytes, error: Exception | None
    ) -> Iterator[tuple[int, AnyEntry]]:
        aside = self._aside.get(place)
        if aside is None:
            assert error is not None
            aside = self._unreadable(place, data, error, mend=True)
            if self.found is None:
                raise aside.error() from None
            self.found.append(aside)
        if aside.instead:
            yield place[2], decode_entry(base64.b64decode(aside.instead))

    def _unreadable(self, place: Place, data: bytes, error: Exception, *, mend: bool) -> Unreadable:
        position, inner, number = place
        file, base = self._file_of(position)
        kind, name = _named(data) if number != WHOLE else ("no list of entries", "")
        instead, lost = mended(data) if mend and number != WHOLE else (b"", ())
        why = error.message if isinstance(error, PenstockError) else str(error) or repr(error)
        return Unreadable(
            file, position - base, position, inner, number, kind, name, why,
            base64.b64encode(data).decode(), base64.b64encode(instead).decode(), lost,
        )  # fmt: skip

    def _file_of(self, position: int) -> tuple[str, int]:
        from penstock.log.journal import file_bases, file_name

        bases = file_bases(self._disk) if self._disk is not None else []
        base = max((base for base in bases if base <= position), default=0)
        return file_name(base), base


def _named(data: bytes) -> tuple[str, str]:
    """What kind of entry some bytes were meant to be, and what it is about."""
    try:
        values = msgspec.msgpack.decode(data)
    except _FAULTS:
        return "unknown", ""
    if not isinstance(values, list) or not values:
        return "unknown", ""
    name = values[1] if len(values) > 1 and isinstance(values[1], str) else ""
    return str(values[0]), name


def mended(data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The entry that was meant, and which of its values take their defaults; empty when none was.

    A number that is whole may be written as a float; whatever else is of the wrong type is lost.

    >>> from penstock.core.entry import TopicPut, TopicSpec
    >>> data, lost = mended(msgspec.msgpack.encode(TopicPut("t", TopicSpec(2.0, "7d"))))
    >>> decode_entry(data).spec.partitions, lost
    (2, ('retention_age_s',))
    """
    try:
        tag, *values = msgspec.msgpack.decode(data)
        kind = _KINDS[tag]
        lost: list[str] = []
        fields = msgspec.structs.fields(kind)
        fit = [
            _fitted(value, field, field.name, lost)
            for field, value in zip(fields, values, strict=False)
        ]
        entry = kind(*fit)
        data = encode_entries([entry])[1:]
        decode_entry(data)
    except (*_FAULTS, KeyError):
        return b"", ()
    return data, tuple(name.removeprefix("spec.") for name in lost)


def _fitted(value: Any, field: msgspec.structs.FieldInfo, path: str, lost: list[str]) -> Any:
    """A value as its field wants it, or the field's default."""
    try:
        return msgspec.convert(value, field.type, strict=False)
    except _FAULTS:
        inner = field.type
        if (
            isinstance(value, dict)
            and isinstance(inner, type)
            and issubclass(inner, msgspec.Struct)
        ):
            return inner(
                **{
                    each.name: _fitted(value[each.encode_name], each, f"{path}.{each.name}", lost)
                    for each in msgspec.structs.fields(inner)
                    if each.encode_name in value
                }
            )
        if field.default is not msgspec.NODEFAULT:
            lost.append(path)
            return field.default
        if field.default_factory is not msgspec.NODEFAULT:
            lost.append(path)
            return field.default_factory()
        raise
