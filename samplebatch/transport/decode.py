"""Decoding: batches put together over the bytes that a message names.

Everything that a message says is checked before the memory is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.frame import load_columns
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.names import SEQ_LENS
from samplebatch.transport.encode import AnyBatch
from samplebatch.transport.schema import (
    BARE,
    GRADIENT,
    NESTED_BATCH,
    SAMPLE_BATCH,
    SCALAR,
    Fixed,
    Part,
    Place,
    Plan,
    Schema,
    Variable,
)
from samplebatch.transport.wire import (
    COLUMN,
    ENV_STEPS,
    FLAGS,
    OBJECTS,
    PLAIN,
    VALUE,
    VARIABLE,
    count_of,
    flags_of,
)

DAMAGE = (
    SampleBatchError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StopIteration,
)
"""Errors that Python, NumPy, torch and the library raise where a message is impossible."""

Root = npt.NDArray[np.uint8]
"""The bytes of a block, which is held as long as there is an array over them."""

_TOO_MANY = "column {!r} must have objects for which its message has bytes; send fewer rows at a time"
_ndarray = np.ndarray
_new = object.__new__

Cut = Callable[[int], Root]
"""Cuts the next buffer, of a given number of bytes."""


def decode(
    schema: Schema, plan: Plan, metadata: Mapping[str, Any], root: Root, cut: Cut, *, allow_pickle: bool = False
) -> AnyBatch:
    """Put a batch together over the bytes of its block.

    Parameters
    ----------
    schema
        The description of its columns.
    plan
        Where they lie.
    metadata
        All else that the message has.
    root
        The block, which has at least the plan's bytes.
    cut
        Cuts the buffers of variable columns, one after the other.
    allow_pickle
        Whether pickled columns may be unpickled.

    Raises
    ------
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    FormatError
        If they do not agree; or another of `DAMAGE`.
    """
    entries = metadata.get(VARIABLE) or [()] * len(schema.parts)
    bound = MemoryBound("the message", root.nbytes)
    variable = [VariableColumns(own, cut, bound, allow_pickle=allow_pickle) for own in entries]
    if schema.kind == NESTED_BATCH:
        return build_tree(schema.parts[0], plan.parts[0], root, variable[0])
    flags = [flags_of(own) for own in metadata[FLAGS]] if FLAGS in metadata else [DEFAULT] * len(schema.parts)
    batches = [
        _sample_batch(part, places, root, own, own_flags)
        for part, places, own, own_flags in zip(schema.parts, plan.parts, variable, flags, strict=True)
    ]
    if schema.kind == SAMPLE_BATCH:
        return batches[0]
    labels = [part.label for part in schema.parts]
    return MultiAgentBatch._of(dict(zip(labels, batches, strict=True)), count_of(metadata[ENV_STEPS]))


class VariableColumns:
    """The variable columns of one batch of a message, put together one after the other."""

    def __init__(self, entries: Iterable[Any], cut: Cut, bound: MemoryBound, *, allow_pickle: bool = False) -> None:
        self._entries = iter(entries)
        self._cut = cut
        self._bound = bound
        self._allow_pickle = allow_pickle

    def fixed(self, place: Place, root: Root) -> Column:
        """Make a column over its place in a block, or one of empty dicts; raises as `decode` does."""
        if place.column.form != BARE:
            return fixed_column(place, root)
        column = ObjectColumn.empty_dicts(place.shape[0])
        try:
            self._bound.take(column.nbytes, "")
        except CapacityError as error:
            raise CapacityError(_TOO_MANY.format(place.column.name)) from error
        return column

    def entry(self) -> Any:
        """Return the entry of the next column in the metadata; raises as `decode` does."""
        return next(self._entries)

    def column(self, name: str, entry: Any) -> Column:
        """Put a column together; raises as `decode` does."""
        header, sizes = entry
        buffers = [self._cut(count_of(nbytes)) for nbytes in sizes]
        if header[0] == ObjectColumn.kind:
            # Objects may keep what they are made from, and are not to hold the block.
            buffers = [buffer.copy() for buffer in buffers]
            try:
                ObjectColumn.check_dumped(header, buffers, name, self._bound)
            except CapacityError as error:
                raise CapacityError(_TOO_MANY.format(name)) from error
        try:
            return load_columns([(name, len(buffers), header)], buffers, allow_pickle=self._allow_pickle)[name]
        except UntrustedPickleError as error:
            raise UntrustedPickleError(
                f"column {name!r} holds pickled objects, and unpickling runs code that its sender chose; "
                "make the channel with allow_pickle=True if you trust it"
            ) from error


def _sample_batch(part: Part, places: list[Place], root: Root, variable: VariableColumns, flags: Flags) -> SampleBatch:
    columns: dict[str, Column] = {}
    if part.has_variable:
        fixed = iter(places)
        for column in part.columns:
            if isinstance(column, Variable):
                columns[column.name] = variable.column(column.name, variable.entry())
            else:
                columns[column.name] = variable.fixed(next(fixed), root)
    else:
        for place in places:
            (name, dtype, _, torch, form), shape, offset = place
            if torch is None and form != BARE:
                columns[name] = made = _new(TensorColumn)
                made.values = _ndarray(shape, dtype, root, offset)
            else:
                columns[name] = variable.fixed(place, root)
    if SEQ_LENS in columns:
        # Before they are checked: the sender must not change where sequences begin.
        columns[SEQ_LENS] = columns[SEQ_LENS].copy()
    return SampleBatch._of(columns, part.nested, flags)


def fixed_column(place: Place, root: Root) -> TensorColumn | TorchColumn:
    """Make a column over its place in a block."""
    column, shape, offset = place
    values: npt.NDArray[Any] = _ndarray(shape, column.dtype, root, offset)
    return TensorColumn(values) if column.torch is None else TorchColumn.from_bits(values, column.torch)


def build_tree(part: Part, places: list[Place], root: npt.NDArray[np.uint8], variable: VariableColumns) -> Batch:
    """Put a nested batch together over the bytes of its block; raises as `decode` does."""
    columns, fixed = iter(part.columns), iter(places)

    def leaf(path: str) -> Any:
        column = next(columns)
        if isinstance(column, Variable):
            return _variable_leaf(variable, path)
        return _fixed_leaf(column, next(fixed), root)

    batch = _build(part.structure, leaf, "")
    if next(columns, None) is not None:
        raise FormatError("a nested batch must have a name for every value, it has too few")
    return batch


def _build(structure: Any, leaf: Callable[[str], Any], prefix: str) -> Batch:
    values: dict[str, Any] = {}
    for name, under in structure:
        if not isinstance(name, str):
            raise FormatError("a nested batch must have strings for names, it has others")
        path = prefix + name
        values[name] = leaf(path) if under is None else _build(under, leaf, f"{path}.")
    return node(Batch, values)


def _fixed_leaf(column: Fixed, place: Place, root: npt.NDArray[np.uint8]) -> Any:
    values: npt.NDArray[Any] = _ndarray(place.shape, column.dtype, root, place.offset)
    if column.torch is not None:
        tensor = TorchColumn.from_bits(values, column.torch).values
        return tensor.requires_grad_() if GRADIENT in column.form else tensor
    return values[()] if SCALAR in column.form else values


def _variable_leaf(variable: VariableColumns, path: str) -> Any:
    what, *entry = variable.entry()
    if what == VALUE:
        (value,) = entry
        if type(value) not in PLAIN:
            raise FormatError("a message must have plain values in its metadata, it has others")
        return value
    shape, *described = entry
    column = variable.column(path, described)
    if what == COLUMN:
        return column
    if what != OBJECTS or not isinstance(column, ObjectColumn):
        raise FormatError("a message must say what a value is, it does not")
    if shape is None:
        (only,) = column.values.tolist()
        return only
    if prod(shape) != len(column):
        raise FormatError(f"an array of objects of shape {shape} cannot have {len(column)}")
    return column.values.reshape(shape)
