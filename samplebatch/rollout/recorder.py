"""Recorders of environment steps, which are appended in time order and returned sorted by stream and time."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import by_stream, run_starts
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.conversions import as_sample_batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.tree import Structure, leaf_names
from samplebatch.column import memory
from samplebatch.column.casting import BOOL, FLOAT, cast_exactly
from samplebatch.column.convert import as_column, as_ragged, is_of_arrays
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.env.base import OUTCOMES, StepResult
from samplebatch.env.infos import Infos, Rows, batch_of_steps, empty_infos, infos_to_rows
from samplebatch.env.spaces import Columns, Leaf, SpaceLayout, column_names
from samplebatch.env.stacking import (
    NestedRows,
    is_tensor,
    join_blocks,
    join_steps,
    stack_rows,
    take_rows,
    to_host,
    to_tensor,
)
from samplebatch.errors import ColumnLengthError, ColumnMismatchError
from samplebatch.names import TO_FLAT, TO_NESTED, PolicyID
from samplebatch.policy.actor import ActResult
from samplebatch.rollout.statistics import RunningStatistics

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_count = np.count_nonzero


class CountedSteps(NamedTuple):
    """Result of `EpisodeCount.add`: positions of the added steps in their episodes, and completed episodes.

    - `ended`: environments whose episodes ended, in time order, shape (e,); None if no episode ended.
    - `returns`, `lens`: sum of rewards and number of steps per ended episode, shape (e,).
    - `eps_id`, `t`: episode of each run, and number of steps in the episode before the run, shape (r,). A run is a
      sequence of consecutive steps of one environment in one episode.
    - `lengths`, `order`: length of each run, shape (r,), and indices of the steps in order of runs, shape (k,); None if
      each run is a single step.
    """

    ended: Rows | None
    returns: Floats
    lens: Ints
    eps_id: Ints
    t: Ints
    lengths: Ints | None = None
    order: Rows | None = None

    def number(self) -> tuple[Ints, Ints]:
        """Return the episode id and time of each step as read-only arrays of shape (k,)."""
        if self.lengths is None or self.order is None:
            return self.eps_id, self.t
        eps_id, t = np.empty((2, len(self.order)), np.int64)
        eps_id[self.order] = self.eps_id.repeat(self.lengths)
        starts = self.lengths.cumsum() - self.lengths
        t[self.order] = np.arange(len(t)) - (starts - self.t).repeat(self.lengths)
        return eps_id, t


_NO_RETURNS: Floats = np.empty(0)
_NO_LENS: Ints = np.empty(0, np.int64)
_FIRST_ROW = np.zeros(1, np.intp)


def _zero_unless(keeps: Flags, returns: Floats) -> Floats:
    """Set returns to 0 in rows where `keeps` is false; returns have shape (k,) or (k, agents)."""
    zeroed: Floats = np.where(keeps if returns.ndim == 1 else keeps[:, None], returns, 0.0)
    return zeroed


class EpisodeCount:
    """Counter of episode returns and lengths in n environments; one call can add any number of steps.

    - `ended`: returns and lengths of completed episodes; a recorder clears the list after reading it.

    >>> count = EpisodeCount(2)
    >>> done = np.array([False, True, False, False])
    >>> counted = count.add(
    ...     done, np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 1, 0, 1]), steps=2
    ... )
    >>> counted.returns, counted.number()[1]
    (array([2.]), array([0, 0, 1, 0]))
    >>> count.add(np.array([True, False]), np.array([16.0, 32.0])).returns
    array([21.])
    """

    def __init__(self, num_envs: int) -> None:
        self.ended: list[tuple[Floats, Ints]] = []
        self._t: Ints = np.zeros(num_envs, np.int64)
        self._returns: Floats = np.zeros(num_envs)
        self._eps_id = episode_ids(num_envs)

    def begin(self) -> None:
        """Start an episode in every environment."""
        count = len(self._t)
        self._t = np.zeros(count, np.int64)
        self._returns = np.zeros(count)
        self._eps_id = episode_ids(count)

    def state_dict(self) -> dict[str, Any]:
        """Return unfinished and completed episodes, for `load_state_dict`."""
        under_way = {"t": self._t.copy(), "returns": self._returns.copy(), "eps_id": self._eps_id.copy()}
        return {**under_way, "ended": list(self.ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore episodes from the `state_dict` of a counter with the same number of environments."""
        self._t, self._returns, self._eps_id = (state[name].copy() for name in ("t", "returns", "eps_id"))
        self.ended = list(state["ended"])

    def add(self, done: Flags, rewards: Floats, envs: Rows | None = None, steps: int = 1) -> CountedSteps:
        """Add steps in time order to the returns and lengths of their episodes.

        - `done`: whether each step ended an episode, shape (k,).
        - `rewards`: rewards of each step, shape (k,) or (k, agents).
        - `envs`: environment index of each step, shape (k,); None if the steps are one step per environment, in order
          of the environments.
        - `steps`: maximum number of steps of one environment; if it exceeds 1, `envs` is required.
        """
        if rewards.ndim != self._returns.ndim:
            self._returns = np.zeros((len(self._t), *rewards.shape[1:]))
        if envs is not None and steps > 1:
            return self._add_runs(done, rewards, envs)
        # Returned arrays are never modified.
        if envs is None:
            eps_id, t = self._eps_id, self._t
            self._t, self._returns = t + 1, self._returns + rewards
        else:
            eps_id, t = self._eps_id[envs], self._t[envs]
            self._t, self._returns = self._t.copy(), self._returns.copy()
            self._t[envs] = t + 1
            self._returns[envs] += rewards
        if 1 not in done.tobytes():
            return CountedSteps(None, _NO_RETURNS, _NO_LENS, eps_id, t)
        ended = done.nonzero()[0] if envs is None else envs[done]
        counted = CountedSteps(ended, self._returns[ended], self._t[ended], eps_id, t)
        self.ended.append((counted.returns, counted.lens))
        self._t[ended] = 0
        self._returns[ended] = 0.0
        self._eps_id = self._eps_id.copy()
        self._eps_id[ended] = episode_ids(len(ended))
        return counted

    def _add_runs(self, done: Flags, rewards: Floats, envs: Rows) -> CountedSteps:
        if len(self._t) == 1:
            return self._add_runs_of_one(done, rewards)
        order = by_stream(envs)
        count = len(order)
        envs, done = envs[order], done[order]
        new_env = np.empty(count, np.bool_)
        new_env[0] = True
        np.not_equal(envs[1:], envs[:-1], out=new_env[1:])
        begins = new_env.copy()
        begins[1:] |= done[:-1]
        starts = begins.nonzero()[0]
        stops = np.append(starts[1:], count)
        lengths = stops - starts
        env_of, first = envs[starts], new_env[starts]
        before = np.where(first, self._t[env_of], 0)
        lens = before + lengths
        returns = np.add.reduceat(rewards[order], starts, axis=0) + _zero_unless(first, self._returns[env_of])
        ids = np.where(first, self._eps_id[env_of], episode_ids(len(starts)))

        over = done[stops - 1]
        newest = np.append(first[1:], True)
        env_newest, goes_on = env_of[newest], ~over[newest]
        # Returned arrays are never modified.
        self._t, self._returns, self._eps_id = self._t.copy(), self._returns.copy(), self._eps_id.copy()
        self._t[env_newest] = lens[newest] * goes_on
        self._returns[env_newest] = _zero_unless(goes_on, returns[newest])
        self._eps_id[env_newest] = np.where(goes_on, ids[newest], episode_ids(len(env_newest)))
        if not _count(over):
            return CountedSteps(None, _NO_RETURNS, _NO_LENS, ids, before, lengths, order)
        ended = over.nonzero()[0]
        # In time order.
        ended = ended[order[stops[ended] - 1].argsort()]
        self.ended.append((returns[ended], lens[ended]))
        return CountedSteps(env_of[ended], returns[ended], lens[ended], ids, before, lengths, order)

    def _add_runs_of_one(self, done: Flags, rewards: Floats) -> CountedSteps:
        count = len(done)
        if 1 not in done.tobytes():
            ids, t, order = self._eps_id, self._t, np.arange(count)
            self._t, self._returns = t + count, np.add.reduceat(rewards, _FIRST_ROW, axis=0) + self._returns
            return CountedSteps(None, _NO_RETURNS, _NO_LENS, ids, t, np.array([count]), order)
        ends = done.nonzero()[0]
        closed = len(ends)
        is_open = bool(ends[-1] < count - 1)
        starts = np.zeros(closed + is_open, np.int64)
        starts[1:] = ends[: len(starts) - 1] + 1
        lengths = np.append(starts[1:], count) - starts
        # The first run continues the running episode.
        t, before = np.zeros(len(starts), np.int64), np.zeros((len(starts), *rewards.shape[1:]))
        t[0], before[0] = self._t[0], self._returns[0]
        ids = self._eps_id if len(starts) == 1 else np.append(self._eps_id, episode_ids(len(starts) - 1))
        returns, lens = np.add.reduceat(rewards, starts, axis=0) + before, t + lengths
        # Returned arrays are never modified.
        if is_open:
            self._t, self._returns, self._eps_id = lens[-1:], returns[-1:], ids[-1:]
        else:
            self._t, self._returns, self._eps_id = np.zeros(1, np.int64), np.zeros_like(before[:1]), episode_ids(1)
        counted = returns[:closed], lens[:closed]
        self.ended.append(counted)
        return CountedSteps(np.zeros(closed, np.intp), *counted, ids, t, lengths, np.arange(count))


