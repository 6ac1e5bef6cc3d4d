"""SampleBatch: steps of experience with RLlib's interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast, overload
from weakref import ReferenceType

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import choice, suggest_names
from samplebatch.batch import arrow, bulk, delivery, episodes, frame, sequences, summary, tree
from samplebatch.batch.action_unit import ENVIRONMENT, ActionUnit
from samplebatch.batch.flags import DEFAULT, Flags, flag, flags_of_unit, missing_attributes
from samplebatch.batch.joining import join
from samplebatch.batch.sequences import Window, slice_column
from samplebatch.batch.tree import NestedColumn, Structure, leaf_names
from samplebatch.batch.view_requirement import view_step
from samplebatch.column.convert import Ragged, is_plain, plain_columns, ragged_dtypes
from samplebatch.column.interface import Column, Indices, as_indices, resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ArgumentError, ColumnTypeError, RowIndexError, no_such_column

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from matplotlib.figure import Figure
    from typing_extensions import TypeVar

    from samplebatch.batch.delivery import Device, Floats, Target
    from samplebatch.batch.multi_agent import MultiAgentBatch
    from samplebatch.batch.nested.batch import Batch
    from samplebatch.tokens import Groups, PackedBatch, Parts

    ValuesT = TypeVar("ValuesT", default=npt.NDArray[Any])
    """The type of a batch's columns: arrays, unless they were made tensors."""
else:
    from typing import TypeVar

    ValuesT = TypeVar("ValuesT")

RowLengths = str | npt.ArrayLike | None
"""Name of a column of tokens or token counts, or one token count per row; None: lengths of the ragged columns."""

OBSERVATIONS = frozenset({names.OBS, names.NEXT_OBS})
"""Columns that `compress` packs by default."""

_DEFAULT_FLAGS = astuple(DEFAULT)

_unpickled = frame.unpickle  # The name in pickles of earlier versions.

_FLAT: Mapping[str, Structure] = MappingProxyType({})
"""The structures of a batch without nested columns; all such batches share it."""


