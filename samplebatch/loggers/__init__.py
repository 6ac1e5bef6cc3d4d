"""Loggers of training metrics."""
