"""Checks of batches of steps from any environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.concat import join
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import SampleBatchError
from samplebatch.rollout.postprocessing import Trajectory

DTYPES = {
    names.REWARDS: np.float64,
    names.TERMINATEDS: np.bool_,
    names.TRUNCATEDS: np.bool_,
    names.INFOS: np.object_,
    names.EPS_ID: np.int64,
    names.ENV_ID: np.int64,
    names.AGENT_INDEX: np.int64,
    names.T: np.int64,
    names.UNROLL_ID: np.int64,
}
"""Dtypes of columns that do not depend on the environment."""


def check(holds: Any, sentence: str) -> None:
    """Raise AssertionError with a message unless a condition holds.

    >>> check(np.array([True, False]).all(), "rewards must equal the environment's")
    Traceback (most recent call last):
    AssertionError: rewards must equal the environment's
    """
    if not holds:
        raise AssertionError(sentence)


def check_steps(batch: SampleBatch, *, together: bool = True) -> None:
    """Check that the rows of each stream are contiguous and in time order, and that trajectories have no gaps.

    Parameters
    ----------
    batch
        Steps, with the columns of all collectors.
    together
        Whether every agent acts in every environment step, so that `t` has no gaps; False for turn-based environments.

    Raises
    ------
    AssertionError
        If a column is missing or has another dtype, a stream is not contiguous, time decreases, an observation is not
        the next observation of the previous step, or an episode continues after its end.
    """
    for name in (names.OBS, names.NEXT_OBS, names.ACTIONS, *DTYPES):
        check(name in batch, f"a batch of steps must have a column {name!r}, got {', '.join(map(repr, batch))}")
    for name, dtype in DTYPES.items():
        check(batch[name].dtype == dtype, f"column {name!r} must hold {np.dtype(dtype)}, got {batch[name].dtype}")
    if not len(batch):
        return
    env_id, agent, eps_id, t = (
        np.asarray(batch[name]) for name in (names.ENV_ID, names.AGENT_INDEX, names.EPS_ID, names.T)
    )
    check((eps_id >= 0).all(), "column 'eps_id' must not be negative")
    stream = _changes(env_id) | _changes(agent)
    pieces = np.flatnonzero(stream)
    streams = set(zip(env_id[pieces].tolist(), agent[pieces].tolist(), strict=True))
    check(len(streams) == len(pieces), "the steps of an agent must be contiguous")
    begins = stream | _changes(eps_id)
    starts = np.flatnonzero(begins)
    episodes = set(zip(env_id[starts].tolist(), agent[starts].tolist(), eps_id[starts].tolist(), strict=True))
    check(len(episodes) == len(starts), "the steps of an episode must be contiguous")
    inside = ~begins[1:]
    ahead = np.diff(t)[inside]
    check((ahead == 1).all() if together else (ahead > 0).all(), "column 't' must increase within an episode")
    check((t >= 0).all(), "column 't' must count from 0")
    done = np.asarray(batch[names.TERMINATEDS]) | np.asarray(batch[names.TRUNCATEDS])
    check(not done[:-1][inside].any(), "no episode must continue after its terminated or truncated step")
    same_stream = ~stream[1:]
    check(done[:-1][same_stream & begins[1:]].all(), "an episode must end before the next episode of its stream starts")
    obs, new_obs = np.asarray(batch[names.OBS]), np.asarray(batch[names.NEXT_OBS])
    check(
        np.array_equal(new_obs[:-1][inside], obs[1:][inside]),
        "column 'obs' must equal 'new_obs' of the previous step",
    )


def by_stream(batches: list[SampleBatch]) -> dict[tuple[int, int], SampleBatch]:
    """Join the steps of each stream, a pair of `env_id` and `agent_index`, over several batches."""
    parts_by_key: dict[tuple[int, int], list[SampleBatch]] = {}
    for batch in batches:
        keys = list(zip(batch[names.ENV_ID].tolist(), batch[names.AGENT_INDEX].tolist(), strict=True))
        for key in dict.fromkeys(keys):
            rows = [row for row, stream in enumerate(keys) if stream == key]
            parts_by_key.setdefault(key, []).append(batch.take(rows))
    return {key: join(parts) for key, parts in parts_by_key.items()}


def number_rows(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> None:
    """Add the column `place` with the offset of each step in its trajectory; a hook."""
    trajectory.steps["place"] = np.arange(trajectory.steps.count)


def says(error: BaseException, kind: type[BaseException], words: str) -> bool:
    """Return whether an error contains `words` and is of type `kind` or a library error."""
    return words in str(error) and isinstance(error, (kind, SampleBatchError))


def _changes(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mark the first row and every row that differs from the previous one."""
    marks = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=marks[1:])
    return marks
