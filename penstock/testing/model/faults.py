"""Planted faults: the engine with one promise broken on purpose, to see the model test notice.

Each fault replaces one function of the engine while sequences run. A fault that no sequence finds means
that the model promises too little, or that the sequences do not go there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.core.delivery import QueueGroup
from penstock.core.lease import Run
from penstock.core.retry import Retry
from penstock.engines import requests as ask
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine import Request, Subscribe
from penstock.model.draft import Draft
from penstock.testing.model.found import Found
from penstock.testing.model.harness import runs_on
from penstock.testing.model.run import run
from penstock.testing.model.sequence import Draw
from penstock.testing.simulation.mutant import Broken, Mutant

SEEDS = 8
"""In so many sequences each fault must be found."""


def _publishes(change: Callable[[Draft], None]) -> Broken:
    """A publish that loses something of what it was given."""

    def broken(original: Any) -> Any:
        async def publish(self: EmbeddedEngine, draft: Draft) -> Any:
            if draft.batch is None:
                change(draft)
            return await original(self, draft)

        return publish

    return broken


def _set(name: str, value: Any) -> Callable[[Draft], None]:
    return lambda draft: setattr(draft, name, value)


def _new_tokens(draft: Draft) -> None:
    if draft.tokens is not None:
        draft.tokens = [os.urandom(16) for _ in draft.tokens]


def _joins(**fields: Any) -> Broken:
    """A subscription that forgets something of what it asked for."""

    def broken(original: Any) -> Any:
        async def subscribe(self: EmbeddedEngine, wanted: Subscribe) -> Any:
            spec = msgspec.structs.replace(wanted.spec, **fields)
            return await original(self, msgspec.structs.replace(wanted, spec=spec))

        return subscribe

    return broken


def _answers(request: type[Request], change: Callable[[Any], Any]) -> Broken:
    """An answer to operators that is not what the engine said."""

    def broken(original: Any) -> Any:
        async def answer(self: EmbeddedEngine, asked: Any) -> Any:
            said = await original(self, asked)
            return change(said) if isinstance(asked, request) else said

        return answer

    return broken


def _asks(request: type[Request], **fields: Any) -> Broken:
    """A request that arrives as another one."""

    def broken(original: Any) -> Any:
        async def answer(self: EmbeddedEngine, asked: Any) -> Any:
            if isinstance(asked, request):
                asked = msgspec.structs.replace(asked, **fields)
            return await original(self, asked)

        return answer

    return broken


def _one_more(groups: list[Any]) -> list[Any]:
    for group in groups:
        group.lag += group.lag > 2
    return groups


def _no_priority(original: Any) -> Any:
    def arrived(self: QueueGroup, lane: Any, end: int, *, prioritised: bool = False) -> None:
        original(self, lane, end, prioritised=False)

    return arrived


def _attempt_forgotten(original: Any) -> Any:
    def again(self: QueueGroup, run: Run, now: float, delay_s: float) -> None:
        original(self, run._replace(made=max(0, run.made - 1)), now, delay_s)

    return again


def _delay_ignored(original: Any) -> Any:
    def nack(
        self: QueueGroup, lease: Any, index: int, now: float, delay_s: float | None = None,
        reason: str = "nacked",
    ) -> None:  # fmt: skip
        original(self, lease, index, now, None if delay_s is None else 0.0, reason)

    return nack


def _acks_lost(original: Any) -> Any:
    async def transact(self: EmbeddedEngine, transaction: Any, *rest: Any) -> Any:
        transaction.acks.clear()
        return await original(self, transaction, *rest)

    return transact


FAULTS = (
    Mutant("priority", "higher priorities go first", QueueGroup, "arrived", _no_priority, 20),
    Mutant("attempt", "attempts are counted", QueueGroup, "_again", _attempt_forgotten),
    Mutant("nack-delay", "a nack's delay is kept", QueueGroup, "nack", _delay_ignored),
    Mutant("headers", "headers arrive", EmbeddedEngine, "publish", _publishes(_set("headers", None))),
    Mutant("key", "keys arrive", EmbeddedEngine, "publish", _publishes(_set("keys", None))),
    Mutant("ttl", "an event can expire", EmbeddedEngine, "publish", _publishes(_set("expires_us", None))),
    Mutant("delay", "an event can wait", EmbeddedEngine, "publish", _publishes(_set("deliver_at_us", None))),
    Mutant("idempotency", "a name is stored once", EmbeddedEngine, "publish", _publishes(_new_tokens)),
    Mutant("priority-option", "a priority arrives", EmbeddedEngine, "publish", _publishes(_set("priority", None))),
    Mutant("event-time", "an event time arrives", EmbeddedEngine, "publish", _publishes(_set("times_us", None))),
    Mutant("partition", "a partition is heeded", EmbeddedEngine, "publish", _publishes(_set("partition", None)), 24),
    Mutant("order", "an order by key is heeded", EmbeddedEngine, "subscribe", _joins(order="any"), 16),
    Mutant("lease", "a lease lasts as long as asked", EmbeddedEngine, "subscribe", _joins(lease_s=300.0), 24),
    Mutant("retry", "a ladder is heeded", EmbeddedEngine, "subscribe", _joins(retry=Retry((5,), 50)), 16),
    Mutant("filter", "a filter leaves events out", EmbeddedEngine, "subscribe", _joins(filter={}), 16),
    Mutant("start", "a group begins where it asked", EmbeddedEngine, "subscribe", _joins(start="earliest"), 16),
    Mutant("lag", "lag is what is left to settle", EmbeddedEngine, "ask", _answers(ask.ListGroups, _one_more)),
    Mutant("dead-letter", "dead letters are kept", EmbeddedEngine, "ask",
           _answers(ask.ListDead, lambda letters: letters[1:])),
    Mutant("reset", "a reset goes where it is sent", EmbeddedEngine, "ask", _asks(ask.ResetGroup, to="earliest"), 16),
    Mutant("transaction-ack", "acks are part of a transaction", EmbeddedEngine, "transact", _acks_lost, 16),
)  # fmt: skip


def hunt(fault: Mutant, engine: str = "mem", length: int = 60) -> tuple[Found | None, int]:
    """Run sequences with one promise broken: the first contradiction, and after how many."""
    with runs_on(engine) as runs, fault.alive():
        for seed in range(1, fault.within + 1):
            found = run(runs(seed), Draw(seed, runs(seed).cannot).sequence(length))
            if found is not None:
                return found, seed
    return None, fault.within


def hunt_all(engine: str = "mem") -> Iterator[tuple[Mutant, Found | None, int]]:
    """Every fault in turn."""
    for fault in FAULTS:
        yield fault, *hunt(fault, engine)
