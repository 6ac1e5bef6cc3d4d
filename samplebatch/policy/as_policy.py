"""Policies of any kind as one callable: functions, torch modules, action spaces.

A function's first parameter is the observations, or a `Batch` of `obs` and `info` if it is called `batch`; a parameter
`info` gets the infos and `state` what it returned as state last. A function with other parameters that have no defaults
is rejected, unless its user says what they stand for (`takes`).

======================================  ================================================================================
given                                   how it is asked
======================================  ================================================================================
function of observations                on the observations: an array, or a `Batch` of arrays for nested ones; on
                                        tensors where the parameter is annotated so
function of `batch`                     on `Batch(obs=..., info=...)`, as Tianshou's policies are
torch module                            without gradients, on tensors of the observations on the module's device and in
                                        its floating dtype; on the batch, if its first parameter is called `batch`
Gymnasium space                         actions are drawn from it (`RandomPolicy`)
another library's model or agent        as that library asks it, see `samplebatch.policy.peers`
======================================  ================================================================================

A policy returns a batch or dict with `act`, and what else it has to say (see `Decision`); or simply

- actions, shape (n, ...);
- scores of k discrete actions, floats of shape (n, k): the best is taken;
- a torch distribution: it is sampled, and the log-probability recorded as `action_logp`;
- a pair of one of these and the state, if the policy takes a state.
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
"""An argument of a policy: observations as arrays or as tensors, a `Batch` of `obs` and `info`, the infos, or the state
that it returned last."""

_FIRST: Final = ("obs", "tensor", "batch")
_FURTHER: Final = ("info", "state")


class Signature(NamedTuple):
    """The arguments that a policy is called with, for its adapter.

    Attributes
    ----------
    first
        Its first argument: `"obs"`, `"tensor"` or `"batch"`.
    positional
        Further arguments by position, each `"info"` or `"state"`.
    named
        Further arguments by name.
    """

    first: str
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def has(self, argument: str) -> bool:
        """Tell whether an argument is among the further ones."""
        return argument in self.positional or argument in self.named


def read_signature(policy: Any, takes: Argument | Sequence[Argument] | None = None) -> Signature:
    """Read the arguments of a policy off its parameters.

    Examples
    --------
    >>> read_signature(lambda obs, state, epsilon=0.1: obs)
    Signature(first='obs', positional=(), named=('state',))
    >>> read_signature(lambda s, hidden: s, takes=("obs", "state"))
    Signature(first='obs', positional=('state',), named=())
    >>> read_signature(lambda: 0)
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: a policy's first parameter must take the observations, or a Batch if it is
    called 'batch', got none; say what it takes: as_policy(policy, takes='obs')
    """
    module = is_module(policy)
    known = _parameters_of(policy.forward if module else policy)
    at_place = [one for one in known or () if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    words = _as_words(takes)
    if words is None:
        words = (_first_of(at_place[0] if at_place else None, module=module),)
    if module and words[0] == "obs":
        words = ("tensor", *words[1:])
    given = at_place[: len(words)]
    named = []
    for one in known or ():
        if one in given or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.name in _FURTHER and one.kind is not one.POSITIONAL_ONLY:
            named.append(one.name)
        elif one.default is one.empty:
            raise PolicySpecError(
                f"parameter {one.name!r} of a policy must be called 'info' or 'state', or have a default; say what the "
                "policy takes: as_policy(policy, takes=('obs', 'state'))"
            )
    return Signature(words[0], words[1:], tuple(named))


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _as_words(takes: Any) -> tuple[str, ...] | None:
    if takes is None:
        return None
    words = (takes,) if isinstance(takes, str) or not isinstance(takes, Sequence) else tuple(takes)
    if not words or words[0] not in _FIRST or not {*words[1:]} <= {*_FURTHER} or len({*words}) < len(words):
        raise PolicySpecError(
            "takes must be 'obs', 'tensor' or 'batch', or a sequence that begins with one of these and goes on with "
            f"'info' or 'state', got {takes!r}"
        )
    return words


def _first_of(parameter: inspect.Parameter | None, *, module: bool) -> str:
    name = None if parameter is None else parameter.name
    if name == "batch":
        return "batch"
    annotation = None if parameter is None or parameter.annotation is parameter.empty else parameter.annotation
    word = "" if annotation is None else getattr(annotation, "__name__", None) or str(annotation)
    if "Tensor" in word:
        return "tensor"
    if "Batch" in word and name != "obs":
        return "batch"
    if module:
        return "tensor"
    if name is None:
        raise PolicySpecError(
            "a policy's first parameter must take the observations, or a Batch if it is called 'batch', got none; say "
            "what it takes: as_policy(policy, takes='obs')"
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
"""All that `as_policy` takes: functions, torch modules, Gymnasium spaces, and policies of other libraries with a method
that is asked."""

CollectorPolicy = PolicyLike | Literal["random"]
"""All that collectors take as a policy."""

Decision = dict[str, Any]
"""A policy's decision: `act`, an array of shape (n, ...) or a batch of arrays; and as far as it said so `state`;
`policy`, to be stored with the step; `dist`; and the columns that RLlib's policies return, such as `action_logp`."""