def episode_ids(count: int) -> Ints:
    """Draw episode ids that are unique across processes and runs, shape (count,).

    Each id has 63 bits from the operating system's random generator.

    >>> ids = episode_ids(1000)
    >>> len(set(ids.tolist())), (ids >= 0).all().item()
    (1000, True)
    """
    return np.frombuffer(os.urandom(8 * count), np.int64) & np.int64((1 << 63) - 1)


Ints = npt.NDArray[np.int64]
Block = Leaf | NestedRows | Sequence[Any]
"""Values of a column in k rows: an array of shape (k, ...), arrays of a nested column, or k values of any type."""

_FIRST = (names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS)
_OBSERVATIONS = (names.OBS, names.NEXT_OBS)
_OBJECT = np.dtype(object)
_ndarray = np.ndarray
_concatenate = np.concatenate


class _EMPTY:
    """Placeholder for an empty info; a class, because copying and pickling preserve the identity of classes."""


_DTYPES = {names.REWARDS: FLOAT, names.TERMINATEDS: BOOL, names.TRUNCATEDS: BOOL, names.EPS_DONE: BOOL}
"""Dtypes of numbers from environments; adapters have checked that the conversion is exact."""


class Streams(NamedTuple):
    """Episode id and stream (environment and agent) of k rows; fields have shape (k,) and are named like columns."""

    eps_id: Ints
    env_id: Ints
    agent_index: Ints


