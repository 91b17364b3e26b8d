"""Repair: sets aside the journal entries that keep a folder from opening, and nothing else.

Only for a folder that no writer has. The audit chain says what is set aside before it is; then the
file with the entries is replaced in one step. A repair that was interrupted is begun again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.audit import AuditEntry
from penstock.log.audit_log import AuditLog
from penstock.log.journal import file_bases, file_name, frames
from penstock.log.recovery import check_folder
from penstock.log.snapshot import Fold
from penstock.log.unreadable import SET_ASIDE, Unreadable, load_set_aside, save_set_aside

if TYPE_CHECKING:
    from penstock.log.disk import Disk
    from penstock.model.settings import Settings

OPERATION = "journal.repair"
TARGETS = 1_000  # in one audit record, which has a bound


def unreadable_entries(disk: Disk, settings: Settings) -> list[Unreadable]:
    """Every entry behind the newest snapshot that recovery could not read; changes nothing."""
    check_folder(disk, write=False)
    fold = Fold.load(disk, settings.dedup)
    found = fold.entries.found = []
    for base in file_bases(disk):
        file = disk.open(file_name(base))
        try:
            view = file.read(0, file.size())
            for frame in frames(view, base, base, base + len(view)):
                if frame.position >= fold.position:
                    fold.take(frame)
        finally:
            file.close()
    return found


def repair(
    disk: Disk, settings: Settings, *, actor: str, at_us: int, entropy: bytes
) -> list[Unreadable]:
    """Set aside what cannot be read; returns what that was. FolderLocked while a writer has it."""
    check_folder(disk, write=False)
    lock = disk.lock()
    try:
        found = unreadable_entries(disk, settings)
        if found:
            _audit(disk, found, actor=actor, at_us=at_us, entropy=entropy)
            save_set_aside(disk, [*load_set_aside(disk), *found])
        return found
    finally:
        lock.release()


def _audit(disk: Disk, found: list[Unreadable], *, actor: str, at_us: int, entropy: bytes) -> None:
    log = AuditLog.open(disk, now_us=at_us, entropy=entropy)
    try:
        said = [record.targets for record in log.records(operation=OPERATION)]
        named = [f"{each.file}@{each.offset}/{each.inner}/{each.number}" for each in found]
        chunks = [named[at : at + TARGETS] for at in range(0, len(named), TARGETS)]
        log.append_many(
            AuditEntry(
                at_us=at_us,
                actor=actor,
                operation=OPERATION,
                targets=targets,
                reason="entries that cannot be read",
                prior={"status": "unreadable"},
                result={"status": "set aside", "kept_in": SET_ASIDE},
            )
            for targets in chunks
            if targets not in said  # by a repair that ended before the file was there
        )
    finally:
        log.close()
