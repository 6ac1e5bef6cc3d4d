"""Row selection with slices, masks, lists of integers and `take`; invalid keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import RowIndexError
from tests.batch.every_kind import every_kind, with_every_kind
from tests.ids import plain_repr
from tests.optional import HAS_TORCH, torch

SLICES = [
    slice(None),
    slice(2, 5),
    slice(0, 0),
    slice(3, 3),
    slice(5, 2),
    slice(-3, None),
    slice(None, -2),
    slice(-100, 100),
    slice(4, 100),
    slice(100, 200),
    slice(None, None, 2),
    slice(1, None, 3),
    slice(None, None, -1),
    slice(-2, None, -2),
    slice(5, 1, -1),
    slice(1, 5, -1),
    slice(None, None, 100),
]

INDICES = [
    [3, 1],
    [0, 0, -1],
    [],
    np.array([6, 0, 6]),
    np.array([-7, 6], np.int8),
    np.array([1, 2], np.uint64),
    (2, 4),
    range(1, 6, 2),
    np.empty(0, np.int64),
]

MASKS = [
    [True, False, True, False, False, False, True],
    np.zeros(7, bool),
    np.ones(7, bool),
    np.arange(7) % 2 == 0,
]


def rows_of(key: Any) -> list[int]:
    """Return the rows that NumPy selects from 7 rows with a key."""
    if isinstance(key, slice):
        return list(range(7))[key]
    picked = np.asarray(key)
    return np.arange(7)[picked if picked.size else picked.astype(int)].tolist()


@pytest.mark.parametrize("key", [*SLICES, *INDICES, *MASKS], ids=str)
def test_every_key_selects_the_same_rows_as_numpy(key: Any) -> None:
    rows = rows_of(key)
    batch = with_every_kind(7)
    part = batch[key]
    assert type(part) is SampleBatch
    assert len(part) == len(rows)
    assert list(part) == list(batch)
    for name in batch.column_names:
        full, picked = batch.column(name), part.column(name)
        assert picked.dtype == full.dtype, name
        assert len(picked) == len(rows), name
        if picked.kind == "compressed":
            picked = picked.decompress()
        # Gathering rows decompresses them: their blocks no longer hold rows in order.
        assert picked.kind == ("tensor" if full.kind == "compressed" else full.kind), name
        assert picked.equals(full.take(np.array(rows, np.intp))), name
    assert part["flat i8"].tolist() == batch["flat i8"][rows].tolist()
    assert part["wide f4"].tolist() == batch["wide f4"][rows].tolist()
    assert part["infos"].tolist() == [batch["infos"][row] for row in rows]
    assert part["nested"]["arm"][1]["grip"].tolist() == batch["nested"]["arm"][1]["grip"][rows].tolist()


@pytest.mark.parametrize("key", [*INDICES, *MASKS], ids=str)
def test_take_agrees_with_brackets(key: Any) -> None:
    batch = with_every_kind(7)
    assert batch.take(key) == batch[key]


@pytest.mark.parametrize("rows", [1, 2])
def test_tensors_can_be_reversed(rows: int) -> None:
    batch = SampleBatch(a=torch.arange(rows), b=np.arange(rows))
    assert batch[::-1]["a"].tolist() == batch[::-1]["b"].tolist() == list(range(rows))[::-1]
    assert batch.take(np.arange(rows)[::-1])["a"].tolist() == list(range(rows))[::-1]


def test_torch_masks_and_indices_select_rows() -> None:
    batch = SampleBatch(a=np.arange(4), b=torch.arange(4))
    assert batch[torch.tensor([3, 0])]["a"].tolist() == [3, 0]
    assert batch[batch["b"] > 1]["a"].tolist() == [2, 3]


@pytest.mark.parametrize("key", [slice(None, None, 2), slice(None, None, -1), [0, 1], [True] * 7], ids=str)
def test_gathered_rows_are_copies(key: Any) -> None:
    batch = SampleBatch(a=np.arange(7))
    part = batch[key]
    assert not np.shares_memory(part["a"], batch["a"])
    part["a"][0] = 100
    assert batch["a"].tolist() == list(range(7))


@pytest.mark.parametrize("key", [slice(None), slice(2, 5), slice(-3, None), slice(1, 6, 1)], ids=str)
def test_plain_slices_are_views(key: slice) -> None:
    batch = SampleBatch(every_kind(7))
    part = batch[key]
    for name in batch.column_names:
        if batch.column(name).kind == "tensor" and batch.column(name).nbytes:
            assert np.shares_memory(part[name], batch[name]), name
            assert part[name].flags.c_contiguous
            assert part[name].flags.writeable
        if batch.column(name).kind == "torch":
            assert part[name].untyped_storage().data_ptr() == batch[name].untyped_storage().data_ptr(), name
    assert np.shares_memory(part["ragged"].elements, batch["ragged"].elements)


@pytest.mark.parametrize("key", [7, -8, 100, np.int64(7)])
def test_a_row_out_of_range_is_rejected(key: int) -> None:
    batch = SampleBatch(a=np.arange(7))
    with pytest.raises(RowIndexError, match=rf"row {key} must be in \[-7, 7\)"):
        batch[[0, key]]
    with pytest.raises(RowIndexError, match=rf"row {key} must be in \[-7, 7\)"):
        batch.take([key])
    with pytest.raises(IndexError, match=rf"row {key} must be in \[-7, 7\)"):
        batch[key]


@pytest.mark.parametrize("key", [0, -1, np.int64(3)])
def test_a_single_integer_is_rejected_as_a_key(key: int) -> None:
    with pytest.raises(RowIndexError, match=rf"take\(\[{key}\]\)"):
        SampleBatch(a=np.arange(7))[key]
    with pytest.raises(RowIndexError, match="single integer"):
        SampleBatch(a=np.arange(7)).take(key)


@pytest.mark.parametrize(
    "key",
    [
        [True, False],
        np.ones(8, bool),
        [1.0, 2.0],
        np.zeros((2, 2), int),
        np.ones((7, 1), bool),
        2.5,
        None,
        object(),
    ],
    ids=plain_repr,
)
def test_keys_of_another_kind_are_rejected(key: Any) -> None:
    batch = SampleBatch(a=np.arange(7))
    with pytest.raises((RowIndexError, KeyError)):
        batch[key]


def test_a_mask_of_another_length_is_rejected() -> None:
    with pytest.raises(RowIndexError, match="a mask must have 7 entries, one per row, got 6"):
        SampleBatch(a=np.arange(7))[np.ones(6, bool)]


def test_the_error_contains_the_first_row_out_of_range() -> None:
    with pytest.raises(RowIndexError, match=r"row 9 must be in \[-3, 3\)"):
        SampleBatch(a=[1, 2, 3]).take([0, 9, 8])


def test_an_integer_too_large_for_an_index_is_rejected() -> None:
    with pytest.raises(RowIndexError):
        SampleBatch(a=[1, 2, 3]).take(np.array([2**63], np.uint64))


@pytest.mark.parametrize(
    ("start", "end", "rows"),
    [(0, 3, [0, 1, 2]), (2, 100, [2, 3, 4]), (3, 1, []), (1, -1, [1, 2, 3]), (7, 9, []), (0, 0, []), (4, 5, [4])],
)
def test_slice_accepts_a_range(start: int, end: int, rows: list[int]) -> None:
    part = SampleBatch(a=np.arange(5)).slice(start, end)
    assert part["a"].tolist() == rows
    assert len(part) == len(rows)


@pytest.mark.parametrize(("start", "end"), [(-2, 2), (-3, 0), (-1, 100), (-4, -2)])
def test_slice_pads_every_kind_of_column_on_the_left(start: int, end: int) -> None:
    batch = with_every_kind(5)
    part = batch.slice(start, end)
    count = len(range(5)[:end])
    assert len(part) == count - start
    for name in batch.column_names:
        column = part.column(name)
        assert len(column) == count - start, name
        assert column.dtype == batch.column(name).dtype, name
        assert column.slice(-start, count - start).equals(batch.column(name).slice(0, count)) or name.startswith(
            "squeezed"
        )
    assert part["flat i8"][:-start].tolist() == [0] * -start
    assert part["infos"][:-start].tolist() == [None] * -start
    assert part["flat U5"][:-start].tolist() == [""] * -start
    assert [row.tolist() for row in part["ragged"]][:-start] == [[]] * -start
    if HAS_TORCH:
        assert part["torch bfloat16"][:-start].tolist() == [0] * -start
    assert part["pair"][1][:-start].tolist() == [[0, 0, 0]] * -start
    part.decompress_if_needed({"squeezed", "squeezed_rows"})
    batch.decompress_if_needed({"squeezed", "squeezed_rows"})
    for name in ("squeezed", "squeezed_rows"):
        assert part[name].tolist() == [[0.0] * 5] * -start + batch[name][:count].tolist()


def test_zero_rows_of_every_kind() -> None:
    empty = with_every_kind(3)[3:]
    assert len(empty) == 0
    assert empty == with_every_kind(3)[0:0]
    assert empty.decompress_if_needed({"squeezed", "squeezed_rows"}) == with_every_kind(3).take([])
    assert empty.copy() == empty
    assert len(empty[::2]) == 0
    assert list(empty.rows()) == []
    assert empty.timeslices(4) == []
    assert empty.shuffle() == with_every_kind(3).take([])
