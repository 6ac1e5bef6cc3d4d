"""Arithmetic: operators and NumPy's functions on nested batches, leaf by leaf, matched by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np

from samplebatch.batch.nested import joining
from samplebatch.batch.nested.node import KINDS, NODE, NUMBER, RAGGED, TENSOR, Node, fault, is_reserved, node
from samplebatch.batch.nested.rows import shape_of
from samplebatch.errors import ColumnMismatchError, ColumnTypeError

B = TypeVar("B", bound=Node)

_REDUCTIONS: Final = frozenset(
    getattr(np, name)
    for name in (
        "all", "any", "max", "mean", "median", "min", "nanmax", "nanmean", "nanmedian", "nanmin", "nanstd", "nansum",
        "nanvar", "prod", "std", "sum", "var",
    )
)  # fmt: skip
_TORCH_NAMES: Final = {"max": "amax", "min": "amin"}
_NAMED_REDUCTIONS: Final[dict[np.ufunc, Callable[..., Any]]] = {
    np.add: np.sum,
    np.multiply: np.prod,
    np.maximum: np.max,
    np.minimum: np.min,
    np.logical_or: np.any,
    np.logical_and: np.all,
}
_OPERATORS: Final[dict[Any, Callable[..., Any]]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.negative: operator.neg,
    np.absolute: abs,
}


def _children(nodes: Sequence[Node], name: str, path: str) -> list[Any]:
    """Return the values of one name in several batches.

    Raises ColumnMismatchError if only some values are nested batches, unless the first batch only reserves the name.
    """
    children = [each.__dict__[name] for each in nodes]
    nested = [KINDS[type(child)] == NODE for child in children]
    if any(nested) and not all(nested) and not is_reserved(children[0]):
        raise ColumnMismatchError(f"column {path!r} must be a nested batch in every batch or in none, got both")
    return children


def _check_names(nodes: Sequence[Node], prefix: str) -> None:
    names = nodes[0].__dict__.keys()
    for other in nodes[1:]:
        if other.__dict__.keys() != names:
            lacking = sorted(prefix + name for name in names ^ other.__dict__.keys())
            raise ColumnMismatchError(
                f"batches must have the same names, only one batch has {', '.join(map(repr, lacking))}"
            )


def map_leaves(function: Callable[..., Any], args: Sequence[Any], prefix: str = "") -> Node:
    """Apply a function to corresponding leaves of all batches among the arguments.

    Other arguments are passed unchanged. Reserved names stay reserved. Raises ColumnMismatchError if the batches differ
    in their names; lists the names that only one has. Raises ColumnTypeError if the function rejects a leaf;
    names it.
    """
    positions = [position for position, arg in enumerate(args) if KINDS[type(arg)] == NODE]
    nodes = [args[position] for position in positions]
    _check_names(nodes, prefix)
    first: Node = nodes[0]
    results: dict[str, Any] = {}
    name = ""
    try:
        for name in first.__dict__:
            path = prefix + name
            leaves = list(args)
            for position, child in zip(positions, _children(nodes, name, path), strict=True):
                leaves[position] = child
            model = leaves[positions[0]]
            if KINDS[type(model)] != NODE:
                results[name] = function(*leaves)
            elif model.__dict__:
                results[name] = map_leaves(function, leaves, path + ".")
            else:
                results[name] = node(type(model), {})
    except Exception as error:
        fault(prefix + name, "computed with", error)
    return node(type(first), results)


def update_leaves(function: Callable[[Any, Any], Any], target: Node, other: Any, prefix: str = "") -> None:
    """Apply an in-place operator to every leaf of a batch; the other operand is a number, or a batch matched by name.

    Raises
    ------
    ColumnMismatchError
        If the batches differ in their names.
    ColumnTypeError
        If a leaf cannot store the result; names it. Earlier leaves have been updated by then.
    """
    matched = KINDS[type(other)] == NODE
    nodes = [target, other] if matched else [target]
    _check_names(nodes, prefix)
    columns = target.__dict__
    name = ""
    try:
        for name, value in columns.items():
            path = prefix + name
            operand = _children(nodes, name, path)[1] if matched else other
            if KINDS[type(value)] != NODE:
                columns[name] = function(value, operand)
            elif value.__dict__:
                update_leaves(function, value, operand, path + ".")
    except Exception as error:
        fault(prefix + name, "computed with in place", error)


def _on_elements(function: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a function of arrays to ragged columns of equal row shapes by applying it to their elements."""

    def compute(*leaves: Any) -> Any:
        ragged = [leaf for leaf in leaves if KINDS[type(leaf)] == RAGGED]
        if not ragged:
            return function(*leaves)
        first = ragged[0]
        if len(ragged) < len(leaves) and any(KINDS[type(leaf)] not in (RAGGED, NUMBER) for leaf in leaves):
            raise TypeError("the other operand of a ragged column must be a number or a ragged column")
        if any(not np.array_equal(first.extents, other.extents) for other in ragged[1:]):
            raise ValueError("ragged columns must have rows of the same shapes")
        elements = function(*[leaf.flat if KINDS[type(leaf)] == RAGGED else leaf for leaf in leaves])
        return type(first)(elements, *first.layout)

    return compute


def _operand(value: Any, rule: str = "the other operand of a Batch must be a number or a Batch") -> Any:
    """Validate an operand, which must be a batch or a number; the error message starts with `rule`."""
    if KINDS[type(value)] in (NODE, NUMBER):
        return value
    if type(value) is np.ndarray and value.ndim == 0:
        return value[()]
    raise ColumnTypeError(f"{rule}, got {type(value).__name__}")


