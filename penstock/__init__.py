# Layers, lowest first; nothing lower imports anything higher (tests/test_tidy.py proves it):
#   model     vocabulary: topics, events, batches, tokens, errors, settings, codecs       pure
#   core      machines without I/O: routing, delivery, schedule, admission, dedup, audit  pure
#   log       journal, segments, manifest, snapshots, recovery: files through one Disk
#   wire      the protocol of the broker: frames, messages, how they travel              pure
#   transport sockets without a protocol: the TCP send buffer, ZeroMQ on the loop
#   engines   memory, embedded, follower, broker: one shape, one conformance suite
#   bus       the public API around an engine
#   server    the daemon: sessions, ZeroMQ, TCP, HTTP around the embedded engine
#   pipelines Spark: source, sink, tables, pipelines and how they run
#   testing   simulator, simulated disk and loop, conformance suite
#   bench     the benchmark harness and its peers
#   cli       the `penstock` command
"""Penstock: a durable event bus for Python.

>>> import asyncio, penstock
>>> async def main() -> None:
...     async with penstock.connect("mem:") as bus:
...         await bus.publish("orders.created", {"id": 7})
...         async for event in bus.replay("orders.created"):
...             print(event.value())
>>> asyncio.run(main())
{'id': 7}
"""

import importlib
import typing

from penstock.model import errors
from penstock.model.errors import *  # noqa: F403 - the whole tree, as its own __all__ lists it

if typing.TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.bus.connect import connect
    from penstock.bus.handler import Reject, RetryLater
    from penstock.bus.subscription import Subscription
    from penstock.bus.sync import SyncBus, connect_sync
    from penstock.bus.transaction import Transaction
    from penstock.core.audit import AuditRecord
    from penstock.core.retry import Retry
    from penstock.core.routes import Route
    from penstock.core.state import DeadLetter
    from penstock.engines.requests import GroupInfo, TopicInfo
    from penstock.model.batch import EventBatch
    from penstock.model.event import Event, Identity, MessageId, Receipt
    from penstock.model.settings import Settings
    from penstock.pipelines.pipeline import pipeline

__version__ = "0.1.0"

# Loaded on first use: the command line answers `--version` and `--help` without loading Arrow.
_HOMES = {
    "AuditRecord": "penstock.core.audit",
    "Bus": "penstock.bus.bus",
    "DeadLetter": "penstock.core.state",
    "Event": "penstock.model.event",
    "EventBatch": "penstock.model.batch",
    "GroupInfo": "penstock.engines.requests",
    "Identity": "penstock.model.event",
    "MessageId": "penstock.model.event",
    "Receipt": "penstock.model.event",
    "Reject": "penstock.bus.handler",
    "Retry": "penstock.core.retry",
    "RetryLater": "penstock.bus.handler",
    "Route": "penstock.core.routes",
    "Settings": "penstock.model.settings",
    "Subscription": "penstock.bus.subscription",
    "SyncBus": "penstock.bus.sync",
    "TopicInfo": "penstock.engines.requests",
    "Transaction": "penstock.bus.transaction",
    "connect": "penstock.bus.connect",
    "connect_sync": "penstock.bus.sync",
    "pipeline": "penstock.pipelines.pipeline",
}

__all__ = [
    "AuditRecord",
    "Bus",
    "DeadLetter",
    "Event",
    "EventBatch",
    "GroupInfo",
    "Identity",
    "MessageId",
    "Receipt",
    "Reject",
    "Retry",
    "RetryLater",
    "Route",
    "Settings",
    "Subscription",
    "SyncBus",
    "TopicInfo",
    "Transaction",
    "connect",
    "connect_sync",
    "errors",
    "pipeline",
    *errors.__all__,
]


def __getattr__(name: str) -> typing.Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
