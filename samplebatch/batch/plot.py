"""Pictures of columns over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.summary import IDS, as_numbers
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnTypeError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 12
_MAX_STEPS = 2000
"""Steps that are drawn; more are no wider than the picture."""
_MAX_LINES = 8
"""Lines of a column; rows of more numbers are drawn by their mean."""
_MAX_ENDS = 200
"""Ends of episodes that are drawn; more would hide the lines."""


def draw_columns(columns: Mapping[str, Column], ends: npt.NDArray[Any], *, chosen: bool) -> Figure:
    """Draw columns over time; see `SampleBatch.plot`.

    Parameters
    ----------
    columns
        Columns with a row per step.
    ends
        The steps before which an episode ends.
    chosen
        Whether all columns were asked for, so that one without numbers is an error.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ColumnTypeError
        If a column that was asked for is not of numbers; names it.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    drawn: dict[str, tuple[Any, Any]] = {}
    for name, column in columns.items():
        steps = np.linspace(0, max(len(column) - 1, 0), min(len(column), _MAX_STEPS)).astype(np.intp)
        numbers = as_numbers(column.take(steps)) if column.kind != "compressed" else np.empty(0)
        if numbers.ndim and len(numbers) == len(steps):
            drawn[name] = steps, numbers
        elif chosen:
            raise ColumnTypeError(f"column {name!r} must be of numbers to be drawn, it is a {column.kind} column")
    if not chosen:
        drawn = dict([item for item in drawn.items() if item[0] not in IDS][:_MAX_COLUMNS])
    # Not through pyplot: that keeps figures, and may open windows.
    figure = Figure(figsize=(10, 0.6 + 1.4 * max(len(drawn), 1)), layout="constrained")
    rows = figure.subplots(max(len(drawn), 1), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, (steps, numbers)) in zip(rows, drawn.items(), strict=False):
        _draw(axes, name, steps, numbers)
        if len(ends) <= _MAX_ENDS:
            axes.vlines(ends[:-1] - 0.5, 0, 1, transform=axes.get_xaxis_transform(), color="0.8", linewidth=0.8)
    rows[-1].set_xlabel("step")
    return figure


def _draw(axes: Axes, name: str, steps: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> None:
    flat = numbers.reshape(len(numbers), -1) if len(numbers) else numbers.reshape(0, 1)
    lines = flat if flat.shape[1] <= _MAX_LINES else flat.mean(1, dtype=np.float64, keepdims=True)
    for line in lines.T:
        axes.plot(steps, line.astype(np.float64), linewidth=1)
    axes.set_ylabel(name if lines is flat else f"{name}\n(mean)")
