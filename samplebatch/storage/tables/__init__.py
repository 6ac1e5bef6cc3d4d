"""Batches as tables in Arrow and Parquet files."""
