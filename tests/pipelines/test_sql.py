"""Penstock in Spark SQL, and what Spark shows when something is wrong (F6, F10, F11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock


@pytest.fixture
def folder(tmp_path: Path) -> str:
    with penstock.connect_sync(tmp_path / "it's data") as bus:
        bus.publish_many("a", [b'{"n": %d}' % n for n in range(10)])
        bus.publish_many("b", [b"x"] * 5)
        bus.topics.create("p", partitions=3)
    return str(tmp_path / "it's data")


@pytest.fixture
def sql(spark: Any) -> Iterator[Any]:
    made: list[str] = []

    def run(text: str) -> list[Any]:
        words = text.split()
        if words[:2] == ["CREATE", "TABLE"]:
            made.append(words[2])
        return list(spark.sql(text).collect())

    yield run
    for name in made:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


def quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"


def test_a_table_is_made_with_create_table_and_read_as_a_batch_and_as_a_stream(
    spark, sql, folder
) -> None:
    """F6: Spark hands over options of its own, and later none at all."""
    sql(
        f"CREATE TABLE ten USING penstock OPTIONS (url {quoted(folder)}, topics 'a', schema 'n INT')"
    )
    [row] = sql("SELECT count(*) AS n, sum(value.n) AS total FROM ten")
    assert (row.n, row.total) == (10, 45)
    [row] = sql("SELECT count(*) AS n FROM ten WITH (start = 'latest')")
    assert row.n == 0
    query = (
        spark.readStream.table("ten").writeStream.format("memory").queryName("ten_rows")
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    assert spark.table("ten_rows").count() == 10
    spark.catalog.dropTempView("ten_rows")


def test_rows_are_inserted_into_a_table_of_sql(sql, folder) -> None:
    columns = "columns 'topic,payload'"
    sql(
        f"CREATE TABLE out_rows USING penstock COMMENT 'ours' OPTIONS (url {quoted(folder)}, {columns})"
    )
    sql("INSERT INTO out_rows VALUES ('new', X'31'), ('new', X'32')")
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        assert [bytes(event.payload) for event in bus.replay("new")] == [b"1", b"2"]


def test_a_table_with_columns_of_its_own_says_how_to_be_read(sql, folder) -> None:
    sql(f"CREATE TABLE own (topic STRING NOT NULL) USING penstock OPTIONS (url {quoted(folder)})")
    with pytest.raises(Exception, match=r"leave the columns out of CREATE TABLE, or read it WITH"):
        sql("SELECT * FROM own")
    assert len(sql(f"SELECT * FROM own WITH (url = {quoted(folder)})")) == 15


def test_a_token_is_not_kept_with_a_table(sql, folder) -> None:
    sql(f"CREATE TABLE secret USING penstock OPTIONS (url {quoted(folder)}, token 'hush')")
    assert "hush" not in str(sql("DESCRIBE secret"))


@pytest.mark.parametrize("how", ["option", "batch", "stream", "columns", "rows"])
def test_what_is_wrong_comes_without_a_traceback_before_it(spark, folder, tmp_path, how) -> None:
    """F10: the message was below a page of Python."""
    frame = spark.range(3).selectExpr("'x' AS payload")
    tries = {
        "option": lambda: spark.read.format("penstock").options(url=folder, topik="a").load(),
        "batch": lambda: spark.read.format("penstock").options(url=folder, topics="no").load().count(),
        "stream": lambda: spark.readStream.format("penstock").options(url=folder, topics="no").load()
        .writeStream.format("noop").option("checkpointLocation", str(tmp_path / "cp"))
        .trigger(availableNow=True).start().awaitTermination(),
        "columns": lambda: spark.range(3).write.format("penstock").options(url=folder, topic="t")
        .mode("append").save(),
        "rows": lambda: frame.write.format("penstock").options(url=folder, topic="t", codec="json")
        .mode("append").save(),
    }  # fmt: skip
    wanted = {
        "option": "no option 'topik'. Did you mean 'topics'",
        "batch": "there is no topic 'no'",
        "stream": "there is no topic 'no'",
        "columns": "need a `payload` column",
        "rows": "is not JSON",
    }
    with pytest.raises(Exception, match="penstock") as caught:
        tries[how]()
    text = str(caught.value)
    assert wanted[how] in text
    assert "Traceback" not in text


def test_spark_prints_nothing_before_an_error_is_raised(spark, folder, capfd) -> None:
    """F10: Java's stack as JSON, of a column that is misspelt and of a table that is not there."""
    events = spark.read.format("penstock").options(url=folder, topics="a").load()
    for wrong in (lambda: events.select("topik"), lambda: spark.sql("SELECT * FROM nowhere")):
        with pytest.raises(Exception, match=r"UNRESOLVED_COLUMN|TABLE_OR_VIEW_NOT_FOUND"):
            wrong()
    assert "Exception" not in "".join(capfd.readouterr())


def test_the_traceback_of_a_users_own_function_stays(spark, folder) -> None:
    from pyspark.sql.functions import udf

    with pytest.raises(Exception, match="Traceback"):
        spark.read.format("penstock").options(
            url=folder, topics="a", columns="offset"
        ).load().select(udf(lambda n: 1 // (n - n), "int")("offset")).collect()


def test_rows_go_to_the_partition_they_name(spark, folder) -> None:
    """F11: null lets the key choose."""
    frame = spark.range(9).selectExpr("'x' AS payload", "CAST(id % 3 AS INT) AS partition")
    frame.write.format("penstock").options(url=folder, topic="p").mode("append").save()
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        found = Counter(event.partition for event in bus.replay("p"))
    assert found == {0: 3, 1: 3, 2: 3}
    none = spark.range(2).selectExpr("'x' AS payload", "CAST(NULL AS INT) AS partition")
    none.write.format("penstock").options(url=folder, topic="p").mode("append").save()
    with pytest.raises(Exception, match="partitions 0 to 2, not 7"):
        spark.range(1).selectExpr("'x' AS payload", "7 AS partition").write.format(
            "penstock"
        ).options(url=folder, topic="p").mode("append").save()
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        assert sum(each.end_offset for each in bus.topics.info("p").partitions) == 11


def test_complete_mode_publishes_the_whole_result_with_each_batch(spark, folder, tmp_path) -> None:
    """F11: update mode is refused by Spark for every sink written in Python."""
    counted = (
        spark.readStream.format("penstock").options(url=folder, topics="a,b").load()
        .groupBy("topic").count().selectExpr("topic AS key", "CAST(count AS STRING) AS payload")
    )  # fmt: skip

    def run(mode: str) -> None:
        counted.writeStream.format("penstock").options(
            url=folder, topic=f"counts.{mode}", checkpointLocation=str(tmp_path / mode)
        ).outputMode(mode).trigger(availableNow=True).start().awaitTermination()

    run("complete")
    with penstock.connect_sync(folder) as bus:
        bus.publish("b", b"x")
    run("complete")
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        found = [(event.key, bytes(event.payload)) for event in bus.replay("counts.complete")]
    assert Counter(found) == {(b"a", b"10"): 2, (b"b", b"5"): 1, (b"b", b"6"): 1}
    with pytest.raises(Exception, match="does not support Update mode"):
        run("update")
