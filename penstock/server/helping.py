"""Helping: a frame of a tenant ahead of its rate is stored in small helpings, each made ready in bites.

Others may go first before each bite, and a helping is small enough to go with a commit of theirs. It is
no smaller, because each costs them about the same. Of a large frame there are few, so that it does not
take for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.model.event import Receipt
from penstock.wire.frame import Bytes
from penstock.wire.message import DraftMeta, Fault

# With what others commit it is below what is written in one go (`COMPANY_BYTES` of the pending).
HELPING_BYTES = 80 << 10
# What is made ready in one turn of the loop, and what a draft takes beside its bytes.
BITE_BYTES, DRAFT_BYTES = 8 << 10, 128
# Helpings are so large that there are no more than about twice as many.
FEW_HELPINGS = 8


class Answers:
    """What became of the drafts of a frame, by number."""

    def __init__(self, count: int) -> None:
        self.receipts: list[Receipt | None] = [None] * count
        self.faults: dict[int, Fault] = {}


def helpings_of(sizes: Sequence[int]) -> list[range]:
    """The numbers of the drafts that are stored together.

    >>> helpings_of([70_000, 5_000, 40_000, 100]), helpings_of([1 << 20] * 16)[:2]
    ([range(0, 2), range(2, 4)], [range(0, 2), range(2, 4)])
    """
    most = max(HELPING_BYTES, -(-sum(sizes) // FEW_HELPINGS))
    helpings, begin, size = [], 0, 0
    for number, each in enumerate(sizes):
        if number > begin and size + each > most:
            helpings.append(range(begin, number))
            begin, size = number, 0
        size += each
    return [*helpings, range(begin, len(sizes))]


def size_of(meta: DraftMeta, parts: Sequence[Bytes]) -> int:
    """The bytes of a draft, in its part or in its lists; a part that is not there has none."""
    if meta.part < 0:
        return sum(map(len, meta.payloads))
    return len(parts[meta.part]) if meta.part < len(parts) else 0
