"""Readers of files that anyone may have written: sizes are checked before pyarrow or HDF5 allocates memory.

A file of few bytes can describe columns of any size, and pyarrow and HDF5 believe it; damaged descriptions can end the
process. These readers hold descriptions against the bytes of the file first. `column.memory_bound` counts what is made
of a file, and `column.unpickling` reads pickles as data.
"""