_WORDS = {"obs": "observations", "tensor": "tensors of observations", "batch": "a Batch"}
_TOLD = "is_within_training_step"
_ndarray = np.ndarray


class PolicyAdapter:
    """A policy of any kind, asked for actions by an `Actor`.

    Parameters
    ----------
    policy
        The policy that is asked.
    signature
        The arguments that it takes.
    layout
        The layout of the actions of one environment, or None to take actions as they come.

    Attributes
    ----------
    policy
        The object that is asked, as the user gave it.
    takes_batch
        Whether `decide` is given a batch, rather than observations.
    """

    def __init__(self, policy: Callable[..., Any], signature: Signature, layout: SpaceLayout | None) -> None:
        self.policy = policy
        self._signature = signature
        self._layout = layout
        self._plain = layout is None or layout.plain
        self._takes_info, self._takes_state = signature.has("info"), signature.has("state")
        self.takes_batch = signature.first == "batch" or self._takes_info
        self._alone = not (self._takes_info or self._takes_state)
        self._ask = policy

    def __call__(self, batch: Batch, state: Any = None) -> Decision:
        """Ask for the actions of every row of a batch."""
        return self.decide(batch if self.takes_batch else batch.obs, state)

    def _with_layout(self, layout: SpaceLayout | None) -> PolicyAdapter:
        return self if layout is None or self._layout else type(self)(self.policy, self._signature, layout)

    def decide(self, given: Any, state: Any = None) -> Decision:
        """Ask for actions, given a batch or observations, as `takes_batch` says.

        Raises
        ------
        PolicySpecError
            If the policy returns no actions.
        """
        try:
            if self._alone:
                result = self._ask(given)
                if type(result) is _ndarray and result.ndim < 2 and self._plain:
                    return {"act": result}
            else:
                result = self._ask_further(given, state)
            return self._decision(result)
        except Exception as error:
            signature = self._signature
            error.add_note(
                f"the policy was called on {_WORDS[signature.first]}; as_policy(policy, takes=...) changes that"
            )
            raise

    def _ask_further(self, given: Any, state: Any) -> Any:
        signature = self._signature
        values = {"state": state, "info": given.info if self._takes_info else None}
        first = given if signature.first == "batch" or not self._takes_info else given.obs
        named = {name: values[name] for name in signature.named}
        return self._ask(first, *[values[word] for word in signature.positional], **named)

    def _decision(self, result: Any) -> Decision:
        if type(result) is _ndarray and self._plain:
            return {"act": self._best(result)}
        kind = KINDS[type(result)]
        if self._takes_state and isinstance(result, tuple) and len(result) == 2:
            return {**self._decision(result[0]), "state": result[1]}
        if kind == DISTRIBUTION:
            return self._sample(result)
        values = _named_values(result)
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


