"""Episode statistics: of a batch by its columns, and of fragments in which episodes come in parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.episodes import EpisodeEnds, by_stream, episode_ends, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID
from samplebatch.rollout.fragments import policies_of

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
    policies = policies_of(batch)
    ends = _ends_of(policies)
    if ends is None:
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
    ends = episode_ends(policies_of(batch))
    return np.empty(0, np.int64) if ends is None else ends.ids[ends.finished]


def _ends_of(policies: Mapping[PolicyID, SampleBatch]) -> EpisodeEnds | None:
    """Tell which episodes ended; None if a batch lacks a column that returns and lengths are counted by."""
    if not all(name in steps for steps in policies.values() for name in _NEEDED):
        return None
    return episode_ends(policies)


def _of_policy(steps: SampleBatch, finished: npt.NDArray[Any]) -> PolicyStatistics:
    rows = np.flatnonzero(np.isin(np.asarray(steps[names.EPS_ID]), finished))
    if not len(rows):
        rewards = np.asarray(steps[names.REWARDS])
        return PolicyStatistics(0, np.empty((0, *rewards.shape[1:])), np.empty(0, np.int64))
    found = _sum_up(steps, rows)
    order = found.first.argsort()
    return PolicyStatistics(len(np.unique(found.eps_id)), found.returns[order], found.lengths[order])


class _Trajectories(NamedTuple):
    """The trajectories in some rows, shape (k,) each: episode, agent, first row, rewards summed up, and steps."""

    eps_id: npt.NDArray[Any]
    agent: npt.NDArray[Any]
    first: npt.NDArray[np.intp]
    returns: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


def _sum_up(steps: SampleBatch, rows: npt.NDArray[np.intp]) -> _Trajectories:
    """Sum up rows, at least one, by trajectory."""
    eps_id, agent = np.asarray(steps[names.EPS_ID]), np.asarray(steps[names.AGENT_INDEX])
    rewards = np.asarray(steps[names.REWARDS])
    rows = rows[by_stream(eps_id[rows], agent[rows])]
    starts = run_starts(eps_id[rows], agent[rows])
    first = rows[starts]
    returns = np.add.reduceat(rewards[rows].astype(np.float64), starts, axis=0)
    return _Trajectories(eps_id[first], agent[first], first, returns, np.diff(np.append(starts, len(rows))))


@dataclass
class _Ended:
    """The agents of a policy in the episodes that ended."""

    episodes: int = 0
    returns: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def statistics(self) -> PolicyStatistics:
        return PolicyStatistics(self.episodes, np.array(self.returns, np.float64), np.array(self.lengths, np.int64))


class EndedEpisodes:
    """Returns and lengths of episodes that ended, by policy, for reports on several fragments.

    Attributes
    ----------
    episodes
        How many there are.
    """

    def __init__(self) -> None:
        self.episodes = 0
        self._policies: dict[PolicyID, _Ended] = {}

    def add(self, found: EpisodeStatistics) -> None:
        """Count the episodes that ended with a fragment."""
        self.episodes += found.episodes
        for policy, own in found.policies.items():
            ended = self._policies.setdefault(policy, _Ended())
            ended.episodes += own.episodes
            ended.returns += list(own.returns)
            ended.lengths += own.lengths.tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return them, for `load_state_dict`."""
        policies = {policy: copy.copy(vars(own)) for policy, own in self._policies.items()}
        return copy.deepcopy({"episodes": self.episodes, "policies": policies})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the episodes of others in place of the own."""
        self.episodes = state["episodes"]
        self._policies = {policy: _Ended(**own) for policy, own in copy.deepcopy(state["policies"]).items()}

    def statistics(self, unfinished: int = 0) -> EpisodeStatistics:
        """Return the statistics of all of them, in the order in which they ended."""
        policies = {policy: found.statistics() for policy, found in self._policies.items()}
        return EpisodeStatistics(self.episodes, unfinished, policies)


class OpenReturns:
    """Returns and lengths of the episodes under way, summed over the fragments in which they come.

    Collectors and `RunningStatistics` hold one. The parts of an episode come in order, others between them.
    """

    def __init__(self) -> None:
        self._episodes: dict[Any, dict[tuple[PolicyID, Any], list[Any]]] = {}
        self._newest: dict[int, Any] = {}
        """The newest of the episodes under way of each environment, where `forget_cut_off` keeps watch."""

    def __len__(self) -> int:
        return len(self._episodes)

    def clear(self) -> None:
        """Forget the episodes under way."""
        self._episodes, self._newest = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes under way, for `load_state_dict`."""
        return {"episodes": copy.deepcopy(self._episodes), "newest": dict(self._newest)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the episodes that others had under way."""
        self._episodes, self._newest = copy.deepcopy(state["episodes"]), dict(state["newest"])

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
        """Take a fragment in, and return the statistics of the episodes that ended with it.

        A fragment that lacks one of the columns `eps_id`, `t`, `agent_index`, `rewards` and the flags counts nothing.
        """
        policies = policies_of(fragment)
        ends = _ends_of(policies)
        if ends is None:
            return EpisodeStatistics(0, len(self), {})
        for policy, steps in policies.items():
            self._add(policy, steps)
        ended: dict[PolicyID, _Ended] = {}
        for eps_id in ends.ids[ends.finished].tolist():
            trajectories = self._episodes.pop(eps_id)
            for policy in dict.fromkeys(policy for policy, _ in trajectories):
                ended.setdefault(policy, _Ended()).episodes += 1
            for (policy, _), (total, length) in trajectories.items():
                ended[policy].returns.append(total)
                ended[policy].lengths.append(length)
        return EpisodeStatistics(
            int(ends.finished.sum()), len(self), {policy: found.statistics() for policy, found in ended.items()}
        )

    def forget_cut_off(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Forget episodes that will never end, once their environment has another one under way in a fragment.

        All fragments must come from one run, in which no two environments have the same `env_id`.
        """
        newest: dict[int, Any] = {}
        for steps in policies_of(fragment).values():
            if names.EPS_ID not in steps or names.ENV_ID not in steps:
                return
            env_id, eps_id = (np.asarray(steps[name]) for name in (names.ENV_ID, names.EPS_ID))
            starts = run_starts(env_id, eps_id)
            pairs = zip(env_id[starts].tolist(), eps_id[starts].tolist(), strict=True)
            newest |= {env: episode for env, episode in pairs if episode in self._episodes}
        for env, episode in newest.items():
            before = self._newest.get(env)
            if before != episode:
                self._episodes.pop(before, None)
        self._newest |= newest

    def _add(self, policy: PolicyID, steps: SampleBatch) -> None:
        found = _sum_up(steps, np.arange(len(steps)))
        pairs = zip(found.eps_id.tolist(), found.agent.tolist(), strict=True)
        for (episode, index), total, length in zip(pairs, found.returns, found.lengths.tolist(), strict=True):
            trajectories = self._episodes.setdefault(episode, {})
            before = trajectories.setdefault((policy, index), [0.0, 0])
            before[0] = before[0] + total
            before[1] += length


class RunningStatistics:
    """Statistics of episodes over the fragments in which they come.

    `episode_statistics` knows a single batch; this knows the fragments before it, too, so that returns and lengths are
    those of whole episodes wherever the fragments were cut. The parts of an episode come in order, others between them.

    Examples
    --------
    >>> running = RunningStatistics()
    >>> for t, rewards, done in (([0, 1], [1.0, 2.0], [False, False]), ([2], [4.0], [True])):
    ...     steps = SampleBatch(eps_id=[7] * len(t), t=t, agent_index=[0] * len(t), rewards=rewards, dones=done)
    ...     running.add(steps).episodes
    0
    1
    >>> running.statistics().policies["default_policy"].mean_return
    7.0
    """

    def __init__(self) -> None:
        self._open = OpenReturns()
        self._ended = EndedEpisodes()

    @property
    def episodes(self) -> int:
        """How many episodes ended."""
        return self._ended.episodes

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
        """Take a fragment in, and return the statistics of the episodes that ended with it.

        A fragment that lacks one of the columns `eps_id`, `t`, `agent_index`, `rewards` and the flags counts nothing.
        """
        found = self._open.add(fragment)
        self._ended.add(found)
        return found

    def statistics(self) -> EpisodeStatistics:
        """Return the statistics of all episodes that ended so far, in the order in which they did."""
        return self._ended.statistics(len(self._open))
