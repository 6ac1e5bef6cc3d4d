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
from samplebatch.learn import (
    A2C,
    AdamOptimizerFactory,
    DiscreteActor,
    Net,
    OnPolicyTrainerParams,
    ProbabilisticActorPolicy,
    RecurrentBody,
    ValueCritic,
    policy_within_training_step,
)
from samplebatch.learn.policy import diagonal_normal
from tests.learn.learning import CHOICES, MEASURES, assert_equal_parameters, assert_goes_on, filled, seeded
from tests.learn.oracle import Asked, Valued, same_order, their_buffer, update_theirs
from tests.learn.tasks import Match, Recall
from tests.learn.test_ppo import Gaussian

STEPS: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2}


def make(actor: nn.Module, critic: nn.Module, actions: Any = CHOICES, **options: Any) -> A2C:
    policy = ProbabilisticActorPolicy(actor=actor, action_space=actions)
    return A2C(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=0.01), **options)


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.parametrize("actions", [CHOICES, MEASURES])
def test_learns_the_same_as_tianshou(actions: Any, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_loss_agrees_with_its_formula() -> None:
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


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_single_gradient_step_needs_no_old_log_probabilities(
    is_recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step learns the same with and without old log-probabilities; several report the KL divergence."""
    first, buffer = collected_by(is_recurrent)
    second, calls = deepcopy(first), []
    original = A2C._add_log_probabilities
    monkeypatch.setattr(A2C, "_add_log_probabilities", lambda value, batch: calls.append(1) or original(value, batch))
    stats: Any = first.update(buffer)
    assert (stats.gradient_steps, stats.approx_kl.mean, calls) == (1, 0.0, [])
    batch, indices = second._sample_batch(buffer, 0)
    batch = original(second, second._preprocess_batch(batch, buffer, indices))
    again = second._update_with_batch(batch, None, 1)
    assert again.loss.mean == pytest.approx(stats.loss.mean, rel=1e-5)  # type: ignore[union-attr]
    assert again.approx_kl.mean == pytest.approx(0.0, abs=1e-6)  # type: ignore[union-attr]
    assert_equal_parameters(first, second, atol=1e-6)
    stats = first.update(buffer, None, 3)
    assert (stats.gradient_steps, calls) == (3, [1])
    assert stats.approx_kl.mean > 0.0
    assert first.update(buffer, 20, 1).gradient_steps > 1  # type: ignore[attr-defined]
    assert len(calls) == 2


def collected_by(is_recurrent: bool) -> tuple[A2C, Any]:
    """Collect 60 steps with a feed-forward or recurrent policy."""
    torch.manual_seed(0)
    body: Any = (RecurrentBody if is_recurrent else Net.for_space)(Match.observation_space, 8 if is_recurrent else [8])
    policy = ProbabilisticActorPolicy(
        actor=DiscreteActor.for_space(body, Match.action_space), action_space=Match.action_space
    )
    algorithm = A2C(policy=policy, critic=ValueCritic(body), optim=AdamOptimizerFactory(lr=0.01), sequence_length=5)
    buffer = VectorReplayBuffer(90, 3)
    with Collector(policy, [Match] * 3, buffer, seed=0) as collector:
        collector.collect(n_step=60)
    return algorithm, buffer


def test_a_recurrent_policy_learns_a_memory_task() -> None:
    """The best return is 1; random actions get 1 / 3."""
    torch.manual_seed(0)
    body = RecurrentBody(Recall.observation_space, 16)
    policy = ProbabilisticActorPolicy(
        actor=DiscreteActor.for_space(body, Recall.action_space),
        action_space=Recall.action_space,
        deterministic_eval=True,
    )
    algorithm = A2C(
        policy=policy, critic=ValueCritic(body), optim=AdamOptimizerFactory(lr=0.01), ent_coef=0.0, gamma=0.9
    )
    buffer = VectorReplayBuffer(512, 4)
    with Collector(policy, [Recall] * 4, buffer, seed=0) as collector:
        for _ in range(25):
            with policy_within_training_step(policy):
                collector.collect(n_step=256)
            algorithm.update(buffer, 32)
            buffer.reset(keep_statistics=True)
    with Collector(policy, [Recall], seed=1) as collector:
        assert collector.collect(n_episode=20).returns.mean() >= 0.95


def test_observations_and_rewards_are_normalized_and_resumed() -> None:
    def algorithm(seed: int) -> A2C:
        learner = make(seeded(seed, 3, 8, 4), seeded(seed + 1, 3, 8, 1), normalize_rewards=True)
        learner.policy.normalize_observations((3,))
        return learner

    first, buffer = algorithm(0), filled()
    assert_goes_on(first, algorithm(5), lambda learner: learner.update(buffer, 16, 1))
    rows = buffer.sample(0)[0].obs
    assert first.policy.obs_rms is not None
    assert first.rew_rms is not None
    # Two updates saw the same rows.
    assert first.policy.obs_rms.count.item() == first.rew_rms.count.item() == 2 * len(rows)
    torch.testing.assert_close(first.policy.obs_rms.mean.float(), torch.as_tensor(rows).mean(0))


def test_continues_from_its_state() -> None:
    def algorithm(seed: int) -> A2C:
        return make(seeded(seed, 3, 8, 4), seeded(seed + 1, 3, 8, 1), return_scaling=True)

    first = algorithm(0)
    step = lambda learner: learner.update(buffer=filled(), batch_size=16, repeat=1)  # noqa: E731
    step(first)
    assert_goes_on(first, algorithm(5), step)


def test_learns_to_select_the_observed_choice() -> None:
    """The best return is 8; random actions get 8 / 3."""
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
