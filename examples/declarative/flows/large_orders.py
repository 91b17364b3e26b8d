"""Orders of more than a hundred, copied to a topic of their own."""

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
pipelines.create_sink(
    "large",
    "penstock",
    {"url": spark.conf.get("bus.results"), "topic": "orders.large", "codec": "json"},
)


@pipelines.append_flow(target="large")
def large_orders() -> DataFrame:
    """Reads on where the last run ended."""
    orders = spark.readStream.format("penstock").option("url", spark.conf.get("bus.url"))
    orders = orders.option("topics", "orders.made").option("schema", "amount DOUBLE")
    return orders.load().where("value.amount > 100").select("key", "payload")
