"""Policies act for several agents in several environments, with one recurrent state per agent."""

from __future__ import annotations

from functools import partial
from typing import Any

import arena
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from mpe2 import simple_spread_v3

from samplebatch import Batch, MultiAgentBatch, concat_samples
from samplebatch.env.registry import make_environment
from samplebatch.errors import PolicyNotFoundError, PolicySpecError
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from tests.optional import torch


class Counting:
    """Policy that records the number of agents in each call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, batch: Batch) -> Batch:
        self.sizes.append(len(batch.obs))
        return Batch(act=np.zeros(len(batch.obs), int))


def test_a_policy_is_called_once_for_its_agents_in_all_environments() -> None:
    adversaries, runners = Counting(), Counting()
    collector = MultiAgentCollector(
        {"adversary": adversaries, "agent": runners}, "mpe2/simple_tag_v3", num_envs=4, seed=0
    )
    batch = collector.collect(n_step=40).batch
    assert adversaries.sizes == [12] * 10
    assert runners.sizes == [4] * 10
    assert {policy: len(steps) for policy, steps in batch.items()} == {"adversary": 120, "agent": 40}
    assert not batch["adversary"]["actions"].any()


def test_one_policy_for_all_turn_based_agents() -> None:
    everyone = Counting()
    collector = MultiAgentCollector(everyone, arena.Relay, num_envs=2, seed=0)
    assert collector.collect(n_step=16).batch.agent_steps() == 24
    assert everyone.sizes == [2, 2, 4, 4, 4, 4, 2, 2]
    requested = []

    def move(batch: Batch) -> Batch:
        requested.append(len(batch.obs.observation))
        return Batch(act=batch.obs.action_mask.argmax(1))

    batch = MultiAgentCollector(move, arena.Bazaar, num_envs=3, seed=0).collect(n_episode=3).batch
    assert batch.count == 27
    assert requested == [3] * 9


def test_actions_follow_the_observations_of_the_agent() -> None:
    def decide(obs: np.ndarray) -> np.ndarray:
        return (obs[:, 0] + 2 * obs[:, 1]).astype(int) % 5

    batch = MultiAgentCollector({"runner": decide}, arena.Relay, num_envs=3, seed=0).collect(n_step=48).batch["runner"]
    assert batch["actions"].tolist() == decide(batch["obs"]).tolist()


def test_a_torch_module_is_accepted_as_a_policy() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(18, 5)
    collector = MultiAgentCollector({"agent": net}, "mpe2/simple_spread_v3", num_envs=2, seed=0)
    batch = collector.collect(n_step=30).batch["agent"]
    with torch.no_grad():
        best = net(torch.from_numpy(batch["obs"])).argmax(1)
    assert batch["actions"].tolist() == best.tolist()


class Remembering:
    """Policy of arrays that counts each agent's steps in its state."""

    def __call__(self, batch: Batch, state: Any) -> Batch:
        count = np.zeros(len(batch.obs)) if state is None else state
        return Batch(act=np.zeros(len(batch.obs), int), state=count + 1)


def ages(batch: MultiAgentBatch, column: str) -> None:
    """Check that each agent's state equals the number of its earlier steps in the episode."""
    for steps in batch.policy_batches.values():
        observed: dict[tuple[int, ...], int] = {}
        for *key, age in zip(*(steps[name].tolist() for name in ("eps_id", "agent_index", column)), strict=True):
            assert age == observed.setdefault(tuple(key), 0)
            observed[tuple(key)] += 1


def test_every_agent_has_a_separate_recurrent_state() -> None:
    collector = MultiAgentCollector(Remembering(), arena.Relay, num_envs=3, seed=0)
    ages(concat_samples([collector.collect(n_step=n).batch for n in (5, 20, 47)]), "state_in_0")

    def turns(batch: Batch, state: Any) -> Batch:
        rows = len(batch.obs.observation)
        count, trail = (np.zeros(rows), torch.zeros(rows, 2)) if state is None else (state.count, state.trail)
        act = batch.obs.action_mask.argmax(1)
        return Batch(act=act, state=Batch(count=count + 1, trail=trail + torch.tensor([1.0, 2.0])))

    batch = MultiAgentCollector(turns, arena.Bazaar, num_envs=2, seed=0).collect(n_step=60).batch
    ages(batch, "state_in.count")
    trader = batch["trader"]
    assert (trader["state_in.trail"] == trader["state_in.count"][:, None] * [1, 2]).all()


