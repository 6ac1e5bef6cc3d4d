"""Discrete SAC learns as its paper and Tianshou have it, obeys masks, and continues from its state."""

from __future__ import annotations

import math
import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samplebatch import Batch, Collector, VectorReplayBuffer
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    AdamOptimizerFactory,
    AutoAlpha,
    DiscreteSAC,
    DiscreteSACPolicy,
    OffPolicyTrainerParams,
    ProbabilisticActorPolicy,
    policy_within_training_step,
)
from tests.learn.learning import CHOICES, MEASURES, assert_goes_on, filled, seeded
from tests.learn.oracle import Asked, Valued
from tests.learn.tasks import Masked, Match

NETWORKS = ["policy.actor", "critic", "critic2", "critic_old.module", "critic2_old.module"]


def auto(rate: float = 0.01, target: float = 0.7) -> AutoAlpha:
    return AutoAlpha(target, 0.0, AdamOptimizerFactory(lr=rate))


def make(seed: int = 0, **options: Any) -> DiscreteSAC:
    return DiscreteSAC(
        policy=DiscreteSACPolicy(actor=seeded(seed, 3, 8, 4), action_space=CHOICES),
        policy_optim=AdamOptimizerFactory(),
        critic=seeded(seed + 1, 3, 8, 4),
        critic2=seeded(seed + 2, 3, 8, 4),
        critic_optim=AdamOptimizerFactory(),
        **options,
    )


@pytest.mark.parametrize(("n_step", "is_learned"), [(1, False), (3, True)])
def test_learns_the_same_as_tianshou(n_step: int, is_learned: bool) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.discrete_sac import DiscreteSAC as TheirSAC
        from tianshou.algorithm.modelfree.discrete_sac import DiscreteSACPolicy as TheirPolicy
        from tianshou.algorithm.modelfree.sac import AutoAlpha as TheirAlpha
    options: dict[str, Any] = {"n_step_return_horizon": n_step, "tau": 0.1}
    ours = make(alpha=auto() if is_learned else 0.3, **options)
    theirs = TheirSAC(
        policy=TheirPolicy(actor=Asked(seeded(0, 3, 8, 4)), action_space=CHOICES),
        policy_optim=peers.THEIRS,
        critic=Valued(seeded(1, 3, 8, 4)),
        critic2=Valued(seeded(2, 3, 8, 4)),
        critic_optim=peers.THEIRS,
        alpha=TheirAlpha(0.7, 0.0, peers.TheirAdam(lr=0.01)) if is_learned else 0.3,
        **options,
    )
    part, other = peers.buffers(CHOICES)
    for first, second in zip(peers.run(ours, part), peers.run(theirs, other), strict=True):
        assert first == pytest.approx({name: second[name] for name in first}, rel=1e-4, abs=1e-5)
    for network in NETWORKS:
        mine, yours = ours.get_submodule(network).parameters(), theirs.get_submodule(network).parameters()
        for parameter, expected in zip(mine, yours, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
    assert ours.alpha.value == pytest.approx(theirs.alpha.value, rel=1e-6)


def test_losses_agree_with_the_formulas_for_each_row() -> None:
    algorithm = make(gamma=0.9, alpha=0.3)
    buffer = filled(alpha=0.6, beta=0.4)
    buffer.update_weight(np.arange(80), np.linspace(1.0, 5.0, 80))
    batch, indices = algorithm._sample_batch(buffer, 0)
    actor, critics = deepcopy(algorithm.policy.actor), deepcopy([algorithm.critic, algorithm.critic2])
    weights = batch.weight.numpy().copy()

    def probabilities(obs: torch.Tensor) -> Any:
        with torch.no_grad():
            logits = actor(obs[None])[0].double().numpy()
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    def values(network: nn.Module, obs: torch.Tensor) -> Any:
        with torch.no_grad():
            return network(obs[None])[0].double().numpy()

    errors = np.zeros((2, len(batch)))
    for row in range(len(batch)):
        chances = probabilities(batch.obs_next[row])
        smaller = np.minimum(*(values(critic, batch.obs_next[row]) for critic in critics))
        soft = sum(chance * (value - 0.3 * math.log(chance)) for chance, value in zip(chances, smaller, strict=True))
        target = float(batch.rew[row]) + 0.9 * (not batch.terminated[row]) * soft
        for number, critic in enumerate(critics):
            errors[number, row] = values(critic, batch.obs[row])[int(batch.act[row])] - target
    stats = algorithm._update_with_batch(algorithm._preprocess_batch(batch, buffer, indices))
    losses = (weights * errors**2).mean(1)
    assert (stats.critic1_loss, stats.critic2_loss) == pytest.approx(losses.tolist(), rel=1e-4)
    np.testing.assert_allclose(batch.weight.numpy(), np.abs(errors.mean(0)), rtol=1e-3, atol=1e-5)
    # The policy's loss is by the critics after their step.
    gains = []
    for row in range(len(batch)):
        chances = probabilities(batch.obs[row])
        smaller = np.minimum(*(values(critic, batch.obs[row]) for critic in (algorithm.critic, algorithm.critic2)))
        gains.append((chances * (smaller - 0.3 * np.log(chances))).sum())
    assert stats.actor_loss == pytest.approx(-np.mean(gains), rel=1e-4, abs=1e-6)


def test_a_learned_temperature_approaches_its_target() -> None:
    high, low = make(alpha=auto(target=10.0)), make(alpha=auto(target=0.0))
    for algorithm in (high, low):
        algorithm.update(filled(), 0)
    assert high.alpha.value > 1.0 > low.alpha.value


def test_masked_actions_do_not_contribute_to_targets() -> None:
    """The target of a row with one allowed action is the value of that action, without entropy."""
    algorithm = make(alpha=0.3)
    obs, allowed = torch.randn(6, 3), torch.arange(6) % 4
    mask = nn.functional.one_hot(allowed, 4).bool()
    after = Batch(obs_next=Batch(obs=obs, mask=mask))
    with torch.no_grad():
        smaller = torch.min(algorithm.critic(obs), algorithm.critic2(obs))
        torch.testing.assert_close(algorithm._target_q(after), smaller[torch.arange(6), allowed])


def test_masked_steps_are_learned_from() -> None:
    algorithm = DiscreteSAC(
        policy=DiscreteSACPolicy(actor=seeded(0, 3, 8, 3), action_space=Masked.action_space),
        policy_optim=AdamOptimizerFactory(),
        critic=seeded(1, 3, 8, 3),
        critic_optim=AdamOptimizerFactory(),
    )
    buffer = VectorReplayBuffer(100, 2)
    with policy_within_training_step(algorithm.policy), Collector(algorithm.policy, [Masked] * 2, buffer) as collector:
        collector.collect(n_step=60)
    assert math.isfinite(algorithm.update(buffer, 32).actor_loss)  # type: ignore[attr-defined]


def test_learns_to_select_the_observed_choice() -> None:
    """The best return is 8; random actions get 8 / 3."""
    torch.manual_seed(0)
    algorithm = DiscreteSAC(
        policy=DiscreteSACPolicy(actor=seeded(0, 3, 32, 3), action_space=Match.action_space, deterministic_eval=True),
        policy_optim=AdamOptimizerFactory(lr=3e-3),
        critic=seeded(1, 3, 32, 3),
        critic2=seeded(2, 3, 32, 3),
        critic_optim=AdamOptimizerFactory(lr=3e-3),
        alpha=0.05,
        gamma=0.5,
        tau=0.05,
    )
    with Collector(algorithm.policy, [Match] * 4, VectorReplayBuffer(4000, 4), seed=1) as collector:
        collector.collect(n_step=200, random=True)
        params = OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=600,
            collection_step_num_env_steps=4,
            batch_size=64,
            verbose=False,
            show_progress=False,
        )
        algorithm.run_training(params)
    with Collector(algorithm.policy, Match(), seed=5) as collector:
        assert collector.collect(n_episode=30).returns.mean() > 7.0


