"""The dedup table: remembers which tokens were stored, so that a retried publish is stored once.

Tokens are 16 bytes. The exact answer comes from one dict per generation, a slice of time (or of
room) that is forgotten whole; a Bloom filter over all generations answers the usual case, a batch
of new tokens, without looking into any of them.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from penstock.model.checksum import crc32
from penstock.model.errors import Corrupted, InvalidInput, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

TOKEN_BYTES = 16
TIME_SLICES = 6  # expiry is late by at most one slice: a sixth of the window
ROOM_SLICES = 8  # when the table is full, an eighth of it is forgotten at once
MAX_GENERATIONS = 16  # 7 closed by time, 8 closed by room, one open: the bits of a filter slot
FILTER_MIN_ENTRIES = 1 << 18  # below, the dicts stay near the processor and beat the filter
FILTER_GROWTH = 4  # each rebuild reads all tokens (30 ms a million), so there are few of them
FILTER_FLUSH_TOKENS = 4096  # single tokens wait until so many can be added at once
FILTER_MIN_BATCH = 64  # below, numpy's fixed cost is more than the look-ups it saves
FILTER_SLOTS_PER_ENTRY = 4  # about 3 % of new tokens are looked up for nothing
MAX_CHUNK_ENTRIES = 1 << 20  # bounds what a damaged count can make us allocate

_MAGIC = b"PSDD"
_CHUNK = struct.Struct("<4sHHQQQQI")  # magic, version, chunks, now, start, last, entries, crc
_VERSION = 1
_MIX = tuple(np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))


def split_tokens(column: bytes | bytearray | memoryview) -> list[bytes]:
    """A column of joined tokens as single ones.

    >>> split_tokens(b"a" * 16 + b"b" * 16)
    [b'aaaaaaaaaaaaaaaa', b'bbbbbbbbbbbbbbbb']
    """
    tokens: list[bytes] = np.frombuffer(column, f"V{TOKEN_BYTES}").tolist()
    return tokens


def repeats(tokens: Sequence[bytes]) -> dict[int, int] | None:
    """Which tokens of one batch repeat an earlier one of it: index to first index; None if none.

    >>> repeats([b"a", b"b", b"a"])
    {2: 0}
    """
    if len(set(tokens)) == len(tokens):
        return None
    first: dict[bytes, int] = {}
    return {
        index: first[token]
        for index, token in enumerate(tokens)
        if first.setdefault(token, index) != index
    }


class _Filter:
    """A Bloom filter for all generations at once: bit `g` of a slot belongs to generation `g`."""

    def __init__(self, entries: int) -> None:
        size = 1 << (entries * FILTER_SLOTS_PER_ENTRY - 1).bit_length()
        self._slots: NDArray[np.uint16] = np.zeros(size, np.uint16)
        self._mask = np.uint64(size - 1)
        self.room = size // FILTER_SLOTS_PER_ENTRY

    def _places(self, joined: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        halves = np.frombuffer(joined, np.uint64)
        mixed = halves[0::2] * _MIX[0]
        mixed ^= halves[1::2] * _MIX[1]
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MIX[2]
        return (mixed >> np.uint64(32)) & self._mask, mixed & self._mask

    def add(self, joined: bytes, bit: int) -> None:
        one, two = self._places(joined)
        self._slots[one] |= np.uint16(bit)
        self._slots[two] |= np.uint16(bit)

    def candidates(self, joined: bytes) -> list[int]:
        one, two = self._places(joined)
        hits: list[int] = np.flatnonzero(self._slots[one] & self._slots[two]).tolist()
        return hits

    def clear(self, bit: int) -> None:
        self._slots &= np.uint16(~bit & 0xFFFF)


class _Generation:
    """The tokens of one slice; those not `unindexed` are in the filter under `bit`."""

    __slots__ = ("bit", "last_us", "offsets", "start_us", "unindexed")

    def __init__(self, bit: int, start_us: int) -> None:
        self.bit = bit
        self.start_us = start_us
        self.last_us = start_us
        self.offsets: dict[bytes, int] = {}
        self.unindexed: list[bytes] = []


class DedupTable:
    """Offsets by token for one topic, for at least `window_us` and at most `capacity` tokens.

    Time comes in as `at_us` and never runs back: an earlier time counts as the latest one seen.

    >>> table = DedupTable(window_us=60_000_000, capacity=1000)
    >>> table.record([b"a" * 16, b"b" * 16], first_offset=40, at_us=1)
    >>> table.find(b"b" * 16), table.find(b"c" * 16)
    (41, None)
    >>> table.find_many([b"c" * 16, b"d" * 16]) is None
    True
    >>> table.find_many([b"a" * 16, b"c" * 16])
    [40, None]
    """

    def __init__(self, window_us: int, capacity: int) -> None:
        if window_us < 1 or capacity < 1:
            raise InvalidSettings(
                f"a dedup window of {window_us} us and {capacity} tokens holds nothing. "
                "Both must be at least 1",
                window_us=window_us,
                capacity=capacity,
            )
        self.window_us = window_us
        self.capacity = capacity
        self.forgotten_early = 0
        self._slice_us = -(-window_us // TIME_SLICES)
        self._slice_entries = -(-capacity // ROOM_SLICES)
        self._generations: deque[_Generation] = deque()
        self._filter: _Filter | None = None
        self._entries = 0
        self._now_us = 0

    def __len__(self) -> int:
        return self._entries

    def find(self, token: bytes) -> int | None:
        """The offset a token was stored at, or None for a new one."""
        for generation in reversed(self._generations):
            offset = generation.offsets.get(token)
            if offset is not None:
                return offset
        return None

    def find_many(self, tokens: Sequence[bytes]) -> list[int | None] | None:
        """The offset of each token, or None when all of them are new.

        Tokens that repeat inside the batch itself are not seen here; `repeats` finds those.
        """
        if self._filter is None or len(tokens) < FILTER_MIN_BATCH:
            if all(held.offsets.keys().isdisjoint(tokens) for held in self._generations):
                return None
            return [self.find(token) for token in tokens]
        self._index()
        found: list[int | None] | None = None
        for index in self._filter.candidates(_joined(tokens)):
            offset = self.find(tokens[index])
            if offset is not None:
                found = found or [None] * len(tokens)
                found[index] = offset
        return found

    def record(self, tokens: Sequence[bytes], first_offset: int, at_us: int) -> None:
        """Remember that the tokens were stored at `first_offset` and the offsets after it."""
        if set(map(len, tokens)) - {TOKEN_BYTES}:
            raise InvalidInput(
                f"a dedup token has {TOKEN_BYTES} bytes; nothing was recorded. "
                "Hash longer keys to that length",
                token_bytes=TOKEN_BYTES,
            )
        self.expire(at_us)
        done = 0
        while done < len(tokens):
            generation = self._open_generation()
            room = self._slice_entries - len(generation.offsets)
            part = tokens if not done and room >= len(tokens) else tokens[done : done + room]
            self._make_room(len(part))
            self._remember(generation, part, first_offset + done)
            done += len(part)

    def forget(self, tokens: Sequence[bytes]) -> None:
        """Take back what was just recorded: it was not stored after all.

        >>> table = DedupTable(window_us=60_000_000, capacity=1000)
        >>> table.record([b"a" * 16], first_offset=40, at_us=1)
        >>> table.forget([b"a" * 16])
        >>> table.find(b"a" * 16), len(table)
        (None, 0)
        """
        for token in tokens:
            for generation in reversed(self._generations):
                if generation.offsets.pop(token, None) is not None:
                    self._entries -= 1
                    break

    def _remember(self, generation: _Generation, part: Sequence[bytes], offset: int) -> None:
        before = len(generation.offsets)
        generation.offsets.update(zip(part, range(offset, offset + len(part)), strict=True))
        generation.last_us = self._now_us
        self._entries += len(generation.offsets) - before
        if self._filter is None:
            if self._entries >= FILTER_MIN_ENTRIES:
                self._rebuild_filter()
        else:
            generation.unindexed.extend(part)
            if len(generation.unindexed) >= FILTER_FLUSH_TOKENS:
                self._index()

    def expire(self, at_us: int) -> None:
        """Move time on and forget the generations that lie wholly before the window."""
        self._now_us = max(self._now_us, at_us)
        while self._generations and self._generations[0].last_us + self.window_us <= self._now_us:
            self._forget_oldest()

    def _open_generation(self) -> _Generation:
        if self._generations:
            newest = self._generations[-1]
            in_time = self._now_us < newest.start_us + self._slice_us
            if in_time and len(newest.offsets) < self._slice_entries:
                return newest
            if len(self._generations) == MAX_GENERATIONS:
                self.forgotten_early += len(self._generations[0].offsets)
                self._forget_oldest()
        used = {generation.bit for generation in self._generations}
        bit = next(1 << g for g in range(MAX_GENERATIONS) if 1 << g not in used)
        self._generations.append(_Generation(bit, self._now_us))
        return self._generations[-1]

    def _make_room(self, incoming: int) -> None:
        while self._entries + incoming > self.capacity and len(self._generations) > 1:
            self.forgotten_early += len(self._generations[0].offsets)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        gone = self._generations.popleft()
        self._entries -= len(gone.offsets)
        if self._filter is None:
            return
        if self._entries * FILTER_GROWTH**2 < self._filter.room:
            self._rebuild_filter()
        else:
            self._filter.clear(gone.bit)

    def _index(self) -> None:
        assert self._filter is not None
        if self._entries > self._filter.room:
            self._rebuild_filter()
            return
        for generation in self._generations:
            if generation.unindexed:
                self._filter.add(b"".join(generation.unindexed), generation.bit)
                generation.unindexed = []

    def _rebuild_filter(self) -> None:
        room = min(self.capacity, self._entries * FILTER_GROWTH)
        self._filter = _Filter(room) if self._entries >= FILTER_MIN_ENTRIES else None
        for generation in self._generations:
            generation.unindexed = []
            if self._filter is not None:
                self._filter.add(b"".join(generation.offsets), generation.bit)

    def snapshot(self) -> list[bytes]:
        """The whole table as checksummed chunks for the engine to store, oldest first."""
        parts = list(self._parts())
        return [self._encode(len(parts), *part) for part in parts]

    def _parts(self) -> Iterator[tuple[_Generation, list[bytes]]]:
        if not self._generations:
            yield _Generation(0, self._now_us), []
        for generation in self._generations:
            tokens = list(generation.offsets)
            for start in range(0, len(tokens), MAX_CHUNK_ENTRIES):
                yield generation, tokens[start : start + MAX_CHUNK_ENTRIES]

    def _encode(self, chunks: int, generation: _Generation, tokens: list[bytes]) -> bytes:
        offsets = np.fromiter(map(generation.offsets.__getitem__, tokens), "<i8", len(tokens))
        body = b"".join(tokens) + offsets.tobytes()
        times = (self._now_us, generation.start_us, generation.last_us)
        head = _CHUNK.pack(_MAGIC, _VERSION, chunks, *times, len(tokens), 0)[:-4]
        return head + struct.pack("<I", crc32(body, crc32(head))) + body

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Replace the content by a snapshot; Corrupted leaves the table as it was."""
        fresh = DedupTable(self.window_us, self.capacity)
        expected, count = 0, 0
        for chunk in chunks:
            expected = fresh._restore_chunk(chunk, count)
            count += 1
        if count != expected:
            raise _corrupted(f"there are {count} chunks, and there should be {expected}")
        fresh.expire(fresh._now_us)
        fresh._make_room(0)
        fresh._rebuild_filter()
        self.__dict__.update(fresh.__dict__)

    def _restore_chunk(self, chunk: bytes, index: int) -> int:
        if len(chunk) < _CHUNK.size:
            raise _corrupted(f"chunk {index} is cut off")
        magic, version, chunks, now, start, last, entries, crc = _CHUNK.unpack_from(chunk)
        body = memoryview(chunk)[_CHUNK.size :]
        if crc != crc32(body, crc32(chunk[: _CHUNK.size - 4])):
            raise _corrupted(f"chunk {index} fails its checksum")
        if (magic, version) != (_MAGIC, _VERSION) or len(body) != entries * (TOKEN_BYTES + 8):
            raise _corrupted(f"chunk {index} is not a dedup chunk of version {_VERSION}")
        self._now_us = max(self._now_us, now)
        if entries:
            newest = self._generations[-1] if self._generations else None
            if newest is None or (newest.start_us, newest.last_us) != (start, last):
                if len(self._generations) == MAX_GENERATIONS:
                    raise _corrupted(f"there are more than {MAX_GENERATIONS} generations")
                newest = _Generation(1 << len(self._generations), start)
                newest.last_us = last
                self._generations.append(newest)
            tokens = split_tokens(body[: entries * TOKEN_BYTES])
            offsets = np.frombuffer(body[entries * TOKEN_BYTES :], "<i8").tolist()
            before = len(newest.offsets)
            newest.offsets.update(zip(tokens, offsets, strict=True))
            self._entries += len(newest.offsets) - before
        return int(chunks)


def _joined(tokens: Sequence[bytes]) -> bytes:
    joined = b"".join(tokens)
    if len(joined) != len(tokens) * TOKEN_BYTES:
        raise InvalidInput(
            f"a dedup token has {TOKEN_BYTES} bytes. Hash longer keys to that length",
            token_bytes=TOKEN_BYTES,
        )
    return joined


def _corrupted(why: str) -> Corrupted:
    return Corrupted(
        f"the dedup snapshot cannot be used: {why}; nothing was changed. "
        "Rebuild the table from the journal",
        reason=why,
    )
