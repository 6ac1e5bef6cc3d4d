"""Columns: a tree of stores, in the structure of what was added."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import Batch
from samplebatch.buffer.columns import Columns, leaves_of, take_rows
from samplebatch.buffer.store import DenseStore
from samplebatch.buffer.stores import Stores
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError, FormatError
from tests.optional import torch


def made(slots: int = 6, **rows: Any) -> Columns:
    columns = Columns(slots, Stores())
    n = len(next(iter(rows.values())))
    columns.write(columns.fit(rows, n), slice(0, n))
    return columns


def kinds(columns: Columns) -> dict[str, str]:
    return {".".join(path): store.kind for path, store in columns.leaves()}


def test_structures_grow_and_gaps_are_filled() -> None:
    columns = made(a=np.array([1, 2]))
    columns.write(columns.fit({"a": [3], "b": {"c": np.array(["x"]), "d": {}}}, 1), 2)
    columns.write(columns.fit(Batch(a=4, b={"d": {"e": 0.5}}), 1, single=True), 3)
    assert kinds(columns) == {"a": "dense", "b.c": "object", "b.d.e": "dense"}
    columns.write(columns.fit({"a": [5]}, 1), 4)
    columns.write(columns.fit({"a": [6], "b": {}}, 1), 5)
    actual = take_rows(columns.tree, np.arange(6))
    assert actual.a.tolist() == [1, 2, 3, 4, 5, 6]
    assert actual.b.c.tolist() == [None, None, "x", None, None, None]
    assert actual.b.d.e.tolist() == [0, 0, 0, 0.5, 0, 0]


def test_a_column_without_values_is_filled_with_zeros() -> None:
    columns = made(a=np.array([1, 2]))
    columns.write(columns.fit({"a": Batch()}, 1), 1)
    assert columns.tree["a"].values.tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"a": {"b": [1]}}, ColumnMismatchError, "'a' must have rows of values, got a nested batch"),
        ({"a": [1], "n": [1]}, ColumnMismatchError, "'n' must be a nested batch, got a list"),
        ({"a": [1, 2]}, ColumnLengthError, "'a' must have 1 rows, got 2"),
        ({"a": [1], "n": {"x": [0.5]}}, ColumnMismatchError, r"'n\.x' must store its values without loss"),
        ({"a": [1], "new": {"y": 5}}, ColumnTypeError, r"'new\.y' must have rows"),
        ({"a": [1], "new": {"y": [1, 2]}}, ColumnLengthError, r"'new\.y' must have 1 rows"),
    ],
)
def test_rejected_values_do_not_change_any_column(options: dict[str, Any], error: type[Exception], words: str) -> None:
    columns = made(a=np.array([1, 2]), n={"x": np.array([3, 4])})
    before = kinds(columns), repr(take_rows(columns.tree, np.arange(6)))
    with pytest.raises(error, match=words):
        columns.fit({"ok": [1], **options}, 1)
    assert (kinds(columns), repr(take_rows(columns.tree, np.arange(6)))) == before


def test_one_column_can_be_written_without_the_others() -> None:
    columns = made(a=np.array([1, 2]), n={"x": np.array([3, 4])})
    columns.write(columns.fit_only("n", {"x": [9]}, 1), 0)
    assert take_rows(columns.tree, np.array([0])).to_dict() == {"a": np.array([1]), "n": {"x": np.array([9])}}


def test_existing_arrays_can_be_used_as_columns() -> None:
    array, other = np.arange(6), np.arange(12)[::2]
    rows = {"a": array, "n": {"b": other}, "short": [1, 2, 3, 4, 5, 6]}
    columns = Columns(6, Stores())
    columns.write(columns.fit(rows, 6, keep=True), slice(0, 6))
    assert columns.tree["a"].values is array
    assert not np.shares_memory(columns.tree["n"]["b"].values, other)
    assert columns.tree["short"].values.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ColumnLengthError, match="'a'"):
        Columns(5, Stores()).fit({"a": array}, 5, keep=True)
    compressed = Columns(6, Stores(compress=("a",)))
    compressed.write(compressed.fit({"a": array}, 6, keep=True), slice(0, 6))
    assert kinds(compressed) == {"a": "compressed"}


def test_every_kind_of_column_is_restored_from_its_live_rows() -> None:
    ragged = np.empty(3, object)
    ragged[:] = [np.arange(n) for n in (2, 0, 3)]
    rows = {
        "obs": {"camera": np.arange(12, dtype=np.uint8).reshape(3, 4), "path": ragged},
        "words": np.array(["a", "b", None], object),
        "grid": np.array([["a", 1]] * 3, object),
        "tensor": torch.arange(3.0),
        "nothing": {"at": {}},
    }
    columns = Columns(5, Stores(compress=("obs.camera",)))
    columns.write(columns.fit(rows, 3), np.array([4, 1, 2]))
    assert list(kinds(columns).values()) == ["compressed", "ragged", "object", "object", "torch"]
    slots = np.array([1, 4])
    actual = columns.state_dict(slots)
    again = Columns(5, Stores(compress=("obs.camera",)))
    again.load_state_dict(slots, actual)
    assert kinds(again) == kinds(columns)
    assert again.tree["nothing"] == {"at": {}}
    assert repr(take_rows(again.tree, slots)) == repr(take_rows(columns.tree, slots))
    again.write(again.fit({**rows, "words": [None, "c", "d"]}, 3), slice(0, 3))
    for broken in ({"tree": {"a": 7}}, {"columns": actual["columns"][:2]}):
        with pytest.raises(FormatError, match="must exist with 2 rows"):
            Columns(5, Stores()).load_state_dict(slots, actual | broken)


def test_names_with_dots_are_distinguished() -> None:
    columns = made(**{"a.b": np.array([1]), "a": {"b": np.array([2])}})
    assert [path for path, _ in leaves_of(columns.tree)] == [("a.b",), ("a", "b")]
    assert [store.values[0] for _, store in columns.leaves()] == [1, 2]


def test_the_column_name_selects_the_kind_of_store() -> None:
    stores = Stores(compress=("obs",), ragged=("info.path",))
    image = np.zeros((1, 8, 8), np.uint8)
    actual = [stores.make(name, image, 3).kind for name in ("obs", "obs.camera", "obs_next", "observer", "info.path")]
    assert actual == ["compressed", "compressed", "dense", "dense", "ragged"]
    finals = stores.for_final_observations()
    assert finals.make("obs", image, 3).kind == "dense"
    assert Stores(ragged=("obs.path",)).for_final_observations().make("obs_next.path", image, 3).kind == "ragged"
    assert type(Stores().make("x", image, 3)) is DenseStore
