"""What a pipeline needs to be installed, checked before a Java process is started.

Each of these fails late and badly when it does not fit: a worker that dies without a word, a
warning on every query, an import error in the middle of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from penstock.model.errors import MissingExtra, UnfitEnvironment

COMMAND = "pip install 'penstock[spark]'"


class Requirement(NamedTuple):
    """A package, the versions that fit, and what it is for."""

    package: str
    oldest: str
    below: str | None
    purpose: str

    def __str__(self) -> str:
        return f"{self.package}>={self.oldest}" + (f",<{self.below}" if self.below else "")


REQUIREMENTS = (
    Requirement("pyspark", "4.2", "5", "it has read limits and Arrow writers for Python sources"),
    Requirement("pandas", "2.2", "3", "PySpark 4 does not support pandas 3"),
    Requirement("pyarrow", "18", None, "rows travel between Spark and Python as Arrow batches"),
    Requirement("protobuf", "5", None, "stateful functions talk to Spark with it"),
)


def check_requirements(installed: Callable[[str], str] = version) -> None:
    """Raise for the first package that is missing or does not fit, with the command that helps.

    >>> check_requirements({"pyspark": "4.3.0", "pandas": "3.0.1"}.__getitem__)
    Traceback (most recent call last):
    penstock.model.pipeline_errors.UnfitEnvironment: pandas 3.0.1 does not fit: PySpark 4 does not \
support pandas 3. Nothing was started: pip install 'pandas>=2.2,<3' [pipeline.environment]
    """
    for need in REQUIREMENTS:
        try:
            found = installed(need.package)
        except PackageNotFoundError:
            raise MissingExtra(
                f"pipelines need {need.package}: {need.purpose}. Nothing was started: {COMMAND}",
                package=need.package,
                command=COMMAND,
            ) from None
        too_new = need.below is not None and _numbers(found) >= _numbers(need.below)
        if _numbers(found) < _numbers(need.oldest) or too_new:
            command = f"pip install '{need}'"
            raise UnfitEnvironment(
                f"{need.package} {found} does not fit: {need.purpose}. Nothing was started: {command}",
                package=need.package,
                found=found,
                command=command,
            )


def _numbers(text: str) -> tuple[int, ...]:
    """A version as numbers to compare; what follows them is left out.

    >>> _numbers("4.3.0.dev1"), _numbers("18")
    ((4, 3, 0), (18,))
    """
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
