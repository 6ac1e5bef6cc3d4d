"""Environments to batches: collecting, in one process or in many."""
