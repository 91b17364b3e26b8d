"""Plain Parquet: a folder with Hive partitions, and beside it a list of the files of each batch.

A batch is in the table once `_committed/<query>/<batch>.json` lists its files. A reader that takes every file it finds may see
files of a batch that is being written; `table_files` does not.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from penstock.pipelines.failure import failpoint
from penstock.pipelines.lakehouse.files import sync
from penstock.pipelines.lakehouse.iceberg import plain
from penstock.pipelines.lakehouse.table import (
    ColumnsByName,
    Cut,
    Layout,
    WrittenFile,
    unknown_table,
)
from penstock.pipelines.lakehouse.warehouse import filesystem

if TYPE_CHECKING:
    from penstock.pipelines.lakehouse.warehouse import Warehouse

HEAD = "_table.json"
COMMITTED = "_committed"
ATTEMPTS = "_attempts"


class _Head(msgspec.Struct, frozen=True):
    schema: str
    tenant: str | None
    day: str | None

    @property
    def columns(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))


class _Commit(msgspec.Struct, frozen=True):
    files: list[str]
    rows: int


class FolderTable(ColumnsByName):
    """One folder of Parquet files. One writer at a time for each query."""

    kind = "Parquet folder"

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        self.name = name
        self.warehouse = warehouse
        self.uri = f"{warehouse.uri}/{name}"
        self._fs, self._root = filesystem(self.uri, warehouse.properties)

    # -- what is there ---------------------------------------------------------------------------

    def _head(self) -> _Head | None:
        data = self._read(HEAD)
        return None if data is None else msgspec.json.decode(data, type=_Head)

    def _known(self) -> _Head:
        head = self._head()
        if head is None:
            raise unknown_table(self.name, self.warehouse.uri)
        return head

    def schema(self) -> pa.Schema | None:
        head = self._head()
        return None if head is None else head.columns

    def files(self) -> list[str]:
        found: list[str] = []
        for path in self._list(COMMITTED, recursive=True):
            data = self._read(path)
            if data is not None and path.endswith(".json"):
                found += msgspec.json.decode(data, type=_Commit).files
        return sorted(f"{plain(self.uri)}/{each}" for each in found)

    # -- columns ---------------------------------------------------------------------------------

    def create(self, schema: pa.Schema, cut: Cut) -> None:
        self._write_head(schema, cut.tenant, cut.day)

    def _write_head(self, schema: pa.Schema, tenant: str | None, day: str | None) -> None:
        text = base64.b64encode(schema.serialize().to_pybytes()).decode()
        self._write(HEAD, msgspec.json.encode(_Head(text, tenant, day)))

    def add(self, fields: Sequence[pa.Field]) -> None:
        head = self._known()
        self._write_head(pa.schema([*head.columns, *fields]), head.tenant, head.day)

    # -- batches ---------------------------------------------------------------------------------

    def layout(self, query: str, batch: int, attempt: str) -> Layout:
        head = self._known()
        # Says whose files to look for should this attempt die.
        self._write(f"{ATTEMPTS}/{query}/{batch}/{attempt}", b"")
        cut = Cut(head.tenant, head.day)
        prefix = f"{query}-{batch}-{attempt}-"
        return Layout(
            self.uri, head.columns, cut, hive=bool(head.tenant or head.day), prefix=prefix
        )

    def has_batch(self, query: str, batch: int) -> bool:
        return self._read(f"{COMMITTED}/{query}/{batch}.json") is not None

    def commit(self, files: Sequence[WrittenFile], query: str, batch: int) -> bool:
        names = [each.path.removeprefix(f"{self.uri}/") for each in files]
        data = msgspec.json.encode(_Commit(names, sum(each.rows for each in files)))
        failpoint("lakehouse.committing")
        return self._write(f"{COMMITTED}/{query}/{batch}.json", data, once=True)

    def clean(self, query: str, batch: int) -> int:
        folder = f"{ATTEMPTS}/{query}/{batch}"
        attempts = [path.rpartition("/")[2] for path in self._list(folder)]
        data = self._read(f"{COMMITTED}/{query}/{batch}.json")
        kept = set() if data is None else set(msgspec.json.decode(data, type=_Commit).files)
        removed = 0
        if len(attempts) > 1:  # one died before: where its files are only a full listing tells
            dead = tuple(f"{query}-{batch}-{attempt}-" for attempt in attempts)
            for path in self._list("", recursive=True):
                if path.rpartition("/")[2].startswith(dead) and path not in kept:
                    self._fs.delete_file(f"{self._root}/{path}")
                    removed += 1
        if attempts:
            self._fs.delete_dir(f"{self._root}/{folder}")
        return removed

    # -- files -----------------------------------------------------------------------------------

    def _list(self, folder: str, *, recursive: bool = False) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        path = f"{self._root}/{folder}".rstrip("/")
        chosen = FileSelector(path, recursive=recursive, allow_not_found=True)
        return [
            info.path.removeprefix(f"{self._root}/")
            for info in self._fs.get_file_info(chosen)
            if info.type == FileType.File
        ]

    def _read(self, name: str) -> bytes | None:
        try:
            with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def _write(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """Write a whole file at once; with `once`, False when it was there."""
        path = f"{self._root}/{name}"
        if not self.warehouse.local:
            if once and self._read(name) is not None:
                return False
            _put(self._fs, path, data)  # an object appears complete or not at all
            return True
        os.makedirs(path.rpartition("/")[0], exist_ok=True)
        beside = f"{path}.{uuid.uuid4().hex}.tmp"
        _put(self._fs, beside, data)
        sync(beside)
        try:
            if once:
                os.link(beside, path)  # fails when the name is taken, by any writer
            else:
                os.replace(beside, path)
        except FileExistsError:
            return False
        finally:
            if os.path.exists(beside):
                os.unlink(beside)
        sync(path)
        return True


def _put(fs: Any, path: str, data: bytes) -> None:
    with fs.open_output_stream(path) as stream:
        stream.write(data)
