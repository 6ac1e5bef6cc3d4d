"""RunningStatistics: episodes that come in parts, summed up when they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.episodes import by_stream, episode_ends, run_starts
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
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


class RunningStatistics:
    """Sum up episodes over the fragments in which they come.

    `episode_statistics` knows a single batch; this knows what came before it, so that returns and lengths are those of
    whole episodes wherever the fragments were cut. The parts of an episode come in order, others between them.

    Attributes
    ----------
    episodes : int
        Episodes that ended.

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
        self.episodes = 0
        self._going_on: dict[Any, dict[tuple[str, Any], list[Any]]] = {}
        self._ended: dict[str, _Ended] = {}

    def add(self, fragment: SampleBatch | MultiAgentBatch) -> EpisodeStatistics:
        """Take a fragment in, and return the statistics of the episodes that ended with it.

        A fragment that lacks one of the columns `eps_id`, `t`, `agent_index`, `rewards` and the flags counts nothing.
        """
        policies = policies_of(fragment)
        ends = episode_ends(policies)
        needed = (names.T, names.AGENT_INDEX, names.REWARDS)
        if ends is None or not all(name in steps for steps in policies.values() for name in needed):
            return EpisodeStatistics(0, len(self._going_on), {})
        for policy, steps in policies.items():
            self._add(policy, steps)
        ended: dict[str, _Ended] = {}
        for eps_id in ends.ids[ends.finished].tolist():
            self.episodes += 1
            trajectories = self._going_on.pop(eps_id)
            for found in (ended, self._ended):
                for policy in {policy for policy, _ in trajectories}:
                    found.setdefault(policy, _Ended()).episodes += 1
                for (policy, _), (total, length) in trajectories.items():
                    found[policy].returns.append(total)
                    found[policy].lengths.append(length)
        return EpisodeStatistics(
            int(ends.finished.sum()),
            len(self._going_on),
            {policy: found.statistics() for policy, found in ended.items()},
        )

    def statistics(self) -> EpisodeStatistics:
        """Return the statistics of all episodes that ended so far, in the order in which they did."""
        policies = {policy: found.statistics() for policy, found in self._ended.items()}
        return EpisodeStatistics(self.episodes, len(self._going_on), policies)

    def _add(self, policy: str, steps: SampleBatch) -> None:
        eps_id, agent, rewards = (np.asarray(steps[name]) for name in (names.EPS_ID, names.AGENT_INDEX, names.REWARDS))
        order = by_stream(eps_id, agent)
        eps_id, agent = eps_id[order], agent[order]
        starts = run_starts(eps_id, agent)
        totals = np.add.reduceat(rewards[order].astype(np.float64), starts, axis=0)
        lengths = np.diff(np.append(starts, len(order))).tolist()
        keys = zip(eps_id[starts].tolist(), agent[starts].tolist(), strict=True)
        for (episode, index), total, length in zip(keys, totals, lengths, strict=True):
            trajectories = self._going_on.setdefault(episode, {})
            before = trajectories.setdefault((policy, index), [0.0, 0])
            before[0] = before[0] + total
            before[1] += length
