"""A2C updates as its formula and Tianshou's class do, resumes from its state, and learns."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Collector, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn import A2C, AdamOptimizerFactory, OnPolicyTrainerParams, ProbabilisticActorPolicy
from samplebatch.learn.policy import diagonal_normal
from tests.learn.learning import CHOICES, MEASURES, assert_equal_parameters, assert_goes_on, filled, seeded
from tests.learn.oracle import Asked, Valued, same_order, their_buffer, update_theirs
from tests.learn.tasks import Match
from tests.learn.test_ppo import Gaussian

STEPS: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2}


def make(actor: nn.Module, critic: nn.Module, actions: Any = CHOICES, **options: Any) -> A2C:
    policy = ProbabilisticActorPolicy(actor=actor, action_space=actions)
    return A2C(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=0.01), **options)


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.parametrize("actions", [CHOICES, MEASURES])
def test_learns_the_same_as_tianshous(actions: Any, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    a2c = pytest.importorskip("tianshou.algorithm.modelfree.a2c")
    reinforce = pytest.importorskip("tianshou.algorithm.modelfree.reinforce")
    factory = pytest.importorskip("tianshou.algorithm.optim").AdamOptimizerFactory(lr=0.01)
    is_box = isinstance(actions, spaces.Box)
    actor = Gaussian(seeded(0, 3, 8, 2)) if is_box else seeded(0, 3, 8, 4)
    critic = seeded(1, 3, 8, 1)
    policy = reinforce.ProbabilisticActorPolicy(
        actor=Asked(actor),
        dist_fn=diagonal_normal if is_box else (lambda logits: torch.distributions.Categorical(logits=logits)),
        action_space=actions,
        action_scaling=is_box,
        action_bound_method="clip" if is_box else None,
    )
    options: dict[str, Any] = {"vf_coef": 0.7, "ent_coef": 0.02, "max_grad_norm": 0.3, "gae_lambda": 0.9}
    theirs = a2c.A2C(policy=policy, critic=Valued(critic), optim=factory, **options)
    ours = make(Asked(actor) if is_box else actor, critic, actions, **options)
    same_order(monkeypatch)
    arguments: dict[str, Any] = {"batch_size": batch_size, "repeat": 2}
    buffer = their_buffer("VectorReplayBuffer", actions=actions, **STEPS)
    expected = update_theirs(theirs, 1, buffer=buffer, **arguments)
    stats = ours.update(buffer=filled(actions=actions, **STEPS), **arguments)
    assert stats.get_loss_stats_dict()["loss"] == pytest.approx(expected[0], rel=1e-4)
    assert_equal_parameters(ours.policy, theirs.policy, atol=1e-4)
    assert_equal_parameters(ours.critic, theirs.critic, atol=1e-4)


def test_the_loss_is_that_of_its_formula() -> None:
    actor, critic = seeded(0, 3, 8, 4), seeded(1, 3, 8, 1)
    algorithm = make(actor, critic, vf_coef=0.7, ent_coef=0.02)
    buffer = filled()
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    logits = deepcopy(actor)(batch.obs).detach()
    chosen = logits.log_softmax(-1)
    log_probs = chosen[torch.arange(len(logits)), batch.act.long()]
    errors = batch.returns - deepcopy(critic)(batch.obs).detach().flatten()
    entropy = -(chosen.exp() * chosen).sum(-1)
    loss = (-log_probs * batch.adv + 0.7 * errors.square() - 0.02 * entropy).mean()
    stats = algorithm._update_with_batch(batch, None, 1)
    assert stats.loss is not None
    assert stats.approx_kl is not None
    assert stats.loss.mean == pytest.approx(loss.item(), rel=1e-5)
    assert (stats.gradient_steps, stats.approx_kl.mean) == (1, pytest.approx(0.0, abs=1e-6))


def test_continues_from_its_state() -> None:
    def algorithm(seed: int) -> A2C:
        return make(seeded(seed, 3, 8, 4), seeded(seed + 1, 3, 8, 1), return_scaling=True)

    first = algorithm(0)
    step = lambda learner: learner.update(buffer=filled(), batch_size=16, repeat=1)  # noqa: E731
    step(first)
    assert_goes_on(first, algorithm(5), step)


def test_what_is_shown_is_learned() -> None:
    """The best return is 8, by chance it is 8 / 3."""
    torch.manual_seed(0)
    algorithm = make(seeded(0, 3, 32, 3), seeded(1, 3, 32, 1), Match.action_space, gamma=0.5)
    with Collector(algorithm.policy, [Match] * 4, VectorReplayBuffer(400, 4), seed=1) as collector:
        params = OnPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=8000,
            collection_step_num_env_steps=160,
            batch_size=None,
            update_step_num_repetitions=1,
            verbose=False,
            show_progress=False,
        )
        algorithm.run_training(params)
    with Collector(algorithm.policy, Match(), seed=5) as collector:
        assert collector.collect(n_episode=30).returns.mean() > 6.5


@pytest.mark.parametrize(("option", "value"), [("gamma", 1.5), ("gae_lambda", -0.1), ("max_batchsize", 0)])
def test_numbers_out_of_range_are_rejected(option: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=option):
        make(seeded(0, 3, 4), seeded(1, 3, 1), **{option: value})
