"""Taking up: the delivery machine of a group before and after its process died.

`ledgers` says what a machine owes, `restore` builds one that owes the same, `adopt` gives a holder
that came back what it held, and `release` ends the wait for the rest. `take_back` is for a member that
only lost its connection. They are part of the machine (penstock.core.delivery) and use its inner parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

from penstock.core.delivery import MAX_LEASE_EVENTS, QueueGroup
from penstock.core.lease import OUT, RETURNED, Lane, Lease, Member, Run, runs
from penstock.core.ledger import AT_ONCE_MS, Ledger

BACK_WITHOUT = "its consumer came back without it"


def ledgers(group: QueueGroup, now: float) -> dict[tuple[str, int], Ledger]:
    """What each lane owes, for a snapshot; the same as replaying every entry would give."""
    waits = {id(run): due - now for due, _, run in group._retries}
    ledgers = {place: Ledger(lane.cursor) for place, lane in group.lanes.items()}
    for run in sorted(group.unsettled(), key=lambda run: run.start):
        delay_ms = max(0, round(waits.get(id(run), 0.0) * 1_000))
        ledger = ledgers[run.lane.topic, run.lane.partition]
        ledger.retried(run.start, run.count, run.made, delay_ms)
    return ledgers


def restore(
    group: QueueGroup,
    topic: str,
    partition: int,
    ledger: Ledger,
    end: int,
    now: float,
    hold_s: float = 0.0,
) -> Lane:
    """Take up a lane where a ledger says it stood.

    What was leased when the process died comes again at once, or after `hold_s`: until then
    its holder may come back and `adopt` it.
    """
    lane = group.lane(topic, partition, cursor=ledger.high, end=max(end, ledger.high))
    for run in ledger.open():
        if hold_s and run.made and not run.delay_ms and group._gate is None:
            held = Run(lane, run.start, run.stop - run.start, run.made - 1)
            _park(group, held, run.holder, now + hold_s)
            continue
        if group.spec.retry.exhausted(run.made):
            for offset in range(run.start, run.stop):
                group._doom(lane, offset, run.made, "out of attempts when the bus stopped")
            continue
        again = Run(lane, run.start, run.stop - run.start, run.made)
        if group._gate is not None:
            group._unseen.append(again)  # in offset order, so that keys keep theirs
        elif run.delay_ms > AT_ONCE_MS:
            group._wait(again, now + run.delay_ms / 1_000)
        else:
            group._ready.append(again)
    return lane


def _park(group: QueueGroup, run: Run, holder: str, until: float) -> None:
    absent = group._absent.setdefault(holder, Member(holder, 0))
    for start in range(run.start, run.start + run.count, MAX_LEASE_EVENTS):
        count = min(MAX_LEASE_EVENTS, run.start + run.count - start)
        lease = Lease(group.fence, run._replace(start=start, count=count), absent)
        group.fence += 1
        lease.deadlines = [until] * count
        group.leases[lease.fence] = absent.leases[lease.fence] = lease
        heapq.heappush(group._checks, (until, lease.fence))


def adopt(
    group: QueueGroup, lane: Lane, start: int, count: int, attempt: int, member: Member, now: float
) -> Lease | None:
    """A holder came back after a crash: what nobody else was given is its own again."""
    lease = Lease(group.fence, Run(lane, start, count, attempt - 1), member)
    lease.states = bytearray([RETURNED]) * count
    lease.open = 0
    for parked in _parked(group, group._absent):
        if parked.lane is not lane or parked.attempt != attempt:
            continue
        first, last = max(start, parked.start), min(start + count, parked.start + parked.count)
        for offset in range(first, last):
            if parked.states[offset - parked.start] == OUT:
                group._close(parked, offset - parked.start, RETURNED)
                lease.states[offset - start] = OUT
                lease.open += 1
    if not lease.open:
        return None
    group.fence += 1
    group.leases[lease.fence] = member.leases[lease.fence] = lease
    member.took(lease.open)
    heapq.heappush(group._checks, (now + group.spec.lease_s, lease.fence))
    return lease


def release(group: QueueGroup, now: float, holder: str | None = None) -> None:
    """This holder, or all, are back: what they did not adopt comes again at once.

    It counts as an attempt: nobody can tell whether it was in somebody's hands.
    """
    for parked in _parked(group, group._absent if holder is None else (holder,)):
        for index in range(parked.count):
            if parked.states[index] == OUT:
                group._fail(parked, index, RETURNED, now, 0.0, BACK_WITHOUT)


def take_back(
    group: QueueGroup, member: Member, kept: Mapping[int, Collection[int]], now: float
) -> None:
    """A member is back and has these events, by lease: whatever else it was leased comes again at once.

    That is also what was on its way to it, so that nothing overtakes what was lost. Only what it said it
    had costs an attempt.
    """
    for lease in list(member.leases.values()):
        lane, has = lease.lane, kept.get(lease.fence, ())
        lost = [at for at in range(lease.count) if lease.states[at] == OUT and at not in has]
        if lost:
            lane.known = max(lane.known, lane.cursor)
        for index in filter(lease.handed, lost):
            group._fail(lease, index, RETURNED, now, 0.0, BACK_WITHOUT)
        unseen = runs([index for index in lost if not lease.handed(index)])
        for first, count in zip(unseen[::2], unseen[1::2], strict=True):
            for index in range(first, first + count):
                group._close(lease, index, RETURNED)
            group._again(Run(lane, lease.start + first, count, lease.attempt - 1), now, 0.0)


def _parked(group: QueueGroup, holders: Iterable[str]) -> list[Lease]:
    """What waits for these holders."""
    absent = (group._absent[holder] for holder in holders if holder in group._absent)
    return [lease for member in absent for lease in member.leases.values()]
