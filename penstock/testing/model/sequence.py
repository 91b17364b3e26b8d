"""Random sequences of public calls: drawn from a seed, and made shorter while they still fail.

A step names what it works on by number ("the third delivery in hand"), and does nothing where there is
no such thing. So any part of a sequence is a sequence, and a failing one can lose steps one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from penstock.testing.model.groups import GroupOptions

REGIONS = ("eu", "us")
KEYS = ("k1", "k2", "k3")
NAMES = ("n1", "n2", "n3", "n4")


@dataclass(frozen=True)
class Step:
    """One operation, with its arguments."""

    kind: str
    args: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in self.args.items())})"


@dataclass(frozen=True)
class Sequence:
    """One seed's groups and steps."""

    seed: int
    prefix: str
    groups: dict[str, GroupOptions]
    steps: tuple[Step, ...]


WEIGHTS = {
    "publish": 24, "publish_many": 5, "transaction": 4, "join": 9, "leave": 3, "drop": 1, "get": 26,
    "settle": 22, "settle_many": 3, "seal": 1, "wait": 8, "flush": 2, "close": 2, "kill": 2, "restart": 2, "cut": 2, "die": 1,
    "create": 1, "grow": 1, "delete_topic": 0.6, "configure": 0.5, "reset": 2.5, "delete_group": 0.5,
    "replay_letter": 1.5, "dead_letter": 1.2, "purge": 0.8, "route": 1.5, "schedule": 0.8,
    "unschedule": 0.4, "replay": 3, "read": 5, "commit": 2, "listen": 1,
}  # fmt: skip


