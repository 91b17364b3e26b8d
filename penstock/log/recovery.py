"""Recovery: from a folder to a running log, or a clear refusal.

The journal is read from the newest snapshot on. An interrupted write at its very end is cut off:
it was never acknowledged. Anything else that does not fit (a hole, a missing file, damage below
what was acknowledged) is refused with the place named, and nothing is deleted.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import msgspec

from penstock.core.entry import Audited
from penstock.log.disk import UNFINISHED, Disk, File, read_file, write_file
from penstock.log.event_log import EventLog
from penstock.log.journal import (
    CONTROL,
    FILE_HEADER,
    FOLDER,
    FORMAT,
    GROUP,
    SPARE,
    WATERMARK,
    FileHeader,
    JournalFrame,
    Watermark,
    batches_in,
    file_bases,
    file_name,
    frames,
    later_frames,
    read_group,
    written_blocks,
)
from penstock.log.manifest import Manifest
from penstock.log.snapshot import Fold
from penstock.model.batch import BatchHead, measured
from penstock.model.errors import Corrupted, FormatTooNew, NotADataFolder, OffsetExpired
from penstock.model.settings import Settings

ABOUT = "penstock.json"
FOLDERS = (FOLDER, "segments", "state", "side", "audit")
READ_ATTEMPTS = 5  # of a reader whose files are reclaimed under its hands
STAGING = "staging"
"""Where Spark's tasks leave rows until their driver publishes them; may be there before the rest."""


class Recovered(NamedTuple):
    """What a folder held."""

    log: EventLog
    fold: Fold
    position: int
    """Where the next journal entry goes."""
    epoch: int
    """The highest epoch seen; a writer takes the next."""
    torn_bytes: int
    """Bytes, rounded up to blocks, of an interrupted write that was cut off; it was never acknowledged."""
    audited: list[tuple[int, Audited]]
    """Operator actions in the journal, by reference, for the audit chain to catch up with."""
    side: dict[bytes, int]
    """Payloads in side files: token and the position of the entry that names it."""
    snapshot_at: int
    """Position of the snapshot the recovery began with."""
    unsealed: dict[int, dict[str, int]]
    """Event bytes of each tenant in the journal, by the base of the file; empty unless measured."""


def refuse_foreign(disk: Disk) -> None:
    """Refuse a folder with files that are not a bus's; leaves it as it is, without a lock file too."""
    if disk.exists(ABOUT) or disk.list(FOLDER):
        return
    # The process may have died while it made the folder, before its first file had its name.
    ours = ("lock", STAGING, *FOLDERS, f"{ABOUT}{UNFINISHED}")
    others = [name for name in disk.list("") if name not in ours]
    if others:
        raise NotADataFolder(
            f"this is no Penstock folder: it holds {others[:3]}. Choose an empty or a new folder",
            found=others[:10],
        )


def check_folder(disk: Disk, *, write: bool) -> None:
    """Refuse what is no data folder or too new; make a new one when writing."""
    if disk.exists(ABOUT):
        try:
            version = int(json.loads(read_file(disk, ABOUT))["format"])
        except (ValueError, KeyError, TypeError):
            raise Corrupted(
                f'{ABOUT} cannot be read; write {{"format": {FORMAT}}} into it if this is a '
                "Penstock folder",
                path=ABOUT,
            ) from None
        if version > FORMAT:
            raise FormatTooNew(
                f"the folder has format {version}, this Penstock reads up to {FORMAT}. Upgrade "
                "Penstock; nothing was changed",
                version=version,
            )
        return
    if disk.list(FOLDER):
        # It is written before the first journal file, so it was there.
        raise Corrupted(
            f"{ABOUT} is missing beside a journal; nothing was changed. Restore it from a copy, or "
            f'write {{"format": {FORMAT}}} into it if this is a Penstock folder',
            path=ABOUT,
        )
    refuse_foreign(disk)
    if not write:
        raise NotADataFolder(
            "this is no Penstock folder: it is empty. Choose an empty or a new folder", found=[]
        )
    for folder in FOLDERS:
        disk.make_dir(folder)
    write_file(disk, ABOUT, [json.dumps({"format": FORMAT, "made by": "penstock"}).encode()])


