"""Loggers of training figures."""
