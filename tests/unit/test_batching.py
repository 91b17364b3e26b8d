"""`Batcher` places drafts into batches: offsets and times in order, small drafts merged, repeated tokens found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.entry import Acked, TopicPut, TopicSpec, decode_entries
from penstock.engines.embedded.batching import (
    MERGE_EVENTS,
    Batcher,
    Submission,
    draft_bytes,
    draft_sizes,
)
from penstock.log.event_log import EventLog
from penstock.log.journal import BATCH, CONTROL, GROUP, Commit, read_group
from penstock.log.manifest import Manifest
from penstock.log.memory_disk import MemoryDisk
from penstock.log.snapshot import Fold
from penstock.model.batch import EventBatch, event_bytes, payload_bytes
from penstock.model.draft import Draft
from penstock.model.settings import Dedup, Media
from penstock.model.token import TokenSource


class Batching:
    """A batcher over an empty log."""

    def __init__(self, **media: Any) -> None:
        disk = MemoryDisk()
        disk.make_dir("segments")
        self.log = EventLog(disk, Manifest.load(disk, write=True), cache_bytes=0)
        self.fold = Fold(Dedup())
        self.batcher = Batcher(
            self.log, self.fold, TokenSource(b"seedseed"), Media(**media), lambda: 5_000_000
        )

    def place(self, *submissions: Submission, now_us: int = 1_000_000) -> tuple[Commit, list]:
        commit = Commit(0, 0, None)
        return commit, self.batcher.lay(submissions, commit, now_us)


def draft(
    *payloads: bytes, topic: str = "orders", tenant: str = "acme", codec: str = "raw"
) -> Draft:
    return Draft(topic, list(payloads), tenant=tenant, codec=codec)


def submit(*drafts: Draft, partitions: list[int] | None = None, entries=()) -> Submission:
    made = Submission("acme", list(drafts), partitions or [0] * len(drafts), 0, None)  # type: ignore[arg-type]
    made.entries = list(entries)
    return made


def kinds(commit: Commit) -> list[int]:
    return [kind for _, kind, _ in commit.entries]


def test_small_drafts_of_one_topic_share_a_batch() -> None:
    batching = Batching()
    work = [submit(draft(b"a")), submit(draft(b"b", b"c")), submit(draft(b"d"))]
    commit, placed = batching.place(*work)
    assert kinds(commit) == [BATCH]
    (only,) = placed
    assert only.batch.payloads() == [b"a", b"b", b"c", b"d"]
    assert [(each.receipts[0].offset, each.receipts[0].count) for each in work] == [
        (0, 1),
        (1, 2),
        (3, 1),
    ]
    for each in work:
        receipt = each.receipts[0]
        assert receipt.token == only.batch.token(receipt.offset)


@pytest.mark.parametrize("other", [{"topic": "payments"}, {"tenant": "globex"}, {"codec": "json"}])
def test_drafts_of_another_topic_tenant_or_codec_do_not(other) -> None:
    commit, placed = Batching().place(submit(draft(b"a")), submit(draft(b"b", **other)))
    assert kinds(commit) == [BATCH, BATCH]
    assert len(placed) == 2


def test_keys_and_headers_of_merged_drafts_stay_with_their_events() -> None:
    first, second, third = draft(b"a"), draft(b"b"), draft(b"c")
    second.keys, third.headers = [b"k"], [{"h": "v"}]
    _, ((batch, *_),) = Batching().place(submit(first), submit(second), submit(third))
    assert [(e.key, dict(e.headers)) for e in batch] == [(None, {}), (b"k", {}), (None, {"h": "v"})]


def test_large_drafts_keep_a_batch_of_their_own() -> None:
    large = draft(*[b"x"] * MERGE_EVENTS)
    commit, _ = Batching().place(submit(draft(b"a")), submit(large), submit(draft(b"b")))
    assert kinds(commit) == [BATCH, BATCH, BATCH]


def test_several_drafts_and_entries_are_one_group_frame() -> None:
    batching = Batching()
    work = submit(
        draft(b"a"),
        draft(b"b", topic="payments"),
        entries=[TopicPut("t", TopicSpec()), Acked("g", "t", 0, [0, 1])],
    )
    commit, placed = batching.place(work)
    assert kinds(commit) == [GROUP]
    body = b"".join(commit.entries[0][2])
    parts = list(read_group(memoryview(body)))
    assert [kind for _, kind, _ in parts] == [BATCH, BATCH, CONTROL]
    for (batch, _, position, inner), (at, _, encoded) in zip(placed, parts, strict=False):
        assert (position, inner) == (0, at)
        assert EventBatch.decode(body[inner:]).payloads() == batch.payloads()
        assert bytes(encoded) == batch.encode()
    assert decode_entries(parts[2][2]) == work.written == work.entries
    assert batching.fold.state.topics == {"t": TopicSpec()}


def test_entries_that_need_offsets_get_the_receipts() -> None:
    work = submit(draft(b"a", b"b"))
    seen = []
    work.when_taken = lambda receipts: seen.extend(receipts) or []
    Batching().place(work)
    assert [(each.offset, each.count) for each in seen] == [(0, 2)]


def test_append_times_never_run_backwards_in_a_partition() -> None:
    batching = Batching()
    times = []
    for now_us in (10_000, 50_000, 20_000, 51_000):
        _, ((batch, *_),) = batching.place(submit(draft(b"a")), now_us=now_us)
        times.append(batch.append_time_us)
    assert times == [10_000, 50_000, 50_000, 51_000]


def test_offsets_go_on_while_commits_are_under_way() -> None:
    batching = Batching()
    _, ((first, log, *_),) = batching.place(submit(draft(b"a", b"b")))
    _, ((second, *_),) = batching.place(submit(draft(b"c")))
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert (log.next, log.end) == (3, 0), "nobody may see what is not committed"


def tokens(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in numbers]


def labelled(*numbers: int) -> Draft:
    made = draft(*(b"%d" % number for number in numbers))
    made.tokens = tokens(*numbers)
    return made


def test_a_token_seen_before_gives_the_first_receipt() -> None:
    batching = Batching()
    first, again = submit(labelled(7)), submit(labelled(7))
    commit, placed = batching.place(first, again)
    assert len(placed) == 1
    assert not first.receipts[0].duplicate
    assert again.receipts[0].duplicate
    assert again.receipts[0].offset == first.receipts[0].offset == 0
    assert kinds(commit) == [BATCH]


def test_of_a_mixed_draft_only_what_is_new_is_stored() -> None:
    batching = Batching()
    batching.place(submit(labelled(1, 2)))
    work = submit(labelled(2, 3, 3, 1, 4))
    _, ((batch, *_),) = batching.place(work)
    assert batch.payloads() == [b"3", b"4"]
    parts = work.receipts[0].parts
    assert [part.offset for part in parts] == [1, 2, 2, 0, 3]
    assert [part.duplicate for part in parts] == [True, False, True, True, False]


def test_of_a_mixed_batch_only_what_is_new_is_stored() -> None:
    """T1: a draft that came over a wire as a batch; its new tokens are known from then on."""
    batching = Batching()
    batching.place(submit(labelled(1, 2)))
    for duplicates in ([True, False, True, True, False], [True] * 5):
        came = labelled(2, 3, 3, 1, 4)
        came.batch, came.payloads = EventBatch.decode(came.build().encode()), ()
        work = submit(came)
        _, placed = batching.place(work)
        parts = work.receipts[0].parts
        assert [part.offset for part in parts] == [1, 2, 2, 0, 3]
        assert [part.duplicate for part in parts] == duplicates
        for batch, *_ in placed:
            assert batch.payloads() == [b"3", b"4"]
            assert [batch.token(0), batch.token(1)] == tokens(3, 4)


def test_a_repeat_within_one_draft_is_stored_once() -> None:
    work = submit(labelled(1, 1, 1))
    _, ((batch, *_),) = Batching().place(work)
    assert batch.count == 1
    assert [part.offset for part in work.receipts[0].parts] == [0, 0, 0]


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), max_size=12))
def test_every_token_is_stored_once_and_every_receipt_points_to_it(drafts) -> None:
    batching = Batching()
    stored: dict[int, int] = {}
    for numbers in drafts:
        work = submit(labelled(*numbers))
        _, placed = batching.place(work)
        for batch, *_ in placed:
            for event in batch:
                assert int(event.payload) not in stored
                stored[int(event.payload)] = event.offset
        receipt = work.receipts[0]
        found = receipt.parts or (receipt,)
        offsets = (
            [part.offset for part in found]
            if receipt.parts
            else list(range(receipt.offset, receipt.offset + receipt.count))
        )
        assert offsets == [stored[number] for number in numbers]
    assert sorted(stored.values()) == list(range(len(stored)))


PAYLOADS = st.lists(st.binary(max_size=50), min_size=1, max_size=20)


@given(PAYLOADS, st.booleans(), st.booleans(), st.booleans())
def test_the_bound_on_what_a_draft_takes_is_one(payloads, keys, headers, labels) -> None:
    made = draft(*payloads, topic="t" * 200, tenant="x" * 60)
    if keys:
        made.keys = [b"key"] * len(payloads)
    if headers:
        made.headers = [{"héader": "välue"}, *[None] * (len(payloads) - 1)]
    if labels:
        made.tokens = [bytes([at]) * 16 for at in range(len(payloads))]
        made.times_us, made.expires_us = [1] * len(payloads), [2] * len(payloads)
        made.priority = [3] * len(payloads)
    assert len(made.build().encode()) <= draft_bytes(made)
    built = made.build()
    assert draft_sizes(made)[:2] == (payload_bytes(built), event_bytes(built)), "laid out or not"


def test_what_compresses_is_compressed_and_what_does_not_is_left() -> None:
    import random

    batching = Batching(compressor="zstd", compress_min_bytes=1_000)
    _, ((soft, *_),) = batching.place(submit(draft(b"a" * 10_000)))
    _, ((hard, *_),) = batching.place(submit(draft(random.Random(1).randbytes(10_000))))
    _, ((tiny, *_),) = batching.place(submit(draft(b"a" * 100)))
    assert (soft.compressor, hard.compressor, tiny.compressor) == ("zstd", "none", "none")
    assert EventBatch.decode(soft.encode()).payloads() == [b"a" * 10_000]
