"""Algorithms that learn nothing and count everything, for trainers of this library and of Tianshou."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from samplebatch import Batch


@dataclass
class Stats:
    """Statistics of an update."""

    loss: float = 0.0
    train_time: float = 0.0
    smoothed_loss: dict[str, float] = field(default_factory=dict)

    def get_loss_stats_dict(self) -> dict[str, float]:
        return {"loss": self.loss}


class Push(nn.Module):
    """Policy that pushes CartPole's cart to where the pole leans; after learning, it always pushes to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.is_within_training_step = False
        self.asked: set[bool] = set()
        self.noted = 0

    def note_steps(self, steps: int) -> None:
        self.noted += steps

    def forward(self, batch: Any, state: Any = None, **_: Any) -> Batch:
        self.asked.add(self.is_within_training_step)
        return Batch(act=(np.asarray(batch.obs)[:, 2] > 0).astype(np.int64))


class Counting(nn.Module):
    """Algorithm that records the arguments of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Push()
        self.updates: list[tuple[Any, ...]] = []

    def process_buffer(self, buffer: Any) -> Any:
        return buffer

    def update(self, buffer: Any, sample_size: Any = None, batch_size: Any = None, repeat: Any = None) -> Stats:
        assert self.policy.is_within_training_step
        self.updates.append((len(buffer), sample_size, batch_size, repeat))
        with torch.no_grad():
            self.policy.weight += 1.0
        return Stats(loss=float(len(self.updates)))
