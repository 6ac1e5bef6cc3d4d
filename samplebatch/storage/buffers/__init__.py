"""Storage of replay buffers: state, files of every format, and memory-mapped folders with a write-ahead log."""
