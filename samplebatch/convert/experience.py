"""Intermediate format of all conversions: steps from any source, grouped by episode.

Sources are batches, buffers, fragments, and paths of datasets or Parquet files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import errors, names
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.concat import concat_samples, join
from samplebatch.batch.episodes import by_stream, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.sequences import rowwise
from samplebatch.batch.tree import select
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.sequences import find_episodes
from samplebatch.buffer.writing import drop_empty
from samplebatch.column.casting import as_flags
from samplebatch.column.memory import MemoryBound
from samplebatch.column.varying_rows import VaryingRows
from samplebatch.storage.datasets.commit_log import CommitLog
from samplebatch.storage.datasets.dataset import Dataset
from samplebatch.storage.tables.parquet import open_parquet

Flags = npt.NDArray[np.bool_]
Source = SampleBatch | MultiAgentBatch | Batch | ReplayBuffer | Mapping[str, Any] | Iterable[Any]
"""Experience that can be converted: a batch, a buffer, columns by name, or an iterable of fragments."""


class Steps(NamedTuple):
    """Steps to convert, grouped by episode and in time order within an episode.

    An episode is a trajectory of one agent: steps with the same `eps_id`, `env_id` and `agent_index`.

    - `batch`: the rows, with RLlib's column names.
    - `bounds`: first row of each episode, followed by the number of rows, shape (k + 1,).
    """

    batch: SampleBatch
    bounds: npt.NDArray[np.intp]

    def episodes(self) -> Iterator[SampleBatch]:
        """Yield the rows of each episode, as a view."""
        for start, stop in zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True):
            yield self.batch.slice(start, stop)

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the index of each row's episode, shape (n,)."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    def times(self) -> npt.NDArray[np.int64]:
        """Return the offset of each row within its episode, shape (n,)."""
        return np.arange(self.batch.count) - np.repeat(self.bounds[:-1], np.diff(self.bounds))


def as_steps(source: Source) -> Steps:
    """Return the steps of a source, grouped by episode, without padding, with actions in environment units.

    Rows that are already grouped and ordered are not copied. Actions in the policy's unit are converted to the
    environment's unit. Without `eps_id`, flags delimit the episodes.

    Raises ColumnNotFoundError if neither `eps_id` nor flags delimit episodes. Raises ColumnTypeError if a
    MultiAgentBatch has several policies, or the source has an unsupported type. Raises ColumnMismatchError if actions
    were mapped by a function, because the function is not recorded. Raises SequenceError if rows are time-major, or
    steps of an episode are missing. Raises EmptyBufferError if there are no steps.
    """
    batch, bounds = steps_as_recorded(source)
    return Steps(batch.to_environment_actions(), bounds)


def steps_as_recorded(source: Source) -> Steps:
    """Return the steps of a source as in `as_steps`, but with actions as recorded."""
    batch = _flat(source)
    streams = [np.asarray(batch[name]) for name in (names.ENV_ID, names.AGENT_INDEX) if name in batch]
    if names.EPS_ID in batch:
        keys = [np.asarray(batch[names.EPS_ID]), *streams]
    else:
        if streams and np.any((stream := _number_in_order(streams))[1:] < stream[:-1]):
            order = by_stream(stream)
            batch, streams = batch.take(order), [key[order] for key in streams]
        done = np.logical_or(*flags_of(batch))
        keys = [np.cumsum(done) - done, *streams]
    number = _number_in_order(keys)
    t = np.asarray(batch[names.T]) if names.T in batch else None
    if np.any(number[1:] < number[:-1]) or (t is not None and np.any((number[1:] == number[:-1]) & (t[1:] < t[:-1]))):
        order = by_stream(number, t=t)
        batch, number, t = batch.take(order), number[order], None if t is None else t[order]
    if t is not None and np.any(gaps := (number[1:] == number[:-1]) & (t[1:] != t[:-1] + 1)):
        before = int(gaps.argmax())
        raise errors.SequenceError(
            f"column {names.T!r} must count the steps of each episode one by one, got {t[before + 1]} after {t[before]}"
        )
    return Steps(batch, np.append(run_starts(number), batch.count))


def _number_in_order(keys: list[npt.NDArray[Any]]) -> npt.NDArray[np.intp]:
    """Return a group number per row, shape (n,): rows with equal keys form a group, numbered by first appearance."""
    starts = run_starts(*keys)
    code = np.zeros(len(starts), np.intp)
    for key in keys:
        key_code = np.unique(key[starts], return_inverse=True)[1].reshape(-1)
        # Numbered again after each key, so that codes stay below the square of the number of runs.
        code = np.unique(code * len(starts) + key_code, return_inverse=True)[1].reshape(-1)
    first, run = np.unique(code, return_index=True, return_inverse=True)[1:]
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.repeat(rank[run.reshape(-1)], np.diff(np.append(starts, len(keys[0]))))


def _steps_in(buffer: ReplayBuffer) -> SampleBatch:
    """Return the steps of a buffer, grouped by episode, with `eps_id` and, for several rings, `env_id`."""
    table = buffer._table
    with table.lock:
        if not len(buffer):
            return SampleBatch()
        episodes = find_episodes(table.rings, table.done, buffer._ring)
        slots, bounds = episodes.slots(table.rings, np.arange(len(episodes.first)))
        rows = drop_empty(rows_at(table, slots, 1))
    batch = node(Batch, rows).as_sample_batch("rllib")
    batch.action_unit = buffer.action_unit
    batch[names.EPS_ID] = np.repeat(np.arange(len(episodes.first)), np.diff(bounds))
    if table.rings.n > 1 and names.ENV_ID not in batch:
        batch[names.ENV_ID] = table.rings.ring_of(slots)
    return batch


def as_flat(source: Source) -> SampleBatch:
    """Return the steps of a source in stored order, with RLlib's column names, without padding.

    Actions are in environment units. Raises the same errors as `as_steps`.
    """
    return _flat(source).to_environment_actions()


def _flat(source: Source) -> SampleBatch:
    batch = _without_sequences(_steps_in(source) if isinstance(source, ReplayBuffer) else _join(source))
    if not batch.count:
        raise errors.EmptyBufferError("experience must contain steps, got none")
    return batch


def fragments_of(source: Source) -> Iterator[SampleBatch | MultiAgentBatch]:
    """Yield the fragments of an iterable, or a single source, as batches of steps.

    A MultiAgentBatch is yielded unchanged and may have any number of policies. Raises the same errors as `as_flat`.
    """
    single = isinstance(source, MultiAgentBatch | ReplayBuffer) or values_of(source) is not None
    for part in [source] if single or not isinstance(source, Iterable) else source:
        yield part if isinstance(part, MultiAgentBatch) else as_flat(part)


def _join(source: Any) -> SampleBatch:
    if isinstance(source, SampleBatch):
        return source
    if isinstance(source, Batch):
        return source.as_sample_batch("rllib")
    if isinstance(source, MultiAgentBatch):
        if len(source.policy_batches) != 1:
            listed = ", ".join(map(repr, source.policy_batches)) or "none"
            raise errors.ColumnTypeError(
                f"experience must contain steps of one policy, got {listed}; convert each policy separately"
            )
        return next(iter(source.policy_batches.values()))
    if values_of(source) is not None:
        return SampleBatch(source)
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        joined = concat_samples([_join(part) for part in source])
        assert isinstance(joined, SampleBatch)
        return joined
    raise errors.ColumnTypeError(
        f"experience must be a batch, a buffer or columns by name, got a {type(source).__name__}"
    )


def _without_sequences(batch: SampleBatch) -> SampleBatch:
    if names.SEQ_LENS not in batch:
        return batch
    if batch.time_major:
        raise errors.SequenceError(
            "experience must be batch-major, got a time-major batch; call to_batch_major() first"
        )
    columns = {name: column for name, column in rowwise(batch).items() if not names.is_per_sequence(name)}
    flags = replace(batch._flags, zero_padded=False, max_seq_len=None, per_sequence=())
    return batch._of(columns, select(batch._nested, columns), flags)


def flags_of(batch: SampleBatch) -> tuple[Flags, Flags]:
    """Return the termination flags and the truncation flags of all steps, shape (n,) each."""
    end_flags = names.TERMINATEDS if names.TERMINATEDS in batch else names.DONES
    require_columns(batch, names.TERMINATEDS if end_flags not in batch else end_flags)
    truncated = np.asarray(batch[names.TRUNCATEDS]) if names.TRUNCATEDS in batch else np.zeros(batch.count, np.bool_)
    return as_flags(np.asarray(batch[end_flags]), end_flags), as_flags(truncated, names.TRUNCATEDS)


def require_columns(batch: SampleBatch, *required: str) -> None:
    """Raise ColumnNotFoundError, which suggests similar names, if a column is missing."""
    for name in required:
        if name not in batch:
            raise errors.ColumnNotFoundError(
                f"column {name!r} must exist to be converted; {errors.near_names(name, batch.column_names)}"
            )


def arrays_of(batch: SampleBatch, name: str) -> Any:
    """Return a column as an array or a tree of arrays, without a copy if possible; reject rows of varying shape."""
    return map_leaves(lambda path, _: _array_of(batch, path), batch[name], name)


def _array_of(batch: SampleBatch, path: str) -> npt.NDArray[Any]:
    column = batch.column(path)
    if isinstance(column, VaryingRows):
        raise errors.ColumnTypeError(
            f"column {path!r} must have rows of equal shape to be converted, got several shapes; pad it first"
        )
    return column.to_numpy()


def observations_of(episode: SampleBatch) -> Any:
    """Return the observations of an episode, including the final observation: arrays of shape (n + 1, ...).

    The observations are copied, unless `obs` and `new_obs` are views of the same array, as in the result of
    `make_episode`.
    """
    require_columns(episode, names.OBS, names.NEXT_OBS)
    return map_leaves(
        lambda path, _: _with_final(_array_of(episode, names.OBS + path), _array_of(episode, names.NEXT_OBS + path)),
        episode[names.OBS],
        "",
    )


def _with_final(obs: npt.NDArray[Any], following: npt.NDArray[Any]) -> npt.NDArray[Any]:
    alike = obs.dtype == following.dtype and obs.strides == following.strides and obs.dtype.kind != "O"
    if alike and obs.shape == following.shape and following.ctypes.data == obs.ctypes.data + obs.strides[0]:
        # Both are views of one array, offset by one row.
        return np.lib.stride_tricks.as_strided(obs, (len(obs) + 1, *obs.shape[1:]), obs.strides)
    return np.concatenate([obs, following[-1:]])


def make_episode(
    number: int,
    observations: Any,
    columns: Mapping[str, Any],
    *,
    terminated: bool,
    truncated: bool,
    action_unit: ActionUnit | None = None,
) -> SampleBatch:
    """Create the batch of an episode; `obs` and `new_obs` are views of the same array.

    - `number`: `eps_id` of the episode.
    - `observations`: arrays of shape (n + 1, ...), or a tree of arrays, including the final observation.
    - `columns`: other columns of the n steps.
    - `terminated`, `truncated`: whether the last step terminates the episode, and whether it truncates the episode.
    - `action_unit`: unit of the actions.

    Raises ColumnLengthError if columns have different lengths.
    """
    batch = SampleBatch(
        {
            names.OBS: map_leaves(lambda _, leaf: leaf[:-1], observations, ""),
            names.NEXT_OBS: map_leaves(lambda _, leaf: leaf[1:], observations, ""),
            **columns,
        }
    )
    ends = np.arange(batch.count) == batch.count - 1
    batch[names.TERMINATEDS], batch[names.TRUNCATEDS] = ends & terminated, ends & truncated
    batch[names.EPS_ID], batch[names.T] = np.full(batch.count, number), np.arange(batch.count)
    batch.action_unit = action_unit
    return batch


def number_episodes(done: Flags) -> dict[str, npt.NDArray[np.int64]]:
    """Return `eps_id` and `t` of steps, shape (n,) each; `done` marks the last step of each episode.

    >>> number_episodes(np.array([False, True, False]))
    {'eps_id': array([0, 0, 1]), 't': array([0, 1, 0])}
    """
    number: npt.NDArray[np.int64] = np.cumsum(done) - done
    if not len(done):
        return {names.EPS_ID: number, names.T: number}
    starts = run_starts(number)
    return {names.EPS_ID: number, names.T: np.arange(len(done)) - starts[number]}


def join_episodes(episodes: list[SampleBatch]) -> SampleBatch:
    """Concatenate episodes with one copy; return a single episode unchanged."""
    return episodes[0] if len(episodes) == 1 else join(episodes)


def stack_steps(steps: list[Any], path: str) -> Any:
    """Stack one value or tree per step into one array or a tree of arrays.

    Raises ColumnMismatchError if steps have different structures. Raises ColumnTypeError if steps have different
    shapes.

    >>> stack_steps([{"x": 1.0, "arm": (2, 3)}, {"x": 4.0, "arm": (5, 6)}], "obs")
    {'x': array([1., 4.]), 'arm': (array([2, 5]), array([3, 6]))}
    """
    return map_leaves(_stack_leaf, gather_leaves(steps, path), path)


def _stack_leaf(path: str, rows: list[Any]) -> npt.NDArray[Any]:
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise errors.ColumnTypeError(
            f"column {path!r} must have rows of equal shape to be converted, got several shapes"
        ) from error


def gather_leaves(steps: list[Any], path: str) -> Any:
    """Convert a list of trees, one per step, to a tree of lists with one value per step.

    >>> gather_leaves([{"x": 1.0, "arm": (2, 3)}, {"x": 4.0, "arm": (5, 6)}], "obs")
    {'x': [1.0, 4.0], 'arm': ([2, 5], [3, 6])}
    """
    first = steps[0] if steps else None
    if isinstance(first, Mapping):
        is_alike = [isinstance(step, Mapping) and step.keys() == first.keys() for step in steps]
        if all(is_alike):
            return {key: gather_leaves([step[key] for step in steps], f"{path}.{key}") for key in first}
    elif isinstance(first, tuple):
        is_alike = [isinstance(step, tuple) and len(step) == len(first) for step in steps]
        if all(is_alike):
            return tuple(gather_leaves([step[i] for step in steps], f"{path}.{i}") for i in range(len(first)))
    else:
        return steps
    raise errors.ColumnMismatchError(
        f"column {path!r} must have the same structure in all rows, got another in row {is_alike.index(False)}"
    )


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str) -> Any:
    """Apply a function to the dotted name and the value of each leaf of nested dicts and tuples.

    >>> map_leaves(lambda path, leaf: f"{path}={leaf}", {"x": 1, "arm": (2, 3)}, "obs")
    {'x': 'obs.x=1', 'arm': ('obs.arm.0=2', 'obs.arm.1=3')}
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, item, f"{path}.{key}") for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, item, f"{path}.{i}") for i, item in enumerate(tree))
    return function(path, tree)


