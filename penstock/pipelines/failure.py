"""Errors of pipelines: Spark wraps ours in pages of Java text, and `explain_failure` unwraps them.

Sources and sinks name the events in hand with `reading`; the note travels in the traceback of the
Python worker, which Spark passes on as text. Classes that Spark calls are decorated with
`plain_errors`, so that an error of ours reaches the user without a traceback. Processes below the
driver warn its user through `warn_user`. `failpoint` lets a test end a process at a named place.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.model import errors
from penstock.model.errors import InvalidInput, PenstockError, PipelineFailed
from penstock.pipelines.plan import Place, Split

# -- explaining a failed query --------------------------------------------------------------------

MAX_NAMED = 3
"""Ranges of offsets that a message names; the error's `splits` has them all."""
C = TypeVar("C", bound=type)

_NOTE = "while reading "
_CODES = {getattr(errors, name).code for name in errors.__all__}
_OURS = re.compile(
    r"(?:^|: )penstock[\w.]*\.(\w+): (.+?) \[([a-z]+(?:[.-][a-z]+)*)\]",
    re.MULTILINE | re.DOTALL,
)
_THEIRS = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)$", re.MULTILINE)
_NOTED = re.compile(_NOTE + r"(.+)")
_SPLIT = re.compile(r"([^\s,()]+)/(\d+)/(\d+)\.\.(\d+)")
_WORKER = re.compile(
    r"Traceback \(most recent call last\):\n(.*?)(?=^=== |\Z)", re.MULTILINE | re.DOTALL
)
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+")
_OFFSETS = re.compile(r"^Current (Committed|Available) Offsets: (.*)$", re.MULTILINE)

_details = logging.getLogger("penstock.pipelines.failure")


@contextmanager
def reading(splits: Iterable[Split]) -> Iterator[None]:
    """Name these ranges of offsets in any error that leaves the block.

    >>> try:
    ...     with reading([Split("orders", 0, 7, 9)]):
    ...         raise ValueError("broken")
    ... except ValueError as error:
    ...     error.__notes__
    ['while reading orders/0/7..9']
    """
    try:
        yield
    except Exception as error:
        error.add_note(_NOTE + ", ".join(map(str, splits)))
        raise


def explain_failure(error: BaseException, pipeline: str | None = None) -> PenstockError:
    """The error to show for one that came out of Spark: what failed, where, and what to do.

    Attributes: `pipeline`, `cause` (the code of our error, or the name of another one), `topic`,
    `partition`, `first` and `last` offset where they are known, and `splits`, all ranges of offsets.
    """
    if isinstance(error, PenstockError):
        return error
    text = str(error)
    _details.debug("the pipeline %s failed: %s", pipeline, text)
    cause, message = _reason(text)
    splits, certain = _noted(text), True
    if not splits:
        splits, certain = _unfinished(text), False
    place = _words(splits, certain)
    name = f"the pipeline {pipeline!r}" if pipeline else "the pipeline"
    data: dict[str, Any] = {"pipeline": pipeline, "cause": cause, "splits": splits}
    if len(splits) == 1:
        only = splits[0]
        data |= {"topic": only.topic, "partition": only.partition}
        data |= {"first": only.start, "last": only.stop - 1}
    return PipelineFailed(
        f"{name} failed{place}: {message} ({cause}). Its checkpoint stands at the last batch that "
        "was done: correct this and run it again. --verbose shows all that Spark said",
        **data,
    )


def _reason(text: str) -> tuple[str, str]:
    """Code or name of the error, and its message."""
    ours = [found for found in _OURS.finditer(text) if found[3] in _CODES]
    if ours:
        return ours[-1][3], ours[-1][2]
    worker = _WORKER.search(text)
    if worker is not None:
        # The last line that begins at the margin is the error itself; frames are indented.
        theirs = _THEIRS.findall(worker[1])
        if theirs:
            return theirs[-1][0].rpartition(".")[2], _SQLSTATE.sub("", theirs[-1][1])
    first = text.partition("\n")[0]
    inner = re.search(r"terminated with exception: (.*)", first)
    return "spark", _SQLSTATE.sub("", inner[1] if inner else first).strip() or type(text).__name__


