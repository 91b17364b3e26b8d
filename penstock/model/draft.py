"""A draft: events of one topic on their way in, before they have offsets."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.model.batch import EventBatch
from penstock.model.column import Headers


class Draft:
    """Events of one topic on their way in: columns as lists, or a batch laid out already."""

    __slots__ = (
        "batch", "codec", "count", "deliver_at_us", "expires_us", "final", "headers", "keys",
        "partition", "payloads", "priority", "tenant", "times_us", "tokens", "topic",
    )  # fmt: skip

    def __init__(self, topic: str, payloads: Sequence[bytes], *, tenant: str, codec: str) -> None:
        self.topic = topic
        self.payloads = payloads
        self.count = len(payloads)
        self.tenant = tenant
        self.codec = codec
        self.batch: EventBatch | None = None
        self.final = False
        """Whether the batch was compressed, or found not worth compressing."""
        self.keys: Sequence[bytes | None] | None = None
        self.headers: Sequence[Headers | None] | None = None
        self.tokens: Sequence[bytes] | None = None
        self.times_us: Sequence[int] | None = None
        self.expires_us: Sequence[int] | None = None
        self.priority: Sequence[int] | None = None
        self.partition: int | None = None
        self.deliver_at_us: int | None = None

    def build(self) -> EventBatch:
        """The draft as columns."""
        return EventBatch.build(
            self.topic,
            self.payloads,
            keys=self.keys,
            headers=self.headers,
            tokens=self.tokens,
            times_us=self.times_us if self.times_us is not None else 0,
            expires_us=self.expires_us,
            priority=self.priority,
            tenant=self.tenant,
            codec=self.codec,
        )

    def subset(self, indices: Sequence[int]) -> Draft:
        """Just some of the events, in the order given."""
        source = self if self.payloads or self.batch is None else _as_lists(self.batch)
        payloads = [source.payloads[index] for index in indices]
        part = Draft(self.topic, payloads, tenant=self.tenant, codec=self.codec)
        part.partition, part.deliver_at_us = self.partition, self.deliver_at_us
        for name in ("keys", "headers", "tokens", "times_us", "expires_us", "priority"):
            column = getattr(source, name)
            if column is not None:
                setattr(part, name, [column[index] for index in indices])
        return part


def _as_lists(batch: EventBatch) -> Draft:
    draft = Draft(batch.topic, batch.payloads(), tenant=batch.tenant, codec=batch.codec)
    draft.keys, draft.headers = batch.keys(), batch.headers()
    for name, column in (
        ("times_us", batch.times), ("expires_us", batch.expires), ("priority", batch.priority)
    ):  # fmt: skip
        if column is not None:
            setattr(draft, name, column.tolist())
    if batch.times is None and batch.time_us:
        draft.times_us = [batch.time_us] * batch.count
    if batch.explicit_tokens:  # other tokens are made with the offsets
        draft.tokens = [batch.token(index) for index in range(batch.count)]
    return draft
