"""Checks of arguments that many functions take: numbers of things, fractions, measures, choices.

Each returns the argument, as the type that it stands for, or raises `ArgumentError`, which names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

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


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _wanted(least: int | None) -> str:
    return "a whole number" if least is None else f"a whole number from {least}"


def _shown(value: object) -> str:
    """Word a value that was given: a number or word itself, else its type."""
    return repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
