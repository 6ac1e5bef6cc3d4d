"""Datasets in folders of Parquet files with a commit log, and samplers of several datasets and buffers."""
