"""The simulator's `Disk`: in memory, lawful, with crashes and faults decided by a seed.

Bytes are durable after `File.sync`, names after `Disk.sync_dir`, and nothing else is: the strict
reading of POSIX. `crash` decides by the seed which of the rest survived and returns the disk as
the next process finds it; the old object and every handle from it raise `SimCrash` from then on. The
same seed and the same calls always give the same bytes.

Bytes: a `SimInode` holds a file as the running process sees it, and a log of the changes that no sync
has made durable. At a crash each 512-byte sector decides alone up to which change it had reached the
platter, so a later write may survive an earlier one. A torn sector keeps only a front part of its new
bytes; the rest is old, or zero where there was nothing. Bytes that no unsynced change touched stay.

Names: `SimNames` holds two trees, the names as the running process sees them and those that are
durable, and between them a list of changes, each durable once its folder is synced. At a crash each
other change is kept or lost by the dice: a later change may survive an earlier one.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NoReturn, Protocol

from penstock.log.memory_disk import Pages, Tree, os_error
from penstock.model.errors import FolderLocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.log.disk import Bytes


# -- the disk -------------------------------------------------------------------------------------

UNLIMITED_BYTES = 1 << 40  # what a disk without a set capacity has: more than any run writes

# Each crash draws one of these as its share of lost sectors and names: mixed dice alone would
# rarely show the plain cases, in which everything or nothing survives.
LOST_SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)
MAX_OPENINGS = 8  # of one file at a time, for syncs side by side


class SimCrash(BaseException):
    """The simulated power is off. A `BaseException`, so that no handler of `Exception` goes on."""


class Stall(Protocol):
    """What a slow operation needs of a clock; `SimClock` has it."""

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        ...


@dataclass(frozen=True, slots=True)
class Faults:
    """How often the disk misbehaves by itself, as probabilities for each operation or sector."""

    crash: float = 0.0  # per operation: power fails in the middle of it
    failed_sync: float = 0.0  # per sync: EIO, and the waiting data is silently forgotten
    slow: float = 0.0  # per operation: it takes `slow_s` of simulated time
    slow_s: float = 0.25
    torn: float = 0.1  # per surviving sector at a crash
    lost: float | None = None  # per unsynced sector and name at a crash; None draws it per crash


class SimDisk:
    """A `Disk` in memory that crashes, tears, forgets and fills up, all by its seed.

    >>> disk = SimDisk(seed=7)
    >>> file = disk.open("a", create=True)
    >>> file.append([b"durable"]); file.sync(); disk.sync_dir("")
    >>> file.append([b", perhaps"])
    >>> after = disk.crash()
    >>> bytes(after.open("a").read(0, 7))
    b'durable'
    >>> file.size()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    penstock.testing.simulation.disk.SimCrash: the power is off
    """

    def __init__(
        self,
        seed: int | Random = 0,
        clock: Stall | None = None,
        faults: Faults | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self.rng = seed if isinstance(seed, Random) else Random(seed)
        self.clock = clock
        self.faults = faults or Faults()
        self.capacity_bytes = capacity_bytes
        self.counts: Counter[str] = Counter()  # faults that happened, by kind, over all lives
        self.operations = 0  # changes and syncs so far, over all lives; reads are not counted
        self.holder: SimLock | None = None
        self.on_power_off: Callable[[], None] | None = None
        self._crash_at = 0
        self._dead = False
        self._inodes = 0
        self._used_bytes = 0
        self._names = SimNames()
        self._openings: dict[int, tuple[SimInode, int]] = {}

    def open(self, path: str, *, create: bool = False, write: bool = False) -> SimFile:
        self.check_power()
        live = self._names.live
        if create:
            if live.has(path):
                raise os_error(errno.EEXIST, path)
            live.spot(path)  # the folder must be there
            self._inodes += 1
            self._rename(_parent(path), [(path, SimInode(self._inodes))])
        inode = live.get(path)
        return SimFile(self, inode, write=create or write)

    def openings(self, inode: SimInode, count: int) -> Sequence[int]:
        """Numbers by which the system knows a file that was opened so many times."""
        first = inode.number * MAX_OPENINGS
        for number in range(first, first + count):
            self._openings.setdefault(number, (inode, inode.failed_syncs))
        return range(first, first + count)

    def sync_opening(self, number: int) -> None:
        """Sync a file by one of its openings: each reports once a sync that failed since its last one."""
        inode, told = self._openings[number]
        try:
            if inode.failed_syncs > told:
                raise os_error(errno.EIO)
            self.sync(inode)
        finally:
            self._openings[number] = (inode, inode.failed_syncs)

    def list(self, folder: str) -> list[str]:
        self.check_power()
        return self._names.live.names(folder)

    def exists(self, path: str) -> bool:
        self.check_power()
        return self._names.live.has(path)

    def rename(self, source: str, target: str) -> None:
        self.check_power()
        live = self._names.live
        inode = live.get(source)
        live.spot(target)
        replaced = live.get(target) if live.has(target) else None
        if replaced is not inode:
            self._rename(_parent(target), [(source, None), (target, inode)], replaced)

    def remove(self, path: str) -> None:
        self.check_power()
        self._rename(_parent(path), [(path, None)], self._names.live.get(path))

    def make_dir(self, folder: str) -> None:
        self.check_power()
        failing = self._step()
        if not failing or self.rng.random() < 0.5:
            self._names.make(folder)
        if failing:
            self._fail()

    def sync_dir(self, folder: str) -> None:
        self.check_power()
        self._names.live.folder(folder)
        failing = self._step()
        if not failing and self._happens("failed_sync", self.faults.failed_sync):
            raise os_error(errno.EIO, folder)  # the names stay pending, as in a file system's log
        if not failing or self.rng.random() < 0.5:
            self._names.sync(folder.strip("/"))
        if failing:
            self._fail()

    def shared(self, path: str, size: int) -> memoryview:
        # A crash here is a power failure, which shared memory does not survive.
        return memoryview(bytearray(size))

    def free_bytes(self) -> int:
        self.check_power()
        if self.capacity_bytes is None:
            return UNLIMITED_BYTES
        return max(0, self.capacity_bytes - self._used_bytes)

    def lock(self) -> SimLock:
        self.check_power()
        if self.holder is not None:
            raise FolderLocked(
                "the simulated disk is being written by another bus. Close that bus first",
                path="sim:",
                holder="the simulated process",
            )
        self.holder = SimLock(self)
        return self.holder

    def crash_at(self, operation: int) -> None:
        """Cut the power in the middle of the operation of this number (see `operations`)."""
        self._crash_at = operation

    def power_off(self) -> None:
        """Kill this object and all its handles: from now on every call raises `SimCrash`."""
        if not self._dead:
            self._dead = True
            if self.on_power_off is not None:
                self.on_power_off()

    def crash(self) -> SimDisk:
        """Cut the power, decide what of the unsynced changes survived, and return the disk of the next life."""
        self.power_off()
        self.counts["crash"] += 1
        lost = self.rng.choice(LOST_SHARES) if self.faults.lost is None else self.faults.lost
        after = SimDisk(self.rng, self.clock, self.faults, self.capacity_bytes)
        after.counts, after.operations, after._inodes = self.counts, self.operations, self._inodes
        after._names = self._names.crash(self.rng, lost=lost, counts=self.counts)
        for _, inode in after._names.live.walk():
            inode.crash(self.rng, lost=lost, torn=self.faults.torn, counts=self.counts)
            inode.linked = True
            after._used_bytes += inode.pages.length
        self._names = SimNames()
        return after

    def fork(self, seed: int) -> SimDisk:
        """A twin with the same bytes and doubts and its own dice, to try another outcome."""
        twin = SimDisk(seed, None, self.faults, self.capacity_bytes)
        twin.operations, twin._inodes, twin._dead = self.operations, self._inodes, self._dead
        twin._used_bytes = self._used_bytes
        twins: dict[int, SimInode] = {}

        def twin_of(inode: SimInode) -> SimInode:
            if inode.number not in twins:
                twins[inode.number] = inode.copy()
            return twins[inode.number]

        twin._names = self._names.copy(twin_of)
        return twin

    def snapshot(self) -> dict[str, bytes]:
        """Every file by path, as the running process sees it."""
        return {
            path: bytes(node.pages.read(0, node.pages.length))
            for path, node in self._names.live.walk()
        }

    def flip(self, path: str, offset: int, bit: int) -> None:
        """Turn one bit at rest. Bytes that were never synced may be rewritten by the crash."""
        self._names.live.get(path).flip(offset, bit)
        self.counts["bit_flip"] += 1

    def flip_random(self, prefix: str = "") -> tuple[str, int, int] | None:
        """Turn a random bit in a synced file below a prefix; says which, None if there is none."""
        candidates = [
            (path, node.pages.written)
            for path, node in self._names.live.walk()
            if path.startswith(prefix) and node.pages.written and not node.log
        ]
        if not candidates:
            return None
        path, size = self.rng.choice(candidates)
        offset, bit = self.rng.randrange(size), self.rng.randrange(8)
        self.flip(path, offset, bit)
        return path, offset, bit

    def lose(self, path: str) -> None:
        """Remove a file everywhere, as after a repair that could not save it."""
        self._unlink(self._names.lose(path))
        self.counts["lost_file"] += 1

    def check_power(self) -> None:
        """Raise `SimCrash` if this disk is from before a crash."""
        if self._dead:
            raise SimCrash("the simulated power is off; go on with the disk that crash() returned")

    def put(self, inode: SimInode, offset: int, data: bytes) -> int:
        """Write as much as fits (all but on a full disk) and say how much that was."""
        failing = self._step()
        if failing:
            data = data[: self.rng.randint(0, len(data))]
        grow = offset + len(data) - inode.pages.length
        if grow > 0 and inode.linked and self.capacity_bytes is not None:
            over = grow - self.free_bytes()
            if over > 0:
                self.counts["full_disk"] += 1
                data = data[: max(0, len(data) - over)]
        before = inode.pages.length
        inode.write(offset, data)
        self._book(inode, before)
        if failing:
            self._fail()
        return len(data)

    def resize(self, inode: SimInode, size: int) -> None:
        """Change a file's length, or raise ENOSPC and change nothing."""
        failing = self._step()
        before = inode.pages.length
        if not failing and inode.linked and size - before > self.free_bytes():
            self.counts["full_disk"] += 1
            raise os_error(errno.ENOSPC)
        if not failing or self.rng.random() < 0.5:
            inode.truncate(size)
            self._book(inode, before)
        if failing:
            self._fail()

    def sync(self, inode: SimInode) -> None:
        """Make a file's bytes durable, or fail and forget that they are not."""
        failing = self._step()
        if not failing and self._happens("failed_sync", self.faults.failed_sync):
            inode.fail_sync()
            raise os_error(errno.EIO)
        if not failing or self.rng.random() < 0.5:
            inode.sync()
        if failing:
            self._fail()

    def _rename(self, folder: str, names: Names, replaced: SimInode | None = None) -> None:
        failing = self._step()
        if not failing or self.rng.random() < 0.5:
            self._names.change(folder, names)
            if replaced is not None:
                self._unlink(replaced)
        if failing:
            self._fail()

    def _book(self, inode: SimInode, before: int) -> None:
        if inode.linked:
            self._used_bytes += inode.pages.length - before

    def _unlink(self, inode: SimInode) -> None:
        self._used_bytes -= inode.pages.length
        inode.linked = False

    def _step(self) -> bool:
        """Count an operation; True when the power is to fail in the middle of it."""
        self.operations += 1
        if self.faults.slow and self._happens("slow", self.faults.slow) and self.clock is not None:
            self.clock.advance(self.faults.slow_s)
        return self.operations == self._crash_at or self._happens(
            "crash_by_chance", self.faults.crash
        )

    def _happens(self, kind: str, probability: float) -> bool:
        if not probability or self.rng.random() >= probability:
            return False
        self.counts[kind] += 1
        return True

    def _fail(self) -> NoReturn:
        self.counts["crash_in_operation"] += 1
        self.power_off()
        raise SimCrash("the simulated power failed in the middle of this operation")


