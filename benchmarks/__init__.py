"""Timings of the library beside its peers and beside bare NumPy, in one process: `python -m benchmarks --help`."""
