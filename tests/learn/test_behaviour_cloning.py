"""Behaviour cloning learns the actions of the data, discrete and continuous, as Tianshou's does."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from samplebatch import Batch
from samplebatch.errors import PolicySpecError
from samplebatch.learn import AdamOptimizerFactory, BehaviourCloning, DiscreteActor, ImitationPolicy, Net
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_goes_on, filled, seeded


def make(space: Any, seed: int = 0) -> BehaviourCloning:
    actor = seeded(seed, 3, 32, 4 if isinstance(space, spaces.Discrete) else 2)
    return BehaviourCloning(
        policy=ImitationPolicy(actor=actor, action_space=space), optim=AdamOptimizerFactory(lr=1e-2)
    )


@pytest.mark.parametrize("space", [CHOICES, MEASURES])
def test_learns_the_same_as_tianshou(space: Any) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.imitation.imitation_base import ImitationPolicy as TheirPolicy
        from tianshou.algorithm.imitation.imitation_base import OfflineImitationLearning
    actor = peers.discrete_actor() if space is CHOICES else peers.deterministic_actor()
    ours = BehaviourCloning(policy=ImitationPolicy(actor=deepcopy(actor), action_space=space), optim=peers.OURS)
    theirs = OfflineImitationLearning(policy=TheirPolicy(actor=actor, action_space=space), optim=peers.THEIRS)
    peers.assert_learn_the_same(ours, theirs, *peers.buffers(space), ["policy.actor"])


@pytest.mark.parametrize("space", [CHOICES, MEASURES])
def test_learns_the_actions_of_the_data(space: Any) -> None:
    """Actions of the data follow a rule: the sign of the first observed number, or half of the first two."""
    buffer = filled(actions=space, steps=200)
    obs = buffer.obs
    buffer.act[:] = np.where(obs[:, 0] > 0, 3, 1) if space is CHOICES else obs[:, :2] / 2
    algorithm = make(space)
    for _ in range(300):
        algorithm.update(buffer, 128)
    with torch.no_grad():
        actual = algorithm.policy(Batch(obs=obs)).act.numpy()
    if space is CHOICES:
        assert (actual == buffer.act).mean() > 0.95
    else:
        assert np.abs(actual - buffer.act).mean() < 0.05


def test_masked_actions_are_not_selected() -> None:
    policy = ImitationPolicy(actor=DiscreteActor.for_space(Net.for_space(OBS, [8]), CHOICES), action_space=CHOICES)
    mask = np.array([[False, False, True, False], [True, False, False, False]])
    obs = {"obs": np.zeros((2, 3), np.float32), "mask": mask}
    assert policy(Batch(obs=obs)).act.tolist() == [2, 0]


def test_continues_from_its_state() -> None:
    assert_goes_on(make(CHOICES), make(CHOICES, seed=1), lambda algorithm: algorithm.update(filled(), 0))


def test_other_actions_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="action_space must be a Discrete space or a Box, got a MultiBinary"):
        ImitationPolicy(actor=seeded(0, 3, 2), action_space=spaces.MultiBinary(2))
