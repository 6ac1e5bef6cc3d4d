"""Builders that create batches step by step.

A builder contains one growable column per batch column, and counts the steps. A step that a column rejects is not
counted and is overwritten by the next step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly, wider
from samplebatch.column.convert import Ragged, as_column, ragged_dtypes
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.types import holds, storage_of
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.names import PolicyID, covers

FIRST_CAPACITY = 64
"""Default initial capacity of a builder, in steps."""

_ndarray = np.ndarray


class SampleBatchBuilder:
    """Builder of a `SampleBatch` from single steps or blocks of steps, for custom environment loops.

    Values are copied when they are added. A column starts with the dtype that `np.array` infers from its first value. A
    later value may widen the dtype if no earlier value changes. Strings, None and infos become objects;
    all other dicts, and tuples of arrays, become nested columns.

    Parameters
    ----------
    dtypes
        Fixed dtypes by column (dotted name); a value is rejected if the conversion would lose information.
    ragged
        Columns (dotted names) whose rows vary in shape, or a mapping from these names to element dtypes. The name of a
        nested column includes all its leaves.
    capacity
        Initial capacity in steps. After the first batch, the initial capacity is the size of the previous batch.

    Attributes
    ----------
    count : int
        Number of steps added since the last batch was built.

    Examples
    --------
    >>> builder = SampleBatchBuilder()
    >>> builder.add_values(obs=[0.0, 1.0], rewards=1)
    >>> builder.add_values(obs=[2.0, 3.0], rewards=0.5)
    >>> batch = builder.build_and_reset()
    >>> batch["obs"].shape, batch["rewards"].tolist(), builder.count
    ((2, 2), [1.0, 0.5], 0)
    """

    __slots__ = ("_capacity", "_columns", "_dtypes", "_ragged", "count")

    def __init__(
        self,
        *,
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
        ragged: Ragged = (),
        capacity: int = FIRST_CAPACITY,
    ) -> None:
        self._dtypes = {name: np.dtype(dtype) for name, dtype in (dtypes or {}).items()}
        self._ragged = ragged_dtypes(ragged)
        self._capacity = max(1, capacity)
        self._columns: dict[str, _GrowingColumn | _GrowingTree] = {}
        self.count = 0

    def add_values(self, /, **values: Any) -> None:
        """Add one step, with a value for every column.

        Raises
        ------
        ColumnMismatchError
            If the columns differ from the columns of previous steps, or the shape or dtype of a value does not match
            the value's column. The builder is unchanged.
        ColumnTypeError
            If columns do not support a value.

        Examples
        --------
        >>> builder = SampleBatchBuilder()
        >>> builder.add_values(obs={"camera": [1, 2], "arm": 0.5}, infos={"hit": True})
        >>> builder.build_and_reset().column_names
        ('obs.camera', 'obs.arm', 'infos')
        """
        columns = self._columns
        row = self.count
        if not columns:
            columns = self._start(values, many=False)
        elif len(values) != len(columns):
            raise self._strange_columns(values)
        if row >= self._capacity:
            self._grow(row + 1)
        try:
            for name, value in values.items():
                column = columns[name]
                kind = type(value)
                if kind is _ndarray:
                    if value.dtype is column.dtype and value.shape == column.row_shape:
                        column.rows[row] = value
                    else:
                        column.put(row, value)
                elif kind in column.scalars:
                    try:
                        column.rows[row] = value
                    except OverflowError:
                        column.put(row, value)
                else:
                    column.put(row, value)
        except BaseException:
            self._undo(row)
            if values.keys() != columns.keys():
                raise self._strange_columns(values) from None
            raise
        self._columns = columns
        self.count = row + 1

    def add_steps(self, /, **arrays: Any) -> None:
        """Add k steps at once, for example from a vector environment.

        Parameters
        ----------
        **arrays
            Arrays of shape (k, ...), lists of k objects, or dicts and tuples of such arrays and lists.

        Raises
        ------
        ColumnLengthError
            If the columns differ in their number of rows.
        ColumnMismatchError, ColumnTypeError
            As in `add_values`.

        Examples
        --------
        >>> builder = SampleBatchBuilder()
        >>> builder.add_steps(obs=np.zeros((16, 4)), infos=[{}] * 16)
        >>> builder.count
        16
        """
        count = _count_rows(arrays)
        if not count:
            return
        columns = self._columns
        row = self.count
        if row + count > self._capacity:
            self._grow(row + count)
        if not columns:
            columns = self._start(arrays, many=True)
        elif arrays.keys() != columns.keys():
            raise self._strange_columns(arrays)
        try:
            for name, values in arrays.items():
                columns[name].put_many(row, values, count)
        except BaseException:
            self._undo(row)
            raise
        self._columns = columns
        self.count = row + count

    def add_batch(self, batch: SampleBatch) -> None:
        """Add every step of a batch.

        Raises
        ------
        SequenceError
            If the batch has sequences (a column `seq_lens`); concatenate batches of sequences with `concat_samples`.
        ColumnMismatchError, ColumnTypeError
            As in `add_values`.

        Examples
        --------
        >>> builder = SampleBatchBuilder()
        >>> builder.add_batch(SampleBatch(rewards=[1.0, 2.0]))
        >>> builder.add_values(rewards=3.0)
        >>> builder.build_and_reset()["rewards"].tolist()
        [1.0, 2.0, 3.0]
        """
        if names.SEQ_LENS in batch:
            raise errors.SequenceError(
                f"a batch with {names.SEQ_LENS!r} cannot be added step by step; use concat_samples"
            )
        self.add_steps(**batch)

    def build_and_reset(self) -> SampleBatch:
        """Return all steps added so far as a batch, and start an empty batch.

        The columns are not copied: the batch owns the builder's memory.
        """
        batch = self._build()
        self._reset()
        return batch

    def _build(self) -> SampleBatch:
        columns: dict[str, Column] = {}
        nested: dict[str, Structure] = {}
        for name, growing in self._columns.items():
            if isinstance(growing, _GrowingColumn):
                columns[name] = growing.finish(self.count)
            else:
                nested[name] = growing.structure
                for path, leaf in growing.leaves.items():
                    columns[path] = leaf.finish(self.count)
        return SampleBatch._of(columns, nested)

    def _reset(self) -> None:
        self._capacity = max(1, self.count)
        self._columns = {}
        self.count = 0

    def _start(self, values: Mapping[str, Any], *, many: bool) -> dict[str, _GrowingColumn | _GrowingTree]:
        """Create empty growable columns with the layout of the first step's values."""
        if not values:
            raise errors.ColumnMismatchError("a step must have at least one column, got none")
        if names.SEQ_LENS in values:
            raise errors.SequenceError(f"a step has no {names.SEQ_LENS!r}; set that column once the batch is built")
        columns: dict[str, _GrowingColumn | _GrowingTree] = {}
        leaves: list[str] = []
        for name, value in values.items():
            if name != names.INFOS and is_nested(value):
                structure, parts = flatten(name, value)
                leaves += [path for path, _ in parts]
                columns[name] = _GrowingTree(
                    name, structure, {path: self._column(path, part, many) for path, part in parts}
                )
            else:
                leaves.append(name)
                columns[name] = self._column(name, value, many)
        twice = [path for path in leaves if leaves.count(path) > 1]
        if twice:
            raise errors.ColumnMismatchError(
                f"column {twice[0]!r} must be there once, got it nested and by its dotted name"
            )
        return columns

    def _column(self, name: str, value: Any, many: bool) -> _GrowingColumn:
        dtype, declared = (
            self._dtypes.get(name),
            [ragged_name for ragged_name in self._ragged if covers((ragged_name,), name)],
        )
        for ragged_name in declared:
            dtype = self._ragged[ragged_name] if dtype is None else dtype
        return _growing_column(name, value, self._capacity, many=many, ragged=bool(declared), dtype=dtype)

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, 2 * self._capacity)
        for column in self._columns.values():
            column.grow(self.count, self._capacity)

    def _undo(self, row: int) -> None:
        for column in self._columns.values():
            column.undo(row)

    def _strange_columns(self, values: Mapping[str, Any]) -> errors.ColumnMismatchError:
        missing = [name for name in self._columns if name not in values]
        extra = [name for name in values if name not in self._columns]
        differences = [f"no {', '.join(map(repr, missing))}"] * bool(missing) + [
            f"also {', '.join(map(repr, extra))}"
        ] * bool(extra)
        return errors.ColumnMismatchError(
            f"a step must have the columns of the steps before it, got {' and '.join(differences)}"
        )


