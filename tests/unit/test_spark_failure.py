"""Row S8: a failure names pipeline, topic, partition and offsets, in one paragraph."""

from __future__ import annotations

import logging
import traceback

import pytest

from penstock.model.errors import Corrupted, OffsetExpired, PipelineFailed
from penstock.pipelines.failure import explain_failure, reading
from penstock.pipelines.plan import Split

SOURCE = "org.apache.spark.sql.execution.datasources.v2.python.PythonMicroBatchStream@7fd77da6"
AFTER = """ SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: risk [id = ef2c45fd-b0e4-40a3-9d41-167316af2be9, runId = 64cf906a-5518-4791-9f94-ccf155d00631]
Current Committed Offsets: {%(source)s: %(committed)s}
Current Available Offsets: {%(source)s: %(available)s}

Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
WriteToMicroBatchDataSource noop-table
+- ~StreamingDataSourceV2ScanRelation[event_time#51, n#52L] fake"""
COMMITTED = '{"penstock": 1, "topics": {"orders": {"0": 700}}, "newest_us": 0, "began": {}}'
AVAILABLE = (
    '{"penstock": 1, "topics": {"orders": {"0": 800}, "refunds": {"1": 9}}, "newest_us": 5, '
    '"began": {"refunds": {"1": 4}}}'
)


def from_spark(
    error: BaseException, *, committed: str = COMMITTED, available: str = AVAILABLE
) -> Exception:
    """An error of a worker as Spark tells it; the words are those of a real run."""
    trace = "".join(traceback.format_exception(error))
    places = {"source": SOURCE, "committed": committed, "available": available}
    return RuntimeError(
        "[STREAM_FAILED] Query [id = ef2c45fd, runId = 64cf906a] terminated with exception: "
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "
        + trace
        + AFTER % places
    )


def raised(error: Exception, *splits: Split) -> Exception:
    try:
        with reading(splits):
            raise error
    except Exception as caught:
        return caught


def test_an_error_of_ours_is_taken_out_of_sparks_text() -> None:
    inner = raised(
        Corrupted("segment 00012 fails its checksum;\nnothing was deleted"),
        Split("orders", 0, 600, 650),
    )
    failed = explain_failure(from_spark(inner), "risk-tags")
    assert isinstance(failed, PipelineFailed)
    assert (failed.pipeline, failed.cause) == ("risk-tags", "storage.corrupted")
    assert (failed.topic, failed.partition, failed.first, failed.last) == ("orders", 0, 600, 649)
    text = str(failed)
    assert "'risk-tags' failed at topic 'orders', partition 0, offsets 600 to 649" in text
    assert "segment 00012 fails its checksum" in text
    assert "org.apache.spark" not in text
    assert "SQLSTATE" not in text


def test_an_error_of_the_users_code_names_the_batch() -> None:
    """Row S8: without a note from the source, the offsets of the batch are what is known."""
    failed = explain_failure(from_spark(raised(ZeroDivisionError("division by zero"))))
    assert failed.cause == "ZeroDivisionError"
    assert "division by zero (ZeroDivisionError)" in failed.message
    assert failed.splits == [Split("orders", 0, 700, 800), Split("refunds", 1, 4, 9)]
    assert "in the batch of topic 'orders', partition 0, offsets 700 to 799" in failed.message
    with pytest.raises(AttributeError):
        _ = failed.topic


def test_the_last_of_chained_errors_counts() -> None:
    try:
        try:
            raise Corrupted("first")
        except Corrupted as first:
            raise OffsetExpired("offsets 0 to 99 of 'orders' were removed") from first
    except OffsetExpired as error:
        failed = explain_failure(from_spark(error))
    assert failed.cause == "notfound.offset-expired"
    assert "removed" in failed.message


def test_many_stretches_are_cut_short_in_words_and_whole_in_data() -> None:
    splits = [Split("orders", number, 0, 5) for number in range(5)]
    failed = explain_failure(from_spark(raised(ValueError("bad"), *splits)))
    assert failed.splits == splits
    assert "and 2 more" in failed.message


def test_a_failure_of_spark_itself_is_its_first_line() -> None:
    text = "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted SQLSTATE: XXKST\nmore"
    failed = explain_failure(RuntimeError(text), "usage")
    assert (failed.cause, failed.splits) == ("spark", [])
    assert "the pipeline 'usage' failed: Job aborted (spark)" in failed.message


@pytest.mark.parametrize("places", ["{}", '{"penstock": 1, "top', '{"penstock": 99, "topics": {}}'])
def test_offsets_that_cannot_be_read_are_left_out(places: str) -> None:
    error = from_spark(raised(ValueError("bad")), committed=places, available=places)
    assert explain_failure(error).splits == []


def test_an_error_that_is_ours_already_stays_as_it_is() -> None:
    error = Corrupted("broken")
    assert explain_failure(error) is error


def test_what_spark_said_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "penstock.pipelines.failure"):
        explain_failure(from_spark(raised(ValueError("bad"))))
    assert "Logical Plan" in caplog.text
