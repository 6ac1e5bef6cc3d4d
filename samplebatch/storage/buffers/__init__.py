"""Replay buffers: their state, files of every format, and folders of mapped columns behind a write-ahead log."""