@dataclass(slots=True, eq=False)
class Step:
    """Rows of one policy in one step: one row for each of the policy's k acting agents.

    - `columns`: values of the k rows by column name.
    - `streams`: episode id, environment and agent of each row.
    - `t`: environment steps since the start of the episode, shape (k,).
    - `infos`: one info per row; None if all infos are empty.
    """

    policy_id: PolicyID
    columns: dict[str, Block]
    streams: Streams
    t: Ints
    infos: Sequence[Any] | None = None


class Recorder:
    """Storage of environment steps by policy, from which collectors create batches.

    Rows are appended in order of collection. In a batch, rows are sorted by stream (`env_id` and `agent_index`) and
    time. Values are copied once when rows are concatenated, and once when rows are sorted.

    >>> recorder, zero = Recorder(), np.zeros(2, int)
    >>> for t in range(3):
    ...     streams = Streams(np.array([7, 8]), np.array([0, 1]), zero)
    ...     columns = {"obs": np.array([t, 10 * t]), "rewards": [0.5, t]}
    ...     recorder.append([Step("cat", columns, streams, zero + t)])
    >>> batch = recorder.take()["cat"]
    >>> batch["env_id"].tolist(), batch["obs"].tolist(), batch["rewards"].tolist()
    ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 10, 20], [0.5, 0.5, 0.5, 0.0, 1.0, 2.0])
    """

    def __init__(self, *, infos: bool = True) -> None:
        self._has_infos = infos
        self._policies: dict[PolicyID, _PolicyRows] = {}

    def append(self, steps: Sequence[Step]) -> None:
        """Write steps of different policies.

        Rows of a stream must be in time order. Arrays are referenced, not copied. Shallow copies of infos are stored,
        because environments may reuse the dicts.

        Raises ColumnMismatchError if the names or row shapes of columns differ from the policy's earlier rows, or if a
        column's dtype and its earlier dtype have no lossless common dtype. If an error is raised, no row is appended.
        """
        policies = self._policies
        fitted: list[Mapping[str, Block]] = []
        for step in steps:
            rows = policies.get(step.policy_id)
            fitted.append(step.columns if rows is None else rows.fit(step.columns))
        for step, columns in zip(steps, fitted, strict=True):
            rows = policies.get(step.policy_id)
            if rows is None:
                rows = policies[step.policy_id] = _PolicyRows(columns)
            rows.append(columns, step.streams, step.t, step.infos if self._has_infos else None)

    def take(
        self, constants: Mapping[str, int] | None = None, episodes: RunningStatistics | None = None
    ) -> dict[PolicyID, SampleBatch]:
        """Remove all rows and return them as one batch per policy."""
        policies, self._policies = self._policies, {}
        batches: dict[PolicyID, SampleBatch] = {}
        for policy_id, rows in policies.items():
            batches[policy_id] = rows.gather(constants or {}, infos=self._has_infos)
            if episodes is not None:
                columns = batches[policy_id]._all()
                episodes.add_rows(
                    policy_id,
                    columns[names.EPS_ID].values,
                    columns[names.AGENT_INDEX].values,
                    columns[names.REWARDS].values,
                )
        return batches

    def state_dict(self) -> dict[PolicyID, Any]:
        """Return the current rows, for `load_state_dict`."""
        return copy.deepcopy(self._policies)

    def load_state_dict(self, state: Mapping[PolicyID, Any]) -> None:
        """Restore rows from `state_dict`."""
        self._policies = copy.deepcopy(dict(state))


