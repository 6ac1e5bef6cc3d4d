"""Networks with Tianshou's names accept its arguments, load its weights and return its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch
from samplebatch.errors import ArgumentError
from samplebatch.learn import MLP, ActorCritic, ContinuousCritic, DiscreteActor, DiscreteActorPolicy, Net, Recurrent
from samplebatch.learn import heads as ours

common = pytest.importorskip("tianshou.utils.net.common")
continuous = pytest.importorskip("tianshou.utils.net.continuous")
discrete = pytest.importorskip("tianshou.utils.net.discrete")

OBS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
ACT = np.random.default_rng(1).standard_normal((5, 2)).astype(np.float32)
STEPS = np.random.default_rng(2).standard_normal((5, 6, 4)).astype(np.float32)


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if hasattr(value, "values") else value
    return [leaf for part in parts if part is not None for leaf in leaves(part)]


def assert_alike(theirs: nn.Module, network: nn.Module, *inputs: Any) -> None:
    network.load_state_dict(theirs.state_dict())
    for expected, actual in zip(leaves(theirs(*inputs)), leaves(network(*inputs)), strict=True):
        torch.testing.assert_close(actual, expected)
    if hasattr(theirs, "get_output_dim"):
        assert network.get_output_dim() == theirs.get_output_dim()  # type: ignore[operator]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax": True},
        {"num_atoms": 3},
        {"norm_layer": nn.LayerNorm},
        {"norm_layer": nn.LayerNorm, "norm_args": {"elementwise_affine": False}},
        {"activation": [nn.Tanh, nn.ELU], "act_args": [{}, {"alpha": 0.5}]},
        {"activation": None},
        {"dueling_param": ({"hidden_sizes": [6]}, {"hidden_sizes": [7]})},
        {"dueling_param": ({}, {}), "num_atoms": 3, "softmax": True},
    ],
    ids=str,
)
def test_outputs_of_net_agree_with_tianshou(options: dict[str, Any]) -> None:
    result = [kind(state_shape=(4,), action_shape=2, hidden_sizes=[8, 9], **options) for kind in (common.Net, Net)]
    assert_alike(*result, OBS)


def test_outputs_of_recurrent_networks_agree_with_tianshou() -> None:
    result = [kind(layer_num=2, state_shape=(4,), action_shape=3) for kind in (common.Recurrent, Recurrent)]
    assert_alike(*result, STEPS)
    state = Batch(result[1](STEPS[:, 0])[1])
    for expected, actual in zip(leaves(result[0](OBS, state)), leaves(result[1](OBS, state)), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("module", "name", "options"),
    [
        (discrete, "DiscreteActor", {"action_shape": 3, "hidden_sizes": [5]}),
        (discrete, "DiscreteActor", {"action_shape": (3,), "softmax_output": False}),
        (discrete, "DiscreteCritic", {"last_size": 3}),
        (discrete, "DiscreteCritic", {}),
        (continuous, "ContinuousActorProbabilistic", {"action_shape": (2,)}),
        (continuous, "ContinuousActorProbabilistic", {"action_shape": (2,), "unbounded": True}),
        (continuous, "ContinuousActorProbabilistic", {"action_shape": 2, "conditioned_sigma": True, "max_action": 2.0}),
        (continuous, "ContinuousActorDeterministic", {"action_shape": (2,), "max_action": 2.0, "hidden_sizes": [3]}),
        (continuous, "ContinuousCritic", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outputs_of_heads_agree_with_tianshou(module: Any, name: str, options: dict[str, Any]) -> None:
    result = [
        getattr(home, name)(preprocess_net=net(state_shape=4, hidden_sizes=[8]), **options)
        for home, net in ((module, common.Net), (ours, Net))
    ]
    assert_alike(*result, OBS)


def test_outputs_of_action_critics_agree_with_tianshou() -> None:
    options: dict[str, Any] = {"state_shape": 4, "action_shape": 2, "hidden_sizes": [8], "concat": True}
    theirs = continuous.ContinuousCritic(preprocess_net=common.Net(**options))
    assert_alike(theirs, ContinuousCritic(preprocess_net=Net(**options)), OBS, ACT)


def test_actors_and_critics_are_initialized_together() -> None:
    actor, critic = Net(4, 2), Net(4)
    assert list(ActorCritic(actor, critic).parameters()) == [*actor.parameters(), *critic.parameters()]


@pytest.mark.parametrize("softmax_output", [False, True])
def test_a_policy_knows_whether_its_actor_returns_probabilities(softmax_output: bool) -> None:
    torch.manual_seed(0)
    actor = DiscreteActor(preprocess_net=Net(4, hidden_sizes=[8]), action_shape=3, softmax_output=softmax_output)
    policy = DiscreteActorPolicy(actor=actor, action_space=spaces.Discrete(3))
    output = actor(OBS)[0]
    expected = output if softmax_output else output.softmax(-1)
    torch.testing.assert_close(policy(Batch(obs=OBS)).dist.probs, expected)
    mask = np.tile([True, False, True], (5, 1))
    masked = policy(Batch(obs={"obs": OBS, "mask": mask})).dist.probs
    assert not masked[:, 1].any()
    torch.testing.assert_close(masked[:, 0] / masked[:, 2], expected[:, 0] / expected[:, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(4, [64]), r"output_dim must be a whole number from 0, got \[64\]; pass hidden_sizes="),  # type: ignore[arg-type]
        (lambda: MLP(spaces.Box(0, 1, (4,))), "input_dim must be .*, got a Box; the class method for_space"),  # type: ignore[arg-type]
        (lambda: Net(spaces.Box(0, 1, (4,))), "state_shape must be a shape or a width, got a Box"),  # type: ignore[arg-type]
        (lambda: DiscreteActor(Net(4), spaces.Discrete(2)), "got a Discrete; the class method for_space"),  # type: ignore[arg-type]
        (lambda: Recurrent(spaces.Box(0, 1, (4,)), 8, 2), "got a Box; RecurrentBody accepts a space"),  # type: ignore[arg-type]
        (lambda: Net(4, 2, [8, 8], activation=[nn.ReLU]), "one entry per hidden layer, 2, got 1"),
        (lambda: DiscreteActor(nn.Linear(4, 4), 2), "preprocess_net must have the width .*, got a Linear without"),
    ],
)
def test_invalid_arguments_are_reported(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
