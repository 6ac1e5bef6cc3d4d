"""Adapters that give functions, torch modules, action spaces and other libraries' policies a uniform call signature.

The first parameter of a function receives the observations; a first parameter named `batch` receives a `Batch` with
`obs` and `info`. A parameter `info` receives the infos, and a parameter `state` the state that the previous call
returned. Other parameters without defaults are rejected, unless the argument `takes` specifies the meaning of the
parameters.

======================================  ================================================================================
policy                                  call
======================================  ================================================================================
function of observations                `policy(obs)` with an array, or a `Batch` of arrays if observations are nested;
                                        with tensors if the parameter is annotated as a tensor
function of `batch`                     `policy(Batch(obs=..., info=...))`, like Tianshou's policies
torch module                            without gradients, with tensors of the observations on the module's device and
                                        in its floating dtype; with the batch, if its first parameter is called `batch`
Gymnasium space                         samples of the space (`RandomPolicy`)
another library's model or agent        see `samplebatch.policy.peers`
======================================  ================================================================================

A policy returns a batch or dict with `act` and optional further columns (see `Decision`), or one of

- actions, shape (n, ...);
- scores of k discrete actions, floats of shape (n, k): the highest score determines the action;
- a torch distribution: actions are sampled, and their log-probabilities recorded as `action_logp`;
- a pair of any of the above and the state, if the policy has a parameter `state`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from samplebatch.batch.delivery import TorchTarget
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.functions import to_numpy
from samplebatch.batch.nested.node import ARRAY, DISTRIBUTION, KINDS, NODE, TENSOR, node, values_of
from samplebatch.env.spaces import SpaceLayout
from samplebatch.errors import ColumnTypeError, PolicySpecError
from samplebatch.policy.peers import is_module, policy_of, wrap_peer
from samplebatch.policy.random import RandomPolicy

Argument = Literal["obs", "tensor", "batch", "info", "state"]
"""Argument of a policy: observations as arrays or as tensors, a `Batch` of `obs` and `info`, the infos, or the state
that the policy returned last."""

_FIRST: Final = ("obs", "tensor", "batch")
_FURTHER: Final = ("info", "state")


class Signature(NamedTuple):
    """Arguments that an adapter passes to its policy.

    - `first`: first argument: `"obs"`, `"tensor"` or `"batch"`.
    - `positional`: further positional arguments, each `"info"` or `"state"`.
    - `named`: further keyword arguments.
    """

    first: str
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def has(self, argument: str) -> bool:
        """Whether the policy receives `argument` in addition to the first argument."""
        return argument in self.positional or argument in self.named


def read_signature(policy: Any, takes: Argument | Sequence[Argument] | None = None) -> Signature:
    """Infer from a policy's signature which arguments to pass to it.

    Raises PolicySpecError if `takes` is not supported, or a required parameter has an unknown name or does not exist.

    >>> read_signature(lambda obs, state, epsilon=0.1: obs)
    Signature(first='obs', positional=(), named=('state',))
    >>> read_signature(lambda s, hidden: s, takes=("obs", "state"))
    Signature(first='obs', positional=('state',), named=())
    >>> read_signature(lambda: 0)
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: a policy must have a parameter for the observations,
        or 'batch' for a Batch, got none; if it accepts arguments, declare them:
        `as_policy(policy, takes='obs')`
    """
    module = is_module(policy)
    parameters = _parameters_of(policy.forward if module else policy)
    positional = [
        parameter
        for parameter in parameters or ()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    arguments = _normalize_takes(takes)
    if arguments is None:
        arguments = (_first_argument(positional[0] if positional else None, module=module),)
    if module and arguments[0] == "obs":
        arguments = ("tensor", *arguments[1:])
    assigned = positional[: len(arguments)]
    keywords = []
    for parameter in parameters or ():
        if parameter in assigned or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in _FURTHER and parameter.kind is not parameter.POSITIONAL_ONLY:
            keywords.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise PolicySpecError(
                f"parameter {parameter.name!r} of a policy must be called 'info' or 'state', or have a default; "
                "declare the arguments: `as_policy(policy, takes=('obs', 'state'))`"
            )
    return Signature(arguments[0], arguments[1:], tuple(keywords))


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _normalize_takes(takes: Any) -> tuple[str, ...] | None:
    if takes is None:
        return None
    arguments = (takes,) if isinstance(takes, str) or not isinstance(takes, Sequence) else tuple(takes)
    if (
        not arguments
        or arguments[0] not in _FIRST
        or not {*arguments[1:]} <= {*_FURTHER}
        or len({*arguments}) < len(arguments)
    ):
        raise PolicySpecError(
            "`takes` must be 'obs', 'tensor' or 'batch', or a sequence that starts with one and continues with 'info' "
            f"or 'state', got {takes!r}"
        )
    return arguments


def _first_argument(parameter: inspect.Parameter | None, *, module: bool) -> str:
    name = None if parameter is None else parameter.name
    if name == "batch":
        return "batch"
    annotation = None if parameter is None or parameter.annotation is parameter.empty else parameter.annotation
    annotation_name = "" if annotation is None else getattr(annotation, "__name__", None) or str(annotation)
    if "Tensor" in annotation_name:
        return "tensor"
    if "Batch" in annotation_name and name != "obs":
        return "batch"
    if module:
        return "tensor"
    if name is None:
        raise PolicySpecError(
            "a policy must have a parameter for the observations, or 'batch' for a Batch, got none; if it accepts "
            "arguments, declare them: `as_policy(policy, takes='obs')`"
        )
    return "obs"


class _Space(Protocol):
    def sample(self, *args: Any, **kwargs: Any) -> Any: ...
    def contains(self, x: Any) -> bool: ...


class _Predicts(Protocol):
    def predict(self, *args: Any, **kwargs: Any) -> Any: ...


class _ComputesActions(Protocol):
    def compute_actions(self, *args: Any, **kwargs: Any) -> Any: ...


PolicyLike = Callable[..., Any] | _Space | _Predicts | _ComputesActions
"""Policies that `as_policy` accepts: functions, torch modules, Gymnasium spaces, and policies of other libraries."""

CollectorPolicy = PolicyLike | Literal["random"]
"""Policies that collectors accept."""

Decision = dict[str, Any]
"""Output of a policy: `act`, an array of shape (n, ...) or a batch of arrays. Optional: `state`; `policy`, a batch to
store with the step; `dist`; and columns of RLlib's policies such as `action_logp`."""

