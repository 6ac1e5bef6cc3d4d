"""Summaries of columns for terminals and notebooks, plots over time, and pandas data frames.

To bound the run time, statistics of large columns are computed from evenly spaced rows and marked with `~`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import make_dataclass
from keyword import iskeyword
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.batch.delivery import column_of_arrays
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnTypeError, require
from samplebatch.names import for_html, for_matplotlib, for_terminal

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HEADINGS = ("column", "dtype", "shape", "min", "max", "mean")
"""The cells of a line that are shown."""

_MAX_ELEMENTS = 1 << 20
"""Maximum number of elements read per column."""
_MAX_POINTS = 60
"""Points of a sparkline."""
_MAX_TITLE = 400
"""Characters of a title that are shown."""
_SAMPLED = "~"
"""Prefix of statistics that were computed from evenly spaced rows."""
IDS = frozenset({names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.UNROLL_ID, names.WEIGHTS_VERSION})
"""Columns of ids: summaries show their range and the number of distinct ids, but no mean."""


class Line(NamedTuple):
    """Summary line of one column; statistics are empty for columns without numbers."""

    column: str
    dtype: str
    shape: str
    min: str = ""
    max: str = ""
    mean: str = ""
    memory: str = ""
    points: tuple[float, ...] = ()
    """Means of evenly spaced rows, for a sparkline."""


def describe(columns: Mapping[str, Column]) -> list[Line]:
    """Summarise columns: name, dtype and shape; minimum, maximum and mean of numbers; number of distinct ids.

    Statistics ignore NaN; the mean is followed by the number of NaN and the first row with NaN.

    >>> describe({"rewards": TensorColumn(np.array([1.0, 2.0, 6.0]))})[0][:6]
    ('rewards', 'float64', '(3,)', '1', '6', '3')
    >>> describe({"eps_id": TensorColumn(np.array([7, 7, 9]))})[0][3:6]
    ('7', '9', '2 ids')
    """
    lines = []
    for name, column in columns.items():
        rows = len(column)
        sampled = column.slice(0, 0) if column.kind == "compressed" else column
        every = rows_to_read(rows, column.row_shape)
        if len(every) < rows and isinstance(sampled, TensorColumn | TorchColumn):
            sampled = sampled.take(every)
        lines.append(describe_column(name, sampled, rows, column.nbytes))
    return lines


def rows_to_read(rows: int, row_shape: tuple[int | None, ...]) -> npt.NDArray[np.intp]:
    """Return the indices of the rows that are summarised: all rows, or evenly spaced rows of a large column.

    >>> rows_to_read(3, (2,)), len(rows_to_read(10**9, ()))
    (array([0, 1, 2]), 1048576)
    """
    elements = max(1, prod(extent for extent in row_shape if extent is not None))
    return np.linspace(0, max(rows - 1, 0), min(rows, max(_MAX_ELEMENTS // elements, 1))).astype(np.intp)


def describe_column(name: str, column: Column, rows: int, nbytes: int) -> Line:
    """Summarise a column based on a selection of its rows.

    column: selected rows.
    """
    extents = [str(rows), *("*" if extent is None else str(extent) for extent in column.row_shape)]
    shape = f"({', '.join(extents)}{',' if len(extents) == 1 else ''})"
    dtype = str(column.dtype) if column.kind in ("tensor", "object") else f"{column.dtype} ({column.kind})"
    if isinstance(column, TextColumn):
        dtype = column.content
    sampled = _SAMPLED if len(column) < rows else ""
    numbers = as_numbers(column)
    line = Line(name, dtype, shape, memory=show_bytes(nbytes))
    if not numbers.size:
        return line
    with np.errstate(all="ignore"):
        low, high = numbers.min(), numbers.max()
        if name in IDS and numbers.dtype.kind in "iu":
            count = f"{len(np.unique(numbers))}{'+' if sampled else ''} ids"
            return line._replace(min=f"{sampled}{low}", max=f"{sampled}{high}", mean=count)
        mark = ""
        points = _points(numbers)
        if np.isnan(low):
            is_nan = np.isnan(numbers)
            nan_rows = np.flatnonzero(is_nan.reshape(len(numbers), -1).any(1))
            # The values of skipped rows are unknown: the number is a lower bound.
            where = "" if sampled else f" from row {nan_rows[0]}"
            mark = f" ({np.count_nonzero(is_nan)}{'+' if sampled else ''} NaN{where})"
            numbers = numbers[~is_nan]
            if not numbers.size:
                return line._replace(mean=mark.strip(), points=points)
            low, high = numbers.min(), numbers.max()
        mean = numbers.mean(dtype=np.float64)
        return line._replace(
            min=sampled + _show(low), max=sampled + _show(high), mean=sampled + _show(mean) + mark, points=points
        )


def as_numbers(column: Column) -> npt.NDArray[Any]:
    """Return rows as an array of real numbers; empty if the rows are not real numbers."""
    if isinstance(column, TorchColumn) and not column.values.is_complex():
        values = column.values.detach().cpu()
        array: npt.NDArray[Any] = (values.double() if values.is_floating_point() else values).numpy()
        return array
    if isinstance(column, TensorColumn) and column.dtype.kind in "biuf":
        return column.values
    return np.empty(0)


def _points(numbers: npt.NDArray[Any]) -> tuple[float, ...]:
    rows = numbers[np.linspace(0, len(numbers) - 1, min(len(numbers), _MAX_POINTS)).astype(np.intp)]
    return tuple(rows.reshape(len(rows), -1).mean(1, dtype=np.float64).tolist())


def _show(value: object) -> str:
    return f"{float(value):.5g}"  # type: ignore[arg-type]


def show_bytes(nbytes: float) -> str:
    """Format a size in bytes with its unit.

    >>> show_bytes(999), show_bytes(12_345), show_bytes(7_000_000_000)
    ('999 B', '12.3 kB', '7.0 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = min(int(np.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def as_text(title: str, lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> str:
    """Format a summary as aligned lines under a title.

    >>> print(as_text("batch", describe({"t": TensorColumn(np.arange(3))})))
    batch
      column  dtype  shape  min  max  mean
      t       int64  (3,)     0    2     1
    """
    return aligned(title, headings, [[getattr(line, heading) for heading in headings] for line in lines], left=3)


def aligned(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Format a table as text; the first `left` columns are left-aligned, all other columns right-aligned."""
    table = [headings, *([for_terminal(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    text = [for_terminal(title, _MAX_TITLE)]
    for row in table:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    if any(cell.startswith(_SAMPLED) for row in table for cell in row[left:]):
        text.append(f"  {_SAMPLED} of evenly spaced rows")
    return "\n".join(text)


def as_html(title: str, lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> str:
    """Format a summary as an HTML table with a caption and one sparkline per numeric column.

    >>> as_html("batch", describe({"t": TensorColumn(np.arange(3))})).startswith(
    ...     "<table><caption>batch</caption>"
    ... )
    True
    """
    rows = [[*(for_html(getattr(line, heading)) for heading in headings), sparkline(line.points)] for line in lines]
    return html_table(title, [*headings, "over time"], rows)


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table as HTML; cells are HTML, title and headings are escaped."""
    head = "".join(f"<th>{for_html(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    caption = for_html(title, _MAX_TITLE)
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sparkline(points: Sequence[float]) -> str:
    """Return an inline SVG sparkline in the text colour; empty for fewer than two points.

    >>> sparkline([1.0, 3.0]).startswith("<svg")
    True
    """
    finite = [point for point in points if np.isfinite(point)]
    if len(points) < 2 or not finite:
        return ""
    # Halved, because the difference of the largest floats would overflow.
    low, high = min(finite) / 2, max(finite) / 2
    height = (high - low) or 1.0
    step = 100 / (len(points) - 1)
    path = " ".join(
        f"{index * step:.1f},{18 - 16 * ((point / 2 - low) / height):.1f}"
        for index, point in enumerate(points)
        if np.isfinite(point)
    )
    line = f'<polyline points="{path}" fill="none" stroke="currentColor"/>'
    return f'<svg width="100" height="20" viewBox="0 0 100 20" role="img">{line}</svg>'


_MAX_COLUMNS = 12
_MAX_STEPS = 2000
"""Maximum number of plotted steps; more points cannot be distinguished."""
_MAX_LINES = 8
"""Maximum number of lines per column; of rows with more numbers, the mean is plotted."""
_MAX_ENDS = 200
"""Maximum number of episode ends that are drawn; more would hide the lines."""


class Part(NamedTuple):
    """Columns of one batch, or of one policy, that are plotted over the same steps."""

    prefix: str
    """Prefix of the columns' names."""
    columns: Mapping[str, Column]
    """Columns with a row per step."""
    ends: npt.NDArray[Any]
    """The steps before which an episode ends."""


def draw_columns(parts: Sequence[Part], *, chosen: bool) -> Figure:
    """Plot columns over time; see `SampleBatch.plot`.

    Raises MissingExtraError if matplotlib is not installed. Raises ColumnTypeError if a requested column is
    not numeric.

    chosen: whether the caller requested the columns by name, so that a non-numeric column is an error.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    max_columns = max(1, _MAX_COLUMNS // max(len(parts), 1))
    lines = [line for part in parts for line in _lines(part, None if chosen else max_columns)]
    # Not pyplot, because pyplot retains figures and may open windows.
    figure = Figure(figsize=(10, 0.6 + 1.4 * max(len(lines), 1)), layout="constrained")
    rows = figure.subplots(max(len(lines), 1), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, steps, numbers, ends) in zip(rows, lines, strict=False):
        _draw(axes, name, steps, numbers)
        if len(ends) <= _MAX_ENDS:
            axes.vlines(ends[:-1] - 0.5, 0, 1, transform=axes.get_xaxis_transform(), color="0.8", linewidth=0.8)
    rows[-1].set_xlabel("step")
    return figure


_Line = tuple[str, npt.NDArray[np.intp], npt.NDArray[Any], npt.NDArray[Any]]


def _lines(part: Part, max_columns: int | None) -> list[_Line]:
    """Return the plotted lines of at most `max_columns` columns: label, steps, values and episode ends."""
    lines: list[_Line] = []
    for name, column in part.columns.items():
        if max_columns is not None and (name in IDS or len(lines) == max_columns):
            continue
        steps = np.linspace(0, max(len(column) - 1, 0), min(len(column), _MAX_STEPS)).astype(np.intp)
        numbers = as_numbers(column.take(steps)) if column.kind != "compressed" else np.empty(0)
        if numbers.ndim and len(numbers) == len(steps):
            lines.append((part.prefix + name, steps, numbers, part.ends))
        elif max_columns is None:
            raise ColumnTypeError(f"column {name!r} must contain numbers to be plotted, got a {column.kind} column")
    return lines


def _draw(axes: Axes, name: str, steps: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> None:
    flat = numbers.reshape(len(numbers), -1) if len(numbers) else numbers.reshape(0, 1)
    lines = flat if flat.shape[1] <= _MAX_LINES else flat.mean(1, dtype=np.float64, keepdims=True)
    for line in lines.T:
        axes.plot(steps, line.astype(np.float64), linewidth=1)
    label = for_matplotlib(name)
    axes.set_ylabel(label if lines is flat else f"{label}\n(mean)")


def data_frame(columns: Mapping[str, Column]) -> pd.DataFrame:
    """Create a data frame from columns with one row per step.

    Raises MissingExtraError if pandas is not installed.
    """
    pandas = require("pandas", "pandas")
    return pandas.DataFrame({name: cells_of(column) for name, column in columns.items()}, copy=False)


def stacked_frame(frames: Mapping[Any, pd.DataFrame], key: str) -> pd.DataFrame:
    """Concatenate data frames, with each frame's key in the first column."""
    pandas = require("pandas", "pandas")
    parts = []
    for value, frame in frames.items():
        frame.insert(0, key, [value] * len(frame))
        parts.append(frame)
    return pandas.concat(parts, ignore_index=True) if parts else pandas.DataFrame({key: []})


def cells_of(column: Column) -> Any:
    """Return the rows of a column as data frame cells: numbers, arrays or objects."""
    if isinstance(column, TextColumn):
        objects = column.to_objects()
        return objects if objects.ndim == 1 else np.fromiter(objects, object, len(column))
    values = (column.decompress() if isinstance(column, CompressedColumn) else column_of_arrays(column)).values
    return values if isinstance(values, np.ndarray) and values.ndim == 1 else np.fromiter(values, object, len(column))


def records(
    fields: Sequence[str], columns: Mapping[str, Column], nest: Callable[[dict[str, Any]], dict[str, Any]], count: int
) -> npt.NDArray[Any]:
    """Create an array of records, one record per step; `nest` maps a step's values to the record's fields."""
    for name in fields:
        if not name.isidentifier() or iskeyword(name):
            raise ColumnTypeError(f"column {name!r} must be a Python identifier to be a record field; call to_pandas()")
    record = make_dataclass("Record", fields)
    # As in `to_pandas`: no tensors, which pandas would store as objects.
    cells = zip(*map(cells_of, columns.values()), strict=True) if count and columns else ()
    steps = [record(**nest(dict(zip(columns, row, strict=True)))) for row in cells]
    return np.fromiter(steps, object, len(steps))
