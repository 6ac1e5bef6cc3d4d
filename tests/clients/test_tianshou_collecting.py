"""Scripts of Tianshou's users that collect: its vector environments in our collectors, and our buffers in its own."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from actors import Upright
from gyms import make_cart_pole

from samplebatch import (
    AsyncCollector,
    CachedReplayBuffer,
    Collector,
    HERVectorReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.errors import ArgumentError, EnvironmentSpecError, PolicySpecError
from samplebatch.rollout import CollectStats, RolloutWorkers

pytest.importorskip("tianshou.data")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tianshou.data
    from tianshou.env import DummyVectorEnv, RayVectorEnv, SubprocVectorEnv, VectorEnvNormObs

    from benchmarks.training.tianshou_setup import q_policy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

ENVS = 3


VECTORS = {
    "Dummy": DummyVectorEnv,
    # The default start method on Linux; other libraries change the default of the process.
    "Subproc": partial(SubprocVectorEnv, context="fork"),
    # What ShmemVectorEnv creates, which has no parameter for the start method.
    "Shmem": partial(SubprocVectorEnv, share_memory=True, context="fork"),
}


@pytest.fixture(params=VECTORS)
def vector(request: Any) -> Iterator[Any]:
    envs = VECTORS[request.param]([make_cart_pole for _ in range(ENVS)])
    yield envs
    if not envs.is_closed:
        envs.close()


def test_the_seed_document_collects_from_tianshou_vectors(vector: Any) -> None:
    vec_buffer = VectorReplayBuffer(total_size=10000, buffer_num=3)
    collector = Collector[CollectStats](Upright(), vector, buffer=vec_buffer)
    assert isinstance(collector, Collector)
    stats = collector.collect(n_episode=3)
    assert stats.n_collected_episodes == 3
    assert stats.returns_stat is not None
    assert stats.returns_stat.mean == stats.lens.mean()
    assert len(vec_buffer) == stats.n_collected_steps == stats.lens.sum()
    assert collector.collect(n_step=2).n_collected_steps >= 2
    assert collector.collect_step == len(vec_buffer)
    collector.close()
    assert vector.is_closed
    collector.close()


def test_tianshou_vectors_give_the_trajectories_of_gymnasium(vector: Any) -> None:
    with (
        Collector(Upright(), vector, seed=4) as theirs,
        Collector(Upright(), make_cart_pole, num_envs=ENVS, seed=4) as ours,
    ):
        for amounts in ({"n_step": 200}, {"n_episode": 4}):
            actual, expected = theirs.collect(**amounts).batch, ours.collect(**amounts).batch
            for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "env_id", "t"):
                np.testing.assert_array_equal(actual[name], expected[name])
            assert list(actual["infos"]) == list(expected["infos"])


def test_ray_vectors_collect() -> None:
    ray = pytest.importorskip("ray")
    # Without an address Ray looks for the cluster of an earlier process, which may have ended, for two minutes.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        envs = RayVectorEnv([make_cart_pole for _ in range(2)])
        with Collector(Upright(), envs, VectorReplayBuffer(100, 2), seed=1) as collector:
            assert collector.collect(n_step=40).n_collected_steps == 40
    finally:
        ray.shutdown()


def test_seeds_given_to_a_tianshou_vector_remain() -> None:
    def first_episodes(env_seed: int, **options: Any) -> SampleBatch:
        envs = DummyVectorEnv([make_cart_pole for _ in range(ENVS)])
        envs.seed(env_seed)
        with Collector(Upright(), envs, **options) as collector:
            return collector.collect(n_episode=5).batch

    np.testing.assert_array_equal(first_episodes(1)["obs"], first_episodes(1)["obs"])
    assert first_episodes(1)["obs"][0].tolist() != first_episodes(2)["obs"][0].tolist()
    # The collector's own seed takes precedence.
    np.testing.assert_array_equal(first_episodes(1, seed=3)["obs"], first_episodes(2, seed=3)["obs"])


def test_a_collector_of_a_tianshou_vector_resumes_exactly() -> None:
    def make() -> Collector:
        return Collector(Upright(), DummyVectorEnv([make_cart_pole for _ in range(ENVS)]), seed=5)

    with make() as collector, make() as resumed:
        collector.collect(n_step=50)
        state = pickle.loads(pickle.dumps(collector.state_dict()))
        assert state["why_reset"] is None
        resumed.load_state_dict(state, allow_pickle=True)
        first, other = (each.collect(n_step=60).batch for each in (collector, resumed))
        np.testing.assert_array_equal(first["obs"], other["obs"])
        np.testing.assert_array_equal(first["t"], other["t"])


def test_the_state_of_environments_in_processes_is_omitted() -> None:
    with Collector(Upright(), VECTORS["Subproc"]([make_cart_pole] * 2), seed=5) as collector:
        collector.collect(n_step=20)
        assert collector.state_dict()["why_reset"]


def test_normalized_observations_of_tianshou_are_collected() -> None:
    envs = VectorEnvNormObs(DummyVectorEnv([make_cart_pole for _ in range(ENVS)]))
    buffer = VectorReplayBuffer(300, ENVS)
    with Collector(Upright(), envs, buffer, seed=1) as collector:
        collector.collect(n_step=300)
        assert envs.get_obs_rms().count >= 300
        assert 0.2 < buffer[:].obs.std() < 3


def test_an_async_collector_uses_the_functions_of_a_tianshou_vector() -> None:
    envs = DummyVectorEnv([make_cart_pole for _ in range(ENVS)], wait_num=2)
    with pytest.raises(EnvironmentSpecError, match="wait_num=2 and timeout=None; use an AsyncCollector"):
        Collector(Upright(), envs)
    with AsyncCollector[CollectStats](Upright(), envs, VectorReplayBuffer(300, ENVS), seed=1) as collector:
        assert collector.num_envs == ENVS
        assert collector.collect(n_episode=3).n_collected_episodes == 3
    with RolloutWorkers(Upright(), envs, num_workers=1, envs_per_worker=ENVS) as workers:
        assert len(workers.collect(n_step=30).batch) >= 30
    envs.close()


def test_mistakes_with_tianshou_vectors_are_reported() -> None:
    envs = DummyVectorEnv([make_cart_pole for _ in range(ENVS)])
    with pytest.raises(ArgumentError, match="num_envs must be 3"):
        Collector(Upright(), envs, num_envs=2)
    with pytest.raises(ArgumentError, match="got env first and policy second"):
        Collector(envs, Upright())
    with pytest.raises(ArgumentError, match="a ring for each of 3 environments, got 1"):
        Collector(Upright(), envs, ReplayBuffer(10))
    envs.close()
    with pytest.raises(EnvironmentSpecError, match="must be open, got a closed DummyVectorEnv"):
        Collector(Upright(), envs)
    mixed = DummyVectorEnv([make_cart_pole, lambda: gymnasium.make("Acrobot-v1")])
    with pytest.raises(EnvironmentSpecError, match=r"the space of environment 0, .* got .* from environment 1"):
        Collector(Upright(), mixed)
    mixed.close()
    collector = Collector(lambda obs: np.zeros(7, int), DummyVectorEnv([make_cart_pole] * 2))
    with collector, pytest.raises(PolicySpecError):
        collector.collect(n_step=2)


BUFFERS: dict[str, Callable[[], ReplayBuffer]] = {
    "vector": lambda: VectorReplayBuffer(3000, ENVS),
    "prioritized": lambda: PrioritizedVectorReplayBuffer(3000, ENVS, alpha=0.6, beta=0.4),
    "cached": lambda: CachedReplayBuffer(ReplayBuffer(3000), ENVS, 600),
    "hindsight": lambda: HERVectorReplayBuffer(3000, ENVS, compute_reward_fn=lambda *_: 0.0, horizon=10),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_tianshou_collects_into_vector_replay_buffers(kind: str) -> None:
    buffer = BUFFERS[kind]()
    envs = DummyVectorEnv([make_cart_pole for _ in range(ENVS)])
    collector = tianshou.data.Collector[tianshou.data.CollectStats](q_policy(envs), envs, buffer)
    collector.reset()
    stats = collector.collect(n_episode=9)
    assert stats.n_collected_episodes == 9
    assert len(buffer) == stats.n_collected_steps == stats.lens.sum()
    # Hindsight draws rows of environments with goals alone.
    batch = buffer[:] if kind == "hindsight" else buffer.sample(16).batch
    assert batch.obs.shape[1] == 4
    ends = buffer[:].done
    assert ends.sum() == 9


def test_tianshou_saves_buffers_of_this_library() -> None:
    envs = DummyVectorEnv([make_cart_pole for _ in range(ENVS)])
    stored: list[Any] = []
    policy = q_policy(envs)
    for buffer in (VectorReplayBuffer(60, ENVS), tianshou.data.VectorReplayBuffer(60, ENVS)):
        hook = tianshou.data.collector.EpisodeRolloutHookMCReturn()
        collector = tianshou.data.Collector(policy, envs, buffer, on_episode_done_hook=hook)
        collector.reset(gym_reset_kwargs={"seed": 3})
        collector.collect(n_episode=6)
        stored.append(buffer)
    ours, theirs = stored
    for name in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "full_episode_mc_return"):
        np.testing.assert_array_equal(ours[:][name], theirs[:][name])


def test_buffers_are_instances_of_tianshou_classes_and_keep_their_type() -> None:
    buffer = VectorReplayBuffer(6, 2)
    assert isinstance(buffer, tianshou.data.ReplayBufferManager)
    assert isinstance(buffer, VectorReplayBuffer | tianshou.data.VectorReplayBuffer)
    assert not isinstance(buffer, tianshou.data.PrioritizedReplayBuffer)
    assert isinstance(ReplayBuffer(3), tianshou.data.ReplayBuffer)
    assert not isinstance(ReplayBuffer(3), tianshou.data.ReplayBufferManager)

    class Mine(VectorReplayBuffer):
        pass

    assert isinstance(Mine(6, 2), tianshou.data.VectorReplayBuffer)
    for restored in (copy.copy(buffer), copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert type(restored) is VectorReplayBuffer
    assert type(pickle.loads(pickle.dumps(buffer, protocol=2))) is VectorReplayBuffer
