"""Errors of ours as Spark shows them: the message alone, without the traceback that would come before it.

What a user has to correct is in the message. A worker of Spark's ends after an error, so nothing
that follows is affected, and errors of other code keep their tracebacks.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.model.errors import PenstockError

C = TypeVar("C", bound=type)
_HIDE = "SPARK_HIDE_TRACEBACK"
"""PySpark looks at it when it reports an error of a worker."""


@contextmanager
def _plainly() -> Iterator[None]:
    try:
        yield
    except PenstockError:
        if "pyspark.worker_util" in sys.modules:  # this is a process of Spark's, not the user's own
            os.environ[_HIDE] = "1"
        raise


def plain_errors(kind: C) -> C:
    """A class whose public methods report errors of ours in this way."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__"):
            setattr(kind, name, _plain(method))
    return kind


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def iterate(*args: Any, **options: Any) -> Iterator[Any]:
            with _plainly():
                yield from method(*args, **options)

        return iterate

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with _plainly():
            return method(*args, **options)

    return call
