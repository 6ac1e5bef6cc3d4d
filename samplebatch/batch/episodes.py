"""Bounds and row order of the episodes and streams in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.interface import Column
from samplebatch.names import PolicyID

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch

_FLAG_COLUMNS = frozenset({names.DONES, names.TERMINATEDS, names.TRUNCATEDS})
_STREAM_COLUMNS = (names.EPS_ID, names.AGENT_INDEX, names.ENV_ID, names.UNROLL_ID)
"""Columns whose value changes between two rows only if the rows belong to different sequences."""

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]

_FIRST_ROW = np.zeros(1, np.intp)
_FEW_RUNS = 32
"""Maximum number of runs of equal ids for which Python sorts them faster than NumPy."""

_FEW_PER_ROW = 16
"""Maximum number of codes per row of a batch for which codes are counted instead of sorted."""


def run_starts(*keys: npt.NDArray[Any]) -> Rows:
    """Return the first row of every run of equal keys, shape (r,); keys must not be empty.

    >>> run_starts(np.array([7, 7, 7, 8]), np.array([0, 0, 1, 1]))
    array([0, 2, 3])
    """
    changed = keys[0][1:] != keys[0][:-1]
    for key in keys[1:]:
        changed = changed | (key[1:] != key[:-1])
    return np.concatenate((_FIRST_ROW, changed.nonzero()[0] + 1))


class DistinctIds(NamedTuple):
    """Distinct ids, ascending, shape (k,); first row of each id, shape (k,); index of each row's id, shape (n,)."""

    ids: npt.NDArray[Any]
    first: Rows
    inverse: Rows


def distinct_ids(ids: npt.NDArray[Any]) -> DistinctIds:
    """Return the result of `numpy.unique` for ids, shape (n,), n > 0.

    Only the first id of each run of equal ids is sorted.

    >>> distinct_ids(np.array([7, 7, 3, 7]))
    DistinctIds(ids=array([3, 7]), first=array([2, 0]), inverse=array([1, 1, 0, 1]))
    """
    starts = run_starts(ids)
    lengths = np.concatenate((starts[1:], [len(ids)])) - starts
    if len(starts) <= _FEW_RUNS and ids.dtype.kind in "iu":
        # Faster than NumPy's sort and its checks.
        id_of_run = ids[starts].tolist()
        ordered = sorted(set(id_of_run))
        index_of = {episode: index for index, episode in enumerate(ordered)}
        first_runs = np.array([id_of_run.index(episode) for episode in ordered])
        inverse = np.array([index_of[episode] for episode in id_of_run])
        return DistinctIds(np.array(ordered, ids.dtype), starts[first_runs], inverse.repeat(lengths))
    distinct, first, inverse = np.unique(ids[starts], return_index=True, return_inverse=True)
    return DistinctIds(distinct, starts[first], inverse.reshape(-1).repeat(lengths))


def by_stream(*keys: npt.NDArray[Any], t: npt.NDArray[Any] | None = None) -> Rows:
    """Return row indices that group the rows by stream, shape (n,).

    keys: ids that identify streams, shape (n,) each; streams are sorted by the first key, then by the next.
    t: times within a stream, shape (n,). None keeps the order of rows within a stream.

    >>> (
    ...     by_stream(np.array([0, 1, 0, 1])),
    ...     by_stream(np.array([0, 1, 0, 1]), t=np.array([3, 0, 2, 1])),
    ... )
    (array([0, 2, 1, 3]), array([2, 0, 1, 3]))
    """
    if t is None and len(keys) == 1:
        (key,) = keys
        if len(key) and key.dtype.kind in "iu" and key.min() >= 0 and key.max() < 1 << 16:
            # NumPy sorts short integers by radix, in linear time.
            key = key.astype(np.uint16)
        return key.argsort(kind="stable")
    return np.lexsort([*([] if t is None else [t]), *reversed(keys)])


class StepNumbers(NamedTuple):
    """Environment step number of each row, and episode number of each environment step.

    step: number of each row's environment step, shape (n,).
    episode: number of each environment step's episode, shape (s,), ascending.
    """

    step: Ints
    episode: Ints


def number_env_steps(eps_id: npt.NDArray[Any], t: npt.NDArray[Any]) -> StepNumbers:
    """Number the environment steps of rows, which are the distinct pairs of `eps_id` and `t`.

    Both arrays have shape (n,) with n > 0. Episodes are numbered from 0 in ascending order of `eps_id`.

    >>> number_env_steps(np.array([7, 7, 5, 7]), np.array([0, 1, 0, 0]))
    StepNumbers(step=array([1, 2, 0, 1]), episode=array([0, 1, 1]))
    """
    return number_coded_steps(distinct_ids(eps_id).inverse, t)


