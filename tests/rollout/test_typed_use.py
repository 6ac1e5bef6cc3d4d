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
from gymnasium.vector import SyncVectorEnv

from samplebatch import (
    AsyncCollector,
    Batch,
    Collector,
    MultiAgentCollector,
    RandomPolicy,
    RolloutWorkers,
    VectorReplayBuffer,
    as_policy,
)
from samplebatch.rollout import environment_kind, load_policy, make_environment, policy_by_kind

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
AsyncCollector(of_obs, [make, "CartPole-v1"], wait_num=2)
several = MultiAgentCollector("mpe2/simple_tag_v3", {"agent": of_obs, "adversary": "random"}, num_envs=2)
reveal_type(several.collect(n_episode=2).batch)
with RolloutWorkers([make, "CartPole-v1"], load_policy("best.pt"), n_step=10) as workers:
    reveal_type(workers.collect(n_step=5))
reveal_type(as_policy(of_obs))
reveal_type(as_policy(of_obs)(Batch(obs=[1])))
reveal_type(environment_kind(make_environment("CartPole-v1")))
reveal_type(policy_by_kind(make())("agent_0"))
as_policy(of_obs, takes="observations")
"""


@pytest.mark.long
def test_a_script_of_a_user_under_strict_mypy(tmp_path: Path) -> None:
    revealed, errors = check_types(SOURCE, tmp_path)
    assert len(revealed) == 7
    assert revealed[0] == "SampleBatch[ndarray[tuple[Any, ...], dtype[Any]]] | None"
    assert "Any" not in revealed
    assert len(errors) == 1, errors
    assert 'Argument "takes" to "as_policy" has incompatible type' in errors[0]
