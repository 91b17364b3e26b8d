"""What a disk in memory is made of: the bytes of one file, and a tree of names.

Views handed out by `Pages.read` stay valid whatever is written afterwards, because a buffer is
never resized: a file that outgrows its buffer moves to a larger one and the old one lives as
long as its views.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

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
