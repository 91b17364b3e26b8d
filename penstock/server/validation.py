"""Checks of messages from clients, before the engine sees their values.

The engine trusts its callers: a number that does not fit its column would stop the writer for all
clients, and a lease that is not a number would stop its timers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.core.entry import MAX_PATTERNS
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine import ReadRange, Request
from penstock.engines.engine import Subscribe as EngineSubscribe
from penstock.engines.requests import ExportAudit, PutSchedule
from penstock.model.batch import EventBatch, check_columns
from penstock.model.draft import Draft
from penstock.model.errors import (
    AccessDenied,
    InvalidBatch,
    InvalidHeaders,
    InvalidInput,
    over_limit,
)
from penstock.model.event import Identity
from penstock.model.parameter import MAX_NAME_CHARACTERS, checked, text
from penstock.model.role import ADMIN
from penstock.model.settings import Limits
from penstock.model.token import TOKEN_BYTES
from penstock.model.topic import check_topic, is_system, is_wildcard, tenant_of
from penstock.server.admin.gate import Tenancy
from penstock.wire.frame import Bytes
from penstock.wire.message import MAX_LOG_HELD, DraftMeta, Hello, Subscribe

REPLY_PREFIX = "_inbox."
MAX_CODEC_BYTES = 255  # a batch has one byte for its length
MAX_HEARTBEAT_S = 3_600.0  # as in `client.heartbeat_s`: a silent client is dropped some time
INT64 = (-(1 << 63), (1 << 63) - 1)
RANGES = {"times_us": INT64, "expires_us": INT64, "priority": (0, 255)}
"""The lowest and highest value of each column of numbers."""


def check_hello(hello: Hello) -> None:
    """Raise InvalidInput when a Hello has values that no client can have."""
    text("client", hello.client, least=1, most=MAX_NAME_CHARACTERS)
    if len(hello.subscriptions) > MAX_PATTERNS or not 0 < hello.heartbeat_s <= MAX_HEARTBEAT_S:
        raise InvalidInput(
            f"a client has at most {MAX_PATTERNS} subscriptions and a heartbeat within "
            f"{MAX_HEARTBEAT_S:g} s, not {len(hello.subscriptions)} and {hello.heartbeat_s} s"
        )
    if hello.max_inflight < 0:  # the client would be accepted, and never get an event
        raise InvalidInput(f"max_inflight is 0 or more, not {hello.max_inflight}")


def check_subscribe(request: Subscribe) -> None:
    """Raise InvalidInput when a subscription asks for something that no group can do."""
    if request.group.startswith("_") and not request.spec.ephemeral:
        raise InvalidInput(f"{request.group!r} is no group name: '_' is for the bus itself")
    _check_log_held(request)


def _check_log_held(request: Subscribe) -> None:
    held = request.log_held
    if held and request.spec.mode != "log":
        raise InvalidInput(f"log_held is for mode 'log', not {request.spec.mode!r}; use held")
    places = {(each.topic, each.partition) for each in held}
    if len(held) > MAX_LOG_HELD or len(places) < len(held):
        raise InvalidInput(
            f"log_held names at most {MAX_LOG_HELD} partitions, each once; not {len(held)}, "
            f"{len(places)} of them different"
        )
    for each in held:
        numbers = (each.partition, each.epoch, each.start, each.stop)
        if min(numbers) < 0 or max(numbers) > INT64[1] or each.start > each.stop:
            raise InvalidInput(
                "log_held has a partition, a start, a stop not before it and an epoch, all from 0 to "
                f"{INT64[1]}; not {each.partition}, {each.start}, {each.stop}, {each.epoch}"
            )


def to_engine(request: Subscribe, identity: Identity) -> EngineSubscribe:
    """A client's subscription, checked, as the engine takes it."""
    handed = {
        (each.topic, each.partition): ReadRange(each.start, each.stop, each.epoch)
        for each in request.log_held
    }
    return checked(
        EngineSubscribe(
            request.group, request.spec, request.member, request.max_inflight, identity, handed
        )
    )


