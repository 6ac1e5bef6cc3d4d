from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.column import types
from samplebatch.errors import ColumnTypeError
from tests.optional import torch

SMALL = [np.dtype(code) for code in ("?", "i1", "u1", "i2", "u2", "f2")]
WIDE = [np.dtype(code) for code in ("i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16")]
TEXT_AND_DATES = [
    np.dtype(code) for code in ("S1", "S5", "U1", "U5", "M8[ns]", "M8[s]", "M8[D]", "M8[7ms]", "m8[us]", "m8[h]")
]
ALL = [*SMALL, *WIDE, *TEXT_AND_DATES]


def every_value(dtype: np.dtype) -> np.ndarray:
    """Return all values of a dtype of up to 16 bits except NaN."""
    if dtype.kind == "b":
        return np.array([False, True])
    values = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    return values[values == values]


def exact(values: np.ndarray) -> list:
    """Convert values to Python numbers, which compare without rounding."""
    return values.tolist()


@pytest.mark.parametrize(("wide", "narrow"), list(itertools.product([*SMALL, *WIDE], SMALL)), ids=str)
def test_holds_agrees_with_an_exhaustive_check(wide, narrow):
    values = every_value(narrow)
    with np.errstate(all="ignore"):
        converted = values.astype(wide)
    lossless = all(map(lambda a, b: a == b, exact(values), exact(converted)))
    assert types.holds(wide, narrow) <= lossless
    if wide.kind != "b" and narrow.kind != "b":
        assert types.holds(wide, narrow) == lossless


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("f8", "i8", False),
        ("f8", "u8", False),
        ("c16", "i8", False),
        ("f8", "i4", True),
        ("f4", "i4", False),
        ("c8", "f4", True),
        ("c8", "f8", False),
        ("i8", "u4", True),
        ("i8", "u8", False),
        ("u8", "i1", False),
        ("U5", "U3", True),
        ("U3", "U5", False),
        ("S5", "S3", True),
        ("U5", "S5", False),
        ("U21", "i8", False),
        ("M8[ns]", "M8[s]", False),
        ("M8[ns]", "i8", False),
        ("m8[s]", "i4", False),
        ("i8", "m8[s]", False),
        ("i8", "M8[s]", False),
    ],
)
def test_holds_is_stricter_than_numpy_casting(wide, narrow, expected):
    assert types.holds(np.dtype(wide), np.dtype(narrow)) is expected


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_holds_itself(dtype):
    assert types.holds(dtype, dtype)


def test_common_dtype_is_one_of_its_arguments():
    for dtypes in itertools.permutations(ALL, 2):
        actual = types.common_dtype(list(dtypes))
        assert actual is None or (actual in dtypes and all(types.holds(actual, dtype) for dtype in dtypes))
    # NumPy would go to a third dtype, int16 or float64.
    assert types.common_dtype([np.dtype("i1"), np.dtype("u1")]) is None
    assert types.common_dtype([np.dtype("f4"), np.dtype("i8")]) is None
    assert types.common_dtype([np.dtype("f4"), np.dtype("f8"), np.dtype("i4")]) == np.float64


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_storage_types_have_the_size_of_the_dtype(dtype):
    storage = types.storage_of(dtype)
    per_element = 1
    for extent in storage.per_element:
        per_element *= extent
    assert storage.arrow.byte_width * per_element == dtype.itemsize
    if not storage.named:
        assert types.dtype_of(storage.arrow) == dtype


@pytest.mark.parametrize("dtype", ["O", "T", "V8", "f4,f4"])
def test_unsupported_dtypes_are_rejected(dtype):
    with pytest.raises(ColumnTypeError, match="that columns support"):
        types.storage_of(np.dtype(dtype))


@pytest.mark.parametrize("arrow", [pa.string(), pa.bool_(), pa.null(), pa.timestamp("ns", "UTC"), pa.decimal128(5)])
def test_arrow_types_without_a_matching_dtype_are_rejected(arrow):
    assert types.dtype_of(arrow) is None


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_dtype_names_round_trip(dtype):
    assert types.named_dtype(dtype.str) == dtype


def test_torch_and_numpy_agree_both_ways():
    for dtype in types.NUMBERS:
        actual = types.torch_dtype(dtype)
        assert actual is not None
        assert types.numpy_dtype(actual) == dtype
        assert torch.from_numpy(np.zeros(1, dtype)).dtype == actual
    assert types.torch_dtype(np.dtype("M8[s]")) is None
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex32):
        assert types.numpy_dtype(dtype) is None


OTHERS = (">f4", "V4", "no such", "x", "f4,i4", "T", "f3", "a8", "|a4", "<a")


@pytest.mark.parametrize(
    "name", ["M8[s/0]", "M8[0s]", "m8[s/3]", "M8[s", "", "i4,i4", ">i4", "O", "V8", None, 3, *OTHERS]
)
def test_foreign_dtype_names_must_be_supported(name: object) -> None:
    with pytest.raises(ColumnTypeError):
        types.named_dtype(name)
    for dtype in ALL:
        assert types.named_dtype(dtype.str) == dtype
