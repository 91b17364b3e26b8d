"""Event time over the bus: windows, joins and deduplication of streams that are restarted (S3, Q14).

The pipelines are those of `examples/pipelines`, which the guide shows. Events come in rounds, one
micro-batch each, and the query is started again for every round. What is expected is worked out here
in plain Python from the same events.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.pipelines import pipeline
from penstock.pipelines.rows import delay, seconds
from penstock.pipelines.run import Route, run_batch, start

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
BEGIN = datetime(2026, 1, 1, 12, tzinfo=UTC)
FAR = datetime(2199, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
LATE_AFTER = timedelta(minutes=10)
HELD = timedelta(seconds=int(delay("10m").split()[0]))
"""How far Spark's watermark is behind the newest event."""
CUSTOMERS = [f"c{number}" for number in range(12)]
ORDERS, PAYMENTS = "shop.orders.v1.acme", "shop.payments.v1.acme"


@dataclass(frozen=True)
class Order:
    id: int
    at: datetime
    customer: str = "ann"
    amount: float = 1.0

    @property
    def payload(self) -> dict[str, Any]:
        return {"id": self.id, "customer": self.customer, "amount": self.amount}


def rounds(seed: int = 4) -> list[list[Order]]:
    """Two hours of orders in six rounds: some late, one from a clock that is far ahead."""
    chance = random.Random(seed)
    numbers = iter(range(1_000_000))
    made = []
    for turn in range(6):
        middle = 20 * turn
        made.append([
            Order(
                next(numbers),
                BEGIN + timedelta(minutes=chance.uniform(middle - 15, middle + 20)),
                chance.choice(CUSTOMERS),
                float(chance.randint(1, 9)),
            )
            for _ in range(60)
        ])  # fmt: skip
    made[2].append(Order(next(numbers), FAR))
    return made


def publish(folder: Path, orders: Sequence[Order], topic: str = ORDERS) -> None:
    with penstock.connect_sync(folder) as bus:
        bus.publish_many(
            topic, [order.payload for order in orders], event_times=[order.at for order in orders]
        )


def run(spark: Any, name: str, folder: Path) -> Any:
    made = pipeline.find(name, EXAMPLES)
    query = start(made, spark, Route(str(folder)), checkpoint=folder / "cp" / name, once=True)
    query.awaitTermination()
    return query


def results(folder: Path, topic: str) -> list[dict[str, Any]]:
    with penstock.connect_sync(f"{folder}?mode=ro") as bus:
        return [event.value() for event in bus.replay(topic)]


def in_time(given: Sequence[Sequence[Order]]) -> tuple[list[Order], list[Order], datetime]:
    """Orders that count, orders that do not, and the newest time that counted."""
    counted: list[Order] = []
    refused: list[Order] = []
    newest = datetime.min.replace(tzinfo=UTC) + LATE_AFTER
    for orders in given:
        for order in orders:
            good = newest - LATE_AFTER <= order.at < FAR
            (counted if good else refused).append(order)
        newest = max(newest, *(order.at for order in orders if order.at < FAR))
    return counted, refused, newest


def floor(at: datetime, width: timedelta) -> datetime:
    return at - (at - datetime(1970, 1, 1, tzinfo=UTC)) % width


def windows(at: datetime, width: timedelta, step: timedelta) -> Iterator[tuple[datetime, datetime]]:
    begin = floor(at, step)
    while begin + width > at:
        yield begin, begin + width
        begin -= step