class Draw:
    """Draws one sequence. `quick` keeps all waits short, for engines whose time is real."""

    def __init__(
        self, seed: int, cannot: frozenset[str] = frozenset(), *, quick: bool = False
    ) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.prefix = f"s{seed}"
        self.quick = quick
        self.topics = [f"{self.prefix}.a", f"{self.prefix}.b", f"{self.prefix}.c.v1.acme"]
        self.groups = {f"{self.prefix}-g{number}": self._group() for number in range(2)}
        self.groups[f"{self.prefix}-log"] = GroupOptions(self._pattern(), mode="log")
        self.weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in cannot}
        self.number = 0

    def sequence(self, length: int) -> Sequence:
        """Draw it."""
        opening = [Step("publish", self.publish()) for _ in range(self.rng.randrange(4))]
        opening.append(Step("join", self.join()))
        kinds = self.rng.choices(list(self.weights), list(self.weights.values()), k=length)
        steps = opening + [Step(kind, getattr(self, kind)()) for kind in kinds]
        return Sequence(self.seed, self.prefix, self.groups, tuple(steps))

    def _seconds(self, *choices: float) -> float:
        seconds = self.rng.choice(choices)
        return round(min(seconds, 1.0) / 2, 3) if self.quick else seconds

    def _pattern(self) -> str:
        p = self.prefix
        return self.rng.choice((f"{p}.a", f"{p}.a", f"{p}.*", f"{p}.#", f"{p}.#"))

    def _group(self) -> GroupOptions:
        rng = self.rng
        ladder = rng.choice(((0.1,), (0.3,), (0.2, 1.0), (1.0,)))
        attempts = rng.choice((1, 2, 3, 3, 5))
        return GroupOptions(
            pattern=self._pattern(),
            order=rng.choice(("any", "any", "any", "key", "single")),
            ladder_s=() if attempts == 1 else ladder,
            max_attempts=attempts,
            lease_s=1.0 if self.quick else rng.choice((1.0, 3.0, 30.0)),
            filter={"region": "eu"} if rng.random() < 0.2 else {},
            start=rng.choice(("earliest", "earliest", "earliest", "latest", 2)),
        )

    def _how(self) -> str:
        """How an operator confirms: with the word, with another one, or by trying it dry."""
        return self.rng.choice(("yes",) * 6 + ("no", "dry"))

    def _pick(self) -> int:
        return self.rng.randrange(64)

    # -- one method for each kind of step ----------------------------------------------------------

    def event(self, *, keyed: bool) -> dict[str, Any]:
        """The options of one event."""
        rng, self.number = self.rng, self.number + 1
        options: dict[str, Any] = {"number": self.number}
        if keyed and rng.random() < 0.6:
            options["key"] = rng.choice(KEYS)
        if rng.random() < 0.4:
            options["headers"] = {"region": rng.choice(REGIONS)}
        if rng.random() < 0.3:
            options["priority"] = rng.choice((1, 5, 9))
        if rng.random() < 0.12:
            options["name"] = rng.choice(NAMES)
        elif rng.random() < 0.06:
            options["token"] = rng.randrange(1, 4)
        if rng.random() < 0.1:
            options["event_time"] = 1_600_000_000 + rng.randrange(1000)
        if rng.random() < 0.15:
            options["codec"] = "json"
        return options

    def publish(self) -> dict[str, Any]:
        """One event with any options."""
        rng, options = self.rng, self.event(keyed=True)
        if rng.random() < 0.12:
            options["ttl_s"] = self._seconds(0.5, 2.0, 5.0)
        if rng.random() < 0.12:
            options["delay_s"] = self._seconds(0.2, 1.0, 4.0)
        elif rng.random() < 0.05:
            options["deliver_in_s"] = rng.choice((-1.0, 0.5))
        if "key" not in options and "delay_s" not in options and rng.random() < 0.15:
            options["partition"] = rng.randrange(2)
        return {"topic": rng.choice(self.topics), "event": options}

    def publish_many(self) -> dict[str, Any]:
        """Several events in one call."""
        rng = self.rng
        events = [self.event(keyed=True) for _ in range(rng.randrange(2, 7))]
        named = rng.random() < 0.3
        for event in events:
            event.pop("token", None)
            event.pop("codec", None)
            event.pop("name", None)
            if named:
                event["name"] = f"m{rng.randrange(8)}"
        for index, event in enumerate(events):  # a name once in a batch
            if named and event["name"] in [each["name"] for each in events[:index]]:
                event["name"] = f"b{event['number']}"
        ttl_s = self._seconds(0.5, 3.0) if rng.random() < 0.15 else None
        delay_s = self._seconds(0.3, 3.0) if not named and rng.random() < 0.12 else None
        partition = rng.randrange(2) if delay_s is None and rng.random() < 0.12 else None
        return {"topic": rng.choice(self.topics), "events": events, "ttl_s": ttl_s,
                "delay_s": delay_s, "partition": partition}  # fmt: skip

    def transaction(self) -> dict[str, Any]:
        """Publishes and acks together, perhaps under a key, perhaps left by an exception."""
        rng = self.rng
        events = [
            (rng.choice(self.topics), self.event(keyed=True)) for _ in range(rng.randrange(1, 4))
        ]
        for _, event in events:
            event.pop("name", None)
            event.pop("token", None)
        return {
            "events": events,
            "acks": [self._pick() for _ in range(rng.randrange(3))],
            "key": rng.choice((None, None, f"{self.prefix}-t1", f"{self.prefix}-t2")),
            "fails": rng.random() < 0.2,
        }

    def join(self) -> dict[str, Any]:
        """A member of a group, with some credit."""
        rng = self.rng
        return {
            "group": rng.choice(list(self.groups)),
            "member": f"m{rng.randrange(3)}",
            "max_inflight": rng.choice((1, 1, 2, 3, 10)),
            "client": rng.choice(("bus", "bus", "other")),
        }

    def listen(self) -> dict[str, Any]:
        """A subscription without a group."""
        return {"pattern": f"{self.prefix}.#", "max_inflight": self.rng.choice((1, 10))}

    def leave(self) -> dict[str, Any]:
        """A member closes its subscription."""
        return {"pick": self._pick()}

    drop = leave

    def get(self) -> dict[str, Any]:
        """A member asks for events."""
        return {"pick": self._pick(), "count": self.rng.choice((1, 1, 2, 4))}

    read = get

    def commit(self) -> dict[str, Any]:
        """A member of the log group commits, by itself or in a transaction."""
        return {"pick": self._pick(), "transaction": self.rng.random() < 0.3}

    def settle(self) -> dict[str, Any]:
        """A delivery is settled in one of the ways."""
        rng = self.rng
        how = rng.choice(
            ("ack",) * 8 + ("nack",) * 4 + ("nack_later",) * 3 + ("reject",) * 2 + ("extend",)
        )
        args: dict[str, Any] = {"pick": self._pick(), "how": how, "late": rng.random() < 0.1}
        if how == "nack_later":
            args["delay_s"] = self._seconds(0.0, 0.5, 2.0)
        if how == "extend":
            args["delay_s"] = rng.choice((None, 2.0))
        return args

    def settle_many(self) -> dict[str, Any]:
        """Several deliveries of a member are settled together."""
        how = self.rng.choice(("ack", "ack", "nack"))
        delay_s = self._seconds(0.5, 2.0) if how == "nack" and self.rng.random() < 0.5 else None
        return {"pick": self._pick(), "how": how, "delay_s": delay_s}

    def seal(self) -> dict[str, Any]:
        """The journal is sealed."""
        return {}

    def wait(self) -> dict[str, Any]:
        """Time passes."""
        seconds = self.rng.choice((0.15, 0.4, 1.1, 2.5, 5.0, 31.0))
        return {"seconds": min(seconds, 1.1) if self.quick else seconds}

    def flush(self) -> dict[str, Any]:
        """Every ack so far is made durable."""
        return {"client": self.rng.choice(("bus", "other"))}

    def close(self) -> dict[str, Any]:
        """A bus is closed and opened again."""
        return {"client": self.rng.choice(("bus", "other"))}

    def kill(self) -> dict[str, Any]:
        """The engine's process dies."""
        return {"flush": self.rng.random() < 0.5}

    restart = kill

    def cut(self) -> dict[str, Any]:
        """A connection breaks."""
        return {"client": self.rng.choice(("bus", "other"))}

    def die(self) -> dict[str, Any]:
        """A client vanishes with all its members."""
        return {"client": "other"}

    def create(self) -> dict[str, Any]:
        """A topic is made."""
        return {"topic": self.rng.choice(self.topics), "partitions": self.rng.choice((1, 2, 3))}

    grow = create

    def delete_topic(self) -> dict[str, Any]:
        """A topic is deleted."""
        return {"topic": self.rng.choice(self.topics), "how": self._how()}

    def configure(self) -> dict[str, Any]:
        """The retention of a topic is set, to more than a sequence takes."""
        return {
            "topic": self.rng.choice(self.topics),
            "retention_age_s": self.rng.choice((86400.0, 1e6)),
        }

    def reset(self) -> dict[str, Any]:
        """A group is sent to a place."""
        rng = self.rng
        return {
            "group": rng.choice(list(self.groups)[: rng.choice((2, 2, 3))]),
            "to": rng.choice(("earliest", "latest", 1, 3)),
            "topic": rng.choice((None, None, self.topics[0])),
            "how": self._how(),
        }

    def delete_group(self) -> dict[str, Any]:
        """A group is forgotten."""
        return {"group": self.rng.choice(list(self.groups)), "how": self._how()}

    def replay_letter(self) -> dict[str, Any]:
        """A dead letter goes back."""
        return {"pick": self._pick(), "wrong": self.rng.random() < 0.2}

    def purge(self) -> dict[str, Any]:
        """A dead letter leaves the list."""
        return {"pick": self._pick()}

    def dead_letter(self) -> dict[str, Any]:
        """An event that waits is made a dead letter by hand."""
        return {"pick": self._pick()}

    def route(self) -> dict[str, Any]:
        """The catalogue is changed and asked."""
        rng, p = self.rng, self.prefix
        return {
            "how": rng.choice(("put", "put", "put", "remove", "enable", "disable")),
            "pattern": rng.choice((f"{p}.a", f"{p}.*", f"{p}.#", f"{p}.#.a")),
            "destination": rng.choice(("x", "y")),
            "priority": rng.choice((0, 0, 5)),
            "topic": rng.choice(self.topics),
        }

    def schedule(self) -> dict[str, Any]:
        """A recurring event is declared."""
        self.number += 1
        return {"id": f"{self.prefix}-r", "topic": self.topics[1], "number": self.number,
                "every_s": self._seconds(2.0, 7.0)}  # fmt: skip

    def unschedule(self) -> dict[str, Any]:
        """It is removed."""
        return {"id": f"{self.prefix}-r"}

    def replay(self) -> dict[str, Any]:
        """What is stored is read again."""
        rng = self.rng
        return {
            "pattern": rng.choice((f"{self.prefix}.#", f"{self.prefix}.*", *self.topics)),
            "start": rng.choice((None, None, 1, 3)),
            "stop": rng.choice((None, None, 4)),
            "partition": rng.choice((None, None, None, 0)),
            "since_s": rng.choice((None, None, 3)),
            "batches": rng.random() < 0.3,
        }


def shrink(sequence: Sequence, fails: Callable[[Sequence], bool], tries: int = 400) -> Sequence:
    """The shortest sequence found that still fails, by leaving steps out.

    >>> long = Sequence(1, "s1", {}, tuple(Step(kind) for kind in "abcdefgh"))
    >>> short = shrink(long, lambda s: {"c", "g"} <= {step.kind for step in s.steps})
    >>> [step.kind for step in short.steps]
    ['c', 'g']
    """
    width = max(1, len(sequence.steps) // 2)
    while tries > 0:
        at, shorter = len(sequence.steps), False
        while at > 0 and tries > 0:
            at = max(0, at - width)
            steps = sequence.steps[:at] + sequence.steps[at + width :]
            tries -= 1
            candidate = replace(sequence, steps=steps)
            if steps and fails(candidate):
                sequence, shorter = candidate, True
        if width == 1 and not shorter:
            break
        width = max(1, width // 2)
    return sequence
