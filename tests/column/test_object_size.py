"""Estimates of the memory of Python objects from an Arrow array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.column.objects import object_nbytes

STRINGS = pa.array(["a" * (i % 50) for i in range(1000)])
ARRAYS = {
    "integers": pa.array(np.arange(1000) + 1000),
    "strings": STRINGS,
    "large strings": STRINGS.cast(pa.large_string()),
    "views": STRINGS.cast(pa.string_view()),
    "dictionary": STRINGS.dictionary_encode(),
    "lists": pa.array([list(range(1000, 1000 + i % 9)) for i in range(1000)]),
    "list views": pa.array([list(range(1000, 1000 + i % 9)) for i in range(1000)], pa.list_view(pa.int64())),
    "structs": pa.array([{"a": i + 1000, "b": "x" * 40} for i in range(1000)]),
    "maps": pa.array([[("a", i + 1000)] for i in range(1000)], pa.map_(pa.string(), pa.int64())),
    "bytes": pa.array([b"12345678"] * 1000, pa.binary(8)),
}


def size_of(value: Any) -> int:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    nested = sum(map(size_of, inner)) if isinstance(inner, list | tuple) else 0
    return sys.getsizeof(value) + 8 + nested


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("part", [slice(None), slice(300, 500), slice(0, 0)], ids=str)
def test_estimates_are_close_to_the_size_of_the_objects(name: str, part: slice) -> None:
    array = ARRAYS[name][part]
    measured = sum(map(size_of, array.to_pylist()))
    assert measured / 3 <= object_nbytes(array) <= 3 * measured + 200
