"""Translation of errors that pyarrow, h5py, NumPy and torch raise for damaged files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError


@contextlib.contextmanager
def name_file_damage(name: str, form: str) -> Iterator[None]:
    """Translate errors that pyarrow raises for damaged bytes to library errors that contain the path.

    Raises FormatError if the `with` block raises an error of another library. Raises CapacityError if memory is
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
    # pyarrow reports damage by any of these exceptions.
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise FormatError(f"{name!r} must be an intact {form} file, got a damaged or truncated one: {error}") from error


@contextlib.contextmanager
def name_damage(where: str) -> Iterator[None]:
    """Translate any error that damaged bytes cause to a library error that contains the location of the bytes.

    pyarrow, h5py, NumPy and torch raise exceptions of many types for invalid bytes.

    where: location that the error message states: the file, or a dataset in the file.

    Raises FormatError if the `with` block raises an error of another library. Raises CapacityError if memory is
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
    """Translate any error that occurs while a buffer's file is read to a library error that contains the path.

    Errors that columns or rings raise for inconsistent values indicate that the file is damaged.

    Raises CapacityError if memory is insufficient. Propagates CapacityError and UntrustedPickleError, and raises
    FormatError for any other error of the `with` block.
    """
    try:
        with name_damage(f"the replay buffer in {path!r}"):
            yield
    except (FormatError, CapacityError, UntrustedPickleError):
        raise
    except SampleBatchError as error:
        raise FormatError(f"the replay buffer in {path!r} must be consistent: {error}") from error
