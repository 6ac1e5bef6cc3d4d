"""DDPG learns as its paper and Tianshou have it, and continues from its state."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    DDPG,
    AdamOptimizerFactory,
    ContinuousActorDeterministic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    ImitationPolicy,
    Net,
)
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_goes_on, filled, seeded


def make(seed: int = 0, **options: Any) -> DDPG:
    torch.manual_seed(seed)
    return DDPG(
        policy=ContinuousDeterministicPolicy(
            actor=ContinuousActorDeterministic.for_space(Net.for_space(OBS, [16]), MEASURES), action_space=MEASURES
        ),
        policy_optim=AdamOptimizerFactory(),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        critic_optim=AdamOptimizerFactory(),
        **options,
    )


def update(algorithm: Any, rows: int = 0) -> Any:
    return algorithm.update(filled(actions=MEASURES), rows)


@pytest.mark.parametrize("n_step", [1, 3])
def test_learns_the_same_as_tianshou(n_step: int) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.ddpg import DDPG as TheirDDPG
        from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy as TheirPolicy
    torch.manual_seed(1)
    actor, critic = peers.deterministic_actor(), peers.critic()
    ours = DDPG(
        policy=ContinuousDeterministicPolicy(actor=deepcopy(actor), action_space=MEASURES),
        critic=deepcopy(critic),
        policy_optim=peers.OURS,
        critic_optim=peers.OURS,
        n_step_return_horizon=n_step,
        tau=0.1,
    )
    theirs = TheirDDPG(
        policy=TheirPolicy(actor=actor, action_space=MEASURES),
        critic=critic,
        policy_optim=peers.THEIRS,
        critic_optim=peers.THEIRS,
        n_step_return_horizon=n_step,
        tau=0.1,
    )
    networks = ["policy.actor", "critic", "actor_old.module", "critic_old.module"]
    peers.assert_learn_the_same(ours, theirs, *peers.buffers(MEASURES), networks)


def test_losses_agree_with_the_formulas_for_each_row() -> None:
    algorithm = make(gamma=0.9)
    buffer = filled(actions=MEASURES)
    batch, indices = algorithm._sample_batch(buffer, 0)
    critic, actor = deepcopy(algorithm.critic), deepcopy(algorithm.policy.actor)
    errors = []
    with torch.no_grad():
        for row in range(len(batch)):
            after = batch.obs_next[row][None]
            bootstrap = 0.0 if batch.terminated[row] else critic(after, actor(after)[0]).item()
            target = float(batch.rew[row]) + 0.9 * bootstrap
            errors.append(critic(batch.obs[row][None], batch.act[row][None]).item() - target)
    stats = algorithm._update_with_batch(algorithm._preprocess_batch(batch, buffer, indices))
    assert stats.critic_loss == pytest.approx(np.square(errors).mean(), rel=1e-5)
    np.testing.assert_allclose(batch.weight.numpy(), np.abs(errors), rtol=1e-4, atol=1e-6)
    # The policy's loss is by the critic after its step.
    with torch.no_grad():
        value = algorithm.critic(batch.obs, actor(batch.obs)[0]).mean().item()
    assert stats.actor_loss == pytest.approx(-value, rel=1e-4)


def test_continues_from_its_state() -> None:
    algorithm = make()
    update(algorithm)
    assert_goes_on(algorithm, make(seed=1), update)


def test_discrete_actions_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="action_space must be a Box, got a Discrete"):
        ContinuousDeterministicPolicy(actor=seeded(0, 3, 2), action_space=CHOICES)
    with pytest.raises(ArgumentError, match="instance of ContinuousDeterministicPolicy, got a ImitationPolicy"):
        DDPG(
            policy=ImitationPolicy(actor=seeded(0, 3, 4), action_space=CHOICES),  # type: ignore[arg-type]
            policy_optim=AdamOptimizerFactory(),
            critic=ContinuousCritic.for_space(OBS, MEASURES),
            critic_optim=AdamOptimizerFactory(),
        )


@pytest.mark.parametrize(("option", "value"), [("tau", 1.5), ("gamma", -0.1), ("n_step_return_horizon", 0)])
def test_numbers_out_of_range_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        make(**{option: value})


def test_a_second_critic_is_rejected_with_the_argument_name() -> None:
    with pytest.raises(ArgumentError, match="DDPG has no argument 'critic2'"):
        make(critic2=ContinuousCritic.for_space(OBS, MEASURES))
