"""How pyiceberg writes what belongs to a table in a folder: each file is on the disk when it is closed.

A module of its own, because workers write data files without loading pyiceberg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from penstock.pipelines.lakehouse.stable import sync

if TYPE_CHECKING:
    from pyiceberg.io import OutputStream


class StableFileIO(PyArrowFileIO):
    """What pyiceberg writes itself: metadata, lists and manifests."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to write."""
        made = super().new_output(location)
        if made._filesystem.type_name != "local":
            return made
        return _StableFile(location, made._path, made._filesystem, made._buffer_size)


class _StableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        return _StableStream(super().create(overwrite), self._path)


class _StableStream:
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

    def __enter__(self) -> _StableStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
