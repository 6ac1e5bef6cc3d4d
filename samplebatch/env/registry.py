"""Creation of environments from Gymnasium ids, PettingZoo ids, module paths and functions."""

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
"""Stepping interface of an environment: one agent; a vector of single-agent environments; all agents simultaneously;
agents in turns; or the agents that received an observation."""

_REGISTERED = re.compile(r"-v\d+$")
_VERSION = re.compile(r"[-_]v\d+$")
_FORMS = "'Name-v0', 'package/module' or 'module:function'"


class GymnasiumEnvironment(Protocol):
    """Interface of Gymnasium's environments and vector environments."""

    @property
    def observation_space(self) -> Any:
        """Observation space."""

    @property
    def action_space(self) -> Any:
        """Action space."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Start an episode and return observation and info."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Execute an action and return observation, reward, terminated, truncated and info."""

    def close(self) -> Any:
        """Close the environment."""


class RLlibEnvironment(Protocol):
    """Interface of RLlib's `MultiAgentEnv`, in which agents that receive an observation act next."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Start an episode and return observations and infos by agent."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Execute actions and return observations, rewards, terminations, truncations and infos by agent."""

    def get_observation_space(self, *args: Any, **kwargs: Any) -> Any:
        """Return the observation space of an agent."""

    def get_action_space(self, *args: Any, **kwargs: Any) -> Any:
        """Return the action space of an agent."""

    def close(self) -> Any:
        """Close the environment."""


class ParallelEnvironment(Protocol):
    """PettingZoo's parallel interface, in which all agents act simultaneously."""

    agents: list[Any]
    """Agents that act in the next step."""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Start an episode and return observations and infos by agent."""
        ...

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Execute actions and return observations, rewards, terminations, truncations and infos by agent."""
        ...

    def action_space(self, agent: Any) -> Any:
        """Return the action space of an agent."""
        ...

    def close(self) -> None:
        """Close the environment."""
        ...


class AECEnvironment(Protocol):
    """PettingZoo's turn-based interface ("agent environment cycle")."""

    agents: list[Any]
    """Active agents, including dead agents before their last turn."""
    agent_selection: Any
    """Agent whose turn it is."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start an episode."""
        ...

    def last(self) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the selected agent's observation, sum of rewards since its last turn, both end flags and info."""
        ...

    def step(self, action: Any) -> None:
        """Execute the selected agent's action; None removes a dead agent."""
        ...

    def action_space(self, agent: Any) -> Any:
        """Return the action space of an agent."""
        ...

    def close(self) -> None:
        """Close the environment."""
        ...


Environment = str | Callable[..., Any]
"""Environment id, or function that creates an environment."""

EnvLike = Environment | GymnasiumEnvironment | Sequence[Environment | GymnasiumEnvironment]
"""Types of `env` in single-agent collectors."""

_Several = Environment | ParallelEnvironment | AECEnvironment | RLlibEnvironment
MultiAgentEnvLike = _Several | Sequence[_Several]
"""Types of `env` in multi-agent collectors."""


def environment_factory(environment: Environment) -> Callable[[], Any]:
    """Return a function without arguments that creates an environment; see `make_environment`.

    If `environment` is an id, the returned function is picklable and imports the environment's module when it is
    called.

    >>> environment_factory("mpe2/simple_spraed_v3")
    Traceback (most recent call last):
    samplebatch.errors.EnvironmentSpecError: no environment ...; did you mean
        'mpe2/simple_spread_v3' or ...
    """
    if callable(environment):
        return environment
    _find(environment)
    return partial(make_environment, environment)


