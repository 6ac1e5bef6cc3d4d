"""Adapter of Tianshou's vector environments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from samplebatch.env.gymnasium import EnvironmentList, check_equal_spaces
from samplebatch.errors import EnvironmentSpecError


def is_tianshou_vector(env: Any) -> bool:
    """Return whether an object is a vector environment of Tianshou, wrapped or not; Tianshou is not imported."""
    module = sys.modules.get("tianshou.env.venvs")
    return module is not None and isinstance(env, module.BaseVectorEnv)


def open_vector(env: Any) -> Any:
    """Return the vector environment inside Tianshou's wrappers.

    Raises
    ------
    EnvironmentSpecError
        If the vector environment has been closed.
    """
    inner = _unwrap(env)
    if inner.is_closed:
        raise EnvironmentSpecError(f"the environments must be open, got a closed {type(inner).__name__}")
    return inner


def _unwrap(env: Any) -> Any:
    while "venv" in vars(env):
        env = env.venv
    return env


def functions_of(env: Any) -> list[Callable[[], Any]]:
    """Return the functions that create the environments of a Tianshou vector environment."""
    return list(open_vector(env)._env_fns)


def waiting_of(env: Any) -> tuple[int | None, float | None]:
    """Return `wait_num` and `timeout` of a Tianshou vector environment; None for both if it is synchronous."""
    inner = open_vector(env)
    return (inner.wait_num, inner.timeout) if inner.is_async else (None, None)


class TianshouEnvironments(EnvironmentList):
    """Environments of Tianshou's `DummyVectorEnv`, `SubprocVectorEnv`, `ShmemVectorEnv` or `RayVectorEnv`.

    Each step is one call of the vector environment, including wrappers such as `VectorEnvNormObs`. Environments whose
    episodes ended are reset together.

    Parameters
    ----------
    env
        The vector environment.

    Raises
    ------
    EnvironmentSpecError
        If the vector environment is closed or asynchronous, or spaces of environments differ.
    """

    keeps_seeds = True

    def __init__(self, env: Any) -> None:
        inner = open_vector(env)
        if inner.is_async:
            raise EnvironmentSpecError(
                f"a {type(inner).__name__} must step all {len(inner)} environments together, got "
                f"wait_num={inner.wait_num} and timeout={inner.timeout}; use an AsyncCollector"
            )
        observation_spaces, action_spaces = env.observation_space, env.action_space
        check_equal_spaces(observation_spaces, action_spaces)
        super(EnvironmentList, self).__init__(env, len(inner), observation_spaces[0], action_spaces[0])
        self._resetting = False

    def _reset_each(self, envs: Sequence[int], arguments: Iterable[dict[str, Any]]) -> list[Any]:
        env_arguments = [arguments_of_env for _, arguments_of_env in zip(envs, arguments, strict=False)]
        if all(arguments_of_env is env_arguments[0] for arguments_of_env in env_arguments):
            return list(zip(*self.env.reset(list(envs), **env_arguments[0]), strict=True))
        # One call passes the same arguments to all environments, but seeds differ.
        returned = [
            self.env.reset([env], **arguments_of_env) for env, arguments_of_env in zip(envs, env_arguments, strict=True)
        ]
        return [(obs[0], infos[0]) for obs, infos in returned]

    def _step_each(self, actions: Iterable[Any]) -> list[Any]:
        returned = list(zip(*self.env.step(actions), strict=True))
        for *_, info in returned:
            # Tianshou adds the environment's number to infos; here it is the column `env_id`.
            info.pop("env_id", None)
        return returned

    def _parts(self) -> list[Any]:
        return [self.env]

    def render_all(self) -> None:
        self.env.render()

    def close(self) -> None:
        if not _unwrap(self.env).is_closed:
            self.env.close()
