"""Tables from the command line: `NAME=KIND:CAPACITY,OPTION=VALUE,...`."""

from __future__ import annotations

import re
from typing import Any

from samplebatch.errors import ArgumentError, near_names
from samplebatch.service.limiter import RateLimiter
from samplebatch.service.step_items import step_options
from samplebatch.service.table import KINDS, ReplayTable

_LIMITS = ("min_size", "samples_per_insert", "error_buffer")
_ARGUMENTS = ("items", "remover", "max_times_sampled", "streams", "seed")
_FORM = "NAME=KIND:CAPACITY,OPTION=VALUE,..."


def parse_table(text: str) -> ReplayTable:
    """Make a replay table of its description in one word.

    Parameters
    ----------
    text
        `NAME=KIND:CAPACITY`, and any options after commas: `OPTION=VALUE`. The kind is one of `ReplayTable`, or
        `queue`, a fifo table that is read once. Options are its arguments, and those of `RateLimiter`. Numbers may be
        written as `1e6`; several names of columns are joined by `+`.

    Raises
    ------
    ArgumentError
        If it is of no such form, or names no such kind or option; says which are near.
    SampleBatchError
        As `ReplayTable` and `RateLimiter` do.

    Examples
    --------
    >>> parse_table("prio=prioritized:1e6,alpha=0.7,samples_per_insert=4")
    ReplayTable('prio', prioritized, 0 of 1000000 steps)
    >>> parse_table("rollouts=queue:64").info()["limits"]["max_times_sampled"]
    1
    >>> parse_table("replay=unifrom:1e6")
    Traceback (most recent call last):
    samplebatch.errors.ArgumentError: table 'replay' must be of a kind that there is, got 'unifrom'; did you mean
        'uniform'?
    """
    found = re.fullmatch(r"(?P<name>[^=,:]+)=(?P<kind>[^:,]+):(?P<capacity>[^,]+)(?:,(?P<options>.*))?", text)
    if found is None:
        raise ArgumentError(f"a table must be given as {_FORM}, got {text!r}")
    name, kind = found["name"], found["kind"]
    if kind not in (*KINDS, "queue"):
        raise ArgumentError(
            f"table {name!r} must be of a kind that there is, got {kind!r}; {near_names(kind, (*KINDS, 'queue'))}"
        )
    arguments: dict[str, Any] = {"kind": kind, "capacity": _value(found["capacity"])}
    if kind == "queue":
        arguments |= {"kind": "fifo", "max_times_sampled": 1}
    limits: dict[str, Any] = {}
    known = (*_LIMITS, *_ARGUMENTS, *_options_of(kind))
    for part in filter(None, (found["options"] or "").split(",")):
        option, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgumentError(f"options of table {name!r} must be given as OPTION=VALUE, got {part!r}")
        if option not in known:
            raise ArgumentError(
                f"table {name!r} of kind {kind!r} has no option {option!r}; {near_names(option, known)}"
            )
        (limits if option in _LIMITS else arguments)[option] = _value(value)
    try:
        return ReplayTable(name, limiter=RateLimiter(**limits), **arguments)
    except ArgumentError as error:
        raise ArgumentError(f"table {name!r}: {error}") from error


def _options_of(kind: str) -> tuple[str, ...]:
    return tuple(step_options(kind)) if kind in ("uniform", "prioritized") else ()


def _value(text: str) -> Any:
    """Return a value by its form: a flag, a number, whole if it is one, names, or a word.

    >>> [_value(text) for text in ("1e6", "0.5", "true", "lifo", "obs+new_obs", "none")]
    [1000000, 0.5, True, 'lifo', ['obs', 'new_obs'], 'none']
    """
    if text in ("true", "false"):
        return text == "true"
    try:
        number = float(text)
    except ValueError:
        return text.split("+") if "+" in text else text
    return int(number) if number.is_integer() else number  # inf and NaN are not
