"""ColumnMap: named columns as a mapping from name to array.

It holds the columns flat under dotted names, hands nested ones out nested, and cuts the columns of a view only when
asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from samplebatch import names
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names, unflatten
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, no_such_column

Window = tuple[dict[str, Column], int, int, int, int]
"""What a view has yet to cut: the source's columns, a range of their rows, and a range of their sequences."""

_FLAT: dict[str, Structure] = {}
"""The structures of a map without nested columns; never changed."""


class ColumnMap(MutableMapping[str, Any]):
    """Named columns, flat inside and nested outside.

    A view holds the columns of its source and a window on them; a column is cut when it is first asked for. The
    source's dict is therefore never changed once a view has seen it: whoever wants to change it takes a copy (`_own`).
    """

    _columns: dict[str, Column]
    _window: Window | None = None
    _lent = False
    _nested = _FLAT

    def __getitem__(self, key: Any) -> Any:
        if type(key) is str:
            column = self._columns.get(key)
            return self._find(key) if column is None else column.values
        return self._find(str(key)) if isinstance(key, str) else self._get_rows(key)

    def _get_rows(self, key: Any) -> Any:
        """Answer a key that is not a name."""
        raise no_such_column(key, self.keys())

    def _derive(self, name: str) -> Any:
        """Answer a name that no column has, or give None."""
        return None

    def _find(self, name: str) -> Any:
        """Answer a name that is not among the columns cut so far."""
        window = self._window
        if window is not None and name in window[0]:
            column = self._columns[name] = _cut(window, name)
            return column.values
        if name in self._columns:
            return self._columns[name].values
        if name in self._nested:
            return unflatten(name, self._nested[name], self.__getitem__)
        derived = self._derive(name)
        if derived is None:
            raise no_such_column(name, self.keys())
        return derived

    def column(self, name: str) -> Column:
        """Return the column behind a dotted name.

        Raises
        ------
        ColumnNotFoundError
            If there is none; lists the near names.
        """
        column = self._columns.get(name)
        if column is not None:
            return column
        window = self._window
        if window is None or name not in window[0]:
            raise no_such_column(name, self.column_names)
        column = _cut(window, name)
        self._columns[name] = column
        return column

    def _all(self) -> dict[str, Column]:
        """Cut every column that is not cut yet, and return them all by dotted name, in order; not to be changed."""
        window = self._window
        if window is not None:
            cut = self._columns
            self._columns = {name: cut[name] if name in cut else _cut(window, name) for name in window[0]}
            self._window = None
            self._lent = False
        return self._columns

    def _own(self) -> dict[str, Column]:
        """Return all columns in a dict that no view looks at, free to be changed."""
        columns = self._all()
        if self._lent:
            self._columns = columns = columns.copy()
            self._lent = False
        return columns

    def _names(self) -> dict[str, Column]:
        """Return a dict whose keys are the dotted names, without cutting anything."""
        return self._columns if self._window is None else self._window[0]

    @property
    def column_names(self) -> tuple[str, ...]:
        """Dotted names of all columns, in order."""
        return tuple(self._names())

    def __iter__(self) -> Iterator[str]:
        if not self._nested:
            return iter(self._names())
        owner = {leaf: top for top, structure in self._nested.items() for leaf in leaf_names(top, structure)}
        return iter(dict.fromkeys([owner.get(name, name) for name in self._names()] + list(self._nested)))

    def __contains__(self, key: object) -> bool:
        return key in self._names() or key in self._nested

    def _build(self, name: str, values: Any) -> tuple[Structure, dict[str, Column]]:
        """Build the structure and the columns that assigning to a name would give; nothing is changed yet."""
        if not isinstance(name, str):
            raise ColumnTypeError(f"a column's name must be a string, got a {type(name).__name__}")
        self._refuse_strange_leaf(name)
        if not is_nested(values):
            return None, {name: as_column(values, name)}
        structure, leaves = flatten(name, values)
        own = set(leaf_names(name, self._nested.get(name)))
        for path, _ in leaves:
            if path in self._names() and path not in own:
                raise ColumnMismatchError(
                    f"column {path!r} is there already, beside the nested column {name!r}; drop it first"
                )
        return structure, {path: as_column(leaf, path) for path, leaf in leaves}

    def _adopt(self, name: str, structure: Structure, columns: dict[str, Column]) -> None:
        """Put built columns in the place of whatever stood under the name."""
        own = self._own()
        if name in self._nested or structure is not None:
            self._forget(name)
        if structure is not None:
            self._nested = {**self._nested, name: structure}
        own.update(columns)

    def _refuse_strange_leaf(self, name: str) -> None:
        for top, structure in self._nested.items():
            if name.startswith(top + ".") and name not in leaf_names(top, structure):
                raise ColumnTypeError(
                    f"column {name!r} is no leaf of the nested column {top!r}; assign batch[{top!r}] whole"
                )

    def _forget(self, name: str) -> None:
        """Take a column, nested or not, out of the columns."""
        columns = self._own()
        for path in leaf_names(name, self._nested.get(name)):
            columns.pop(path, None)
        if name in self._nested:
            self._nested = {top: structure for top, structure in self._nested.items() if top != name}

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise no_such_column(name, self.keys())
        for top, structure in self._nested.items():
            if name != top and name in leaf_names(top, structure):
                raise ColumnTypeError(
                    f"column {name!r} is part of the nested column {top!r}; delete that, or assign it whole"
                )
        self._forget(name)

    def _leaves(self, wanted: str) -> list[str]:
        """List the dotted names that a name stands for: its leaves if it is nested, else itself.

        Raises
        ------
        ColumnNotFoundError
            If there is no such column.
        """
        if wanted in self._nested:
            return list(leaf_names(wanted, self._nested[wanted]))
        if wanted not in self._names():
            raise no_such_column(wanted, self.keys())
        return [wanted]


def _cut(window: Window, name: str) -> Column:
    source, start, stop, first, last = window
    column = source[name]
    if names.SEQ_LENS in source and names.is_per_sequence(name) and len(column) == len(source[names.SEQ_LENS]):
        return column.slice(first, last)
    return column.slice(start, stop)