def _parent(path: str) -> str:
    return path.strip("/").rpartition("/")[0]


# -- open files and the lock ----------------------------------------------------------------------


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
        """Nothing to do: everything stays in memory."""

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


# -- bytes of one file ----------------------------------------------------------------------------

SECTOR_BYTES = 512  # what a disk writes at once; smaller than any page, so the harsher choice

# How often a surviving sector that was written several times shows an earlier of its versions.
STALE_SHARE = 0.25


@dataclass(slots=True)
class Change:
    """One unsynced change: bytes written at an offset, or (`new` is None) a new length."""

    offset: int
    new: bytes | None
    old: bytes
    old_length: int
    synced: bool = False  # only kept because an earlier change was lost by a failed sync
    doomed: bool = False  # its sync failed: the kernel has forgotten that it is not on disk


@dataclass(frozen=True, slots=True)
class Fate:
    """How far one sector got: changes below `moment` reached it, the last of them up to `cut`."""

    moment: int
    cut: int = SECTOR_BYTES
    zeros: bool = False


class SimInode:
    """One simulated file: live bytes, and the changes that a crash may still lose."""

    __slots__ = ("_dropped", "_size_floor", "failed_syncs", "linked", "log", "number", "pages")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pages = Pages()
        self.log: list[Change] = []
        self.linked = True
        self.failed_syncs = 0
        self._dropped = False  # a failed sync has left doomed changes in the log
        self._size_floor = 0  # lengths set by changes below this index are durable

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite or extend; unsynced."""
        if not data:
            return
        pages = self.pages
        old = b""
        if offset < pages.written:
            old = bytes(pages.read(offset, min(len(data), pages.written - offset)))
        self.log.append(Change(offset, data, old, pages.length))
        pages.write(offset, data)

    def reserve(self, size: int) -> None:
        """Extend with zeros; unsynced."""
        self.log.append(Change(size, None, b"", self.pages.length))
        self.pages.reserve(size)

    def truncate(self, size: int) -> None:
        """Cut or extend; unsynced."""
        cut = b""
        if size < self.pages.written:
            cut = bytes(self.pages.read(size, self.pages.written - size))
        self.log.append(Change(size, None, cut, self.pages.length))
        self.pages.truncate(size)

    def sync(self) -> None:
        """Make everything durable, except what an earlier failed sync dropped."""
        if not self._dropped:
            self.log.clear()
            self._size_floor = 0
            return
        for change in self.log:
            change.synced = change.synced or not change.doomed
        self._size_floor = len(self.log)

    def fail_sync(self) -> None:
        """Forget, as Linux does after EIO, that the waiting changes are not on the disk."""
        self._dropped = True
        self.failed_syncs += 1
        for change in self.log:
            change.doomed = not change.synced

    def flip(self, offset: int, bit: int) -> None:
        """Turn one bit of the stored bytes; views taken before keep the good copy."""
        self.pages = self.pages.copy()
        byte = self.pages.read(offset, 1)[0] ^ (1 << bit)
        self.pages.write(offset, bytes([byte]))

    def copy(self) -> SimInode:
        """An independent file with the same bytes and the same doubt about them."""
        twin = SimInode(self.number)
        twin.pages = self.pages.copy()
        twin.log = [
            Change(c.offset, c.new, c.old, c.old_length, c.synced, c.doomed) for c in self.log
        ]
        twin.linked = self.linked
        twin._size_floor, twin._dropped = self._size_floor, self._dropped
        twin.failed_syncs = self.failed_syncs
        return twin

    def crash(self, rng: Random, *, lost: float, torn: float, counts: Counter[str]) -> None:
        """Decide every unsynced change by the dice; the result is durable."""
        if not self.log:
            return
        pages = self.pages.copy()
        self._undo(pages)
        fates = self._draw(rng, lost, torn, counts)
        self._redo(pages, fates, self._size_moment(rng, lost))
        self.pages = pages
        self.log = []
        self._size_floor, self._dropped = 0, False

    def _undo(self, pages: Pages) -> None:
        for change in reversed(self.log):
            old = change.old if change.new is None else change.old.ljust(len(change.new), b"\0")
            if old:
                pages.write(change.offset, old)
            pages.length = change.old_length

    def _size_moment(self, rng: Random, lost: float) -> int:
        count = len(self.log)
        if rng.random() < lost:
            return self._size_floor
        stale = lost and rng.random() < STALE_SHARE
        return rng.randint(self._size_floor, count) if stale else count

    def _draw(self, rng: Random, lost: float, torn: float, counts: Counter[str]) -> dict[int, Fate]:
        """The fate of each touched sector, and the count of each kind of fate."""
        touched: dict[int, list[int]] = {}
        for index, change in enumerate(self.log):
            for sector, _, _ in _slices(change):
                touched.setdefault(sector, []).append(index)
        fates: dict[int, Fate] = {}
        first_lost: tuple[int, int] | None = None
        for sector, indexes in touched.items():
            fate = fates[sector] = self._fate(rng, indexes, lost, torn)
            missing = next((index for index in indexes if index >= fate.moment), None)
            if missing is not None:
                counts["lost_sectors"] += 1
                first_lost = min(first_lost or (missing, sector), (missing, sector))
            elif fate.cut < SECTOR_BYTES:
                counts["torn_sectors"] += 1
            else:
                counts["kept_sectors"] += 1
        if first_lost is not None:
            counts["reordered_sectors"] += sum(
                indexes[-1] < fates[sector].moment and (indexes[-1], sector) > first_lost
                for sector, indexes in touched.items()
            )
        return fates

    def _fate(self, rng: Random, indexes: list[int], lost: float, torn: float) -> Fate:
        # A later sync of the same sector carried everything before it to the disk.
        floor = max((index + 1 for index in indexes if self.log[index].synced), default=0)
        if rng.random() < lost:
            return Fate(floor)
        moment = len(self.log)
        if lost and len(indexes) > 1 and rng.random() < STALE_SHARE:
            moment = max(floor, rng.choice(indexes))
        if floor == 0 and rng.random() < torn:
            return Fate(moment, rng.randrange(SECTOR_BYTES), rng.random() < 0.5)
        return Fate(moment)

    def _redo(self, pages: Pages, fates: dict[int, Fate], size_moment: int) -> None:
        size = pages.length
        for index, change in enumerate(self.log):
            if change.new is None:
                if index < size_moment and change.offset < change.old_length:
                    pages.truncate(change.offset)
                    size = change.offset
                elif index < size_moment:
                    size = change.offset
                continue
            if index < size_moment:
                size = max(size, change.offset + len(change.new))
            for sector, start, end in _slices(change):
                fate = fates[sector]
                if index < fate.moment:
                    _land(pages, change, start, end, sector * SECTOR_BYTES + fate.cut, fate.zeros)
        pages.truncate(size)


def _slices(change: Change) -> Iterator[tuple[int, int, int]]:
    """The sectors a written change covers: number, first byte, end."""
    if change.new is None:
        return
    start, stop = change.offset, change.offset + len(change.new)
    while start < stop:
        sector = start // SECTOR_BYTES
        end = min(stop, (sector + 1) * SECTOR_BYTES)
        yield sector, start, end
        start = end


def _land(pages: Pages, change: Change, start: int, end: int, cut: int, zeros: bool) -> None:
    """Put one sector's share of a change on the disk, only up to `cut` when it is torn."""
    assert change.new is not None
    whole = max(start, min(end, cut))
    if start < whole:
        pages.write(start, change.new[start - change.offset : whole - change.offset])
    # Zeros only where nothing lay before: a sector is torn between its old and its new bytes.
    blank = max(whole, change.offset + len(change.old))
    if zeros and blank < end:
        pages.write(blank, bytes(end - blank))


