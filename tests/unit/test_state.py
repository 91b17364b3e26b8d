"""State: what each entry changes, and that pieces put it together again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import state as module
from penstock.core.entry import (
    Acked,
    Committed,
    Dead,
    DeadPurged,
    DeadReplayed,
    Delayed,
    Fired,
    GroupGone,
    GroupPut,
    GroupSpec,
    LaneSet,
    Leased,
    RecurringGone,
    RecurringPut,
    Retried,
    TopicGone,
    TopicPut,
    TopicSpec,
)
from penstock.core.schedule import Definition
from penstock.core.state import Piece, State, load_pieces, pieces_of
from penstock.model.errors import Corrupted


def applied(*entries) -> State:
    state = State()
    for entry in entries:
        state.apply(entry)
    return state


BASE = (
    TopicPut("orders", TopicSpec(partitions=2)),
    GroupPut("billing", GroupSpec(patterns=("orders",))),
    LaneSet("billing", "orders", 0, 0),
    GroupPut("spark", GroupSpec(patterns=("orders",), mode="log")),
    LaneSet("spark", "orders", 0, 4),
)


def test_a_deleted_topic_takes_its_cursors_along_and_leaves_its_ends() -> None:
    state = applied(*BASE, TopicGone("orders", (7, 8)))
    assert state.topics == {}
    assert state.deleted == {"orders": (7, 8)}
    assert state.groups["billing"].ledgers == {}
    assert state.groups["spark"].cursors == {}
    state.apply(TopicPut("orders", TopicSpec(floors=(7, 8))))
    assert state.deleted == {}


def test_a_group_keeps_its_place_when_its_rules_change() -> None:
    state = applied(
        *BASE,
        Leased("billing", "orders", 0, 0, 3, 1, 5, "m"),
        GroupPut("billing", GroupSpec(patterns=("orders",), lease_s=1.0)),
    )
    group = state.groups["billing"]
    assert group.spec.lease_s == 1.0
    assert group.ledgers["orders", 0].outstanding() == 3
    assert group.fence == 6


def test_the_fence_only_grows() -> None:
    leases = [Leased("billing", "orders", 0, 0, 1, 1, fence, "m") for fence in (9, 3)]
    assert applied(*BASE, *leases).groups["billing"].fence == 10


def test_a_dead_letter_lives_is_replayed_dies_again_and_is_purged() -> None:
    dead = Dead("i@billing", "billing", "orders", 0, 1, "acme", 5, "why", 9, 0)
    state = applied(*BASE, Leased("billing", "orders", 0, 0, 3, 1, 1, "m"), dead)
    assert state.groups["billing"].ledgers["orders", 0].outstanding() == 2
    assert (state.dead["i@billing"].status, state.dead["i@billing"].replay_count) == ("dead", 0)
    state.apply(DeadReplayed("i@billing"))
    state.apply(Retried("billing", "orders", 0, 1, 1, 0, 0))
    assert (state.dead["i@billing"].status, state.dead["i@billing"].replay_count) == ("replayed", 1)
    assert state.groups["billing"].ledgers["orders", 0].outstanding() == 3
    state.apply(dead)
    assert (state.dead["i@billing"].status, state.dead["i@billing"].replay_count) == ("dead", 1)
    state.apply(DeadPurged("i@billing"))
    state.apply(DeadPurged("i@billing"))
    assert state.dead == {}


@pytest.mark.parametrize(
    "entry",
    [
        Leased("{}", "orders", 0, 0, 1, 1, 1, "m"), Acked("{}", "orders", 0, [0, 1]),
        Retried("{}", "orders", 0, 0, 1, 1, 5), Committed("{}", "orders", 0, 3, 1),
        LaneSet("{}", "orders", 0, 3), DeadReplayed("{}"), GroupGone("{}"),
    ],
)  # fmt: skip
def test_what_comes_after_its_group_or_topic_was_deleted_changes_nothing(entry) -> None:
    """Settles race with deletions; a journal with one behind the other must open."""
    name = "id" if hasattr(entry, "id") else "group"
    for state in (
        applied(*BASE, GroupGone("billing"), GroupGone("spark")),
        applied(*BASE, TopicGone("orders", (1, 1))),
    ):
        for group in ("billing", "spark"):
            before = pieces_of(state, 0)
            about = msgspec.structs.replace(entry, **{name: group})
            if isinstance(about, LaneSet | GroupGone) and state.groups:
                continue
            state.apply(about)
            state.apply_live(about)
            if not isinstance(entry, Leased):  # which still raises the fence of a group that lives
                assert pieces_of(state, 0) == before


def test_schedules_come_and_go() -> None:
    definition = Definition(id="tick", topic="orders", payload=b"", codec="raw", every_us=10**6)
    put = RecurringPut("tick", msgspec.msgpack.encode(definition))
    state = applied(Delayed([0, 500, 1, 400]), put, put, Fired([1]))
    assert state.schedule.delayed.due(10_000, 10) == [0]
    assert [each.id for each in state.schedule.recurring.definitions()] == ["tick"]
    state.apply(RecurringGone("tick"))
    assert state.schedule.recurring.definitions() == []


def test_the_running_engine_leaves_deliveries_to_its_machines() -> None:
    state = applied(*BASE)
    before = pieces_of(state, 0)
    for entry in (
        Leased("billing", "orders", 0, 0, 3, 1, 1, "m"), Acked("billing", "orders", 0, [0, 1]),
        Retried("billing", "orders", 0, 1, 1, 1, 10), LaneSet("billing", "orders", 0, 9),
    ):  # fmt: skip
        state.apply_live(entry)
    assert pieces_of(state, 0) == before
    state.apply_live(LaneSet("spark", "orders", 0, 9))
    assert state.groups["spark"].cursors["orders", 0] == 9


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_put_the_state_together_again(letters: int, chunk: int) -> None:
    entries = [
        *BASE,
        Leased("billing", "orders", 0, 0, 30, 1, 1, "m"),
        Acked("billing", "orders", 0, [3, 4]),
        Committed("spark", "orders", 0, 5, 2),
        TopicGone("gone", (4,)),
        Delayed([0, 500]),
        *(
            Dead(f"{n}@billing", "billing", "orders", 0, n, "acme", 5, "", n, n)
            for n in range(letters)
        ),
    ]
    state = applied(*entries)
    before, module.DEAD_CHUNK = module.DEAD_CHUNK, chunk
    try:
        pieces = pieces_of(state, 77)
    finally:
        module.DEAD_CHUNK = before
    again = load_pieces(pieces)
    assert pieces_of(again, 77) == pieces_of(state, 77)
    assert {piece.as_of for piece in pieces} == {77}


@pytest.mark.parametrize("piece", [
    Piece("topics", "", 0, 0, b"\xc1"), Piece("lane", "nobody", 0, 0, b"\x92\xa1t\x91\x00"),
    Piece("group", "g", 0, 0, b"\x90"),
])  # fmt: skip
def test_a_piece_that_does_not_fit_is_corruption(piece: Piece) -> None:
    with pytest.raises(Corrupted):
        load_pieces([piece])
