"""Nested and tuple observations are stored flat and restored by every operation."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, ViewRequirement, concat_samples
from samplebatch.batch.tree import flatten, is_nested, leaf_names, unflatten
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnNotFoundError, ColumnTypeError
from tests.optional import torch

Tree = Any


def observations(n: int, start: int = 0) -> dict[str, Tree]:
    """Return a dict, a tuple, a nested mix and a flat column; all values of row i equal start + i."""
    rows = np.arange(start, start + n)
    return {
        "obs": {"camera": rows.astype(np.uint8).reshape(n, 1, 1) * np.ones((2, 2), np.uint8), "pose": rows + 0.0},
        "new_obs": (rows, rows.astype(np.float32)[:, None]),
        "deep": {"a": ({"b": rows}, rows), "c": {"d": {"e": torch.from_numpy(rows.astype(np.float32))}}},
        "flat": rows,
    }


def same(mine: Tree, theirs: Tree) -> bool:
    """Return whether two nested values have the same structure and equal leaves."""
    if isinstance(mine, dict):
        return isinstance(theirs, dict) and list(mine) == list(theirs) and all(same(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, tuple):
        return isinstance(theirs, tuple) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    return type(mine) is type(theirs) and mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()


def each(value: Tree, change: Callable[[Any], Any]) -> Tree:
    if isinstance(value, dict):
        return {key: each(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(each(item, change) for item in value)
    return change(value)


def assert_holds(batch: SampleBatch, columns: dict[str, Tree]) -> None:
    assert list(batch) == list(columns)
    for name, expected in columns.items():
        assert same(batch[name], expected), name


def test_nested_columns_are_stored_flat_and_restored() -> None:
    columns = observations(4)
    batch = SampleBatch(columns)
    assert batch.column_names == (
        "obs.camera",
        "obs.pose",
        "new_obs.0",
        "new_obs.1",
        "deep.a.0.b",
        "deep.a.1",
        "deep.c.d.e",
        "flat",
    )
    assert_holds(batch, columns)
    assert batch["obs"]["camera"] is columns["obs"]["camera"]
    assert batch["obs.camera"] is columns["obs"]["camera"]
    assert batch["new_obs.1"] is columns["new_obs"][1]
    assert batch["deep.c.d.e"] is columns["deep"]["c"]["d"]["e"]
    assert "obs" in batch
    assert "obs.camera" in batch
    assert "obs.c" not in batch
    assert "deep.a" not in batch
    assert len(batch) == 4


def test_changing_the_returned_dict_changes_the_batch() -> None:
    batch = SampleBatch(observations(4))
    batch["obs"]["extra"] = [0, 1, 2, 3]
    del batch["obs"]["pose"]
    batch["obs"]["camera"] = np.arange(4)
    assert {key: values.tolist() for key, values in batch["obs"].items()} == {
        "camera": [0, 1, 2, 3],
        "extra": [0, 1, 2, 3],
    }
    assert batch.column_names[:3] == ("obs.camera", "obs.extra", "new_obs.0")
    batch["deep"]["a"][0]["x"] = {"y": np.zeros(4)}
    batch["deep"]["a"][0]["x"]["y"] = np.ones(4)
    del batch["deep"]["c"]["d"]["e"]
    assert batch["deep"]["a"][0]["x"]["y"].tolist() == [1] * 4
    assert [name for name in batch.column_names if name.startswith("deep")] == [
        "deep.a.0.b",
        "deep.a.0.x.y",
        "deep.a.1",
    ]
    assert pickle.loads(pickle.dumps(batch)) == batch == SampleBatch.from_arrow(batch.to_arrow())


def test_every_method_of_a_dict_changes_the_batch() -> None:
    batch = SampleBatch(a=np.arange(2), obs={key: np.full(2, i) for i, key in enumerate("stuvwxyz")})
    obs = batch["obs"]
    assert obs is batch["obs"]
    obs.update({"t": [7, 7]}, u=[8, 8])
    obs |= {"v": [9, 9], "new": [1, 1]}
    assert obs.pop("w").tolist() == [4, 4]
    assert obs.pop("w", None) is None
    assert obs.popitem()[0] == "new"
    assert obs.setdefault("x", [5, 5]).tolist() == [5, 5]
    assert obs.setdefault("other", [6, 6]).tolist() == [6, 6]
    assert {key: values[0].item() for key, values in obs.items()} == {
        "s": 0, "t": 7, "u": 8, "v": 9, "x": 5, "y": 6, "z": 7, "other": 6,
    }  # fmt: skip
    assert [name.removeprefix("obs.") for name in batch.column_names[1:]] == list(obs) == list(batch["obs"])
    obs.clear()
    assert (batch["obs"], batch.column_names, len(batch)) == ({}, ("a",), 2)
    obs["again"] = [1, 2]
    assert batch["obs.again"].tolist() == [1, 2]
    for key in obs:
        obs[key] = obs[key] + 1
    assert batch["obs.again"].tolist() == [2, 3]
    with pytest.raises(KeyError, match="must have a column to remove, got none"):
        SampleBatch(obs={})["obs"].popitem()


def test_a_column_that_conflicts_with_a_nested_one_is_rejected() -> None:
    batch = SampleBatch({"a": [1, 2], "obs": {"camera": [1, 2], "arm": {"x": [1, 2]}}, "obs2.x": [0, 0]})
    before = batch.copy()
    obs = batch["obs"]
    with pytest.raises(ColumnLengthError, match=r"column 'obs\.camera' must have 2 rows as 'a' has, got 3"):
        obs["camera"] = [1, 2, 3]
    with pytest.raises(ColumnLengthError, match=r"column 'obs\.arm\.y\.z' must have 2 rows"):
        obs["arm"]["y"] = {"z": [1]}
    with pytest.raises(ColumnLengthError, match=r"'obs\.b'"):
        obs.update(camera=[0, 0], b=[1])
    with pytest.raises(ColumnTypeError, match=r"'obs\.camera'"):
        obs["camera"] = 5
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must have strings for keys, got a int"):
        obs[3] = [1, 2]
    with pytest.raises(ColumnMismatchError, match=r"column 'obs\.arm\.x' must have a unique name"):
        obs["arm.x"] = [1, 2]
    with pytest.raises(ColumnNotFoundError, match=r"no column 'obs\.camra'; did you mean 'obs\.camera'"):
        del obs["camra"]
    assert batch == before
    assert list(obs) == ["camera", "arm"]


def test_a_dict_of_a_replaced_column_or_another_batch_changes_nothing() -> None:
    batch = SampleBatch(a=[1, 2], obs={"x": [1, 2], "arm": {"y": [1, 2]}})
    view, part = batch[:1], batch.copy()
    old, arm = batch["obs"], batch["obs"]["arm"]
    batch["obs"]["arm"] = {"y": [3, 4]}
    arm["y"] = [0, 0]
    assert batch["obs"]["arm"]["y"].tolist() == [3, 4]
    batch["obs"] = {"x": [5, 6]}
    old["x"] = [0, 0]
    for copied in (copy.copy(batch["obs"]), copy.deepcopy(batch["obs"]), pickle.loads(pickle.dumps(batch["obs"]))):
        assert type(copied) is dict
        copied["x"] = [0, 0]
    retained = SampleBatch(obs={"x": [1, 2]})["obs"]
    retained["y"] = "of a batch that has been freed"
    assert batch["obs.x"].tolist() == [5, 6]
    assert (view["obs.x"].tolist(), part["obs.arm.y"].tolist()) == ([1], [1, 2])
    view["obs"]["x"] = [9]
    assert (view["obs.x"].tolist(), batch["obs.x"].tolist()) == ([9], [5, 6])


def test_dicts_of_sequences_and_policies_write_to_the_batch() -> None:
    steps = SampleBatch(obs={"x": np.arange(4)}, state_in_0=np.zeros((2, 3)), seq_lens=[2, 2], _zero_padded=True)
    batch = MultiAgentBatch({"p": steps}, 4)
    batch["p"]["obs"]["y"] = np.ones(4)
    assert steps["obs"]["y"].tolist() == [1] * 4
    with pytest.raises(ColumnLengthError, match=r"'obs\.y'"):
        batch["p"]["obs"]["y"] = np.ones(3)
    shared = steps["obs"]
    steps.shuffle(rng=0)
    assert steps["obs"] is shared
    assert sorted(shared["x"].tolist()) == [0, 1, 2, 3]
    assert shared["x"].tolist() == steps["obs.x"].tolist()


def test_the_dict_of_a_nested_column_is_accepted_as_tree_and_mapping() -> None:
    batch = SampleBatch(obs={"b": np.arange(3.0), "a": {"c": np.ones((3, 2))}})
    obs = batch["obs"]
    assert isinstance(obs, dict)
    doubled = torch.utils._pytree.tree_map(lambda leaf: leaf * 2, obs)
    assert doubled["a"]["c"].tolist() == [[2.0, 2.0]] * 3
    doubled["b"] = "no column: the tree belongs to no batch"
    collated = torch.utils.data.default_collate([obs, obs])
    assert collated["b"].shape == (2, 3)
    for library in ("optree", "tree"):
        if find_spec(library) is not None:
            mapped = import_module(library)
            function = mapped.tree_map if library == "optree" else mapped.map_structure
            assert function(lambda leaf: leaf + 1, obs)["b"].tolist() == [1, 2, 3]
    if find_spec("tree") is not None:
        assert import_module("tree").map_structure(lambda x, y: x is y, obs, dict(obs)) == {"b": True, "a": {"c": True}}
    assert batch["obs"]["b"].tolist() == [0, 1, 2]
    assert {**obs}.keys() == dict(obs).keys() == {"a", "b"}


def test_writing_to_a_leaf_changes_the_batch() -> None:
    batch = SampleBatch(observations(4))
    batch[1:3]["obs"]["pose"][0] = 100
    assert batch["obs.pose"].tolist() == [0, 100, 2, 3]


ROUNDS: dict[str, Callable[[SampleBatch], SampleBatch]] = {
    "copy": lambda batch: batch.copy(),
    "shallow copy": lambda batch: batch.copy(shallow=True),
    "deepcopy": copy.deepcopy,
    "slice": lambda batch: batch[:],
    "slice()": lambda batch: batch.slice(0, 4),
    "take": lambda batch: batch.take([0, 1, 2, 3]),
    "twice reversed": lambda batch: batch[::-1][::-1],
    "mask": lambda batch: batch[np.ones(4, bool)],
    "concat of parts": lambda batch: concat_samples([batch[:1], batch[1:3], batch[3:]]),
    "concat of timeslices": lambda batch: concat_samples(batch.timeslices(3)),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch, 5)),
    "pickle 4": lambda batch: pickle.loads(pickle.dumps(batch, 4)),
    "arrow": lambda batch: SampleBatch.from_arrow(batch.to_arrow()),
    "select": lambda batch: batch.select(*batch),
    "drop nothing": lambda batch: batch.drop(),
    "rename and back": lambda batch: batch.rename({"obs": "x", "flat": "y"}).rename({"x": "obs", "y": "flat"}),
    "compress": lambda batch: batch.compress(bulk=True).decompress_if_needed(),
    "compress rows": lambda batch: batch.compress().decompress_if_needed(),
    "constructor": lambda batch: SampleBatch(batch),
}


@pytest.mark.parametrize("how", ROUNDS)
def test_nested_columns_are_restored_by_every_format(how: str) -> None:
    columns = observations(4)
    assert_holds(ROUNDS[how](SampleBatch(columns)), columns)


def test_nested_columns_are_moved_to_a_device() -> None:
    batch = SampleBatch(observations(4)).to_device("cpu")
    assert_holds(batch, {name: each(value, torch.as_tensor) for name, value in observations(4).items()})


@pytest.mark.parametrize("rows", [[2, 0], [3, 3, 1], []], ids=str)
def test_operations_keep_rows_of_nested_columns_together(rows: list[int]) -> None:
    columns = observations(4)
    expected = {name: each(value, lambda leaf: leaf[rows]) for name, value in columns.items()}
    assert_holds(SampleBatch(columns).take(rows), expected)
    assert_holds(SampleBatch(columns)[rows], expected)


def test_shuffle_keeps_rows_of_nested_columns_together() -> None:
    batch = SampleBatch(observations(20)).shuffle(rng=1)
    order = batch["flat"].tolist()
    assert order != sorted(order)
    assert_holds(batch, {name: each(v, lambda leaf: leaf[order]) for name, v in observations(20).items()})


def test_padding_nested_columns() -> None:
    batch = SampleBatch(observations(3), seq_lens=[1, 2]).right_zero_pad(3)
    assert batch["obs"]["pose"].tolist() == [0, 0, 0, 1, 2, 0]
    assert batch["obs"]["camera"].shape == (6, 2, 2)
    assert batch["new_obs"][1].shape == (6, 1)
    assert isinstance(batch["deep"]["c"]["d"]["e"], torch.Tensor)
    assert batch["deep"]["c"]["d"]["e"].tolist() == [0, 0, 0, 1, 2, 0]
    left = SampleBatch(observations(2)).slice(-1, 2)
    assert left["new_obs"][0].tolist() == [0, 0, 1]


def test_rows_are_nested_like_the_columns() -> None:
    rows = list(SampleBatch(observations(3)).rows())
    assert len(rows) == 3
    assert list(rows[1]) == ["obs", "new_obs", "deep", "flat"]
    assert rows[1]["obs"]["camera"].tolist() == [[1, 1], [1, 1]]
    assert rows[1]["obs"]["pose"] == 1
    assert isinstance(rows[1]["new_obs"], tuple)
    assert rows[2]["deep"]["a"][0]["b"] == 2


def test_splitting_nested_columns() -> None:
    batch = SampleBatch(observations(4), eps_id=[0, 0, 1, 1])
    first, second = batch.split_by_episode()
    assert_holds(first, {**observations(2), "eps_id": np.array([0, 0])})
    assert_holds(second, {**observations(2, start=2), "eps_id": np.array([1, 1])})


def test_nested_states_have_a_row_per_sequence() -> None:
    batch = SampleBatch(
        a=np.arange(6), state_in_0={"h": np.arange(3.0), "c": (np.arange(6.0).reshape(3, 2),)}, seq_lens=[2, 3, 1]
    )
    part = batch.slice(1, 4)
    assert part["seq_lens"].tolist() == [1, 2]
    assert part["state_in_0"]["h"].tolist() == [0, 1]
    assert part["state_in_0"]["c"][0].tolist() == [[0, 1], [2, 3]]
    padded = batch.copy().right_zero_pad(3)
    assert padded["state_in_0"]["h"].tolist() == [0, 1, 2]
    assert batch.take_sequences([2, 0])["state_in_0"]["h"].tolist() == [2, 0]
    assert [row["state_in_0"]["h"] for row in batch.rows()] == [0, 0, 1, 1, 1, 2]
    assert concat_samples([part, batch])["state_in_0"]["h"].tolist() == [0, 1, 0, 1, 2]
    assert SampleBatch.from_arrow(batch.to_arrow()) == batch


def test_single_step_input_is_nested_like_the_columns() -> None:
    batch = SampleBatch(observations(4))
    views = {"obs": ViewRequirement(), "past": ViewRequirement("deep", shift=[-1, 0])}
    step = batch.get_single_step_input_dict(views, index=2)
    assert list(step) == ["obs", "past", "seq_lens"]
    assert same(step["obs"], each(batch["obs"], lambda leaf: leaf[2:3]))
    assert same(step["past"], each(batch["deep"], lambda leaf: leaf[1:3][None]))
    last = batch.get_single_step_input_dict({"obs": ViewRequirement()})
    assert same(last["obs"], each(batch["new_obs"], lambda leaf: leaf[-1:]))


def test_equality_compares_the_structure_of_columns() -> None:
    rows = np.arange(2)
    assert SampleBatch(o={"0": rows}) != SampleBatch(o=(rows,))
    assert SampleBatch(o={"x": rows}) != SampleBatch({"o.x": rows})
    assert SampleBatch(o={"x": rows, "y": rows}) == SampleBatch(o={"y": rows, "x": rows})


def test_batches_with_different_structure_are_not_joined() -> None:
    rows = np.arange(2)
    with pytest.raises(ValueError, match="nested"):
        concat_samples([SampleBatch(o={"0": rows}), SampleBatch(o=(rows,))])
    joined = concat_samples([SampleBatch(o={"x": rows, "y": rows}), SampleBatch(o={"y": rows + 2, "x": rows})])
    assert joined["o"]["y"].tolist() == [0, 1, 2, 3]


def test_dicts_and_tuples_without_leaves() -> None:
    batch = SampleBatch(a=[1, 2], obs={"nothing": {}, "x": [3, 4]}, none={})
    assert batch["obs"]["nothing"] == {}
    assert batch["none"] == {}
    assert list(batch) == ["a", "obs", "none"]
    assert list(batch[1:]) == ["a", "obs", "none"]
    assert pickle.loads(pickle.dumps(batch))["none"] == {}
    assert SampleBatch.from_arrow(batch.to_arrow()) == batch


def test_a_tuple_of_numbers_is_a_list_of_rows() -> None:
    assert SampleBatch(a=(1, 2))["a"].tolist() == [1, 2]
    assert not is_nested((1, 2))
    assert not is_nested((np.float32(1), np.array(2)))
    assert not is_nested([{"x": 1}])
    assert is_nested((np.zeros(2), np.zeros(2)))
    assert is_nested({})


def test_flatten_and_unflatten_are_inverse() -> None:
    value = observations(2)["deep"]
    structure, leaves = flatten("deep", value)
    assert [path for path, _ in leaves] == list(leaf_names("deep", structure))
    assert same(unflatten("deep", structure, dict(leaves).__getitem__), value)


_JAX = """
import jax, numpy as np
from samplebatch import SampleBatch
batch = SampleBatch(obs={"b": np.arange(3.0), "a": {"c": np.ones((3, 2))}})
assert jax.jit(lambda obs: obs["b"].sum() + obs["a"]["c"].sum())(batch["obs"]) == 9
assert jax.grad(lambda obs: (obs["b"] ** 2).sum())(batch["obs"])["b"].tolist() == [0, 2, 4]
paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch["obs"])]
print(paths, batch["obs"]["b"].tolist())
"""


def test_jax_accepts_the_dict_of_a_nested_column() -> None:
    if find_spec("jax") is None:
        pytest.skip("JAX is not installed")
    printed = subprocess.run([sys.executable, "-c", _JAX], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == """["['a']['c']", "['b']"] [0.0, 1.0, 2.0]"""