def make_environment(environment: Environment, env_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Create an environment from an id or a function.

    Parameters
    ----------
    environment
        One of

        - a Gymnasium or PettingZoo id, such as `CartPole-v1` or `classic/tictactoe-v3`; for `module:Name-v0`, `module`
          is imported first;
        - `package/module`, such as `mpe2/simple_spread_v3`: the PettingZoo environment that the function `parallel_env`
          of the module creates, or `env` if agents can only act in turns;
        - `module:function`: a function that returns an environment with Gymnasium's, PettingZoo's or RLlib's interface;
        - a function that returns such an environment.
    env_kwargs
        Keyword arguments for the function that creates the environment.

    Raises
    ------
    EnvironmentSpecError
        If the environment, module or function does not exist, the module requires another module that is not installed,
        or the function does not return an environment.
    MissingExtraError
        If a package of the extra `envs` is not installed.

    Examples
    --------
    >>> make_environment("mpe2/simple_spread_v3").possible_agents
    ['agent_0', 'agent_1', 'agent_2']
    """
    instance = (_find(environment) if isinstance(environment, str) else environment)(**(env_kwargs or {}))
    try:
        environment_kind(instance)
    except EnvironmentSpecError as error:
        named = isinstance(environment, str)
        word = repr(environment) if named else getattr(environment, "__qualname__", repr(environment))
        raise EnvironmentSpecError(f"{word} must create an environment: {error}") from None
    return instance


def imports_module(name: str) -> bool:
    """Return whether the creation of an environment imports a module that the environment's name specifies.

    Registered ids, such as `CartPole-v1`, do not import modules. Names that are read from files must be registered ids
    unless the caller permits imports.

    >>> [
    ...     imports_module(name)
    ...     for name in ("CartPole-v1", "ALE/Pong-v5", "module:Id-v0", "module:make", "a/b_v3")
    ... ]
    [False, False, True, True, True]
    """
    return ":" in name or not _REGISTERED.search(name)


def environment_kind(environment: Any) -> Kind:
    """Return the stepping interface of an environment.

    Raises EnvironmentSpecError if the object is not an environment.

    >>> (
    ...     environment_kind(make_environment("CartPole-v1")),
    ...     environment_kind(make_environment("mpe2/simple_spread_v3")),
    ... )
    ('gymnasium', 'parallel')
    """
    if hasattr(environment, "step") and hasattr(environment, "reset") and not isinstance(environment, type):
        if hasattr(environment, "agent_iter") or hasattr(environment, "agent_selection"):
            return "aec"
        if hasattr(environment, "num_envs") and hasattr(environment, "single_action_space"):
            return "vector"
        if hasattr(environment, "get_observation_space") and hasattr(environment, "get_action_space"):
            return "rllib"
        # PettingZoo's `action_space` is a function of the agent, Gymnasium's is a space.
        space = getattr(environment, "action_space", None)
        if space is not None:
            return "parallel" if callable(space) else "gymnasium"
    raise EnvironmentSpecError(
        f"it must have an interface of Gymnasium, PettingZoo or RLlib, got a {type(environment).__name__}"
    )


def _find(name: str) -> Callable[..., Any]:
    if _REGISTERED.search(name):
        return _find_registered(name)
    module_name, colon, function_name = name.partition(":")
    if colon:
        return _find_function(_import(module_name, name), function_name, name)
    package, slash, stem = name.replace(".", "/").rpartition("/")
    if not slash or not package:
        raise EnvironmentSpecError(f"an environment id must have the form {_FORMS}, got {name!r}{_hint_for_bare(name)}")
    module = _import(f"{package}.{stem}".replace("/", "."), name)
    for function_name in ("parallel_env", "env"):
        if hasattr(module, function_name):
            return _find_function(module, function_name, name)
    raise EnvironmentSpecError(f"the module of {name!r} must have a function parallel_env or env, got neither")


def _find_registered(name: str) -> Callable[..., Any]:
    """Find an id in Gymnasium's registry or, otherwise, in the registry of PettingZoo 1.27 or later."""
    gymnasium = require("gymnasium", "envs")
    module_name, colon, env_id = name.rpartition(":")
    if colon:
        _import(module_name, name)
    elif name.startswith("ALE/") or re.fullmatch(r"\w+(NoFrameskip|Deterministic)-v[04]", name):
        # Importing the module registers Atari's environments, with their older ids.
        require("ale_py", "atari")
    try:
        with warnings.catch_warnings():
            # The warning about later versions is issued once, when the environment is created.
            warnings.simplefilter("ignore")
            gymnasium.spec(env_id)
        return partial(gymnasium.make, env_id)
    except gymnasium.error.Error as error:
        ids = list(gymnasium.registry)
        for interface, registry in _pettingzoo_registries():
            ids += registry
            if env_id in registry:
                return partial(import_module("pettingzoo").make, interface, env_id)
        game = re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)-v\d", env_id)
        hint = f"did you mean 'ALE/{game[1]}-v5'?" if game else near_names(env_id, dict.fromkeys(ids))
        raise EnvironmentSpecError(f"no environment {name!r}; {hint}") from error


