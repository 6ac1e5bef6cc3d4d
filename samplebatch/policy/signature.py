"""Signature: the arguments that a policy is called with, by the names of its parameters or as its user says."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from samplebatch.errors import PolicySpecError

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

    Parameters
    ----------
    policy
        A callable, or a torch module, whose `forward` is looked at.
    takes
        The meanings of its first parameters; None to go by the first one's name, or else its annotation. Parameters
        after them that are called `info` or `state` get these in any case.

    Raises
    ------
    PolicySpecError
        If a parameter is neither of a known name nor has a default.

    Examples
    --------
    >>> read_signature(lambda obs, state, epsilon=0.1: obs)
    Signature(first='obs', positional=(), named=('state',))
    >>> read_signature(lambda s, hidden: s, takes=("obs", "state"))
    Signature(first='obs', positional=('state',), named=())
    >>> read_signature(lambda state: state)
    Traceback (most recent call last):
    samplebatch.errors.PolicySpecError: a policy's first parameter must be called 'obs' or 'batch', got 'state'; say
    what it takes: as_policy(policy, takes='obs')
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


def is_module(policy: Any) -> bool:
    """Tell whether a policy is a torch module; torch need not be loaded."""
    torch = sys.modules.get("torch.nn")
    return torch is not None and isinstance(policy, torch.Module)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """List the parameters of a function; None where Python cannot tell."""
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
    """Classify the first parameter of a policy by its name, then by its annotation."""
    name = None if parameter is None else parameter.name
    if name == "batch":
        return "batch"
    annotation = None if parameter is None or parameter.annotation is parameter.empty else parameter.annotation
    word = "" if annotation is None else getattr(annotation, "__name__", None) or str(annotation)
    if "Tensor" in word:
        return "tensor"
    if name == "obs":
        return "obs"
    if "Batch" in word:
        return "batch"
    if module:
        return "tensor"
    if "ndarray" in word.lower():
        return "obs"
    raise PolicySpecError(
        f"a policy's first parameter must be called 'obs' or 'batch', got {'none' if name is None else repr(name)}; "
        "say what it takes: as_policy(policy, takes='obs')"
    )