def _noted(text: str) -> list[Split]:
    """The ranges that `reading` named."""
    noted = _NOTED.search(text)
    return [
        Split(topic, int(partition), int(start), int(stop))
        for topic, partition, start, stop in _SPLIT.findall(noted[1] if noted else "")
    ]


def _unfinished(text: str) -> list[Split]:
    """The ranges of the batch that failed: from the offsets committed to those available."""
    ends = {kind: _places(line) for kind, line in _OFFSETS.findall(text)}
    committed, available = ends.get("Committed", []), ends.get("Available", [])
    splits = []
    for number, place in enumerate(available):
        before = committed[number] if number < len(committed) else Place({})
        for lane, stop in sorted(place.offsets.items()):
            start = before.offsets.get(lane, place.began.get(lane, 0))
            if start < stop:
                splits.append(Split(*lane, start, stop))
    return splits


def _places(line: str) -> list[Place]:
    """Offsets of our sources in a line of Spark's, where each follows a name without quotes."""
    places = []
    for found in re.finditer(r'\{"penstock"', line):
        try:
            value, _ = json.JSONDecoder().raw_decode(line, found.start())
            places.append(Place.from_json(value))
        except (ValueError, InvalidInput):  # cut off, or of another version: then it is unknown
            _details.debug("no offsets in %s", line)
    return places


def _words(splits: list[Split], certain: bool) -> str:
    if not splits:
        return ""
    named = [
        f"topic {each.topic!r}, partition {each.partition}, offsets {each.start} to {each.stop - 1}"
        for each in splits[:MAX_NAMED]
    ]
    more = f" and {len(splits) - MAX_NAMED} more" if len(splits) > MAX_NAMED else ""
    return f" {'at' if certain else 'in the batch of'} {'; '.join(named)}{more}"


# -- errors without a traceback -------------------------------------------------------------------

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
    """A class whose public methods report errors of ours by their message alone.

    The message says what the user has to correct. A worker of Spark's ends after an error, so hiding
    its traceback affects nothing after it; errors of other code keep theirs.
    """
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


# -- warnings from processes below the driver -----------------------------------------------------

MARK = "penstock warning: "
_log = logging.getLogger("penstock.pipelines")


def warn_user(text: str) -> None:
    """Warn the user of the driver, from a process of its session.

    A source plans and reads in processes of its own, whose logs the user does not see. Their output
    reaches Java's stderr, where the driver finds these lines by their mark and logs them. Workers of a
    cluster print to the stderr of their executor instead.
    """
    print(f"{MARK}{text}", file=sys.stderr, flush=True)


def warn_skipped(gone: Split) -> None:
    """Warn which events a query left out because retention had deleted them."""
    warn_user(
        f"retention took {gone.stop - gone.start:,} events before they were read: "
        f"{gone} is skipped, as onExpired=skip asks for"
    )


def relay_warning(line: str) -> bool:
    """Log a line of Java's stderr if it is one of our warnings; says whether it was.

    >>> relay_warning("26/11/16 WARN Utils: something of Spark's")
    False
    """
    if not line.startswith(MARK):
        return False
    _log.warning("%s", line.removeprefix(MARK))
    return True


# -- failpoints for tests -------------------------------------------------------------------------

_passes: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kill this process here when `FAILPOINT` is this name, or `name:3` for the third pass.

    The file that `FAILPOINT_FIRED` names is made first: a test asserts that it is there.
    `FAILPOINT_ROOT` is the process id of a driver: it is killed too, with all processes between it
    and this one, because a stage of a batch may run in a worker.

    >>> failpoint("docs.nobody-asked")
    """
    wanted, _, number = os.environ.get("FAILPOINT", "").partition(":")
    if wanted != name:
        return
    _passes[name] += 1
    if _passes[name] != int(number or 1):
        return
    fired = os.environ.get("FAILPOINT_FIRED")
    if fired:
        Path(fired).touch()
    for pid in _ancestors_up_to(os.environ.get("FAILPOINT_ROOT")):
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _ancestors_up_to(root: str | None) -> list[int]:
    """The processes above this one as far as `root`, the highest first."""
    if not root or int(root) == os.getpid():
        return []
    above, pid = [], os.getppid()
    while pid > 1:
        above.append(pid)
        if pid == int(root):
            return above[::-1]
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise RuntimeError(f"process {root} is not above {os.getpid()}")
