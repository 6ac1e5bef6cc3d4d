"""Environment adapters for all kinds of `env` arguments of collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from samplebatch.arguments import whole
from samplebatch.env.agents import MultiAgentAdapter, PolicyOfAgents
from samplebatch.env.base import Environments
from samplebatch.env.envpool import EnvPoolEnvironments, is_envpool
from samplebatch.env.gymnasium import EnvironmentList, check_different, vector_environments
from samplebatch.env.pettingzoo import ParallelAdapter, TurnBasedAdapter
from samplebatch.env.registry import Environment, environment_factory, environment_kind, make_environment
from samplebatch.env.rllib import RLlibAdapter
from samplebatch.env.tianshou import TianshouEnvironments, functions_of, is_tianshou_vector
from samplebatch.errors import ArgumentError, EnvironmentSpecError


def as_environments(env: Any, num_envs: int | None = None, env_kwargs: Mapping[str, Any] | None = None) -> Environments:
    """Create the adapter of Gymnasium environments.

    Parameters
    ----------
    env
        An environment or vector environment, Tianshou's included; a function that makes one, or its id (see
        `make_environment`); or a list of single environments, functions that make them and ids.
    num_envs
        How many environments to create from one function or id; 1 by default.
    env_kwargs
        Keyword arguments of these functions, or of those behind the ids.

    Examples
    --------
    >>> as_environments("CartPole-v1", 3).num_envs
    3
    >>> import gymnasium
    >>> vector = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    >>> type(as_environments(vector)).__name__
    'NextStepSyncEnvironments'
    """
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    found = _adapt(bind_arguments(env, env_kwargs), num_envs or 1)
    check_num_envs(num_envs, found.num_envs, env)
    return found


def check_num_envs(num_envs: int | None, given: int, env: Any) -> None:
    """Reject a number of environments that differs from the given ones; None stands for all."""
    if num_envs not in (None, given):
        word = "a list" if isinstance(env, list | tuple) else f"a {type(env).__name__}"
        raise ArgumentError(f"num_envs must be {given}, as env is {word} of as many environments, got {num_envs}")


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
            f"env must be a Gymnasium environment, got a {type(env).__name__} of several agents; "
            "use a MultiAgentCollector"
        )
    if kind == "gymnasium":
        return EnvironmentList([env])
    return EnvPoolEnvironments(env) if is_envpool(env) else vector_environments(env)


def make_all(given: Sequence[Any]) -> list[Any]:
    """Create environments from functions or ids; existing environments are returned unchanged."""
    with ExitStack() as stack:
        made = []
        for env in given:
            if is_factory(env):
                env = make_environment(env)
                stack.callback(env.close)
            made.append(env)
        stack.pop_all()
    return made


def bind_arguments(env: Any, env_kwargs: Mapping[str, Any] | None) -> Any:
    """Bind keyword arguments to functions and ids that create environments, also in a list.

    Examples
    --------
    >>> bind_arguments("CartPole-v1", {"max_episode_steps": 9})().spec.max_episode_steps
    9
    """
    if not env_kwargs:
        return env
    if isinstance(env, list | tuple):
        return [bind_arguments(one, env_kwargs) for one in env]
    if not is_factory(env):
        raise ArgumentError(
            f"env_kwargs must be for functions and ids that make environments, and env is a {type(env).__name__}"
        )
    environment_factory(env)
    return partial(make_environment, env, dict(env_kwargs))


def is_factory(env: Any) -> bool:
    """Return whether an argument creates environments, as ids, classes and functions do."""
    return isinstance(env, str | type) or (callable(env) and not hasattr(env, "step"))


def environment_makers(env: Environment | Sequence[Environment], num_envs: int | None) -> list[Callable[[], Any]]:
    """Return the functions that create the environments of a collector.

    Parameters
    ----------
    env
        Functions or ids, one for each environment; or one for all; or a vector environment of Tianshou, whose functions
        are used.
    num_envs
        Number of environments, by default the number of functions.

    Examples
    --------
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
        raise EnvironmentSpecError("there must be at least one environment, got none")
    if num_envs not in (None, len(env)):
        raise ArgumentError(f"num_envs must be {len(env)}, as env is a list of as many functions, got {num_envs}")
    return [_maker(one) for one in env]


def _maker(env: Any) -> Callable[[], Any]:
    if is_factory(env):
        return environment_factory(env)
    own = "the functions that it was made of, its env_fns" if hasattr(env, "env_fns") else "functions that make it"
    raise EnvironmentSpecError(
        "env must be given as functions that make environments, or ids, since each is made in a process of its own, "
        f"got a {type(env).__name__}; pass {own}"
    )


def list_environments(env: Environment | Sequence[Environment], count: int) -> tuple[Environment, ...]:
    """List the name or function of each of the environments of all workers.

    Examples
    --------
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
    """Create the adapter of a multi-agent environment; see `MultiAgentAdapter` for the arguments."""
    try:
        kind = environment_kind(environment)
    except EnvironmentSpecError:
        raise EnvironmentSpecError(
            "env must be a PettingZoo environment or a MultiAgentEnv of RLlib's, a list of these, a function or an id, "
            f"got a {type(environment).__name__}"
        ) from None
    adapter = _BY_KIND.get(kind)
    if adapter is None:
        raise EnvironmentSpecError(
            "an environment of several agents must have one of PettingZoo's interfaces or RLlib's, got a "
            f"{type(environment).__name__}, which Collector steps"
        )
    return adapter(environment, env_id, seed, policy_of)


def make_several(env: Any, num_envs: int | None) -> list[Any]:
    """Create the environments of a multi-agent collector: `num_envs` from a function or id, or those of a list."""
    if num_envs is not None:
        whole("num_envs", num_envs, 1)
    listed = isinstance(env, list | tuple)
    if not listed and is_factory(env):
        return make_all([env] * (num_envs or 1))
    given = env if listed else [env]
    check_num_envs(num_envs, len(given), env)
    if not given:
        raise EnvironmentSpecError("there must be at least one environment, got none")
    check_different(given)
    return make_all(given)
