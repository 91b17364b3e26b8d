"""What an engine may or may not be able to do: the names, what each promises, and who declares it.

Every engine passes the mandatory core of `penstock.testing.conformance`. Beyond it an engine
declares capabilities in `bus.capabilities`; a call that needs one it has not declared raises
`Unsupported`. docs/reference/capabilities.md is printed from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

CAPABILITIES: dict[str, str] = {
    "durable": "What was acknowledged is still there after the engine stops and starts.",
    "transactions": "Publishes to several topics, acks and commits happen together or not at all.",
    "delayed": "An event can be published now and delivered at a later time.",
    "schedules": "An event can be published again and again, by cron expression or interval.",
    "ttl": "An event can expire: after its time a queue group gets it as a dead letter and no more. "
    "Logs and replays still have it.",
    "priority": 'Waiting events of higher priority are delivered first, but for `order="key"` and '
    "log subscriptions.",
    "key-order": "Events of one key are delivered one at a time and in order.",
    "single-active": "One member of a group receives everything; another takes over when it leaves.",
    "filters": "A group can receive only the events whose headers match.",
    "group-reset": "A group can be moved to another position.",
    "idempotency": "Publishing again under the same idempotency key or token stores nothing new.",
    "request-reply": "A publish can wait for the answer of a handler.",
    "dead-letter-replay": "Dead letters can be sent back to their group, made by hand and purged.",
    "grow-partitions": "A topic can get more partitions while it is in use.",
    "write-once": "A topic can refuse every deletion of events inside its retention.",
    "audit": "What operators did is kept in a hash chain that can be queried and verified.",
    "routes": "A catalogue of routes says which destinations a topic goes to.",
    "time-replay": "Reading can start and stop at a point in time.",
}
"""Every declarable capability, with the sentence that says what it promises."""


def matrix(engines: Mapping[str, AbstractSet[str]]) -> str:
    """Print which engine declares what, as a Markdown table.

    >>> print(matrix({"mem:": {"ttl"}}).splitlines()[-1])
    | `time-replay` | Reading can start and stop at a point in time. | no |
    """
    names = list(engines)
    lines = [
        "| capability | what it promises | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for capability, promise in CAPABILITIES.items():
        marks = ["yes" if capability in engines[name] else "no" for name in names]
        lines.append(f"| `{capability}` | {promise} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def page(engines: Mapping[str, AbstractSet[str]]) -> str:
    """The whole of docs/reference/capabilities.md."""
    return f"""# Capabilities

Every engine does everything in the mandatory core of the
[conformance suite](conformance.md). What only some engines can do is a capability: an engine
lists those it has in `bus.capabilities`, and a call that needs one it does not have raises
`Unsupported` (code `refused.unsupported`) and changes nothing.

{matrix(engines)}
"""
