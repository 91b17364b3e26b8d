"""Opening an audit folder: its key, its head, and the newest file up to where a crash left it."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.audit import (
    FORMAT,
    GENESIS,
    KEY_BYTES,
    AuditChain,
    AuditRecord,
    Checkpoint,
    FileHeader,
    Head,
    Signer,
    encode_line,
)
from penstock.core.auditproof import file_name
from penstock.log.auditreader import AuditReader, damaged, parse_line
from penstock.log.auditseal import (
    FOLDER,
    HEAD_PATH,
    KEY_PATH,
    PUBLIC_KEY_PATH,
    SavedHead,
    refuse_newer,
    seal,
    sealed_bytes,
    unseal,
)
from penstock.log.disk import Disk, read_file, write_file
from penstock.log.memory_disk import MemoryDisk
from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Sequence


_RECORD_START = b'{"kind":"record",'


class TornTail(NamedTuple):
    """What recovery cut off: the unsynced end of a write that a crash interrupted."""

    file: str
    offset_bytes: int
    lost_bytes: int


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


class Recovered(NamedTuple):
    """Where the newest file ends: the chain there, the file's header and its sound length."""

    chain: AuditChain
    header: FileHeader
    end_bytes: int
    torn: TornTail | None
    last_write: int
    """Where the lines of the last write begin that nothing proves durable."""


def recover(path: str, data: bytes, head: SavedHead) -> Recovered:
    """Follow the newest file to its end; a damaged line is a torn end or raises Corrupted."""
    lines = list(io.BytesIO(data))
    try:
        header = parse_line(path, 1, lines[0] if lines else b"")
    except ValueError as error:
        raise damaged(path, 1, str(error)) from None
    if not isinstance(header, FileHeader) or not path.endswith(file_name(header.first_sequence)):
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
            return Recovered(chain, header, end, torn, last_write)
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
    return Recovered(chain, header, end, None, last_write)


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


def write_head(disk: Disk, signer: Signer, head: Head, *, at_us: int) -> None:
    """Replace head.json: how far the log reaches, and the file that records go to now."""
    assert head.file is not None
    place = (head.sequence, head.hash, head.checkpoint, head.file)
    saved = SavedHead(FORMAT, at_us, *place, signer.public_key)
    write_file(disk, HEAD_PATH, [sealed_bytes(seal(saved, signer))])


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


def newest_file(disk: Disk, head: SavedHead) -> str:
    """The file to go on with, begun if the log is new; Corrupted when the head knows a later one."""
    files = AuditReader(disk).files()
    if not files and head.sequence == 0:
        path, header = f"{FOLDER}/{file_name(1)}", FileHeader(FORMAT, 1, GENESIS, 0, 0, 0)
        write_file(disk, path, [encode_line(header)])
        return path
    if not files or files[-1] < head.file:
        raise damaged(head.file, None, "the file is missing")
    return files[-1]


def find_end(
    disk: Disk, *, key: bytes | None, entropy: bytes | None, now_us: int
) -> tuple[Signer, Recovered]:
    """What a log is opened with: its key, and where its newest file ends; a new log is begun."""
    disk.make_dir(FOLDER)
    signer = load_signer(disk, key=key, entropy=entropy)
    head = load_head(disk, signer, now_us)
    path = newest_file(disk, head)
    return signer, recover(path, read_file(disk, path), head)


def rehearse(disk: Disk) -> Recovered:
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