class _PolicyRows:
    """Rows of one policy.

    The values of a column are stored as one array per step, or as one list over all steps. Python's garbage collector
    would track one list per step, and every tracked object slows down all steps.
    """

    def __init__(self, columns: Mapping[str, Block]) -> None:
        # Single values of a column are collected in one list; arrays are stored one per step.
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
        """Convert columns to the dtypes of earlier rows.

        If an earlier dtype cannot represent the new values, the earlier rows are converted.
        """
        if columns.keys() != self._blocks.keys():
            unmatched = next(iter(columns.keys() ^ self._blocks.keys()))
            raise ColumnMismatchError(
                f"all steps of a collection must have the same columns, got some without {unmatched!r}"
            )
        fitted: dict[str, Block] = {}
        for name, blocks in self._arrays.items():
            if not blocks:
                continue
            block: Any = columns[name]
            first = blocks[0]
            # Native numeric dtypes are singletons in NumPy.
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
        streams = Streams(*map(_concatenate, zip(*self._streams, strict=True)))
        stream = streams.env_id * (int(streams.agent_index.max()) + 1) + streams.agent_index
        # Rows may already be in stream order.
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
        blocks = self._blocks[name]
        if name in self._values:
            joined = np.array(blocks, _DTYPES[name]) if name in _DTYPES else stack_rows(name, blocks)
        elif len(blocks) == 1 and order is not None:
            # Reordering copies the block.
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
            rows: Any = values if order is None else _take(values, order)
            # Observations of one dtype and varying shapes become a ragged column; NumPy stores them as objects.
            is_ragged = values.dtype is _OBJECT and name in _OBSERVATIONS and is_of_arrays(rows)
            columns[leaf] = as_ragged(rows, leaf) if is_ragged else as_column(rows, leaf)

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
    first = blocks[0]
    if any(not isinstance(block, NestedRows) or block.structure != first.structure for block in blocks):
        raise ColumnMismatchError(f"column {name!r} must have the same structure in all steps, got several structures")
    paths = leaf_names(name, first.structure)
    leaves = zip(*[block.leaves for block in blocks], strict=True)
    return NestedRows(first.structure, [join_blocks(path, parts) for path, parts in zip(paths, leaves, strict=True)])


