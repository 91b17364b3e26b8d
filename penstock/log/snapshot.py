"""Snapshots: the state folded up to a journal position, so that recovery need not begin at zero.

A snapshot is a function of the journal alone. Maintenance makes it from each
closed journal file before that is sealed: the running bus never stops to describe itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from penstock.core.dedup import DedupTable, split_tokens
from penstock.core.entry import TopicGone
from penstock.core.state import Piece, State, load_pieces, pieces_of
from penstock.log.disk import Bytes, Disk, read_file, write_file
from penstock.log.journal import BATCH, CONTROL, GROUP, JournalFrame, read_group
from penstock.log.unreadable import EntryReader
from penstock.model.batch import EXPLICIT_TOKENS, BatchHead, EventBatch
from penstock.model.checksum import crc32
from penstock.model.errors import Corrupted
from penstock.model.settings import Dedup as DedupSettings

FOLDER = "state"
KEPT = 2  # a damaged newest one must not cost the whole history
_MAGIC = b"PSTSTAT1"
_RECORD = struct.Struct("<II")
DEDUP = "dedup"
ENDS = "ends"
# Where a token was stored: partition above, offset below; one table serves all partitions.
PARTITION_SHIFT = 48


def snapshot_path(position: int) -> str:
    """Where the snapshot as of `position` lies."""
    return f"{FOLDER}/{position:020d}.snap"


class Fold:
    """State and dedup tables, built by reading the journal in order."""

    def __init__(self, settings: DedupSettings, entries: EntryReader | None = None) -> None:
        self.settings = settings
        self.entries = entries or EntryReader()
        self.state = State()
        self.dedup: dict[str, DedupTable] = {}
        self.ends: dict[str, list[tuple[int, int]]] = {}
        """Next offset and last append time of each partition: retention must not make us forget."""
        self.position = 0

    def take(self, frame: JournalFrame) -> None:
        """Apply one journal entry."""
        if frame.kind == CONTROL:
            self._control(frame.body, frame.position, 0)
        elif frame.kind == BATCH:
            self._batch(frame.body)
        elif frame.kind == GROUP:
            for inner, kind, body in read_group(frame.body):
                if kind == CONTROL:
                    self._control(body, frame.position, inner)
                else:
                    self._batch(body)
        self.position = frame.end

    def _control(self, body: memoryview, position: int, inner: int) -> None:
        for number, entry in self.entries.read(body, position, inner):
            try:
                self.state.apply(entry)
            except Exception as error:  # whatever it is: the folder must say where
                self.entries.refuse(entry, (position, inner, number), error)
                continue
            if isinstance(entry, TopicGone):
                self.dedup.pop(entry.topic, None)
                self.ends.pop(entry.topic, None)

    def _batch(self, body: memoryview) -> None:
        head = BatchHead.parse(body)
        ends = self.ends.setdefault(head.topic, [])
        ends += [(0, 0)] * (head.partition + 1 - len(ends))
        ends[head.partition] = (head.base_offset + head.count, head.append_time_us)
        if head.flags & EXPLICIT_TOKENS:
            self.remember(EventBatch.decode(body))

    def table(self, topic: str) -> DedupTable:
        """The dedup table of a topic."""
        table = self.dedup.get(topic)
        if table is None:
            window_us = round(self.settings.window_s * 1e6)
            table = self.dedup[topic] = DedupTable(window_us, self.settings.capacity)
        return table

    def remember(self, batch: EventBatch) -> None:
        """Enter the tokens a producer chose, so that publishing them again is noticed."""
        first = batch.partition << PARTITION_SHIFT | batch.base_offset
        tokens = split_tokens(batch.token_bytes())
        self.table(batch.topic).record(tokens, first, batch.append_time_us)

    def forget(self, batch: EventBatch) -> None:
        """Undo `remember`, for a batch that was not stored after all."""
        self.table(batch.topic).forget(split_tokens(batch.token_bytes()))

    # -- files ---------------------------------------------------------------------------------

    def save(self, disk: Disk) -> None:
        """Write the snapshot of what was folded so far; drops all but the newest two."""
        parts: list[Bytes] = [_MAGIC]
        for piece in self._pieces():
            body = msgspec.msgpack.encode(piece)
            parts += (_RECORD.pack(len(body), crc32(body)), body)
        parts.append(_RECORD.pack(0, crc32(b"")))
        write_file(disk, snapshot_path(self.position), parts)
        names = [name for name in disk.list(FOLDER) if name.endswith(".snap")]
        for name in names[:-KEPT]:
            disk.remove(f"{FOLDER}/{name}")

    def _pieces(self) -> Iterator[Piece]:
        yield from pieces_of(self.state, self.position)
        yield Piece(ENDS, "", 0, self.position, msgspec.msgpack.encode(self.ends))
        for topic, table in self.dedup.items():
            for number, chunk in enumerate(table.snapshot()):
                yield Piece(DEDUP, topic, number, self.position, chunk)

    @classmethod
    def load(cls, disk: Disk, settings: DedupSettings) -> Fold:
        """The newest snapshot, or the beginning of time when there is none."""
        names = [name for name in disk.list(FOLDER) if name.endswith(".snap")]
        fold = cls(settings, EntryReader(disk))
        if not names:
            return fold
        path = f"{FOLDER}/{names[-1]}"
        pieces = _read_pieces(path, read_file(disk, path))
        fold.position = int(names[-1][:-5])
        fold.state = load_pieces([piece for piece in pieces if piece.kind not in (DEDUP, ENDS)])
        chunks: dict[str, list[bytes]] = {}
        for piece in pieces:
            if piece.kind == DEDUP:
                chunks.setdefault(piece.key, []).append(piece.body)
            elif piece.kind == ENDS:
                fold.ends = msgspec.msgpack.decode(
                    piece.body, type=dict[str, list[tuple[int, int]]]
                )
        for topic, its_chunks in chunks.items():
            fold.table(topic).restore(its_chunks)
        return fold


def _read_pieces(path: str, data: bytes) -> list[Piece]:
    pieces: list[Piece] = []
    at = len(_MAGIC)
    whole = data[:at] == _MAGIC
    while whole:
        if at + _RECORD.size > len(data):
            whole = False
            break
        length, checksum = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        body = data[at : at + length]
        if len(body) != length or crc32(body) != checksum:
            whole = False
            break
        if length == 0:
            return pieces
        pieces.append(msgspec.msgpack.decode(body, type=Piece))
        at += length
    raise Corrupted(
        f"{path} is damaged at byte {at}; nothing was deleted. Move that file away to recover from "
        "the snapshot before it, if the journal still reaches back that far",
        path=path,
    )
