"""Conversion of RLDS episodes: dicts of steps in which the last step contains only the final observation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ENVIRONMENT
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert import experience
from samplebatch.errors import ColumnLengthError, ColumnNotFoundError, ColumnTypeError, near_names

_NAMES = names.PEERS["rlds"]
_TO_FLAT = {theirs: name for name, theirs in _NAMES.items()}
_STEPS, _FIRST, _LAST, _TERMINAL = "steps", "is_first", "is_last", _NAMES[names.TERMINATEDS]
_REQUIRED = (_NAMES[names.OBS], _NAMES[names.ACTIONS], _LAST, _TERMINAL)


def from_rlds(episodes: Iterable[Mapping[str, Any]]) -> SampleBatch:
    """Return the steps of RLDS episodes; a single episode of arrays is not copied.

    An RLDS episode of n transitions has n + 1 steps. All entries of the last step except the observation are ignored.

    Parameters
    ----------
    episodes
        Dicts whose entry `"steps"` is an iterable of one dict per step, or a single dict of arrays. Steps have the
        entries `observation`, `action`, `is_last` and `is_terminal`; further entries, such as `reward` and `discount`,
        are also read.

    Raises
    ------
    ColumnNotFoundError
        If a required entry is missing.
    ColumnTypeError
        If there is no episode, an episode is not a dict with steps, or the values of an entry have different shapes.
    ColumnLengthError
        If an episode has no steps, or its entries have different lengths.
    ColumnMismatchError
        If the steps of an episode have different entries.

    Examples
    --------
    >>> steps = {
    ...     "observation": np.arange(3.0),
    ...     "action": np.array([1, 0, 0]),
    ...     "reward": np.array([0.5, 1.0, 0.0]),
    ...     "is_last": np.array([False, False, True]),
    ...     "is_terminal": np.array([False, False, True]),
    ... }
    >>> batch = from_rlds([{"steps": steps}])
    >>> batch["new_obs"].tolist(), batch["terminateds"].tolist()
    ([1.0, 2.0], [False, True])
    """
    batches = [_episode_of(number, episode) for number, episode in enumerate(episodes)]
    if not batches:
        raise ColumnTypeError("episodes must contain at least one RLDS episode, got none")
    return experience.join_episodes(batches)


def _episode_of(number: int, episode: Any) -> SampleBatch:
    if not isinstance(episode, Mapping) or _STEPS not in episode:
        raise ColumnTypeError(
            f"episode {number} of RLDS must be a dict with {_STEPS!r}, got a {type(episode).__name__}"
        )
    steps = episode[_STEPS]
    if not isinstance(steps, Mapping):
        rows = list(steps)
        steps = experience.stack_steps(rows, _STEPS) if rows else dict.fromkeys(_REQUIRED, rows)
    for name in _REQUIRED:
        if name not in steps:
            raise ColumnNotFoundError(f"episode {number} of RLDS must have {name!r}; {near_names(name, steps)}")
    n = len(steps[_LAST])
    if not n:
        raise ColumnLengthError(f"episode {number} of RLDS must have steps, got none")
    terminal, last = bool(steps[_TERMINAL][-1]), bool(steps[_LAST][-1])
    columns = {
        _TO_FLAT.get(name, name): experience.map_leaves(lambda _, leaf: leaf[:-1], values, name)
        for name, values in steps.items()
        if name not in (_FIRST, _LAST, _TERMINAL, _NAMES[names.OBS])
    }
    observations = steps[_NAMES[names.OBS]]
    ends = {"terminated": terminal, "truncated": last and not terminal}
    return experience.make_episode(number, observations, columns, **ends, action_unit=ENVIRONMENT)


def to_rlds(source: experience.Source) -> Iterator[dict[str, Any]]:
    """Yield RLDS episodes: dicts whose entry `"steps"` is a dict of arrays, with one more step than transitions.

    Convert the steps with `tf.data.Dataset.from_tensor_slices(episode["steps"])`. All values of the last step are zero,
    except the observation and the flags. The last step of an unfinished episode is not terminal.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnNotFoundError, ColumnTypeError
        If a column is missing, or has rows of varying shape.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are no steps.
    """
    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, names.OBS, names.NEXT_OBS, names.ACTIONS, names.REWARDS)
    for episode in steps.episodes():
        yield {_STEPS: _steps_of(episode)}


_LEFT_OUT = frozenset(
    (names.OBS, names.NEXT_OBS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES, names.EPS_ID, names.T)
)


def _steps_of(episode: SampleBatch) -> dict[str, Any]:
    terminated, _ = experience.flags_of(episode)
    step_index = np.arange(episode.count + 1)
    columns = {
        _NAMES.get(name, name): experience.map_leaves(_with_zeros, experience.arrays_of(episode, name), name)
        for name in episode
        if name not in _LEFT_OUT
    }
    return {
        _NAMES[names.OBS]: experience.observations_of(episode),
        **columns,
        _NAMES[names.DISCOUNT]: columns.get(_NAMES[names.DISCOUNT], _with_zeros("", (~terminated).astype(np.float32))),
        _FIRST: step_index == 0,
        _LAST: step_index == episode.count,
        _TERMINAL: (step_index == episode.count) & bool(terminated[-1]),
    }


def _with_zeros(path: str, values: Any) -> Any:
    return np.concatenate([values, np.zeros_like(values[:1])])
