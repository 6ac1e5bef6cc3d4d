"""Summaries of columns for people: as text for terminals, as HTML for notebooks.

Ranges of large columns are those of evenly spaced rows, and marked so: looking at a column never takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn

HEADINGS = ("column", "dtype", "shape", "min", "max", "mean")
"""The cells of a line that are shown."""

_MAX_ELEMENTS = 1 << 20
"""Elements of a column that are looked at."""
_MAX_POINTS = 60
"""Points of a sparkline."""
_SAMPLED = "~"
"""Marks numbers that are those of evenly spaced rows."""
IDS = frozenset({names.EPS_ID, names.ENV_ID, names.AGENT_INDEX, names.UNROLL_ID, names.WEIGHTS_VERSION})
"""Columns that name things: they have a range and a number, but no mean."""


class Line(NamedTuple):
    """One column's line of a summary; statistics are empty where there are none."""

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
    """Summarise columns: name, dtype, shape, and of numbers minimum, maximum and mean; of ids their number.

    Examples
    --------
    >>> describe({"rewards": TensorColumn(np.array([1.0, 2.0, 6.0]))})[0][:6]
    ('rewards', 'float64', '(3,)', '1', '6', '3')
    >>> describe({"eps_id": TensorColumn(np.array([7, 7, 9]))})[0][3:6]
    ('7', '9', '2 ids')
    """
    lines = []
    for name, column in columns.items():
        rows = len(column)
        kept = column.slice(0, 0) if column.kind == "compressed" else column
        every = rows_to_read(rows, column.row_shape)
        if len(every) < rows and isinstance(kept, TensorColumn | TorchColumn):
            kept = kept.take(every)
        lines.append(describe_column(name, kept, rows, column.nbytes))
    return lines


def rows_to_read(rows: int, row_shape: tuple[int | None, ...]) -> npt.NDArray[np.intp]:
    """Choose the rows of a column that are looked at: all, or evenly spaced ones where that would take long.

    >>> rows_to_read(3, (2,)), len(rows_to_read(10**9, ()))
    (array([0, 1, 2]), 1048576)
    """
    elements = max(1, prod(extent for extent in row_shape if extent is not None))
    return np.linspace(0, max(rows - 1, 0), min(rows, max(_MAX_ELEMENTS // elements, 1))).astype(np.intp)


def describe_column(name: str, kept: Column, rows: int, nbytes: int) -> Line:
    """Summarise a column by some of its rows.

    Parameters
    ----------
    name
        The column's name.
    kept
        The rows that are looked at.
    rows
        How many it has.
    nbytes
        Bytes that it occupies.
    """
    extents = [str(rows), *("*" if extent is None else str(extent) for extent in kept.row_shape)]
    shape = f"({', '.join(extents)}{',' if len(extents) == 1 else ''})"
    dtype = str(kept.dtype) if kept.kind in ("tensor", "object") else f"{kept.dtype} ({kept.kind})"
    sampled = _SAMPLED if len(kept) < rows else ""
    numbers = as_numbers(kept)
    line = Line(name, dtype, shape, memory=show_bytes(nbytes))
    if not numbers.size:
        return line
    with np.errstate(all="ignore"):
        low, high = numbers.min(), numbers.max()
        if name in IDS and numbers.dtype.kind in "iu":
            count = f"{len(np.unique(numbers))}{'+' if sampled else ''} ids"
            return line._replace(min=f"{sampled}{low}", max=f"{sampled}{high}", mean=count)
        mean = numbers.mean(dtype=np.float64)
        return line._replace(
            min=sampled + _show(low), max=sampled + _show(high), mean=sampled + _show(mean), points=_points(numbers)
        )


def as_numbers(column: Column) -> npt.NDArray[Any]:
    """Return rows as an array of real numbers, without elements if they are none."""
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
    """Write a size for people.

    >>> show_bytes(999), show_bytes(12_345), show_bytes(7_000_000_000)
    ('999 B', '12.3 kB', '7.0 GB')
    """
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = min(int(np.log10(nbytes)) // 3, 4)
    return f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def as_text(title: str, lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> str:
    """Lay a summary out as aligned lines under a title.

    Examples
    --------
    >>> print(as_text("batch", describe({"t": TensorColumn(np.arange(3))})))
    batch
      column  dtype  shape  min  max  mean
      t       int64  (3,)     0    2     1
    """
    return aligned(title, headings, [[getattr(line, heading) for heading in headings] for line in lines], left=3)


def aligned(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Lay a table out as text: the first cells of each row to the left, the others to the right."""
    table = [headings, *rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    text = [title]
    for row in table:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append(("  " + "  ".join(cells)).rstrip())
    if any(cell.startswith(_SAMPLED) for row in table for cell in row[left:]):
        text.append(f"  {_SAMPLED} of evenly spaced rows")
    return "\n".join(text)


def as_html(title: str, lines: Sequence[Line], headings: Sequence[str] = HEADINGS) -> str:
    """Lay a summary out as an HTML table with a caption, with a sparkline for each column of numbers.

    Examples
    --------
    >>> as_html("batch", describe({"t": TensorColumn(np.arange(3))})).startswith("<table><caption>batch</caption>")
    True
    """
    rows = [[*(escape(getattr(line, heading)) for heading in headings), sparkline(line.points)] for line in lines]
    return html_table(title, [*headings, "over time"], rows)


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay a table out as HTML. The cells are HTML already, title and headings are text."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sparkline(points: Sequence[float]) -> str:
    """Draw numbers as a small line within a page: SVG that takes the colour of the text; "" if fewer than two.

    >>> sparkline([1.0, 3.0]).startswith("<svg")
    True
    """
    finite = [point for point in points if np.isfinite(point)]
    if len(points) < 2 or not finite:
        return ""
    # Halves, whose difference is finite even where the numbers are the largest there are.
    low, high = min(finite) / 2, max(finite) / 2
    height = (high - low) or 1.0
    step = 100 / (len(points) - 1)
    path = " ".join(
        f"{place * step:.1f},{18 - 16 * ((point / 2 - low) / height):.1f}"
        for place, point in enumerate(points)
        if np.isfinite(point)
    )
    line = f'<polyline points="{path}" fill="none" stroke="currentColor"/>'
    return f'<svg width="100" height="20" viewBox="0 0 100 20" role="img">{line}</svg>'