class _GrowingTree:
    """Growable columns for the leaves of one nested column."""

    __slots__ = ("leaves", "name", "structure")
    # Rows require `put`; see `_GrowingColumn`.
    rows: Any = None
    dtype = row_shape = None
    scalars: frozenset[type] = frozenset()

    def __init__(self, name: str, structure: Structure, leaves: dict[str, _GrowingColumn]) -> None:
        self.name = name
        self.structure = structure
        self.leaves = leaves

    def put(self, row: int, value: Any) -> None:
        for path, part in self._parts(value):
            self.leaves[path].put(row, part)

    def put_many(self, row: int, values: Any, count: int) -> None:
        for path, part in self._parts(values):
            self.leaves[path].put_many(row, part, count)

    def _parts(self, value: Any) -> Iterable[tuple[str, Any]]:
        structure, parts = flatten(self.name, value)
        if structure != self.structure:
            raise errors.ColumnMismatchError(
                f"column {self.name!r} must have the parts of the steps before it, "
                f"{', '.join(leaf_names(self.name, self.structure))}; got {', '.join(path for path, _ in parts)}"
            )
        return parts

    def grow(self, rows: int, capacity: int) -> None:
        for leaf in self.leaves.values():
            leaf.grow(rows, capacity)

    def undo(self, row: int) -> None:
        for leaf in self.leaves.values():
            leaf.undo(row)