def test_continues_from_its_state() -> None:
    def update(algorithm: Any) -> None:
        algorithm.update(filled(), 0)

    algorithm = make(alpha=auto())
    update(algorithm)
    assert_goes_on(algorithm, make(seed=5, alpha=auto()), update)


def test_the_policy_selects_the_mode_in_evaluation_like_tianshou() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.discrete_sac import DiscreteSACPolicy as TheirPolicy
    rows = Batch(obs=np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32), info=Batch())
    ours = DiscreteSACPolicy(actor=seeded(0, 3, 8, 4), action_space=CHOICES)
    theirs = TheirPolicy(actor=Asked(seeded(0, 3, 8, 4)), action_space=CHOICES)
    assert (np.asarray(ours(rows).act) == theirs(rows).act.numpy()).all()
    with policy_within_training_step(ours):
        assert len({tuple(np.asarray(ours(rows).act)) for _ in range(5)}) > 1


def test_continuous_actions_are_rejected() -> None:
    with pytest.raises(
        PolicySpecError, match="action_space of the policy must be a Discrete space for DiscreteSAC, got Box"
    ):
        DiscreteSAC(
            policy=ProbabilisticActorPolicy(actor=seeded(0, 3, 2), action_space=MEASURES),
            policy_optim=AdamOptimizerFactory(),
            critic=seeded(1, 3, 1),
            critic_optim=AdamOptimizerFactory(),
        )


@pytest.mark.parametrize(
    ("option", "value"), [("tau", 1.5), ("gamma", -0.1), ("n_step_return_horizon", 0), ("alpha", -1)]
)
def test_numbers_out_of_range_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        make(**{option: value})
