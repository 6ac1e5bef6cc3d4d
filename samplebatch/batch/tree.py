"""Trees of columns <-> dotted names, for nested observations.

A dict or tuple of arrays is stored as one column per leaf, named by its path: `obs.camera`, `obs.0`. The form of the
tree is kept as a structure, plain enough for JSON: None for a leaf, a dict for a dict, a list for a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from samplebatch.batch.nested.node import KINDS, MAPPING, NODE, RECORD, values_of
from samplebatch.errors import ColumnMismatchError, ColumnTypeError

Structure = dict[str, Any] | list[Any] | None
"""Form of a nested column: None for a leaf, a dict for a dict, a list for a tuple."""


_NAMED = frozenset((MAPPING, NODE, RECORD))


def columns_in(given: tuple[Any, ...], named: dict[str, Any]) -> dict[Any, Any]:
    """Return the columns by name that a batch is constructed from, in a dict of their own.

    Parameters
    ----------
    given
        Nothing, or one of: a mapping, a dataclass, a named tuple, a TensorDict or another library's batch, or pairs.
    named
        Further columns.

    Raises
    ------
    ColumnTypeError
        If it is anything else, or more than one; names its type.

    Examples
    --------
    >>> columns_in(({"a": [1]},), {"b": [2]}), columns_in(([("a", [1])],), {})
    ({'a': [1], 'b': [2]}, {'a': [1]})
    """
    if not given:
        return named
    if len(given) > 1:
        raise ColumnTypeError(f"a SampleBatch is made from one mapping of columns at most, got {len(given)} values")
    (source,) = given
    if type(source) is dict:
        return source | named
    values = values_of(source)
    try:
        return dict(source if values is None else values.items()) | named
    except (TypeError, ValueError) as error:
        raise ColumnTypeError(
            "a SampleBatch is made from a mapping, a dataclass, a named tuple or pairs of names and columns, "
            f"got a {type(source).__name__}"
        ) from error


def is_nested(value: Any) -> bool:
    """Tell whether a column's value is a tree of columns rather than one column.

    A dict is, and so are dataclasses and batches. A tuple is if any of its items has rows itself; a tuple of numbers is
    a list of rows.

    >>> is_nested({"camera": [1, 2]}), is_nested(([1, 2], [3, 4])), is_nested((1, 2))
    (True, True, False)
    """
    if type(value) is np.ndarray:
        return False
    if not isinstance(value, tuple):
        return KINDS[type(value)] in _NAMED
    return any(isinstance(item, (Mapping, tuple, list)) or getattr(item, "ndim", 0) > 0 for item in value)


def flatten(name: str, value: Any) -> tuple[Structure, list[tuple[str, Any]]]:
    """Flatten a nested value to its structure and its leaves.

    Returns
    -------
    structure
        The form of the tree.
    leaves
        Pairs of dotted name and leaf, in order.

    Raises
    ------
    ColumnTypeError
        If a dict has a key that is not a string, or a tuple has named fields, which would be lost.
    ColumnMismatchError
        If two leaves have the same dotted name, because a key contains a dot.

    Examples
    --------
    >>> flatten("obs", {"camera": [1], "arm": ([2], [3])})
    ({'camera': None, 'arm': [None, None]}, [('obs.camera', [1]), ('obs.arm.0', [2]), ('obs.arm.1', [3])])
    """
    leaves: list[tuple[str, Any]] = []
    structure = _walk(name, value, leaves)
    if len({path for path, _ in leaves}) < len(leaves):
        raise ColumnMismatchError(
            f"column {name!r} must have one path per leaf; a key with a dot in it makes two alike"
        )
    return structure, leaves


def _walk(path: str, value: Any, leaves: list[tuple[str, Any]]) -> Structure:
    if not is_nested(value):
        leaves.append((path, value))
        return None
    if not isinstance(value, tuple):
        items = cast("Mapping[Any, Any]", values_of(value)).items()
        for key, _ in items:
            if not isinstance(key, str):
                raise ColumnTypeError(f"column {path!r} must have strings for keys, got a {type(key).__name__}")
        return {key: _walk(f"{path}.{key}", item, leaves) for key, item in items}
    if hasattr(value, "_fields"):
        raise ColumnTypeError(
            f"column {path!r} must be a dict or a plain tuple, got a named tuple {type(value).__name__}; use _asdict()"
        )
    return [_walk(f"{path}.{i}", item, leaves) for i, item in enumerate(value)]


def leaf_names(name: str, structure: Structure) -> Iterator[str]:
    """Yield the dotted names of a structure's leaves, in order.

    >>> list(leaf_names("obs", {"camera": None, "arm": [None, None]}))
    ['obs.camera', 'obs.arm.0', 'obs.arm.1']
    """
    if structure is None:
        yield name
        return
    children = structure.items() if isinstance(structure, dict) else enumerate(structure)
    for key, child in children:
        yield from leaf_names(f"{name}.{key}", child)


def named_leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of the leaves of nested dicts, and the leaves, in order.

    >>> list(named_leaves({"obs": {"x": 0, "y": 1}, "info": {}, "rew": 2}))
    [('obs.x', 0), ('obs.y', 1), ('rew', 2)]
    """
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from named_leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def unflatten(name: str, structure: Structure, leaf: Callable[[str], Any]) -> Any:
    """Rebuild a nested value from its structure and its leaves.

    >>> unflatten("obs", {"camera": None, "arm": [None, None]}, {"obs.camera": 1, "obs.arm.0": 2, "obs.arm.1": 3}.get)
    {'camera': 1, 'arm': (2, 3)}
    """
    if structure is None:
        return leaf(name)
    if isinstance(structure, dict):
        return {key: unflatten(f"{name}.{key}", child, leaf) for key, child in structure.items()}
    return tuple(unflatten(f"{name}.{i}", child, leaf) for i, child in enumerate(structure))
