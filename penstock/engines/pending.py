"""Pending: what waits for the next commit, a queue for each tenant, served in turns.

Each tenant gets at most its quantum of bytes in a commit while others wait, so one tenant's flood
costs the others one quantum and not the flood. Who is patient goes with the commit of somebody who
is not, as long as there is one soon: a sync of its own would hold up those of others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from penstock.core.entry import Entry
from penstock.core.lease import Lease
from penstock.engines.engine import Draft
from penstock.model.event import Receipt

# A commit that patient submissions join is no larger than this: it is written as quickly as without.
COMPANY_BYTES = 112 * 1024


class Submission:
    """Drafts and entries that go into the journal together."""

    __slots__ = (
        "brings_news",
        "check",
        "drafts",
        "entries",
        "for_publish",
        "future",
        "partitions",
        "patience_s",
        "position",
        "receipts",
        "size",
        "tenant",
        "when_taken",
        "written",
    )  # fmt: skip

    def __init__(
        self,
        tenant: str,
        drafts: list[Draft],
        partitions: list[int],
        size: int,
        future: asyncio.Future[Any],
    ) -> None:
        self.tenant = tenant
        self.drafts = drafts
        self.partitions = partitions
        self.size = size
        self.future = future
        self.patience_s = 0.0
        """How long it waits for a commit of somebody else; nothing when that time is over."""
        self.entries: list[Entry] = []
        self.position = 0
        """Where it went in the journal."""
        self.written: list[Entry] = []
        """All entries that went into the journal with it."""
        self.receipts: list[Receipt] = []
        self.check: Callable[[], None] | None = None
        """Last objection before the submission is taken: raises, and nothing of it happens."""
        self.for_publish = bool(drafts)
        """Whether it is events, or what they need: such as do not use the room that is kept back."""
        self.brings_news = False
        """Whether `when_taken` also gives what a group has settled and leased."""
        self.when_taken: Callable[[list[Receipt]], list[Entry]] | None = None
        """Entries that need the offsets the drafts got."""


class Source(Protocol):
    """Where entries that nobody waits for come from: the delivery machines."""

    def drain(self) -> tuple[list[Entry], list[Lease]]:
        """Entries to write, and the leases that may go out when they are durable."""
        ...

    def news_bytes(self) -> int:
        """An upper bound on what `drain` would return takes in the journal."""
        ...


class Pending:
    """Submissions by tenant, in turns.

    >>> pending = Pending()
    >>> pending.bytes
    0
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._queues: dict[str, deque[Submission]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, submission: Submission) -> None:
        """Put a submission behind the others of its tenant."""
        queue = self._queues.get(submission.tenant)
        if queue is None:
            queue = self._queues[submission.tenant] = deque()
        queue.append(submission)
        self.bytes += submission.size

    def presses(self, busy: Collection[str] = ()) -> bool:
        """Whether anybody but these tenants has something that should not wait for company."""
        return any(
            tenant not in busy and _pressing(queue) for tenant, queue in self._queues.items()
        )

    def first_size(self, busy: Collection[str] = ()) -> int:
        """Size of the submission that would be taken first."""
        for tenant in self._order(busy):
            return self._queues[tenant][0].size
        return 0

    def _order(self, busy: Collection[str]) -> list[str]:
        """Whose turn it is: patient tenants come last."""
        order = [tenant for tenant in self._queues if tenant not in busy]
        order.sort(key=lambda tenant: not _pressing(self._queues[tenant]))
        return order

    def take(
        self,
        budget: int,
        quantum: int,
        fits: Callable[[Submission, int], bool],
        busy: Collection[str] = (),
    ) -> list[Submission]:
        """The submissions of one commit, none of a busy tenant's; at least one, if it fits.

        `fits` is asked about each, and how many bytes there would be with it.
        """
        taken: list[Submission] = []
        if len(self._queues) == 1:
            quantum = budget
        spent = 0
        served: dict[str, deque[Submission]] = {}
        for tenant in self._order(busy):
            if not _pressing(self._queues[tenant]):
                budget = min(budget, COMPANY_BYTES)
            queue = self._queues.pop(tenant)
            share = 0
            while queue and (
                not taken
                or (spent + queue[0].size <= budget and share + queue[0].size <= quantum)
                or (share == 0 and spent + queue[0].size <= budget)
            ):
                if not fits(queue[0], spent + queue[0].size):
                    break
                submission = queue.popleft()
                spent += submission.size
                share += submission.size
                taken.append(submission)
            if queue and share:
                served[tenant] = queue
            elif queue:
                self._queues[tenant] = queue
        self._queues.update(served)  # at the back: they had their turn
        self.bytes -= spent
        return taken

    def drop(self) -> list[Submission]:
        """Take everything out, to be refused."""
        dropped = [submission for queue in self._queues.values() for submission in queue]
        self._queues.clear()
        self.bytes = 0
        return dropped


def _pressing(queue: deque[Submission]) -> bool:
    """Whether any of a tenant's submissions should not wait: those before it go with it."""
    return any(not each.patience_s for each in queue)
