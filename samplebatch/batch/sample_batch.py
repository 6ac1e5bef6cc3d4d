"""SampleBatch: steps of experience, RLlib's flat type."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast, overload
from weakref import ReferenceType

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import choice
from samplebatch.batch import arrow, bulk, delivery, episodes, frame, sequences, summary, tree
from samplebatch.batch.action_unit import ENVIRONMENT, ActionUnit
from samplebatch.batch.flags import DEFAULT, Flags, flag, flags_of_unit
from samplebatch.batch.joining import join
from samplebatch.batch.row_parts import RowParts
from samplebatch.batch.tree import NestedColumn, Structure, leaf_names
from samplebatch.batch.view_requirement import view_step
from samplebatch.column.convert import Ragged, is_plain, plain_columns, ragged_dtypes
from samplebatch.column.interface import Column, Indices, as_indices, resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import (
    ArgumentError,
    ColumnTypeError,
    RowIndexError,
    no_such_column,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure
    from typing_extensions import TypeVar

    from samplebatch.batch.delivery import Device, Floats, Target
    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.nested.batch import Batch

    ValuesT = TypeVar("ValuesT", default=npt.NDArray[Any])
    """The type of a batch's columns: arrays, unless they were made tensors."""
else:
    from typing import TypeVar

    ValuesT = TypeVar("ValuesT")

Window = tuple[dict[str, Column], int, int, int, int]
"""Pending cut of a view: the source's columns, a range of their rows, and a range of their sequences."""

OBSERVATIONS = frozenset({names.OBS, names.NEXT_OBS})
"""Columns that `compress` packs by default."""

_FLAT: Mapping[str, Structure] = MappingProxyType({})
"""The structures of a batch without nested columns; all such batches share it."""


