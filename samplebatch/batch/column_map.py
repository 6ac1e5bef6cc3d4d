"""ColumnMap: the columns of a batch, a mapping from name to array.

It holds the columns flat under dotted names, hands nested ones out nested, and cuts the columns of a view only when
asked for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Self

from samplebatch import names
from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.packed import is_packed, unpack_column
from samplebatch.batch.saved import Saved
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names, unflatten
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError, no_such_column

Window = tuple[dict[str, Column], int, int, int, int]
"""Pending cut of a view: the source's columns, a range of their rows, and a range of their sequences."""

OBSERVATIONS = frozenset({names.OBS, names.NEXT_OBS})
"""Columns that `compress` packs by default."""

_FLAT: Mapping[str, Structure] = MappingProxyType({})
"""The structures of a map without nested columns; all such maps share it."""


class ColumnMap(Saved, MutableMapping[str, Any]):
    """Named columns, flat inside and nested outside: the part of `SampleBatch` that sees to names.

    A view holds the columns of its source and a window on them; a column is cut when it is first asked for. The
    source's dict is therefore never changed once a view has seen it: `_own` copies it first.
    """

    _columns: dict[str, Column]
    _window: Window | None = None
    _lent = False
    _nested = _FLAT
    _flags: Flags = DEFAULT

    @classmethod
    def _of(
        cls, columns: dict[str, Column], nested: Mapping[str, Structure] | None = None, flags: Flags = DEFAULT
    ) -> Self:
        """Make a batch of built columns, and count and check their rows."""
        new = cls.__new__(cls)
        new._columns = columns
        if nested:
            new._nested = nested
        if flags is not DEFAULT:
            new._flags = flags
        new._count_rows()
        return new

    def _count_rows(self) -> None:
        """Check the columns against each other; columns without a common length have nothing to check."""

    def __getitem__(self, key: Any) -> Any:
        if type(key) is str:
            column = self._columns.get(key)
            return self._find(key) if column is None else column.values
        return self._find(str(key)) if isinstance(key, str) else self._get_rows(key)

    def _get_rows(self, key: Any) -> Any:
        """Return rows for a key that is not a name."""
        raise no_such_column(key, self.keys())

    def _derive(self, name: str) -> Any:
        """Derive the values of a name that no column has, or return None."""
        return None

    def _find(self, name: str) -> Any:
        """Return the values of a name that is not among the columns cut so far."""
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
        """Return the dotted names as the keys of a dict, without cutting anything."""
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

    def get(self, key: str, default: Any = None) -> Any:
        """Return a column, or the default if there is none.

        >>> from samplebatch import SampleBatch
        >>> SampleBatch(a=[1]).get("b", 0)
        0
        """
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a column, made of the default first if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Take a column out of the batch and return it, or the default if it has no such column.

        Raises
        ------
        ColumnNotFoundError
            If there is no such column, and no default.
        """
        if key not in self and default:
            return default[0]
        return super().pop(key)

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """Return the arrays of the given columns, in the order asked for.

        Raises
        ------
        ColumnNotFoundError
            If one is not there; lists the near names.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> [values.tolist() for values in SampleBatch(a=[1], b=[2], c=[3]).columns(["a", "b"])]
        [[1], [2]]
        """
        return [self[key] for key in keys]

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
        """Replace the columns under a name by built ones."""
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

    # -- choosing columns ----------------------------------------------------------------------------------------------

    def select(self, *keys: str) -> Self:
        """View only the given columns, in the order asked for; sequences stay with `seq_lens`.

        Raises
        ------
        ColumnNotFoundError
            If one is not there; lists the near names.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(a=[1], b=[2], c=[3]).select("c", "a"))
        ['c', 'a']
        """
        columns = self._all()
        return self._part({path: columns[path] for key in keys for path in self._leaves(key)})

    def drop(self, *keys: str) -> Self:
        """View all columns but the given ones.

        Raises
        ------
        ColumnNotFoundError
            If one is not there; lists the near names.
        SequenceError
            If `seq_lens` goes and columns with a row per sequence stay.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(a=[1], b=[2], c=[3]).drop("b"))
        ['a', 'c']
        """
        gone = {path for key in keys for path in self._leaves(key)}
        return self._part({path: column for path, column in self._all().items() if path not in gone})

    def _part(self, columns: dict[str, Column]) -> Self:
        """Make a batch of some of the columns; of a nested one all or none."""
        nested = {}
        for top, structure in self._nested.items():
            kept = [path in columns for path in leaf_names(top, structure)]
            if any(kept) and not all(kept):
                raise ColumnTypeError(f"the nested column {top!r} must be kept or left out as a whole")
            if any(kept):
                nested[top] = structure
        return self._of(columns, nested, self._flags)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """View the columns under other names, in the same order.

        Raises
        ------
        ColumnNotFoundError
            If a name is not there; lists the near names.
        ColumnMismatchError
            If two columns would have one name.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> list(SampleBatch(obs=[1], rewards=[2]).rename({"rewards": "rew"}))
        ['obs', 'rew']
        """
        columns, order = self._all(), list(self)
        for old in mapping:
            if old not in order:
                raise no_such_column(old, order)
        for new in mapping.values():
            if not isinstance(new, str):
                raise ColumnTypeError(f"a column's name must be a string, got a {type(new).__name__}")
        renamed = [mapping.get(name, name) for name in order]
        nested = {mapping.get(top, top): structure for top, structure in self._nested.items()}
        for name in renamed:
            if renamed.count(name) > 1 or any(name.startswith(f"{top}.") for top in nested):
                raise ColumnMismatchError(f"column {name!r} must have a name of its own, and another one has it too")
        return self._of(
            {
                new + path[len(old) :]: columns[path]
                for old, new in zip(order, renamed, strict=True)
                for path in self._leaves(old)
            },
            nested,
            self._flags,
        )

    # -- compression ---------------------------------------------------------------------------------------------------

    def compress(self, bulk: bool = False, columns: Set[str] | Iterable[str] = OBSERVATIONS) -> Self:
        """Compress columns with LZ4, in place; such a column is handed out as a `CompressedColumn`.

        Parameters
        ----------
        bulk
            Whether to compress each column as a whole. If not, it is compressed in blocks of a few rows, so that rows
            can be read alone.
        columns
            The columns, by name or by dotted name; missing and compressed ones are left alone.

        Returns
        -------
        SampleBatch
            This very batch.

        Raises
        ------
        ColumnTypeError
            If a column is not an array of numbers.

        Examples
        --------
        >>> from samplebatch import SampleBatch
        >>> batch = SampleBatch(obs=[[0.0] * 84] * 100, rewards=[0.0] * 100).compress(bulk=True)
        >>> batch["obs"].nbytes < 1000
        True
        >>> batch.decompress_if_needed()["obs"].shape
        (100, 84)
        """
        chosen = self._choose(columns)
        for path, column in chosen:
            if not isinstance(column, (TensorColumn, CompressedColumn)):
                raise ColumnTypeError(f"column {path!r} must be an array to be compressed, got a {column.kind} column")
        self._own().update(
            {path: CompressedColumn.compress(c, bulk=bulk) for path, c in chosen if isinstance(c, TensorColumn)}
        )
        return self

    def decompress_if_needed(
        self, columns: Set[str] | Iterable[str] = OBSERVATIONS, *, allow_pickle: bool = False
    ) -> Self:
        """Decompress columns, in place; missing and uncompressed ones are left alone.

        Columns that RLlib packed, a string or bytes a row, are unpacked.

        Parameters
        ----------
        columns
            The columns, by name or by dotted name.
        allow_pickle
            Whether what RLlib packed may be unpickled if it is more than arrays, numbers and strings. Only for data
            that you trust.

        Returns
        -------
        SampleBatch
            This very batch.

        Raises
        ------
        FormatError
            If a packed row is damaged; names the column.
        UntrustedPickleError
            If a packed row is more than arrays, numbers and strings and `allow_pickle` is false; names the column.
        """
        found: dict[str, Column] = {}
        for path, column in self._choose(columns):
            if isinstance(column, CompressedColumn):
                found[path] = column.decompress()
            elif is_packed(column):
                found[path] = unpack_column(column, path, allow_pickle=allow_pickle)
        self._own().update(found)
        return self

    def _choose(self, wanted: Iterable[str]) -> list[tuple[str, Column]]:
        """List the leaves of the wanted columns, without missing ones."""
        paths = [path for name in wanted if name in self for path in self._leaves(name)]
        return [(path, self.column(path)) for path in paths]


def _cut(window: Window, name: str) -> Column:
    source, start, stop, first, last = window
    column = source[name]
    if names.SEQ_LENS in source and names.is_per_sequence(name) and len(column) == len(source[names.SEQ_LENS]):
        return column.slice(first, last)
    return column.slice(start, stop)


def counted_column(columns: dict[str, Column]) -> str:
    """Name the column that counts the steps: not infos or states, unless there is nothing else."""
    return next(filter(names.counts_steps, columns), next(iter(columns)))


def check_length(name: str, column: Column, rows: int, why: str) -> None:
    """Check that a column has the rows that it must have.

    Raises
    ------
    ColumnLengthError
        If it has not; names the column and the reason.
    """
    if len(column) != rows:
        raise ColumnLengthError(f"column {name!r} must have {rows} rows {why}, got {len(column)}")
