"""Policies that worker processes import by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch import Batch


class Marked:
    """Policy that acts by the parity of the first observation number, and records its weights in every step."""

    def __init__(self) -> None:
        self.mark = 0.0

    def __call__(self, obs: Any) -> dict[str, Any]:
        values = np.full(len(obs), self.mark)
        return {
            "act": (obs[:, 0] > 0).astype(int),
            "policy": {"mark": values},
            "vf_preds": obs[:, 0].astype(np.float32),
        }

    def set_weights(self, weights: Any) -> None:
        self.mark = float(weights["mark"][0])


class Upright:
    """Policy with Tianshou's interface that pushes CartPole's cart to where the pole leans."""

    def __call__(self, batch: Any, state: Any = None, **_: Any) -> Any:
        return Batch(act=(np.asarray(batch.obs)[:, 2] > 0).astype(int))


def lean(obs: Any) -> Any:
    """Push a pole's cart to where the pole leans."""
    return (obs[:, 2] > 0).astype(int)


def constant(action_space: Any) -> Any:
    """Create a policy that always selects the last action of a space."""
    last = int(action_space.n) - 1
    return lambda obs: np.full(len(obs), last)


def broken(obs: Any) -> Any:
    """Policy that raises an error."""
    raise RuntimeError("the policy broke")


class Fickle:
    """Policy whose actions have another dtype from its 25th call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, obs: Any) -> Any:
        self.calls += 1
        return (obs[:, 2] > 0).astype(np.int64 if self.calls < 25 else np.int32)


def ones(obs: Any) -> Any:
    """Policy that always returns the same action of two numbers."""
    return np.ones((len(obs), 2))


def first(obs: Any) -> Any:
    """Estimate values as the first number of observations."""
    return obs[:, 0]


def numbered(agent: str) -> int | str:
    """Map agents to policies with similar ids: an integer and a string."""
    return 0 if agent.startswith("adversary") else "0"
