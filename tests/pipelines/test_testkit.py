"""The test kit: rows as the source gives them, pipelines run on them in memory (S6)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock.model.errors import InvalidInput, NotFound
from penstock.pipelines.columns import EVENT_COLUMNS
from penstock.pipelines.pipeline import Input, Pipeline
from penstock.pipelines.rows import timely
from penstock.pipelines.testkit import frame, run_on_rows, stream_on_rows


def test_rows_have_every_column_of_the_source(spark: Any) -> None:
    rows = frame(spark, [{"payload": {"n": 1}}, {"payload": "?"}], schema="n INT", late_after="1m")
    assert rows.columns == [*EVENT_COLUMNS, "value", "fault", "late"]
    first, second = rows.collect()
    assert (first["offset"], first["value"]["n"], first["fault"], first["late"]) == (0, 1, None, False)  # fmt: skip
    assert (second["offset"], second["value"]) == (1, None)
    assert "not a JSON object" in second["fault"]
    with pytest.raises(InvalidInput, match="no column 'subject'"):
        frame(spark, [{"subject": "x"}])


def test_times_are_taken_as_json_writes_them(spark: Any) -> None:
    """F4: in a file of rows a time is a text, or seconds since 1970."""
    rows = frame(
        spark,
        [
            {"event_time": "2026-01-02T03:04:05Z", "append_time": "2026-01-02T05:04:05+02:00"},
            {"event_time": 1767323045},
            {"event_time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)},
        ],
    ).selectExpr("CAST(event_time AS STRING) AS event", "CAST(append_time AS STRING) AS appended")
    found = rows.collect()
    assert {row.event for row in found} == {"2026-01-02 03:04:05"}
    assert found[0].appended == "2026-01-02 03:04:05"


def test_a_row_with_an_event_time_alone_is_not_from_the_future(spark: Any) -> None:
    """F4: `timely` left every such row out, and a test of a pipeline with windows gave nothing."""

    def counted(events: Any) -> Any:
        return timely(events, "10m").groupBy("tenant").count()

    made = Pipeline("counted", counted, {"events": Input("rows", late_after="10m")})
    rows = [{"event_time": f"2030-01-02T03:04:0{n}Z"} for n in range(3)]
    assert run_on_rows(made, spark, rows) == [{"tenant": "default", "count": 3}]
    ahead = [{"event_time": "2030-01-02T03:04:05Z", "append_time": "2030-01-02T03:00:00Z"}]
    assert run_on_rows(made, spark, rows + ahead) == [{"tenant": "default", "count": 3}]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"event_time": "yesterday"}, "event_time is a time .*, not 'yesterday'"),
        ({"append_time": True}, "append_time is a time .*, not True"),
        ({"partition": "first"}, "partition of row 2 is 'first', and the column is INT"),
        ({"headers": ["a"]}, "headers are an object of texts"),
        ({"key": {"a": 1}}, "key of row 2"),
    ],
)
def test_a_row_that_is_no_event_is_named(spark: Any, row: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        frame(spark, [{}, row])


def test_a_pipeline_of_two_inputs_is_an_ordinary_function(spark: Any) -> None:
    """S6: tested without a cluster, a bus or a source."""

    def joined(left: Any, right: Any) -> Any:
        return left.join(right, "key").select(
            left["value.n"].alias("a"), right["value.n"].alias("b")
        )

    made = Pipeline("joined", joined, {"left": Input("l", "n INT"), "right": Input("r", "n INT")})
    rows = {
        "left": [{"key": b"k", "payload": {"n": 1}}, {"key": b"x", "payload": {"n": 2}}],
        "right": [{"key": b"k", "payload": {"n": 3}}],
    }
    assert run_on_rows(made, spark, rows) == [{"a": 1, "b": 3}]
    with pytest.raises(NotFound, match="no pipeline 'nothing'"):
        run_on_rows("nothing", spark)


def test_a_stream_marks_late_rows_as_the_source_does(spark: Any) -> None:
    """S3: late is what is older than all batches before allow; the future moves nothing."""
    start = datetime(2026, 3, 1, tzinfo=UTC)

    def at(minutes: int, **more: Any) -> dict[str, Any]:
        return {"append_time": start + timedelta(minutes=minutes)} | more

    made = Pipeline(
        "late", lambda events: events.select("offset", "late"), {"events": Input("#", None, "10m")}
    )
    batches = [
        [at(0), at(20), at(20, event_time=start + timedelta(days=9))],
        [at(21, event_time=start + timedelta(minutes=10)), at(21, event_time=start)],
    ]
    rows = stream_on_rows(made, spark, batches)
    assert {row["offset"]: row["late"] for row in rows} == {0: False, 1: False, 2: False, 3: False, 4: True}  # fmt: skip