class TorchPolicy(PolicyAdapter):
    """A torch module, or a function of tensors, asked without gradients."""

    def __init__(self, policy: Callable[..., Any], signature: Signature, layout: SpaceLayout | None) -> None:
        super().__init__(policy, signature, layout)
        self._ask = self._ask_ungraded
        self._path: Sequence[str] = ()
        """Names of modules and of a parameter, which lead to the one whose device and dtype observations get."""
        self._device: Any = None
        self._target: TorchTarget | None = None

    def _ask_ungraded(self, first: Any, *further: Any, **named: Any) -> Any:
        if self._signature.first == "tensor":
            device, dtype = self._device_and_dtype()
            if self._target is None or device != self._device:
                self._device, self._target = device, TorchTarget(device=device)
            first = _tensors(first, self._target, dtype)
        with sys.modules["torch"].no_grad():
            return self.policy(first, *further, **named)

    def _device_and_dtype(self) -> tuple[Any, Any]:
        """Return the device of the module's parameters and their floating dtype; the host and None for functions.

        Parameters may be moved or replaced at any time, so they are looked at in each call; torch's search for the
        first one would take longer than a small network.
        """
        if self._path:
            owner: Any = self.policy
            try:
                for name in self._path[:-1]:
                    owner = owner._modules[name]
                parameter = owner._parameters[self._path[-1]]
                return parameter.device, parameter.dtype
            except (AttributeError, KeyError):
                self._path = ()
        device: Any = "cpu"
        if hasattr(self.policy, "named_parameters"):
            for name, parameter in self.policy.named_parameters():
                device = parameter.device
                if parameter.dtype.is_floating_point:
                    self._path = name.split(".") if is_module(self.policy) else ()
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
    """Make one kind of callable, from batch and state to a `Decision`, of anything that can be asked for actions.

    Parameters
    ----------
    policy
        A callable on batches or observations, a torch module, or a Gymnasium space to draw from, or `"random"` to draw
        from `action_space`; see the table of this module. A model of Stable-Baselines3, a module or policy of RLlib,
        an agent of CleanRL's, or an algorithm, which stands for its policy.
    action_space
        The space of one environment's actions. Without it, scores are not recognised and the parts of dict and tuple
        actions not checked; collectors know it.
    takes
        The meanings of the policy's first parameters: one of `"obs"`, `"tensor"` (observations as tensors) and
        `"batch"`, or a sequence that begins with one of these and goes on with `"info"` and `"state"`. By default the
        first is the observations, or the batch if it is called `batch`; others go by their names.
    deterministic
        Whether a policy of Stable-Baselines3 or RLlib is asked for its best actions, and not to explore.
    seed
        The seed of draws, where the policy is a space.

    Raises
    ------
    PolicySpecError
        If it is none of these, or the names of its parameters do not say what they stand for; or the best actions are
        asked for, of a policy that has no way to tell them.

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
            raise PolicySpecError("action_space must be given where the policy is 'random'")
        policy = action_space
    if is_space(policy):
        if takes is not None:
            raise PolicySpecError("takes must be left out where the policy is a space")
        policy = RandomPolicy(policy, seed=seed)
    if takes is None or deterministic:
        policy = wrap_peer(policy_of(policy), deterministic=deterministic)
    if isinstance(policy, type):
        raise PolicySpecError(f"a policy must be an object that can be asked, got the class {policy.__name__}")
    if not callable(policy):
        found = repr(policy) if isinstance(policy, str) else f"a {type(policy).__name__}"
        raise PolicySpecError(
            f"a policy must be callable, a torch module, a space or 'random', got {found}; "
            "give a function that returns the actions of a Batch of observations"
        )
    signature = read_signature(policy, takes)
    kind = TorchPolicy if is_module(policy) or signature.first == "tensor" else PolicyAdapter
    return kind(policy, signature, layout)


def is_random(policy: Any) -> bool:
    """Tell whether a policy is the word `"random"`: actions are drawn from the space of the environment."""
    return isinstance(policy, str) and policy == "random"


def own_policy(policy: Any) -> Any:
    """Return the user's own policy: its methods load weights, map actions and add noise."""
    return policy.policy if isinstance(policy, PolicyAdapter) else wrap_peer(policy_of(policy))


def evaluation_mode(policy: Any) -> AbstractContextManager[None]:
    """Make a context of torch's evaluation mode for policies that are told of training steps; for each collection.

    Those are policies with a flag `is_within_training_step`, as Tianshou's have it: dropout and batch normalisation go
    by the mode, exploration by the flag. Any other module collects in the mode that it is in.
    """
    policies = policy.values() if isinstance(policy, Mapping) else (policy,)
    # Found once: a loop that collects step by step enters the mode for each.
    told = [own for own in map(own_policy, policies) if hasattr(own, _TOLD) and is_module(own)]
    return _EvaluationMode(told) if told else nullcontext()


class _EvaluationMode(AbstractContextManager[None]):
    """Torch's evaluation mode of modules, for collectors to enter while they collect."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._switched: list[Any] = []

    def __enter__(self) -> None:
        self._switched = [own for own in self._modules if own.training]
        for own in self._switched:
            own.eval()

    def __exit__(self, *_: object) -> None:
        for own in self._switched:
            own.train()


def is_space(policy: Any) -> bool:
    """Tell whether a policy is a Gymnasium space, to draw from."""
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and isinstance(policy, gymnasium.Space)


def _named_values(result: Any) -> Mapping[str, Any] | None:
    named = values_of(result)
    if named is None and hasattr(result, "act") and hasattr(result, "__dict__"):
        named = vars(result)
    return named


def _tensors(observations: Any, target: TorchTarget, dtype: Any) -> Any:
    kind = KINDS[type(observations)]
    if kind == NODE:
        return node(Batch, {name: _tensors(leaf, target, dtype) for name, leaf in observations.__dict__.items()})
    if observations.dtype == object:
        return observations
    if kind == ARRAY and observations.dtype.kind not in "biufc":
        raise ColumnTypeError(f"observations must be numbers to become tensors, got {observations.dtype}")
    tensor = target.convert(observations, kind)
    return tensor.to(dtype) if dtype not in (None, tensor.dtype) and tensor.is_floating_point() else tensor