_DESCRIPTIONS = {"obs": "observations", "tensor": "tensors of observations", "batch": "a Batch"}
_TRAINING_STEP_FLAG = "is_within_training_step"
_ndarray = np.ndarray


class PolicyAdapter:
    """Policy of any supported type, with a uniform call signature.

    Parameters
    ----------
    policy
        Policy to call.
    signature
        Arguments of the policy.
    layout
        Layout of the action space of one environment; if it is None, actions are not validated.

    Attributes
    ----------
    policy
        As passed.
    takes_batch
        Whether the method `decide` expects a batch instead of observations.
    """

    def __init__(self, policy: Callable[..., Any], signature: Signature, layout: SpaceLayout | None) -> None:
        self.policy = policy
        self._signature = signature
        self._layout = layout
        self._plain = layout is None or layout.plain
        self._takes_info, self._takes_state = signature.has("info"), signature.has("state")
        self.takes_batch = signature.first == "batch" or self._takes_info
        self._takes_one_argument = not (self._takes_info or self._takes_state)
        self._call = policy

    def __call__(self, batch: Batch, state: Any = None) -> Decision:
        """Return one action per row of a batch."""
        return self.decide(batch if self.takes_batch else batch.obs, state)

    def _with_layout(self, layout: SpaceLayout | None) -> PolicyAdapter:
        return self if layout is None or self._layout else type(self)(self.policy, self._signature, layout)

    def decide(self, batch: Any, state: Any = None) -> Decision:
        """Return one action per row of a batch if `takes_batch` is true, otherwise per row of observations.

        Raises
        ------
        PolicySpecError
            If the policy returns no actions.
        """
        try:
            if self._takes_one_argument:
                result = self._call(batch)
                if type(result) is _ndarray and result.ndim < 2 and self._plain:
                    return {"act": result}
            else:
                result = self._call_with_further(batch, state)
            return self._decision(result)
        except Exception as error:
            signature = self._signature
            error.add_note(
                f"the policy was called with {_DESCRIPTIONS[signature.first]}; `as_policy(policy, takes=...)` changes "
                "this"
            )
            raise

    def _call_with_further(self, policy_input: Any, state: Any) -> Any:
        signature = self._signature
        values = {"state": state, "info": policy_input.info if self._takes_info else None}
        first = policy_input if signature.first == "batch" or not self._takes_info else policy_input.obs
        named = {name: values[name] for name in signature.named}
        return self._call(first, *[values[word] for word in signature.positional], **named)

    def _decision(self, result: Any) -> Decision:
        if type(result) is _ndarray and self._plain:
            return {"act": self._greedy(result)}
        kind = KINDS[type(result)]
        if self._takes_state and isinstance(result, tuple) and len(result) == 2:
            return {**self._decision(result[0]), "state": result[1]}
        if kind == DISTRIBUTION:
            return self._sample(result)
        values = _named_values(result)
        if values is None:
            return {"act": self._greedy(self._actions(result))}
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
                f"actions must have the parts {', '.join(map(repr, layout.names))} of the action space: {error}"
            ) from error

    def _greedy(self, actions: Any) -> Any:
        """Replace each row of scores by the discrete action with the highest score; return other arrays unchanged."""
        choices = None if self._layout is None else self._layout.choices
        if choices is None or actions.ndim != 2 or actions.dtype.kind != "f" or actions.shape[1] != choices[1]:
            return actions
        return actions.argmax(1) + choices[0]

    def _sample(self, distribution: Any) -> Decision:
        sampled = distribution.sample()
        logp = distribution.log_prob(sampled)
        logp = logp.reshape(len(logp), -1).sum(1) if logp.ndim > 1 else logp
        return {"act": self._actions(sampled), "dist": distribution, "action_logp": logp}


