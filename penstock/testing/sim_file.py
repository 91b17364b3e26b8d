"""Open files and the lock of a simulated disk."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from penstock.log.pages import os_error
from penstock.testing.sim_inode import SimInode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.log.disk import Bytes
    from penstock.testing.sim_disk import SimDisk


class SimFile:
    """A `File` on a `SimDisk`."""

    __slots__ = ("_disk", "_end", "_inode", "_open", "_writable")

    def __init__(self, disk: SimDisk, inode: SimInode, *, write: bool) -> None:
        self._disk = disk
        self._inode = inode
        self._end = inode.pages.length
        self._writable = write
        self._open = True

    def descriptors(self, count: int) -> Sequence[int]:
        return self._disk.openings(self._inode, count)

    def append(self, parts: Sequence[Bytes]) -> None:
        # Like pwritev, a full disk or a power cut may leave a front part of it.
        self._need(write=True)
        start, data = self._end, b"".join(parts)
        self._end = start + self._disk.put(self._inode, start, data)
        if self._end < start + len(data):
            raise os_error(errno.ENOSPC)

    def append_durably(self, parts: Sequence[Bytes]) -> None:
        self.append(parts)
        self.sync()

    def write_at(self, offset: int, data: Bytes) -> None:
        self._need(write=True)
        if self._disk.put(self._inode, offset, bytes(data)) < len(data):
            raise os_error(errno.ENOSPC)

    def read(self, offset: int, size: int) -> memoryview:
        self._need()
        return self._inode.pages.read(offset, size)

    def sync(self) -> None:
        self._need()
        self._disk.sync(self._inode)

    def allocate(self, size: int) -> None:
        self._need(write=True)
        if size > self._inode.pages.length:
            self._disk.resize(self._inode, size)

    def truncate(self, size: int) -> None:
        self._need(write=True)
        self._disk.resize(self._inode, size)
        self._end = size

    def size(self) -> int:
        self._need()
        return self._inode.pages.length

    def rest(self, offset: int, size: int) -> None:
        """What is in memory stays there."""

    def written(self, start: int) -> Sequence[tuple[int, int]]:
        return [(start, self.size())]

    def close(self) -> None:
        self._disk.check_power()
        self._open = False

    def _need(self, *, write: bool = False) -> None:
        self._disk.check_power()
        if not self._open or (write and not self._writable):
            raise os_error(errno.EBADF)


class SimLock:
    """The held lock of a `SimDisk`; a crash lets go of it."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    def release(self) -> None:
        self._disk.check_power()
        if self._disk.holder is self:
            self._disk.holder = None
