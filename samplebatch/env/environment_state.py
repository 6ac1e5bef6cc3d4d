"""Saving and restoring of environments, including their random generators, as pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypedDict

from samplebatch.errors import EnvironmentSpecError

_ARGUMENTS = "_ezpickle_args"
"""Attribute of Gymnasium's `EzPickle`, which pickles the arguments of an object instead of its state."""


class SavedEnvironments(TypedDict):
    """Pickled environments in the state of collectors.

    - `pickles`: one pickle per environment; None if an environment cannot be pickled.
    - `why`: reason for which `pickles` is None; None if all environments are pickled.
    """

    pickles: list[bytes] | None
    why: str | None


def save_environments(envs: Sequence[Any]) -> SavedEnvironments:
    """Pickle all environments, or none of the environments if one cannot be pickled."""
    try:
        return {"pickles": [save_environment(env) for env in envs], "why": None}
    except Exception as error:
        return {"pickles": None, "why": f"{type(error).__name__}: {error}"}


def load_environments(envs: Sequence[Any], saved: SavedEnvironments) -> bool:
    """Restore environments from a result of `save_environments`; return False if the result contains no pickles.

    Raises EnvironmentSpecError if the classes of the environments differ from the classes in the saved state.
    """
    if saved["pickles"] is None:
        return False
    for env, pickled in zip(envs, saved["pickles"], strict=True):
        load_environment(env, pickled)
    return True


def save_environment(env: Any) -> bytes:
    """Pickle an environment with its wrappers and random generators, so that the environment resumes exactly.

    Windows, fonts and images of pygame are omitted, because rendering recreates them.

    Raises Exception if a part cannot be pickled, such as a process or a native simulator.

    >>> import gymnasium
    >>> env, again = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    >>> _ = env.reset(seed=1)
    >>> load_environment(again, save_environment(env))
    >>> env.step(0)[0].tolist() == again.step(0)[0].tolist()
    True
    """
    file = io.BytesIO()
    left_out = {id(value): path for path, value in _find_pygame_objects(env)}

    class Pickler(import_module("cloudpickle").Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> Any:
            return left_out.get(id(value))

        def reducer_override(self, value: Any) -> Any:
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict and _ARGUMENTS in attributes and not isinstance(value, type):
                return object.__new__, (type(value),), attributes, None, None, _fill
            return super().reducer_override(value)

    Pickler(file).dump(env)
    return file.getvalue()


def load_environment(env: Any, state: bytes) -> None:
    """Restore an environment from the bytes that `save_environment` returned.

    Raises EnvironmentSpecError if the class of the environment differs from the class of the saved environment.
    """
    attributes = dict(_find_pygame_objects(env))

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, path: Any) -> Any:
            return attributes.get(path)

    loaded = Unpickler(io.BytesIO(state)).load()
    if type(loaded) is not type(env):
        raise EnvironmentSpecError(
            f"the state of an environment must be of a {type(env).__name__}, got a {type(loaded).__name__}"
        )
    # The collector and its user have references to this object.
    env.__dict__.clear()
    env.__dict__.update(loaded.__dict__)


def _find_pygame_objects(env: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and value of every pygame object among the attributes of an environment and its wrappers."""
    visited: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), env)]
    while waiting:
        path, layer = waiting.pop()
        attributes = getattr(layer, "__dict__", None)
        if id(layer) in visited or not isinstance(attributes, Mapping):
            continue
        visited.add(id(layer))
        for name, value in attributes.items():
            if type(value).__module__.partition(".")[0] == "pygame":
                yield (*path, name), value
            elif hasattr(value, "step") and hasattr(value, "reset"):
                waiting.append(((*path, name), value))
            elif isinstance(value, list | tuple):
                waiting += [
                    ((*path, name, str(index)), part) for index, part in enumerate(value) if hasattr(part, "step")
                ]


def _fill(instance: Any, attributes: dict[str, Any]) -> None:
    instance.__dict__.update(attributes)
