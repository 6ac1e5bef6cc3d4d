"""Small batches: columns in one block are aligned, disjoint and equal to separate columns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from samplebatch import SampleBatch, concat_samples
from samplebatch.batch import bulk
from samplebatch.column.memory import ALIGNMENT
from samplebatch.errors import ColumnMismatchError

COLUMNS = {
    "obs": np.arange(15, dtype=np.float32).reshape(5, 3),
    "flags": np.array([True, False, True, False, True]),
    "empty_rows": np.zeros((5, 0), np.int16),
    "when": np.arange(5).astype("M8[s]"),
    "lives": np.array([3, 2, 1, 3, 2], np.int8),
    "t": np.arange(5),
}


def _addresses(batch: SampleBatch) -> list[tuple[int, int]]:
    return [(batch[name].ctypes.data, batch[name].nbytes) for name in batch]


def _block_nbytes(array: np.ndarray) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return memoryview(array.base).nbytes


def _assert_lies_well(batch: SampleBatch) -> None:
    spans = sorted(_addresses(batch))
    assert all(address % ALIGNMENT == 0 for address, _ in spans)
    assert all(before + nbytes <= after for (before, nbytes), (after, _) in pairwise(spans))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_copy_of_a_small_batch(rows: int) -> None:
    batch = SampleBatch(COLUMNS)[:rows]
    copy = batch.copy()
    assert copy == batch
    _assert_lies_well(copy)
    copy["t"][:] = -1
    assert batch["t"].tolist() == list(range(rows))
    assert copy.drop("t") == batch.drop("t")


@pytest.mark.parametrize("rows", [[], [3], [4, 0, 4, -1, 2, 2]])
def test_gathering_from_a_small_batch(rows: list[int]) -> None:
    batch = SampleBatch(COLUMNS, infos=[{}, None, {"a": 1}, {}, {}])
    gathered = batch.take(np.array(rows, np.intp))
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(gathered[name], values[rows])
        assert gathered[name].dtype == values.dtype
    assert gathered["infos"].tolist() == [batch["infos"][row] for row in rows]
    _assert_lies_well(gathered.drop("infos"))
    assert len({_block_nbytes(gathered[name]) for name in COLUMNS}) == 1


def test_a_few_rows_of_large_columns_are_gathered_without_the_rest() -> None:
    rows = bulk.BLOCK_NBYTES // 16 + 1
    gathered = SampleBatch(a=np.arange(2 * rows), b=np.zeros(2 * rows)).take(np.arange(rows))
    assert _block_nbytes(gathered["a"]) == gathered["a"].nbytes
    assert gathered["a"].tolist() == list(range(rows))


@pytest.mark.parametrize("sizes", [(1, 1), (5, 1, 3), (2, 0, 2)])
def test_joining_small_batches(sizes: tuple[int, ...]) -> None:
    parts = [SampleBatch(COLUMNS)[:size] for size in sizes]
    joined = concat_samples(parts)
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(joined[name], np.concatenate([values[:size] for size in sizes]))
        assert joined[name].dtype == values.dtype
    _assert_lies_well(joined)


def test_joining_matches_columns_by_name_in_any_order() -> None:
    parts = [SampleBatch(a=[1, 2], b=[1.0, 2.0]), SampleBatch(b=[3.0], a=[3])]
    joined = concat_samples(parts)
    assert (list(joined), joined["a"].tolist(), joined["b"].tolist()) == (["a", "b"], [1, 2, 3], [1.0, 2.0, 3.0])


def test_joining_small_batches_of_other_dtypes_and_shapes() -> None:
    assert concat_samples([SampleBatch(a=np.zeros(1, np.int8)), SampleBatch(a=np.ones(2))])["a"].dtype == np.float64
    with pytest.raises(ColumnMismatchError, match="'a' must have one row shape"):
        concat_samples([SampleBatch(a=np.zeros((1, 2))), SampleBatch(a=np.zeros((1, 3)))])


def test_columns_of_other_kinds_get_separate_memory() -> None:
    batch = SampleBatch(COLUMNS, infos=[{}, None, {"a": 1}, {}, {}])
    assert bulk.copy_small(batch._all()) is None
    assert batch.copy() == batch
    assert bulk.join_small([batch._all()] * 2, 10, 1000) is None
    assert concat_samples([batch, batch])[5:] == batch


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_large_columns_can_be_released_separately(parts: int) -> None:
    rows = bulk.BLOCK_NBYTES // 16 + 1
    batch = SampleBatch(a=np.arange(rows), b=np.zeros(rows))
    assert bulk.copy_small(batch._all()) is None
    for converted in (batch.copy(), concat_samples([batch] * parts)):
        assert _block_nbytes(converted["a"]) == converted["a"].nbytes
        assert converted["a"].tolist() == list(range(rows)) * (len(converted) // rows)


def test_two_cores_join_large_batches() -> None:
    batch = SampleBatch(a=np.arange(200_000), b=np.ones((200_000, 2), np.float32))
    joined = concat_samples([batch, batch[:100_000]])
    np.testing.assert_array_equal(joined["a"], np.concatenate([np.arange(200_000), np.arange(100_000)]))
    assert joined["b"].shape == (300_000, 2)
    assert joined["b"].all()
