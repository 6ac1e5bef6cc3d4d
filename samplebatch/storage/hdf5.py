"""Nested values in HDF5 files, in Tianshou's layout.

A dict or batch is a group, an array or tensor a dataset, a number an attribute of its group. Arrays of strings are
datasets of strings; whatever else HDF5 has no form for is pickled into a dataset of bytes. The attribute
`__data_type__` says which is which. Pickles are read as data, without running them (see `inert_pickle`), so that
strings, None, lists and arrays of such come back from any file, and other objects only if the caller allows it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, TENSOR, values_of
from samplebatch.column.interface import Column
from samplebatch.errors import UnstorableError, require
from samplebatch.storage.hdf5_heaps import check_heaps
from samplebatch.storage.hdf5_reader import DTYPE_KEY, TYPE_KEY, Hdf5Reader, bound_of

if TYPE_CHECKING:
    import h5py


def to_hdf5(x: Mapping[str, Any] | Batch, y: h5py.Group, compression: str | None = None) -> None:
    """Write a dict or batch into a group of an HDF5 file.

    Parameters
    ----------
    x
        Values by name: arrays, tensors, numbers, strings, None, further dicts and batches, and whatever can be pickled.
    y
        The group, such as an open `h5py.File`.
    compression
        A filter of h5py's for datasets: `"gzip"`, `"lzf"`.

    Raises
    ------
    UnstorableError
        If a value can be neither stored nor pickled, or a name contains a slash or is empty; names it.
    MissingExtraError
        If h5py is not installed.

    Examples
    --------
    >>> import h5py, tempfile
    >>> with h5py.File(tempfile.mkdtemp() + "/a.hdf5", "w") as file:
    ...     to_hdf5({"rew": np.ones(2), "text": "hello", "info": {"lives": 3}}, file)
    ...     from_hdf5(file)
    {'info': {'lives': 3}, 'rew': array([1., 1.]), 'text': 'hello'}
    """
    require("h5py", "hdf5")
    _write_group(values_of(x) or {}, y, compression, "")


def from_hdf5(
    x: h5py.Group | h5py.Dataset,
    device: str | None = None,
    *,
    allow_pickle: bool = False,
    max_nbytes: int | None = None,
) -> Any:
    """Read a file of `to_hdf5`, ours or Tianshou's: a group as a dict or Batch, a dataset as its value.

    Parameters
    ----------
    x
        The group or dataset.
    device
        Where tensors go.
    allow_pickle
        Whether to unpickle objects. Only for files whose writer you trust: a pickle can run any code.
    max_nbytes
        Bytes of memory that may be made of the file; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    FormatError
        If the file is damaged, or leads to other files.
    CapacityError
        If more memory would be made of it than `max_nbytes`; names the dataset.
    UntrustedPickleError
        If an object is pickled that is no plain value, and `allow_pickle` is false; names it.
    MissingExtraError
        If h5py is not installed.
    """
    require("h5py", "hdf5")
    check_heaps(x.file.filename)
    reader = Hdf5Reader(bound_of(x.file, max_nbytes), device, allow_pickle=allow_pickle)
    return reader.read(x)


def _write_group(values: Mapping[Any, Any], group: h5py.Group, compression: str | None, prefix: str) -> None:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if not isinstance(name, str) or not name or "/" in name or name in (".", TYPE_KEY):
            raise UnstorableError(f"the name {path!r} must be one that HDF5 allows: a string without slashes")
        nested = values_of(value)
        if nested is not None:
            inner = group.create_group(name)
            if isinstance(value, Batch):
                inner.attrs[TYPE_KEY] = "Batch"
            _write_group(nested, inner, compression, f"{path}.")
        else:
            write_value(value, group, name, compression, path)


def write_value(value: Any, group: h5py.Group, name: str, compression: str | None, path: str) -> None:
    """Write one value that is no dict and no batch.

    Raises
    ------
    UnstorableError
        If it can be neither stored nor pickled; names it.
    """
    if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        try:
            group.attrs[name] = value
        except (OverflowError, TypeError):  # an integer of more than 64 bits
            _write_pickle(value, group, name, compression, path)
        return
    if isinstance(value, Column):
        value = value.to_numpy()
    kind = KINDS[type(value)]
    if kind == TENSOR:
        array, dtype = _tensor_array(value)
        _create(group, name, array, compression).attrs[TYPE_KEY] = "Tensor"
        if dtype:
            group[name].attrs[DTYPE_KEY] = dtype
    elif kind == ARRAY and (stored := _storable(value)) is not None:
        _create(group, name, stored, compression).attrs[TYPE_KEY] = "ndarray"
    else:
        _write_pickle(value, group, name, compression, path)


def _create(group: h5py.Group, name: str, array: npt.NDArray[Any], compression: str | None) -> h5py.Dataset:
    # HDF5 filters neither single values nor nothing at all.
    return group.create_dataset(name, data=array, compression=compression if array.ndim and array.size else None)


def _storable(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return an array as HDF5 stores it, or None if it has no form for it."""
    import h5py

    kind = array.dtype.kind
    if kind in "biufcS":
        return array
    if kind not in "OT" or not array.size:
        return None
    rows = array.ravel().tolist()
    types = set(map(type, rows))
    # Strings in HDF5 end at their first zero, and bytes that are not ASCII are no strings there.
    if types == {str} and not any("\0" in row for row in rows):
        try:
            for row in rows:
                row.encode()
        except UnicodeEncodeError:
            return None
        return array.astype(h5py.string_dtype())
    if types == {bytes} and all(row.isascii() and b"\0" not in row for row in rows):
        return array.astype(h5py.string_dtype("ascii"))
    return None


def _tensor_array(value: Any) -> tuple[npt.NDArray[Any], str]:
    """Return a tensor as an array, and its dtype if the array has another, that holds it."""
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    try:
        return plain.numpy(), ""
    except TypeError:  # a dtype that NumPy has not, such as bfloat16
        return plain.float().numpy(), str(plain.dtype).removeprefix("torch.")


def _write_pickle(value: Any, group: h5py.Group, name: str, compression: str | None, path: str) -> None:
    try:
        data = pickle.dumps(value, 4)
    except Exception as error:
        raise UnstorableError(
            f"column {path!r} must have values that HDF5 can store or that can be pickled, got {type(value).__name__}: "
            f"{error}"
        ) from error
    dataset = _create(group, name, np.frombuffer(data, np.int8), compression)
    dataset.attrs[TYPE_KEY] = "pickled_ndarray" if isinstance(value, np.ndarray) else type(value).__name__
