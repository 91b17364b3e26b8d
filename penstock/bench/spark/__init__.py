"""Benchmarks of the pipelines on Spark: `penstock bench spark`.

A case has sides, Penstock's first, that take turns in an order that rotates. Spark's own way over
Parquet files, on the same rows, is the peer wherever there is one.
"""
