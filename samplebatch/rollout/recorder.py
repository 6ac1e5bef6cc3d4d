"""Recorder: rows of environment steps, written in time order and handed out in stream order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import by_stream
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure, leaf_names
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.column.convert import as_column
from samplebatch.column.exact import BOOL, FLOAT
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.env.infos import empty_infos
from samplebatch.env.spaces import Leaf
from samplebatch.env.stacking import NestedRows, join_blocks, stack_rows
from samplebatch.env.tensors import is_tensor
from samplebatch.errors import ColumnMismatchError
from samplebatch.names import PolicyID

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
Block = Leaf | NestedRows | Sequence[Any]
"""Values of a column in k rows: an array of shape (k, ...), the arrays of a nested column, or k values of any kind."""

_FIRST = (names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS)
_ndarray = np.ndarray
_concatenate = np.concatenate


class _EMPTY:
    """Stands for an empty info, also in copies and pickles of rows."""


_DTYPES = {names.REWARDS: FLOAT, names.TERMINATEDS: BOOL, names.TRUNCATEDS: BOOL, names.EPS_DONE: BOOL}
"""Dtypes of numbers that environments return; adapters have checked that these hold them exactly."""


class Streams(NamedTuple):
    """The episode and the stream of k rows, shape (k,) each, under the names of their columns."""

    eps_id: Ints
    env_id: Ints
    agent_index: Ints


Step = tuple[PolicyID, Mapping[str, Block], Streams, Ints, Sequence[Any] | None]
"""Rows of a policy, as `Recorder.append` takes them: its id, columns, streams, times and infos."""


class Recorder:
    """Rows of environment steps, by policy; collectors write them and take them as batches.

    Rows are written in the order in which steps are made. In a batch they lie stream by stream, by `env_id` and
    `agent_index`, and each stream in order of time. Values are copied once where rows of one dtype are joined, and
    once into stream order.

    Parameters
    ----------
    infos
        Whether batches have a column of infos.

    Examples
    --------
    >>> recorder, zero = Recorder(), np.zeros(2, int)
    >>> for t in range(3):
    ...     streams = Streams(np.array([7, 8]), np.array([0, 1]), zero)
    ...     recorder.append("cat", {"obs": np.array([t, 10 * t]), "rewards": [0.5, t]}, streams, zero + t, [{}, {}])
    >>> batch = recorder.take()["cat"]
    >>> batch["env_id"].tolist(), batch["obs"].tolist(), batch["rewards"].tolist()
    ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 10, 20], [0.5, 0.5, 0.5, 0.0, 1.0, 2.0])
    """

    def __init__(self, *, infos: bool = True) -> None:
        self._has_infos = infos
        self._policies: dict[PolicyID, _PolicyRows] = {}

    def append(
        self,
        policy_id: PolicyID,
        columns: Mapping[str, Block],
        streams: Streams,
        t: Ints,
        infos: Sequence[Any] | None = None,
    ) -> None:
        """Write k rows of a policy.

        Parameters
        ----------
        policy_id
            The policy.
        columns
            Their values by column. Arrays are kept, not copied.
        streams
            Their episodes and streams. Rows of a stream must come in order of time.
        t
            Their times, shape (k,).
        infos
            Their infos, an item a row; None for empty ones. They are copied one level deep, as environments reuse them.

        Raises
        ------
        ColumnMismatchError
            If the columns are not those of the policy's rows before, or differ in row shape, or in dtype in a way that
            no dtype holds without loss. Nothing is written then.
        """
        rows = self._policies.get(policy_id)
        if rows is None:
            rows = self._policies[policy_id] = _PolicyRows(columns)
        else:
            columns = rows.fit(columns)
        rows.append(columns, streams, t, infos if self._has_infos else None)

    def append_together(self, steps: Sequence[Step]) -> None:
        """Write rows of several policies, each as `append` does.

        Raises
        ------
        ColumnMismatchError
            If those of a policy do not fit the ones before. Nothing is written then, of no policy.
        """
        policies = self._policies
        fitted = [policies[own[0]].fit(own[1]) if own[0] in policies else own[1] for own in steps]
        for (policy_id, _, streams, t, infos), columns in zip(steps, fitted, strict=True):
            rows = policies.get(policy_id)
            if rows is None:
                rows = policies[policy_id] = _PolicyRows(columns)
            rows.append(columns, streams, t, infos if self._has_infos else None)

    def take(self, constants: Mapping[str, int] | None = None) -> dict[PolicyID, SampleBatch]:
        """Hand out all rows as a batch for each policy, and start afresh.

        Parameters
        ----------
        constants
            Further columns, of one number each.
        """
        policies, self._policies = self._policies, {}
        batches: dict[PolicyID, SampleBatch] = {}
        for policy_id, rows in policies.items():
            batches[policy_id] = rows.gather(constants or {}, infos=self._has_infos)
        return batches

    def state_dict(self) -> dict[PolicyID, Any]:
        """Return the rows that have not been taken, for `load_state_dict`."""
        return copy.deepcopy(self._policies)

    def load_state_dict(self, state: Mapping[PolicyID, Any]) -> None:
        """Go on with the rows of another recorder."""
        self._policies = copy.deepcopy(dict(state))


class _PolicyRows:
    """The rows of one policy.

    The values of a step are kept as arrays, or go into one long list: objects that Python's garbage collector has to
    visit make every step slower.
    """

    def __init__(self, columns: Mapping[str, Block]) -> None:
        # Single values of a column go into one list; of arrays there is one a step.
        self._values: dict[str, list[Any]] = {}
        self._arrays: dict[str, list[Any]] = {}
        self._blocks: dict[str, list[Any]] = {}
        for name, block in columns.items():
            kind = self._values if type(block) in (list, tuple) else self._arrays
            self._blocks[name] = kind[name] = []
        self._streams: list[Streams] = []
        self._t: list[Ints] = []
        self._infos: list[Any] = []

    def append(self, columns: Mapping[str, Block], streams: Streams, t: Ints, infos: Sequence[Any] | None) -> None:
        """Write rows of columns that `fit` has returned."""
        for name, blocks in self._arrays.items():
            blocks.append(columns[name])
        for name, values in self._values.items():
            values.extend(columns[name])
        self._streams.append(streams)
        self._t.append(t)
        if infos is None:
            self._infos += [_EMPTY] * len(t)
        else:
            self._infos += [
                (info.copy() if info else _EMPTY) if type(info) is dict else _copy_info(info) for info in infos
            ]

    def fit(self, columns: Mapping[str, Block]) -> Mapping[str, Block]:
        """Convert columns to the dtypes of the rows before; these are widened where they cannot hold them."""
        if columns.keys() != self._blocks.keys():
            odd = next(iter(columns.keys() ^ self._blocks.keys()))
            raise ColumnMismatchError(f"all steps of a collection must have the same columns, some lack {odd!r}")
        fitted: dict[str, Block] = {}
        for name, blocks in self._arrays.items():
            if not blocks:
                continue
            block: Any = columns[name]
            first = blocks[0]
            # NumPy has one object for each dtype of native numbers.
            alike = type(block) is type(first) is _ndarray and block.dtype is first.dtype
            if alike and block.shape[1:] == first.shape[1:]:
                continue
            fitted[name] = self._fit_block(name, block, blocks)
        return {**columns, **fitted} if fitted else columns

    def _fit_block(self, name: str, block: Any, blocks: list[Any]) -> Any:
        first = blocks[0]
        if isinstance(block, np.ndarray) and isinstance(first, np.ndarray):
            if block.shape[1:] == first.shape[1:]:
                if block.dtype == first.dtype:
                    return block
                fitted = cast_exactly(block, first.dtype)
                if fitted is not None:
                    return fitted
        elif _is_alike(block, first):
            return block
        join = _join_nested if NestedRows in {type(first), type(block)} else join_blocks
        joined = join(name, [*blocks, block])
        count = _count_rows(joined) - _count_rows(block)
        blocks[:] = [rows_of_block(joined, slice(count))]
        return rows_of_block(joined, slice(count, None))

    def gather(self, constants: Mapping[str, int], *, infos: bool) -> SampleBatch:
        """Make a batch in which the rows of each stream lie together."""
        streams = Streams(*map(_concatenate, zip(*self._streams, strict=True)))
        stream = streams.env_id * (int(streams.agent_index.max()) + 1) + streams.agent_index
        # Rows may lie stream by stream already.
        order = None if (stream[1:] >= stream[:-1]).all() else by_stream(stream)
        columns: dict[str, Column] = {}
        nested: dict[str, Structure] = {}
        for name in filter(self._blocks.__contains__, _FIRST):
            self._join(name, order, columns, nested)
        if infos:
            columns[names.INFOS] = self._join_infos(order)
        for name in self._blocks:
            if name not in _FIRST and name != names.EPS_DONE:
                self._join(name, order, columns, nested)
        for name, values in (*streams._asdict().items(), (names.T, _concatenate(self._t))):
            columns[name] = TensorColumn(values if order is None else _take(values, order))
        if names.EPS_DONE in self._blocks:
            self._join(names.EPS_DONE, order, columns, nested)
        for name, value in constants.items():
            columns[name] = TensorColumn(np.full(len(stream), value))
        return SampleBatch._of_steps(columns, nested, len(stream))

    def _join(self, name: str, order: Rows | None, columns: dict[str, Column], nested: dict[str, Structure]) -> None:
        """Join the blocks of a column, or of the leaves of a nested one, in stream order."""
        blocks = self._blocks[name]
        if name in self._values:
            joined = _join_values(name, blocks)
        elif len(blocks) == 1 and order is not None:
            # The gather copies it.
            joined = blocks[0]
        elif type(blocks[0]) is NestedRows:
            joined = _join_nested(name, blocks)
        else:
            joined = join_blocks(name, blocks)
        if isinstance(joined, NestedRows):
            nested[name] = joined.structure
            parts = [*zip(leaf_names(name, joined.structure), joined.leaves, strict=True)]
        else:
            parts = [(name, joined)]
            top, *folders = name.split(".")
            tree: Any = nested.setdefault(top, {}) if folders else {}
            for folder in folders[:-1]:
                tree = tree.setdefault(folder, {})
            if folders:
                tree[folders[-1]] = None
        for leaf, values in parts:
            columns[leaf] = as_column(values if order is None else _take(values, order), leaf)

    def _join_infos(self, order: Rows | None) -> ObjectColumn:
        infos = self._infos
        if infos.count(_EMPTY) == len(infos):
            return ObjectColumn.empty_dicts(len(infos))
        joined = empty_infos(len(infos))
        for row, info in enumerate(infos):
            if info is not _EMPTY:
                joined[row] = info
        return ObjectColumn(joined if order is None else joined[order])


def _join_nested(name: str, blocks: Sequence[Any]) -> NestedRows:
    """Join blocks of a nested column, leaf by leaf."""
    first = blocks[0]
    if any(not isinstance(block, NestedRows) or block.structure != first.structure for block in blocks):
        raise ColumnMismatchError(f"column {name!r} must be nested in the same way in all rows, and is not")
    paths = leaf_names(name, first.structure)
    leaves = zip(*[block.leaves for block in blocks], strict=True)
    return NestedRows(first.structure, [join_blocks(path, own) for path, own in zip(paths, leaves, strict=True)])


def _is_alike(block: Any, first: Any) -> bool:
    """Tell whether two tensors, or two blocks of a nested column, agree in structure, dtypes and row shapes."""
    if is_tensor(block) and is_tensor(first):
        return bool(block.dtype == first.dtype and block.shape[1:] == first.shape[1:])
    if not (isinstance(block, NestedRows) and isinstance(first, NestedRows)) or block.structure != first.structure:
        return False
    pairs = zip(block.leaves, first.leaves, strict=True)
    return all(leaf.dtype == own.dtype and leaf.shape[1:] == own.shape[1:] for leaf, own in pairs)


def _count_rows(block: Leaf | NestedRows) -> int:
    return len(block.leaves[0]) if isinstance(block, NestedRows) else len(block)


def _join_values(name: str, values: Sequence[Any]) -> Leaf | NestedRows:
    """Stack single values."""
    return np.array(values, _DTYPES[name]) if name in _DTYPES else stack_rows(name, values)


def _take(values: Leaf, order: Rows) -> Leaf:
    """Take all rows in another order."""
    if type(values) is not _ndarray or values.dtype.hasobject:
        return values[order]
    # Out of bounds cannot happen here; NumPy gathers by way of a copy if it must check.
    return values.take(order, 0, memory.empty((len(order), *values.shape[1:]), values.dtype), "clip")


def rows_of_block(block: Block, rows: Sequence[int] | slice) -> Block:
    """Take some rows of a column.

    >>> rows_of_block(["a", "b", "c"], [2, 0])
    ['c', 'a']
    """
    if isinstance(block, NestedRows):
        return NestedRows(block.structure, [leaf[rows] for leaf in block.leaves])
    if isinstance(block, np.ndarray):
        return block[rows]
    values: Sequence[Any] = block
    return values[rows] if isinstance(rows, slice) else [values[row] for row in rows]


def _copy_info(info: Any) -> Any:
    return info.copy() if type(info) in (list, np.ndarray) else info
