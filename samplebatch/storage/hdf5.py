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
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ColumnTypeError, FormatError, UnstorableError, require
from samplebatch.storage.inert_pickle import is_plain, read_pickle

if TYPE_CHECKING:
    import h5py

TYPE_KEY = "__data_type__"
_DTYPE_KEY = "__torch_dtype__"


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


def from_hdf5(x: h5py.Group | h5py.Dataset, device: str | None = None, *, allow_pickle: bool = False) -> Any:
    """Read what `to_hdf5`, ours or Tianshou's, wrote: a group as a dict or Batch, a dataset as its value.

    Parameters
    ----------
    x
        The group or dataset.
    device
        Where tensors go.
    allow_pickle
        Whether to unpickle objects. Only for files whose writer you trust: a pickle can run any code.

    Raises
    ------
    FormatError
        If the file is damaged, or leads to other files.
    UntrustedPickleError
        If an object is pickled that is no plain value, and `allow_pickle` is false; names it.
    MissingExtraError
        If h5py is not installed.
    """
    require("h5py", "hdf5")
    try:
        return _read(x, device, allow_pickle=allow_pickle)
    except RecursionError as error:
        raise FormatError(f"{x.name!r} must be a tree of groups, and some contain each other") from error


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
            group[name].attrs[_DTYPE_KEY] = dtype
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


def _read(x: Any, device: str | None, *, allow_pickle: bool = False) -> Any:
    import h5py

    if isinstance(x, h5py.Dataset):
        return read_value(x, device, allow_pickle=allow_pickle)
    values = attributes_of(x)
    is_batch = values.pop(TYPE_KEY, None) == "Batch"
    for name, child in children_of(x).items():
        values[name] = _read(child, device, allow_pickle=allow_pickle)
    return Batch(values) if is_batch else values


def attributes_of(group: h5py.Group) -> dict[str, Any]:
    """Return the attributes of a group, numbers as Python's."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in group.attrs.items()}


def children_of(group: h5py.Group) -> dict[str, Any]:
    """Return what is in a group.

    Raises
    ------
    FormatError
        If a link leads out of the file, or a dataset's values lie elsewhere.
    """
    import h5py

    found = {}
    for name in group:
        child = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        foreign = child is None or (isinstance(child, h5py.Dataset) and (child.external or child.is_virtual))
        if foreign or not isinstance(child, (h5py.Dataset, h5py.Group)):
            raise FormatError(f"{group.name}/{name} must be in the file itself, and it is a link or a type")
        found[name] = child
    return found


def read_value(dataset: h5py.Dataset, device: str | None = None, *, allow_pickle: bool = False) -> Any:
    """Read one value that was no dict and no batch.

    Raises
    ------
    FormatError
        If the dataset is not what it says it is.
    UntrustedPickleError
        If the value is a pickled object, and `allow_pickle` is false; names it.
    """
    kind = dataset.attrs.get(TYPE_KEY, "ndarray")
    if kind == "Tensor":
        import torch

        tensor = torch.from_numpy(np.array(dataset))
        dtype = getattr(torch, str(dataset.attrs.get(_DTYPE_KEY, "")), tensor.dtype)
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"{dataset.name!r} must name a dtype of torch's, it does not")
        return tensor.to(device=device, dtype=dtype)
    if kind == "ndarray":
        return _read_array(dataset)
    value = read_inert(dataset)
    if is_plain(value):
        return value
    return unpickle([dataset[()].tobytes()], repr(dataset.name), allow_pickle=allow_pickle)[0]


def read_inert(dataset: h5py.Dataset) -> Any:
    """Read a pickled value as data; see `read_pickle`.

    Raises
    ------
    FormatError
        If it is no pickle.
    """
    if dataset.dtype.itemsize != 1 or dataset.dtype.kind not in "iu" or dataset.ndim != 1:
        raise FormatError(f"{dataset.name!r} must hold the bytes of a pickle, got {dataset.dtype} of {dataset.shape}")
    return read_pickle(dataset[()].tobytes())


def _read_array(dataset: h5py.Dataset) -> npt.NDArray[Any]:
    import h5py

    strings = h5py.check_string_dtype(dataset.dtype)
    if strings is not None and strings.length is None and strings.encoding == "utf-8":
        return np.array(dataset.asstr(errors="surrogateescape")[()], object)
    found = np.array(dataset)
    if found.dtype.kind in "biufcS" or strings is not None:
        # Without the notes of h5py's that its dtypes carry along.
        return found.astype(np.dtype(found.dtype.str)) if found.dtype.metadata else found
    raise ColumnTypeError(f"{dataset.name!r} has dtype {found.dtype}, which no column can hold")