class SampleBatch(MutableMapping[str, Any], Generic[ValuesT]):
    """Steps of experience: a mapping from column names to arrays of equal length.

    C-contiguous arrays in native byte order are stored without a copy; other arrays are copied once. Slices are views
    that slice a column on first access. A dict or tuple of arrays is a nested column, which is stored under dotted
    names and returned as a dict or tuple. A change of the returned dict also changes the batch (see `NestedColumn`).
    `len` counts steps, not columns.

    A column `seq_lens` of shape (s,) divides the steps into s sequences for recurrent models. In a batch with
    sequences, `state_in_*` columns and columns in `per_sequence` have one row per sequence. All other columns have one
    row per step, or `max_seq_len` rows per sequence if the batch is padded.

    Without a column `dones`, `batch["dones"]` is the logical or of `terminateds` and `truncateds`.

    Parameters
    ----------
    *args, **kwargs
        Columns by name: a mapping, dataclass, named tuple, TensorDict, another library's batch, pairs, or keywords.
    ragged
        Names of columns (dotted for nested columns) to store as ragged columns regardless of their row lengths, or a
        mapping from names to element dtypes. By default, rows of equal shape become an array.
    per_sequence
        Names of columns (dotted for nested columns) with one row per sequence, such as one reward per sequence. Before
        `to_sequences`, these columns have one row per step.
    _time_major, _zero_padded, _max_seq_len, _num_grad_updates, _is_training, _action_unit
        Flags (see `Flags`). `_max_seq_len` defaults to the longest sequence's length.

    Raises
    ------
    ColumnLengthError, SequenceError
        If a column has a different number of rows, or sequences do not fit the padding.
    ColumnTypeError, ColumnMismatchError
        If a value has no rows, has an unsupported dtype, or does not match `ragged`.
    ArgumentError
        If `ragged` or `per_sequence` names a missing column.

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

    OBS = CUR_OBS = names.OBS
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
    vars().update(missing_attributes())

    count: int
    """Number of steps, without padding."""

    # A view has a window on the columns of its source, and slices a column on first access. The source's dict
    # is therefore never changed once it is lent to a view: `_own` copies it first.
    _columns: dict[str, Column]
    _window: Window | None = None
    _lent = False
    _has_sequences = False
    _nested = _FLAT
    _nested_views: Mapping[tuple[str, ...], ReferenceType[NestedColumn]] = MappingProxyType({})
    _flags: Flags = DEFAULT

    def __init__(
        self,
        *args: Any,
        ragged: Ragged = (),
        per_sequence: str | Iterable[str] = (),
        _time_major: bool | None = None,
        _zero_padded: bool = False,
        _max_seq_len: int | None = None,
        _num_grad_updates: float | None = None,
        _is_training: bool = False,
        _action_unit: ActionUnit | None = None,
        **kwargs: Any,
    ) -> None:
        flags = _time_major, _zero_padded, _max_seq_len, _num_grad_updates, bool(_is_training), _action_unit, ()
        if flags != _DEFAULT_FLAGS:
            self._flags = Flags(*flags)
        data = tree.columns_in(args, kwargs)
        if names.SEQ_LENS in data:
            sequences.set_lengths(data)
        if type(ragged) is not tuple or ragged:
            data = tree.declare_ragged(data, ragged_dtypes(ragged))
        plain = plain_columns(data)
        if plain is None:
            self._columns = {}
            tree.build_all(self, data)
        else:
            self._columns = plain
        if type(per_sequence) is not tuple or per_sequence:
            tree.declare_per_sequence(self, per_sequence)
        self._count_rows()

    @classmethod
    def _of(
        cls, columns: dict[str, Column], nested: Mapping[str, Structure] | None = None, flags: Flags = DEFAULT
    ) -> Self:
        """Create a batch from columns; count the steps and validate the column lengths."""
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
        """Create a batch from columns that are known to have `count` rows each and no sequences."""
        new = cls.__new__(cls)
        new._columns, new.count = columns, count
        if nested:
            new._nested = nested
        return new

    def _with(self, columns: dict[str, Column], flags: Flags | None = None) -> Self:
        """Create a batch of the given columns with this batch's structure and flags; the caller updates `count`."""
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
        """Return the values of a column that is nested, derived from other columns, or not sliced yet."""
        window = self._window
        if window is not None and name in window[0]:
            column = self._columns[name] = slice_column(window, name, self._flags)
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
        """Return the column with a dotted name; raises ColumnNotFoundError that lists similar names."""
        column = self._columns.get(name)
        if column is not None:
            return column
        window = self._window
        if window is None or name not in window[0]:
            raise no_such_column(name, self.column_names)
        column = self._columns[name] = slice_column(window, name, self._flags)
        return column

    def _all(self) -> dict[str, Column]:
        """Slice all columns not sliced yet; return all columns by dotted name, in a dict that must not be modified."""
        window = self._window
        if window is not None:
            cut, flags = self._columns, self._flags
            self._columns = {key: cut[key] if key in cut else slice_column(window, key, flags) for key in window[0]}
            self._window = None
            self._lent = False
        return self._columns

    def _own(self) -> dict[str, Column]:
        """Return all columns in a dict that no view shares, so that it can be modified."""
        columns = self._all()
        if self._lent:
            self._columns = columns = columns.copy()
            self._lent = False
        return columns

    def _names(self) -> dict[str, Column]:
        """Return a dict whose keys are the dotted names of all columns, without slicing columns."""
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

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a column; if the column is missing, create it from `default` first."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return a column; if the column is missing, return the default or raise ColumnNotFoundError."""
        if key not in self and default:
            return default[0]
        return super().pop(key)

    def columns(self, keys: Sequence[str]) -> list[Any]:
        """Return the arrays of the named columns in order; raises ColumnNotFoundError if a column is missing."""
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
        """Assign several columns atomically, from a mapping, pairs or keywords: an error leaves the batch unchanged."""
        before = dict(self.__dict__)
        # Mark the dict as shared with `before`, so that an assignment copies the dict instead of changing it.
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
        """Remove all columns."""
        self._flags = replace(self._flags, zero_padded=False, max_seq_len=None, per_sequence=())
        self._columns, self._window, self._lent, self._nested, self._nested_views = {}, None, False, {}, {}
        self._count_rows()

    def _leaves(self, name: str) -> list[str]:
        """Return the dotted leaf names of a column; raises ColumnNotFoundError if the column is missing."""
        if name in self._nested:
            return list(leaf_names(name, self._nested[name]))
        if name not in self._names():
            raise no_such_column(name, self.keys())
        return [name]

    def select(self, *keys: str) -> Self:
        """View only the named columns, in the order of `keys`; `seq_lens` must be selected to keep sequences.

        Raises ColumnNotFoundError that lists similar names if a column is missing.

        >>> list(SampleBatch(a=[1], b=[2], c=[3]).select("c", "a"))
        ['c', 'a']
        """
        columns = self._all()
        return self._part({path: columns[path] for key in keys for path in self._leaves(key)})

    def drop(self, *keys: str) -> Self:
        """View all columns except the named ones.

        Raises ColumnNotFoundError if a column is missing, SequenceError if a remaining column requires `seq_lens`.

        >>> list(SampleBatch(a=[1], b=[2], c=[3]).drop("b"))
        ['a', 'c']
        """
        dropped = {path for key in keys for path in self._leaves(key)}
        return self._part({path: column for path, column in self._all().items() if path not in dropped})

    def _part(self, columns: dict[str, Column]) -> Self:
        is_torn = self._has_sequences and names.SEQ_LENS not in columns
        flags = sequences.flags_without(self, columns) if is_torn else self._flags
        return self._of(columns, tree.select(self._nested, columns), sequences.retain(flags, columns))

    def rename(self, mapping: Mapping[str, str]) -> Self:
        """View the batch with renamed columns; the order of the columns is preserved.

        Raises ColumnNotFoundError if a name is missing, ColumnMismatchError if two columns would share a name.

        >>> list(SampleBatch(obs=[1], rewards=[2]).rename({"rewards": "rew"}))
        ['obs', 'rew']
        """
        columns, order = self._all(), list(self)
        pairs = zip(order, tree.check_renaming(mapping, order, self._nested), strict=True)
        renamed = {new + path[len(old) :]: columns[path] for old, new in pairs for path in self._leaves(old)}
        nested = {mapping.get(top, top): structure for top, structure in self._nested.items()}
        return self._of(renamed, nested, tree.rename_flags(self._flags, mapping))

    def compress(self, bulk: bool = False, columns: Set[str] | Iterable[str] = OBSERVATIONS) -> Self:
        """Compress columns with LZ4, in place; the batch then returns these columns as `CompressedColumn`.

        With `bulk`, a column becomes one compressed block. Without `bulk`, a column becomes blocks of a few rows that
        can be read individually. `columns` are names or dotted names; missing and compressed columns are skipped.
        Raises ColumnTypeError if a column is not an array of numbers.

        >>> batch = SampleBatch(obs=[[0.0] * 84] * 100, rewards=[0.0] * 100).compress(bulk=True)
        >>> batch["obs"].nbytes < 1000, batch.decompress_if_needed()["obs"].shape
        (True, (100, 84))
        """
        tree.compress(self, columns, bulk=bulk)
        return self

    def decompress_if_needed(
        self, columns: Set[str] | Iterable[str] = OBSERVATIONS, *, allow_pickle: bool = False
    ) -> Self:
        """Decompress columns, and unpack columns that RLlib packed, in place; other columns are unchanged.

        `allow_pickle` permits unpickling packed rows with values other than arrays, numbers and strings (trusted data
        only). Raises UntrustedPickleError for such rows if `allow_pickle` is false, FormatError for damaged rows.
        """
        tree.decompress(self, columns, allow_pickle=allow_pickle)
        return self

    # -- flags ---------------------------------------------------------------------------------------------------------

    num_grad_updates = flag("num_grad_updates", is_layout=False)
    """Gradient updates of the behaviour policy, averaged over steps; None if unknown."""
    time_major = flag("time_major")
    """Whether step columns have shape (T, B, ...); None if unknown."""
    zero_padded = flag("zero_padded")
    """Whether every sequence occupies `max_seq_len` rows."""
    max_seq_len = flag("max_seq_len")
    """Steps of the longest sequence, or rows per sequence if padded; None without sequences."""
    per_sequence = flag("per_sequence")
    """Names of columns with one row per sequence besides states; assign it before a column that is to be added."""

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the actions: environment units, or policy units with their mapping; None if unknown.

        Collectors set the unit; it is preserved in slices, copies and files of the batch. Assigning the actions resets
        the unit to None.
        """
        return self._flags.action_unit

    @action_unit.setter
    def action_unit(self, unit: ActionUnit | None) -> None:
        if unit is self._flags.action_unit:
            return
        flags = replace(self._flags, action_unit=unit)
        # A shared Flags object makes concatenating and sending batches faster.
        self._flags = flags_of_unit(unit) if flags == flags_of_unit(unit) else flags

    is_training = property(attrgetter("_flags.is_training"))
    """Whether the batch is for training rather than for computing actions."""

    def set_training(self, training: bool = True) -> None:
        """Set whether the batch is for training."""
        self._flags = replace(self._flags, is_training=training)

    def _set_layout(self, flags: Flags) -> None:
        trial = self._with(self._all(), flags)
        trial._count_rows()
        self._flags = trial._flags

    def to_environment_actions(self) -> Self:
        """Return a batch whose actions are in the environment's unit; all other columns are shared.

        Returns the batch itself if the actions' unit is unknown or already the environment's unit. Raises
        ColumnMismatchError if a function mapped the actions, because functions are not recorded.

        >>> from samplebatch import ActionUnit
        >>> batch = SampleBatch(actions=[[-1.0], [0.5]], _action_unit=ActionUnit("scale", -2, 2))
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

    def env_steps(self) -> int:
        """Return the number of steps, like `MultiAgentBatch.env_steps`."""
        return self.count

    agent_steps = env_steps

    def size_bytes(self) -> int:
        """Return the size of all rows in view in bytes; Python objects count with their shallow size."""
        return sum(map(attrgetter("nbytes"), self._all().values()))

    def _get_rows(self, key: Any) -> Self:
        if type(key) is slice:
            start, stop, step = key.indices(self.count)
            if step == 1:
                return self._range(start, stop if stop > start else start)
        rows = resolve(key, self.count)
        if isinstance(rows, int):
            raise RowIndexError(f"rows must be a slice, a mask or an array, got {key}; use take([{key}])")
        return self._gather(np.arange(*rows) if isinstance(rows, tuple) else rows)

    def _range(self, start: int, stop: int) -> Self:
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
        """View exactly the steps from `start` to `end`, even inside sequences.

        A negative `start` prepends `-start` zero rows (None for objects) and copies columns. A negative `end` counts
        from the end; an `end` beyond the last step is clipped. With sequences, the first and last sequence may be cut;
        each sequence keeps its state, and padding is removed. `state_start` and `state_end` (excluded) select these
        sequences by number. Raises SequenceError if these sequences are too short or only one argument is passed.

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

        `indices` are integers of shape (k,) in [-n, n), or a mask of shape (n,). With sequences, adjacent gathered
        steps of one sequence form a new sequence with the source sequence's state; padding is removed. Raises
        RowIndexError for an index out of range.

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
        """Copy the batch; a `shallow` copy shares the arrays but has its own set of columns."""
        columns = self._all()
        return self._with(columns.copy() if shallow else bulk.copy(columns, self.count))

    def __copy__(self) -> Self:
        return self.copy(shallow=True)

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    def concat(self, other: SampleBatch[ValuesT]) -> SampleBatch[ValuesT]:
        """Concatenate this batch and another into a new batch; see `concat_samples`.

        >>> SampleBatch(a=[1, 2]).concat(SampleBatch(a=[3, 4, 5]))["a"].tolist()
        [1, 2, 3, 4, 5]
        """
        parts: list[SampleBatch[Any]] = [self, require_flat(other)]
        return join(parts, SampleBatch)

    def __eq__(self, other: object) -> bool:
        """Return whether two batches have equal columns, dtypes, rows and layout; NaN equals NaN."""
        if not isinstance(other, SampleBatch):
            return NotImplemented
        return tree.equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    # -- order and parts -----------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each step as a dict of scalars, views of array rows and objects; nested columns are nested dicts.

        With sequences, padding is omitted, `seq_lens` is 1, and states are the states of the step's sequence.

        >>> [(row["a"], row["b"]) for row in SampleBatch(a=[1, 2], b=["x", "y"]).rows()]
        [(np.int64(1), 'x'), (np.int64(2), 'y')]
        """
        # Infos and states alone have rows but no steps.
        columns = self._rowwise() if self.count else {}
        keys = list(columns)
        for row in zip(*(column.values for column in columns.values()), strict=True):
            flat = dict(zip(keys, row, strict=True))
            yield self._nest(flat) if self._nested else flat

    def _rowwise(self) -> dict[str, Column]:
        return sequences.rowwise(self) if self._has_sequences else self._all()

    def _nest(self, flat: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tree.unflatten(name, self._nested[name], flat.__getitem__) if name in self._nested else flat[name]
            for name in self
        }

    @suggest_names(seed="rng")
    def shuffle(self, rng: np.random.Generator | int | None = None) -> Self:
        """Shuffle the steps in place; padded sequences are shuffled as units, with their states.

        Columns are replaced by new arrays, one at a time: existing arrays and views keep their order, and the peak
        memory overhead is one copy of the largest column. `rng` is a generator or a seed; default: a random seed.
        Raises SequenceError for unpadded sequences; use `take_sequences(rng.permutation(len(batch["seq_lens"])))`.

        >>> sorted(SampleBatch(a=[1, 2, 3, 4]).shuffle(rng=0)["a"].tolist())
        [1, 2, 3, 4]
        """
        bulk.reorder(self._draw_moves(np.random.default_rng(rng)))
        return self

    def _draw_moves(self, rng: np.random.Generator) -> list[bulk.Move]:
        return sequences.draw_moves(self, rng) if self._has_sequences else bulk.draw_moves(self._own(), self.count, rng)

    def timeslices(self, size: int | None = None, num_slices: int | None = None, k: int | None = None) -> list[Self]:
        """Split into consecutive views; raises ArgumentError unless exactly one positive argument is passed.

        `size` (or `k`) is the number of steps per view; the last view may have fewer. With sequences, both ends of a
        view move back to the start of a sequence. `num_slices` is the number of views. The sizes of these views differ
        by at most one step; the last views are the largest.

        >>> [part["a"].tolist() for part in SampleBatch(a=[1, 2, 3, 4, 5]).timeslices(2)]
        [[1, 2], [3, 4], [5]]
        """
        bounds = bulk.slice_bounds(self.count, size, num_slices, k)
        part = self._range if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise(bounds)]

    @overload
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: RowLengths = None,
        device: None = None,
        floats: Floats | None = None,
    ) -> Iterator[Self]: ...
    @overload
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: RowLengths = None,
        device: Device,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[SampleBatch[torch.Tensor]]: ...
    @suggest_names(minibatch_size="size", batch_size="size")
    def minibatches(
        self,
        size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        rng: np.random.Generator | int | None = None,
        *,
        max_tokens: int | None = None,
        lengths: RowLengths = None,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Any:
        """Yield parts of `size` steps, every step once per epoch; the last part of an epoch may have fewer steps.

        With sequences, parts consist of entire sequences: as many as fit in `size` steps, but at least one.

        Parameters
        ----------
        size, epochs
            Steps per minibatch, and number of passes over the batch.
        shuffle
            Whether each pass has a new random order. Without shuffling, parts are views.
        rng
            Generator or seed; by default a seed from the operating system.
        max_tokens
            Maximum number of tokens per part, instead of `size`; each part has as many rows as fit.
        lengths
            Column of tokens or token counts, or one token count per row; default: lengths of the ragged columns.
        device, floats
            Device of tensors, and dtype of floating-point columns; None keeps columns as stored.
        prefetch
            Number of parts to prepare ahead; copies to a GPU use page-locked memory and a separate stream.

        Raises
        ------
        ArgumentError, DeviceError
            If not exactly one of `size` and `max_tokens` is passed, a number is too small, a row has more than
            `max_tokens` tokens, `floats` is not a floating-point dtype, minibatches are prefetched without a device, or
            torch cannot use the device.

        Examples
        --------
        >>> [len(part) for part in SampleBatch(a=[1, 2, 3, 4, 5]).minibatches(2, epochs=2, rng=0)]
        [2, 2, 1, 2, 2, 1]
        >>> rows = SampleBatch(ids=[[1, 2, 3], [4], [5, 6], [7]])
        >>> [part["ids"].lengths.tolist() for part in rows.minibatches(max_tokens=4, shuffle=False)]
        [[3, 1], [2, 1]]
        """
        parts = delivery.minibatches(self, size, epochs, shuffle, rng, max_tokens, lengths)
        return delivery.Delivery(device, floats, prefetch).each(parts, type(self)._to)

    def pack(self, max_tokens: int, lengths: RowLengths = None) -> PackedBatch[Any]:
        """Pack rows into bins of at most `max_tokens` tokens by first-fit decreasing; see `samplebatch.tokens.pack`.

        >>> SampleBatch(ids=[[1, 2, 3], [4], [5, 6]]).pack(max_tokens=4)
        PackedBatch(3 rows in 2 bins, 75.0% full)
        """
        from samplebatch.tokens import pack

        return pack(self, max_tokens, lengths)

    def balance(self, k: int, weights: RowLengths = None, *, equal_size: bool = False) -> Parts[Any]:
        """Partition rows into `k` parts of similar weight (default: tokens); see `samplebatch.tokens.balance`.

        >>> parts = SampleBatch(ids=[[1, 2, 3], [4], [5, 6]]).balance(2)
        >>> parts.totals.tolist(), parts.imbalance
        ([3.0, 3.0], 1.0)
        """
        from samplebatch.tokens import balance

        return balance(self, k, weights, equal_size=equal_size)

    def chunk(self, n: int, *, pad_to_divisor: bool = False) -> Parts[Any]:
        """Split into `n` parts of similar size, or of equal size by repeating rows; see `samplebatch.tokens.chunk`.

        >>> parts = SampleBatch(a=[1, 2, 3]).chunk(2, pad_to_divisor=True)
        >>> [part["a"].tolist() for part in parts], parts.join()["a"].tolist()
        ([[1, 2], [3, 1]], [1, 2, 3])
        """
        from samplebatch.tokens import chunk

        return chunk(self, n, pad_to_divisor=pad_to_divisor)

    def group_by(self, key: str | npt.ArrayLike) -> Groups[Any]:
        """Group rows by a column of numbers or strings, for statistics per group; see `samplebatch.tokens.group_by`.

        >>> groups = SampleBatch(uid=[7, 7, 8, 8], rewards=[0.0, 1.0, 3.0, 5.0]).group_by("uid")
        >>> groups.mean("rewards"), groups.normalize("rewards", scale=False)
        (array([0.5, 4. ]), array([-0.5,  0.5, -1. ,  1. ]))
        """
        from samplebatch.tokens import group_by

        return group_by(self, key)

    def repeat(self, k: int, *, interleave: bool = True) -> Self:
        """Repeat every row `k` times: consecutively if `interleave`, otherwise as `k` repetitions of the batch.

        >>> SampleBatch(uid=[7, 8]).repeat(2)["uid"].tolist()
        [7, 7, 8, 8]
        """
        from samplebatch.tokens import repeat

        return repeat(self, k, interleave=interleave)

    def union(self, other: SampleBatch[Any] | Mapping[str, Any]) -> Self:
        """Return a batch with the columns of this batch and another, without a copy; common columns must be equal.

        Raises ColumnLengthError if the batches have different numbers of rows, ColumnMismatchError if the rows of a
        common column differ between the batches.

        >>> list(SampleBatch(ids=[1, 2]).union(SampleBatch(rewards=[0.5, 1.0])))
        ['ids', 'rewards']
        """
        from samplebatch.tokens import union

        return union(self, other)

    def assign(self, **columns: Any) -> Self:
        """Return a batch with added or replaced columns, without a copy; this batch is unchanged.

        >>> list(SampleBatch(rewards=[1.0, 3.0]).assign(advantages=[-1.0, 1.0]))
        ['rewards', 'advantages']
        """
        from samplebatch.tokens import assign

        return assign(self, **columns)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def is_terminated_or_truncated(self) -> bool:
        """Return whether the last step ends its episode.

        Raises RowIndexError if there are no steps, ColumnNotFoundError if no column marks episode ends.
        """
        if not self.count:
            raise RowIndexError("a batch without steps has no last one")
        return bool(np.asarray(sequences.unpadded(self)[names.DONES])[-1])

    def is_single_trajectory(self) -> bool:
        """Return whether no step before the last step ends an episode; raises ColumnNotFoundError without end flags."""
        return not np.asarray(sequences.unpadded(self)[names.DONES])[:-1].any()

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Split the batch into one view per episode, including an unfinished last episode.

        `key` is the column to split by: the batch is split after each true flag of `dones`, `terminateds` or
        `truncateds`, or wherever the value of another column changes. The default is `eps_id`, or `dones` if the batch
        has no `eps_id`. Raises ColumnNotFoundError if the column is missing.

        >>> steps = SampleBatch(a=[1, 2, 3], eps_id=[0, 0, 1])
        >>> [part["a"].tolist() for part in steps.split_by_episode()]
        [[1, 2], [3]]
        """
        stops = episodes.stops_by(key, sequences.unpadded(self))
        part = self.slice if self._has_sequences else self._view
        return [part(start, stop) for start, stop in pairwise([0, *stops])]

    # -- sequences -----------------------------------------------------------------------------------------------------

    def to_sequences(self, max_seq_len: int) -> Self:
        """View the steps as sequences of at most `max_seq_len` steps, each with its initial state.

        A sequence ends where `eps_id`, `agent_index`, `env_id` or `unroll_id` changes, where `t` does not increase by
        1, and without `eps_id` after each step that ends an episode; missing columns are ignored. The rows of each
        agent must be contiguous, as collectors return them. `state_in_*` and columns in `per_sequence` keep the first
        row of each sequence; other columns are shared. A batch without steps is returned as a shallow copy. Raises
        ArgumentError if `max_seq_len` is not a positive integer, SequenceError if the batch already has sequences.

        >>> steps = SampleBatch(eps_id=[7, 7, 7, 8, 8], state_in_0=[0.0, 0.1, 0.2, 0.0, 0.3])
        >>> recurrent = steps.to_sequences(max_seq_len=2)
        >>> recurrent["seq_lens"].tolist(), recurrent["state_in_0"].tolist()
        ([2, 1, 2], [0.0, 0.2, 0.0])
        """
        return sequences.cut_streams(self, max_seq_len)

    def take_sequences(self, indices: Any) -> Self:
        """Gather entire sequences with their states in the given order into a new batch with the same padding.

        `indices` are integers of shape (k,) in [-s, s) for s sequences, or a mask of shape (s,). Raises SequenceError
        if the batch has no `seq_lens`. Raises RowIndexError if an index is out of range.

        >>> batch = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 3.0], seq_lens=[1, 2])
        >>> swapped = batch.take_sequences([1, 0])
        >>> swapped["a"].tolist(), swapped["state_in_0"].tolist(), swapped["seq_lens"].tolist()
        ([2, 3, 1], [3.0, 1.0], [2, 1])
        """
        return sequences.gather_whole(self, indices)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that are steps and not padding, shape (rows,).

        >>> SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(2).mask().tolist()
        [True, False, True, True]
        """
        return sequences.mask(self) if self._has_sequences and self.zero_padded else np.ones(self.count, np.bool_)

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> Self:
        """Pad every sequence to `max_seq_len` rows in place, with zeros (None for objects) after its last step.

        Sets `zero_padded` and `max_seq_len`; a padded batch is padded to the new length. States are padded as well if
        `exclude_states` is false. Raises ArgumentError if `max_seq_len` is not a non-negative integer, SequenceError
        without `seq_lens` or for a longer sequence.

        >>> SampleBatch(a=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(max_seq_len=4)["a"].tolist()
        [1, 0, 0, 0, 2, 3, 0, 0]
        """
        sequences.pad(self, max_seq_len, exclude_states=exclude_states)
        return self

    def to_batch_major(self) -> Self:
        """Copy a time-major batch of sequences, columns (T, B, ...), into a padded batch, columns (B * T, ...).

        Raises SequenceError if the batch is not time-major or has no sequences.
        """
        return sequences.to_batch_major(self)

    def _lengths(self) -> sequences.Lengths:
        return sequences.lengths_of(self.column(names.SEQ_LENS))

    def _is_per_sequence(self, name: str) -> bool:
        return self._has_sequences and sequences.is_per_sequence(self._all(), name, self._flags)

    # -- other forms ---------------------------------------------------------------------------------------------------

    def as_multi_agent(self, module_id: str | None = None) -> MultiAgentBatch[ValuesT]:
        """Return the batch as the only policy of a `MultiAgentBatch` (default id: `default_policy`)."""
        if module_id is None:
            return _multi_agent_batch()._of({names.DEFAULT_POLICY_ID: self}, self.count)
        return _multi_agent_batch()({module_id: self}, self.count)

    def as_batch(self, convention: names.Convention | None = None) -> Batch:
        """Return a nested batch over the same arrays and tensors; nested columns become nested batches.

        A tuple of columns becomes a batch with the names `0`, `1`, ...; ragged columns stay ragged. The result shares
        values with this batch, but not columns added later. `convention="tianshou"` renames the columns that both
        libraries define, such as `rewards` to `rew`; `"rllib"` renames in the reverse direction. None keeps all names.
        Raises ColumnTypeError if a column is compressed, ArgumentError for another `convention`, ColumnMismatchError if
        two columns would share a name.

        >>> SampleBatch(obs=[1.0, 2.0], rewards=[0.5, 1.0]).as_batch(convention="tianshou").rew
        array([0.5, 1. ])
        """
        from samplebatch.batch.nested import as_batch

        return as_batch(self, convention)

    def get_single_step_input_dict(
        self, view_requirements: Mapping[str, Any], index: int | Literal["last"] = "last"
    ) -> SampleBatch:
        """Gather the inputs of a model at one step into a batch of one step.

        Columns have shape (1, ...) or (1, window, ...). Rows before the first step are zeros; `seq_lens` is [1]. Raises
        ColumnNotFoundError if a view requires a missing column, RowIndexError if the step is out of range.

        Parameters
        ----------
        view_requirements
            Views by name, this library's `ViewRequirement` or RLlib's; only those for computing actions are used.
        index
            Step index, negative from the end; or `"last"` for the step *after* the last step, as for a value estimate;
            `obs` is then the last row of `new_obs`, `prev_actions` of `actions`, `prev_rewards` of `rewards`.

        Examples
        --------
        >>> from samplebatch import ViewRequirement
        >>> batch = SampleBatch(obs=[1, 2, 3], new_obs=[2, 3, 4])
        >>> batch.get_single_step_input_dict({"last": ViewRequirement("obs", shift="-2:0")})["last"]
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
        """Return a batch of tensors that share memory with the arrays if torch supports their layout.

        Only read-only arrays and columns that change device or dtype are copied. Compressed columns and columns without
        a torch dtype (objects, strings, dates) are unchanged. For ragged columns, the elements are converted. Raises
        ArgumentError if the dtype is not a floating-point dtype or is passed twice, DeviceError if torch cannot use the
        device or pin memory.

        Parameters
        ----------
        dtype, floats
            Two names for the dtype of floating-point columns: a torch dtype, a NumPy dtype or a dtype's name; None
            keeps each dtype. Integers, flags and images are unchanged.
        device
            Device of all tensors.
        pin_memory, non_blocking
            Whether to pin host memory, and whether to return before copies to a device have finished.

        Examples
        --------
        >>> SampleBatch(rewards=[0.5, 1.0], actions=[0, 1]).to_torch(floats="float32")["rewards"]
        tensor([0.5000, 1.0000])
        """
        if dtype is not None and floats is not None:
            raise ArgumentError("only one of dtype and floats may be passed, both name the same argument")
        floats = dtype if floats is None else floats
        target = delivery.TorchTarget(device=device, floats=floats, pin_memory=pin_memory, non_blocking=non_blocking)
        return cast("SampleBatch[torch.Tensor]", self._to(target))

    def to_numpy(self, *, floats: Floats | None = None) -> SampleBatch:
        """Return a batch of arrays that share memory with tensors on the host.

        bfloat16 becomes float32, which represents it exactly. Compressed columns are unchanged. `floats` is the dtype
        of floating-point columns; None keeps each dtype. Raises ArgumentError for other dtypes.

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
        """Convert the columns to tensors on a device, in place; dtypes and copies are handled as in `to_torch`.

        `pin_memory` copies to the device asynchronously from pinned memory, `use_stream` on `stream` (None: a new CUDA
        stream) instead of the current stream. Raises ArgumentError if `framework` is not `"torch"`, DeviceError if
        torch cannot use the device; the batch is then unchanged.

        >>> SampleBatch(rewards=[1.0, 2.0]).to_device("cpu")["rewards"]
        tensor([1., 2.], dtype=torch.float64)
        """
        choice("framework", framework, ["torch"])
        torch_device = delivery.require_device(device)
        on_gpu = torch_device.type == "cuda"
        target = delivery.TorchTarget(device=torch_device, pin_memory=pin_memory and on_gpu, non_blocking=pin_memory)
        with delivery.on_stream(torch_device, stream) if use_stream and on_gpu else nullcontext():
            self._columns = self._to(target)._columns
        self._lent = False
        return self

    def _to(self, target: Target) -> Self:
        return self._with({name: delivery.convert_column(column, target) for name, column in self._all().items()})

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of the columns' values, with nested columns as dicts and tuples.

        >>> SampleBatch(obs={"x": [1, 2]}, rewards=[0.5, 1.0]).to_dict()
        {'obs': {'x': array([1, 2])}, 'rewards': array([0.5, 1. ])}
        """
        return self._nest({name: column.values for name, column in self._all().items()})

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table without a copy; `from_arrow` is the inverse.

        The table has one row per step or, with sequences, one row per sequence. Each step column of sequences becomes a
        list column that shares the column's values. N-dimensional columns are fixed-shape tensors.

        >>> SampleBatch(obs=np.zeros((2, 3)), rewards=[1.0, 2.0]).to_arrow().num_rows
        2
        """
        return arrow.to_table(self._all(), self._nested, self._flags)

    @classmethod
    def from_arrow(cls, table: Any, *, allow_pickle: bool = False, max_nbytes: int | None = None) -> Self:
        """View an Arrow table as a batch, without copying if its layout permits.

        Parameters
        ----------
        table
            A table, record batch or object with the Arrow PyCapsule interface, written by `to_arrow` or another
            library. Columns with several chunks are concatenated, with one copy.
        allow_pickle
            Whether to unpickle columns of Python objects that Arrow cannot represent. Only for trusted data.
        max_nbytes
            Maximum bytes of Python objects; None: 256 MiB or 1024 times the table's size, whichever is larger.

        Raises
        ------
        ColumnTypeError, UntrustedPickleError, CapacityError
            If a column has nulls or an unsupported type, is pickled without `allow_pickle`, or exceeds `max_nbytes`.

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
        """Write the batch atomically to a file or folder that `samplebatch.load` reads back.

        Parameters
        ----------
        path
            The file; its extension selects the format: `.arrow` for memory mapping, `.parquet` for small files and
            exchange, `.hdf5` for HDF5 readers. A path without extension becomes a `Dataset` folder.
        compression
            `"lz4"`, `"zstd"` or `"none"` for Arrow (default: LZ4 if a column is compressed in memory); these,
            `"snappy"`, `"gzip"` or `"brotli"` for Parquet (default: `"zstd"`); `"gzip"` or `"lzf"` for HDF5 (default:
            `"lzf"` if a column is compressed in memory).
        durable
            Whether to wait until the file is on disk (always true for folders). If false, a power failure may damage
            the file, but a crash of this process does not. `load(verify=True)` detects damaged files.

        Raises
        ------
        FormatError, ArgumentError
            If no format has the path's extension, the format lacks the codec, or `durable` is false for a folder.
        ColumnTypeError, UnstorableError, OSError
            If a column can be neither stored nor pickled, or the file cannot be written.

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
        return frame.unpickle, (type(self), header, dict(self._nested), flags, *wrapped)

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
        """Plot columns over time, one subplot per column, with a vertical line at each episode end.

        Rows with a few numbers are plotted as one line per number, larger rows as their mean. Long batches are plotted
        at evenly spaced steps. `columns` are dotted names; default: numeric columns except ids, at most twelve. Raises
        MissingExtraError without matplotlib, ColumnNotFoundError for missing, ColumnTypeError for non-numeric columns.

        >>> SampleBatch(rewards=[0.0, 1.0], eps_id=[0, 1]).plot("rewards").axes[0].get_ylabel()
        'rewards'
        """
        for name in columns:
            self.column(name)
        rows = self._rowwise()
        part = summary.Part("", {name: rows[name] for name in columns or rows}, episodes.ends_in(rows))
        return summary.draw_columns([part], chosen=bool(columns))

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame with one row per step and one column per dotted name; requires pandas.

        Numeric columns share memory. Array rows become one array per cell; sequence states are repeated for every step.

        >>> SampleBatch(obs=[[1, 2], [3, 4]], rewards=[0.5, 1.0]).to_pandas()
              obs  rewards
        0  [1, 2]      0.5
        1  [3, 4]      1.0
        """
        return summary.data_frame(self._rowwise())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the steps as an object array of records, shape (n,), as `pandas.DataFrame(batch)` requires.

        Raises ColumnTypeError if a column name is not a valid field name.
        """
        return summary.records(list(self), self._rowwise(), self._nest, self.count)


@cache
def _multi_agent_batch() -> type[MultiAgentBatch[Any]]:
    from samplebatch.batch import MultiAgentBatch

    return MultiAgentBatch


_RLLIB_FLAGS = ("time_major", "zero_padded", "max_seq_len", "num_grad_updates", "is_training")


def require_flat(sample: Any) -> SampleBatch[Any]:
    """Return a `SampleBatch` unchanged, convert RLlib's batch without copying, and reject other types."""
    if isinstance(sample, SampleBatch):
        return sample
    if isinstance(sample, Mapping) and all(hasattr(sample, name) for name in _RLLIB_FLAGS):
        return SampleBatch(dict(sample), **{f"_{name}": getattr(sample, name) for name in _RLLIB_FLAGS})
    raise ColumnTypeError(f"only SampleBatch and MultiAgentBatch can be joined, got {type(sample).__name__}")
