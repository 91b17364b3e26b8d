"""Sealing: journal files and small segments are rewritten as fewer and better segments, every event kept.

Sealing a journal file, folding shared segments and merging small ones are the same `run` with
different inputs. Events are sorted by topic and partition, and cut into runs (offsets that follow
each other within one UTC day). A run of at least `min_segment_bytes` becomes segments of its own;
the rest goes into shared segments. Before the inputs may go, the outputs are decoded and compared
with the inputs.

`plan_merge` chooses the segments to rewrite next. One rule bounds the work: a file is only rewritten
together with others that are, in sum, at least as large as itself. So each rewrite at least doubles
the file an event lies in, and an event is rewritten at most log2(target / min) times, six with the
default settings, before its file is full.

A `Sealer` runs rewrites: in a process of its own, so that publishing keeps its core, or in line. The
process runs the same interpreter, reads length-prefixed msgpack from its standard input and ends
with that input, so it ends when the parent dies. A job that fails leaves no file that counts, so it
can be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import queue
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from penstock.log.disk import Disk, RealDisk
from penstock.log.journal import Packed
from penstock.log.segment import (
    DAY_US,
    ContentHash,
    Range,
    SegmentInfo,
    Sized,
    row_groups,
    write_segment,
)
from penstock.log.segment_reader import GroupCache, SegmentReader
from penstock.model.batch import EventBatch, event_bytes
from penstock.model.errors import Corrupted, PenstockError, StorageError
from penstock.model.settings import Sealing

if TYPE_CHECKING:
    from penstock.log.manifest import Manifest

# Two or three neighbours are left alone: they will have more soon.
MIN_NEIGHBOURS = 4

JOURNAL_READER = "penstock.log.journal:sealed_batches"
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30  # far above any job: a larger length means that the input is damaged
NICENESS = 10  # sealing takes the time that publishing leaves
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0  # a sealer that cannot start is tried again twice a minute
STOP_TIMEOUT_S = 5.0


# -- one rewrite -----------------------------------------------------------------------------------


class JournalInput(msgspec.Struct, frozen=True):
    """One closed journal file: from its first position to its end."""

    base: int
    end: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One rewrite: what to read, what it replaces, how to write."""

    first_id: int
    settings: Sealing
    journal: list[JournalInput] = []
    segments: list[SegmentInfo] = []


class SealingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a rewrite: hand it to `Manifest.apply` as one change."""

    added: list[SegmentInfo]
    removed: list[int]
    sealed_to: int | None
    bytes_in: int
    bytes_out: int
    events: int


# Reads one closed journal file: (disk, its first position, its end).
BatchesOf = Callable[[Disk, int, int], Iterator[Packed]]


def run(disk: Disk, job: Job, batches_of: BatchesOf) -> SealingResult:
    """Do a rewrite. The inputs stay as they are; the outputs count once the manifest has them.

    Decoded at a time are a row group, the batches of a shared file and the file itself: a journal file
    may expand to many times its size.
    """
    batches, bytes_in = _read_inputs(disk, job, batches_of)
    events = sum(each.events for each in batches)
    added: list[SegmentInfo] = []
    for shared, part in cut_files(runs_of(batches), job.settings):
        groups = row_groups(part, job.settings.row_group_events)
        number = job.first_id + len(added)
        added.append(
            write_segment(disk, number, groups, shared=shared, zstd_level=job.settings.zstd_level)
        )
    prove(disk, job, added)
    if sum(info.rows for info in added) != events:
        raise Corrupted(f"a rewrite of {events} events wrote another number; its inputs were kept")
    return SealingResult(
        added=added,
        removed=[info.id for info in job.segments],
        sealed_to=job.journal[-1].end if job.journal else None,
        bytes_in=bytes_in,
        bytes_out=sum(info.size_bytes for info in added),
        events=events,
    )


def packed(batches: Iterable[EventBatch]) -> Iterator[Packed]:
    """Decoded batches in the form that `run` takes."""
    known = list(batches)
    for at, each in enumerate(known):
        yield Packed(
            each.topic, each.partition, each.base_offset, each.count, at, known.__getitem__
        )


def _read_inputs(disk: Disk, job: Job, batches_of: BatchesOf) -> tuple[list[Packed], int]:
    batches: list[Packed] = []
    for part in job.journal:
        batches += batches_of(disk, part.base, part.end)
    for info in job.segments:
        reader = SegmentReader(disk, info)
        try:
            batches += packed(reader.batches())
        finally:
            reader.close()
    size = sum(part.end - part.base for part in job.journal)
    return batches, size + sum(info.size_bytes for info in job.segments)


# -- which file a batch goes to --------------------------------------------------------------------


def runs_of(batches: Iterable[Packed]) -> Iterator[Iterator[Sized]]:
    """Sort batches by topic, partition and offset, and cut them into runs; take each before the next.

    >>> batches = [EventBatch.build("b", [b"1"]), EventBatch.build("a", [b"2"])]
    >>> [[batch.topic for batch, _ in run] for run in runs_of(packed(batches))]
    [['a'], ['b']]
    """
    ordered = sorted(batches, key=lambda each: each[:3])
    for one, other in pairwise(ordered):
        if _lane(one) == _lane(other) and other.base_offset < one.end_offset:
            raise Corrupted(
                f"{other.topic!r} partition {other.partition} has offset {other.base_offset} twice; "
                "nothing was rewritten and nothing deleted: restore the folder from a backup",
                topic=other.topic,
                partition=other.partition,
                offset=other.base_offset,
            )
    for _, run in groupby(_numbered(ordered), key=itemgetter(0)):
        yield (sized for _, sized in run)


def _numbered(ordered: Iterable[Packed]) -> Iterator[tuple[int, Sized]]:
    """Each batch, cut at midnight, with the number of its run."""
    number = 0
    last: EventBatch | None = None
    for each in ordered:
        for batch in _split_days(each.read()):
            if last is not None and not _follows(last, batch):
                number += 1
            yield number, (batch, event_bytes(batch))
            last = batch


def _lane(batch: EventBatch | Packed) -> tuple[str, int]:
    return batch.topic, batch.partition


def _follows(last: EventBatch, batch: EventBatch) -> bool:
    return (
        last.end_offset == batch.base_offset
        and _lane(last) == _lane(batch)
        and last.append_time(last.count - 1) // DAY_US == batch.append_time_us // DAY_US
    )


def _split_days(batch: EventBatch) -> list[EventBatch]:
    """Cut at midnight UTC; nearly always there is nothing to cut."""
    if batch.append_times is None:
        return [batch]
    days = batch.append_times // DAY_US
    cuts = np.flatnonzero(days[1:] != days[:-1]) + 1
    if not len(cuts):
        return [batch]
    bounds = [0, *cuts.tolist(), batch.count]
    return [batch.slice(start, stop) for start, stop in pairwise(bounds)]


def cut_files(
    runs: Iterable[Iterator[Sized]], settings: Sealing
) -> Iterator[tuple[bool, Iterator[Sized]]]:
    """Decide which file every batch goes to: yields (shared, batches) for each file; take each before the next.

    Files of one topic have at least `min_segment_bytes`, shared ones at least
    `target_segment_bytes` but for the last, so a rewrite leaves at most one small file.
    """
    for (_, shared), part in groupby(_placed(runs, settings), key=itemgetter(0, 1)):
        yield shared, (sized for _, _, sized in part)


def _placed(
    runs: Iterable[Iterator[Sized]], settings: Sealing
) -> Iterator[tuple[int, bool, Sized]]:
    """Each batch with the number of its file, and whether topics share it."""
    number = 0
    shared: list[Sized] = []
    for run in runs:
        head = _up_to(run, settings.min_segment_bytes)
        if _size(head) >= settings.min_segment_bytes:
            for begins, sized in _cut_run(chain(head, run), settings):
                number += begins
                yield number, False, sized
            continue
        shared += head
        if _size(shared) >= settings.target_segment_bytes:
            number += 1
            yield from ((number, True, sized) for sized in shared)
            shared = []
    yield from ((number + 1, True, sized) for sized in shared)


def _cut_run(run: Iterable[Sized], settings: Sealing) -> Iterator[tuple[bool, Sized]]:
    """Each batch of a large run, and whether a file begins with it."""
    pieces = (each for whole in run for each in _pieces(whole, settings.target_segment_bytes))
    size = settings.target_segment_bytes  # as if a file before this run were full
    while held := _up_to(pieces, settings.min_segment_bytes):
        # A rest that is too small for a file of its own stays in the one before it.
        begins = _size(held) >= settings.min_segment_bytes
        if begins:
            size = 0
        for each in held:
            yield begins, each
            begins = False
            size += each[1]
        while size < settings.target_segment_bytes and (following := next(pieces, None)):
            yield False, following
            size += following[1]


def _up_to(batches: Iterator[Sized], least_bytes: int) -> list[Sized]:
    """The next batches, until they have so many bytes together or there are no more."""
    taken: list[Sized] = []
    size = 0
    while size < least_bytes and (each := next(batches, None)) is not None:
        taken.append(each)
        size += each[1]
    return taken


def _size(batches: Iterable[Sized]) -> int:
    return sum(size for _, size in batches)


def _pieces(whole: Sized, target_bytes: int) -> list[Sized]:
    """A batch, cut into equal parts when it is larger than a file."""
    batch, size = whole
    parts = min(batch.count, size // target_bytes)
    if parts <= 1:
        return [whole]
    bounds = [batch.count * index // parts for index in range(parts + 1)]
    slices = [batch.slice(start, stop) for start, stop in pairwise(bounds)]
    return [(each, event_bytes(each)) for each in slices]


# -- proof -----------------------------------------------------------------------------------------


def prove(disk: Disk, job: Job, added: Sequence[SegmentInfo]) -> None:
    """Read the outputs and compare: every event of the segments that went in is there, unchanged.

    The hashes are those the inputs got when they were written, so damage in between shows too.
    Events from the journal are compared by `write_segment`, which has them at hand.
    """
    homes: dict[tuple[str, int], list[tuple[Range, SegmentReader]]] = {}
    cache = GroupCache()
    readers = [SegmentReader(disk, info, cache) for info in added]
    for info, reader in zip(added, readers, strict=True):
        for each in info.ranges:
            homes.setdefault((each.topic, each.partition), []).append((each, reader))
    expected = [each for info in job.segments for each in info.ranges]
    expected.sort(key=lambda each: (each.topic, each.partition, each.first_offset))
    try:
        for each in expected:
            if _content(homes.get((each.topic, each.partition), []), each) != each.content:
                raise Corrupted(
                    f"a rewrite did not keep {each.topic!r} partition {each.partition} offsets "
                    f"{each.first_offset} to {each.last_offset} as they were; its output is not "
                    "used and its inputs were kept. Check the memory of this machine",
                    topic=each.topic,
                    partition=each.partition,
                    first_offset=each.first_offset,
                    last_offset=each.last_offset,
                )
    finally:
        for reader in readers:
            reader.close()


def _content(homes: list[tuple[Range, SegmentReader]], wanted: Range) -> bytes:
    """The hash of a range as it is in the outputs, which may have cut it over several files."""
    content = ContentHash()
    at = wanted.first_offset
    for each, reader in homes:
        if each.first_offset <= at <= each.last_offset:
            last = min(each.last_offset, wanted.last_offset)
            at += reader.hash_into(content, wanted.topic, wanted.partition, at, last)
    return content.digest()


# -- what to rewrite next --------------------------------------------------------------------------


def plan_merge(manifest: Manifest, settings: Sealing) -> Job | None:
    """The most useful rewrite of existing segments, or None when the files are few enough."""
    infos = list(manifest.segments())
    chosen = plan_fold(infos, settings) or next(plan_neighbours(infos, settings), None)
    if chosen is None:
        return None
    return Job(first_id=manifest.next_id, settings=settings, segments=chosen)


def plan_fold(infos: Iterable[SegmentInfo], settings: Sealing) -> list[SegmentInfo] | None:
    """Shared segments to fold into one, when more than `shared_files_max` are not full."""
    small = sorted(
        (info.event_bytes, info.id, info)
        for info in infos
        if info.shared and info.event_bytes < settings.target_segment_bytes
    )
    if len(small) <= settings.shared_files_max:
        return None
    least = len(small) - settings.shared_files_max + 1
    chosen: list[SegmentInfo] = []
    size = 0
    for weight, _, info in small:
        # Segments that do not fit the rule, or would take much memory, stay for later.
        full = size + weight > 2 * settings.target_segment_bytes
        if len(chosen) >= least and (weight > size or full):
            break
        chosen.append(info)
        size += weight
    return chosen


def plan_neighbours(infos: Iterable[SegmentInfo], settings: Sealing) -> Iterator[list[SegmentInfo]]:
    """Groups of small segments of one topic, partition and day that follow each other."""
    lanes: dict[tuple[str, int, int], list[SegmentInfo]] = {}
    for info in infos:
        if not info.shared:
            each = info.ranges[0]
            lanes.setdefault((each.topic, each.partition, each.day), []).append(info)
    for lane in lanes.values():
        lane.sort(key=lambda info: info.ranges[0].first_offset)
        for row in _adjacent(lane):
            chosen = _window(row, settings.target_segment_bytes)
            if chosen:
                yield chosen


def _adjacent(lane: list[SegmentInfo]) -> Iterator[list[SegmentInfo]]:
    row: list[SegmentInfo] = []
    for info in lane:
        if row and row[-1].ranges[0].last_offset + 1 != info.ranges[0].first_offset:
            yield row
            row = []
        row.append(info)
    yield row


def _window(row: list[SegmentInfo], target_bytes: int) -> list[SegmentInfo] | None:
    """The longest stretch that fits one file and whose largest is no larger than its rest."""
    best: list[SegmentInfo] = []
    sizes = [info.event_bytes for info in row]
    for start in range(len(row)):
        total = largest = 0
        for stop in range(start, len(row)):
            total += sizes[stop]
            largest = max(largest, sizes[stop])
            if total > target_bytes:
                break
            length = stop - start + 1
            if length >= MIN_NEIGHBOURS and length > len(best) and 2 * largest <= total:
                best = row[start : stop + 1]
    return best or None


# -- sealers ---------------------------------------------------------------------------------------


class Sealer(Protocol):
    """Runs rewrites."""

    async def run(self, job: Job) -> SealingResult:
        """Do one rewrite; one at a time."""
        ...

    async def close(self) -> None:
        """Stop, giving up a rewrite under way."""
        ...


class InlineSealer:
    """Runs rewrites in this process, through `execute` if given: for `mem:`, the simulator, tests."""

    def __init__(
        self,
        disk: Disk,
        batches_of: BatchesOf,
        execute: Callable[[Callable[[], SealingResult]], Awaitable[SealingResult]] | None = None,
    ) -> None:
        self._disk = disk
        self._batches_of = batches_of
        self._execute = execute

    async def run(self, job: Job) -> SealingResult:
        """Do one rewrite."""

        def work() -> SealingResult:
            return run(self._disk, job, self._batches_of)

        return work() if self._execute is None else await self._execute(work)

    async def close(self) -> None:
        """Nothing to stop."""


class SealerProcess:
    """Runs rewrites in a child process, started on first use and again after it died."""

    def __init__(self, disk: RealDisk, reader: str = JOURNAL_READER) -> None:
        self._start = Start(str(disk.root.absolute()), reader)
        self._child: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._child is None else self._child.pid

    async def run(self, job: Job) -> SealingResult:
        """Do one rewrite; raises what it raised, or StorageError when the process died."""
        async with self._lock:
            if self._child is None and self._deaths:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (self._deaths - 1), MAX_BACKOFF_S))
            try:
                reply = await self._ask(job)
            except (OSError, asyncio.IncompleteReadError) as error:
                self._deaths += 1
                code = await self._stop()
                raise StorageError(
                    f"the sealing process died (exit code {code}). Nothing was lost: the journal "
                    "keeps what was not sealed, and the next attempt starts a new process",
                    exit_code=code,
                ) from error
            except BaseException:
                await self._stop()  # its answer would be taken for that of the next job
                raise
            self._deaths = 0
        if reply.result is None:
            raise _rebuild(reply)
        return reply.result

    async def _ask(self, job: Job) -> SealerReply:
        if self._child is None:
            start = asyncio.create_subprocess_exec(
                sys.executable, "-c", "from penstock.log.sealing import main; main()",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=_environment(),
            )  # fmt: skip
            starting = asyncio.ensure_future(start)
            try:
                self._child = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._child = await starting  # a process that is half started cannot be stopped
                raise
            self._send(self._start)
        self._send(job)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        await child.stdin.drain()
        (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await child.stdout.readexactly(length), type=SealerReply)

    def _send(self, message: Start | Job) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        data = msgspec.msgpack.encode(message)
        self._child.stdin.write(LENGTH.pack(len(data)) + data)

    async def _stop(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin is not None
        child.stdin.close()  # the process ends with its input, even in mid-job
        try:
            await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        return child.returncode

    async def close(self) -> None:
        """End the process; a rewrite under way is given up and will be done again."""
        await self._stop()


def _environment() -> dict[str, str]:
    """An environment in which the child finds the package where the parent found it."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *(os.path.abspath(path) for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _rebuild(reply: SealerReply) -> Exception:
    if reply.errno:
        return OSError(reply.errno, reply.message)
    kinds: list[type[PenstockError]] = [PenstockError]
    for kind in kinds:
        if kind.code == reply.code:
            return kind(reply.message)
        kinds += kind.__subclasses__()
    return StorageError(f"sealing failed; the journal keeps everything. It said: {reply.message}")


