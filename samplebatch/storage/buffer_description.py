"""Description of a buffer beside its rows, as plain values: class, options, attributes; and buffers made from it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import inf
from types import NoneType
from typing import Any

from samplebatch.buffer.samplers import Sampler
from samplebatch.buffer.table import Table
from samplebatch.errors import FormatError, near_names
from samplebatch.storage.buffer_state import generator_from_state, is_plain, plain
from samplebatch.storage.untrusted_state import State

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
    if buffer.__dict__.get("buffer_num", table.rings.n) != table.rings.n:
        raise FormatError(f"a {described['class']} must have a ring for each of its buffers, it has {table.rings.n}")
    buffer._table = table
    buffer.maxsize = table.rings.capacity
    buffer._rng = generator_from_state(described["generator"])
    buffer._use(sampler)
    return buffer


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
    buffer.__dict__.update(own)
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


_KINDS: dict[str, tuple[type, ...]] = {
    "maxsize": (int,),
    "options": (dict,),
    "stack_num": (int,),
    "_seed": (int, NoneType),
    "buffer_num": (int,),
    "cached_buffer_num": (int,),
    "horizon": (int,),
}
"""Types of attributes, where buffers have them."""

_NUMBERS = {"future_k": (1.0, inf), "future_p": (0.0, 1.0)}
"""Attributes that are numbers, where buffers have them, and the least and the largest."""

_OPTIONS = frozenset(("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail"))


def _check_own(name: str, own: Mapping[str, Any], *, set_up: bool) -> None:
    """Check that attributes from outside are of the types that buffers give them."""
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
        if type(value) not in kinds or (int in kinds and value is not None and not 0 <= value < 1 << 63):
            raise FormatError(f"attribute {attribute!r} of a {name} must be of its type, it is not; it is damaged")
    for attribute, (least, largest) in _NUMBERS.items():
        value = own.get(attribute, least)
        if type(value) not in (int, float) or not least <= value <= largest:
            raise FormatError(f"attribute {attribute!r} of a {name} must be of its type, it is not; it is damaged")
    for attribute in ("horizon", "stack_num"):
        if own.get(attribute, 1) < 1:
            raise FormatError(f"attribute {attribute!r} of a {name} must be at least 1, it is not; it is damaged")
    if not set_up and not own["options"].keys() >= _OPTIONS:
        raise FormatError(f"the options of a {name} must be those that it was made with, some are missing; damaged")
    if own.get("options", {}).get("reward_dtype", "float32") != "float32":
        raise FormatError(f"option 'reward_dtype' of a {name} must be 'float32' or absent; it is damaged")
    order = own.get("_order", [])
    if not isinstance(order, list) or not all(type(place) is int for place in order):
        raise FormatError(f"attribute '_order' of a {name} must list rings, it does not; it is damaged")


def _with_subclasses(cls: type) -> list[type]:
    found = [cls]
    inner: type
    for inner in cls.__subclasses__():
        found += _with_subclasses(inner)
    return found
