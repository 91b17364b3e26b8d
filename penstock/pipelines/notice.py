"""Warnings from the processes below a Spark session, for the user of the driver.

A source plans and reads in processes of its own, whose logs nobody sees. What they print reaches
Java's stderr, and the driver finds our lines there by their mark and logs them as its own. Workers
of a cluster print to their executor's stderr.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipelines.plan import Split

MARK = "penstock warning: "
_log = logging.getLogger("penstock.pipelines")


def warn_user(text: str) -> None:
    """Say something to whoever runs the driver, from a process of its session."""
    print(f"{MARK}{text}", file=sys.stderr, flush=True)


def tell_skipped(gone: Split) -> None:
    """Say which events a query left out because they were there no more."""
    warn_user(
        f"retention took {gone.stop - gone.start:,} events before they were read: "
        f"{gone} is skipped, as onExpired=skip asks for"
    )


def passed_on(line: str) -> bool:
    """Whether a line of Java's stderr was a warning; it is in the driver's log then.

    >>> passed_on("26/11/16 WARN Utils: something of Spark's")
    False
    """
    if not line.startswith(MARK):
        return False
    _log.warning("%s", line.removeprefix(MARK))
    return True
