"""RLlib's MultiAgentEnv: agents act after each observation, together or in turns, and may join and leave."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from samplebatch import MultiAgentCollector, RolloutWorkers, as_policy
from samplebatch.env.registry import environment_kind
from samplebatch.errors import EnvironmentSpecError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[rllib]")

SPACE = spaces.Box(-np.inf, np.inf, (2,), np.float32)

Script = list[dict[str, Any]]
"""What happens in each step, by agent: `obs` (a number), `reward`, `terminated`, `truncated`."""


def base() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("ray.rllib.env.multi_agent_env").MultiAgentEnv


def scripted(begin: dict[str, float], script: Script, agents: tuple[str, ...] = ("a_0", "a_1")) -> Any:
    """Create an environment that replays a script and records its actions."""

    class Scripted(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = list(agents)
            self.observation_spaces = dict.fromkeys(agents, SPACE)
            self.action_spaces = dict.fromkeys(agents, spaces.Discrete(3))
            self.given: list[dict[str, int]] = []
            self.seeds: list[int | None] = []
            self._array = {agent: np.zeros(2, np.float32) for agent in agents}

        def _see(self, numbers: dict[str, float]) -> dict[str, Any]:
            for agent, number in numbers.items():
                # The same arrays again in every step.
                self._array[agent][:] = number, self._step
            return {agent: self._array[agent] for agent in numbers}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.seeds.append(seed)
            self._step = 0
            return self._see(begin), {agent: {"begun": True} for agent in begin}

        def step(self, action_dict: dict[str, Any]) -> Any:
            self.given.append({agent: int(action) for agent, action in action_dict.items()})
            output = script[self._step]
            self._step += 1
            return (
                self._see(output.get("obs", {})),
                output.get("reward", {}),
                {"__all__": False, **output.get("terminated", {})},
                {"__all__": False, **output.get("truncated", {})},
                {agent: {"step": self._step} for agent in output.get("obs", {})},
            )

    return Scripted()


def count_up(obs: Any) -> Any:
    return obs[:, 0].astype(int) % 3


def rows(batch: Any, policy: str = "a") -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of one episode, by agent and time."""
    steps = batch[policy]
    names = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "eps_done")
    return {
        (int(agent), int(t)): {name: np.asarray(steps[name])[row].tolist() for name in names}
        for row, (agent, t) in enumerate(zip(steps["agent_index"], steps["t"], strict=True))
    }


def test_agents_that_act_simultaneously() -> None:
    both = {"a_0": 0.0, "a_1": 1.0}
    env = scripted(
        both,
        [
            {"obs": {"a_0": 2, "a_1": 3}, "reward": {"a_0": 1, "a_1": 2}},
            {"obs": {"a_0": 4, "a_1": 5}, "reward": {"a_0": 3, "a_1": 4}, "terminated": {"__all__": True}},
        ],
    )
    assert environment_kind(env) == "rllib"
    with MultiAgentCollector(count_up, env, seed=1) as collector:
        stats = collector.collect(n_episode=2)
    batch = stats.batch
    assert batch.count == 4
    assert env.given == [{"a_0": 0, "a_1": 1}, {"a_0": 2, "a_1": 0}] * 2
    assert env.seeds[0] is not None
    assert env.seeds[1:] == [None]
    assert np.asarray(batch["a"]["obs"])[:, 0].tolist() == [0, 2, 0, 2, 1, 3, 1, 3]
    assert np.asarray(batch["a"]["new_obs"])[:, 0].tolist() == [2, 4, 2, 4, 3, 5, 3, 5]
    assert batch["a"]["rewards"].tolist() == [1, 3, 1, 3, 2, 4, 2, 4]
    assert batch["a"]["terminateds"].tolist() == batch["a"]["eps_done"].tolist() == [False, True] * 4
    assert batch["a"]["infos"].tolist() == [{"step": 1}, {"step": 2}] * 4


def test_turns_rewards_and_agents_that_join_and_leave() -> None:
    env = scripted(
        {"a_0": 0.0},
        [
            {"obs": {"a_1": 10}, "reward": {"a_1": 0.5}},
            {"obs": {"a_0": 1, "b_0": 20}, "reward": {"a_0": 1.0, "a_1": 2.0}},
            {"obs": {"a_1": 11}, "reward": {"a_0": 4.0, "a_1": 8.0}, "terminated": {"b_0": True}},
            {"reward": {"a_1": 16.0}},
            {"obs": {"a_0": 2, "a_1": 12}, "reward": {"a_0": 32.0}, "truncated": {"__all__": True}},
        ],
        ("a_0", "a_1", "b_0"),
    )
    with MultiAgentCollector(count_up, env) as collector:
        batch = collector.collect(n_episode=1).batch
    assert env.given == [{"a_0": 0}, {"a_1": 1}, {"a_0": 1, "b_0": 2}, {"a_1": 2}, {}]
    nothing = {"terminateds": False, "truncateds": False, "eps_done": False}
    assert rows(batch) == {
        (0, 0): {"obs": [0, 0], "new_obs": [1, 2], "actions": 0, "rewards": 1.0, **nothing},
        # What an agent gets before it acts for the first time counts with its first action.
        (1, 1): {"obs": [10, 1], "new_obs": [11, 3], "actions": 1, "rewards": 10.5, **nothing},
        (0, 2): {"obs": [1, 2], "new_obs": [2, 5], "actions": 1, "rewards": 36.0, **nothing, "truncateds": True},
        (1, 3): {
            **{"obs": [11, 3], "new_obs": [12, 5], "actions": 2, "rewards": 16.0},
            **{"terminateds": False, "truncateds": True, "eps_done": True},
        },
    }
    # Terminated agents that see nothing more keep what they saw last.
    assert rows(batch, "b") == {
        (2, 2): {
            **{"obs": [20, 2], "new_obs": [20, 2], "actions": 2, "rewards": 0.0},
            **{"terminateds": True, "truncateds": False, "eps_done": False},
        }
    }


