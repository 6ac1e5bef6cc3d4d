"""Sample arrays of every supported dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
DATES = [
    "M8[ns]",
    "M8[us]",
    "M8[ms]",
    "M8[s]",
    "M8[m]",
    "M8[D]",
    "M8[Y]",
    "M8[25s]",
    "m8[ns]",
    "m8[s]",
    "m8[h]",
    "m8[D]",
]
TEXT = ["S1", "S7", "U1", "U7"]
DTYPES = [np.dtype(code) for code in (*NUMBERS, *DATES)]
ELEMENTS = [*DTYPES, *map(np.dtype, TEXT)]
ROW_SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (1,), (0,), (2, 0)]


def rows(dtype: Any, n: int, row_shape: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    """Return n rows that cover the range of the dtype, including NaN and NaT."""
    dtype = np.dtype(dtype)
    shape = (n, *row_shape)
    size = int(np.prod(shape))
    rng = np.random.default_rng(seed)
    if dtype.kind in "SU":
        return np.array(["".join(map(chr, rng.integers(97, 123, k % 8))) for k in range(size)], dtype).reshape(shape)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    raw = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    values = raw.view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    if dtype.kind in "mM" and size:
        # Years that every unit can print.
        values = (values.view(np.int64) % 1000).view(dtype)
        values.reshape(-1)[0] = "NaT"
    return values


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare dtype, shape and every byte."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def through_ipc(field: pa.Field, array: pa.Array) -> tuple[pa.Field, pa.Array]:
    """Write an array to an Arrow stream and read it back."""
    sink = pa.BufferOutputStream()
    schema = pa.schema([field])
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([array], schema=schema))
    batch = pa.ipc.open_stream(sink.getvalue()).read_next_batch()
    return batch.schema.field(0), batch.column(0)
