"""IQL learns as its paper has it, from both kinds of actions, and continues from its state."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Collector, Dataset
from samplebatch.errors import ArgumentError, NonFiniteLossError, PolicySpecError
from samplebatch.learn import (
    IQL,
    AdamOptimizerFactory,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    Net,
    OfflineTrainerParams,
    ProbabilisticActorPolicy,
    ValueCritic,
)
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_goes_on, filled, parameters_of, seeded
from tests.learn.tasks import Aim, Match


def make(actions: Any = MEASURES, seed: int = 0, **options: Any) -> IQL:
    torch.manual_seed(seed)
    if isinstance(actions, spaces.Discrete):
        actor: nn.Module = seeded(seed, 3, 8, 4)
        critics = [seeded(seed + number, 3, 8, 4) for number in (1, 2)]
    else:
        actor = ContinuousActorProbabilistic.for_space(Net.for_space(OBS, [8]), actions)
        critics = [ContinuousCritic.for_space(OBS, actions, [8]) for _ in range(2)]
    return IQL(
        policy=ProbabilisticActorPolicy(actor=actor, action_space=actions),
        policy_optim=AdamOptimizerFactory(),
        critic=critics[0],
        critic2=critics[1],
        critic_optim=AdamOptimizerFactory(),
        value=seeded(seed + 3, 3, 8, 1),
        **options,
    )


def number(network: nn.Module, *inputs: torch.Tensor, choice: Any = None) -> float:
    """Return a network's value for one row and, if it has several outputs, one action."""
    with torch.no_grad():
        output = network(*(part[None] for part in inputs))
    output = output[0] if isinstance(output, tuple) else output
    return float(output.flatten()[0 if choice is None else int(choice)])


@pytest.mark.parametrize("actions", [MEASURES, CHOICES])
def test_losses_agree_with_the_formulas_for_each_row(actions: Any) -> None:
    is_discrete = actions is CHOICES
    bound = 0.6 if is_discrete else 1.5
    algorithm = make(actions, gamma=0.9, expectile=0.8, temperature=2.0, max_weight=bound)
    for lagged in (algorithm.critic_old, algorithm.critic2_old):
        with torch.no_grad():
            for parameter in lagged.parameters():
                parameter.mul_(-0.7)
    buffer = filled(actions=actions, alpha=0.6, beta=0.4)
    buffer.update_weight(np.arange(80), np.linspace(1.0, 5.0, 80))
    batch, _ = algorithm._sample_batch(buffer, 0)
    before = deepcopy(algorithm)
    weights = batch.weight.numpy().copy()

    def of(critic: nn.Module, row: int) -> float:
        if is_discrete:
            return number(critic, batch.obs[row], choice=batch.act[row])
        return number(critic, batch.obs[row], batch.act[row])

    def log_density(row: int) -> float:
        with torch.no_grad():
            output = before.policy.actor(batch.obs[row][None])
        if is_discrete:
            logits = output[0].double().numpy()
            return float(logits[int(batch.act[row])] - np.log(np.exp(logits).sum()))
        (mean, scale), _ = output
        errors = (batch.act[row] - mean[0]) / scale[0]
        return float((-errors.square() / 2 - scale[0].log() - math.log(2 * math.pi) / 2).sum())

    stats = algorithm._update_with_batch(batch)
    value_losses, actor_losses, errors, cut = [], [], [], 0
    for row in range(len(batch)):
        smaller = min(of(before.critic_old, row), of(before.critic2_old, row))
        gap = smaller - number(before.value, batch.obs[row])
        value_losses.append((0.8 if gap >= 0.0 else 0.2) * gap**2)
        # The policy and the critics learn from the value network after its step.
        advantage = smaller - number(algorithm.value, batch.obs[row])
        factor = math.exp(2.0 * advantage)
        cut += factor > bound
        actor_losses.append(-min(factor, bound) * log_density(row))
        bootstrap = (not batch.terminated[row]) * number(algorithm.value, batch.obs_next[row])
        target = float(batch.rew[row]) + 0.9 * bootstrap
        errors.append([of(critic, row) - target for critic in (before.critic, before.critic2)])
    assert 0 < cut < len(batch)
    assert stats.value_loss == pytest.approx((weights * value_losses).mean(), rel=1e-4)
    assert stats.actor_loss == pytest.approx((weights * actor_losses).mean(), rel=1e-4)
    critic_losses = (weights[:, None] * np.square(errors)).mean(0)
    assert (stats.critic1_loss, stats.critic2_loss) == pytest.approx(critic_losses.tolist(), rel=1e-4)
    np.testing.assert_allclose(batch.weight.numpy(), np.abs(np.mean(errors, 1)), rtol=1e-3, atol=1e-5)


