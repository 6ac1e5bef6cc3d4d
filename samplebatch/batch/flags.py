"""Flags: properties of a whole batch, beside its columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

from samplebatch.batch.action_unit import ActionUnit


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a batch: the layout of its sequences, its age and its purpose; slices share them.

    Attributes
    ----------
    time_major
        Whether step columns have shape (T, B, ...) rather than (B * T, ...) or (rows, ...); None if unknown.
    zero_padded
        Whether every sequence occupies `max_seq_len` rows, zeros after its last step.
    max_seq_len
        Steps of the longest sequence, or the rows that each occupies when padded; None without sequences.
    num_grad_updates
        Gradient updates that the policy behind the batch had seen, averaged over steps; None if unknown.
    is_training
        Whether the batch is meant for training rather than for computing actions.
    action_unit
        The unit of the actions; None if unknown.
    """

    time_major: bool | None = None
    zero_padded: bool = False
    max_seq_len: int | None = None
    num_grad_updates: float | None = None
    is_training: bool = False
    action_unit: ActionUnit | None = None


DEFAULT = Flags()


@lru_cache(maxsize=256)
def flags_of_unit(action_unit: ActionUnit | None) -> Flags:
    """Return the flags of a batch whose actions are in a unit: one object for each unit, as it is compared often."""
    return DEFAULT if action_unit is None else Flags(action_unit=action_unit)


def describe_flags(flags: Flags) -> dict[str, Any]:
    """Return flags as plain values by name; the unit of actions is left out if it is unknown, as in older files."""
    found = {field.name: getattr(flags, field.name) for field in fields(flags)}
    unit = found.pop("action_unit")
    return found if unit is None else {**found, "action_unit": unit.describe()}


def flag(name: str, *, is_layout: bool = True) -> Any:
    """Make the property of a batch that reads and sets a flag; one of the layout is checked against the columns."""

    def set_flag(batch: Any, value: Any) -> None:
        flags = replace(batch._flags, **{name: value})
        if is_layout:
            batch._set_layout(flags)
        else:
            batch._flags = flags

    return property(attrgetter(f"_flags.{name}"), set_flag)
