"""Builders that create batches step by step.

A builder has one growing column per column of the batch and counts the steps itself. A step that a column rejects is
not counted and is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure, flatten, is_nested, leaf_names
from samplebatch.column.convert import Ragged, ragged_dtypes
from samplebatch.column.growing import GrowingColumn, growing_column
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, PolicyNotFoundError, SequenceError, near_names
from samplebatch.names import PolicyID, covers

FIRST_CAPACITY = 64
"""Default initial capacity of a builder, in steps."""

_ndarray = np.ndarray


class SampleBatchBuilder:
    """Builder of a `SampleBatch` from single steps or blocks of steps, for custom environment loops.

    Values are copied when they are added. A column starts with the dtype that `np.array` infers from its first value. A
    later value may widen the dtype if no earlier value changes. Strings, None and infos become objects;
    other dicts, and tuples of arrays, become nested columns.

    Parameters
    ----------
    dtypes
        Fixed dtypes by column (dotted name); a value that would lose information is rejected.
    ragged
        Columns (dotted names) whose rows vary in shape, or a mapping from these names to element dtypes. A name
        includes all columns nested under it.
    capacity
        Initial capacity in steps. Later batches start with the size of the previous batch.

    Attributes
    ----------
    count : int
        Steps added since the last batch.

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
        self._columns: dict[str, GrowingColumn | _GrowingTree] = {}
        self.count = 0

    def add_values(self, /, **values: Any) -> None:
        """Add one step: a value for every column.

        Raises
        ------
        ColumnMismatchError
            If the columns differ from the previous steps, or a value's shape or dtype does not fit its column; names
            the columns. The builder is unchanged.
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
            Arrays of shape (k, ...), lists of k objects, or dicts and tuples of such.

        Raises
        ------
        ColumnLengthError
            If the columns differ in their number of rows.
        ColumnMismatchError, ColumnTypeError
            As `add_values` does.

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
            If the batch has `seq_lens`, which steps do not have; join such batches with `concat_samples`.
        ColumnMismatchError, ColumnTypeError
            As `add_values` does.

        Examples
        --------
        >>> builder = SampleBatchBuilder()
        >>> builder.add_batch(SampleBatch(rewards=[1.0, 2.0]))
        >>> builder.add_values(rewards=3.0)
        >>> builder.build_and_reset()["rewards"].tolist()
        [1.0, 2.0, 3.0]
        """
        if names.SEQ_LENS in batch:
            raise SequenceError(f"a batch with {names.SEQ_LENS!r} cannot be added step by step; use concat_samples")
        self.add_steps(**batch)

    def build_and_reset(self) -> SampleBatch:
        """Return all steps added so far as a batch, and start an empty one.

        The columns are not copied: the batch owns the builder's memory.
        """
        batch = self._build()
        self._reset()
        return batch

    def _build(self) -> SampleBatch:
        columns: dict[str, Column] = {}
        nested: dict[str, Structure] = {}
        for name, growing in self._columns.items():
            if isinstance(growing, GrowingColumn):
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

    def _start(self, values: Mapping[str, Any], *, many: bool) -> dict[str, GrowingColumn | _GrowingTree]:
        """Make empty columns for steps like the first."""
        if not values:
            raise ColumnMismatchError("a step must have at least one column, got none")
        if names.SEQ_LENS in values:
            raise SequenceError(f"a step has no {names.SEQ_LENS!r}; set that column once the batch is built")
        columns: dict[str, GrowingColumn | _GrowingTree] = {}
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
            raise ColumnMismatchError(f"column {twice[0]!r} must be there once, got it nested and by its dotted name")
        return columns

    def _column(self, name: str, value: Any, many: bool) -> GrowingColumn:
        dtype, declared = self._dtypes.get(name), [one for one in self._ragged if covers((one,), name)]
        for one in declared:
            dtype = self._ragged[one] if dtype is None else dtype
        return growing_column(name, value, self._capacity, many=many, ragged=bool(declared), dtype=dtype)

    def _grow(self, rows: int) -> None:
        self._capacity = max(rows, 2 * self._capacity)
        for column in self._columns.values():
            column.grow(self.count, self._capacity)

    def _undo(self, row: int) -> None:
        for column in self._columns.values():
            column.undo(row)

    def _strange_columns(self, values: Mapping[str, Any]) -> ColumnMismatchError:
        missing = [name for name in self._columns if name not in values]
        extra = [name for name in values if name not in self._columns]
        differences = [f"no {', '.join(map(repr, missing))}"] * bool(missing) + [
            f"also {', '.join(map(repr, extra))}"
        ] * bool(extra)
        return ColumnMismatchError(
            f"a step must have the columns of the steps before it, got {' and '.join(differences)}"
        )


class _GrowingTree:
    """The growing columns of one nested column."""

    __slots__ = ("leaves", "name", "structure")
    # Nothing goes past `put`: see `GrowingColumn`.
    rows: Any = None
    dtype = row_shape = None
    scalars: frozenset[type] = frozenset()

    def __init__(self, name: str, structure: Structure, leaves: dict[str, GrowingColumn]) -> None:
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
            raise ColumnMismatchError(
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
    """Count the rows of several steps by their first column."""
    for name, values in arrays.items():
        while isinstance(values, Mapping) or (isinstance(values, tuple) and is_nested(values)):
            values = next(iter(values.values() if isinstance(values, Mapping) else values))
        if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
            raise ColumnLengthError(
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
        The policy that acts for an agent: a mapping from agent id to policy id, or a function of the agent id. By
        default one policy, `default_policy`, acts for all.
    dtypes, ragged
        As for `SampleBatchBuilder`, for every agent.

    Attributes
    ----------
    count : int
        Environment steps ended since the last batch.

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
        """Steps of all agents added since the last batch."""
        return sum(builder.count for _, builder in self._agents.values())

    def has_pending_agent_data(self) -> bool:
        """Return whether any steps were added since the last batch."""
        return any(builder.count for _, builder in self._agents.values())

    def add_values(self, agent_id: Any, /, **values: Any) -> None:
        """Add one step of one agent; raises as `SampleBatchBuilder.add_values` does.

        Raises PolicyNotFoundError if the mapping has no policy for the agent.
        """
        entry = self._agents.get(agent_id)
        (entry[1] if entry is not None else self._builder(agent_id)).add_values(**values)

    def add_steps(self, agent_id: Any, /, **arrays: Any) -> None:
        """Add several steps of one agent; raises as `SampleBatchBuilder.add_steps` does."""
        entry = self._agents.get(agent_id)
        (entry[1] if entry is not None else self._builder(agent_id)).add_steps(**arrays)

    def end_env_step(self, steps: int = 1) -> None:
        """Count an environment step, after all acting agents have added their values."""
        self.count += steps

    def build_and_reset(self) -> MultiAgentBatch:
        """Return all steps added so far as a batch, and start an empty one.

        Columns of a policy with one agent are not copied; columns of several agents are concatenated with one copy.

        Raises
        ------
        ColumnMismatchError
            If agents of one policy differ in their columns, dtypes or row shapes. The builder then keeps its steps.
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
            raise PolicyNotFoundError(
                f"agent {agent_id!r} must have a policy in policy_mapping; {near_names(agent_id, mapping)}"
            )
        return mapping[agent_id]
