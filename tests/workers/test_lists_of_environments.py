"""Workers step environments that are given one by one: names and functions, of one agent or several."""

from __future__ import annotations

from functools import partial
from typing import Any

import arena
import gyms
import numpy as np
import pytest

from samplebatch import AsyncCollector, Collector, MultiAgentCollector, RolloutWorkers
from samplebatch.errors import ArgumentError, EnvironmentSpecError, WorkerError

LADDERS = [partial(gyms.Ladder, number, 4) for number in range(4)]


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize("backend", ["inline", "process"])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_env_ids_are_positions_in_the_list(num_workers: int, backend: Any) -> None:
    options = {"num_workers": num_workers, "envs_per_worker": 4 // num_workers, "backend": backend}
    with RolloutWorkers(stay, LADDERS, start_method="fork", **options) as workers:
        batch = workers.collect(n_step=24).batch
    assert batch["obs"][:, 0].tolist() == batch["env_id"].tolist() == [env for env in range(4) for _ in range(6)]


def test_simultaneous_and_turn_based_agents_are_collected_together() -> None:
    original: list[Any] = [arena.Relay, "mpe2/simple_tag_v3", arena.Bazaar]
    with RolloutWorkers("random", original, num_workers=3, seed=1, backend="inline") as workers:
        several = workers.collect(n_step=30).batch
    with MultiAgentCollector("random", [arena.Relay(), *original[1:]], policy_mapping=str, seed=1) as collector:
        alone = collector.collect(n_step=30).batch
    for batch, agents in ((several, {"runner", "adversary", "agent", "trader"}), (alone, None)):
        assert batch.count == 30
        assert agents is None or set(batch.policy_batches) == agents
        actual = {int(env) for steps in batch.policy_batches.values() for env in steps["env_id"]}
        assert actual == {0, 1, 2}


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (LADDERS[:3], ArgumentError, r"num_workers \* envs_per_worker, 4, got 3"),
        ([*LADDERS[:3], gyms.Ladder(3)], EnvironmentSpecError, "created in its own process, got a Ladder"),
        ([*LADDERS[:3], "CartPoll-v1"], EnvironmentSpecError, "did you mean 'CartPole-v1'"),
        (gyms.Ladder(3), EnvironmentSpecError, "created in its own process, got a Ladder"),
    ],
)
def test_invalid_lists_of_environments_are_rejected(env: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RolloutWorkers("random", env, num_workers=2, envs_per_worker=2)


def test_environments_of_a_list_must_have_equal_spaces() -> None:
    with (
        pytest.raises(WorkerError, match="column 'obs' must have the space of environment 0,"),
        RolloutWorkers(
            "random", [LADDERS[0], "CartPole-v1"], num_workers=1, envs_per_worker=2, backend="inline"
        ) as workers,
    ):
        workers.collect(n_step=2)


def test_all_collectors_accept_lists_of_names_and_functions() -> None:
    original: Any = ["CartPole-v1", "gymnasium.envs.classic_control:CartPoleEnv"]
    with Collector("random", original, seed=1) as collector:
        batches = [collector.collect(n_step=20).batch]
    with AsyncCollector("random", original, seed=1, start_method="fork", wait_num=2) as collector:
        batches.append(collector.collect(n_step=20).batch)
    with RolloutWorkers("random", original, seed=1, backend="inline") as workers:
        batches.append(workers.collect(n_step=20).batch)
    for batch in batches:
        assert batch["obs"].tolist() == batches[0]["obs"].tolist()
