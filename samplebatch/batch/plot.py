"""Pictures of columns over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Part(NamedTuple):
    """Columns that are drawn over the same steps: those of a batch, or of one policy."""

    prefix: str
    """Stands before the columns' names."""
    columns: Mapping[str, Column]
    """Columns with a row per step."""
    ends: npt.NDArray[Any]
    """The steps before which an episode ends."""


def draw_columns(parts: Sequence[Part], *, chosen: bool) -> Figure:
    """Draw columns over time; see `SampleBatch.plot`.

    Parameters
    ----------
    parts
        The columns.
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

    most = max(1, _MAX_COLUMNS // max(len(parts), 1))
    drawn = [line for part in parts for line in _lines(part, None if chosen else most)]
    # Not through pyplot: that keeps figures, and may open windows.
    figure = Figure(figsize=(10, 0.6 + 1.4 * max(len(drawn), 1)), layout="constrained")
    rows = figure.subplots(max(len(drawn), 1), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, steps, numbers, ends) in zip(rows, drawn, strict=False):
        _draw(axes, name, steps, numbers)
        if len(ends) <= _MAX_ENDS:
            axes.vlines(ends[:-1] - 0.5, 0, 1, transform=axes.get_xaxis_transform(), color="0.8", linewidth=0.8)
    rows[-1].set_xlabel("step")
    return figure


_Line = tuple[str, npt.NDArray[np.intp], npt.NDArray[Any], npt.NDArray[Any]]


def _lines(part: Part, most: int | None) -> list[_Line]:
    """Pick the columns of a part that are drawn, with steps, numbers and ends; no more than `most`, if given."""
    lines: list[_Line] = []
    for name, column in part.columns.items():
        if most is not None and (name in IDS or len(lines) == most):
            continue
        steps = np.linspace(0, max(len(column) - 1, 0), min(len(column), _MAX_STEPS)).astype(np.intp)
        numbers = as_numbers(column.take(steps)) if column.kind != "compressed" else np.empty(0)
        if numbers.ndim and len(numbers) == len(steps):
            lines.append((part.prefix + name, steps, numbers, part.ends))
        elif most is None:
            raise ColumnTypeError(f"column {name!r} must be of numbers to be drawn, it is a {column.kind} column")
    return lines


def _draw(axes: Axes, name: str, steps: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> None:
    flat = numbers.reshape(len(numbers), -1) if len(numbers) else numbers.reshape(0, 1)
    lines = flat if flat.shape[1] <= _MAX_LINES else flat.mean(1, dtype=np.float64, keepdims=True)
    for line in lines.T:
        axes.plot(steps, line.astype(np.float64), linewidth=1)
    axes.set_ylabel(name if lines is flat else f"{name}\n(mean)")
