"""Batch: a tree of named arrays, tensors and objects."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, Any, Self, cast, overload

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested import interchange, joining
from samplebatch.batch.nested.arithmetic import Arithmetic
from samplebatch.batch.nested.conversions import Conversions
from samplebatch.batch.nested.joining import Missing
from samplebatch.batch.nested.node import (
    KINDS,
    MAPPING,
    NODE,
    RECORD,
    Node,
    adopt,
    copy_nodes,
    copy_tree,
    format_tree,
    replace_leaves,
    values_of,
)
from samplebatch.batch.nested.rows import assign, iterate, select, shape_of, shortest, split_rows, zero
from samplebatch.batch.nested.values import join_name, parse, parse_items, stack_rows, transform_leaves, trees_equal
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, no_such_column

_ndarray = np.ndarray
_FIRST_OBJECT = np.dtype(object).num


class _Shape:
    """Descriptor of `Batch.shape`, which a column called `shape` hides, as it could not hide a property."""

    def __get__(self, batch: Any, owner: type) -> list[int]:
        return shape_of(batch) if batch is not None else []


def _has_leaves(source: Node) -> bool:
    """Tell whether any value is more than a nested batch of nested batches."""
    return any(KINDS[type(value)] != NODE or _has_leaves(value) for value in source.__dict__.values())


class Batch(Conversions, Arithmetic):
    """Named values in a tree: arrays, tensors, distributions, objects and further batches.

    Every value is an attribute and an item: `b.obs` is `b["obs"]`. An integer, a slice, a mask or any other NumPy index
    takes rows of all values at once. `Batch()` as a value reserves its name.

    Parameters
    ----------
    batch_dict
        A dict or Batch of values by name, or another thing that has them: a named tuple, a dataclass, a batch of
        another library (with `keys` and `items`, or Tianshou's); or a sequence or array of them, which are stacked.
        Such values become batches themselves, lists become arrays, numbers 0-d arrays. Arrays and tensors are kept, not
        copied.
    copy
        Whether to copy all values, objects included.
    **kwargs
        Further values by name.

    Raises
    ------
    ColumnTypeError
        If a name is not a string, or no column can hold a value.

    Examples
    --------
    >>> b = Batch(obs={"camera": np.zeros((2, 3)), "speed": [1.5, 2.5]}, act=[0, 1])
    >>> b.obs.speed
    array([1.5, 2.5])
    >>> b[0]
    Batch(
        obs: Batch(
                 camera: array([0., 0., 0.]),
                 speed: 1.5,
             ),
        act: 0,
    )
    >>> len(b), b.shape
    (2, [2])
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]
    _stack_rows = classmethod(joining.stack)

    def __init__(
        self,
        /,
        batch_dict: Mapping[str, Any] | Batch | Iterable[Mapping[str, Any] | Batch] | npt.NDArray[Any] | None = None,
        copy: bool = False,
        **kwargs: Any,
    ) -> None:
        if batch_dict is None:
            kept = kwargs
            for name, value in kwargs.items():
                if type(value) is not _ndarray or value.dtype.num >= _FIRST_OBJECT:
                    kwargs[name] = parse(value, Batch, name)
        else:
            kind = KINDS[type(batch_dict)]
            if kind in (MAPPING, RECORD):
                kept = parse_items(cast("Mapping[str, Any]", values_of(batch_dict)), Batch, "")
            else:
                kept = dict(batch_dict.__dict__ if kind == NODE else stack_rows(batch_dict, Batch).__dict__)
            if kwargs:
                kept.update(parse_items(kwargs, Batch, ""))
        adopt(self, kept)
        if copy:
            adopt(self, copy_tree(self).__dict__)
        if len(sys.modules) != interchange.modules_seen:
            interchange.register_where_loaded(Batch)

    # Access by name

    if TYPE_CHECKING:
        # At run time a value is a plain attribute, found in __dict__: a hook here would double the cost.
        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is not _ndarray or value.dtype.num >= _FIRST_OBJECT:
            value = parse(value, Batch, name)
        self.__dict__[name] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, which is set to the default if there is none."""
        if key not in self.__dict__:
            self.__dict__[key] = parse(default, Batch, join_name(key, ""))
        return self.__dict__[key]

    def update(self, batch: Mapping[str, Any] | Batch | None = None, **kwargs: Any) -> None:
        """Set values by name, from a dict or Batch and from keywords.

        Examples
        --------
        >>> b = Batch(a=4)
        >>> b.update({"b": [5, 5]}, c=1)
        >>> b
        Batch(
            a: 4,
            b: array([5, 5]),
            c: 1,
        )
        """
        given = {} if batch is None else values_of(batch)
        if given is None:
            raise ColumnTypeError(f"a Batch is updated from a dict or Batch, got {type(batch).__name__}")
        values = parse_items(given, Batch, "")
        values.update(parse_items(kwargs, Batch, ""))
        self.__dict__.update(values)

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def keys(self) -> KeysView[str]:
        """Return the names, as a dict's `keys` does."""
        return self.__dict__.keys()

    def get_keys(self) -> KeysView[str]:
        """Return the names; unlike `keys`, a name that hardly collides with a column's."""
        return self.__dict__.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values, as a dict's `values` does."""
        return self.__dict__.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names and values, as a dict's `items` does."""
        return self.__dict__.items()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a name, or the default if there is none."""
        return self.__dict__.get(key, default)

    def pop(self, key: str, default: Any = None) -> Any:
        """Remove a name and return its value, or the default if there is none."""
        return self.__dict__.pop(key, default)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last name, and return it with its value."""
        return self.__dict__.popitem()

    def clear(self) -> None:
        """Remove all names."""
        self.__dict__.clear()

    def is_empty(self, recurse: bool = False) -> bool:
        """Tell whether there are no names, or with `recurse` no values under any of them.

        Examples
        --------
        >>> Batch(a=Batch()).is_empty(), Batch(a=Batch()).is_empty(recurse=True)
        (False, True)
        """
        return not _has_leaves(self) if recurse else not self.__dict__

    # Rows

    def __len__(self) -> int:
        return shortest(self.__dict__) or 0

    shape = _Shape()

    def __iter__(self) -> Iterator[Self]:
        return cast("Iterator[Self]", iterate(self, shortest(self.__dict__) or 0))

    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is str:
            held = self.__dict__
            if index in held:
                return held[index]
            raise no_such_column(index, held)
        return self[str(index)] if isinstance(index, str) else select(self, index)

    def __getitems__(self, indices: Sequence[int]) -> Self:
        """Take several rows at once, as a torch `DataLoader` asks of a data set."""
        return cast("Self", select(self, list(indices)))

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, str):
            self.__dict__[str(index)] = parse(value, Batch, index)
            return
        given = values_of(value)
        if given is None:
            raise ColumnMismatchError(f"rows of a Batch are set from a Batch or dict, got {type(value).__name__}")
        assign(self, index, given if KINDS[type(value)] == NODE else parse_items(given, Batch, ""))

    def __delitem__(self, name: str) -> None:
        if name not in self.__dict__:
            raise no_such_column(name, self.__dict__)
        del self.__dict__[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        return trees_equal(self, other)

    def __repr__(self) -> str:
        return format_tree(self)

    def empty_(self, index: Any = None) -> Self:
        """Set all values, or those of some rows, to zeros and objects to None, in place.

        Examples
        --------
        >>> Batch(a=[1, 2], b=["x", "y"]).empty_(1)
        Batch(
            a: array([1, 0]),
            b: array(['x', None], dtype=object),
        )
        """
        zero(self, ... if index is None else index)
        return self

    @staticmethod
    def empty(batch: Batch, index: Any = None) -> Batch:
        """Copy a batch with all values, or those of some rows, set to zeros and objects to None."""
        return Batch.empty_(cast("Batch", copy_tree(batch)), index)

    # Joining and splitting

    @staticmethod
    def stack(batches: Iterable[Mapping[str, Any] | Batch], axis: int = 0, *, missing: Missing = "zero") -> Batch:
        """Join n batches along a new axis: leaves of shape (...) become (n, ...) for axis 0.

        Parameters
        ----------
        batches
            Batches or dicts.
        axis
            Where the new axis goes. Names that only some batches have can be padded along axis 0 alone.
        missing
            Padding for a name that a batch lacks or only reserves: `"zero"` for zeros, False or None; `"nan"` for NaN,
            NaT or None, an error for dtypes without; `"error"` for an error.

        Raises
        ------
        ColumnMismatchError
            If a name is a batch in one and an array in another, or names differ and may not.
        ColumnTypeError
            If tensors and arrays meet under one name, or tensors of different shapes.

        Warns
        -----
        UserWarning
            If arrays differ in shape: they become the elements of an array of dtype object.

        Examples
        --------
        >>> Batch.stack([Batch(a=[0.0, 2.0]), Batch(a=[1.0, 3.0], b="done")])
        Batch(
            a: array([[0., 2.],
                      [1., 3.]]),
            b: array([None, 'done'], dtype=object),
        )
        """
        return cast("Batch", joining.stack(Batch, joining.list_batches(batches), axis=axis, missing=missing))

    def stack_(self, batches: Iterable[Mapping[str, Any] | Batch], axis: int = 0) -> None:
        """Replace this batch by the stack of it and others; an empty batch is left out."""
        others = joining.list_batches(batches)
        adopt(self, joining.stack(Batch, [self, *others] if self.__dict__ else others, axis=axis).__dict__)

    @staticmethod
    def cat(batches: Iterable[Mapping[str, Any] | Batch], *, missing: Missing = "zero") -> Batch:
        """Join batches one after the other: leaves of shape (n_i, ...) become (sum of n_i, ...).

        Parameters
        ----------
        batches
            Batches or dicts.
        missing
            As for `stack`; as many rows are padded as the batch has.

        Raises
        ------
        ColumnMismatchError
            If row shapes differ, a value has no rows, a name is a batch in one and an array in another, or names differ
            and may not.
        ColumnTypeError
            If tensors and arrays meet under one name.

        Examples
        --------
        >>> Batch.cat([Batch(a=[1, 2]), Batch(a=[3], b=[4.0])])
        Batch(
            a: array([1, 2, 3]),
            b: array([0., 0., 4.]),
        )
        >>> Batch.cat([Batch(a=[1, 2]), Batch(a=[3], b=[4.0])], missing="error")
        Traceback (most recent call last):
        samplebatch.errors.ColumnMismatchError: column 'b' must be in every batch to be concatenated, batch 0 lacks it
        """
        return cast("Batch", joining.cat(Batch, joining.list_one_or_more(batches), missing))

    def cat_(self, batches: Mapping[str, Any] | Batch | Iterable[Mapping[str, Any] | Batch]) -> None:
        """Replace this batch by it and others, one after the other; a single batch need not be in a list."""
        adopt(self, joining.cat(Batch, [self, *joining.list_one_or_more(batches)]).__dict__)

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, rng: np.random.Generator | None = None
    ) -> Iterator[Self]:
        """Yield the rows in batches of a size.

        Parameters
        ----------
        size
            Rows in a batch; -1 for all of them.
        shuffle
            Whether to draw the rows in random order, copying them. Otherwise the batches are views.
        merge_last
            Whether a shorter last batch joins the one before.
        rng
            Source of the order; NumPy's global one if it is None.

        Raises
        ------
        ArgumentError
            If the size is neither a whole number from 1 on nor -1.

        Examples
        --------
        >>> [part.a.tolist() for part in Batch(a=[1, 2, 3, 4, 5]).split(2, shuffle=False, merge_last=True)]
        [[1, 2], [3, 4, 5]]
        """
        if size != -1:
            whole("size", size, 1)
        return cast("Iterator[Self]", split_rows(self, size, shuffle, merge_last, rng))

    # Leaf by leaf

    def apply_values_transform(self, values_transform: Callable[[Any], Any], inplace: bool = False) -> Self | None:
        """Apply a function to every value, those of nested batches included.

        Parameters
        ----------
        values_transform
            Takes a value, None and objects included; its result is converted as on assignment.
        inplace
            Whether to change this batch, nested ones included, and return None; otherwise a new one is returned.

        Examples
        --------
        >>> Batch(a=[1, 2], b=Batch(c=[3])).apply_values_transform(lambda value: value * 10)
        Batch(
            a: array([10, 20]),
            b: Batch(
                   c: array([30]),
               ),
        )
        """
        changed = transform_leaves(self, values_transform, Batch)
        if not inplace:
            return cast("Self", changed)
        replace_leaves(self, changed)
        return None

    # Copies

    def copy(self) -> Self:
        """Copy the batch and everything under it."""
        return cast("Self", copy_tree(self))

    def __copy__(self) -> Self:
        return cast("Self", copy_nodes(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return cast("Self", copy_tree(self, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), interchange.values_to_pickle(self)  # type: ignore[attr-defined]
