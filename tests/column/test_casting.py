"""Exact casts: random numbers are compared individually, in Python's own arithmetic; rounding casts; rejected kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.column.casting import as_flags, cast_exactly, exact_rows, nearest_rows, wider
from samplebatch.errors import ColumnMismatchError, SampleBatchError

RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
DTYPES = [np.dtype(code) for code in "?bhilBHILefdFD"]
EXTREMES: list[Any] = [0, 1, -1, 127, 255, 2**11 + 1, 2**24 + 1, 2**53 + 1, 2**63 - 1, 2**64 - 1, 0.5, 65520.0, 1e300]
EXTREMES += [np.nan, np.inf, 1 + 2j]


def refuse(sentence: str, row: int | None) -> SampleBatchError:
    return SampleBatchError(f"{sentence} in row {row}")


def is_same(number: Any, other: Any) -> bool:
    """Compare two Python numbers exactly; NaN equals NaN in each component."""
    if isinstance(number, complex) or isinstance(other, complex):
        return is_same(number.real, other.real) and is_same(number.imag, other.imag)
    return number == other or (number != number and other != other)


def random_array(rng: np.random.Generator, dtype: np.dtype[Any]) -> np.ndarray:
    numbers = [EXTREMES[i] for i in rng.integers(0, len(EXTREMES), rng.integers(0, 4))]
    with np.errstate(all="ignore"):
        arrays = []
        for number in numbers:
            try:
                arrays.append(np.array(number).astype(dtype) if dtype.kind == "c" else np.array(number, dtype))
            except (OverflowError, TypeError, ValueError):
                arrays.append(np.zeros((), dtype))
    return np.array(arrays, dtype)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(300))
def test_casts_are_lossless_or_rejected_for_all_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = (DTYPES[i] for i in rng.integers(0, len(DTYPES), 2))
    array = random_array(rng, source)
    before = array.copy()
    cast = cast_exactly(array, target)
    assert np.array_equal(array, before, equal_nan=source.kind in "fc")
    if cast is not None:
        assert cast.dtype == target
        assert all(map(is_same, cast.tolist(), array.tolist()))
    elif RANK[source.kind] <= RANK[target.kind]:
        with np.errstate(all="ignore"):
            naive = array.astype(target)
        limits = np.iinfo(target) if target.kind in "iu" else None
        outside = limits and any(not limits.min <= number <= limits.max for number in array.tolist())
        assert outside or not all(map(is_same, naive.tolist(), array.tolist()))


@pytest.mark.parametrize(
    ("array", "target"),
    [
        ([1 + 0j], "f8"),
        ([1 + 0j], "i8"),
        ([2.0], "i8"),
        ([1], "?"),
        ([True], "U5"),
        ([True], "M8[s]"),
        ([1], "U5"),
        (["a"], "f8"),
        ([], "?"),
    ],
)
def test_narrower_kinds_are_rejected_even_without_loss(array: list[Any], target: str) -> None:
    assert cast_exactly(np.array(array), np.dtype(target)) is None


@pytest.mark.parametrize(
    ("stored", "new", "expected"),
    [
        ("U3", "U5", ["U5"]),
        ("S4", "S2", ["S4"]),
        ("U3", "S5", []),
        ("M8[s]", "M8[ms]", ["M8[ms]"]),
        ("M8[s]", "i8", []),
        ("i8", "u8", ["u8"]),
        ("i4", "u4", ["i8", "u4"]),
        ("f4", "i8", ["f8", "i8"]),
        ("?", "i1", ["i1", "i1"]),
    ],
)
def test_wider_dtypes_are_listed_in_order_of_preference(stored: str, new: str, expected: list[str]) -> None:
    assert list(wider(np.dtype(stored), np.dtype(new))) == [np.dtype(name) for name in expected]


@pytest.mark.parametrize("values", [[0.5], [2], [np.nan], [-1]])
def test_numbers_other_than_0_and_1_are_rejected_as_flags(values: list[Any]) -> None:
    with pytest.raises(ColumnMismatchError, match="column 'dones' must have flags"):
        as_flags(np.array(values), "dones")


def test_floats_are_rounded_to_the_nearest_of_a_declared_dtype() -> None:
    values = np.array([[0.1], [-np.inf], [np.nan]])
    rounded = nearest_rows("obs", values, np.dtype("f4"), (3,), refuse)
    assert rounded.dtype == np.float32
    assert np.array_equal(rounded, np.float32([0.1, -np.inf, np.nan]), equal_nan=True)
    lists = nearest_rows("obs", [[0.1, 2], [3, 4]], np.dtype("f4"), (2, 2), refuse)
    assert lists.tolist() == [[float(np.float32(0.1)), 2.0], [3.0, 4.0]]
    single = np.ones(2, np.float32)
    assert nearest_rows("obs", single, np.dtype("f4"), (2,), refuse) is single


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, 1e39], "f4", "row 1"),
        ([1.0, 0.5], "i8", "row 1"),
        ([1.0, "a"], "f4", "must contain numbers, got a str in row 1"),
        ([1.0], "f4", r"must have 2 rows, got 1 in row None"),
    ],
)
def test_values_that_rounding_cannot_represent_are_rejected_by_row(values: list[Any], dtype: str, message: str) -> None:
    with pytest.raises(SampleBatchError, match=message):
        nearest_rows("obs", values, np.dtype(dtype), (2,), refuse)


@pytest.mark.parametrize("seed", range(200))
def test_rows_are_exact_or_rejected(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = np.dtype(str(rng.choice(["?", "i1", "i8", "u8", "f4", "f8"])))
    numbers = [EXTREMES[i] for i in rng.integers(0, len(EXTREMES) - 1, 3)]
    values = numbers if rng.random() < 0.5 else np.array(numbers, object).astype(float)
    expected = numbers if isinstance(values, list) else values.tolist()
    try:
        rows = exact_rows("x", values, target, (3,), refuse)
    except SampleBatchError as error:
        row = int(str(error).rpartition(" ")[2])
        with np.errstate(all="ignore"):
            try:
                naive = np.array(expected[row]).astype(target).item()
            except (OverflowError, ValueError):
                return
        limits = np.iinfo(target) if target.kind in "iu" else None
        assert not is_same(naive, expected[row]) or (limits and not limits.min <= expected[row] <= limits.max)
    else:
        assert all(map(is_same, rows.tolist(), expected))
        assert rows.dtype == target or rows.dtype.kind == target.kind == "f"