def _is_alike(block: Any, first: Any) -> bool:
    """Return whether two tensors or nested blocks have equal structures, dtypes and row shapes."""
    if is_tensor(block) and is_tensor(first):
        return bool(block.dtype == first.dtype and block.shape[1:] == first.shape[1:])
    if not (isinstance(block, NestedRows) and isinstance(first, NestedRows)) or block.structure != first.structure:
        return False
    pairs = zip(block.leaves, first.leaves, strict=True)
    return all(leaf.dtype == expected.dtype and leaf.shape[1:] == expected.shape[1:] for leaf, expected in pairs)


def _count_rows(block: Leaf | NestedRows) -> int:
    return len(block.leaves[0]) if isinstance(block, NestedRows) else len(block)


def _take(values: Leaf, order: Rows) -> Leaf:
    if type(values) is not _ndarray or values.dtype.hasobject:
        return values[order]
    # Indices are in bounds; with bounds checks, NumPy would gather through a temporary copy.
    return values.take(order, 0, memory.empty((len(order), *values.shape[1:]), values.dtype), "clip")


def rows_of_block(block: Block, rows: Sequence[int] | slice) -> Block:
    """Select rows of a block.

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


EpisodeHook = Callable[[Batch], Mapping[str, Any] | None]
"""Function of the steps of a finished episode, under Tianshou's names. The arrays that it returns by name, with one row
per step, are stored with the steps."""


def call_on_buffer(hook: EpisodeHook, buffer: Any, start: int, last: int, length: int) -> None:
    """Call a hook on an episode in a buffer, and write the returned columns to the buffer."""
    indices = buffer.get_buffer_indices(start, last + 1)[-length:]
    if len(indices) < length:
        indices = _remaining(buffer, last, length)
    for name, values in _results(hook, buffer[indices], len(indices)):
        # Other rows of a new column are NaN, which integers cannot represent.
        is_integer = values.dtype.kind in "iu" and not hasattr(buffer, name)
        buffer.set_array_at_key(values.astype(np.float64) if is_integer else values, name, index=indices)


def _remaining(buffer: Any, last: int, length: int) -> npt.NDArray[np.intp]:
    """Return the indices of an episode's stored rows by following `prev` from its last step."""
    reversed_indices = [last]
    while len(reversed_indices) < length:
        before = int(buffer.prev(np.array([reversed_indices[-1]]))[0])
        if before == reversed_indices[-1] or before == last:
            break
        reversed_indices.append(before)
    return np.array(reversed_indices[::-1])


def call_on_rows(hook: EpisodeHook, batch: SampleBatch) -> None:
    """Call a hook on every episode that ends in a batch, and add the returned columns.

    In rows of all other episodes, a returned column contains False, None or NaN, depending on the dtype.

    For an episode that started in an earlier batch, the hook receives only the episode's rows in the current batch.
    """
    if not len(batch):
        return
    starts = run_starts(np.asarray(batch[names.EPS_ID]))
    stops = np.append(starts[1:], len(batch))
    done = np.asarray(batch[names.DONES])
    rows = batch.as_batch(convention="tianshou")
    rows.done = done
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if done[stop - 1]:
            for name, values in _results(hook, rows[start:stop], stop - start):
                if name not in batch:
                    batch[name] = _blank(values, len(batch))
                batch[name][start:stop] = values


def _results(hook: EpisodeHook, episode: Batch, steps: int) -> list[tuple[str, npt.NDArray[Any]]]:
    columns = []
    for name, values in (hook(episode) or {}).items():
        array = np.asarray(values)
        if not array.ndim or len(array) != steps:
            raise ColumnLengthError(
                f"column {name!r} must have {steps} rows, got {len(array) if array.ndim else 'one'}"
            )
        columns.append((name, array))
    return columns


