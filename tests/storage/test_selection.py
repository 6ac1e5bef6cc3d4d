"""Filters of rows: those that NumPy compares are those that Arrow's engine finds."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from samplebatch.errors import ArgumentError
from samplebatch.storage.tables.batches import RowFilter

DTYPES = [np.dtype(name) for name in ("i1", "u2", "i4", "i8", "u8", "f4", "f8")]
SIGNS = ("==", "=", "!=", "<", ">", "<=", ">=")


@st.composite
def filtered_tables(draw: st.DrawFn) -> tuple[pa.Table, list[list[tuple[str, str, Any]]]]:
    """Draw a table of numbers with missing values, and conditions on it."""
    rows = draw(st.integers(0, 8))
    columns: dict[str, Any] = {}
    for name in "ab":
        dtype = draw(st.sampled_from(DTYPES))
        # Arrow's engine compares no larger numbers.
        values = draw(hnp.arrays(dtype, rows, elements={"max_value": 2**63 - 1} if dtype == np.uint64 else None))
        missing = draw(st.none() | hnp.arrays(np.bool_, rows))
        columns[name] = pa.chunked_array([pa.array(values[part], mask=None if missing is None else missing[part])
                                          for part in (slice(0, rows // 2), slice(rows // 2, None))])  # fmt: skip
    table = pa.table(columns)

    def condition(name: str) -> tuple[str, str, Any]:
        arrow = table.schema.field(name).type
        stored = [value for value in table.column(name).to_pylist() if value is not None]
        some = st.integers(-(2**62), 2**62) if pa.types.is_integer(arrow) else st.floats()
        return name, draw(st.sampled_from(SIGNS)), draw(st.sampled_from(stored) | some if stored else some)

    groups = draw(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=2), min_size=1, max_size=2))
    return table, [[condition(name) for name in group] for group in groups]


@given(filtered_tables())
def test_selected_rows_agree_with_arrow(example: tuple[pa.Table, list[list[tuple[str, str, Any]]]]) -> None:
    table, filters = example
    condition = RowFilter(filters, table.schema, "the table")
    numbered = table.append_column("row", pa.array(np.arange(table.num_rows)))
    expected = numbered.filter(condition.expression).column("row").to_pylist()
    assert condition.rows(table).tolist() == expected


def test_numbers_of_64_bits_are_compared_as_such_with_columns_of_32() -> None:
    table = pa.table({"rewards": np.array([0.1, 0.5], np.float32)})
    assert RowFilter([("rewards", "==", 0.1)], table.schema, "the table").rows(table).tolist() == []
    assert RowFilter([("rewards", "==", 0.5)], table.schema, "the table").rows(table).tolist() == [1]


def test_values_that_no_column_can_contain_are_rejected() -> None:
    table = pa.table({"t": np.array([2**63], np.uint64)})
    with pytest.raises(ArgumentError, match="filters must compare columns with values of their types"):
        RowFilter([("t", "==", 2**65)], table.schema, "the table")
