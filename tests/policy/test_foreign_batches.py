"""Tianshou's Batch as policy output, recurrent state and observation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import arena
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from samplebatch import Batch, Collector, MultiAgentCollector, VectorReplayBuffer
from samplebatch.policy.as_policy import as_policy
from tests.optional import torch

tianshou = pytest.importorskip("tianshou.data")


@dataclass
class Memory:
    """Recurrent state with named parts."""

    hidden: Any
    cell: Any


STATES = {"tianshou": tianshou.Batch, "ours": Batch, "dataclass": lambda parts: Memory(**parts), "dict": dict}


class Counting:
    """Policy that counts the steps of each episode in a state of some kind, and records received states."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.seen: list[Any] = []

    def __call__(self, batch: Any, state: Any = None) -> Any:
        self.seen.append(state)
        count = len(batch.obs)
        hidden = np.ones((count, 1)) if state is None else _get(state, "hidden") + 1
        cell = torch.ones(count, 2) if state is None else _get(state, "cell") + 1
        act = np.zeros(count, np.int64)
        result = {"hidden": hidden, "cell": cell}
        return {"act": act, "state": self.make(result), "policy": tianshou.Batch(twice=2 * hidden)}


def _get(state: Any, name: str) -> Any:
    return getattr(state, name) if isinstance(state, Memory) else state[name]


@pytest.mark.parametrize("kind", [*STATES])
def test_states_are_returned_with_their_types(kind: str) -> None:
    policy = Counting(STATES[kind])
    with Collector(policy, "CartPole-v1", num_envs=3, seed=1) as collector:
        batch = collector.collect(n_step=120).batch
    assert {type(state) for state in policy.seen[1:]} == {type(STATES[kind]({"hidden": 0, "cell": 0}))}
    assert np.asarray(batch["state_in"]["hidden"])[:, 0].tolist() == batch["t"].tolist()
    assert np.asarray(batch["state_in"]["cell"])[:, 1].tolist() == batch["t"].tolist()


def test_states_of_tianshou_are_stored_in_buffers_and_for_agents() -> None:
    buffer = VectorReplayBuffer(60, 2)
    with Collector(Counting(tianshou.Batch), "CartPole-v1", buffer, num_envs=2, seed=1) as collector:
        collector.collect(n_step=60)
    assert buffer.policy.hidden_state.hidden.shape == (60, 1)
    assert buffer.policy.twice.max() > 2
    with MultiAgentCollector(Counting(tianshou.Batch), arena.Relay()) as several:
        steps = several.collect(n_episode=2).batch["runner"]
    assert len(steps) > 20
    for episode in steps.split_by_episode():
        for agent in np.unique(episode["agent_index"]):
            rows = episode[np.asarray(episode["agent_index"]) == agent]
            hidden = rows["state_in"]["hidden"][:, 0].tolist()
            # One who comes back begins again.
            assert hidden[0] == 0
            assert all(after in (0, before + 1) for before, after in itertools.pairwise(hidden))


def test_a_recurrent_network_of_tianshou_continues_from_its_state() -> None:
    networks = pytest.importorskip("tianshou.utils.net.common")
    torch.manual_seed(0)
    network = networks.Recurrent(layer_num=1, state_shape=4, action_shape=2, hidden_layer_size=8)

    def policy(batch: Any, state: Any = None) -> Any:
        with torch.no_grad():
            scores, after = network(batch.obs, state)
        return tianshou.Batch(act=scores.argmax(1), state=after)

    with Collector(policy, "CartPole-v1", num_envs=2, seed=3) as collector:
        batch = collector.collect(n_step=60).batch
    for part in batch.split_by_episode():
        state = None
        for row in range(len(part)):
            if state is not None:
                assert np.allclose(part["state_in"]["hidden"][row], state["hidden"][0])
            act = policy(tianshou.Batch(obs=part["obs"][row : row + 1]), state)
            assert act.act.tolist() == part["actions"][row : row + 1].tolist()
            state = act.state


class Seeing(gymnasium.Env):
    """Environment that returns observations as Tianshou batches."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            camera=spaces.Box(-9, 9, (2,), np.float32), arms=spaces.Tuple([spaces.Discrete(9), spaces.Discrete(9)])
        )
        self.action_space = spaces.Discrete(2)

    def _see(self) -> Any:
        camera = np.full(2, self._step, np.float32)
        return tianshou.Batch(camera=camera, arms={"0": self._step, "1": 8 - self._step})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._see(), 1.0, self._step == 4, False, {}


def test_observations_may_be_tianshou_batches() -> None:
    with Collector("random", [Seeing(), Seeing()], seed=1) as collector:
        batch = collector.collect(n_step=8).batch
    assert batch["obs"]["camera"][:, 0].tolist() == [0, 1, 2, 3] * 2
    assert batch["new_obs"]["arms"][1].tolist() == [7, 6, 5, 4] * 2


class Several(arena.Relay):
    """Relay whose observations are Tianshou batches."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(seen=super().observation_space(agent))

    def reset(self, *args: Any, **options: Any) -> Any:
        observations, infos = super().reset(*args, **options)
        return {agent: tianshou.Batch(seen=part) for agent, part in observations.items()}, infos

    def step(self, actions: Any) -> Any:
        observations, *others = super().step(actions)
        return ({agent: tianshou.Batch(seen=part) for agent, part in observations.items()}, *others)


@pytest.mark.parametrize("policy", ["random", lambda obs: np.zeros(len(obs.seen), int)])
def test_observations_of_agents_may_be_tianshou_batches(policy: Any) -> None:
    steps, plain = (
        MultiAgentCollector(policy if make is Several else "random", make(), seed=1)
        .collect(n_episode=2)
        .batch["runner"]
        for make in (Several, arena.Relay)
    )
    assert steps["obs"]["seen"].tolist() == plain["obs"].tolist()
    assert steps["new_obs"]["seen"].tolist() == plain["new_obs"].tolist()


def test_actions_of_several_parts_may_be_a_tianshou_batch() -> None:
    space = spaces.Dict(steer=spaces.Box(-1, 1, (2,)), gears=spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]))
    parts = tianshou.Batch(steer=np.zeros((3, 2)), gears={"0": np.zeros(3, int), "1": np.array([1, 1, 2])})
    original = SimpleNamespace(obs=np.zeros((3, 1)))
    for result in (parts, tianshou.Batch(act=parts)):
        act = as_policy(lambda obs, result=result: result, space)(original)["act"]
        assert act.steer.shape == (3, 2)
        assert act.gears["1"].tolist() == [1, 1, 2]
