"""Traversals of modules agree with those of torch."""

from __future__ import annotations

import copy
from typing import Any, Self

from torch import nn

from samplebatch.learn import ContinuousActorDeterministic, ContinuousDeterministicPolicy, Net
from samplebatch.learn.networks import LaggedNetwork, set_training, tensors_of
from tests.learn.learning import MEASURES, OBS


class Counted(nn.Linear):
    """Layer that counts how often its training mode is set."""

    told = 0

    def train(self, mode: bool = True) -> Self:
        self.told += 1
        return super().train(mode)


def network() -> nn.Sequential:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()), Counted(3, 3), shared)


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_set_training_changes_all_parts_like_torch() -> None:
    walked, default = network(), network()
    for mode in (False, True):
        set_training(walked, mode)
        default.train(mode)
        assert modes(walked) == modes(default) == [mode] * 6
    assert walked[2].told == default[2].told == 2


def test_lagged_networks_are_always_in_evaluation_mode() -> None:
    module = nn.ModuleList([nn.Linear(1, 1), LaggedNetwork(nn.Linear(1, 1))])
    set_training(module, True)
    assert modes(module) == [True, True, False, False]


def test_a_policy_and_its_parts_are_set_to_a_mode() -> None:
    policy: Any = ContinuousDeterministicPolicy(
        actor=ContinuousActorDeterministic.for_space(Net.for_space(OBS), MEASURES), action_space=MEASURES
    )
    assert not any(modes(policy.eval()))
    assert all(modes(policy.train()))


def test_tensors_of_a_module_are_listed_once_in_the_order_of_copies() -> None:
    module = network()
    other = copy.deepcopy(module)
    for actual, of_other, default in zip(
        tensors_of(module), tensors_of(other), (module.parameters(), module.buffers()), strict=True
    ):
        assert sorted(map(id, actual)) == sorted(map(id, default))
        names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        others = {id(tensor): name for name, tensor in [*other.named_parameters(), *other.named_buffers()]}
        assert [names[id(tensor)] for tensor in actual] == [others[id(tensor)] for tensor in of_other]
