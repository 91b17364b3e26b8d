"""The warehouse: a folder or bucket of tables, and the catalogue that knows them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.model.errors import InvalidSettings, MissingExtra, WarehouseFailed
from penstock.model.topic import check_topic, tenant_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

    from penstock.pipelines.lakehouse.table import Table

Format = Literal["iceberg", "delta", "parquet"]
CATALOGUE_FILE = "catalogue.db"
CATALOGUE_NAME = "penstock"
ONE_WORD_NAMESPACE = "main"  # Iceberg wants a namespace; names of one word have none of their own
# Said for every segment that joins, about dictionary columns and payloads without statistics. Both
# are meant: names are read back as text, and no query asks for the smallest payload.
EXPECTED_NOTES = ("Iceberg does not have a dictionary type", "PyArrow statistics missing")


def table_name(topic: str) -> str:
    """The table of a topic: its name without the tenant, which is a column.

    >>> table_name("orders.created.v1.acme"), table_name("orders.created")
    ('orders.created.v1', 'orders.created')
    """
    return topic.rpartition(".")[0] if tenant_of(topic) else topic


def identifier(name: str) -> tuple[str, ...]:
    """Namespace and table of a name in an Iceberg catalogue.

    >>> identifier("orders.created.v1"), identifier("orders")
    (('orders', 'created', 'v1'), ('main', 'orders'))
    """
    words = tuple(check_topic(name, system=True).split("."))
    return words if len(words) > 1 else (ONE_WORD_NAMESPACE, *words)


class Warehouse:
    """A place for tables, all of one format.

    A local folder needs nothing else: its catalogue is an SQLite file in it. Any other catalogue
    comes by pyiceberg's own properties: `{"type": "rest", "uri": …}`.

    >>> Warehouse("lake", format="csv")
    Traceback (most recent call last):
    ...
    penstock.model.errors.InvalidSettings: a warehouse has no format 'csv'; nothing was opened. \
Choose iceberg, delta or parquet [invalid.settings]
    """

    def __init__(
        self,
        place: str | Path,
        *,
        format: Format = "iceberg",
        properties: Mapping[str, str] | None = None,
        create: bool = True,
    ) -> None:
        if format not in get_args(Format):
            raise InvalidSettings(
                f"a warehouse has no format {format!r}; nothing was opened. "
                "Choose iceberg, delta or parquet",
                format=format,
            )
        self.format = format
        self.properties = dict(properties or {})
        text = str(place)
        self.local = "://" not in text or text.startswith("file://")
        # pyiceberg does not decode URIs, so a blank in a path must stay a blank.
        self.uri = f"file://{Path(text.removeprefix('file://')).absolute()}" if self.local else text
        self.create = create
        """Whether a missing folder or catalogue is made; off for callers that only read."""
        if self.local and create:
            try:
                Path(self.uri.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise WarehouseFailed(
                    f"the warehouse {text!r} cannot be made: {error}. Name a folder that can be "
                    "written",
                    place=text,
                ) from error

    def table(self, name: str) -> Table:
        """The table of that name, which need not exist yet."""
        identifier(name)
        if self.format == "iceberg":
            from penstock.pipelines.lakehouse.iceberg import IcebergTable

            return IcebergTable(self, name)
        if self.format == "delta":
            from penstock.pipelines.lakehouse.delta import DeltaLakeTable

            return DeltaLakeTable(self, name)
        from penstock.pipelines.lakehouse.folder import FolderTable

        return FolderTable(self, name)

    def is_empty(self) -> bool:
        """Whether there is no catalogue, and none is to be made."""
        if self.create or not self.local or self._named() or self.format != "iceberg":
            return False
        return not Path(self._file()).exists()

    def _named(self) -> bool:
        """Whether the properties say which catalogue it is."""
        return bool({"type", "uri", "py-catalog-impl"} & self.properties.keys())

    def _file(self) -> str:
        return f"{self.uri.removeprefix('file://')}/{CATALOGUE_FILE}"

    @cached_property
    def catalogue(self) -> Catalog:
        """The Iceberg catalogue, opened on first use."""
        try:
            from pyiceberg.catalog import load_catalog
        except ImportError:
            raise missing_extra("Iceberg tables", "pyiceberg") from None
        logging.getLogger("pyiceberg.io.pyarrow").addFilter(_is_news)
        properties = self._catalogue_properties()
        try:
            return load_catalog(CATALOGUE_NAME, **properties)
        except Exception as error:
            # Catalogues raise what their drivers raise: there is no common root.
            raise WarehouseFailed(
                f"the catalogue of {self.uri} does not open: {error}. Nothing was changed; check "
                "its properties (type, uri, credentials)",
                place=self.uri,
            ) from error

    def _catalogue_properties(self) -> dict[str, str]:
        given = {"warehouse": self.uri, **self.properties}
        if self.local:
            from penstock.pipelines.lakehouse.iceberg import StableFileIO

            given.setdefault("py-io-impl", f"{StableFileIO.__module__}.{StableFileIO.__name__}")
        if self._named():
            return given
        if not self.local:
            raise InvalidSettings(
                f"the warehouse {self.uri} is no folder, so its catalogue must be named; nothing "
                "was opened. Give the properties 'type' and 'uri' of an Iceberg catalogue",
                place=self.uri,
            )
        return {"type": "sql", "uri": f"sqlite:///{self._file()}", **given}

    def close(self) -> None:
        """Let go of the catalogue."""
        catalogue = self.__dict__.pop("catalogue", None)
        if catalogue is not None:
            catalogue.close()

    def __enter__(self) -> Warehouse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def table_files(warehouse: Warehouse, name: str) -> list[str]:
    """The Parquet files a table consists of now, for `spark.read.parquet` or DuckDB's read_parquet.

    Local files come as plain paths. No files for a table that does not exist.
    """
    table = warehouse.table(name)
    return [] if table.schema() is None else table.files()


def filesystem(uri: str, properties: Mapping[str, str]) -> tuple[Any, str]:
    """A pyarrow file system and the path in it; pyiceberg's file properties (`s3.*`) apply."""
    if uri.startswith("file://"):  # spares each worker a second of loading pyiceberg
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem(), uri.removeprefix("file://")
    try:
        from pyiceberg.io.pyarrow import PyArrowFileIO
    except ImportError:
        raise missing_extra("a warehouse", "pyiceberg") from None
    io = PyArrowFileIO(dict(properties))
    scheme, host, path = io.parse_location(uri)
    return io.fs_by_scheme(scheme, host), path


def missing_extra(what: str, package: str) -> MissingExtra:
    """The error for a table format whose library is not installed."""
    return MissingExtra(
        f"{what} need the package {package}; nothing was opened: pip install 'penstock[lakehouse]'",
        extra="lakehouse",
    )


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(EXPECTED_NOTES)
