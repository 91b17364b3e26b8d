"""Replay and compare: one SHA-256 for one set of rows, whatever their order and cut (S5, X6, X13)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.model.errors import Corrupted, InvalidSettings
from penstock.pipelines.builtin.replay_compare import digest
from penstock.pipelines.pipeline import find
from penstock.pipelines.run import Route, run_batch
from penstock.pipelines.testkit import frame, run_on_rows
from penstock.testing.broker_process import BrokerProcess

START = datetime(2026, 3, 1, tzinfo=UTC)
ROWS = [
    {"topic": topic, "offset": offset, "payload": {"n": offset}, "key": b"k" if offset % 2 else None,
     "headers": {"a": "1", "b": str(offset)}, "append_time": START + timedelta(minutes=offset)}
    for topic in ("orders.eu.v1", "orders.us.v1", "parcels") for offset in range(20)
]  # fmt: skip


def test_the_order_and_the_cut_of_rows_do_not_matter_but_every_row_does(spark: Any) -> None:
    """X6: shuffled, repartitioned and with headers in another order it is the same set; one bit is not."""
    rows = frame(spark, ROWS)
    expected = digest(rows)
    assert expected.rows == len(ROWS)
    turned = [row | {"headers": dict(reversed(list(row["headers"].items())))} for row in reversed(ROWS)]  # fmt: skip
    assert digest(frame(spark, turned).repartition(5)) == expected
    others = {
        "one row fewer": ROWS[1:],
        "one row twice": [*ROWS, ROWS[0]],
        "a payload": [ROWS[0] | {"payload": {"n": 99}}, *ROWS[1:]],
        "a key that is empty, not absent": [ROWS[0] | {"key": b""}, *ROWS[1:]],
        "a header": [ROWS[0] | {"headers": {"a": "1", "b": "9"}}, *ROWS[1:]],
        "a microsecond": [ROWS[0] | {"append_time": START + timedelta(microseconds=1)}, *ROWS[1:]],
    }
    found = {name: digest(frame(spark, changed)).sha256 for name, changed in others.items()}
    assert len({*found.values(), expected.sha256}) == len(others) + 1


def test_values_do_not_run_into_each_other(spark: Any) -> None:
    """X6: columns, array items and map entries are told apart, and null from empty."""
    kind = "a STRING, b ARRAY<STRING>, c MAP<STRING, STRING>, d STRUCT<x: INT, y: STRING>"
    rows = [
        ("ab", ["c"], {}, (1, "2")), ("a", ["bc"], {}, (1, "2")), ("ab", ["c", ""], {}, (1, "2")),
        ("ab", ["c", None], {}, (1, "2")), ("ab", None, {}, (1, "2")), ("ab", [], {}, (1, "2")),
        ("ab", ["c"], {"k": "v"}, (1, "2")), ("ab", ["c"], {"k": None}, (1, "2")),
        ("ab", ["c"], None, (1, "2")), ("ab", ["c"], {}, (12, "")), ("ab", ["c"], {}, None),
        ("ab", ["c"], {}, (None, None)), (None, ["c"], {}, (1, "2")), ("", ["c"], {}, (1, "2")),
    ]  # fmt: skip
    found = {digest(spark.createDataFrame([row], kind)).sha256 for row in rows}
    assert len(found) == len(rows)


def test_a_second_run_is_compared_with_the_first(spark: Any, tmp_path: Path) -> None:
    """S5, X6: kept, then equal; later events do not disturb it, a missing one does."""
    file = tmp_path / "hash.json"
    params = {"file": str(file), "topics": "orders.#", "since": "2026-03-01T00:05:00Z"}
    (first,) = run_on_rows("replay-compare", spark, ROWS, params)
    assert (first["verdict"], first["rows"]) == ("kept", 30)
    kept = file.read_bytes()
    later = {"topic": "orders.eu.v1", "append_time": datetime.now(UTC) + timedelta(hours=1)}
    (second,) = run_on_rows("replay-compare", spark, [*reversed(ROWS), later], params)
    assert (second["verdict"], second["sha256"]) == ("equal", first["sha256"])
    with pytest.raises(Corrupted, match="the replay is another: 29 rows"):
        run_on_rows("replay-compare", spark, [*ROWS[:10], *ROWS[11:]], params)
    with pytest.raises(InvalidSettings, match="asks for something else"):
        run_on_rows("replay-compare", spark, ROWS, params | {"topics": "orders.eu.*"})
    assert file.read_bytes() == kept
    file.write_text("{}")
    with pytest.raises(InvalidSettings, match="does not hold"):
        run_on_rows("replay-compare", spark, ROWS, params)


class Log:
    """A folder whose events stay in the journal until it is told to seal and to merge them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publish(self, *numbers: int) -> str:
        """Publish some; returns a time between these events and the next."""
        with penstock.connect_sync(self.folder, sealing__enabled=False) as bus:
            bus.publish_many("orders.eu.v1", [{"n": n} for n in numbers], keys=[f"k{n}" for n in numbers])  # fmt: skip
            bus.publish("parcels", b"bytes", headers={"a": "1"})
        time.sleep(0.01)
        return datetime.now(UTC).isoformat()

    def seal(self, *, kept: int) -> set[int]:
        """Seal what there is, and merge when there are more shared files than `kept`; the segments."""
        small = {"sealing__process": False, "sealing__shared_files_max": kept}
        with penstock.connect_sync(self.folder, journal__roll_after_s=0.01, **small) as bus:
            time.sleep(0.1)
            bus.publish("other", b"the journal file before this event is closed")
            engine = bus._target.engine
            bus._thread.wait(engine.maintenance.settle())
            return {info.id for info in engine.log.manifest.segments()}


def test_the_hash_is_the_same_in_journal_segments_and_through_a_broker(
    spark: Any, tmp_path: Path
) -> None:
    """X6, X13.4: on the real source, of the same range, before and after sealing and merging."""
    log, file = Log(tmp_path / "data"), tmp_path / "hash.json"
    since = log.publish(1, 2)
    until = log.publish(3, 4, 5)
    log.publish(6)
    params = {"file": str(file), "since": since, "until": until}
    made = find("replay-compare")

    def compared(url: str | Path) -> tuple[int, str, str]:
        [row] = run_batch(made, spark, Route(url=str(url)), params).collect()
        return row["rows"], row["sha256"], row["verdict"]

    rows, sha256, verdict = compared(log.folder)
    assert (rows, verdict) == (4, "kept")
    first = log.seal(kept=100)
    assert first
    assert compared(log.folder) == (4, sha256, "equal")
    log.publish(7)
    assert first < log.seal(kept=100), "a second shared file"
    assert not first & log.seal(kept=1), "and both are merged into a new one"
    assert compared(log.folder) == (4, sha256, "equal")
    with BrokerProcess(log.folder) as broker:
        assert compared(broker.url()) == (4, sha256, "equal")
        params["until"] = ""
        params["file"] = ""
        assert compared(broker.url())[1] != sha256
