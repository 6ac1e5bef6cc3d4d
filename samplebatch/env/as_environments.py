"""Creation of environment adapters from the `env` arguments of collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from samplebatch.arguments import whole
from samplebatch.env.agents import MultiAgentAdapter, ParallelAdapter, PolicyOfAgents, RLlibAdapter, TurnBasedAdapter
from samplebatch.env.base import Environments
from samplebatch.env.gymnasium import (
    EnvironmentList,
    EnvPoolEnvironments,
    TianshouEnvironments,
    check_different,
    functions_of,
    is_envpool,
    is_tianshou_vector,
    vector_environments,
)
from samplebatch.env.registry import Environment, environment_factory, environment_kind, make_environment
from samplebatch.errors import ArgumentError, EnvironmentSpecError


def as_environments(env: Any, num_envs: int | None = None, env_kwargs: Mapping[str, Any] | None = None) -> Environments:
    """Create an adapter of Gymnasium environments.

    - `env`: an environment or a vector environment, including Tianshou's; a function that creates an environment, or an
      environment id (see `make_environment`); or a list of single environments, functions and ids.
    - `num_envs`: number of environments to create if `env` is a single function or id; 1 by default.
    - `env_kwargs`: keyword arguments for the functions or ids.

    >>> as_environments("CartPole-v1", 3).num_envs
    3
    >>> import gymnasium
    >>> vector = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    >>> type(as_environments(vector)).__name__
    'NextStepSyncEnvironments'
    """
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    adapter = _adapt(bind_arguments(env, env_kwargs), num_envs or 1)
    check_num_envs(num_envs, adapter.num_envs, env)
    return adapter


def check_num_envs(num_envs: int | None, actual: int, env: Any) -> None:
    """Reject `num_envs` if it differs from the number of existing environments; None is accepted."""
    if num_envs not in (None, actual):
        word = "a list" if isinstance(env, list | tuple) else f"a {type(env).__name__}"
        raise ArgumentError(f"num_envs must be {actual}, the number of environments in env, {word}, got {num_envs}")


def _adapt(env: Any, num_envs: int) -> Environments:
    if isinstance(env, Environments):
        return env
    if isinstance(env, list | tuple):
        return EnvironmentList(make_all(env))
    if not is_factory(env):
        return _adapt_made(env)
    first = make_environment(env)
    if environment_kind(first) == "vector" or num_envs == 1:
        return _adapt_made(first)
    return EnvironmentList(make_all([first, *[env] * (num_envs - 1)]))


def _adapt_made(env: Any) -> Environments:
    if is_tianshou_vector(env):
        return TianshouEnvironments(env)
    try:
        kind = environment_kind(env)
    except EnvironmentSpecError:
        raise EnvironmentSpecError(
            "env must be a Gymnasium environment or vector environment, a list of environments, a function or an id, "
            f"got a {type(env).__name__}"
        ) from None
    if kind in ("parallel", "aec", "rllib"):
        raise EnvironmentSpecError(
            f"env must be a Gymnasium environment, got a {type(env).__name__} with several agents; "
            "use a MultiAgentCollector"
        )
    if kind == "gymnasium":
        return EnvironmentList([env])
    return EnvPoolEnvironments(env) if is_envpool(env) else vector_environments(env)


def make_all(sources: Sequence[Any]) -> list[Any]:
    """Create environments from functions or ids; existing environments are returned unchanged."""
    with ExitStack() as stack:
        environments = []
        for env in sources:
            if is_factory(env):
                env = make_environment(env)
                stack.callback(env.close)
            environments.append(env)
        stack.pop_all()
    return environments


def bind_arguments(env: Any, env_kwargs: Mapping[str, Any] | None) -> Any:
    """Bind keyword arguments to an environment function or id, or to each function or id in a list.

    >>> bind_arguments("CartPole-v1", {"max_episode_steps": 9})().spec.max_episode_steps
    9
    """
    if not env_kwargs:
        return env
    if isinstance(env, list | tuple):
        return [bind_arguments(item, env_kwargs) for item in env]
    if not is_factory(env):
        raise ArgumentError(f"env_kwargs must be passed with a function or id as env, got a {type(env).__name__}")
    environment_factory(env)
    return partial(make_environment, env, dict(env_kwargs))


def is_factory(env: Any) -> bool:
    """Return whether an argument is an id, a class or a function that creates environments."""
    return isinstance(env, str | type) or (callable(env) and not hasattr(env, "step"))


def environment_makers(env: Environment | Sequence[Environment], num_envs: int | None) -> list[Callable[[], Any]]:
    """Return the functions that create the environments of a collector.

    - `env`: a list with one function or id per environment; a single function or id for all environments; or a vector
      environment of Tianshou, whose environment functions are used.
    - `num_envs`: number of environments; by default, the number of functions.

    >>> len(environment_makers("CartPole-v1", 3)), len(environment_makers([dict, dict], None))
    (3, 2)
    """
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    if is_tianshou_vector(env):
        env = functions_of(env)
    if not isinstance(env, (list, tuple)):
        return [_maker(env)] * (num_envs or 1)
    if not env:
        raise EnvironmentSpecError("env must contain at least one environment, got none")
    if num_envs not in (None, len(env)):
        raise ArgumentError(f"num_envs must be {len(env)}, the number of functions in env, got {num_envs}")
    return [_maker(source) for source in env]


def _maker(env: Any) -> Callable[[], Any]:
    if is_factory(env):
        return environment_factory(env)
    expected = "the functions that it was made of, its env_fns" if hasattr(env, "env_fns") else "functions that make it"
    raise EnvironmentSpecError(
        "env must be functions or ids, because each environment is created in its own process, "
        f"got a {type(env).__name__}; pass {expected}"
    )


def list_environments(env: Environment | Sequence[Environment], count: int) -> tuple[Environment, ...]:
    """Return the id or function of each environment of the workers.

    >>> list_environments("CartPole-v1", 2)
    ('CartPole-v1', 'CartPole-v1')
    """
    if is_tianshou_vector(env):
        env = functions_of(env)
    environments: tuple[Any, ...] = tuple(env) if isinstance(env, (list, tuple)) else (env,) * count
    if len(environments) != count:
        raise ArgumentError(
            f"env must have as many environments as num_workers * envs_per_worker, {count}, got {len(environments)}"
        )
    environment_makers(environments, None)
    return environments


_BY_KIND: dict[str, type[MultiAgentAdapter]] = {
    "parallel": ParallelAdapter,
    "aec": TurnBasedAdapter,
    "rllib": RLlibAdapter,
}


def adapt_agents(environment: Any, env_id: int, seed: int, policy_of: PolicyOfAgents) -> MultiAgentAdapter:
    """Create the adapter of a multi-agent environment; the arguments are described in `MultiAgentAdapter`."""
    try:
        kind = environment_kind(environment)
    except EnvironmentSpecError:
        raise EnvironmentSpecError(
            "env must be a PettingZoo environment or a MultiAgentEnv of RLlib, a function, an id or a list, "
            f"got a {type(environment).__name__}"
        ) from None
    adapter = _BY_KIND.get(kind)
    if adapter is None:
        raise EnvironmentSpecError(
            "a multi-agent environment must have an interface of PettingZoo or RLlib, got a "
            f"{type(environment).__name__}; use a Collector"
        )
    return adapter(environment, env_id, seed, policy_of)


def make_several(env: Any, num_envs: int | None) -> list[Any]:
    """Create multi-agent environments: one per list item, or `num_envs` environments from one function or id."""
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    listed = isinstance(env, list | tuple)
    if not listed and is_factory(env):
        return make_all([env] * (num_envs or 1))
    environments = env if listed else [env]
    check_num_envs(num_envs, len(environments), env)
    if not environments:
        raise EnvironmentSpecError("env must contain at least one environment, got none")
    check_different(environments)
    return make_all(environments)
