"""What a batch takes in, at construction and at assignment."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from samplebatch import Batch, SampleBatch
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import (
    ColumnLengthError,
    ColumnTypeError,
    SampleBatchError,
    SequenceError,
)
from tests.batch.doors import Assign, every_door
from tests.batch.every_kind import DATES, NUMBERS, STRINGS, TORCH, every_kind, numbers, tensor


def test_a_batch_is_made_like_a_dict() -> None:
    expected = SampleBatch({"a": [1, 2], "b": [3, 4]})
    assert SampleBatch([("a", [1, 2]), ("b", [3, 4])]) == expected
    assert SampleBatch(a=[1, 2], b=[3, 4]) == expected
    assert SampleBatch({"a": [1, 2]}, b=[3, 4]) == expected
    assert SampleBatch(expected) == expected
    assert SampleBatch(SampleBatch({"a": [1, 2], "o": {"x": [1, 2]}})) == SampleBatch({"a": [1, 2], "o": {"x": [1, 2]}})
    with pytest.raises(TypeError):
        SampleBatch({"a": [1]}, {"b": [2]})


def test_a_batch_is_a_mutable_mapping() -> None:
    batch = SampleBatch(a=[1, 2], b=[3, 4])
    assert isinstance(batch, MutableMapping)
    batch.update(b=[5, 6], c=[7, 8])
    assert batch.setdefault("d", [9, 9]).tolist() == [9, 9]
    assert batch.setdefault("a", [0, 0]).tolist() == [1, 2]
    assert batch.pop("a").tolist() == [1, 2]
    assert batch.pop("a", None) is None
    with pytest.raises(KeyError, match="no column 'a'"):
        batch.pop("a")
    assert list(batch) == list(batch.keys()) == ["b", "c", "d"]
    assert "b" in batch
    assert "a" not in batch
    assert {name: values.tolist() for name, values in batch.items()} == {"b": [5, 6], "c": [7, 8], "d": [9, 9]}
    batch.clear()
    assert list(batch) == []
    assert len(batch) == 0


def test_pop_of_derived_dones_gives_the_default() -> None:
    batch = SampleBatch(terminateds=[True, False])
    assert batch.pop("dones", None) is None
    assert list(batch) == ["terminateds"]


def test_clear_works_with_sequences() -> None:
    batch = SampleBatch(seq_lens=[1, 2], a=[1, 2, 3], state_in_0=[1.0, 2.0])
    batch.clear()
    assert list(batch) == []
    batch["a"] = [1, 2, 3, 4]
    assert len(batch) == 4


def test_a_batch_without_columns() -> None:
    batch = SampleBatch()
    assert len(batch) == batch.size_bytes() == 0
    assert list(batch) == list(batch.rows()) == []
    assert batch.column_names == ()
    assert len(batch[:]) == len(batch.copy()) == len(batch.take([])) == 0
    assert batch.timeslices(3) == []


def test_the_first_column_of_an_empty_batch_sets_its_length() -> None:
    batch = SampleBatch()
    batch["a"] = np.zeros((4, 2))
    assert len(batch) == 4
    batch["a"] = np.zeros((5, 2))
    assert len(batch) == 5
    batch["b"] = np.zeros(5)
    with pytest.raises(ColumnLengthError, match="'a' must have 5 rows as 'b' has, got 4"):
        batch["a"] = np.zeros((4, 2))


@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES, *STRINGS])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 0), (0,), (0, 2)], ids=str)
def test_arrays_of_every_dtype_are_kept(dtype: str, shape: tuple[int, ...]) -> None:
    values = numbers(dtype, *shape)
    batch = SampleBatch(a=values)
    assert batch["a"] is values
    assert len(batch) == shape[0]
    assert batch.column("a").row_shape == shape[1:]


@pytest.mark.parametrize("dtype", TORCH)
def test_tensors_of_every_dtype_are_kept(dtype: str) -> None:
    values = tensor(dtype, 3, 2)
    assert SampleBatch(a=values)["a"] is values


def test_tensors_in_another_layout_are_copied_once() -> None:
    batch = SampleBatch(a=torch.arange(6).reshape(2, 3).T)
    assert batch["a"].is_contiguous()
    assert batch["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 3], np.int64),
        ([1.0, 2, 3], np.float64),
        ((1, 2, 3), np.int64),
        ([True, False, True], np.bool_),
        ([[1, 2], [3, 4], [5, 6]], np.int64),
        (["a", "bc", ""], "U2"),
        ([np.float32(1), np.float32(2), np.float32(3)], np.float32),
        ([np.zeros(2, np.float32)] * 3, np.float32),
    ],
    ids=["ints", "floats", "tuple", "bools", "rows", "strings", "scalars", "arrays"],
)
@every_door
def test_lists_become_arrays(door: Assign, values: Any, dtype: Any) -> None:
    held = door("a", values)["a"]
    assert isinstance(held, np.ndarray)
    assert held.dtype == dtype
    assert held.tolist() == np.array(values).tolist()


@every_door
def test_infos_become_an_array_of_the_very_objects(door: Assign) -> None:
    infos = [{"x": 1}, None, {}]
    held = door("infos", infos)["infos"]
    assert isinstance(held, np.ndarray)
    assert held.dtype == object
    assert held.shape == (3,)
    assert all(mine is given for mine, given in zip(held, infos, strict=True))


@every_door
def test_rows_of_varying_shape_become_a_ragged_column(door: Assign) -> None:
    held = door("a", [[1], [2, 3], []])["a"]
    assert isinstance(held, RaggedColumn)
    assert [row.tolist() for row in held] == [[1], [2, 3], []]
    tensors = door("a", [torch.ones(1), torch.ones(2), torch.ones(3)])["a"]
    assert isinstance(tensors, RaggedColumn)
    assert tensors.lengths.tolist() == [1, 2, 3]


@every_door
def test_tensors_in_a_list_are_stacked(door: Assign) -> None:
    held = door("a", [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])])["a"]
    assert isinstance(held, torch.Tensor)
    assert held.tolist() == [[1, 2], [3, 4], [5, 6]]


@every_door
def test_arrow_arrays_and_columns_are_taken(door: Assign) -> None:
    array = pa.array([1.0, 2.0, 3.0])
    held = door("a", array)["a"]
    assert held.tolist() == [1, 2, 3]
    assert held.__array_interface__["data"][0] == array.buffers()[1].address
    assert door("a", pa.chunked_array([[1, 2], [3]]))["a"].tolist() == [1, 2, 3]
    column = TensorColumn(np.arange(3))
    assert door("a", column).column("a") is column


def test_a_batch_holds_columns_of_every_kind_at_once() -> None:
    batch = SampleBatch(every_kind(5))
    assert len(batch) == 5
    assert {batch.column(name).kind for name in batch.column_names} == {
        "tensor",
        "torch",
        "ragged",
        "ragged_torch",
        "object",
    }


# -- replacing and deleting --------------------------------------------------------------------------------------------
def test_a_flat_column_gives_way_to_a_nested_one_and_back() -> None:
    batch = SampleBatch(a=[1, 2], obs=[3, 4])
    batch["obs"] = {"x": [5, 6], "y": ([7, 8], [9, 10])}
    assert batch.column_names == ("a", "obs.x", "obs.y.0", "obs.y.1")
    batch["obs"] = {"x": [1, 1]}
    assert batch.column_names == ("a", "obs.x")
    batch["obs"] = [0, 0]
    assert batch.column_names == ("a", "obs")
    assert batch["obs"].tolist() == [0, 0]


def test_a_leaf_can_be_assigned_alone() -> None:
    batch = SampleBatch(obs={"x": [1, 2], "y": [3, 4]})
    replaced = np.array([5.0, 6.0])
    batch["obs.x"] = replaced
    assert batch["obs"]["x"] is replaced
    assert batch["obs"]["y"].tolist() == [3, 4]


def test_deleting() -> None:
    batch = SampleBatch({"a": [1, 2], "obs": {"x": [1, 2], "y": [3, 4]}})
    with pytest.raises(ColumnTypeError, match=r"'obs.x' is part of the nested column 'obs'"):
        del batch["obs.x"]
    del batch["obs"]
    assert batch.column_names == ("a",)
    del batch["a"]
    assert len(batch) == 0
    batch["a"] = [1, 2, 3]
    assert len(batch) == 3


def test_deleting_seq_lens_needs_the_states_gone() -> None:
    batch = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2]).right_zero_pad(2)
    with pytest.raises(SequenceError, match="'state_in_0'"):
        del batch["seq_lens"]
    assert batch.zero_padded
    del batch["state_in_0"]
    del batch["seq_lens"]
    assert not batch.zero_padded
    assert batch.max_seq_len is None
    assert len(batch) == 4
    assert batch["a"].tolist() == [1, 0, 2, 3]


def test_seq_lens_can_be_assigned_later() -> None:
    batch = SampleBatch(a=[1, 2, 3])
    batch["seq_lens"] = [1, 2]
    assert batch["seq_lens"].dtype == np.int32
    assert batch.max_seq_len == 2
    batch["state_in_0"] = np.zeros((2, 4))
    batch["seq_lens"] = [2, 1]
    with pytest.raises(SampleBatchError, match=r"state_in_0|seq_lens"):
        batch["seq_lens"] = [3]
    assert batch["seq_lens"].tolist() == [2, 1]


class Point(NamedTuple):
    obs: Any
    rewards: Any


@dataclass
class Arm:
    joints: Any
    grip: Any


def test_records_become_columns() -> None:
    obs, rewards = np.zeros((3, 2)), np.ones(3)
    for given in (
        Point(obs, rewards),
        MappingProxyType({"obs": obs, "rewards": rewards}),
        Batch(obs=obs, rewards=rewards),
    ):
        batch = SampleBatch(given)
        assert batch["obs"] is obs
        assert batch["rewards"] is rewards
    assert SampleBatch(Arm(obs, rewards), more=[1, 2, 3]).column_names == ("joints", "grip", "more")


def test_records_become_nested_columns() -> None:
    joints = np.zeros((3, 2))
    for given in (Arm(joints, np.ones(3)), Batch(joints=joints, grip=np.ones(3))):
        batch = SampleBatch(obs=given, rewards=np.ones(3))
        assert batch["obs.joints"] is joints
        assert batch["obs"].keys() == {"joints", "grip"}


def test_a_tensordict_becomes_columns() -> None:
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"obs": torch.zeros(3, 2), "next": {"rewards": torch.ones(3)}}, batch_size=[3])
    batch = SampleBatch(td)
    assert batch["obs"].data_ptr() == td["obs"].data_ptr()
    assert batch["next.rewards"].tolist() == [1, 1, 1]
    assert SampleBatch(obs=td)["obs.next.rewards"].tolist() == [1, 1, 1]


def test_the_columns_given_are_not_changed() -> None:
    given = {"obs": [1.0], "seq_lens": None}
    assert list(SampleBatch(given)) == ["obs"]
    assert list(given) == ["obs", "seq_lens"]


@pytest.mark.parametrize("given", [3, "abc", [1, 2], None, object()], ids=lambda given: type(given).__name__)
def test_what_has_no_names_is_refused_by_its_type(given: Any) -> None:
    with pytest.raises(ColumnTypeError, match=f"made from a mapping, .* got a {type(given).__name__}"):
        SampleBatch(given)


def test_two_mappings_are_refused() -> None:
    with pytest.raises(ColumnTypeError, match="made from one mapping of columns at most, got 2 values"):
        SampleBatch({}, {})
