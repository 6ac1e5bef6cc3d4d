"""MAPPO: a critic of all agents' observations, in lockstep, and actors of single observations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learning import assert_goes_on
from teams import SPEAKER_LISTENER, SPREAD, actor, adam, joint_critic, spaces_of

from samplebatch import Batch, MultiAgentBatch, MultiAgentCollector, MultiAgentReplayBuffer, RolloutWorkers, SampleBatch
from samplebatch.errors import ArgumentError, ColumnNotFoundError, EmptyBufferError
from samplebatch.learn import (
    MAPPO,
    DiscreteActor,
    DiscreteActorPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    JointCritic,
    Net,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    RecurrentBody,
)

LINE = spaces.Box(-10.0, 10.0, (1,), np.float32)


def spread(seed: int = 0, **options: Any) -> MAPPO:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    return MAPPO(
        policies={"agent": actor(obs, act, seed)}, critic=joint_critic(SPREAD, seed), optim=adam(2e-3), **options
    )


def two_lines(seed: int, steps: int = 6) -> dict[str, Any]:
    """Return an episode of two agents; the second agent joins after one step and leaves before the end."""
    rng = np.random.default_rng(seed)
    t = np.concatenate([np.arange(steps), np.arange(1, steps - 1)])
    agent = np.repeat([0, 1], [steps, steps - 2])
    obs = rng.normal(size=(len(t), 1)).astype(np.float32)
    over = np.zeros(len(t), bool)
    over[-1] = True
    return {
        "obs": obs,
        "new_obs": obs + 1,
        "actions": rng.integers(0, 2, len(t)),
        "rewards": rng.normal(size=len(t)),
        "terminateds": over,
        "truncateds": np.zeros(len(t), bool),
        "eps_id": np.zeros(len(t), np.int64),
        "agent_index": agent,
        "t": t,
    }


def pair(seed: int = 0, **options: Any) -> MAPPO:
    torch.manual_seed(seed)
    critic = JointCritic([LINE, LINE], [8])
    return MAPPO(policies={"one": actor(LINE, spaces.Discrete(2), seed)}, critic=critic, optim=adam(), **options)


def test_observations_of_a_step_are_concatenated_and_missing_agents_are_zero() -> None:
    critic = JointCritic([LINE, spaces.Box(-1, 1, (2,))])
    first = torch.tensor([[5.0], [6.0]]), torch.tensor([0, 1]), torch.tensor([0, 0])
    second = torch.tensor([[7.0, 8.0]]), torch.tensor([1]), torch.tensor([1])
    assert critic.join([first, second]).tolist() == [[5.0, 0.0, 0.0], [6.0, 7.0, 8.0]]


def test_advantages_use_values_of_the_observations_of_all_agents() -> None:
    algorithm, columns = pair(gamma=0.9, gae_lambda=0.8), two_lines(1)
    result = algorithm._add_targets(MultiAgentBatch({"one": SampleBatch(columns)}, 6))["one"]
    expected = []
    for agent in (0, 1):
        rows = np.flatnonzero(columns["agent_index"] == agent)
        values = []
        for shift in (0.0, 1.0):
            joint = np.zeros((6, 2), np.float32)
            joint[columns["t"], columns["agent_index"]] = columns["obs"][:, 0] + shift
            with torch.no_grad():
                values.append(algorithm.critic(torch.from_numpy(joint))[columns["t"][rows], agent].numpy())
        goes_on = ~columns["terminateds"][rows]
        errors = columns["rewards"][rows] + 0.9 * goes_on * values[1] - values[0]
        advantages = np.zeros(len(rows) + 1)
        for row in reversed(range(len(rows))):
            advantages[row] = errors[row] + 0.9 * 0.8 * advantages[row + 1]
        expected.append((advantages[:-1], advantages[:-1] + values[0]))
    advantages, targets = (np.concatenate(parts) for parts in zip(*expected, strict=True))
    np.testing.assert_allclose(result["advantages"], (advantages - advantages.mean()) / advantages.std(), rtol=1e-5)
    np.testing.assert_allclose(result["value_targets"], (targets - targets.mean()) / targets.std(), rtol=1e-4)


def test_the_order_of_rows_does_not_matter() -> None:
    columns = two_lines(2)
    order = np.random.default_rng(0).permutation(len(columns["t"]))
    parameters = []
    for rows in (slice(None), order):
        algorithm = pair()
        batch = MultiAgentBatch({"one": SampleBatch({name: column[rows] for name, column in columns.items()})}, 6)
        torch.manual_seed(3)
        algorithm.update(batch, batch_size=2, repeat=3)
        parameters.append(torch.cat([parameter.flatten() for parameter in algorithm.parameters()]))
    assert torch.equal(*parameters)


def test_the_first_step_follows_the_gradient_of_the_advantages() -> None:
    algorithm, columns = pair(ent_coef=0.0), two_lines(3)
    batch = MultiAgentBatch({"one": SampleBatch(columns)}, 6)
    rows = algorithm._add_targets(batch)["one"]
    policy = algorithm.policy["one"]
    chances = policy(Batch(obs=columns["obs"])).dist.log_prob(torch.as_tensor(columns["actions"]))
    expected = torch.autograd.grad(-(chances * torch.as_tensor(rows["advantages"])).mean(), list(policy.parameters()))
    fresh = pair(ent_coef=0.0)
    part = next(iter(fresh._add_targets(batch).minibatches(99, lockstep=True, device="cpu", floats=torch.float32)))
    loss, _, change = fresh._actor_losses(part)
    assert abs(float(change)) < 1e-6
    actual = torch.autograd.grad(loss, list(fresh.policy["one"].parameters()))
    for first, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, other.to(first), rtol=1e-4, atol=1e-6)


def test_updates_from_a_buffer_and_a_batch_agree() -> None:
    parameters = []
    for buffered in (False, True):
        algorithm = spread()
        buffer = MultiAgentReplayBuffer(1000) if buffered else None
        with MultiAgentCollector(algorithm.policy, SPREAD, buffer, num_envs=2, seed=1) as collector:
            torch.manual_seed(1)
            stats = collector.collect(n_step=60)
        algorithm.update(buffer or stats.batch, batch_size=None, repeat=2)
        parameters.append(torch.cat([parameter.flatten() for parameter in algorithm.parameters()]))
    torch.testing.assert_close(*parameters)


def test_agents_with_different_spaces_have_separate_policies() -> None:
    observations, actions = spaces_of(SPEAKER_LISTENER)
    policies = {
        name: actor(observations[position], actions[position]) for position, name in enumerate(("speaker", "listener"))
    }
    algorithm = MAPPO(policies=policies, critic=joint_critic(SPEAKER_LISTENER), optim=adam())
    with MultiAgentCollector(algorithm.policy, SPEAKER_LISTENER, num_envs=2, seed=1) as collector:
        stats = algorithm.update(collector.collect(n_step=50).batch, batch_size=25, repeat=2)
    assert stats.gradient_steps == 4


def test_a_trainer_trains_with_a_collector_and_tests_with_another() -> None:
    algorithm = spread()
    with (
        MultiAgentCollector(algorithm.policy, SPREAD, MultiAgentReplayBuffer(1000), num_envs=4, seed=1) as training,
        MultiAgentCollector(algorithm.policy, SPREAD, num_envs=2, seed=2) as test,
    ):
        params = OnPolicyTrainerParams(
            training_collector=training,
            test_collector=test,
            max_epochs=2,
            epoch_num_steps=200,
            collection_step_num_env_steps=100,
            update_step_num_repetitions=2,
            test_step_num_episodes=2,
            batch_size=50,
            verbose=False,
        )
        trainer = algorithm.create_trainer(params)
        assert isinstance(trainer, OnPolicyTrainer)
        info = trainer.run()
        assert (info.train_step, info.test_episode) == (400, 6)
        assert algorithm.updates == 4
        assert len(training.buffer) == 0
        assert not algorithm.policy.is_within_training_step


def test_a_trainer_trains_with_workers_that_get_its_weights() -> None:
    algorithm = spread()
    buffer = MultiAgentReplayBuffer(1000)
    with RolloutWorkers(algorithm.policy, SPREAD, buffer, num_workers=1, seed=1, start_method="fork") as workers:
        params = OnPolicyTrainerParams(
            training_collector=workers,
            max_epochs=1,
            epoch_num_steps=200,
            collection_step_num_env_steps=100,
            update_step_num_repetitions=2,
            batch_size=50,
            verbose=False,
        )
        algorithm.run_training(params)
    assert algorithm.updates >= 1


def test_mappo_resumes_from_its_state() -> None:
    batch = MultiAgentBatch({"one": SampleBatch(two_lines(4))}, 6)
    assert_goes_on(pair(1), pair(2), lambda algorithm: algorithm.update(batch, 2, 2))


def test_steps_must_exist_and_identify_their_agent() -> None:
    with pytest.raises(EmptyBufferError, match="must have steps"):
        pair().update(MultiAgentReplayBuffer(10), 2, 1)
    columns = two_lines(5)
    del columns["agent_index"]
    with pytest.raises(ColumnNotFoundError, match="agent_index"):
        pair().update(MultiAgentBatch({"one": SampleBatch(columns)}, 6), 2, 1)


def test_policies_of_other_algorithms_are_rejected() -> None:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    policy: Any = DiscreteQLearningPolicy(model=DiscreteCritic.for_space(Net.for_space(obs), act), action_space=act)
    with pytest.raises(ArgumentError, match="'agent' must be an instance of ProbabilisticActorPolicy, got a DiscreteQ"):
        MAPPO(policies={"agent": policy}, critic=joint_critic(SPREAD), optim=adam())


def test_recurrent_policies_are_rejected() -> None:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    policy = DiscreteActorPolicy(actor=DiscreteActor.for_space(RecurrentBody(obs), act), action_space=act)
    with pytest.raises(ArgumentError, match="policy 'agent' must not be recurrent, because MAPPO"):
        MAPPO(policies={"agent": policy}, critic=joint_critic(SPREAD), optim=adam())


@pytest.mark.long
def test_a_team_learns_to_spread() -> None:
    torch.set_num_threads(1)
    algorithm = spread(gamma=0.95)
    with MultiAgentCollector("random", SPREAD, num_envs=16, seed=3) as collector:
        random = collector.collect(n_episode=200).returns.mean()
    with MultiAgentCollector(algorithm.policy, SPREAD, num_envs=32, seed=1) as collector:
        for _ in range(20):
            stats = collector.collect(n_step=3200)
            algorithm.update(stats.batch, batch_size=400, repeat=10)
    assert stats.returns.mean() > random + 4, "about -25 at random, -19.5 after 64,000 steps"


def test_updates_add_the_observations_of_each_policy_to_its_statistics() -> None:
    algorithm, columns = pair(), two_lines(4)
    algorithm.policy["one"].normalize_observations((1,))
    for count in (1, 2):
        algorithm.update(MultiAgentBatch({"one": SampleBatch(columns)}, 6), batch_size=3)
        statistics = algorithm.policy["one"].obs_rms
        assert statistics is not None
        assert statistics.count.item() == count * len(columns["obs"])
        np.testing.assert_allclose(statistics.mean.numpy(), columns["obs"].astype(np.float64).mean(0), rtol=1e-9)
