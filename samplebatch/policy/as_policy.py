"""Policies of any kind as one callable: functions, torch modules, action spaces.

======================================  ================================================================================
given                                   how it is asked
======================================  ================================================================================
callable on a batch                     on `Batch(obs=..., info=...)`, and the state it returned last
function of observations                on `obs` itself: its first parameter is called `obs` (`observations`, `x`, ...),
                                        or annotated as an array or tensor
torch module                            without gradients, on tensors of `obs` on the module's device and in its
                                        floating dtype; on the batch, if its first parameter is called `batch`
Gymnasium space                         actions are drawn from it (`RandomPolicy`)
======================================  ================================================================================

A policy takes the state if it has a parameter `state`, or a second one without a default. What it returns is a batch or
dict with `act`, and what else it has to say (see `Decision`); or simply

- actions, shape (n, ...);
- scores of k discrete actions, floats of shape (n, k): the best is taken;
- a torch distribution: it is sampled, and the log-probability recorded as `action_logp`;
- a pair of one of these and the state, if the policy takes a state.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy, to_torch
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, KINDS, MAPPING, NODE, TENSOR, node
from samplebatch.env.spaces import SpaceLayout
from samplebatch.errors import PolicySpecError
from samplebatch.policy.random import RandomPolicy

Decision = dict[str, Any]
"""What a policy decided: `act`, an array of shape (n, ...) or a batch of arrays; and as far as it said so `state`;
`policy`, to be stored with the step; `dist`; and the columns that RLlib's policies return, such as `action_logp`."""

_OBSERVATION_NAMES = frozenset({"o", "s", "x", "input", "inputs"})
_ndarray = np.ndarray


class PolicyAdapter(ABC):
    """A policy of any kind, asked for actions by an `Actor`.

    Parameters
    ----------
    policy
        What is asked.
    layout
        The layout of the actions of one environment, or None to take actions as they come.

    Attributes
    ----------
    policy
        What is asked.
    takes_batch
        Whether it is called on a batch, rather than on observations.
    """

    takes_batch = True

    def __init__(self, policy: Callable[..., Any], layout: SpaceLayout | None) -> None:
        self.policy = policy
        self._layout = layout
        parameters, self._state_name = _parameters(policy)
        self._takes_state = self._state_name is not None
        self._plain = layout is None or layout.plain
        self._ask = policy
        self._first = parameters[0].name if parameters else None

    def __call__(self, batch: Batch, state: Any = None) -> Decision:
        """Ask for the actions of every row of a batch.

        Raises
        ------
        PolicySpecError
            If the policy returns no actions.
        """
        return self.decide(batch if self.takes_batch else batch.obs, state)

    def decide(self, given: Any, state: Any = None) -> Decision:
        """Ask for actions, given a batch or observations, as the policy takes them.

        Raises
        ------
        PolicySpecError
            If the policy returns no actions.
        """
        try:
            if not self._takes_state:
                result = self._ask(given)
                if type(result) is _ndarray and result.ndim < 2 and self._plain:
                    return {"act": result}
            elif self._state_name:
                result = self._ask(given, **{self._state_name: state})
            else:
                result = self._ask(given, state)
            return self._decision(result)
        except Exception as error:
            error.add_note(self._note())
            raise

    @abstractmethod
    def _note(self) -> str:
        """Word the note for errors that the policy raises: whether it was called on a batch or on observations."""

    def _decision(self, result: Any) -> Decision:
        if type(result) is _ndarray and self._plain:
            return {"act": self._best(result)}
        kind = KINDS[type(result)]
        if self._takes_state and isinstance(result, tuple) and len(result) == 2:
            return {**self._decision(result[0]), "state": result[1]}
        if kind == DISTRIBUTION:
            return self._sample(result)
        values = _named_values(result, kind)
        if values is None:
            return {"act": self._best(self._actions(result))}
        if "act" in values:
            return {**values, "act": self._actions(values["act"])}
        if self._layout is not None and not self._layout.plain and self._layout.has_keys(values):
            return {"act": self._actions(values)}
        raise PolicySpecError(
            f"a policy must return actions under 'act', got {', '.join(map(repr, values)) or 'nothing'}; "
            "return a Batch or dict with 'act', or the actions alone"
        )

    def _actions(self, value: Any) -> Any:
        if value is None:
            raise PolicySpecError("a policy must return actions, got None")
        layout = self._layout
        if layout is None or self._plain:
            return value if type(value) is _ndarray else to_numpy(value)
        if KINDS[type(value)] in (TENSOR, NODE):
            value = to_numpy(value)
        try:
            return layout.batch([to_numpy(leaf) for leaf in layout.flatten(value)])
        except (KeyError, IndexError, TypeError) as error:
            raise PolicySpecError(
                f"actions must have the parts {', '.join(map(repr, layout.names))}, as the action space has: {error}"
            ) from error

    def _best(self, actions: Any) -> Any:
        """Take the best action of each row, if these are scores of discrete ones."""
        choices = None if self._layout is None else self._layout.choices
        if choices is None or actions.ndim != 2 or actions.dtype.kind != "f" or actions.shape[1] != choices[1]:
            return actions
        return actions.argmax(1) + choices[0]

    def _sample(self, distribution: Any) -> Decision:
        sampled = distribution.sample()
        logp = distribution.log_prob(sampled)
        logp = logp.reshape(len(logp), -1).sum(1) if logp.ndim > 1 else logp
        return {"act": self._actions(sampled), "dist": distribution, "action_logp": logp}


class BatchPolicy(PolicyAdapter):
    """A policy that is called on batches: Tianshou's contract."""

    def _note(self) -> str:
        return f"the policy was called on a Batch: its first parameter is {self._first!r}, not 'obs'"