# -- the process -----------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """First message to the process: where the data is and how to read its journal."""

    root: str
    reader: str


class SealerReply(msgspec.Struct, frozen=True):
    """The answer of the process to a job: a result, or why there is none."""

    result: SealingResult | None = None
    code: str = ""
    message: str = ""
    errno: int = 0


def main() -> None:
    """The sealing process: take jobs from standard input until it ends."""
    os.nice(NICENESS)
    # Text printed by accident must not land between replies.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(inbox,), daemon=True).start()
    start = msgspec.msgpack.decode(inbox.get(), type=Start)
    disk = RealDisk(start.root)
    module, _, name = start.reader.partition(":")
    batches_of: BatchesOf = getattr(importlib.import_module(module), name)
    while True:
        job = msgspec.msgpack.decode(inbox.get(), type=Job)
        data = msgspec.msgpack.encode(_attempt(disk, job, batches_of))
        out.write(LENGTH.pack(len(data)) + data)
        out.flush()


def _receive(inbox: queue.SimpleQueue[bytes]) -> None:
    """Read messages while a job runs, so that the process also ends in the middle of a job."""
    source = sys.stdin.buffer
    while True:
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            os._exit(0)
        (length,) = LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            os._exit(1)
        inbox.put(source.read(length))


def _attempt(disk: Disk, job: Job, batches_of: BatchesOf) -> SealerReply:
    try:
        return SealerReply(result=run(disk, job, batches_of))
    except PenstockError as error:
        return SealerReply(code=error.code, message=error.message)
    except OSError as error:
        return SealerReply(errno=error.errno or 5, message=error.strerror or str(error))
    except Exception:
        return SealerReply(message=traceback.format_exc(limit=8))
