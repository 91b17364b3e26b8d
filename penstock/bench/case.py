"""A benchmark case: one thing Penstock does, timed, and what peers do that compares.

Cases live in `penstock.bench.cases` and put themselves into `CASES` with `register`.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.bench.measure import Meter, Sample
from penstock.bench.peers import PEERS, Peer
from penstock.model.errors import AlreadyExists, NotFound

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from penstock.bench.client_process import ClientProcess

    PeerSide = Callable[[Peer, "Window"], Awaitable[Sample]]

Unit = Literal["events", "bytes"]
Operation = Literal[
    "publish_batched", "publish_awaited", "publish_serial", "queue", "fanout", "read_batches"
]

# A case may take 40 s; what is left over is for imports, stopping servers and deleting data.
BUDGET_S = 35.0
DEFAULT_ROUNDS = 3
DEFAULT_SECONDS = 2.0
PAYLOAD_BYTES = 100  # the size every number in the docs is quoted for
BATCH_EVENTS = 1000  # events in one batched call
# 64,000 distinct payloads: too many for a compressor or cache to learn, 10 MB of memory.
DISTINCT_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Window:
    """What one turn of a side gets: how long to measure, and where it may write.

    `folder` is new for each turn and deleted after it. `shared` is the side's own for all rounds
    of the case: data prepared once lies there. `clients` are the processes of `Case.parts`.
    """

    seconds: float
    folder: Path
    shared: Path
    turn: int = 0
    payload_bytes: int = PAYLOAD_BYTES
    batch_events: int = BATCH_EVENTS
    server_pid: int | None = None
    clients: Sequence[ClientProcess] = ()

    def meter(self) -> Meter:
        """A meter that runs for this window."""
        return Meter(self.seconds, server_pid=self.server_pid)

    def batches(self, count: int = DISTINCT_BATCHES) -> list[list[bytes]]:
        """Batches of distinct payloads, the same for every side; make them before the meter runs.

        >>> from pathlib import Path
        >>> window = Window(seconds=1, folder=Path("."), shared=Path("."), batch_events=3)
        >>> batch = window.batches(count=1)[0]
        >>> len(set(batch)), len(batch[0])
        (3, 100)
        """
        source = random.Random(self.payload_bytes)
        head = 16
        body = max(0, self.payload_bytes - head)
        return [
            [
                (b"%016x" % (number * self.batch_events + place))[: self.payload_bytes]
                + source.randbytes(body)
                for place in range(self.batch_events)
            ]
            for number in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark: its name, Penstock's side of it, and the peers' operation it is held against.

    `prepare` runs once before the rounds (its time is taken from the case's budget, not from a
    window). Without an `operation` no peer can run the case; it is the name of one that
    `penstock.bench.peers.operation` has, or a function of its own. `rounds`, `seconds` of a window and
    `budget_s` for all of it are what the case takes when nobody says. `parts` name classes; each gets
    a process of its own for all rounds.
    """

    name: str
    title: str
    penstock: Callable[[Window], Awaitable[Sample]]
    unit: Unit = "events"
    operation: Operation | PeerSide | None = None
    peers: tuple[str, ...] = PEERS
    prepare: Callable[[Window], Awaitable[None]] | None = None
    rounds: int = DEFAULT_ROUNDS
    seconds: float = DEFAULT_SECONDS
    budget_s: float = BUDGET_S
    parts: tuple[str, ...] = ()

    def runs_on(self, peer: str) -> bool:
        """Whether that peer has something to compare."""
        return self.operation is not None and peer in self.peers


CASES: dict[str, Case] = {}


def register(case: Case) -> Case:
    """Put a case into the table that `penstock bench list` shows."""
    if case.name in CASES:
        raise AlreadyExists(
            f"there is a benchmark case {case.name!r} already; give this one another name",
            case=case.name,
        )
    CASES[case.name] = case
    return case


def load_cases() -> dict[str, Case]:
    """All cases; the built-in ones are imported on first use, as they pull in the whole bus."""
    if importlib.util.find_spec("penstock.bench.cases") is not None:
        importlib.import_module("penstock.bench.cases")
    return CASES


def find_case(name: str) -> Case:
    """The case of that name, or an error that lists the names there are."""
    cases = load_cases()
    if name not in cases:
        raise NotFound(
            f"no benchmark case {name!r}; `penstock bench list` shows them: "
            + (", ".join(sorted(cases)) or "none is registered"),
            case=name,
        )
    return cases[name]
