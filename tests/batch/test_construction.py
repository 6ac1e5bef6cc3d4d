"""Values that a batch accepts at construction and at assignment."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, SampleBatch
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    SampleBatchError,
    SequenceError,
)
from tests.batch.doors import Assign, every_door
from tests.batch.every_kind import DATES, NUMBERS, TORCH, every_kind, numbers, tensor
from tests.optional import HAS_TORCH, torch


def test_a_batch_is_created_like_a_dict() -> None:
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


@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 0), (0,), (0, 2)], ids=str)
def test_arrays_of_every_dtype_are_preserved(dtype: str, shape: tuple[int, ...]) -> None:
    values = numbers(dtype, *shape)
    batch = SampleBatch(a=values)
    assert batch["a"] is values
    assert len(batch) == shape[0]
    assert batch.column("a").row_shape == shape[1:]


@pytest.mark.parametrize("dtype", TORCH)
def test_tensors_of_every_dtype_are_preserved(dtype: str) -> None:
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
        (["a", "bc", ""], np.dtypes.StringDType()),
        (["a", None, ""], np.dtypes.StringDType(na_object=None)),
        ([b"a", b"bc\0", b""], object),
        ([["a", "b"], ["", "cd"], ["e", "f"]], np.dtypes.StringDType()),
        ([np.float32(1), np.float32(2), np.float32(3)], np.float32),
        ([np.zeros(2, np.float32)] * 3, np.float32),
    ],
    ids=["ints", "floats", "tuple", "bools", "rows", "strings", "none", "bytes", "words", "scalars", "arrays"],
)
@every_door
def test_lists_become_arrays(door: Assign, values: Any, dtype: Any) -> None:
    column = door("a", values)["a"]
    assert isinstance(column, np.ndarray)
    assert column.dtype == dtype
    assert column.tolist() == [row.tolist() if isinstance(row, np.ndarray | np.generic) else row for row in values]


@every_door
def test_infos_become_an_array_of_the_same_objects(door: Assign) -> None:
    infos = [{"x": 1}, None, {}]
    column = door("infos", infos)["infos"]
    assert isinstance(column, np.ndarray)
    assert column.dtype == object
    assert column.shape == (3,)
    assert all(mine is value for mine, value in zip(column, infos, strict=True))


@every_door
def test_rows_of_varying_shape_become_a_ragged_column(door: Assign) -> None:
    column = door("a", [[1], [2, 3], []])["a"]
    assert isinstance(column, RaggedColumn)
    assert [row.tolist() for row in column] == [[1], [2, 3], []]
    tensors = door("a", [torch.ones(1), torch.ones(2), torch.ones(3)])["a"]
    assert isinstance(tensors, RaggedTorchColumn)
    assert tensors.lengths.tolist() == [1, 2, 3]


@every_door
def test_tensors_in_a_list_are_stacked(door: Assign) -> None:
    column = door("a", [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])])["a"]
    assert isinstance(column, torch.Tensor)
    assert column.tolist() == [[1, 2], [3, 4], [5, 6]]


@every_door
def test_arrow_arrays_and_columns_are_accepted(door: Assign) -> None:
    array = pa.array([1.0, 2.0, 3.0])
    stored = door("a", array)["a"]
    assert stored.tolist() == [1, 2, 3]
    assert stored.__array_interface__["data"][0] == array.buffers()[1].address
    assert door("a", pa.chunked_array([[1, 2], [3]]))["a"].tolist() == [1, 2, 3]
    column = TensorColumn(np.arange(3))
    assert door("a", column).column("a") is column


def test_a_batch_contains_columns_of_every_kind_together() -> None:
    batch = SampleBatch(every_kind(5))
    assert len(batch) == 5
    kinds = {"tensor", "ragged", "text", "object"} | ({"torch", "ragged_torch"} if HAS_TORCH else set())
    assert {batch.column(name).kind for name in batch.column_names} == kinds


# -- replacing and deleting --------------------------------------------------------------------------------------------
def test_assignment_replaces_flat_columns_by_nested_ones_and_back() -> None:
    batch = SampleBatch(a=[1, 2], obs=[3, 4])
    batch["obs"] = {"x": [5, 6], "y": ([7, 8], [9, 10])}
    assert batch.column_names == ("a", "obs.x", "obs.y.0", "obs.y.1")
    batch["obs"] = {"x": [1, 1]}
    assert batch.column_names == ("a", "obs.x")
    batch["obs"] = [0, 0]
    assert batch.column_names == ("a", "obs")
    assert batch["obs"].tolist() == [0, 0]


def test_one_leaf_of_a_nested_column_can_be_assigned() -> None:
    batch = SampleBatch(obs={"x": [1, 2], "y": [3, 4]})
    replaced = np.array([5.0, 6.0])
    batch["obs.x"] = replaced
    assert batch["obs"]["x"] is replaced
    assert batch["obs"]["y"].tolist() == [3, 4]


def test_deleting() -> None:
    batch = SampleBatch({"a": [1, 2], "obs": {"x": [1, 2], "y": [3, 4]}})
    with pytest.raises(ColumnTypeError, match=r"'obs.x' is a leaf of the nested column 'obs'"):
        del batch["obs.x"]
    del batch["obs"]
    assert batch.column_names == ("a",)
    del batch["a"]
    assert len(batch) == 0
    batch["a"] = [1, 2, 3]
    assert len(batch) == 3


def test_deleting_seq_lens_requires_deleting_states_first() -> None:
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
    for value in (
        Point(obs, rewards),
        MappingProxyType({"obs": obs, "rewards": rewards}),
        Batch(obs=obs, rewards=rewards),
    ):
        batch = SampleBatch(value)
        assert batch["obs"] is obs
        assert batch["rewards"] is rewards
    assert SampleBatch(Arm(obs, rewards), more=[1, 2, 3]).column_names == ("joints", "grip", "more")


def test_records_become_nested_columns() -> None:
    joints = np.zeros((3, 2))
    for value in (Arm(joints, np.ones(3)), Batch(joints=joints, grip=np.ones(3))):
        batch = SampleBatch(obs=value, rewards=np.ones(3))
        assert batch["obs.joints"] is joints
        assert batch["obs"].keys() == {"joints", "grip"}


def test_a_tensordict_becomes_columns() -> None:
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"obs": torch.zeros(3, 2), "next": {"rewards": torch.ones(3)}}, batch_size=[3])
    batch = SampleBatch(td)
    assert batch["obs"].data_ptr() == td["obs"].data_ptr()
    assert batch["next.rewards"].tolist() == [1, 1, 1]
    assert SampleBatch(obs=td)["obs.next.rewards"].tolist() == [1, 1, 1]


def test_the_mapping_passed_to_the_constructor_is_unchanged() -> None:
    options = {"obs": [1.0], "seq_lens": None}
    assert list(SampleBatch(options)) == ["obs"]
    assert list(options) == ["obs", "seq_lens"]


@pytest.mark.parametrize("value", [3, "abc", [1, 2], None, object()], ids=lambda value: type(value).__name__)
def test_values_without_names_are_rejected_by_type(value: Any) -> None:
    with pytest.raises(ColumnTypeError, match=f"must be a mapping, .* got a {type(value).__name__}"):
        SampleBatch(value)


def test_two_mappings_are_rejected() -> None:
    with pytest.raises(ColumnTypeError, match="accepts at most one mapping of columns, got 2 values"):
        SampleBatch({}, {})


LENGTHS: dict[str, list[list[int]]] = {
    "of one length": [[1, 2], [3, 4]],
    "one row": [[1, 2, 3]],
    "of many lengths": [[1], [], [2, 3]],
    "without elements": [[], []],
    "no rows": [],
}
of_lengths = pytest.mark.parametrize("rows", LENGTHS.values(), ids=LENGTHS)


@of_lengths
def test_a_declared_column_is_ragged_for_any_lengths(rows: list[list[int]]) -> None:
    arrays = [np.array(row, np.int64) for row in rows]
    for value in (rows, arrays, np.fromiter(arrays, object, len(rows))):
        batch = SampleBatch({"ids": value}, t=np.arange(len(rows)), ragged={"ids": "int64"})
        column = batch["ids"]
        assert isinstance(column, RaggedColumn)
        assert (column.dtype, [row.tolist() for row in column]) == (np.dtype("int64"), rows)
        for part in (batch[:1], batch[:0], batch.take(np.arange(len(rows))), batch.copy(), batch.select("ids")):
            assert isinstance(part["ids"], RaggedColumn)
            assert part["ids"].dtype == np.int64


def test_declared_names_include_nested_columns() -> None:
    nested = {"path": [[1], [2]], "deep": {"ids": [[3], [4]]}}
    full = SampleBatch(obs=nested, t=[0, 1], ragged="obs")
    assert {name: full.column(name).kind for name in full.column_names} == {
        "obs.path": "ragged",
        "obs.deep.ids": "ragged",
        "t": "tensor",
    }
    leaf = SampleBatch(obs=nested, ragged=["obs.deep.ids"])
    assert [leaf.column(name).kind for name in leaf.column_names] == ["tensor", "ragged"]


def test_a_declared_array_is_viewed() -> None:
    ids = np.arange(6).reshape(3, 2)
    assert np.shares_memory(SampleBatch(ids=ids, ragged="ids")["ids"].elements, ids)
    tensor = torch.arange(12).reshape(2, 3, 2)
    column = SampleBatch(ids=tensor, ragged="ids")["ids"]
    assert isinstance(column, RaggedTorchColumn)
    assert column.elements.data_ptr() == tensor.data_ptr()
    assert torch.equal(column[1], tensor[1])


def test_all_rows_are_converted_to_a_declared_dtype() -> None:
    batch = SampleBatch(ids=[[1], []], logp=[[0.1], [0.2]], ragged={"ids": np.int32, "logp": "float32"})
    assert [batch[name].dtype for name in batch] == [np.int32, np.float32]
    assert batch["logp"][0] == np.float32(0.1)
    with pytest.raises(ColumnMismatchError, match="'ids' must store its values without loss, got float64 for int32"):
        SampleBatch(ids=[[1.5]], ragged={"ids": np.int32})
    with pytest.raises(ColumnMismatchError, match="'ids' must store its values without loss, got int64 for int8"):
        SampleBatch(ids=[[1000]], ragged={"ids": np.int8})
    with pytest.raises(ColumnMismatchError, match="'x' must store its values without loss, got float64 for float32"):
        SampleBatch(x=[np.array([0.1])], ragged={"x": np.float32})


@pytest.mark.parametrize(
    ("columns", "ragged", "words"),
    [
        ({"ids": [[1]]}, "idz", "ragged must name columns of the batch, 'idz' is none; did you mean 'ids'?"),
        ({"ids": [[1]]}, ["ids", 3], "ragged must contain column names, got int"),
        ({"ids": [[1]]}, np.zeros((2, 2)), "ragged must contain column names, got ndarray; pass dtypes by column name"),
        ({"ids": [[1]]}, {"ids": "intt"}, "ragged must map column names to element dtypes"),
        ({"ids": [1, 2]}, "ids", "column 'ids' must have rows that are arrays, got a single int in row 0"),
        (
            {"ids": np.zeros(3)},
            "ids",
            "column 'ids' must have rows that are arrays, got single values of dtype float64",
        ),
        ({"ids": ["a"]}, "ids", "column 'ids' must have rows that are arrays, got a single str in row 0"),
        ({"ids": [{}]}, "ids", "column 'ids' must have rows that are arrays"),
        ({"ids": [np.zeros(1), np.zeros((1, 1))]}, "ids", "column 'ids' must have rows of one number of dimensions"),
    ],
)
def test_values_that_cannot_be_ragged_are_rejected_with_the_name(
    columns: dict[str, Any], ragged: Any, words: str
) -> None:
    with pytest.raises(SampleBatchError, match=words.replace("?", r"\?")):
        SampleBatch(columns, ragged=ragged)


def test_a_list_that_replaces_a_ragged_column_becomes_ragged() -> None:
    batch = SampleBatch(ids=[[1], [2, 3]])
    batch["ids"] = [[4], [5]]
    assert isinstance(batch["ids"], RaggedColumn)
    batch["ids"] = np.zeros((2, 1))
    assert isinstance(batch["ids"], np.ndarray)
    batch["ids"] = [[1], [2, 3]]
    batch["ids"] = [1, 2]
    assert batch["ids"].tolist() == [1, 2]


def test_jagged_tensors_are_ragged_columns() -> None:
    rows = [torch.arange(2), torch.arange(3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    column = SampleBatch(ids=nested)["ids"]
    assert isinstance(column, RaggedTorchColumn)
    assert column.elements.data_ptr() == nested.values().data_ptr()
    assert [row.tolist() for row in column] == [[0, 1], [0, 1, 2]]
    images = torch.nested.nested_tensor([torch.ones(1, 4), torch.zeros(2, 4)], layout=torch.jagged)
    assert [row.shape for row in SampleBatch(a=images)["a"]] == [(1, 4), (2, 4)]
    cut = torch.nested.narrow(
        torch.arange(8).reshape(2, 4), 1, torch.tensor([1, 0]), torch.tensor([2, 4]), torch.jagged
    )
    assert [row.tolist() for row in SampleBatch(a=cut)["a"]] == [[1, 2], [4, 5, 6, 7]]
    assert torch.equal(SampleBatch(ids=nested)["ids"].to_torch().values(), nested.values())
    with warnings.catch_warnings():
        # This layout is on its way out.
        warnings.simplefilter("ignore", UserWarning)
        strided = torch.nested.nested_tensor(rows)
    for refused, words in (
        (images.transpose(1, 2), "must be a jagged tensor whose second dimension varies"),
        (strided, "must be a dense or a jagged tensor"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged, requires_grad=True), "without a gradient"),
    ):
        with pytest.raises(ColumnTypeError, match=f"column 'a' {words}" if "without" not in words else words):
            SampleBatch(a=refused)