def number_coded_steps(episodes: npt.NDArray[np.intp], t: npt.NDArray[Any]) -> StepNumbers:
    """Number environment steps by episode number (from 0) and time; see `number_env_steps`.

    >>> number_coded_steps(np.array([1, 1, 0, 1]), np.array([0, 1, 0, 0]))
    StepNumbers(step=array([1, 2, 0, 1]), episode=array([0, 1, 1]))
    """
    if t.dtype.kind in "iu" and int(t.max()) - int(t.min()) < _FEW_PER_ROW * len(t):
        times = (t - t.min()).astype(np.int64)
    else:
        times = np.unique(t, return_inverse=True)[1].reshape(-1)
    width = int(times.max()) + 1
    # Two codes below a few times the number of rows make one that fits 64 bits for any batch that fits in memory.
    codes = episodes * width + times
    size = (int(episodes.max()) + 1) * width
    if size > _FEW_PER_ROW * len(t):
        keys, step = np.unique(codes, return_inverse=True)
        return StepNumbers(step.reshape(-1), keys // width)
    # Few codes are counted faster than sorted.
    is_step = np.zeros(size, np.bool_)
    is_step[codes] = True
    return StepNumbers((is_step.cumsum() - 1)[codes], is_step.nonzero()[0] // width)


def order_streams(policies: Mapping[PolicyID, SampleBatch]) -> dict[PolicyID, SampleBatch]:
    """Sort each policy's rows by episode, agent and time, and number episodes by first occurrence.

    Episode ids are random, so two trainings with the same seed would differ if rows were sorted by episode id.

    policies: batches with the columns `eps_id`, `agent_index` and `t`; batches without rows are omitted.

    >>> from samplebatch import SampleBatch
    >>> steps = SampleBatch(eps_id=[9, 9, 4], agent_index=[0, 0, 0], t=[1, 0, 0])
    >>> ordered = order_streams({"walker": steps})["walker"]
    >>> ordered["eps_id"], ordered["t"]
    (array([0, 0, 1]), array([0, 1, 0]))
    """
    nonempty = {policy_id: rows for policy_id, rows in policies.items() if rows.count}
    eps_id = np.concatenate([rows[names.EPS_ID] for rows in nonempty.values()])
    _, first, of_row = distinct_ids(eps_id)
    numbers, ordered = first.argsort().argsort()[of_row], {}
    for policy_id, rows in nonempty.items():
        episodes, numbers = numbers[: rows.count], numbers[rows.count :]
        order = by_stream(episodes, rows[names.AGENT_INDEX], t=rows[names.T])
        ordered[policy_id] = rows.take(order)
        ordered[policy_id][names.EPS_ID] = episodes[order]
    return ordered


def ends_by_change(ids: npt.NDArray[Any]) -> list[int]:
    """Return the row after the end of each episode; episodes are runs of equal ids.

    >>> ends_by_change(np.array([7, 7, 3]))
    [2, 3]
    """
    if not len(ids):
        return []
    return [*run_starts(ids)[1:].tolist(), len(ids)]


def ends_by_flag(flags: npt.NDArray[Any]) -> list[int]:
    """Return the row after the end of each episode: a true flag ends an episode.

    The last episode may be unfinished.

    >>> ends_by_flag(np.array([0, 0, 1, 0, 0]))
    [3, 5]
    """
    ends: list[int] = (np.flatnonzero(flags) + 1).tolist()
    if len(flags) and (not ends or ends[-1] < len(flags)):
        ends.append(len(flags))
    return ends


class EpisodeEnds(NamedTuple):
    """Episode ids, shape (k,), ascending, and whether each episode is finished."""

    ids: npt.NDArray[Any]
    finished: npt.NDArray[np.bool_]


def episode_ends(policies: Mapping[PolicyID, SampleBatch]) -> EpisodeEnds | None:
    """Return which episodes are finished.

    An episode is finished if `eps_done` marks one of its steps. Without a column `eps_done`, an episode is finished if
    every agent that acts in the episode's last step is terminated or truncated.

    policies: batches with the columns `eps_id` and `eps_done`; or `eps_id`, `t`, and `terminateds` and `truncateds` (or
        `dones`). Rows may be in any order; a single batch in time order needs no `t`.

    Returns: ids and whether each episode is finished; None if a batch lacks a required column.

    >>> from samplebatch import SampleBatch
    >>> steps = SampleBatch(eps_id=[7, 7, 8], t=[0, 1, 0], dones=[False, True, False])
    >>> episode_ends({"walker": steps})
    EpisodeEnds(ids=array([7, 8]), finished=array([ True, False]))
    """
    batches = [steps for steps in policies.values() if steps.count]
    if not batches:
        return EpisodeEnds(np.empty(0, np.int64), np.empty(0, np.bool_))
    flags = _end_flags(batches)
    if flags is None:
        return None
    eps_id = np.concatenate([np.asarray(steps[names.EPS_ID]) for steps in batches])
    done, marked = flags
    if marked:
        ids, _, episode = distinct_ids(eps_id)
        finished = np.zeros(len(ids), np.bool_)
        finished[episode[done]] = True
        return EpisodeEnds(ids, finished)
    t = np.concatenate(
        [np.asarray(steps[names.T]) if names.T in steps else np.arange(len(eps_id)) for steps in batches]
    )
    order = by_stream(eps_id, t=t)
    eps_id, t, done = eps_id[order], t[order], done[order]
    starts = run_starts(eps_id)
    stops = np.append(starts[1:], len(eps_id))
    last = np.repeat(t[stops - 1], stops - starts)
    return EpisodeEnds(eps_id[starts], np.logical_and.reduceat(done | (t < last), starts))


def finished_by_number(policies: Mapping[PolicyID, SampleBatch], numbers: StepNumbers) -> npt.NDArray[np.bool_] | None:
    """Return whether each episode is finished, without sorting the rows; the rows' environment steps are numbered.

    policies: batches with the columns that `episode_ends` requires.
    numbers: environment steps of all rows, policy by policy.

    Returns: whether each episode is finished, by episode number.

    >>> from samplebatch import SampleBatch
    >>> steps = SampleBatch(eps_id=[7, 7, 3], t=[0, 1, 0], dones=[False, True, False])
    >>> finished_by_number({"walker": steps}, StepNumbers(np.arange(3), np.array([0, 0, 1])))
    array([ True, False])
    """
    flags = _end_flags([steps for steps in policies.values() if steps.count])
    if flags is None:
        return None
    (done, marked), (step, episode) = flags, numbers
    finished = np.zeros(int(episode[-1]) + 1, np.bool_)
    if marked:
        finished[episode[step[done]]] = True
        return finished
    is_last = np.append(episode[1:] != episode[:-1], True)
    finished[:] = True
    finished[episode[step[is_last[step] & ~done]]] = False
    return finished


def _end_flags(batches: Sequence[SampleBatch]) -> tuple[npt.NDArray[np.bool_], bool] | None:
    """Concatenate `eps_done`, or else `dones`, of non-empty batches; the second item is whether `eps_done` was used.

    Returns None if a batch has no column that `episode_ends` requires.
    """
    if not all(names.EPS_ID in steps for steps in batches):
        return None
    marks = join_column(batches, names.EPS_DONE)
    if marks is not None:
        return marks.astype(np.bool_), True
    if len(batches) > 1 and not all(names.T in steps for steps in batches):
        return None
    terminated, truncated = (join_column(batches, name) for name in (names.TERMINATEDS, names.TRUNCATEDS))
    if terminated is not None and truncated is not None and not any(names.DONES in steps for steps in batches):
        done: npt.NDArray[np.bool_] = (terminated != 0) | (truncated != 0)
        return done, False
    if not all(names.DONES in steps or (names.TERMINATEDS in steps and names.TRUNCATEDS in steps) for steps in batches):
        return None
    return np.concatenate([np.asarray(steps[names.DONES]) for steps in batches]).astype(np.bool_), False


def join_column(batches: Sequence[SampleBatch], name: str) -> npt.NDArray[Any] | None:
    """Concatenate a column of several batches; return None if a batch lacks the column."""
    values: list[npt.NDArray[Any]] = []
    for steps in batches:
        if name not in steps:
            return None
        values.append(np.asarray(steps[name]))
    return np.concatenate(values)


def derive_dones(batch: SampleBatch[Any]) -> Any:
    """Combine `terminateds` and `truncateds` of a batch by logical or; return None if the batch has neither column."""
    flags = [batch[name] for name in (names.TERMINATEDS, names.TRUNCATEDS) if name in batch]
    if len(flags) < 2:
        return flags[0] if flags else None
    terminated, truncated = flags if type(flags[0]) is type(flags[1]) else map(np.asarray, flags)
    return (terminated != 0) | (truncated != 0)


def stops_by(key: str | None, batch: SampleBatch[Any]) -> list[int]:
    """Return the row after each episode's end, determined from column `key`; default: `eps_id`, or else `dones`."""
    if key is None:
        key = names.EPS_ID if names.EPS_ID in batch else names.DONES
    values = np.asarray(batch[key])
    return ends_by_flag(values) if key in _FLAG_COLUMNS else ends_by_change(values)


def stream_starts(batch: SampleBatch[Any]) -> Rows:
    """Return the rows that do not continue the previous row's stream, shape (k,)."""
    keys = [np.asarray(batch[name]) for name in _STREAM_COLUMNS if name in batch]
    if names.T in batch:
        keys.append(np.asarray(batch[names.T]) - np.arange(batch.count))
    if names.EPS_ID not in batch:
        done = batch.get(names.DONES)
        if done is not None:
            keys.append(np.append(0, np.cumsum(np.asarray(done) != 0)[:-1]))
    return run_starts(*keys) if keys else np.zeros(1, np.intp)


def ends_in(columns: Mapping[str, Column]) -> Rows:
    """Return the row after each episode's end; empty if no column marks episodes. Columns have one row per step."""
    if names.EPS_ID in columns:
        return np.asarray(ends_by_change(np.asarray(columns[names.EPS_ID].to_numpy())), np.intp)
    flags = [columns[name].to_numpy() for name in sorted(_FLAG_COLUMNS) if name in columns]
    return np.asarray(ends_by_flag(np.logical_or.reduce(flags)) if flags else [], np.intp)
