"""Running statistics equal NumPy's, and are shared by policies, workers, checkpoints and exported policies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from samplebatch import Batch, Collector, RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    DDPG,
    DQN,
    PPO,
    SAC,
    TD3,
    AdamOptimizerFactory,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActor,
    DiscreteActorPolicy,
    DiscreteQLearningPolicy,
    Net,
    RunningMeanStd,
    SACPolicy,
    ValueCritic,
    policy_within_training_step,
)
from tests.learn.learning import assert_goes_on, filled, random_steps, seeded

ROWS = hnp.arrays(np.float64, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-1e6, 1e6))


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, cuts=st.lists(st.integers(0, 40), max_size=5), merges=st.booleans())
def test_statistics_do_not_depend_on_the_split(rows: Any, cuts: list[int], merges: bool) -> None:
    total = RunningMeanStd((3,))
    for part in np.split(rows, sorted(min(cut, len(rows)) for cut in cuts)):
        worker = RunningMeanStd((3,)) if merges else total
        worker.update(part)
        if merges:
            total.merge(worker)
    scale = max(1.0, float(np.abs(rows).max()))
    assert total.count.item() == len(rows)
    np.testing.assert_allclose(total.mean.numpy(), rows.mean(0), rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(total.var.numpy(), rows.var(0), rtol=1e-9, atol=1e-12 * scale**2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_invalid_rows_do_not_change_the_statistics(value: float) -> None:
    statistics = RunningMeanStd((2,))
    statistics.update(np.array([[1.0, 2.0], [3.0, 4.0]]))
    before = copy.deepcopy(statistics.state_dict())
    with pytest.raises(ArgumentError, match="rows of running statistics must"):
        statistics.update(np.array([[1.0, 1.0], [value, 1.0]]))
    assert all(torch.equal(before[name], tensor) for name, tensor in statistics.state_dict().items())


def test_wrong_shapes_are_rejected() -> None:
    with pytest.raises(ArgumentError, match=r"must have shape \(2,\), got"):
        RunningMeanStd((2,)).update(np.ones((4, 3)))
    with pytest.raises(ArgumentError, match="must have shape"):
        RunningMeanStd((2,)).merge(RunningMeanStd((3,)))
    policy = DiscreteActorPolicy(actor=seeded(0, 3, 2), action_space=spaces.Discrete(2))
    with pytest.raises(PolicySpecError, match="pass the shape of an observation"):
        policy.normalize_observations()


def cart_pole_ppo(seed: int = 0) -> PPO:
    env = gymnasium.make("CartPole-v1")
    torch.manual_seed(seed)
    obs, act = env.observation_space, env.action_space
    actor = DiscreteActor.for_space(Net.for_space(obs, [8]), act)
    policy = DiscreteActorPolicy(actor=actor, action_space=act, observation_space=obs, deterministic_eval=True)
    critic = ValueCritic(Net.for_space(obs, [8]))
    return PPO(
        policy=policy.normalize_observations(), critic=critic, optim=AdamOptimizerFactory(), normalize_rewards=True
    )


def test_updates_add_the_stored_observations_and_tests_add_none() -> None:
    algorithm = cart_pole_ppo()
    policy, buffer = algorithm.policy, VectorReplayBuffer(200, 4)
    collector = Collector(policy, "CartPole-v1", buffer, num_envs=4, seed=0)
    collector.collect(n_step=100)
    obs = buffer.sample(0)[0].obs
    algorithm.update(buffer, 32, 2)
    assert policy.obs_rms is not None
    np.testing.assert_allclose(policy.obs_rms.mean.numpy(), obs.astype(np.float64).mean(0), rtol=1e-9, atol=1e-12)
    Collector(policy, "CartPole-v1", seed=1).collect(n_episode=2)
    assert policy.obs_rms.count.item() == 100
    np.testing.assert_array_equal(buffer.sample(0)[0].obs, obs)
    # A pickled policy normalizes by itself, and so does an exported program.
    rows = torch.as_tensor(obs[:5])
    expected = policy.distribution(Batch(obs=rows))[0].logits
    loaded = pickle.loads(pickle.dumps(policy))
    assert torch.equal(loaded.distribution(Batch(obs=rows))[0].logits, expected)
    program = torch.export.export(torch.nn.Sequential(policy.obs_rms), (rows,)).module()
    assert torch.equal(program(rows), policy.obs_rms(rows))


def test_workers_receive_the_statistics_with_the_weights() -> None:
    algorithm, buffer = cart_pole_ppo(), VectorReplayBuffer(200, 1)
    policy = algorithm.policy
    policy.records_log_probability = True
    with policy_within_training_step(policy):
        workers = RolloutWorkers(policy, "CartPole-v1", buffer, num_workers=1, seed=1, start_method="fork")
    with workers:
        workers.collect(n_step=40)
        algorithm.update(buffer, 32, 1)
        buffer.reset()
        workers.publish(policy.state_dict())
        workers.collect(n_step=40)
    rows, _ = buffer.sample(0, device="cpu")
    assert policy.obs_rms is not None
    assert policy.obs_rms.count.item() == 40
    # The worker's copy computed these with its own statistics.
    expected = policy.distribution(rows)[0].log_prob(rows.act)
    torch.testing.assert_close(rows.action_logp, expected, rtol=1e-5, atol=1e-5)


def test_a_resumed_algorithm_resumes_bit_for_bit() -> None:
    buffer = filled()

    def fresh(seed: int) -> PPO:
        policy = DiscreteActorPolicy(actor=seeded(seed, 3, 8, 4), action_space=spaces.Discrete(4))
        critic = seeded(seed, 3, 8, 1)
        optim = AdamOptimizerFactory(lr=0.01)
        return PPO(policy=policy.normalize_observations((3,)), critic=critic, optim=optim, normalize_rewards=True)

    first, second = fresh(0), fresh(1)
    assert_goes_on(first, second, lambda algorithm: [algorithm.update(buffer, 16, 2) for _ in range(2)])
    state, other = first.state_dict(), second.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state if "_rms" in name)
    assert state["_extra_state"]["discounted_returns"] == other["_extra_state"]["discounted_returns"]


def test_rewards_are_divided_by_the_deviation_of_discounted_returns() -> None:
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=seeded(0, 3, 4), action_space=spaces.Discrete(4)),
        critic=seeded(1, 3, 1),
        optim=AdamOptimizerFactory(),
        normalize_rewards=True,
        gamma=0.9,
    )
    buffer = filled()
    raw, indices = buffer.sample(0)
    returns, running = [], {0: 0.0, 1: 0.0}
    for slot, reward, done in zip(indices, raw.rew, raw.done, strict=True):
        ring = int(slot >= buffer.buffers[0].maxsize)
        running[ring] = 0.9 * running[ring] + float(reward)
        returns.append(running[ring])
        running[ring] *= not done
    batch, _ = algorithm._sample_batch(buffer, 0)
    expected = raw.rew / np.sqrt(np.float32(returns).astype(np.float64).var() + 1e-8)
    np.testing.assert_allclose(batch.rew.numpy(), expected.clip(-10, 10), rtol=1e-4)
    np.testing.assert_array_equal(buffer.sample(0)[0].rew, raw.rew)


def off_policy(kind: str, seed: int = 0) -> Any:
    optim = AdamOptimizerFactory(lr=0.01)
    if kind == "dqn":
        policy = DiscreteQLearningPolicy(model=seeded(seed, 3, 8, 4), action_space=spaces.Discrete(4))
        return DQN(policy=policy.normalize_observations((3,)), optim=optim)
    space = spaces.Box(-2.0, 2.0, (2,), np.float32)
    obs = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    torch.manual_seed(seed)
    critics = {"critic": ContinuousCritic.for_space(obs, space, [8]), "critic_optim": optim}
    if kind == "sac":
        actor = ContinuousActorProbabilistic.for_space(Net.for_space(obs, [8]), space, conditioned_sigma=True)
        return SAC(
            policy=SACPolicy(actor=actor, action_space=space).normalize_observations((3,)),
            policy_optim=optim, **critics,
        )  # fmt: skip
    deterministic = ContinuousActorDeterministic.for_space(Net.for_space(obs, [8]), space)
    td3_policy = ContinuousDeterministicPolicy(actor=deterministic, action_space=space)
    return (TD3 if kind == "td3" else DDPG)(
        policy=td3_policy.normalize_observations((3,)), policy_optim=optim, **critics
    )


@pytest.mark.parametrize("kind", ["dqn", "sac", "td3", "ddpg"])
def test_off_policy_updates_count_each_added_row_once(kind: str) -> None:
    algorithm = off_policy(kind)
    actions = spaces.Discrete(4) if kind == "dqn" else spaces.Box(-1.0, 1.0, (2,), np.float32)
    steps = random_steps(0, 90, 2, actions)
    # The ring of 50 rows per environment wraps around, and some updates see no new row.
    buffer = VectorReplayBuffer(100, 2, random_seed=1)
    for number, step in enumerate(steps):
        buffer.add(step)
        if number % 7 == 6:
            algorithm.update(buffer, 16)
            algorithm.update(buffer, 16)
    algorithm.update(buffer, 16)
    observed = np.concatenate([step.obs for step in steps]).astype(np.float64)
    statistics = algorithm.policy.obs_rms
    assert statistics.count.item() == 180
    np.testing.assert_allclose(statistics.mean.numpy(), observed.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(statistics.var.numpy(), observed.var(0), rtol=1e-9)
    buffer.reset()
    buffer.add(steps[0])
    algorithm.update(buffer, 4)
    assert statistics.count.item() == 182
    # Another buffer, and rows that are no buffer.
    algorithm.update(filled(steps=5, actions=actions), 4)
    algorithm.update(buffer.sample(6)[0])
    assert statistics.count.item() == 198


@pytest.mark.parametrize("kind", ["dqn", "sac", "td3"])
def test_a_resumed_off_policy_algorithm_counts_no_row_twice(kind: str) -> None:
    buffer = filled(actions=spaces.Discrete(4) if kind == "dqn" else spaces.Box(-1.0, 1.0, (2,), np.float32))
    first, second = off_policy(kind, 0), off_policy(kind, 1)
    assert_goes_on(first, second, lambda algorithm: [algorithm.update(buffer, 0) for _ in range(2)])
    assert second.policy.obs_rms.count.item() == 80
    assert copy.deepcopy(first).policy.obs_rms.count.item() == 80


@pytest.mark.parametrize("kind", ["sac", "td3", "ddpg"])
def test_critics_see_normalized_observations(kind: str) -> None:
    plain, normalized = off_policy(kind), off_policy(kind)
    plain.policy.obs_rms = None
    normalized.policy.obs_rms.update(np.array([[5.0, 5.0, 5.0], [7.0, 7.0, 7.0]]))
    rows = torch.tensor([[6.0, 7.0, 5.0]])
    act = torch.zeros(1, 2)
    expected = plain._action_value(plain.critic, (rows - 6.0).double().div(np.sqrt(1.0 + 1e-8)).float(), act)
    torch.testing.assert_close(normalized._action_value(normalized.critic, rows, act), expected)


def test_observations_that_are_not_finite_stop_the_update_and_are_not_counted() -> None:
    algorithm, buffer = off_policy("dqn"), filled(steps=4)
    algorithm.update(buffer, 8)
    bad = random_steps(1, 1, 2, spaces.Discrete(4))[0]
    bad.obs[0, 0] = np.nan
    buffer = VectorReplayBuffer(8, 2)
    buffer.add(bad)
    with pytest.raises(ArgumentError, match="must be finite, got NaN or infinity in 1 of 2 rows"):
        algorithm.update(buffer, 8)
    assert algorithm.policy.obs_rms.count.item() == 8


def test_tianshous_normalizing_vector_environments_collect() -> None:
    tianshou = pytest.importorskip("tianshou.env")

    def envs() -> Any:
        return tianshou.DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)

    train, test = tianshou.VectorEnvNormObs(envs()), tianshou.VectorEnvNormObs(envs(), update_obs_rms=False)
    test.set_obs_rms(train.get_obs_rms())
    buffer = VectorReplayBuffer(200, 2)
    Collector("random", train, buffer, seed=1).collect(n_step=200)
    count = train.get_obs_rms().count
    assert count >= 200
    np.testing.assert_allclose(buffer.obs[150:].std(0), np.ones(4), atol=0.5)
    Collector("random", test, seed=2).collect(n_episode=2)
    assert test.get_obs_rms().count == count
