"""Tenant usage: events and bytes of every tenant by the hour, against quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as sql

from penstock.pipelines.pipeline import pipeline

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TOPIC = "usage.hours.v1"
EVERYBODY = "*"
"""The quota of tenants that have none of their own."""
SETTLED = "1 minute"
"""How long an hour stays open in a stream; append times of partitions differ by less."""


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant may publish in an hour; None is no limit."""

    events: int | None = None
    bytes: int | None = None


class Params(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of `usage`."""

    quotas: dict[str, Quota] = {}
    """By tenant; `*` is for all others."""


@pipeline(
    "usage",
    reads="#",
    # Its own rows are no usage of a tenant, and would give rise to more of them.
    exclude=f"{TOPIC}.#",
    writes=TOPIC,
    params=Params,
    columns="tenant,append_time,key,payload",
)
def usage(events: DataFrame, params: Params) -> DataFrame:
    """Events and bytes by tenant and hour of appending, and how much of the quota they are.

    Bytes are those of payloads and keys. A stream writes an hour once, when it is over.
    """
    if events.isStreaming:
        events = events.withWatermark("append_time", SETTLED)
    size = sql.length("payload") + sql.coalesce(sql.length("key"), sql.lit(0))
    hours = events.groupBy("tenant", sql.window("append_time", "1 hour").alias("hour")).agg(
        sql.count("*").alias("events"), sql.sum(size.cast("BIGINT")).alias("bytes")
    )
    return _against(hours, params.quotas)


def _against(hours: DataFrame, quotas: dict[str, Quota]) -> DataFrame:
    limits = {
        measure: _limit({name: getattr(quota, measure) for name, quota in quotas.items()})
        for measure in ("events", "bytes")
    }
    # Zero allowed is used up by the first event, and `greatest` takes no account of no limit.
    parts = [
        sql.when(limit > 0, sql.col(measure) / limit).when(limit == 0, sql.lit(float("inf")))
        for measure, limit in limits.items()
    ]
    used = sql.greatest(*parts)
    return hours.select(
        sql.concat(sql.lit(f"{TOPIC}."), sql.col("tenant")).alias("topic"),
        "tenant",
        sql.col("hour.start").alias("hour"),
        "events",
        "bytes",
        limits["events"].alias("quota_events"),
        limits["bytes"].alias("quota_bytes"),
        used.alias("used"),
        sql.coalesce(used > 1, sql.lit(False)).alias("over"),
    )


def _limit(by_tenant: dict[str, int | None]) -> Column:
    """The limit of the row's tenant; null where there is none."""
    everybody: Any = by_tenant.get(EVERYBODY)
    chosen = sql.lit(everybody).cast("BIGINT")
    for tenant, limit in by_tenant.items():
        if tenant != EVERYBODY:
            mine = sql.lit(limit).cast("BIGINT")
            chosen = sql.when(sql.col("tenant") == tenant, mine).otherwise(chosen)
    return chosen
