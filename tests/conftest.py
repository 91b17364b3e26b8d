"""What tests of the log and the engine share: folders as values, and a bus under simulated time."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.log.disk import Disk
from penstock.log.journal import Journal
from penstock.log.memory_disk import MemoryDisk
from penstock.log.recovery import FOLDERS, open_for_writing
from penstock.model.settings import Settings
from penstock.model.settings_loader import load
from penstock.testing.simulation.disk import SimCrash, SimDisk
from penstock.testing.simulation.loop import LoopRuntime, SimClock, SimLoop, kill

# Small files, no process of its own, little grace: everything happens, and soon.
# In the background a shell has its programs ignore Ctrl-C, and these theirs: tests interrupt some.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL = {
    "journal.file_bytes": 1 << 20,
    "sealing.process": False,
    "sealing.grace_s": 0.5,
    "sealing.min_segment_bytes": 1 << 12,
}


def small_settings(**flags: Any) -> Settings:
    """Settings under which files roll and are sealed soon; flags as for `connect`."""
    return load(None, {}, {**SMALL, **{k.replace("__", ".", 1): v for k, v in flags.items()}})


@pytest_asyncio.fixture
async def mem() -> AsyncIterator[penstock.Bus]:
    """A bus on `mem:`."""
    async with penstock.connect("mem:") as bus:
        yield bus


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncIterator[penstock.Bus]:
    """A bus on a folder."""
    async with penstock.connect(tmp_path / "data", settings=small_settings()) as bus:
        yield bus


class Folder:
    """A data folder on a disk, by hand: commits, contents, damage."""

    def __init__(self, disk: Disk | None = None, settings: Settings | None = None) -> None:
        self.disk: Any = disk if disk is not None else MemoryDisk()
        self.settings = settings or small_settings()
        self.recovered = open_for_writing(self.disk, self.settings)
        self.journal = Journal(
            self.disk,
            self.settings.journal,
            position=self.recovered.position,
            epoch=self.recovered.epoch + 1,
        )

    def commit(
        self, entries: Sequence[tuple[int, Sequence[bytes]]], *, sync: bool = True, now_us: int = 1
    ) -> Any:
        """Write one commit, as the commit loop does."""
        size = sum(64 + sum(map(len, parts)) for _, parts in entries)
        if wanted := self.journal.spare_wanted(size):
            self.journal.prepare(wanted)
        commit = self.journal.begin(now_us, size)
        for kind, parts in entries:
            commit.add(kind, parts)
        self.journal.place(commit)
        self.journal.write(commit, sync=sync)
        return commit

    def files(self) -> dict[str, bytes]:
        """Every file of the folder by path."""
        return contents(self.disk)


def contents(disk: Any) -> dict[str, bytes]:
    """Every file of a disk by path."""
    found: dict[str, bytes] = {}
    for folder in ("", *FOLDERS):
        for name in disk.list(folder):
            path = f"{folder}/{name}" if folder else name
            if path in FOLDERS:
                continue
            file = disk.open(path)
            found[path] = bytes(file.read(0, file.size()))
            file.close()
    return found


def disk_of(files: dict[str, bytes]) -> MemoryDisk:
    """A disk with these files and nothing else."""
    disk = MemoryDisk()
    for folder in FOLDERS:
        disk.make_dir(folder)
    for path, data in files.items():
        file = disk.open(path, create=True)
        file.append([data])
        file.close()
    return disk


def hashes(root: Path) -> dict[str, str]:
    """Every file below a path, by its SHA-256; the lock says who holds it and is left out."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


class ClockRuntime(LoopRuntime):
    """A runtime whose wall clock a test sets."""

    def __init__(self, wall_us: Callable[[], int]) -> None:
        super().__init__()
        self.wall_us = wall_us  # type: ignore[method-assign]


class World:
    """An engine under virtual time on a simulated disk, through several lives."""

    def __init__(self, seed: int = 0, **flags: Any) -> None:
        self.settings = small_settings(**flags)
        self.disk = SimDisk(seed)
        self.loop = SimLoop(seed)
        self.clock = SimClock(self.loop)

    def connect(self) -> penstock.Bus:
        """A bus on the simulated disk; not open yet."""
        engine = EmbeddedEngine(self.disk, self.settings, ClockRuntime(self.clock.wall_us))
        bus = penstock.Bus(engine, self.settings, penstock.Identity(), engine.capabilities)
        bus.wall_us = self.clock.wall_us  # type: ignore[method-assign]
        return bus

    def run(self, work: Callable[[penstock.Bus], Coroutine[Any, Any, Any]]) -> Any:
        """Open the bus, do the work, close it."""

        async def life() -> Any:
            async with self.connect() as bus:
                return await work(bus)

        return self.loop.run_until_complete(life())

    def run_and_die(
        self, work: Callable[[penstock.Bus], Coroutine[Any, Any, Any]], *, power: bool
    ) -> Any:
        """Open the bus, do the work, and die: of a kill, or of a power failure.

        The work may set `disk.crash_at`; then the power fails in the middle of it.
        """

        async def life() -> Any:
            bus = self.connect()
            await bus.open()
            return await work(bus)

        result, before = None, self.disk
        before.on_power_off = self.loop.halt
        with contextlib.suppress(SimCrash):
            result = self.loop.run_until_complete(life())
        before.on_power_off = None
        # A killed process loses nothing that it wrote: the page cache stays.
        after = before.crash() if power else before.fork(seed=1)
        before.power_off()
        start_s = self.loop.time()
        kill(self.loop)
        self.disk = after
        self.loop = SimLoop(7, start_s=start_s)
        self.clock.loop = self.loop
        return result


@pytest.fixture
def world() -> Callable[..., World]:
    """Makes simulated worlds."""
    return World


@pytest.fixture
def folder() -> Callable[..., Folder]:
    """Makes data folders by hand."""
    return Folder


@pytest.fixture(scope="session")
def small() -> Callable[..., Settings]:
    """Makes settings under which everything happens soon."""
    return small_settings


@pytest.fixture
def disk_with() -> Callable[[dict[str, bytes]], MemoryDisk]:
    """Makes disks from files."""
    return disk_of


@pytest.fixture
def files_of() -> Callable[[Any], dict[str, bytes]]:
    """Reads all files of a disk."""
    return contents


@pytest.fixture
def hashes_of() -> Callable[[Path], dict[str, str]]:
    """Hashes all files below a path."""
    return hashes
