"""Networks accept observations of every space, steps and sequences, and recurrent states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn import (
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    Convolutional,
    DiscreteActor,
    Net,
    RecurrentBody,
    ValueCritic,
)
from samplebatch.learn.networks import Flatten, LaggedNetwork, call_network, initialize_orthogonally
from tests.learn.learning import CHOICES, MEASURES, OBS

SPACES = [
    spaces.Box(-1.0, 1.0, (2, 3)),
    spaces.Box(0, 255, (4,), np.uint8),
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(4),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (2,))]),
    spaces.Dict(b=spaces.Box(-1.0, 1.0, (2,)), a=spaces.Dict(n=spaces.Discrete(3))),
]


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return Batch({name: as_tensors(part) for name, part in value.items()})
    if isinstance(value, tuple):
        return Batch({str(position): as_tensors(part) for position, part in enumerate(value)})
    return torch.as_tensor(np.asarray(value))[None]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_observations_are_flattened_like_gymnasium(space: Any) -> None:
    space.seed(0)
    flatten = Flatten(space)
    for _ in range(5):
        sample = space.sample()
        expected = np.asarray(spaces.flatten(space, sample), np.float32)
        np.testing.assert_allclose(flatten(as_tensors(sample))[0].numpy(), expected, rtol=1e-6)
    assert flatten.output_dim == len(expected)


def test_critic_networks_concatenate_observations_and_actions() -> None:
    net = Net(OBS.shape, MEASURES.shape, [4], concat=True)
    assert net(torch.zeros(5, 5))[0].shape == (5, 4)


def test_image_channels_may_be_first_or_last() -> None:
    torch.manual_seed(0)
    first = Convolutional(spaces.Box(0, 255, (3, 36, 40), np.uint8), 8)
    last = Convolutional(spaces.Box(0, 255, (36, 40, 3), np.uint8), 8)
    last.load_state_dict(first.state_dict())
    images = torch.randint(256, (2, 3, 36, 40), dtype=torch.uint8)
    features, state = first(images)
    assert state is None
    torch.testing.assert_close(last(images.movedim(1, 3))[0], features)
    torch.testing.assert_close(first(images[:, None])[0], features[:, None])


@pytest.mark.parametrize(
    ("space", "message"),
    [(spaces.Box(0, 1, (4,)), "three axes"), (spaces.Box(0, 1, (3, 20, 40)), "at least 36 by 36, got 20 by 40")],
)
def test_inputs_that_are_not_images_or_too_small_are_rejected(space: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Convolutional(space)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_sequence_gives_the_same_outputs_as_single_steps(kind: str) -> None:
    torch.manual_seed(0)
    body = RecurrentBody(OBS, 6, kind)
    obs = torch.randn(4, 7, 3)
    together, after = body(obs)
    state = None
    for step in range(7):
        features, state = body(obs[:, step], state)
        torch.testing.assert_close(features, together[:, step])
    assert state is not None
    for name, part in after.items():
        torch.testing.assert_close(state[name], part)
    # Collectors hand states back as batches as well.
    torch.testing.assert_close(body(obs[:, 0], Batch(state))[0], body(obs[:, 0], state)[0])


def test_unknown_kinds_of_recurrent_networks_are_rejected() -> None:
    with pytest.raises(ArgumentError, match="kind must be one of 'gru', 'lstm', got 'rnn'"):
        RecurrentBody(OBS, 6, "rnn")


def test_states_are_passed_to_networks_that_accept_them() -> None:
    body = RecurrentBody(OBS, 6)
    obs = torch.randn(2, 3)
    _, state = body(obs)
    expected = body(obs, state)[0]
    torch.testing.assert_close(call_network(body, obs, state)[0], expected)
    torch.testing.assert_close(call_network(LaggedNetwork(body), obs, state)[0], expected)
    assert call_network(nn.Linear(3, 1), obs, state)[0].shape == (2, 1)


def test_a_critic_without_memory_works_with_an_actor_with_one() -> None:
    body = nn.Sequential(nn.Linear(3, 4))
    body.output_dim = 4  # type: ignore[assignment]
    assert ValueCritic(body)(torch.zeros(2, 3), {"h": torch.zeros(2, 6)}).shape == (2, 1)


@pytest.mark.parametrize("conditioned", [False, True])
def test_means_and_standard_deviations_are_bounded(conditioned: bool) -> None:
    actor = ContinuousActorProbabilistic.for_space(
        Net.for_space(OBS, [4]), MEASURES, max_action=0.5, conditioned_sigma=conditioned
    )
    (mu, sigma), _ = actor(1e6 * torch.randn(50, 3))
    assert mu.shape == sigma.shape == (50, 2)
    assert mu.abs().max() <= 0.5
    assert (sigma > 0.0).all()
    assert sigma.max() <= np.exp(2.0) + 1e-3


def test_deterministic_actions_are_bounded() -> None:
    act, _ = ContinuousActorDeterministic.for_space(Net.for_space(OBS, [4]), MEASURES, max_action=2.0)(
        1e6 * torch.randn(50, 3)
    )
    assert act.shape == (50, 2)
    assert 1.0 < act.abs().max() <= 2.0


def test_a_critic_evaluates_observations_and_actions() -> None:
    critic = ContinuousCritic.for_space(OBS, MEASURES, [8])
    obs = torch.randn(5, 3)
    values = critic(obs, torch.zeros(5, 2))
    assert values.shape == (5, 1)
    assert not torch.equal(values, critic(obs, torch.ones(5, 2)))


def test_orthogonal_initialization_uses_the_documented_gains() -> None:
    actor = DiscreteActor.for_space(Net.for_space(OBS, [3]), CHOICES)
    initialize_orthogonally(actor, gain=2.0, head_gain=0.1)
    hidden = actor.preprocess.model.model[0].weight.detach()  # type: ignore[index, union-attr]
    torch.testing.assert_close(hidden @ hidden.T, 4.0 * torch.eye(3), atol=1e-5, rtol=0.0)
    head = actor.last.model[0].weight.detach()  # type: ignore[union-attr]
    torch.testing.assert_close(head.T @ head, 0.01 * torch.eye(3), atol=1e-5, rtol=0.0)
    assert not actor.last.model[0].bias.any()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DiscreteActor.for_space(Net.for_space(OBS), MEASURES),
            "must be a Discrete space for this head, got a Box",
        ),
        (lambda: ContinuousActorProbabilistic.for_space(Net.for_space(OBS), CHOICES), "must be a Box of one axis"),
        (lambda: Net.for_space(OBS, [8, 0]), "hidden_sizes must be a whole number from 1, got 0"),
        (
            lambda: ValueCritic(nn.Linear(3, 4)),
            "preprocess_net must have the width of its features as output_dim, got a Linear",
        ),
    ],
)
def test_incompatible_heads_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
