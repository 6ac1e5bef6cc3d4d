"""Plans of random schemas agree with Arrow and the general column readers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.column.plan import Plan, StreamLayout
from samplebatch.service.fragments import as_record_batch

DTYPES = ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "M8[s]", "M8[D]", "m8[ms]")
NAMES = ("a", "b", "obs.x", "seq", "état")


@st.composite
def columns_of_numbers(draw: st.DrawFn, min_rows: int = 1) -> dict[str, npt.NDArray[Any]]:
    rows = draw(st.integers(min_rows, 6))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    columns = {}
    for name in names:
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = (rows, *draw(st.lists(st.integers(1, 3), max_size=3)))
        content = rng.integers(0, 100, shape)
        columns[name] = (content % 2 == 0) if dtype.kind == "b" else content.astype(dtype)
    return columns


def encoded(columns: dict[str, npt.NDArray[Any]]) -> pa.RecordBatch:
    return as_record_batch(SampleBatch(columns).to_arrow())


def assert_same(arrays: dict[str, npt.NDArray[Any]] | None, columns: dict[str, npt.NDArray[Any]]) -> None:
    assert arrays is not None
    assert list(arrays) == list(columns)
    for name, expected in columns.items():
        assert arrays[name].dtype == expected.dtype
        assert arrays[name].shape == expected.shape
        assert np.array_equal(arrays[name], expected)


@given(columns_of_numbers())
def test_a_plan_reads_and_writes_the_same_as_the_general_path(columns: dict[str, npt.NDArray[Any]]) -> None:
    rows = encoded(columns)
    general = {name: column.to_numpy() for name, column in SampleBatch.from_arrow(rows)._all().items()}
    assert_same(general, columns)
    plan = Plan.of(rows.schema)
    assert plan is not None
    assert plan.names == list(columns)
    read = plan.read(rows)
    assert_same(read, general)
    assert plan.fits(columns)
    written = plan.write(columns)
    written.validate(full=True)
    assert written.equals(rows, check_metadata=True)
    assert_same(plan.read(written), columns)


@given(columns_of_numbers(min_rows=2), st.data())
def test_a_plan_declines_data_in_another_layout(columns: dict[str, npt.NDArray[Any]], data: st.DataObject) -> None:
    rows = encoded(columns)
    plan = Plan.of(rows.schema)
    assert plan is not None
    first = data.draw(st.integers(1, rows.num_rows - 1))
    part = rows.slice(first, data.draw(st.integers(1, rows.num_rows - first)))
    assert plan.read(part) is None
    name = data.draw(st.sampled_from(sorted(columns)))
    values = columns[name]
    assert not plan.fits({**columns, name: np.zeros(values.shape, np.int16)})
    assert not plan.fits({**columns, name: values[..., None]})
    assert plan.fits({**columns, name: values[:-1]}) == (len(columns) == 1)
    assert not plan.fits({**columns, "another": values})
    assert not plan.fits({other: array for other, array in columns.items() if other != name})
    assert not plan.fits({f"{other}_": array for other, array in columns.items()})


@given(columns_of_numbers(), st.integers(0, 1000), st.integers(0, 7))
def test_a_stream_layout_writes_streams_that_arrow_reads(
    columns: dict[str, npt.NDArray[Any]], seed: int, shift: int
) -> None:
    rows = encoded(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    stream = np.frombuffer(sink.getvalue(), np.uint8)
    layout = StreamLayout.find(stream, pa.ipc.open_stream(pa.py_buffer(stream)).read_next_batch())
    assert layout is not None
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    others = {name: values[order] for name, values in columns.items()}
    assert layout.fits(others)
    # A stream may start at any address: unaligned columns are copied.
    memory = np.empty(layout.nbytes + shift, np.uint8)
    out = memory[shift:]
    layout.write(others, out)
    assert layout.matches(out)
    assert_same(layout.read(out), others)
    read = pa.ipc.open_stream(pa.py_buffer(out.tobytes())).read_next_batch()
    assert_same({name: c.to_numpy() for name, c in SampleBatch.from_arrow(read)._all().items()}, others)
