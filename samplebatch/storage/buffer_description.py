"""Description of a buffer beside its rows, as plain values: class, options, attributes; and buffers made from it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any

from samplebatch.buffer.samplers import Sampler
from samplebatch.buffer.table import Table
from samplebatch.errors import ArgumentError, FormatError, near_names
from samplebatch.storage.buffer_state import generator_from_state, is_plain, plain
from samplebatch.storage.untrusted_state import State, check_flags

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Version of the description, and of states and files that have one."""

_HOMES = {
    "ReplayBuffer": "replay",
    "ReplayBufferManager": "vector",
    "VectorReplayBuffer": "vector",
    "PrioritizedReplayBuffer": "prioritized",
    "PrioritizedReplayBufferManager": "prioritized",
    "PrioritizedVectorReplayBuffer": "prioritized",
    "CachedReplayBuffer": "cached",
    "HERReplayBuffer": "hindsight",
    "HERReplayBufferManager": "hindsight",
    "HERVectorReplayBuffer": "hindsight",
}
"""Modules of the classes that a description may name."""

_BOUND = frozenset(("_table", "_ring", "_start", "_sampler", "_rng", "_parts"))
"""Attributes that are stored in another form, or not at all."""


def describe(buffer: Any) -> State:
    """Describe a buffer beside its rows: its class, its plain attributes, and the names of the others."""
    own = {name: value for name, value in buffer.__dict__.items() if name not in _BOUND}
    return {
        "version": VERSION,
        "class": type(buffer).__name__,
        "own": {name: plain(value) for name, value in own.items() if is_plain(value)},
        "missing": [name for name, value in own.items() if not is_plain(value)],
    }


def check_description(described: Mapping[str, Any]) -> None:
    """Check that a description is of a buffer, and of a version that can be read.

    Raises
    ------
    FormatError
        If it is not.
    """
    if not isinstance(described, Mapping) or not isinstance(described.get("class"), str):
        raise FormatError("the state must be of a buffer, it is of something else")
    version = described.get("version")
    if type(version) is not int or version != VERSION:
        raise FormatError(f"the buffer is of version {str(version)[:20]}, this library reads {VERSION}")


def make_buffer(cls: Any, described: Mapping[str, Any], table: Table, sampler: Sampler, missing: dict[str, Any]) -> Any:
    """Make a buffer from its parts.

    Parameters
    ----------
    cls
        Its class, or one that it derives from.
    described
        What `describe` returned, and the state of the generator.
    missing
        The attributes that no file can hold, by argument.

    Raises
    ------
    FormatError
        If it is of another class, its description is not whole, or an attribute is missing.
    TypeError
        If an attribute is given that is not missing.
    """
    buffer = make_rowless(cls, described, missing)
    give_rows(buffer, table, sampler, generator_from_state(described.get("generator")))
    return buffer


def give_rows(buffer: Any, table: Table, sampler: Sampler, rng: np.random.Generator) -> None:
    """Give a buffer that has no rows yet a table, a sampler and a generator.

    Raises
    ------
    FormatError
        If the table has other rings than the buffer's attributes count, rows without flags, or far fewer steps than
        are stacked.
    """
    check_flags(table)
    own, n, kind = buffer.__dict__, table.rings.n, type(buffer).__name__
    if own.get("buffer_num", n) != n or own.get("cached_buffer_num", n - 1) != n - 1:
        raise FormatError(f"a {kind} must have a ring for each of its buffers, it has {n}")
    if own.get("_order", [0]) != list(range(own.get("cached_buffer_num", n))):
        raise FormatError(f"attribute '_order' of a {kind} must list its rings, it does not; it is damaged")
    if buffer.stack_num > max(table.rings.capacity, _MAX_STACK):
        raise FormatError(f"attribute 'stack_num' of a {kind} must be at most its steps, got {buffer.stack_num}")
    buffer._table = table
    buffer.maxsize = table.rings.capacity
    buffer._rng = rng
    buffer._use(sampler)