def closed_windows(
    given: Sequence[Sequence[Order]], width: timedelta, step: timedelta
) -> dict[tuple[datetime, datetime], tuple[int, float]]:
    counted, _, newest = in_time(given)
    found: dict[tuple[datetime, datetime], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for order in counted:
        for window in windows(order.at, width, step):
            if window[1] <= newest - HELD:
                count, total = found[window]
                found[window] = count + 1, total + order.amount
    return dict(found)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def as_windows(rows: Sequence[dict[str, Any]]) -> dict[Any, tuple[int, float]]:
    found = {
        (moment(row["window"]["start"]), moment(row["window"]["end"])): (row["orders"], row["sold"])
        for row in rows
    }
    assert len(found) == len(rows), "a window came out twice"
    return found


@pytest.fixture(scope="module")
def given() -> list[list[Order]]:
    made = rounds()
    counted, refused, _ = in_time(made)
    assert len(counted) > 200
    assert len(refused) > 10, "there is nothing late to be seen"
    return made


def in_rounds(spark: Any, name: str, folder: Path, given: Sequence[Sequence[Order]]) -> None:
    dropped = 0
    for orders in given:
        publish(folder, orders)
        query = run(spark, name, folder)
        dropped += sum(
            each["numRowsDroppedByWatermark"]
            for progress in query.recentProgress
            for each in progress["stateOperators"]
        )
    assert dropped == 0, "Spark dropped rows without a word"


def test_tumbling_windows_and_what_is_late_beside_them(
    spark: Any, tmp_path: Path, given: Any
) -> None:
    """Every order is in a closed window, in one that is still open, or on the side topic."""
    in_rounds(spark, "sold-by-minute", tmp_path, given)
    assert as_windows(results(tmp_path, "shop.minutes")) == closed_windows(given, MINUTE, MINUTE)
    _, refused, _ = in_time(given)
    set_aside = Counter(json.dumps(row) for row in results(tmp_path, "shop.late"))
    assert set_aside == Counter(json.dumps(order.payload) for order in refused)


def test_sliding_windows(spark: Any, tmp_path: Path, given: Any) -> None:
    in_rounds(spark, "moving-total", tmp_path, given)
    expected = closed_windows(given, 10 * MINUTE, 5 * MINUTE)
    assert as_windows(results(tmp_path, "shop.totals")) == expected


def test_session_windows(spark: Any, tmp_path: Path, given: Any) -> None:
    in_rounds(spark, "visits", tmp_path, given)
    counted, _, newest = in_time(given)
    expected: Counter[tuple[str, datetime, datetime, int]] = Counter()
    for customer in CUSTOMERS:
        sessions: list[list[datetime]] = []
        for at in sorted(order.at for order in counted if order.customer == customer):
            if sessions and at < sessions[-1][-1] + 5 * MINUTE:
                sessions[-1].append(at)
            else:
                sessions.append([at])
        for times in sessions:
            end = times[-1] + 5 * MINUTE
            if end <= newest - HELD:
                expected[customer, _ms(times[0]), _ms(end), len(times)] += 1
    assert len(expected) > 10
    found = Counter(
        (row["customer"], moment(row["visit"]["start"]), moment(row["visit"]["end"]), row["orders"])
        for row in results(tmp_path, "shop.visits")
    )
    assert found == expected


def _ms(at: datetime) -> datetime:
    """As JSON has it."""
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def test_a_join_of_streams_finds_what_comes_later_and_what_never_comes(
    spark: Any, tmp_path: Path
) -> None:
    at = {number: BEGIN + number * MINUTE for number in range(200)}
    publish(tmp_path, [Order(1, at[0]), Order(2, at[1]), Order(3, at[2])])
    publish(tmp_path, [Order(2, at[3])], PAYMENTS)
    run(spark, "paid", tmp_path)
    assert [row["id"] for row in results(tmp_path, "shop.paid")] == [2]
    # Paid in a later run, in time and too late; and both streams move on.
    publish(tmp_path, [Order(1, at[14]), Order(3, at[18]), Order(0, at[120])], PAYMENTS)
    publish(tmp_path, [Order(9, at[120])])
    run(spark, "paid", tmp_path)
    found = {row["id"]: row.get("paid") for row in results(tmp_path, "shop.paid")}
    assert {number: paid and moment(paid) for number, paid in found.items()} == {
        2: at[3], 1: at[14], 3: None,
    }  # fmt: skip
    assert len(results(tmp_path, "shop.paid")) == 3


def test_a_duplicate_is_dropped_over_restarts(spark: Any, tmp_path: Path) -> None:
    for orders in (
        [Order(1, BEGIN), Order(2, BEGIN), Order(1, BEGIN)],
        [Order(2, BEGIN), Order(3, BEGIN + 5 * MINUTE)],
        [Order(1, BEGIN), Order(4, BEGIN + 30 * MINUTE), Order(3, BEGIN + 5 * MINUTE)],
        # Too old to be compared with anything: late, and no duplicate comes back that way.
        [Order(1, BEGIN), Order(5, BEGIN + 31 * MINUTE)],
    ):
        publish(tmp_path, orders)
        run(spark, "orders-once", tmp_path)
    assert sorted(row["id"] for row in results(tmp_path, "shop.unique")) == [1, 2, 3, 4, 5]


def test_a_batch_counts_all_but_the_future(spark: Any, tmp_path: Path, given: Any) -> None:
    """The same function over the same topics; a batch knows no late events."""
    for orders in given:
        publish(tmp_path, orders)
    made = pipeline.find("sold-by-minute", EXAMPLES)
    rows = [row.payload for row in run_batch(made, spark, Route(str(tmp_path))).collect()]
    parsed = [json.loads(row) for row in rows]
    assert sum(row["orders"] for row in parsed if "window" in row) == 6 * 60
    assert len([row for row in parsed if "window" not in row]) == 1


def test_half_seconds_count_as_whole_ones() -> None:
    assert (seconds("1500ms"), delay("500ms", "0s")) == (2, "2 seconds")
