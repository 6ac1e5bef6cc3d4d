"""Storage of replay buffers in files of every format and in memory-mapped folders with a write-ahead log."""
