"""Layout of the values of a Gymnasium space for several environments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import ARRAY, KINDS, NODE, RECORD, TENSOR, node, values_of
from samplebatch.batch.tree import Structure
from samplebatch.column.casting import Refuse, exact_rows
from samplebatch.errors import require

_ndarray = np.ndarray
_ARRAYS = frozenset({_ndarray})
_shape_of = attrgetter("shape")
_concatenate = np.concatenate

Leaf = npt.NDArray[Any]
"""Values of one leaf of a space, shape (n, ...): numbers if the space is numeric, otherwise objects."""

Columns = dict[str, Leaf]
"""Values by column, shape (k, ...) each; leaves of nested columns have dotted names."""


class SpaceLayout:
    """Layout of a Gymnasium space: dict and tuple spaces are nested, and every other space is a leaf.

    Values of n environments have the same form as in Gymnasium's vector environments: dicts and tuples of arrays of
    shape (n, ...). Values of spaces that are not arrays (text, graph, sequence) are tuples of n objects.

    - `space`: Gymnasium space of one environment.

    Instance attributes:
    - `plain`: whether the space is a single numeric leaf, so that its values form one array.
    - `names`: dotted path of each leaf; the path is "" if the space itself is a leaf.
    - `spaces`: space of each leaf.
    - `structure`: nesting of the leaves; see `samplebatch.batch.tree`.
    - `choices`: first value and number of values of a discrete space; None for other spaces.

    >>> from gymnasium import spaces
    >>> layout = SpaceLayout(
    ...     spaces.Dict(camera=spaces.Box(0, 1, (2,)), arm=spaces.Tuple([spaces.Discrete(3)]))
    ... )
    >>> layout.names
    ('camera', 'arm.0')
    >>> leaves = layout.flatten({"camera": np.zeros((4, 2)), "arm": (np.arange(4),)})
    >>> layout.nest(leaves)["arm"]
    (array([0, 1, 2, 3]),)
    """

    def __init__(self, space: Any) -> None:
        kinds = require("gymnasium.spaces", "envs")
        self._dict, self._tuple = kinds.Dict, kinds.Tuple
        self._numeric = (kinds.Box, kinds.Discrete, kinds.MultiDiscrete, kinds.MultiBinary)
        self._space = space
        self._cache: dict[int, list[tuple[Any, Any]] | None] = {}
        leaves = list(self._walk(space, ""))
        self.names: tuple[str, ...] = tuple(name for name, _ in leaves)
        self.spaces: tuple[Any, ...] = tuple(leaf for _, leaf in leaves)
        self.structure = self._structure_of(space)
        self.plain = self.names == ("",) and self.is_numeric(space)
        self._form: tuple[int, ...] = space.shape if self.plain else ()
        discrete = isinstance(space, kinds.Discrete)
        self.choices: tuple[int, int] | None = (int(space.start), int(space.n)) if discrete else None

    def _walk(self, space: Any, path: str) -> Iterator[tuple[str, Any]]:
        parts = self._parts(space)
        if parts is None:
            yield path, space
            return
        for key, part in parts:
            yield from self._walk(part, f"{path}.{key}" if path else str(key))

    def _structure_of(self, space: Any) -> Structure:
        parts = self._parts(space)
        if parts is None:
            return None
        if isinstance(space, self._tuple):
            return [self._structure_of(part) for _, part in parts]
        return {str(key): self._structure_of(part) for key, part in parts}

    def _parts(self, space: Any) -> list[tuple[Any, Any]] | None:
        parts = self._cache
        if id(space) not in parts:
            parts[id(space)] = self._find_parts(space)
        return parts[id(space)]

    def _find_parts(self, space: Any) -> list[tuple[Any, Any]] | None:
        if isinstance(space, self._dict):
            return list(space.spaces.items())
        return list(enumerate(space.spaces)) if isinstance(space, self._tuple) else None

    def is_numeric(self, leaf: Any) -> bool:
        """Return whether the values of a leaf space are numbers or numeric arrays of equal shape."""
        return isinstance(leaf, self._numeric)

    def has_keys(self, values: Mapping[str, Any]) -> bool:
        """Return whether a dict has exactly the same keys as a dict space."""
        return isinstance(self._space, self._dict) and self._space.spaces.keys() == values.keys()

    def flatten(self, values: Any) -> list[Leaf]:
        """Split the values of n environments into one array or tensor per leaf, without copying them.

        - `values`: dicts, batches or tuples with the structure of the space, whose leaves are arrays of shape (n, ...)
          or sequences of n objects; in a batch, the items of a tuple are named `0`, `1`, ...

        Raises KeyError if the values lack a part of the space.
        """
        if self.plain:
            return [_as_rows(values)]
        leaves: list[Leaf] = []
        self._gather(self._space, values, leaves)
        return leaves

    def _gather(self, space: Any, values: Any, leaves: list[Leaf]) -> None:
        parts = self._parts(space)
        if parts is None:
            leaves.append(_as_rows(values) if self.is_numeric(space) else _objects(values))
            return
        for key, part in parts:
            self._gather(part, _part_of(values, key), leaves)

    def flatten_one(self, value: Any, top: str, refuse: Refuse) -> list[Leaf]:
        """Split the value of a single environment into one new array of shape (1, ...) per leaf.

        Numbers are converted to the dtype of their space; if the conversion would lose precision, the numbers' wider
        dtype is preserved (see `exact_rows`).

        - `value`: the value.
        - `top`: name of the column, for errors.
        - `refuse`: function that creates the error for a value that is not in the space.
        """
        if self.plain:
            space = self._space
            if type(value) is np.ndarray and value.dtype == space.dtype and value.shape == space.shape:
                return [value[None].copy()]
            # NumPy copies a list of one value into an array.
            return [exact_rows(top, [value], space.dtype, (1, *space.shape), refuse)]
        return self.flatten_each([value], top, refuse)

    def flatten_each(self, values: Sequence[Any], top: str, refuse: Refuse) -> list[Leaf]:
        """Split the values of n single environments into one array of shape (n, ...) per leaf.

        Every array is newly allocated. Numbers are converted to the dtype of their space; if the conversion would lose
        precision, the numbers' wider dtype is preserved (see `exact_rows`).

        - `values`: one value per environment, not stacked.
        - `top`: name of the column, for errors.
        - `refuse`: function that creates the error for a value that is not in the space.

        >>> from gymnasium import spaces
        >>> from samplebatch.errors import EnvironmentSpecError
        >>> layout = SpaceLayout(spaces.Dict(arm=spaces.Discrete(3)))
        >>> refuse = lambda sentence, row: EnvironmentSpecError(
        ...     f"{sentence} from environment {row}"
        ... )
        >>> layout.flatten_each([{"arm": 1}, {"arm": 2}], "obs", refuse)
        [array([1, 2])]
        >>> layout.flatten_each([{"arm": 1}, {}], "obs", refuse)
        Traceback (most recent call last):
        samplebatch.errors.EnvironmentSpecError: column 'obs.arm' must have a value, got none
            from environment 1
        """
        if self.plain and self._form:
            count, shape = len(values), self._form
            if count == 1:
                value = values[0]
                if type(value) is _ndarray and value.shape == shape and value.dtype == self._space.dtype:
                    return [value[None].copy()]
            elif _ARRAYS.issuperset(map(type, values)) and [*map(_shape_of, values)].count(shape) == count:
                try:
                    # NumPy raises unless all values have the dtype.
                    return [_concatenate(values, dtype=self._space.dtype, casting="no").reshape(count, *shape)]
                except TypeError:
                    pass
        leaves: list[Leaf] = []
        # Stacking a list always copies the arrays of the environments.
        self._gather_each(self._space, list(values), top, leaves, refuse)
        return leaves

    def _gather_each(self, space: Any, values: list[Any], name: str, leaves: list[Leaf], refuse: Refuse) -> None:
        parts = self._parts(space)
        if parts is None:
            numeric = self.is_numeric(space)
            shape = (len(values), *(space.shape or ())) if numeric else ()
            leaves.append(exact_rows(name, values, space.dtype, shape, refuse) if numeric else _objects(values))
            return
        for key, part in parts:
            part_values = []
            for row, value in enumerate(values):
                try:
                    part_values.append(_part_of(value, key))
                except (KeyError, IndexError, TypeError) as error:
                    raise refuse(f"column '{name}.{key}' must have a value, got none", row) from error
            self._gather_each(part, part_values, f"{name}.{key}", leaves, refuse)

    def nest(self, leaves: Sequence[Any]) -> Any:
        """Nest one value per leaf in dicts and tuples with the structure of the space."""
        if self.names == ("",):
            return leaves[0]
        return self._nest(self._space, iter(leaves), dict)

    def nest_each(self, leaves: Sequence[Leaf], count: int) -> Iterable[Any]:
        """Convert leaves of shape (count, ...) to one value of the space per row.

        >>> from gymnasium import spaces
        >>> layout = SpaceLayout(spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]))
        >>> layout.nest_each([np.array([1, 2]), np.array([0, 1])], 2)
        [(np.int64(1), np.int64(0)), (np.int64(2), np.int64(1))]
        """
        if self.names == ("",):
            return leaves[0]
        return [self._nest(self._space, iter([leaf[row] for leaf in leaves]), dict) for row in range(count)]

    def batch(self, leaves: Sequence[Any]) -> Any:
        """Nest leaves in batches, for policies and buffers; return the array itself if the space is a leaf."""
        if self.names == ("",):
            return leaves[0]
        return self._nest(self._space, iter(leaves), lambda parts: node(Batch, parts))

    def _nest(self, space: Any, leaves: Iterator[Any], make: Callable[[dict[str, Any]], Any]) -> Any:
        parts = self._parts(space)
        if parts is None:
            return next(leaves)
        if make is dict and isinstance(space, self._tuple):
            return tuple(self._nest(part, leaves, make) for _, part in parts)
        return make({str(key): self._nest(part, leaves, make) for key, part in parts})


def column_names(top: str, layout: SpaceLayout) -> tuple[str, ...]:
    """Return the column names of a layout's leaves.

    >>> from gymnasium import spaces
    >>> column_names("obs", SpaceLayout(spaces.Dict(camera=spaces.Discrete(2))))
    ('obs.camera',)
    """
    return tuple(f"{top}.{leaf}" if leaf else top for leaf in layout.names)


def put(leaf: Leaf, rows: npt.NDArray[np.intp], values: Leaf) -> Leaf:
    """Write rows of an array and return the array, or a copy with a wider dtype if the values require it.

    >>> put(np.zeros(3, np.float32), np.array([1]), np.array([0.1]))
    array([0. , 0.1, 0. ])
    """
    if KINDS[type(leaf)] == TENSOR:
        torch = sys.modules["torch"]
        leaf[torch.from_numpy(rows)] = torch.as_tensor(values).to(leaf)
        return leaf
    if leaf.dtype != values.dtype:
        leaf = leaf.astype(np.result_type(leaf.dtype, values.dtype))
    leaf[rows] = values
    return leaf


def _as_rows(values: Any) -> Any:
    return values if KINDS[type(values)] in (ARRAY, TENSOR) else np.asarray(values)


def _part_of(value: Any, key: Any) -> Any:
    """Return a part of a dict, a tuple or any library's batch; in a batch, a tuple item is named by its index."""
    if KINDS[type(value)] in (NODE, RECORD) and not isinstance(value, tuple):
        return (values_of(value) or {})[str(key)]
    return value[key]


def _objects(values: Any) -> Leaf:
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    return np.fromiter(values, object, len(values))
