"""A sink waits while its bus has no room, up to a deadline (S2, T11)."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.model.errors import Deferred, Dropped, Rejected, Throttled
from penstock.pipelines import sink

ROWS = pa.record_batch({"topic": ["a", "a"], "payload": [b"1", b"2"]})


class Busy:
    """A bus whose transactions are refused, one after another, until none is left."""

    repeated = False

    def __init__(self, *refusals: Rejected) -> None:
        self.refusals = list(refusals)
        self.keys: list[str] = []
        self.rows: list[int] = []

    def transaction(self, idempotency_key: str) -> Busy:
        self.keys.append(idempotency_key)
        self.rows.append(0)
        return self

    async def __aenter__(self) -> Busy:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.refusals:
            raise self.refusals.pop(0)

    def publish_many(self, topic: str, table: pa.Table, codec: str, partition: int | None) -> None:
        self.rows[-1] += table.num_rows


async def published(bus: Busy) -> bool:
    publisher = sink.BatchPublisher.__new__(sink.BatchPublisher)
    publisher.bus = bus  # type: ignore[assignment]
    batch = sink.Batch("query/1", None, "raw", 1 << 20, "spark.plans")
    return await publisher._publish(lambda: iter([ROWS]), batch)


async def test_rows_are_offered_again_under_the_same_key() -> None:
    """S2, T11."""
    bus = Busy(Deferred("full", retry_after_s=0.001), Throttled("slowly", retry_after_s=0.001))
    assert await published(bus)
    assert bus.keys == ["query/1"] * 3
    assert bus.rows == [2, 2, 2], "all of them, every time"


async def test_what_waiting_cannot_help_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2, T11: too large for the limit, or for longer than anybody would wait."""
    bus = Busy(Dropped("too large", retry_after_s=0.0))
    with pytest.raises(Dropped):
        await published(bus)
    monkeypatch.setattr(sink, "BUSY_S", 0.01)
    bus = Busy(*[Deferred("full", retry_after_s=0.002)] * 100)
    with pytest.raises(Deferred):
        await published(bus)
    assert 1 <= len(bus.keys) < 10
