"""Files that live in memory: the `Disk` behind `mem:`."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from penstock.log.pages import Pages, Tree, os_error
from penstock.model.errors import FolderLocked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.log.disk import Bytes

# Parts of less than this together are joined before they are copied: below it a Python step per
# part costs more than the second copy.
JOIN_BELOW_BYTES = 64 * 1024
MANY_PARTS = 64  # and so are more parts than this, whatever their size

MEMORY_SHARE = 2  # a MemoryDisk may by default fill one part in this many of the machine's memory


class MemoryFile:
    """A `File` over `Pages`; every handle has its own append position."""

    __slots__ = ("_disk", "_end", "_node", "_state")

    def __init__(self, disk: MemoryDisk, node: MemoryNode, *, write: bool) -> None:
        self._disk = disk
        self._node = node
        self._end = node.pages.length
        self._state = 2 if write else 1  # 2 writable, 1 readable, 0 closed

    def descriptors(self, count: int) -> Sequence[int]:
        return ()

    def append(self, parts: Sequence[Bytes]) -> None:
        self._need(2)
        pages = self._node.pages
        start = self._end
        end = start + sum(map(len, parts))
        if end == start:
            return
        if end > pages.length:
            self._disk.resize(self._node, end)
        if end - start < JOIN_BELOW_BYTES or len(parts) > MANY_PARTS:
            pages.write(start, b"".join(parts))
        else:
            for part in parts:
                pages.write(start, part)
                start += len(part)
        self._end = end

    def append_durably(self, parts: Sequence[Bytes]) -> None:
        self.append(parts)
        self.sync()

    def write_at(self, offset: int, data: Bytes) -> None:
        self._need(2)
        if not data:
            return
        if offset + len(data) > self._node.pages.length:
            self._disk.resize(self._node, offset + len(data))
        self._node.pages.write(offset, data)

    def read(self, offset: int, size: int) -> memoryview:
        self._need(1)
        return self._node.pages.read(offset, size)

    def sync(self) -> None:
        self._need(1)

    def allocate(self, size: int) -> None:
        self._need(2)
        if size > self._node.pages.length:
            self._disk.resize(self._node, size)
            self._node.pages.reserve(size)

    def truncate(self, size: int) -> None:
        self._need(2)
        self._disk.resize(self._node, size)
        self._node.pages.truncate(size)
        self._end = size

    def size(self) -> int:
        self._need(1)
        return self._node.pages.length

    def rest(self, offset: int, size: int) -> None:
        """What is in memory stays there."""

    def written(self, start: int) -> Sequence[tuple[int, int]]:
        return [(start, self.size())]

    def close(self) -> None:
        self._state = 0

    def _need(self, state: int) -> None:
        if self._state < state:
            raise os_error(errno.EBADF)


class MemoryNode:
    """One file of a `MemoryDisk` and the room it was granted."""

    __slots__ = ("granted_bytes", "linked", "pages")

    def __init__(self) -> None:
        self.pages = Pages()
        self.granted_bytes = 0
        self.linked = True  # a removed file no longer counts, however long it stays open


class MemoryLock:
    """The held lock of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk

    def release(self) -> None:
        if self._disk.holder is self:
            self._disk.holder = None


class MemoryDisk:
    """A `Disk` in memory: what `mem:` stands on. Nothing survives the process; `sync` is free.

    >>> from penstock.log.disk import read_file, write_file
    >>> disk = MemoryDisk()
    >>> write_file(disk, "hello", [b"wor", b"ld"])
    >>> read_file(disk, "hello"), disk.list("")
    (b'world', ['hello'])
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is None:
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            capacity_bytes = memory // MEMORY_SHARE
        self.capacity_bytes = capacity_bytes
        self.holder: MemoryLock | None = None
        self._used_bytes = 0
        self._account = threading.Lock()
        self._tree = Tree[MemoryNode]()

    def open(self, path: str, *, create: bool = False, write: bool = False) -> MemoryFile:
        if create:
            if self._tree.has(path):
                raise os_error(errno.EEXIST, path)
            self._tree.put(path, MemoryNode())
        return MemoryFile(self, self._tree.get(path), write=create or write)

    def list(self, folder: str) -> list[str]:
        return self._tree.names(folder)

    def exists(self, path: str) -> bool:
        return self._tree.has(path)

    def rename(self, source: str, target: str) -> None:
        node = self._tree.get(source)
        if self._tree.has(target):
            replaced = self._tree.get(target)
            if replaced is node:
                return
            self._unlink(replaced)
        self._tree.put(target, node)
        self._tree.take(source)

    def remove(self, path: str) -> None:
        self._unlink(self._tree.take(path))

    def make_dir(self, folder: str) -> None:
        self._tree.make(folder)

    def sync_dir(self, folder: str) -> None:
        self._tree.folder(folder)

    def shared(self, path: str, size: int) -> memoryview:
        return memoryview(bytearray(size))  # nothing here outlives the process

    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self._used_bytes)

    def lock(self) -> MemoryLock:
        if self.holder is not None:
            raise FolderLocked(
                "this memory disk is being written by another bus. Close that bus first",
                path="mem:",
                holder="this process",
            )
        self.holder = MemoryLock(self)
        return self.holder

    def resize(self, node: MemoryNode, size: int) -> None:
        """Book room for a file of `size` bytes, or raise ENOSPC and change nothing."""
        with self._account:
            if not node.linked:
                return
            more = size - node.granted_bytes
            if more > 0 and self._used_bytes + more > self.capacity_bytes:
                raise os_error(errno.ENOSPC)
            self._used_bytes += more
            node.granted_bytes = size

    def _unlink(self, node: MemoryNode) -> None:
        self.resize(node, 0)
        node.linked = False