def _pettingzoo_registries() -> Iterator[tuple[str, Collection[str]]]:
    try:
        pettingzoo = import_module("pettingzoo")
    except ImportError:
        return
    for interface in ("parallel", "aec"):
        yield interface, getattr(pettingzoo, f"{interface}_registry", ())


def _find_function(module: ModuleType, function_name: str, name: str) -> Callable[..., Any]:
    attribute: Any = getattr(module, function_name, None)
    if not callable(attribute):
        functions = [
            attribute_name
            for attribute_name, value in vars(module).items()
            if callable(value) and not attribute_name.startswith("_")
        ]
        raise EnvironmentSpecError(
            f"no function {function_name!r} in module {module.__name__!r}; {near_names(function_name, functions)}"
        )
    function: Callable[..., Any] = attribute
    return function


def _import(module_name: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise EnvironmentSpecError(f"an environment id must have the form {_FORMS}, got {name!r}")
    root = module_name.partition(".")[0]
    if root == "mpe2":
        require("mpe2", "envs")
    elif root == "pettingzoo":
        require("pettingzoo", "envs")
    try:
        with warnings.catch_warnings():
            # PettingZoo's modules warn of their removal in favour of its registry, which older releases lack.
            warnings.simplefilter("ignore", DeprecationWarning)
            return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise EnvironmentSpecError(f"no environment {name!r}; {_near_environments(module_name, name)}") from error
        raise EnvironmentSpecError(
            f"environment {name!r} requires the module {missing!r}; install the package that provides it"
        ) from error
    except Exception as error:
        # The module's author needs the original error, which is the cause.
        raise EnvironmentSpecError(
            f"the module of environment {name!r} must import without error, got {type(error).__name__}: {error}"
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
        f"{package_name.replace('.', separator)}{separator}{module_info.name}"
        for module_info in pkgutil.iter_modules(package.__path__)
    )
    return near_names(name, modules)


def known_environments() -> list[str]:
    """Return the ids of all environments in the installed packages of the extra `envs`.

    >>> expected = {"mpe2/simple_spread_v3", "pettingzoo/classic/tictactoe_v3", "CartPole-v1"}
    >>> expected <= set(known_environments())
    True
    """
    ids: list[str] = []
    packages = ("mpe2", *(f"pettingzoo.{name}" for name in ("classic", "butterfly", "sisl", "atari")))
    for package_name in packages:
        try:
            package = import_module(package_name)
        except ImportError:
            continue
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        ids += [f"{package_name.replace('.', '/')}/{module}" for module in modules if re.search(r"_v\d+$", module)]
    try:
        return [*ids, *import_module("gymnasium").registry]
    except ImportError:
        return ids


def _hint_for_bare(name: str) -> str:
    bare: dict[str, str] = {}
    versions: dict[str, str] = {}
    for full in known_environments():
        short = full.rpartition("/")[2]
        if bare.setdefault(short, full) == full:
            # The last listed version is the latest.
            versions[_VERSION.sub("", short)] = full
    exact = bare.get(name) or versions.get(name)
    if exact:
        return f"; did you mean {exact!r}?"
    hint = near_names(name, bare)
    for short in re.findall(r"'([^']+)'", hint):
        hint = hint.replace(repr(short), repr(bare[short]))
    return f"; {hint}"
