"""CompressedStore: chunks of LZ4 that are opened, written and sealed again."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.buffer.store import DenseStore
from samplebatch.buffer.stores import CHUNK_NBYTES, CompressedStore
from samplebatch.column import compressed
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

U1 = np.dtype(np.uint8)
SHAPE = (64, 64)
CHUNK = CHUNK_NBYTES // (64 * 64)


def frames(numbers: Any) -> np.ndarray[Any, Any]:
    """Return one image per number; the number can be decoded from the image."""
    numbers = np.asarray(numbers)
    images = np.zeros((len(numbers), *SHAPE), U1)
    images[:, :, 0] = (numbers % 251)[:, None]
    images[:, 0, :] = (numbers // 251)[:, None]
    return images


@pytest.fixture
def store() -> CompressedStore:
    return CompressedStore("obs", 100, U1, SHAPE)


def test_rows_are_restored_from_open_and_sealed_chunks(store: CompressedStore) -> None:
    for slot in range(70):
        store.write(slot, store.fit(frames([slot]), 1))
    picked = np.array([69, 0, 33, 69, 99, 8])
    expected = frames([69, 0, 33, 69, 0, 8])
    assert np.array_equal(store.take(picked), expected)
    assert store.take(picked).dtype == U1
    assert store.take(np.array([], np.intp)).shape == (0, *SHAPE)


def test_stacks_are_gathered_into_their_final_layout(store: CompressedStore) -> None:
    store.write(np.arange(100), store.fit(frames(np.arange(100)), 100))
    slots = np.arange(8, 60)[:, None] - np.arange(4)
    assert np.array_equal(store.take(slots), frames(slots.reshape(-1)).reshape(52, 4, *SHAPE))


def test_each_chunk_is_decompressed_once_for_a_gather(store: CompressedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(slice(0, 100), store.fit(frames(np.arange(100)), 100))
    decompress, calls = compressed._decompress, []

    def counting(block: Any, nbytes: int) -> Any:
        calls.append(nbytes)
        return decompress(block, nbytes)

    monkeypatch.setattr(compressed, "_decompress", counting)
    slots = np.random.default_rng(0).integers(0, 40, (256, 4))
    assert np.array_equal(store.take(slots), frames(slots.reshape(-1)).reshape(256, 4, *SHAPE))
    assert len(calls) == 40 // CHUNK


def test_other_rows_of_a_partly_overwritten_chunk_are_kept(store: CompressedStore) -> None:
    store.write(slice(0, 100), store.fit(frames(np.arange(100)), 100))
    for slot in range(3):
        store.write(slot, store.fit(frames([1000 + slot]), 1))
        expected = np.arange(100)
        expected[: slot + 1] += 1000
        assert np.array_equal(store.take(np.arange(100)), frames(expected))


def test_compressed_images_use_a_fraction_of_their_memory(store: CompressedStore) -> None:
    for step in range(350):
        store.write(step % 100, store.fit(frames([step]), 1))
        assert store.nbytes < 100 * 64 * 64 / 10 + CHUNK * 64 * 64


def test_no_more_chunks_are_open_than_allowed() -> None:
    store = CompressedStore("obs", 20 * CHUNK, U1, SHAPE, max_open=3)
    order = np.random.default_rng(1).permutation(20 * CHUNK)
    for slot in order:
        store.write(int(slot), store.fit(frames([slot]), 1))
        assert len(store._open) <= 3
    assert np.array_equal(store.take(np.arange(20 * CHUNK)), frames(np.arange(20 * CHUNK)))


def test_rings_written_in_turn_open_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rings share one store; one ring ends inside a chunk of the next ring."""
    rings, size = 16, 5 * CHUNK + 3
    store = CompressedStore("obs", rings * size, U1, SHAPE, max_open=2 * rings)
    opened = []
    sealed = CompressedStore._sealed_chunk

    def counting(self: CompressedStore, chunk: int) -> CompressedColumn:
        opened.append(chunk)
        return sealed(self, chunk)

    monkeypatch.setattr(CompressedStore, "_sealed_chunk", counting)
    for step in range(size):
        slots = np.arange(rings) * size + step
        store.write(slots, store.fit(frames(slots), rings))
    assert not opened
    monkeypatch.undo()
    assert np.array_equal(store.take(np.arange(rings * size)), frames(np.arange(rings * size)))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_random_writes_read_like_an_array(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (3,), (40, 40), (200, 200)]))
    slots = data.draw(st.integers(1, 60))
    store = CompressedStore("obs", slots, np.dtype(np.int16), shape, max_open=data.draw(st.integers(1, 4)))
    oracle = np.zeros((slots, *shape), np.int16)
    for step in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["one", "slice", "many"]))
        if kind == "one":
            at: Any = data.draw(st.integers(0, slots - 1))
            n = 1
        elif kind == "slice":
            start = data.draw(st.integers(0, slots))
            at = slice(start, data.draw(st.integers(start, slots)))
            n = at.stop - start
        else:
            at = np.array(data.draw(st.lists(st.integers(0, slots - 1), max_size=20)), np.intp)
            n = len(at)
        values = (np.arange(n, dtype=np.int16) + 100 * step).reshape(n, *(1,) * len(shape))
        rows = store.fit(np.broadcast_to(values, (n, *shape)), n)
        store.write(at, rows)
        oracle[at] = rows[0] if kind == "one" else rows
    assert np.array_equal(store.take(np.arange(slots)), oracle)
    assert np.array_equal(store.values.to_numpy(), oracle)
    picked = np.array(data.draw(st.lists(st.integers(0, slots - 1), max_size=30)), np.intp)
    assert np.array_equal(store.take(picked), oracle[picked])
    assert np.array_equal(store.to_column(picked).to_numpy(), oracle[picked])