def chain(length: int) -> Any:
    """Environment in which two agents act in odd steps and one in even steps."""
    script: Script = [
        {"obs": {"a_0": t + 1} if t % 2 else {"a_0": t + 1, "a_1": t + 1}, "reward": {"a_0": 1.0, "a_1": 1.0}}
        for t in range(length - 1)
    ]
    last = {"obs": {"a_0": length, "a_1": length}, "reward": {"a_0": 1.0}, "terminated": {"__all__": True}}
    return scripted({"a_0": 0.0}, [*script, last])


@pytest.mark.parametrize("n_step", [1, 3, 7])
def test_fragments_contain_complete_environment_steps(n_step: int) -> None:
    with MultiAgentCollector(count_up, [chain(1), chain(6)]) as collector:
        batches = [collector.collect(n_step=n_step).batch for _ in range(12)]
    assert [batch.count for batch in batches] == [n_step] * 12
    steps = [set(zip(batch["a"]["eps_id"], batch["a"]["t"], strict=True)) for batch in batches if batch.policy_batches]
    assert sum(map(len, steps)) == len(set().union(*steps)) == 12 * n_step
    single = MultiAgentCollector(count_up, [chain(1), chain(6)]).collect(n_step=12 * n_step).batch
    assert len(single["a"]) == sum(len(batch["a"]) for batch in batches)


def test_states_are_preserved_for_agents_that_wait() -> None:
    def recurrent(obs: Any, state: Any) -> Any:
        counts = np.zeros((len(obs), 1)) if state is None else state
        return np.zeros(len(obs), int), counts + 1

    with MultiAgentCollector(recurrent, chain(6)) as collector:
        steps = collector.collect(n_episode=2).batch["a"]
    counts = {
        (int(agent), int(t)): float(state[0])
        for agent, t, state in zip(steps["agent_index"], steps["t"], steps["state_in_0"], strict=True)
    }
    assert counts == {**{(0, t): float(t) for t in range(6)}, (1, 1): 0.0, (1, 3): 1.0, (1, 5): 2.0}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            {"obs": {"a_0": 1, "a_1": 1}, "reward": {"a_1": None}},
            "'rewards' must contain numbers, got a NoneType for agent",
        ),
        ({"obs": {"a_0": 1, "a_1": 1}, "terminated": {"a_1": 0.5}}, "'terminateds' must have dtype bool.* agent 'a_1'"),
        ({"obs": {"a_0": 1}, "truncated": {"__all__": True}}, "final observation for a truncated agent.* 'a_1'"),
    ],
)
def test_values_that_do_not_fit_are_rejected_and_a_new_episode_starts(script: dict[str, Any], message: str) -> None:
    env = scripted({"a_0": 0.0, "a_1": 0.0}, [{"obs": {"a_0": 1, "a_1": 1}}, script])
    with MultiAgentCollector("random", env, seed=1) as collector:
        with pytest.raises(EnvironmentSpecError, match=f"{message}.* from environment 0 in step 1"):
            collector.collect(n_step=5)
        assert len(env.seeds) == 1
        assert collector.collect(n_step=1).batch["a"]["t"].tolist() == [0, 0]


def test_environments_of_rllib_are_collected() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        games = importlib.import_module("ray.rllib.examples.envs.classes.multi_agent")
    carts = games.MultiAgentCartPole({"num_agents": 3})
    with MultiAgentCollector(count_up, carts, policy_mapping=lambda agent: f"p{agent % 2}", seed=1) as collector:
        batch = collector.collect(n_episode=3).batch
    assert set(batch.policy_batches) == {"p0", "p1"}
    for steps in batch.policy_batches.values():
        for _, part in enumerate(steps.split_by_episode()):
            for agent in np.unique(part["agent_index"]):
                of_agent = part[np.asarray(part["agent_index"]) == agent]
                assert of_agent["t"].tolist() == list(range(len(of_agent)))
                assert of_agent["terminateds"].tolist() == [False] * (len(of_agent) - 1) + [True]
                assert np.array_equal(of_agent["obs"][1:], of_agent["new_obs"][:-1])


def make_chain() -> Any:
    return chain(6)


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_workers_step_environments_of_rllib(backend: Any) -> None:
    options = {"num_workers": 2, "seed": 1, "backend": backend}
    with RolloutWorkers("random", make_chain, start_method="fork", **options) as workers:
        fragments = list(workers.fragments(n_step=30, fragment_length=10))
    assert sum(fragment.count for fragment in fragments) == 30
    assert {int(env) for fragment in fragments for env in fragment["a"]["env_id"]} == {0, 1}


def test_single_agent_collectors_recommend_the_multi_agent_one() -> None:
    from samplebatch import Collector

    with pytest.raises(EnvironmentSpecError, match="with several agents; use a MultiAgentCollector"):
        Collector("random", chain(2))


def test_takes_selects_the_arguments_of_policies_of_several_agents() -> None:
    recorded: list[Any] = []

    def policy(s: Any, output: Any) -> Any:
        recorded.extend(output)
        return np.zeros(len(s), int)

    with MultiAgentCollector(as_policy(policy, takes=("obs", "info")), chain(3)) as collector:
        collector.collect(n_episode=1)
    assert recorded == [{"begun": True}, {"step": 1}, {"step": 1}, {"step": 2}]
