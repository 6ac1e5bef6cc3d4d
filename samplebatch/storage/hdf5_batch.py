"""Batches in HDF5 files: a dataset for each column, and JSON for types, flags and layout.

A nested batch lies as `to_hdf5` writes it, in Tianshou's layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.batch.arrow import read_flags, read_structures
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.ragged_torch import RaggedTorchColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import FormatError
from samplebatch.storage.batch_table import AnyBatch
from samplebatch.storage.damage import name_damage
from samplebatch.storage.hdf5 import to_hdf5, write_value
from samplebatch.storage.hdf5_file import hdf5_file, hdf5_writer
from samplebatch.storage.hdf5_reader import TYPE_KEY, Hdf5Reader, bound_of
from samplebatch.storage.selection import choose

if TYPE_CHECKING:
    import h5py

_ABOUT = "samplebatch.batch"
"""Attribute of the file, or of a policy's group, with the description of its batch as JSON."""

_VERSION = 1


def write_hdf5(
    batch: AnyBatch, path: str | os.PathLike[str], compression: str | None = None, *, durable: bool = True
) -> None:
    """Write a batch to an HDF5 file, whole or not at all.

    Raises
    ------
    UnstorableError
        If a value can be neither stored nor pickled, or a column's name has a slash; names it.
    MissingExtraError
        If h5py is not installed.
    OSError
        If the file cannot be written.
    """
    with hdf5_writer(path, durable=durable) as file:
        if isinstance(batch, Batch):
            file.attrs[TYPE_KEY] = "Batch"
            file.attrs[_ABOUT] = json.dumps({"version": _VERSION, "type": "Batch"})
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
        "flags": asdict(batch._flags),
        "columns": {name: column.kind for name, column in columns.items()},
    }
    group.attrs[_ABOUT] = json.dumps(about, default=np.generic.item)
    for name, column in columns.items():
        if isinstance(column, VaryingRows):
            offsets, shapes = column.layout
            rows = {"elements": column.flat, "offsets": offsets, **({} if shapes is None else {"shapes": shapes})}
            to_hdf5({name: rows}, group)
        else:
            value = column.to_torch() if column.kind == "torch" else column.to_numpy()
            write_value(value, group, name, compression, name)


def read_hdf5(
    path: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    *,
    allow_pickle: bool = False,
    verify: bool = True,
    max_nbytes: int | None = None,
) -> AnyBatch:
    """Read a batch from an HDF5 file of `write_hdf5`, all or some of its columns.

    Raises
    ------
    FormatError
        If the file is damaged, or holds something else.
    ColumnNotFoundError
        If there is no such column.
    UntrustedPickleError
        If objects are pickled that are no plain values, and `allow_pickle` is false; names the column.
    CapacityError
        If more memory would be made of the file than `max_nbytes`; names the dataset.
    """
    with hdf5_file(path, verify=verify) as file, name_damage(repr(os.fspath(path))):
        reader = Hdf5Reader(bound_of(file, max_nbytes), allow_pickle=allow_pickle)
        about = _about(file, reader)
        if about["type"] == "SampleBatch":
            return _read_columns(file, about, reader, columns)
        if about["type"] == "Batch":
            return _read_nested(file, reader, columns)
        policies = list(about["policies"])
        if not all(type(policy) in (str, int) for policy in policies) or len(set(policies)) < len(policies):
            raise FormatError("policies must have ids of their own, strings or integers, they have not")
        groups = reader.children(file)
        parts = {}
        for i, policy in enumerate(policies):
            group = groups[str(i)]
            own = _about(group, reader)
            known = [name for name in columns or () if _is_in(name, own["columns"])]
            parts[policy] = _read_columns(group, own, reader, None if columns is None else known)
        if columns is not None:
            choose(
                columns, [name for group in groups.values() for name in _about(group, reader)["columns"]], "the file"
            )
        return MultiAgentBatch(parts, int(about["env_steps"]))


def holds_batch(path: str | os.PathLike[str]) -> bool:
    """Tell whether an HDF5 file holds a batch of `write_hdf5`, or else a buffer.

    Raises
    ------
    FormatError
        If it holds neither.
    """
    with hdf5_file(path, verify=False) as file, name_damage(repr(os.fspath(path))):
        if _ABOUT not in file.attrs and "_indices" not in file:
            raise FormatError(
                f"{os.fspath(path)!r} must be a batch or a buffer that save wrote, got other values; "
                "from_hdf5 may take them"
            )
        return _ABOUT in file.attrs


def _is_in(name: str, columns: Mapping[str, Any]) -> bool:
    return any(column == name or column.startswith(f"{name}.") for column in columns)


def _about(group: h5py.Group, reader: Hdf5Reader) -> dict[str, Any]:
    about = json.loads(reader.attributes(group)[_ABOUT])
    if about["version"] != _VERSION:
        raise FormatError(f"the batch was written as version {about['version']}, this library reads {_VERSION}")
    return dict(about)


def _read_nested(file: h5py.File, reader: Hdf5Reader, columns: Sequence[str] | None) -> Batch:
    if columns is None:
        batch = reader.read(file)
        if not isinstance(batch, Batch):
            raise FormatError("the file must hold a nested batch, it holds other values")
        del batch.__dict__[_ABOUT]
        return batch
    children = reader.children(file)
    held = set(choose([name.split(".")[0] for name in columns], list(children), "the file"))
    return Batch({name: reader.read(child) for name, child in children.items() if name in held})


def _read_columns(
    group: h5py.Group, about: Mapping[str, Any], reader: Hdf5Reader, wanted: Sequence[str] | None
) -> SampleBatch:
    kinds = dict(about["columns"])
    children, attributes = reader.children(group), reader.attributes(group)
    columns = {}
    for name in choose(wanted, list(kinds), "the file"):
        value = reader.read(children[name]) if name in children else attributes[name]
        columns[name] = _column(name, str(kinds[name]), value)
    nested = {
        top: tree
        for top, tree in read_structures(about["nested"]).items()
        if sum(_is_in(top, {name: None}) for name in kinds) == sum(_is_in(top, {name: None}) for name in columns)
    }
    return SampleBatch._of(columns, nested, read_flags(about["flags"]))


def _column(name: str, kind: str, value: Any) -> Column:
    """Make a column of rows that were read; raises FormatError if it is of another kind than the file says."""
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
    column = as_column(value, name)
    # What was compressed in memory is not so in the file.
    if column.kind != kind and not isinstance(column, TensorColumn):
        raise FormatError(f"column {name!r} must be of kind {kind!r}, got {column.kind!r}")
    return column


def _ragged(value: Any) -> RaggedColumn:
    """Make rows of varying shape of the arrays that were read; raises FormatError if they do not fit each other."""
    elements, offsets, *shapes = [
        np.asarray(value[part]) for part in ("elements", "offsets", "shapes") if part in value
    ]
    ndim = shapes[0].shape[1] if shapes else 1
    header = (RaggedColumn.kind, elements.dtype.str, len(offsets) - 1, ndim)
    return RaggedColumn.load(header, [elements.view(np.uint8), offsets.astype(np.int64), *shapes])
