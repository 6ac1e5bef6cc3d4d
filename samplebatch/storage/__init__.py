"""Batches in files."""