def open_source(source: Any) -> Any:
    """Open a path as a dataset or buffer; other sources are returned unchanged.

    - `source`: path of a dataset folder, or of another library's Parquet files with RLlib's or Tianshou's column names.
      The rows of Parquet files are loaded into a replay buffer. A replay buffer, `Dataset` or `MixedSampler` is
      returned unchanged.

    Raises ArgumentError if the source is neither a path nor an object with `sample`. Raises FormatError if a folder has
    no Parquet files, or a file is damaged. Raises the same errors as `ReplayBuffer.extend` if the rows cannot be added.
    Raises OSError if the path does not exist, or a file cannot be read.

    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> folder = tempfile.mkdtemp() + "/steps"
    >>> path = Dataset(folder).extend(SampleBatch(obs=[0.0, 1.0], actions=[0, 1]))
    >>> len(open_source(folder))
    2
    """
    if not isinstance(source, str | os.PathLike):
        if not callable(getattr(source, "sample", None)):
            raise errors.ArgumentError(f"source must be a buffer, a dataset or a path, got a {type(source).__name__}")
        return source
    if CommitLog(Path(source)).path is not None:
        return Dataset(source)
    tables = [table for table, _ in read_tables(source)]
    buffer = ReplayBuffer(sum(map(len, tables)))
    for table in tables:
        buffer.extend(table)
    return buffer


def read_tables(path: str | os.PathLike[str], max_nbytes: int | None = None) -> Iterator[tuple[pa.Table, MemoryBound]]:
    """Yield the table and memory bound of a Parquet file, or of each Parquet file below a folder, sorted by name."""
    for file_path in files_in(path, ".parquet"):
        file, bound = open_parquet(file_path, max_nbytes=max_nbytes)
        names = file.schema.names
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise errors.FormatError(f"{str(file_path)!r} must contain column {duplicate!r} only once, got a duplicate")
        table = file.read(range(file.num_groups), names, bound)
        try:
            table.validate(full=True)
        except pa.ArrowInvalid as error:
            raise errors.FormatError(f"{str(file_path)!r} must contain valid values: {error}") from error
        yield table, bound


def files_in(path: str | os.PathLike[str], suffix: str) -> list[Path]:
    """List a single file, or all files with a suffix below a folder, sorted by path.

    Raises FormatError if a folder has no file with the suffix.
    """
    root = Path(path)
    if not root.is_dir():
        root.stat()
        return [root]
    files = sorted(file for file in root.rglob(f"*{suffix}") if file.is_file())
    if not files:
        raise errors.FormatError(f"{str(root)!r} must be a folder with {suffix} files, got none")
    return files
