"""A batch of the Spark sink that is tried again with other tasks: each row once, through folder and broker.

The sink is called as Spark calls it, without Java: writers make messages, and the driver commits them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema

import penstock
from penstock.model.errors import BatchChanged, InvalidInput
from penstock.pipelines.source import PenstockSource
from penstock.testing.broker_process import BrokerProcess

ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("payload", pa.binary()),
    ]
)
SCHEMA = from_arrow_schema(ARROW)
Row = dict[str, Any]


@pytest.fixture(params=["folder", "broker"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "data")
        return
    with BrokerProcess(tmp_path / "data") as running:
        yield running.url()


def stored(url: str, pattern: str = "out.#") -> list[bytes]:
    if "://" not in url and not (Path(url) / "penstock.json").exists():
        return []
    with penstock.connect_sync(url if "://" in url else f"{url}?mode=ro") as bus:
        return [bytes(event.payload) for event in bus.replay(pattern)]


def rows(count: int, size: int = 20) -> list[Row]:
    return [
        {
            "topic": f"out.{n % 3}",
            "key": None if n % 4 == 0 else b"k%d" % (n % 17),
            "headers": {"n": str(n), "a": "b"} if n % 2 else None,
            "payload": b"%08d" % n + b"x" * size,
        }
        for n in range(count)
    ]


def attempt(
    url: str, tasks: Sequence[Sequence[Row]], *, commit: bool = True, **options: str
) -> None:
    """One try of Spark's to write the batch 7 of a query, with these rows in its tasks."""
    given = {"url": url, "queryId": "nightly", "batchId": "7", **options}
    writer = PenstockSource(given).writer(SCHEMA, False)
    messages = []
    for task in tasks:
        batches = [pa.RecordBatch.from_pylist(list(some), ARROW) for some in halves(task)]
        messages.append(writer.write(iter(batches)))
    if commit:
        writer.commit(messages)
    else:
        writer.abort([*messages, None])


def halves(task: Sequence[Row]) -> list[Sequence[Row]]:
    middle = len(task) // 2
    return [task[:middle], task[middle:]]


def dealt(given: Sequence[Row], dice: random.Random) -> list[list[Row]]:
    """The rows in tasks of another number, order and size."""
    mixed = dice.sample(list(given), len(given))
    tasks: list[list[Row]] = [[] for _ in range(dice.randint(1, 9))]
    for row in mixed:
        dice.choice(tasks).append(row)
    return tasks


@pytest.mark.parametrize("limit", ["100000000", "9000"], ids=["whole", "in-parts"])
def test_a_batch_tried_again_with_other_tasks_is_there_once(url: str, limit: str) -> None:
    """F1: cores, adaptive execution, repartition and eventsPerTask change who has which rows."""
    dice = random.Random(1)
    given = rows(600)
    wanted = Counter(row["payload"] for row in given)
    attempt(url, dealt(given, dice), commit=False)
    assert stored(url) == [], "an attempt that fails leaves nothing"
    for _ in range(4):
        attempt(url, dealt(given, dice), maxTransactionBytes=limit)
        assert Counter(stored(url)) == wanted


@pytest.mark.parametrize(("first", "then"), [("9000", "100000000"), ("100000000", "9000")])
def test_the_limit_of_a_transaction_may_change_between_attempts(
    url: str, first: str, then: str
) -> None:
    given = rows(300)
    for limit in (first, then, first):
        attempt(url, [given], maxTransactionBytes=limit)
        assert Counter(stored(url)) == Counter(row["payload"] for row in given)


DIES = """
import sys
from tests.unit.test_spark_sink_attempts import attempt, dealt, rows
import random
url, seed, count, limit = sys.argv[1:]
attempt(url, dealt(rows(int(count)), random.Random(int(seed))), maxTransactionBytes=limit)
"""


