"""Cached plans of schemas write and read the same columns as the general path."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.column.plan import Plan
from samplebatch.service.fragments import as_record_batch
from tests.service.table_rows import lengthened

ROWS = 5
VALUES = {
    "numbers": np.arange(ROWS),
    "tensors": np.arange(ROWS * 6.0).reshape(ROWS, 3, 2),
    "flags": np.arange(ROWS) % 2 == 0,
    "rows of flags": np.ones((ROWS, 4), bool),
    "complex": np.arange(ROWS) + 1j,
    "rows of complex": np.ones((ROWS, 2), np.complex64),
    "times": np.arange(ROWS).astype("M8[s]"),
    "days": np.arange(ROWS).astype("M8[D]"),
    "rows of spans": np.arange(2 * ROWS).astype("m8[ms]").reshape(ROWS, 2),
    "halves": np.ones(ROWS, np.float16),
}


def plan_of(**columns: Any) -> tuple[Plan | None, pa.RecordBatch, dict[str, npt.NDArray[Any]]]:
    rows = as_record_batch(SampleBatch(**columns).to_arrow())
    read = SampleBatch.from_arrow(rows)._all()
    return Plan.of(rows.schema), rows, {name: column.to_numpy() for name, column in read.items()}


@pytest.mark.parametrize("kind", VALUES)
def test_columns_of_every_dtype_round_trip(kind: str) -> None:
    plan, rows, arrays = plan_of(a=VALUES[kind], b=np.zeros(ROWS))
    assert plan is not None
    assert plan.fits(arrays)
    result = plan.write(arrays)
    assert result.equals(rows, check_metadata=True)
    result.validate(full=True)
    back = plan.read(result)
    assert back is not None
    assert back["a"].dtype == arrays["a"].dtype
    assert np.array_equal(back["a"], arrays["a"])


def test_a_plan_works_for_any_number_of_rows() -> None:
    plan, _, _ = plan_of(a=np.zeros((2, 3)), b=np.arange(2))
    assert plan is not None
    columns = {"a": np.ones((7, 3)), "b": np.arange(7)}
    assert plan.fits(columns)
    back = plan.read(plan.write(columns))
    assert back is not None
    assert back["b"].tolist() == list(range(7))


@pytest.mark.parametrize(
    "columns",
    [
        {"a": np.zeros((2, 3))},
        {"b": np.arange(2), "a": np.zeros((2, 3))},
        {"a": np.zeros((2, 4)), "b": np.arange(2)},
        {"a": np.zeros((2, 3), np.float32), "b": np.arange(2)},
        {"a": np.zeros((2, 3)), "b": np.arange(3)},
        {"a": np.zeros((3, 2)).T, "b": np.arange(2)},
        {"a": np.zeros((0, 3)), "b": np.arange(0)},
    ],
)
def test_other_columns_do_not_match(columns: dict[str, npt.NDArray[Any]]) -> None:
    plan, _, _ = plan_of(a=np.zeros((2, 3)), b=np.arange(2))
    assert plan is not None
    assert not plan.fits(columns)


def test_objects_and_ragged_rows_have_no_plan() -> None:
    assert plan_of(a=np.array([{"x": 1}, {}], object))[0] is None
    assert plan_of(a=[np.zeros(2), np.zeros(3)])[0] is None


def test_arrow_data_of_another_layout_is_not_read() -> None:
    plan, rows, arrays = plan_of(a=np.arange(321))
    assert plan is not None
    assert plan.read(rows.slice(1)) is None
    assert plan.read(rows.slice(0, 0)) is None
    assert plan.read(rows.replace_schema_metadata({})) is None
    nulls = pa.Array.from_buffers(pa.int64(), 321, [pa.py_buffer(bytes(64)), pa.py_buffer(arrays["a"])])
    assert plan.read(pa.RecordBatch.from_arrays([nulls], schema=rows.schema)) is None
    assert plan.read(lengthened(rows)) is None
