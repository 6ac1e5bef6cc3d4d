"""Gymnasium's SyncVectorEnv, stepped environment by environment, so that its values reach columns as they are.

Gymnasium would put them into arrays of its own first, where None becomes NaN, a flag of 0.5 becomes True, and a float
that is too large for its space becomes infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplebatch.env.base import refuse_mask
from samplebatch.env.environment_list import EnvironmentList
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

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; see `Environments.reset`."""
        self._resets = None
        return super().reset(seeds=seeds, **given)
