"""RunningStatistics: episodes that come in parts, summed up when they end."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import by_stream, episode_ends, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.names import PolicyID
from samplebatch.rollout.fragments import policies_of
from samplebatch.rollout.statistics import EpisodeStatistics, PolicyStatistics


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
        ends = episode_ends(policies)
        needed = (names.T, names.AGENT_INDEX, names.REWARDS)
        if ends is None or not all(name in steps for steps in policies.values() for name in needed):
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
        eps_id, agent, rewards = (np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX, names.REWARDS))
        order = by_stream(eps_id, agent)
        eps_id, agent = eps_id[order], agent[order]
        starts = run_starts(eps_id, agent)
        totals = np.add.reduceat(rewards[order].astype(np.float64), starts, axis=0)
        lengths = np.diff(np.append(starts, len(order))).tolist()
        keys = zip(eps_id[starts].tolist(), agent[starts].tolist(), strict=True)
        for (episode, index), total, length in zip(keys, totals, lengths, strict=True):
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
