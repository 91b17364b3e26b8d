"""Makes `format("penstock")` known to Spark, which looks into modules named `pyspark_*` by itself."""

from penstock.pipelines.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
