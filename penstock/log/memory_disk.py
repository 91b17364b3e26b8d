"""Files that live in memory: the `Disk` behind `mem:`.

`Pages` holds the bytes of one file, `Tree` the names of all. Views handed out by `Pages.read` stay
valid through later writes, because a buffer is never resized: a file that outgrows its buffer
moves to a larger one, and the old one lives as long as its views.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.model.errors import FolderLocked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.log.disk import Bytes

# From here on a buffer is an anonymous map, which the kernel fills page by page as it is touched:
# a journal file of 256 MiB costs what was written to it. Below, a bytearray is cheaper to make.
LAZY_FROM_BYTES = 256 * 1024

# Large maps ask for huge pages: filling 256 MiB for the first time is three times as fast.
HUGE_FROM_BYTES = 8 * 1024 * 1024

# Reserved room up to this size is mapped whole at the first write, so that no later write copies.
# It is four times the default journal file and well within what a 64-bit process may map.
MAP_AHEAD_BYTES = 1 << 30

Node = TypeVar("Node")

# Parts of less than this together are joined before they are copied: below it a Python step per
# part costs more than the second copy.
JOIN_BELOW_BYTES = 64 * 1024
MANY_PARTS = 64  # and so are more parts than this, whatever their size

MEMORY_SHARE = 2  # a MemoryDisk may by default fill one part in this many of the machine's memory


# -- the disk -------------------------------------------------------------------------------------


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


# -- bytes and names ------------------------------------------------------------------------------


class Pages:
    """The bytes of one file: grows by doubling, costs nothing where nothing was written.

    >>> pages = Pages()
    >>> pages.reserve(1 << 40)
    >>> pages.write(3, b"abc")
    >>> bytes(pages.read(0, 8)), pages.written
    (b'\\x00\\x00\\x00abc\\x00\\x00', 6)
    """

    __slots__ = ("_shown", "_view", "length", "written")

    def __init__(self) -> None:
        self.length = 0  # size of the file, reserved room included
        self.written = 0  # end of the last byte ever written; zeros from here to `length`
        self._view = memoryview(bytearray())
        self._shown = self._view.toreadonly()

    def write(self, offset: int, data: Bytes) -> None:
        """Put the data at an offset, growing the file if it ends behind its length."""
        end = offset + len(data)
        if end > len(self._view):
            # Room known to be needed is taken at once, without ever copying again.
            self._move(max(end, min(self.length, MAP_AHEAD_BYTES), 2 * len(self._view)))
        self._view[offset:end] = data
        if end > self.written:
            self.written = end
        # Last, so that a reader in another thread never sees a length without its bytes.
        if end > self.length:
            self.length = end

    def read(self, offset: int, size: int) -> memoryview:
        """Up to `size` bytes from `offset`, without a copy where they were written."""
        length = self.length
        end = min(offset + size, length)
        if end <= offset:
            return memoryview(b"")
        view = self._shown
        if end > len(view):
            return memoryview(bytes(view[offset:]) + bytes(end - max(offset, len(view))))
        return view[offset:end]

    def reserve(self, size: int) -> None:
        """Make the file at least `size` long; the new part reads as zeros."""
        self.length = max(self.length, size)

    def truncate(self, size: int) -> None:
        """Cut or extend to `size`; views taken before keep what they show."""
        if size < self.written:
            kept = self._view[:size]
            self.written = size
            self._move(size, kept)
        self.length = size

    def copy(self) -> Pages:
        """An independent file of the same content."""
        twin = Pages()
        twin.length, twin.written = self.length, self.written
        twin._move(self.written, self._view)
        return twin

    def _move(self, capacity: int, source: memoryview | None = None) -> None:
        source = self._view if source is None else source
        fresh = memoryview(_buffer(capacity))
        fresh[: self.written] = source[: self.written]
        self._view, self._shown = fresh, fresh.toreadonly()


def _buffer(size: int) -> bytearray | mmap.mmap:
    if size < LAZY_FROM_BYTES:
        return bytearray(size)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_FROM_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            area.madvise(mmap.MADV_HUGEPAGE)
    return area


class Tree(Generic[Node]):
    """Names in folders, with the errors a file system gives for the names it does not have.

    >>> tree = Tree[int]()
    >>> tree.make("a/b")
    >>> tree.put("a/b/c", 7)
    >>> tree.names("a"), tree.get("a/b/c")
    (['b'], 7)
    """

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, Node | None]] = {"": {}}  # None: a folder

    def get(self, path: str) -> Node:
        """What stands under a name."""
        folder, name = self.spot(path)
        try:
            node = folder[name]
        except KeyError:
            raise os_error(errno.ENOENT, path) from None
        if node is None:
            raise os_error(errno.EISDIR, path)
        return node

    def put(self, path: str, node: Node) -> None:
        """Set a name in a folder that is there."""
        folder, name = self.spot(path)
        folder[name] = node

    def take(self, path: str) -> Node:
        """Remove a name and return what stood under it."""
        node = self.get(path)
        folder, name = self.spot(path)
        del folder[name]
        return node

    def spot(self, path: str) -> tuple[dict[str, Node | None], str]:
        """The folder a path lies in and its name there."""
        parent, _, name = path.strip("/").rpartition("/")
        return self.folder(parent), name

    def folder(self, path: str) -> dict[str, Node | None]:
        """The names of a folder that must be there."""
        try:
            return self._folders[path.strip("/")]
        except KeyError:
            raise os_error(errno.ENOENT, path) from None

    def make(self, path: str) -> None:
        """Make a folder and its parents."""
        path = path.strip("/")
        if path in self._folders:
            return
        parent, _, name = path.rpartition("/")
        self.make(parent)
        if self._folders[parent].setdefault(name, None) is not None:
            raise os_error(errno.EEXIST, path)
        self._folders[path] = {}

    def names(self, path: str) -> list[str]:
        """Sorted names of a folder, none when it is missing."""
        path = path.strip("/")
        if path not in self._folders:
            if self.has(path):
                raise os_error(errno.ENOTDIR, path)
            return []
        return sorted(self._folders[path])

    def has(self, path: str) -> bool:
        """Whether a file or folder has this name."""
        path = path.strip("/")
        parent, _, name = path.rpartition("/")
        return path in self._folders or name in self._folders.get(parent, ())

    def copy(self) -> Tree[Node]:
        """The same names for the same nodes, free to change on its own."""
        twin = Tree[Node]()
        twin._folders = {path: dict(names) for path, names in self._folders.items()}
        return twin

    def folders(self) -> list[str]:
        """Every folder, parents first."""
        return sorted(self._folders)

    def walk(self) -> Iterator[tuple[str, Node]]:
        """Every file with its path, sorted."""
        for folder in self.folders():
            for name, node in sorted(self._folders[folder].items(), key=lambda item: item[0]):
                if node is not None:
                    yield f"{folder}/{name}".lstrip("/"), node


def os_error(code: int, path: str = "") -> OSError:
    """The error the operating system would raise, as the subclass that Python gives its code.

    >>> type(os_error(errno.ENOENT, "a")).__name__
    'FileNotFoundError'
    """
    return OSError(code, os.strerror(code), path)
