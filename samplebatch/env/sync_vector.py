"""Gymnasium's SyncVectorEnv, stepped environment by environment, so that its values reach columns as they are.

Gymnasium would put them into arrays of its own first, where None becomes NaN, a flag of 0.5 becomes True, and a float
that is too large for its space becomes infinite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy import count_nonzero

from samplebatch.env.base import Environments, Flags, StepResult, refuse_mask
from samplebatch.env.environment_list import EnvironmentList, StepParts, take_apart
from samplebatch.env.infos import Infos
from samplebatch.env.spaces import Leaf
from samplebatch.errors import require


def is_plain_sync(env: Any) -> bool:
    """Tell whether an environment is a `SyncVectorEnv` that does nothing but step its environments.

    Wrapped ones, derived ones, those with spaces of their own, and those whose `step` or `reset` has been replaced are
    not: they may do more.
    """
    plain = type(env) is require("gymnasium.vector", "envs").SyncVectorEnv
    return plain and not vars(env).keys() & {"step", "reset"} and getattr(env, "observation_mode", "same") == "same"


class SyncEnvironments(EnvironmentList):
    """The environments of a plain `SyncVectorEnv`, which a collector steps one by one and resets at an episode's end.

    That is what its autoreset modes same-step and disabled come to. The vector environment itself is not stepped: it
    can be used again once it is reset.

    Parameters
    ----------
    env
        The vector environment.

    Raises
    ------
    EnvironmentSpecError
        If one of its environments is no Gymnasium environment, or is there twice.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env.envs)
        self.env = env

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`."""
        refuse_mask(given)
        return super().reset(seeds=seeds, **given)

    def render_all(self) -> None:
        """Render every environment."""
        self.env.render()

    def close(self) -> None:
        """Close the vector environment, and with it the others."""
        self.env.close()


class NextStepSyncEnvironments(SyncEnvironments):
    """The environments of a plain `SyncVectorEnv` that resets each in the step after its episode ended."""

    resets_later = True
    _kept = ("made", "_resets")
    _resets: Flags | None = None
    """Which environments the next step resets; None for none."""

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`."""
        self._resets = None
        return super().reset(seeds=seeds, **given)

    def step_raw(self, actions: Sequence[Leaf]) -> Any:
        """Step every environment, or reset it if its episode has ended; see `Environments.step_raw`."""
        resets = self._resets
        step = super().step_raw(actions)
        ended = step[2] | step[3]
        self._resets = ended if count_nonzero(ended) else None
        return (*step, resets)

    def _step_each(self, actions: Iterable[Any]) -> list[Any]:
        if self._resets is None:
            return super()._step_each(actions)
        asked = enumerate(zip(self._resets.tolist(), self._envs, actions, strict=True))
        return [self._begin(index) if resets else env.step(action) for index, (resets, env, action) in asked]

    def _begin(self, index: int) -> tuple[Any, ...]:
        """Reset an environment in an autoreset step: it is paid nothing there."""
        self._resetting = True
        (obs,), (info,) = take_apart("reset", [self._envs[index].reset()], 2, self.refusing(index))
        self._resetting = False
        return obs, 0.0, False, False, info

    def next_obs(self, step: StepParts) -> tuple[Sequence[Leaf], Infos]:
        """Return the observations to act on; see `Environments.next_obs`."""
        return step[0], step[4]

    def finish_chunk(self, steps: Sequence[Any]) -> StepResult:
        """Tell which steps were autoreset steps; see `Environments.finish_chunk`."""
        result = Environments.finish_chunk(self, steps)
        masks = [step[5] for step in steps]
        if all(mask is None for mask in masks):
            return result
        none = np.zeros(self.num_envs, np.bool_)
        rows = np.concatenate([none if mask is None else mask for mask in masks]).nonzero()[0]
        return result._replace(autoreset=rows)
