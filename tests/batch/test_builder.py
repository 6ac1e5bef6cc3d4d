"""Builders return the rows that were added, and rejected rows change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import MultiAgentBatchBuilder, SampleBatch, SampleBatchBuilder
from samplebatch.column import memory
from samplebatch.column.casting import cast_exactly
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    PolicyNotFoundError,
    SequenceError,
)


def built(*steps: dict[str, Any], **options: Any) -> SampleBatch:
    builder = SampleBatchBuilder(**options)
    for step in steps:
        builder.add_values(**step)
    return builder.build_and_reset()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.5, "float64"),
        (3, "int64"),
        (True, "bool"),
        (1j, "complex128"),
        (np.float32(0.5), "float32"),
        (np.int8(3), "int8"),
        (np.uint16(3), "uint16"),
        (np.datetime64("2024-01-01", "s"), "datetime64[s]"),
        (np.zeros(3, "f2"), "float16"),
        (np.zeros((2, 2), np.uint8), "uint8"),
        (np.array(7, "i4"), "int32"),
        ([1.0, 2.0], "float64"),
        ((1, 2), "int64"),
        (np.zeros(2, ">f4"), "float32"),
        (np.array(["ab", "c"]), "T"),
        ("left", "T"),
        (None, "object"),
        (b"x", "object"),
        (np.array([None, {}], object), "object"),
    ],
)
def test_a_column_has_the_dtype_of_its_first_value(value: Any, dtype: str) -> None:
    batch = built({"x": value}, {"x": value})
    assert batch["x"].dtype == np.dtype(dtype)
    assert len(batch) == 2
    assert batch.column("x").kind == ("text" if dtype == "T" or isinstance(value, bytes) else batch.column("x").kind)
    if dtype != "object":
        expected = np.array([value, value])
        assert batch["x"].shape == expected.shape
        assert (batch["x"] == expected).all()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 0.7], "float64"),
        ([True, 2], "int64"),
        ([1, 2**63], "uint64"),
        ([np.int8(1), 300], "int64"),
        ([np.int8(1), 100], "int8"),
        ([np.float32(0.5), 0.1], "float64"),
        ([np.float32(0.5), 0.25], "float32"),
        ([0.5, 3], "float64"),
        ([0.5, np.float32(0.1)], "float64"),
        ([0.5, True], "float64"),
        ([1, 2j], "complex128"),
        ([2**53, 0.5], "float64"),
        ([np.array(["a"]), np.array(["abc"])], "T"),
        ([float("nan"), np.float32("nan"), float("inf")], "float64"),
        ([np.float16(1), 1e-8], "float64"),
    ],
)
def test_a_later_value_widens_the_column_when_nothing_is_lost(values: list[Any], dtype: str) -> None:
    column = built(*({"x": value} for value in values))["x"]
    assert column.dtype == np.dtype(dtype)
    for stored, value in zip(column, values, strict=True):
        assert np.array_equal(stored, value, equal_nan=np.asarray(value).dtype.kind in "fc")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([2**53 + 1, 0.5], "int64"),
        ([0.5, 2**53 + 1], "float64"),
        ([-1, 2**63], "int64"),
        ([1, 2**64], "object|numbers"),
        ([1.0, None], "numbers or arrays, got a NoneType"),
        ([1.0, "a"], "float64|numbers"),
        ([np.zeros(3), np.zeros(4)], r"shape \(3,\).*got \(4,\).*ragged"),
        ([np.zeros(3), 0.0], r"shape \(3,\).*got \(\)"),
        ([0.0, np.zeros(1)], r"shape \(\).*got \(1,\)"),
        ([np.zeros((2, 3)), np.zeros((1, 3))], r"shape \(2, 3\)"),
        ([np.datetime64(1, "s"), 1], "datetime64"),
        ([np.array(["a"]), np.array([1])], "<U1"),
    ],
)
def test_a_value_of_another_shape_or_dtype_is_rejected_with_its_name(values: list[Any], words: str) -> None:
    builder = SampleBatchBuilder()
    for value in values[:-1]:
        builder.add_values(a=1.0, reward=value)
    with pytest.raises((ColumnMismatchError, ColumnTypeError), match=f"'reward'.*({words})"):
        builder.add_values(a=2.0, reward=values[-1])
    batch = builder.build_and_reset()
    assert len(batch) == len(values) - 1
    dtype = np.array(values[:-1]).dtype
    assert batch["reward"].dtype == (np.dtypes.StringDType() if dtype.kind == "U" else dtype)


@pytest.mark.parametrize("value", [object(), [[1], [1, 2]], {1, 2}])
def test_an_unsupported_value_is_rejected_with_its_name(value: Any) -> None:
    builder = SampleBatchBuilder()
    with pytest.raises(ColumnTypeError, match="'obs'"):
        builder.add_values(t=1, obs=value)
    builder.add_values(other=1)
    assert builder.build_and_reset().column_names == ("other",)


def test_a_declared_dtype_is_used_from_the_first_row_and_never_widened() -> None:
    builder = SampleBatchBuilder(dtypes={"rewards": np.float32})
    builder.add_values(rewards=1)
    with pytest.raises(ColumnMismatchError, match=r"'rewards'.*float32.*float64"):
        builder.add_values(rewards=0.1)
    builder.add_values(rewards=0.5)
    batch = builder.build_and_reset()
    assert batch["rewards"].dtype == np.float32
    assert batch["rewards"].tolist() == [1.0, 0.5]


def test_values_are_copied_when_they_are_added() -> None:
    builder = SampleBatchBuilder()
    buffer, info = np.zeros(3), {"step": 0}
    for step in range(3):
        buffer[:] = step
        info["step"] = step
        builder.add_values(obs=buffer, part={"x": buffer}, infos=info)
    batch = builder.build_and_reset()
    assert batch["obs"][:, 0].tolist() == [0, 1, 2]
    assert batch["part.x"][:, 0].tolist() == [0, 1, 2]
    assert [item["step"] for item in batch["infos"]] == [0, 1, 2]


def test_strided_rows_are_stored_with_the_values_they_contain() -> None:
    image = np.arange(12).reshape(3, 4)
    batch = built({"obs": image.T}, {"obs": image[:, ::-1].T})
    assert (batch["obs"][0] == image.T).all()
    assert (batch["obs"][1] == image[:, ::-1].T).all()


def test_steps_must_have_the_columns_of_the_first() -> None:
    builder = SampleBatchBuilder()
    builder.add_values(obs=1, rewards=1.0)
    for step, words in (
        ({"obs": 1}, "no 'rewards'"),
        ({"obs": 1, "rewards": 1.0, "t": 3}, "also 't'"),
        ({"obs": 1, "reward": 1.0}, "no 'rewards' and also 'reward'"),
    ):
        with pytest.raises(ColumnMismatchError, match=words):
            builder.add_values(**step)
        with pytest.raises(ColumnMismatchError, match=words):
            builder.add_steps(**{name: [value] for name, value in step.items()})
    with pytest.raises(ColumnMismatchError, match="at least one column"):
        SampleBatchBuilder().add_values()
    assert builder.count == 1
    assert len(builder.build_and_reset()) == 1


@pytest.mark.parametrize("bad", [{"b": "word"}, {"b": 0.5, "c": "word"}, {"b": np.zeros(2)}])
def test_a_failed_step_does_not_change_the_builder(bad: dict[str, Any]) -> None:
    builder = SampleBatchBuilder(capacity=2)
    for step in range(5):
        builder.add_values(a=step, b=step, c=step)
    with pytest.raises((ColumnMismatchError, ColumnTypeError)):
        builder.add_values(**{"a": 0.5, "b": 9, "c": 9, **bad})
    with pytest.raises((ColumnMismatchError, ColumnTypeError)):
        builder.add_steps(**{"a": [0.5, 1.5], "b": [9, 9], "c": [9, 9], **{name: [v, v] for name, v in bad.items()}})
    assert builder.count == 5
    builder.add_values(a=5, b=5, c=5)
    batch = builder.build_and_reset()
    for name in ("a", "b", "c"):
        assert batch[name].dtype == np.int64
        assert batch[name].tolist() == list(range(6))


def test_the_first_step_can_fail_and_be_repeated() -> None:
    builder = SampleBatchBuilder()
    with pytest.raises(ColumnTypeError):
        builder.add_values(a=1, b=object())
    assert builder.count == 0
    builder.add_values(x=1)
    assert builder.build_and_reset().column_names == ("x",)


def test_nested_values_become_nested_columns() -> None:
    steps = [{"obs": {"camera": np.full((2, 2), i, "u1"), "arm": (np.full(3, i, "f4"), i)}} for i in range(100)]
    batch = built(*steps)
    assert batch.column_names == ("obs.camera", "obs.arm.0", "obs.arm.1")
    assert batch["obs"]["arm"][0].shape == (100, 3)
    assert batch["obs"]["camera"][:, 0, 0].tolist() == list(range(100))
    builder = SampleBatchBuilder()
    builder.add_values(**steps[0])
    with pytest.raises(ColumnMismatchError, match=r"'obs'.*obs\.camera"):
        builder.add_values(obs={"camera": np.zeros((2, 2), "u1")})
    with pytest.raises(ColumnMismatchError, match="'obs'"):
        builder.add_values(obs=np.zeros(3))
    builder.add_values(**steps[1])
    assert builder.build_and_reset() == batch[:2]


def test_a_nested_column_and_its_leaf_cannot_both_be_given() -> None:
    with pytest.raises(ColumnMismatchError, match=r"'obs\.x'"):
        SampleBatchBuilder().add_values(**{"obs": {"x": 1}, "obs.x": 2})


def test_a_failed_nested_step_narrows_its_leaves_again() -> None:
    builder = SampleBatchBuilder()
    builder.add_values(obs={"x": 1, "y": 1})
    with pytest.raises(ColumnTypeError):
        builder.add_values(obs={"x": 0.5, "y": None})
    builder.add_values(obs={"x": 2, "y": 2})
    assert builder.build_and_reset()["obs.x"].dtype == np.int64


def test_infos_are_always_objects() -> None:
    batch = built({"infos": {"a": 1}}, {"infos": None}, {"infos": {}})
    assert list(batch["infos"]) == [{"a": 1}, None, {}]


def test_declared_ragged_columns_accept_rows_of_any_length() -> None:
    rows = [np.arange(n, dtype=np.float32) for n in (3, 0, 5)]
    batch = built(*({"obs": row} for row in rows), ragged=["obs"])
    assert [batch["obs"][i].tolist() for i in range(3)] == [row.tolist() for row in rows]
    builder = SampleBatchBuilder(ragged=["obs"])
    builder.add_values(obs=rows[0])
    with pytest.raises(ColumnMismatchError, match=r"'obs'.*1 dimensions"):
        builder.add_values(obs=np.zeros((2, 2), np.float32))
    with pytest.raises(ColumnMismatchError, match=r"'obs'.*float32"):
        builder.add_values(obs=np.array([0.1]))


def test_many_steps_at_once() -> None:
    builder = SampleBatchBuilder(capacity=3)
    builder.add_values(obs=np.zeros(2), t=0, infos={}, word="a")
    builder.add_steps(obs=np.ones((4, 2)), t=np.arange(1, 5), infos=[{"i": i} for i in range(4)], word=list("bcde"))
    builder.add_steps(obs=np.ones((0, 2)), t=[], infos=[], word=[])
    batch = builder.build_and_reset()
    assert batch["t"].tolist() == [0, 1, 2, 3, 4]
    assert batch["infos"][3] == {"i": 2}
    assert list(batch["word"]) == list("abcde")
    builder.add_steps(obs={"x": np.zeros((3, 2))}, t=np.arange(3))
    assert builder.build_and_reset()["obs.x"].shape == (3, 2)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({"a": [1, 2], "b": [1, 2, 3]}, "'b' must have 2 rows.*got 3"),
        ({"a": [1, 2], "b": 1}, "'b'"),
        ({"a": 1, "b": [1, 2]}, "'a' must have a row for each step"),
        ({"a": [1, 2], "infos": [{}]}, "'infos' must have 2 rows.*got 1"),
        ({"a": [1, 2], "infos": {}}, "'infos' must have 2 rows.*single"),
    ],
)
def test_many_steps_must_have_as_many_rows_in_every_column(steps: dict[str, Any], words: str) -> None:
    builder = SampleBatchBuilder()
    with pytest.raises((ColumnLengthError, ColumnTypeError), match=words):
        builder.add_steps(**steps)
    assert builder.count == 0


def test_batches_can_be_added() -> None:
    source = SampleBatch(
        obs={"x": np.arange(6).reshape(3, 2)}, rewards=[1.0, 2.0, 3.0], infos=[{}, {"a": 1}, None], who=["x", "y", "z"]
    )
    builder = SampleBatchBuilder()
    builder.add_batch(source[1:])
    builder.add_values(obs={"x": np.array([0, 1])}, rewards=0.5, infos={}, who="w")
    builder.add_batch(source[:0])
    batch = builder.build_and_reset()
    assert batch[:2]["obs"]["x"].tolist() == [[2, 3], [4, 5]]
    assert batch["rewards"].tolist() == [2.0, 3.0, 0.5]
    assert list(batch["infos"]) == [{"a": 1}, None, {}]
    with pytest.raises(SequenceError, match="concat_samples"):
        builder.add_batch(SampleBatch(a=[1, 2], seq_lens=[2]))
    with pytest.raises(SequenceError, match="seq_lens"):
        builder.add_values(a=1, seq_lens=1)


def test_torch_rows_are_stored_as_arrays() -> None:
    torch = pytest.importorskip("torch")
    batch = built({"actions": torch.ones(2)}, {"actions": torch.zeros(2)})
    assert batch["actions"].dtype == np.float32
    with pytest.raises(ColumnTypeError, match="'actions'"):
        built({"actions": torch.ones(2, requires_grad=True)})


def test_building_transfers_the_memory_and_resets_the_builder() -> None:
    builder = SampleBatchBuilder()
    for step in range(200):
        builder.add_values(obs=np.full(4, step, np.float32))
    first = builder.build_and_reset()
    for _ in range(200):
        builder.add_values(obs=np.full(4, -1, np.float32))
    second = builder.build_and_reset()
    assert first["obs"][:, 0].tolist() == list(range(200))
    assert not np.shares_memory(first["obs"], second["obs"])
    # The second batch needed as much room as the first, which was known by then.
    assert second["obs"].base.nbytes == second["obs"].nbytes
    assert second["obs"].ctypes.data % memory.ALIGNMENT == 0
    builder.add_values(other="x")
    assert list(builder.build_and_reset()["other"]) == ["x"]
    assert len(builder.build_and_reset()) == 0


def test_a_short_batch_does_not_retain_the_memory_of_a_long_one() -> None:
    builder = SampleBatchBuilder(capacity=100_000)
    builder.add_values(obs=np.zeros(4))
    assert builder.build_and_reset()["obs"].base.size < 1000


def test_columns_may_have_the_names_of_arguments() -> None:
    batch = built({"self": 1, "values": 2})
    assert batch.column_names == ("self", "values")
    builder = MultiAgentBatchBuilder()
    builder.add_values("a", self=1, agent_id=2)
    assert builder.build_and_reset()["default_policy"].column_names == ("self", "agent_id")


Numbers = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.complex_numbers(),
)


@given(st.lists(Numbers, min_size=1, max_size=12))
def test_no_accepted_number_ever_changes(values: list[Any]) -> None:
    builder = SampleBatchBuilder(capacity=1)
    accepted = []
    for value in values:
        try:
            builder.add_values(x=value)
        except ColumnMismatchError:
            continue
        accepted.append(value)
    column = builder.build_and_reset()["x"]
    assert len(column) == len(accepted)
    for stored, value in zip(column.tolist(), accepted, strict=True):
        plain = value.item() if isinstance(value, np.generic) else value
        # Python compares ints and floats by their exact values.
        assert stored == plain or (stored != stored and plain != plain)


@given(st.lists(Numbers, min_size=1, max_size=5), st.sampled_from(["?", "i1", "i8", "u8", "f2", "f4", "f8", "c8"]))
def test_casting_exactly_changes_no_value(values: list[Any], code: str) -> None:
    array = np.array(values)
    if array.dtype.kind not in "biufc":
        return
    cast = cast_exactly(array, np.dtype(code))
    if cast is not None:
        for new, old in zip(cast.tolist(), array.tolist(), strict=True):
            assert new == old or (new != new and old != old)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=12))
def test_single_steps_and_groups_of_steps_build_the_same_batch(groups: list[tuple[bool, int]]) -> None:
    builder = SampleBatchBuilder(capacity=1)
    at = 0
    for together, size in groups:
        t = np.arange(at, at + size)
        obs = np.stack([t, -t], 1).astype(np.float32)
        if together:
            builder.add_steps(obs=obs, t=t)
        else:
            for i in range(size):
                builder.add_values(obs=obs[i], t=t[i])
        at += size
    batch = builder.build_and_reset()
    assert len(batch) == at
    if at:
        assert batch["t"].tolist() == list(range(at))
        assert (batch["obs"][:, 1] == -np.arange(at)).all()


# -- several agents --------------------------------------------------------------------------------------------------


def test_rows_of_an_agent_are_contiguous_in_its_policys_batch() -> None:
    builder = MultiAgentBatchBuilder({"a": "left", "b": "right", "c": "right"})
    for t in range(3):
        for agent in "abc":
            if (agent, t) != ("c", 0):
                builder.add_values(agent, t=t, who=ord(agent))
        builder.end_env_step()
    assert builder.agent_steps == 8
    assert builder.has_pending_agent_data()
    batch = builder.build_and_reset()
    assert batch.count == 3
    assert batch["left"]["t"].tolist() == [0, 1, 2]
    assert batch["right"]["who"].tolist() == [98, 98, 98, 99, 99]
    assert batch["right"]["t"].tolist() == [0, 1, 2, 1, 2]
    assert (builder.count, builder.agent_steps, builder.has_pending_agent_data()) == (0, 0, False)
    assert builder.build_and_reset().policy_batches == {}


def test_all_agents_share_the_default_policy_by_default() -> None:
    builder = MultiAgentBatchBuilder()
    builder.add_steps(1, t=np.arange(3))
    builder.add_steps("x", t=np.arange(2))
    builder.add_steps(1, t=[3])
    builder.end_env_step(3)
    batch = builder.build_and_reset()
    assert batch["default_policy"]["t"].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.count == 3


def test_an_agent_without_a_policy_is_listed_in_the_error() -> None:
    builder = MultiAgentBatchBuilder({"walker_1": "walker"})
    with pytest.raises(PolicyNotFoundError, match=r"'walker_2'.*did you mean 'walker_1'"):
        builder.add_values("walker_2", t=0)


def test_agents_with_different_columns_are_rejected_and_kept() -> None:
    builder = MultiAgentBatchBuilder()
    builder.add_values("a", obs=np.zeros(3))
    builder.add_values("b", obs=np.zeros(4))
    for _ in range(2):
        with pytest.raises(ColumnMismatchError, match="'obs'"):
            builder.build_and_reset()
    assert builder.agent_steps == 2


def test_a_failed_step_of_an_agent_is_undone() -> None:
    builder = MultiAgentBatchBuilder()
    builder.add_values("a", t=0, obs=np.zeros(2))
    with pytest.raises(ColumnMismatchError):
        builder.add_values("a", t=1, obs=np.zeros(3))
    builder.add_values("a", t=1, obs=np.ones(2))
    assert builder.build_and_reset()["default_policy"]["t"].tolist() == [0, 1]


def test_ragged_dtypes_are_declared_or_from_the_first_elements() -> None:
    assert built({"ids": []}, {"ids": [1, 2]}, ragged=["ids"])["ids"].dtype == np.int64
    assert built({"ids": []}, {"ids": []}, ragged={"ids": np.int32})["ids"].dtype == np.int32
    assert built({"ids": [1]}, ragged=["ids"], dtypes={"ids": "i2"})["ids"].dtype == np.int16
    assert built({"x": [0.1]}, {"x": [1]}, ragged={"x": "f4"})["x"].dtype == np.float32
    builder = SampleBatchBuilder(ragged={"obs": "i4"})
    builder.add_values(obs={"ids": [1]})
    with pytest.raises(ColumnMismatchError, match=r"'obs\.ids' must store int32, got a row of float64"):
        builder.add_values(obs={"ids": [0.5]})
    assert builder.build_and_reset().column("obs.ids").dtype == np.int32


def test_a_rejected_step_does_not_set_the_dtype_of_ragged_rows() -> None:
    builder = SampleBatchBuilder(ragged=["ids"])
    builder.add_values(ids=[], t=0)
    with pytest.raises(ColumnMismatchError):
        builder.add_values(ids=[0.5], t=np.zeros(2))
    builder.add_values(ids=[1], t=1)
    assert builder.build_and_reset()["ids"].dtype == np.int64


def test_ragged_batches_are_added_as_such() -> None:
    builder = SampleBatchBuilder()
    for rows in ([[1, 2], [3, 4]], [[5]], [[], []]):
        builder.add_batch(SampleBatch(ids=rows, ragged={"ids": "int32"}))
    batch = builder.build_and_reset()
    assert batch["ids"].dtype == np.int32
    assert [row.tolist() for row in batch["ids"]] == [[1, 2], [3, 4], [5], [], []]
    agents = MultiAgentBatchBuilder(ragged={"ids": "int32"})
    for agent, row in (("a", [1]), ("b", []), ("c", [2])):
        agents.add_values(agent, ids=row)
    joined = agents.build_and_reset()["default_policy"]["ids"]
    assert (joined.kind, joined.dtype, joined.lengths.tolist()) == ("ragged", np.int32, [1, 0, 1])
