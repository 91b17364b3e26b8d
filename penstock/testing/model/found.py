"""A contradiction, told as a program that shows it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.testing.model.groups import Contradiction
from penstock.testing.model.sequence import Sequence, Step


@dataclass
class Found:
    """A sequence that contradicts the model."""

    engine: str
    sequence: Sequence
    step: Step
    contradiction: Contradiction
    lines: list[str]

    def script(self) -> str:
        """The calls as a program; what was expected, and what came."""
        body = "\n".join(self.lines)
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        said = "\n".join(f"# {line}" for line in str(self.contradiction).splitlines())
        return _SCRIPT.format(engine=self.engine, seed=self.sequence.seed, step=self.step, said=said,
                              body=indented, prefix=self.sequence.prefix)  # fmt: skip


_SCRIPT = '''\
"""Seed {seed} of the model test on {engine}, made short. Run it with python."""
{said}
# at {step}
import asyncio, contextlib, uuid
from datetime import UTC, datetime

import penstock
from penstock.testing.model.harness import harness_of


async def main(harness):
{body}
    for group in await bus.groups.list():
        print(group)
        for letter in await bus.dead_letters.list(consumer=group.name):
            print("  ", letter)


with harness_of({engine!r}, {seed}) as harness:
    harness.run(lambda: main(harness))
'''
