"""Iceberg tables: pyiceberg on the driver commits the files of tasks, one snapshot per batch.

Workers write data files without loading this module or pyiceberg. `StableFileIO` makes pyiceberg sync
each metadata file when it is closed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from penstock.model.errors import AlreadyExists, CommitConflict, SchemaMismatch
from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.files import remove_others, sync
from penstock.pipelines.lakehouse.table import (
    BATCH_PROPERTY,
    QUERY_PROPERTY,
    Cut,
    Layout,
    WrittenFile,
    unknown_table,
)
from penstock.pipelines.lakehouse.warehouse import identifier

if TYPE_CHECKING:
    from pyiceberg.io import OutputStream
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table as PyTable
    from pyiceberg.table import Transaction

    from penstock.pipelines.lakehouse.warehouse import Warehouse


# -- tables ---------------------------------------------------------------------------------------

NAME_PROPERTY = "penstock.name"
# Twelve tries with waits that double to a second: about seven seconds against a writer that never
# pauses. A commit that loses for longer fails, and Spark repeats the batch.
COMMIT_TRIES = 12
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 1.0
TABLE_PROPERTIES = {
    # Each batch brings a manifest: merged they stay few. Old metadata files go after a hundred.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}
FIRST_PART = 1000  # where Iceberg begins to number partition fields
R = TypeVar("R")


class IcebergTable:
    """One table of an Iceberg catalogue."""

    widens = True

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        self.name = name
        self.warehouse = warehouse
        self.identifier = identifier(name)
        self._written_with: int | None = None

    # -- what is there ---------------------------------------------------------------------------

    def load(self) -> PyTable:
        """The table as the catalogue has it now."""
        found = self.find()
        if found is None:
            raise unknown_table(self.name, self.warehouse.uri)
        return found

    def find(self) -> PyTable | None:
        """The table, or None; a table that another name made under this identifier is an error."""
        if self.warehouse.is_empty():
            return None
        catalogue = self.warehouse.catalogue
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = catalogue.load_table(self.identifier)
        except NoSuchTableError:
            return None
        owner = table.properties.get(NAME_PROPERTY, self.name)
        if owner != self.name:
            raise AlreadyExists(
                f"{'.'.join(self.identifier)} holds {owner!r}, so it cannot hold {self.name!r} "
                "too; nothing was changed. Rename one of them",
                table=self.name,
            )
        return table

    def schema(self) -> pa.Schema | None:
        table = self.find()
        return None if table is None else columns_of(table)

    def files(self) -> list[str]:
        return sorted(plain(each.file_path) for each in data_files(self.load()))

    # -- columns ---------------------------------------------------------------------------------

    def create(self, schema: pa.Schema, cut: Cut) -> None:
        catalogue = self.warehouse.catalogue
        from pyiceberg.exceptions import TableAlreadyExistsError
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
        from pyiceberg.schema import assign_fresh_schema_ids

        catalogue.create_namespace_if_not_exists(self.identifier[:-1])
        # A catalogue with a warehouse of its own knows where tables go.
        own = "warehouse" in self.warehouse.properties
        location = None if own else f"{self.warehouse.uri}/{self.name}"
        try:
            columns = assign_fresh_schema_ids(catalogue._convert_schema_if_needed(schema))
            properties = {
                **TABLE_PROPERTIES,
                NAME_PROPERTY: self.name,
                "schema.name-mapping.default": columns.name_mapping.model_dump_json(),
            }
            # Not as a transaction: those know no namespaces in namespaces.
            catalogue.create_table(
                self.identifier, columns, location, _spec(columns, cut), properties=properties
            )
        except TableAlreadyExistsError:
            self.load()  # made by another writer meanwhile: theirs is as good
        except (TypeError, ValueError, UnsupportedPyArrowTypeException) as error:
            raise SchemaMismatch(
                f"Iceberg cannot hold the columns of {self.name!r}: {error}. Nothing was made; "
                "cast or leave out the column",
                table=self.name,
            ) from error

    def add(self, fields: Sequence[pa.Field]) -> None:
        self._change(lambda update: update.union_by_name(pa.schema(fields)))

    def widen(self, fields: Sequence[pa.Field]) -> None:
        def change(update: Any) -> None:
            for each in fields:
                update.update_column(each.name, _iceberg_type(each.type))

        self._change(change)

    def rename(self, names: dict[str, str]) -> None:
        def change(update: Any) -> None:
            for old, new in names.items():
                update.rename_column(old, new)

        self._change(change)

    def drop(self, names: Sequence[str]) -> None:
        def change(update: Any) -> None:
            for name in names:
                update.delete_column(name)

        self._change(change)

    def _change(self, change: Callable[[Any], Any]) -> None:
        from pyiceberg.exceptions import ValidationError

        def apply(_: PyTable, transaction: Transaction) -> None:
            with transaction.update_schema() as update:
                change(update)

        try:
            self.transact(apply)
        except (ValueError, TypeError, ValidationError) as error:
            raise SchemaMismatch(
                f"the columns of {self.name!r} cannot change so: {error}. The table stays as it was",
                table=self.name,
            ) from error

    # -- batches ---------------------------------------------------------------------------------

    def layout(self, query: str, batch: int, attempt: str) -> Layout:
        table = self.load()
        self._written_with = table.schema().schema_id
        folder = f"{self._batch_folder(table, query, batch)}/{attempt}"
        schema = columns_of(table)
        return Layout(folder, schema, cut_of(table))

    def has_batch(self, query: str, batch: int) -> bool:
        table = self.find()
        return table is not None and _last_batch(table, query) >= batch

    def commit(self, files: Sequence[WrittenFile], query: str, batch: int) -> bool:
        def apply(table: PyTable, transaction: Transaction) -> bool:
            if _last_batch(table, query) >= batch:
                return False
            self._check_columns(table)
            marks = {QUERY_PROPERTY: query, BATCH_PROPERTY: str(batch)}
            with transaction.update_snapshot(snapshot_properties=marks).merge_append() as append:
                for each in files:
                    append.append_data_file(data_file(table, each.path))
            # Snapshots expire and take their properties with them; the table's own stay.
            transaction.set_properties({f"{BATCH_PROPERTY}.{query}": str(batch)})
            failpoint("lakehouse.committing")
            return True

        return self.transact(apply)

    def _check_columns(self, table: PyTable) -> None:
        if self._written_with not in (None, table.schema().schema_id):
            raise CommitConflict(
                f"the columns of {self.name!r} changed while a batch was being written; nothing of "
                "it was added. Run the batch again: it will be written for the new columns",
                table=self.name,
            )

    def transact(self, apply: Callable[[PyTable, Transaction], R]) -> R:
        """Apply a change to the newest state and commit; start over when another writer was faster.

        `apply` sees the state its commit will be checked against. pyiceberg's own retries would
        repeat a change on top of a state that was not checked, and add a batch twice.
        """
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
        from sqlalchemy.exc import OperationalError

        last: Exception | None = None
        for turn in range(COMMIT_TRIES):
            if turn:
                wait = min(FIRST_WAIT_S * 2**turn, LONGEST_WAIT_S)
                time.sleep(wait * (0.5 + random.random() / 2))
            table = self.load()
            table.metadata.properties["commit.retry.num-retries"] = "0"  # of this copy only
            try:
                with table.transaction() as transaction:
                    return apply(table, transaction)
            except (CommitFailedException, CommitStateUnknownException, OperationalError) as error:
                last = error
        raise CommitConflict(
            f"{COMMIT_TRIES} commits to {self.name!r} lost against other writers: {last}. Nothing "
            "was added; run it again when they are done",
            table=self.name,
        ) from last

    def clean(self, query: str, batch: int) -> int:
        table = self.load()
        listed = [each.file_path for each in data_files(table)]
        folder = self._batch_folder(table, query, batch)
        return remove_others(folder, listed, self.warehouse.properties)

    @staticmethod
    def _batch_folder(table: PyTable, query: str, batch: int) -> str:
        return f"{table.location()}/data/{query}/{batch}"


def data_files(table: PyTable) -> list[Any]:
    """The data files of the current snapshot, as pyiceberg's `DataFile`."""
    snapshot = table.current_snapshot()
    if snapshot is None:
        return []
    return [
        entry.data_file
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    ]


