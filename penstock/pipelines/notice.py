"""Warnings from the processes below a Spark session, for the user of the driver.

A source plans in a process of its own, whose log nobody sees. What it prints reaches Java's stderr,
and the driver finds our lines there by their mark and logs them as its own.
"""

from __future__ import annotations

import logging
import sys

MARK = "penstock warning: "
_log = logging.getLogger("penstock.pipelines")


def warn_user(text: str) -> None:
    """Say something to whoever runs the driver, from a process of its session."""
    print(f"{MARK}{text}", file=sys.stderr, flush=True)


def passed_on(line: str) -> bool:
    """Whether a line of Java's stderr was a warning; it is in the driver's log then.

    >>> passed_on("26/11/16 WARN Utils: something of Spark's")
    False
    """
    if not line.startswith(MARK):
        return False
    _log.warning("%s", line.removeprefix(MARK))
    return True
