"""Lossless stacking and concatenation of observations, as arrays or as torch tensors on their device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.node import KINDS, NODE, RECORD, TENSOR, values_of
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names
from samplebatch.column import memory
from samplebatch.column.casting import Refuse, cast_exactly, wider
from samplebatch.column.types import torch_dtype
from samplebatch.env.spaces import Leaf
from samplebatch.errors import ColumnMismatchError

_NUMBERS = frozenset("?bBhHiIlLqQefdFD")
_SCALARS = (bool, int, float, np.generic)
_ndarray = np.ndarray
_ARRAYS = frozenset({np.ndarray})
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_concatenate = np.concatenate

_MAX_SMALL_NBYTES = 1024
"""Maximum bytes of blocks that are joined as bytes objects."""


class NestedRows(NamedTuple):
    """Rows of a nested column: structure of the column, and one array of shape (k, ...) per leaf."""

    structure: Structure
    leaves: list[Leaf]


def stack_rows(name: str, values: Sequence[Any]) -> Leaf | NestedRows:
    """Stack k values along a new first axis in newly allocated memory.

    - `name`: name of the column, for errors.
    - `values`: arrays or numbers, possibly of different dtypes; trees of arrays and numbers; or any other objects.

    >>> stack_rows("obs", [np.zeros(2), np.ones(2)])
    array([[0., 0.],
           [1., 1.]])
    >>> stack_rows("obs", [{"who": 1}, {"who": 2}])
    NestedRows(structure={'who': None}, leaves=[array([1, 2])])
    """
    first = values[0]
    if type(first) is _ndarray and first.ndim and first.dtype.char in _NUMBERS:
        shape = first.shape
        if _ARRAYS.issuperset(map(type, values)) and [*map(_shape_of, values)].count(shape) == len(values):
            try:
                # NumPy raises unless all dtypes are equal.
                return _concatenate(values, casting="no").reshape(len(values), *shape)
            except TypeError:
                pass
    if KINDS[type(first)] in (NODE, RECORD):
        values = [_as_dicts(value) for value in values]
        first = values[0]
    if not is_nested(first):
        return _stack_leaf(name, values)
    structure, _ = flatten(name, first)
    taken_apart = [flatten(name, value) if is_nested(value) else (None, []) for value in values]
    for row, (other, _) in enumerate(taken_apart):
        if other != structure:
            raise ColumnMismatchError(
                f"column {name!r} must have the same structure in all rows, got another in row {row}"
            )
    paths = list(leaf_names(name, structure))
    return NestedRows(
        structure,
        [_stack_leaf(path, [leaves[index][1] for _, leaves in taken_apart]) for index, path in enumerate(paths)],
    )


def _as_dicts(value: Any) -> Any:
    named = values_of(value)
    return value if named is None else {key: _as_dicts(part) for key, part in named.items()}


def _stack_leaf(name: str, values: Sequence[Any]) -> Leaf:
    kinds = {*map(type, values)}
    if len(kinds) == 1 and isinstance(values[0], _SCALARS):
        array = np.array(values)
        if array.dtype.char in _NUMBERS:
            return array
    try:
        arrays = [np.asarray(value)[None] for value in values]
    except (ValueError, TypeError, RuntimeError):
        arrays = []
    if not arrays or any(array.dtype.char not in _NUMBERS for array in arrays):
        return np.fromiter(values, object, len(values))
    return join_blocks(name, arrays)


def join_blocks(name: str, blocks: Sequence[Leaf]) -> Leaf:
    """Concatenate blocks of rows into a new array.

    The result has the dtype of the first block, or a wider dtype if another block requires it.

    >>> join_blocks("a", [np.array([1, 2]), np.array([0.5])]).tolist()
    [1.0, 2.0, 0.5]
    """
    first = blocks[0]
    if type(first) is not _ndarray and is_tensor(first):
        return _join_tensors(name, blocks)
    rows = sum(map(len, blocks))
    if first.dtype.char not in _NUMBERS:
        return _join_objects(name, blocks, rows)
    joined = memory.empty((rows, *first.shape[1:]), first.dtype)
    try:
        # NumPy raises unless all dtypes and row shapes are equal.
        return _concatenate(blocks, 0, joined, casting="no")
    except (TypeError, ValueError):
        return _join_widened(name, blocks, rows)


def join_alike(name: str, blocks: Sequence[Leaf]) -> Leaf:
    """Concatenate arrays of one dtype and shape into a new array.

    >>> join_alike("rewards", [np.zeros(2), np.ones(2)])
    array([0., 0., 1., 1.])
    """
    first, buffers = blocks[0], cast(Sequence[Any], blocks)
    if first.nbytes > _MAX_SMALL_NBYTES:
        return join_blocks(name, blocks)
    try:
        # Three times as fast as NumPy, which checks the dtype of each block.
        return _ndarray((len(blocks) * len(first), *first.shape[1:]), first.dtype, bytearray().join(buffers))
    except TypeError:
        # A block is not in C order.
        return join_blocks(name, blocks)


def join_steps(name: str, blocks: Sequence[Leaf]) -> Leaf:
    """Concatenate the rows of several steps, given as blocks of equal shape; see `join_blocks`.

    >>> join_steps("obs", [np.array([1, 2]), np.array([3, 4])])
    array([1, 2, 3, 4])
    """
    first = blocks[0]
    numbers = type(first) is _ndarray and first.dtype.char in _NUMBERS
    if numbers and [*map(_dtype_of, blocks)].count(first.dtype) == len(blocks):
        return join_alike(name, blocks)
    return join_blocks(name, blocks)


def _join_tensors(name: str, blocks: Sequence[Any]) -> Leaf:
    for block in blocks:
        _check_shape(name, blocks[0], block)
        if block.dtype != blocks[0].dtype:
            raise ColumnMismatchError(
                f"column {name!r} must contain {blocks[0].dtype}, the dtype of earlier steps, got {block.dtype}"
            )
    joined: Leaf = sys.modules["torch"].cat([*blocks])
    return joined


def take_rows(column: Leaf, rows: npt.NDArray[np.intp]) -> Leaf:
    """Copy rows of an array or a tensor.

    >>> take_rows(np.array([4, 5, 6]), np.array([2, 0]))
    array([6, 4])
    """
    # With mode "clip", NumPy skips bounds checks.
    selected: Leaf = column[rows] if is_tensor(column) else column.take(rows, 0, None, "clip")
    return selected


def _join_objects(name: str, blocks: Sequence[Leaf], rows: int) -> Leaf:
    for block in blocks:
        _check_shape(name, blocks[0], block)
    joined = np.empty((rows, *blocks[0].shape[1:]), object)
    return np.concatenate(blocks, out=joined, casting="unsafe")


def _join_widened(name: str, blocks: Sequence[Leaf], rows: int) -> Leaf:
    dtype = blocks[0].dtype
    for index, block in enumerate(blocks):
        _check_shape(name, blocks[0], block)
        if cast_exactly(block, dtype) is None:
            dtype = _widen(name, blocks[:index], dtype, block)
    joined = memory.empty((rows, *blocks[0].shape[1:]), dtype)
    return np.concatenate(blocks, out=joined, casting="unsafe")


def _widen(name: str, before: Sequence[Leaf], dtype: np.dtype[Any], block: Leaf) -> np.dtype[Any]:
    """Return a dtype that represents a block and all earlier blocks exactly."""
    for candidate in wider(dtype, block.dtype):
        if all(cast_exactly(earlier, candidate) is not None for earlier in (block, *before)):
            return candidate
    raise ColumnMismatchError(
        f"column {name!r} must contain {dtype}, the dtype of earlier steps, got {block.dtype}, which cannot be widened "
        "without loss"
    )


def _check_shape(name: str, first: Leaf, block: Leaf) -> None:
    if block.shape[1:] != first.shape[1:]:
        raise ColumnMismatchError(
            f"column {name!r} must have rows of shape {first.shape[1:]}, as earlier steps, got {block.shape[1:]}"
        )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    return KINDS[type(value)] == TENSOR


def check_tensor(name: str, tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse) -> None:
    """Reject a tensor whose shape or dtype kind does not match its space."""
    actual = tuple(tensor.shape)
    if actual[:1] != shape[:1]:
        raise refuse(
            f"column {name!r} must have {shape[0]} rows, got {actual[0] if actual else 'a single number'}", None
        )
    if actual != shape:
        raise refuse(f"column {name!r} must have rows of shape {shape[1:]}, got {actual[1:]}", None)
    if tensor.is_complex() or (tensor.is_floating_point() and dtype.kind != "f"):
        raise refuse(f"column {name!r} must have dtype {dtype}, got {tensor.dtype}", None)


def own_tensor(tensor: Any) -> Any:
    """Copy a tensor that an environment may overwrite; the copy is on the same device."""
    return tensor.detach().clone()


def to_host(value: Any) -> Any:
    """Convert a tensor to an array, without a copy if the tensor is on the host; return other values unchanged."""
    if not is_tensor(value):
        return value
    if value.dtype is sys.modules["torch"].bfloat16:
        value = value.float()
    return value.numpy(force=True)


def infos_to_host(infos: Any) -> Any:
    """Convert tensors in infos, including nested dicts, to arrays."""
    if isinstance(infos, dict):
        return {key: infos_to_host(value) for key, value in infos.items()}
    return to_host(infos)


def to_tensor(values: npt.NDArray[Any], device: Any) -> Any:
    """Convert an array to a tensor on a device; on the host, the tensor shares the array's memory.

    An array whose dtype torch does not support, such as an object array, is returned unchanged.
    """
    if is_tensor(values) or torch_dtype(values.dtype) is None:
        return values
    return sys.modules["torch"].from_numpy(values).to(device)


def actions_to_device(actions: npt.NDArray[Any], space: Any, device: Any) -> Any:
    """Convert actions to a tensor on a device; floats are converted to the dtype of the action space."""
    if actions.dtype.kind == "f" and space.dtype is not None:
        actions = actions.astype(space.dtype, copy=False)
    # Policies may return read-only arrays.
    return to_tensor(actions if actions.flags.writeable else actions.copy(), device)
