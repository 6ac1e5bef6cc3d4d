"""Fragments of workers contain exactly the collected rows, sent complete or in parts."""

from __future__ import annotations

from typing import Any

import actors
import arena
import numpy as np
import pytest
from fragments import begin, check_same, made, plan, sent

from samplebatch import Batch, MultiAgentCollector, SampleBatch, concat_samples
from samplebatch.errors import EnvironmentSpecError


def telling(obs: Any) -> dict[str, Any]:
    """Act, and say more."""
    if isinstance(obs, Batch):
        return {"act": obs.action_mask.argmax(1), "vf_preds": obs.observation[:, 0]}
    return {
        "act": (obs[:, 0] > 0).astype(int),
        "policy": {"deep": {"who": np.arange(len(obs))}},
        "vf_preds": obs[:, 0],
    }


@pytest.mark.parametrize(
    "environment", ["CartPole-v1", "gyms:Walk", "mpe2/simple_tag_v3", "arena:Relay", "arena:Bazaar"]
)
@pytest.mark.parametrize("envs", [1, 3])
def test_fragments_are_received_unchanged(environment: str, envs: int) -> None:
    arrived = sent(plan(environment, envs=envs), 6)
    assert len(arrived) == 6
    check_same(arrived, made(plan(environment, envs=envs), 6))


@pytest.mark.parametrize("name", ["mpe2/simple_spread_v3", "mpe2/simple_tag_v3", "arena:Relay", "arena:Bazaar"])
def test_columns_of_a_policy_are_received(name: str) -> None:
    arrived = sent(plan(name, telling), 5)
    assert all("vf_preds" in steps for batch in arrived for steps in batch.policy_batches.values())
    check_same(arrived, made(plan(name, telling), 5))


def test_dtypes_that_change_between_fragments() -> None:
    arrived = sent(plan("CartPole-v1", actors.Fickle()), 4)
    # The 25th call is the fifth of the second fragment. Its two dtypes become the wider one.
    assert [fragment["actions"].dtype.name for fragment in arrived] == ["int64", "int64", "int32", "int32"]
    check_same(arrived, made(plan("CartPole-v1", actors.Fickle()), 4))


def test_fragments_larger_than_the_arena_are_sent_in_parts() -> None:
    arrived = sent(plan("CartPole-v1"), 4, capacity_nbytes=1 << 13)
    assert len(arrived) > 4
    check_same(arrived, made(plan("CartPole-v1"), 4))


def scaled(trajectory: Any, others: Any) -> None:
    trajectory.steps["rewards"] = trajectory.steps["rewards"] * 2.0
    trajectory.steps["twice"] = trajectory.steps["rewards"]


def reversed_time(trajectory: Any, others: Any) -> SampleBatch:
    return trajectory.steps.take(np.arange(len(trajectory.steps))[::-1])


def without_the_first(trajectory: Any, others: Any) -> SampleBatch:
    return trajectory.steps.slice(1, len(trajectory.steps))


def twice(trajectory: Any, others: Any) -> SampleBatch:
    return concat_samples([trajectory.steps, trajectory.steps])


@pytest.mark.parametrize("environment", ["CartPole-v1", "mpe2/simple_tag_v3"])
@pytest.mark.parametrize("hook", [scaled, reversed_time, without_the_first, twice])
def test_hooks_may_change_values_columns_and_the_number_of_rows(environment: str, hook: Any) -> None:
    check_same(sent(plan(environment, hooks=(hook,)), 4), made(plan(environment, hooks=(hook,)), 4))


class Growing(arena.Relay):
    """A relay whose episodes get longer and longer, and whose last runner is there from the third one on."""

    episode = 0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self._step = 0
        self.agents = self.possible_agents[: 1 + (self.episode > 2)]
        return {agent: self._observe(agent) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self._step += 1
        over = self._step == 3 * self.episode
        acted, self.agents = self.agents, [] if over else self.agents
        return (
            {agent: self._observe(agent) for agent in acted},
            dict.fromkeys(acted, 0.5),
            dict.fromkeys(acted, over),
            dict.fromkeys(acted, False),
            {},
        )


def test_agents_that_join_and_episodes_that_grow_longer() -> None:
    check_same(sent(plan(Growing, envs=2), 6), made(plan(Growing, envs=2), 6))
    collector = MultiAgentCollector("random", Growing, num_envs=2)
    assert [len(collector.collect(n_episode=2).batch["runner"]) for _ in range(4)] == [6, 12, 36, 48]


class Shifting(arena.Relay):
    """A relay whose observations get another dtype, and whose rewards another type, in the hundredth step."""

    made = 0

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self.made += 1
        observations, rewards, *others = super().step(actions)
        if self.made < 100:
            return observations, rewards, *others
        wide = {agent: obs.astype(np.float64) + 0.1 for agent, obs in observations.items()}
        return wide, {agent: np.float32(reward) for agent, reward in rewards.items()}, *others


def test_observations_that_widen_in_mid_fragment() -> None:
    arrived = sent(plan(Shifting, envs=3), 8)
    dtypes = [[fragment["runner"][name].dtype.name for name in ("obs", "new_obs")] for fragment in arrived]
    narrow, wide = "float32", "float64"
    assert dtypes == [[narrow, narrow]] * 4 + [[narrow, wide]] + [[wide, wide]] * 3
    others = made(plan(Shifting, envs=3), 8)
    for alike in (slice(4), slice(4, 5), slice(5, 8)):
        check_same(arrived[alike], others[alike])


class Poetic(arena.Relay):
    """A relay that gives its rewards out by name, from the fiftieth step on."""

    made = 0

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self.made += 1
        observations, rewards, *others = super().step(actions)
        return observations, dict.fromkeys(rewards, "a rose") if self.made == 50 else rewards, *others


def test_rewards_that_are_not_numbers_are_rejected() -> None:
    task = begin(plan(Poetic, envs=1))
    with pytest.raises(EnvironmentSpecError, match="'rewards'"):
        task.next()


def test_an_error_in_one_environment_loses_no_steps_of_the_others() -> None:
    stages = [arena.Relay(), arena.Failing()]
    collector = MultiAgentCollector("random", stages, seed=0)
    with pytest.raises(RuntimeError, match="baton"):
        collector.collect(n_step=80)
    collector.reset()
    stages[1].made = 100
    # The first made thirty steps before the second raised in its thirtieth; they count among those of the next call.
    batch = collector.collect(n_step=80).batch
    assert batch.count == 80
    steps = batch["runner"]
    environment_steps = np.stack([steps[name] for name in ("eps_id", "env_id", "t")], 1)
    assert len(np.unique(environment_steps, axis=0)) == batch.count
    assert (steps["obs"][:, 0] == steps["t"]).all()
    assert [info["now"] for info in steps["infos"]] == steps["t"].tolist()
