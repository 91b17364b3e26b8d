"""Pipelines: named functions from DataFrames to a DataFrame, with their inputs and outputs.

The decorator `pipeline` returns the function it was given, so tests call it like any other. `discover`
and `find` load the pipelines that come with Penstock, those of installed packages, and those of a folder.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from penstock.model.errors import AlreadyExists, InvalidInput, NotFound
from penstock.model.registry import did_you_mean
from penstock.pipelines import builtin

# -- defining -------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["stream", "batch"]


@dataclass(frozen=True)
class Input:
    """What one argument of a pipeline's function reads."""

    topics: str
    """A topic pattern, `evidence.#`, or several with commas between them."""
    schema: str | None = None
    """Types of the payload as DDL, `host STRING, score DOUBLE`: gives the columns `value` and `fault`."""
    late_after: str | None = None
    """Allowed lateness, `10m`: gives the column `late`."""
    columns: str | None = None
    """The columns that are used, `event_time,value`: no others are read."""
    exclude: str = ""
    """Patterns of topics that are left out, with commas between them."""


@dataclass(frozen=True)
class Pipeline:
    """A named function and its surroundings."""

    name: str
    function: Callable[..., Any]
    reads: Mapping[str, Input] = field(default_factory=dict)
    """Inputs by argument; none for a job that reads something else: it asks for `spark`, `url`, `token`."""
    writes: str | None = None
    """The topic of the rows that name none themselves."""
    table: str | None = None
    """The table that results join, too: rows with no topic, or on a topic of `results`."""
    results: str | None = None
    """A pattern: of rows that name a topic, those that are results, not set aside."""
    table_schema: str | None = None
    """Types of the payload of results as DDL: the table's columns, beside the event time."""
    params: type[msgspec.Struct] | None = None
    """Parameters with their defaults; the function gets one as `params`."""
    mode: Mode = "stream"
    output_mode: Literal["append", "update", "complete"] = "append"

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


class Pipelines(dict[str, Pipeline]):
    """Pipelines by name."""

    def add(self, made: Pipeline) -> None:
        """Add one; a name is taken once, except by the same function loaded again."""
        known = self.get(made.name)
        if known is not None and _place(known.function) != _place(made.function):
            raise AlreadyExists(
                f"there are two pipelines named {made.name!r}: {_place(known.function)} and "
                f"{_place(made.function)}. Rename one"
            )
        self[made.name] = made


registered = Pipelines()
"""Every pipeline decorated so far in this process."""


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def pipeline(
    name: str,
    *,
    reads: str | Mapping[str, str | Input] | None = None,
    writes: str | None = None,
    table: str | None = None,
    results: str | None = None,
    table_schema: str | None = None,
    schema: str | None = None,
    late_after: str | None = None,
    columns: str | None = None,
    exclude: str = "",
    params: type[msgspec.Struct] | None = None,
    mode: Mode = "stream",
    output_mode: Literal["append", "update", "complete"] = "append",
) -> Callable[[F], F]:
    """Name a function from DataFrames to a DataFrame as a pipeline; the function stays as it is.

    >>> @pipeline("doubled", reads="numbers.#", writes="doubles", schema="n BIGINT")
    ... def doubled(events):
    ...     return events.selectExpr("value.n * 2 AS n")
    >>> registered["doubled"].reads["events"].topics
    'numbers.#'
    """

    def decorate(function: F) -> F:
        arguments = [each for each in inspect.signature(function).parameters if each != "params"]
        alone = isinstance(reads, str)
        given: Mapping[str, Any] = dict.fromkeys(arguments[:1], reads) if alone else reads or {}  # type: ignore[assignment]
        inputs = {
            argument: each
            if isinstance(each, Input)
            else Input(each, schema, late_after, columns, exclude)
            for argument, each in given.items()
        }
        unknown = sorted(set(inputs) - set(arguments))
        if unknown:
            raise InvalidInput(
                f"pipeline {name!r} reads into {unknown[0]!r}, which is no argument of "
                f"{_place(function)}: it has {', '.join(arguments) or 'none'}"
            )
        registered.add(
            Pipeline(
                name=name,
                function=function,
                reads=inputs,
                writes=writes,
                table=table,
                results=results,
                table_schema=table_schema,
                params=params,
                mode=mode,
                output_mode=output_mode,
            )
        )
        return function

    return decorate


# -- finding by name ------------------------------------------------------------------------------

FOLDER = "pipelines"
"""Where a project's own pipelines are looked for, unless another folder is named."""
GROUP = "penstock.pipelines"
"""The entry points by which packages bring pipelines; each names a module."""


def discover(folder: str | Path | None = None) -> Pipelines:
    """Load everything there is and return it by name; needs PySpark, and no session."""
    builtin.load()
    for point in entry_points(group=GROUP):
        point.load()
    chosen = Path(folder if folder is not None else FOLDER)
    if folder is not None and not chosen.is_dir():
        raise NotFound(f"there is no folder {str(chosen)!r} with pipelines")
    for path in sorted(chosen.glob("*.py")):
        _load(path)
    return registered


def _load(path: Path) -> None:
    """Run a file of a folder as a module; importable by the workers, which get its functions whole."""
    name = f"penstock_pipelines_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidInput(
            f"{path} cannot be loaded: {type(error).__name__}: {error}. The other pipelines are "
            "not affected; correct the file or move it away",
            path=str(path),
        ) from error


def find(name: str, folder: str | Path | None = None) -> Pipeline:
    """A pipeline by its name; an unknown one is answered with the nearest."""
    known = discover(folder)
    if name not in known:
        raise NotFound(
            f"there is no pipeline {name!r}. {did_you_mean(name, known)}There is "
            f"{', '.join(sorted(known))}",
            name=name,
        )
    return known[name]
