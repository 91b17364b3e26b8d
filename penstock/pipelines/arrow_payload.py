"""Arrow payloads by the batch: streams of one schema, a row each, are read as one stream.

Payloads that are alike differ in their data only, and in the sizes their metadata states. So what
has to be looked at is looked at once for each schema and once for each metadata, and Arrow does the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.codec import refuse_compressed_buffers

MESSAGE = b"\xff\xff\xff\xff"
END = MESSAGE + bytes(4)
PREFIX_BYTES = 8  # the mark of a message, and the size of the metadata that follows
# More schemas than this in one batch are not worth a search of all payloads for each.
MAX_SCHEMAS = 32

Indices = Any
"""A numpy array of places in a batch."""


def alike(payloads: pa.Array) -> Iterator[tuple[Indices, bytes]]:
    """Groups of payloads of one row and one schema, with the schema's message.

    What is in no group is no such payload, or too rare: it has to be looked at alone.

    >>> from penstock.model.codec import codecs
    >>> made = [codecs.get("arrow").encode(pa.table({"n": [number]})) for number in (7, 8)]
    >>> ((places, head),) = alike(pa.array([made[0], b"{}", made[1]], pa.binary()))
    >>> places.tolist(), read_alike(pa.array(made), head).column("n").to_pylist()
    ([0, 2], [7, 8])
    """
    left = _where(pc.and_(pc.starts_with(payloads, MESSAGE), pc.ends_with(payloads, END)))
    for _ in range(MAX_SCHEMAS):
        if not len(left):
            return
        rest = payloads.take(pa.array(left))
        head = _first_message(rest[0].as_py())
        same = pc.starts_with(rest, head).to_numpy(zero_copy_only=False)
        group = _of_one_row(rest.filter(pa.array(same)), head)
        if group.any():
            yield left[same][group], head
        left = left[~same]


def read_alike(payloads: pa.Array, head: bytes) -> pa.Table:
    """A table with a row for each payload of such a group; ArrowException when data is damaged."""
    bodies = _bodies(payloads, head)
    pieces = pa.concat_arrays([pa.array([head], pa.binary()), bodies, pa.array([END], pa.binary())])
    whole = pc.binary_join(pa.ListArray.from_arrays([0, len(pieces)], pieces), b"")[0]
    batches = list(pa.ipc.open_stream(whole.as_buffer()))
    if len(batches) != len(payloads) or any(each.num_rows != 1 for each in batches):
        raise pa.ArrowInvalid("some of the payloads do not have one row")
    table = pa.Table.from_batches(batches)
    table.validate(full=True)
    return table


def _first_message(stream: bytes) -> bytes:
    size = int.from_bytes(stream[4:PREFIX_BYTES], "little")
    return stream[: PREFIX_BYTES + size]


def _bodies(payloads: pa.Array, head: bytes) -> pa.Array:
    """What is between the schema and the end of each stream."""
    return pc.binary_slice(payloads, len(head), -len(END))


def _of_one_row(payloads: pa.Array, head: bytes) -> Any:
    """Which of these streams have one batch, of one row, that nothing follows."""
    bodies = _bodies(payloads, head)
    found = np.zeros(len(bodies), dtype=bool)
    long_enough = np.flatnonzero(pc.binary_length(bodies).to_numpy() >= PREFIX_BYTES)
    starts = pc.binary_slice(bodies.take(pa.array(long_enough)), 4, PREFIX_BYTES)
    sizes = np.frombuffer(b"".join(starts.to_pylist()), "<u4").astype(np.int64)
    # Batches of one schema and one row have metadata of one size, but for what somebody made up.
    for size in np.unique(sizes)[:MAX_SCHEMAS]:
        places = long_enough[sizes == size]
        found[places] = _same_metadata(
            bodies.take(pa.array(places)), PREFIX_BYTES + int(size), head
        )
    return found


def _same_metadata(bodies: pa.Array, size: int, head: bytes) -> Any:
    """Which of these have the length that their metadata states, looking at each metadata once."""
    metadata = pc.binary_slice(bodies, 0, size).dictionary_encode()
    kinds = metadata.indices.to_numpy()
    _, samples = np.unique(kinds, return_index=True)
    lengths = np.array([_length(bodies[int(at)].as_py(), head) for at in samples])
    return pc.binary_length(bodies).to_numpy() == lengths[kinds]


def _length(body: bytes, head: bytes) -> int:
    """How long a batch of one row with this metadata is; -1 when it is something else."""
    try:
        refuse_compressed_buffers(pa.py_buffer(head + body + END))
        message = pa.ipc.read_message(body)
        if message.type != "record batch":
            return -1
        schema = pa.ipc.read_schema(pa.py_buffer(head))
        if pa.ipc.read_record_batch(message, schema).num_rows != 1:
            return -1
        return len(_first_message(body)) + int(message.body.size)
    except Exception:  # of hostile bytes pyarrow raises whatever it likes
        return -1


def _where(mask: pa.Array) -> Indices:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))
