"""Datasets: folders of Parquet files with a commit log, and mixtures of datasets and replay buffers."""
