"""Taken: one commit between the moment it is laid out and the moment its callers hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.core.lease import Lease
from penstock.engines.layout import Placed
from penstock.engines.pending import Submission
from penstock.log.frame import frame_bytes
from penstock.log.journal import Commit, Journal
from penstock.model.errors import PenstockError


class Taken:
    """One commit and what to do when it is durable."""

    __slots__ = ("commit", "drained", "flushes", "leases", "placed", "submissions")

    def __init__(self, commit: Commit) -> None:
        self.commit = commit
        self.drained = True
        """Whether everything settled so far is in it; not when there was no room."""
        self.submissions: list[Submission] = []
        self.placed: list[Placed] = []
        self.leases: list[Lease] = []
        self.flushes: list[asyncio.Future[None]] = []

    def fits(
        self, journal: Journal, submission: Submission, size: int, news_bytes: Callable[[], int]
    ) -> bool:
        """Whether there is room for a submission with which `size` bytes more are in the commit."""
        size += frame_bytes(0)
        if submission.for_publish:
            # Without room for what was settled there is none for new events either.
            return self.drained and journal.fits(self.commit, size)
        if submission.brings_news and not self.drained:
            size += news_bytes()
        return journal.fits(self.commit, size, last=True)

    def answer(self, full: PenstockError | None) -> None:
        """It is durable: tell whoever waits; flushes hear that it was not all, when it was not."""
        for submission in self.submissions:
            if not submission.future.done():
                submission.future.set_result(submission.receipts)
        for done in self.flushes:
            if done.done():
                continue
            if full is not None and not self.drained:
                done.set_exception(full)
            else:
                done.set_result(None)


def refuse(submissions: Iterable[Submission], error: BaseException) -> None:
    """Tell callers that what they wait for did not happen, or may not have."""
    for submission in submissions:
        if not submission.future.done():
            submission.future.set_exception(error)