class TorchPolicy(PolicyAdapter):
    """Adapter that calls a torch module or a function of tensors without computing gradients."""

    def __init__(self, policy: Callable[..., Any], signature: Signature, layout: SpaceLayout | None) -> None:
        super().__init__(policy, signature, layout)
        self._call = self._call_without_gradients
        self._parameter_path: Sequence[str] = ()
        """Path of module names to the parameter whose device and dtype the observations are converted to."""
        self._device: Any = None
        self._target: TorchTarget | None = None

    def _call_without_gradients(self, first: Any, *further: Any, **named: Any) -> Any:
        if self._signature.first == "tensor":
            device, dtype = self._device_and_dtype()
            if self._target is None or device != self._device:
                self._device, self._target = device, TorchTarget(device=device)
            first = _to_tensors(first, self._target, dtype)
        with sys.modules["torch"].no_grad():
            return self.policy(first, *further, **named)

    def _device_and_dtype(self) -> tuple[Any, Any]:
        """Return the device and the floating-point dtype of the module's parameters; "cpu" and None for functions.

        Each call reads the parameters, because they may be moved or replaced at any time. The path of the parameter is
        cached, because iterating over `named_parameters` is slower than the forward pass of a small network.
        """
        if self._parameter_path:
            owner: Any = self.policy
            try:
                for name in self._parameter_path[:-1]:
                    owner = owner._modules[name]
                parameter = owner._parameters[self._parameter_path[-1]]
                return parameter.device, parameter.dtype
            except (AttributeError, KeyError):
                self._parameter_path = ()
        device: Any = "cpu"
        if hasattr(self.policy, "named_parameters"):
            for name, parameter in self.policy.named_parameters():
                device = parameter.device
                if parameter.dtype.is_floating_point:
                    self._parameter_path = name.split(".") if is_module(self.policy) else ()
                    return device, parameter.dtype
        return device, None

    def _sample(self, distribution: Any) -> Decision:
        with sys.modules["torch"].no_grad():
            return super()._sample(distribution)


