"""Summaries of columns for people: as text for terminals, as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

import numpy as np

from samplebatch.column.interface import Column
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn

HEADINGS = ("column", "dtype", "shape", "min", "max", "mean")


class Line(NamedTuple):
    """One column's line of a summary; statistics are empty where there are none."""

    column: str
    dtype: str
    shape: str
    min: str
    max: str
    mean: str


def describe(columns: Mapping[str, Column]) -> list[Line]:
    """Summarise columns: name, dtype, shape, and of numbers minimum, maximum and mean.

    Examples
    --------
    >>> describe({"rewards": TensorColumn(np.array([1.0, 2.0, 6.0]))})
    [Line(column='rewards', dtype='float64', shape='(3,)', min='1', max='6', mean='3')]
    """
    return [_line(name, column) for name, column in columns.items()]


def _line(name: str, column: Column) -> Line:
    extents = [str(len(column)), *("*" if extent is None else str(extent) for extent in column.row_shape)]
    shape = f"({', '.join(extents)}{',' if len(extents) == 1 else ''})"
    dtype = str(column.dtype) if column.kind in ("tensor", "object") else f"{column.dtype} ({column.kind})"
    return Line(name, dtype, shape, *_statistics(column))


def _statistics(column: Column) -> tuple[str, str, str]:
    if isinstance(column, TorchColumn):
        if not column.values.numel() or column.values.is_complex():
            return "", "", ""
        wide = column.values.detach().cpu().double()
        return _number(wide.min()), _number(wide.max()), _number(wide.mean())
    if not isinstance(column, TensorColumn) or column.dtype.kind not in "biuf" or not column.values.size:
        return "", "", ""
    values = column.values
    with np.errstate(all="ignore"):
        return _number(values.min()), _number(values.max()), _number(values.mean(dtype=np.float64))


def _number(value: object) -> str:
    return f"{float(value):.5g}"  # type: ignore[arg-type]


def as_text(title: str, columns: Mapping[str, Column]) -> str:
    """Lay a summary out as aligned lines under a title.

    Examples
    --------
    >>> print(as_text("batch", {"t": TensorColumn(np.arange(3))}))
    batch
      column  dtype  shape  min  max  mean
      t       int64  (3,)     0    2     1
    """
    lines = [Line(*HEADINGS), *describe(columns)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = [title]
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
        text.append(("  " + "  ".join(left + right)).rstrip())
    return "\n".join(text)


def as_html(title: str, columns: Mapping[str, Column]) -> str:
    """Lay a summary out as an HTML table with a caption.

    Examples
    --------
    >>> as_html("batch", {"t": TensorColumn(np.arange(3))}).startswith("<table><caption>batch</caption>")
    True
    """
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in describe(columns)]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
