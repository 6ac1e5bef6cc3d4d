"""SAC learns as its paper and Tianshou have it, with a temperature that is fixed or learned."""

from __future__ import annotations

import math
import pickle
import shutil
import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import Batch
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    SAC,
    AdamOptimizerFactory,
    AutoAlpha,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    FixedAlpha,
    Net,
    SACPolicy,
    policy_within_training_step,
)
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_equal_parameters, assert_goes_on, filled, seeded

NETWORKS = ["policy.actor", "critic", "critic2", "critic_old.module", "critic2_old.module"]


def auto(rate: float = 0.1, target: float = -2.0) -> AutoAlpha:
    return AutoAlpha(target, 0.0, AdamOptimizerFactory(lr=rate))


def make(seed: int = 0, **options: Any) -> SAC:
    torch.manual_seed(seed)
    return SAC(
        policy=SACPolicy(
            actor=ContinuousActorProbabilistic.for_space(Net.for_space(OBS, [16]), MEASURES, conditioned_sigma=True),
            action_space=MEASURES,
        ),
        policy_optim=AdamOptimizerFactory(),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        critic_optim=AdamOptimizerFactory(),
        **options,
    )


def update(algorithm: Any) -> Any:
    return algorithm.update(filled(actions=MEASURES), 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "backend",
    [
        # Traces the losses and their gradients, but generates no code.
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_losses_lead_to_the_same_parameters(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    def trained(**options: Any) -> SAC:
        algorithm = make(alpha=auto(), **options)
        torch.manual_seed(3)
        buffer = filled(actions=MEASURES, alpha=0.6, beta=0.4)
        for _ in range(3):
            algorithm.update(buffer, 16)
        return algorithm

    compiled, plain = trained(compile=True), trained()
    assert_equal_parameters(compiled, plain, atol=1e-5)
    assert compiled.alpha.value == pytest.approx(plain.alpha.value, rel=1e-5)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for again in (pickle.loads(pickle.dumps(compiled)), deepcopy(compiled)):
        assert again._compiler is not None
        assert_equal_parameters(again, compiled, atol=0.0)


def test_losses_that_cannot_be_compiled_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Batch(obs=Batch(a=torch.zeros(2, 4)), act=torch.zeros(2, 2), returns=torch.zeros(2))
    with pytest.raises(ArgumentError, match="observations must be single tensors for compile=True, got nested ones"):
        make(compile=True)._policy_loss(rows)
    shifted = type("Shifted", (SACPolicy,), {"forward": lambda *_: None})
    monkeypatch.setitem(globals(), "SACPolicy", shifted)
    with pytest.raises(ArgumentError, match=r"compile must be False for a policy that overrides .* for a Shifted"):
        make(compile=True)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ArgumentError, match=r"requires a C\+\+ compiler on PATH or in CXX, got none; install"):
        make(compile=True)


@pytest.mark.parametrize(("n_step", "learned"), [(1, False), (3, True)])
def test_learns_the_same_as_tianshou(n_step: int, learned: bool) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.modelfree.sac import SAC as TheirSAC
        from tianshou.algorithm.modelfree.sac import AutoAlpha as TheirAlpha
        from tianshou.algorithm.modelfree.sac import SACPolicy as TheirPolicy
    actor = peers.gaussian_actor()
    ours = SAC(
        policy=SACPolicy(actor=deepcopy(actor), action_space=MEASURES),
        alpha=auto(0.01) if learned else 0.3,
        n_step_return_horizon=n_step,
        **peers.of_two_critics(peers.OURS),
    )
    theirs = TheirSAC(
        policy=TheirPolicy(actor=actor, action_space=MEASURES),
        alpha=TheirAlpha(-2.0, 0.0, peers.TheirAdam(lr=0.01)) if learned else 0.3,
        n_step_return_horizon=n_step,
        **peers.of_two_critics(peers.THEIRS),
    )
    peers.assert_learn_the_same(ours, theirs, *peers.buffers(MEASURES), NETWORKS)
    assert ours.alpha.value == pytest.approx(theirs.alpha.value, rel=1e-6)
    assert (ours.alpha.value != 1.0) == learned or not learned


def test_log_densities_account_for_squashed_actions() -> None:
    """A histogram of many samples agrees with the densities that the policy returns."""
    policy = make().policy
    with policy_within_training_step(policy), torch.no_grad():
        actual = policy(Batch(obs=np.zeros((200_000, 3), np.float32)))
    first = actual.act[:, 0].numpy()
    (loc, scale) = (part[0, 0].item() for part in actual.logits)
    counts, edges = np.histogram(first, bins=20, range=(-0.9, 0.9))
    middle = np.arctanh((edges[:-1] + edges[1:]) / 2)
    normal = np.exp(-(((middle - loc) / scale) ** 2) / 2) / (scale * math.sqrt(2 * math.pi))
    density = counts / len(first) / np.diff(edges)
    np.testing.assert_allclose(density, normal / (1 - np.tanh(middle) ** 2), rtol=0.1)
    raw = np.arctanh(actual.act[0].numpy().astype(np.float64))
    mean, spread = (part[0].numpy() for part in actual.logits)
    by_hand = (
        -(((raw - mean) / spread) ** 2) / 2 - np.log(spread * math.sqrt(2 * math.pi)) - np.log(1 - np.tanh(raw) ** 2)
    )
    assert actual.log_prob.shape == (200_000, 1)
    assert actual.log_prob[0].item() == pytest.approx(by_hand.sum(), rel=1e-4)


def test_evaluation_selects_the_mode_and_training_samples() -> None:
    policy = make().policy
    rows = Batch(obs=np.zeros((4, 3), np.float32))
    evaluated = policy(rows).act
    assert torch.equal(evaluated, torch.tanh(policy(rows).logits[0]))
    with policy_within_training_step(policy):
        assert not torch.equal(policy(rows).act, evaluated)
    policy.deterministic_eval = False
    assert not torch.equal(policy(rows).act, evaluated)


def test_a_learned_temperature_follows_the_entropy_target() -> None:
    falling, rising = make(alpha=auto(target=-50.0)), make(alpha=auto(target=50.0))
    for algorithm in (falling, rising):
        stats = update(algorithm)
        assert stats.alpha == algorithm.alpha.value
        assert stats.alpha_loss is not None
    assert falling.alpha.value < 1.0 < rising.alpha.value


def test_a_fixed_temperature_is_constant_and_has_no_loss() -> None:
    algorithm = make(alpha=0.25)
    stats = update(algorithm)
    assert (stats.alpha, stats.alpha_loss) == (0.25, None)
    assert "alpha_loss" not in stats.get_loss_stats_dict()
    with pytest.raises(NotImplementedError):
        FixedAlpha(0.25).loss(torch.zeros(1))


def test_continues_from_its_state_with_the_temperature_and_its_optimizer() -> None:
    algorithm = make(alpha=auto())
    update(algorithm)
    fresh = make(seed=1, alpha=auto())
    assert_goes_on(algorithm, fresh, update)
    assert algorithm.alpha.value == fresh.alpha.value != 1.0


def test_the_loss_of_the_policy_does_not_change_the_critics() -> None:
    algorithm = make()
    batch, _ = algorithm._sample_batch(filled(actions=MEASURES), 0)
    before = deepcopy(algorithm.critic.state_dict())
    algorithm._update_actor(batch)
    for name, values in algorithm.critic.state_dict().items():
        assert torch.equal(values, before[name])


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), True, "auto", None])
def test_other_temperatures_are_rejected(alpha: Any) -> None:
    with pytest.raises(ArgumentError, match="alpha must be a number from 0, or a temperature"):
        make(alpha=alpha)


def test_discrete_actions_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="action_space must be a Box, got a Discrete"):
        SACPolicy(actor=seeded(0, 3, 2), action_space=CHOICES)
