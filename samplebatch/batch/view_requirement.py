"""ViewRequirement: the rows of a column that a model wants at a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.sequence_batch import SequenceBatch
from samplebatch.batch.space_dict import space_from_dict, space_to_dict
from samplebatch.batch.tree import unflatten
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnTypeError, RowIndexError

_AFTER_LAST = {names.OBS: names.NEXT_OBS, names.PREV_ACTIONS: names.ACTIONS, names.PREV_REWARDS: names.REWARDS}
"""Columns whose row at step t + 1 stands in row t of another: so the step after the last can be seen too."""

_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?[1-9]\d*))?")


@dataclass
class ViewRequirement:
    """View of a column that a model wants at a step, as RLlib's models declare it.

    Parameters
    ----------
    data_col
        The column that it looks at; by default the one of the view's own name.
    space
        Space of one row, carried for the model's use.
    shift
        Steps relative to the present one: an integer, a list of them, or a range `"from:to"` or `"from:to:step"`, both
        ends included.
    index, batch_repeat_value
        Carried for the model's use.
    used_for_compute_actions, used_for_training
        Whether the view is wanted when computing actions, and in training.

    Raises
    ------
    ValueError
        If `shift` is a string that is no such range.

    Examples
    --------
    >>> ViewRequirement("obs", shift="-2:0").shift_arr
    array([-2, -1,  0])
    """

    data_col: str | None = None
    space: Any = None
    shift: int | str | list[int] = 0
    index: int | None = None
    batch_repeat_value: int = 1
    used_for_compute_actions: bool = True
    used_for_training: bool = True
    shift_from: int | None = field(init=False, default=None, compare=False)
    shift_to: int | None = field(init=False, default=None, compare=False)
    shift_step: int | None = field(init=False, default=None, compare=False)
    shift_arr: npt.NDArray[np.int64] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.shift, str):
            match = _RANGE.fullmatch(self.shift)
            if match is None:
                raise ValueError(
                    f"shift must be an integer, a list of them, 'from:to' or 'from:to:step', got {self.shift!r}"
                )
            self.shift_from, self.shift_to, self.shift_step = (int(part or 1) for part in match.groups())
            self.shift_arr = np.arange(self.shift_from, self.shift_to + 1, self.shift_step)
        else:
            self.shift_arr = np.atleast_1d(np.asarray(self.shift, np.int64))

    @classmethod
    def of(cls, requirement: Any) -> ViewRequirement:
        """Return a view requirement, and make one of RLlib's own objects, or anything that has their attributes.

        Raises
        ------
        ColumnTypeError
            If it has no attribute `shift`.

        Examples
        --------
        >>> from types import SimpleNamespace
        >>> ViewRequirement.of(SimpleNamespace(data_col="actions", shift=-1)).shift_arr
        array([-1])
        """
        if isinstance(requirement, cls):
            return requirement
        if not hasattr(requirement, "shift"):
            raise ColumnTypeError(f"a view must be a ViewRequirement or RLlib's, got a {type(requirement).__name__}")
        given = [own.name for own in fields(cls) if own.init and hasattr(requirement, own.name)]
        return cls(**{name: getattr(requirement, name) for name in given})

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as values that JSON can hold, spaces of Gymnasium included, as RLlib lays them out.

        Raises
        ------
        ArgumentError
            If the space is of a kind that has no description.

        Examples
        --------
        >>> ViewRequirement.from_dict(ViewRequirement("obs", shift="-2:0").to_dict()).shift
        '-2:0'
        """
        plain = {own.name: getattr(self, own.name) for own in fields(self) if own.init}
        return {**plain, "space": space_to_dict(self.space)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Make a view requirement from the dict of `to_dict`, ours or RLlib's.

        Raises
        ------
        FormatError
            If the space cannot be made.
        """
        return cls(**{**d, "space": space_from_dict(d.get("space"))})

    def source(self, name: str, index: int | None, count: int) -> tuple[str, npt.NDArray[np.int64]]:
        """Find the column and the rows of it that the view shows at a step.

        Parameters
        ----------
        name
            The view's name.
        index
            The step in [0, count), or None for the step after the last.
        count
            Steps that there are.

        Returns
        -------
        column
            The column to look at.
        steps
            Rows to look at, shape (k,); negative ones lie before the first step.

        Raises
        ------
        RowIndexError
            If there are no steps, or the view looks beyond the last one.

        Examples
        --------
        >>> ViewRequirement(shift="-2:0").source("obs", None, 3)
        ('new_obs', array([0, 1, 2]))
        """
        if not count:
            raise RowIndexError("a batch without steps has none to look at")
        column = self.data_col or name
        if index is not None:
            steps = index + self.shift_arr
            if steps.max(initial=0) >= count:
                raise RowIndexError(
                    f"view {name!r} looks at step {steps.max()} of column {column!r}, which has {count}"
                )
            return column, steps
        if column in _AFTER_LAST:
            return _AFTER_LAST[column], count - 1 + self.shift_arr
        return column, np.minimum(count + self.shift_arr, count - 1)

    def rows(self, column: Column, steps: npt.NDArray[np.int64]) -> Any:
        """Gather rows, zeros for steps before the first: shape (1, ...), or (1, window, ...) for windows."""
        inside = np.flatnonzero(steps >= 0)
        rows = column.take(steps[inside])
        values = (rows if len(inside) == len(steps) else rows.spread(len(steps), inside)).values
        return values if isinstance(self.shift, (int, np.integer)) else values[None]


def view_step(batch: SequenceBatch, requirements: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Gather the views of one step that computing actions needs, nested where their columns are.

    Parameters
    ----------
    batch
        The steps to look at.
    requirements
        The views by name, ours or RLlib's.
    step
        The step in [0, n), or None for the step after the last.

    Raises
    ------
    ColumnNotFoundError
        If a view looks at a column that is not there.
    RowIndexError
        If there are no steps, or a view looks beyond the last one.
    """
    columns = batch._rowwise()
    views = {}
    for name, given in requirements.items():
        requirement = ViewRequirement.of(given)
        if requirement.used_for_compute_actions:
            source, steps = requirement.source(name, step, batch.count)
            rows = {path: requirement.rows(columns[path], steps) for path in batch._leaves(source)}
            views[name] = unflatten(source, batch._nested.get(source), rows.__getitem__)
    return views