class SampleBatch(RowParts, MutableMapping[str, Any], Generic[ValuesT]):
    """Steps of experience: a mapping from column name to array, all of one length.

    Columns keep the very arrays they are given wherever these are C-contiguous and in native byte order, and copy
    others once. Slices are views that cut a column when it is asked for. A dict or tuple of arrays is a nested column:
    stored flat under dotted names and returned in its former structure. Assigning to such a dict and deleting from it
    changes the batch (see `NestedColumn`). `len` counts steps, not columns.

    With a column `seq_lens` of shape (s,) the steps form s sequences for recurrent models. Then `state_in_*` columns
    have one row per sequence, all others one row per step; when padded, all others have `max_seq_len` rows per
    sequence.

    `batch["dones"]` is `terminateds` or `truncateds` where the batch has no such column.

    Parameters
    ----------
    *args, **kwargs
        Columns by name: a mapping, a dataclass, a named tuple, a TensorDict, another library's batch, or pairs; and
        keywords.
    ragged
        Names of columns (dotted ones for nested columns) that are ragged whatever the lengths of their rows happen to
        be, or a mapping from names to the dtypes of their elements. Without it, rows of one shape become an array.
    _time_major, _zero_padded, _max_seq_len, _num_grad_updates, _is_training, _action_unit
        The flags (see `Flags`). `_max_seq_len` defaults to the longest sequence.

    Raises
    ------
    ColumnLengthError, SequenceError
        If a column has another number of rows than the batch, or sequences do not fit the padding; names the columns.
    ColumnTypeError, ColumnMismatchError
        If a value has no rows or a dtype that no column can hold, or is not ragged as `ragged` says.
    ArgumentError
        If `ragged` names a column that is not there.

    Examples
    --------
    >>> batch = SampleBatch(obs=[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], rewards=[1.0, 0.0, 1.0])
    >>> len(batch), batch["rewards"].mean().round(2).item()
    (3, 0.67)
    >>> batch[1:]["obs"].tolist()
    [[3.0, 4.0], [5.0, 6.0]]
    >>> batch[batch["rewards"] > 0]["obs"].tolist()
    [[1.0, 2.0], [5.0, 6.0]]
    >>> SampleBatch(ids=[[1, 2], [3, 4]], ragged={"ids": "int32"})["ids"]
    RaggedColumn(2 rows of int32, row shape (None,))
    """

    OBS = names.OBS
    CUR_OBS = names.OBS
    NEXT_OBS = names.NEXT_OBS
    ACTIONS = names.ACTIONS
    REWARDS = names.REWARDS
    TERMINATEDS = names.TERMINATEDS
    TRUNCATEDS = names.TRUNCATEDS
    DONES = names.DONES
    INFOS = names.INFOS
    EPS_ID = names.EPS_ID
    ENV_ID = names.ENV_ID
    AGENT_INDEX = names.AGENT_INDEX
    UNROLL_ID = names.UNROLL_ID
    T = names.T
    SEQ_LENS = names.SEQ_LENS
    PREV_ACTIONS = names.PREV_ACTIONS
    PREV_REWARDS = names.PREV_REWARDS
    ACTION_DIST = names.ACTION_DIST
    ACTION_DIST_INPUTS = names.ACTION_DIST_INPUTS
    ACTION_PROB = names.ACTION_PROB
    ACTION_LOGP = names.ACTION_LOGP
    VF_PREDS = names.VF_PREDS
    VALUES_BOOTSTRAPPED = names.VALUES_BOOTSTRAPPED
    RETURNS_TO_GO = names.RETURNS_TO_GO
    ATTENTION_MASKS = names.ATTENTION_MASKS
    OBS_EMBEDS = names.OBS_EMBEDS

    count: int
    """Steps in the batch; padding is not counted."""

    # A view has a window on the columns of its source, and cuts a column when it is first asked for. The source's dict
    # is therefore never changed once it is lent to a view: `_own` copies it first.
    _columns: dict[str, Column]
    _window: Window | None = None
    _lent = False
    _has_sequences = False
    _nested = _FLAT
    _shown: Mapping[tuple[str, ...], ReferenceType[NestedColumn]] = MappingProxyType({})
    _flags: Flags = DEFAULT

    def __init__(
        self,
        *args: Any,
        ragged: Ragged = (),
        _time_major: bool | None = None,
        _zero_padded: bool = False,
        _max_seq_len: int | None = None,
        _num_grad_updates: float | None = None,
        _is_training: bool = False,
        _action_unit: ActionUnit | None = None,
        **kwargs: Any,
    ) -> None:
        if (
            _time_major is not None
            or _zero_padded
            or _max_seq_len is not None
            or _num_grad_updates is not None
            or _is_training
            or _action_unit is not None
        ):
            flags = _time_major, _zero_padded, _max_seq_len, _num_grad_updates, bool(_is_training), _action_unit
            self._flags = Flags(*flags)
        data = tree.columns_in(args, kwargs)
        if names.SEQ_LENS in data:
            lengths = data[names.SEQ_LENS] = sequences.as_lengths(data[names.SEQ_LENS])
            if lengths is None:
                del data[names.SEQ_LENS]
        if type(ragged) is not tuple or ragged:
            data = tree.declare_ragged(data, ragged_dtypes(ragged))
        plain = plain_columns(data)
        if plain is None:
            self._columns = {}
            tree.build_all(self, data)
        else:
            self._columns = plain
        self._count_rows()

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

    @classmethod
    def _of_steps(cls, columns: dict[str, Column], nested: Mapping[str, Structure], count: int) -> Self:
        """Make a batch of built columns that are known to have a row for each of `count` steps, and no sequences."""
        new = cls.__new__(cls)
        new._columns, new.count = columns, count
        if nested:
            new._nested = nested
        return new

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        """Make a batch of other columns with this one's structure, flags and, until the caller sets it, count."""
        new = object.__new__(type(self))
        new._columns = columns
        new.count = self.count
        if self._nested:
            new._nested = self._nested
        flags = self._flags if flags is None else flags
        if flags is not DEFAULT:
            new._flags = flags
        if names.SEQ_LENS in columns:
            new._has_sequences = True
        return new

    def _count_rows(self) -> None:
        """Count steps (infos and states alone do not count) and check every column's length."""
        self._has_sequences = names.SEQ_LENS in self._columns
        if self._has_sequences:
            sequences.count_steps(self)
        else:
            self.count = bulk.count_rows(self._columns)

    # -- columns by name -----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, key: str) -> ValuesT: ...
    @overload
    def __getitem__(self, key: Any) -> Self: ...
    def __getitem__(self, key: Any) -> Any:
        if type(key) is str:
            column = self._columns.get(key)
            return self._find(key) if column is None else column.values
        return self._find(str(key)) if isinstance(key, str) else self._get_rows(key)

    def _find(self, name: str) -> Any:
        """Return the values of a name that is not among the columns cut so far."""
        window = self._window
        if window is not None and name in window[0]:
            column = self._columns[name] = _cut(window, name)
            return column.values
        if name in self._columns:
            return self._columns[name].values
        if name in self._nested:
            return tree.show(self, (name,), self._nested[name])
        values = episodes.derive_dones(self) if name == names.DONES else None
        if values is None:
            raise no_such_column(name, self.keys())
        return values

    def column(self, name: str) -> Column:
        """Return the column behind a dotted name, or raise ColumnNotFoundError with the near names."""
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
        """Take a column out of the batch and return it, or the default, or raise ColumnNotFoundError if it has none."""
        if key not in self and default:
            return default[0]
        return super().pop(key)

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """Return the arrays of the given columns, in order; raises ColumnNotFoundError if one is not there.

        >>> [values.tolist() for values in SampleBatch(a=[1], b=[2], c=[3]).columns(["a", "b"])]
        [[1], [2]]
        """
        return [self[key] for key in keys]

    def __setitem__(self, name: str, values: Any) -> None:
        if (
            is_plain(values)
            and name in self._columns
            and len(values) == self.count > 0
            and self._window is None
            and not (self._lent or self._has_sequences)
        ):
            self._columns[name] = TensorColumn(values)
        else:
            tree.assign(self, name, values)
        if self._flags is not DEFAULT and name == names.ACTIONS:
            self.action_unit = None

    def update(self, other: Any = (), /, **columns: Any) -> None:
        """Put several columns, given as a mapping, as pairs or as keywords: all of them, or none if one is refused."""
        before = dict(self.__dict__)
        # So that no column is put into the dict of those before.
        self._lent = True
        try:
            super().update(other, **columns)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def __delitem__(self, name: str) -> None:
        tree.delete(self, name)

    def clear(self) -> None:
        """Take all columns out of the batch."""
        self._flags = replace(self._flags, zero_padded=False, max_seq_len=None)
        self._columns, self._window, self._lent, self._nested, self._shown = {}, None, False, {}, {}
        self._count_rows()

    def _leaves(self, name: str) -> list[str]:
        """List the dotted names that a name stands for: its leaves if it is nested, else itself; raises if unknown."""
        if name in self._nested:
            return list(leaf_names(name, self._nested[name]))
        if name not in self._names():
            raise no_such_column(name, self.keys())
        return [name]

    def select(self, *keys: str) -> Self:
        """View only the given columns, in the order asked for; sequences stay with `seq_lens`.

        Raises ColumnNotFoundError, with the near names, if one is not there.

        >>> list(SampleBatch(a=[1], b=[2], c=[3]).select("c", "a"))
        ['c', 'a']
        """
        columns = self._all()
        return self._part({path: columns[path] for key in keys for path in self._leaves(key)})

    def drop(self, *keys: str) -> Self:
        """View all columns but the given ones.

        Raises ColumnNotFoundError if one is not there, SequenceError if `seq_lens` goes and columns with a row per
        sequence stay.

        >>> list(SampleBatch(a=[1], b=[2], c=[3]).drop("b"))
        ['a', 'c']
        """
        dropped = {path for key in keys for path in self._leaves(key)}
        return self._part({path: column for path, column in self._all().items() if path not in dropped})

    def _part(self, columns: dict[str, Column]) -> Self:
        """Make a batch of some of the columns; of a nested one all or none."""
        is_torn = self._has_sequences and names.SEQ_LENS not in columns
        flags = sequences.flags_without(self, columns) if is_torn else self._flags
        return self._of(columns, tree.select(self._nested, columns), flags)

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """View the columns under other names, in the same order.

        Raises ColumnNotFoundError if a name is not there, ColumnMismatchError if two columns would have one name.

        >>> list(SampleBatch(obs=[1], rewards=[2]).rename({"rewards": "rew"}))
        ['obs', 'rew']
        """
        columns, order = self._all(), list(self)
        pairs = zip(order, tree.check_renaming(mapping, order, self._nested), strict=True)
        renamed = {new + path[len(old) :]: columns[path] for old, new in pairs for path in self._leaves(old)}
        nested = {mapping.get(top, top): structure for top, structure in self._nested.items()}
        return self._of(renamed, nested, self._flags)

    def compress(self, bulk: bool = False, columns: Set[str] | Iterable[str] = OBSERVATIONS) -> Self:
        """Compress columns with LZ4, in place; such a column is handed out as a `CompressedColumn`.

        With `bulk` each column is compressed as a whole, not in blocks of a few rows, which can be read alone.
        `columns` are names or dotted names; missing and compressed ones are left alone. Raises ColumnTypeError if one
        is no array of numbers.

        >>> batch = SampleBatch(obs=[[0.0] * 84] * 100, rewards=[0.0] * 100).compress(bulk=True)
        >>> batch["obs"].nbytes < 1000, batch.decompress_if_needed()["obs"].shape
        (True, (100, 84))
        """
        tree.compress(self, columns, bulk=bulk)
        return self

    def decompress_if_needed(
        self, columns: Set[str] | Iterable[str] = OBSERVATIONS, *, allow_pickle: bool = False
    ) -> Self:
        """Decompress columns, in place, and unpack those that RLlib packed; others are left alone.

        With `allow_pickle`, packed rows of more than arrays, numbers and strings are unpickled: only for data that you
        trust. Without it they raise UntrustedPickleError, and damaged rows raise FormatError; both name the column.
        """
        tree.decompress(self, columns, allow_pickle=allow_pickle)
        return self

    # -- flags ---------------------------------------------------------------------------------------------------------

    num_grad_updates = flag("num_grad_updates", is_layout=False)
    """Gradient updates that the policy had seen, averaged over steps; None if unknown."""
    time_major = flag("time_major")
    """Whether step columns have shape (T, B, ...); None if unknown."""
    zero_padded = flag("zero_padded")
    """Whether every sequence occupies `max_seq_len` rows."""
    max_seq_len = flag("max_seq_len")
    """Steps of the longest sequence, or rows per sequence when padded; None without sequences."""

    @property
    def action_unit(self) -> ActionUnit | None:
        """The unit of the actions: the environment's, or a policy's with its mapping; None if unknown.

        Collectors set it. It goes with every part, copy and file of the batch. A column of actions that is assigned
        has no known unit: set it with the column.
        """
        return self._flags.action_unit

    @action_unit.setter
    def action_unit(self, unit: ActionUnit | None) -> None:
        if unit is self._flags.action_unit:
            return
        flags = replace(self._flags, action_unit=unit)
        # Batches share one object, by which joining them and sending them is faster.
        self._flags = flags_of_unit(unit) if flags == flags_of_unit(unit) else flags

    @property
    def is_training(self) -> bool:
        """Whether the batch is meant for training rather than for computing actions."""
        return self._flags.is_training

    def set_training(self, training: bool = True) -> None:
        """Set whether the batch is meant for training."""
        self._flags = replace(self._flags, is_training=training)

    def _set_layout(self, flags: Flags) -> None:
        """Set flags of how rows lie, after checking that the columns lie so."""
        trial = self._with(self._all(), flags)
        trial._count_rows()
        self._flags = trial._flags

    def to_environment_actions(self) -> Self:
        """Return the batch with its actions as the environment takes them; the other columns are shared.

        A batch of unknown unit, or of the environment's, is returned itself. Raises ColumnMismatchError if the actions
        were mapped by a function, which is not recorded.

        >>> from samplebatch import ActionUnit
        >>> batch = SampleBatch(actions=np.array([[-1.0], [0.5]]), _action_unit=ActionUnit("scale", low=-2.0, high=2.0))
        >>> batch.to_environment_actions()["actions"].tolist()
        [[-2.0], [1.0]]
        """
        unit = self._flags.action_unit
        if unit is None or unit.mapping is None:
            return self
        new = self._with(tree.with_environment_actions(self, unit))
        new.action_unit = ENVIRONMENT
        return new

    # -- views and copies ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.count

    def agent_steps(self) -> int:
        """Return the number of steps, as `MultiAgentBatch.agent_steps` does."""
        return self.count

    def env_steps(self) -> int:
        """Return the number of steps, as `MultiAgentBatch.env_steps` does."""
        return self.count

    def size_bytes(self) -> int:
        """Return the bytes of all columns in view; of Python objects, their shallow sizes.

        >>> SampleBatch(a=np.zeros((4, 2), np.float32))[1:].size_bytes()
        24
        """
        return sum([column.nbytes for column in self._all().values()])

    def _get_rows(self, key: Any) -> Self:
        if type(key) is slice:
            start, stop, step = key.indices(self.count)
            if step == 1:
                return self._range(start, stop if stop > start else start)
        rows = resolve(key, self.count)
        if isinstance(rows, int):
            raise RowIndexError(f"a batch hands out no single rows; for a batch of row {key} use take([{key}])")
        return self._gather(np.arange(*rows) if isinstance(rows, tuple) else rows)

    def _range(self, start: int, stop: int) -> Self:
        """View the steps of `batch[start:stop]`."""
        return sequences.view_whole(self, start, stop) if self._has_sequences else self._view(start, stop)

    def _view(self, start: int, stop: int) -> Self:
        """View steps `start` to `stop` of a batch without sequences, `0 <= start <= stop <= count`."""
        new = object.__new__(type(self))
        new._columns = {}
        new.count = stop - start
        if self._nested:
            new._nested = self._nested
        if self._flags is not DEFAULT:
            new._flags = self._flags
        window = self._window
        if window is None:
            self._lent = True
            new._window = (self._columns, start, stop, 0, 0)
        else:
            new._window = (window[0], window[1] + start, window[1] + stop, 0, 0)
        return new

    def slice(self, start: int, end: int, state_start: int | None = None, state_end: int | None = None) -> Self:
        """View the steps from `start` to `end`, exactly, even inside sequences.

        A negative start pads that many zero rows (None for objects) on the left, which takes a copy. A negative `end`
        counts from the end, and one beyond the length is cut to it. Where there are sequences, the first and last ones
        may be cut short, each keeps its state, and padding is taken out. `state_start` and `state_end` are the
        sequences that the steps come from, if known. Raises SequenceError if these have fewer steps than the range, or
        only one end of them is given.

        >>> part = SampleBatch(a=[1, 2, 3, 4, 5, 6], seq_lens=[2, 3, 1]).slice(1, 4)
        >>> part["a"].tolist(), part["seq_lens"].tolist()
        ([2, 3, 4], [1, 2])
        """
        padding = max(0, -start)
        begin, stop, _ = slice(max(0, start), end).indices(self.count)
        stop = max(begin, stop)
        if self._has_sequences:
            part = sequences.view_exact(self, begin, stop, state_start, state_end)
        else:
            part = self._view(begin, stop)
        return sequences.pad_left(part, padding) if padding else part

    def take(self, indices: Any) -> Self:
        """Gather steps in the given order into a new batch, one copy per column: shape (n, ...) becomes (k, ...).

        `indices` are integers of shape (k,) in [-n, n), or a mask of shape (n,). Where there are sequences, steps that
        follow each other out of one sequence form a sequence of the result, with that one's state; padding is taken
        out. Raises RowIndexError if an index lies outside; names the first such one.

        >>> SampleBatch(rewards=[1.0, 2.0, 3.0]).take([2, 0])["rewards"].tolist()
        [3.0, 1.0]
        """
        return self._gather(as_indices(indices, self.count))

    def _gather(self, steps: Indices) -> Self:
        if self._has_sequences:
            return sequences.gather_steps(self, steps)
        new = self._with(bulk.gather(self._all(), steps, self.count))
        new.count = len(steps)
        return new

    def copy(self, shallow: bool = False) -> Self:
        """Copy the batch; if `shallow`, the copy shares the arrays, and only its set of columns is independent."""
        columns = self._all()
        return self._with(columns.copy() if shallow else bulk.copy(columns, self.count))

    def __copy__(self) -> Self:
        return self.copy(shallow=True)

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    def concat(self, other: SampleBatch[ValuesT]) -> SampleBatch[ValuesT]:
        """Join another batch to this one in a new batch; see `concat_samples`.

        >>> SampleBatch(a=[1, 2]).concat(SampleBatch(a=[3, 4, 5]))["a"].tolist()
        [1, 2, 3, 4, 5]
        """
        parts: list[SampleBatch[Any]] = [self, require_flat(other)]
        return join(parts, SampleBatch)

    def __eq__(self, other: object) -> bool:
        """Tell whether the other batch has the same columns, dtypes and rows, laid out alike; NaN equals NaN."""
        if not isinstance(other, SampleBatch):
            return NotImplemented
        mine, theirs = self._all(), other._all()
        return (
            self.count == other.count
            and mine.keys() == theirs.keys()
            and self._nested == other._nested
            and self._flags.zero_padded == other._flags.zero_padded
            and bool(self._flags.time_major) == bool(other._flags.time_major)
            and all(column.equals(theirs[name]) for name, column in mine.items())
        )

    __hash__ = None  # type: ignore[assignment]

    # -- order and parts -----------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each step as a dict of its values: scalars, views of array rows, objects; nested where columns are.

        Where there are sequences, padding is left out, `seq_lens` is 1 and states are those of the step's sequence.

        >>> [(row["a"], row["b"]) for row in SampleBatch(a=[1, 2], b=["x", "y"]).rows()]
        [(np.int64(1), 'x'), (np.int64(2), 'y')]
        """
        # Infos and states alone have rows, but count no steps.
        columns = self._rowwise() if self.count else {}
        keys = list(columns)
        for row in zip(*(column.values for column in columns.values()), strict=True):
            flat = dict(zip(keys, row, strict=True))
            yield self._nest(flat) if self._nested else flat

    def _rowwise(self) -> dict[str, Column]:
        """Return columns with one row per step each."""
        return sequences.rowwise(self) if self._has_sequences else self._all()

    def _nest(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Put values by dotted names into the structures of nested columns."""
        return {
            name: tree.unflatten(name, self._nested[name], flat.__getitem__) if name in self._nested else flat[name]
            for name in self
        }

    def shuffle(self, rng: np.random.Generator | int | None = None) -> Self:
        """Shuffle the steps in place; where sequences are padded, whole sequences with their states.

        Columns are replaced one after the other, by new arrays: arrays and views that were handed out before keep their
        order, and the additional memory is that of the largest column. `rng` is a generator or a seed; by default,
        fresh entropy. Raises SequenceError if there are sequences that are not padded: shuffle whole ones by
        `take_sequences(rng.permutation(len(batch["seq_lens"])))`.

        >>> sorted(SampleBatch(a=[1, 2, 3, 4]).shuffle(rng=0)["a"].tolist())
        [1, 2, 3, 4]
        """
        bulk.reorder(self._draw_moves(np.random.default_rng(rng)))
        return self

    def _draw_moves(self, rng: np.random.Generator) -> list[bulk.Move]:
        """Draw a random order of the rows: each column with the order of its own rows."""
        if self._has_sequences:
            return sequences.draw_moves(self, rng)
        if not self.count:
            return []
        order = rng.permutation(self.count)
        columns = self._own()
        return [(columns, name, order) for name in columns]

    def timeslices(self, size: int | None = None, num_slices: int | None = None, k: int | None = None) -> list[Self]:
        """Split into consecutive views, by one of three numbers from 1 on; another number of them is an ArgumentError.

        Parameters
        ----------
        size, k
            Steps in each view, fewer in the last. With sequences, both ends move back to where theirs begins.
        num_slices
            How many views to make, as equal as they can be, later ones the longer.

        Examples
        --------
        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3, 4, 5]).timeslices(2)]
        [[1, 2], [3, 4], [5]]
        """
        bounds = bulk.slice_bounds(self.count, size, num_slices, k)
        part = self._range if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise(bounds)]

    def _epoch(self, size: int, rng: np.random.Generator | None) -> Iterator[Self]:
        """Yield every step once, in parts of `size` steps; in random order, or as views without a generator."""
        if self._has_sequences:
            yield from sequences.each_packed(self, size, rng)
        elif rng is None:
            yield from self.timeslices(size)
        else:
            order = rng.permutation(self.count)
            for start in range(0, self.count, size):
                yield self._gather(order[start : start + size])

    # -- episodes ------------------------------------------------------------------------------------------------------

    def is_terminated_or_truncated(self) -> bool:
        """Tell whether the last step ends its episode.

        Raises RowIndexError if there are no steps, ColumnNotFoundError if the batch has no column that says so.
        """
        if not self.count:
            raise RowIndexError("a batch without steps has no last one")
        return bool(np.asarray(sequences.unpadded(self)[names.DONES])[-1])

    def is_single_trajectory(self) -> bool:
        """Tell whether no step but the last ends an episode; raises ColumnNotFoundError if no column says so."""
        return not np.asarray(sequences.unpadded(self)[names.DONES])[:-1].any()

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Split into one view per episode, the last one even if it has not ended.

        `key` is the column to split by: after each true flag for `dones`, `terminateds` and `truncateds`, else wherever
        the value changes. By default it is `eps_id`, or `dones` where there is none. Raises ColumnNotFoundError if it
        is not there.

        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3], eps_id=[0, 0, 1]).split_by_episode()]
        [[1, 2], [3]]
        """
        stops = episodes.stops_by(key, sequences.unpadded(self))
        part = self.slice if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise([0, *stops])]

    # -- sequences -----------------------------------------------------------------------------------------------------

    def to_sequences(self, max_seq_len: int) -> Self:
        """View the steps as sequences of at most `max_seq_len` steps, each with the state that it begins with.

        A sequence ends where `eps_id`, `agent_index`, `env_id` or `unroll_id` change and where `t` does not go on by 1,
        in as far as these columns are there; without `eps_id` also after a step that ends its episode. The rows of each
        agent must lie together, as collectors hand them out. Of `state_in_*`, a row for each step, the first row of
        each sequence is kept; all other columns are shared. A batch without steps is returned as a shallow copy. Raises
        ArgumentError if `max_seq_len` is no whole number from 1 on, SequenceError if the batch has sequences already.

        >>> steps = SampleBatch(a=[1, 2, 3, 4, 5], eps_id=[7, 7, 7, 8, 8], state_in_0=[0.0, 0.1, 0.2, 0.0, 0.3])
        >>> recurrent = steps.to_sequences(max_seq_len=2)
        >>> recurrent["seq_lens"].tolist(), recurrent["state_in_0"].tolist()
        ([2, 1, 2], [0.0, 0.2, 0.0])
        """
        return sequences.cut_streams(self, max_seq_len)

    def take_sequences(self, indices: Any) -> Self:
        """Gather whole sequences in the given order into a new batch, states included, padded as this one is.

        `indices` are integers of shape (k,) in [-s, s) for s sequences, or a mask of shape (s,). Raises SequenceError
        if the batch has no `seq_lens`, RowIndexError if an index lies outside.

        >>> swapped = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 3.0], seq_lens=[1, 2]).take_sequences([1, 0])
        >>> swapped["a"].tolist(), swapped["state_in_0"].tolist(), swapped["seq_lens"].tolist()
        ([2, 3, 1], [3.0, 1.0], [2, 1])
        """
        return sequences.gather_whole(self, indices)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which rows of the columns are steps rather than padding, shape (rows,).

        >>> SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(2).mask().tolist()
        [True, False, True, True]
        """
        return sequences.mask(self) if self._has_sequences and self.zero_padded else np.ones(self.count, np.bool_)

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> Self:
        """Give every sequence `max_seq_len` rows, in place: zeros (None for objects) after its last step.

        Sets `zero_padded` and `max_seq_len`. A padded batch is padded to the new length. Unless `exclude_states`, each
        sequence's state is followed by zeros as well. Raises ArgumentError if `max_seq_len` is no whole number from 0
        on, SequenceError if the batch has no `seq_lens`, or a sequence has more steps.

        >>> SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(max_seq_len=4)["a"].tolist()
        [1, 0, 0, 0, 2, 3, 0, 0]
        """
        sequences.pad(self, max_seq_len, exclude_states=exclude_states)
        return self

    def to_batch_major(self) -> Self:
        """Copy a time-major batch of sequences, columns of shape (T, B, ...), into a padded one of shape (B * T, ...).

        Raises SequenceError if the batch is not time-major or has no sequences.
        """
        return sequences.to_batch_major(self)

    def _lengths(self) -> sequences.Lengths:
        """Return the steps of every sequence, shape (s,)."""
        return sequences.lengths_of(self.column(names.SEQ_LENS))

    def _is_per_sequence(self, name: str) -> bool:
        """Tell whether a column has one row per sequence rather than one per step."""
        if not self._has_sequences or not names.is_per_sequence(name):
            return False
        return len(self.column(name)) == len(self.column(names.SEQ_LENS))

    # -- other forms ---------------------------------------------------------------------------------------------------

    def as_multi_agent(self, module_id: str | None = None) -> MultiAgentBatch[ValuesT]:
        """Wrap the batch as that of one policy, by default the default one, with as many env steps as it has steps."""
        if module_id is None:
            return _multi_agent_batch()._of({names.DEFAULT_POLICY_ID: self}, self.count)
        return _multi_agent_batch()({module_id: self}, self.count)

    def as_batch(self, convention: names.Convention | None = None) -> Batch:
        """Return a nested batch over the same arrays and tensors; nested columns become nested batches.

        A tuple of columns becomes a batch with the names `0`, `1`, ...; ragged columns stay ragged. Writing to one is
        seen in the other; columns added to one are not. With `convention="tianshou"` the columns that both libraries
        know are renamed: `rewards` becomes `rew`, `new_obs` becomes `obs_next`; `"rllib"` does the reverse, None
        keeps all names. Raises ColumnTypeError if a column is compressed, ArgumentError if `convention` is another
        word, ColumnMismatchError if two columns would have one name.

        >>> SampleBatch(obs=[1.0, 2.0], rewards=[0.5, 1.0]).as_batch(convention="tianshou").rew
        array([0.5, 1. ])
        """
        from samplebatch.batch.nested import as_batch

        return as_batch(self, convention)

    def get_single_step_input_dict(
        self, view_requirements: Mapping[str, Any], index: int | Literal["last"] = "last"
    ) -> SampleBatch:
        """Gather a model's inputs at one step into a batch of that step.

        Columns have shape (1, ...), or (1, window, ...). Steps before the first are zeros, and `seq_lens` is [1].
        Raises ColumnNotFoundError if a view looks at a column that is not there, RowIndexError if the step lies
        outside.

        Parameters
        ----------
        view_requirements
            The model's views by name, a `ViewRequirement` or RLlib's own each; those not used for computing actions
            are left out.
        index
            The step, negative ones from the end; or `"last"` for the step *after* the last, as for estimating its
            value: there `obs` is the last row of `new_obs`, `prev_actions` that of `actions`, `prev_rewards` that of
            `rewards`.

        Examples
        --------
        >>> from samplebatch import ViewRequirement
        >>> batch = SampleBatch(obs=[1, 2, 3], new_obs=[2, 3, 4])
        >>> batch.get_single_step_input_dict({"stack": ViewRequirement("obs", shift="-2:0")})["stack"]
        array([[2, 3, 4]])
        """
        views = view_step(self, view_requirements, index)
        return SampleBatch({**views, names.SEQ_LENS: np.ones(1, np.int32)}, _is_training=self.is_training)

    def to_torch(
        self,
        dtype: Floats | None = None,
        device: Device = "cpu",
        *,
        floats: Floats | None = None,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> SampleBatch[torch.Tensor]:
        """Return a batch of tensors, over the same memory wherever torch can use it.

        Only read-only arrays, and columns that change device or dtype, are copied. Columns that torch has no dtype for
        (objects, strings, dates) and compressed ones stay as they are. Of ragged columns the elements are moved. Raises
        ArgumentError if the dtype is no floating-point one, or given twice, DeviceError if torch cannot use the device,
        or memory cannot be page-locked for want of one.

        Parameters
        ----------
        dtype, floats
            The dtype of floating-point columns, torch's or NumPy's, or its name; None leaves each as it is. Integers,
            flags and images are left alone. `floats` is what all methods with tensors call it.
        device
            The device of all tensors.
        pin_memory
            Whether to page-lock the host memory that tensors lie in or are copied from.
        non_blocking
            Whether to return before copies to a device have ended.

        Examples
        --------
        >>> SampleBatch(rewards=[0.5, 1.0], actions=[0, 1]).to_torch(floats="float32")["rewards"]
        tensor([0.5000, 1.0000])
        """
        if dtype is not None and floats is not None:
            raise ArgumentError("one of dtype and floats must be given, they are names of the same argument")
        floats = dtype if floats is None else floats
        target = delivery.TorchTarget(device=device, floats=floats, pin_memory=pin_memory, non_blocking=non_blocking)
        return cast("SampleBatch[torch.Tensor]", self._to(target))

    def to_numpy(self, *, floats: Floats | None = None) -> SampleBatch:
        """Return a batch of arrays, over the tensors' memory where that is on the host.

        bfloat16 becomes float32, which holds it exactly. Compressed columns stay as they are. `floats` is the dtype of
        floating-point columns, None for their own; raises ArgumentError if NumPy has no such floating-point dtype.

        >>> SampleBatch(rewards=[0.5, 1.0]).to_torch().to_numpy(floats="float32")["rewards"]
        array([0.5, 1. ], dtype=float32)
        """
        arrays = self._with({name: delivery.column_of_arrays(column) for name, column in self._all().items()})
        return cast("SampleBatch", arrays if floats is None else arrays._to(delivery.ArrayTarget(floats)))

    def to_device(
        self,
        device: torch.device | str,
        framework: Literal["torch"] = "torch",
        pin_memory: bool = False,
        use_stream: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> Self:
        """Turn the columns into tensors on a device, in place; dtypes are kept, and copies as in `to_torch`.

        Raises ArgumentError if `framework` is another than `"torch"`, DeviceError if torch cannot use the device; the
        batch is then left as it is.

        Parameters
        ----------
        pin_memory
            Whether to copy to the device from page-locked memory, asynchronously.
        use_stream, stream
            Whether to copy on `stream`, or if None on a CUDA stream of its own, rather than on the current one.

        Examples
        --------
        >>> SampleBatch(rewards=[1.0, 2.0]).to_device("cpu")["rewards"]
        tensor([1., 2.], dtype=torch.float64)
        """
        choice("framework", framework, ["torch"])
        place = delivery.require_device(device)
        on_gpu = place.type == "cuda"
        target = delivery.TorchTarget(device=place, pin_memory=pin_memory and on_gpu, non_blocking=pin_memory)
        with delivery.on_stream(place, stream) if use_stream and on_gpu else nullcontext():
            self._columns = self._to(target)._columns
        self._lent = False
        return self

    def _to(self, target: Target) -> Self:
        """Convert the columns to a target's form."""
        return self._with({name: delivery.convert_column(column, target) for name, column in self._all().items()})

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of the columns as the batch hands them out, nested ones as dicts and tuples.

        >>> SampleBatch(obs={"x": [1, 2]}, rewards=[0.5, 1.0]).to_dict()
        {'obs': {'x': array([1, 2])}, 'rewards': array([0.5, 1. ])}
        """
        return self._nest({name: column.values for name, column in self._all().items()})

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table over the same memory.

        Without sequences it has a row per step. With them it has a row per sequence, whose step columns are lists:
        their values are the columns untouched. N-dimensional columns are fixed-shape tensors. `from_arrow` is the
        inverse.

        >>> SampleBatch(obs=np.zeros((2, 3)), rewards=[1.0, 2.0]).to_arrow().num_rows
        2
        """
        return arrow.to_table(self._all(), self._nested, self._flags)

    @classmethod
    def from_arrow(cls, table: Any, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> Self:
        """View an Arrow table as a batch, without copying wherever its layout permits.

        Raises ColumnTypeError if a column has nulls or a type that no column can hold, UntrustedPickleError if one is
        pickled and may not be, CapacityError if objects take too much; all name the column.

        Parameters
        ----------
        table
            A table, record batch or anything with the Arrow PyCapsule interface; written by `to_arrow` or by anyone
            else. Columns in several chunks are joined, with one copy.
        allow_pickle
            Whether columns of Python objects that Arrow could not hold may be unpickled. Only for data that you trust.
        max_nbytes
            Bytes that Python objects may take; 256 MiB or 1024 times the table's own, whichever is more, if None.

        Examples
        --------
        >>> import pyarrow as pa
        >>> SampleBatch.from_arrow(pa.table({"rewards": [1.0, 2.0]}))["rewards"]
        array([1., 2.])
        """
        table = arrow.as_table(table)
        bound = arrow.bound_of(table, max_nbytes)
        return cls._of(*arrow.from_table(table, allow_pickle=allow_pickle, bound=bound))

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the batch to a file or folder, whole or not at all, from which `samplebatch.load` makes the same again.

        Parameters
        ----------
        path
            The file. The ending of its name says in which format: `.arrow` to be mapped, `.parquet` to be kept small
            and given away, `.hdf5` for readers of that. A name without ending is a folder, a `Dataset`.
        compression
            Of the columns. `"lz4"`, `"zstd"` or `"none"` for Arrow, which is compressed with LZ4 by default where a
            column is in memory; these, `"snappy"`, `"gzip"` or `"brotli"` for Parquet, `"zstd"` by default; `"gzip"` or
            `"lzf"` for HDF5, `"lzf"` by default where a column is compressed in memory, else none.
        durable
            Whether to wait until a file is on the disk, so that it outlives a power cut. Without that, the end of this
            process still loses nothing; after a power cut the file may be damaged, which `load(verify=True)` tells.
            Folders are always durable.

        Raises
        ------
        FormatError, ArgumentError
            If no format has that ending, or it has no such compression; if a folder is not to be durable.
        ColumnTypeError, UnstorableError
            If a column holds values that the format cannot hold and that cannot be pickled; names it.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import samplebatch, tempfile
        >>> path = tempfile.mkdtemp() + "/steps.parquet"
        >>> SampleBatch(obs=[[1.0, 2.0], [3.0, 4.0]], rewards=[0.5, 1.0]).save(path)
        >>> samplebatch.load(path, columns=["rewards"], filters=[("rewards", ">", 0.5)])["rewards"]
        array([1.])
        """
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        header, buffers = frame.dump_columns(self._all())
        wrapped = frame.for_pickle(buffers, int(protocol))
        flags = None if self._flags is DEFAULT else astuple(self._flags)
        return _unpickled, (type(self), header, dict(self._nested), flags, *wrapped)

    # -- for people ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{self._title()[:-1]}: {list(self)})"

    def __str__(self) -> str:
        return summary.as_text(self._title(), summary.describe(self._all()))

    def _repr_html_(self) -> str:
        return summary.as_html(self._title(), summary.describe(self._all()))

    def _title(self) -> str:
        parts = f" in {len(self.column(names.SEQ_LENS))} sequences" if self._has_sequences else ""
        return f"SampleBatch({self.count} steps{parts})"

    def plot(self, *columns: str) -> Figure:
        """Draw columns over time, an axis each, with a line where an episode ends.

        Rows of a few numbers have a line for each, larger ones their mean. Long batches are drawn by evenly spaced
        steps. `columns` are dotted names; by default all of numbers, ids aside, but no more than twelve. Raises
        MissingExtraError without matplotlib, ColumnNotFoundError if a column is not there, ColumnTypeError if it is not
        of numbers.

        >>> [axes.get_ylabel() for axes in SampleBatch(rewards=[0.0, 1.0, 0.5], eps_id=[0, 0, 1]).plot("rewards").axes]
        ['rewards']
        """
        for name in columns:
            self.column(name)
        rows = self._rowwise()
        part = summary.Part("", {name: rows[name] for name in columns or rows}, episodes.ends_in(rows))
        return summary.draw_columns([part], chosen=bool(columns))

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with a row per step and a column per dotted name; needs the package pandas.

        Columns of numbers share their memory. Where rows are arrays, a cell holds one; states of sequences stand with
        every step of theirs.

        >>> SampleBatch(obs=[[1, 2], [3, 4]], rewards=[0.5, 1.0]).to_pandas()
              obs  rewards
        0  [1, 2]      0.5
        1  [3, 4]      1.0
        """
        return summary.data_frame(self._rowwise())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the steps as an array of records, which `pandas.DataFrame(batch)` asks for; shape (n,), of objects.

        Raises ColumnTypeError if the name of a column cannot be that of a field; names it.
        """
        return summary.records(list(self), self._rowwise(), self._nest, self.count)


def _cut(window: Window, name: str) -> Column:
    """Cut a column of a view out of its source's."""
    source, start, stop, first, last = window
    column = source[name]
    if names.SEQ_LENS in source and names.is_per_sequence(name) and len(column) == len(source[names.SEQ_LENS]):
        return column.slice(first, last)
    return column.slice(start, stop)


def _unpickled(
    cls: type[SampleBatch], header: Any, nested: dict[str, Structure], flags: tuple[Any, ...] | None, *buffers: Any
) -> SampleBatch:
    """Rebuild a pickled batch; unpickling means trusting its bytes."""
    columns = frame.load_columns(header, buffers, allow_pickle=True)
    return cls._of(columns, nested, DEFAULT if flags is None else Flags(*flags))


@cache
def _multi_agent_batch() -> type[MultiAgentBatch[Any]]:
    """Import the class that is made of this one, once."""
    from samplebatch.batch import MultiAgentBatch

    return MultiAgentBatch


_RLLIB_FLAGS = ("time_major", "zero_padded", "max_seq_len", "num_grad_updates", "is_training")


def require_flat(sample: Any) -> SampleBatch[Any]:
    """Return a `SampleBatch`, make one of RLlib's over the same arrays, and refuse anything else."""
    if isinstance(sample, SampleBatch):
        return sample
    if isinstance(sample, Mapping) and all(hasattr(sample, name) for name in _RLLIB_FLAGS):
        return SampleBatch(dict(sample), **{f"_{name}": getattr(sample, name) for name in _RLLIB_FLAGS})
    raise ColumnTypeError(f"only SampleBatch and MultiAgentBatch can be joined, got {type(sample).__name__}")
