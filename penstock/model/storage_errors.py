"""Errors of the data folder and the disk: part of the tree in penstock.model.errors."""

from __future__ import annotations

from penstock.model.error import PenstockError


class StorageError(PenstockError):
    """The data folder or the disk below it."""

    code = "storage"


class FolderLocked(StorageError):
    """Another process writes this folder; `holder` names it."""

    code = "storage.locked"


class FormatTooNew(StorageError):
    """The folder was written by a newer Penstock."""

    code = "storage.format-too-new"


class Corrupted(StorageError):
    """Stored bytes fail their checksum or a file is missing; nothing was deleted."""

    code = "storage.corrupted"


class UnreadableEntry(StorageError):
    """A journal entry is whole and cannot be read; `path`, `offset` and `kind` name it."""

    code = "storage.unreadable-entry"


class WriterFailed(StorageError):
    """The disk refused to make data durable; the writer stopped for good."""

    code = "storage.writer-failed"


class NotADataFolder(StorageError):
    """The path holds something else than a Penstock folder."""

    code = "storage.not-a-folder"
