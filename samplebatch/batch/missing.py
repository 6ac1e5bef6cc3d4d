"""Columns that only some batches have: refused, dropped or filled up before the batches are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from samplebatch import names
from samplebatch.batch.sequence_batch import SequenceBatch
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.errors import ColumnMismatchError

B = TypeVar("B", bound=SequenceBatch)

Missing = Literal["error", "drop", "zero"]
"""Treatment of columns that only some batches have."""


def level(parts: Sequence[B], missing: Missing) -> list[B]:
    """Give batches the same columns, as views: those of all of them, or, with `"zero"`, those of any.

    Rows that are filled up are zeros, None in columns of objects.

    Raises
    ------
    ColumnMismatchError
        If `missing` is `"error"` and the columns differ; names those that only some have. If `missing` is `"zero"` and
        batches are time-major, or a nested column is there in part.
    """
    groups = [part._all() for part in parts]
    models: dict[str, Column] = {}
    for group in groups:
        for name, column in group.items():
            models.setdefault(name, column)
    some = sorted(name for name in models if not all(name in group for group in groups))
    if missing == "error":
        raise ColumnMismatchError(
            f"batches to be joined must have the same columns, only some of them have {', '.join(map(repr, some))}; "
            "missing='drop' leaves these out, missing='zero' fills them up"
        )
    if missing == "drop":
        tops = {name for part in parts for name in part if not all(name in other for other in parts)}
        return [part.drop(*(name for name in part if name in tops)) for part in parts]
    nested = {top: structure for part in parts for top, structure in part._nested.items()}
    if parts[0]._flags.time_major or any(top in group for top in nested for group in groups):
        raise ColumnMismatchError(
            f"column {some[0]!r} must be in all batches: those of time-major ones, and nested ones that are there in "
            "part, cannot be filled up"
        )
    levelled = []
    for part, group in zip(parts, groups, strict=True):
        columns = {name: group[name] if name in group else _fill(models[name], _rows_of(part, name)) for name in models}
        new = part._with(columns)
        if nested:
            new._nested = {**nested, **part._nested}
        levelled.append(new)
    return levelled


def _rows_of(part: SequenceBatch, name: str) -> int:
    """Return the rows that a column of a name must have."""
    if not part._has_sequences:
        return part.count
    sequences = len(part.column(names.SEQ_LENS))
    return sequences if names.is_state_in(name) else part._stored_rows(sequences)


def _fill(model: Column, rows: int) -> Column:
    """Make a column of zeros that is like another."""
    none, nowhere = model.slice(0, 0), np.empty(0, np.intp)
    if isinstance(none, CompressedColumn):
        # It spreads into plain rows, which compressed ones could not be joined to.
        return CompressedColumn.compress(none.spread(rows, nowhere))
    return none.spread(rows, nowhere)