def killed(url: str, failpoint: str, seed: int, count: int = 400, limit: str = "9000") -> None:
    """A driver that dies at a stage of its commit."""
    done = subprocess.run(
        [sys.executable, "-c", DIES, url, str(seed), str(count), limit],
        env={**os.environ, "FAILPOINT": failpoint},
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL


def test_a_driver_that_dies_between_parts_is_followed_by_one_that_completes_them(url: str) -> None:
    given = rows(400)
    for seed, failpoint in enumerate(
        ("sink.planned", "sink.part-published:3", "sink.part-published:4")
    ):
        killed(url, failpoint, seed)
        assert len(stored(url)) < 400
    attempt(url, dealt(given, random.Random(9)), maxTransactionBytes="100000000")
    assert Counter(stored(url)) == Counter(row["payload"] for row in given)


def test_a_driver_that_dies_after_its_batch_is_published_is_followed_by_one_that_does_nothing(
    url: str,
) -> None:
    given = rows(400)
    killed(url, "sink.after-commit", 1, limit="100000000")
    # Of a batch that is there as a whole, not even other rows are taken.
    attempt(url, dealt(rows(500), random.Random(2)))
    assert Counter(stored(url)) == Counter(row["payload"] for row in given)
    if "://" not in url:
        assert not list(Path(url).glob("staging/*")), "what the killed one staged is removed"


def test_other_rows_are_refused_while_a_batch_is_there_in_part(url: str) -> None:
    killed(url, "sink.part-published:1", 1)
    before = stored(url)
    assert 0 < len(before) < 400
    other = rows(400)
    other[7]["payload"] = b"another"
    with pytest.raises(BatchChanged, match="nightly/7 was begun with 400 rows"):
        attempt(url, [other], maxTransactionBytes="9000")
    with pytest.raises(BatchChanged, match="`topic` and `codec` changed"):
        attempt(url, [rows(400)], maxTransactionBytes="9000", codec="msgpack")
    assert stored(url) == before
    attempt(url, [rows(400)])
    attempt(url, [other], maxTransactionBytes="9000")  # it is complete, so it is skipped
    assert Counter(stored(url)) == Counter(row["payload"] for row in rows(400))


def test_no_rows_at_all_are_refused_while_a_batch_is_there_in_part(url: str) -> None:
    """F1: the query went on, and the rest of the batch was lost."""
    killed(url, "sink.part-published:1", 1)
    before = stored(url)
    with pytest.raises(BatchChanged, match=r"begun with 400 rows.*this attempt has 0 rows"):
        attempt(url, [[], []])
    assert stored(url) == before
    attempt(url, [rows(400)])
    attempt(url, [[]])  # it is complete, so it is skipped
    assert Counter(stored(url)) == Counter(row["payload"] for row in rows(400))


def test_a_batch_without_rows_makes_no_folder(tmp_path: Path) -> None:
    attempt(str(tmp_path / "data"), [[], []])
    assert not (tmp_path / "data").exists()


def test_a_batch_is_there_once_when_its_retry_goes_through_a_broker(tmp_path: Path) -> None:
    """F1: the folder and its broker are one bus, for batches that are whole and for those in parts."""
    url = str(tmp_path / "data")
    killed(url, "sink.part-published:3", 1)
    with BrokerProcess(tmp_path / "data") as broker:
        for seed in (2, 3):
            attempt(broker.url(), dealt(rows(400), random.Random(seed)))
            assert Counter(stored(broker.url())) == Counter(row["payload"] for row in rows(400))


def test_rows_of_one_key_keep_their_order_in_a_batch_of_several_parts(url: str) -> None:
    given = rows(600)
    attempt(url, [given], maxTransactionBytes="9000")
    with penstock.connect_sync(url if "://" in url else f"{url}?mode=ro") as bus:
        found = [(event.topic, event.key, bytes(event.payload)) for event in bus.replay("out.#")]
    for lane in {(topic, key) for topic, key, _ in found if key is not None}:
        mine = [payload for topic, key, payload in found if (topic, key) == lane]
        assert mine == sorted(mine)


def test_large_tasks_leave_no_files_behind(url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given = rows(400, size=1_000)
    attempt(url, [given[:200], given[200:]], commit=False)
    attempt(url, [given[:300], given[300:]])
    assert len(stored(url)) == 400
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_worker_that_does_not_see_the_drivers_folder_sends_its_rows(
    tmp_path: Path, monkeypatch: Any
) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(driver))
    with BrokerProcess(tmp_path / "data") as broker:
        options = {"url": broker.url(), "queryId": "q", "batchId": "1"}
        writer = PenstockSource(options).writer(SCHEMA, False)
        shutil.rmtree(driver)
        message = writer.write(iter([pa.RecordBatch.from_pylist(rows(400, size=1_000), ARROW)]))
        assert not driver.exists()
        writer.commit([message])
        assert len(stored(broker.url())) == 400


def test_two_writes_of_one_batch_to_two_topics_are_two(url: str) -> None:
    """In foreachBatch both have the same query and batch."""
    given = [{**row, "topic": None} for row in rows(9)]
    for topic in ("out.a", "out.b", "out.a"):
        attempt(url, [given], topic=topic)
    assert (len(stored(url, "out.a")), len(stored(url, "out.b"))) == (9, 9)


def test_a_payload_that_is_not_the_json_it_is_said_to_be_is_named(url: str) -> None:
    """F5: consumers would fail at it one after another."""
    bad = [{"topic": "out.a", "key": b"k%d" % n, "payload": b"{%d" % n} for n in range(3)]
    with pytest.raises(InvalidInput, match=r"payload b'\{0' of the row with .*k0.* is not JSON"):
        attempt(url, [bad], codec="json")
    assert stored(url) == []


@pytest.mark.parametrize(
    ("column", "kind", "takes"),
    [
        ("payload", types.LongType(), "BINARY or STRING"),
        ("key", types.LongType(), "BINARY or STRING"),
        ("key", types.NullType(), "BINARY or STRING"),
        ("topic", types.LongType(), "STRING"),
        ("codec", types.BinaryType(), "STRING"),
        ("partition", types.StringType(), "INT or"),
        ("event_time", types.StringType(), "TIMESTAMP or"),
        ("headers", types.ArrayType(types.StringType()), "MAP<STRING,STRING>"),
    ],
)
def test_a_column_of_another_type_is_named_before_any_row_is_made(
    column: str, kind: Any, takes: str, tmp_path: Path
) -> None:
    """F10: some ended in a traceback of Arrow's, when all tasks were done."""
    schema = types.StructType().add("payload", types.StringType()).add("topic", types.StringType())
    fields = [each for each in schema if each.name != column]
    given = types.StructType([*fields, types.StructField(column, kind)])
    source = PenstockSource({"url": str(tmp_path / "data")})
    for write in (source.writer, source.streamWriter):
        with pytest.raises(
            InvalidInput, match=f"column '{column}' is .*, and the sink takes {takes}"
        ):
            write(given, False)
    assert source.writer(schema, False)
