"""Validation of common arguments; each function returns the argument or raises `ArgumentError`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Any, Final, ParamSpec, TypeGuard, TypeVar

import numpy as np

from samplebatch.errors import ArgumentError, near_names

_SHOWN_LENGTH: Final = 80
"""Number of characters of a string in an error message; the string may be read from a file or socket."""
_SHOWN_BITS: Final = 256
"""Number of bits of an integer in an error message; Python formats integers of at most 4,300 digits."""
_FLOAT_BITS: Final = 1023
"""Number of bits of the integers that `float` accepts regardless of their value."""


def whole(name: str, value: object, minimum: int | None = 0) -> int:
    """Validate an integer argument and return it as an int.

    value: a Python or NumPy integer.
    minimum: smallest accepted value; None for any integer.

    Raises ArgumentError if the value is not an integer or is less than `minimum`.

    >>> whole("batch_size", np.int32(4))
    4
    >>> whole("batch_size", 2.5, 1)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: batch_size must be a whole number from 1, got 2.5
    """
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
        raise ArgumentError(f"{name} must be {_describe_integer(minimum)}, got {describe_value(value)}")
    number = int(value)
    if minimum is not None and number < minimum:
        raise ArgumentError(f"{name} must be {_describe_integer(minimum)}, got {describe_value(number)}")
    return number


def count_of(name: str, value: object) -> int:
    """Validate a count from a file: an integer that every reader of the file can represent.

    Raises ArgumentError if the value is not an integer from 0 to 2**62.

    >>> count_of("times", 10**30)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: times must be a whole number from 0 to 2**62, got
        1000000000000000000000000000000
    """
    count = whole(name, value)
    if count > 1 << 62:
        raise ArgumentError(f"{name} must be a whole number from 0 to 2**62, got {count}")
    return count


def finite(name: str, value: object) -> float:
    """Validate a priority from a file, and return it as a float.

    Raises ArgumentError if the value is not a non-negative finite number.

    >>> finite("priority", float("nan"))
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: priority must be a finite number from 0, got nan
    """
    if not _is_number(value) or not 0.0 <= float(value) < float("inf"):
        raise ArgumentError(f"{name} must be a finite number from 0, got {describe_value(value)}")
    return float(value)


def fraction(name: str, value: object) -> float:
    """Validate a number in [0, 1], such as a discount, and return it as a float.

    Raises ArgumentError if the value is not a number from 0 to 1.

    >>> fraction("gamma", 1)
    1.0
    >>> fraction("gamma", float("nan"))
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: gamma must be a number from 0 to 1, got nan
    """
    if not _is_number(value) or not 0.0 <= float(value) <= 1.0:
        raise ArgumentError(f"{name} must be a number from 0 to 1, got {describe_value(value)}")
    return float(value)


def positive(name: str, value: object) -> float:
    """Validate a positive number, such as a duration, and return it as a float.

    Raises ArgumentError if the value is not a positive number.

    >>> positive("stall_timeout_s", 0)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: stall_timeout_s must be a number above 0, got 0
    """
    if not _is_number(value) or not float(value) > 0.0:
        raise ArgumentError(f"{name} must be a number above 0, got {describe_value(value)}")
    return float(value)


def choice(name: str, value: object, options: Iterable[str]) -> str:
    """Return one of several options.

    Raises ArgumentError if the value is not one of the options; the message suggests similar options.

    >>> choice("convention", "rlib", ["rllib", "tianshou"])
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: convention must be one of 'rllib', 'tianshou', got
        'rlib'; did you mean 'rllib'?
    """
    words = list(options)
    if not isinstance(value, str) or value not in words:
        listed = ("one of " if len(words) > 1 else "") + ", ".join(map(repr, words))
        near = near_names(value, words) if isinstance(value, str) else ""
        hint = f"; {near}" if near.startswith("did") else ""
        raise ArgumentError(f"{name} must be {listed}, got {describe_value(value)}{hint}")
    return value


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def check_names(cls: type, values: tuple[Any, ...], names: Iterable[str], renamed: Mapping[str, str]) -> None:
    """Validate the arguments of a class before the `__init__` of the class is called.

    cls: the class. Valid names are the parameters of `cls.__init__` and, if `__init__` accepts `**options`, the
        parameters of the base classes' `__init__`.
    values, names: positional arguments, and the names of keyword arguments.
    renamed: mapping from argument names in other versions and libraries to the names in this library.

    Raises ArgumentError if an argument is missing, has an unknown name, or is positional although `cls` does not accept
    positional arguments. For an unknown name, the message suggests similar names.

    >>> class Learner:
    ...     def __init__(self, *, gamma=0.9, lr=0.1): ...
    >>> check_names(Learner, (), ["discount_factor"], {"discount_factor": "gamma"})
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: Learner has no argument 'discount_factor'; did you
        mean 'gamma'?
    """
    parameters, positional = _parameters_of(cls)
    if values and not positional:
        expected = ", ".join(f"{name}=..." for name in list(parameters)[:3])
        raise ArgumentError(f"{cls.__name__} must get its arguments by name, {expected}, got {len(values)} positional")
    named = list(names)
    for name in named:
        if parameters and name not in parameters:
            raise ArgumentError(_no_argument(cls.__name__, name, parameters, renamed))
    if values or named:
        # Copies and pickles are created without arguments.
        required = [name for name, parameter in parameters.items() if parameter.default is Parameter.empty]
        _check_required(cls.__name__, required[len(values) :], named)


@cache
def _parameters_of(cls: type) -> tuple[dict[str, Parameter], bool]:
    """Return a class's named parameters (empty if any name is valid), and whether positional arguments are valid."""
    parameters: dict[str, Parameter] = {}
    takes_any, takes_positional = True, False
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not takes_any or base is object:
            continue
        takes_any = False
        for name, parameter in list(signature(vars(base)["__init__"]).parameters.items())[1:]:
            if parameter.kind is Parameter.VAR_KEYWORD:
                takes_any = True
            elif parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
                parameters.setdefault(name, parameter)
            takes_positional |= parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
    return ({} if takes_any else parameters), takes_positional


