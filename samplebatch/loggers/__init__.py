"""Loggers: told the figures of a training, which they show, send or write down."""
