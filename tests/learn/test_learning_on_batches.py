"""Algorithms and policies learn on train batches, as RLlib's do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from samplebatch import Batch, Collector, MultiAgentCollector, SampleBatch, VectorReplayBuffer
from samplebatch.errors import ArgumentError, EmptyBufferError, PolicySpecError
from samplebatch.learn import (
    DQN,
    PPO,
    AdamOptimizerFactory,
    DiscreteActorPolicy,
    DiscreteCritic,
    DiscreteQLearningPolicy,
    MultiAgentOffPolicyAlgorithm,
    MultiAgentOnPolicyAlgorithm,
    Net,
)
from tests.learn.learning import parameters_of


def dqn(width: int = 4, choices: int = 2, **options: Any) -> DQN:
    torch.manual_seed(0)
    policy = DiscreteQLearningPolicy(model=Net(width, choices, [8]), action_space=spaces.Discrete(choices))
    return DQN(policy=policy, optim=AdamOptimizerFactory(), target_update_freq=2, **options)


def ppo(width: int = 4, choices: int = 2) -> PPO:
    torch.manual_seed(0)
    policy = DiscreteActorPolicy(actor=Net(width, choices, [8]), action_space=spaces.Discrete(choices))
    return PPO(policy=policy, critic=DiscreteCritic(Net(width, hidden_sizes=[8])), optim=AdamOptimizerFactory())


def collected(policy: Any, steps: int = 60) -> SampleBatch:
    with Collector(policy, "CartPole-v1", num_envs=2, seed=1) as collector:
        batch: SampleBatch = collector.collect(n_step=steps).batch
        return batch


def assert_alike(first: Any, other: Any) -> None:
    for left, right in zip(parameters_of(first), parameters_of(other), strict=True):
        torch.testing.assert_close(left, right, rtol=0.0, atol=0.0)


def test_on_policy_updates_from_a_batch_and_a_buffer_agree() -> None:
    from_batch, from_buffer = ppo(), ppo()
    batch = collected(from_batch.policy)
    buffer = VectorReplayBuffer(120, 1)
    buffer.extend(batch)
    for algorithm, source in ((from_batch, batch), (from_buffer, buffer)):
        torch.manual_seed(3)
        algorithm.update(source, batch_size=16, repeat=2)
    assert_alike(from_batch, from_buffer)


def test_off_policy_updates_from_a_batch_and_a_buffer_agree() -> None:
    from_batch, from_buffer = dqn(), dqn()
    batch = collected("random")
    buffer = VectorReplayBuffer(120, 1)
    buffer.extend(batch)
    rows = buffer.sample(0).batch
    from_buffer.update(buffer, 0)
    from_batch.update(rows)
    assert_alike(from_batch, from_buffer)
    assert from_batch.policy.learn_on_batch(batch)["num_agent_steps_trained"] == len(batch)


def test_the_train_batch_of_older_documents_is_accepted() -> None:
    """Columns of RLlib's documentation, with `dones` as the only flag."""
    rng = np.random.default_rng(0)
    train_batch = SampleBatch(
        obs=rng.normal(size=(20, 4)).astype(np.float32),
        new_obs=rng.normal(size=(20, 4)).astype(np.float32),
        actions=rng.integers(2, size=20),
        rewards=np.ones(20, np.float32),
        dones=np.arange(20) % 10 == 9,
        action_logp=np.full(20, -0.69, np.float32),
        t=np.arange(20) % 10,
    )
    for algorithm in (dqn(), ppo()):
        before = parameters_of(algorithm.policy)
        report = algorithm.policy.learn_on_batch(train_batch)
        assert {"learner_stats", "num_agent_steps_trained", "num_grad_updates_lifetime"} == set(report)
        assert report["num_grad_updates_lifetime"] == 1
        assert np.isfinite(report["learner_stats"]["loss"])
        assert any(not torch.equal(a, b) for a, b in zip(before, parameters_of(algorithm.policy), strict=True))


@pytest.mark.parametrize("make", [dqn, ppo])
def test_several_policies_learn_on_a_batch_of_several(make: Any) -> None:
    kind: Any = MultiAgentOffPolicyAlgorithm if make is dqn else MultiAgentOnPolicyAlgorithm
    algorithm = kind({"adversary": make(16, 5), "agent": make(14, 5)})
    with MultiAgentCollector(algorithm.policy, "mpe2/simple_tag_v3", seed=1) as collector:
        batch = collector.collect(n_step=30).batch
    stats = algorithm.update(batch).get_loss_stats_dict()
    assert {name.partition("/")[0] for name in stats} == {"adversary", "agent"}
    first = algorithm.policy["agent"].learn_on_batch(batch["agent"])
    assert first["num_agent_steps_trained"] == len(batch["agent"])


def test_copies_of_a_policy_have_no_associated_algorithm() -> None:
    algorithm = dqn()
    for policy in (copy.deepcopy(algorithm.policy), pickle.loads(pickle.dumps(algorithm.policy))):
        assert_alike(policy, algorithm.policy)
        with pytest.raises(PolicySpecError, match="must have an algorithm to learn on a batch, got none"):
            policy.learn_on_batch(collected("random", 4))


def test_batches_that_cannot_be_learned_from_are_rejected() -> None:
    batch = collected("random", 20)
    with pytest.raises(ArgumentError, match="n_step_return_horizon must be 1 for rows that are single steps, got 3"):
        dqn(n_step_return_horizon=3).update(batch)
    with pytest.raises(ArgumentError, match="sample_size must be None for a batch, which is used in full, got 8"):
        dqn().update(batch, 8)
    for algorithm in (dqn(), ppo()):
        with pytest.raises(EmptyBufferError):
            algorithm.update(batch[:0])
        with pytest.raises(EmptyBufferError):
            algorithm.update(Batch())
