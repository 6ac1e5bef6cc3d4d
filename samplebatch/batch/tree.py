"""Nested columns: conversion between trees of arrays and columns with dotted names.

A dict or tuple of arrays is stored as one column per leaf, named by the leaf's path: `obs.camera`, `obs.0`. A structure
in JSON types represents the tree: None for a leaf, a dict for a dict, a list for a tuple.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import ReferenceType, ref

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.bulk import check_length, counted_column
from samplebatch.batch.flags import Flags, column_names
from samplebatch.batch.inert_pickle import is_packed, unpack_column
from samplebatch.batch.nested.interchange import PYTREES, register_where_loaded
from samplebatch.batch.nested.node import KINDS, MAPPING, NODE, RECORD, values_of
from samplebatch.batch.sequences import as_lengths, check_column, flags_without, retain
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.convert import as_column, as_ragged
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnTypeError, near_names, no_such_column
from samplebatch.names import covers

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch

Structure = dict[str, Any] | list[Any] | None
"""JSON form of a nested column: None for a leaf, a dict for a dict, a list for a tuple."""


_NAMED = frozenset((MAPPING, NODE, RECORD))


def columns_in(positional: tuple[Any, ...], named: dict[str, Any]) -> dict[Any, Any]:
    """Return the constructor arguments of a batch as a new dict of columns.

    Raises ColumnTypeError if `positional` is not one mapping, dataclass, named tuple, TensorDict, batch of another
    library, or iterable of pairs.

    >>> columns_in(({"a": [1]},), {"b": [2]}), columns_in(([("a", [1])],), {})
    ({'a': [1], 'b': [2]}, {'a': [1]})
    """
    if not positional:
        return named
    if len(positional) > 1:
        raise ColumnTypeError(f"a SampleBatch accepts at most one mapping of columns, got {len(positional)} values")
    (source,) = positional
    if type(source) is dict:
        return source | named
    values = values_of(source)
    try:
        if isinstance(source, np.ndarray):
            raise TypeError("an array has no names")
        return dict(source if values is None else values.items()) | named
    except (TypeError, ValueError) as error:
        is_rows = isinstance(source, list) and all(isinstance(row, dict) for row in source)
        hint = "; samplebatch.convert.from_dicts accepts a list of dicts" if is_rows else ""
        raise ColumnTypeError(
            "columns must be a mapping, a dataclass, a named tuple or pairs of names and columns, "
            f"got a {type(source).__name__}{hint}"
        ) from error


def declare_ragged(data: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any] | None]) -> dict[str, Any]:
    """Convert the named values, or all leaves below a name, to ragged columns.

    dtypes: dtype of the elements by dotted name; None keeps the rows' dtype.

    Raises ArgumentError if a name matches no value. Raises ColumnTypeError or ColumnMismatchError as in `as_ragged`.

    >>> declare_ragged({"obs": {"path": [[1], [2]]}, "t": [0, 1]}, {"obs.path": None})
    {'obs': {'path': RaggedColumn(2 rows of int64, row shape (None,))}, 't': [0, 1]}
    """
    declared, paths, used = {**data}, [], set[str]()
    for name, value in data.items():
        if not is_nested(value):
            leaves: list[tuple[str, Any]] = [(name, value)]
            structure: Structure = None
        else:
            structure, leaves = flatten(name, value)
        paths += [path for path, _ in leaves]
        columns = dict(leaves)
        for declared_name, dtype in dtypes.items():
            for path in [path for path, _ in leaves if covers((declared_name,), str(path))]:
                columns[path] = as_ragged(columns[path], path, dtype)
                declared[name] = unflatten(name, structure, columns.__getitem__)
                used.add(declared_name)
    for name in dtypes:
        if name not in used:
            raise ArgumentError(f"ragged must name columns of the batch, {name!r} is none; {near_names(name, paths)}")
    return declared


def is_nested(value: Any) -> bool:
    """Return whether a value is a tree of columns and not a single column.

    Dicts, dataclasses and batches are nested. A tuple is nested if any item has rows; a tuple of numbers is a single
    column.

    >>> is_nested({"camera": [1, 2]}), is_nested(([1, 2], [3, 4])), is_nested((1, 2))
    (True, True, False)
    """
    if type(value) is np.ndarray:
        return False
    if not isinstance(value, tuple):
        return KINDS[type(value)] in _NAMED
    return any(isinstance(item, (Mapping, tuple, list)) or getattr(item, "ndim", 0) > 0 for item in value)


def flatten(name: str, value: Any) -> tuple[Structure, list[tuple[str, Any]]]:
    """Split a nested value into its structure and a list of (dotted name, leaf).

    Raises ColumnTypeError if a dict key is not a string, or if a tuple has named fields, because structures cannot
    store field names. Raises ColumnMismatchError if a dot in a key makes two dotted names equal.

    >>> flatten("obs", {"camera": [1], "arm": ([2], [3])})
    ({'camera': None, 'arm': [None, None]},
     [('obs.camera', [1]), ('obs.arm.0', [2]), ('obs.arm.1', [3])])
    """
    leaves: list[tuple[str, Any]] = []
    structure = _walk(name, value, leaves)
    counts = Counter(path for path, _ in leaves)
    if len(counts) < len(leaves):
        raise ColumnMismatchError(
            f"column {name!r} must have one path per leaf, got {counts.most_common(1)[0][0]!r} twice; remove the dot "
            "from the key"
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
    """Yield (dotted name, leaf) of nested dicts, in order.

    >>> list(named_leaves({"obs": {"x": 0, "y": 1}, "info": {}, "rew": 2}))
    [('obs.x', 0), ('obs.y', 1), ('rew', 2)]
    """
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from named_leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def unflatten(name: str, structure: Structure, leaf: Callable[[str], Any]) -> Any:
    """Restore a nested value from its structure; `leaf` maps a dotted name to the leaf's value.

    >>> unflatten(
    ...     "obs",
    ...     {"camera": None, "arm": [None, None]},
    ...     {"obs.camera": 1, "obs.arm.0": 2, "obs.arm.1": 3}.get,
    ... )
    {'camera': 1, 'arm': (2, 3)}
    """
    if structure is None:
        return leaf(name)
    if isinstance(structure, dict):
        return {key: unflatten(f"{name}.{key}", child, leaf) for key, child in structure.items()}
    return tuple(unflatten(f"{name}.{i}", child, leaf) for i, child in enumerate(structure))


def changed_at(
    structure: Structure, path: Sequence[str], change: Callable[[dict[str, Structure]], Structure]
) -> Structure:
    """Return a copy of a structure with the dict at `path` replaced.

    >>> changed_at({"arm": [{"x": None}]}, ["arm", "0"], lambda inner: {**inner, "y": None})
    {'arm': [{'x': None, 'y': None}]}
    """
    if not path:
        return change(cast("dict[str, Structure]", structure))
    key, *below = path
    if isinstance(structure, dict):
        return {**structure, key: changed_at(structure[key], below, change)}
    return [
        changed_at(child, below, change) if str(i) == key else child
        for i, child in enumerate(cast("list[Structure]", structure))
    ]


_MISSING: Any = object()


class NestedColumn(dict[str, Any]):
    """Dict of a nested column; assignments to the dict and deletions from the dict change the batch.

    While a nested column's dict is referenced, each read of the column from the batch updates and returns this dict.
    Assigned values are validated like columns of the batch, under their dotted names. The dict is detached from the
    batch when the nested column is replaced or deleted, or the batch is freed; constructed, copied and unpickled dicts
    are detached as well.

    Raises ColumnLengthError if an assigned column has a different number of rows than the batch. Raises ColumnTypeError
    if a key is not a string, or no column type supports the values. Raises ColumnMismatchError if two columns would
    have the same dotted name.

    >>> from samplebatch import SampleBatch
    >>> batch = SampleBatch(obs={"camera": [1, 2], "speed": [0.5, 1.5]})
    >>> batch["obs"]["camera"] = [7, 8]
    >>> del batch["obs"]["speed"]
    >>> batch.column_names, batch["obs"]
    (('obs.camera',), {'camera': array([7, 8])})
    """

    _batch: ReferenceType[Any] | None = None
    _path: tuple[str, ...] = ()

    @classmethod
    def of_batch(cls, batch: Any, path: tuple[str, ...], items: dict[str, Any]) -> Self:
        """Create the dict of the nested column at `path`."""
        new = cls(items)
        new._batch, new._path = ref(batch), path
        return new

    def refresh(self, items: dict[str, Any]) -> None:
        """Update the values; a running iteration continues if the keys are unchanged."""
        if self.keys() != items.keys():
            super().clear()
        super().update(items)

    def _owner(self) -> Any:
        """Return the batch that this dict writes to; None if the dict is detached."""
        batch = None if self._batch is None else self._batch()
        reference = None if batch is None else batch._nested_views.get(self._path)
        return batch if reference is not None and reference() is self else None

    def _remove(self, keys: list[str]) -> None:
        batch = self._owner()
        if batch is not None:
            drop_below(batch, self._path, keys)
            return
        for key in keys:
            super().__delitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign several columns atomically."""
        items: dict[str, Any] = dict(*args, **kwargs)
        batch = self._owner()
        if batch is None:
            super().update(items)
        elif items:
            assign_below(batch, self._path, items)

    def __ior__(self, other: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a column; if the column is missing, create it from `default` first."""
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise no_such_column(".".join((*self._path, str(key))), [".".join((*self._path, name)) for name in self])
        self._remove([key])

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Remove and return a column; if the column is missing, return the default or raise ColumnNotFoundError."""
        if key not in self and default is not _MISSING:
            return default
        value = self.get(key)
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last (name, column); raises KeyError if there are no columns."""
        if not self:
            raise KeyError(f"nested column {'.'.join(self._path)!r} must have a column to remove, got none")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        """Remove all columns below this nested column."""
        self._remove(list(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copied or unpickled dict belongs to no batch.
        return dict, (dict(self),)


register_where_loaded(NestedColumn, PYTREES)


# -- nested columns of a batch -----------------------------------------------------------------------------------------


def show(batch: SampleBatch[Any], path: tuple[str, ...], structure: Structure) -> Any:
    """Return the value at a path: a dict that writes to the batch, a tuple of values, or a column's values."""
    if structure is None:
        return batch[".".join(path)]
    if isinstance(structure, list):
        return tuple(show(batch, (*path, str(i)), child) for i, child in enumerate(structure))
    items = {key: show(batch, (*path, key), child) for key, child in structure.items()}
    reference = batch._nested_views.get(path)
    view = None if reference is None else reference()
    if view is not None:
        view.refresh(items)
        return view
    view = NestedColumn.of_batch(batch, path, items)
    batch._nested_views = {**batch._nested_views, path: ref(view)}
    return view


def build(batch: SampleBatch[Any], name: str, values: Any) -> tuple[Structure, dict[str, Column]]:
    """Build the structure and columns of an assignment without modifying the batch."""
    if not isinstance(name, str):
        raise ColumnTypeError(f"a column's name must be a string, got a {type(name).__name__}")
    for top, structure in batch._nested.items():
        if name.startswith(top + ".") and name not in leaf_names(top, structure):
            raise ColumnTypeError(
                f"column {name!r} must be a leaf of the nested column {top!r}; assign all of batch[{top!r}]"
            )
    if not is_nested(values):
        if type(values) is list and isinstance(batch._names().get(name), VaryingRows) and _are_rows(values):
            # A list does not specify a column type: the column stays ragged even if its rows now have one shape.
            return None, {name: as_ragged(values, name)}
        return None, {name: as_column(values, name)}
    structure, leaves = flatten(name, values)
    replaced = set(leaf_names(name, batch._nested.get(name)))
    for path, _ in leaves:
        if path in batch._names() and path not in replaced:
            raise ColumnMismatchError(
                f"column {path!r} already exists beside the nested column {name!r}; drop it first"
            )
    return structure, {path: as_column(leaf, path) for path, leaf in leaves}


def build_all(batch: SampleBatch[Any], data: Mapping[str, Any]) -> None:
    """Build the columns and structures of a new batch."""
    columns = batch._columns
    for name, values in data.items():
        structure, built = build(batch, name, values)
        if name in columns:
            raise ColumnMismatchError(f"column {name!r} already exists as a leaf of a nested column; rename it")
        if structure is not None:
            batch._nested = {**batch._nested, name: structure}
        columns.update(built)


def assign(batch: SampleBatch[Any], name: str, values: Any) -> None:
    """Validate and assign a column, which may be nested."""
    structure, columns = build(batch, name, as_lengths(values) if name == names.SEQ_LENS else values)
    replaced = set(batch._leaves(name)) if name in batch else set()
    _check(batch, columns, {path: column for path, column in batch._all().items() if path not in replaced})
    present = batch._own()
    if name in batch._nested or structure is not None:
        _remove(batch, name)
    if structure is not None:
        batch._nested = {**batch._nested, name: structure}
    present.update(columns)
    if name == names.SEQ_LENS and not batch._flags.zero_padded:
        batch._flags = replace(batch._flags, max_seq_len=None)
    batch._count_rows()


def _check(batch: SampleBatch[Any], columns: dict[str, Column], others: dict[str, Column]) -> None:
    """Validate new columns against the remaining columns before the batch is modified."""
    if batch._has_sequences or names.SEQ_LENS in columns:
        if names.SEQ_LENS in others:
            for path, column in columns.items():
                check_column(batch, path, column, len(others[names.SEQ_LENS]))
        batch._with({**others, **columns})._count_rows()
    elif not others:
        batch._with(columns)._count_rows()
    else:
        counted = counted_column(others)
        for path, column in columns.items():
            check_length(path, column, len(others[counted]), f"as {counted!r} has")


def delete(batch: SampleBatch[Any], name: str) -> None:
    """Delete a column, which may be nested."""
    if name not in batch:
        raise no_such_column(name, batch.keys())
    for top, structure in batch._nested.items():
        if name != top and name in leaf_names(top, structure):
            raise ColumnTypeError(
                f"column {name!r} is a leaf of the nested column {top!r}; delete or assign all of {top!r}"
            )
    if name == names.SEQ_LENS:
        batch._flags = flags_without(batch, batch.column_names)
    _remove(batch, name)
    batch._flags = retain(batch._flags, batch._columns)
    batch._count_rows()


def _remove(batch: SampleBatch[Any], name: str) -> None:
    columns = batch._own()
    for path in leaf_names(name, batch._nested.get(name)):
        columns.pop(path, None)
    if name in batch._nested:
        batch._nested = {top: structure for top, structure in batch._nested.items() if top != name}
        _hide(batch, (name,))


def _are_rows(values: list[Any]) -> bool:
    return all(isinstance(row, list) or getattr(row, "ndim", 0) > 0 for row in values)


def assign_below(batch: SampleBatch[Any], path: tuple[str, ...], items: Mapping[str, Any]) -> None:
    """Assign columns below a nested column atomically."""
    structure, columns = _build_below(batch, path, items)
    name = ".".join(path)
    assigned = tuple(f"{name}.{key}" for key in items)
    replaced = {p for p in batch._names() if p in assigned or p.startswith(tuple(f"{key}." for key in assigned))}
    _check(batch, columns, {p: column for p, column in batch._all().items() if p not in replaced})
    _replace_below(batch, path, items, structure, columns)


def drop_below(batch: SampleBatch[Any], path: tuple[str, ...], keys: Sequence[str]) -> None:
    """Delete columns below a nested column."""
    structure = changed_at(
        batch._nested[path[0]], path[1:], lambda inner: {key: c for key, c in inner.items() if key not in keys}
    )
    _replace_below(batch, path, keys, structure, {})


def _build_below(
    batch: SampleBatch[Any], path: tuple[str, ...], items: Mapping[str, Any]
) -> tuple[Structure, dict[str, Column]]:
    name = ".".join(path)
    columns: dict[str, Column] = {}
    children: dict[str, Structure] = {}
    for key, values in items.items():
        if not isinstance(key, str):
            raise ColumnTypeError(f"column {name!r} must have strings for keys, got a {type(key).__name__}")
        children[key], leaves = flatten(f"{name}.{key}", values)
        for leaf, value in leaves:
            if leaf in columns:
                raise ColumnMismatchError(f"column {leaf!r} must be assigned once, got it twice")
            columns[leaf] = as_column(value, leaf)
    former = batch._nested[path[0]]
    structure = changed_at(former, path[1:], lambda inner: {**inner, **children})
    leaf_paths = list(leaf_names(path[0], structure))
    other_names = batch._names().keys() - set(leaf_names(path[0], former))
    for leaf in leaf_paths:
        if leaf in other_names or leaf_paths.count(leaf) > 1:
            raise ColumnMismatchError(f"column {leaf!r} must have a unique name, got a name that another column has")
    return structure, columns


def _replace_below(
    batch: SampleBatch[Any],
    path: tuple[str, ...],
    keys: Iterable[str],
    structure: Structure,
    columns: dict[str, Column],
) -> None:
    """Replace a nested column's structure and the columns below `keys`; the order of other columns is preserved."""
    top = path[0]
    for key in keys:
        _hide(batch, (*path, key))
    present = batch._own() | columns
    leaves = list(leaf_names(top, structure))
    former = set(leaf_names(top, batch._nested[top]))
    ordered: dict[str, Column] = {}
    for name, column in batch._columns.items():
        if name in former:
            ordered.update((leaf, present[leaf]) for leaf in leaves)
        else:
            ordered[name] = column
    ordered.update((leaf, present[leaf]) for leaf in leaves)
    batch._columns = ordered
    batch._nested = {**batch._nested, top: structure}
    # Update all referenced dicts of the nested column, including dicts below tuples.
    show(batch, (top,), structure)
    batch._count_rows()


def _hide(batch: SampleBatch[Any], path: tuple[str, ...]) -> None:
    batch._nested_views = {
        path_of_view: view for path_of_view, view in batch._nested_views.items() if path_of_view[: len(path)] != path
    }


def select(nested: Mapping[str, Structure], columns: Mapping[str, Any]) -> dict[str, Structure]:
    """Return the structures of the nested columns in `columns`; raises ColumnTypeError if one lacks leaves."""
    chosen = {}
    for top, structure in nested.items():
        paths = list(leaf_names(top, structure))
        present = [path for path in paths if path in columns]
        if present and len(present) < len(paths):
            raise ColumnTypeError(
                f"nested column {top!r} must be selected or dropped with all its leaves, got only "
                f"{', '.join(map(repr, present))}"
            )
        if present:
            chosen[top] = structure
    return chosen


def check_renaming(mapping: Mapping[str, str], order: list[str], nested: Mapping[str, Structure]) -> list[str]:
    """Validate a renaming and return the new column names in order."""
    for old in mapping:
        if old not in order:
            raise no_such_column(old, order)
    for new in mapping.values():
        if not isinstance(new, str):
            raise ColumnTypeError(f"a column's name must be a string, got a {type(new).__name__}")
    renamed = [mapping.get(name, name) for name in order]
    tops = [mapping.get(top, top) for top in nested]
    for name in renamed:
        if renamed.count(name) > 1 or any(name.startswith(f"{top}.") for top in tops):
            raise ColumnMismatchError(f"column {name!r} must have a unique name, got a name that another column has")
    return renamed


# -- columns in other forms --------------------------------------------------------------------------------------------


def rename_flags(flags: Flags, mapping: Mapping[str, str]) -> Flags:
    """Return flags that declare renamed columns under their new names."""
    if not flags.per_sequence:
        return flags
    parts = (name.partition(".") for name in flags.per_sequence)
    declared = [mapping.get("".join(part), mapping.get(part[0], part[0]) + part[1] + part[2]) for part in parts]
    return replace(flags, per_sequence=tuple(sorted(declared)))


def declare_per_sequence(batch: SampleBatch[Any], columns: str | Iterable[str]) -> None:
    """Set the flag `per_sequence` of a new batch; raises ArgumentError with similar names if a column is missing."""
    declared = column_names("per_sequence", columns)
    for name in declared:
        if not any(covers((name,), path) for path in batch.column_names):
            raise ArgumentError(f"per_sequence must name columns of the batch, got {name!r}; {near_names(name, batch)}")
    batch._flags = replace(batch._flags, per_sequence=declared)


def compress(batch: SampleBatch[Any], columns: Iterable[str], *, bulk: bool) -> None:
    """Implement `SampleBatch.compress`."""
    chosen = _choose(batch, columns)
    for path, column in chosen.items():
        if not isinstance(column, (TensorColumn, CompressedColumn)):
            raise ColumnTypeError(f"column {path!r} must be an array to be compressed, got a {column.kind} column")
    arrays = {path: column for path, column in chosen.items() if isinstance(column, TensorColumn)}
    batch._own().update({path: CompressedColumn.compress(column, bulk=bulk) for path, column in arrays.items()})


def decompress(batch: SampleBatch[Any], columns: Iterable[str], *, allow_pickle: bool = False) -> None:
    """Implement `SampleBatch.decompress_if_needed`."""
    plain: dict[str, Column] = {}
    for path, column in _choose(batch, columns).items():
        if isinstance(column, CompressedColumn):
            plain[path] = column.decompress()
        elif is_packed(column):
            plain[path] = unpack_column(column, path, allow_pickle=allow_pickle)
    batch._own().update(plain)


def _choose(batch: SampleBatch[Any], columns: Iterable[str]) -> dict[str, Column]:
    """Return the leaves of the named columns; missing columns are skipped."""
    return {path: batch.column(path) for name in columns if name in batch for path in batch._leaves(name)}


def with_environment_actions(batch: SampleBatch[Any], unit: ActionUnit) -> dict[str, Column]:
    """Return the columns with the actions converted from `unit` to the environment's unit."""
    columns = dict(batch._all())
    if names.ACTIONS in batch:
        if names.ACTIONS in batch._nested or not isinstance(columns[names.ACTIONS], TensorColumn | TorchColumn):
            raise ColumnMismatchError(
                f"column {names.ACTIONS!r} must be one array to be mapped, got another type or nested columns"
            )
        columns[names.ACTIONS] = as_column(unit.to_environment(columns[names.ACTIONS].values), names.ACTIONS)
    return columns


def equal(batch: SampleBatch[Any], other: SampleBatch[Any]) -> bool:
    """Return whether two batches have equal columns, dtypes, rows and layout; NaN equals NaN."""
    columns, others = batch._all(), other._all()
    return (
        batch.count == other.count
        and columns.keys() == others.keys()
        and batch._nested == other._nested
        and batch._flags.zero_padded == other._flags.zero_padded
        and bool(batch._flags.time_major) == bool(other._flags.time_major)
        and all(batch._flags.declares(name) == other._flags.declares(name) for name in columns)
        and all(column.equals(others[name]) for name, column in columns.items())
    )
