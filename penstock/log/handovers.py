"""Handovers: which leased events consumers were given, in a file that outlives the process.

A lease is in the journal before its events are handed out, and covers many of them. Which of them a
consumer was given changes with every event, so it is kept in shared memory: the operating system has
it when the process is killed, and an attempt is counted for those events and no others. It is not
synced. After a power failure it is not known, and everything that was leased counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableSequence
from pathlib import Path
from typing import cast

from penstock.core.delivery import Handed
from penstock.core.lease import Lease
from penstock.log.disk import Disk

FILE = "handovers"
MAGIC = 0x31_53_44_4E_41_48_50_01
# Leases of which something was handed out and is not settled. Beyond, attempts count after a crash
# whether an event was handed out or not.
MAX_LEASES = 4_096
FIRST_LEASES = 64
SLOT = 4  # numbers: place, first offset, attempt, the offset behind the last that was handed out
HEAD = 8  # numbers: magic, boot, epoch, half in use, whether there were too many leases
WORD = 8
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Handovers:
    """The file, in two halves: what the last process noted, and what this one does.

    >>> from penstock.core.lease import Lane, Member, Run
    >>> from penstock.log.memory_disk import MemoryDisk
    >>> handovers = Handovers(MemoryDisk(), epoch=0)
    >>> lease = Lease(1, Run(Lane("orders", 0, 0, 9), 0, 9, 0), Member("m", 9))
    >>> handovers.mark("billing", lease)[0] = 4
    >>> handovers.begin(epoch=1)
    """

    def __init__(self, disk: Disk, epoch: int) -> None:
        """`epoch`: that of the last process which wrote to the journal."""
        size = (HEAD + 2 * SLOT * MAX_LEASES) * WORD
        self._words = disk.shared(FILE, size).cast("Q")
        self._boot = _boot()
        magic, boot, began, half, crowded = self._words[:5]
        self._before: dict[int, list[tuple[int, int, int]]] | None = None
        if magic == MAGIC and boot == self._boot and began >= epoch and not crowded:
            self._before = self._noted(half & 1)
        self._half = (half & 1) ^ 1
        self._at = HEAD + self._half * SLOT * MAX_LEASES
        empty = memoryview(bytes(SLOT * MAX_LEASES * WORD)).cast("Q")
        self._words[self._at : self._at + SLOT * MAX_LEASES] = empty
        self._leases: list[Lease | None] = [None] * FIRST_LEASES
        self._free = list(range(FIRST_LEASES))
        self._places: dict[tuple[str, str, int], int] = {}

    def _noted(self, half: int) -> dict[int, list[tuple[int, int, int]]]:
        found: dict[int, list[tuple[int, int, int]]] = {}
        at = HEAD + half * SLOT * MAX_LEASES
        numbers = self._words[at : at + SLOT * MAX_LEASES].tolist()
        for slot in range(0, len(numbers), SLOT):
            place, start, attempt, stop = numbers[slot : slot + SLOT]
            if stop > start:
                found.setdefault(place, []).append((start, stop, attempt))
        return found

    def begin(self, epoch: int) -> None:
        """What the last process left is in the journal by now: from here on, this one's notes count."""
        words = self._words
        words[4] = 0
        words[1], words[2], words[3] = self._boot, epoch, self._half
        words[0] = MAGIC

    def handed(self, group: str, topic: str, partition: int) -> Handed:
        """What the last process handed out of a partition for a group."""
        noted = self._before
        if noted is None:
            return lambda start, stop, attempt: None
        slots = noted.get(self._place(group, topic, partition), [])

        def stretches(start: int, stop: int, attempt: int) -> list[tuple[int, int]]:
            found = sorted(
                (max(start, first), min(stop, last))
                for first, last, made in slots
                if made == attempt and first < stop and last > start
            )
            joined: list[tuple[int, int]] = []
            for first, last in found:
                if joined and first <= joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(joined[-1][1], last))
                else:
                    joined.append((first, last))
            return joined

        return stretches

    def mark(self, group: str, lease: Lease) -> MutableSequence[int]:
        """Where to note the offset behind the last event of a lease that was handed out."""
        if not self._free and not self._reclaim():
            self._words[4] = 1
            return [0]
        slot = self._free.pop()
        self._leases[slot] = lease
        at, lane, words = self._at + slot * SLOT, lease.lane, self._words
        words[at + 3] = 0
        words[at] = self._place(group, lane.topic, lane.partition)
        words[at + 1], words[at + 2] = lease.start, lease.attempt
        return cast(MutableSequence[int], words[at + 3 : at + 4])

    def _reclaim(self) -> bool:
        """Take back the slots of leases that ended; grow when there are few."""
        leases = self._leases
        for slot, lease in enumerate(leases):
            if lease is not None and not lease.open:
                leases[slot] = None
                self._free.append(slot)
        size = len(leases)
        if len(self._free) < size // 2 and size < MAX_LEASES:
            leases += [None] * size
            self._free += range(size, 2 * size)
        return bool(self._free)

    def forget(self, group: str, only: tuple[str, int] | None = None) -> None:
        """Forget what was handed out for a group, or of one partition for it."""
        for slot, lease in enumerate(self._leases):
            at = self._at + slot * SLOT
            if lease is not None:
                lane = lease.lane
                if only not in (None, (lane.topic, lane.partition)):
                    continue
                if self._words[at] == self._place(group, lane.topic, lane.partition):
                    self._words[at + 3] = 0

    def _place(self, group: str, topic: str, partition: int) -> int:
        place = (group, topic, partition)
        found = self._places.get(place)
        if found is None:
            digest = hashlib.blake2b("\0".join(map(str, place)).encode("utf-8", "surrogatepass"), digest_size=WORD)  # fmt: skip
            found = self._places[place] = int.from_bytes(digest.digest(), "little")
        return found


def _boot() -> int:
    """Which start of the operating system this is: what was not synced is gone after the next one."""
    try:
        return int.from_bytes(hashlib.blake2b(BOOT_ID.read_bytes(), digest_size=WORD).digest(), "little")  # fmt: skip
    except OSError:
        return int.from_bytes(os.urandom(WORD), "little")
