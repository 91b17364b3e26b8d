"""The memory engine behind `mem:`: the embedded engine on a disk in memory.

A test on `mem:` runs the same code as a bus on a folder, down to the last frame. The engine forgets
everything when it is closed.
"""

from __future__ import annotations

import msgspec

from penstock.engines.embedded.engine import CAPABILITIES, EmbeddedEngine
from penstock.engines.embedded.runtime import Runtime
from penstock.log.memory_disk import MemoryDisk
from penstock.model.settings import MIB, Settings

# Files take memory and nothing outlives the process, so small ones that are reclaimed early are better.
FILE_BYTES = 16 * MIB
# Long enough for a read that was planned just before its file was replaced.
GRACE_S = 1.0


class MemoryEngine(EmbeddedEngine):
    """A bus that lives in this process's memory."""

    capabilities = CAPABILITIES - {"durable"}

    def __init__(self, settings: Settings, runtime: Runtime | None = None) -> None:
        super().__init__(MemoryDisk(), in_memory(settings), runtime)


def in_memory(settings: Settings) -> Settings:
    """The settings that make sense without a disk: no syncs, no extra process, little grace."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        durability=replace(settings.durability, fsync="never"),
        journal=replace(settings.journal, file_bytes=min(settings.journal.file_bytes, FILE_BYTES)),
        sealing=replace(
            settings.sealing, process=False, grace_s=min(settings.sealing.grace_s, GRACE_S)
        ),
    )
