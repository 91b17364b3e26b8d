"""The one door to files: everything that touches storage goes through a `Disk`.

Production uses `RealDisk`; `mem:` and the simulator bring their own (penstock.testing). The
Protocol is as small as the log needs, and says what survives a crash: bytes after `File.sync`,
names after `Disk.sync_dir`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from penstock.model.errors import DiskFull, DiskRefused, FolderLocked, NotADataFolder, StorageError

Bytes = bytes | bytearray | memoryview

IOV_MAX = 1024  # what Linux takes in one writev
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or what this user may have of it
DSYNC = getattr(os, "RWF_DSYNC", 0)  # Linux; elsewhere a write and a sync


_PERMISSION = "this user may not write there: check owner and permissions of the folder"
ADVICE = {
    errno.EROFS: "the file system is read-only: mount it for writing (after a failure of the disk "
    "the system makes it so by itself: look in its log)",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EMFILE: "this process has too many files open: raise its limit (LimitNOFILE=, ulimit -n)",
    errno.ENFILE: "the system has too many files open: raise fs.file-max",
    errno.ENOSPC: "free some space, or lower retention",
    errno.EDQUOT: "free some space, or raise the quota of this user",
    errno.EIO: "the disk failed: look in the system's log, and replace it",
}
RETRY_S = 1.0  # permissions, mounts and room come back at the pace of people


def advice_for(error: OSError) -> str:
    """What to do about an error of the system.

    >>> advice_for(OSError(errno.EIO, "Input/output error"))
    "the disk failed: look in the system's log, and replace it"
    """
    return ADVICE.get(error.errno or 0, "check the disk, the folder and its permissions")


def refused(error: OSError, what: str, **data: int) -> DiskRefused:
    """What a caller hears whose write the system refused, before anything of it was there."""
    if error.errno in NO_ROOM:
        return DiskFull(
            f"no room for {what} ({error.strerror}); nothing was changed. Free some space or "
            "lower retention; publishing resumes by itself, and reads never stopped",
            retry_after_s=RETRY_S,
            errno=error.errno,
            **data,
        )
    return DiskRefused(
        f"{what} could not be written ({error.strerror}): {advice_for(error)}. Nothing was "
        "changed; publishing resumes by itself, and reads never stopped",
        retry_after_s=RETRY_S,
        errno=error.errno,
        **data,
    )


def unusable(error: OSError) -> StorageError:
    """What the caller hears who opens a folder and the system refuses it."""
    where = "" if error.filename is None else f"{error.filename}: "
    return StorageError(
        f"{where}{error.strerror}: {advice_for(error)}; nothing was changed",
        path=error.filename,
        errno=error.errno,
    )


class File(Protocol):
    """One open file. Appends go to `end`; nothing is durable before `sync`."""

    def descriptors(self, count: int) -> Sequence[int]:
        """What the operating system knows the file by: up to `count` of them, or none.

        Each is an opening of its own, so that a failed write is reported by a sync of any of them.
        """
        ...

    def append(self, parts: Sequence[Bytes]) -> None:
        """Write the parts one after another at the end of what was written so far."""
        ...

    def append_durably(self, parts: Sequence[Bytes]) -> None:
        """The same, and return when they are on stable storage, as `sync` would."""
        ...

    def write_at(self, offset: int, data: Bytes) -> None:
        """Overwrite in place; not moved by and not moving the append position."""
        ...

    def read(self, offset: int, size: int) -> memoryview:
        """Up to `size` bytes from `offset`; shorter at the end of the file. Valid until close."""
        ...

    def rest(self, offset: int, size: int) -> None:
        """This part will not be read again soon: it need not count as this process's memory."""
        ...

    def sync(self) -> None:
        """fdatasync: returns when the bytes are on stable storage; raises OSError if they may not be."""
        ...

    def allocate(self, size: int) -> None:
        """Reserve room so that appends up to `size` cannot hit a full disk (raises ENOSPC now)."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; appends continue there."""
        ...

    def size(self) -> int:
        """Length in bytes, allocated room included."""
        ...

    def written(self, start: int) -> Sequence[tuple[int, int]]:
        """(start, end) of each part from `start` on that may hold more than zeros."""
        ...

    def close(self) -> None:
        """Release the handle; does not sync."""
        ...


