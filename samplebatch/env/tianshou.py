"""Tianshou's vector environments, which step and reset the environments that they are asked to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from samplebatch.env.gymnasium import EnvironmentList, check_equal_spaces
from samplebatch.errors import EnvironmentSpecError


def is_tianshou_vector(env: Any) -> bool:
    """Return whether an object is a vector environment of Tianshou, or a wrapper of one; Tianshou is not imported."""
    module = sys.modules.get("tianshou.env.venvs")
    return module is not None and isinstance(env, module.BaseVectorEnv)


def open_vector(env: Any) -> Any:
    """Return the vector environment inside Tianshou's wrappers.

    Raises
    ------
    EnvironmentSpecError
        If it has been closed.
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
    """List the functions that make the environments of a vector environment of Tianshou."""
    return list(open_vector(env)._env_fns)


def waiting_of(env: Any) -> tuple[int | None, float | None]:
    """Return `wait_num` and `timeout` of a vector environment of Tianshou; None for both if it is synchronous."""
    inner = open_vector(env)
    return (inner.wait_num, inner.timeout) if inner.is_async else (None, None)


class TianshouEnvironments(EnvironmentList):
    """The environments of Tianshou's `DummyVectorEnv`, `SubprocVectorEnv`, `ShmemVectorEnv` or `RayVectorEnv`.

    All of them are stepped by one call of the vector environment, wrappers such as `VectorEnvNormObs` included. The
    environments whose episodes ended are reset together.

    Parameters
    ----------
    env
        The vector environment.

    Raises
    ------
    EnvironmentSpecError
        If it is closed, steps environments asynchronously, or their spaces differ.
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
        given = [own for _, own in zip(envs, arguments, strict=False)]
        if all(own is given[0] for own in given):
            return list(zip(*self.env.reset(list(envs), **given[0]), strict=True))
        # A call passes the same arguments to all, and each has a seed of its own.
        returned = [self.env.reset([env], **own) for env, own in zip(envs, given, strict=True)]
        return [(obs[0], infos[0]) for obs, infos in returned]

    def _step_each(self, actions: Iterable[Any]) -> list[Any]:
        returned = list(zip(*self.env.step(actions), strict=True))
        for *_, info in returned:
            # Tianshou adds the number of the environment, which is a column of its own here.
            info.pop("env_id", None)
        return returned

    def _parts(self) -> list[Any]:
        return [self.env]

    def render_all(self) -> None:
        self.env.render()

    def close(self) -> None:
        if not _unwrap(self.env).is_closed:
            self.env.close()
