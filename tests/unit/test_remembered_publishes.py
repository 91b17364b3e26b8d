"""`RequestWindow` bounds the unanswered publishes of a session to what deduplication remembers (Q13, T4)."""

from __future__ import annotations

import pytest

from penstock.core.entry import Produced, SessionPut
from penstock.core.state import REMEMBERED_PUBLISHES, SessionState, State, load_pieces, pieces_of
from penstock.engines.broker.engine import MAX_TRANSACTIONS
from penstock.engines.broker.publisher import MAX_UNDER_WAY
from penstock.model.errors import ConnectionLost, Deferred
from penstock.server.publish import RequestWindow

MOST = REMEMBERED_PUBLISHES


def session(stored: int) -> SessionState:
    """A session as a broker knows it that was restarted after so many publishes."""
    state = State()
    state.apply(SessionPut("s", "c", "acme", "me", (), (), 1, True))
    for sequence in range(1, stored + 1):
        state.apply(Produced("s", sequence, []))
    return load_pieces(pieces_of(state, 0)).sessions["s"]


def test_a_client_has_fewer_under_way_than_are_remembered() -> None:
    assert MAX_TRANSACTIONS + MAX_UNDER_WAY < MOST


@pytest.mark.parametrize("stored", [0, 1, MOST - 1, MOST, MOST + 1, 3 * MOST])
def test_what_may_have_been_stored_is_known_or_refused(stored: int) -> None:
    known, window = session(stored), RequestWindow()
    for sequence in range(1, stored - MOST + 1):
        with pytest.raises(ConnectionLost) as raised:
            window.begin(sequence, known)
        assert raised.value.outcome == "unknown"
    for sequence in range(max(1, stored - MOST + 1), stored + 1):
        assert sequence in known.produced
        window.begin(sequence, known)
        window.end()
    window.begin(stored + 1, known)


def test_new_ones_are_refused_beyond_what_is_remembered_and_repeated_ones_never() -> None:
    known, window = session(10), RequestWindow()
    for sequence in range(11, 11 + MOST):
        window.begin(sequence, known)
    with pytest.raises(Deferred, match="nothing of this one was stored") as raised:
        window.begin(11 + MOST, known)
    assert raised.value.retry_after_s > 0
    window.begin(10, known)  # came before, and is only told so
    window.end()
    window.end()
    window.begin(11 + MOST, known)


def test_who_cannot_come_back_may_have_as_many_as_it_likes() -> None:
    window = RequestWindow()
    for sequence in range(4 * MOST):
        window.begin(sequence, None)


def test_what_is_stored_later_of_a_publish_does_not_hide_what_was_before() -> None:
    """A frame that comes again may store what was refused at first; all of it is known then."""
    known = session(0)
    known.remember(1, [0, 0, 7, 1])
    known.remember(1, [1, 0, 9, 1])
    assert known.produced == {1: [0, 0, 7, 1, 1, 0, 9, 1]}
