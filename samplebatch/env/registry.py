"""Environments by name, of Gymnasium and PettingZoo, or made by a function."""

from __future__ import annotations

import pkgutil
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, Protocol

from samplebatch.errors import EnvironmentSpecError, near_names, require

DEFAULT_ENVIRONMENT = "mpe2/simple_spread_v3"

Kind = Literal["gymnasium", "vector", "parallel", "aec", "rllib"]
"""How an environment is stepped: by one agent; many of that kind at once; by all of its agents at once; in turns; by
those agents that it gave an observation."""

_REGISTERED = re.compile(r"-v\d+$")
_VERSION = re.compile(r"[-_]v\d+$")
_FORMS = "'Name-v0', 'package/module' or 'module:function'"


class GymnasiumEnvironment(Protocol):
    """Gymnasium's interface, of one environment or of many in a vector environment."""

    @property
    def observation_space(self) -> Any:
        """The space of observations."""

    @property
    def action_space(self) -> Any:
        """The space of actions."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Start an episode, and return observation and info."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Act, and return observation, reward, the two flags and info."""

    def close(self) -> Any:
        """Close the environment."""


class RLlibEnvironment(Protocol):
    """RLlib's `MultiAgentEnv`: those agents act that it gave an observation."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Start an episode, and return observations and infos by agent."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Let agents act, and return observations, rewards, the two flags and infos by agent."""

    def get_observation_space(self, *args: Any, **kwargs: Any) -> Any:
        """Return the space of an agent's observations."""

    def get_action_space(self, *args: Any, **kwargs: Any) -> Any:
        """Return the space of an agent's actions."""

    def close(self) -> Any:
        """Close the environment."""


class ParallelEnvironment(Protocol):
    """PettingZoo's parallel interface: all agents act at once."""

    agents: list[Any]
    """Agents that act in the next step."""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Start an episode, and return each agent's observation and info."""
        ...

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Let every agent act, and return observations, rewards, terminations, truncations and infos by agent."""
        ...

    def action_space(self, agent: Any) -> Any:
        """Return the space of an agent's actions."""
        ...

    def close(self) -> None:
        """Close the environment."""
        ...


