"""Deadlines: the moments until which operations wait."""

from __future__ import annotations

import time

_monotonic = time.monotonic


def deadline_of(timeout_s: float | None) -> float | None:
    """Return the moment at which the time given is over, in seconds of the monotonic clock; None if it never is.

    Raises
    ------
    ValueError
        If the time is negative or no number.

    Examples
    --------
    >>> deadline_of(0.0) <= time.monotonic()
    True
    >>> deadline_of(float("nan"))
    Traceback (most recent call last):
    ValueError: timeout_s must be None or a number of seconds from 0 on, got nan
    """
    if timeout_s is None:
        return None
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s must be None or a number of seconds from 0 on, got {timeout_s}")
    return _monotonic() + timeout_s
