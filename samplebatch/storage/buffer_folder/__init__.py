"""Replay buffers in folders: mapped columns behind a write-ahead log."""