class Lock(Protocol):
    """A held folder lock."""

    def release(self) -> None:
        """Let another writer in."""
        ...


class Disk(Protocol):
    """A folder of files. Paths are relative, with `/`."""

    def open(self, path: str, *, create: bool = False, write: bool = False) -> File:
        """Open an existing file, or make an empty one (`create` implies `write`)."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder is missing."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file of that name is there."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move over the target atomically; durable after `sync_dir`."""
        ...

    def remove(self, path: str) -> None:
        """Delete one file."""
        ...

    def make_dir(self, folder: str) -> None:
        """Make a folder and its parents; durable when it returns."""
        ...

    def sync_dir(self, folder: str) -> None:
        """Make the names in a folder durable."""
        ...

    def free_bytes(self) -> int:
        """Room left on the device."""
        ...

    def shared(self, path: str, size: int) -> memoryview:
        """A file of this size as memory: what is written there outlives the process, not the machine.

        Zeros when there was no such file, and where there is no room for one.
        """
        ...

    def lock(self) -> Lock:
        """Become the one writer of this folder, or raise FolderLocked naming the holder."""
        ...


def holder_in_words(holder: str) -> str:
    """Who holds a folder, from what it wrote into the lock.

    >>> holder_in_words('{"pid": 77, "host": "b1", "since": 0.0}')
    'process 77 on b1, since 1970-01-01 00:00:00 UTC'
    """
    try:
        said = json.loads(holder)
        since = datetime.fromtimestamp(said["since"], UTC)
        return f"process {said['pid']} on {said['host']}, since {since:%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return holder or "another process"


