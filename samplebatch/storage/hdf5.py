"""HDF5 files with checksums: storage of batches, and of nested values in Tianshou's layout.

A batch is stored as one dataset per column; a JSON attribute contains the types, flags and layout. A nested batch is
stored in Tianshou's layout: a dict or batch is a group, an array or tensor is a dataset, and a number is an attribute
of the group that contains it. String arrays are stored as string datasets; values without an HDF5 type are pickled into
byte datasets. The attribute `__data_type__` records the original type of a value. Pickles are decoded as data without
execution (see `inert_pickle`). Strings, None, and lists and arrays of strings and None are read from any file; other
objects are read only if the caller allows pickles.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.arrow import read_flags, read_structures
from samplebatch.batch.flags import describe_flags
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, TENSOR, set_unit, unit_of, values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import FormatError, UnstorableError, require
from samplebatch.storage import checksums
from samplebatch.storage.files import check_suffix, file_bytes, replacing
from samplebatch.storage.foreign.damage import name_damage
from samplebatch.storage.foreign.hdf5 import DTYPE_KEY, TYPE_KEY, Hdf5Reader, bound_of, check_heaps
from samplebatch.storage.tables.batches import AnyBatch, choose

if TYPE_CHECKING:
    import h5py


def to_hdf5(x: Mapping[str, Any] | Batch, y: h5py.Group, compression: str | None = None) -> None:
    """Write a dict or batch to a group of an HDF5 file.

    Parameters
    ----------
    x
        Values by name: arrays, tensors, numbers, strings, None, nested dicts and batches, and picklable objects.
    y
        Group, such as an open `h5py.File`.
    compression
        h5py filter for datasets: `"gzip"` or `"lzf"`; None for no compression.

    Raises
    ------
    UnstorableError
        If a value can be neither stored nor pickled, or a name is empty or contains a slash.
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
    """Read a dict, Batch or single value that `to_hdf5` of this library or Tianshou wrote.

    Parameters
    ----------
    x
        Group or dataset.
    device
        Device of tensors.
    allow_pickle
        Whether to unpickle objects. A pickle can execute arbitrary code, so pass True only for files from a trusted
        writer.
    max_nbytes
        Maximum bytes to allocate; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If the file is damaged or links to other files.
    CapacityError
        If more than `max_nbytes` would be allocated.
    UntrustedPickleError
        If `allow_pickle` is false and a pickle contains an object that is not a plain value.
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
            invalid = path if isinstance(name, str) else name
            raise UnstorableError(f"names must be valid in HDF5 (non-empty strings without slashes), got {invalid!r}")
        nested = values_of(value)
        if nested is not None:
            inner = group.create_group(name)
            if isinstance(value, Batch):
                inner.attrs[TYPE_KEY] = "Batch"
            _write_group(nested, inner, compression, f"{path}.")
        else:
            write_value(value, group, name, compression, path)


def write_value(value: Any, group: h5py.Group, name: str, compression: str | None, path: str) -> None:
    """Write one value that is not a dict or batch.

    Raises UnstorableError if the value can be neither stored nor pickled.
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
    elif kind == ARRAY and (stored := storable(value)) is not None:
        _create(group, name, stored, compression).attrs[TYPE_KEY] = "ndarray"
    else:
        _write_pickle(value, group, name, compression, path)


def _create(group: h5py.Group, name: str, array: npt.NDArray[Any], compression: str | None) -> h5py.Dataset:
    # HDF5 cannot filter scalars and empty datasets.
    return group.create_dataset(name, data=array, compression=compression if array.ndim and array.size else None)


