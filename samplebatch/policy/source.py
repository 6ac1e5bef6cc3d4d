"""Policies for workers and from files: given, made by a function, named or loaded; and given new weights."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch.errors import PolicySpecError, UntrustedPickleError, near_names
from samplebatch.names import label_policies
from samplebatch.policy.as_policy import is_random, own_policy

if TYPE_CHECKING:
    import torch


_WEIGHTS_NBYTES, _NO_WEIGHTS_NBYTES = 16 << 20, 1 << 20
_SPACES = ("observation_space", "action_space")


class PickledPolicy:
    """A policy, or a mapping of policies, as bytes: each call makes another, with memory of its own.

    Bytes, because multiprocessing would put the tensors of a module where the learner's changes reach all workers.

    Examples
    --------
    >>> PickledPolicy({"walker": "random"})()
    {'walker': 'random'}
    """

    def __init__(self, policy: Any, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
        try:
            self._bytes = dumps(policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PolicySpecError(
                "a policy goes to other processes, and must be 'random', a name, an importable function or an object "
                f"that can be pickled: {error}"
            ) from error

    def __call__(self) -> Any:
        """Unpickle the policy."""
        return pickle.loads(self._bytes)


def make_policy(policy: Any, observation_space: Any, action_space: Any) -> Any:
    """Make a policy from a factory or a name; a policy, and `"random"`, are returned as they are.

    Parameters
    ----------
    policy
        A class or a function without further parameters than `observation_space` and `action_space`, which makes a
        policy; the name of one, as `module:function`; or a policy.
    observation_space, action_space
        Arguments of such a function, if it has parameters of these names.

    Raises
    ------
    PolicySpecError
        If there is nothing of that name.

    Examples
    --------
    >>> class Constant:
    ...     def __init__(self, action_space):
    ...         self.action = action_space
    ...
    ...     def __call__(self, obs):
    ...         return [self.action] * len(obs)
    >>> make_policy(Constant, None, 3)([0, 0])
    [3, 3]
    >>> make_policy("random", None, None)
    'random'
    """
    if isinstance(policy, str):
        if is_random(policy):
            return policy
        policy = _import_policy(policy)
    wanted = _factory_parameters(policy)
    if wanted is None:
        return policy
    given = dict(zip(_SPACES, (observation_space, action_space), strict=True))
    return policy(**{name: given[name] for name in wanted})


def _import_policy(name: str) -> Any:
    module_name, colon, path = name.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in module_name.split(".")):
        raise PolicySpecError(f"a policy must be named 'random' or as 'module:function', got {name!r}")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise PolicySpecError(f"the module of policy {name!r} must import, and did not: {error}") from error
    if not hasattr(module, path):
        known = [own for own, value in vars(module).items() if callable(value) and not own.startswith("_")]
        raise PolicySpecError(f"no policy {path!r} in module {module_name!r}; {near_names(path, known)}")
    return getattr(module, path)


def _factory_parameters(policy: Any) -> list[str] | None:
    """Return which of the spaces a factory takes; None if it is a policy, and no factory."""
    if not (inspect.isclass(policy) or inspect.isroutine(policy) or isinstance(policy, partial)):
        return None
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return [] if inspect.isclass(policy) else None
    wanted = [one.name for one in parameters if one.name in _SPACES]
    others = [one for one in parameters if one.name not in _SPACES and one.default is one.empty]
    needed = [one for one in others if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    # A function of other things, or of anything, is a policy itself; a class is none.
    return wanted if inspect.isclass(policy) or not (needed or (others and not wanted)) else None


def check_policy(policy: Any) -> None:
    """Check that policies given by name are there."""
    for one in policy.values() if isinstance(policy, Mapping) else (policy,):
        if isinstance(one, str) and not is_random(one):
            _import_policy(one)


def load_weights(policy: Any, weights: Any) -> None:
    """Give a policy, or each of a mapping's policies, new weights.

    By its method `load_state_dict`, as torch modules have, or else `set_weights`. A random policy takes none. A
    mapping's policies have theirs by id, or by `label_policies`, as names of weights are strings.

    Raises
    ------
    PolicySpecError
        If it has neither method, or there are weights for a policy that is not there.
    """
    if isinstance(policy, Mapping):
        ids = {label: policy_id for policy_id, label in label_policies(policy).items()}
        for label, own in weights.items():
            policy_id = ids.get(label, label)
            if policy_id not in policy:
                raise PolicySpecError(
                    f"weights must be given by the ids of policies, got {policy_id!r}; {near_names(policy_id, policy)}"
                )
            load_weights(policy[policy_id], own)
        return
    policy = own_policy(policy)
    if is_random(policy):
        return
    for method in ("load_state_dict", "set_weights"):
        load: Callable[[Any], Any] | None = getattr(policy, method, None)
        if load is not None:
            load(weights)
            return
    raise PolicySpecError(
        f"a policy must have a method load_state_dict or set_weights to be given weights, a {type(policy).__name__} "
        "has neither"
    )


def label_weights(policy: Any, weights: Any) -> Any:
    """Name the weights of a mapping's policies by their labels, as names of weights are strings and ids need not be."""
    if not (isinstance(policy, Mapping) and isinstance(weights, Mapping)):
        return weights
    labels = label_policies(policy)
    return {labels.get(policy_id, policy_id): own for policy_id, own in weights.items()}


def weights_nbytes(policy: Any) -> int:
    """Tell how much room weights need that are like the policy's own, with some for their description."""
    policies = list(policy.values()) if isinstance(policy, Mapping) else [policy]
    if all(map(is_random, policies)):
        return _NO_WEIGHTS_NBYTES
    made = [own_policy(one) for one in policies if not isinstance(one, type)]
    states = [one.state_dict() for one in made if hasattr(one, "state_dict")]
    known = sum(int(value.nbytes) for state in states for value in state.values() if hasattr(value, "nbytes"))
    return max(_WEIGHTS_NBYTES, known + known // 8 + _NO_WEIGHTS_NBYTES)


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


def require_safe_torch(path: str, *, allow_pickle: bool = False) -> None:
    """Reject a file that `torch.load` would run code of even with `weights_only=True`, unless that is allowed."""
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if not allow_pickle and release < _FIRST_SAFE_TORCH:
        raise UntrustedPickleError(f"{path!r} runs code when it is loaded by torch {torch.__version__}")


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

    require_safe_torch(path, allow_pickle=allow_pickle)
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
