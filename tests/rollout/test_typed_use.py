"""A user's script that builds collectors with every kind of environment and policy is clean in mypy's strict mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strict_mypy import check_types

SOURCE = """
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import SyncVectorEnv
from mpe2 import simple_spread_v3
from pettingzoo import AECEnv, ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from samplebatch import (
    AsyncCollector,
    Batch,
    Collector,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    RandomPolicy,
    RolloutWorkers,
    SampleBatch,
    VectorReplayBuffer,
    as_policy,
)
from samplebatch.service import ReplayClient
from samplebatch.rollout import episode_statistics, load_policy

Array = npt.NDArray[Any]


def of_obs(obs: Array) -> Array:
    return obs[:, 0]


def of_info(obs: Array, info: Batch) -> Array:
    return obs[:, 0]


def of_batch(batch: Batch, state: Array | None = None) -> dict[str, Any]:
    return {"act": batch.obs[:, 0], "state": state}


def make() -> gymnasium.Env[Array, int]:
    return gymnasium.make("CartPole-v1")


vector = SyncVectorEnv([make, make])
buffer = VectorReplayBuffer(100, 2)
with Collector(of_obs, vector, buffer, seed=1) as collector:
    reveal_type(collector.collect(n_step=10).batch)
Collector(of_info, make(), map_action="clip")
Collector(of_batch, [make, "CartPole-v1"], exploration_noise=lambda act, batch: act)
Collector(load_policy("best.pt"), "CartPole-v1", num_envs=3)
Collector("random", partial(gymnasium.make, "CartPole-v1"))
Collector(as_policy(lambda s: s, takes="obs"), make)
Collector(as_policy(lambda s, h: (s, h), takes=("tensor", "state")), make)
Collector(RandomPolicy(vector.single_action_space, seed=1), make)
Collector(vector.single_action_space, [make(), make()])
Collector(torch.nn.Linear(4, 2), make())


def serve(client: ReplayClient) -> None:
    Collector(of_obs, make, client).reset()
    AsyncCollector(of_obs, make, client)
    MultiAgentCollector("random", "mpe2/simple_tag_v3", client)
    RolloutWorkers("random", make, client)


def steps_of(collector: Collector) -> SampleBatch:
    stats = collector.collect(n_step=10)
    print(stats.batch["rewards"].mean(), stats.n_collected_steps)
    return stats.batch


def agents(parallel: ParallelEnv[str, Array, Array], turns: AECEnv[str, Array, Array], rllib: MultiAgentEnv) -> int:
    MultiAgentCollector("random", [parallel, turns, simple_spread_v3.parallel_env])
    stats = MultiAgentCollector({0: of_obs}, rllib, policy_mapping=lambda agent: 0).collect(n_step=5)
    return stats.batch[0].count + stats.batch.count


AsyncCollector(of_obs, [make, "CartPole-v1"], wait_num=2)
several = MultiAgentCollector({"agent": of_obs, "adversary": "random"}, "mpe2/simple_tag_v3", num_envs=2)
reveal_type(several.collect(n_episode=2).batch)
RolloutWorkers({"agent": "module:policy", "adversary": of_obs}, "mpe2/simple_tag_v3", MultiAgentReplayBuffer(8))
with RolloutWorkers(load_policy("best.pt"), [make, "CartPole-v1"], buffer) as workers:
    reveal_type(workers.collect(n_step=5))
    reveal_type(next(workers.fragments(n_step=10)))
reveal_type(as_policy(of_obs))
reveal_type(as_policy(of_obs)(Batch(obs=[1])))
reveal_type(several.collect(n_step=2))
reveal_type(episode_statistics(several.collect(n_step=2).batch))
as_policy(of_obs, takes="observations")
Collector(3, make)
Collector("randm", make)
Collector(of_obs, 3)
Collector(of_obs, make, MultiAgentReplayBuffer(8))
RolloutWorkers(3, make)
MultiAgentCollector("random", make())
"""


@pytest.mark.long
def test_a_user_script_passes_strict_mypy(tmp_path: Path) -> None:
    revealed, errors = check_types(SOURCE, tmp_path)
    assert len(revealed) == 8
    assert revealed[0] == "SampleBatch[ndarray[tuple[Any, ...], dtype[Any]]] | Any"
    assert "Any" not in revealed
    wrong = ['"takes" to "as_policy"', *('1 to "Collector"',) * 2, '2 to "Collector"', '3 to "Collector"']
    wrong += ['1 to "RolloutWorkers"', '2 to "MultiAgentCollector"']
    assert len(errors) == len(wrong), errors
    for error, argument in zip(errors, wrong, strict=True):
        assert f"Argument {argument} has incompatible type" in error
