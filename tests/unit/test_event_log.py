"""The event log: one offset space over memory, journal and segments."""

from __future__ import annotations

import pytest

from penstock.log.event_log import EventLog, InJournal, InMemory, InSegment
from penstock.log.journal import BATCH, sealed_batches
from penstock.log.manifest import Manifest
from penstock.log.sealing import InlineSealer, Job, JournalInput
from penstock.model.batch import EventBatch
from penstock.model.errors import OffsetExpired

COUNT = 5  # events in a batch


@pytest.fixture
def home(folder):
    return folder()


def add(home, log: EventLog, number: int, *, remember: bool) -> int:
    batch = EventBatch.build("orders", [b"%d" % (number * COUNT + at) for at in range(COUNT)])
    batch.base_offset, batch.append_time_us = number * COUNT, 1_000 + 100 * number
    commit = home.commit([(BATCH, batch.encode_parts())])
    partition = log.partition("orders", 0)
    partition.add(batch, home.journal.base, commit.entries[-1][0], 0)
    if remember:
        log.remember(batch, partition)
    return commit.end


async def in_line(function, *args):
    return function(*args)


@pytest.fixture
async def log(home) -> EventLog:
    """Batches 0 and 1 sealed, 2 and 3 in the journal, 4 and 5 in memory too."""
    log = EventLog(home.disk, home.recovered.log.manifest, cache_bytes=1 << 20)
    for number in range(2):
        sealed_to = add(home, log, number, remember=False)
    sealer = InlineSealer(home.disk, sealed_batches, in_line)
    manifest: Manifest = log.manifest
    result = await sealer.run(
        Job(
            first_id=manifest.next_id,
            settings=home.settings.sealing,
            journal=[JournalInput(0, sealed_to)],
        )
    )
    manifest.apply(result.added, result.removed, sealed_to=sealed_to, at_us=1)
    log.sealed(sealed_to)
    for number in range(2, 6):
        add(home, log, number, remember=number >= 4)
    return log


def payloads(log: EventLog, offset: int, limit: int) -> list[int]:
    return [
        int(each) for batch in log.read("orders", 0, offset, limit) for each in batch.payloads()
    ]


async def test_an_offset_is_found_wherever_it_lies(log: EventLog) -> None:
    kinds = {0: InSegment, 9: InSegment, 10: InJournal, 19: InJournal, 20: InMemory, 29: InMemory}
    for offset, kind in kinds.items():
        assert type(log.plan("orders", 0, offset, 1)[0]) is kind
    assert log.plan("orders", 0, 30, 1) == []
    assert log.bounds("orders", 0) == (0, 30)


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_reading_on_from_any_offset_gives_every_event_once(log: EventLog, limit: int) -> None:
    for start in range(30):
        offset, found = start, []
        while offset < 30:
            part = payloads(log, offset, limit)
            assert part, f"nothing at {offset}"
            assert len(part) <= limit
            found += part
            offset += len(part)
        assert found == list(range(start, 30))


async def test_one_read_takes_no_more_from_the_journal_than_fits_the_memory(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q7: what is at hand already costs nothing, and comes whole."""
    monkeypatch.setattr("penstock.log.event_log.READ_BYTES", 1)
    assert payloads(log, 10, 100) == list(range(10, 15))
    assert payloads(log, 17, 100) == list(range(17, 20))
    assert payloads(log, 20, 100) == list(range(20, 30))


async def test_times_are_found_across_segments_and_journal(log: EventLog) -> None:
    for time_us, offset in [
        (0, 0), (1_000, 0), (1_001, 5), (1_100, 5), (1_101, 10), (1_200, 10), (1_201, 15),
        (1_500, 25), (1_501, 30),
    ]:  # fmt: skip
        assert log.find_time("orders", 0, time_us) == offset, time_us
    assert log.find_time("nothing", 0, 5) == 0


async def test_what_retention_took_says_what_is_left(log: EventLog) -> None:
    manifest = log.manifest
    manifest.apply([], [info.id for info in manifest.segments()], at_us=2)
    with pytest.raises(OffsetExpired) as caught:
        log.plan("orders", 0, 3, 1)
    assert (caught.value.first_offset, caught.value.end_offset) == (10, 30)
    assert log.bounds("orders", 0) == (10, 30)
    assert payloads(log, 10, 2) == [10, 11]


async def test_a_plan_made_before_sealing_can_still_be_read(log: EventLog) -> None:
    planned = log.plan("orders", 0, 10, 5)
    log.sealed(1 << 40)
    assert [each.base_offset for each in log.load(planned, 10, 5)] == [10]


async def test_offsets_of_a_deleted_topic_of_the_same_name_are_gone(log: EventLog) -> None:
    partition = log.partition("orders", 0)
    partition.floor = 12
    assert log.bounds("orders", 0) == (12, 30)
    for offset in (0, 9, 11):
        with pytest.raises(OffsetExpired):
            log.plan("orders", 0, offset, 1)
    assert payloads(log, 12, 1) == [12]
    assert log.find_time("orders", 0, 0) == 12, "a time before the floor is the floor"
    assert log.find_time("orders", 0, 1_201) == 15


async def test_memory_is_bounded_and_the_oldest_leaves_first(home) -> None:
    log = EventLog(home.disk, home.recovered.log.manifest, cache_bytes=5_000)
    for number in range(20):
        add(home, log, number, remember=True)
    partition = log.partition("orders", 0)
    assert 0 < len(partition.recent) < 10
    assert max(partition.recent) == 95
    assert payloads(log, 0, 100) == list(range(100))


async def test_no_memory_at_all_works_too(home) -> None:
    log = EventLog(home.disk, home.recovered.log.manifest, cache_bytes=0)
    add(home, log, 0, remember=True)
    assert log.partition("orders", 0).recent == {}
    assert payloads(log, 2, 2) == [2, 3]
