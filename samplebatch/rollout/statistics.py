"""Episode statistics, computed from the columns of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch

_NEEDED = (names.EPS_ID, names.T, names.AGENT_INDEX, names.REWARDS)


@dataclass(frozen=True)
class PolicyStatistics:
    """How one policy's agents fared in the episodes that ended, in the order in which they begin in the batch.

    Attributes
    ----------
    episodes
        Episodes that ended, and in which an agent of the policy acted.
    returns
        Each agent's rewards in each of these episodes, summed; shape (k,), or (k, m) for rewards of m parts.
    lengths
        Steps that each agent made in each of them, shape (k,).
    """

    episodes: int
    returns: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]

    @property
    def mean_return(self) -> float:
        """Mean of the returns (over their parts as well), NaN if no episode ended."""
        return float(self.returns.mean()) if self.returns.size else float("nan")

    @property
    def mean_length(self) -> float:
        """Mean of the lengths, NaN if no episode ended."""
        return float(self.lengths.mean()) if self.lengths.size else float("nan")


@dataclass(frozen=True)
class EpisodeStatistics:
    """What a batch says about its episodes.

    Attributes
    ----------
    episodes
        Episodes that ended within the batch.
    unfinished
        Episodes that did not.
    policies
        Statistics of each policy's agents in the episodes that ended.
    """

    episodes: int
    unfinished: int
    policies: dict[str, PolicyStatistics]


def episode_statistics(batch: MultiAgentBatch | SampleBatch) -> EpisodeStatistics | None:
    """Sum up the episodes in a batch.

    An episode has ended if every agent that acted in its last step was terminated or truncated by it. Those that have
    not are counted, but enter no mean: they would pull it down.

    Parameters
    ----------
    batch
        A batch with the columns `eps_id`, `t`, `agent_index`, `rewards`, and `terminateds` and `truncateds` (or
        `dones`), in any order of rows.

    Returns
    -------
    EpisodeStatistics or None
        None if a policy's batch lacks one of these columns.

    Examples
    --------
    >>> steps = SampleBatch(
    ...     eps_id=[7, 7, 7, 8],
    ...     t=[0, 1, 2, 0],
    ...     agent_index=[0, 0, 0, 0],
    ...     rewards=[1.0, 2.0, 3.0, 9.0],
    ...     dones=[False, False, True, False],
    ... )
    >>> found = episode_statistics(steps)
    >>> found.episodes, found.unfinished, found.policies["default_policy"].mean_return
    (1, 1, 6.0)
    """
    policies = _policies(batch)
    if not all(_has_episodes(steps) for steps in policies.values()):
        return None
    ends = _episode_ends(policies)
    finished = ends.ids[ends.finished]
    return EpisodeStatistics(
        len(finished),
        len(ends.ids) - len(finished),
        {policy: _of_policy(steps, finished) for policy, steps in policies.items()},
    )


def finished_episodes(batch: MultiAgentBatch | SampleBatch) -> npt.NDArray[Any]:
    """Return the ids of the episodes that ended within a batch; see `episode_statistics`.

    A batch without the columns that tell has none.
    """
    policies = _policies(batch)
    if not all(_has_episodes(steps) for steps in policies.values()):
        return np.empty(0, np.int64)
    ends = _episode_ends(policies)
    return ends.ids[ends.finished]


class _Ends(NamedTuple):
    """Episodes, shape (k,), and whether each of them ended."""

    ids: npt.NDArray[Any]
    finished: npt.NDArray[np.bool_]


def _policies(batch: MultiAgentBatch | SampleBatch) -> Mapping[str, SampleBatch]:
    policies = {names.DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches
    return {policy: steps for policy, steps in policies.items() if len(steps)}


def _has_episodes(steps: SampleBatch) -> bool:
    return all(name in steps for name in _NEEDED) and (
        names.DONES in steps or (names.TERMINATEDS in steps and names.TRUNCATEDS in steps)
    )


def _episode_ends(policies: Mapping[str, SampleBatch]) -> _Ends:
    if not policies:
        return _Ends(np.empty(0, np.int64), np.empty(0, np.bool_))
    eps_id, t, done = (
        np.concatenate([np.asarray(steps[name]) for steps in policies.values()])
        for name in (names.EPS_ID, names.T, names.DONES)
    )
    order = np.lexsort((t, eps_id))
    eps_id, t, done = eps_id[order], t[order], done[order].astype(np.bool_)
    starts = _starts(eps_id)
    stops = np.append(starts[1:], len(eps_id))
    last = np.repeat(t[stops - 1], stops - starts)
    return _Ends(eps_id[starts], np.logical_and.reduceat(done | (t < last), starts))


def _of_policy(steps: SampleBatch, finished: npt.NDArray[Any]) -> PolicyStatistics:
    eps_id, agent, rewards = (np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX, names.REWARDS))
    rows = np.flatnonzero(np.isin(eps_id, finished))
    rows = rows[np.lexsort((agent[rows], eps_id[rows]))]
    if not len(rows):
        return PolicyStatistics(0, np.empty((0, *rewards.shape[1:])), np.empty(0, np.int64))
    starts = _starts(eps_id[rows], agent[rows])
    returns = np.add.reduceat(rewards[rows].astype(np.float64), starts, axis=0)
    lengths = np.diff(np.append(starts, len(rows)))
    order = rows[starts].argsort()
    return PolicyStatistics(len(_starts(eps_id[rows])), returns[order], lengths[order])


def _starts(*keys: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return where runs of equal keys begin, in keys that are not empty."""
    changed = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.concatenate(([0], np.flatnonzero(changed) + 1))