def _blank(values: npt.NDArray[Any], rows: int) -> npt.NDArray[Any]:
    """Return a column of missing values, which are False, None or NaN, depending on the dtype."""
    kind = values.dtype.kind
    dtype = values.dtype if kind in "fcbO" else np.dtype(np.float64)
    return np.full((rows, *values.shape[1:]), {"b": False, "O": None}.get(kind, np.nan), dtype)


StepHook = Callable[[Batch, Batch], Any]
"""Function of the decision (`act`, `act_normalized`, `policy_entry`, `dist`, `hidden_state`) and the transitions of a
step, as they will be stored; it may add columns to the transitions."""

_NO_INFO: dict[str, Any] = {}


class VectorRecorder:
    """Recorder of steps in n single-agent environments; the steps are returned as a batch or added to a buffer.

    - `recorded`: number of steps recorded since the last `take`.
    - `looks_at_each_step`: whether steps must be recorded one at a time, because a hook processes each step or episode.
    """

    def __init__(
        self,
        env_ids: npt.NDArray[np.int64],
        observations: SpaceLayout,
        actions: SpaceLayout,
        buffer: Any = None,
        *,
        on_step: StepHook | None = None,
        on_episode: EpisodeHook | None = None,
        infos: bool = True,
    ) -> None:
        self._env_ids, self._agent_index = env_ids, np.zeros(len(env_ids), np.int64)
        self._buffer = buffer
        # If rows are added to all rings in order, the buffer does not check ring ids.
        self._all_rings = None if getattr(buffer, "buffer_num", 0) == len(env_ids) else list(range(len(env_ids)))
        self._on_step, self._on_episode = on_step, on_episode
        self._actions = actions
        self._obs_names = frozenset(column_names(names.OBS, observations))
        self._new_names = column_names(names.NEXT_OBS, observations)
        self._outcome_names = (*self._new_names, *OUTCOMES)
        self._layouts = {
            top: layout
            for top, layout in ((names.OBS, observations), (names.NEXT_OBS, observations), (names.ACTIONS, actions))
            if layout.structure is not None
        }
        self._has_infos = infos
        self._rows: _PolicyRows | None = None
        self._episodes = EpisodeCount(len(env_ids))
        self.looks_at_each_step = on_step is not None or (buffer is not None and on_episode is not None)
        self.recorded = 0

    def record_chunk(
        self,
        columns: Sequence[Columns],
        result: StepResult,
        drop: Rows | None,
        act: ActResult | None = None,
    ) -> None:
        """Record steps of all environments."""
        first = columns[0]
        outcomes = zip(self._outcome_names, (*result.new_obs, *result[2:5]), strict=True)
        if result.steps == 1:
            # Buffers and batches copy their arguments, but a hook may write to the arrays.
            data = {**first, **dict(outcomes)}
            if self._on_step is not None:
                data = {name: join_blocks(name, [column]) for name, column in data.items()}
            self.record(data, result.infos, drop=drop, act=act)
            return
        keys = first.keys()
        for step_columns in columns:
            if step_columns.keys() != keys:
                unmatched = next(iter(step_columns.keys() ^ keys))
                raise ColumnMismatchError(
                    f"all steps of a collection must have the same columns, got some without {unmatched!r}"
                )
        data = {}
        for name in first:
            # Adapters return all observations in one shape.
            join = join_steps if name in self._obs_names else join_blocks
            data[name] = join(name, [*map(itemgetter(name), columns)])
        data.update(outcomes)
        self.record(data, result.infos, steps=result.steps, drop=drop, act=act)

    def record(
        self,
        columns: Columns,
        infos: Mapping[int, Infos],
        envs: Rows | None = None,
        *,
        steps: int = 1,
        drop: Rows | None = None,
        act: ActResult | None = None,
    ) -> None:
        """Record rows of steps.

        - `columns`: arrays of shape (k, ...), in order of steps.
        - `infos`: infos of each step by step number; steps without infos may be omitted.
        - `envs`: index of each row's environment, shape (k,); None if every step has one row per environment, in order
          of the environments.
        - `steps`: number of steps; each step has the same number of rows.
        - `drop`: rows to discard; None to keep all rows.
        - `act`: policy output for the rows; required if the recorder was created with `on_step`.
        """
        if not self._has_infos:
            infos = {}
        every = len(self._env_ids)
        count = every if envs is None else len(envs) // steps
        rows = None
        if drop is not None:
            is_kept = np.ones(steps * count, np.bool_)
            is_kept[drop] = False
            rows = is_kept.nonzero()[0]
            if not len(rows):
                return
            columns = {name: take_rows(column, rows) for name, column in columns.items()}
            envs = (self._every_env(steps) if envs is None else envs)[rows]
        elif envs is None and steps > 1:
            envs = self._every_env(steps)
        self.recorded += every if envs is None else len(envs)
        decided = None if self._on_step is None else act
        if self._buffer is None and decided is None:
            self._keep(columns, _info_rows(infos, steps, count, rows) if infos else None, envs, steps)
            return
        new_obs: Any = columns[self._new_names[0]]
        if self._buffer is not None and type(new_obs) is not _ndarray and is_tensor(new_obs):
            columns = {name: to_host(column) for name, column in columns.items()}
        transitions = to_transitions(columns, _infos_of_batch(infos, steps, count, rows))
        before = transitions.__dict__ if self._on_step is None else dict(transitions.__dict__)
        if self._on_step is not None and decided is not None:
            self._on_step(_decision(decided, self._actions, rows), transitions)
        if self._buffer is None:
            columns = _columns_after(columns, before, transitions)
            self._keep(columns, _info_rows(infos, steps, count, rows) if infos else None, envs, steps)
            return
        added = self._buffer.add(transitions, buffer_ids=self._all_rings if envs is None else envs)
        ends, rewards = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS], columns[names.REWARDS]
        counted = self._episodes.add(ends, rewards, envs, steps)
        if self._on_episode is not None and counted.ended is not None:
            self._call_on_ended(self._on_episode, added, envs, counted)

    def _every_env(self, steps: int) -> Rows:
        count = len(self._env_ids)
        if count == 1:
            return np.zeros(steps, np.intp)
        return np.broadcast_to(np.arange(count), (steps, count)).ravel()

    def _keep(self, columns: Columns, infos: list[Any] | None, envs: Rows | None, steps: int) -> None:
        ends, rewards = columns[names.TERMINATEDS] | columns[names.TRUNCATEDS], columns[names.REWARDS]
        counted = self._episodes.add(ends, rewards, envs, steps)
        new_obs: Any = columns[self._new_names[0]]
        if type(new_obs) is not _ndarray and is_tensor(new_obs):
            columns = {name: to_tensor(column, new_obs.device) for name, column in columns.items()}
        blocks: Mapping[str, Block] = dict(columns)
        for top, layout in self._layouts.items():
            leaves = [columns[name] for name in column_names(top, layout)]
            blocks = {name: block for name, block in blocks.items() if name.partition(".")[0] != top}
            blocks = {**blocks, top: NestedRows(layout.structure, leaves)}
        env_id, agent_index = self._env_ids, self._agent_index
        if envs is not None:
            env_id, agent_index = env_id[envs], np.zeros(len(envs), np.int64)
        eps_id, t = (counted.eps_id, counted.t) if counted.order is None else counted.number()
        rows = self._rows
        if rows is None:
            rows = self._rows = _PolicyRows(blocks)
        else:
            blocks = rows.fit(blocks)
        rows.append(blocks, Streams(eps_id, env_id, agent_index), t, infos if self._has_infos else None)

    def _call_on_ended(self, hook: EpisodeHook, added: Any, envs: Rows | None, counted: CountedSteps) -> None:
        ended: Any = counted.ended
        row_of = {env: row for row, env in enumerate(envs.tolist())} if envs is not None else range(len(self._env_ids))
        for env, length in zip(ended.tolist(), counted.lens.tolist(), strict=True):
            row = row_of[env]
            call_on_buffer(hook, self._buffer, int(added[3][row]), int(added[0][row]), length)

    def begin(self) -> None:
        """Start an episode in every environment and abandon unfinished episodes.

        In a buffer, the last step of each unfinished episode is marked as truncated.
        """
        self._episodes.begin()
        if self._buffer is None or not len(self._buffer):
            return
        last = self._buffer.unfinished_index()
        if len(last):
            self._buffer.truncated[last] = True
            self._buffer.done[last] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished episodes, and the steps recorded since the last `take`, for `load_state_dict`."""
        return {
            "episodes": self._episodes.state_dict(),
            "rows": copy.deepcopy(self._rows),
            "recorded": self.recorded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of a recorder with the same number of environments."""
        self._episodes.load_state_dict(state["episodes"])
        self._rows = copy.deepcopy(state["rows"])
        self.recorded = state["recorded"]

    def take(
        self, constants: Mapping[str, int]
    ) -> tuple[SampleBatch | None, npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Remove and return recorded steps (None with a buffer), and returns and lengths of completed episodes."""
        ended, self._episodes.ended, self.recorded = self._episodes.ended, [], 0
        returns, lens = np.empty(0), np.empty(0, np.int64)
        if ended:
            returns, lens = map(np.concatenate, zip(*ended, strict=True))
        if self._buffer is not None:
            return None, returns, lens
        rows, self._rows = self._rows, None
        batch = SampleBatch() if rows is None else rows.gather(constants, infos=self._has_infos)
        if self._on_episode is not None:
            call_on_rows(self._on_episode, batch)
        return batch, returns, lens


def _info_rows(infos: Mapping[int, Infos], steps: int, count: int, selected: Rows | None) -> list[Any]:
    rows: list[Any] = [_NO_INFO] * (steps * count)
    for step, info in infos.items():
        rows[step * count : (step + 1) * count] = infos_to_rows(info, count)
    return rows if selected is None else [rows[row] for row in selected.tolist()]


def _infos_of_batch(infos: Mapping[int, Infos], steps: int, count: int, selected: Rows | None) -> Batch:
    batch = batch_of_steps(infos, steps, count) if infos else node(Batch, {})
    return batch if selected is None or not batch.__dict__ else batch[selected]


def to_transitions(values: Columns, infos: Batch) -> Batch:
    """Build a batch of transitions with Tianshou's column names; nested columns become nested batches.

    >>> to_transitions({"rewards": np.ones(1), "policy.logp": np.zeros(1)}, Batch())
    Batch(
        rew: array([1.]),
        policy: Batch(
                    logp: array([0.]),
                ),
        info: Batch(),
    )
    """
    data: dict[str, Any] = {}
    for name, value in values.items():
        folders, leaf = _nested_place(name)
        folder = data
        for key in folders:
            folder = folder.setdefault(key, node(Batch, {})).__dict__
        folder[leaf] = value
    data["info"] = infos
    return node(Batch, data)


@lru_cache(maxsize=1024)
def _nested_place(name: str) -> tuple[tuple[str, ...], str]:
    """Return a column's path in the transitions: names of nested batches, and the key in the innermost batch."""
    top, *path = name.split(".")
    *folders, leaf = TO_NESTED.get(top, top), *path
    return tuple(folders), leaf


def _columns_after(columns: Columns, before: Mapping[str, Any], transitions: Batch) -> Columns:
    """Return the columns of transitions after a hook call, and reuse the arrays that the hook did not replace."""
    after = {name: value for name, value in transitions.__dict__.items() if name != "info"}
    unchanged = {name for name, value in after.items() if type(value) is _ndarray and value is before.get(name)}
    # The rewards define the length of the batch.
    unchanged.discard("rew")
    same_columns = {TO_FLAT.get(name, name) for name in unchanged}
    changed = as_sample_batch(
        node(Batch, {TO_FLAT.get(name, name): value for name, value in after.items() if name not in unchanged})
    )
    values = {name: column for name, column in columns.items() if name in same_columns}
    for name in changed.column_names:
        value = changed.column(name).values
        values[name] = value if is_tensor(value) else np.asarray(value)
    return values


def _decision(act: ActResult, actions: SpaceLayout, rows: Rows | None) -> Batch:
    decision = act.decision
    batch = node(
        Batch,
        {
            "act": decision["act"],
            "act_normalized": actions.batch(act.actions),
            "policy_entry": Batch(decision.get("policy") or {}),
            "dist": decision.get("dist"),
            "hidden_state": decision.get("state"),
        },
    )
    return batch if rows is None else batch[rows]
