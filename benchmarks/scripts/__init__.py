"""Measurements that are no rows of `make bench`: ``python -m benchmarks.scripts NAME``, or no name for a list."""
