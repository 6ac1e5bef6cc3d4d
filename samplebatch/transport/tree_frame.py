"""A nested batch as what a channel carries: its leaves in the order in which one meets them.

An array or tensor is a fixed column, one without an axis of rows too. All other leaves are loose: plain values stand in
the note, whole columns and arrays of objects are written as an `ObjectColumn` writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, Node, node
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnTypeError, DeviceError, FormatError
from samplebatch.transport.schema import GRADIENT, SCALAR, WHOLE, Fixed, Loose, Part, Place

if TYPE_CHECKING:
    from samplebatch.transport.decoding import Loosened
    from samplebatch.transport.frame import Taken

_VALUE: Final = "value"
_COLUMN: Final = "column"
_OBJECTS: Final = "objects"

_PLAIN = frozenset((type(None), str, bool, int, float))
_FIXED_KINDS = "biufcSUmM"
_ndarray = np.ndarray


def take(source: Node, taken: Taken, prefix: str = "") -> tuple[Any, ...]:
    """Take a tree apart, and return its structure: pairs of a name and, unless it is a leaf, what stands under it.

    Raises
    ------
    ColumnTypeError
        If a leaf cannot be sent; names it.
    UntrustedPickleError
        If a leaf has to be pickled and that is not allowed; names it.
    DeviceError
        If a tensor is not in host memory; names it.
    """
    structure: list[tuple[str, Any]] = []
    for name, value in source.__dict__.items():
        kind = KINDS[type(value)]
        if kind == NODE:
            structure.append((name, take(value, taken, f"{prefix}{name}.")))
            continue
        if type(value) is _ndarray and value.dtype.kind in _FIXED_KINDS:
            _take_array(value, taken, "")
        elif kind == TENSOR:
            _take_tensor(value, taken, prefix + name)
        elif isinstance(value, np.generic) and value.dtype.kind in _FIXED_KINDS and not isinstance(value, (str, bytes)):
            _take_array(np.asarray(value), taken, SCALAR)
        else:
            taken.key.append(("",))
            taken.loose.append(_take_loose(value, taken, prefix + name))
        structure.append((name, None))
    return tuple(structure)


def _take_array(values: npt.NDArray[Any], taken: Taken, form: str, torch: str | None = None) -> None:
    taken.arrays.append(values)
    if values.ndim:
        taken.counts.append(len(values))
    elif form != SCALAR:
        form = WHOLE + form
    taken.key.append(("", values.dtype.newbyteorder("="), values.shape[1:], torch, form))


def _take_tensor(tensor: Any, taken: Taken, path: str) -> None:
    import torch

    if tensor.device.type != "cpu":
        raise DeviceError(f"column {path!r} must be in host memory to be sent, it is on {tensor.device}; move it first")
    if tensor.grad_fn is not None:
        raise ColumnTypeError(f"column {path!r} is the result of a computation with gradients; detach() it first")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ColumnTypeError(f"column {path!r} must be a dense tensor to be sent, got one of layout {tensor.layout}")
    dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
    (_, dtype_name, _), (values,) = TorchColumn(dense).dump()
    _take_array(values, taken, GRADIENT if tensor.requires_grad else "", dtype_name)


def _take_loose(value: Any, taken: Taken, path: str) -> list[Any]:
    if type(value) in _PLAIN:
        return [_VALUE, value]
    if isinstance(value, Column):
        return [_COLUMN, None, *taken.dump(path, value)]
    if type(value) is _ndarray and value.dtype.kind in "OT":
        column = ObjectColumn(value.reshape(-1))
        return [_OBJECTS, value.shape, *taken.dump(path, column)]
    return [_OBJECTS, None, *taken.dump(path, ObjectColumn(_alone(value)))]


def _alone(value: Any) -> npt.NDArray[Any]:
    """Make an array of one object, whatever it is."""
    row = np.empty(1, object)
    row[0] = value
    return row


def build(part: Part, places: list[Place], root: npt.NDArray[np.uint8], loose: Loosened) -> Batch:
    """Put a nested batch together over the bytes of its slot; raises as `decode` does."""
    columns, fixed = iter(part.columns), iter(places)

    def leaf(path: str) -> Any:
        column = next(columns)
        if isinstance(column, Loose):
            return _loose_leaf(loose, path)
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


def _loose_leaf(loose: Loosened, path: str) -> Any:
    what, *entry = loose.entry()
    if what == _VALUE:
        (value,) = entry
        if type(value) not in _PLAIN:
            raise FormatError("a message must have plain values in its note, it has others")
        return value
    shape, *described = entry
    column = loose.column(path, described)
    if what == _COLUMN:
        return column
    if what != _OBJECTS or not isinstance(column, ObjectColumn):
        raise FormatError("a message must say what a value is, it does not")
    if shape is None:
        (only,) = column.values.tolist()
        return only
    if prod(shape) != len(column):
        raise FormatError(f"an array of objects of shape {shape} cannot have {len(column)}")
    return column.values.reshape(shape)
