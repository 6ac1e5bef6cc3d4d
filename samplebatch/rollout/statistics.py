"""Episode statistics, computed from the columns of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import by_stream, episode_ends, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID

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
    """Statistics of the episodes in a batch.

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
    policies: dict[PolicyID, PolicyStatistics]


def episode_statistics(batch: MultiAgentBatch | SampleBatch) -> EpisodeStatistics | None:
    """Sum up the episodes in a batch.

    An episode has ended if a step of it is marked by `eps_done`; without that column, if every agent that acted in its
    last step was terminated or truncated by it. Those that have not are counted, but enter no mean: they would pull it
    down.

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
    ends = episode_ends(policies)
    if ends is None or not all(name in steps for steps in policies.values() for name in _NEEDED):
        return None
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
    ends = episode_ends(_policies(batch))
    return np.empty(0, np.int64) if ends is None else ends.ids[ends.finished]


def _policies(batch: MultiAgentBatch | SampleBatch) -> Mapping[PolicyID, SampleBatch]:
    policies = {names.DEFAULT_POLICY_ID: batch} if isinstance(batch, SampleBatch) else batch.policy_batches
    return {policy: steps for policy, steps in policies.items() if len(steps)}


def _of_policy(steps: SampleBatch, finished: npt.NDArray[Any]) -> PolicyStatistics:
    eps_id, agent, rewards = (np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX, names.REWARDS))
    rows = np.flatnonzero(np.isin(eps_id, finished))
    rows = rows[by_stream(eps_id[rows], agent[rows])]
    if not len(rows):
        return PolicyStatistics(0, np.empty((0, *rewards.shape[1:])), np.empty(0, np.int64))
    starts = run_starts(eps_id[rows], agent[rows])
    returns = np.add.reduceat(rewards[rows].astype(np.float64), starts, axis=0)
    lengths = np.diff(np.append(starts, len(rows)))
    order = rows[starts].argsort()
    return PolicyStatistics(len(run_starts(eps_id[rows])), returns[order], lengths[order])
