"""The audit log on disk: readable lines, one sync for many records, safe to reopen after a crash.

The folder `audit/` holds one JSON line per record or checkpoint in files named by their first
sequence, `head.json` with the newest checkpoint, and the key pair. docs/reference/audit.md
describes each of them.

Opening the log loads its key and its head, and follows the newest file to where a crash left it.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from penstock.core.audit import (
    CHECKPOINT_EVERY_RECORDS,
    FORMAT,
    GENESIS,
    KEY_BYTES,
    AuditChain,
    AuditEntry,
    AuditFileHeader,
    AuditRecord,
    Checkpoint,
    Head,
    Signer,
    Verdict,
    encode_line,
    file_name,
)
from penstock.log.audit_reader import (
    FOLDER,
    HEAD_PATH,
    KEY_PATH,
    PUBLIC_KEY_PATH,
    AuditManifest,
    AuditReader,
    SavedHead,
    damaged,
    export_files,
    identity_of,
    parse_line,
    refuse_newer,
    seal,
    sealed_bytes,
    unseal,
)
from penstock.log.disk import NO_ROOM, Disk, read_file, refused, write_file
from penstock.log.memory_disk import MemoryDisk
from penstock.model.errors import DiskRefused, InvalidInput, InvalidSettings, WriterFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_RECORD_START = b'{"kind":"record",'

MAX_FILE_BYTES = 16 << 20  # about 40,000 records: opens in a pager, and recovers in half a second
MAX_BATCH_BYTES = 64 << 20  # what one append may hold in memory before it is written


# -- the log --------------------------------------------------------------------------------------


class AuditLog:
    """The one writer of an audit folder; `open` it, append, and `close` it.

    >>> import tempfile
    >>> from penstock.log.disk import RealDisk
    >>> log = AuditLog.open(RealDisk(tempfile.mkdtemp()), now_us=0, entropy=bytes(32))
    >>> entry = AuditEntry(at_us=1, actor="ann", operation="dlq.purge", targets=["orders/0/7"],
    ...                    reason="test data", prior={"state": "dead"}, result={}, ref=12)
    >>> [record.sequence for record in log.append_many([entry, entry])]
    [1, 2]
    >>> log.last_ref, log.verify().ok, [r.actor for r in log.records(message="orders/0/7")]
    (12, True, ['ann', 'ann'])
    >>> log.close()
    """

    def __init__(
        self,
        disk: Disk,
        signer: Signer,
        recovered: RecoveredAudit,
        *,
        now_us: int,
        checkpoint_every: int,
        max_file_bytes: int,
    ) -> None:
        self._disk = disk
        self._signer = signer
        self._chain, self._header, self._size, self.torn, last_write = recovered
        self._path = f"{FOLDER}/{file_name(self._header.first_sequence)}"
        self._file = disk.open(self._path, write=True)
        self._at_us = now_us
        self._checkpoint_every = checkpoint_every
        self._max_file_bytes = max_file_bytes
        self._reader = AuditReader(disk)
        self._failure: str | None = None
        # Also without a torn end: what a dead process wrote may not have been synced, and
        # `last_ref` promises that it is durable. It is written again, because after a failed
        # fsync the page cache shows lines that no further fsync would bring to the disk.
        self._cut_back(last_write)

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        key: bytes | None = None,
        now_us: int,
        entropy: bytes | None = None,
        checkpoint_every: int = CHECKPOINT_EVERY_RECORDS,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> AuditLog:
        """Open the log of a disk, or begin one; `torn` says what a crash had left half written.

        Only the newest file is read. Corrupted when it, or the head, is damaged beyond what a
        crash can do; nothing is deleted then.
        """
        if checkpoint_every < 1 or max_file_bytes < 1:
            raise InvalidSettings(
                "audit checkpoint_every and max_file_bytes must be at least 1",
                checkpoint_every=checkpoint_every,
                max_file_bytes=max_file_bytes,
            )
        signer, recovered = find_end(disk, key=key, entropy=entropy, now_us=now_us)
        return cls(
            disk,
            signer,
            recovered,
            now_us=now_us,
            checkpoint_every=checkpoint_every,
            max_file_bytes=max_file_bytes,
        )

    @property
    def last_ref(self) -> int:
        """The highest journal position recorded; 0 when none was."""
        return self._chain.last_ref

    @property
    def head(self) -> Head:
        """The end of the chain: keep it elsewhere to notice a cut-off tail."""
        chain = self._chain
        return Head(chain.sequence, chain.hash, self._path, chain.last_checkpoint)

    @property
    def public_key(self) -> str:
        """The key that verifies the checkpoints, in hex."""
        return self._signer.public_key

    @property
    def identity(self) -> str:
        """What tells this bus from every other."""
        return identity_of(self.public_key)

    def append_many(self, entries: Iterable[AuditEntry]) -> list[AuditRecord]:
        """Record all the entries with one sync; they are durable when this returns.

        All or nothing: DiskRefused and InvalidInput leave the log as it was; after WriterFailed the
        log must be opened again, and may or may not hold the entries.
        """
        self._check_usable()
        if (
            self._size >= self._max_file_bytes
            and self._chain.sequence >= self._header.first_sequence
        ):
            self._rotate()
        draft = self._chain.copy()
        first = draft.sequence + 1
        records: list[AuditRecord] = []
        lines: list[bytes] = []
        size, at_us, signed = 0, self._at_us, None
        for entry in entries:
            record = draft.append(**msgspec.structs.asdict(entry), batch=first)
            records.append(record)
            lines.append(encode_line(record))
            at_us = max(at_us, entry.at_us)
            if draft.sequence - draft.last_checkpoint >= self._checkpoint_every:
                signed = draft.checkpoint(self._signer, at_us=at_us)
                lines.append(encode_line(signed))
            size += len(lines[-1])
            if size > MAX_BATCH_BYTES:
                raise InvalidInput(
                    f"more than {MAX_BATCH_BYTES} bytes of audit entries at once; nothing was "
                    "recorded. Append them in smaller groups",
                    limit_bytes=MAX_BATCH_BYTES,
                )
        if lines:
            self._write(lines)
            self._chain, self._at_us = draft, at_us
        if signed is not None:
            self._save_head()
        return records

    def append_missing(self, entries: Iterable[AuditEntry]) -> list[AuditRecord]:
        """Record those entries of a replayed journal that a crash kept out of this log.

        Entries come in journal order, all of one `ref` in the same call; what is already there
        is skipped, so that a replay may run any number of times.
        """
        last, known = self._chain.last_ref, self._chain.last_ref_count
        missing = []
        for entry in entries:
            if entry.ref < 1:
                raise InvalidInput(
                    "an audit entry without a journal position cannot be replayed; nothing was "
                    "recorded. Use append_many for it",
                    operation=entry.operation,
                )
            if entry.ref == last and known:
                known -= 1
            elif entry.ref >= last:
                missing.append(entry)
        return self.append_many(missing)

    def checkpoint(self, *, at_us: int) -> Checkpoint:
        """Sign the end of the chain now, durably."""
        self._check_usable()
        draft = self._chain.copy()
        signed = draft.checkpoint(self._signer, at_us=at_us)
        if self._chain.sequence > self._chain.last_checkpoint:
            self._write([encode_line(signed)])
            self._chain, self._at_us = draft, max(self._at_us, at_us)
            self._save_head()
        return signed

    def records(
        self,
        *,
        message: str | None = None,
        actor: str | None = None,
        since_us: int | None = None,
        until_us: int | None = None,
        operation: str | None = None,
    ) -> Iterator[AuditRecord]:
        """The records that match, oldest first; see `AuditReader.records`."""
        return self._reader.records(
            message=message,
            actor=actor,
            since_us=since_us,
            until_us=until_us,
            operation=operation,
        )

    def verify(self, *, public_key: str | None = None, expect_last: Head | None = None) -> Verdict:
        """Walk the whole log; see `AuditReader.verify`."""
        return self._reader.verify(
            public_key=public_key or self.public_key, expect_last=expect_last or self.head
        )

    def export(self, target: Disk, *, at_us: int) -> AuditManifest:
        """Finish the present file and copy all finished ones to `target` with a signed manifest."""
        self.checkpoint(at_us=at_us)
        if self._chain.sequence >= self._header.first_sequence:
            self._rotate()
        head = Head(self._chain.sequence, self._chain.hash)
        paths = self._reader.files()[:-1]
        return export_files(self._disk, target, paths, head=head, signer=self._signer, at_us=at_us)

    def close(self) -> None:
        """Sign the end, save the head and let go of the file."""
        if self._failure is None:
            with contextlib.suppress(DiskRefused):  # the last signed place stays a valid one
                self.checkpoint(at_us=self._at_us)
            self._failure = "it was closed"
        self._file.close()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise WriterFailed(
                f"the audit log takes no more records: {self._failure}. Open it again",
                file=self._path,
            )

    def _fail(self, error: OSError) -> NoReturn:
        self._failure = f"writing {self._path} failed ({error})"
        raise WriterFailed(
            f"{self._failure}; what was synced before is kept. Check the disk, then open again",
            file=self._path,
        ) from error

    def _full(self, error: OSError) -> NoReturn:
        raise refused(error, f"an audit record in {self._path}") from error

    def _write(self, lines: list[bytes]) -> None:
        try:
            self._file.append(lines)
        except OSError as error:
            if error.errno not in NO_ROOM:
                self._fail(error)
            self._cut_back()
            self._full(error)
        try:
            self._file.sync()
        except OSError as error:
            self._fail(error)
        self._size += sum(map(len, lines))

    def _cut_back(self, write_again_from: int | None = None) -> None:
        try:
            if write_again_from is not None:
                lines = self._file.read(write_again_from, self._size - write_again_from)
                self._file.write_at(write_again_from, bytes(lines))
            self._file.truncate(self._size)
            self._file.sync()
        except OSError as error:
            self._fail(error)

    def _rotate(self) -> None:
        self.checkpoint(at_us=self._at_us)
        chain = self._chain
        header = AuditFileHeader(
            FORMAT,
            chain.sequence + 1,
            chain.hash,
            self._header.first_sequence,
            chain.last_ref,
            chain.last_ref_count,
        )
        path, line = f"{FOLDER}/{file_name(header.first_sequence)}", encode_line(header)
        try:
            write_file(self._disk, path, [line])
        except OSError as error:
            # Once the new name may exist, going on in the old file would fork the chain.
            if error.errno not in NO_ROOM or self._disk.exists(path):
                self._fail(error)
            self._full(error)
        self._file.close()
        self._path, self._header, self._size = path, header, len(line)
        self._file = self._disk.open(path, write=True)
        self._save_head()

    def _save_head(self) -> None:
        try:
            write_head(self._disk, self._signer, self.head, at_us=self._at_us)
        except OSError as error:
            if error.errno not in NO_ROOM:  # an older head is still a true one
                self._fail(error)


# -- opening --------------------------------------------------------------------------------------


def find_end(
    disk: Disk, *, key: bytes | None, entropy: bytes | None, now_us: int
) -> tuple[Signer, RecoveredAudit]:
    """What a log is opened with: its key, and where its newest file ends; a new log is begun."""
    disk.make_dir(FOLDER)
    signer = load_signer(disk, key=key, entropy=entropy)
    head = load_head(disk, signer, now_us)
    path = newest_file(disk, head)
    return signer, recover(path, read_file(disk, path), head)


def rehearse(disk: Disk) -> RecoveredAudit:
    """What opening the log would find, or raise; whatever that writes goes to a copy in memory."""
    copy = MemoryDisk()
    copy.make_dir(FOLDER)
    # The head before the file it speaks of: a live writer writes it after.
    for path in (PUBLIC_KEY_PATH, KEY_PATH, HEAD_PATH):
        if disk.exists(path):
            write_file(copy, path, [read_file(disk, path)])
    files = AuditReader(disk).files()
    for path in files:  # of the older ones only the names count
        write_file(copy, path, [read_file(disk, path)] if path == files[-1] else [])
    return find_end(copy, key=None, entropy=bytes(KEY_BYTES), now_us=0)[1]


def load_signer(disk: Disk, *, key: bytes | None, entropy: bytes | None) -> Signer:
    """The key of this log: the one given, else the one in audit/key, else a new one from `entropy`.

    A log keeps one key for life; another key, or a lost one, is refused.
    """
    published = disk.exists(PUBLIC_KEY_PATH)
    if key is not None:
        signer = Signer(key)
    elif disk.exists(KEY_PATH):
        try:
            signer = Signer(bytes.fromhex(read_file(disk, KEY_PATH).decode().strip()))
        except (ValueError, InvalidSettings):
            raise damaged(
                KEY_PATH, None, f"this is not a key of {KEY_BYTES} bytes in hex"
            ) from None
    elif published:
        raise damaged(KEY_PATH, None, "the signing key is missing")
    elif entropy is None:
        raise InvalidSettings("a new audit log needs a key: give 'key', or 'entropy' to make one")
    else:
        signer = Signer(entropy)
        write_file(disk, KEY_PATH, [entropy.hex().encode(), b"\n"])
    if not published:
        write_file(disk, PUBLIC_KEY_PATH, [signer.public_key.encode(), b"\n"])
    elif read_file(disk, PUBLIC_KEY_PATH).decode("ascii", "replace").strip() != signer.public_key:
        raise InvalidSettings(
            f"the audit key is not the one of {PUBLIC_KEY_PATH}; nothing was written. "
            "Give the key this log was begun with",
            file=PUBLIC_KEY_PATH,
        )
    return signer


def load_head(disk: Disk, signer: Signer, now_us: int) -> SavedHead:
    """The saved head; a new log gets one first, so that later its absence means something."""
    if not disk.exists(HEAD_PATH):
        if AuditReader(disk).files():
            raise damaged(HEAD_PATH, None, "the file is missing")
        first = Head(0, GENESIS, f"{FOLDER}/{file_name(1)}")
        write_head(disk, signer, first, at_us=now_us)
    data = read_file(disk, HEAD_PATH)
    refuse_newer(HEAD_PATH, data)
    head = unseal(data, SavedHead, signer.public_key)
    if head is None:
        raise damaged(HEAD_PATH, None, "it is not signed by the key of this log")
    return head


def write_head(disk: Disk, signer: Signer, head: Head, *, at_us: int) -> None:
    """Replace head.json: how far the log reaches, and the file that records go to now."""
    assert head.file is not None
    place = (head.sequence, head.hash, head.checkpoint, head.file)
    saved = SavedHead(FORMAT, at_us, *place, signer.public_key)
    write_file(disk, HEAD_PATH, [sealed_bytes(seal(saved, signer))])


def newest_file(disk: Disk, head: SavedHead) -> str:
    """The file to go on with, begun if the log is new; Corrupted when the head knows a later one."""
    files = AuditReader(disk).files()
    if not files and head.sequence == 0:
        path, header = f"{FOLDER}/{file_name(1)}", AuditFileHeader(FORMAT, 1, GENESIS, 0, 0, 0)
        write_file(disk, path, [encode_line(header)])
        return path
    if not files or files[-1] < head.file:
        raise damaged(head.file, None, "the file is missing")
    return files[-1]


class RecoveredAudit(NamedTuple):
    """Where the newest file ends: the chain there, the file's header and its sound length."""

    chain: AuditChain
    header: AuditFileHeader
    end_bytes: int
    torn: TornTail | None
    last_write: int
    """Where the lines of the last write begin that nothing proves durable."""


