"""Stores: rows of one column in slots that are written many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.buffer.store import DenseStore, ObjectStore, Store, TorchStore
from samplebatch.buffer.stores import allocate_zeros, store_for
from samplebatch.column import threads
from samplebatch.column.memory import ALIGNMENT
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError
from tests.optional import torch

FIRST_ROWS: dict[str, Any] = {
    "floats": np.arange(12, dtype=np.float32).reshape(3, 4),
    "flags": np.array([True, False, True]),
    "half": np.array([1.5, 2.5, 3.5], np.float16),
    "dates": np.array(["2024-01-01", "2024-01-02", "2024-01-03"], "M8[D]"),
    "complex": np.array([1 + 2j, 0, 3j]),
    "no elements": np.zeros((3, 0), np.int64),
    "tensor": torch.arange(6).reshape(3, 2),
    "bfloat16": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "objects": np.array([{"a": 1}, None, "x"], object),
    "object rows": np.array([["a", 1], ["b", 2], ["c", None]], object),
}


def made(name: str, slots: int = 5) -> tuple[Store, Any]:
    rows = FIRST_ROWS[name]
    return store_for(name, rows, slots), rows


def copied(store: Store, *ranges: tuple[int, int]) -> Any:
    out, jobs = store.plan_copy(ranges)
    threads.share(jobs)
    return out


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_written_rows_are_read_unchanged(name: str) -> None:
    store, rows = made(name)
    store.write(np.array([3, 1, 0]), store.fit(rows, 3))
    assert same(store.take(np.array([3, 1, 0])), rows)
    grid = store.take(np.array([[1, 3], [0, 0]]))
    assert same(grid[0, 1], rows[0]) if hasattr(rows[0], "shape") and rows.ndim > 1 else grid[0, 1] == rows[0]
    assert tuple(grid.shape) == (2, 2, *rows.shape[1:])


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_slices_single_slots_and_ranges(name: str) -> None:
    store, rows = made(name)
    store.write(slice(1, 4), store.fit(rows, 3))
    store.write(0, store.fit(rows[2:], 1))
    assert same(copied(store, (1, 4)), rows)
    assert same(copied(store, (3, 4), (0, 0), (1, 3)), rows[[2, 0, 1]])
    assert same(store.take(np.array([0])), rows[2:])
    assert store.slots == len(store.values) == 5
    assert same(store.values[1:4], rows)


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_rows_are_restored_from_a_column(name: str) -> None:
    store, rows = made(name)
    store.write(slice(1, 4), store.fit(rows, 3))
    column = store.to_column(np.array([2, 3, 1]))
    assert len(column) == 3
    other, _ = made(name)
    other.load_column(np.array([2, 3, 1]), column)
    assert same(copied(other, (1, 4)), rows)


@pytest.mark.parametrize("name", FIRST_ROWS)
def test_slots_never_written_have_blank_rows(name: str) -> None:
    store, rows = made(name)
    never = store.take(np.array([0, 1]))
    store.write(slice(0, 3), store.fit(rows, 3))
    store.write(slice(0, 2), store.blank(2))
    assert same(store.take(np.array([0, 1])), never)


def test_gathered_rows_are_copies() -> None:
    store, rows = made("floats")
    store.write(slice(0, 3), store.fit(rows, 3))
    for selected in (store.take(np.array([0, 1])), copied(store, (0, 2))):
        selected[...] = -1
    assert same(copied(store, (0, 3)), rows)


def test_the_last_of_several_rows_for_one_slot_is_stored() -> None:
    store = store_for("act", np.zeros(1), 3)
    store.write(np.array([1, 1, 1]), store.fit(np.array([5.0, 6.0, 7.0]), 3))
    assert store.values.tolist() == [0.0, 7.0, 0.0]


def test_memory_is_lazy_and_aligned() -> None:
    array = allocate_zeros("obs", (1 << 22, 1 << 6), np.dtype("f8"))
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.shape == (1 << 22, 1 << 6)
    assert not array[-1].any()


def test_the_caller_may_provide_the_memory() -> None:
    requested = []
    mine = np.zeros((4, 2), np.float32)

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        requested.append((name, shape, dtype))
        return mine

    store = store_for("obs.speed", np.ones((1, 2), np.float32), 4, allocate)
    assert requested == [("obs.speed", (4, 2), np.dtype("f4"))]
    store.write(2, store.fit(np.ones((1, 2), np.float32), 1))
    assert mine[2].tolist() == [1.0, 1.0]
    assert store.values is mine
    assert store.nbytes == mine.nbytes


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([1, 2], DenseStore),
        ([1, 2.5], DenseStore),
        ([np.zeros(2), np.ones(2)], DenseStore),
        ([np.zeros(2), np.ones(3)], ObjectStore),
        (["a", "b"], ObjectStore),
        (np.array(["a", "b"]), ObjectStore),
        ([None], ObjectStore),
        ([{"a": 1}], ObjectStore),
        (torch.zeros(1, 2), TorchStore),
    ],
)
def test_the_first_rows_determine_the_kind_of_store(rows: Any, kind: type[Store]) -> None:
    assert type(store_for("x", rows, 3)) is kind


def test_byte_order_is_converted_to_native() -> None:
    rows = np.array([1.5, 2.5], ">f4")
    store = store_for("x", rows, 3)
    store.write(slice(0, 2), store.fit(rows, 2))
    assert store.values.dtype == np.dtype("f4")
    assert store.values.dtype.isnative
    assert store.values.tolist() == [1.5, 2.5, 0.0]


@pytest.mark.parametrize(
    ("first", "later", "error", "words"),
    [
        (np.zeros(2, np.int64), [0.7, 1.0], ColumnMismatchError, "'x' must store its values without loss"),
        (np.zeros(2, np.float32), np.array([0.1, 0.2]), ColumnMismatchError, "float64 for float32"),
        (np.zeros(2, np.int64), [np.nan, 1.0], ColumnMismatchError, "without loss"),
        (np.zeros(2, np.int64), [2.0**63, 1.0], ColumnMismatchError, "without loss"),
        (np.zeros(2), [1j, 1.0], ColumnMismatchError, "without loss"),
        (np.zeros(2, np.uint8), [256, 0], ColumnMismatchError, "without loss"),
        (np.zeros(2, bool), [2, 0], ColumnMismatchError, "int64 for bool"),
        (np.zeros((2, 3)), np.zeros((2, 4)), ColumnMismatchError, "rows of shape (3,), got (4,)"),
        (np.zeros((2, 3)), np.zeros((1, 3)), ColumnLengthError, "must have 2 rows, got 1"),
        (np.zeros(2), ["a", "b"], ColumnMismatchError, "object for float64"),
        (np.zeros(2), 1.0, ColumnTypeError, "must have rows, got a single float"),
        (["a", "b"], "ab", ColumnTypeError, "must have rows, got a single str"),
        (["a", "b"], ["a"], ColumnLengthError, "must have 2 rows, got 1"),
        (torch.zeros(2), torch.zeros(2, 1), ColumnMismatchError, "rows of shape (), got (1,)"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), ColumnMismatchError, "tensors of torch.bfloat16"),
        (torch.zeros(2), torch.full((2,), 0.1, dtype=torch.float64), ColumnMismatchError, "without loss"),
    ],
)
def test_rows_of_another_shape_or_dtype_are_rejected(
    first: Any, later: Any, error: type[Exception], words: str
) -> None:
    store = store_for("x", first, 3)
    store.write(slice(0, 2), store.fit(first, 2))
    with pytest.raises(error) as raised:
        store.fit(later, 2)
    assert words in str(raised.value)
    assert "'x'" in str(raised.value)
    assert same(copied(store, (0, 2)), store.values[:2])


def test_lossless_conversions_are_accepted() -> None:
    store = store_for("x", np.zeros(1, np.float32), 3)
    store.write(slice(0, 3), store.fit([1, True, 0.5], 3))
    assert store.values.tolist() == [1.0, 1.0, 0.5]
    full = store_for("x", np.zeros(1, np.int8), 3)
    full.write(slice(0, 3), full.fit([1.0, -2.0, 3 + 0j], 3))
    assert full.values.tolist() == [1, -2, 3]
    flags = store_for("x", np.zeros(1, bool), 2)
    flags.write(slice(0, 2), flags.fit([1, 0], 2))
    assert flags.values.tolist() == [True, False]
    tensors = store_for("x", torch.zeros(1), 3)
    tensors.write(slice(0, 3), tensors.fit(np.array([1, 2, 3]), 3))
    assert tensors.values.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("rows", [np.zeros(2, [("a", "f4")]), np.ma.masked_array([1, 2], [True, False])])
def test_values_that_no_column_can_store_are_rejected(rows: Any) -> None:
    with pytest.raises(ColumnTypeError, match="'x'"):
        store_for("x", rows, 3)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensors_of_dtypes_that_numpy_lacks_are_stored_bit_by_bit(name: str) -> None:
    dtype = getattr(torch, name)
    rows = torch.tensor([[0.5, -2.0], [1.0, 0.25]]).to(dtype)
    store = store_for("obs", rows, 4)
    store.write(np.array([1, 3]), store.fit(rows, 2))
    selected = store.take(np.array([3, 1, 0]))
    assert selected.dtype == dtype
    assert selected.float().tolist() == [[1.0, 0.25], [0.5, -2.0], [0.0, 0.0]]
