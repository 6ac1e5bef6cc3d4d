"""Adapter of EnvPool's environments, which EnvPool steps together in threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplebatch.env.gymnasium import NextStepEnvironments
from samplebatch.env.infos import Infos
from samplebatch.env.spaces import Leaf
from samplebatch.errors import EnvironmentSpecError

_BOOKKEEPING = frozenset({"env_id", "elapsed_step"})
"""Infos that duplicate the columns `env_id` and `t`."""


def is_envpool(env: Any) -> bool:
    """Return whether a vector environment is an EnvPool, wrapped or not; the package is not imported."""
    inner = getattr(env, "unwrapped", env)
    return hasattr(inner, "all_env_ids") and hasattr(inner, "is_async")


class EnvPoolEnvironments(NextStepEnvironments):
    """Environments of an EnvPool; each is reset in the step after its episode ended.

    EnvPool seeds its environments on creation (`envpool.make(..., seed=1)`); the seed of a collector has no effect.

    Parameters
    ----------
    env
        An EnvPool created with `env_type="gymnasium"`, also in Gymnasium's wrappers of vector environments.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        if inner.is_async:
            raise EnvironmentSpecError(
                f"an EnvPool must step all environments together, with batch_size={len(inner)}, got "
                f"{inner.config['batch_size']}"
            )
        super().__init__(env)

    def reset(self, *, seeds: Sequence[int] | None = None, **arguments: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; EnvPool does not accept seeds on reset."""
        obs, infos = super().reset(**arguments)
        return obs, _leave_out_bookkeeping(infos)

    def _convert(self, obs: Any, rewards: Any, terminateds: Any, truncateds: Any, infos: Any) -> tuple[Any, ...]:
        return super()._convert(obs, rewards, terminateds, truncateds, _leave_out_bookkeeping(infos))


def _leave_out_bookkeeping(infos: Any) -> dict[str, Any]:
    """Remove EnvPool's ids and step counts; ids of players only if each environment has one player."""
    remaining = {key: value for key, value in infos.items() if key not in _BOOKKEEPING}
    if remaining.get("players", {}).keys() == {"env_id"}:
        del remaining["players"]
    return remaining
