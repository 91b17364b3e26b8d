"""Wish: how a feed asks a broker to be opened, the first time and after a restart."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.link import MAX_FRAME_BYTES
from penstock.engines.remote_delivery import RemoteDelivery, RemoteQueue
from penstock.engines.remote_log import RemoteLog
from penstock.wire import message as say

HELD_BYTES = 512  # more than one takes in a message, whatever its topic is called


def wish(
    feed: RemoteQueue | RemoteLog,
    held: Sequence[RemoteDelivery] = (),
    frame_bytes: int = MAX_FRAME_BYTES,
) -> say.Subscribe:
    """The message that opens a feed, with what of it is in our hands: nothing, the first time.

    It names as many deliveries as fit, the earliest ones; the others come again.
    """
    wanted = feed.wanted
    most = min(say.MAX_HELD, frame_bytes // HELD_BYTES)
    return say.Subscribe(
        feed.number, wanted.group, wanted.spec, wanted.member, wanted.max_inflight,
        [delivery.in_hand() for delivery in held[:most]],
        feed.in_hand() if isinstance(feed, RemoteLog) else [],
    )  # fmt: skip
