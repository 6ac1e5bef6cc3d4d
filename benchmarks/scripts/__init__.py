"""Measurements outside `make bench`: ``python -m benchmarks.scripts NAME`` runs one; without a name, it lists all."""