class ObservationPolicy(PolicyAdapter):
    """A function of observations."""

    takes_batch = False

    def _note(self) -> str:
        return f"the policy was called on observations: its first parameter is {self._first!r}, not 'batch'"


class _Ungraded(PolicyAdapter):
    """A torch module, asked without gradients."""

    def __init__(self, policy: Callable[..., Any], layout: SpaceLayout | None) -> None:
        super().__init__(policy, layout)
        self._ask = self._ask_ungraded

    def _ask_ungraded(self, *given: Any, **state: Any) -> Any:
        with sys.modules["torch"].no_grad():
            return self.policy(*given, **state)

    def _sample(self, distribution: Any) -> Decision:
        with sys.modules["torch"].no_grad():
            return super()._sample(distribution)


class BatchModulePolicy(_Ungraded, BatchPolicy):
    """A torch module that is called on batches, as Tianshou's policies are."""


class ModulePolicy(_Ungraded, ObservationPolicy):
    """A torch module, or function of tensors, that is called on tensors of observations."""

    def decide(self, given: Any, state: Any = None) -> Decision:
        """Ask for actions, given observations; see `PolicyAdapter.decide`."""
        parameters = getattr(self.policy, "parameters", None)
        device, dtype = "cpu", None
        for parameter in parameters() if parameters is not None else ():
            device = parameter.device
            if parameter.dtype.is_floating_point:
                dtype = parameter.dtype
                break
        return super().decide(_tensors(given, device, dtype), state)


def as_policy(
    policy: Any, action_space: Any = None, *, seed: int | np.random.SeedSequence | np.random.Generator | None = None
) -> PolicyAdapter:
    """Make one kind of callable, from batch and state to a `Decision`, of anything that can be asked for actions.

    Parameters
    ----------
    policy
        A callable on batches or observations, a torch module, or a Gymnasium space to draw from; see the table of this
        module.
    action_space
        The space of one environment's actions. Without it, scores are not recognised and the parts of dict and tuple
        actions not checked.
    seed
        The seed of draws, where the policy is a space.

    Raises
    ------
    PolicySpecError
        If it is none of these.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> batch = Batch(obs=np.zeros((2, 4)), info=Batch())
    >>> as_policy(lambda batch: Batch(act=np.ones(len(batch.obs), int)))(batch)["act"]
    array([1, 1])
    >>> as_policy(lambda obs: obs[:, :2] + [0.0, 0.5], spaces.Discrete(2))(batch)["act"]
    array([1, 1])
    >>> as_policy(spaces.Discrete(2), seed=3)(batch)["act"]
    array([1, 0])
    """
    if isinstance(policy, PolicyAdapter):
        return policy
    layout = None if action_space is None else SpaceLayout(action_space)
    if is_space(policy):
        return BatchPolicy(RandomPolicy(policy, seed=seed), layout)
    if not callable(policy):
        raise PolicySpecError(
            f"a policy must be callable, a torch module or a space, got a {type(policy).__name__}; "
            "give a function that returns the actions of a Batch of observations"
        )
    module = _is_a(policy, "torch.nn", "Module")
    parameters, _ = _parameters(policy)
    given = _takes(parameters[0]) if parameters else ""
    if module:
        return BatchModulePolicy(policy, layout) if given == "batch" else ModulePolicy(policy, layout)
    if given == "tensor":
        return ModulePolicy(policy, layout)
    return ObservationPolicy(policy, layout) if given == "observations" else BatchPolicy(policy, layout)


def is_space(policy: Any) -> bool:
    """Tell whether a policy is a Gymnasium space, to draw from."""
    return _is_a(policy, "gymnasium", "Space")


def _is_a(value: Any, module: str, name: str) -> bool:
    """Tell whether a value is of a class of a package that may not even be loaded."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _parameters(policy: Any) -> tuple[list[inspect.Parameter], str | None]:
    """Return the positional parameters, and the state's name: "" to pass it by position, None not to pass it at all."""
    function = policy.forward if _is_a(policy, "torch.nn", "Module") else policy
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return [], None
    positional = [p for p in known.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if "state" in known and known["state"].kind is not inspect.Parameter.POSITIONAL_ONLY:
        return positional, "state"
    return positional, "" if len(positional) > 1 and positional[1].default is inspect.Parameter.empty else None


def _takes(parameter: inspect.Parameter) -> str:
    """Tell the kind of a policy's first parameter by its name, then by its annotation; "" if neither says."""
    annotation = parameter.annotation
    word = "" if annotation is parameter.empty else getattr(annotation, "__name__", None) or str(annotation)
    if parameter.name == "batch":
        return "batch"
    if "Tensor" in word:
        return "tensor"
    if parameter.name in _OBSERVATION_NAMES or parameter.name.startswith("ob"):
        return "observations"
    return "batch" if "Batch" in word else "observations" if "ndarray" in word.lower() else ""


def _named_values(result: Any, kind: int) -> Mapping[str, Any] | None:
    """Return the named values of a policy's result, another library's batch included; None if it has none."""
    if kind == NODE:
        found: dict[str, Any] = result.__dict__
        return found
    if kind == MAPPING:
        return result  # type: ignore[no-any-return]
    return vars(result) if kind != ARRAY and hasattr(result, "act") and hasattr(result, "__dict__") else None


def _tensors(observations: Any, device: Any, dtype: Any) -> Any:
    if KINDS[type(observations)] == NODE:
        return node(Batch, {name: _tensors(leaf, device, dtype) for name, leaf in observations.__dict__.items()})
    if observations.dtype == object:
        return observations
    tensor = to_torch(observations, device=device)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
