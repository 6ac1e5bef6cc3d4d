"""EnvPool's environments, which its threads step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplebatch.env.gymnasium import NextStepEnvironments
from samplebatch.env.infos import Infos
from samplebatch.env.spaces import Leaf
from samplebatch.errors import EnvironmentSpecError

_BOOKKEEPING = frozenset({"env_id", "elapsed_step"})
"""Infos that say of every step which environment made it, and when: the columns `env_id` and `t` do."""


def is_envpool(env: Any) -> bool:
    """Tell whether a vector environment is an EnvPool, wrapped or not; the package is not imported."""
    inner = getattr(env, "unwrapped", env)
    return hasattr(inner, "all_env_ids") and hasattr(inner, "is_async")


class EnvPoolEnvironments(NextStepEnvironments):
    """The environments of an EnvPool, for collectors: each is reset in the step after its episode ended.

    EnvPool seeds its environments when it makes them (`envpool.make(..., seed=1)`), and the seeds of a collector do not
    reach them.

    Parameters
    ----------
    env
        An EnvPool made with `env_type="gymnasium"`, or wrapped in Gymnasium's wrappers of vector environments.
    """

    def __init__(self, env: Any) -> None:
        inner = getattr(env, "unwrapped", env)
        if inner.is_async:
            raise EnvironmentSpecError(
                f"an EnvPool must step all environments together, with a batch_size of {len(inner)}, got "
                f"{inner.config['batch_size']}"
            )
        super().__init__(env)

    def reset(self, *, seeds: Sequence[int] | None = None, **given: Any) -> tuple[Sequence[Leaf], Infos]:
        """Start an episode in every environment; EnvPool takes no seeds here."""
        obs, infos = super().reset(**given)
        return obs, _leave_out_bookkeeping(infos)

    def _convert(self, obs: Any, rewards: Any, terminateds: Any, truncateds: Any, infos: Any) -> tuple[Any, ...]:
        return super()._convert(obs, rewards, terminateds, truncateds, _leave_out_bookkeeping(infos))


def _leave_out_bookkeeping(infos: Any) -> dict[str, Any]:
    """Leave out EnvPool's ids and counts of steps; those of players only where each environment has one."""
    kept = {key: value for key, value in infos.items() if key not in _BOOKKEEPING}
    if kept.get("players", {}).keys() == {"env_id"}:
        del kept["players"]
    return kept
