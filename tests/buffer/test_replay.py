"""ReplayBuffer: undocumented behaviour that users of Tianshou's buffers rely on."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, HERReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from samplebatch.column import threads
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    EmptyBufferError,
    RingError,
    RowIndexError,
    SampleBatchError,
)
from tests.buffer.oracle import step, steps
from tests.optional import torch


def filled(rows: int = 13, size: int = 10, ends: tuple[int, ...] = (6,), **options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(size, **options)
    for n in range(rows):
        buf.add(step(n, terminated=n in ends))
    return buf


# Kinds of values


def test_tensors_are_restored_as_tensors() -> None:
    buf = ReplayBuffer(6, stack_num=2)
    for n in range(8):
        hidden = torch.full((2,), float(n), dtype=torch.bfloat16, requires_grad=True)
        buf.add(step(n, obs=torch.tensor([n, n]), obs_next=torch.tensor([n + 1, n]), policy={"h": hidden}))
    assert torch.equal(buf.obs[:, 0], torch.tensor([6, 7, 2, 3, 4, 5]))
    rows = buf[[3, 0]]
    assert torch.equal(rows.obs[..., 0], torch.tensor([[2, 3], [5, 6]]))
    assert rows.policy.h.dtype == torch.bfloat16
    assert not rows.policy.h.requires_grad
    assert rows.policy.h[1, 1].tolist() == [6.0, 6.0]
    assert buf[0].obs.tolist() == [[5, 5], [6, 6]]
    assert buf[0].act == 6
    with pytest.raises(SampleBatchError, match=r"policy\.h"):
        buf.add(step(9, obs=torch.tensor([1, 1]), obs_next=torch.tensor([1, 1]), policy={"h": torch.zeros(2)}))


def test_tensors_at_the_ends_of_episodes() -> None:
    buf = ReplayBuffer(6, stack_num=3, ignore_obs_next=True)
    for n in range(5):
        buf.add(step(n, obs=torch.tensor(float(n)), obs_next=torch.tensor(n + 0.5), truncated=n == 2))
    assert buf[[1, 2, 4]].obs_next.tolist() == [[0.0, 1.0, 2.0], [1.0, 2.0, 2.5], [3.0, 4.0, 4.5]]


def test_tensors_and_arrays_may_alternate() -> None:
    buf = ReplayBuffer(3)
    buf.add(step(0, act=torch.tensor([1, 2])))
    buf.add(step(1, act=np.array([3, 4])))
    assert torch.equal(buf.act[:2], torch.tensor([[1, 2], [3, 4]]))
    other = ReplayBuffer(3)
    other.add(step(0, act=np.array([3.0, 4.0])))
    other.add(step(1, act=torch.tensor([1.0, 2.0])))
    assert other.act[:2].tolist() == [[3.0, 4.0], [1.0, 2.0]]


def test_objects_are_stored_unchanged() -> None:
    values: list[Any] = [{1, 2}, "words", None, [1, [2]], lambda: None]
    buf = ReplayBuffer(8)
    for n, value in enumerate(values):
        row = step(n)
        row.__dict__["info"] = Batch()
        row.info.__dict__["thing"] = value
        buf.add(row)
    assert all(actual is item for actual, item in zip(buf[:].info.thing, values, strict=True))
    assert buf[1].info.thing == "words"
    assert buf[0].info.thing == {1, 2}
    array = np.array([1, 2])
    buf.add(step(5, info={"thing": array}))
    array[0] = 7
    assert buf.info.thing[5].tolist() == [1, 2]
    assert buf.info.thing[6:].tolist() == [None, None]


def test_rows_of_objects_have_a_shape() -> None:
    buf = ReplayBuffer(3)
    for n in range(2):
        buf.add(step(n, obs=np.array(["left", f"{n}"]), obs_next=np.array(["right", None], object)))
    assert buf[:].obs.tolist() == [["left", "0"], ["left", "1"]]
    assert pickle.loads(pickle.dumps(buf))[:].obs.tolist() == [["left", "0"], ["left", "1"]]
    with pytest.raises(ColumnMismatchError, match="'obs'"):
        buf.add(step(2, obs=np.array(["a", "b", "c"]), obs_next=np.array(["right", None], object)))


def test_rows_of_varying_shape() -> None:
    buf = ReplayBuffer(4, ragged="obs", stack_num=2, ignore_obs_next=True)
    for n in range(6):
        buf.add(step(n, obs=np.arange(n), obs_next=np.arange(n + 1), terminated=n == 3))
    rows = buf[:]
    assert [[frame.tolist() for frame in row] for row in rows.obs] == [
        [[0, 1], [0, 1]],
        [[0, 1], [0, 1, 2]],
        [[0, 1, 2, 3]] * 2,
        [[0, 1, 2, 3], [0, 1, 2, 3, 4]],
    ]
    assert [row[-1].tolist() for row in rows.obs_next] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert buf.get([0], "obs", stack_num=1)[0].tolist() == [0, 1, 2, 3]


def test_compressed_columns_read_like_others() -> None:
    images = np.random.default_rng(0).integers(0, 3, (30, 20, 20), np.uint8)
    options: dict[str, Any] = {"stack_num": 3, "ignore_obs_next": True}
    plain, compressed = ReplayBuffer(20, **options), ReplayBuffer(20, compress=True, **options)
    for n in range(30):
        for buf in (plain, compressed):
            buf.add(step(n, obs=images[n], obs_next=images[(n + 1) % 30], truncated=n % 9 == 8))
    assert compressed.options["compress"] is True
    index = np.random.default_rng(1).integers(0, 20, 40)
    for name in ("obs", "obs_next"):
        assert np.array_equal(compressed[index][name], plain[index][name])
    assert np.array_equal(compressed.obs[3], plain.obs[3])
    with pytest.raises(ColumnTypeError, match="compress must be"):
        ReplayBuffer(3, compress=[1])  # type: ignore[list-item]


def test_only_the_last_frame_may_be_stored() -> None:
    for ignore in (True, False):
        buf = ReplayBuffer(5, stack_num=2, save_only_last_obs=True, ignore_obs_next=ignore)
        for n in range(4):
            frames = np.arange(n - 3, n + 1)
            buf.add(step(n, obs={"a": frames}, obs_next={"a": frames + 1}, truncated=n == 1))
        assert buf.obs.a.tolist() == [0, 1, 2, 3, 0]
        assert buf[:].obs.a.tolist() == [[0, 0], [0, 1], [2, 2], [2, 3]]
        expected = [[0, 1], [1, 2], [2, 3], [3, 4]] if ignore else [[1, 1], [1, 2], [3, 3], [3, 4]]
        assert buf[:].obs_next.a.tolist() == expected
    with pytest.raises(ColumnMismatchError, match="stacks of frames"):
        ReplayBuffer(3, save_only_last_obs=True).add(step(0))


# Slots without a row


def test_a_single_index_or_an_iteration_has_rows_that_were_written() -> None:
    buf = VectorReplayBuffer(8, 2)
    assert list(buf) == []
    for n in range(3):
        buf.add(steps([n, n + 10]))
    buf.add(steps([3]), buffer_ids=[1])
    assert [int(row.obs) for row in buf] == buf[:].obs.tolist() == [0, 1, 2, 10, 11, 12, 3]
    for index in (3, np.int64(3), np.array(3), -5):
        with pytest.raises(
            RowIndexError, match=r"index 3 must have a row, got an empty slot; .* the 7 indices with rows"
        ):
            buf[index]
        with pytest.raises(RowIndexError, match="index 3"):
            buf.get(index, "obs")
    # Arrays name slots, as they lie in memory.
    assert buf[np.arange(8)].obs.tolist() == buf.obs.tolist() == [0, 1, 2, 0, 10, 11, 12, 3]
    with pytest.raises(RowIndexError, match="index 3 must have a row"):
        buf.buffers[0][3]
    assert (int(buf.buffers[1][3].obs), [int(row.obs) for row in buf.buffers[1]]) == (3, [10, 11, 12, 3])
    buf.reset()
    assert list(buf) == []
    with pytest.raises(RowIndexError):
        buf[0]


def test_iteration_returns_stored_rows_in_time_order() -> None:
    buf = filled(13, 10)
    assert [int(row.act) for row in buf] == buf[:].act.tolist() == list(range(3, 13))
    rows = iter(buf)
    assert int(next(rows).act) == 3


def test_a_data_loader_has_no_rows_that_were_not_written() -> None:
    data = pytest.importorskip("torch.utils.data")
    buf = VectorReplayBuffer(8, 2)
    buf.add(steps([5, 6]))

    def collate(rows: list[Batch]) -> list[int]:
        return [int(row.obs) for row in rows]

    with pytest.raises(RowIndexError, match="sample_indices"):
        list(data.DataLoader(buf, batch_size=2, collate_fn=collate))
    loader = data.DataLoader(buf, batch_size=2, sampler=buf.sample_indices(0), collate_fn=collate)
    assert list(loader) == [[5, 6]]


# Refusals


@pytest.mark.parametrize("size", [-1, 2.5, True, "3", None])
def test_sizes_are_integers(size: Any) -> None:
    with pytest.raises(ArgumentError, match="whole number"):
        ReplayBuffer(size)


@pytest.mark.parametrize("size", [10**16, 10**30])
def test_sizes_larger_than_memory_are_rejected(size: int) -> None:
    with pytest.raises(ArgumentError, match=r"^size must be at most 140737488355328, got 10000"):
        ReplayBuffer(size)


def test_a_buffer_without_slots_accepts_no_rows() -> None:
    buf = ReplayBuffer(0)
    with pytest.raises(RingError, match="must have slots"):
        buf.add(step(0))
    assert (len(buf), buf.sample_indices(0).tolist(), repr(buf)) == (0, [], "ReplayBuffer()")
    assert ReplayBuffer(3).update(buf).tolist() == []
    assert buf.update(filled()).tolist() == []


@pytest.mark.parametrize("name", ["obs", "act", "rew", "terminated", "truncated"])
def test_steps_need_their_columns(name: str) -> None:
    buf = ReplayBuffer(3)
    row = step(0)
    row.pop(name)
    with pytest.raises(ColumnNotFoundError, match=f"'{name}'"):
        buf.add(row)
    assert repr(buf) == "ReplayBuffer()"


def test_next_observations_must_be_in_all_steps_or_in_none() -> None:
    buf = filled(2)
    row = step(2)
    row.pop("obs_next")
    with pytest.raises(ColumnNotFoundError, match="'obs_next'"):
        buf.add(row)
    assert len(buf) == 2
    without = ReplayBuffer(4)
    for n in range(2):
        row = step(n)
        row.pop("obs_next")
        without.add(row)
    assert without[:].obs_next.is_empty()


def test_a_batch_and_keyword_columns_together_are_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="'extra'"):
        ReplayBuffer(3).add(step(0), extra=1)


@pytest.mark.parametrize("index", [None, ..., "nothing", 1.5, [0.5], (0, 1), [True, False], np.zeros((2, 2), bool), {}])
def test_indices_of_other_kinds_are_rejected(index: Any) -> None:
    with pytest.raises((RowIndexError, ColumnNotFoundError)):
        filled()[index]


def test_indices_in_other_forms() -> None:
    buf = filled()
    mask = np.zeros(10, bool)
    mask[[2, 5]] = True
    assert buf[mask].obs.tolist() == [12, 5]
    assert buf[torch.tensor([2, -5])].obs.tolist() == [12, 5]
    assert buf[(3,)].obs == buf[np.int32(3)].obs == 3
    assert buf[np.array([1, 2], np.uint8)].obs.tolist() == [11, 12]
    assert buf["obs"] is buf.obs
    assert buf[range(3)].obs.tolist() == [10, 11, 12]


# Drawing


def test_sampling_from_an_empty_buffer_is_rejected() -> None:
    for buf in (ReplayBuffer(3), VectorReplayBuffer(6, 2)):
        for count in (1, 5):
            with pytest.raises(EmptyBufferError, match="add some first"):
                buf.sample(count)
        assert buf.sample_indices(None).tolist() == buf.sample_indices(-1).tolist() == []


def test_complete_stacks_only() -> None:
    buf = ReplayBuffer(12, stack_num=4, sample_avail=True)
    for n in range(3):
        buf.add(step(n))
    with pytest.raises(EmptyBufferError, match="4 frames"):
        buf.sample(2)
    for n in range(3, 30):
        buf.add(step(n, truncated=n % 5 == 4))
    full = buf.sample_indices(0)
    assert buf[full].act.tolist() == [23, 24, 28, 29]
    counts = np.bincount(buf.sample_indices(4000), minlength=12)
    assert counts[full].min() > 900
    assert counts.sum() == counts[full].sum() == 4000
    assert sorted(buf.sample_indices(None)) == sorted(full)
    assert buf[:].act.tolist() == list(range(18, 30))


def test_minibatches_have_every_row_once() -> None:
    buf = filled()
    epochs = [indices for _, indices in buf.minibatches(3, epochs=2)]
    assert [len(part) for part in epochs] == [3, 3, 3, 1] * 2
    first, second = np.concatenate(epochs[:4]), np.concatenate(epochs[4:])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()
    for rows, indices in buf.minibatches(4, shuffle=False, drop_last=True):
        assert rows.obs.tolist() == buf.obs[indices].tolist()
        assert len(rows) == 4
    with pytest.raises(ArgumentError, match="batch_size must be a whole number from 1"):
        next(buf.minibatches(0))
    assert list(ReplayBuffer(3).minibatches(2)) == []


def test_splits_depend_on_the_seed_of_the_buffer() -> None:
    def orders(seed: int) -> list[list[int]]:
        return [part.obs.tolist() for part in filled(random_seed=seed).split(4)]

    assert orders(1) == orders(1) != orders(2)
    assert sorted(n for part in orders(1) for n in part) == list(range(3, 13))
    assert [part.obs.tolist() for part in filled().split(6, shuffle=False, merge_last=True)] == [list(range(3, 13))]


# Copies


@pytest.mark.parametrize("index", [slice(None), slice(2, 5), [2, 3], np.array([2, 3]), slice(6, 1, -2)])
def test_rows_are_copies(index: Any) -> None:
    buf = filled()
    before = repr(buf._meta)
    for value in buf[index].values():
        if isinstance(value, np.ndarray):
            value[...] = 1
    assert repr(buf._meta) == before


def test_large_copies_use_two_cores() -> None:
    rows = 2 * threads.WORTHWHILE // 4000
    buf = ReplayBuffer(rows)
    obs = np.arange(rows * 500).reshape(rows, 500)
    for n in range(rows + rows // 3):
        buf.add(Batch(obs=obs[n % rows], act=n, rew=0.0, terminated=False, truncated=False))
    all_rows = buf[:]
    assert all_rows.act.tolist() == list(range(rows // 3, rows + rows // 3))
    assert np.array_equal(all_rows.obs, np.roll(obs, -(rows // 3), 0))
    assert np.array_equal(buf[7 : rows - 5].obs, obs[7 : rows - 5])
    assert np.array_equal(buf[buf.sample_indices(0)].obs, all_rows.obs)


# All rows at once


def test_a_new_column_misses_the_values_of_other_rows() -> None:
    buf = ReplayBuffer(6)
    for n in range(4):
        buf.add(step(n))
    buf.set_array_at_key(np.array([0.5, 1.5]), "advantage", index=[1, 3])
    assert np.isnan(buf.advantage).tolist() == [True, False, True, False, True, True]
    buf.set_array_at_key(np.array(["x"], object), "word", index=[1])
    assert buf.word.tolist() == [None, "x", None, None, None, None]
    assert buf.hasnull()
    before = repr(buf._meta)
    with pytest.raises(
        ColumnTypeError,
        match="column 'n' must have a dtype with a missing value or a default for its other rows, got int64",
    ):
        buf.set_array_at_key(np.array([1, 2]), "n", index=[1, 3])
    assert repr(buf._meta) == before
    buf.set_array_at_key(np.array([1, 2]), "n", index=[1, 3], default_value=7)
    assert buf.n.tolist() == [7, 1, 7, 2, 7, 7]
    buf.dropnull()
    assert buf[:].obs.tolist() == [1]
    buf.add(step(9))
    assert buf[:].advantage.tolist() == [0.5, 0.0]


def test_objects_that_are_numbers_become_numbers_once_null_rows_are_removed() -> None:
    buf = VectorReplayBuffer(8, 2)
    for score in (None, 2):
        buf.add(steps([0, 1], info={"score": np.array([score, score], object)}))
    assert buf.info.score.dtype == object
    buf.dropnull()
    assert buf[:].info.score.dtype == np.int64
    assert buf[:].to_torch().info.score.tolist() == [2, 2]
    buf.add(steps([5, 6], info={"score": np.array([3, 4])}))
    assert buf[:].info.score.tolist() == [2, 3, 2, 4]


@pytest.mark.parametrize("buf", [ReplayBuffer(0), ReplayBuffer(3), VectorReplayBuffer(4, 2)], ids=repr)
def test_numpy_sees_no_rows_in_an_empty_buffer(buf: ReplayBuffer) -> None:
    assert np.array([buf]).dtype == np.array([buf, buf]).dtype == object
    for index in (0, 9, [0], slice(None), ...):
        with pytest.raises(KeyError, match="nothing has been added"):
            buf[index]


def test_columns_can_be_set() -> None:
    buf = filled()
    buf.set_array_at_key(np.arange(10) * 2, "act")
    assert buf.act.tolist() == list(range(0, 20, 2))
    buf.set_array_at_key(np.array([0.5, 1.5]), "advantage", index=[2, 4], default_value=-1)
    assert buf.advantage.tolist() == [-1, -1, 0.5, -1, 1.5] + [-1] * 5
    assert buf[[2, 3]].advantage.tolist() == [0.5, -1.0]
    buf.set_array_at_key([7, 8], "rew", index=slice(8, None))
    assert buf.rew[8:].tolist() == [7.0, 8.0]
    buf.set_array_at_key([1, 0], "truncated", index=[0, 6])
    assert (buf.truncated[0], buf.done[0], buf.done[6]) == (True, True, True)
    assert buf.next(0) == 0
    before = repr(buf._meta)
    for values, name, error in (
        (np.arange(9), "act", ColumnLengthError),
        (np.full(10, 0.5), "act", ColumnMismatchError),
        (np.zeros(10, bool), "done", ColumnMismatchError),
        (["x"] * 10, "terminated", ColumnTypeError),
    ):
        with pytest.raises(error, match=f"'{name}'"):
            buf.set_array_at_key(values, name)
    assert repr(buf._meta) == before
    buf.add(step(50, advantage=2.5))
    assert buf.latest(1).advantage.tolist() == [2.5]


def data(rows: int = 6) -> dict[str, Any]:
    flags = np.zeros((3, rows), bool)
    flags[0, 2] = True
    flags[1, 4] = True
    flags[2] = flags[0] | flags[1]
    obs = np.arange(rows * 2.0).reshape(rows, 2)
    return {
        "obs": obs,
        "act": np.arange(rows),
        "rew": np.ones(rows),
        "terminated": flags[0],
        "truncated": flags[1],
        "done": flags[2],
        "obs_next": obs + 2,
    }


def test_buffers_of_data_share_its_memory_and_continue() -> None:
    original = data()
    buf = ReplayBuffer.from_data(**original)
    assert buf.obs is original["obs"]
    assert buf.last_index.tolist() == [5]
    assert buf.next(np.arange(6)).tolist() == [1, 2, 2, 4, 4, 5]
    assert buf.prev(np.arange(6)).tolist() == [0, 0, 1, 3, 3, 5]
    assert buf.add(step(9, obs=np.zeros(2), obs_next=np.ones(2)))[0].tolist() == [0]
    assert original["obs"][0].tolist() == [0.0, 0.0]
    for read_only in (True, False):
        other = data()
        other["obs"] = other["obs"][::-1]
        other["act"].flags.writeable = not read_only
        result = ReplayBuffer.from_data(**other)
        result.add(step(9, obs=np.zeros(2), obs_next=np.ones(2)))
        assert result.act[0] == 9
        assert other["act"][0] == (0 if read_only else 9)
        assert other["obs"][0, 0] == 10.0


def test_data_may_be_nested_and_of_other_kinds() -> None:
    original = data()
    original |= {"obs": Batch(a=original["obs"]), "obs_next": {"a": original["obs_next"]}, "act": list(range(6))}
    original |= {"rew": np.ones(6, np.float32), "terminated": [0, 0, 1, 0, 0, 0]}
    buf = ReplayBuffer.from_data(**original)
    assert buf.obs.a.shape == (6, 2)
    assert (buf.rew.dtype, buf.terminated.dtype) == (np.float64, bool)
    assert buf[:].obs_next.a[0].tolist() == [2.0, 3.0]
    assert len(ReplayBuffer.from_data(**{name: value[:0] for name, value in data().items()})) == 0


def test_slots_can_be_filled_without_stored_next_observations() -> None:
    buf = ReplayBuffer(6, ignore_obs_next=True)
    buf.set_batch(Batch(data()))
    assert len(buf) == 0
    buf._table.rings.append(0, 6)
    assert buf[:].obs_next[:5, 0].tolist() == [2.0, 4.0, 4.0, 8.0, 10.0]
    with pytest.raises(ColumnMismatchError, match="'obst'"):
        buf.set_batch({"obst": np.zeros(6)})


def test_rows_without_missing_values() -> None:
    buf = ReplayBuffer(5, ignore_obs_next=True)
    for n in range(8):
        missing = np.nan if n in (4, 6) else 0.0
        buf.add(step(n, info={"x": missing}, truncated=n == 5, obs_next=n + 100))
    assert buf.isnull().info.x.tolist() == [False, True, False, False, True]
    buf.dropnull()
    assert buf[:].obs.tolist() == [3, 5, 7]
    # Row 4 is gone; what came after row 3 was seen there nonetheless.
    assert buf[:].obs_next.tolist() == [4, 105, 107]
    assert (buf.maxsize, buf.hasnull()) == (5, False)
    assert [part.tolist() for part in buf.add(step(8, rew=1, terminated=1))][:2] == [[3], [14.0]]
    assert not ReplayBuffer(2).hasnull()


def test_updates_from_several_rings() -> None:
    vector = VectorReplayBuffer(6, 2, ignore_obs_next=True)
    for n in range(4):
        vector.add(steps([n, n + 10], truncated=[n == 2, n == 1], obs_next=[n + 100, n + 110]))
    for ignore in (True, False):
        buf = ReplayBuffer(9, ignore_obs_next=ignore)
        buf.add(step(50, info={}))
        assert buf.update(vector).tolist() == [1, 2, 3, 4, 5, 6]
        assert buf[:].obs.tolist() == [50, 1, 2, 3, 11, 12, 13]
        assert buf[:].obs_next.tolist()[1:3] == [2, 102]
        assert buf[:].obs_next.tolist()[4:] == [111, 13, 113]
    small = ReplayBuffer(4, ignore_obs_next=True)
    assert small.update(vector).tolist() == [0, 1, 2, 3, 0, 1]
    assert small[:].obs.tolist() == [3, 11, 12, 13]
    with pytest.raises(ColumnNotFoundError, match="'obs_next'"):
        filled(2).update(without_next())


def without_next() -> ReplayBuffer:
    buf = ReplayBuffer(3)
    row = step(0)
    row.pop("obs_next")
    buf.add(row)
    return buf


# Elsewhere


def test_copies_are_independent_buffers() -> None:
    for again in (copy.copy, copy.deepcopy, lambda buf: pickle.loads(pickle.dumps(buf, 4))):
        buf = filled(stack_num=2)
        other = again(buf)
        assert other.options == buf.options
        assert other[:].obs.tolist() == buf[:].obs.tolist()
        other.add(step(99))
        assert 99 not in buf.obs
        assert buf.sample_indices(5).tolist() == other.sample_indices(5).tolist()


def test_pickles_keep_final_observations() -> None:
    buf = ReplayBuffer(6, ignore_obs_next=True)
    for n in range(30):
        buf.add(step(n, truncated=n % 3 == 0, obs_next=n + 100))
    other = pickle.loads(pickle.dumps(buf))
    for _ in range(2):
        assert other[:].obs_next.tolist() == buf[:].obs_next.tolist()
        for item in (buf, other):
            item.add(step(31, truncated=1, obs_next=500))
    assert buf[:].obs_next.tolist()[-2:] == [500, 500]


def test_bytes_are_counted() -> None:
    buf = ReplayBuffer(1000)
    assert buf.nbytes == 0
    buf.add(step(0, obs=np.zeros(8, np.float32), obs_next=np.zeros(8, np.float32)))
    assert buf.nbytes == 1000 * (2 * 32 + 8 + 8 + 3)
    ignoring = ReplayBuffer(1000, ignore_obs_next=True)
    ignoring.add(step(0, obs=np.zeros(8, np.float32), obs_next=np.zeros(8, np.float32)))
    assert 1000 * (32 + 8 + 8 + 3) < ignoring.nbytes < 1000 * (32 + 8 + 8 + 3) + 5000


def wrapped(**options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(10, **options)
    for n in range(13):
        buf.add(step(n, terminated=n == 6))
    return buf


def reach(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -(achieved != desired).any(-1).astype(float)


def goal(n: int) -> dict[str, np.ndarray]:
    return {"observation": np.array([n]), "achieved_goal": np.array([n, n]), "desired_goal": np.array([-1, -1])}


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(("terminated", "truncated"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_done_is_terminated_or_truncated(value: bool, terminated: int, truncated: int) -> None:
    batch = step(0, terminated=terminated, truncated=truncated, done=value)
    before = batch.to_dict()
    buf = ReplayBuffer(3)
    buf.add(batch)
    assert buf.done[0] == (terminated or truncated)
    assert batch.to_dict() == before
    vector = VectorReplayBuffer(6, 2)
    vector.add(steps([0, 1], terminated=[terminated] * 2, truncated=[truncated] * 2, done=[value] * 2))
    assert vector.done[[0, 3]].tolist() == [bool(terminated or truncated)] * 2


@pytest.mark.parametrize("rew", [1, 1.5, np.float32(1.5), np.int8(1), True, np.array([1, 2]), np.ones(3, np.float32)])
def test_rewards_are_float64_and_flags_bool(rew: Any) -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0, rew=rew, terminated=np.int64(1), truncated=0.0))
    assert buf.rew.dtype == np.float64
    assert buf.rew.shape == (4, *np.shape(rew))
    assert buf.rew[0].tolist() == np.asarray(rew, float).tolist()
    assert [buf[0][name].dtype for name in ("terminated", "truncated", "done")] == [bool] * 3


def test_values_that_would_lose_precision_are_rejected() -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0, act=1, info={"n": np.float32(1)}))
    for lossy in ({"act": 0.7}, {"act": "x"}, {"info": {"n": 0.1}}, {"act": [1, 2]}):
        with pytest.raises(SampleBatchError, match=r"'act'|'info\.n'"):
            buf.add(step(1, **lossy))
    buf.add(step(1, act=2.0, info={"n": 0.5}))
    assert (len(buf), buf.act.tolist(), buf.act.dtype) == (2, [1, 2, 0, 0], np.int64)


def test_new_keys_are_filled_for_existing_rows() -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0))
    buf.add(step(1, info={"lives": 3}, policy={"logits": np.ones(2, np.float32)}, extra=7, name="x"))
    assert buf[:].info.lives.tolist() == [0, 3]
    assert buf[:].policy.logits.tolist() == [[0, 0], [1, 1]]
    assert buf[:].extra.tolist() == [0, 7]
    assert buf[:].name.tolist() == [None, "x"]
    buf.add(step(2))
    assert buf[:].info.lives.tolist() == [0, 3, 0]
    assert buf[:].extra.tolist() == [0, 7, 0]
    assert buf[:].name.tolist() == [None, "x", None]


def test_add_returns_four_arrays() -> None:
    buf = ReplayBuffer(4)
    for n, end in enumerate([False, False, True, False, True]):
        actual = buf.add(step(n, rew=n + 1, terminated=end))
        expected = (
            [n % 4],
            [6.0 if n == 2 else 9.0 if end else 0.0],
            [3 if n == 2 else 2 if end else 0],
            [3 * (n > 2)],
        )
        assert tuple(part.tolist() for part in actual) == expected
        assert [part.dtype.kind for part in actual] == list("ifii")


def test_returns_of_vector_rewards() -> None:
    buf = ReplayBuffer(4)
    assert buf.add(step(0, rew=np.array([1.0, 2.0])))[1].tolist() == [[0.0, 0.0]]
    assert buf.add(step(1, rew=np.array([3.0, 5.0]), truncated=1))[1].tolist() == [[4.0, 7.0]]
    assert buf.add(step(2, rew=np.array([1.0, 1.0])))[1].tolist() == [[0.0, 0.0]]


def test_buffer_ids_of_a_plain_buffer() -> None:
    buf = ReplayBuffer(4)
    index, _, length, start = buf.add(steps([7], terminated=[1]), buffer_ids=[0])
    assert (index.tolist(), length.tolist(), start.tolist()) == ([0], [1], [0])
    assert buf.add(steps([8]), buffer_ids=np.array([0]))[0].tolist() == [1]
    assert buf.add(step(9))[0].tolist() == [2]
    assert buf.obs.tolist() == [7, 8, 9, 0]
    for rows, ids in ((steps([7]), [1]), (steps([7, 8]), [0]), (steps([7, 8]), [0, 1]), (steps([7]), [])):
        with pytest.raises(ValueError, match=r"buffer_ids|rows"):
            buf.add(rows, buffer_ids=ids)
    assert len(buf) == 3


def test_all_rows_are_in_time_order_and_slices_in_storage_order() -> None:
    buf = wrapped()
    assert buf.sample_indices(0).tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert buf[:].obs.tolist() == list(range(3, 13))
    assert buf.sample(0)[0].obs.tolist() == list(range(3, 13))
    assert buf[-3:].obs.tolist() == [7, 8, 9]
    assert buf[0:5].obs.tolist() == [10, 11, 12, 3, 4]
    assert buf[8:2:-3].obs.tolist() == [8, 5]
    assert buf.latest(3).obs.tolist() == [10, 11, 12]
    shuffled = [buf.sample_indices(None).tolist() for _ in range(5)]
    assert all(sorted(indices) == list(range(10)) for indices in shuffled)
    assert len(set(map(tuple, shuffled))) == 5


def test_indices() -> None:
    buf = wrapped()
    assert buf.sample_indices(-1).tolist() == []
    assert buf[[]].obs.tolist() == []
    assert buf[[2, 2, -1]].obs.tolist() == [12, 12, 9]
    assert buf[np.array([[0, 1], [3, 4]])].obs.tolist() == [[10, 11], [3, 4]]
    assert buf[-1].obs == 9
    for index in (10, 99, [0, 10], np.array([3, 12])):
        with pytest.raises(IndexError):
            buf[index]


def test_rows_always_have_info_and_policy() -> None:
    buf = ReplayBuffer(3)
    buf.add(Batch(obs=0, act=0, rew=0, terminated=0, truncated=0))
    assert buf[0].info.is_empty()
    assert buf[:].policy.is_empty()
    buf = ReplayBuffer(3)
    buf.add(step(0, policy={"h": np.ones(2)}))
    assert buf[:].policy.h.tolist() == [[1.0, 1.0]]


def test_only_observations_info_and_policy_are_stacked() -> None:
    buf = ReplayBuffer(8, stack_num=3)
    for n in range(5):
        buf.add(step(n, terminated=n == 1, info={"n": n * 10}, policy={"h": np.array([n, n])}))
    rows = buf[[0, 1, 2, 4]]
    frames = [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 4]]
    assert rows.obs.tolist() == frames
    assert rows.obs_next.tolist() == (np.array(frames) + 1).tolist()
    assert rows.info.n.tolist() == (np.array(frames) * 10).tolist()
    assert rows.policy.h.tolist() == [[[n, n] for n in frame] for frame in frames]
    assert rows.act.tolist() == rows.rew.tolist() == [0, 1, 2, 4]
    assert buf.get([4], "obs", stack_num=2).tolist() == [[3, 4]]
    assert buf.get(4, "obs", stack_num=2).tolist() == [3, 4]
    assert buf.get(np.array([4]), "obs", stack_num=1).tolist() == [4]
    assert buf.get([4], "rew").tolist() == [[2.0, 3.0, 4.0]]
    assert buf.get([4], "nothing", 5) == 5
    with pytest.raises(KeyError, match="nothing"):
        buf.get([4], "nothing")


def test_stack_num_can_be_set_later() -> None:
    buf = wrapped()
    buf.stack_num = 2
    assert buf[[3, 4, 7]].obs.tolist() == [[3, 3], [3, 4], [7, 7]]
    vector = VectorReplayBuffer(6, 2)
    vector.add(steps([0, 1]))
    vector.add(steps([2, 3]))
    vector.stack_num = 3
    assert vector[[1, 4]].obs.tolist() == [[0, 0, 2], [1, 1, 3]]


def test_stacking_uses_one_gather_for_any_shape() -> None:
    buf = ReplayBuffer(8, stack_num=4)
    for n in range(11):
        buf.add(step(n, obs=np.full((2, 3), n, np.uint8), obs_next=np.full((2, 3), n + 1, np.uint8)))
    rows = buf[[0, 2]]
    assert rows.obs.shape == (2, 4, 2, 3)
    assert rows.obs[:, :, 0, 0].tolist() == [[5, 6, 7, 8], [7, 8, 9, 10]]
    assert rows.obs.dtype == np.uint8


def test_previous_and_next_stop_at_ends_and_at_the_last_write() -> None:
    buf = wrapped()
    assert buf.prev(np.arange(10)).tolist() == [9, 0, 1, 3, 3, 4, 5, 7, 7, 8]
    assert buf.next(np.arange(10)).tolist() == [1, 2, 2, 4, 5, 6, 6, 8, 9, 0]
    assert buf.prev(3) == 3
    assert buf.next(9) == 0
    assert buf.prev([4, 8]).tolist() == [3, 7]
    assert buf.last_index.tolist() == [2]
    assert buf.unfinished_index().tolist() == [2]


def test_interval_of_indices() -> None:
    buf = VectorReplayBuffer(10, 2)
    assert buf.get_buffer_indices(2, 4).tolist() == [2, 3]
    assert buf.get_buffer_indices(start=4, stop=2).tolist() == [4, 0, 1]
    assert buf.get_buffer_indices(start=8, stop=7).tolist() == [8, 9, 5, 6]
    for start, stop in ((1, 6), (8, 1)):
        with pytest.raises(ValueError, match=f"{start}"):
            buf.get_buffer_indices(start, stop)


def test_attributes_and_items_of_an_empty_buffer() -> None:
    buf = ReplayBuffer(3)
    with pytest.raises(AttributeError, match="obs"):
        _ = buf.obs
    with pytest.raises(KeyError):
        buf[0]
    assert (np.array([buf]).dtype, np.array([buf]).shape) == (object, (1,))
    assert np.array([buf, VectorReplayBuffer(4, 2)], dtype=object).shape == (2,)
    assert buf.sample_indices(0).tolist() == []
    assert buf.unfinished_index().tolist() == []
    assert len(buf) == 0


def test_similar_column_names_are_computed_only_for_a_shown_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buf = ReplayBuffer(3)
    buf.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=1, info={}, goal=1))
    with pytest.raises(AttributeError, match=r"'ReplayBuffer' object has no attribute 'gaol': .* mean 'goal'\?"):
        _ = buf.gaol
    monkeypatch.setattr("difflib.get_close_matches", None)
    assert not hasattr(buf, "gaol")


def test_reserved_names_cannot_be_set() -> None:
    with pytest.raises((SampleBatchError, AttributeError), match="obs"):
        ReplayBuffer(3).obs = np.zeros(3)


def test_reset_does_not_erase_the_data() -> None:
    buf = wrapped()
    buf.reset()
    assert len(buf) == 0
    assert buf.obs.tolist() == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]
    assert buf.sample_indices(0).tolist() == []
    assert [part.tolist() for part in buf.add(step(50, rew=2, terminated=1))] == [[0], [2.0], [1], [0]]
    assert buf.prev(0) == buf.next(0) == 0


def test_reset_keeps_the_running_episode_on_request() -> None:
    buf = ReplayBuffer(5)
    for n in range(3):
        buf.add(step(n, rew=1))
    buf.reset(keep_statistics=True)
    assert [part.tolist() for part in buf.add(step(3, rew=1, terminated=1))] == [[0], [4.0], [4], [0]]
    for n in range(5):
        buf.add(step(n, rew=1, terminated=n == 0))
    buf.reset(keep_statistics=True)
    assert [part.tolist() for part in buf.add(step(3, rew=1, terminated=1))] == [[0], [5.0], [5], [0]]


def test_rare_complete_stacks_are_drawn_as_often_as_requested() -> None:
    buf = ReplayBuffer(100, stack_num=4, sample_avail=True, random_seed=1)
    for n in range(100):
        buf.add(step(n, terminated=n < 96 and n % 3 == 2))
    assert buf.sample_indices(200).tolist() == [99] * 200


@pytest.mark.parametrize("kind", ["her", "prioritized", "vector", "plain"])
def test_draws_use_the_generator_of_the_buffer(kind: str) -> None:
    def make(seed: int) -> ReplayBuffer:
        if kind == "her":
            return HERReplayBuffer(40, compute_reward_fn=reach, horizon=6, random_seed=seed)
        if kind == "prioritized":
            return PrioritizedReplayBuffer(40, alpha=0.6, beta=0.4, random_seed=seed)
        return VectorReplayBuffer(40, 1, random_seed=seed) if kind == "vector" else ReplayBuffer(40, random_seed=seed)

    def draws(seed: int, disturb: bool) -> list[Any]:
        buf = make(seed)
        for n in range(30):
            buf.add(
                steps([n], obs=[goal(n)], obs_next=[goal(n + 1)], rew=[-1], terminated=[n % 5 == 4]), buffer_ids=[0]
            )
        actual = []
        for _ in range(3):
            if disturb:
                np.random.seed(7)
            batch, indices = buf.sample(16)
            actual.append((indices.tolist(), batch.obs.desired_goal.tolist()))
        return actual

    assert draws(1, False) == draws(1, True)
    assert draws(1, False) != draws(2, False)
    state = np.random.get_state()[1].tolist()
    draws(1, False)
    assert np.random.get_state()[1].tolist() == state


def test_objects_cannot_be_stored_in_hdf5(tmp_path: Path) -> None:
    buf = ReplayBuffer(3)
    buf.add(step(0, info={"what": lambda: None}))
    with pytest.raises(NotImplementedError):
        buf.save_hdf5(str(tmp_path / "x.hdf5"))


def test_done_without_other_flags_means_terminated() -> None:
    buf = ReplayBuffer(4)
    actual = buf.add(obs=1, act=1, rew=2, done=True, obs_next=2, info={})
    assert [part.tolist() for part in actual] == [[0], [2.0], [1], [0]]
    assert (buf.terminated[0], buf.truncated[0], buf.done[0]) == (True, False, True)
    buf.add(Batch(obs=1, act=1, rew=2, done=False, obs_next=2, info={}))
    assert buf.done.tolist() == [True, False, False, False]
    vector = VectorReplayBuffer(4, 2)
    vector.add(obs=[1, 2], act=[1, 2], rew=[0, 0], done=[0, 1], obs_next=[1, 2], info=[{}, {}])
    assert vector.terminated.tolist() == [False, False, True, False]


def test_set_batch_and_from_data() -> None:
    rows = steps(list(range(5)), done=[0] * 5)
    buf = ReplayBuffer(5)
    buf.set_batch(rows)
    assert buf.obs.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SampleBatchError):
        ReplayBuffer(4).set_batch(rows)
    names = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")
    data = {name: np.asarray(rows[name]) for name in names}
    result = ReplayBuffer.from_data(**data)
    assert (len(result), result.maxsize) == (5, 5)
    assert result[:].obs_next.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(SampleBatchError):
        ReplayBuffer.from_data(**{**data, "act": data["act"][:3]})


def test_nulls() -> None:
    buf = ReplayBuffer(6)
    for n in range(4):
        buf.add(step(n, obs=float(n), obs_next=np.nan if n == 2 else float(n + 1)))
    assert buf.hasnull()
    assert buf.isnull().obs_next.tolist() == [False, False, True, False]
    buf.dropnull()
    assert len(buf) == 3
    assert buf[:].obs.tolist() == [0.0, 1.0, 3.0]
    assert not buf.hasnull()
