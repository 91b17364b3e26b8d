"""Runs a program for an event: `consume --exec` and `reply --exec`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from penstock.cli import output
from penstock.cli.output import key_text

if TYPE_CHECKING:
    import penstock

HOPELESS = 65
"""EX_DATAERR of sysexits.h: the data is wrong, and a repetition would not help."""

GRACE_S = 10.0
"""How long a program may run after the command was asked to stop."""

EXEC_HELP = (
    "Run this command (by `sh -c`) for each event: the payload is its input, EVENT_ID, EVENT_TOPIC, EVENT_KEY, "
    "EVENT_ATTEMPT, EVENT_TIME and EVENT_HEADER_NAME are in its environment. Exit status 0 acks the event, 65 makes it "
    "a dead letter, any other has it delivered again by the retry ladder."
)


class Outcome(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int
    stdout: bytes

    @property
    def reason(self) -> str:
        """Why it failed, for the record of the delivery."""
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"


def environment(event: penstock.Event) -> dict[str, str]:
    """The environment of a program: its event without the payload."""
    about = {
        "EVENT_ID": str(event.id),
        "EVENT_TOPIC": event.topic,
        "EVENT_KEY": "" if event.key is None else output.cell(key_text(event.key)),
        "EVENT_ATTEMPT": str(event.attempt),
        "EVENT_TIME": output.moment(event.time_us),
        "EVENT_CODEC": event.codec,
    }
    for name, value in event.headers.items():
        about["EVENT_HEADER_" + re.sub(r"\W", "_", name, flags=re.ASCII).upper()] = value
    # An environment holds no zero bytes.
    return {name: value.replace("\0", "") for name, value in about.items()}


async def run_program(command: str, event: penstock.Event, *, lease_s: float, capture: bool, stopping: asyncio.Event) -> Outcome:  # fmt: skip
    """Run a program for an event, whose lease is extended while it runs."""
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if capture else None,
        env={**os.environ, **environment(event)},
        start_new_session=True,  # Ctrl-C is for this command, which lets the program finish
    )
    talking = asyncio.ensure_future(process.communicate(event.payload))
    ending = asyncio.ensure_future(stopping.wait())
    try:
        while not talking.done():
            waits_for = {talking} if ending.done() else {talking, ending}
            limit_s = min(GRACE_S, lease_s / 3) if ending.done() else lease_s / 3
            done, _ = await asyncio.wait(
                waits_for, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done and ending.done():
                _end(process)
            elif not done:
                await event.extend(lease_s)
        stdout, _ = await talking
    finally:
        ending.cancel()
        if process.returncode is None:
            _end(process)
            await process.wait()
    return Outcome(process.returncode or 0, stdout or b"")


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
