"""What a batch takes in, at construction and at assignment, and what it refuses, by name and without a trace."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from samplebatch import SampleBatch
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    SampleBatchError,
    SequenceError,
)
from tests.batch.every_kind import DATES, NUMBERS, STRINGS, TORCH, every_kind, numbers, tensor

Assign = Callable[[str, Any], SampleBatch]


def construct(name: str, values: Any) -> SampleBatch:
    return SampleBatch({"first": [1, 2, 3], name: values})


def assign(name: str, values: Any) -> SampleBatch:
    batch = SampleBatch(first=[1, 2, 3])
    batch[name] = values
    return batch


def replace(name: str, values: Any) -> SampleBatch:
    batch = SampleBatch({"first": [1, 2, 3], name: [4, 5, 6]})
    batch[name] = values
    return batch


def assign_to_view(name: str, values: Any) -> SampleBatch:
    view = SampleBatch(first=[0, 1, 2, 3])[1:]
    view[name] = values
    return view


every_door = pytest.mark.parametrize("door", [construct, assign, replace, assign_to_view])


# -- ways in ----------------------------------------------------------------------------------------------------------


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
    assert {batch.column(name).kind for name in batch.column_names} == {"tensor", "torch", "ragged", "object"}


# -- refusals ---------------------------------------------------------------------------------------------------------


@every_door
@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_another_length_is_refused_by_name(door: Assign, length: int) -> None:
    for values in (
        np.zeros(length),
        np.zeros((length, 2)),
        torch.zeros(length),
        [{}] * length,
        {"x": np.zeros(length)},
    ):
        with pytest.raises(ColumnLengthError, match=rf"'obs(\.x)?' must have 3 rows as 'first' has, got {length}"):
            door("obs", values)


@every_door
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (5, "single int"),
        (2.5, "single float"),
        (None, "single NoneType"),
        ("word", "single str"),
        (b"bytes", "single bytes"),
        (np.float32(1), "single float32"),
        (np.array(1.0), "0-d array"),
        (torch.tensor(1.0), "0-d tensor"),
        (object(), "single object"),
        (np.ma.masked_array([1, 2, 3], [0, 1, 0]), "mask"),
        (np.zeros(3, [("x", "f4"), ("y", "i4")]), "fields"),
        (np.zeros(3, "V4"), "dtype"),
        (torch.zeros(3).to_sparse(), "dense"),
        ({1: np.zeros(3)}, "strings for keys"),
        ({"x": np.array(1.0)}, "0-d array"),
        (pa.array([1, None, 3]), "no nulls, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_without_rows_of_a_kind_are_refused_by_name(door: Assign, values: Any, message: str) -> None:
    with pytest.raises(ColumnTypeError, match=rf"'strange(\.x)?'.*{message}"):
        door("strange", values)


@every_door
def test_a_name_must_be_a_string(door: Assign) -> None:
    with pytest.raises(ColumnTypeError, match="must be a string, got a int"):
        door(3, [1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [[1, 2], np.zeros(4), np.array(1), {"x": [1, 2]}, {"x": [1, 2, 3], "y": 5}, None, {"x": [1, 2, 3], "y": [1]}],
    ids=str,
)
@pytest.mark.parametrize("name", ["a", "b", "obs", "obs.x", "new"])
def test_a_refused_assignment_leaves_no_trace(name: str, values: Any) -> None:
    batch = SampleBatch({"a": np.arange(3), "b": [{}, {}, {}], "obs": {"x": np.arange(3.0)}, "n": [7, 8, 9]})
    before = batch.copy(shallow=True)
    held = dict(batch.items())
    with pytest.raises(SampleBatchError, match=f"'{name}"):
        batch[name] = values
    assert batch == before
    assert list(batch) == ["a", "b", "obs", "n"]
    assert all(batch[top] is values for top, values in held.items() if top != "obs")


@pytest.mark.parametrize("lengths", [[1, 1], [4], [-1, 4], [1.5, 1.5], np.array(["1", "2"]), 3], ids=str)
def test_refused_seq_lens_leave_no_trace(lengths: Any) -> None:
    for batch in (
        SampleBatch(a=np.arange(3)),
        SampleBatch(a=np.arange(3), seq_lens=[1, 2]),
        SampleBatch(a=np.arange(3), seq_lens=[3], state_in_0=[1.0]),
    ):
        before = batch.copy()
        with pytest.raises(SampleBatchError, match=r"seq_lens"):
            batch["seq_lens"] = lengths
        assert batch == before
        assert batch.max_seq_len == before.max_seq_len


@pytest.mark.parametrize("lengths", [[-1, 4], [1.5, 2.5], ["1", "2"], [True, True, True]], ids=str)
@pytest.mark.parametrize("form", [list, np.array])
def test_seq_lens_must_be_counts(lengths: Any, form: Any) -> None:
    with pytest.raises(SampleBatchError, match="'seq_lens'"):
        SampleBatch(a=[1, 2, 3], seq_lens=form(lengths))


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2), (2, 1, 1)], ids=str)
def test_seq_lens_of_any_shape_are_a_length_for_each_sequence(shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=np.array([1, 2]).reshape(shape))
    assert batch["seq_lens"].tolist() == [1, 2]
    assert len(batch) == 3
    assert batch[1:]["state_in_0"].tolist() == [2.0]


@pytest.mark.parametrize("lengths", [3, 2.5, "3", np.array(3)], ids=repr)
def test_seq_lens_must_have_rows(lengths: Any) -> None:
    with pytest.raises(SampleBatchError, match="'seq_lens'"):
        SampleBatch(a=[1, 2, 3], seq_lens=lengths)


def test_a_misspelt_column_lists_the_near_ones() -> None:
    batch = SampleBatch(rewards=[1.0], obs={"camera": [1]})
    with pytest.raises(ColumnNotFoundError, match=r"no column 'reward'; did you mean 'rewards'\?"):
        batch["reward"]
    with pytest.raises(ColumnNotFoundError, match=r"no column 'obs.camra'; did you mean 'obs.camera'\?"):
        batch.column("obs.camra")
    with pytest.raises(ColumnNotFoundError, match="no column 'x'"):
        del batch["x"]


# -- nested names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"obs.camera": [1, 2], "obs": {"camera": [3, 4]}},
        {"obs": {"camera": [3, 4]}, "obs.camera": [1, 2]},
        {"obs": {"arm.grip": [1, 2], "arm": {"grip": [3, 4]}}},
        {"obs": {"arm": [1, 2]}, "obs.leg": [3, 4]},
        {"obs.leg": [3, 4], "obs": {"arm": [1, 2], "leg": [5, 6]}},
    ],
)
def test_two_columns_of_one_dotted_name_are_refused_at_construction(columns: dict[str, Any]) -> None:
    with pytest.raises((ColumnMismatchError, ColumnTypeError), match="'obs"):
        SampleBatch(columns)


def test_a_stranger_among_the_leaves_of_a_nested_column_is_refused() -> None:
    batch = SampleBatch(obs={"arm": [1, 2]})
    with pytest.raises(ColumnTypeError, match=r"'obs.leg' is no leaf of the nested column 'obs'"):
        batch["obs.leg"] = [3, 4]
    flat = SampleBatch({"obs.arm": [1, 2]})
    with pytest.raises(ColumnMismatchError, match=r"'obs.arm' is there already"):
        flat["obs"] = {"arm": [3, 4]}
    assert flat["obs.arm"].tolist() == [1, 2]


def test_a_named_tuple_is_refused() -> None:
    from typing import NamedTuple

    class Observation(NamedTuple):
        camera: np.ndarray
        arm: np.ndarray

    with pytest.raises(ColumnTypeError, match="'obs' must be a dict or a plain tuple, got a named tuple Observation"):
        SampleBatch(obs=Observation(np.zeros(2), np.zeros(2)))


def test_dots_in_flat_names_are_allowed() -> None:
    batch = SampleBatch({"agent.0": [1, 2], "agent.1": [3, 4]})
    assert list(batch) == ["agent.0", "agent.1"]
    assert batch["agent.1"].tolist() == [3, 4]


# -- replacing and deleting -------------------------------------------------------------------------------------------


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
