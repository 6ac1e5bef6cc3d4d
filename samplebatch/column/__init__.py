"""Columns: rows of one kind in Arrow memory."""
