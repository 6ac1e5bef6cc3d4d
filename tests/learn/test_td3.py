"""TD3 learns as its paper and Tianshou have it, and continues from its state."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from samplebatch import Batch
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    TD3,
    AdamOptimizerFactory,
    ContinuousActorDeterministic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    GaussianNoise,
    ImitationPolicy,
    Net,
    OUNoise,
    TorchOptimizerFactory,
)
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_goes_on, filled, parameters_of, seeded

NETWORKS = ["policy.actor", "critic", "critic2", "actor_old.module", "critic_old.module", "critic2_old.module"]


def make(seed: int = 0, **options: Any) -> TD3:
    torch.manual_seed(seed)
    return TD3(
        policy=ContinuousDeterministicPolicy(
            actor=ContinuousActorDeterministic.for_space(Net.for_space(OBS, [16]), MEASURES), action_space=MEASURES
        ),
        policy_optim=AdamOptimizerFactory(),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        critic_optim=AdamOptimizerFactory(),
        **options,
    )


class CriticOverBody(torch.nn.Module):
    """Critic whose body may be shared."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, torch.nn.Linear(8, 1)

    def forward(self, obs: Any, act: Any) -> Any:
        return self.head(self.body(torch.cat([torch.as_tensor(obs), act], -1)))


def update(algorithm: Any, rows: int = 0) -> Any:
    return algorithm.update(filled(actions=MEASURES), rows)


@pytest.mark.parametrize("n_step", [1, 3])
def test_learns_the_same_as_tianshou(n_step: int) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy as TheirPolicy
        from tianshou.algorithm.modelfree.td3 import TD3 as TheirTD3
    actor = peers.deterministic_actor()
    ours = TD3(
        policy=ContinuousDeterministicPolicy(actor=deepcopy(actor), action_space=MEASURES),
        n_step_return_horizon=n_step,
        **peers.of_two_critics(peers.OURS),
    )
    theirs = TheirTD3(
        policy=TheirPolicy(actor=actor, action_space=MEASURES),
        n_step_return_horizon=n_step,
        **peers.of_two_critics(peers.THEIRS),
    )
    peers.assert_learn_the_same(ours, theirs, *peers.buffers(MEASURES), NETWORKS)


def test_every_second_update_changes_policy_and_lagged_networks() -> None:
    algorithm = make(update_actor_freq=2)
    slow = [algorithm.policy, algorithm.actor_old, algorithm.critic_old, algorithm.critic2_old]
    moved = []
    for _ in range(4):
        before = [parameters_of(network) for network in slow]
        critic = parameters_of(algorithm.critic)
        stats = update(algorithm)
        pairs = zip(before, [parameters_of(network) for network in slow], strict=True)
        moved.append([any(not torch.equal(*pair) for pair in zip(*both, strict=True)) for both in pairs])
        assert any(not torch.equal(*pair) for pair in zip(critic, parameters_of(algorithm.critic), strict=True))
        assert (stats.actor_loss is not None) == all(moved[-1])
    assert moved == [[True] * 4, [False] * 4, [True] * 4, [False] * 4]


def test_the_second_critic_is_a_copy_with_separate_updates() -> None:
    algorithm = make()
    for first, second in zip(algorithm.critic.parameters(), algorithm.critic2.parameters(), strict=True):
        assert torch.equal(first, second)
        assert first is not second
    assert len(algorithm.state_dict()["_extra_state"]["optimizers"]) == 3


def test_noise_of_targets_is_clipped() -> None:
    """With a large standard deviation, all noise is clipped to its bounds, so targets use the four corners."""
    algorithm = make(policy_noise=1e6, noise_clip=0.25)
    requested: list[torch.Tensor] = []
    algorithm._min_target_value = lambda obs, act: requested.append(act) or torch.zeros(len(act))  # type: ignore[method-assign, func-returns-value]
    batch, _ = algorithm._sample_batch(filled(actions=MEASURES), 0)
    algorithm._target_q(batch)
    plain = algorithm.policy(Batch(obs=batch.obs_next)).act
    torch.testing.assert_close((requested[0] - plain).abs(), torch.full_like(plain, 0.25))


def test_continues_from_its_state_between_updates_of_the_policy() -> None:
    algorithm = make()
    update(algorithm)
    assert_goes_on(algorithm, make(seed=1), update)


