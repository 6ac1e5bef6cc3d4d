"""Observations, stacked and joined without loss, as arrays or as tensors of torch on their device."""

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
"""Blocks of at most so many bytes are joined as bytes."""


class NestedRows(NamedTuple):
    """Rows of a nested column: its structure, and an array of shape (k, ...) a leaf."""

    structure: Structure
    leaves: list[Leaf]


def stack_rows(name: str, values: Sequence[Any]) -> Leaf | NestedRows:
    """Lay k values one under the other, in memory of their own.

    Parameters
    ----------
    name
        The column's name, for errors.
    values
        Arrays or numbers, which may differ in dtype, trees of these, or any objects.

    Examples
    --------
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
                # Refused unless all agree in dtype.
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
    if any(own != structure for own, _ in taken_apart):
        raise ColumnMismatchError(f"column {name!r} must be nested in the same way in all rows, and is not")
    paths = list(leaf_names(name, structure))
    return NestedRows(
        structure,
        [_stack_leaf(path, [leaves[place][1] for _, leaves in taken_apart]) for place, path in enumerate(paths)],
    )


def _as_dicts(value: Any) -> Any:
    """Return a batch, our own or another library's, as nested dicts."""
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
    """Lay blocks of rows one under the other, in memory of their own.

    The dtype is that of the first block, unless values of another one need a wider dtype.

    Examples
    --------
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
        # Refused unless all agree in dtype and row shape.
        return _concatenate(blocks, 0, joined, casting="no")
    except (TypeError, ValueError):
        return _join_widened(name, blocks, rows)


def join_alike(name: str, blocks: Sequence[Leaf]) -> Leaf:
    """Lay arrays that are known to be of one dtype and shape one under the other, in memory of their own.

    >>> join_alike("rewards", [np.zeros(2), np.ones(2)])
    array([0., 0., 1., 1.])
    """
    first, buffers = blocks[0], cast(Sequence[Any], blocks)
    if first.nbytes > _MAX_SMALL_NBYTES:
        return join_blocks(name, blocks)
    try:
        # Three times as fast as NumPy, which looks at the dtype of each block.
        return _ndarray((len(blocks) * len(first), *first.shape[1:]), first.dtype, bytearray().join(buffers))
    except TypeError:
        # One is not in C order.
        return join_blocks(name, blocks)


def join_steps(name: str, blocks: Sequence[Leaf]) -> Leaf:
    """Lay the rows of several steps, blocks of one shape each, one under the other; see `join_blocks`.

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
                f"column {name!r} must hold {blocks[0].dtype}, as in the steps before, got {block.dtype}"
            )
    joined: Leaf = sys.modules["torch"].cat([*blocks])
    return joined


def take_rows(column: Leaf, rows: npt.NDArray[np.intp]) -> Leaf:
    """Take rows of an array or a tensor, into memory of their own.

    >>> take_rows(np.array([4, 5, 6]), np.array([2, 0]))
    array([6, 4])
    """
    # Clipping is what makes NumPy skip a second look at every index.
    taken: Leaf = column[rows] if is_tensor(column) else column.take(rows, 0, None, "clip")
    return taken


def _join_objects(name: str, blocks: Sequence[Leaf], rows: int) -> Leaf:
    for block in blocks:
        _check_shape(name, blocks[0], block)
    joined = np.empty((rows, *blocks[0].shape[1:]), object)
    return np.concatenate(blocks, out=joined, casting="unsafe")


def _join_widened(name: str, blocks: Sequence[Leaf], rows: int) -> Leaf:
    dtype = blocks[0].dtype
    for place, block in enumerate(blocks):
        _check_shape(name, blocks[0], block)
        if cast_exactly(block, dtype) is None:
            dtype = _widen(name, blocks[:place], dtype, block)
    joined = memory.empty((rows, *blocks[0].shape[1:]), dtype)
    return np.concatenate(blocks, out=joined, casting="unsafe")


def _widen(name: str, before: Sequence[Leaf], dtype: np.dtype[Any], block: Leaf) -> np.dtype[Any]:
    """Find a dtype that holds a block and those before it."""
    for candidate in wider(dtype, block.dtype):
        if all(cast_exactly(own, candidate) is not None for own in (block, *before)):
            return candidate
    raise ColumnMismatchError(
        f"column {name!r} must hold {dtype}, as in the steps before, got {block.dtype} that neither fits it nor allows "
        "a wider dtype without loss"
    )


def _check_shape(name: str, first: Leaf, block: Leaf) -> None:
    if block.shape[1:] != first.shape[1:]:
        raise ColumnMismatchError(
            f"column {name!r} must have rows of shape {first.shape[1:]}, as in the steps before, got {block.shape[1:]}"
        )


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor; torch need not be loaded."""
    return KINDS[type(value)] == TENSOR


def check_tensor(name: str, tensor: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse) -> None:
    """Refuse observations of another shape than their space has, or of another kind of numbers."""
    found = tuple(tensor.shape)
    if found[:1] != shape[:1]:
        raise refuse(f"column {name!r} must have {shape[0]} rows, got {found[0] if found else 'a single number'}", None)
    if found != shape:
        raise refuse(f"column {name!r} must have rows of shape {shape[1:]}, got {found[1:]}", None)
    if tensor.is_complex() or (tensor.is_floating_point() and dtype.kind != "f"):
        raise refuse(f"column {name!r} must hold {dtype}, got {tensor.dtype}", None)


def own_tensor(tensor: Any) -> Any:
    """Copy a tensor that an environment may write over, on its device."""
    return tensor.detach().clone()


def to_host(value: Any) -> Any:
    """Return a tensor as an array, over the same memory if it is on the host; anything else stays as it is."""
    if not is_tensor(value):
        return value
    if value.dtype is sys.modules["torch"].bfloat16:
        value = value.float()
    return value.numpy(force=True)


def infos_to_host(infos: Any) -> Any:
    """Return infos with arrays in place of tensors, in nested dicts too."""
    if isinstance(infos, dict):
        return {key: infos_to_host(value) for key, value in infos.items()}
    return to_host(infos)


def to_tensor(values: npt.NDArray[Any], device: Any) -> Any:
    """Return an array as a tensor on a device, over the same memory if that is the host.

    An array that no tensor can hold, such as one of objects, stays as it is.
    """
    if is_tensor(values) or torch_dtype(values.dtype) is None:
        return values
    return sys.modules["torch"].from_numpy(values).to(device)


def actions_to_device(actions: npt.NDArray[Any], space: Any, device: Any) -> Any:
    """Return actions as a tensor on a device, floats in the dtype of their space."""
    if actions.dtype.kind == "f" and space.dtype is not None:
        actions = actions.astype(space.dtype, copy=False)
    # Policies may give arrays that must not be written to.
    return to_tensor(actions if actions.flags.writeable else actions.copy(), device)
