"""Environments by name: PettingZoo's parallel environments, and functions that make one."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from samplebatch.errors import EnvironmentSpecError, near_names, require

DEFAULT_ENVIRONMENT = "mpe2/simple_spread_v3"

_NUMBERED = re.compile(r"(?P<kind>.*[^_\d])_?\d+")


class ParallelEnvironment(Protocol):
    """What is asked of an environment: PettingZoo's parallel interface."""

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
        """Let go of what the environment holds."""
        ...


Environment = str | Callable[[], ParallelEnvironment]
"""An environment's name, or a function that makes it."""


def environment_factory(environment: Environment) -> Callable[[], ParallelEnvironment]:
    """Find the function that makes an environment.

    Parameters
    ----------
    environment
        `package/module`, such as `mpe2/simple_spread_v3`, for the module's `parallel_env`; `module:function` for any
        function that returns a parallel environment; or such a function itself.

    Returns
    -------
    Callable
        A function without arguments. It can be pickled where the environment was given by name, and imports the
        module anew in the process that calls it.

    Raises
    ------
    EnvironmentSpecError
        If there is no such module or function, naming the near ones, or if its module needs another that is not
        installed.
    MissingExtraError
        If a package that the extra `envs` brings is not installed.

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


def make_environment(environment: Environment) -> ParallelEnvironment:
    """Make an environment; see `environment_factory`.

    Raises
    ------
    EnvironmentSpecError
        If there is none of that name, or what is made is not a parallel environment.
    MissingExtraError
        If a package that the extra `envs` brings is not installed.

    Examples
    --------
    >>> env = make_environment("mpe2/simple_spread_v3")
    >>> env.possible_agents
    ['agent_0', 'agent_1', 'agent_2']
    """
    made = (_find(environment) if isinstance(environment, str) else environment)()
    word: str = (
        repr(environment) if isinstance(environment, str) else getattr(environment, "__qualname__", repr(environment))
    )
    if hasattr(made, "agent_iter") or not all(hasattr(made, name) for name in ("reset", "step", "action_space")):
        raise EnvironmentSpecError(
            f"{word} must make a PettingZoo parallel environment, whose agents act together, "
            f"got a {type(made).__name__}"
        )
    return made


def policy_by_kind(environment: ParallelEnvironment) -> Callable[[Any], str]:
    """Map the agents of one kind to one policy: an agent's id without the number at its end.

    Agents whose ids differ in the number alone but whose spaces differ cannot share a batch, and get a policy each.

    Examples
    --------
    >>> mapping = policy_by_kind(make_environment("mpe2/simple_tag_v3"))
    >>> [mapping(agent) for agent in ("adversary_0", "adversary_2", "agent_0")]
    ['adversary', 'adversary', 'agent']
    """
    spaces: dict[str, Any] = {}
    mixed = set()
    for agent in getattr(environment, "possible_agents", ()):
        own = _spaces(environment, agent)
        if spaces.setdefault(kind_of(agent), own) != own:
            mixed.add(kind_of(agent))
    return partial(_policy_of, mixed=frozenset(mixed))


def _policy_of(agent: Any, *, mixed: frozenset[str]) -> str:
    kind = kind_of(agent)
    return str(agent) if kind in mixed else kind


def kind_of(agent: Any) -> str:
    """Take the number off the end of an agent's id.

    >>> [kind_of(agent) for agent in ("agent_0", "walker12", "red_knight", 3)]
    ['agent', 'walker', 'red_knight', 'agent']
    """
    if isinstance(agent, int):
        return "agent"
    found = _NUMBERED.fullmatch(str(agent))
    return found["kind"] if found else str(agent)


def _spaces(environment: ParallelEnvironment, agent: Any) -> tuple[Any, Any]:
    observation_space = getattr(environment, "observation_space", None)
    return (observation_space(agent) if observation_space else None, environment.action_space(agent))


def _find(name: str) -> Callable[[], ParallelEnvironment]:
    module_name, colon, function_name = name.partition(":")
    if colon:
        return _function(_import(module_name, name), function_name, name)
    package, slash, rest = name.replace(".", "/").rpartition("/")
    if not slash or not package:
        raise EnvironmentSpecError(
            f"an environment must be named as 'package/module' or 'module:function', got {name!r}{_hint_for_bare(name)}"
        )
    module = _import(f"{package}.{rest}".replace("/", "."), name)
    if not hasattr(module, "parallel_env"):
        turns = ", whose agents take turns, which is not supported" if hasattr(module, "env") else ""
        raise EnvironmentSpecError(f"the module of {name!r} must have a function parallel_env, and has none{turns}")
    return _function(module, "parallel_env", name)


def _function(module: ModuleType, function_name: str, name: str) -> Callable[[], ParallelEnvironment]:
    found: Any = getattr(module, function_name, None)
    if not callable(found):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise EnvironmentSpecError(
            f"no function {function_name!r} in module {module.__name__!r}; {near_names(function_name, functions)}"
        )
    made: Callable[[], ParallelEnvironment] = found
    return made


def _import(module_name: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise EnvironmentSpecError(
            f"an environment must be named as 'package/module' or 'module:function', got {name!r}"
        )
    root = module_name.partition(".")[0]
    if root == "mpe2":
        require("mpe2", "envs")
    elif root == "pettingzoo":
        require("pettingzoo", "envs")
    try:
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

    >>> "mpe2/simple_spread_v3" in known_environments()
    True
    """
    found: list[str] = []
    for package_name in ("mpe2", "pettingzoo.butterfly", "pettingzoo.sisl", "pettingzoo.atari"):
        try:
            package = import_module(package_name)
        except ImportError:
            continue
        modules = (module.name for module in pkgutil.iter_modules(package.__path__))
        found += [f"{package_name.replace('.', '/')}/{module}" for module in modules if re.search(r"_v\d+$", module)]
    return found


def _hint_for_bare(name: str) -> str:
    known = known_environments()
    exact = [full for full in known if full.rpartition("/")[2] == name]
    if exact:
        return f"; did you mean {exact[0]!r}?"
    bare = {full.rpartition("/")[2]: full for full in known}
    hint = near_names(name, bare)
    for short in re.findall(r"'([^']+)'", hint):
        hint = hint.replace(repr(short), repr(bare[short]))
    return f"; {hint}"


def agent_positions(environment: ParallelEnvironment) -> dict[Any, int]:
    """Number the agents that the environment says are possible, in its order.

    >>> agent_positions(make_environment("mpe2/simple_spread_v3"))
    {'agent_0': 0, 'agent_1': 1, 'agent_2': 2}
    """
    possible: Iterable[Any] = getattr(environment, "possible_agents", ())
    return {agent: position for position, agent in enumerate(possible)}
