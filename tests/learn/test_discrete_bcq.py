"""Discrete BCQ selects only actions that are likely in the data, as in its paper and in Tianshou."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samplebatch import Batch
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import AdamOptimizerFactory, DiscreteBCQ, DiscreteBCQPolicy
from tests.learn.learning import CHOICES, MEASURES, assert_goes_on, filled, seeded


class Says(nn.Module):
    """Network that returns the same output for every observation."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor(numbers))

    def forward(self, obs: Any) -> torch.Tensor:
        return self.numbers.expand(len(next(iter(obs.values())) if isinstance(obs, Batch) else obs), -1)


def make(seed: int = 0, **options: Any) -> DiscreteBCQ:
    policy = DiscreteBCQPolicy(model=seeded(seed, 3, 16, 4), imitator=seeded(seed + 1, 3, 16, 4), action_space=CHOICES)
    return DiscreteBCQ(policy=policy, optim=AdamOptimizerFactory(), **{"target_update_freq": 3} | options)


@pytest.mark.parametrize("n_step", [1, 2])
def test_learns_the_same_as_tianshou(n_step: int) -> None:
    from tests.learn import peers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tianshou.algorithm.imitation.discrete_bcq import DiscreteBCQ as TheirBCQ
        from tianshou.algorithm.imitation.discrete_bcq import DiscreteBCQPolicy as TheirPolicy
    model, imitator = peers.discrete_actor(), peers.discrete_actor()
    options = {"n_step_return_horizon": n_step, "target_update_freq": 3, "imitation_logits_penalty": 0.1}
    # Some actions are below nine tenths of the likeliest one in most rows.
    nets = {"unlikely_action_threshold": 0.9, "action_space": CHOICES}
    ours = DiscreteBCQ(
        policy=DiscreteBCQPolicy(model=deepcopy(model), imitator=deepcopy(imitator), **nets),
        optim=peers.OURS,
        **options,
    )
    theirs = TheirBCQ(
        policy=TheirPolicy(model=model, imitator=imitator, target_update_freq=3, **nets), optim=peers.THEIRS, **options
    )
    peers.assert_learn_the_same(
        ours, theirs, *peers.buffers(CHOICES), ["policy.model", "policy.imitator", "model_old.module"]
    )


@pytest.mark.parametrize(("threshold", "best"), [(0.0, 0), (0.2, 1), (0.6, 2)])
def test_the_best_of_the_likely_actions_is_selected(threshold: float, best: int) -> None:
    """Actions have 0.1, 0.5 and 1 times the probability of the most likely action."""
    policy = DiscreteBCQPolicy(
        model=Says(3.0, 2.0, 1.0, 0.0),
        imitator=Says(*np.log([0.1, 0.5, 1.0, 0.01])),
        unlikely_action_threshold=threshold,
        action_space=CHOICES,
    )
    assert policy(Batch(obs=np.zeros((2, 3), np.float32))).act.tolist() == [best, best]


def test_masked_actions_are_not_selected_even_if_likely() -> None:
    policy = DiscreteBCQPolicy(
        model=Says(3.0, 2.0, 1.0, 0.0), imitator=Says(*np.log([1.0, 0.1, 0.01, 0.001])), action_space=CHOICES
    )
    obs = {"obs": np.zeros((1, 3), np.float32), "mask": np.array([[False, True, True, True]])}
    act = policy(Batch(obs=obs)).act
    assert isinstance(act, np.ndarray)
    assert act.tolist() == [1]


def test_continues_from_its_state_between_copies_to_the_target() -> None:
    def update(algorithm: Any) -> None:
        algorithm.update(filled(), 0)

    algorithm = make()
    update(algorithm)
    assert_goes_on(algorithm, make(seed=5), update)


def test_numbers_out_of_range_and_continuous_actions_are_rejected() -> None:
    nets = {"model": seeded(0, 3, 4), "imitator": seeded(0, 3, 4)}
    for threshold in (1.0, -0.1):
        with pytest.raises(ArgumentError, match="unlikely_action_threshold must be"):
            DiscreteBCQPolicy(**nets, action_space=CHOICES, unlikely_action_threshold=threshold)
    with pytest.raises(PolicySpecError, match="action_space must be a Discrete"):
        DiscreteBCQPolicy(**nets, action_space=MEASURES)
    with pytest.raises(ArgumentError, match="target_update_freq"):
        make(target_update_freq=0)