def _no_argument(subject: str, name: str, valid_names: Iterable[str], renamed: Mapping[str, str]) -> str:
    valid_names = list(valid_names)
    if (near := renamed.get(name)) is not None and near.split("=")[0] in valid_names:
        return f"{subject} has no argument {name!r}; did you mean {near!r}?"
    return f"{subject} has no argument {name!r}; {near_names(name, valid_names)}"


def _check_required(subject: str, required: Iterable[str], names: Iterable[str]) -> None:
    missing = [repr(name) for name in required if name not in names]
    if missing:
        raise ArgumentError(f"{subject} requires {' and '.join(missing)}")


def suggest_names(
    **renamed: str,
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Create a decorator that rejects unknown, missing and superfluous arguments, and suggests similar names.

    **renamed: mapping from argument names in other libraries to the names in this library.

    >>> @suggest_names(lam="gae_lambda")
    ... def estimate(gae_lambda=0.95): ...
    >>> estimate(lam=0.9)
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: estimate has no argument 'lam'; did you mean
        'gae_lambda'?
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        parameters = signature(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        takes_any, takes_values = Parameter.VAR_KEYWORD in kinds, Parameter.VAR_POSITIONAL in kinds
        by_name = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        positional = [name for name, parameter in parameters.items() if parameter.kind not in by_name]
        required = [
            name
            for name, parameter in parameters.items()
            if parameter.default is Parameter.empty and (name in positional or parameter.kind is Parameter.KEYWORD_ONLY)
        ]
        required_keywords, accepted = set(required).difference(positional), frozenset(parameters)
        names = [name for name in parameters if name != "self"]
        is_method = len(names) < len(parameters)
        title = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # A constructor names the class that is created, which may be derived.
            is_complete = len(args) >= len(required) and (takes_values or len(args) <= len(positional))
            if not is_complete or required_keywords or (kwargs and not accepted.issuperset(kwargs)):
                subject = type(args[0]).__name__ if function.__name__ == "__init__" and args else title
                for name in kwargs:
                    if name not in parameters and (name in renamed or not takes_any):
                        raise ArgumentError(_no_argument(subject, name, names, renamed))
                if len(args) > len(positional) and not takes_values:
                    others = ", ".join(f"{name}=..." for name in names[len(positional) - is_method :][:3])
                    raise ArgumentError(
                        f"{subject} accepts at most {len(positional) - is_method} positional arguments, got "
                        f"{len(args) - is_method}" + (f"; pass others by name: {others}" if others else "")
                    )
                if len(args) < len(required) or not required_keywords <= kwargs.keys():
                    _check_required(subject, [name for name in required if name not in positional[: len(args)]], kwargs)
            return function(*args, **kwargs)

        return call

    return decorate


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, int) and value.bit_length() > _FLOAT_BITS:
        return False
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _describe_integer(minimum: int | None) -> str:
    return "a whole number" if minimum is None else f"a whole number from {minimum}"


def describe_value(value: object) -> str:
    """Format a value for an error message: a number, the first 80 characters of a string, or another value's type.

    >>> describe_value("v2.1"), describe_value([2, 1]), len(describe_value("v" * 1000))
    ("'v2.1'", 'a list', 85)
    >>> describe_value(-(10**5000))
    'an integer of 16610 bits'
    """
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _SHOWN_LENGTH:
        value = f"{value[:_SHOWN_LENGTH]}..."
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
