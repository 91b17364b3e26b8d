"""Recall: how many publishes of a session may be under way, and which are too old to vouch for."""

from __future__ import annotations

from penstock.core.state import REMEMBERED_PUBLISHES, SessionState
from penstock.model.errors import ConnectionLost, Deferred

RETRY_S = 0.05  # about as long as a slow commit takes


class Recall:
    """Publishes and transactions of one session that came and have no answer.

    No more than the journal remembers: each may come again after a crash, and must be recognised.

    >>> recall = Recall()
    >>> recall.begin(7, None)
    >>> recall.end()
    """

    def __init__(self) -> None:
        self._open = 0

    def begin(self, sequence: int, known: SessionState | None) -> None:
        """One came, new or again; raises when it could happen twice, now or after a crash.

        To be called in the order in which they came: a new one is newer than all that are known.
        """
        if known is not None and sequence not in known.produced:
            if known.may_have_forgotten(sequence):
                raise ConnectionLost(
                    f"the broker remembers the last {REMEMBERED_PUBLISHES} publishes and transactions of "
                    f"a session, and {sequence} came before them: it may have been stored. Look before "
                    f"you repeat it, and have fewer than {REMEMBERED_PUBLISHES} without an answer",
                    outcome="unknown",
                )
            if self._open >= REMEMBERED_PUBLISHES:
                raise Deferred(
                    f"{REMEMBERED_PUBLISHES} publishes and transactions of this session have no answer "
                    "yet, and a broker recognises no more after a crash; nothing of this one was "
                    "stored. Send it again, with a sequence of its own, when some are answered",
                    retry_after_s=RETRY_S,
                    limit="session_publishes",
                )
        self._open += 1

    def end(self) -> None:
        """One has its answer."""
        self._open -= 1
