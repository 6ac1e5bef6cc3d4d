"""RaggedStore: rows of varying shape in slots that are written again and again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Batch, ReplayBuffer, SampleBatch
from samplebatch.buffer.store import RaggedStore, ragged_rows
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

RESERVED = ("info", "policy")
"""Names of a sample without values, which a flat batch leaves out."""
F4, I8 = np.dtype(np.float32), np.dtype(np.int64)


def rows_of(store: RaggedStore, slots: Any) -> list[Any]:
    return [row.tolist() for row in store.take(np.asarray(slots))]


def test_rows_are_restored_for_any_length() -> None:
    store = RaggedStore("obs", 5, F4, 1)
    store.write(np.array([3, 1]), store.fit([np.ones(4, F4), np.zeros(0, F4)], 2))
    store.write(0, store.fit(np.full((1, 2), 7, F4), 1))
    store.write(slice(2, 3), store.fit([[1.5, 2.5, 3.5]], 1))
    assert rows_of(store, [0, 1, 2, 3, 4]) == [[7, 7], [], [1.5, 2.5, 3.5], [1, 1, 1, 1], []]
    assert store.values.equals(store.take(np.arange(5)))
    assert isinstance(store.to_column(np.array([3, 0])), RaggedColumn)


def test_rows_of_several_dimensions_keep_their_shapes() -> None:
    store = RaggedStore("obs", 3, I8, 2)
    images = [np.arange(6).reshape(2, 3), np.arange(4).reshape(4, 1), np.empty((0, 5), int)]
    store.write(np.array([2, 0, 1]), store.fit(images, 3))
    for slot, image in zip([2, 0, 1], images, strict=True):
        (row,) = store.take(np.array([slot]))
        assert row.shape == image.shape
        assert np.array_equal(row, image)
    store.write(1, store.fit(np.ones((1, 2, 2), int), 1))
    assert store.take(np.array([1]))[0].tolist() == [[1, 1], [1, 1]]


def test_rows_in_a_tensor_are_stored_like_others() -> None:
    rows = SampleBatch(obs=[[1.5, 2.5], [], [3.5]]).to_torch(floats="bfloat16")["obs"]
    store = RaggedStore.for_rows("obs", rows, 3)
    store.write(np.arange(3), store.fit(rows, 3))
    assert rows_of(store, [0, 1, 2]) == [[1.5, 2.5], [], [3.5]]
    assert store.item == F4


def test_stacks_are_arrays_of_rows() -> None:
    store = RaggedStore("obs", 3, I8, 1)
    store.write(np.arange(3), store.fit([[1], [2, 2], [3, 3, 3]], 3))
    stacks = store.take(np.array([[0, 1], [1, 2]]))
    assert stacks.shape == (2, 2)
    assert stacks.dtype == object
    assert [[row.tolist() for row in stack] for stack in stacks] == [[[1], [2, 2]], [[2, 2], [3, 3, 3]]]


def test_the_last_of_several_rows_for_a_slot_is_stored() -> None:
    store = RaggedStore("obs", 2, I8, 1)
    store.write(np.array([0, 1, 0]), store.fit([[1], [2], [3, 3]], 3))
    assert rows_of(store, [0, 1]) == [[3, 3], [2]]


def test_gathered_rows_are_copies() -> None:
    store = RaggedStore("obs", 1, I8, 1)
    store.write(0, store.fit([[1, 2]], 1))
    store.take(np.array([0])).elements[:] = 9
    assert rows_of(store, [0]) == [[1, 2]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_writes_read_like_a_list(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 9))
    ndim = data.draw(st.integers(1, 2))
    store = RaggedStore("obs", slots, I8, ndim)
    oracle: list[Any] = [np.empty((0,) * ndim, int)] * slots
    count = 0
    for _ in range(data.draw(st.integers(1, 25))):
        at = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=5))
        rows = []
        for _ in at:
            shape = data.draw(st.tuples(*[st.integers(0, 7)] * ndim))
            rows.append(np.arange(count, count + int(np.prod(shape))).reshape(shape))
            count += rows[-1].size
        store.write(np.array(at), store.fit(rows, len(rows)))
        for slot, row in zip(at, rows, strict=True):
            oracle[slot] = row
    for actual, expected in zip(store.take(np.arange(slots)), oracle, strict=True):
        assert actual.shape == expected.shape
        assert np.array_equal(actual, expected)


def test_memory_stays_within_a_multiple_of_the_rows_in_use() -> None:
    rng = np.random.default_rng(0)
    store = RaggedStore("obs", 200, F4, 1)
    maximum = 0
    for step in range(20_000):
        store.write(step % 200, store.fit(np.full((1, rng.integers(0, 60)), step, F4), 1))
        maximum = max(maximum, store.nbytes)
    used = store.values.flat.nbytes
    assert maximum < 3 * used + 200 * 16
    assert [row[0] for row in store.take(np.arange(200)) if len(row)] == [
        19_800 + slot for slot, row in enumerate(store.take(np.arange(200))) if len(row)
    ]


def test_memory_is_released_when_rows_become_short() -> None:
    store = RaggedStore("obs", 50, F4, 1)
    store.write(np.arange(50), store.fit(np.zeros((50, 10_000), F4), 50))
    large = store.nbytes
    for step in range(200_000 // 100):
        store.write(step % 50, store.fit(np.zeros((1, 500), F4), 1))
    assert store.nbytes < large / 5


def test_unsupported_values_are_rejected_without_changes() -> None:
    store = RaggedStore("obs.cloud", 2, F4, 1)
    store.write(0, store.fit([[1.0]], 1))
    with pytest.raises(ColumnMismatchError, match=r"'obs\.cloud' must store its values without loss, got float64"):
        store.fit([np.array([0.1])], 1)
    with pytest.raises(ColumnMismatchError, match=r"'obs\.cloud' must have rows of 1 dimensions, got 2"):
        store.fit(np.zeros((1, 2, 2), F4), 1)
    with pytest.raises(ColumnLengthError, match=r"'obs\.cloud' must have 3 rows, got 1"):
        store.fit([[1.0]], 3)
    with pytest.raises(ColumnTypeError, match=r"'obs\.cloud' must have rows that are arrays"):
        store.fit(np.zeros(2, F4), 2)
    with pytest.raises(ColumnTypeError, match=r"'obs\.cloud' must have rows that are arrays"):
        store.fit(["a", "b"], 2)
    assert rows_of(store, [0, 1]) == [[1], []]


def test_convertible_values_are_converted() -> None:
    store = RaggedStore("obs", 2, F4, 1)
    store.write(np.arange(2), store.fit([np.array([1.0, 2.0]), np.array([0.5])], 2))
    assert store.take(np.arange(2)).dtype == F4
    assert rows_of(store, [0, 1]) == [[1, 2], [0.5]]


def test_the_first_rows_determine_the_kind_of_store() -> None:
    assert RaggedStore.for_rows("obs", [[1, 2], [3]], 4).item == I8
    assert RaggedStore.for_rows("obs", np.zeros((2, 3, 4), F4), 4).ndim == 2
    rows = np.fromiter([np.zeros(2, F4), np.zeros(3, F4)], object, 2)
    assert RaggedStore.for_rows("obs", rows, 4).item == F4
    with pytest.raises(ColumnTypeError, match="'obs' must have rows that are arrays"):
        RaggedStore.for_rows("obs", np.zeros(3), 4)


def test_tensors_and_strided_rows_are_accepted() -> None:
    import torch

    assert [row.tolist() for row in ragged_rows(torch.arange(4).reshape(2, 2), "obs")] == [[0, 1], [2, 3]]
    assert [row.tolist() for row in ragged_rows([torch.arange(2), torch.arange(1)], "obs")] == [[0, 1], [0]]
    strided = np.arange(12).reshape(2, 6)[:, ::2]
    assert [row.tolist() for row in ragged_rows(strided, "obs")] == [[0, 2, 4], [6, 8, 10]]
    assert [row.tolist() for row in ragged_rows(strided.astype(">i4"), "obs")] == [[0, 2, 4], [6, 8, 10]]


def test_live_rows_are_restored_into_other_slots() -> None:
    store = RaggedStore("obs", 4, I8, 2)
    store.write(np.arange(3), store.fit([np.ones((1, 2), int), np.zeros((0, 1), int), np.ones((3, 1), int)], 3))
    other = RaggedStore("obs", 4, I8, 2)
    other.load_column(np.array([3, 1]), store.to_column(np.array([0, 2])))
    assert [row.shape for row in other.take(np.arange(4))] == [(0, 0), (3, 1), (0, 0), (1, 2)]


def test_rows_without_elements_do_not_determine_the_dtype() -> None:
    store = RaggedStore.for_rows("ids", [[], []], 4)
    store.write(np.arange(2), store.fit([[], []], 2))
    store.write(np.array([2]), store.fit([[1, 2]], 1))
    assert store.take(np.arange(4)).dtype == I8
    assert rows_of(store, [0, 1, 2, 3]) == [[], [], [1, 2], []]
    with pytest.raises(ColumnMismatchError, match="'ids' must store its values without loss, got float64 for int64"):
        store.fit([[0.5]], 1)


def steps(rows: list[list[int]]) -> SampleBatch:
    n = len(rows)
    return SampleBatch(
        obs=np.arange(n),
        actions=np.zeros(n),
        rewards=np.ones(n),
        terminateds=np.arange(n) % 4 == 3,
        truncateds=np.zeros(n, bool),
        ids=rows,
        obs_path=rows,
        ragged={"ids": "int64", "obs_path": "int32"},
    ).rename({"obs": "t", "obs_path": "obs"})


@pytest.mark.parametrize("lengths", [[2, 2, 2, 2, 2, 2], [1, 0, 3, 2, 5, 1], [0, 0, 0, 0, 0, 0]], ids=str)
def test_samples_have_ragged_columns_for_any_lengths(lengths: list[int]) -> None:
    import torch

    rows = [[i] * length for i, length in enumerate(lengths)]
    buffer = ReplayBuffer(16, ignore_obs_next=True)
    buffer.extend(steps(rows))
    samples = {
        "sample": buffer.sample(5)[0],
        "n-step": buffer.sample(5, n_step=2)[0],
        "slice": buffer[:],
        "latest": buffer.latest(3),
        "minibatch": next(buffer.minibatches(4))[0],
        "unpickled": pickle.loads(pickle.dumps(buffer)).sample(5)[0],
    }
    for name, batch in samples.items():
        for column, dtype in (("ids", np.int64), ("obs", np.int32), ("obs_next", np.int32)):
            assert isinstance(batch[column], RaggedColumn), (name, column)
            assert batch[column].dtype == dtype
        for row, t in zip(batch.ids, batch.t, strict=True):
            assert row.tolist() == rows[t]
        for row, t, done in zip(batch.obs_next, batch.t, batch.terminated, strict=True):
            assert name == "n-step" or row.tolist() == rows[t if done or t == 5 else t + 1]
        tensors = batch.to_torch()
        assert isinstance(tensors.ids, RaggedTorchColumn)
        assert tensors.ids.dtype == torch.int64
        assert tensors.to_numpy() == batch
        columns = {key: value for key, value in batch.items() if key not in RESERVED}
        assert batch.as_sample_batch().as_batch() == Batch(columns)
        assert isinstance(batch[1:].ids, RaggedColumn)
        assert isinstance(batch[np.array([0, -1])].ids, RaggedColumn)
        assert Batch.cat([batch, batch]).ids.lengths.tolist() == 2 * batch.ids.lengths.tolist()
        assert pickle.loads(pickle.dumps(batch)) == batch == copy.deepcopy(batch)


def test_cut_episodes_of_ragged_rows_return_final_observations() -> None:
    buffer = ReplayBuffer(8, ragged=True, ignore_obs_next=True)
    for t in range(4):
        buffer.add(
            Batch(
                obs=np.full(t, t),
                act=0,
                rew=0.0,
                terminated=False,
                truncated=t == 1,
                obs_next=np.full(t + 5, t),
                info={},
            )
        )
    rows = buffer[:]
    assert isinstance(rows.obs_next, RaggedColumn)
    assert [row.tolist() for row in rows.obs_next] == [[1], [1] * 6, [3, 3, 3], [3] * 8]
