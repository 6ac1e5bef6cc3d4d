"""Functions that create workers' policies from factories, names and files, and load weights into the policies."""

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
from samplebatch.policy.as_policy import is_random, unwrap_policy

if TYPE_CHECKING:
    import torch


_MIN_WEIGHTS_NBYTES, _OVERHEAD_NBYTES = 16 << 20, 1 << 20
_SPACES = ("observation_space", "action_space")


class PickledPolicy:
    """Serialized policy or mapping of policies; each call returns an independent copy.

    Without serialization, multiprocessing would move a module's tensors to shared memory, and the learner's updates
    would change the workers' policies.

    Raises PolicySpecError if the policy cannot be pickled.

    >>> PickledPolicy({"walker": "random"})()
    {'walker': 'random'}
    """

    def __init__(self, policy: Any, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
        try:
            self._bytes = dumps(policy)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PolicySpecError(
                "a policy for other processes must be 'random', a name, an importable function or a picklable object, "
                f"got a {type(policy).__name__}: {error}"
            ) from error

    def __call__(self) -> Any:
        """Unpickle the policy."""
        return pickle.loads(self._bytes)


def make_policy(policy: Any, observation_space: Any, action_space: Any) -> Any:
    """Create a policy from a factory or a name; a policy and `"random"` are returned unchanged.

    - `policy`: factory: a class or function without required parameters other than `observation_space` and
      `action_space`; the name of a factory or policy, `module:function`; or a policy.
    - `observation_space`, `action_space`: arguments of the factory, if it has parameters with these names.

    Raises PolicySpecError if the name cannot be imported.

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
    parameters = _factory_parameters(policy)
    if parameters is None:
        return policy
    spaces = dict(zip(_SPACES, (observation_space, action_space), strict=True))
    return policy(**{name: spaces[name] for name in parameters})


def _import_policy(name: str) -> Any:
    module_name, colon, path = name.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in module_name.split(".")):
        raise PolicySpecError(f"a policy must be named 'random' or as 'module:function', got {name!r}")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise PolicySpecError(f"the module of policy {name!r} must be importable: {error}") from error
    if not hasattr(module, path):
        callables = [
            attribute for attribute, value in vars(module).items() if callable(value) and not attribute.startswith("_")
        ]
        raise PolicySpecError(f"no policy {path!r} in module {module_name!r}; {near_names(path, callables)}")
    return getattr(module, path)


def _factory_parameters(policy: Any) -> list[str] | None:
    """Return the names of the spaces that a factory requires; None if `policy` is a policy rather than a factory."""
    if not (inspect.isclass(policy) or inspect.isroutine(policy) or isinstance(policy, partial)):
        return None
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return [] if inspect.isclass(policy) else None
    space_parameters = [parameter.name for parameter in parameters if parameter.name in _SPACES]
    other_parameters = [
        parameter for parameter in parameters if parameter.name not in _SPACES and parameter.default is parameter.empty
    ]
    required = [
        parameter
        for parameter in other_parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    # A function with other or arbitrary parameters is a policy itself; a class never is.
    return (
        space_parameters
        if inspect.isclass(policy) or not (required or (other_parameters and not space_parameters))
        else None
    )


def check_policy(policy: Any) -> None:
    """Check that policies specified by name can be imported.

    Raises PolicySpecError if a name cannot be imported.
    """
    for candidate in policy.values() if isinstance(policy, Mapping) else (policy,):
        if isinstance(candidate, str) and not is_random(candidate):
            _import_policy(candidate)


def load_weights(policy: Any, weights: Any) -> None:
    """Load weights into a policy, or into each policy of a mapping.

    Calls `load_state_dict`, or otherwise `set_weights`. Random policies ignore weights. For a mapping of policies,
    weights are keyed by policy id or by the label of the policy id (see `label_policies`).

    Raises PolicySpecError if the policy has neither `set_weights` nor `load_state_dict`, or a policy id of the weights
    is unknown.
    """
    if isinstance(policy, Mapping):
        ids = {label: policy_id for policy_id, label in label_policies(policy).items()}
        for label, policy_weights in weights.items():
            policy_id = ids.get(label, label)
            if policy_id not in policy:
                raise PolicySpecError(
                    f"weights must have policy ids as keys, got {policy_id!r}; {near_names(policy_id, policy)}"
                )
            load_weights(policy[policy_id], policy_weights)
        return
    policy = unwrap_policy(policy)
    if is_random(policy):
        return
    for method in ("load_state_dict", "set_weights"):
        load: Callable[[Any], Any] | None = getattr(policy, method, None)
        if load is not None:
            load(weights)
            return
    raise PolicySpecError(
        f"a policy must have a method load_state_dict or set_weights to load weights, got a {type(policy).__name__}"
    )


def label_weights(policy: Any, weights: Any) -> Any:
    """Replace the policy ids in a mapping of weights by their labels, which are always strings."""
    if not (isinstance(policy, Mapping) and isinstance(weights, Mapping)):
        return weights
    labels = label_policies(policy)
    return {labels.get(policy_id, policy_id): policy_weights for policy_id, policy_weights in weights.items()}


def weights_nbytes(policy: Any) -> int:
    """Return the number of bytes to reserve for serialized weights of a policy, or of all policies of a mapping."""
    policies = list(policy.values()) if isinstance(policy, Mapping) else [policy]
    if all(map(is_random, policies)):
        return _OVERHEAD_NBYTES
    instances = [unwrap_policy(candidate) for candidate in policies if not isinstance(candidate, type)]
    states = [candidate.state_dict() for candidate in instances if hasattr(candidate, "state_dict")]
    nbytes = sum(int(value.nbytes) for state in states for value in state.values() if hasattr(value, "nbytes"))
    return max(_MIN_WEIGHTS_NBYTES, nbytes + nbytes // 8 + _OVERHEAD_NBYTES)


_FIRST_SAFE_TORCH = (2, 6)
"""Earlier releases of `torch.load` execute code even with `weights_only=True` (CVE-2025-32434)."""

CHECKPOINTS = (".pt", ".pth")
"""Suffixes of files that `torch.save` wrote."""
PROGRAMS = (".pt2",)
"""Suffixes of files that `torch.export.save` wrote."""


def is_policy_file(name: str) -> bool:
    """Whether a name has the suffix of a policy file.

    >>> is_policy_file("best.pt"), is_policy_file("my_package:policy")
    (True, False)
    """
    return Path(name).suffix.lower() in CHECKPOINTS + PROGRAMS


def load_policy(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> torch.nn.Module:
    """Load a torch module from a file.

    Parameters
    ----------
    path
        `.pt2` file of `torch.export.save`, or `.pt` or `.pth` file with a complete module of `torch.save`.
    allow_pickle
        Whether to load files although loading may execute code chosen by the author of the file. Loading executes code
        in both formats: a complete module is a pickle, and for an exported program torch unpickles example inputs and
        evaluates expressions.

    Raises
    ------
    PolicySpecError
        If the file does not exist, cannot be loaded or contains no module.
    UntrustedPickleError
        If loading would execute code and `allow_pickle` is False.

    Examples
    --------
    >>> load_policy("nowhere.pt")
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: a policy file must exist, got 'nowhere.pt'
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise PolicySpecError(f"a policy file must exist, got {name!r}")
    load = _load_program if Path(name).suffix.lower() in PROGRAMS else _load_checkpoint
    return load(name, allow_pickle=allow_pickle)


def require_safe_torch(path: str, *, allow_pickle: bool = False) -> None:
    """Reject a file if the installed torch may execute its code even with `weights_only=True`.

    Raises UntrustedPickleError if torch is older than 2.6 and `allow_pickle` is False.
    """
    import torch

    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if not allow_pickle and release < _FIRST_SAFE_TORCH:
        raise UntrustedPickleError(f"{path!r} may execute code when torch {torch.__version__} loads it")


def _load_program(path: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    if not allow_pickle:
        raise UntrustedPickleError(f"{path!r} is an exported program, and torch may execute its code to load it")
    import torch

    try:
        return torch.export.load(path).module()
    except Exception as error:
        # Torch raises various exception types for files that are not exported programs.
        raise PolicySpecError(f"{path!r} must be a file that torch.export.save wrote: {error}") from error


def _load_checkpoint(path: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    import torch

    require_safe_torch(path, allow_pickle=allow_pickle)
    try:
        module = torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise UntrustedPickleError(
                f"{path!r} is a pickled module, which may execute code when it is loaded"
            ) from None
        raise PolicySpecError(f"{path!r} must be a file that torch.save wrote: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise PolicySpecError(
            f"{path!r} must contain a complete module, got a {type(module).__name__}; for a file of weights, pass the "
            "name 'module:function' of a function that creates the module and loads them"
        )
    return module
