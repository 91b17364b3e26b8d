"""What a power cut leaves of one file: the crash model of the simulated disk, sector by sector.

A `SimInode` holds the bytes as the running process sees them and a log of the changes that no
sync has made durable. At a crash each 512-byte sector decides alone up to which change it had
reached the platter, so a later write may survive an earlier one. A torn sector keeps only a front
part of its new bytes; the rest is old, or zero where nothing was. Bytes that no unsynced change
touched never move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.log.pages import Pages

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from random import Random

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
    """How far one sector got: changes below `moment` reached it, the last ones up to `cut`."""

    moment: int
    cut: int = SECTOR_BYTES
    zeros: bool = False


class SimInode:
    """One simulated file: live bytes, and what of them a crash may still take."""

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
        """Settle every unsynced change by the dice; the result is durable."""
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
