"""Tianshou's algorithms beside ours: the same networks, rows and draws, and a comparison of what they learned."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch

from samplebatch import VectorReplayBuffer
from samplebatch.learn import AdamOptimizerFactory
from tests.learn.learning import CHOICES, MEASURES, random_steps

pytest.importorskip("tianshou.data")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tianshou.algorithm.optim import AdamOptimizerFactory as TheirAdam
    from tianshou.data import Batch as TheirBatch
    from tianshou.data import VectorReplayBuffer as TheirBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import (
        ContinuousActorDeterministic,
        ContinuousActorProbabilistic,
        ContinuousCritic,
    )
    from tianshou.utils.net.discrete import DiscreteActor
    from tianshou.utils.torch_utils import policy_within_training_step

OURS, THEIRS = AdamOptimizerFactory(1e-3), TheirAdam(lr=1e-3)


def _body(*, actions: bool = False) -> Any:
    return Net(state_shape=(3,), action_shape=MEASURES.shape if actions else 0, hidden_sizes=[16], concat=actions)


def deterministic_actor() -> Any:
    return ContinuousActorDeterministic(preprocess_net=_body(), action_shape=MEASURES.shape)


def gaussian_actor() -> Any:
    return ContinuousActorProbabilistic(
        preprocess_net=_body(), action_shape=MEASURES.shape, unbounded=True, conditioned_sigma=True
    )


def discrete_actor() -> Any:
    return DiscreteActor(preprocess_net=_body(), action_shape=CHOICES.n, softmax_output=False)


def critic() -> Any:
    return ContinuousCritic(preprocess_net=_body(actions=True))


def of_two_critics(optim: Any) -> dict[str, Any]:
    """Return the arguments of algorithms with two different critics of seeded weights."""
    torch.manual_seed(1)
    return {"critic": critic(), "critic2": critic(), "policy_optim": optim, "critic_optim": optim, "tau": 0.1}


def buffers(actions: Any, *, steps: int = 30, truncates: bool = True) -> tuple[Any, Any]:
    """Fill a buffer of this library and a buffer of Tianshou with the same steps of two environments."""
    ours, theirs = VectorReplayBuffer(2 * steps, 2), TheirBuffer(2 * steps, 2)
    for step in random_steps(3, steps, 2, actions):
        step.truncated &= truncates
        ours.add(step)
        theirs.add(TheirBatch(**{name: value for name, value in step.items() if name != "info"}, info=TheirBatch()))
    return ours, theirs


def run(algorithm: Any, buffer: Any, updates: int = 5) -> list[dict[str, float]]:
    """Update with all rows of a buffer in order; return the losses of each update."""
    torch.manual_seed(7)
    losses = []
    with policy_within_training_step(algorithm.policy):
        for _ in range(updates):
            losses.append(algorithm.update(buffer=buffer, sample_size=0).get_loss_stats_dict())
    return losses


def assert_learn_the_same(ours: Any, theirs: Any, buffer: Any, other: Any, networks: list[str]) -> None:
    """Check that losses and parameters agree after several updates within the rounding of float32."""
    before = deepcopy(ours.state_dict())
    for first, second in zip(run(ours, buffer), run(theirs, other), strict=True):
        assert first == pytest.approx({name: second[name] for name in first}, rel=1e-4, abs=1e-5)
    for network in networks:
        mine, yours = ours.get_submodule(network).state_dict(), theirs.get_submodule(network).state_dict()
        assert mine.keys() == yours.keys()
        for name, values in mine.items():
            torch.testing.assert_close(values, yours[name], rtol=1e-5, atol=1e-6)
            assert (values != before[f"{network}.{name}"]).any(), f"{network}.{name} has not moved"