class TornTail(NamedTuple):
    """What recovery cut off: the unsynced end of a write that a crash interrupted."""

    file: str
    offset_bytes: int
    lost_bytes: int


def recover(path: str, data: bytes, head: SavedHead) -> RecoveredAudit:
    """Follow the newest file to its end; a damaged line is a torn end or raises Corrupted."""
    lines = list(io.BytesIO(data))
    try:
        header = parse_line(path, 1, lines[0] if lines else b"")
    except ValueError as error:
        raise damaged(path, 1, str(error)) from None
    if not isinstance(header, AuditFileHeader) or not path.endswith(
        file_name(header.first_sequence)
    ):
        raise damaged(path, 1, "the file does not begin with its header line")
    chain = AuditChain(
        sequence=header.first_sequence - 1,
        hash=header.prev_hash,
        last_ref=header.last_ref,
        last_ref_count=header.last_ref_count,
    )
    if chain.sequence == head.sequence and chain.hash != head.hash:
        raise damaged(path, 1, f"{HEAD_PATH} has another hash for the record before")
    end = last_write = len(lines[0])
    for number, raw in enumerate(lines[1:], 2):
        try:
            entry = parse_line(path, number, raw)
        except ValueError as error:
            if _was_synced(lines[number - 1 :], path, chain) or _is_behind(chain, head):
                raise damaged(path, number, str(error)) from None
            torn = TornTail(path, end, len(data) - end)
            return RecoveredAudit(chain, header, end, torn, last_write)
        if isinstance(entry, Checkpoint) and (entry.sequence, entry.hash) == (
            chain.sequence,
            chain.hash,
        ):
            chain.last_checkpoint = entry.sequence
        elif not isinstance(entry, AuditRecord) or not chain.follow(entry):
            raise damaged(path, number, f"the line does not follow record {chain.sequence}")
        elif entry.sequence == head.sequence and entry.hash != head.hash:
            raise damaged(path, number, f"{HEAD_PATH} has another hash for this record")
        elif entry.sequence == entry.batch:
            last_write = end
        end += len(raw)
        if chain.sequence <= head.sequence and chain.last_checkpoint <= head.checkpoint:
            last_write = end  # the head was saved after it was durable: it must not be touched
    if _is_behind(chain, head):
        raise damaged(
            path,
            None,
            f"{HEAD_PATH} knows {head.sequence} records and checkpoint {head.checkpoint}, "
            f"the file ends with {chain.sequence} and {chain.last_checkpoint}",
        )
    return RecoveredAudit(chain, header, end, None, last_write)


def _is_behind(chain: AuditChain, head: SavedHead) -> bool:
    return chain.sequence < head.sequence or chain.last_checkpoint < head.checkpoint


def _was_synced(rest: Sequence[bytes], path: str, chain: AuditChain) -> bool:
    """Whether a damaged line was once durable: some later line was begun after it was synced.

    One write holds many lines and a crash may spare its later pages, so intact lines after a
    damaged one prove something only when they belong to a later write.
    """
    following = chain.sequence + 1
    for raw in rest:
        # Where a newline is lost, a sound line hangs on the end of the damaged one.
        start = max(0, raw.rfind(_RECORD_START))
        with contextlib.suppress(ValueError):
            entry = parse_line(path, 0, raw[start:])
            if isinstance(entry, AuditRecord):
                own_write = entry.sequence == entry.batch == following
                if entry.batch > following or own_write:
                    return True
    return False
