"""Settling: a Spark worker stops looking through its modules for garbage after every task.

Spark's worker collects garbage when a task ends. What it has imported by then is hundreds of
thousands of objects that live as long as the process; to walk them takes longer than to read a
small batch.
"""

from __future__ import annotations

import functools
import gc


@functools.cache
def settle() -> None:
    """Take what is alive now for permanent; once in a process, when the first task has read all."""
    gc.collect()  # what is garbage now would never be looked at again
    gc.freeze()
