"""kill -9 of a real broker under load, in short; `--rounds 200` is the long one (T1, T4, T6)."""

from __future__ import annotations

import pytest

from penstock.testing.broker_kill import Ledger, broker_kill_rounds, payload_of


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broker_that_is_killed_keeps_its_promises() -> None:
    """Nothing confirmed is lost or stored twice, and nothing flushed is delivered again."""
    lines: list[str] = []
    code, ledger = broker_kill_rounds(3, tell=lines.append)
    assert code == 0, "\n".join(lines)
    assert len(ledger.confirmed) > 100
    assert ledger.flushed
    assert ledger.counts["read"] >= len(ledger.confirmed)


def whole() -> tuple[Ledger, dict[int, bytes]]:
    """A ledger of three events that were published, delivered and acked."""
    ledger = Ledger(sent={1, 2, 3}, confirmed={1: 0, 2: 1, 3: 2})
    ledger.attempts = dict.fromkeys(range(3), 1)
    ledger.ends = dict.fromkeys(range(3), "acked")
    return ledger, {offset: payload_of(offset + 1) for offset in range(3)}


def test_the_ledger_is_content_when_all_is_well() -> None:
    ledger, found = whole()
    ledger.examine(found)
    assert ledger.problems == []


def test_the_ledger_notices() -> None:
    """Each promise that could be broken has words for it."""
    for harm, words in (
        (lambda ledger, found: found.pop(2), "confirmed at 2, is not there"),
        (lambda ledger, found: found.update({3: payload_of(2)}), "event 2 is stored 2 times"),
        (lambda ledger, found: found.update({3: payload_of(9)}), "nobody sent it"),
        (lambda ledger, found: ledger.unsent.add(2), "was called not sent"),
        (lambda ledger, found: found.update({7: payload_of(3)}), "offsets have holes"),
        (lambda ledger, found: ledger.attempts.pop(1), "offset 1 was never delivered"),
        (lambda ledger, found: ledger.ends.update({1: "nacked"}), "offset 1 was last nacked"),
    ):
        ledger, found = whole()
        harm(ledger, found)
        ledger.examine(found)
        assert any(words in problem for problem in ledger.problems), words
