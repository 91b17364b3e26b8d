"""`LogQuota` limits the log lines a second that refused clients cause (T1, Q1)."""

from __future__ import annotations

import logging

import pytest

from penstock.server.logs import LINES_PER_S, LogQuota


def test_what_is_left_out_is_counted_by_the_next_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    quota = LogQuota(logging.getLogger("penstock.test"), now=lambda: now)
    for number in range(LINES_PER_S + 7):
        assert quota.warning("client refused", peer=f"p{number}") is (number < LINES_PER_S)
    now = 6.0
    quota.warning("client refused", peer="later")
    quota.warning("client refused", peer="last")
    said = [(vars(record)["peer"], vars(record).get("left_out")) for record in caplog.records]
    assert len(said) == LINES_PER_S + 2
    assert said[-3:] == [(f"p{LINES_PER_S - 1}", None), ("later", 7), ("last", None)]
