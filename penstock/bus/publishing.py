"""From a caller's values to a draft: encoding, keys, headers, tokens, times, each checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.core.schedule import no_moment, parse_duration, parse_when
from penstock.engines.engine import Draft
from penstock.model.arrow import batch_of_columns
from penstock.model.codec import codecs, encode_many
from penstock.model.errors import (
    InvalidBatch,
    InvalidHeaders,
    InvalidInput,
    InvalidSchedule,
    over_limit,
)
from penstock.model.event import Identity
from penstock.model.settings import Settings
from penstock.model.token import parse_token, token_of_key
from penstock.model.topic import check_topic, tenant_of

Key = bytes | str | None
Times = datetime | int | None
When = datetime | str | float | int
MAX_PRIORITY = 9
LONGEST_S = 1_000 * 31_556_952  # what times in microseconds have room for many times over
LAST_US = 1 << 62


class Drafting:
    """Turns what callers pass to publish into drafts; knows the identity and the defaults."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._identity = identity

    def one(
        self,
        topic: str,
        value: Any,
        *,
        key: Key,
        headers: Mapping[str, str] | None,
        token: Any,
        idempotency_key: str | None,
        event_time: Times,
        expires_us: int | None,
        priority: int,
        codec: str | None,
        system: bool = False,
    ) -> Draft:
        """A draft of one event."""
        check_topic(topic, system=system)
        if codec is None:
            codec = "raw" if type(value) is bytes else self._settings.media.codec
        payload = codecs.get(codec).encode(value)
        draft = Draft(
            topic, [payload], tenant=tenant_of(topic) or self._identity.tenant, codec=codec
        )
        if key is not None:
            draft.keys = [self._key(key)]
        if headers:
            self._check_headers(headers)
            draft.headers = [headers]
        if token is not None or idempotency_key is not None:
            draft.tokens = [self._token(token, idempotency_key)]
        if event_time is not None:
            draft.times_us = [_time_us(event_time)]
        if expires_us is not None:
            draft.expires_us = [expires_us]
        if priority:
            draft.priority = [_priority(priority)]
        return draft

    def many(
        self,
        topic: str,
        values: Any,
        *,
        keys: Sequence[Key] | None,
        headers: Sequence[Mapping[str, str] | None] | None,
        tokens: Sequence[Any] | None,
        idempotency_keys: Sequence[str] | None,
        event_times: Sequence[Times] | None,
        expires_us: int | None,
        priorities: Sequence[int] | None,
        codec: str | None,
    ) -> Draft:
        """A draft of many events, from a list or from columns."""
        check_topic(topic)
        tenant = tenant_of(topic) or self._identity.tenant
        table = _as_table(values)
        if table is not None:
            return self._columns(topic, table, tenant, codec, keys, headers, tokens)
        if codec is None and set(map(type, values)) == {bytes}:
            codec, payloads = "raw", values
        else:
            codec = codec or self._settings.media.codec
            payloads = encode_many(codecs.get(codec), values)
        draft = Draft(topic, payloads, tenant=tenant, codec=codec)
        self._check_count(draft.count)
        if keys is not None:
            draft.keys = [None if key is None else self._key(key) for key in keys]
        if headers is not None:
            for each in headers:
                if each:
                    self._check_headers(each)
            draft.headers = headers
        if tokens is not None:
            draft.tokens = [parse_token(token) for token in tokens]
        elif idempotency_keys is not None:
            draft.tokens = [token_of_key(each) for each in idempotency_keys]
        if event_times is not None:
            draft.times_us = [0 if time is None else _time_us(time) for time in event_times]
        if expires_us is not None:
            draft.expires_us = [expires_us] * draft.count
        if priorities is not None and any(priorities):
            draft.priority = [_priority(each) for each in priorities]
        for name in ("keys", "headers", "tokens", "times_us", "priority"):
            column = getattr(draft, name)
            if column is not None and len(column) != draft.count:
                raise InvalidBatch(
                    f"{name} has {len(column)} values for {draft.count} events; give every column "
                    "the same length",
                    column=name,
                )
        return draft

    def _columns(
        self, topic: str, table: Any, tenant: str, codec: str | None, *lists: Sequence[Any] | None
    ) -> Draft:
        if any(each is not None for each in lists):
            raise InvalidBatch(
                "a table brings its own key and headers columns; pass no lists beside it"
            )
        batch = batch_of_columns(topic, table, tenant=tenant, codec=codec or "raw")
        self._check_count(batch.count)
        draft = Draft(topic, (), tenant=tenant, codec=batch.codec)
        draft.batch, draft.count = batch, batch.count
        return draft

    def _check_count(self, count: int) -> None:
        if count == 0:
            raise InvalidBatch("there is nothing to publish; a batch needs at least one event")
        if count > self._limits.max_batch_events:
            most, found = self._limits.max_batch_events, f"a batch of {count} events"
            raise over_limit(InvalidBatch, "max_batch_events", most, found, "Publish it in parts")

    def _key(self, key: bytes | str) -> bytes:
        raw = key.encode() if isinstance(key, str) else key
        if not isinstance(raw, bytes):
            raise InvalidInput(f"a key is bytes or text, not {type(key).__name__}", key=repr(key))
        if len(raw) > self._limits.max_key_bytes:
            most, found = self._limits.max_key_bytes, f"a key of {len(raw)} bytes"
            raise over_limit(InvalidInput, "max_key_bytes", most, found, "Shorten it")
        return raw

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        if not isinstance(headers, Mapping):
            raise InvalidHeaders(
                f"headers are a mapping of text to text, not {type(headers).__name__}"
            )
        size = 0
        for name, text in headers.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InvalidHeaders(
                    f"header {name!r} is {type(text).__name__}, not text; headers map str to str",
                    header=repr(name),
                )
            try:
                size += len(name.encode()) + len(text.encode())
            except UnicodeEncodeError:
                raise InvalidHeaders(
                    f"header {name!r} holds half a character (a lone surrogate); headers are UTF-8",
                    header=repr(name),
                ) from None
        for limit, value, found in (
            ("max_headers", len(headers), f"an event with {len(headers)} headers"),
            ("max_headers_bytes", size, f"an event with {size} bytes of headers"),
        ):
            if value > getattr(self._limits, limit):
                most, advice = getattr(self._limits, limit), "Put the rest into the payload"
                raise over_limit(InvalidHeaders, limit, most, found, advice)

    @staticmethod
    def _token(token: Any, idempotency_key: str | None) -> bytes:
        if token is not None and idempotency_key is not None:
            raise InvalidInput("give a token or an idempotency key, not both")
        return parse_token(token) if token is not None else token_of_key(str(idempotency_key))


