"""Values that a batch rejects, with the name in the error and without side effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    SampleBatchError,
)
from tests.batch.doors import Assign, every_door
from tests.optional import torch


@every_door
@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_columns_of_another_length_are_rejected_with_the_name(door: Assign, length: int) -> None:
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
        (np.zeros(3, [("x", "f4"), ("y", "i4")]), "one column per field"),
        (np.zeros(3, "V4"), "dtype"),
        (torch.zeros(3).to_sparse(), "dense"),
        ({1: np.zeros(3)}, "strings for keys"),
        ({"x": np.array(1.0)}, "0-d array"),
        (pa.array([1, None, 3]), "no nulls, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_without_rows_are_rejected_with_the_column_name(door: Assign, values: Any, message: str) -> None:
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
def test_a_rejected_assignment_changes_nothing(name: str, values: Any) -> None:
    batch = SampleBatch({"a": np.arange(3), "b": [{}, {}, {}], "obs": {"x": np.arange(3.0)}, "n": [7, 8, 9]})
    before = batch.copy(shallow=True)
    stored = dict(batch.items())
    with pytest.raises(SampleBatchError, match=f"'{name}"):
        batch[name] = values
    assert batch == before
    assert list(batch) == ["a", "b", "obs", "n"]
    assert all(batch[top] is values for top, values in stored.items() if top != "obs")


@pytest.mark.parametrize("lengths", [[1, 1], [4], [-1, 4], [1.5, 1.5], np.array(["1", "2"]), 3], ids=str)
def test_rejected_seq_lens_change_nothing(lengths: Any) -> None:
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


def test_a_misspelt_column_lists_similar_names() -> None:
    batch = SampleBatch(rewards=[1.0], obs={"camera": [1]})
    with pytest.raises(ColumnNotFoundError, match=r"no column 'reward'; did you mean 'rewards'\?"):
        batch["reward"]
    with pytest.raises(ColumnNotFoundError, match=r"no column 'obs.camra'; did you mean 'obs.camera'\?"):
        batch.column("obs.camra")
    with pytest.raises(ColumnNotFoundError, match="no column 'x'"):
        del batch["x"]


# -- nested names ------------------------------------------------------------------------------------------------------
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
def test_duplicate_dotted_names_are_rejected_at_construction(columns: dict[str, Any]) -> None:
    with pytest.raises((ColumnMismatchError, ColumnTypeError), match="'obs"):
        SampleBatch(columns)


def test_an_unknown_leaf_of_a_nested_column_is_rejected() -> None:
    batch = SampleBatch(obs={"arm": [1, 2]})
    with pytest.raises(ColumnTypeError, match=r"'obs.leg' must be a leaf of the nested column 'obs'"):
        batch["obs.leg"] = [3, 4]
    flat = SampleBatch({"obs.arm": [1, 2]})
    with pytest.raises(ColumnMismatchError, match=r"'obs.arm' already exists"):
        flat["obs"] = {"arm": [3, 4]}
    assert flat["obs.arm"].tolist() == [1, 2]


def test_a_named_tuple_is_rejected() -> None:
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


@every_door
def test_a_tensor_that_requires_a_gradient_is_rejected_with_the_name(door: Assign) -> None:
    values = torch.ones(2, requires_grad=True)
    for tensor in (values, values * 2):
        with pytest.raises(ColumnTypeError, match=r"column 'x' must be a tensor without a gradient.*detach\(\)"):
            door("x", tensor)
    assert SampleBatch(x=values.detach())["x"].tolist() == [1, 1]