class AECEnvironment(Protocol):
    """PettingZoo's interface of agents that take turns ("agent environment cycle")."""

    agents: list[Any]
    """Agents that take part, those included that are dead and have their last turn to come."""
    agent_selection: Any
    """Whose turn it is."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode."""
        ...

    def last(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the selected agent's observation, its rewards since its last turn, its flags and its info."""
        ...

    def step(self, action: Any) -> None:
        """Let the selected agent act; None takes a dead one out."""
        ...

    def action_space(self, agent: Any) -> Any:
        """Return the space of an agent's actions."""
        ...

    def close(self) -> None:
        """Close the environment."""
        ...


Environment = str | Callable[..., Any]
"""An environment's name, or a function that makes it."""

EnvLike = Environment | GymnasiumEnvironment | Sequence[Environment | GymnasiumEnvironment]
"""All that collectors of one agent take as `env`."""

_Several = Environment | ParallelEnvironment | AECEnvironment | RLlibEnvironment
MultiAgentEnvLike = _Several | Sequence[_Several]
"""All that collectors of several agents take as `env`."""


def environment_factory(environment: Environment) -> Callable[[], Any]:
    """Return a function without arguments that makes an environment; see `make_environment`.

    If the environment is given by name, the function can be pickled, and imports the module again in the process that
    calls it.

    Examples
    --------
    >>> environment_factory("mpe2/simple_spraed_v3")
    Traceback (most recent call last):
    samplebatch.errors.EnvironmentSpecError: no environment ...; did you mean 'mpe2/simple_spread_v3' or ...
    """
    if callable(environment):
        return environment
    _find(environment)
    return partial(make_environment, environment)


def make_environment(environment: Environment, env_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Create an environment from its name, or by a function.

    Parameters
    ----------
    environment
        One of

        - an id that Gymnasium or PettingZoo knows, such as `CartPole-v1`, `classic/tictactoe-v3` or, to import a module
          first, `module:Name-v0`;
        - `package/module`, such as `mpe2/simple_spread_v3`: the PettingZoo environment that the module's `parallel_env`
          makes, or its `env` if agents can only take turns;
        - `module:function`: a function that returns an environment with Gymnasium's, PettingZoo's or RLlib's interface;
        - such a function itself.
    env_kwargs
        Keyword arguments of the function.

    Raises
    ------
    EnvironmentSpecError
        If there is no such environment, module or function (the error suggests similar names); if its module requires
        another that is not installed; or if the function makes no environment.
    MissingExtraError
        If a package that the extra `envs` brings is not installed.

    Examples
    --------
    >>> make_environment("mpe2/simple_spread_v3").possible_agents
    ['agent_0', 'agent_1', 'agent_2']
    """
    made = (_find(environment) if isinstance(environment, str) else environment)(**(env_kwargs or {}))
    try:
        environment_kind(made)
    except EnvironmentSpecError as error:
        named = isinstance(environment, str)
        word = repr(environment) if named else getattr(environment, "__qualname__", repr(environment))
        raise EnvironmentSpecError(f"{word} must make an environment: {error}") from None
    return made


def imports_module(name: str) -> bool:
    """Return whether making an environment of this name imports a module that the name chooses.

    Only ids of the registries, such as `CartPole-v1`, do not: a name that comes from a file is used without permission
    only if it is one.

    >>> [imports_module(name) for name in ("CartPole-v1", "ALE/Pong-v5", "module:Id-v0", "module:make", "a/b_v3")]
    [False, False, True, True, True]
    """
    return ":" in name or not _REGISTERED.search(name)


def environment_kind(made: Any) -> Kind:
    """Tell how an environment is stepped.

    Raises
    ------
    EnvironmentSpecError
        If it is no environment.

    Examples
    --------
    >>> environment_kind(make_environment("CartPole-v1")), environment_kind(make_environment("mpe2/simple_spread_v3"))
    ('gymnasium', 'parallel')
    """
    if hasattr(made, "step") and hasattr(made, "reset") and not isinstance(made, type):
        if hasattr(made, "agent_iter") or hasattr(made, "agent_selection"):
            return "aec"
        if hasattr(made, "num_envs") and hasattr(made, "single_action_space"):
            return "vector"
        if hasattr(made, "get_observation_space") and hasattr(made, "get_action_space"):
            return "rllib"
        # A space is no function: PettingZoo's agents have one each, Gymnasium's environments have one.
        space = getattr(made, "action_space", None)
        if space is not None:
            return "parallel" if callable(space) else "gymnasium"
    raise EnvironmentSpecError(
        f"it must have Gymnasium's or one of PettingZoo's interfaces, or RLlib's, got a {type(made).__name__}"
    )


def _find(name: str) -> Callable[..., Any]:
    if _REGISTERED.search(name):
        return _find_registered(name)
    module_name, colon, function_name = name.partition(":")
    if colon:
        return _find_function(_import(module_name, name), function_name, name)
    package, slash, rest = name.replace(".", "/").rpartition("/")
    if not slash or not package:
        raise EnvironmentSpecError(f"an environment must be named as {_FORMS}, got {name!r}{_hint_for_bare(name)}")
    module = _import(f"{package}.{rest}".replace("/", "."), name)
    for function_name in ("parallel_env", "env"):
        if hasattr(module, function_name):
            return _find_function(module, function_name, name)
    raise EnvironmentSpecError(f"the module of {name!r} must have a function parallel_env or env, and has neither")


def _find_registered(name: str) -> Callable[..., Any]:
    """Find an id in Gymnasium's registry, else in PettingZoo's, which it has since 1.27."""
    gymnasium = require("gymnasium", "envs")
    module_name, colon, rest = name.rpartition(":")
    if colon:
        _import(module_name, name)
    elif name.startswith("ALE/"):
        # Importing the module registers Atari's environments.
        require("ale_py", "atari")
    try:
        with warnings.catch_warnings():
            # That there is a later version is said once, when the environment is made.
            warnings.simplefilter("ignore")
            gymnasium.spec(rest)
        return partial(gymnasium.make, rest)
    except gymnasium.error.Error as error:
        known = list(gymnasium.registry)
        for interface, registry in _pettingzoo_registries():
            known += registry
            if rest in registry:
                return partial(import_module("pettingzoo").make, interface, rest)
        raise EnvironmentSpecError(f"no environment {name!r}; {near_names(rest, dict.fromkeys(known))}") from error


def _pettingzoo_registries() -> Iterator[tuple[str, Collection[str]]]:
    try:
        pettingzoo = import_module("pettingzoo")
    except ImportError:
        return
    for interface in ("parallel", "aec"):
        yield interface, getattr(pettingzoo, f"{interface}_registry", ())


def _find_function(module: ModuleType, function_name: str, name: str) -> Callable[..., Any]:
    found: Any = getattr(module, function_name, None)
    if not callable(found):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise EnvironmentSpecError(
            f"no function {function_name!r} in module {module.__name__!r}; {near_names(function_name, functions)}"
        )
    made: Callable[..., Any] = found
    return made


def _import(module_name: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise EnvironmentSpecError(f"an environment must be named as {_FORMS}, got {name!r}")
    root = module_name.partition(".")[0]
    if root == "mpe2":
        require("mpe2", "envs")
    elif root == "pettingzoo":
        require("pettingzoo", "envs")
    try:
        with warnings.catch_warnings():
            # PettingZoo's modules warn that they will go, in favour of its registry, which older releases do not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise EnvironmentSpecError(f"no environment {name!r}; {_near_environments(module_name, name)}") from error
        raise EnvironmentSpecError(
            f"environment {name!r} needs the module {missing!r}, which is not installed; install what has it"
        ) from error
    except Exception as error:
        # What goes wrong inside a module is its author's to read: the cause stays attached.
        raise EnvironmentSpecError(
            f"the module of environment {name!r} must import without error, and raised {type(error).__name__}: {error}"
        ) from error


def _near_environments(module_name: str, name: str) -> str:
    package_name, _, _ = module_name.rpartition(".")
    separator = "." if ":" in name else "/"
    try:
        package = import_module(package_name) if package_name else None
    except ImportError:
        package = None
    if package is None or not hasattr(package, "__path__"):
        return near_names(name, known_environments())
    modules = (
        f"{package_name.replace('.', separator)}{separator}{found.name}"
        for found in pkgutil.iter_modules(package.__path__)
    )
    return near_names(name, modules)


def known_environments() -> list[str]:
    """List the environments of the packages that the extra `envs` brings, as far as they are installed.

    >>> {"mpe2/simple_spread_v3", "pettingzoo/classic/tictactoe_v3", "CartPole-v1"} <= set(known_environments())
    True
    """
    found: list[str] = []
    packages = ("mpe2", *(f"pettingzoo.{name}" for name in ("classic", "butterfly", "sisl", "atari")))
    for package_name in packages:
        try:
            package = import_module(package_name)
        except ImportError:
            continue
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        found += [f"{package_name.replace('.', '/')}/{module}" for module in modules if re.search(r"_v\d+$", module)]
    try:
        return [*found, *import_module("gymnasium").registry]
    except ImportError:
        return found


def _hint_for_bare(name: str) -> str:
    """Word a hint for a name without a package, or without a version."""
    bare: dict[str, str] = {}
    versions: dict[str, str] = {}
    for full in known_environments():
        short = full.rpartition("/")[2]
        if bare.setdefault(short, full) == full:
            # The latest version is listed last.
            versions[_VERSION.sub("", short)] = full
    exact = bare.get(name) or versions.get(name)
    if exact:
        return f"; did you mean {exact!r}?"
    hint = near_names(name, bare)
    for short in re.findall(r"'([^']+)'", hint):
        hint = hint.replace(repr(short), repr(bare[short]))
    return f"; {hint}"
