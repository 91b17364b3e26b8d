"""Random texts in columns: made by the hundred thousand, never one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
# Texts are cut out of one long text: that costs a copy each, and two are hardly ever the same.
POOL_BYTES = 1 << 20
MIN_TEXT_BYTES = 3
# One letter in so many is the special one: a blank in descriptions, an underscore in addresses.
SPECIAL_EVERY = 13


class Texts:
    """Texts of a seed: letters only, or words with something between them.

    >>> source = Texts(7)
    >>> sizes = np.array([3, 5])
    >>> again = Texts(7).letters(np.random.default_rng(1), sizes)
    >>> source.letters(np.random.default_rng(1), sizes).equals(again), again[1].as_py().isalpha()
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, POOL_BYTES])
        self._letters = rng.choice(LETTERS, POOL_BYTES)
        special = rng.integers(0, SPECIAL_EVERY, POOL_BYTES) == 0
        self._words = np.where(special, np.uint8(ord(" ")), self._letters)

    def letters(self, rng: np.random.Generator, sizes: Any) -> pa.Array:
        """Texts of letters, each as long as `sizes` says."""
        return _cut(rng, self._letters, sizes)

    def words(
        self, rng: np.random.Generator, count: int, below: int, special: str = " "
    ) -> pa.Array:
        """Texts of at least three letters and fewer than `below`; some letters are the special one.

        Blanks at the ends are cut off.
        """
        sizes = rng.integers(MIN_TEXT_BYTES, below, count)
        found = _cut(rng, self._words, sizes)
        return pc.utf8_trim(found, " ") if special == " " else pc.replace_substring(found, " ", special)  # fmt: skip


def padded(rng: np.random.Generator, used_bytes: Any, average_bytes: int, texts: Texts) -> pa.Array:
    """What brings records to an average size: between four and six fifths of what is missing."""
    missing = np.maximum(average_bytes - used_bytes, 0)
    spread = np.rint(missing * 0.2).astype(np.int64)
    return texts.letters(rng, missing - spread + rng.integers(0, np.maximum(2 * spread, 1)))


def _cut(rng: np.random.Generator, pool: Any, sizes: Any) -> pa.Array:
    widest = max(1, int(sizes.max(initial=1)))
    windows = np.lib.stride_tricks.sliding_window_view(pool, widest)
    places = rng.integers(0, len(windows), len(sizes))
    data = windows[places][np.arange(widest) < sizes[:, None]]
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(data))
