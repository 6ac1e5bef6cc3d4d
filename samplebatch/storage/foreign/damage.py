"""Errors of damaged files, raised by readers in place of those of pyarrow, h5py, NumPy and torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError


@contextlib.contextmanager
def name_file_damage(name: str, form: str) -> Iterator[None]:
    """Convert errors of pyarrow at damaged bytes into one that names the file.

    Raises
    ------
    FormatError
        If anything is raised within that is no error of the library's.
    CapacityError
        If there is not as much memory as would be needed.
    """
    try:
        yield
    except FormatError as error:
        if repr(name) in str(error):
            raise
        raise FormatError(f"{name!r} must be a whole {form} file, and it is not: {error}") from error
    except SampleBatchError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{name!r} must fit into memory, it does not: {error}") from error
    # pyarrow words damage in many ways: what it cannot decode is any of these.
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(f"{name!r} must be a whole {form} file, and it is damaged or cut short: {error}") from error


@contextlib.contextmanager
def name_damage(where: str) -> Iterator[None]:
    """Convert any error at damaged bytes into one that names where they are.

    pyarrow, h5py, NumPy and torch raise errors of many kinds at bytes that cannot be.

    Parameters
    ----------
    where
        The first words of a sentence: the file, or the dataset in it.

    Raises
    ------
    FormatError
        If anything is raised within that is no error of the library's.
    CapacityError
        If there is not as much memory as would be needed.

    Examples
    --------
    >>> with name_damage("'buffer.hdf5'"):
    ...     {}["rings"]
    Traceback (most recent call last):
    samplebatch.errors.FormatError: 'buffer.hdf5' must be whole, and it is damaged: KeyError('rings')
    """
    try:
        yield
    except SampleBatchError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{where} must fit into memory, it does not: {error}") from error
    except Exception as error:
        raise FormatError(f"{where} must be whole, and it is damaged: {error!r}") from error


@contextlib.contextmanager
def name_buffer_damage(path: str) -> Iterator[None]:
    """Convert any error while a buffer is read from a file into one that names the file.

    What columns and rings say of values that do not fit each other says of a file that it is damaged.

    Raises
    ------
    FormatError
        If anything is raised within but the errors below.
    CapacityError, UntrustedPickleError
        If one is raised within, or there is not as much memory as would be needed.
    """
    try:
        with name_damage(f"the replay buffer in {path!r}"):
            yield
    except (FormatError, CapacityError, UntrustedPickleError):
        raise
    except SampleBatchError as error:
        raise FormatError(f"the replay buffer in {path!r} must fit itself, and it does not: {error}") from error
