"""Selecting and renaming columns: `select`, `drop`, `rename`, `columns`, `get`."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import (
    ColumnNotFoundError,
    ColumnTypeError,
    SampleBatchError,
    SequenceError,
)
from tests.batch.every_kind import in_sequences


@pytest.fixture
def batch() -> SampleBatch:
    return SampleBatch(a=[1, 2], obs={"x": [3, 4], "y": ([5, 6], [7, 8])}, b=[9, 10], _num_grad_updates=2.0)


def test_select_uses_the_requested_order_and_shares_memory(batch: SampleBatch) -> None:
    part = batch.select("b", "obs")
    assert list(part) == ["b", "obs"]
    assert part["b"] is batch["b"]
    assert part["obs"]["y"][1] is batch["obs"]["y"][1]
    assert part.num_grad_updates == 2.0
    part["new"] = [0, 0]
    del part["b"]
    assert list(batch) == ["a", "obs", "b"]


def test_drop_keeps_all_other_columns(batch: SampleBatch) -> None:
    assert list(batch.drop("a", "obs")) == ["b"]
    assert list(batch.drop()) == ["a", "obs", "b"]
    assert len(batch.drop("a", "b", "obs")) == 0
    assert batch.drop("obs") == SampleBatch(a=[1, 2], b=[9, 10])


def test_select_of_nothing_has_no_rows(batch: SampleBatch) -> None:
    assert list(batch.select()) == []
    assert len(batch.select()) == 0


def test_select_and_drop_on_a_view() -> None:
    view = SampleBatch(a=np.arange(5), b=np.arange(5))[2:4]
    assert view.select("b")["b"].tolist() == [2, 3]
    assert view.drop("b")["a"].tolist() == [2, 3]
    assert view.rename({"a": "c"})[1:]["c"].tolist() == [3]


@pytest.mark.parametrize("method", ["select", "drop"])
def test_a_misspelt_name_is_rejected(batch: SampleBatch, method: str) -> None:
    with pytest.raises(ColumnNotFoundError, match=r"no column 'ob'; did you mean 'obs'"):
        getattr(batch, method)("a", "ob")
    with pytest.raises(ColumnNotFoundError, match="no column 'ob'"):
        batch.rename({"ob": "c"})
    with pytest.raises(ColumnNotFoundError, match="no column 'ob'"):
        batch.columns(["a", "ob"])


@pytest.mark.parametrize("method", ["select", "drop"])
def test_part_of_a_nested_column_is_rejected(batch: SampleBatch, method: str) -> None:
    with pytest.raises(ColumnTypeError, match="'obs' must be selected or dropped with all its leaves"):
        getattr(batch, method)("a", "obs.x")


def test_all_leaves_of_a_nested_column_are_the_column(batch: SampleBatch) -> None:
    part = batch.select("obs.x", "obs.y.0", "obs.y.1")
    assert list(part) == ["obs"]
    assert part["obs"]["y"][0].tolist() == [5, 6]


def test_the_structures_that_flat_batches_share_cannot_be_written() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        SampleBatch(a=[1])._nested["obs"] = {"x": None}  # type: ignore[index]
    assert list(SampleBatch(b=[2])) == ["b"]


def test_rename_keeps_order_and_memory(batch: SampleBatch) -> None:
    renamed = batch.rename({"obs": "state", "a": "first"})
    assert list(renamed) == ["first", "state", "b"]
    assert renamed.column_names == ("first", "state.x", "state.y.0", "state.y.1", "b")
    assert renamed["state"]["y"][0] is batch["obs"]["y"][0]
    assert renamed["first"] is batch["a"]
    assert list(batch) == ["a", "obs", "b"]


def test_rename_can_swap(batch: SampleBatch) -> None:
    swapped = batch.rename({"a": "b", "b": "a"})
    assert swapped["a"].tolist() == [9, 10]
    assert swapped["b"].tolist() == [1, 2]
    assert list(swapped) == ["b", "obs", "a"]
    assert batch.rename({"obs": "a", "a": "obs"})["obs"].tolist() == [1, 2]


@pytest.mark.parametrize("mapping", [{"a": "b"}, {"a": "c", "b": "c"}, {"a": "obs.x"}, {"a": "obs"}, {"a": "obs.new"}])
def test_rename_rejects_duplicate_names(batch: SampleBatch, mapping: dict[str, str]) -> None:
    before = batch.copy()
    with pytest.raises(SampleBatchError, match=r"name|leaf|nested"):
        batch.rename(mapping)
    assert batch == before


def test_rename_rejects_one_leaf(batch: SampleBatch) -> None:
    with pytest.raises(SampleBatchError, match="'obs"):
        batch.rename({"obs.x": "x"})


def test_rename_rejects_names_that_are_not_strings(batch: SampleBatch) -> None:
    for columns in (batch, batch.drop("obs")):
        with pytest.raises(ColumnTypeError, match="string"):
            columns.rename({"a": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("padded", [False, True])
def test_selecting_without_seq_lens_gives_plain_rows(padded: bool) -> None:
    part = in_sequences(padded=padded).select("a", "b")
    assert len(part) == (16 if padded else 6)
    assert not part.zero_padded
    assert part.max_seq_len is None
    assert part[2:5]["a"].shape == (3,)


@pytest.mark.parametrize("padded", [False, True])
def test_selecting_with_seq_lens_keeps_the_sequences(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    part = batch.select("a", "state_in_0", "seq_lens")
    assert len(part) == 6
    assert part.zero_padded == padded
    assert part.max_seq_len == batch.max_seq_len
    assert part[2:5]["state_in_0"].tolist() == [[2.0], [3.0]]
    only = batch.select("seq_lens")
    assert len(only) == 6


def test_states_need_seq_lens() -> None:
    batch = in_sequences(padded=False)
    with pytest.raises(SequenceError, match="'state_in_0' has one row per sequence"):
        batch.drop("seq_lens")
    with pytest.raises(SequenceError, match="'state_in_0' has one row per sequence"):
        batch.select("a", "state_in_0")
    with pytest.raises(SampleBatchError, match=r"state_in_0|seq_lens"):
        batch.rename({"seq_lens": "lengths"})
    assert len(batch.drop("seq_lens", "state_in_0", "state_in_1")) == 6


def test_columns_and_get(batch: SampleBatch) -> None:
    obs, a = batch.columns(["obs", "a"])
    assert a is batch["a"]
    assert list(obs) == ["x", "y"]
    assert batch.columns([]) == []
    assert batch.get("obs.x") is batch["obs.x"]
    assert batch.get("none") is None
    assert batch.get("none", 3) == 3
    marker = object()
    assert batch.get("obs.none", marker) is marker