def check_transaction_key(key: bytes) -> None:
    """Raise InvalidInput when the key of a transaction does not fit the table of known keys."""
    if len(key) != TOKEN_BYTES:
        raise InvalidInput(
            f"the key of a transaction has {TOKEN_BYTES} bytes, not {len(key)}; nothing happened. "
            "Hash a longer one to that length",
            key_bytes=len(key),
        )


def check_request(request: Request) -> None:
    """Raise InvalidInput when an administrative request would harm the broker later."""
    if isinstance(request, PutSchedule):
        _check_codec(request.codec)
    if isinstance(request, ExportAudit) and not Path(request.folder).is_absolute():
        raise InvalidInput(
            f"{request.folder!r} would be a folder below the broker's own directory; nothing was "
            "written. A broker exports to its own disk: give an absolute path there",
            folder=request.folder,
        )


def _check_codec(codec: str) -> None:
    # The head of a batch holds it as ASCII: another name could be written, but not read back.
    if not 0 < len(codec) <= MAX_CODEC_BYTES or not codec.isascii() or not codec.isprintable():
        raise InvalidInput(f"a codec's name is 1 to {MAX_CODEC_BYTES} printable ASCII characters")


def owner(meta: DraftMeta, identity: Identity) -> str:
    """The tenant that a draft counts for; raises when the client may not publish for it."""
    check_topic(meta.topic, system=is_system(meta.topic))
    check_tenant(identity, meta.topic)
    return tenant_of(meta.topic) or identity.tenant


def to_draft(meta: DraftMeta, parts: Sequence[Bytes], identity: Identity, limits: Limits) -> Draft:
    """The draft in a message and its part, checked; raises the errors of a local publish."""
    tenant = owner(meta, identity)
    _check_codec(meta.codec)
    if meta.part < 0:
        return _from_lists(meta, tenant, limits)
    if meta.part >= len(parts):
        raise InvalidBatch(f"the frame has {len(parts)} parts, the draft names part {meta.part}")
    batch = EventBatch.decode(parts[meta.part], limit_bytes=limits.max_batch_bytes)
    _check_batch(batch, meta, limits)
    draft = Draft(meta.topic, (), tenant=tenant, codec=meta.codec)
    batch.tenant, batch.codec = tenant, meta.codec
    draft.count, draft.batch, draft.partition = batch.count, batch, meta.partition
    draft.deliver_at_us = meta.deliver_at_us
    if batch.explicit_tokens:
        draft.tokens = [batch.token(index) for index in range(batch.count)]
    return draft


def check_tenant(identity: Identity, topic: str) -> None:
    """A tenant publishes to its own topics and to topics without a tenant."""
    if ADMIN in identity.roles:
        return
    owner = tenant_of(topic)
    if owner is not None and owner != identity.tenant:
        raise AccessDenied(
            f"topic {topic!r} belongs to tenant {owner!r}, you are {identity.tenant!r}; nothing was "
            "stored. Use a token of that tenant",
            topic=topic,
        )
    if is_system(topic) and not topic.startswith(REPLY_PREFIX):
        raise AccessDenied(
            f"{topic!r} is the broker's own; only an admin may touch it", topic=topic
        )


def check_read(engine: EmbeddedEngine, identity: Identity, patterns: Sequence[str]) -> None:
    """A tenant reads its own topics and those without a tenant; an admin reads all."""
    if ADMIN in identity.roles:
        return
    own = Tenancy(engine, identity.tenant)
    for pattern in patterns:
        inbox = pattern.startswith(REPLY_PREFIX)
        if (
            not inbox
            and not own.pattern(pattern)
            and (is_wildcard(pattern) or not own.open_topic(pattern))
        ):
            raise AccessDenied(
                f"{pattern!r} can select topics of other tenants; name the version and tenant, "
                f"as in orders.created.v1.{own.tenant}, or ask for a token with role admin",
                pattern=pattern,
            )