def storable(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Convert an array to a dtype that HDF5 supports; return None if no such dtype exists."""
    import h5py

    kind = array.dtype.kind
    if kind in "biufcS":
        return array
    if kind not in "OT" or not array.size:
        return None
    rows = array.ravel().tolist()
    types = set(map(type, rows))
    # HDF5 strings end at their first zero, and its byte strings must be ASCII.
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
    """Convert a tensor to an array; also return the tensor's dtype if NumPy has no equivalent."""
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    try:
        return plain.numpy(), ""
    except TypeError:  # a dtype that NumPy lacks, such as bfloat16
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


@contextlib.contextmanager
def hdf5_writer(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[h5py.File]:
    """Open an HDF5 file with checksums for writing; the file replaces `path` if the `with` block succeeds."""
    h5py = require("h5py", "hdf5")
    check_suffix(path, "HDF5")
    with replacing(path, durable=durable) as written:
        # The first format version with attributes of any size.
        with h5py.File(written.name, "w", libver=("v108", "v108")) as file:
            yield file
        checksums.add(written, checksums.HDF5)


@contextlib.contextmanager
def hdf5_file(path: str | os.PathLike[str], *, verify: bool = True) -> Iterator[h5py.File]:
    """Check the string heaps and, with `verify`, the checksums of an HDF5 file, and open the file for reading."""
    h5py = require("h5py", "hdf5")
    name = os.fspath(path)
    with open(name, "rb"):
        pass
    if not h5py.is_hdf5(name):
        raise FormatError(f"{name!r} must be an HDF5 file, got another format")
    check_heaps(name)
    if verify:
        check_hdf5(file_bytes(name, memory_map=True), name)
    try:
        file = h5py.File(name, "r")
    except (OSError, RuntimeError) as error:
        raise FormatError(f"{name!r} must be an intact HDF5 file: {error}") from error
    with file:
        yield file


def check_hdf5(data: pa.Buffer, name: str) -> bool:
    """Verify all bytes of an HDF5 file against its checksums; return whether the file has checksums."""
    return checksums.verify(data, checksums.HDF5, name, lambda start, stop: _datasets_at(name, start, stop))


def _datasets_at(name: str, start: int, stop: int) -> list[str]:
    """Return the names of datasets with values between two offsets of an HDF5 file."""
    import h5py

    names: list[str] = []

    def visit(path: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            chunks = [item.id.get_chunk_info(i) for i in range(item.id.get_num_chunks())] if item.chunks else []
            ranges = [(chunk.byte_offset, chunk.size) for chunk in chunks]
            if not item.chunks and item.id.get_offset() is not None:
                ranges = [(item.id.get_offset(), item.id.get_storage_size())]
            if any(at < stop and at + nbytes > start for at, nbytes in ranges):
                names.append(path.removeprefix("_meta/").replace("/", "."))

    # The damage may affect the layout of the datasets.
    with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError), h5py.File(name, "r") as file:
        file.visititems(visit)
    return names


_ABOUT = "samplebatch.batch"
"""Attribute of a file or a policy's group that describes its batch as JSON."""

_VERSION = 1


def write_hdf5(
    batch: AnyBatch, path: str | os.PathLike[str], compression: str | None = None, *, durable: bool = True
) -> None:
    """Write a batch atomically to an HDF5 file."""
    with hdf5_writer(path, durable=durable) as file:
        if isinstance(batch, Batch):
            file.attrs[TYPE_KEY] = "Batch"
            unit = unit_of(batch)
            described = {} if unit is None else {"action_unit": unit.describe()}
            file.attrs[_ABOUT] = json.dumps({"version": _VERSION, "type": "Batch", **described})
            to_hdf5(batch, file, compression)
        elif isinstance(batch, SampleBatch):
            _write_columns(batch, file, compression)
        else:
            about = {"version": _VERSION, "type": "MultiAgentBatch", "env_steps": batch.count, "policies": list(batch)}
            file.attrs[_ABOUT] = json.dumps(about, default=np.generic.item)
            for i, part in enumerate(batch.policy_batches.values()):
                _write_columns(part, file.create_group(str(i)), compression)


def _write_columns(batch: SampleBatch, group: h5py.Group, compression: str | None) -> None:
    columns: Mapping[str, Column] = batch._all()
    about = {
        "version": _VERSION,
        "type": "SampleBatch",
        "nested": dict(batch._nested),
        "flags": describe_flags(batch._flags),
        "columns": {name: column.kind for name, column in columns.items()},
    }
    group.attrs[_ABOUT] = json.dumps(about, default=np.generic.item)
    for name, column in columns.items():
        if isinstance(column, VaryingRows):
            offsets, shapes = column.layout
            rows = {"elements": column.flat, "offsets": offsets, **({} if shapes is None else {"shapes": shapes})}
            to_hdf5({name: rows}, group)
        elif isinstance(column, TextColumn):
            _write_text(column, group, name, compression)
        else:
            value = column.to_torch() if column.kind == "torch" else column.to_numpy()
            write_value(value, group, name, compression, name)


def _write_text(column: TextColumn, group: h5py.Group, name: str, compression: str | None) -> None:
    """Write a string dataset, or the column's buffers if its values include byte strings, zero bytes or None."""
    if column.is_text and not column.array.null_count and storable(column.values) is not None:
        write_value(column.values, group, name, compression, name)
        return
    header, buffers = column.dump()
    dtypes = {"data": np.uint8, "offsets": np.int64, "present": np.uint8}
    parts = {part: np.frombuffer(buffer, dtype) for (part, dtype), buffer in zip(dtypes.items(), buffers, strict=False)}
    to_hdf5({name: {"header": json.dumps(header), **parts}}, group)


def read_hdf5(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
) -> AnyBatch:
    """Read all or some columns of a batch from an HDF5 file that `write_hdf5` wrote."""
    with hdf5_file(path, verify=verify) as file, name_damage(repr(os.fspath(path))):
        reader = Hdf5Reader(bound_of(file, max_nbytes), allow_pickle=allow_pickle)
        about = _about(file, reader)
        if about["type"] == "SampleBatch":
            return _read_columns(file, about, reader, columns)
        if about["type"] == "Batch":
            nested, unit = _read_nested(file, reader, columns), about.get("action_unit")
            if unit is not None:
                set_unit(nested, ActionUnit.from_description(unit))
            return nested
        policies = list(about["policies"])
        for policy in policies:
            if type(policy) not in (str, int):
                raise FormatError(f"policies must have strings or integers as ids, got {describe_value(policy)}")
        if len(set(policies)) < len(policies):
            repeated = Counter(policies).most_common(1)[0][0]
            raise FormatError(f"policies must have unique ids, got {describe_value(repeated)} twice")
        groups = reader.children(file)
        parts = {}
        for i, policy in enumerate(policies):
            group = groups[str(i)]
            group_about = _about(group, reader)
            present = [name for name in columns or () if _is_in(name, group_about["columns"])]
            parts[policy] = _read_columns(group, group_about, reader, None if columns is None else present)
        if columns is not None:
            choose(
                columns, [name for group in groups.values() for name in _about(group, reader)["columns"]], "the file"
            )
        return MultiAgentBatch(parts, int(about["env_steps"]))


def holds_batch(path: str | os.PathLike[str]) -> bool:
    """Return whether an HDF5 file contains a batch rather than a buffer.

    Raises FormatError if the file contains neither.
    """
    with hdf5_file(path, verify=False) as file, name_damage(repr(os.fspath(path))):
        if _ABOUT not in file.attrs and "_indices" not in file:
            raise FormatError(
                f"{os.fspath(path)!r} must be a batch or a buffer that save wrote, got other values; "
                "pass it to from_hdf5"
            )
        return _ABOUT in file.attrs


def _is_in(name: str, columns: Mapping[str, Any]) -> bool:
    return any(column == name or column.startswith(f"{name}.") for column in columns)


def _about(group: h5py.Group, reader: Hdf5Reader) -> dict[str, Any]:
    about = json.loads(reader.attributes(group)[_ABOUT])
    if about["version"] != _VERSION:
        raise FormatError(f"the batch must have version {_VERSION}, got version {describe_value(about['version'])}")
    return dict(about)


def _read_nested(file: h5py.File, reader: Hdf5Reader, columns: Sequence[str] | None) -> Batch:
    if columns is None:
        batch = reader.read(file)
        if not isinstance(batch, Batch):
            raise FormatError(f"the file must contain a nested batch, got a {type(batch).__name__}")
        del batch.__dict__[_ABOUT]
        return batch
    children = reader.children(file)
    selected = set(choose([name.split(".")[0] for name in columns], list(children), "the file"))
    return Batch({name: reader.read(child) for name, child in children.items() if name in selected})


def _read_columns(
    group: h5py.Group, about: Mapping[str, Any], reader: Hdf5Reader, requested: Sequence[str] | None
) -> SampleBatch:
    kinds = dict(about["columns"])
    children, attributes = reader.children(group), reader.attributes(group)
    columns = {}
    for name in choose(requested, list(kinds), "the file"):
        value = reader.read(children[name]) if name in children else attributes[name]
        columns[name] = _column(name, str(kinds[name]), value)
    nested = {
        top: tree
        for top, tree in read_structures(about["nested"]).items()
        if sum(_is_in(top, {name: None}) for name in kinds) == sum(_is_in(top, {name: None}) for name in columns)
    }
    return SampleBatch._of(columns, nested, read_flags(about["flags"]))


def _column(name: str, kind: str, value: Any) -> Column:
    """Create a column from stored values.

    Raises FormatError if the values do not have the recorded column type.
    """
    if kind == RaggedColumn.kind:
        return _ragged(value)
    if kind == RaggedTorchColumn.kind:
        elements = as_column(value["elements"], name)
        if not isinstance(elements, TorchColumn):
            raise FormatError(f"column {name!r} must have elements in a tensor, got {elements.kind!r}")
        (_, dtype_name, _), (bits,) = elements.dump()
        return RaggedTorchColumn.from_bits(_ragged({**value, "elements": bits}), dtype_name)
    if kind == ObjectColumn.kind:
        return ObjectColumn.from_array(np.asarray(value), name)
    if kind == TextColumn.kind:
        return _text(name, value)
    column = as_column(value, name)
    # The file stores compressed columns uncompressed, and earlier versions stored fixed-width strings as tensors.
    if column.kind != kind and not isinstance(column, TensorColumn | TextColumn):
        raise FormatError(f"column {name!r} must be of kind {kind!r}, got {column.kind!r}")
    return column


def _text(name: str, value: Any) -> TextColumn:
    """Create a column of strings from stored values.

    Raises FormatError if the values are inconsistent.
    """
    if isinstance(value, np.ndarray):
        text = TextColumn.from_objects(value) if value.dtype.kind == "O" else None
        if text is None:
            raise FormatError(f"column {name!r} must have strings, got values of dtype {value.dtype}")
        return text
    buffers = [np.ascontiguousarray(value[part]) for part in ("data", "offsets", "present") if part in value]
    header = json.loads(value["header"])
    return TextColumn.load(header, [buffer.reshape(-1).view(np.uint8) for buffer in buffers])


def _ragged(value: Any) -> RaggedColumn:
    """Create a ragged column from stored arrays.

    Raises FormatError if the arrays are inconsistent.
    """
    elements, offsets, *shapes = [
        np.asarray(value[part]) for part in ("elements", "offsets", "shapes") if part in value
    ]
    ndim = shapes[0].shape[1] if shapes else 1
    header = (RaggedColumn.kind, elements.dtype.str, len(offsets) - 1, ndim)
    return RaggedColumn.load(header, [elements.view(np.uint8), offsets.astype(np.int64), *shapes])
