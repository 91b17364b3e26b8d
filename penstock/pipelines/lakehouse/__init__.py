"""Topics and results as tables: Iceberg by default, Delta or plain Parquet by setting."""
