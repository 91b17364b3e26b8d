"""Errors of the lakehouse: part of the tree in penstock.model.errors."""

from __future__ import annotations

from penstock.model.error import PenstockError


class TableError(PenstockError):
    """A warehouse or one of its tables."""

    code = "table"


class UnknownTable(TableError):
    """No table of that name in this warehouse."""

    code = "table.unknown"


class CommitConflict(TableError):
    """Other writers kept changing the table while a commit was tried; nothing of it was added."""

    code = "table.conflict"


class SchemaMismatch(TableError):
    """A change of columns that the table or its format cannot make."""

    code = "table.schema"


class TableChanged(TableError):
    """The files of a table are not those that its own properties list."""

    code = "table.changed"


class WarehouseFailed(TableError):
    """The catalogue or the storage of a warehouse does not answer."""

    code = "table.warehouse"