def _count_rows(arrays: Mapping[str, Any]) -> int:
    """Return the number of steps in a block of steps: the length of the first leaf."""
    for name, values in arrays.items():
        while isinstance(values, Mapping) or (isinstance(values, tuple) and is_nested(values)):
            values = next(iter(values.values() if isinstance(values, Mapping) else values))
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
            raise errors.ColumnLengthError(
                f"column {name!r} must have a row for each step, got a single {type(values).__name__}"
            )
        return len(values)
    return 0


PolicyMapping = Mapping[Any, PolicyID] | Callable[..., PolicyID]
"""Policy that acts for an agent: a mapping from agent id to policy id, or a function of the agent id."""


class MultiAgentBatchBuilder:
    """Builder of a `MultiAgentBatch` from the steps of single agents, for custom environment loops.

    Each policy's rows are grouped by agent, in order of the agents' first steps; each agent's steps keep their order.

    Parameters
    ----------
    policy_mapping
        Mapping from agent id to policy id, or a function that returns the policy id of an agent id. By default, one
        policy, `default_policy`, acts for all agents.
    dtypes, ragged
        As in `SampleBatchBuilder`, for every agent.

    Attributes
    ----------
    count : int
        Number of environment steps completed since the last batch was built.

    Examples
    --------
    >>> builder = MultiAgentBatchBuilder(lambda agent: agent.split("_")[0])
    >>> for t in range(2):
    ...     builder.add_values("cat_0", t=t, rewards=1.0)
    ...     builder.add_values("dog_0", t=t, rewards=2.0)
    ...     builder.add_values("dog_1", t=t, rewards=3.0)
    ...     builder.end_env_step()
    >>> batch = builder.build_and_reset()
    >>> batch.count, batch["dog"]["rewards"].tolist()
    (2, [2.0, 2.0, 3.0, 3.0])
    """

    __slots__ = ("_agents", "_capacities", "_dtypes", "_policy_mapping", "_ragged", "count")

    def __init__(
        self,
        policy_mapping: PolicyMapping | None = None,
        *,
        dtypes: Mapping[str, npt.DTypeLike] | None = None,
        ragged: Ragged = (),
    ) -> None:
        self._policy_mapping = policy_mapping
        self._dtypes = dtypes
        self._ragged = ragged
        self._agents: dict[Any, tuple[PolicyID, SampleBatchBuilder]] = {}
        self._capacities: dict[Any, int] = {}
        self.count = 0

    @property
    def agent_steps(self) -> int:
        """Number of steps of all agents added since the last batch was built."""
        return sum(builder.count for _, builder in self._agents.values())

    def has_pending_agent_data(self) -> bool:
        """Return whether any steps were added since the last batch was built."""
        return any(builder.count for _, builder in self._agents.values())

    def add_values(self, agent_id: Any, /, **values: Any) -> None:
        """Add one step of one agent; raises the same errors as `SampleBatchBuilder.add_values`.

        Raises PolicyNotFoundError if the mapping has no policy for the agent.
        """
        entry = self._agents.get(agent_id)
        (entry[1] if entry is not None else self._builder(agent_id)).add_values(**values)

    def add_steps(self, agent_id: Any, /, **arrays: Any) -> None:
        """Add several steps of one agent; raises the same errors as `SampleBatchBuilder.add_steps`."""
        entry = self._agents.get(agent_id)
        (entry[1] if entry is not None else self._builder(agent_id)).add_steps(**arrays)

    def end_env_step(self, steps: int = 1) -> None:
        """Increment the number of environment steps, after the steps of all acting agents have been added."""
        self.count += steps

    def build_and_reset(self) -> MultiAgentBatch:
        """Return all steps added so far as a batch, and start an empty batch.

        The columns of a policy with one agent are not copied; the columns of a policy with several agents are
        concatenated with one copy.

        Raises
        ------
        ColumnMismatchError
            If the agents of a policy differ in columns, dtypes or row shapes. The error leaves the builder's steps
            unchanged.
        """
        policies: dict[PolicyID, list[SampleBatch]] = {}
        for policy_id, builder in self._agents.values():
            if builder.count:
                policies.setdefault(policy_id, []).append(builder._build())
        batch = MultiAgentBatch(
            {policy_id: join(parts) if len(parts) > 1 else parts[0] for policy_id, parts in policies.items()},
            self.count,
        )
        self._capacities = {agent_id: builder.count for agent_id, (_, builder) in self._agents.items()}
        self._agents = {}
        self.count = 0
        return batch

    def _builder(self, agent_id: Any) -> SampleBatchBuilder:
        capacity = self._capacities.get(agent_id, FIRST_CAPACITY)
        builder = SampleBatchBuilder(dtypes=self._dtypes, ragged=self._ragged, capacity=capacity)
        self._agents[agent_id] = (self._policy_of(agent_id), builder)
        return builder

    def _policy_of(self, agent_id: Any) -> PolicyID:
        mapping = self._policy_mapping
        if mapping is None:
            return names.DEFAULT_POLICY_ID
        if not isinstance(mapping, Mapping):
            return mapping(agent_id)
        if agent_id not in mapping:
            raise errors.PolicyNotFoundError(
                f"agent {agent_id!r} must have a policy in policy_mapping; {errors.near_names(agent_id, mapping)}"
            )
        return mapping[agent_id]


