"""The delivery machine (T5, X4, Y6): each rule by a script, all of them against a naive model."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.delivery import MAX_LEASE_EVENTS, QueueGroup
from penstock.core.entry import Acked, GroupPut, GroupSpec, LaneSet, Leased, Retried
from penstock.core.lease import OUT, STATES, Lane, Lease
from penstock.core.retry import Retry
from penstock.core.state import Ledger, State
from penstock.model.errors import AlreadySettled, Fenced, LeaseExpired


def group(count: int = 10, *, credit: int = 10, **spec) -> QueueGroup:
    """A group with one lane of `count` events and one member."""
    made = QueueGroup("billing", GroupSpec(patterns=("orders",), **spec))
    made.lane("orders", 0, cursor=0, end=count)
    made.join("worker", credit)
    return made


def handed(machine: QueueGroup, now: float) -> list[tuple[Lease, int]]:
    """Dispatch, and hand every event to its member."""
    out = []
    for lease in machine.dispatch(now):
        for index in range(lease.count):
            lease.hand(index, now + machine.spec.lease_s)
            out.append((lease, index))
    return out


def offsets(out: list[tuple[Lease, int]]) -> list[int]:
    return [lease.start + index for lease, index in out]


# -- scripts --------------------------------------------------------------------------------------


def test_credit_bounds_what_a_member_holds() -> None:
    machine = group(10, credit=3)
    out = handed(machine, 0.0)
    assert offsets(out) == [0, 1, 2]
    assert handed(machine, 0.0) == []
    machine.ack(*out[1], 1.0)
    assert offsets(handed(machine, 1.0)) == [3]


def test_members_share_and_a_lease_is_bounded() -> None:
    machine = group(10_000, credit=5_000)
    machine.join("second", 5_000)
    leases = machine.dispatch(0.0)
    assert {lease.member.id for lease in leases} == {"worker", "second"}
    assert max(lease.count for lease in leases) <= MAX_LEASE_EVENTS
    assert sum(lease.count for lease in leases) == 10_000


def test_the_ladder_is_exact_and_then_the_event_is_doomed() -> None:
    machine = group(1)
    now = 0.0
    for attempt, step in enumerate((0.1, 1.0, 10.0, 60.0), 1):
        ((lease, index),) = handed(machine, now)
        assert lease.attempt == attempt
        machine.nack(lease, index, now)
        due = now + step
        assert machine.next_due() <= due
        assert machine.dispatch(due - 0.001) == []
        now = due
    ((lease, index),) = handed(machine, now)
    assert lease.attempt == 5
    machine.nack(lease, index, now, reason="no luck")
    (doomed,) = machine.doomed
    assert (doomed.offset, doomed.attempts, doomed.reason) == (0, 5, "no luck")
    assert machine.outstanding() == 1, "it is owed until it is buried"
    machine.buried(doomed.lane, 0)
    assert machine.outstanding() == 0


def test_one_long_backoff_delays_nobody_else() -> None:
    machine = group(100, credit=1)
    ((lease, index),) = handed(machine, 0.0)
    machine.nack(lease, index, 0.0, delay_s=3_600.0)
    came = []
    for _ in range(99):
        ((lease, index),) = handed(machine, 0.0)
        came.append(lease.start)
        machine.ack(lease, index, 0.0)
    assert came == list(range(1, 100))
    assert handed(machine, 3_599.9) == []
    assert offsets(handed(machine, 3_600.0)) == [0]


def test_neighbours_are_acked_at_once_unless_one_of_them_needs_a_look() -> None:
    machine = group(10)
    lease = machine.dispatch(0.0)[0]
    for index in range(10):
        lease.hand(index, 5.0 if index == 8 else 30.0)
    assert machine.ack_run(lease, 2, 5, 1.0)
    assert not machine.ack_run(lease, 4, 7, 1.0)  # one is acked already
    assert not machine.ack_run(lease, 7, 10, 6.0)  # the lease on one has run out
    assert lease.open == machine.members["worker"].inflight == 7
    assert machine.ack_run(lease, 5, 8, 6.0)
    acked = [entry for entry in machine.drain() if isinstance(entry, Acked)]
    assert [entry.runs for entry in acked] == [[2, 6]]
    assert machine.ack_run(lease, 0, 2, 1.0)
    assert machine.ack_run(lease, 8, 10, 1.0)
    assert not machine.leases
    assert not machine.members["worker"].leases


def test_neighbours_of_a_keyed_group_are_acked_one_by_one() -> None:
    machine = group(4, order="key")
    machine.peek_keys = lambda lane, start, count: [b"k"] * count
    lease = machine.dispatch(0.0)[0]
    assert not machine.ack_run(lease, 0, lease.count, 1.0)
    assert lease.open == lease.count


def test_a_burial_from_before_a_reset_does_not_let_the_key_go_on() -> None:
    """Found by the simulator, seed 202: the burial had waited for room on a full disk."""
    machine = group(3, order="key")
    machine.peek_keys = lambda lane, start, count: [b"k"] * count
    lane = machine.lanes["orders", 0]
    machine.reject(*handed(machine, 0.0)[0], 1.0)
    machine.reset(lane, 0)
    assert offsets(handed(machine, 2.0)) == [0]
    machine.buried(lane, 0)
    assert handed(machine, 3.0) == []


def test_a_lease_expires_and_its_late_ack_is_refused() -> None:
    machine = group(1, lease_s=5.0)
    ((lease, index),) = handed(machine, 0.0)
    assert machine.dispatch(4.9) == []
    assert machine.dispatch(5.0) == []
    assert STATES[lease.states[index]] == "expired"
    with pytest.raises(LeaseExpired):
        machine.ack(lease, index, 5.0)
    ((again, index),) = handed(machine, 5.1)
    assert again.attempt == 2
    assert again.fence > lease.fence
    with pytest.raises(LeaseExpired):
        machine.ack(lease, 0, 5.2)
    machine.ack(again, index, 5.2)


def test_an_ack_after_the_deadline_is_refused_even_before_anybody_looked() -> None:
    machine = group(1, lease_s=5.0)
    ((lease, index),) = handed(machine, 0.0)
    with pytest.raises(LeaseExpired):
        machine.ack(lease, index, 5.0)
    assert [type(each) for each in machine.drain()] == [Leased, Retried]


def test_events_not_handed_over_yet_do_not_expire() -> None:
    machine = group(3, lease_s=5.0)
    (lease,) = machine.dispatch(0.0)
    lease.hand(0, 5.0)
    machine.dispatch(1_000.0)
    assert [STATES[state] for state in lease.states] == ["expired", "dispatched", "dispatched"]


def test_an_extension_moves_the_deadline() -> None:
    machine = group(1, lease_s=5.0)
    ((lease, index),) = handed(machine, 0.0)
    machine.extend(lease, index, 4.0)
    machine.dispatch(8.9)
    assert lease.states[index] == OUT
    machine.extend(lease, index, 8.9, 100.0)
    machine.dispatch(108.8)
    assert lease.states[index] == OUT
    machine.dispatch(108.9)
    with pytest.raises(LeaseExpired):
        machine.extend(lease, index, 109.0)


def test_settling_twice_is_refused_whatever_it_was() -> None:
    machine = group(3)
    out = handed(machine, 0.0)
    machine.ack(*out[0], 0.0)
    machine.nack(*out[1], 0.0)
    machine.reject(*out[2], 0.0)
    for (lease, index), was in zip(out, ("acked", "nacked", "rejected"), strict=True):
        for call in (machine.ack, machine.nack, machine.reject, machine.extend, machine.ack_now):
            with pytest.raises(AlreadySettled) as caught:
                call(lease, index, 0.0)
            assert caught.value.state == was


def test_reject_is_dead_without_further_attempts() -> None:
    machine = group(1)
    ((lease, index),) = handed(machine, 0.0)
    machine.reject(lease, index, 0.0, "hopeless")
    assert [(each.attempts, each.reason) for each in machine.doomed] == [(1, "hopeless")]
    assert handed(machine, 1e6) == []


def test_what_was_handed_over_out_of_order_counts_and_nothing_before_it() -> None:
    machine = group(3, credit=3)
    (lease,) = machine.dispatch(0.0)
    lease.hand(2, 30.0)
    machine.ack(lease, 2, 0.0)
    assert lease.next_deadline() is None
    machine.leave("worker", 1.0)
    retried = [each for each in machine.drain() if isinstance(each, Retried)]
    assert [(each.start, each.count, each.made) for each in retried] == [(0, 2, 0)]


def test_who_leaves_returns_what_it_held_and_only_what_it_saw_counts() -> None:
    machine = group(3, credit=3)
    (lease,) = machine.dispatch(0.0)
    lease.hand(0, 30.0)
    machine.leave("worker", 1.0)
    retried = [each for each in machine.drain() if isinstance(each, Retried)]
    assert [(each.start, each.count, each.made, each.delay_ms) for each in retried] == [
        (0, 1, 1, 1),
        (1, 2, 0, 1),
    ]
    machine.join("next", 3)
    attempts = {lease.start: lease.attempt for lease in machine.dispatch(1.0)}
    assert attempts == {0: 2, 1: 1}
    with pytest.raises(LeaseExpired):
        machine.ack(lease, 0, 1.0)


def test_who_joins_under_a_name_takes_the_place_of_its_former_self() -> None:
    machine = group(4, credit=2)
    (lease,) = machine.dispatch(0.0)
    lease.hand(0, 30.0)
    successor = machine.join("worker", 10, 1.0)
    assert (list(machine.members.values()), lease.open) == ([successor], 0)
    leases = machine.dispatch(1.0)
    assert {each.member for each in leases} == {successor}
    assert {each.start: each.attempt for each in leases} == {0: 2, 1: 1, 2: 1}
    machine.leave("worker", 2.0)
    assert machine.dispatch(2.0) == []  # nobody is left, the former self neither


def test_a_reset_fences_whoever_holds_something() -> None:
    machine = group(5)
    out = handed(machine, 0.0)
    machine.nack(*out[4], 0.0)
    lane = machine.lanes["orders", 0]
    machine.drain()
    machine.reset(lane, 2)
    with pytest.raises(Fenced):
        machine.ack(*out[3], 0.0)
    again = handed(machine, 100.0)
    assert offsets(again) == [2, 3, 4]
    assert {lease.attempt for lease, _ in again} == {1}
    assert min(lease.fence for lease, _ in again) > max(lease.fence for lease, _ in out)


def test_what_an_operator_withdrew_cannot_be_settled() -> None:
    machine = group(3)
    out = handed(machine, 0.0)
    machine.nack(*out[1], 0.0)
    lane = machine.lanes["orders", 0]
    for offset in (0, 1):
        machine.withdraw(lane, offset)
    with pytest.raises(AlreadySettled):
        machine.ack(*out[0], 0.0)
    assert machine.members["worker"].inflight == 1
    assert offsets(handed(machine, 1e6)) == []
    assert offsets(handed(machine, 1e6 + 1)) == [2]


def keyed(keys: list[bytes | None], **options) -> QueueGroup:
    machine = group(len(keys), order="key", **options)
    machine.peek_keys = lambda lane, start, count: keys[start : start + count]
    return machine


def test_a_key_goes_one_at_a_time_and_a_stuck_one_delays_no_other() -> None:
    machine = keyed([b"a", b"a", b"b", None, b"a", None])
    out = handed(machine, 0.0)
    assert offsets(out) == [0, 2, 3, 5]
    machine.nack(*out[0], 0.0, delay_s=50.0)
    assert offsets(handed(machine, 1.0)) == [], "a retry keeps its key"
    ((lease, index),) = [each for each in handed(machine, 50.0) if each[0].start == 0]
    machine.ack(lease, index, 50.0)
    assert offsets(handed(machine, 50.0)) == [1]


def test_a_dead_letter_lets_its_key_go_on_when_it_is_buried() -> None:
    machine = keyed([b"a", b"a"])
    (held,) = handed(machine, 0.0)
    machine.reject(*held, 0.0)
    assert handed(machine, 0.0) == []
    (doomed,) = machine.doomed
    machine.buried(doomed.lane, doomed.offset)
    assert offsets(handed(machine, 0.0)) == [1]


def test_withdrawing_what_waits_for_its_key_keeps_the_order() -> None:
    machine = keyed([b"a", b"a", b"a"])
    (held,) = handed(machine, 0.0)
    machine.withdraw(machine.lanes["orders", 0], 1)
    assert handed(machine, 0.0) == [], "the key was let go while its first event is out"
    machine.ack(*held, 0.0)
    assert offsets(handed(machine, 0.0)) == [2]


def test_a_replayed_dead_letter_waits_for_its_key() -> None:
    machine = keyed([b"a", b"a"])
    (held,) = handed(machine, 0.0)
    machine.reject(*held, 0.0)
    lane = machine.lanes["orders", 0]
    machine.doomed.clear()
    machine.buried(lane, 0)
    (second,) = handed(machine, 0.0)
    machine.revive(lane, 0, 0.0)
    assert handed(machine, 0.0) == [], "two events of a key are out"
    machine.ack(*second, 0.0)
    (again,) = handed(machine, 0.0)
    assert (again[0].start, again[0].attempt) == (0, 1)


def test_withdrawing_what_waits_by_priority() -> None:
    machine = group(0, credit=1)
    lane = machine.lanes["orders", 0]
    machine.peek_priorities = lambda lane, start, count: [0, 9, 5][start : start + count]
    machine.arrived(lane, 3, prioritised=True)
    (held,) = handed(machine, 0.0)
    assert held[0].start == 1
    machine.withdraw(lane, 2)
    machine.ack(*held, 0.0)
    assert offsets(handed(machine, 0.0)) == [0]


def test_keys_that_are_not_at_hand_starve_the_group_until_loaded() -> None:
    machine = group(2, order="key")
    assert machine.dispatch(0.0) == []
    assert machine.starved is not None
    machine.peek_keys = lambda lane, start, count: [b"a", b"b"][start : start + count]
    machine.loaded()
    assert offsets(handed(machine, 0.0)) == [0, 1]


def test_single_active_sends_everything_to_the_first_and_then_to_the_next() -> None:
    machine = group(10, credit=2, order="single")
    machine.join("standby", 10)
    out = handed(machine, 0.0)
    assert {lease.member.id for lease, _ in out} == {"worker"}
    assert len(out) == 2
    machine.leave("worker", 0.0)
    out = handed(machine, 0.0)
    assert {lease.member.id for lease, _ in out} == {"standby"}
    assert sorted(offsets(out)) == list(range(10))


def test_urgent_events_overtake() -> None:
    machine = group(0, credit=1)
    lane = machine.lanes["orders", 0]
    priorities = [0, 3, 9, 3]
    machine.peek_priorities = lambda lane, start, count: priorities[start : start + count]
    machine.arrived(lane, 4, prioritised=True)
    came = []
    while out := handed(machine, 0.0):
        came += offsets(out)
        machine.ack(*out[0], 0.0)
    assert came == [2, 1, 3, 0]


def test_fences_go_on_after_a_restart() -> None:
    machine = group(1)
    (lease,) = machine.dispatch(0.0)
    again = QueueGroup("billing", machine.spec, fence=lease.fence + 1)
    lane = again.restore("orders", 0, machine.ledgers(0.0)["orders", 0], 1, 0.0)
    again.join("worker", 1)
    (second,) = again.dispatch(0.0)
    assert second.fence > lease.fence
    assert (second.start, second.attempt, lane.cursor) == (0, 2, 1)


def test_restored_events_out_of_attempts_are_doomed_not_delivered() -> None:
    ledger = Ledger(0)
    ledger.leased(0, 1, attempt=5)
    machine = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    machine.restore("orders", 0, ledger, 1, 0.0)
    machine.join("worker", 1)
    assert machine.dispatch(0.0) == []
    assert [(each.offset, each.attempts) for each in machine.doomed] == [(0, 5)]


def test_a_restored_wait_goes_on() -> None:
    ledger = Ledger(0)
    ledger.retried(0, 1, made=2, delay_ms=700)
    machine = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    machine.restore("orders", 0, ledger, 1, 100.0)
    machine.join("worker", 1)
    assert machine.dispatch(100.6) == []
    assert machine.dispatch(100.7)[0].attempt == 3


def test_an_event_that_is_withdrawn_leaves_those_that_waited_with_it() -> None:
    """T5: after a restart neighbours of one history wait together; one of them is settled by hand."""
    ledger = Ledger(0)
    ledger.retried(0, 4, made=1, delay_ms=700)
    machine = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    lane = machine.restore("orders", 0, ledger, 4, 0.0)
    machine.withdraw(lane, 1)
    assert machine.outstanding() == 3
    machine.join("worker", 10)
    assert machine.dispatch(0.6) == []
    offsets = [lease.start + at for lease in machine.dispatch(0.7) for at in range(lease.count)]
    assert sorted(offsets) == [0, 2, 3]


def test_what_was_returned_is_not_kept_for_who_held_it() -> None:
    """T4: a restart waits for holders, and he who left is none."""
    machine = group(2, credit=2)
    (lease,) = machine.dispatch(0.0)
    lease.hand(0, 30.0)
    machine.leave("worker", 1.0)
    ledger = Ledger(0)
    for entry in machine.drain():
        if isinstance(entry, Retried):
            ledger.retried(entry.start, entry.count, entry.made, entry.delay_ms)
    again = QueueGroup("billing", machine.spec)
    again.restore("orders", 0, ledger, 2, 0.0, hold_s=30.0)
    again.join("next", 2)
    assert {each.start: each.attempt for each in again.dispatch(0.0)} == {0: 2, 1: 1}


def test_acks_of_one_turn_are_one_entry() -> None:
    machine = group(10)
    out = handed(machine, 0.0)
    machine.drain()
    for each in (*out[:4], *out[6:]):
        machine.ack(*each, 0.0)
    assert machine.has_news()
    assert machine.drain() == [Acked("billing", "orders", 0, [0, 4, 6, 4])]
    assert not machine.has_news()


# -- against a naive model ------------------------------------------------------------------------

STEP_S = 0.125  # exact in binary, so that times compare
LADDER_MS = (125, 500, 1_000)
LEASE_S = 2.0
KEYS = (b"a", b"b", None, b"a", b"c")


class Known:
    """What the model knows of one event."""

    def __init__(self) -> None:
        self.state = "new"
        self.made = 0
        self.due = 0.0
        self.delay_ms: int | None = 0
        self.lease: Lease | None = None
        self.deadline: float | None = None


class Delivery(RuleBasedStateMachine):
    """One group under everything that can happen, beside a dictionary of events."""

    @initialize(order=st.sampled_from(["any", "key", "single"]), urgent=st.booleans())
    def begin(self, order: str, urgent: bool) -> None:
        self.spec = GroupSpec(
            patterns=("orders",), order=order, retry=Retry(LADDER_MS, 4), lease_s=LEASE_S
        )
        self.urgent = urgent
        self.now = 0.0
        self.members = 0
        self.known: dict[int, Known] = {}
        self.ledger = Ledger(0)
        self.last_fence = 0
        self.stale: list[tuple[Lease, int]] = []
        self.machine = QueueGroup("g", self.spec)
        self._wire()
        self.lane = self.machine.lane("orders", 0, cursor=0, end=0)
        self.calm = 0  # steps since the last upheaval: too many of them and nothing else happens
        self.arrive(6)
        self.join(4)

    def _wire(self) -> None:
        self.at_hand = True
        self.machine.peek_keys = lambda lane, start, count: (
            [KEYS[o % 5] for o in range(start, start + count)] if self.at_hand else None
        )
        self.machine.peek_priorities = lambda lane, start, count: (
            [o % 3 for o in range(start, start + count)] if self.at_hand else None
        )

    # -- what the model does ---------------------------------------------------------------------

    def _write(self) -> None:
        for entry in self.machine.drain():
            if isinstance(entry, Leased):
                assert entry.fence > self.last_fence, "fences only grow"
                self.last_fence = entry.fence
                self.ledger.leased(entry.start, entry.count, entry.attempt)
            elif isinstance(entry, Retried):
                self.ledger.retried(entry.start, entry.count, entry.made, entry.delay_ms)
            elif isinstance(entry, Acked):
                for at in range(0, len(entry.runs), 2):
                    self.ledger.acked(entry.runs[at], entry.runs[at + 1])

    def _failed(self, offset: int, delay_s: float | None) -> None:
        event = self.known[offset]
        self.stale.append((event.lease, offset - event.lease.start))
        if event.made >= 4:
            event.state = "dying"
            return
        delay = LADDER_MS[min(event.made, 3) - 1] / 1_000 if delay_s is None else delay_s
        self._waits(offset, delay)

    def _waits(self, offset: int, delay_s: float) -> None:
        event = self.known[offset]
        event.state, event.due = "waiting", self.now + delay_s
        event.delay_ms, event.lease, event.deadline = round(delay_s * 1_000), None, None

    def _expire(self) -> None:
        for offset, event in self.known.items():
            if event.state == "out" and event.deadline is not None and event.deadline <= self.now:
                self._failed(offset, None)

    def _pick(self, data, *states: str) -> int:
        return data.draw(st.sampled_from([o for o, e in self.known.items() if e.state in states]))

    def _has(self, *states: str) -> bool:
        return any(event.state in states for event in self.known.values())

    # -- rules -------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def arrive(self, count: int) -> None:
        first = len(self.known)
        self.known.update({offset: Known() for offset in range(first, first + count)})
        self.machine.arrived(self.lane, first + count, prioritised=self.urgent)

    @rule(credit=st.integers(1, 5))
    def join(self, credit: int) -> None:
        self.members += 1
        self.machine.join(f"m{self.members}", credit)

    @precondition(lambda self: len(self.machine.members) > 1 or self.calm > 8)
    @rule(data=st.data())
    def leave(self, data) -> None:
        if not self.machine.members:
            return
        member = data.draw(st.sampled_from(sorted(self.machine.members)))
        for offset, event in self.known.items():
            if event.state == "out" and event.lease.member.id == member:
                if event.deadline is None:
                    self.stale.append((event.lease, offset - event.lease.start))
                    event.made -= 1
                    self._waits(offset, 0.0)
                else:
                    self._failed(offset, 0.0)
        self.machine.leave(member, self.now)

    @precondition(lambda self: self._has("out"))
    @rule(data=st.data())
    def come_back(self, data) -> None:
        member = self.known[self._pick(data, "out")].lease.member
        kept: dict[int, set[int]] = {}
        for offset, event in self.known.items():
            if event.state != "out" or event.lease.member is not member:
                continue
            index = offset - event.lease.start
            if data.draw(st.booleans()):
                kept.setdefault(event.lease.fence, set()).add(index)
            elif event.deadline is None:
                self.stale.append((event.lease, index))
                event.made -= 1
                self._waits(offset, 0.0)
            else:
                self._failed(offset, 0.0)
        self.machine.return_unheld(member, kept, self.now)

    @rule(steps=st.sampled_from([1, 4, 17, 40]))
    def wait(self, steps: int) -> None:
        self.now += steps * STEP_S

    @rule(at_hand=st.sampled_from([True, True, True, False]), hand=st.booleans())
    def dispatch(self, at_hand: bool, hand: bool = False) -> None:
        self.at_hand = at_hand
        self._expire()
        for lease in self.machine.dispatch(self.now):
            for index in range(lease.count):
                event = self.known[lease.start + index]
                assert event.state in ("new", "waiting"), f"{event.state} was delivered"
                assert event.due <= self.now, "delivered before its time"
                event.state, event.lease, event.deadline = "out", lease, None
                event.made += 1
                assert lease.attempt == event.made <= 4
                if hand:
                    event.deadline = self.now + LEASE_S
                    lease.hand(index, event.deadline)
        self.at_hand = True

    @precondition(lambda self: self.machine.starved is not None)
    @rule()
    def load(self) -> None:
        self.machine.loaded()

    @precondition(lambda self: self._has("out"))
    @rule(data=st.data())
    def hand(self, data) -> None:
        lease = self.known[self._pick(data, "out")].lease
        # Events of a lease are handed over in order.
        for index in range(lease.count):
            event = self.known[lease.start + index]
            if event.lease is lease and event.state == "out" and event.deadline is None:
                event.deadline = self.now + LEASE_S
                lease.hand(index, event.deadline)
                return

    @precondition(lambda self: self._has("out"))
    @rule(
        data=st.data(),
        call=st.sampled_from(["ack", "nack", "later", "reject", "extend", "tx", "back"]),
    )
    def settle(self, data, call: str) -> None:
        offset = self._pick(data, "out")
        event = self.known[offset]
        lease, index = event.lease, offset - event.lease.start
        late = event.deadline is not None and event.deadline <= self.now
        calls = {
            "ack": lambda: self.machine.ack(lease, index, self.now),
            "nack": lambda: self.machine.nack(lease, index, self.now),
            "later": lambda: self.machine.nack(lease, index, self.now, 3.0),
            "reject": lambda: self.machine.reject(lease, index, self.now),
            "extend": lambda: self.machine.extend(lease, index, self.now, LEASE_S * 2),
            "tx": lambda: self._acked_now(self.machine.ack_now(lease, index, self.now)),
            "back": lambda: self.machine.give_back(lease, index, self.now),
        }
        if late:
            with pytest.raises(LeaseExpired):
                calls[call]()
            self._failed(offset, None)
            return
        calls[call]()
        if call in ("ack", "tx"):
            event.state = "done"
            self.stale.append((lease, index))
        elif call == "reject":
            event.state = "dying"
            self.stale.append((lease, index))
        elif call == "back":
            self.stale.append((lease, index))
            event.made -= 1
            self._waits(offset, 0.0)
        elif call == "extend":
            if event.deadline is not None:
                event.deadline = self.now + LEASE_S * 2
        else:
            self._failed(offset, 3.0 if call == "later" else None)

    def _acked_now(self, entry: Acked) -> None:
        self._write()  # the entries before it are in the journal by then
        self.ledger.acked(*entry.runs)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def settle_again(self, data) -> None:
        lease, index = data.draw(st.sampled_from(self.stale[-20:]))
        with pytest.raises((AlreadySettled, LeaseExpired, Fenced)):
            self.machine.ack(lease, index, self.now)

    @precondition(lambda self: self.machine.doomed)
    @rule()
    def bury(self) -> None:
        self._write()
        doomed, self.machine.doomed = self.machine.doomed, []
        for each in doomed:
            assert self.known[each.offset].state == "dying"
            self.known[each.offset].state = "dead"
            self.machine.buried(each.lane, each.offset)
            self.ledger.acked(each.offset, 1)

    @precondition(lambda self: self._has("dead"))
    @rule(data=st.data())
    def replay(self, data) -> None:
        offset = self._pick(data, "dead")
        self.machine.revive(self.lane, offset, self.now)
        self.known[offset].made = 0
        self._waits(offset, 0.0)

    @precondition(lambda self: self._has("new", "out", "waiting", "dying"))
    @rule(data=st.data())
    def withdraw(self, data) -> None:
        offset = self._pick(data, "new", "out", "waiting", "dying")
        event = self.known[offset]
        if event.state == "out":
            self.stale.append((event.lease, offset - event.lease.start))
        self.machine.withdraw(self.lane, offset)
        self._write()
        self.ledger.acked(offset, 1)
        event.state = "dead"

    @precondition(lambda self: self.calm > 12)
    @rule(data=st.data())
    def reset(self, data) -> None:
        self.calm = 0
        to = data.draw(st.integers(0, len(self.known)))
        self._write()
        for offset, event in self.known.items():
            if event.state == "out":
                self.stale.append((event.lease, offset - event.lease.start))
            if offset >= to:
                self.known[offset] = Known()
            elif event.state not in ("done", "dead"):
                event.state = "done"
        self.ledger = Ledger(to)
        self.machine.reset(self.lane, to)

    @precondition(lambda self: self.calm > 12)
    @rule(noted=st.booleans())
    def restart(self, noted: bool) -> None:
        """The process died; sometimes what it had handed out is known to the next one."""
        self.calm = 0
        self._write()
        self.machine = QueueGroup("g", self.spec, fence=self.last_fence + 1)
        self._wire()

        def handed(start: int, stop: int, attempt: int) -> list[tuple[int, int]] | None:
            given = [o for o in range(start, stop) if self.known[o].deadline is not None]
            return [(offset, offset + 1) for offset in given] if noted else None

        count = len(self.known)
        self.lane = self.machine.restore(
            "orders", 0, self.ledger, count, self.now, handed=handed,
            urgent_to=count if self.urgent else 0,
        )  # fmt: skip
        self.stale = []
        self.join(4)
        for event in self.known.values():
            if event.state in ("out", "waiting", "dying"):
                if noted and event.lease is not None and event.deadline is None:
                    event.made -= 1
                # A rejection that was not buried yet is forgotten: the event comes again.
                event.state = "dying" if event.made >= 4 else "waiting"
                event.due = self.now + (0 if event.lease is not None else event.delay_ms) / 1_000
                event.lease = event.deadline = None

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def live_state_is_replayed_state_is_the_model(self) -> None:
        self.calm += 1
        self._write()
        live = self.machine.ledgers(self.now)["orders", 0]
        owed = ("out", "waiting", "dying")
        expected = {
            offset: event.made for offset, event in self.known.items() if event.state in owed
        }
        unseen = {offset: 0 for offset, event in self.known.items() if event.state == "new"}
        for name, ledger in (("live", live), ("replayed", self.ledger)):
            found = {o: run.made for run in ledger for o in range(run.start, run.stop)}
            found.update(dict.fromkeys(range(ledger.high, len(self.known)), 0))
            assert found == {**expected, **unseen}, name

    @invariant()
    def waits_are_what_is_left_of_them(self) -> None:
        live = self.machine.ledgers(self.now)["orders", 0]
        waits = {o: run.delay_ms for run in live for o in range(run.start, run.stop)}
        for offset, event in self.known.items():
            if event.state == "waiting":
                assert waits[offset] == max(0, round((event.due - self.now) * 1_000))

    @invariant()
    def credit_and_order_hold(self) -> None:
        out = {o: event for o, event in self.known.items() if event.state == "out"}
        for member in self.machine.members.values():
            mine = [event for event in out.values() if event.lease.member is member]
            assert member.inflight == len(mine) <= member.max_inflight
        if self.spec.order == "key":
            keys = [KEYS[o % 5] for o in out if KEYS[o % 5] is not None]
            assert len(keys) == len(set(keys)), "two events of one key are out"

    @invariant()
    def nothing_is_forgotten(self) -> None:
        owed = sum(e.state in ("out", "waiting", "dying") for e in self.known.values())
        held = self.machine.outstanding()
        new = sum(event.state == "new" for event in self.known.values())
        assert owed <= held <= owed + new

    def teardown(self) -> None:
        """Let it run: every event ends acked or dead, whatever happened before."""
        if not hasattr(self, "machine"):
            return
        self.join(5)
        for _ in range(400):
            if all(event.state in ("done", "dead") for event in self.known.values()):
                return
            self.now += 5.0
            self.dispatch(True)
            if self.machine.starved is not None:
                self.machine.loaded()
            for event in list(self.known.values()):
                if event.state == "out":
                    self.machine.ack(event.lease, self._index(event), self.now)
                    event.state = "done"
            if self.machine.doomed:
                self.bury()
            self._write()
        left = {offset: event.state for offset, event in self.known.items()}
        raise AssertionError(f"some events never end: {left}")

    def _index(self, event: Known) -> int:
        return next(o for o, e in self.known.items() if e is event) - event.lease.start


Delivery.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDelivery = Delivery.TestCase


def test_what_a_member_came_back_without_comes_again_before_all_else() -> None:
    """T4, Y3: as runs, in the order of their leases, and as the same attempt unless it was in hand."""
    machine = group(10, credit=6)
    (lease,) = machine.dispatch(0.0)
    machine.drain()
    lease.hand(2, 30.0)  # two were in a stretch of their own, of which it said nothing
    machine.ack(lease, 5, 0.0)
    machine.return_unheld(lease.member, {lease.fence: {3}}, 0.0)
    assert [bool(state == OUT) for state in lease.states] == [False] * 3 + [True] + [False] * 2
    assert (lease.open, lease.member.inflight, lease.lane.known) == (1, 1, 6)
    again = machine.dispatch(0.0)
    assert [(each.start, each.count, each.attempt) for each in again] == [
        (2, 1, 2), (0, 2, 1), (4, 1, 1), (6, 1, 1),
    ]  # fmt: skip
    machine.ack(lease, 3, 1.0)
    with pytest.raises(LeaseExpired):
        machine.ack(lease, 0, 1.0)


def restored_with_hold(machine: QueueGroup, hold_s: float = 30.0) -> tuple[QueueGroup, object]:
    again = QueueGroup("billing", machine.spec, fence=machine.fence)
    lane = again.restore("orders", 0, machine.ledgers(0.0)["orders", 0], 4, 0.0, hold_s)
    return again, lane


def held_machine() -> QueueGroup:
    machine = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    machine.lane("orders", 0, cursor=0, end=4)
    machine.join("w", 10)
    (lease,) = machine.dispatch(0.0)
    machine.ack(lease, 1, 0.0)
    return machine


def test_what_was_leased_waits_for_its_holder_who_takes_it_up_again() -> None:
    """T4: leases survive a restart; what was acked stays acked, nobody else gets the rest."""
    again, lane = restored_with_hold(held_machine())
    other = again.join("other", 10)
    assert again.dispatch(1.0) == []
    member = again.join("w", 10)
    lease = again.reclaim(lane, 0, 4, 1, member, 1.0)
    assert lease is not None
    assert list(lease.states) == [0, 5, 0, 0]
    assert member.inflight == 3
    assert other.inflight == 0
    for index in (0, 2, 3):
        again.ack(lease, index, 2.0)
    assert again.outstanding() == 0
    assert again.reclaim(lane, 0, 4, 1, member, 2.0) is None


def test_what_no_holder_takes_up_comes_again_after_the_hold() -> None:
    """T4: a holder that never returns delays its events, and loses none."""
    again, _ = restored_with_hold(held_machine(), hold_s=5.0)
    again.join("other", 10)
    assert again.dispatch(4.9) == []
    again.dispatch(5.0)
    again.dispatch(6.0)
    attempts = [lease.attempt for lease in again.leases.values()]
    assert attempts
    assert set(attempts) == {2}
    assert again.outstanding() == 3


def test_a_wrong_attempt_adopts_nothing() -> None:
    again, lane = restored_with_hold(held_machine())
    assert again.reclaim(lane, 0, 4, 2, again.join("w", 10), 1.0) is None


def test_what_is_released_comes_again_at_once_and_what_was_adopted_does_not() -> None:
    """T4, T5: the only holder is back; the attempt that it does not know of counts."""
    again, lane = restored_with_hold(held_machine())
    member = again.join("w", 10)
    kept = again.reclaim(lane, 0, 1, 1, member, 1.0)
    assert kept is not None
    again.expire_unclaimed(1.0)
    again.expire_unclaimed(1.0)
    leases = again.dispatch(1.0)
    assert sorted((lease.start, lease.attempt) for lease in leases) == [(2, 2), (3, 2)]
    again.ack(kept, 0, 2.0)
    assert again.outstanding() == 2


def journalled(machine: QueueGroup) -> tuple[QueueGroup, Lane]:
    """The machine after a crash, from the entries it wrote."""
    state = State()
    state.apply(GroupPut("billing", machine.spec))
    state.apply(LaneSet("billing", "orders", 0, 0))
    for entry in machine.drain():
        state.apply(entry)
    again = QueueGroup("billing", machine.spec, fence=machine.fence)
    ledger = state.groups["billing"].ledgers["orders", 0]
    return again, again.restore("orders", 0, ledger, 6, 0.0, 30.0)


def shared_machine() -> QueueGroup:
    """Offsets 0 to 2 are out with `w`, 3 to 5 with `other`."""
    machine = QueueGroup("billing", GroupSpec(patterns=("orders",)))
    machine.lane("orders", 0, cursor=0, end=6)
    machine.join("w", 3)
    machine.join("other", 3)
    holders = [lease.member.id for lease in machine.dispatch(0.0) for _ in range(lease.count)]
    assert holders == ["w"] * 3 + ["other"] * 3
    return machine


def test_a_holder_that_is_back_releases_its_own_and_nobody_elses() -> None:
    """T4, T5: what it does not adopt comes again as another attempt; others keep theirs."""
    again, lane = journalled(shared_machine())
    member = again.join("w", 10)
    kept = again.reclaim(lane, 0, 1, 1, member, 1.0)
    assert kept is not None
    again.expire_unclaimed(1.0, "w")
    again.expire_unclaimed(1.0, "w")
    given = {
        lease.start + at: lease.attempt
        for lease in again.dispatch(1.0)
        for at in range(lease.count)
    }
    assert given == {1: 2, 2: 2}
    theirs = again.reclaim(lane, 3, 3, 1, again.join("other", 3), 2.0)
    assert theirs is not None
    assert theirs.open == 3
    again.ack(kept, 0, 2.0)
    assert again.outstanding() == 5


def test_a_lease_that_only_a_snapshot_knows_waits() -> None:
    """T4: snapshots do not say who held it."""
    again, _ = restored_with_hold(held_machine())
    again.join("w", 10)
    again.expire_unclaimed(1.0, "w")
    assert again.dispatch(1.0) == []
    assert again.outstanding() == 3


def test_a_dumped_ledger_does_not_say_who_holds_what() -> None:
    """Y10: older versions read the same snapshots."""
    ledger, plain = Ledger(0), Ledger(0)
    ledger.leased(0, 3, 1, "w")
    plain.leased(0, 3, 1)
    for each in (ledger, plain):
        each.acked(1, 1)
    assert ledger.dump() == plain.dump() == Ledger.load(ledger.dump()).dump()


def test_what_is_released_out_of_attempts_dies() -> None:
    again, _ = restored_with_hold(held_machine())
    again.spec = msgspec.structs.replace(again.spec, retry=Retry(max_attempts=1))
    again.expire_unclaimed(1.0)
    assert [doomed.offset for doomed in again.doomed] == [0, 2, 3]
