"""Laws of every batch, compared with plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch, ViewRequirement, concat_samples
from samplebatch.batch.tree import flatten, leaf_names, unflatten
from samplebatch.errors import ColumnMismatchError, RowIndexError
from tests.properties.strategies import NUMPY, Oracle, batches

Drawn = tuple[SampleBatch, Oracle]
ids = st.integers(0, 3)


# -- cutting and joining ----------------------------------------------------------------------------------------------


@given(example=batches(), cuts=st.lists(st.integers(0, 20), max_size=4))
def test_consecutive_slices_neither_lose_nor_repeat_rows(example: Drawn, cuts: list[int]) -> None:
    batch, oracle = example
    bounds = [0, *sorted(min(cut, len(batch)) for cut in cuts), len(batch)]
    for cut in (batch.__getitem__, lambda key: batch.slice(key.start, key.stop)):
        parts = [cut(slice(*pair)) for pair in itertools.pairwise(bounds)]
        numbers = [number for part in parts for number in np.asarray(part["id"])[part.mask()].tolist()]
        assert numbers == oracle.numbers.tolist()


@given(example=batches(), size=st.integers(1, 8))
def test_joining_the_parts_gives_the_batch(example: Drawn, size: int) -> None:
    batch, oracle = example
    for parts in (batch.timeslices(size), batch.timeslices(num_slices=size), [batch, SampleBatch()]):
        joined = concat_samples(parts)
        if len(batch):
            oracle.with_empty_sequences_of(joined).check(joined)
        elif any(leaf.kind.startswith("ragged") for leaf in oracle.leaves.values()) and parts:
            # Only a ragged column keeps its layout in a batch without rows.
            assert joined.keys() == batch.keys()
            assert len(joined) == 0
        else:
            assert joined == SampleBatch()


@given(example=batches(sequences=True), extra=st.integers(0, 3))
def test_padding_and_cutting_again_is_the_identity(example: Drawn, extra: int) -> None:
    batch, _ = example
    plain = batch.take_sequences(np.arange(len(batch["seq_lens"]))).slice(0, len(batch))
    padded = plain.copy().right_zero_pad((plain.max_seq_len or 0) + extra)
    assert padded.slice(0, len(padded)) == plain
    again = padded.copy().right_zero_pad((plain.max_seq_len or 0) + extra + 1)
    assert again.slice(0, len(again)) == plain


@given(example=batches(), data=st.data())
def test_gathering_twice_equals_gathering_once(example: Drawn, data: st.DataObject) -> None:
    batch, oracle = example
    rows = st.lists(st.integers(0, max(len(batch) - 1, 0)), max_size=6 if len(batch) else 0)
    first = np.array(data.draw(rows), int)
    second = np.array(data.draw(st.lists(st.integers(0, max(len(first) - 1, 0)), max_size=6 if len(first) else 0)), int)
    oracle.take(first).take(second).check(batch.take(first).take(second))


@given(example=batches(), row=st.integers(-30, 30))
def test_only_rows_out_of_range_are_rejected(example: Drawn, row: int) -> None:
    batch, oracle = example
    if -len(batch) <= row < len(batch):
        oracle.take(np.array([row])).check(batch.take([row]))
    else:
        with pytest.raises(RowIndexError, match=f"row {row} must be in"):
            batch.take([row])


@given(dtypes=st.lists(st.sampled_from(NUMPY), min_size=2, max_size=4), seed=st.integers(0, 999))
@example(dtypes=["c8", "c16"], seed=98).via("signaling NaN")
def test_joining_dtypes_never_loses_a_value(dtypes: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = []
    for name in dtypes:
        dtype = np.dtype(name)
        if dtype.kind in "bSU":
            arrays.append(rng.integers(0, 2, 5).astype(dtype))
        else:
            arrays.append(np.frombuffer(rng.bytes(5 * dtype.itemsize), dtype))
    try:
        joined = concat_samples([SampleBatch(a=array) for array in arrays])["a"]
    except ColumnMismatchError:
        assert len(set(dtypes)) > 1
        return
    assert joined.dtype in {SampleBatch(a=array)["a"].dtype for array in arrays}
    # Python compares numbers of any kind exactly.
    pairs = zip(joined.tolist(), [value for array in arrays for value in array.tolist()], strict=True)
    assert all(mine == value or (mine != mine and value != value) for mine, value in pairs)


# -- lockstep ---------------------------------------------------------------------------------------------------------


@st.composite
def multi_agent(draw: st.DrawFn) -> dict[str, list[tuple[int, int, int, int]]]:
    """Draw rows of (eps_id, t, agent_index, number) for up to three policies, in any order, with ties."""
    number = itertools.count()
    rows = st.tuples(ids, ids, st.integers(0, 2))
    return {
        policy: [(*row, next(number)) for row in draw(st.lists(rows, max_size=8))]
        for policy in draw(st.lists(st.sampled_from("pqr"), unique=True, max_size=3))
    }


@given(policies=multi_agent(), k=st.integers(1, 5), padded=st.sampled_from([None, False, True]))
def test_lockstep_slices_agree_with_sorted_rows(
    policies: dict[str, list[tuple[int, int, int, int]]], k: int, padded: bool | None
) -> None:
    batches_by_policy = {}
    for policy, rows in policies.items():
        columns: dict[str, Any] = dict(
            zip(("eps_id", "t", "agent_index", "number"), np.array(rows, int).reshape(-1, 4).T, strict=True)
        )
        batch = SampleBatch(columns)
        if padded is not None and rows:
            batch["seq_lens"] = [1, len(rows) - 1]
            if padded:
                batch.right_zero_pad(len(rows))
        batches_by_policy[policy] = batch
    steps = sorted({row[:2] for rows in policies.values() for row in rows})
    parts = MultiAgentBatch(batches_by_policy, len(steps)).timeslices(k)
    reference = [steps[i : i + k] for i in range(0, len(steps), k)]
    assert [part.count for part in parts] == [len(group) for group in reference]
    for part, group in zip(parts, reference, strict=True):
        expected = {
            policy: [row[3] for row in sorted(rows, key=lambda row: row[:3]) if row[:2] in group]
            for policy, rows in policies.items()
        }
        actual = {policy: batch["number"].tolist() for policy, batch in part.items()}
        assert actual == {policy: numbers for policy, numbers in expected.items() if numbers}


@given(policies=multi_agent(), k=st.integers(1, 5))
def test_joining_lockstep_slices_gives_every_row_once(
    policies: dict[str, list[tuple[int, int, int, int]]], k: int
) -> None:
    names = ("eps_id", "t", "agent_index", "number")
    batch = MultiAgentBatch(
        {
            policy: SampleBatch(dict(zip(names, np.array(rows, int).reshape(-1, 4).T, strict=True)))
            for policy, rows in policies.items()
        },
        9,
    )
    joined = concat_samples([MultiAgentBatch({}, 0), *batch.timeslices(k)])
    for policy, rows in policies.items():
        if rows:
            assert sorted(joined[policy]["number"].tolist()) == [row[3] for row in rows]
    assert joined.agent_steps() == batch.agent_steps()


# -- single steps -----------------------------------------------------------------------------------------------------

shifts = st.one_of(
    st.integers(-4, 0),
    st.lists(st.integers(-4, 0), min_size=1, max_size=3),
    st.tuples(st.integers(-4, -1), st.integers(-1, 0)).map(lambda ends: f"{ends[0]}:{ends[1]}"),
    st.tuples(st.integers(-4, -1), st.integers(-1, 0), st.integers(1, 3)).map(lambda ends: ":".join(map(str, ends))),
)


def listed(shift: int | str | list[int]) -> list[int]:
    """Return the relative steps of a shift."""
    if isinstance(shift, str):
        start, stop, *step = map(int, shift.split(":"))
        return list(range(start, stop + 1, *step))
    return [shift] if isinstance(shift, int) else shift


@given(example=batches(), shift=shifts, data=st.data())
def test_a_view_contains_its_rows_and_zeros_before_the_first(
    example: Drawn, shift: int | str | list[int], data: st.DataObject
) -> None:
    batch, oracle = example
    if not len(batch):
        return
    index = data.draw(st.integers(-len(batch), len(batch) - 1))
    inputs = batch.get_single_step_input_dict({"id": ViewRequirement(shift=shift)}, index)
    steps = [index % len(batch) + step for step in listed(shift)]
    rows = [int(oracle.numbers[step]) if step >= 0 else 0 for step in steps]
    assert inputs["id"].tolist() == (rows if isinstance(shift, int) else [rows])
    last = batch.get_single_step_input_dict({"id": ViewRequirement(shift=shift)})
    steps = [min(len(batch) + step, len(batch) - 1) for step in listed(shift)]
    rows = [int(oracle.numbers[step]) if step >= 0 else 0 for step in steps]
    assert last["id"].tolist() == (rows if isinstance(shift, int) else [rows])


# -- nested columns ---------------------------------------------------------------------------------------------------

leaves = st.integers()
keys = st.text("abcxyz_0", min_size=1, max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


def arrays(tree: Any) -> Any:
    """Return a column for every leaf."""
    if isinstance(tree, dict):
        return {key: arrays(item) for key, item in tree.items()}
    return tuple(map(arrays, tree)) if isinstance(tree, tuple) else np.array([tree % 1000, 0])


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain(item) for key, item in tree.items()}
    return tuple(map(plain, tree)) if isinstance(tree, tuple) else tree.tolist()


@given(tree=trees)
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    value = arrays(tree)
    structure, flat = flatten("obs", value)
    assert [path for path, _ in flat] == list(leaf_names("obs", structure))
    assert plain(unflatten("obs", structure, dict(flat).__getitem__)) == plain(value)


@given(tree=trees)
def test_a_batch_restores_any_tree(tree: Any) -> None:
    value = arrays(tree)
    batch = SampleBatch(a=[1, 2], obs=value)
    assert plain(batch["obs"]) == plain(value)
    expected = plain(arrays_sliced(value))
    for result in (batch[1:], batch.take([1]), concat_samples([batch[1:], SampleBatch()])):
        assert plain(result["obs"]) == expected
    assert plain(SampleBatch.from_arrow(batch.to_arrow())["obs"]) == plain(value)


def arrays_sliced(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: arrays_sliced(item) for key, item in tree.items()}
    return tuple(map(arrays_sliced, tree)) if isinstance(tree, tuple) else tree[1:]