NO_PLACE = {
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip


def no_folder(error: OSError) -> StorageError:
    """What the caller hears whose folder is not there or cannot be made: another place must be named."""
    if error.errno not in NO_PLACE:
        return unusable(error)
    remedy = f"{ADVICE[error.errno]}, or name" if error.errno in ADVICE else "Name"
    return NotADataFolder(
        f"the folder cannot be opened: {error.strerror}: {error.filename!r}. {remedy} a folder that "
        "this user may read and write, or one that can be made",
        path=str(error.filename),
        errno=error.errno,
    )


UNFINISHED = ".tmp"
"""What the name of a file ends with until all of it is there."""


def write_file(disk: Disk, path: str, parts: Iterable[Bytes], *, paced: bool = False) -> None:
    """Write a whole file so that it is there completely or not at all, crash or no crash.

    Paced, each part is synced before the next is asked for, so that others get their turn at the disk.
    """
    folder = path.rpartition("/")[0]
    temporary = f"{path}{UNFINISHED}"
    if disk.exists(temporary):
        disk.remove(temporary)
    file = disk.open(temporary, create=True)
    try:
        for some in ([part] for part in parts) if paced else [list(parts)]:
            file.append(some)
            file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_dir(folder)


def read_file(disk: Disk, path: str) -> bytes:
    """The whole content of a file."""
    file = disk.open(path)
    try:
        return bytes(file.read(0, file.size()))
    finally:
        file.close()


def sync_path(path: str | Path) -> None:
    """Have a file's bytes, or a folder's names, on stable storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RealFile:
    """A `File` on the operating system; reads are memory-mapped."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._end = os.fstat(descriptor).st_size
        self._map: mmap.mmap | None = None
        self._more: list[int] = []

    def descriptors(self, count: int) -> Sequence[int]:
        with contextlib.suppress(OSError):  # no /proc, or too many files are open: fewer will do
            while len(self._more) < count - 1:
                self._more.append(os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC))
        return [self._fd, *self._more]

    def append(self, parts: Sequence[Bytes]) -> None:
        self._append(parts, 0)

    def append_durably(self, parts: Sequence[Bytes]) -> None:
        if DSYNC and len(parts) <= IOV_MAX:
            # One call instead of two: a thread that writes waits for the interpreter once.
            self._append(parts, DSYNC)
        else:
            self._append(parts, 0)
            self.sync()

    def _append(self, parts: Sequence[Bytes], flags: int) -> None:
        for start in range(0, len(parts), IOV_MAX):
            chunk: list[Bytes] = list(parts[start : start + IOV_MAX])
            while chunk:
                written = os.pwritev(self._fd, chunk, self._end, flags)
                self._end += written
                while chunk and written >= len(chunk[0]):
                    written -= len(chunk.pop(0))
                if chunk and written:
                    chunk[0] = memoryview(chunk[0])[written:]

    def write_at(self, offset: int, data: Bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            offset += written
            view = view[written:]

    def read(self, offset: int, size: int) -> memoryview:
        if self._map is None or offset + size > len(self._map):
            length = os.fstat(self._fd).st_size
            if offset >= length or size == 0:
                return memoryview(b"")
            if self._map is None or length > len(self._map):
                # The old map stays alive as long as a view into it.
                self._map = mmap.mmap(self._fd, length, prot=mmap.PROT_READ)
        return memoryview(self._map)[offset : offset + size]

    def rest(self, offset: int, size: int) -> None:
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and length > 0 and start + length <= len(self._map):
            # The page cache keeps it, and a view into it finds it there again.
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def allocate(self, size: int) -> None:
        if size > os.fstat(self._fd).st_size:
            os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        self._map = None  # reading a map past the end of its file kills the process
        os.ftruncate(self._fd, size)
        self._end = size

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def written(self, start: int) -> Sequence[tuple[int, int]]:
        # All at once: a hole that was read ahead into the page cache counts as data.
        parts: list[tuple[int, int]] = []
        end = self.size()
        while start < end:
            try:
                start = os.lseek(self._fd, start, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nothing but holes from here
                    raise
                break
            stop = os.lseek(self._fd, start, os.SEEK_HOLE)
            parts.append((start, stop))
            start = stop
        return parts

    def close(self) -> None:
        if self._fd >= 0:
            for descriptor in (self._fd, *self._more):
                os.close(descriptor)
            self._fd = -1
            self._more.clear()


class RealLock:
    """An flock held for the life of the writer; the kernel lets go when the process dies."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """A `Disk` that is a folder of the operating system.

    >>> import tempfile
    >>> disk = RealDisk(tempfile.mkdtemp())
    >>> write_file(disk, "hello", [b"wor", b"ld"])
    >>> read_file(disk, "hello")
    b'world'
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __reduce__(self) -> tuple[type[RealDisk], tuple[str]]:
        return (RealDisk, (str(self.root),))

    def open(self, path: str, *, create: bool = False, write: bool = False) -> RealFile:
        flags = os.O_RDWR if create or write else os.O_RDONLY
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        return RealFile(os.open(self.root / path, flags | os.O_CLOEXEC, 0o640))

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def rename(self, source: str, target: str) -> None:
        os.replace(self.root / source, self.root / target)

    def remove(self, path: str) -> None:
        os.unlink(self.root / path)

    def make_dir(self, folder: str) -> None:
        path = self.root / folder
        if path.is_dir():
            return
        path.mkdir(parents=True, exist_ok=True)
        for parent in (path, *path.parents):
            sync_path(parent)
            if parent == self.root.parent or parent == parent.parent:
                break

    def sync_dir(self, folder: str) -> None:
        sync_path(self.root / folder)

    def free_bytes(self) -> int:
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def shared(self, path: str, size: int) -> memoryview:
        try:
            descriptor = os.open(self.root / path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                # A page that the disk has no room for would end the process when it is written.
                os.posix_fallocate(descriptor, 0, size)
                return memoryview(mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
        except OSError:
            return memoryview(bytearray(size))

    def lock(self) -> RealLock:
        path = self.root / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise FolderLocked(
                f"{self.root} is being written by {holder_in_words(holder)}. "
                "Stop that process, open the folder read-only with '?mode=ro', or, if a broker has it, "
                "connect to the broker: ports.json in the folder has its URL",
                path=str(self.root),
                holder=holder,
            ) from None
        holder = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time(), 3)}
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        with contextlib.suppress(OSError):  # the name in the lock is a courtesy, the flock the lock
            os.fsync(descriptor)
        return RealLock(descriptor)