def data_file(table: PyTable, path: str) -> Any:
    """A Parquet file as the table's manifests describe it; its partition comes from its footer."""
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    return parquet_file_to_data_file(table.io, table.metadata, path)


def plain(uri: str) -> str:
    """A local file's path, any other file's URI."""
    return uri.removeprefix("file://")


def columns_of(table: PyTable) -> pa.Schema:
    """Columns with their numbers: files that carry them survive renaming."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema(), include_field_ids=True)
    return pa.schema([_small(field) for field in schema])


def _small(field: pa.Field) -> pa.Field:
    """The same column in the types that Spark hands over: a batch needs no 64-bit offsets."""
    kind = field.type
    if pa.types.is_large_string(kind):
        kind = pa.string()
    elif pa.types.is_large_binary(kind):
        kind = pa.binary()
    elif pa.types.is_large_list(kind) or pa.types.is_list(kind):
        kind = pa.list_(_small(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(_small(kind.key_field), _small(kind.item_field))
    elif pa.types.is_struct(kind):
        kind = pa.struct([_small(each) for each in kind])
    return field.with_type(kind)


def _spec(columns: Schema, cut: Cut) -> PartitionSpec:
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.transforms import DayTransform, IdentityTransform

    parts: list[tuple[str, Any, str]] = []
    if cut.tenant:
        parts.append((cut.tenant, IdentityTransform(), "tenant"))
    if cut.day:
        plain_day = cut.day == "day"
        name = "day" if plain_day else f"{cut.day}_day"
        parts.append((cut.day, IdentityTransform() if plain_day else DayTransform(), name))
    return PartitionSpec(
        *(
            PartitionField(
                columns.find_field(column).field_id, FIRST_PART + number, transform, name
            )
            for number, (column, transform, name) in enumerate(parts)
        )
    )


def cut_of(table: PyTable) -> Cut:
    """Which columns cut the table, by the names of its partition fields."""
    names = {
        field.name: table.schema().find_column_name(field.source_id)
        for field in table.spec().fields
    }
    day = next((column for name, column in names.items() if name.endswith("day")), None)
    return Cut(names.get("tenant"), day)


def _last_batch(table: PyTable, query: str) -> int:
    return int(table.properties.get(f"{BATCH_PROPERTY}.{query}", -1))


def _iceberg_type(kind: pa.DataType) -> Any:
    from pyiceberg.types import DecimalType, DoubleType, LongType

    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    return LongType() if pa.types.is_integer(kind) else DoubleType()


# -- durable metadata -----------------------------------------------------------------------------


class StableFileIO(PyArrowFileIO):
    """What pyiceberg writes itself: metadata, lists and manifests."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to write."""
        made = super().new_output(location)
        if made._filesystem.type_name != "local":
            return made
        return _SyncedFile(location, made._path, made._filesystem, made._buffer_size)


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        return _SyncedStream(super().create(overwrite), self._path)


class _SyncedStream:
    """A stream whose end is a sync."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path
        self.write = stream.write
        self.tell = stream.tell

    def close(self) -> None:
        if not self._stream.closed:
            self._stream.close()
            sync(self._path)

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def __enter__(self) -> _SyncedStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
