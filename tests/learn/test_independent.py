"""Independent learners: an algorithm for each policy, with the steps of its agents."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from learning import assert_equal_parameters, assert_goes_on
from teams import SPEAKER_LISTENER, SPREAD, actor, adam, spaces_of

from samplebatch import Batch, MultiAgentCollector, MultiAgentReplayBuffer, PrioritizedReplayBuffer, RolloutWorkers
from samplebatch.errors import ArgumentError, EmptyBufferError, PolicyNotFoundError
from samplebatch.learn import (
    DQN,
    PPO,
    ContinuousDeterministicPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    MultiAgentOffPolicyAlgorithm,
    MultiAgentOnPolicyAlgorithm,
    MultiAgentPolicy,
    Net,
    OffPolicyTrainerParams,
    OnPolicyTrainerParams,
    OUNoise,
    ValueCritic,
)
from samplebatch.workers.workers import WorkerRollouts

ROLES = ("speaker", "listener")


def q_learners(seed: int = 0) -> dict[str, DQN]:
    torch.manual_seed(seed)
    learners = {}
    for role, obs, act in zip(ROLES, *spaces_of(SPEAKER_LISTENER), strict=True):
        model = DiscreteCritic.for_space(Net.for_space(obs, [64]), act)
        policy = DiscreteQLearningPolicy(model=model, action_space=act, eps_training=0.2)
        learners[role] = DQN(policy=policy, optim=adam(), target_update_freq=50)
    return learners


def shared_ppo(seed: int = 0) -> PPO:
    (obs, *_), (act, *_) = spaces_of(SPREAD)
    policy = actor(obs, act, seed)
    return PPO(policy=policy, critic=ValueCritic(Net.for_space(obs, [64])), optim=adam())


def filled(algorithm: Any, env: str, n_step: int = 100, **options: Any) -> MultiAgentReplayBuffer:
    buffer = MultiAgentReplayBuffer(10_000, **options)
    with MultiAgentCollector(algorithm.policy, env, buffer, num_envs=4, seed=1) as collector:
        collector.collect(n_step=n_step)
    return buffer


@pytest.mark.parametrize("kind", [None, PrioritizedReplayBuffer])
def test_each_policy_learns_as_in_a_separate_training(kind: Any) -> None:
    together, alone = MultiAgentOffPolicyAlgorithm(q_learners()), q_learners()
    options = {} if kind is None else {"kind": kind, "alpha": 0.6, "beta": 0.4}
    joint, apart = (filled(together, SPEAKER_LISTENER, **options) for _ in range(2))
    for _ in range(3):
        together.update(joint, 32)
    for role in ROLES:
        for _ in range(3):
            alone[role].update(apart.buffers[role], 32)
        assert_equal_parameters(together.get_algorithm(role), alone[role])
    assert together.updates == 3


def test_agents_that_share_a_policy_train_it_together() -> None:
    algorithm = MultiAgentOnPolicyAlgorithm({"agent": shared_ppo()})
    with MultiAgentCollector(algorithm.policy, SPREAD, num_envs=2, seed=1) as collector:
        batch = collector.collect(n_step=50).batch
    stats = algorithm.update(batch, batch_size=50, repeat=2)
    assert stats.get_loss_stats_dict()["agent/gradient_steps"] == 6, "three agents of 50 steps, twice in parts of 50"


def test_statistics_have_the_names_of_policies() -> None:
    algorithm = MultiAgentOffPolicyAlgorithm(q_learners())
    stats = algorithm.update(filled(algorithm, SPEAKER_LISTENER), 16)
    assert sorted(stats.get_loss_stats_dict()) == ["listener/loss", "speaker/loss"]
    assert stats.train_time > 0


def test_a_trainer_trains_all_policies() -> None:
    algorithm = MultiAgentOffPolicyAlgorithm(q_learners())
    buffer = MultiAgentReplayBuffer(10_000)
    with (
        MultiAgentCollector(algorithm.policy, SPEAKER_LISTENER, buffer, num_envs=4, exploration_noise=True) as training,
        MultiAgentCollector(algorithm.policy, SPEAKER_LISTENER, num_envs=2, seed=2) as test,
    ):
        params = OffPolicyTrainerParams(
            training_collector=training,
            test_collector=test,
            max_epochs=2,
            epoch_num_steps=100,
            collection_step_num_env_steps=20,
            update_step_num_gradient_steps_per_sample=0.1,
            test_step_num_episodes=2,
            batch_size=32,
            verbose=False,
        )
        info = algorithm.run_training(params)
    assert (info.train_step, algorithm.updates) == (200, 20)


def test_a_trainer_trains_on_policy() -> None:
    algorithm = MultiAgentOnPolicyAlgorithm({"agent": shared_ppo()})
    buffer = MultiAgentReplayBuffer(10_000)
    with MultiAgentCollector(algorithm.policy, SPREAD, buffer, num_envs=4) as training:
        params = OnPolicyTrainerParams(
            training_collector=training,
            max_epochs=1,
            epoch_num_steps=100,
            collection_step_num_env_steps=50,
            update_step_num_repetitions=1,
            batch_size=64,
            verbose=False,
        )
        algorithm.run_training(params)
    assert algorithm.updates == 2
    assert len(buffer) == 0


def test_independent_learners_resume_from_their_state() -> None:
    algorithm = MultiAgentOffPolicyAlgorithm(q_learners(1))
    buffer = filled(algorithm, SPEAKER_LISTENER)
    all_rows = {role: len(part) for role, part in buffer.buffers.items()}
    assert all_rows == {"speaker": 100, "listener": 100}
    assert_goes_on(algorithm, MultiAgentOffPolicyAlgorithm(q_learners(2)), lambda first: first.update(buffer, 0))


def test_noises_of_policies_resume_from_the_state_of_all() -> None:
    def drifting() -> MultiAgentPolicy:
        space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
        created = {}
        for policy_id in (1, "two"):
            noise = OUNoise(sigma=0.0, theta=0.5, mu=4.0, dt=1.0)
            created[policy_id] = ContinuousDeterministicPolicy(
                actor=torch.nn.Identity(), action_space=space, exploration_noise=noise
            )
        return MultiAgentPolicy(created)

    policies, fresh = drifting(), drifting()
    act = np.zeros((1, 2))
    policies[1].add_exploration_noise(act, Batch())
    fresh.set_exploration_state(policies.get_exploration_state())
    assert fresh[1].add_exploration_noise(act, Batch()).tolist() == [[3.0, 3.0]]
    assert fresh["two"].add_exploration_noise(act, Batch()).tolist() == [[2.0, 2.0]]


def test_steps_of_workers_count_for_the_schedule_of_the_policy_that_made_them() -> None:
    learners = q_learners()
    algorithm = MultiAgentOffPolicyAlgorithm(learners)
    buffer = MultiAgentReplayBuffer(1000)
    with RolloutWorkers(
        algorithm.policy, SPEAKER_LISTENER, num_workers=1, seed=1, buffer=buffer, backend="inline"
    ) as workers:
        WorkerRollouts(workers, algorithm.policy).collect(50, None)
    assert [int(learners[role].policy._steps) for role in ROLES] == [50, 50]


def test_policies_are_a_mapping_with_weights_for_workers() -> None:
    first, second = (MultiAgentOffPolicyAlgorithm(q_learners(seed)).policy for seed in (1, 2))
    second.load_state_dict(first.state_dict())
    for role in ROLES:
        assert_equal_parameters(first[role], second[role])
    first.is_within_training_step = True
    assert all(policy.is_within_training_step for policy in first.values())
    with pytest.raises(PolicyNotFoundError, match="no policy 'speker'; did you mean 'speaker'"):
        first.load_state_dict({"speker": {}})


def test_missing_steps_and_policies_are_reported() -> None:
    algorithm = MultiAgentOffPolicyAlgorithm({"listener": q_learners()["listener"]})
    with pytest.raises(EmptyBufferError, match="must have steps"):
        algorithm.update(MultiAgentReplayBuffer(10), 4)
    with pytest.raises(PolicyNotFoundError, match="no policy 'speaker'"):
        algorithm.update(filled(MultiAgentOffPolicyAlgorithm(q_learners()), SPEAKER_LISTENER), 4)
    with pytest.raises(ArgumentError, match="at least one policy"):
        MultiAgentPolicy({})


@pytest.mark.long
def test_two_q_learners_learn_the_speaker_listener_task() -> None:
    torch.set_num_threads(1)
    np.random.seed(0)
    algorithm, buffer = MultiAgentOffPolicyAlgorithm(q_learners()), MultiAgentReplayBuffer(20_000)
    with MultiAgentCollector("random", SPEAKER_LISTENER, num_envs=16, seed=3) as collector:
        random = collector.collect(n_episode=200).returns.mean()
    with MultiAgentCollector(
        algorithm.policy, SPEAKER_LISTENER, buffer, num_envs=4, exploration_noise=True, seed=1
    ) as collector:
        for _ in range(100):
            algorithm.policy.is_within_training_step = True
            collector.collect(n_step=100)
            for _ in range(10):
                algorithm.update(buffer, sample_size=64)
    algorithm.policy.is_within_training_step = False
    with MultiAgentCollector(algorithm.policy, SPEAKER_LISTENER, num_envs=16, seed=4) as collector:
        assert collector.collect(n_episode=100).returns.mean() > random + 5


def test_a_printed_line_has_returns_and_losses_of_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithm = MultiAgentOffPolicyAlgorithm(q_learners())
    buffer = filled(algorithm, SPEAKER_LISTENER)
    with MultiAgentCollector(algorithm.policy, SPEAKER_LISTENER, buffer, num_envs=4, seed=1) as collector:
        info = algorithm.run_training(
            OffPolicyTrainerParams(
                training_collector=collector, max_epochs=1, epoch_num_steps=200, collection_step_num_env_steps=100,
                batch_size=8, update_step_num_gradient_steps_per_sample=0.02,
            )
        )  # fmt: skip
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1: updates")]
    assert all(f"return {role} " in line and f"{role}/loss " in line for role in ROLES)
    # Two training steps with two updates each, of one gradient step per policy.
    assert (info.update_step, info.gradient_step) == (2, 8)
    assert "updates 8," in line
