"""Share between tests of learning: seeded modules, buffers of random steps, a bandit with one good action."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
CHOICES = spaces.Discrete(4)
MEASURES = spaces.Box(-2.0, 2.0, (2,), np.float32)


def seeded(seed: int, *widths: int) -> nn.Sequential:
    """Create linear layers with tanh activations and seeded weights."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def random_steps(seed: int, steps: int, envs: int, actions: Any) -> list[Batch]:
    """Return random steps of environments whose episodes end by termination and truncation."""
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(steps + 1, envs, 3)).astype(np.float32)
    created = []
    for i in range(steps):
        terminated, truncated = rng.random(envs) < 0.1, rng.random(envs) < 0.05
        if isinstance(actions, spaces.Discrete):
            act: Any = rng.integers(0, actions.n, envs)
        else:
            act = rng.normal(size=(envs, *actions.shape)).astype(np.float32)
        row = {"obs": obs[i], "act": act, "rew": rng.normal(size=envs), "obs_next": obs[i + 1]}
        created.append(Batch(**row, terminated=terminated, truncated=truncated & ~terminated, info=Batch()))
    return created


def filled(
    buffer: Any = None, *, seed: int = 0, steps: int = 40, envs: int = 2, actions: Any = CHOICES, **options: Any
) -> Any:
    """Fill a buffer with random steps; create the buffer if none is passed."""
    if buffer is None:
        kind = PrioritizedVectorReplayBuffer if "alpha" in options else VectorReplayBuffer
        buffer = kind(steps * envs, envs, **options)
    for step in random_steps(seed, steps, envs, actions):
        buffer.add(step)
    return buffer


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_equal_parameters(ours: nn.Module, other: nn.Module, atol: float = 0.0) -> None:
    for first, second in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0.0 if not atol else 1e-5, atol=atol)


def assert_goes_on(algorithm: Any, fresh: Any, update: Any) -> None:
    """Check that an algorithm continues bitwise from another algorithm's state that was saved to a file."""

    update(algorithm)
    file = io.BytesIO()
    torch.save(algorithm.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    torch.manual_seed(5)
    update(algorithm)
    torch.manual_seed(5)
    update(fresh)
    assert_equal_parameters(algorithm, fresh)
    assert algorithm.updates == fresh.updates
