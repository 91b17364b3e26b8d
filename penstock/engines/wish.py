"""Wish: how a feed asks a broker to be opened, the first time and after a restart."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.remote_delivery import RemoteDelivery, RemoteQueue
from penstock.engines.remote_log import RemoteLog
from penstock.wire.message import MAX_HELD, Subscribe


def wish(feed: RemoteQueue | RemoteLog, held: Sequence[RemoteDelivery] = ()) -> Subscribe:
    """The message that opens a feed, with what of it is in our hands: nothing, the first time."""
    wanted = feed.wanted
    return Subscribe(
        feed.number, wanted.group, wanted.spec, wanted.member, wanted.max_inflight,
        [delivery.in_hand() for delivery in held[:MAX_HELD]],
        feed.in_hand() if isinstance(feed, RemoteLog) else [],
    )  # fmt: skip
