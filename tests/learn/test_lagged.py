"""Lagged networks copy and follow their sources, and are never trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from samplebatch.errors import ArgumentError
from samplebatch.learn.networks import LaggedNetwork
from tests.learn.learning import assert_equal_parameters, parameters_of, seeded


def changed(source: nn.Module) -> None:
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 1.0


def test_a_lagged_network_changes_only_when_it_follows() -> None:
    source = seeded(0, 3, 4, 2)
    before = copy.deepcopy(source)
    lagged = LaggedNetwork(source)
    changed(source)
    assert_equal_parameters(lagged.module, before)
    lagged.follow()
    assert_equal_parameters(lagged.module, source)


def test_polyak_averages_interpolate_the_parameters() -> None:
    source = seeded(0, 3, 4, 2)
    before = parameters_of(source)
    lagged = LaggedNetwork(source)
    changed(source)
    lagged.follow(0.25)
    for now, then in zip(lagged.module.parameters(), before, strict=True):
        torch.testing.assert_close(now, then + 0.25)


def test_copies_need_no_gradients_and_are_in_evaluation_mode() -> None:
    source = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9))
    lagged = LaggedNetwork(source)
    lagged.train()
    assert not lagged.module.training
    assert source.training
    assert not any(parameter.requires_grad for parameter in lagged.parameters())
    assert all(parameter.requires_grad for parameter in source.parameters())


def test_the_lagged_network_does_not_contain_the_source() -> None:
    lagged = LaggedNetwork(nn.Linear(2, 2))
    assert [*lagged.state_dict()] == ["module.weight", "module.bias"]


def test_running_means_of_normalization_are_copied() -> None:
    source = nn.BatchNorm1d(2)
    lagged = LaggedNetwork(source)
    source(torch.randn(8, 2) + 5.0)
    lagged.follow(0.1)
    assert torch.equal(lagged.module.running_mean, source.running_mean)  # type: ignore[arg-type]


def test_a_copied_pair_follows_the_copied_source() -> None:
    pair = nn.ModuleList([nn.Linear(1, 1)])
    pair.append(LaggedNetwork(pair[0]))
    twin = copy.deepcopy(pair)
    changed(twin[0])
    twin[1].follow()  # type: ignore[operator]
    assert_equal_parameters(twin[1].module, twin[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("tau", [-0.1, 1.5])
def test_tau_outside_of_zero_to_one_is_rejected(tau: float) -> None:
    with pytest.raises(ArgumentError, match="tau"):
        LaggedNetwork(nn.Linear(1, 1)).follow(tau)
