"""Direct consumers: a client that registers with subscriptions has a group of its own (row T4)."""

from __future__ import annotations

from penstock.core.catalogue import DIRECT
from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.core.window import MAX_HELD_EVENTS
from penstock.engines.engine import Subscribe
from penstock.model.event import Identity
from penstock.model.settings import Delivery
from penstock.wire.message import Hello


def direct_wish(hello: Hello, identity: Identity, settings: Delivery) -> Subscribe:
    """The subscription that a client's Hello stands for; it is known by the client's name."""
    spec = GroupSpec(
        tuple(hello.subscriptions),
        retry=Retry(settings.ladder_ms, settings.max_attempts),
        lease_s=settings.lease_s,
        start="latest",
    )
    inflight = hello.max_inflight or MAX_HELD_EVENTS  # the limits in force say what it gets
    return Subscribe(f"{DIRECT}{hello.client}", spec, hello.client, inflight, identity)
