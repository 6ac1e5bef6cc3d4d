"""Episodes that arrive in parts are summarized like complete episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.statistics import EpisodeStatistics, RunningStatistics, episode_statistics


def plain(statistics: EpisodeStatistics | None) -> dict[str, Any]:
    assert statistics is not None
    actual: dict[str, Any] = {
        policy: (first.episodes, sorted(zip(first.returns.round(9).tolist(), first.lengths.tolist(), strict=True)))
        for policy, first in statistics.policies.items()
        if first.episodes
    }
    return {**actual, "episodes": statistics.episodes, "unfinished": statistics.unfinished}


@pytest.mark.parametrize("name", ["mpe2/simple_tag_v3", "arena:Relay", "arena:Bazaar"])
def test_cut_episodes_count_as_complete_ones(name: str) -> None:
    rng = np.random.default_rng(0)
    sources = [MultiAgentCollector("random", name, num_envs=2, seed=seed) for seed in range(2)]
    running = RunningStatistics()
    fragments = []
    ended: list[EpisodeStatistics] = []
    for _ in range(20):
        fragments.append(sources[rng.integers(2)].collect(n_step=int(rng.integers(1, 40))).batch)
        ended.append(running.add(fragments[-1]))
    joined = concat_samples(fragments)
    assert plain(running.statistics()) == plain(episode_statistics(joined))
    assert running.episodes == sum(item.episodes for item in ended) > 5
    returns = [value for item in ended for policy in item.policies.values() for value in policy.returns.tolist()]
    assert len(returns) == sum(len(policy.returns) for policy in running.statistics().policies.values())


def test_rewards_of_several_parts_are_summed_separately() -> None:
    running = RunningStatistics()
    for t in range(3):
        steps = SampleBatch(eps_id=[7], t=[t], agent_index=[0], rewards=[[1.0, 10.0 * t]], dones=[t == 2])
        last = running.add(steps)
    assert last.policies["default_policy"].returns.tolist() == [[3.0, 30.0]]
    assert last.policies["default_policy"].lengths.tolist() == [3]


def test_fragments_without_episodes_are_not_counted() -> None:
    running = RunningStatistics()
    assert running.add(SampleBatch(obs=[1, 2])) == EpisodeStatistics(0, 0, {})
    assert running.add(SampleBatch(eps_id=[1], dones=[True])).episodes == 0
    assert running.add(SampleBatch()).episodes == 0
    assert running.statistics() == EpisodeStatistics(0, 0, {})


def test_abandoned_episodes_are_removed_when_a_new_one_starts() -> None:
    returns = RunningStatistics()

    def add(env_id: list[int], eps_id: list[int], done: bool = False) -> EpisodeStatistics:
        count = len(eps_id)
        steps = SampleBatch(env_id=env_id, eps_id=eps_id, t=np.arange(count), agent_index=[0] * count)
        steps["rewards"], steps["dones"] = [1.0] * count, [done] * count
        actual = returns.advance(steps)
        returns.forget_cut_off(steps)
        return actual

    add([0, 1], [70, 71])
    add([0], [70])
    assert returns.unfinished == 2
    add([0], [80])
    assert sorted(returns.state_dict()["open"]) == [71, 80]
    again = RunningStatistics()
    again.load_state_dict(returns.state_dict())
    returns = again
    assert add([1], [71], done=True).policies["default_policy"].returns.tolist() == [2.0]
    add([0], [90])
    assert sorted(returns.state_dict()["open"]) == [90]
