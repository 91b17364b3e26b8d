"""Taking stock of the risk-tag pipeline: where every evidence event ended, from the topics alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from penstock.pipelines.builtin.evidence import TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.bus.bus import Bus

TAGS, BAD, LATE = "risk.tags.v1", "evidence.bad.v1", "evidence.late.v1"
SOURCE_HEADER = "evidence-source"
"""Header of a bad or late row: topic/partition/offset of the event it was."""
SHOWN = 5  # examples of what does not add up, for a person to look at


class _Result(msgspec.Struct):
    evidence_id: str
    source: str


class _Evidence(msgspec.Struct):
    evidence_id: str


_read_result = msgspec.json.Decoder(_Result).decode
_read_evidence = msgspec.json.Decoder(_Evidence).decode


class Balance(msgspec.Struct, frozen=True):
    """One tenant's books: `events` = out + duplicates + late + bad when they balance."""

    events: int
    out: int
    duplicates: int
    late: int
    bad: int
    lost: int = 0
    """Events that ended nowhere and are no duplicates."""
    repeated: int = 0
    """Results, late or bad rows beyond the first for one event or evidence id."""
    examples: tuple[str, ...] = ()

    @property
    def balanced(self) -> bool:
        """Whether every event ended in exactly one place."""
        total = self.out + self.duplicates + self.late + self.bad
        return self.events == total and not self.lost and not self.repeated


def balance(
    events: Iterable[tuple[str, bytes]],
    results: Iterable[tuple[str, str]],
    late: Iterable[str],
    bad: Iterable[str],
) -> Balance:
    """The books of one tenant: events as (source, payload), results as (source, evidence id).

    >>> seen = [("e/0/0", b'{"evidence_id": "a"}'), ("e/0/1", b'{"evidence_id": "a"}'), ("e/0/2", b"?")]
    >>> books = balance(seen, [("e/0/0", "a")], [], ["e/0/2"])
    >>> books.events, books.out, books.duplicates, books.bad, books.balanced
    (3, 1, 1, 1, True)
    >>> balance(seen, [], [], ["e/0/2"]).lost
    2
    """
    rows = list(results)
    late, bad = list(late), list(bad)
    ids = Counter(evidence_id for _, evidence_id in rows)
    places = Counter([source for source, _ in rows] + late + bad)
    twice = [name for counter in (ids, places) for name, times in counter.items() if times > 1]
    repeated = sum(times - 1 for counter in (ids, places) for times in counter.values())
    count = duplicates = 0
    lost: list[str] = []
    for source, payload in events:
        count += 1
        if places.pop(source, 0):
            continue
        if _evidence_id(payload) in ids:
            duplicates += 1
        else:
            lost.append(source)
    # What is left names events that are not there: as wrong as a second row.
    examples = (*twice, *places, *lost)[:SHOWN]
    return Balance(
        count,
        len(rows),
        duplicates,
        len(late),
        len(bad),
        len(lost),
        repeated + len(places),
        examples,
    )


def _evidence_id(payload: bytes) -> str | None:
    try:
        return _read_evidence(payload).evidence_id
    except msgspec.MsgspecError:  # a bad row that is not among the bad ones is lost
        return None


async def take_stock(bus: Bus, tenants: Iterable[str]) -> dict[str, Balance]:
    """The books of each tenant over all that its topics hold."""
    return {tenant: await _stock_of(bus, tenant) for tenant in tenants}


async def _stock_of(bus: Bus, tenant: str) -> Balance:
    # Wildcards find nothing where a topic was never written; a plain name would be an error.
    events = [
        (str(event.id), event.payload)
        for topic in TOPICS.values()
        async for event in bus.replay(f"{topic}.{tenant}.#")
    ]
    results = [
        (result.source, result.evidence_id)
        async for event in bus.replay(f"{TAGS}.{tenant}.#")
        for result in [_read_result(event.payload)]
    ]
    aside = {
        topic: [event.headers[SOURCE_HEADER] async for event in bus.replay(f"{topic}.{tenant}.#")]
        for topic in (LATE, BAD)
    }
    return balance(events, results, aside[LATE], aside[BAD])
