"""Policies in files that torch wrote."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from samplebatch.errors import PolicySpecError, UntrustedPickleError

if TYPE_CHECKING:
    import torch

_FIRST_SAFE_TORCH = (2, 6)
"""Before it, `torch.load` ran code even where it was to load weights alone (CVE-2025-32434)."""

CHECKPOINTS = (".pt", ".pth")
"""Endings of files that `torch.save` wrote."""
PROGRAMS = (".pt2",)
"""Endings of files that `torch.export.save` wrote."""


def is_policy_file(name: str) -> bool:
    """Tell whether a name is that of a policy's file.

    >>> is_policy_file("best.pt"), is_policy_file("my_package:policy")
    (True, False)
    """
    return Path(name).suffix.lower() in CHECKPOINTS + PROGRAMS


def load_policy(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> torch.nn.Module:
    """Load a policy.

    Parameters
    ----------
    path
        A file ending in `.pt2` with a program that `torch.export.save` wrote, or one ending in `.pt` or `.pth` with a
        whole module that `torch.save` wrote.
    allow_pickle
        Whether to load either, which runs code that its writer chose: a module is a pickle, and in a program torch
        unpickles example inputs and evaluates expressions.

    Raises
    ------
    PolicySpecError
        If there is no such file, or it holds no module.
    UntrustedPickleError
        If that would run code, and is not allowed.

    Examples
    --------
    >>> load_policy("nowhere.pt")
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: the file of a policy must be there, and 'nowhere.pt' is not
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise PolicySpecError(f"the file of a policy must be there, and {name!r} is not")
    load = _program if Path(name).suffix.lower() in PROGRAMS else _checkpoint
    return load(name, allow_pickle=allow_pickle)


def _program(path: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    if not allow_pickle:
        raise UntrustedPickleError(
            f"{path!r} holds an exported program, of which torch unpickles parts, and that runs code of its writer's"
        )
    import torch

    try:
        return torch.export.load(path).module()
    except Exception as error:
        # Torch has no error of its own for a file that is no policy.
        raise PolicySpecError(
            f"{path!r} must be what torch.export.save wrote, and cannot be loaded: {error}"
        ) from error


def _checkpoint(path: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if not allow_pickle and release < _FIRST_SAFE_TORCH:
        raise UntrustedPickleError(f"{path!r} runs code when it is loaded by torch {torch.__version__}")
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
