"""Flags: properties of a batch that are not columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from samplebatch import names
from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.errors import ArgumentError, FormatError


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a batch: sequence layout, gradient updates, purpose and action unit; slices of a batch share its flags.

    Attributes
    ----------
    time_major
        Whether step columns have shape (T, B, ...) rather than (B * T, ...) or (rows, ...); None if unknown.
    zero_padded
        Whether every sequence has `max_seq_len` rows, with zeros after the sequence's last step.
    max_seq_len
        Number of steps in the longest sequence, or number of rows per sequence if padded; None without sequences.
    num_grad_updates
        Number of gradient updates of the behaviour policy, averaged over steps; None if unknown.
    is_training
        Whether the batch is for training rather than for computing actions.
    action_unit
        Unit of the actions; None if unknown.
    per_sequence
        Sorted names of columns with one row per sequence, without state columns.
    """

    time_major: bool | None = None
    zero_padded: bool = False
    max_seq_len: int | None = None
    num_grad_updates: float | None = None
    is_training: bool = False
    action_unit: ActionUnit | None = None
    per_sequence: tuple[str, ...] = ()

    def declares(self, name: str) -> bool:
        """Return whether a column with this dotted name is declared to have one row per sequence."""
        return bool(self.per_sequence) and names.covers(self.per_sequence, name)


DEFAULT = Flags()


@lru_cache(maxsize=256)
def flags_of_unit(action_unit: ActionUnit | None) -> Flags:
    """Return default flags with an action unit; results are cached, because flags are often compared by identity."""
    return DEFAULT if action_unit is None else Flags(action_unit=action_unit)


def describe_flags(flags: Flags) -> dict[str, Any]:
    """Return flags as plain values.

    An unknown `action_unit` and an empty `per_sequence` are omitted, as in older files.
    """
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    unit, per_sequence = values.pop("action_unit"), values.pop("per_sequence")
    values |= {} if unit is None else {"action_unit": unit.describe()}
    return values | ({"per_sequence": list(per_sequence)} if per_sequence else {})


def column_names(argument: str, values: Any) -> tuple[str, ...]:
    """Return the sorted column names in an argument, which is one name or an iterable of names.

    Raises ArgumentError if a name is not a string.

    >>> column_names("per_sequence", "score"), column_names("per_sequence", ["b", "a", "b"])
    (('score',), ('a', 'b'))
    """
    values = [values] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    for value in values:
        if not isinstance(value, str):
            raise ArgumentError(f"{argument} must contain column names, got a {type(value).__name__}")
    return tuple(sorted({*map(str, values)}))


def read_declarations(plain: Any) -> tuple[str, ...]:
    """Validate the names of columns with one row per sequence; raises FormatError if the names are malformed."""
    if not isinstance(plain, list):
        raise FormatError(f"per_sequence must be a list of column names, got {describe_value(plain)}")
    for name in plain:
        if not isinstance(name, str):
            raise FormatError(f"per_sequence must be a list of column names, got {describe_value(name)} in the list")
    return column_names("per_sequence", plain)


def flag(name: str, *, is_layout: bool = True) -> Any:
    """Return a property that reads and writes a flag; layout flags are validated against the columns."""

    def set_flag(batch: Any, value: Any) -> None:
        value = column_names(name, value) if name == "per_sequence" else value
        flags = replace(batch._flags, **{name: value})
        if is_layout:
            batch._set_layout(flags)
        else:
            batch._flags = flags

    return property(attrgetter(f"_flags.{name}"), set_flag)


METHODS_ELSEWHERE = {
    "append": "batch.concat(other) joins two batches, and concat_samples([...]) several",
    "extend": "batch.concat(other) joins two batches, and concat_samples([...]) several",
    "filter": "batch[mask] has the steps at which a boolean array is True",
    "head": "batch[:5] has the first five steps",
    "iloc": "batch[2:5] and batch[indices] are steps by position, batch['obs'] is a column",
    "concat_samples": "from samplebatch import concat_samples joins a list of batches",
    "numpy": "batch['obs'] is a NumPy array, to_torch() has tensors",
    "load": "samplebatch.load(path) reads a file that save(path) wrote",
    "sample": "batch[rng.integers(len(batch), size=64)] has random steps, minibatches(64) all of them in random order",
    "shape": "len(batch) is the number of steps, batch['obs'].shape the shape of a column",
    "to": "to_torch(device=...) has the columns as tensors",
}
"""Replacements in this library for attributes of other libraries' batches, by attribute name."""


class MissingAttribute:
    """Missing attribute whose access raises an error with a suggestion; `hasattr` returns False."""

    def __init__(self, name: str, way_out: str) -> None:
        self.name, self.way_out = name, way_out

    def __get__(self, batch: Any, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}: {self.way_out}")

    def __set__(self, batch: Any, value: Any) -> None:
        raise AttributeError(f"{self.name!r} must not be set as an attribute: {self.way_out}")


_COLUMNS = (*names.TO_NESTED, *names.TO_FLAT, names.ADVANTAGES, names.EPS_ID)


def missing_columns_of_agents() -> dict[str, MissingAttribute]:
    """Return attributes that a `MultiAgentBatch` lacks: common column names, which exist only in policies' batches."""
    return {
        name: MissingAttribute(name, f"columns belong to the batch of a policy, batch['policy_id'][{name!r}]")
        for name in _COLUMNS
    }


def missing_attributes() -> dict[str, MissingAttribute]:
    """Return the attributes that users of other libraries expect: common column names, and `METHODS_ELSEWHERE`."""
    items = {
        name: f"columns are items, batch[{names.TO_FLAT.get(name, name)!r}]; as_batch() has them as attributes"
        for name in _COLUMNS
    }
    return {name: MissingAttribute(name, way_out) for name, way_out in (items | METHODS_ELSEWHERE).items()}