class Reviving(arena.Relay):
    """Relay whose first runner is terminated in its second step and returns in the next step."""

    def step(self, actions: dict[str, Any]) -> arena.Step:
        fell = self._step == 1
        observations, rewards, terminations, truncations, infos = super().step(actions)
        if fell:
            terminations["runner_0"] = True
        return observations, rewards, terminations, truncations, infos


def test_an_agent_that_rejoins_has_a_new_recurrent_state() -> None:
    batch = MultiAgentCollector(Remembering(), Reviving, seed=0).collect(n_step=8).batch["runner"]
    assert batch["state_in_0"][batch["agent_index"] == 0].tolist() == [0, 1, 0, 1]


def test_extra_outputs_of_a_policy_are_recorded() -> None:
    def telling(batch: Batch) -> Batch:
        n = len(batch.obs)
        output = Batch(value=batch.obs[:, 0] * 2, deep=Batch(who=batch.obs[:, 1]))
        return Batch(act=np.zeros(n, int), policy=output, vf_preds=batch.obs[:, 0], unknown=np.ones(n))

    batch = MultiAgentCollector(telling, arena.Relay, num_envs=2, seed=0).collect(n_step=16).batch["runner"]
    assert batch.column_names == (
        "obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "infos", "policy.value",
        "policy.deep.who", "vf_preds", "eps_id", "env_id", "agent_index", "t", "eps_done",
        "unroll_id",
    )  # fmt: skip
    assert (batch["policy"]["value"] == 2 * batch["t"]).all()
    assert (batch["policy"]["deep"]["who"] == batch["agent_index"]).all()
    assert (batch["vf_preds"] == batch["t"]).all()


class Scaled:
    """Policy with actions in [-1, 1] for an environment with actions in [0, 1]."""

    def __call__(self, batch: Batch) -> Batch:
        return Batch(act=np.full((len(batch.obs), 5), -0.5, np.float32))

    def map_action(self, act: np.ndarray) -> np.ndarray:
        return (act + 1) / 2


def test_actions_are_stored_with_the_dtype_of_the_policy() -> None:
    created = []

    class Watched:
        def __init__(self) -> None:
            self._env = simple_spread_v3.parallel_env(continuous_actions=True)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._env, name)

        def step(self, actions: dict[str, Any]) -> Any:
            created.extend(actions.values())
            return self._env.step(actions)

    batch = MultiAgentCollector(Scaled(), Watched, seed=0).collect(n_step=5).batch["agent"]
    assert (batch["actions"] == np.float32(-0.5)).all()
    assert (np.stack(created) == np.float32(0.25)).all()


def test_spaces_and_the_string_random_sample_actions() -> None:
    policies = {"adversary": Discrete(2), "agent": "random"}
    batch = MultiAgentCollector(policies, "mpe2/simple_tag_v3", seed=0).collect(n_step=60).batch
    assert set(batch["adversary"]["actions"].tolist()) == {0, 1}
    assert set(batch["agent"]["actions"].tolist()) == {0, 1, 2, 3, 4}


def test_custom_sample_methods_of_spaces_are_used() -> None:
    class Odd(Discrete):
        def sample(self, *args: Any, **options: Any) -> Any:
            return 2 * super().sample(*args, **options) % 5

    class OddRelay(arena.Relay):
        def __init__(self) -> None:
            super().__init__()
            self._spaces = {agent: Odd(2) for agent in self.possible_agents}

    batch = MultiAgentCollector("random", OddRelay, seed=0).collect(n_step=40).batch["runner"]
    assert set(batch["actions"].tolist()) == {0, 2}


