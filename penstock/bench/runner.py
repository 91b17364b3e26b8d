"""Runs a case: starts the peers, takes turns, keeps to the time, and puts the result together.

Penstock and the peers are measured in short windows that alternate, in an order that rotates
from round to round, and medians are reported: a machine that slows down for a while slows
everyone. A case ends within its budget whatever is asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.bench.case import Case, Window, find_case, load_cases
from penstock.bench.client_process import Crew
from penstock.bench.measure import PROBE_MAX_S, Sample, disk_sync_s, percentile, rounded
from penstock.bench.peers import PEERS, Peer, make_peer
from penstock.bench.peers.operation import OPERATIONS
from penstock.bench.progress import Progress, silent
from penstock.bench.report import compare
from penstock.bench.result import OURS, result
from penstock.model.errors import InvalidInput, InvalidSettings, PenstockError, RequestTimedOut

MAX_ROUNDS = 20
# Below this a window measures its own edges; a round that cannot have it is not run.
MIN_WINDOW_S = 0.1
# What opening and checking around a window takes, until a turn has shown it.
FIRST_OVERHEAD_S = 0.5
# A peer that hangs loses its own turn, not the whole case: filling, draining and checking take less.
TURN_GRACE_S = 10.0
START_LIMIT_S = 22.0  # a server's own start limit and the client's connection
T = TypeVar("T")


def list_cases() -> list[dict[str, object]]:
    """Name, title, unit and possible peers of every case, in the order they are registered."""
    return [
        {
            "case": case.name,
            "title": case.title,
            "unit": case.unit,
            "peers": [name for name in PEERS if case.runs_on(name)],
        }
        for case in load_cases().values()
    ]


def run_case(
    name: str,
    vs: Sequence[str] = (),
    *,
    folder: Path,
    seconds: float | None = None,
    rounds: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run one case against the peers named in `vs` and return the result as JSON-ready data.

    `folder` decides which disk is measured; nothing stays in it. A peer that cannot run is named
    with the reason in `left_out`, and `complete` says whether all that were asked for ran.
    """
    case = find_case(name)
    rounds = case.rounds if rounds is None else rounds
    seconds = case.seconds if seconds is None else seconds
    budget_s = case.budget_s if budget_s is None else budget_s
    _check(vs, seconds, rounds, budget_s)
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="bench-", dir=folder)).resolve()
    run = _Run(case, place, seconds, rounds, time.monotonic() + budget_s, progress or silent)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run.all(list(dict.fromkeys(vs))))
            loop = type(runner.get_loop()).__module__.partition(".")[0]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return run.result(loop)


def complete(result: dict[str, Any], vs: Sequence[str]) -> bool:
    """Whether every peer asked for by name is in the result: the condition of exit code 0."""
    return not set(vs) & set(result["left_out"])


def compare_files(a: Path, b: Path) -> dict[str, Any]:
    """What changed from the results in file `a` to those in file `b`, case by case.

    A file holds one result or a list of them.
    """
    first, second = _results(a), _results(b)
    shared = [name for name in first if name in second]
    if not shared:
        raise InvalidInput(
            f"{a} holds {sorted(first)} and {b} holds {sorted(second)}: no case is in both; "
            "run the same case twice with --json",
            a=sorted(first),
            b=sorted(second),
        )
    return {
        "a": str(a),
        "b": str(b),
        "cases": [compare(first[name], second[name]) for name in shared],
        "only_in_one": sorted(set(first) ^ set(second)),
    }


def _results(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(path.read_text())
        found = data if isinstance(data, list) else [data]
        return {result["case"]: result for result in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} is no benchmark result ({error}); write one with "
            "`penstock bench run CASE --json`",
            path=str(path),
        ) from error


def _check(vs: Sequence[str], seconds: float, rounds: int, budget_s: float) -> None:
    for peer in vs:
        if peer not in PEERS:
            raise InvalidSettings(
                f"no peer {peer!r} to compare with; choose from {', '.join(PEERS)}", peer=peer
            )
    if not 1 <= rounds <= MAX_ROUNDS:
        raise InvalidSettings(f"rounds must be 1 to {MAX_ROUNDS}, not {rounds}", rounds=rounds)
    if not MIN_WINDOW_S <= seconds <= budget_s:
        raise InvalidSettings(
            f"seconds must be {MIN_WINDOW_S} to the {budget_s:g} that all of it may take, not {seconds}",
            seconds=seconds,
        )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop for both sides where it is installed: clients of peers gain most from it."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop  # type: ignore[no-any-return]
    return None