def test_an_expectile_of_one_half_converges_to_the_mean() -> None:
    """With all weight on V, it converges to the mean of two values, or near the higher one."""
    reached = {}
    for expectile in (0.5, 0.95):
        algorithm = make(CHOICES, expectile=expectile, gamma=0.0, temperature=0.0)
        algorithm.value_optim.optim.param_groups[0]["lr"] = 0.05
        lagged: Any = nn.Linear(3, 4)
        with torch.no_grad():
            lagged.weight.zero_()
            lagged.bias.copy_(torch.tensor([0.0, 1.0, 0.0, 1.0]))
        algorithm.critic_old.module, algorithm.critic2_old.module = lagged, deepcopy(lagged)
        algorithm._lagged_networks.clear()
        buffer = filled(actions=CHOICES)
        buffer.obs[:] = 0.0
        for _ in range(300):
            algorithm.update(buffer, 0)
        with torch.no_grad():
            reached[expectile] = algorithm.value(torch.zeros(1, 3)).item()
    actions = filled(actions=CHOICES)[:].act % 2
    assert reached[0.5] == pytest.approx(actions.mean(), abs=0.02)
    assert reached[0.95] > 0.9


def test_lagged_critics_are_updated_and_targets_need_no_policy() -> None:
    algorithm = make()
    before = parameters_of(algorithm.critic_old)
    algorithm.update(filled(actions=MEASURES), 0)
    assert any(not torch.equal(*pair) for pair in zip(before, parameters_of(algorithm.critic_old), strict=True))
    algorithm.policy.forward = None  # type: ignore[method-assign, assignment]
    algorithm.update(filled(actions=MEASURES), 0)


@pytest.mark.parametrize("actions", [MEASURES, CHOICES])
def test_continues_from_its_state(actions: Any) -> None:
    def update(algorithm: Any) -> None:
        algorithm.update(filled(actions=actions), 0)

    algorithm = make(actions)
    update(algorithm)
    assert_goes_on(algorithm, make(actions, seed=5), update)


def test_huge_advantages_have_the_largest_weight() -> None:
    algorithm = make(temperature=1e6)
    assert math.isfinite(algorithm.update(filled(actions=MEASURES), 0).actor_loss)  # type: ignore[attr-defined]


def test_rewards_that_are_not_finite_are_reported() -> None:
    buffer = filled(actions=MEASURES)
    buffer.rew[3] = np.inf
    with pytest.raises(NonFiniteLossError, match="'rew'"):
        make().update(buffer, 0)


def test_other_actions_are_rejected() -> None:
    with pytest.raises(
        PolicySpecError, match="action_space of the policy must be a Box or a Discrete space for IQL, got"
    ):
        IQL(
            policy=ProbabilisticActorPolicy(actor=seeded(0, 3, 5), action_space=spaces.MultiDiscrete([2, 3])),
            policy_optim=AdamOptimizerFactory(),
            critic=seeded(1, 3, 1),
            critic_optim=AdamOptimizerFactory(),
            value=seeded(2, 3, 1),
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("expectile", 1.0),
        ("expectile", 0.0),
        ("expectile", 1.5),
        ("temperature", -1.0),
        ("max_weight", 0.0),
        ("tau", 2),
    ],
)
def test_numbers_out_of_range_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        make(**{option: value})


def test_policy_and_value_network_may_not_be_swapped() -> None:
    algorithm = make()
    with pytest.raises(ArgumentError, match="must be a network, got a ProbabilisticActorPolicy"):
        IQL(
            policy=algorithm.policy,
            policy_optim=AdamOptimizerFactory(),
            critic=algorithm.critic,
            critic_optim=AdamOptimizerFactory(),
            value=algorithm.policy,
        )


@pytest.mark.parametrize("env", [Match, pytest.param(Aim, marks=pytest.mark.long)])
def test_learns_a_better_policy_than_its_random_data(env: Any, tmp_path: Path) -> None:
    """Random discrete actions get 8 / 3 of 8; random continuous actions about -9 of 0."""
    torch.manual_seed(0)
    obs, act = env.observation_space, env.action_space
    if env is Match:
        actor: nn.Module = seeded(0, 3, 32, 3)
        critics = [seeded(number, 3, 32, 3) for number in (1, 2)]
    else:
        actor = ContinuousActorProbabilistic.for_space(Net.for_space(obs, [32]), act, max_action=1.0)
        critics = [ContinuousCritic.for_space(obs, act, [32]) for _ in range(2)]
    adam = AdamOptimizerFactory(lr=3e-3)
    policy = ProbabilisticActorPolicy(actor=actor, action_space=act, deterministic_eval=True)
    algorithm = IQL(
        policy=policy,
        policy_optim=adam,
        critic=critics[0],
        critic2=critics[1],
        critic_optim=adam,
        value=ValueCritic(Net.for_space(obs, [32])),
        gamma=0.5,
        tau=0.05,
        expectile=0.8,
        temperature=10.0,
    )
    with Collector("random", [env] * 2, seed=0) as collector:
        Dataset(tmp_path / "steps").extend(collector.collect(n_step=1500).batch)
    arguments: dict[str, Any] = {"verbose": False, "show_progress": False, "max_epochs": 1, "batch_size": 64}
    algorithm.run_training(OfflineTrainerParams(buffer=tmp_path / "steps", epoch_num_steps=400, **arguments))
    with Collector(policy, env(), seed=5) as collector:
        assert collector.collect(n_episode=30).returns.mean() > (7.0 if env is Match else -3.0)
