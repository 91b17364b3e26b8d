"""Interventions: what operators do to a group's events while consumers are at work.

They are part of the delivery machine (penstock.core.delivery) and use its inner parts.
"""

from __future__ import annotations

import heapq
from collections import deque

from penstock.core.delivery import QueueGroup
from penstock.core.entry import Retried
from penstock.core.lease import FENCED, OUT, REJECTED, Lane, Run
from penstock.core.ledger import AT_ONCE_MS


def withdraw(group: QueueGroup, lane: Lane, offset: int) -> None:
    """An event is settled by an operator: whoever holds it may no longer settle it."""
    # Replaying entries, nothing else tells that it was looked at: it may never have been leased.
    group._entries.append(Retried(group.name, lane.topic, lane.partition, offset, 1, 0, AT_ONCE_MS))
    if offset >= lane.cursor:
        _set_apart(group, lane, offset)
    for lease in list(group.leases.values()):
        index = offset - lease.start
        if lease.lane is lane and 0 <= index < lease.count and lease.states[index] == OUT:
            group._close(lease, index, REJECTED)
    waiting, group._retries = group._retries, []
    for due, _, run in sorted(waiting, key=lambda item: item[:2]):
        for part in run.without(lane, offset):  # after a restart it may be one of several
            group._wait(part, due)
    group._ready = deque(part for run in group._ready for part in run.without(lane, offset))
    group._unseen = deque(part for run in group._unseen for part in run.without(lane, offset))
    group._priorities.withdraw(lane, offset)
    group._dying.pop((lane, offset), None)
    group._later.pop((lane, offset), None)
    group.doomed = [each for each in group.doomed if (each.lane, each.offset) != (lane, offset)]
    if group.starved is not None and group.starved.holds(lane, offset):
        group._unseen.extendleft(reversed(group.starved.without(lane, offset)))
        group.starved = None
    if group._gate is None or not group._gate.withdraw(lane, offset):
        group._settled(lane, offset)


def _set_apart(group: QueueGroup, lane: Lane, offset: int) -> None:
    """An event that was never handed out leaves its lane; those before it keep their order."""
    before = Run(lane, lane.cursor, offset - lane.cursor, 0)
    lane.end = max(lane.end, offset + 1)
    lane.cursor = offset + 1
    group._queue(lane)
    if before.count:
        plain = group._gate is None and before.start >= lane.urgent_to
        (group._ready if plain else group._unseen).append(before)


def revive(group: QueueGroup, lane: Lane, offset: int, now: float) -> None:
    """A dead letter comes back with a fresh budget."""
    if offset >= lane.cursor or any(run.holds(lane, offset) for run in group.unsettled()):
        return  # a reset has brought it back already
    lane.known = max(lane.known, lane.cursor)
    run = Run(lane, offset, 1, 0)
    if group._gate is None:
        group._again(run, now, 0.0)
        return
    # Its key was let go when it was buried: it waits for its turn like any other.
    group._entries.append(Retried(group.name, lane.topic, lane.partition, offset, 1, 0, 0))
    group._unseen.append(run)


def end(group: QueueGroup) -> None:
    """The group is deleted: nothing held of it can be settled any more."""
    for lease in list(group.leases.values()):
        for index in range(lease.count):
            if lease.states[index] == OUT:
                group._close(lease, index, FENCED)
    group.doomed.clear()


def reset(group: QueueGroup, lane: Lane, offset: int) -> None:
    """Read a lane from elsewhere; everything held of it is void."""
    for lease in [lease for lease in group.leases.values() if lease.lane is lane]:
        for index in range(lease.count):
            if lease.states[index] == OUT:
                group._close(lease, index, FENCED)
        group._dirty.pop(lease.fence, None)
    group._retries = [item for item in group._retries if item[2].lane is not lane]
    heapq.heapify(group._retries)
    group._ready = deque(run for run in group._ready if run.lane is not lane)
    group._unseen = deque(run for run in group._unseen if run.lane is not lane)
    group._leased_before = deque(run for run in group._leased_before if run.lane is not lane)
    for places in (group._unlooked, group._later):
        for place in [place for place in places if place[0] is lane]:
            del places[place]
    group._dying = {place: made for place, made in group._dying.items() if place[0] is not lane}
    group.doomed = [doomed for doomed in group.doomed if doomed.lane is not lane]
    if group.starved is not None and group.starved.lane is lane:
        group.starved = None
    group._priorities.forget(lane)
    if group._gate is not None:
        group._gate.forget(lane)
    lane.known = max(lane.known, lane.cursor)
    lane.looked_to = 0
    lane.cursor = offset
    group._queue(lane)
