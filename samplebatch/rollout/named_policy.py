"""NamedPolicy: a policy by the name of a function or a file, which goes to other processes as that name."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from samplebatch.errors import PolicySpecError, UntrustedPickleError, near_names

CHECKPOINTS = (".pt", ".pth")
"""Endings of files that `torch.save` wrote."""
PROGRAMS = (".pt2",)
"""Endings of files that `torch.export.save` wrote."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that is loaded where it is used.

    Parameters
    ----------
    name
        `module:function`, where a function without required parameters (a class, too) makes the policy, and any other
        is the policy; a file ending in `.pt2` that `torch.export.save` wrote; or one ending in `.pt` or `.pth` with a
        whole module that `torch.save` wrote.
    allow_pickle
        Whether to unpickle such a module, which runs code that its writer chose.

    Examples
    --------
    >>> NamedPolicy("collections:OrderedDict").load()
    OrderedDict()
    >>> NamedPolicy("math:cielo").load()
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: module 'math' must have the policy 'cielo', it has none; did you mean 'ceil'?
    """

    name: str
    allow_pickle: bool = False

    def load(self) -> Any:
        """Return the policy.

        Raises
        ------
        PolicySpecError
            If there is no such module, function or file, or the file holds no module.
        UntrustedPickleError
            If it is pickled and that is not allowed.
        """
        ending = Path(self.name).suffix.lower()
        if ending in CHECKPOINTS + PROGRAMS:
            if not os.path.isfile(self.name):
                raise PolicySpecError(f"the file of a policy must be there, and {self.name!r} is not")
            return _program(self.name) if ending in PROGRAMS else _checkpoint(self.name, self.allow_pickle)
        module, colon, function = self.name.partition(":")
        if not colon or not module or not function:
            raise PolicySpecError(
                f"a policy must be named as 'random', 'module:function', or a file ending in "
                f"{', '.join(CHECKPOINTS + PROGRAMS)}, got {self.name!r}"
            )
        return _imported(module, function)


def _imported(module: str, function: str) -> Any:
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise PolicySpecError(f"the module of a policy must be there, and there is no {error.name!r}") from error
    found = getattr(home, function, None)
    if found is None:
        raise PolicySpecError(
            f"module {module!r} must have the policy {function!r}, it has none; {near_names(function, dir(home))}"
        )
    if not callable(found):
        raise PolicySpecError(f"a policy must be callable, and '{module}:{function}' is a {type(found).__name__}")
    return found() if _makes(found) else found


def _makes(function: Any) -> bool:
    """Tell whether a function can be called on nothing."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return isinstance(function, type)
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _program(path: str) -> Any:
    import torch

    try:
        return torch.export.load(path).module()
    except Exception as error:
        # Whatever is wrong with the file, torch has no error of its own for it.
        raise PolicySpecError(
            f"{path!r} must be what torch.export.save wrote, and cannot be loaded: {error}"
        ) from error


def _checkpoint(path: str, allow_pickle: bool) -> Any:
    import pickle

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise UntrustedPickleError(f"{path!r} holds a pickled module, which runs code when it is loaded") from None
        raise PolicySpecError(f"{path!r} must be what torch.save wrote, and cannot be loaded: {error}") from error
    if not isinstance(found, torch.nn.Module):
        raise PolicySpecError(
            f"{path!r} must hold a whole module, and holds a {type(found).__name__}; where it holds weights, name a "
            "'module:function' that makes the module and loads them"
        )
    return found