def test_random_actions_do_not_depend_on_the_number_of_environments() -> None:
    def draw(num_envs: int, **options: Any) -> list[int]:
        collector = MultiAgentCollector("random", "mpe2/simple_spread_v3", num_envs=num_envs, seed=3, **options)
        batch = collector.collect(n_step=100 * num_envs).batch["agent"]
        return batch[(batch["env_id"] == 0) & (batch["agent_index"] == 1)]["actions"].tolist()

    assert len(draw(1)) == 100
    assert draw(1) == draw(3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": {"runer": "random"}}, PolicyNotFoundError, "'runner'; there are 'runer'|did you mean 'runer'"),
        ({"policy_mapping": {"runner_9": "a"}}, PolicyNotFoundError, "'runner_0' must have a policy"),
        ({"policy": 3}, PolicySpecError, "must be callable"),
        ({"policy": lambda obs: None}, PolicySpecError, "must return actions"),
        ({"policy": lambda obs: np.zeros(7, int)}, PolicySpecError, "each of 1"),
    ],
)
def test_policies_that_cannot_act_are_reported(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MultiAgentCollector(**{"policy": "random", "env": arena.Relay} | options).collect(n_step=2)


def test_environments_are_created_from_every_supported_value() -> None:
    makes: list[Any] = [
        "mpe2/simple_spread_v3",
        partial(simple_spread_v3.parallel_env, N=3),
        make_environment("mpe2/simple_spread_v3"),
        [make_environment("mpe2/simple_spread_v3") for _ in range(2)],
    ]
    for make in makes:
        collector = MultiAgentCollector("random", make, seed=0)
        assert collector.collect(n_step=4).batch.agent_steps() == 12
        collector.close()
    assert len(MultiAgentCollector("random", makes[3]).environments) == 2


class Talking(arena.Relay):
    """Relay whose infos have any content."""

    def step(self, actions: dict[str, Any]) -> arena.Step:
        *others, _ = super().step(actions)
        infos: dict[str, Any] = {"runner_0": {"at": {"x": 1}}, "runner_1": {"at": 3}, "runner_2": {"at": np.zeros(2)}}
        return *others, {agent: infos[agent] for agent in actions}  # type: ignore[return-value]


def test_agents_may_have_different_infos() -> None:
    received: list[Any] = []

    def listen(batch: Batch) -> Batch:
        received.extend(batch.info)
        return Batch(act=np.zeros(len(batch.obs), int))

    batch = MultiAgentCollector(listen, Talking, num_envs=2, seed=0).collect(n_step=16).batch["runner"]
    # A runner hears what it said itself, and nothing in its first step.
    assert sum(not info for info in received) == 6
    assert sum(type(info.get("at")) is int for info in received) == 6
    assert list(batch["infos"][:4]) == [{"at": {"x": 1}}] * 4


class Exploring:
    """Policy that always returns action 0, unless noise is added."""

    def __call__(self, batch: Batch) -> Batch:
        return Batch(act=np.zeros(len(batch.obs), int))

    def add_exploration_noise(self, act: np.ndarray, batch: Batch) -> np.ndarray:
        return act + (batch.obs[:, 2] > 0)


def flipped(act: np.ndarray, batch: Batch) -> np.ndarray:
    """Noise that replaces action 0."""
    assert len(batch.info) == len(act)
    return act + 4


@pytest.mark.parametrize("envs", [1, 3])
def test_noise_is_added_for_the_requested_policies(envs: int) -> None:
    def acted(noise: Any) -> dict[str, set[tuple[bool, int]]]:
        collector = MultiAgentCollector(
            Exploring(), "mpe2/simple_tag_v3", num_envs=envs, seed=0, exploration_noise=noise
        )
        batch = collector.collect(n_step=150 * envs).batch
        return {
            policy: set(zip((steps["obs"][:, 2] > 0).tolist(), steps["actions"].tolist(), strict=True))
            for policy, steps in batch.policy_batches.items()
        }

    none, ours, options = {(False, 0), (True, 0)}, {(False, 0), (True, 1)}, {(False, 4), (True, 4)}
    assert acted(False) == {"adversary": none, "agent": none}
    assert acted(True) == {"adversary": ours, "agent": ours}
    assert acted(flipped) == {"adversary": options, "agent": options}
    assert acted({"agent": True}) == {"adversary": none, "agent": ours}
    assert acted({"agent": flipped, "adversary": True}) == {"adversary": ours, "agent": options}


def test_noise_for_missing_or_random_policies_is_rejected() -> None:
    def collector(noise: Any, **policies: Any) -> MultiAgentCollector:
        options = {"adversary": "random", "agent": Exploring()}
        return MultiAgentCollector(options | policies, "mpe2/simple_tag_v3", seed=0, exploration_noise=noise)

    quiet, noisy = (collector(noise).collect(n_step=50).batch for noise in (False, True))
    assert quiet["adversary"]["actions"].tolist() == noisy["adversary"]["actions"].tolist()
    assert noisy["agent"]["actions"].any()
    with pytest.raises(PolicyNotFoundError, match=r"exploration_noise must name policies, got 'agnet'.*'agent'"):
        collector({"agnet": True})
    with pytest.raises(PolicySpecError, match="exploration_noise must be False for policy 'adversary'"):
        collector({"adversary": flipped})
    assert collector({"adversary": False}).collect(n_step=4).batch.count == 4
    with pytest.raises(PolicySpecError, match="add_exploration_noise"):
        collector(True, agent=Counting()).collect(n_step=4)
