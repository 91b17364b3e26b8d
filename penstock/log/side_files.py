"""Side files: large payloads beside the journal, so that they do not fill commits that others share.

The file is durable before the journal entry that names it. In the entry the payload is replaced by
its checksum; sealing puts the payload into the segment, and the side file goes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from penstock.log.disk import Bytes, Disk, write_file
from penstock.model.batch import EventBatch
from penstock.model.checksum import crc32
from penstock.model.column import Strings
from penstock.model.errors import Corrupted

FOLDER = "side"
_STUB = struct.Struct("<I")


def side_path(token: bytes) -> str:
    """Where the payload of the event with this token lies."""
    return f"{FOLDER}/{token.hex()}"


# Checked, written and synced in one go. A commit that comes meanwhile waits for the disk no longer than
# this takes; a checksum over all of a large payload would keep a core from it for milliseconds.
PIECE_BYTES = 128 << 10


def put_aside(disk: Disk, batch: EventBatch, pause: Callable[[], None] | None = None) -> int:
    """Make the payload of a batch of one durable in a file of its own; returns its bytes.

    `pause` is called before each piece, for as long as others should have the disk.
    """
    assert batch.count == 1
    column = batch.payload_column
    ends = column.ends()
    payload = memoryview(column.data)[ends[0] : ends[1]]
    checksum = 0

    def pieces() -> Iterator[Bytes]:
        nonlocal checksum
        for at in range(0, len(payload), PIECE_BYTES):
            piece = payload[at : at + PIECE_BYTES]
            if pause is not None:
                pause()
            checksum = crc32(piece, checksum)
            yield piece

    write_file(disk, side_path(batch.token_base), pieces(), paced=True)
    batch.side_bytes = len(payload)
    batch.payload_column = Strings.of([_STUB.pack(checksum)])
    batch.forget_encoding()
    return len(payload)


def attach(disk: Disk, batch: EventBatch) -> EventBatch:
    """Put the payload back into a batch whose payload lies in a side file."""
    if not batch.side_bytes:
        return batch
    path = side_path(batch.token_base)
    try:
        file = disk.open(path)
    except FileNotFoundError:
        raise _damaged(path, batch, "is missing") from None
    try:
        payload = bytes(file.read(0, file.size()))
    finally:
        file.close()
    (checksum,) = _STUB.unpack(batch.payload_column.at(0))
    if len(payload) != batch.side_bytes or crc32(payload) != checksum:
        raise _damaged(path, batch, "fails its checksum")
    whole = batch.slice(0, 1)
    if whole is batch:
        whole = EventBatch.decode(batch.encode())
    whole.side_bytes = 0
    whole.payload_column = Strings.of([payload])
    whole.forget_encoding()
    return whole


def _damaged(path: str, batch: EventBatch, what: str) -> Corrupted:
    return Corrupted(
        f"side file {path} of {batch.topic}/{batch.partition}/{batch.base_offset} {what}; the "
        "event was not served. Restore the file from a copy, nothing was deleted",
        path=path,
        topic=batch.topic,
        offset=batch.base_offset,
    )
