"""From a caller's values to a draft: encoding, keys, headers, tokens, times, each checked once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, TypedDict

import numpy as np

from penstock.model.arrow import batch_of_columns
from penstock.model.codec import codecs, encode_many
from penstock.model.draft import Draft
from penstock.model.errors import (
    InvalidBatch,
    InvalidHeaders,
    InvalidInput,
    InvalidSchedule,
    over_limit,
)
from penstock.model.event import Identity
from penstock.model.parameter import (
    MAX_ITEMS,
    MAX_NAME_CHARACTERS,
    Moment,
    Seconds,
    count,
    encodable,
    microseconds,
    moment_us,
    refused,
    text,
)
from penstock.model.settings import Settings
from penstock.model.token import parse_token, token_of_key
from penstock.model.topic import check_topic, tenant_of

Key = bytes | str
Token = bytes | str | uuid.UUID


class PublishOptions(TypedDict, total=False):
    """The options of `publish`, without those of a delay."""

    key: Key | None
    headers: Mapping[str, str] | None
    token: Token | None
    idempotency_key: str | None
    event_time: Moment | None
    ttl_s: Seconds | None
    priority: int
    codec: str | None
    partition: int | None


class PublishManyOptions(TypedDict, total=False):
    """The options of `publish_many`, without those of a delay."""

    keys: Sequence[Key | None] | None
    headers: Sequence[Mapping[str, str] | None] | None
    tokens: Sequence[Token] | None
    idempotency_keys: Sequence[str] | None
    event_times: Sequence[Moment | None] | None
    ttl_s: Seconds | None
    priorities: Sequence[int] | None
    codec: str | None
    partition: int | None


MAX_PRIORITY = 9
MAX_PARTITION = (1 << 31) - 1
MAX_KEY_CHARACTERS = 1 << 20  # of an idempotency key: it is hashed, never stored
MIN_TTL_S = 1e-6


class DraftBuilder:
    """Makes drafts from the arguments of publish, with the bus's identity and defaults."""

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._identity = identity

    def one(
        self,
        topic: str,
        value: Any,
        *,
        key: Key | None = None,
        headers: Mapping[str, str] | None = None,
        token: Token | None = None,
        idempotency_key: str | None = None,
        event_time: Moment | None = None,
        expires_us: int | None = None,
        priority: int = 0,
        codec: str | None = None,
        partition: int | None = None,
        system: bool = False,
    ) -> Draft:
        """A draft of one event."""
        check_topic(topic, system=system)
        if codec is None:
            codec = "raw" if type(value) is bytes else self._settings.media.codec
        elif type(codec) is not str:
            codec = text("codec", codec, least=1, most=MAX_NAME_CHARACTERS)
        payload = codecs.get(codec).encode(value)
        draft = Draft(
            topic, [payload], tenant=tenant_of(topic) or self._identity.tenant, codec=codec
        )
        if key is not None:
            draft.keys = [self._key("key", key)]
        if headers is not None:
            self.check_headers(headers)
            draft.headers = [headers] if headers else None
        if token is not None or idempotency_key is not None:
            if token is not None and idempotency_key is not None:
                raise InvalidInput("give a token or an idempotency key, not both")
            draft.tokens = [
                key_token("idempotency_key", idempotency_key)
                if token is None
                else parse_token(token)
            ]
        if event_time is not None:
            draft.times_us = [moment_us("event_time", event_time)]
        if expires_us is not None:
            draft.expires_us = [expires_us]
        if priority != 0 or type(priority) is not int:
            draft.priority = [count("priority", priority, most=MAX_PRIORITY)]
        if partition is not None:
            draft.partition = count("partition", partition, most=MAX_PARTITION)
        return draft

    def many(
        self,
        topic: str,
        values: Any,
        *,
        keys: Sequence[Key | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        tokens: Sequence[Token] | None = None,
        idempotency_keys: Sequence[str] | None = None,
        event_times: Sequence[Moment | None] | None = None,
        expires_us: int | None = None,
        priorities: Sequence[int] | None = None,
        codec: str | None = None,
        partition: int | None = None,
    ) -> Draft:
        """A draft of many events, from a list or from columns."""
        check_topic(topic)
        if codec is not None and type(codec) is not str:
            codec = text("codec", codec, least=1, most=MAX_NAME_CHARACTERS)
        if tokens is not None and idempotency_keys is not None:
            raise InvalidInput("give tokens or idempotency keys, not both")
        tenant = tenant_of(topic) or self._identity.tenant
        table = _as_table(values)
        if table is not None:
            draft = self._table(topic, table, tenant, codec, keys, headers)
        else:
            draft = self._list(topic, values, tenant, codec, keys, headers)
        number = draft.count
        if tokens is not None:
            draft.tokens = [
                parse_token(each, "tokens") for each in column("tokens", tokens, number)
            ]
        elif idempotency_keys is not None:
            own = column("idempotency_keys", idempotency_keys, number)
            draft.tokens = [key_token("idempotency_keys", each) for each in own]
        if event_times is not None:
            now_us = time.time_ns() // 1_000
            draft.times_us = [
                now_us if each is None else moment_us("event_times", each)
                for each in column("event_times", event_times, number)
            ]
        if expires_us is not None:
            draft.expires_us = [expires_us] * number
        if priorities is not None:
            draft.priority = _priorities(column("priorities", priorities, number))
        if partition is not None:
            draft.partition = count("partition", partition, most=MAX_PARTITION)
        if draft.batch is not None:
            _complete(draft)
        return draft

    def _list(
        self,
        topic: str,
        values: Any,
        tenant: str,
        codec: str | None,
        keys: Sequence[Key | None] | None,
        headers: Sequence[Mapping[str, str] | None] | None,
    ) -> Draft:
        if codec is None and set(map(type, values)) == {bytes}:
            codec, payloads = "raw", values
        else:
            codec = codec or self._settings.media.codec
            payloads = encode_many(codecs.get(codec), values)
        draft = Draft(topic, payloads, tenant=tenant, codec=codec)
        self._check_count(draft.count)
        if keys is not None:
            draft.keys = self._keys(column("keys", keys, draft.count))
        if headers is not None:
            headers = column("headers", headers, draft.count)
            for each in headers:
                if each is not None:
                    self.check_headers(each)
            draft.headers = headers
        return draft

    def _table(
        self, topic: str, table: Any, tenant: str, codec: str | None, *lists: Sequence[Any] | None
    ) -> Draft:
        if any(each is not None for each in lists):
            raise InvalidBatch(
                "a table brings its own key and headers columns; pass no lists of them beside it"
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

    def _keys(self, keys: Sequence[Key | None]) -> Sequence[bytes | None]:
        kinds = set(map(type, keys))
        try:
            plain: Any = keys if kinds == {bytes} else None
            if kinds == {str}:
                plain = [key.encode() for key in keys]  # type: ignore[union-attr]
            if plain and max(map(len, plain)) <= self._limits.max_key_bytes:
                return plain  # type: ignore[no-any-return]
        except UnicodeEncodeError:
            pass  # which one it is, is found below
        return [None if key is None else self._key("keys", key) for key in keys]

    def _key(self, parameter: str, key: bytes | str) -> bytes:
        if isinstance(key, str) and encodable(key):
            raw = key.encode()
        elif isinstance(key, bytes | bytearray | memoryview):
            raw = bytes(key)
        else:
            raise refused(parameter, "bytes, or text that UTF-8 can hold", key)
        if len(raw) > self._limits.max_key_bytes:
            most, found = self._limits.max_key_bytes, f"a key of {len(raw)} bytes"
            raise over_limit(InvalidInput, "max_key_bytes", most, found, "Shorten it")
        return raw

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Raise InvalidHeaders unless these map text to text, within the limits."""
        if not isinstance(headers, Mapping):
            raise refused("headers", "a mapping of text to text", headers, InvalidHeaders)
        size = 0
        for name, each in headers.items():
            if not isinstance(name, str) or not isinstance(each, str):
                raise refused("headers", "a mapping of text to text", headers, InvalidHeaders)
            try:
                size += len(name.encode()) + len(each.encode())
            except UnicodeEncodeError:
                half = "text that UTF-8 can hold, without half a character"
                raise refused("headers", half, name, InvalidHeaders) from None
        for limit, value, found in (
            ("max_headers", len(headers), f"an event with {len(headers)} headers"),
            ("max_headers_bytes", size, f"an event with {size} bytes of headers"),
        ):
            if value > getattr(self._limits, limit):
                most, advice = getattr(self._limits, limit), "Put the rest into the payload"
                raise over_limit(InvalidHeaders, limit, most, found, advice)


def key_token(parameter: str, key: Any) -> bytes:
    """The token of an idempotency key."""
    return token_of_key(text(parameter, key, least=1, most=MAX_KEY_CHARACTERS))


def column(parameter: str, values: Any, number: int) -> Sequence[Any]:
    """One value for each event of a list."""
    if not isinstance(values, list | tuple):
        if not isinstance(values, Iterable) or isinstance(
            values, str | bytes | bytearray | Mapping | Set
        ):
            raise refused(parameter, "a list with one value for each event", values, InvalidBatch)
        values = list(islice(values, MAX_ITEMS + 1))
    if len(values) != number:
        raise InvalidBatch(
            f"{parameter} has {len(values)} values for {number} events; give every column the same "
            "length",
            column=parameter,
        )
    return values  # type: ignore[no-any-return]


def _priorities(values: Sequence[int]) -> Sequence[int] | None:
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_PRIORITY:
        values = [count("priorities", each, most=MAX_PRIORITY) for each in values]
    return values if any(values) else None


def _complete(draft: Draft) -> None:
    """Put the columns that were given beside a table into its batch."""
    batch = draft.batch
    assert batch is not None
    if draft.times_us is not None:
        if batch.times is not None:
            raise InvalidBatch("the table has an event_time column; pass no event_times beside it")
        batch.times = np.asarray(draft.times_us, dtype=np.int64)
        batch.time_us = int(batch.times[0])
    if draft.expires_us is not None:
        batch.expires = np.asarray(draft.expires_us, dtype=np.int64)
    if draft.priority is not None:
        batch.priority = np.asarray(draft.priority, dtype=np.uint8)
    if draft.tokens is not None:
        batch.tokens = b"".join(draft.tokens)
        batch.explicit_tokens, batch.token_base = True, draft.tokens[0]


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
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return None
    raise InvalidBatch(
        f"{type(values).__name__} is no batch; pass a list of values, an Arrow table or a DataFrame",
        parameter="values",
    )


def due_us(delay_s: Seconds | None, deliver_at: Moment | None, now_us: int) -> int:
    """When a delayed event is due; at most one of the two options is set."""
    if delay_s is not None and deliver_at is not None:
        raise InvalidInput("give delay_s or deliver_at, not both")
    if deliver_at is None:
        return now_us + microseconds("delay_s", delay_s, kind=InvalidSchedule)
    at_us = moment_us("deliver_at", deliver_at, kind=InvalidSchedule)
    if at_us < 0:
        raise refused("deliver_at", "a time after 1970", deliver_at, InvalidSchedule)
    return at_us
