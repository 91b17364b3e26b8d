"""What a table of results is to its writer, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import pyarrow as pa

from penstock.model.errors import Unsupported
from penstock.model.table_errors import UnknownTable

REJECTED_SUFFIX = "__rejected"
QUERY_PROPERTY = "penstock.query"
BATCH_PROPERTY = "penstock.batch"
DAYS = ("append_time", "event_time")  # timestamps whose day a table is cut by, the first there is


class WrittenFile(msgspec.Struct, frozen=True):
    """A Parquet file that a task wrote and nobody has committed yet."""

    path: str
    rows: int
    size_bytes: int
    tenant: str | None = None
    day: int | None = None
    rejected: bool = False


@dataclass(frozen=True)
class Cut:
    """Which columns cut a table into partitions: a tenant, and a date or the day of a timestamp.

    >>> stamp = pa.timestamp("us", tz="UTC")
    >>> Cut.of(pa.schema([("tenant", pa.string()), ("event_time", stamp)]))
    Cut(tenant='tenant', day='event_time')
    """

    tenant: str | None = None
    day: str | None = None

    @classmethod
    def of(cls, schema: pa.Schema) -> Cut:
        """By the columns `tenant`, and `day`, `append_time` or `event_time`, where they exist."""

        def has(name: str, fits: object) -> bool:
            return name in schema.names and bool(fits(schema.field(name).type))  # type: ignore[operator]

        tenant = "tenant" if has("tenant", pa.types.is_string) else None
        if has("day", pa.types.is_date32):
            return cls(tenant, "day")
        return cls(tenant, next((n for n in DAYS if has(n, pa.types.is_timestamp)), None))


@dataclass(frozen=True)
class Layout:
    """Where and how tasks write the files of one attempt at one batch."""

    folder: str
    schema: pa.Schema
    cut: Cut
    hive: bool = False
    """Files lie in folders `tenant=…/day=…`."""
    prefix: str = ""
    """What file names begin with."""


class Table(Protocol):
    """A table that takes the files of a batch once, whoever repeats the batch."""

    name: str
    widens: bool
    """Whether its columns can take a wider type; where not, rows that need one are dead letters."""

    def schema(self) -> pa.Schema | None:
        """Its columns, or None when there is no such table."""
        ...

    def create(self, schema: pa.Schema, cut: Cut) -> None:
        """Make it, unless somebody else just did."""
        ...

    def add(self, fields: Sequence[pa.Field]) -> None:
        """Add columns, null in all rows so far."""
        ...

    def widen(self, fields: Sequence[pa.Field]) -> None:
        """Give columns a wider type of the same kind."""
        ...

    def rename(self, names: dict[str, str]) -> None:
        """Give columns other names."""
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Take columns away."""
        ...

    def layout(self, query: str, batch: int, attempt: str) -> Layout:
        """Where the files of an attempt go."""
        ...

    def has_batch(self, query: str, batch: int) -> bool:
        """Whether this or a later batch of the query is in."""
        ...

    def commit(self, files: Sequence[WrittenFile], query: str, batch: int) -> bool:
        """Add all files at once, or nothing and False when the batch is in already."""
        ...

    def clean(self, query: str, batch: int) -> int:
        """Remove the files of this batch that are not in the table; returns how many."""
        ...

    def files(self) -> list[str]:
        """The data files the table consists of now."""
        ...


def total_rows(files: Iterable[WrittenFile]) -> int:
    """How many rows files hold together."""
    return sum(each.rows for each in files)


def unknown_table(name: str, uri: str) -> UnknownTable:
    """The error for a table that nobody has written to."""
    return UnknownTable(
        f"there is no table {name!r} in {uri}; nothing was changed. A table is made by the first "
        "rows written to it",
        table=name,
    )


class ColumnsByName:
    """What a format cannot do whose files know columns by their names."""

    name: str
    kind: str
    """What such a table is called."""
    widens = False

    def widen(self, fields: Sequence[pa.Field]) -> None:
        """Refused; a writer sends rows that need a wider type to the dead letters."""
        raise self._unsupported("widened", fields[0].name)

    def rename(self, names: dict[str, str]) -> None:
        """Refused."""
        raise self._unsupported("renamed", next(iter(names)))

    def drop(self, names: Sequence[str]) -> None:
        """Refused."""
        raise self._unsupported("dropped", names[0])

    def _unsupported(self, what: str, column: str) -> Unsupported:
        return Unsupported(
            f"columns of a {self.kind} are not {what}, for its files know them by name; "
            f"{self.name!r} keeps {column!r}. Use an Iceberg warehouse, or write another table",
            table=self.name,
        )