def operators(
    function: Callable[[Any, Any], Any], in_place: Callable[[Any, Any], Any]
) -> tuple[Callable[[B, Any], B], Callable[[B, Any], B], Callable[[B, Any], B]]:
    """Return the forward, reflected and in-place methods of a binary operator."""

    def forward(batch: B, other: Any) -> B:
        return cast("B", map_leaves(_on_elements(function), (batch, _operand(other))))

    def reflected(batch: B, other: Any) -> B:
        return cast("B", map_leaves(_on_elements(function), (_operand(other), batch)))

    def update(batch: B, other: Any) -> B:
        update_leaves(_on_elements(in_place), batch, _operand(other))
        return batch

    return forward, reflected, update


def apply(function: Callable[[Any], Any], source: Node) -> Node:
    """Apply an elementwise function to every leaf."""
    return map_leaves(_on_elements(function), (source,))


def apply_ufunc(source: Node, ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a NumPy ufunc to every leaf; implements `__array_ufunc__`."""
    if "out" in kwargs or ufunc.nout != 1:
        return NotImplemented
    if method == "reduce" and ufunc in _NAMED_REDUCTIONS:
        return reduce_leaves(_NAMED_REDUCTIONS[ufunc], source, {"axis": 0, **kwargs})
    if method != "__call__":
        return NotImplemented
    operands = [
        _operand(value, f"np.{ufunc.__name__} accepts only numbers and Batches next to a Batch") for value in inputs
    ]

    def leafwise(*leaves: Any) -> Any:
        if TENSOR in [KINDS[type(leaf)] for leaf in leaves]:
            return _tensor_ufunc(ufunc, leaves)
        return ufunc(*leaves, **kwargs)

    return map_leaves(_on_elements(leafwise), operands)


def apply_function(source: Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a NumPy function to every leaf; implements `__array_function__`."""
    if function is np.shape:
        return tuple(shape_of(source))
    if function is np.concatenate and kwargs.get("axis", 0) == 0 and len(args) == 1:
        return joining.cat(type(source), args[0])
    if function is np.stack and len(args) == 1 and kwargs.keys() <= {"axis"}:
        return joining.stack(type(source), args[0], axis=kwargs.get("axis", 0))
    if function in _REDUCTIONS and args[0] is source and not any(KINDS[type(arg)] == NODE for arg in args[1:]):
        return reduce_leaves(function, source, {**dict(zip(("axis",), args[1:2], strict=False)), **kwargs})
    if not any(KINDS[type(arg)] == NODE for arg in args) or any(KINDS[type(arg)] == NODE for arg in kwargs.values()):
        return NotImplemented
    results = map_leaves(lambda *leaves: _call_on_arrays(function, leaves, kwargs), args)
    if function in (np.array_equal, np.allclose):
        return all(_leaves(results))
    return results


def _leaves(source: Node) -> list[Any]:
    leaves: list[Any] = []
    for value in source.__dict__.values():
        if KINDS[type(value)] == NODE:
            leaves += _leaves(value)
        else:
            leaves.append(value)
    return leaves


def _call_on_arrays(function: Callable[..., Any], leaves: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if RAGGED in [KINDS[type(leaf)] for leaf in leaves]:
        raise TypeError(f"np.{function.__name__} does not support ragged columns; pad them first")
    if TENSOR in [KINDS[type(leaf)] for leaf in leaves]:
        raise TypeError(f"np.{function.__name__} does not support tensors; convert the batch with to_numpy first")
    return function(*leaves, **kwargs)


def _tensor_ufunc(ufunc: np.ufunc, leaves: Sequence[Any]) -> Any:
    import torch

    if ufunc in _OPERATORS:
        # A NumPy number on the left would turn the tensor on the right into an array.
        return _OPERATORS[ufunc](*[leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in leaves])
    torch_function = getattr(torch, ufunc.__name__, None)
    if torch_function is None:
        raise TypeError(f"torch has no {ufunc.__name__}; convert the batch with to_numpy first")
    return torch_function(*map(torch.as_tensor, leaves))


def reduce_leaves(function: Callable[..., Any], source: Node, kwargs: Mapping[str, Any]) -> Node:
    """Apply a NumPy reduction to every leaf, by default over the dimensions common to all leaves.

    Raises ColumnTypeError if the function rejects a leaf; names it.
    """
    axis = kwargs.get("axis")
    if axis is None:
        axis = tuple(range(min((np.ndim(leaf) for leaf in _leaves(source)), default=0)))
    kwargs = {**kwargs, "axis": axis}

    def leafwise(leaf: Any) -> Any:
        if KINDS[type(leaf)] == RAGGED:
            raise TypeError(f"{function.__name__} does not support ragged columns; pad them first")
        if KINDS[type(leaf)] == TENSOR:
            return _reduce_tensor(function.__name__, leaf, **kwargs)
        result = function(leaf, **kwargs)
        return np.asarray(result) if KINDS[type(result)] == NUMBER else result

    return map_leaves(leafwise, (source,))


def _reduce_tensor(name: str, tensor: Any, axis: Any, *, keepdims: bool = False, ddof: int = 0) -> Any:
    import torch

    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if not axes:
        tensor, axes = tensor[None], (0,)
    if name in ("mean", "std", "var") and not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.get_default_dtype())
    if name in ("std", "var"):
        return getattr(torch, name)(tensor, dim=axes, correction=ddof, keepdim=keepdims)
    function = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if function is None or name in ("prod", "median", "nanmedian"):
        raise TypeError(f"torch has no {name} over several dimensions; convert the batch with to_numpy first")
    return function(tensor, dim=axes, keepdim=keepdims)