class Recovery:
    """One reading of the journal, shared by writers (once) and read-only readers (again and again)."""

    def __init__(
        self, disk: Disk, settings: Settings, *, write: bool, measure: bool | None = None
    ) -> None:
        self.disk = disk
        self.write = write
        self.measure = write if measure is None else measure
        """Whether to sum up what tenants have in the journal; compressed batches cost some time."""
        self.manifest = Manifest.load(disk, write=write)
        self.log = EventLog(disk, self.manifest, cache_bytes=settings.limits.cache_bytes)
        self.fold = Fold.load(disk, settings.dedup)
        self.snapshot_at = self.fold.position
        self.epoch = 0
        self.torn_bytes = 0
        self.audited: list[tuple[int, Audited]] = []
        self.watermark, self._promised = self._read_watermark()
        self.position = min(self.fold.position, self.manifest.sealed_to)
        self._indexed = self.manifest.sealed_to
        self.side: dict[bytes, int] = {}
        self.unsealed: dict[int, dict[str, int]] = {}
        self._settings = settings
        self._continue_ends()

    def _continue_ends(self) -> None:
        """Partitions go on where the snapshot says, also where retention took all they had."""
        for topic, ends in self.fold.ends.items():
            for partition, (end, time_us) in enumerate(ends):
                log = self.log.partition(topic, partition)
                log.end = log.next = max(log.end, end)
                log.last_time_us = max(log.last_time_us, time_us)

    def _read_watermark(self) -> tuple[int, int]:
        """How far the journal may be read, and how far it is sure to be there."""
        if not self.disk.exists(WATERMARK):
            return 0, 0
        mark = Watermark(self.disk, write=False)
        try:
            return mark.positions()
        finally:
            mark.close()

    def run(self) -> Recovered:
        """Read everything there is."""
        bases = file_bases(self.disk)
        if not self.write:
            # A writer that is starting, or syncs now and then, has files its watermark is not at yet.
            bases = [base for base in bases if base <= self.watermark]
        wanted = [base for base in bases if base >= self.position]
        older = [base for base in bases if base < self.position]
        if older and (not wanted or wanted[0] != self.position):
            wanted.insert(0, older[-1])
        self._check_start(wanted)
        for number, base in enumerate(wanted):
            following = wanted[number + 1] if number + 1 < len(wanted) else None
            self._read_file(base, following)
        if self.position < self._promised:
            raise self._hole(file_name(wanted[-1]) if wanted else FOLDER, self.position)
        return Recovered(
            self.log, self.fold, self.position, self.epoch, self.torn_bytes, self.audited,
            self.side, self.snapshot_at, self.unsealed,
        )  # fmt: skip

    def advance(self) -> bool:
        """Read on as far as the writer, in another process, has published; for read-only readers."""
        before = self.position
        watermark, promised = self._read_watermark()
        self.watermark = max(self.watermark, watermark)
        self._promised = max(self._promised, promised)
        changed = self.manifest.refresh()
        while self.position < self.watermark:
            bases = [base for base in file_bases(self.disk) if base <= self.position]
            if not bases:
                self._skip_reclaimed()
                continue
            here = self.position
            try:
                self._read_on(bases[-1])
            except FileNotFoundError:  # since it was listed
                continue
            if self.position == here:
                if here >= self._promised:
                    break  # `fsync = never`: the power failure took what the watermark showed
                raise self._hole(file_name(bases[-1]), here)
        if changed:
            self._indexed = max(self._indexed, self.manifest.sealed_to)
            self.log.sealed(self.manifest.sealed_to)
        return changed or self.position != before

    def _skip_reclaimed(self) -> None:
        """The writer reclaimed journal before it was read here: segments and a snapshot have it."""
        fold = Fold.load(self.disk, self._settings.dedup)
        self.manifest.refresh()
        position = min(fold.position, self.manifest.sealed_to)
        if position <= self.position:
            raise OffsetExpired(
                "the writer reclaimed the journal before it was read here; open the folder again"
            )
        self.fold, self.position = fold, position
        self._indexed = self.manifest.sealed_to
        self.log.sealed(self.manifest.sealed_to)
        self._continue_ends()

    def _read_on(self, base: int) -> None:
        file = self.disk.open(file_name(base))
        try:
            view = file.read(0, file.size())
            for frame in frames(view, base, self.position, min(base + len(view), self.watermark)):
                self._take(base, frame)
                self.position = frame.end
        finally:
            file.close()

    def _check_start(self, wanted: list[int]) -> None:
        first = wanted[0] if wanted else self._promised
        if first > self.position:
            unnamed = self.manifest.unnamed()
            if unnamed:
                path = self.manifest.path
                raise Corrupted(
                    f"{path} is cut, or an older copy: it ends at position {self.position} of the "
                    f"journal, which begins at {first}, and it does not name {len(unnamed)} segment "
                    f"files that are there ({unnamed[0]}). Restore it from a backup; if it is whole, "
                    f"{file_name(self.position)} is missing. Nothing was deleted",
                    path=path,
                    position=self.position,
                )
            raise Corrupted(
                f"{file_name(self.position)} is missing: the journal before {first} is neither in "
                "a file nor sealed. Restore it from a copy; nothing was deleted",
                path=file_name(self.position),
                position=self.position,
            )

    def _read_file(self, base: int, following: int | None) -> None:
        file = self.disk.open(file_name(base), write=self.write)
        try:
            view = file.read(0, file.size())
            limit = base + len(view)
            if not self.write:
                limit = min(limit, self.watermark)
            position = durable = base
            for frame in frames(view, base, base, limit):
                position, durable = frame.end, max(durable, frame.durable)
                self._take(base, frame)
            if following is not None:
                if position != following:
                    raise self._hole(file_name(base), position)
            elif self.write:
                self._check_tail(base, file, position)
                self._cut_tail(base, file, position)
                if position == base:
                    return
                # After a failed fsync the page cache shows bytes that the disk does not have, and
                # another fsync would not write them: write again what nothing proves durable.
                file.write_at(durable - base, bytes(view[durable - base : position - base]))
                file.truncate(position - base)
                file.sync()
        finally:
            file.close()
        self.position = max(self.position, position)

    def _take(self, base: int, frame: JournalFrame) -> None:
        self.epoch = max(self.epoch, frame.epoch)
        if frame.kind == FILE_HEADER:
            header = msgspec.msgpack.decode(frame.body, type=FileHeader)
            if header.format > FORMAT:
                raise FormatTooNew(
                    f"{file_name(base)} has format {header.format}, this Penstock reads up to "
                    f"{FORMAT}. Upgrade Penstock; nothing was changed",
                    version=header.format,
                )
            return
        if frame.position >= self._indexed:
            for inner, body in batches_in(frame):
                head = BatchHead.parse(body)
                log = self.log.partition(head.topic, head.partition)
                log.add(head, base, frame.position, inner)
                if self.measure:
                    of_file = self.unsealed.setdefault(base, {})
                    size = measured(head, body).events
                    of_file[head.tenant] = of_file.get(head.tenant, 0) + size
                if head.side_bytes:
                    self.side[head.token_base] = frame.position
        if frame.position >= self.fold.position:
            self.fold.take(frame)
        self._collect_audit(frame)

    def _collect_audit(self, frame: JournalFrame) -> None:
        bodies = [(0, frame.body)] if frame.kind == CONTROL else []
        if frame.kind == GROUP:
            parts = read_group(frame.body)
            bodies = [(inner, body) for inner, kind, body in parts if kind == CONTROL]
        number = 0
        for inner, body in bodies:
            if b"audited" not in bytes(body):
                continue
            for _, entry in self.fold.entries.read(body, frame.position, inner):
                if isinstance(entry, Audited):
                    self.audited.append((frame.position + number, entry))
                    number += 1

    def _check_tail(self, base: int, file: File, end: int) -> None:
        """A broken frame at the end is an interrupted write only if nothing proves it was durable."""
        if end < self._promised:
            raise self._hole(file_name(base), end)
        for frame in later_frames(file, base, end):
            if frame.durable > end:
                raise self._hole(file_name(base), end)

    def _cut_tail(self, base: int, file: File, end: int) -> None:
        self.torn_bytes += sum(len(block) for _, block in written_blocks(file, end - base))
        if end == base:
            self.disk.remove(file_name(base))
            self.disk.sync_dir(FOLDER)

    def _hole(self, path: str, position: int) -> Corrupted:
        return Corrupted(
            f"{path} is damaged at position {position}, and what follows was acknowledged. Nothing "
            "was deleted. Restore the file from a backup; `penstock doctor --deep` says whether the "
            "sealed files, which have the older events, are whole",
            path=path,
            position=position,
        )


def open_for_reading(disk: Disk, settings: Settings) -> Recovery:
    """Recover a folder that another process may be writing, and reclaiming while it is read here."""
    for attempt in range(READ_ATTEMPTS):
        check_folder(disk, write=False)
        recovery = Recovery(disk, settings, write=False)
        before = file_bases(disk)[:1]
        try:
            recovery.run()
        except (FileNotFoundError, Corrupted):
            recovery.log.close()
            recovery.manifest.close()
            if attempt + 1 == READ_ATTEMPTS or file_bases(disk)[:1] == before:
                raise  # nothing moved: it is damage
        else:
            return recovery
    raise AssertionError("the last attempt raises")


def open_for_writing(disk: Disk, settings: Settings) -> Recovered:
    """Recover a folder whose lock is held."""
    check_folder(disk, write=True)
    for folder in FOLDERS:
        disk.make_dir(folder)
    recovered = Recovery(disk, settings, write=True).run()
    if disk.exists(SPARE):  # only now: a folder that is refused stays as it is
        disk.remove(SPARE)
    return recovered
