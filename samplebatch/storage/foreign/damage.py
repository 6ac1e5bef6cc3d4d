"""Errors for damaged files, which replace errors of pyarrow, h5py, NumPy and torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError


@contextlib.contextmanager
def name_file_damage(name: str, form: str) -> Iterator[None]:
    """Convert errors of pyarrow about damaged bytes to library errors that contain the path.

    Raises FormatError if the block raises an error that is not the library's. Raises CapacityError if memory is
    insufficient.
    """
    try:
        yield
    except FormatError as error:
        if repr(name) in str(error):
            raise
        raise FormatError(f"{name!r} must be an intact {form} file: {error}") from error
    except SampleBatchError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{name!r} must fit into memory: {error}") from error
    # pyarrow reports damage by any of these.
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(f"{name!r} must be an intact {form} file, got a damaged or truncated one: {error}") from error


@contextlib.contextmanager
def name_damage(where: str) -> Iterator[None]:
    """Convert any error about damaged bytes to a library error that contains their location.

    pyarrow, h5py, NumPy and torch raise errors of many types for invalid bytes.

    where: location for the message: the file, or a dataset in the file.

    Raises FormatError if the block raises an error that is not the library's. Raises CapacityError if memory is
    insufficient.

    >>> with name_damage("'buffer.hdf5'"):
    ...     {}["rings"]
    Traceback (most recent call last):
    samplebatch.errors.FormatError: 'buffer.hdf5' must be intact, got damaged data:
        KeyError('rings')
    """
    try:
        yield
    except SampleBatchError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{where} must fit into memory: {error}") from error
    except Exception as error:
        raise FormatError(f"{where} must be intact, got damaged data: {error!r}") from error


@contextlib.contextmanager
def name_buffer_damage(path: str) -> Iterator[None]:
    """Convert any error from reading a buffer's file to a library error that contains the path.

    Errors of columns and rings about inconsistent values mean that the file is damaged.

    Raises FormatError if the block raises any other error. Raises CapacityError or UntrustedPickleError if the block
    raises them, or memory is insufficient.
    """
    try:
        with name_damage(f"the replay buffer in {path!r}"):
            yield
    except (FormatError, CapacityError, UntrustedPickleError):
        raise
    except SampleBatchError as error:
        raise FormatError(f"the replay buffer in {path!r} must be consistent: {error}") from error
