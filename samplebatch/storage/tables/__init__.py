"""Storage of batches as tables in Arrow and Parquet files."""
