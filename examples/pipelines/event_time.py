"""Event time in five pipelines: windows, sessions, a join and deduplication.

penstock --url ./data pipeline run sold-by-minute --path examples/pipelines
"""

from pyspark.sql import functions as sql

import penstock
from penstock.pipelines.pipeline import Input
from penstock.pipelines.rows import timely, untimely

LATE_AFTER = "10m"
ORDERS = Input("shop.orders.#", "id BIGINT, customer STRING, amount DOUBLE", LATE_AFTER)
PAYMENTS = Input("shop.payments.#", "id BIGINT, amount DOUBLE", LATE_AFTER)


@penstock.pipeline("sold-by-minute", reads={"orders": ORDERS})
def sold_by_minute(orders):
    """Tumbling windows; what cannot be counted any more goes to a topic of its own, as it came."""
    sums = (
        timely(orders, LATE_AFTER)
        .groupBy("tenant", sql.window("event_time", "1 minute"))
        .agg(sql.count("*").alias("orders"), sql.sum("value.amount").alias("sold"))
    )
    row = sql.to_json(sql.struct("tenant", "window", "orders", "sold"))
    counted = sums.select(
        sql.lit("shop.minutes").alias("topic"),
        sql.lit("json").alias("codec"),
        row.cast("BINARY").alias("payload"),
    )
    return counted.union(untimely(orders).select(sql.lit("shop.late"), "codec", "payload"))


@penstock.pipeline("moving-total", reads={"orders": ORDERS}, writes="shop.totals")
def moving_total(orders):
    """Sliding windows: the last ten minutes, every five minutes."""
    windows = sql.window("event_time", "10 minutes", "5 minutes")
    return (
        timely(orders, LATE_AFTER)
        .groupBy("tenant", windows)
        .agg(sql.count("*").alias("orders"), sql.sum("value.amount").alias("sold"))
    )


@penstock.pipeline("visits", reads={"orders": ORDERS}, writes="shop.visits")
def visits(orders):
    """Session windows: what a customer orders with less than five minutes in between."""
    sessions = sql.session_window("event_time", "5 minutes").alias("visit")
    return (
        timely(orders, LATE_AFTER)
        .groupBy(sql.col("value.customer").alias("customer"), sessions)
        .agg(sql.count("*").alias("orders"))
    )


@penstock.pipeline("paid", reads={"orders": ORDERS, "payments": PAYMENTS}, writes="shop.paid")
def paid(orders, payments):
    """A join of two streams: each order with its payment, or with none after a quarter of an hour."""
    left = timely(orders, LATE_AFTER).select("value.id", sql.col("event_time").alias("ordered"))
    right = timely(payments, LATE_AFTER).select(
        sql.col("value.id").alias("order"), sql.col("event_time").alias("paid")
    )
    soon = "id = order AND paid BETWEEN ordered AND ordered + INTERVAL 15 MINUTES"
    return left.join(right, sql.expr(soon), "leftOuter").select("id", "ordered", "paid")


@penstock.pipeline("orders-once", reads={"orders": ORDERS}, writes="shop.unique")
def orders_once(orders):
    """Deduplication: an order that was sent again within the allowed lateness is dropped."""
    first = timely(orders, LATE_AFTER).withColumn("id", sql.col("value.id"))
    return first.dropDuplicatesWithinWatermark(["id"]).select(
        "key", "event_time", "codec", "payload"
    )
