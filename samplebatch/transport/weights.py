"""Weights: a dict of arrays or tensors, flat or nested, as a nested batch and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, TENSOR, Node, node
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, near_names
from samplebatch.transport.schema import Fixed, Part, Place


def as_batch(weights: Mapping[str, Any], path: str = "") -> Batch:
    """View weights as a nested batch, without gradients.

    Raises
    ------
    ColumnTypeError
        If a name is not a string; names where.

    Examples
    --------
    >>> as_batch({"layer.0": {"bias": np.zeros(2)}})["layer.0"]
    Batch(
        bias: array([0., 0.]),
    )
    """
    values: dict[str, Any] = {}
    for name, value in weights.items():
        if not isinstance(name, str):
            raise ColumnTypeError(
                f"weights must have strings for names, got a {type(name).__name__} in {path or 'them'}"
            )
        if isinstance(value, Mapping):
            value = as_batch(value, f"{path}{name}.")
        elif KINDS[type(value)] == TENSOR:
            value = value.detach()
        values[name] = value
    return node(Batch, values)


def as_dict(batch: Node) -> dict[str, Any]:
    """Turn the nested batch of weights into a dict again.

    >>> as_dict(as_batch({"layer.0": {"bias": np.zeros(2)}}))
    {'layer.0': {'bias': array([0., 0.])}}
    """
    return {name: as_dict(value) if isinstance(value, Node) else value for name, value in batch.__dict__.items()}


def write(target: Mapping[str, Any], part: Part, places: Sequence[Place], root: npt.NDArray[np.uint8]) -> None:
    """Copy weights into the arrays and tensors of others that have their names, shapes and dtypes.

    Parameters
    ----------
    target
        Where they are written to: a model's `state_dict()`, for instance.
    part, places
        Descriptions of the weights, and where they lie.
    root
        The bytes that they lie in.

    Raises
    ------
    ColumnMismatchError
        If the target has other names, shapes or dtypes; names the first. Nothing is written then.
    """
    columns = iter(part.columns)
    fixed = iter(places)
    found = list(_pairs(target, part.structure, columns, fixed, ""))
    for value, place in found:
        values: npt.NDArray[Any] = np.ndarray(place.shape, place.column.dtype, root, place.offset)
        _write_one(value, values, place)


def _pairs(target: Any, structure: Any, columns: Any, fixed: Any, path: str) -> Any:
    names = [name for name, _ in structure]
    if not isinstance(target, Mapping):
        raise ColumnMismatchError(f"{path[:-1]!r} must be a dict to be written to, got a {type(target).__name__}")
    for name in target:
        if name not in names:
            raise ColumnMismatchError(
                f"weights must have {path + str(name)!r} to be written; {near_names(name, names)}"
            )
    for name, under in structure:
        where = path + name
        if name not in target:
            raise ColumnMismatchError(f"{where!r} must be there to be written to; {near_names(name, target)}")
        if under is not None:
            yield from _pairs(target[name], under, columns, fixed, where + ".")
            continue
        column = next(columns)
        if not isinstance(column, Fixed):
            raise ColumnMismatchError(f"{where!r} must be an array or tensor to be written, it is not")
        place = next(fixed)
        _check(target[name], place, where)
        yield target[name], place


def _check(value: Any, place: Place, where: str) -> None:
    column, shape, _ = place
    kind = KINDS[type(value)]
    wanted = column.torch or str(column.dtype)
    if kind == ARRAY and column.torch is None:
        got = str(value.dtype)
    elif kind == TENSOR and column.torch is not None:
        got = str(value.dtype).removeprefix("torch.")
    else:
        got = type(value).__name__
        wanted = f"a tensor of {wanted}" if column.torch else f"an array of {wanted}"
    if got != wanted or tuple(value.shape) != shape:
        got_shape = tuple(getattr(value, "shape", ()))
        raise ColumnMismatchError(f"{where!r} must be {wanted} of shape {shape}, got {got} of shape {got_shape}")


def _write_one(value: Any, values: npt.NDArray[Any], place: Place) -> None:
    if place.column.torch is None:
        value[...] = values
        return
    # Gradients are not followed through the copy, as in `load_state_dict`.
    tensor = value.detach()
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        (bits,) = TorchColumn(tensor).dump()[1]
        bits[...] = values
    else:
        tensor.copy_(TorchColumn.from_bits(values, place.column.torch).values)
