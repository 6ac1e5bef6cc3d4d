"""Policies for workers: given, made by a function, or named; and given new weights."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from samplebatch.errors import PolicySpecError, near_names
from samplebatch.names import label_policies
from samplebatch.policy.as_policy import is_random, own_policy

_WEIGHTS_NBYTES, _NO_WEIGHTS_NBYTES = 16 << 20, 1 << 20
_SPACES = ("observation_space", "action_space")


class PickledPolicy:
    """A policy, or a mapping of policies, as bytes: each call makes another, with memory of its own.

    Bytes, because multiprocessing would put the tensors of a module where the learner's changes reach all workers.

    Parameters
    ----------
    policy
        The policy as `RolloutWorkers` takes it.
    dumps
        Pickles it.

    Raises
    ------
    PolicySpecError
        If it cannot be pickled.

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
    """Import the object that a name stands for."""
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
    """Check that policies given by name are there.

    Raises
    ------
    PolicySpecError
        If it is not.
    """
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
