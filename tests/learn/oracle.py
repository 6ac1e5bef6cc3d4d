"""Build Tianshou's algorithms over copies of our networks, as oracles for updates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.learn.learning import random_steps


class Asked(nn.Module):
    """Network with the call signature that Tianshou's policies use."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        return self.net(torch.as_tensor(obs)), state


class Valued(Asked):
    """Critic with the call signature that Tianshou's algorithms use."""

    def forward(self, obs: Any, **others: Any) -> Any:
        return self.net(torch.as_tensor(obs))


def their_buffer(kind: str, *, seed: int, steps: int, envs: int, actions: Any, **options: Any) -> Any:
    """Fill Tianshou's buffer with the steps of `learning.filled`."""
    data = pytest.importorskip("tianshou.data")
    buffer = getattr(data, kind)(steps * envs, envs, **options)
    for step in random_steps(seed, steps, envs, actions):
        columns = {name: value for name, value in step.items() if name != "info"}
        buffer.add(data.Batch(**columns, info=data.Batch()))
    return buffer


def update_theirs(algorithm: Any, times: int, **arguments: Any) -> list[float]:
    """Update an algorithm of Tianshou; return the losses."""
    utils = pytest.importorskip("tianshou.utils.torch_utils")
    losses = []
    with utils.policy_within_training_step(algorithm.policy):
        for _ in range(times):
            losses.append(algorithm.update(**arguments).get_loss_stats_dict()["loss"])
    return losses


def same_order(monkeypatch: pytest.MonkeyPatch, seed: int = 3) -> None:
    """Make both libraries iterate over rows in the same order."""
    import numpy as np

    ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(ours.permutation(n)))
    monkeypatch.setattr(np.random, "permutation", theirs.permutation)