# -- names ----------------------------------------------------------------------------------------

Names = list[tuple[str, "SimInode | None"]]  # None: the name goes away


@dataclass(slots=True, eq=False)
class NameChange:
    """One unsynced change of names, durable with its folder: all of it or nothing."""

    folder: str
    names: Names


class SimNames:
    """The names of a simulated disk, live and durable.

    >>> from collections import Counter
    >>> from random import Random
    >>> from penstock.testing.simulation.disk import SimInode
    >>> names = SimNames()
    >>> names.change("", [("a", SimInode(1))])
    >>> names.crash(Random(1), lost=1.0, counts=Counter()).live.has("a")
    False
    """

    def __init__(self) -> None:
        self.live: Tree[SimInode] = Tree()
        self._durable: Tree[SimInode] = Tree()
        self._pending: list[NameChange] = []

    def make(self, folder: str) -> None:
        """Make a folder; durable at once, as the `Disk` contract says."""
        self.live.make(folder)
        self._durable.make(folder)

    def change(self, folder: str, names: Names) -> None:
        """Set and remove names in one step, durable with the next sync of `folder`."""
        self._pending.append(NameChange(folder, names))
        _apply(self.live, names)

    def sync(self, folder: str) -> None:
        """Make the changes that belong to a folder durable."""
        for change in [change for change in self._pending if change.folder == folder]:
            self._make_durable(change)

    def crash(self, rng: Random, *, lost: float, counts: Counter[str]) -> SimNames:
        """The names that the next life finds."""
        for change in self._pending[:]:
            survives = rng.random() >= lost
            counts["kept_names" if survives else "lost_names"] += 1
            if survives:
                self._make_durable(change)
        after = SimNames()
        after._durable = self._durable
        after.live = self._durable.copy()
        return after

    def lose(self, path: str) -> SimInode:
        """Take a name away everywhere, the durable tree included."""
        inode = self.live.take(path)
        self._forget(path, len(self._pending))
        _apply(self._durable, [(path, None)])
        return inode

    def copy(self, twin_of: Callable[[SimInode], SimInode]) -> SimNames:
        """The same names for copies of the files."""
        twin = SimNames()
        for theirs, ours in ((self.live, twin.live), (self._durable, twin._durable)):
            for folder in theirs.folders():
                ours.make(folder)
            for path, inode in theirs.walk():
                ours.put(path, twin_of(inode))
        twin._pending = [
            NameChange(
                change.folder, [(path, node and twin_of(node)) for path, node in change.names]
            )
            for change in self._pending
        ]
        return twin

    def _make_durable(self, change: NameChange) -> None:
        position = self._pending.index(change)
        for path, _ in change.names:
            self._forget(path, position)
        _apply(self._durable, change.names)
        self._pending.pop(position)

    def _forget(self, path: str, position: int) -> None:
        # An earlier change of the same name must not be applied after this one.
        for change in self._pending[:position]:
            change.names = [(name, inode) for name, inode in change.names if name != path]


def _apply(tree: Tree[SimInode], names: Names) -> None:
    for path, inode in names:
        if inode is not None:
            tree.put(path, inode)
        elif tree.has(path):
            tree.take(path)