# Growing columns: rows written singly or in bulk into memory that doubles when full. A growing column does not record
# its length: the builder passes the row to write, so that a step rejected by one column is undone by not counting it.
# Every value is copied immediately, because environments reuse their buffers.

_NUMBER_TYPES = tuple(np.dtype(code).type for code in "?bhilqBHILQefdFD")
_PYTHON_TYPES: dict[str, type] = {"bool": bool, "int64": int, "float64": float, "complex128": complex}


@lru_cache(maxsize=256)
def _scalar_types(dtype: np.dtype[Any]) -> frozenset[type]:
    """Return the types of single numbers that an array of the dtype stores exactly, or rejects with OverflowError."""
    exact = {kind for kind in _NUMBER_TYPES if dtype.kind in "biufc" and holds(dtype, np.dtype(kind))}
    return frozenset(exact | {_PYTHON_TYPES[dtype.name]} if dtype.name in _PYTHON_TYPES else exact)


class _GrowingColumn(ABC):
    """Growable column: rows of one column type with spare capacity.

    `put` and `put_many` write within the capacity set by the last call to `grow`, and overwrite existing rows.

    dtype, row_shape: dtype and shape of arrays that can be assigned to `rows[row]` without `put`; None if rows require
    `put`. scalars: types of numbers that can also be assigned to `rows[row]`; a number that is too large raises
    OverflowError.
    """

    __slots__ = ("dtype", "name", "row_shape", "rows", "scalars")
    name: str
    rows: Any
    dtype: np.dtype[Any] | None
    row_shape: tuple[int, ...] | None
    scalars: frozenset[type]

    @abstractmethod
    def put(self, row: int, value: Any) -> None:
        """Write one row.

        Raises ColumnMismatchError if the value's shape differs from the shape of earlier rows, or if the dtype of
        earlier rows neither represents the value exactly nor can be widened. Raises ColumnTypeError if columns do not
        support the value.
        """

    @abstractmethod
    def put_many(self, row: int, values: Any, count: int) -> None:
        """Write `count` values, shape (count, ...), to the rows from `row`; raises the same errors as `put`.

        Raises ColumnLengthError if the number of values is not `count`.
        """

    @abstractmethod
    def grow(self, rows: int, capacity: int) -> None:
        """Increase the capacity to `capacity` rows, and preserve the first `rows` rows."""

    def undo(self, row: int) -> None:
        """Undo the widening of the dtype caused by the write at `row`, if any."""
        return None

    @abstractmethod
    def finish(self, rows: int) -> Column:
        """Return the first `rows` rows as a column; the growable column must not be used afterwards."""