def as_policy(
    policy: CollectorPolicy,
    action_space: Any = None,
    *,
    takes: Argument | Sequence[Argument] | None = None,
    deterministic: bool = False,
    seed: int | np.random.SeedSequence | np.random.Generator | None = None,
) -> PolicyAdapter:
    """Convert a policy of any supported type to a callable that maps a batch and a state to a `Decision`.

    Parameters
    ----------
    policy
        A function of a batch or of observations, a torch module, a Gymnasium space to sample from, or `"random"` to
        sample from `action_space`; see the table of this module. A model of Stable-Baselines3, a module or policy of
        RLlib, an agent of CleanRL, or an algorithm with an attribute `policy` is also accepted.
    action_space
        Action space of one environment, which collectors pass. If it is None, scores are not converted to actions and
        the keys of dict and tuple actions are not checked.
    takes
        Positional arguments of the policy: `"obs"`, `"tensor"` (observations as tensors) or `"batch"`, or a sequence
        that starts with such a name and continues with `"info"` and `"state"`. By default, the first argument is the
        observations (the batch if the parameter is called `batch`), and further arguments are passed by name.
    deterministic
        Whether a policy of Stable-Baselines3 or RLlib returns its best actions instead of exploring.
    seed
        Seed of the random actions if the policy is a space.

    Raises
    ------
    PolicySpecError
        If the type of the policy is not supported, the meaning of its parameters cannot be inferred from their names,
        or `deterministic` is true but the policy has no deterministic method.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> batch = Batch(obs=np.zeros((2, 4)), info=Batch())
    >>> as_policy(lambda batch: Batch(act=np.ones(len(batch.obs), int)))(batch)["act"]
    array([1, 1])
    >>> as_policy(lambda obs: obs[:, :2] + [0.0, 0.5], spaces.Discrete(2))(batch)["act"]
    array([1, 1])
    >>> as_policy(lambda s: s[:, 0], takes="obs")(batch)["act"]
    array([0., 0.])
    >>> as_policy(spaces.Discrete(2), seed=3)(batch)["act"]
    array([1, 0])
    """
    layout = None if action_space is None else SpaceLayout(action_space)
    if isinstance(policy, PolicyAdapter):
        if takes is None and not deterministic:
            return policy._with_layout(layout)
        policy = policy.policy
    if is_random(policy):
        if action_space is None:
            raise PolicySpecError("action_space must be a space for the policy 'random', got None")
        policy = action_space
    if is_space(policy):
        if takes is not None:
            raise PolicySpecError(f"`takes` must be None for a policy that is a space, got {takes!r}")
        policy = RandomPolicy(policy, seed=seed)
    if takes is None or deterministic:
        policy = wrap_peer(policy_of(policy), deterministic=deterministic)
    if is_space(getattr(policy, "__self__", None)):
        raise PolicySpecError(
            "a policy must be a space itself, got its method sample; pass env.action_space or 'random'"
        )
    if isinstance(policy, type):
        raise PolicySpecError(f"a policy must be an instance, got the class {policy.__name__}")
    if not callable(policy):
        description = repr(policy) if isinstance(policy, str) else f"a {type(policy).__name__}"
        raise PolicySpecError(
            f"a policy must be callable, a torch module, a space or 'random', got {description}; "
            "pass a function that returns the actions for a Batch of observations"
        )
    signature = read_signature(policy, takes)
    kind = TorchPolicy if is_module(policy) or signature.first == "tensor" else PolicyAdapter
    return kind(policy, signature, layout)


def is_random(policy: Any) -> bool:
    """Whether a policy is `"random"`, which samples from the action space of the environment."""
    return isinstance(policy, str) and policy == "random"


def unwrap_policy(policy: Any) -> Any:
    """Return the policy that an adapter wraps; the policy's methods load weights, map actions and add noise."""
    return policy.policy if isinstance(policy, PolicyAdapter) else wrap_peer(policy_of(policy))


def evaluation_mode(policy: Any) -> AbstractContextManager[None]:
    """Return a reusable context manager that sets torch's evaluation mode during a collection.

    The context manager affects policies that have a flag `is_within_training_step`, as in Tianshou. The flag controls
    exploration, and torch's mode controls dropout and batch normalisation. The mode of modules without the flag is
    unchanged.
    """
    policies = policy.values() if isinstance(policy, Mapping) else (policy,)
    # Selected once, because loops that collect single steps enter the context for each step.
    modules = [
        module for module in map(unwrap_policy, policies) if hasattr(module, _TRAINING_STEP_FLAG) and is_module(module)
    ]
    return _EvaluationMode(modules) if modules else nullcontext()


class _EvaluationMode(AbstractContextManager[None]):
    """Context manager that sets modules to evaluation mode and restores their mode."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._switched: list[Any] = []

    def __enter__(self) -> None:
        self._switched = [module for module in self._modules if module.training]
        for module in self._switched:
            module.eval()

    def __exit__(self, *_: object) -> None:
        for module in self._switched:
            module.train()


def is_space(policy: Any) -> bool:
    """Whether a policy is a Gymnasium space."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(policy, gymnasium.Space)


def _named_values(result: Any) -> Mapping[str, Any] | None:
    values = values_of(result)
    if values is None and hasattr(result, "act") and hasattr(result, "__dict__"):
        values = vars(result)
    return values


def _to_tensors(observations: Any, target: TorchTarget, dtype: Any) -> Any:
    kind = KINDS[type(observations)]
    if kind == NODE:
        return node(Batch, {name: _to_tensors(leaf, target, dtype) for name, leaf in observations.__dict__.items()})
    if observations.dtype == object:
        return observations
    if kind == ARRAY and observations.dtype.kind not in "biufc":
        raise ColumnTypeError(f"observations must be numbers to become tensors, got {observations.dtype}")
    tensor = target.convert(observations, kind)
    return tensor.to(dtype) if dtype not in (None, tensor.dtype) and tensor.is_floating_point() else tensor
