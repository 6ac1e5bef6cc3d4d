"""Replay: rings of columns."""
