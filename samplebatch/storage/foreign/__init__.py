"""Readers of untrusted files: sizes are validated before pyarrow or HDF5 allocates memory.

A small file can declare columns of any size, which pyarrow and HDF5 do not verify, and damaged metadata can terminate
the process. These readers first compare the metadata with the bytes of the file. `column.memory_bound` counts the
memory that is allocated for a file, and `column.unpickling` reads pickles as data.
"""
