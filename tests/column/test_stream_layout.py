"""Streams with a validated layout are viewed; Arrow reads all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.column.plan import Bytes, StreamLayout, head_of

COLUMNS = {
    "obs": np.arange(15, dtype=np.float32).reshape(5, 3),
    "done": np.array([True, False, False, True, True]),
    "z": np.arange(5) + 1j,
    "day": np.arange(5).astype("M8[D]"),
    "when": np.arange(5).astype("M8[s]"),
}


def stream_of(rows: Any, **options: Any) -> Bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(rows)
    return np.frombuffer(sink.getvalue(), np.uint8).copy()


def find(stream: Bytes) -> StreamLayout | None:
    rows = pa.ipc.open_stream(stream).read_next_batch()
    return StreamLayout.find(stream, rows)


def found_in(table: Any, **options: Any) -> StreamLayout:
    layout = find(stream_of(table, **options))
    assert layout is not None
    return layout


@pytest.fixture
def layout() -> StreamLayout:
    return found_in(SampleBatch(COLUMNS).to_arrow())


def test_a_layout_writes_the_same_stream_as_arrow(layout: StreamLayout) -> None:
    others = {name: values[::-1] for name, values in COLUMNS.items()}
    assert layout.fits(others)
    out = np.full(layout.nbytes, 0xFF, np.uint8)
    layout.write(others, out)
    assert out.tobytes() == stream_of(SampleBatch(others).to_arrow()).tobytes()


def test_columns_are_viewed_without_copies(layout: StreamLayout) -> None:
    others = {name: values[::-1] for name, values in COLUMNS.items()}
    stream = stream_of(SampleBatch(others).to_arrow())
    stream.flags.writeable = False
    assert head_of(stream) == layout.head
    assert layout.matches(stream)
    actual = layout.read(stream)
    for name, values in others.items():
        assert actual[name].dtype == values.dtype
        assert np.array_equal(actual[name], values)
        assert np.shares_memory(actual[name], stream)
        assert not actual[name].flags.writeable


def test_columns_at_an_odd_address_are_copied(layout: StreamLayout) -> None:
    memory = np.empty(layout.nbytes + 1, np.uint8)
    layout.write(COLUMNS, memory[1:])
    actual = layout.read(memory[1:])
    assert all(actual[name].flags.aligned and np.array_equal(actual[name], values) for name, values in COLUMNS.items())


@pytest.mark.parametrize(
    "other",
    [
        {**COLUMNS, "obs": np.zeros((5, 4), np.float32)},
        {**COLUMNS, "obs": np.zeros((5, 3))},
        {name: values[:4] for name, values in COLUMNS.items()},
        {**COLUMNS, "more": np.zeros(5)},
        {name: COLUMNS[name] for name in list(COLUMNS)[:-1]},
        {("sight" if name == "obs" else name): values for name, values in COLUMNS.items()},
        {name: COLUMNS[name] for name in reversed(COLUMNS)},
    ],
    ids=["shape", "dtype", "rows", "one more", "one less", "name", "order"],
)
def test_other_columns_do_not_match(layout: StreamLayout, other: dict[str, Any]) -> None:
    assert not layout.fits(other)
    assert head_of(stream_of(SampleBatch(other).to_arrow())) != layout.head


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"a": [1, 2, 3], "b": [[1], [2, 3], []]}),
        pa.table({"a": pa.array([True, False])}),
        pa.table({"infos": pa.array([{"lives": 1}, {"lives": 2}])}),
    ],
    ids=["lists", "bits", "structs"],
)
def test_columns_that_are_not_numeric_have_no_layout(table: Any) -> None:
    assert find(stream_of(table)) is None


def test_columns_with_a_bitmap_of_nulls_have_no_layout() -> None:
    # Arrow counts the nulls of such a column by its bitmap, which is no part of the head.
    values = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x07"), pa.py_buffer(np.arange(3))], null_count=-1)
    rows = pa.RecordBatch.from_arrays([values], names=["a"])
    columns = SampleBatch.from_arrow(rows)._all()
    memory = columns["a"].values
    stream = np.frombuffer(stream_of(SampleBatch(a=memory).to_arrow()), np.uint8)
    read = pa.ipc.open_stream(stream).read_next_batch()
    assert StreamLayout.find(stream, read) is not None
    assert StreamLayout.find(stream, rows) is None


def test_compressed_columns_have_no_layout() -> None:
    assert find(stream_of(pa.table({"a": np.zeros(1000)}), compression="zstd")) is None


def test_declared_buffer_lengths_must_match_the_layout() -> None:
    # Eight bytes before each buffer say how long it is; -1 says that it lies there as it is.
    noise = np.frombuffer(np.random.default_rng(1).bytes(8000), np.int64)
    stream = stream_of(pa.table({"a": noise}), compression="zstd")
    start = len(head_of(stream) or b"")
    stream[start : start + 8] = np.frombuffer(np.int64(-1).tobytes(), np.uint8)
    layout = find(stream)
    assert layout is not None
    assert layout.matches(stream)
    stream[start : start + 8] = np.frombuffer(np.int64(8000).tobytes(), np.uint8)
    assert head_of(stream) == layout.head
    assert not layout.matches(stream)


def test_a_stream_whose_other_bytes_differ_does_not_match(layout: StreamLayout) -> None:
    stream = np.empty(layout.nbytes, np.uint8)
    layout.write(COLUMNS, stream)
    stream[-1] ^= 1
    assert head_of(stream) == layout.head
    assert not layout.matches(stream)


def test_a_truncated_stream_does_not_match(layout: StreamLayout) -> None:
    stream = np.empty(layout.nbytes, np.uint8)
    layout.write(COLUMNS, stream)
    assert not layout.matches(stream[:-1])


@pytest.mark.parametrize("length", [0, 3, 8, 40, 200])
def test_incomplete_messages_have_no_stream_header(layout: StreamLayout, length: int) -> None:
    assert head_of(np.frombuffer(layout.head, np.uint8)[:length]) is None


@pytest.mark.parametrize("described", [-(1 << 31), -8, 0, 1 << 30])
def test_a_message_of_an_impossible_length_has_no_stream_header(layout: StreamLayout, described: int) -> None:
    stream = np.frombuffer(layout.head, np.uint8).copy()
    stream[4:8] = np.frombuffer(np.int32(described).tobytes(), np.uint8)
    assert head_of(stream) is None
