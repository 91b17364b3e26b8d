"""A disk that lies within the rules: the simulator's `Disk`, with crashes and faults by seed.

Bytes are durable after `File.sync`, names after `Disk.sync_dir`, and nothing else is: the strict
reading of POSIX. `crash` decides by the seed what of the rest survived and gives back the disk as
the next process finds it; the old object and every handle from it are dead for good. The same
seed and the same calls always give the same bytes.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NoReturn, Protocol

from penstock.log.pages import os_error
from penstock.model.errors import FolderLocked
from penstock.testing.sim_file import SimFile, SimLock
from penstock.testing.sim_inode import SimInode
from penstock.testing.sim_names import Names, SimNames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


UNLIMITED_BYTES = 1 << 40  # what a disk without a set capacity has: more than any run writes

# Each crash draws one of these as its share of lost sectors and names: mixed dice alone would
# hardly ever show the plain cases, in which everything or nothing survives.
LOST_SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)
MAX_OPENINGS = 8  # of one file at a time, for syncs side by side


class SimCrash(BaseException):
    """The simulated power is off. Not an `Exception`, so that no handler carries on regardless."""


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
    penstock.testing.sim_disk.SimCrash: the power is off
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
        """Sync a file by one of its openings: each hears once of what failed since it last did."""
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
        return memoryview(
            bytearray(size)
        )  # a crash here is a power failure, which it does not outlive

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
        """Cut the power, settle what was unsynced, and return the disk of the next life."""
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
        """Let a file vanish, as after a repair that could not save it."""
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
