"""A group delivers one event of a key at a time, and higher priorities first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.lease import Lane
from penstock.core.ordering import KeyGate, Priorities

KEYS = st.lists(st.sampled_from([b"a", b"b", b"c", None]), min_size=1, max_size=30)


def lane(name: str = "orders") -> Lane:
    return Lane(name, 0, 0, 100)


def offsets(runs) -> list[int]:
    return [offset for run in runs for offset in range(run.start, run.start + run.count)]


@given(KEYS, st.randoms(use_true_random=False))
def test_a_key_has_one_event_out_and_they_come_in_order(keys, random) -> None:
    gate, here = KeyGate(), lane()
    out = offsets(gate.offer(here, 0, 0, keys))
    came: list[int] = list(out)
    while out:
        busy = [keys[offset] for offset in out if keys[offset] is not None]
        assert len(busy) == len(set(busy)), "two events of a key are out"
        done = out.pop(random.randrange(len(out)))
        following = gate.settled(here, done)
        if following is not None:
            out += offsets([following])
            came += offsets([following])
    assert sorted(came) == list(range(len(keys)))
    for key in set(keys) - {None}:
        mine = [offset for offset in came if keys[offset] == key]
        assert mine == sorted(mine)
    assert gate.held == 0
    assert list(gate.waiting()) == []


def test_the_same_key_in_two_lanes_is_two_keys() -> None:
    gate, one, two = KeyGate(), lane("one"), lane("two")
    assert offsets(gate.offer(one, 0, 0, [b"a"])) == [0]
    assert offsets(gate.offer(two, 0, 0, [b"a"])) == [0]


def test_a_stuck_key_holds_up_nobody_else() -> None:
    gate, here = KeyGate(), lane()
    free = offsets(gate.offer(here, 0, 0, [b"stuck"] * 50 + [b"free", None]))
    assert free == [0, 50, 51]
    assert gate.held == 49


def test_forgetting_a_lane_leaves_the_others() -> None:
    gate, one, two = KeyGate(), lane("one"), lane("two")
    gate.offer(one, 0, 0, [b"a", b"a", b"a"])
    gate.offer(two, 0, 0, [b"a", b"a"])
    gate.forget(one)
    assert gate.held == 1
    assert gate.settled(one, 0) is None
    assert gate.settled(two, 0).start == 1


def test_what_waits_can_be_withdrawn_without_letting_its_key_go() -> None:
    gate, here = KeyGate(), lane()
    gate.offer(here, 0, 0, [b"a", b"a", b"a"])
    assert gate.withdraw(here, 1)
    assert not gate.withdraw(here, 0), "what is out does not wait"
    assert not gate.withdraw(here, 1)
    assert gate.held == 1
    assert gate.settled(here, 0).start == 2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 5))
def test_urgent_first_and_in_order_among_equals(priorities, limit) -> None:
    queue, here = Priorities(), lane()
    queue.offer(here, 0, 0, priorities)
    came: list[int] = []
    while (run := queue.pop(limit)) is not None:
        assert run.count <= limit
        came += offsets([run])
    assert came == sorted(range(len(priorities)), key=lambda at: (-priorities[at], at))


def test_events_with_other_histories_do_not_share_a_run() -> None:
    queue, here = Priorities(), lane()
    queue.offer(here, 0, 0, [5])
    queue.offer(here, 1, 3, [5])
    assert (queue.pop(10).count, queue.pop(10).made) == (1, 3)


def test_priorities_forget_a_lane() -> None:
    queue, one, two = Priorities(), lane("one"), lane("two")
    queue.offer(one, 0, 0, [1, 2])
    queue.offer(two, 0, 0, [1])
    queue.forget(one)
    assert len(queue) == 1
    assert queue.pop(5).lane is two
