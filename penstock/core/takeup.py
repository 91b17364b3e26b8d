"""Taking up: the delivery machine of a group before and after its process died.

`ledgers` says what a machine owes, `restore` builds one that owes the same, `adopt` gives a holder
that came back what it held, and `release` ends the wait for the rest. `take_back` is for a member that
only lost its connection. They are part of the machine (penstock.core.delivery) and use its inner parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from penstock.core.delivery import MAX_LEASE_EVENTS, QueueGroup
from penstock.core.entry import Retried
from penstock.core.lease import OUT, RETURNED, Lane, Lease, Member, Run, runs
from penstock.core.ledger import AT_ONCE_MS, Ledger, Open

BACK_WITHOUT = "its consumer came back without it"
Handed = Callable[[int, int, int], Sequence[tuple[int, int]] | None]
"""Of the events from start to stop that were leased for this attempt, the stretches that a consumer
was handed; None when that is not known."""


def _unknown(start: int, stop: int, attempt: int) -> None:
    """Nothing was noted."""


def ledgers(group: QueueGroup, now: float) -> dict[tuple[str, int], Ledger]:
    """What each lane owes, for a snapshot; the same as replaying every entry would give."""
    waits = {id(run): due - now for due, _, run in group._retries}
    ledgers = {place: Ledger(lane.cursor) for place, lane in group.lanes.items()}
    for run in sorted(group.unsettled(), key=lambda run: run.start):
        ledger = ledgers[run.lane.topic, run.lane.partition]
        delay_ms = max(0, round(waits.get(id(run), 0.0) * 1_000))
        ledger.retried(run.start, run.count, run.made, delay_ms)
        for offset in range(run.start, run.start + run.count if group._later else 0):
            due = group._later.get((run.lane, offset), now)
            if due > now:
                ledger.retried(offset, 1, run.made, round((due - now) * 1_000))
    return ledgers


def restore(
    group: QueueGroup,
    topic: str,
    partition: int,
    ledger: Ledger,
    end: int,
    now: float,
    hold_s: float = 0.0,
    handed: Handed = _unknown,
    urgent_to: int = 0,
) -> Lane:
    """Take up a lane where a ledger says it stood.

    What was leased when the process died comes again at once, or after `hold_s`: until then
    its holder may come back and `adopt` it. An attempt is counted for what a consumer was `handed`.
    """
    lane = group.lane(
        topic, partition, cursor=ledger.high, end=max(end, ledger.high), urgent_to=urgent_to
    )
    for run in ledger.open():
        if run.delay_ms or not run.made:
            _wait(group, Run(lane, run.start, run.stop - run.start, run.made), run.delay_ms, now)
            continue
        for start, stop, given in _parts(run, handed(run.start, run.stop, run.made)):
            leased = Run(lane, start, stop - start, run.made - 1)
            if hold_s:
                _park(group, leased, run.holder, now + hold_s, given=given)
                continue
            again = leased._replace(made=run.made) if given else leased
            group._entries.append(
                Retried(group.name, topic, partition, start, again.count, again.made, AT_ONCE_MS)
            )
            _wait(group, again, AT_ONCE_MS, now)
    return lane


def _parts(run: Open, handed: Sequence[tuple[int, int]] | None) -> Iterator[tuple[int, int, bool]]:
    """The stretches of a run, and whether each was handed out; all of it when that is not known."""
    if handed is None:
        handed = [(run.start, run.stop)]
    at = run.start
    for start, stop in handed:
        if at < start:
            yield at, start, False
        yield start, stop, True
        at = stop
    if at < run.stop:
        yield at, run.stop, False


def _wait(group: QueueGroup, run: Run, delay_ms: int, now: float) -> None:
    """Let events wait for their next attempt, if they have one left."""
    offsets = range(run.start, run.start + run.count)
    due = now + delay_ms / 1_000 if delay_ms > AT_ONCE_MS else None
    if group.spec.retry.exhausted(run.made):
        for offset in offsets:
            group._doom(run.lane, offset, run.made, "out of attempts when the bus stopped")
    elif group._gate is not None:
        group._unseen.append(run)  # in offset order, so that keys keep theirs
        if due is not None:
            group._later.update(((run.lane, offset), due) for offset in offsets)
    elif due is not None:
        group._wait(run, due)
    else:
        group._again_now(run)


def _park(group: QueueGroup, run: Run, holder: str, until: float, *, given: bool) -> None:
    absent = group._absent.setdefault(holder, Member(holder, 0))
    for start in range(run.start, run.start + run.count, MAX_LEASE_EVENTS):
        count = min(MAX_LEASE_EVENTS, run.start + run.count - start)
        lease = Lease(group.fence, run._replace(start=start, count=count), absent)
        group.fence += 1
        lease.deadlines = [until] * count
        lease.counted = given
        if given:
            group.mark(lease)[0] = start + count
        group.leases[lease.fence] = absent.leases[lease.fence] = lease
        heapq.heappush(group._checks, (until, lease.fence))
    if group._gate is not None:
        group._leased_before.append(run)
        group._unlooked.update(
            ((run.lane, offset), True) for offset in range(run.start, run.start + run.count)
        )


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

    It counts as an attempt where it was handed out, or where that is not known.
    """
    for parked in _parked(group, group._absent if holder is None else (holder,)):
        for index in range(parked.count if parked.counted else 0):
            if parked.states[index] == OUT:
                group._fail(parked, index, RETURNED, now, 0.0, BACK_WITHOUT)
        group._take_unhanded(parked, now)


def take_back(
    group: QueueGroup,
    member: Member,
    kept: Mapping[int, Collection[int]],
    now: float,
    reason: str = BACK_WITHOUT,
) -> None:
    """A member has these events, by lease, and no more: whatever else it was leased comes again at once.

    That is also what was on its way to it, so that nothing overtakes what was lost. Only what it said it
    had costs an attempt.
    """
    for lease in list(member.leases.values()):
        lane, has = lease.lane, kept.get(lease.fence, ())
        lost = [at for at in range(lease.count) if lease.states[at] == OUT and at not in has]
        if lost:
            lane.known = max(lane.known, lane.cursor)
        for index in filter(lease.handed, lost):
            group._fail(lease, index, RETURNED, now, 0.0, reason)
        unhanded = runs([index for index in lost if not lease.handed(index)])
        for first, count in zip(unhanded[::2], unhanded[1::2], strict=True):
            group._return(lease, first, count, now)


def _parked(group: QueueGroup, holders: Iterable[str]) -> list[Lease]:
    """What waits for these holders."""
    absent = (group._absent[holder] for holder in holders if holder in group._absent)
    return [lease for member in absent for lease in member.leases.values()]
