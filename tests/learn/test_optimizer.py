"""Factories create optimizers, which apply schedules and clip gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samplebatch.errors import ArgumentError
from samplebatch.learn import (
    AdamOptimizerFactory,
    LRSchedulerFactoryLinear,
    OptimizerFactory,
    RMSpropOptimizerFactory,
    TorchOptimizerFactory,
)
from samplebatch.learn.optimizer import Optimizer


@pytest.mark.parametrize(
    ("factory", "kind", "defaults"),
    [
        (AdamOptimizerFactory(lr=0.1, betas=(0.5, 0.6), eps=0.2, weight_decay=0.3), torch.optim.Adam, {"lr": 0.1}),
        (RMSpropOptimizerFactory(lr=0.1, alpha=0.5, momentum=0.2, centered=True), torch.optim.RMSprop, {"alpha": 0.5}),
        (TorchOptimizerFactory(torch.optim.SGD, lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    ],
)
def test_factories_make_optimizers_of_all_parameters(factory: Any, kind: type, defaults: dict[str, Any]) -> None:
    module = nn.Linear(2, 3)
    optimizer, scheduler = factory.create_instances(module)
    assert type(optimizer) is kind
    assert scheduler is None
    assert defaults.items() <= optimizer.defaults.items()
    assert [*optimizer.param_groups[0]["params"]] == [*module.parameters()]


def test_a_linear_schedule_remains_zero_after_its_end() -> None:
    factory: OptimizerFactory = TorchOptimizerFactory(torch.optim.SGD, lr=1.0)
    factory = factory.with_lr_scheduler_factory(LRSchedulerFactoryLinear(2, 50, 30))
    optimizer, scheduler = factory.create_instances(nn.Linear(1, 1))
    assert scheduler is not None
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_schedule_without_updates_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="epoch_num_steps"):
        LRSchedulerFactoryLinear(2, 0, 30)


@pytest.mark.parametrize(("bound", "moved"), [(None, 8.0), (0.5, 0.5), (100.0, 8.0)])
def test_gradients_are_scaled_down_to_the_bound(bound: float | None, moved: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), module, bound)
    before = module.weight.item()
    optimizer.step(module(torch.tensor([[8.0]])).sum())
    assert before - module.weight.item() == pytest.approx(moved, rel=1e-5)


def test_gradients_are_cleared_between_steps() -> None:
    module = nn.Linear(1, 1, bias=False)
    optimizer = Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), module)
    before = module.weight.item()
    for _ in range(3):
        optimizer.step(module(torch.ones(1, 1)).sum())
    assert before - module.weight.item() == pytest.approx(3.0)


def test_bounds_of_gradients_must_be_positive() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match="max_grad_norm must be a number above 0"):
        Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), module, 0.0)


def test_only_the_parameters_of_the_module_receive_gradients() -> None:
    policy, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    policy.bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(1))
    policy.register_parameter("unused", unused)
    before = policy.weight.item()
    Optimizer(torch.optim.SGD(policy.parameters(), lr=1.0), policy).step(critic(policy(torch.ones(1, 1))).sum())
    assert policy.weight.item() == pytest.approx(before - critic.weight.item())
    assert critic.weight.grad is None
    assert policy.bias.grad is None
    assert unused.item() == 1.0
