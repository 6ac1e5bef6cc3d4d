"""Reinforce updates as Tianshou's does, and learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samplebatch import Collector, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn import (
    AdamOptimizerFactory,
    DiscreteActor,
    DiscreteActorPolicy,
    Net,
    RecurrentBody,
    Reinforce,
    policy_within_training_step,
)
from tests.learn.learning import CHOICES, OBS, assert_equal_parameters, assert_goes_on, filled, seeded
from tests.learn.oracle import Asked, same_order, their_buffer, update_theirs
from tests.learn.tasks import Match

STEPS: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2, "actions": CHOICES}


def make(net: Any, **options: Any) -> Reinforce:
    policy = DiscreteActorPolicy(actor=net, action_space=CHOICES)
    return Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=0.01), **options)


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("options", [{}, {"gamma": 0.9}, {"return_standardization": True}])
def test_updates_agree_with_tianshou(
    options: dict[str, Any], batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("tianshou.algorithm.modelfree.reinforce")
    factory = pytest.importorskip("tianshou.algorithm.optim").AdamOptimizerFactory(lr=0.01)
    net = seeded(0, 3, 16, 4)
    theirs = module.Reinforce(
        policy=module.DiscreteActorPolicy(actor=Asked(net), action_space=CHOICES), optim=factory, **options
    )
    ours, buffer, their = make(net, **options), filled(**STEPS), their_buffer("VectorReplayBuffer", **STEPS)
    same_order(monkeypatch)
    expected = update_theirs(theirs, 3, buffer=their, batch_size=batch_size, repeat=2)
    actual = [ours.update(buffer, batch_size, 2).get_loss_stats_dict()["loss"] for _ in range(3)]
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert_equal_parameters(net, theirs.policy.actor.net, atol=2e-5)


def test_reinforce_resumes_bit_for_bit() -> None:
    buffer = filled()

    def fresh(seed: int) -> Reinforce:
        return make(seeded(seed, 3, 8, 4), return_standardization=True)

    assert_goes_on(fresh(0), fresh(1), lambda algorithm: [algorithm.update(buffer, 16, 2) for _ in range(2)])


def test_discounts_must_be_between_0_and_1() -> None:
    with pytest.raises(ArgumentError, match="gamma"):
        make(seeded(0, 3, 4), gamma=-0.1)


def test_reinforce_learns_a_small_task() -> None:
    torch.manual_seed(0)
    envs = [Match() for _ in range(4)]
    actor = DiscreteActor.for_space(Net.for_space(envs[0].observation_space, [32]), envs[0].action_space)
    policy = DiscreteActorPolicy(actor=actor, action_space=envs[0].action_space, deterministic_eval=True)
    algorithm = Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=0.01), gamma=0.0)
    buffer = VectorReplayBuffer(512, 4)
    with Collector(policy, envs, buffer, seed=0) as collector:
        for _ in range(20):
            with policy_within_training_step(policy):
                collector.collect(n_step=128)
            algorithm.update(buffer, 32, 1)
            buffer.reset(keep_statistics=True)
    with Collector(policy, [Match()], seed=1) as collector:
        assert collector.collect(n_episode=10).returns.mean() >= 7.5


def test_recurrent_policies_are_rejected() -> None:
    with pytest.raises(ArgumentError, match="policy must not be recurrent, because Reinforce"):
        make(DiscreteActor.for_space(RecurrentBody(OBS), CHOICES))