def test_all_slots_are_exported_compressed(store: CompressedStore) -> None:
    store.write(slice(0, 45), store.fit(frames(np.arange(45)), 45))
    values = store.values
    assert values.nbytes < 100 * 64 * 64 / 10
    assert np.array_equal(values[44], frames([44])[0])
    assert not values[99].any()
    store.write(44, store.fit(frames([900]), 1))
    assert np.array_equal(values[44], frames([44])[0])


def test_live_rows_are_stored_compressed_and_restored(store: CompressedStore) -> None:
    store.write(slice(0, 100), store.fit(frames(np.arange(100)), 100))
    store.write(slice(0, 20), store.fit(frames(np.arange(100, 120)), 20))
    slots = np.r_[20:100, 0:20]
    live = store.to_column(slots)
    assert isinstance(live, CompressedColumn)
    assert len(pickle.dumps(live)) < 100 * 64 * 64 / 10
    other = CompressedStore("obs", 100, U1, SHAPE)
    other.load_column(slots, live)
    assert np.array_equal(other.take(slots), frames(np.arange(20, 120)))
    other.load_column(np.arange(100), TensorColumn(frames(np.arange(100))))
    assert np.array_equal(other.take(np.arange(100)), frames(np.arange(100)))
    assert isinstance(store.to_column(np.arange(0, 100, 2)), TensorColumn)
    assert len(store.to_column(np.arange(0))) == 0


def test_rows_of_another_shape_or_dtype_are_rejected(store: CompressedStore) -> None:
    with pytest.raises(ColumnMismatchError, match=r"'obs' must have rows of shape \(64, 64\), got \(3,\)"):
        store.fit(np.zeros((1, 3), U1), 1)
    with pytest.raises(ColumnMismatchError, match="'obs' must store its values without loss, got int64 for uint8"):
        store.fit(np.full((1, *SHAPE), 256), 1)
    with pytest.raises(ColumnLengthError, match="'obs' must have 2 rows, got 1"):
        store.fit(frames([0]), 2)
    with pytest.raises(ColumnTypeError, match=r"'obs' must have numeric rows of one shape .*, got objects"):
        CompressedStore.for_rows("obs", ["a"], 10)


def test_the_first_rows_determine_the_kind_of_store() -> None:
    import torch

    assert CompressedStore.for_rows("obs", np.zeros((2, 3), ">f4"), 4).fit(np.ones((1, 3)), 1).dtype == np.dtype("f4")
    store = CompressedStore.for_rows("obs", torch.zeros(1, 3), 4)
    store.write(0, store.fit(torch.ones(1, 3), 1))
    assert store.take(np.array([0])).tolist() == [[1, 1, 1]]


def test_a_compressed_store_returns_the_same_rows_as_a_dense_one(store: CompressedStore) -> None:
    dense = DenseStore("obs", np.zeros((100, *SHAPE), U1))
    rng = np.random.default_rng(3)
    for _ in range(30):
        slots = rng.integers(0, 100, 7)
        rows = frames(rng.integers(0, 60_000, 7))
        store.write(slots, store.fit(rows, 7))
        dense.write(slots, dense.fit(rows, 7))
    assert np.array_equal(store.plan_copy([(10, 70)])[0], dense.take(np.arange(10, 70)))
    assert np.array_equal(store.values.to_numpy(), dense.values)
