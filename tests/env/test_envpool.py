"""EnvPool, which is a `gymnasium.Env` and a vector environment at once, is stepped as the latter."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest

from samplebatch import Collector, RolloutWorkers, VectorReplayBuffer
from samplebatch.env.as_environments import as_environments
from samplebatch.env.gymnasium import EnvPoolEnvironments
from samplebatch.env.registry import environment_kind
from samplebatch.errors import EnvironmentSpecError


def make_pool(name: str = "CartPole-v1", **options: Any) -> Any:
    envpool = pytest.importorskip("envpool")
    with warnings.catch_warnings():
        # Its spaces are made when they are first asked for, and of another dtype than they are given in.
        warnings.simplefilter("ignore")
        pool = envpool.make(name, env_type="gymnasium", **{"num_envs": 3, "seed": 7, **options})
        assert pool.observation_space is not None
    return pool


def lean(obs: Any) -> Any:
    return (obs[:, 2] > 0).astype(int)


def step_by_hand(pool: Any, steps: int) -> list[list[tuple[Any, ...]]]:
    """List the transitions of each environment: observations, reward, flags."""
    actual: list[list[tuple[Any, ...]]] = [[] for _ in range(len(pool))]
    obs, _ = pool.reset()
    ended = np.zeros(len(pool), bool)
    for _ in range(steps):
        new_obs, *outcome, _ = pool.step(lean(obs))
        for env in np.flatnonzero(~ended):
            actual[env].append((obs[env].tolist(), new_obs[env].tolist(), *(part[env].item() for part in outcome)))
        obs, ended = new_obs, outcome[1] | outcome[2]
    return actual


@pytest.mark.parametrize("max_episode_steps", [500, 20])
def test_transitions_agree_with_the_pool(max_episode_steps: int) -> None:
    assert environment_kind(make_pool()) == "vector"
    with Collector(lean, make_pool(max_episode_steps=max_episode_steps)) as collector:
        batch = collector.collect(n_step=600).batch
    by_hand = step_by_hand(make_pool(max_episode_steps=max_episode_steps), 300)
    names = ("obs", "new_obs", "rewards", "terminateds", "truncateds")
    assert np.unique(batch["env_id"]).tolist() == [0, 1, 2]
    for env, expected in enumerate(by_hand):
        rows = batch[np.asarray(batch["env_id"]) == env]
        result = [*zip(*(np.asarray(rows[name]).tolist() for name in names), strict=True)]
        assert result == expected[: len(result)]
        assert len(result) > 150
    assert batch["truncateds"].any() == (max_episode_steps == 20)
    assert batch["rewards"].dtype == np.float64
    # What it says of every step, other columns say.
    assert not any(batch["infos"])


def test_episodes_are_counted_and_buffers_filled() -> None:
    with Collector(lean, make_pool()) as collector:
        assert collector.collect(n_episode=7).lens.shape == (7,)
        assert collector.collect(n_episode=2).lens.shape == (2,)
    buffer = VectorReplayBuffer(90, 3)
    with Collector("random", make_pool("Pendulum-v1"), buffer, seed=1) as filling:
        filling.collect(n_step=90)
    assert len(buffer) == 90


def test_infos_of_its_environments_are_preserved() -> None:
    pool = make_pool("FrozenLake-v1")
    reported = pool.reset()[1].keys() - {"env_id", "elapsed_step", "players"}
    with Collector("random", pool, seed=1) as collector:
        infos = collector.collect(n_step=9).batch["infos"]
    assert all(info.keys() == reported for info in infos)


def test_a_wrapped_pool() -> None:
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_pool())
    assert isinstance(as_environments(wrapped), EnvPoolEnvironments)
    with Collector(lean, wrapped) as collector:
        stats = collector.collect(n_episode=4)
    reported = [info["episode"]["r"] for info in stats.batch["infos"] if "episode" in info]
    assert sorted(reported) == sorted(stats.returns)


def test_workers_create_pools() -> None:
    with RolloutWorkers("random", make_pool, num_workers=1, backend="inline") as workers:
        fragments = list(workers.fragments(n_step=24))
    assert sum(len(fragment) for fragment in fragments) == 24


def test_a_pool_that_does_not_step_all_environments_together_is_rejected() -> None:
    with pytest.raises(EnvironmentSpecError, match="with batch_size=3, got 2"):
        Collector("random", make_pool(batch_size=2))
