"""Errors of what reads files, in the library's words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError


@contextlib.contextmanager
def damage_named(where: str) -> Iterator[None]:
    """Turn whatever is raised at damaged bytes into an error that names where they are.

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
    >>> with damage_named("'buffer.hdf5'"):
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
def buffer_damage_named(path: str) -> Iterator[None]:
    """Turn whatever is raised while a buffer is put together from a file into an error that names the file.

    What columns and rings say of values that do not fit each other says of a file that it is damaged.

    Raises
    ------
    FormatError
        If anything is raised within but the errors below.
    CapacityError, UntrustedPickleError
        If one is raised within, or there is not as much memory as would be needed.
    """
    try:
        with damage_named(f"the replay buffer in {path!r}"):
            yield
    except (FormatError, CapacityError, UntrustedPickleError):
        raise
    except SampleBatchError as error:
        raise FormatError(f"the replay buffer in {path!r} must fit itself, and it does not: {error}") from error
