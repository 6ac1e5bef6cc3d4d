"""Views and copies: columns are sliced on access, and a view keeps the columns of its creation."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import ColumnNotFoundError
from tests.batch.every_kind import with_every_kind
from tests.optional import torch


@pytest.fixture
def batch() -> SampleBatch:
    return SampleBatch(a=np.arange(6), b=np.arange(12.0).reshape(6, 2), obs={"x": np.arange(6)})


# -- the parent changes -----------------------------------------------------------------------------------------------


def test_a_view_shows_array_writes_made_before_its_first_read(batch: SampleBatch) -> None:
    view = batch[2:5]
    batch["a"][3] = 100
    assert view["a"].tolist() == [2, 100, 4]
    batch["a"][4] = 200
    assert view["a"].tolist() == [2, 100, 200]
    view["b"][0] = -1
    assert batch["b"][2].tolist() == [-1, -1]


@pytest.mark.parametrize("read", [False, True], ids=["not yet cut", "cut"])
def test_a_view_does_not_follow_added_or_removed_columns(batch: SampleBatch, read: bool) -> None:
    view, nested = batch[2:5], batch[1:][1:4]
    if read:
        _ = view["a"], view["obs"], nested["a"]
    batch["a"] = np.zeros(6)
    batch["new"] = np.zeros(6)
    batch["obs"] = np.zeros(6)
    del batch["b"]
    for part in (view, nested):
        assert list(part) == ["a", "b", "obs"]
        assert part["a"].tolist() == [2, 3, 4]
        assert part["b"].tolist() == [[4, 5], [6, 7], [8, 9]]
        assert part["obs"]["x"].tolist() == [2, 3, 4]
        with pytest.raises(ColumnNotFoundError):
            part["new"]
    assert batch.column_names == ("a", "new", "obs")


def test_a_view_does_not_follow_in_place_operations(batch: SampleBatch) -> None:
    views = [batch[1:4]]
    batch.shuffle(rng=3)
    views.append(batch[:2])
    shuffled = batch["a"].tolist()
    batch.compress(columns={"b"})
    views.append(batch[4:])
    batch.to_device("cpu")
    assert views[0]["a"].tolist() == [1, 2, 3]
    assert isinstance(views[0]["a"], np.ndarray)
    assert views[1]["a"].tolist() == shuffled[:2]
    assert views[1].column("b").kind == "tensor"
    assert views[2].column("b").kind == "compressed"
    assert isinstance(views[2]["a"], np.ndarray)


# -- the view changes -------------------------------------------------------------------------------------------------


def test_a_view_of_sequences_does_not_follow_assigned_columns() -> None:
    batch = SampleBatch(obs=np.arange(6), seq_lens=[2, 4])
    view = batch[2:6]
    batch["obs"] = np.zeros(6, int)
    assert view["obs"].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("read", [False, True], ids=["not yet cut", "cut"])
def test_assigning_to_a_view_does_not_change_the_parent(batch: SampleBatch, read: bool) -> None:
    view = batch[2:5]
    if read:
        _ = view["a"], view["b"]
    view["a"] = np.array([7, 8, 9])
    view["new"] = np.array([1, 2, 3])
    del view["b"]
    assert list(view) == ["a", "obs", "new"]
    assert view["a"].tolist() == [7, 8, 9]
    assert view["obs"]["x"].tolist() == [2, 3, 4]
    assert list(batch) == ["a", "b", "obs"]
    assert batch["a"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("read", [False, True], ids=["not yet cut", "cut"])
def test_a_view_of_a_view_that_was_assigned_to_has_the_new_column(batch: SampleBatch, read: bool) -> None:
    view = batch[2:5]
    if read:
        _ = view["a"]
    view["a"] = np.array([7, 8, 9])
    part = view[1:]
    view["a"] = np.array([0, 0, 0])
    assert part["a"].tolist() == [8, 9]
    assert view[:1]["a"].tolist() == [0]
    assert view.take([2])["a"].tolist() == [0]
    assert view.copy()["a"].tolist() == [0, 0, 0]


def test_in_place_operations_on_a_view_do_not_change_the_parent(batch: SampleBatch) -> None:
    before = batch.copy()
    batch[1:5].shuffle(rng=0)
    batch[1:5].compress(columns={"a", "b"})
    batch[1:5].to_device("cpu")
    batch[:].shuffle(rng=1)
    view = batch[:]
    view.clear()
    assert batch == before
    assert all(batch.column(name).kind == "tensor" for name in batch.column_names)


def test_views_of_one_batch_are_independent(batch: SampleBatch) -> None:
    first, second = batch[:3], batch[:3]
    first["a"] = np.zeros(3)
    assert second["a"].tolist() == [0, 1, 2]
    second["a"][0] = 50
    assert batch["a"][0] == 50
    assert first["a"].tolist() == [0, 0, 0]


def test_reading_a_column_twice_gives_the_same_object(batch: SampleBatch) -> None:
    view = batch[2:5]
    assert view["a"] is view["a"]
    assert view["obs"]["x"] is view["obs.x"]
    assert view["a"] is dict(view.items())["a"]


def test_a_deep_chain_of_views(batch: SampleBatch) -> None:
    view = batch
    for _ in range(5):
        view = view[1:]
    assert len(view) == 1
    assert view["a"].tolist() == [5]
    assert view["b"].tolist() == [[10, 11]]
    assert np.shares_memory(view["b"], batch["b"])


def test_a_view_keeps_a_reference_to_the_memory() -> None:
    batch = SampleBatch(a=np.arange(1000))
    watch = weakref.ref(batch["a"])
    view = batch[10:20]
    del batch
    gc.collect()
    assert watch() is not None
    assert view["a"].tolist() == list(range(10, 20))
    del view
    gc.collect()
    assert watch() is None


def test_writes_to_read_only_memory_raise() -> None:
    values = np.arange(4)
    values.flags.writeable = False
    batch = SampleBatch(a=values)
    for part in (batch, batch[1:], batch.copy(shallow=True)):
        with pytest.raises(ValueError, match="read-only"):
            part["a"][0] = 1
    batch.copy()["a"][0] = 1
    batch.take([0])["a"][0] = 1
    assert values.tolist() == [0, 1, 2, 3]


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5)], ids=["whole", "view"])
def test_a_copy_shares_nothing(rows: slice) -> None:
    batch = with_every_kind(7)[rows]
    copied = batch.copy()
    assert copied == batch
    for name in batch.column_names:
        mine, theirs = batch.column(name), copied.column(name)
        assert type(mine) is type(theirs)
        if mine.kind == "tensor" and mine.nbytes:
            assert not np.shares_memory(mine.values, theirs.values), name
            assert theirs.values.flags.writeable
        elif mine.kind == "torch":
            assert mine.values.untyped_storage().data_ptr() != theirs.values.untyped_storage().data_ptr(), name
        elif mine.kind == "ragged":
            assert not np.shares_memory(mine.elements, theirs.elements), name
        elif mine.kind == "object":
            assert mine.values is not theirs.values, name


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5)], ids=["whole", "view"])
def test_a_shallow_copy_shares_the_arrays_but_not_the_set_of_columns(rows: slice) -> None:
    batch = with_every_kind(7)[rows]
    shallow = batch.copy(shallow=True)
    assert all(shallow.column(name) is batch.column(name) for name in batch.column_names)
    shallow["new"] = np.zeros(len(batch))
    del shallow["infos"]
    shallow["flat i8"] = np.zeros(len(batch))
    assert "new" not in batch
    assert "infos" in batch
    assert batch["flat i8"].dtype == np.int64
    batch["other"] = np.zeros(len(batch))
    assert "other" not in shallow


def test_copies_keep_flags_and_sequences() -> None:
    batch = SampleBatch(
        a=np.zeros(4), state_in_0=[1.0, 2.0], seq_lens=[2, 1], _zero_padded=True, _max_seq_len=2, _num_grad_updates=3
    )
    batch.set_training()
    for converted in (batch.copy(), batch.copy(shallow=True), copy.copy(batch), copy.deepcopy(batch)):
        assert converted == batch
        assert len(converted) == 3
        assert (converted.zero_padded, converted.max_seq_len, converted.num_grad_updates, converted.is_training) == (
            True,
            2,
            3,
            True,
        )


def test_copy_copy_is_shallow() -> None:
    batch = SampleBatch(a=np.arange(3), infos=[{}, {}, {}])
    shallow = copy.copy(batch)
    assert shallow["a"] is batch["a"]
    shallow["new"] = [1, 2, 3]
    assert "new" not in batch


def test_copy_deepcopy_is_deep_and_writable() -> None:
    infos = [{"list": [1]}, {"list": [2]}]
    batch = SampleBatch(a=np.arange(2), t=torch.arange(2), infos=infos)
    deep = copy.deepcopy(batch)
    assert deep == batch
    deep["a"][0] = 100
    deep["t"][0] = 100
    deep["infos"][0]["list"].append(2)
    assert batch["a"].tolist() == [0, 1]
    assert batch["t"].tolist() == [0, 1]
    assert infos[0] == {"list": [1]}
