"""The dedup table behaves like a dict with expiry, whatever is in front of it (row Q13)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import dedup
from penstock.core.dedup import MAX_GENERATIONS, TIME_SLICES, DedupTable, repeats, split_tokens
from penstock.model.errors import Corrupted, InvalidInput, InvalidSettings


def token(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tokens(first: int, count: int) -> list[bytes]:
    return [token(number) for number in range(first, first + count)]


@pytest.fixture
def eager_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "FILTER_MIN_ENTRIES", 8)
    monkeypatch.setattr(dedup, "FILTER_MIN_BATCH", 1)
    monkeypatch.setattr(dedup, "FILTER_FLUSH_TOKENS", 5)


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 60), max_size=12, unique=True), st.integers(-30, 60)),
    max_size=40,
)


def check_like_a_dict(steps: list[tuple[list[int], int]], capacity: int, reopen_every: int) -> None:
    window = 100
    table = DedupTable(window, capacity)
    model: dict[bytes, tuple[int, int]] = {}
    now = latest = offset = 0
    for step, (numbers, elapsed) in enumerate(steps):
        now = max(0, now + elapsed)
        latest = max(latest, now)
        batch = [token(number) for number in numbers]
        table.expire(now)
        found = table.find_many(batch)
        assert found is None or any(place is not None for place in found)
        for index, one in enumerate(batch):
            place = found[index] if found else None
            assert place == table.find(one)
            known = model.get(one)
            if known is None:
                assert place is None, "invented a token"
            elif latest < known[1] + window:
                assert place == known[0], "forgot a token inside the window"
            elif place is not None:
                assert place == known[0]
                assert latest < known[1] + window + -(-window // TIME_SLICES)
        table.record(batch, offset, now)
        model.update((one, (offset + index, latest)) for index, one in enumerate(batch))
        offset += len(batch)
        assert len(table._generations) <= MAX_GENERATIONS
        if step % reopen_every == reopen_every - 1:
            fresh = DedupTable(window, capacity)
            fresh.restore(table.snapshot())
            assert len(fresh) == len(table)
            table = fresh
    assert table.forgotten_early == 0


@settings(deadline=None)
@given(STEPS)
def test_like_a_dict_with_expiry(steps: list[tuple[list[int], int]]) -> None:
    """Q13: no false positive, nothing forgotten in the window, also when the clock runs back."""
    check_like_a_dict(steps, capacity=1000, reopen_every=7)


@settings(deadline=None)
@given(steps=STEPS)
def test_like_a_dict_behind_the_filter(steps: list[tuple[list[int], int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "FILTER_MIN_ENTRIES", 8)
        patch.setattr(dedup, "FILTER_MIN_BATCH", 1)
        patch.setattr(dedup, "FILTER_FLUSH_TOKENS", 5)
        check_like_a_dict(steps, capacity=1000, reopen_every=9)


@settings(deadline=None)
@given(
    capacity=st.integers(1, 40),
    batches=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), max_size=30),
)
def test_never_more_than_capacity(capacity: int, batches: list[tuple[int, int]]) -> None:
    table = DedupTable(100, capacity)
    now = first = 0
    for size, elapsed in batches:
        now += elapsed
        table.record(tokens(first, size), first, now)
        first += size
        assert len(table) <= capacity
        assert len(table) == sum(len(held.offsets) for held in table._generations)
        if size:
            assert table.find(token(first - 1)) == first - 1


def test_full_table_forgets_the_oldest_first_and_counts_it() -> None:
    table = DedupTable(1_000_000, 80)
    table.record(tokens(0, 80), 0, 1)
    table.record(tokens(80, 1), 80, 2)
    assert table.forgotten_early == 10
    assert [number for number in range(81) if table.find(token(number)) is None] == list(range(10))


def test_sparse_slices_then_a_burst_stay_inside_capacity() -> None:
    """Time closes generations and room closes generations: both at once still fit the bits."""
    table = DedupTable(600, 800)
    for slice_ in range(7):
        table.record(tokens(slice_, 1), slice_, slice_ * 100)
    table.record(tokens(100, 793), 100, 601)
    assert table.forgotten_early == 0
    assert all(table.find(token(number)) is not None for number in (2, 6, 100, 892))


@pytest.mark.usefixtures("eager_filter")
def test_a_filter_hit_is_confirmed() -> None:
    """Q13: with every slot set the filter says yes to all, and still no new token is refused."""
    table = DedupTable(1_000_000, 1000)
    table.record(tokens(0, 100), 0, 1)
    table._index()
    assert table._filter is not None
    table._filter._slots[:] = 0xFFFF
    assert table.find_many(tokens(1000, 200)) is None
    found = table.find_many([token(1000), token(7), token(1001)])
    assert found == [None, 7, None]


@pytest.mark.usefixtures("eager_filter")
def test_the_filter_spares_most_lookups() -> None:
    table = DedupTable(1_000_000, 100_000)
    source = random.Random(7)
    table.record([source.randbytes(16) for _ in range(50_000)], 0, 1)
    table._index()
    assert table._filter is not None
    joined = source.randbytes(16 * 10_000)
    assert len(table._filter.candidates(joined)) < 600
    table.expire(2_000_000)
    assert len(table) == 0
    assert table._filter is None


def test_a_clock_that_jumps_back_an_hour() -> None:
    hour = 3_600_000_000
    table = DedupTable(hour, 1000)
    table.record(tokens(0, 5), 0, 10 * hour)
    table.record(tokens(5, 5), 5, 9 * hour)
    table.expire(10 * hour + hour // 2)
    assert table.find_many(tokens(0, 10)) == list(range(10))
    table.expire(12 * hour)
    assert table.find_many(tokens(0, 10)) is None


def test_newest_offset_wins() -> None:
    table = DedupTable(600, 100)
    table.record(tokens(1, 1), 10, 0)
    table.record(tokens(1, 1), 20, 150)
    assert table.find(token(1)) == 20


def test_repeats_inside_one_batch() -> None:
    assert repeats(tokens(0, 5)) is None
    assert repeats([token(1), token(2), token(1), token(2), token(1)]) == {2: 0, 3: 1, 4: 0}


def test_split_tokens_keeps_zero_bytes() -> None:
    assert split_tokens(bytes(32)) == [bytes(16), bytes(16)]


@pytest.mark.parametrize("bad", [b"", b"x" * 15, b"x" * 17])
def test_token_of_wrong_length_is_refused(bad: bytes) -> None:
    table = DedupTable(100, 100)
    with pytest.raises(InvalidInput):
        table.record([token(1), bad], 0, 0)
    assert table.find(token(1)) is None


@pytest.mark.usefixtures("eager_filter")
def test_wrong_length_in_a_lookup_is_refused() -> None:
    table = DedupTable(100, 100)
    table.record(tokens(0, 20), 0, 0)
    with pytest.raises(InvalidInput):
        table.find_many([b"short"])


@pytest.mark.parametrize(("window", "capacity"), [(0, 1), (1, 0), (-1, 5)])
def test_settings_that_hold_nothing(window: int, capacity: int) -> None:
    with pytest.raises(InvalidSettings):
        DedupTable(window, capacity)


def test_snapshot_of_an_empty_table_keeps_its_time() -> None:
    table = DedupTable(100, 10)
    table.expire(5_000)
    fresh = DedupTable(100, 10)
    fresh.restore(table.snapshot())
    fresh.record(tokens(0, 1), 0, 10)
    fresh.expire(5_099)
    assert fresh.find(token(0)) == 0


def test_restore_into_a_smaller_table_keeps_the_newest() -> None:
    table = DedupTable(1000, 800)
    table.record(tokens(0, 400), 0, 1)
    small = DedupTable(1000, 150)
    small.restore(table.snapshot())
    assert len(small) <= 400
    small.record(tokens(400, 10), 400, 2)
    assert len(small) <= 150
    assert small.find(token(409)) == 409


@settings(deadline=None)
@given(st.data())
def test_damaged_snapshots_are_refused(data: st.DataObject) -> None:
    """Any flipped bit, a cut, a missing or an extra chunk raises Corrupted; the table stays."""
    table = DedupTable(60, 100)
    for number in range(4):
        table.record(tokens(number * 5, 5), number * 5, number * 15)
    chunks = table.snapshot()
    assert len(chunks) > 2
    place = data.draw(st.integers(0, len(chunks) - 1))
    fault = data.draw(st.sampled_from(["flip", "cut", "drop", "double"]))
    if fault == "flip":
        bit = data.draw(st.integers(0, len(chunks[place]) * 8 - 1))
        flipped = bytearray(chunks[place])
        flipped[bit // 8] ^= 1 << bit % 8
        chunks[place] = bytes(flipped)
    elif fault == "cut":
        chunks[place] = chunks[place][: data.draw(st.integers(0, len(chunks[place]) - 1))]
    elif fault == "drop":
        del chunks[place]
    else:
        chunks.insert(place, chunks[place])
    before = table.snapshot()
    with pytest.raises(Corrupted):
        table.restore(chunks)
    assert table.snapshot() == before


def test_no_chunks_at_all_is_an_empty_table() -> None:
    table = DedupTable(60, 100)
    table.record(tokens(0, 5), 0, 0)
    table.restore([])
    assert len(table) == 0