def _time_us(time: datetime | int) -> int:
    if not isinstance(time, int):
        return parse_when(time)
    if not -LAST_US < time < LAST_US:
        raise InvalidInput(f"an event time in microseconds lies within 64 bits, not {time}")
    return time


def _priority(priority: int) -> int:
    if not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidInput(
            f"a priority is 0 to {MAX_PRIORITY}, not {priority!r}", priority=priority
        )
    return priority


def _as_table(values: Any) -> Any:
    """An Arrow table when the values are one, or a DataFrame; None for plain sequences."""
    if isinstance(values, list | tuple):
        return None
    module = type(values).__module__.partition(".")[0]
    if module == "pyarrow":
        return values
    if module == "polars":
        return values.to_arrow()
    if module == "pandas":
        import pyarrow as pa

        return pa.Table.from_pandas(values, preserve_index=False)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return None
    raise InvalidBatch(
        f"{type(values).__name__} is no batch; pass a list of values, an Arrow table or a DataFrame"
    )


def when_us(value: When, now_us: int) -> int:
    """A point in time: a datetime, ISO text, epoch seconds, or how long ago ("2h")."""
    if isinstance(value, str):
        with contextlib.suppress(InvalidSchedule):
            return now_us - parse_duration(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    try:
        return parse_when(value)
    except InvalidSchedule as error:
        raise no_moment(value, error) from None


def due_us(delay_s: float | None, deliver_at: datetime | str | float | None, now_us: int) -> int:
    """When a delayed event is due; one of the two says it."""
    if delay_s is not None and deliver_at is not None:
        raise InvalidInput("give delay_s or deliver_at, not both")
    if deliver_at is not None:
        return parse_when(deliver_at)
    assert delay_s is not None
    if delay_s < 0:
        raise InvalidInput(f"delay_s is not negative, got {delay_s}", delay_s=delay_s)
    return now_us + span_us("delay_s", delay_s)


def span_us(name: str, seconds: float) -> int:
    """Seconds from now as microseconds; not for ever, and not a number that is none.

    >>> span_us("ttl_s", 1.5)
    1500000
    """
    if not seconds <= LONGEST_S:
        raise InvalidInput(f"{name} is at most {LONGEST_S} (1,000 years), not {seconds}")
    return round(seconds * 1e6)
