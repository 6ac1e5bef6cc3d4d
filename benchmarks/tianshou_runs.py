"""Short runs of Tianshou's own algorithms by name: some steps, some updates, and the parameters in the end.

Every run takes the data package whose classes it makes, as `classes_of` gives it, and how many updates to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getmembers, isfunction
from types import ModuleType
from typing import Any

import numpy as np
import torch

from benchmarks import tianshou_off_policy, tianshou_offline, tianshou_on_policy
from benchmarks.tianshou_setup import Parameters

Run = Callable[[Any, int], Parameters]


def _seeded(function: Callable[[Any, int], Any]) -> Run:
    @wraps(function)
    def seeded(data: Any, updates: int) -> Parameters:
        np.random.seed(0)
        torch.manual_seed(0)
        return parameters_of(function(data, updates))

    return seeded


def parameters_of(algorithm: Any) -> Parameters:
    """Return the parameters of networks, targets included, as arrays."""
    named = [(name, value) for name, value in algorithm.state_dict().items() if isinstance(value, torch.Tensor)]
    return {name: value.numpy().copy() for name, value in named}


def _runs_of(module: ModuleType) -> dict[str, Run]:
    own = [(name, value) for name, value in getmembers(module, isfunction) if value.__module__ == module.__name__]
    return {name.replace("_", " "): _seeded(value) for name, value in own if not name.startswith("_")}


RUNS = _runs_of(tianshou_off_policy) | _runs_of(tianshou_on_policy) | _runs_of(tianshou_offline)
"""Short runs by name."""