class _GrowingTensor(_GrowingColumn):
    """Rows of one shape.

    fixed: whether the dtype was declared by the user; a declared dtype is never widened.

    >>> column = _GrowingTensor("rewards", np.dtype("i8"), (), capacity=4)
    >>> column.put(0, 1)
    >>> column.put(1, 0.5)
    >>> column.finish(2).values
    array([1. , 0.5])
    """

    __slots__ = ("_before", "_fixed")
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    def __init__(
        self, name: str, dtype: np.dtype[Any], row_shape: tuple[int, ...], capacity: int, *, fixed: bool = False
    ) -> None:
        storage_of(dtype)
        self.name = name
        self.row_shape = row_shape
        self._fixed = fixed
        self._before: tuple[int, npt.NDArray[Any]] | None = None
        self._use(memory.empty((capacity, *row_shape), dtype))

    def _use(self, rows: npt.NDArray[Any]) -> None:
        self.rows = rows
        self.dtype = rows.dtype
        self.scalars = frozenset() if self.row_shape else _scalar_types(rows.dtype)

    def put(self, row: int, value: Any) -> None:
        self._store(row, _as_rows(value, self.name)[None])

    def put_many(self, row: int, values: Any, count: int) -> None:
        block = _as_rows(values, self.name)
        if not block.ndim or len(block) != count:
            raise _wrong_count(self.name, count, len(block) if block.ndim else None)
        self._store(row, block)

    def _store(self, row: int, block: npt.NDArray[Any]) -> None:
        if block.shape[1:] != self.row_shape:
            raise errors.ColumnMismatchError(
                f"column {self.name!r} must have rows of shape {self.row_shape}, as its earlier rows, "
                f"got {block.shape[1:]}; declare it ragged if its rows vary"
            )
        exact = cast_exactly(block, self.dtype)
        if exact is None:
            exact = self._widen(row, block)
        self.rows[row : row + len(block)] = exact

    def _widen(self, row: int, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Widen the dtype so that it represents the stored and the new rows; return the converted new rows."""
        for dtype in () if self._fixed else wider(self.dtype, block.dtype):
            exact, stored = cast_exactly(block, dtype), cast_exactly(self.rows[:row], dtype)
            if exact is not None and stored is not None:
                rows = memory.empty(self.rows.shape, dtype)
                rows[:row] = stored
                self._before = (row, self.rows)
                self._use(rows)
                return exact
        raise errors.ColumnMismatchError(
            f"column {self.name!r} must store {self.dtype}, got a value of {block.dtype} that neither fits exactly "
            "nor allows a wider dtype; convert the values to one dtype first"
        )

    def grow(self, rows: int, capacity: int) -> None:
        grown = memory.empty((capacity, *self.row_shape), self.dtype)
        grown[:rows] = self.rows[:rows]
        self.rows = grown
        self._before = None

    def undo(self, row: int) -> None:
        if self._before is not None and self._before[0] == row:
            self._use(self._before[1])
            self._before = None

    def finish(self, rows: int) -> Column:
        values = self.rows[:rows]
        if values.dtype.kind in "SU":
            return as_column(values, self.name)
        # A short column must not retain a long column's memory.
        return TensorColumn(values if 2 * rows >= len(self.rows) else memory.copy_of(values))


class _GrowingObjects(_GrowingColumn):
    """Growable column of Python objects, mostly infos.

    Dicts and lists are copied one level deep, because environments reuse dicts and lists. Columns that contain only
    strings or only bytes become text columns.
    """

    __slots__ = ()
    rows: list[Any]

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.rows = [None] * capacity
        self.dtype = self.row_shape = None
        self.scalars = frozenset()

    def put(self, row: int, value: Any) -> None:
        kind = type(value)
        self.rows[row] = value.copy() if kind is dict or kind is list or kind is _ndarray else value

    def put_many(self, row: int, values: Any, count: int) -> None:
        if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
            raise _wrong_count(self.name, count, None)
        if len(values) != count:
            raise _wrong_count(self.name, count, len(values))
        for value in values:
            self.put(row, value)
            row += 1

    def grow(self, rows: int, capacity: int) -> None:
        self.rows += [None] * (capacity - len(self.rows))

    def finish(self, rows: int) -> Column:
        values = self.rows[:rows]
        text = None if self.name == names.INFOS else TextColumn.from_rows(values)
        return ObjectColumn.from_rows(values) if text is None else text


class _GrowingRagged(_GrowingColumn):
    """Growable column of rows that vary in shape but have the same number of dimensions.

    item: dtype of the elements; default: dtype of the first row that is not an empty list.
    """

    __slots__ = ("_chosen", "_item")
    rows: list[Any]

    def __init__(self, name: str, capacity: int, item: np.dtype[Any] | None = None) -> None:
        self.name = name
        self.rows = [None] * capacity
        self.dtype = self.row_shape = None
        self.scalars = frozenset()
        self._item = item
        self._chosen: int | None = None
        """Row that determined the dtype of the elements; None if it was declared or is undetermined."""

    def put(self, row: int, value: Any) -> None:
        array = _as_rows(value, self.name)
        before = self.rows[0]
        if row and array.ndim != before.ndim:
            raise errors.ColumnMismatchError(
                f"column {self.name!r} must have rows of {before.ndim} dimensions, as its earlier rows, "
                f"got {array.ndim}"
            )
        if array.size or not isinstance(value, list | tuple):
            if self._item is None:
                self._item, self._chosen = array.dtype, row
            elif array.dtype != self._item:
                array = self._cast(array, is_list=isinstance(value, list | tuple))
        self.rows[row] = memory.copy_of(array)

    def _cast(self, array: npt.NDArray[Any], *, is_list: bool) -> npt.NDArray[Any]:
        """Convert a row to the dtype of the elements; lists of numbers are rounded to a declared float dtype."""
        assert self._item is not None
        if is_list and self._chosen is None and self._item.kind in "fc" and array.dtype.kind in "biufc":
            return array.astype(self._item)
        exact = cast_exactly(array, self._item) if array.size else array.astype(self._item)
        if exact is None:
            raise errors.ColumnMismatchError(
                f"column {self.name!r} must store {self._item}, got a row of {array.dtype} that does not fit exactly"
            )
        return exact

    def put_many(self, row: int, values: Any, count: int) -> None:
        if not hasattr(values, "__len__") or len(values) != count:
            raise _wrong_count(self.name, count, len(values) if hasattr(values, "__len__") else None)
        for i in range(count):
            self.put(row + i, values[i])

    def grow(self, rows: int, capacity: int) -> None:
        self.rows += [None] * (capacity - len(self.rows))

    def finish(self, rows: int) -> RaggedColumn:
        # Empty lists were stored as float arrays, which do not affect the dtype.
        item = self._item
        rows_to_store = (
            self.rows[:rows] if item is None else [row if row.size else row.astype(item) for row in self.rows[:rows]]
        )
        return RaggedColumn.from_rows(rows_to_store, self.name, item)

    def undo(self, row: int) -> None:
        if self._chosen is not None and self._chosen >= row:
            self._item = self._chosen = None


def _growing_column(
    name: str,
    value: Any,
    capacity: int,
    *,
    many: bool = False,
    ragged: bool = False,
    dtype: np.dtype[Any] | None = None,
) -> _GrowingColumn:
    """Create an empty growable column whose type and row shape are inferred from a first value.

    Raises ColumnTypeError if columns do not support the value.

    name: the column's name; infos are always objects.
    value: a row, or rows of shape (k, ...) if `many` is true. The value is inspected, not stored.
    dtype: a declared dtype, which is never widened; default: the dtype of `np.array(value)`.

    >>> [type(_growing_column("x", v, 8)).__name__ for v in (0.5, "left", None, np.zeros(3))]
    ['_GrowingTensor', '_GrowingObjects', '_GrowingObjects', '_GrowingTensor']
    """
    if ragged or (many and isinstance(value, VaryingRows)):
        return _GrowingRagged(
            name, capacity, value.dtype if dtype is None and isinstance(value, RaggedColumn) else dtype
        )
    if name == names.INFOS or (dtype is None and _is_object(value, many)):
        return _GrowingObjects(name, capacity)
    array = _as_rows(value, name)
    if many and not array.ndim:
        raise errors.ColumnTypeError(f"column {name!r} must have one row per step, got a single {type(value).__name__}")
    row_shape = array.shape[1:] if many else array.shape
    return _GrowingTensor(name, array.dtype if dtype is None else dtype, row_shape, capacity, fixed=dtype is not None)


def _is_object(value: Any, many: bool) -> bool:
    if many:
        if isinstance(value, _ndarray):
            return value.dtype.kind == "O" or (value.dtype.kind == "T" and value.ndim == 1)
        if not isinstance(value, (list, tuple)) or not value:
            return False
        value = next((row for row in value if row is not None), None)
    if value is None or isinstance(value, (str, bytes, dict)):
        return True
    return isinstance(value, _ndarray) and value.dtype.kind == "O"


def _as_rows(value: Any, name: str) -> npt.NDArray[Any]:
    """Convert a value to an array of numbers, dates or fixed-width strings in native byte order.

    Raises ColumnTypeError for other values.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise errors.ColumnTypeError(
            f"column {name!r} must have rows that are arrays, got a {type(value).__name__}: {error}"
        ) from error
    if array.dtype.kind == "T":
        fixed = np.array(array.tolist())
        # NumPy removes trailing zeros of fixed-width strings.
        array = fixed if fixed.dtype.kind == "U" and fixed.tolist() == array.tolist() else array
    if array.dtype.kind not in "biufcmMSU":
        hint = "; declare it ragged if its rows vary in shape" if isinstance(value, Column) else ""
        raise errors.ColumnTypeError(f"column {name!r} must contain numbers or arrays, got a {_word(value)}{hint}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _word(value: Any) -> str:
    return f"{value.dtype} array" if isinstance(value, _ndarray) else type(value).__name__


def _wrong_count(name: str, count: int, actual: int | None) -> errors.ColumnLengthError:
    described = "a single value" if actual is None else str(actual)
    return errors.ColumnLengthError(
        f"column {name!r} must have {count} rows, as the other columns of these steps, got {described}"
    )