def check_join(engine: EmbeddedEngine, identity: Identity, group: str) -> None:
    """A tenant joins only groups whose topics it may read: a member gets any event of its group.

    Events that a route leads to the group are not checked: an operator made the route on purpose.
    """
    known = engine.state.groups.get(group)
    if known is None or ADMIN in identity.roles:
        return
    try:
        check_read(engine, identity, [*known.spec.patterns, *engine.groups.topics_of(group)])
    except AccessDenied:
        raise AccessDenied(
            f"group {group!r} is there already, and reads what is not {identity.tenant!r}'s; you were "
            "not let in. Take another name: one that begins with your tenant's meets nobody's",
            group=group,
        ) from None


def _from_lists(meta: DraftMeta, tenant: str, limits: Limits) -> Draft:
    draft = Draft(meta.topic, meta.payloads, tenant=tenant, codec=meta.codec)
    if not draft.count:
        raise InvalidInput("a draft has at least one event; nothing was stored")
    _check_count(draft.count, limits)
    for name in ("keys", "headers", "tokens", "times_us", "expires_us", "priority"):
        column = getattr(meta, name)
        if column is not None and len(column) != draft.count:
            raise InvalidBatch(
                f"column {name!r} has {len(column)} values for {draft.count} payloads", column=name
            )
        low, high = RANGES.get(name, (0, 0))
        if column and name in RANGES and not low <= min(column) <= max(column) <= high:
            raise InvalidBatch(f"column {name!r} holds {low} to {high}", column=name)
        setattr(draft, name, column)
    if draft.tokens is not None and any(len(token) != 16 for token in draft.tokens):
        raise InvalidBatch("every token has 16 bytes", column="tokens")
    for key in draft.keys or ():
        if key is not None and len(key) > limits.max_key_bytes:
            raise _long_key(len(key), limits)
    for headers in draft.headers or ():
        if headers:
            size = sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())
            _check_headers(len(headers), size, limits)
    draft.partition, draft.deliver_at_us = meta.partition, meta.deliver_at_us
    return draft


def _check_batch(batch: EventBatch, meta: DraftMeta, limits: Limits) -> None:
    if batch.topic != meta.topic:
        raise InvalidBatch(f"a batch of {batch.topic!r} came with a draft for {meta.topic!r}")
    if batch.side_bytes or batch.append_times is not None:
        raise InvalidBatch("a batch to publish has neither side files nor append times")
    _check_count(batch.count, limits)
    check_columns(batch)
    if batch.key_column is not None and batch.key_column.largest() > limits.max_key_bytes:
        raise _long_key(batch.key_column.largest(), limits)
    column = batch.header_column
    if column is not None:
        ends = np.frombuffer(column.offsets, dtype=np.int32, count=batch.count + 1)
        sizes = sum(
            np.diff(np.frombuffer(part.offsets, dtype=np.int32, count=part.count + 1)[ends])
            for part in (column.keys, column.values)
        )
        _check_headers(int(np.diff(ends).max()), int(np.max(sizes)), limits)


def _check_count(count: int, limits: Limits) -> None:
    if count > limits.max_batch_events:
        most, found = limits.max_batch_events, f"a batch of {count} events"
        raise over_limit(InvalidBatch, "max_batch_events", most, found, "Publish it in parts")


def _check_headers(count: int, size: int, limits: Limits) -> None:
    for name, value, found in (
        ("max_headers", count, f"an event with {count} headers"),
        ("max_headers_bytes", size, f"an event with {size} bytes of headers"),
    ):
        if value > getattr(limits, name):
            most, advice = getattr(limits, name), "Put the rest into the payload"
            raise over_limit(InvalidHeaders, name, most, found, advice)


def _long_key(size: int, limits: Limits) -> InvalidInput:
    most, found = limits.max_key_bytes, f"a key of {size} bytes"
    return over_limit(InvalidInput, "max_key_bytes", most, found, "Shorten it")