def make_rowless(cls: Any, described: Mapping[str, Any], missing: dict[str, Any]) -> Any:
    """Make a buffer without rows, of the class described: the given one, or one that derives from it.

    Raises
    ------
    FormatError, TypeError
        As `make_buffer` does.
    """
    check_description(described)
    name = described["class"]
    kind = buffer_class(name, cls)
    own, asked = described.get("own"), described.get("missing")
    if not isinstance(own, dict) or not isinstance(asked, list):
        raise FormatError(f"the attributes of a {name} must have been kept with it, they were not; it is damaged")
    arguments = {str(attribute).lstrip("_"): str(attribute) for attribute in asked}
    for argument in arguments:
        if argument not in missing:
            raise FormatError(f"a {name} must be given {argument!r}, which cannot be kept; pass {argument}=...")
    for argument in missing:
        if argument not in arguments:
            raise TypeError(f"a {name} has no {argument!r} that could not be kept; {near_names(argument, arguments)}")
    buffer: Any = object.__new__(kind)
    strange = [attribute for attribute in own if callable(getattr(kind, attribute, None))]
    if strange:
        raise FormatError(f"the attributes of a {name} must be values, {strange[0]!r} is a method; it is damaged")
    _check_own(name, own, set_up="set_up" in described)
    if "set_up" in described:
        buffer._set_up(described["set_up"]["maxsizes"], described["set_up"]["options"], 42)
    buffer.__dict__.update({attribute: value for attribute, value in own.items() if attribute not in _CHECKED})
    set_checked(buffer, own)
    buffer.__dict__.update({attribute: missing[argument] for argument, attribute in arguments.items()})
    return buffer


def buffer_class(name: str, cls: Any) -> Any:
    """Return the class of a buffer by its name: the given one, or one that derives from it.

    Raises
    ------
    FormatError
        If there is none of that name.
    """
    if name in _HOMES:
        import_module(f"samplebatch.buffer.{_HOMES[name]}")
    kinds = {kind.__name__: kind for kind in _with_subclasses(cls)}
    if name not in kinds:
        raise FormatError(f"the buffer must be a {cls.__name__}, and it is a {name}; open or load it with {name}")
    return kinds[name]


def set_checked(buffer: Any, found: Mapping[str, Any]) -> None:
    """Set the attributes that a buffer checks when they are set, as far as they were found.

    Raises
    ------
    FormatError
        If the buffer refuses one; names it.
    """
    for attribute in _CHECKED:
        if attribute not in found:
            continue
        try:
            if type(found[attribute]) is int and found[attribute] > _MAX_INT:
                raise OverflowError(f"it must be at most {_MAX_INT}")
            setattr(buffer, attribute, found[attribute])
        except (ArgumentError, OverflowError) as error:
            kind = type(buffer).__name__
            raise FormatError(f"attribute {attribute!r} of a {kind} must be one that it can have: {error}") from error


_MAX_INT = (1 << 63) - 1
"""The largest number of steps: indices have 64 bits."""

_MAX_STACK = 1024
"""Frames that a buffer of fewer steps may stack: the first step of an episode is repeated as often."""

_CHECKED = ("stack_num", "horizon", "future_k", "future_p")
"""Attributes that buffers check when they are set. The last one sets the one before it, too."""

_KINDS: dict[str, tuple[type, ...]] = {
    "maxsize": (int,),
    "options": (dict,),
    "_seed": (int, NoneType),
    "buffer_num": (int,),
    "cached_buffer_num": (int,),
}
"""Types of the other attributes, where buffers have them."""

_OPTIONS = frozenset(("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail"))


def _check_own(name: str, own: Mapping[str, Any], *, set_up: bool) -> None:
    """Check that the attributes that a buffer does not check itself are of the types that it gives them."""
    if not set_up:
        needed = {"options", "stack_num", "_seed"}
        needed |= (
            {"buffer_num", "_order"}
            if name.startswith("Cached") or name.endswith(("Manager", "VectorReplayBuffer"))
            else set()
        )
        needed |= {"horizon", "future_k"} if name.startswith("HER") else set()
        absent = needed - own.keys()
        if absent:
            raise FormatError(f"a {name} must have attribute {min(absent)!r}, it has not; it is damaged")
    for attribute, kinds in _KINDS.items():
        value = own.get(attribute, kinds[0]())
        if type(value) not in kinds or (type(value) is int and value < 0):
            raise FormatError(f"attribute {attribute!r} of a {name} must be of its type, it is not; it is damaged")
    if not set_up and not own["options"].keys() >= _OPTIONS:
        raise FormatError(f"the options of a {name} must be those that it was made with, some are missing; damaged")
    if own.get("options", {}).get("reward_dtype", "float32") != "float32":
        raise FormatError(f"option 'reward_dtype' of a {name} must be 'float32' or absent; it is damaged")


def _with_subclasses(cls: type) -> list[type]:
    found = [cls]
    inner: type
    for inner in cls.__subclasses__():
        found += _with_subclasses(inner)
    return found
