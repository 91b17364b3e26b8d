"""Tenant usage by the hour, and rows kept as a table (S5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.pipelines.builtin.usage import usage
from penstock.pipelines.testkit import run_on_rows, stream_on_rows

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def event(tenant: str, minute: int, size: int, **more: Any) -> dict[str, Any]:
    at = NOON + timedelta(minutes=minute)
    return {
        "topic": f"orders.created.v1.{tenant}",
        "payload": b"x" * size,
        "append_time": at,
    } | more


ROWS = [
    event("acme", 0, 10), event("acme", 59, 20, key=b"key"), event("acme", 60, 1),
    event("globex", 5, 100), event("globex", 6, 0),
    event("acme", 7, 9) | {"topic": "usage.hours.v1.acme"},
]  # fmt: skip


def by_hour(rows: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[int, int]]:
    return {(row["tenant"], row["hour"].hour): (row["events"], row["bytes"]) for row in rows}


def test_events_and_bytes_are_counted_by_tenant_and_hour(spark: Any) -> None:
    """S5: payloads and keys count, its own rows do not, and without quotas nobody is over one."""
    rows = run_on_rows("usage", spark, ROWS)
    assert by_hour(rows) == {("acme", 12): (2, 33), ("acme", 13): (1, 1), ("globex", 12): (2, 100)}
    assert {row["topic"] for row in rows} == {"usage.hours.v1.acme", "usage.hours.v1.globex"}
    assert all(
        (row["used"], row["over"], row["quota_bytes"]) == (None, False, None) for row in rows
    )


def test_usage_is_measured_against_the_tenant_s_quota_or_everybody_s(spark: Any) -> None:
    """S5: the tighter of the two limits decides; zero allowed is over at the first event."""
    quotas = {"acme": {"events": 4, "bytes": 30}, "*": {"bytes": 1_000}, "nobody": {"events": 0}}
    rows = run_on_rows("usage", spark, [*ROWS, event("nobody", 1, 1)], {"quotas": quotas})
    found = {(row["tenant"], row["hour"].hour): (row["used"], row["over"]) for row in rows}
    assert found == {
        ("acme", 12): (1.1, True), ("acme", 13): (0.25, False), ("globex", 12): (0.1, False),
        ("nobody", 12): (float("inf"), True),
    }  # fmt: skip


def test_a_stream_writes_an_hour_once_when_it_is_over(spark: Any) -> None:
    """S5, S3: the same hours as a batch, each when the next has begun; the last stays open."""
    rows = stream_on_rows(usage, spark, [ROWS[:1], ROWS[1:3], ROWS[3:], [event("acme", 130, 1)]])
    assert by_hour(rows) == by_hour(run_on_rows(usage, spark, ROWS))


def test_a_table_gets_every_column_and_no_topic_to_publish_to(spark: Any) -> None:
    """S5: rows as they are; the table is cut by the day of `append_time`."""
    (row,) = run_on_rows("topic-to-table", spark, [event("acme", 0, 3, headers={"a": "b"})])
    assert row["source_topic"] == "orders.created.v1.acme"
    assert "topic" not in row
    assert (row["payload"], row["headers"], row["tenant"]) == (b"xxx", {"a": "b"}, "acme")
    assert str(row["append_time"])[:10] == "2026-03-01"