def test_priorities_are_mean_errors_and_weights_count() -> None:
    buffer = filled(actions=MEASURES, alpha=1.0, beta=1.0)
    buffer.update_weight(np.arange(80), np.linspace(1.0, 5.0, 80))
    algorithm = make()
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    # Both critics are the same before the first step.
    error = (algorithm.critic(batch.obs, batch.act).flatten() - batch.returns).detach()
    expected = (batch.weight * error.square()).mean().item()
    assert expected != pytest.approx(error.square().mean().item(), rel=1e-3)
    assert algorithm._update_critics(batch) == pytest.approx((expected, expected))
    torch.testing.assert_close(batch.weight, error.abs())


def test_critics_that_share_a_body_step_in_turn() -> None:
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh())
    rate = 0.1
    algorithm = TD3(
        policy=make().policy,
        policy_optim=AdamOptimizerFactory(),
        critic=CriticOverBody(body),
        critic2=CriticOverBody(body),
        critic_optim=TorchOptimizerFactory(torch.optim.SGD, lr=rate),
    )
    buffer = filled(actions=MEASURES)
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    by_hand = deepcopy((algorithm.critic, algorithm.critic2))
    for critic in by_hand:
        loss = (critic(batch.obs, batch.act).flatten() - batch.returns).square().mean()
        own = list(critic.parameters())
        with torch.no_grad():
            for parameter, slope in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter -= rate * slope
    algorithm._update_critics(batch)
    for critic, expected in zip((algorithm.critic, algorithm.critic2), by_hand, strict=True):
        for actual, reference in zip(critic.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(actual, reference)


def test_exploration_noise_keeps_the_dtype_of_actions() -> None:
    space = gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)
    policy = ContinuousDeterministicPolicy(
        actor=seeded(0, 3, 2), action_space=space, exploration_noise=GaussianNoise(sigma=0.5)
    )
    act = np.zeros((4, 2), np.float32)
    noisy = policy.add_exploration_noise(act, Batch(obs=np.zeros((4, 3))))
    assert noisy.dtype == np.float32
    assert (noisy != 0).all()
    assert not act.any()
    plain = ContinuousDeterministicPolicy(actor=seeded(0, 3, 2), action_space=space)
    assert plain.add_exploration_noise(act, Batch()) is act
    assert isinstance(
        ContinuousDeterministicPolicy(
            actor=seeded(0, 3, 2), action_space=space, exploration_noise="default"
        ).exploration_noise,
        GaussianNoise,
    )


def test_correlated_noise_resumes_from_the_state_of_its_algorithm() -> None:
    def drifting() -> TD3:
        algorithm = make()
        algorithm.policy.exploration_noise = OUNoise(sigma=0.5, dt=0.5)
        return algorithm

    algorithm, fresh = drifting(), drifting()
    act, batch = np.zeros((4, 2), np.float32), Batch(obs=np.zeros((4, 3)))
    algorithm.policy.add_exploration_noise(act, batch)
    fresh.load_state_dict(algorithm.state_dict())
    torch.manual_seed(3)
    expected = algorithm.policy.add_exploration_noise(act, batch)
    torch.manual_seed(3)
    np.testing.assert_array_equal(fresh.policy.add_exploration_noise(act, batch), expected)
    # Workers are given the policy's own state, and drift by themselves.
    assert algorithm.policy.state_dict().keys() == make().policy.state_dict().keys()


def test_discrete_actions_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="action_space must be a Box, got a Discrete"):
        ContinuousDeterministicPolicy(actor=seeded(0, 3, 2), action_space=CHOICES)
    with pytest.raises(ArgumentError, match="instance of ContinuousDeterministicPolicy, got a ImitationPolicy"):
        TD3(
            policy=ImitationPolicy(actor=seeded(0, 3, 4), action_space=CHOICES),  # type: ignore[arg-type]
            policy_optim=AdamOptimizerFactory(),
            critic=ContinuousCritic.for_space(OBS, MEASURES),
            critic_optim=AdamOptimizerFactory(),
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("tau", 1.5), ("gamma", -0.1), ("n_step_return_horizon", 0), ("update_actor_freq", 0)],
)
def test_numbers_out_of_range_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        make(**{option: value})
