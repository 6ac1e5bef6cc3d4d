"""Checks of arguments that many functions take: numbers of things, fractions, measures, choices.

Each returns the argument, as the type that it stands for, or raises `ArgumentError`, which names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

from samplebatch.errors import ArgumentError, near_names


def whole(name: str, value: object, least: int | None = 0) -> int:
    """Return a number of things as an int.

    Parameters
    ----------
    name
        The argument's name.
    value
        An integer, Python's or NumPy's.
    least
        The smallest that it may be; None for any.

    Raises
    ------
    ArgumentError
        If it is no whole number, or smaller.

    Examples
    --------
    >>> whole("batch_size", np.int32(4))
    4
    >>> whole("batch_size", 2.5, 1)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: batch_size must be a whole number from 1, got 2.5
    """
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
        raise ArgumentError(f"{name} must be {_wanted(least)}, got {_shown(value)}")
    found = int(value)
    if least is not None and found < least:
        raise ArgumentError(f"{name} must be {_wanted(least)}, got {found}")
    return found


def count_of(name: str, value: object) -> int:
    """Return a count that a file states, which every reader of it can hold.

    Raises
    ------
    ArgumentError
        If it is no whole number from 0 to 2**62.

    Examples
    --------
    >>> count_of("times", 10**30)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: times must be a whole number from 0 to 2**62, got 1000000000000000000000000000000
    """
    found = whole(name, value)
    if found > 1 << 62:
        raise ArgumentError(f"{name} must be a whole number from 0 to 2**62, got {found}")
    return found


def finite(name: str, value: object) -> float:
    """Return a priority that a file states.

    Raises
    ------
    ArgumentError
        If it is no finite number from 0.

    Examples
    --------
    >>> finite("priority", float("nan"))
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: priority must be a finite number from 0, got nan
    """
    if not _is_number(value) or not 0.0 <= float(value) < float("inf"):
        raise ArgumentError(f"{name} must be a finite number from 0, got {_shown(value)}")
    return float(value)


def fraction(name: str, value: object) -> float:
    """Return a part of a whole, such as a discount, as a float.

    Raises
    ------
    ArgumentError
        If it is no number from 0 to 1.

    Examples
    --------
    >>> fraction("gamma", 1)
    1.0
    >>> fraction("gamma", float("nan"))
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: gamma must be a number from 0 to 1, got nan
    """
    if not _is_number(value) or not 0.0 <= float(value) <= 1.0:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {_shown(value)}")
    return float(value)


def positive(name: str, value: object) -> float:
    """Return a length of time, or another measure that cannot be 0, as a float.

    Raises
    ------
    ArgumentError
        If it is no number above 0.

    Examples
    --------
    >>> positive("stall_timeout_s", 0)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: stall_timeout_s must be a number above 0, got 0
    """
    if not _is_number(value) or not float(value) > 0.0:
        raise ArgumentError(f"{name} must be a number above 0, got {_shown(value)}")
    return float(value)


def choice(name: str, value: object, known: Iterable[str]) -> str:
    """Return one of several words.

    Raises
    ------
    ArgumentError
        If it is none of them.

    Examples
    --------
    >>> choice("convention", "rlib", ["rllib", "tianshou"])
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: convention must be one of 'rllib', 'tianshou', got 'rlib'; did you mean 'rllib'?
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        listed = ("one of " if len(words) > 1 else "") + ", ".join(map(repr, words))
        near = near_names(value, words) if isinstance(value, str) else ""
        hint = f"; {near}" if near.startswith("did") else ""
        raise ArgumentError(f"{name} must be {listed}, got {_shown(value)}{hint}")
    return value


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def check_names(cls: type, values: tuple[Any, ...], names: Iterable[str], renamed: Mapping[str, str]) -> None:
    """Check the arguments of a class that takes them by name, before its `__init__` is called.

    Parameters
    ----------
    cls
        The class. Names are those of its `__init__`, and of its base classes' as long as these take `**options`.
    values, names
        Arguments without a name, and the names of the others.
    renamed
        Names of other versions and libraries, with the ones they have here.

    Raises
    ------
    ArgumentError
        If arguments come without a name, or with an unknown one; suggests the near name.

    Examples
    --------
    >>> class Learner:
    ...     def __init__(self, *, gamma=0.9, lr=0.1): ...
    >>> check_names(Learner, (), ["discount_factor"], {"discount_factor": "gamma"})
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: Learner has no argument 'discount_factor'; did you mean 'gamma'?
    """
    parameters, positional = _parameters_of(cls)
    if values and not positional:
        expected = ", ".join(f"{name}=..." for name in list(parameters)[:3])
        raise ArgumentError(f"{cls.__name__} must get its arguments by name, {expected}, got {len(values)} without one")
    for name in names:
        if parameters and name not in parameters:
            raise ArgumentError(_no_argument(cls.__name__, name, parameters, renamed))


@cache
def _parameters_of(cls: type) -> tuple[dict[str, Parameter], bool]:
    """Return the named parameters of a class, none if it takes any, and whether it takes arguments without names."""
    found: dict[str, Parameter] = {}
    takes_any, takes_positional = True, False
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not takes_any or base is object:
            continue
        takes_any = False
        for name, parameter in list(signature(vars(base)["__init__"]).parameters.items())[1:]:
            if parameter.kind is Parameter.VAR_KEYWORD:
                takes_any = True
            elif parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
                found.setdefault(name, parameter)
            takes_positional |= parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
    return ({} if takes_any else found), takes_positional


def _no_argument(subject: str, name: str, known: Iterable[str], renamed: Mapping[str, str]) -> str:
    known = list(known)
    if (near := renamed.get(name)) is not None and near.split("=")[0] in known:
        return f"{subject} has no argument {name!r}; did you mean {near!r}?"
    return f"{subject} has no argument {name!r}; {near_names(name, known)}"


def suggest_names(
    **renamed: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator of functions that answers unknown argument names with near ones.

    Parameters
    ----------
    **renamed
        Names of other libraries, with the ones they have here.

    Examples
    --------
    >>> @suggest_names(lam="gae_lambda")
    ... def estimate(gae_lambda=0.95): ...
    >>> estimate(lam=0.9)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: estimate has no argument 'lam'; did you mean 'gae_lambda'?
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = signature(function).parameters
        takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
        subject = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name in kwargs:
                if name not in parameters and (name in renamed or not takes_any):
                    known = [known for known in parameters if known != "self"]
                    raise ArgumentError(_no_argument(subject, name, known, renamed))
            return function(*args, **kwargs)

        return call

    return decorate


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _wanted(least: int | None) -> str:
    return "a whole number" if least is None else f"a whole number from {least}"


def _shown(value: object) -> str:
    """Word a value that was given: a number or word itself, else its type."""
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
