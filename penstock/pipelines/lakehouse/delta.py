"""Delta tables: deltalake on the driver commits the files of tasks, with the batch as a transaction."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa

from penstock.model.errors import CommitConflict, SchemaMismatch
from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.files import remove_others, sync
from penstock.pipelines.lakehouse.iceberg import COMMIT_TRIES, FIRST_WAIT_S, LONGEST_WAIT_S, plain
from penstock.pipelines.lakehouse.table import (
    BATCH_PROPERTY,
    QUERY_PROPERTY,
    ColumnsByName,
    Cut,
    Layout,
    WrittenFile,
    unknown_table,
)
from penstock.pipelines.lakehouse.warehouse import missing_extra

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from penstock.pipelines.lakehouse.warehouse import Warehouse

DAY_PROPERTY = "penstock.day"  # the timestamp whose day the partition column `day` holds


class DeltaLakeTable(ColumnsByName):
    """One Delta table: a folder of the warehouse, with its log in it."""

    kind = "Delta table"

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        self.name = name
        self.warehouse = warehouse
        self.uri = f"{warehouse.uri}/{name}"
        own = ("s3.", "gcs.", "adls.")  # those are pyiceberg's, for the files that tasks write
        self._options = {k: v for k, v in warehouse.properties.items() if not k.startswith(own)}

    # -- what is there ---------------------------------------------------------------------------

    def find(self) -> DeltaTable | None:
        """The table as its log has it now, or None."""
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise missing_extra("Delta tables", "deltalake") from None
        if not DeltaTable.is_deltatable(plain(self.uri), self._options):
            return None
        return DeltaTable(plain(self.uri), storage_options=self._options)

    def load(self) -> DeltaTable:
        """The table, or UnknownTable."""
        found = self.find()
        if found is None:
            raise unknown_table(self.name, self.warehouse.uri)
        return found

    def schema(self) -> pa.Schema | None:
        found = self.find()
        return None if found is None else _columns(found)

    def files(self) -> list[str]:
        return sorted(plain(unquote(each)) for each in self.load().file_uris())

    # -- columns ---------------------------------------------------------------------------------

    def create(self, schema: pa.Schema, cut: Cut) -> None:
        try:
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError
        except ImportError:
            raise missing_extra("Delta tables", "deltalake") from None
        parts = [name for name in (cut.tenant, "day" if cut.day else None) if name]
        if cut.day and cut.day != "day":
            schema = schema.append(pa.field("day", pa.date32()))
        try:
            DeltaTable.create(
                plain(self.uri), schema, mode="ignore", partition_by=parts,
                storage_options=self._options, configuration={DAY_PROPERTY: cut.day},
                raise_if_key_not_exists=False,
            )  # fmt: skip
        except (DeltaError, ValueError, TypeError) as error:
            raise SchemaMismatch(
                f"Delta cannot hold the columns of {self.name!r}: {error}. Nothing was made; cast "
                "or leave out the column",
                table=self.name,
            ) from error
        self.sync_log(since=-1)

    def add(self, fields: Sequence[pa.Field]) -> None:
        from deltalake import Schema

        table = self.load()
        version = table.version()
        table.alter.add_columns(list(Schema.from_arrow(pa.schema(fields)).fields))
        self.sync_log(version)

    # -- batches ---------------------------------------------------------------------------------

    def layout(self, query: str, batch: int, attempt: str) -> Layout:
        table = self.load()
        parts = table.metadata().partition_columns
        day = table.metadata().configuration.get(DAY_PROPERTY)
        cut = Cut("tenant" if "tenant" in parts else None, day if "day" in parts else None)
        folder = f"{self.uri}/data/{query}/{batch}/{attempt}"
        return Layout(folder, _columns(table), cut)

    def has_batch(self, query: str, batch: int) -> bool:
        table = self.find()
        return table is not None and _last_batch(table, query) >= batch

    def commit(self, files: Sequence[WrittenFile], query: str, batch: int) -> bool:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        marks = CommitProperties(
            custom_metadata={QUERY_PROPERTY: query, BATCH_PROPERTY: str(batch)},
            # Its own retries would not look again whether the batch is in meanwhile.
            max_commit_retries=0,
            app_transactions=[Transaction(query, batch)],
        )
        last: Exception | None = None
        for turn in range(COMMIT_TRIES):
            if turn:
                wait = min(FIRST_WAIT_S * 2**turn, LONGEST_WAIT_S)
                time.sleep(wait * (0.5 + random.random() / 2))
            table = self.load()
            if _last_batch(table, query) >= batch:
                return False
            parts, version = table.metadata().partition_columns, table.version()
            failpoint("lakehouse.committing")
            try:
                table.create_write_transaction(
                    [self._action(each, parts) for each in files],
                    "append", table.schema(), parts, commit_properties=marks,
                )  # fmt: skip
                self.sync_log(version)
                return True
            except CommitFailedError as error:
                last = error
        raise CommitConflict(
            f"{COMMIT_TRIES} commits to {self.name!r} lost against other writers: {last}. Nothing "
            "was added; run it again when they are done",
            table=self.name,
        ) from last

    def sync_log(self, since: int) -> None:
        """Have a folder's log after a version on the disk; deltalake does not care for that."""
        if not self.warehouse.local:
            return
        log = f"{self.uri.removeprefix('file://')}/_delta_log"
        for version in range(since + 1, self.load().version() + 1):
            sync(f"{log}/{version:020d}.json")

    def _action(self, file: WrittenFile, parts: Sequence[str]) -> Any:
        from deltalake.transaction import AddAction

        day = None if file.day is None else str(np.datetime64(file.day, "D"))
        known = {"tenant": file.tenant, "day": day}
        return AddAction(
            path=quote(file.path.removeprefix(f"{self.uri}/")),
            size=file.size_bytes,
            partition_values={name: known[name] for name in parts},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": file.rows}),
        )

    def clean(self, query: str, batch: int) -> int:
        folder = f"{self.uri}/data/{query}/{batch}"
        return remove_others(folder, self.files(), self.warehouse.properties)


def _columns(table: DeltaTable) -> pa.Schema:
    """The columns that rows bring: a day that follows from a timestamp is not among them."""
    schema = pa.schema(table.schema().to_arrow())
    derived = table.metadata().configuration.get(DAY_PROPERTY)
    return pa.schema([each for each in schema if each.name != "day" or derived in (None, "day")])


def _last_batch(table: DeltaTable, query: str) -> int:
    version = table.transaction_version(query)
    return -1 if version is None else version
