"""Benchmarks of the library, its peers and bare NumPy in one process: `python -m benchmarks --help`."""