@dataclass
class _Run:
    """One case on its way: who takes part, what was measured, how much time is left."""

    case: Case
    place: Path
    seconds: float
    rounds: int
    deadline: float
    progress: Progress
    peers: dict[str, Peer] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    windows_s: list[float] = field(default_factory=list)
    syncs_s: list[float] = field(default_factory=list)
    done_rounds: int = 0
    done_turns: int = 0
    overhead_s: dict[str, float] = field(default_factory=dict)
    load_1m: float = field(default_factory=lambda: os.getloadavg()[0])

    def __post_init__(self) -> None:
        self.crew = Crew(self.place, *self.case.parts)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def sides(self) -> list[str]:
        return [OURS, *self.peers]

    async def all(self, vs: list[str]) -> None:
        """Start, prepare, take turns, stop; what was started is stopped on every way out."""
        try:
            await self.crew.start()
            await self._start(vs)
            if self.case.prepare is not None:
                self.progress("prepare", 0, self.rounds * len(self.sides))
                with self._window(OURS, self.seconds, 0) as window:
                    await self._in_time(self.case.prepare(window), self.left_s)
            for number in range(self.rounds):
                if not await self._round(number):
                    break
                self.done_rounds += 1
        finally:
            for peer in list(self.peers.values()):
                with contextlib.suppress(Exception):
                    await peer.stop()
            await self.crew.stop()

    async def _start(self, vs: list[str]) -> None:
        wanted: dict[str, Peer] = {}
        for name in vs:
            if not self.case.runs_on(name):
                self._leave_out(name, f"has nothing to compare with the case {self.case.name}")
                continue
            try:
                wanted[name] = make_peer(name)
            except Exception as error:
                self._leave_out(name, _reason(error))
        if wanted:
            self.progress(f"start {', '.join(wanted)}", 0, self.rounds * (len(wanted) + 1))
        # Before the first await, so that a cancelled start is stopped like a finished one.
        self.peers = wanted
        started = await asyncio.gather(
            *(
                self._in_time(peer.start(self.place / f"server-{name}"), START_LIMIT_S)
                for name, peer in wanted.items()
            ),
            return_exceptions=True,
        )
        for name, outcome in zip(list(wanted), started, strict=True):
            if isinstance(outcome, Exception):
                await self._drop(name, outcome)

    async def _round(self, number: int) -> bool:
        """One turn for each side, windows of equal length; False when the time is used up."""
        share = self._share(self.rounds - number)
        if share < MIN_WINDOW_S:
            share = self._share(1)  # fewer rounds than asked for, rather than useless ones
        if number and share < MIN_WINDOW_S:
            return False
        seconds = min(self.seconds, max(share, MIN_WINDOW_S))
        self.syncs_s += disk_sync_s(self.place)
        start = number % len(self.sides)
        for side in self.sides[start:] + self.sides[:start]:
            if number and self.left_s < seconds + self.overhead_s.get(side, 0.0):
                return False
            total = max(self.rounds * len(self.sides), self.done_turns + 1)
            self.progress(f"round {number + 1}: {side}", self.done_turns, total)
            await self._turn(side, number, seconds)
            self.done_turns += 1
        return True

    def _share(self, rounds_left: int) -> float:
        """The window each turn may have so that all the rounds left fit into the time left."""
        overhead_s = sum(self.overhead_s.get(side, FIRST_OVERHEAD_S) for side in self.sides)
        round_s = self.left_s / rounds_left - PROBE_MAX_S - overhead_s
        return round_s / len(self.sides)

    async def _turn(self, side: str, number: int, seconds: float) -> None:
        began = time.monotonic()
        try:
            with self._window(side, seconds, number) as window:
                sample = await self._measure(side, window)
        except Exception as error:
            if side == OURS:
                raise
            await self._drop(side, error)
            return
        self.samples.setdefault(side, {})[number] = sample
        self.windows_s.append(seconds)
        over_s = time.monotonic() - began - seconds
        self.overhead_s[side] = max(over_s, self.overhead_s.get(side, 0.0), 0.0)

    async def _measure(self, side: str, window: Window) -> Sample:
        if side == OURS:
            return await self._in_time(self.case.penstock(window), self.left_s)
        operation = self.case.operation
        assert operation is not None, "only peers with an operation were started"
        run = OPERATIONS[operation] if isinstance(operation, str) else operation
        call = run(self.peers[side], window)
        sample = await self._in_time(call, min(self.left_s, window.seconds + TURN_GRACE_S))
        if not sample.per_s:
            raise PenstockError(f"{side} completed nothing in {window.seconds:g} s", peer=side)
        return sample

    async def _in_time(self, call: Awaitable[T], limit_s: float) -> T:
        try:
            async with asyncio.timeout(max(limit_s, MIN_WINDOW_S)) as limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise RequestTimedOut(
                f"the case {self.case.name} did not end within its time; "
                "ask for fewer seconds, rounds or peers",
                case=self.case.name,
            ) from error

    @contextlib.contextmanager
    def _window(self, side: str, seconds: float, number: int) -> Iterator[Window]:
        shared = self.place / f"shared-{side}"
        shared.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{side}-", dir=self.place))
        server_pid = self.peers[side].server_pid if side in self.peers else None
        try:
            yield Window(
                seconds, folder, shared, number, server_pid=server_pid, clients=self.crew.clients
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _drop(self, name: str, error: Exception) -> None:
        self._leave_out(name, _reason(error))
        self.samples.pop(name, None)
        with contextlib.suppress(Exception):
            await self.peers.pop(name).stop()

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        print(f"bench: {name} is left out: {reason}", file=sys.stderr)

    def result(self, loop: str) -> dict[str, Any]:
        """Everything measured."""
        ordered = sorted(self.syncs_s)
        machine = {
            "loop": loop,
            "fdatasync_p50_ms": rounded(percentile(ordered, 0.50) * 1000),
            "fdatasync_p99_ms": rounded(percentile(ordered, 0.99) * 1000),
        }
        return result(
            self.case.name,
            self.case.title,
            self.samples,
            unit=self.case.unit,
            rounds=self.done_rounds,
            seconds=statistics.median(self.windows_s),
            load_1m=self.load_1m,
            machine=machine,
            left_out=self.left_out,
        )


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
