"""Readers of untrusted files; declared sizes are validated before pyarrow or HDF5 allocates memory.

A small file can declare columns of any size, because pyarrow and HDF5 do not verify the declared sizes. Damaged
metadata can also terminate the process. The readers of this package therefore first compare the metadata with the bytes
of the file. `column.memory_bound` limits the memory that is allocated for a file, and `column.unpickling` decodes
pickles as data.
"""
