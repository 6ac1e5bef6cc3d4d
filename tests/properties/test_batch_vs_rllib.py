"""The same operations on RLlib's batches and on ours give the same, wherever RLlib is not at fault.

Every place where the two are meant to differ is left out by name, with the reason beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import samplebatch as ours
from samplebatch import MultiAgentBatch, SampleBatch
from tests.properties.strategies import Oracle, batches

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[rllib]")

Drawn = tuple[SampleBatch, Oracle]
ARRAYS = (("?", "i4", "i8", "u1", "f4", "f8", "c8", "M8[ns]"),)
"""Kinds of columns that RLlib holds as we do. Torch tensors are left out (RLlib joins and slices them, but cannot copy,
pad or compress them), and strings, which it pads with None."""
WITH_INFOS = (*ARRAYS, ("infos", "mixed infos"))


@pytest.fixture(scope="module")
def rllib() -> SimpleNamespace:
    """Import RLlib, which takes seconds and warns, only when the first test needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module("ray.rllib.policy.sample_batch")
            views = importlib.import_module("ray.rllib.policy.view_requirement")
        except ImportError:
            pytest.skip("needs ray[rllib]")
    return SimpleNamespace(
        SampleBatch=module.SampleBatch,
        MultiAgentBatch=module.MultiAgentBatch,
        ViewRequirement=views.ViewRequirement,
        concat_samples=module.concat_samples,
        concat_samples_into_ma_batch=module.concat_samples_into_ma_batch,
    )


def theirs_of(rllib: SimpleNamespace, batch: SampleBatch) -> Any:
    """Return RLlib's batch with copies of the same columns."""
    return rllib.SampleBatch(
        {name_of_state(batch, name): each(values, np.copy) for name, values in batch.items()},
        _zero_padded=batch.zero_padded,
        _max_seq_len=batch.max_seq_len if batch.zero_padded else None,
        _num_grad_updates=batch.num_grad_updates,
        _is_training=batch.is_training,
    )


def name_of_state(batch: SampleBatch, name: str) -> str:
    """Return RLlib's name of a column: only numbered states have one row per sequence in all its methods."""
    if "seq_lens" not in batch or name not in batch.per_sequence:
        return name
    return f"state_in_{sum(other.startswith('state_in_') and other[9:].isdigit() for other in batch)}"


def each(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: each(item, change) for key, item in value.items()}
    return tuple(each(item, change) for item in value) if isinstance(value, tuple) else change(value)


def plain(values: Any) -> Any:
    """Return what two columns must have in common: dtype, shape and bytes, or the objects."""
    values = np.asarray(values)
    if values.dtype == object:
        return values.tolist()
    return values.dtype, values.shape, values.tobytes()


def assert_same(mine: SampleBatch, theirs: Any) -> None:
    assert len(mine) == mine.count == theirs.count
    assert {name_of_state(mine, name) for name in mine} == set(theirs.keys())
    for name in mine:
        # RLlib's lengths become int32 in some operations, ours keep their dtype.
        compared = np.ndarray.tolist if name == "seq_lens" else plain
        assert each(mine[name], compared) == each(theirs[name_of_state(mine, name)], compared), name
    assert mine.zero_padded == theirs.zero_padded
    # RLlib says None where there are no sequences left, we say 0.
    assert (mine.max_seq_len or 0) == (theirs.max_seq_len or 0)
    assert mine.num_grad_updates == theirs.num_grad_updates
    assert mine.is_training == theirs.is_training


def assert_all_same(mine: list[SampleBatch], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for pair in zip(mine, theirs, strict=True):
        assert_same(*pair)


# -- parts ------------------------------------------------------------------------------------------------------------


@given(example=batches(kinds=WITH_INFOS, declared=True), start=st.integers(0, 12), stop=st.integers(1, 20))
def test_brackets(rllib: SimpleNamespace, example: Drawn, start: int, stop: int) -> None:
    batch, oracle = example
    # A stop of 0 is RLlib's fault: it means the whole batch there. A start beyond the end is an error with sequences.
    assume(start <= len(batch))
    theirs = theirs_of(rllib, batch)
    assert_same(batch[start:stop], theirs[start:stop])
    assert_same(batch[start:], theirs[start:])
    if len(batch):
        assert_same(batch[:stop], theirs[:stop])
    # RLlib refuses negative bounds with sequences by mistake (they wrap around its slice map), and steps everywhere.
    if oracle.sequences is None and start:
        assert batch[-start:]["id"].tolist() == list(theirs["id"][-start:])


@given(
    example=batches(kinds=WITH_INFOS, sequences=True, padded=False, min_rows=1, forms=("flat",), declared=True),
    data=st.data(),
)
def test_slice_with_states(rllib: SimpleNamespace, example: Drawn, data: st.DataObject) -> None:
    batch, _ = example
    # Left out: padded batches, whose padding RLlib takes for steps; sequences without steps, which it counts by chance;
    # empty ranges, of which it makes a sequence of length 0; ends beyond the last step, after which it has no seq_lens.
    start = data.draw(st.integers(0, len(batch) - 1))
    stop = data.draw(st.integers(start + 1, len(batch)))
    renamed = batch.rename({"state_in_id": "state_in_1"} if "state_in_0" in batch else {"state_in_id": "state_in_0"})
    assert_same(renamed.slice(start, stop), theirs_of(rllib, renamed).slice(start, stop))


@given(
    example=batches(kinds=ARRAYS, sequences=True, padded=False, min_rows=1, forms=("flat",)),
    padding=st.integers(1, 3),
    data=st.data(),
)
def test_slice_with_a_negative_start(rllib: SimpleNamespace, example: Drawn, padding: int, data: st.DataObject) -> None:
    batch, _ = example
    # Without sequences RLlib counts a negative start from the end, which its documentation does not say. It cannot pad
    # nested columns.
    plain = batch.drop("state_in_id")
    stop = data.draw(st.integers(1, len(batch)))
    assert_same(plain.slice(-padding, stop), theirs_of(rllib, plain).slice(-padding, stop))


@given(example=batches(kinds=WITH_INFOS, sequences=True, padded=False, min_rows=1, forms=("flat",)), data=st.data())
def test_slice_with_given_states(rllib: SimpleNamespace, example: Drawn, data: st.DataObject) -> None:
    # RLlib takes the number of keys of a nested column for that of its rows.
    batch, oracle = example
    bounds = oracle.bounds()
    first = data.draw(st.integers(0, len(bounds) - 1))
    last = data.draw(st.integers(first, len(bounds) - 1))
    start, stop = bounds[first][1], data.draw(st.integers(bounds[last][1] + 1, bounds[last][2]))
    renamed = batch.drop("state_in_0") if "state_in_0" in batch else batch
    renamed = renamed.rename({"state_in_id": "state_in_0"})
    expected = theirs_of(rllib, renamed).slice(start, stop, first, last + 1)
    assert_same(renamed.slice(start, stop, first, last + 1), expected)


@given(example=batches(kinds=WITH_INFOS, declared=True), size=st.integers(1, 12))
def test_timeslices(rllib: SimpleNamespace, example: Drawn, size: int) -> None:
    batch, _ = example
    theirs = theirs_of(rllib, batch)
    # RLlib never ends where the size does not divide the rows, and more slices than rows give it the whole batch.
    if len(batch) % size == 0:
        assert_all_same(batch.timeslices(size), theirs.timeslices(size))
    if len(batch) >= size:
        assert_all_same(batch.timeslices(num_slices=size), theirs.timeslices(num_slices=size))


@given(example=batches(kinds=WITH_INFOS, sequences=False, min_rows=1), data=st.data())
def test_split_by_episode(rllib: SimpleNamespace, example: Drawn, data: st.DataObject) -> None:
    # RLlib fails on batches without steps.
    batch, _ = example
    flags = st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)).map(np.array)
    batch["terminateds"] = data.draw(flags)
    if data.draw(st.booleans()):
        batch["truncateds"] = data.draw(flags)
    theirs = theirs_of(rllib, batch)
    assert_all_same(batch.split_by_episode(), theirs.split_by_episode())
    for key in ("eps_id", "dones"):
        assert_all_same(batch.split_by_episode(key), theirs.split_by_episode(key))
    assert batch.is_terminated_or_truncated() == bool(theirs.is_terminated_or_truncated())
    assert batch.is_single_trajectory() == theirs.is_single_trajectory()


@given(example=batches(kinds=WITH_INFOS, sequences=True, padded=False, min_rows=1, declared=True))
def test_split_by_episode_of_sequences(rllib: SimpleNamespace, example: Drawn) -> None:
    # RLlib cuts at the beginning of sequences even where an episode ends inside one, and takes padding for steps.
    batch, oracle = example
    batch["eps_id"] = np.repeat([state // 2 for state, _ in oracle.sequences or []], batch["seq_lens"])
    assert_all_same(batch.split_by_episode(), theirs_of(rllib, batch).split_by_episode())


# -- padding, rows, columns -------------------------------------------------------------------------------------------


@given(
    example=batches(kinds=ARRAYS, sequences=True, padded=False, forms=("flat", "flat", "dict"), declared=True),
    extra=st.integers(0, 3),
)
def test_right_zero_pad(rllib: SimpleNamespace, example: Drawn, extra: int) -> None:
    # RLlib loses rows where the width is too small, and takes padding for steps where there is some already. It cannot
    # pad tuples, or objects in nested columns, and makes a list of others.
    batch, _ = example
    batch["objects"] = np.fromiter(({"step": i} for i in range(len(batch))), object, len(batch))
    theirs = theirs_of(rllib, batch)
    width = (batch.max_seq_len or 0) + extra
    batch.right_zero_pad(width)
    theirs.right_zero_pad(width)
    assert batch["objects"].tolist() == theirs.pop("objects")
    assert_same(batch.drop("objects"), theirs)


@given(example=batches(kinds=WITH_INFOS, padded=False))
def test_rows(rllib: SimpleNamespace, example: Drawn) -> None:
    # RLlib takes states by the number of the step, not of its sequence, and padding for steps.
    batch, _ = example
    batch = batch.drop(*[name for name in batch if name.startswith("state_in")])
    mine, theirs = list(batch.rows()), list(theirs_of(rllib, batch).rows())
    assert len(mine) == len(theirs)
    for first, other in zip(mine, theirs, strict=True):
        assert set(first) == set(other)
        assert all(each(first[name], plain) == each(other[name], plain) for name in first if name != "seq_lens")
        assert first.get("seq_lens") == other.get("seq_lens")


@given(example=batches(kinds=ARRAYS))
def test_columns_and_sizes(rllib: SimpleNamespace, example: Drawn) -> None:
    batch, _ = example
    theirs = theirs_of(rllib, batch)
    names = [*batch][::-1]
    for mine, other in zip(batch.columns(names), theirs.columns(names), strict=True):
        assert each(mine, plain) == each(other, plain)
    assert batch.get("no such column", 3) == theirs.get("no such column", 3) == 3
    assert batch.size_bytes() == theirs.size_bytes()
    assert batch.agent_steps() == theirs.agent_steps()
    assert batch.env_steps() == theirs.env_steps()
    # RLlib forgets is_training in a copy.
    assert_same(batch.copy(), theirs.copy())
    assert_same(batch.copy(shallow=True), theirs.copy(shallow=True))


@given(example=batches(kinds=ARRAYS, min_rows=1, forms=("flat", "flat", "dict")), bulk=st.booleans())
def test_compress_and_decompress(rllib: SimpleNamespace, example: Drawn, bulk: bool) -> None:
    # RLlib cannot tell the kind of a column that has no rows when it decompresses it, and compresses no tuples.
    batch, _ = example
    theirs = theirs_of(rllib, batch)
    columns = {name for name in batch if name.startswith("column")}
    theirs.compress(bulk=bulk, columns=columns).decompress_if_needed(columns)
    assert_same(batch.compress(bulk=bulk, columns=columns).decompress_if_needed(columns), theirs)


@given(example=batches(kinds=WITH_INFOS, sequences=False, min_rows=1), data=st.data())
def test_single_steps(rllib: SimpleNamespace, example: Drawn, data: st.DataObject) -> None:
    batch, _ = example
    batch = batch.rename({"id": "actions", "eps_id": "rewards", "column 0": "obs"})
    batch["new_obs"] = np.arange(len(batch)) + 0.5
    batch["state_out_0"] = np.arange(len(batch))[:, None]
    # RLlib pays no heed to shifts. Where they are 0, or -1 after the last step, that makes no difference.
    shifts = {"obs": 0, "prev_actions": 0, "prev_rewards": 0}
    columns = {"state_in_0": ("state_out_0", -1), "before": ("actions", -1)}
    make: list[Any] = [ours.ViewRequirement, rllib.ViewRequirement]
    mine, theirs = (
        {
            **{name: view(shift=shift) for name, shift in shifts.items()},
            **{name: view(column, shift=shift) for name, (column, shift) in columns.items()},
            "unused": view("nothing", used_for_compute_actions=False),
        }
        for view in make
    )
    other = theirs_of(rllib, batch)
    assert_same(batch.get_single_step_input_dict(mine), other.get_single_step_input_dict(theirs))
    index = data.draw(st.integers(-len(batch), len(batch) - 1))
    expected = {"obs": make[0]()}, {"obs": make[1]()}
    # RLlib cannot take one row of a nested column.
    if not isinstance(batch["obs"], (dict, tuple)):
        assert_same(
            batch.get_single_step_input_dict(expected[0], index), other.get_single_step_input_dict(expected[1], index)
        )


# -- joining ----------------------------------------------------------------------------------------------------------


@given(
    example=batches(kinds=WITH_INFOS, declared=True),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    all_counted=st.booleans(),
)
def test_concat_samples(rllib: SimpleNamespace, example: Drawn, cuts: list[int], all_counted: bool) -> None:
    batch, _ = example
    parts = [batch[cut:] for cut in cuts] + [batch]
    assume(any(map(len, parts)))
    for i, part in enumerate(parts):
        # Where no batch knows, RLlib answers 0, and we None.
        part.num_grad_updates = 2.0 * i if all_counted or i == len(parts) - 1 else None
    mine = ours.concat_samples([SampleBatch(), *parts])
    theirs = rllib.concat_samples([rllib.SampleBatch(), *(theirs_of(rllib, part) for part in parts)])
    assert mine.num_grad_updates == pytest.approx(theirs.num_grad_updates)
    mine.num_grad_updates = theirs.num_grad_updates
    assert_same(mine, theirs)


@given(first=batches(kinds=(("i4",),)), other=batches(kinds=(("i4",),)))
def test_batches_that_rllib_does_not_join_are_not_joined(rllib: SimpleNamespace, first: Drawn, other: Drawn) -> None:
    pair = [sampled[0].select("id", *(["seq_lens"] if "seq_lens" in sampled[0] else [])) for sampled in (first, other)]
    # Both skip batches without steps. RLlib joins one without sequences and one with them if they come in this order.
    assume(all(map(len, pair)) and not ("seq_lens" in pair[1] and "seq_lens" not in pair[0]))
    try:
        theirs = rllib.concat_samples([theirs_of(rllib, batch) for batch in pair])
    except ValueError:
        with pytest.raises(ValueError, match=r"concatenated|equal lengths"):
            ours.concat_samples(pair)
        return
    mine = ours.concat_samples(pair)
    mine.num_grad_updates = theirs.num_grad_updates
    assert_same(mine, theirs)


policies = st.lists(st.sampled_from(["p", "q", "default_policy"]), unique=True, max_size=3)


@given(example=batches(kinds=WITH_INFOS), mix=st.lists(st.none() | policies, min_size=1, max_size=4), data=st.data())
def test_concat_samples_of_flat_and_multi_agent_batches(
    rllib: SimpleNamespace, example: Drawn, mix: list[list[str] | None], data: st.DataObject
) -> None:
    full, _ = example
    full.num_grad_updates = 1.0
    mine: list[Any] = []
    theirs: list[Any] = []
    for names in mix:
        part = full[data.draw(st.integers(0, max(len(full) - 1, 0))) :]
        if names is None:
            mine.append(part)
            theirs.append(theirs_of(rllib, part))
        else:
            mine.append(MultiAgentBatch(dict.fromkeys(names, part), 3))
            theirs.append(rllib.MultiAgentBatch({name: theirs_of(rllib, part) for name in names}, 3))
    for join in ("concat_samples", "concat_samples_into_ma_batch"):
        first, other = getattr(ours, join)(mine), getattr(rllib, join)(theirs)
        if isinstance(first, SampleBatch):
            assert_same(first, other)
        else:
            assert_same_policies(first, other)


def assert_same_policies(mine: MultiAgentBatch, theirs: Any) -> None:
    assert list(mine.policy_batches) == list(theirs.policy_batches)
    assert (mine.count, mine.env_steps(), len(mine)) == (theirs.count, theirs.env_steps(), len(theirs))
    assert mine.agent_steps() == theirs.agent_steps()
    for policy, batch in mine.policy_batches.items():
        assert_same(batch, theirs[policy])


# -- policies ---------------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.tuples(*[st.integers(0, 4)] * 3, st.sampled_from("pq")), unique=True, min_size=1, max_size=24),
    k=st.integers(1, 6),
)
def test_multi_agent_timeslices(rllib: SimpleNamespace, rows: list[tuple[int, int, int, str]], k: int) -> None:
    # RLlib compares the rows' dicts where (eps_id, t, agent_index, policy) tie, which fails: `unique` rules that out.
    # It adds a column unroll_id, and turns float64 into float32.
    mine: dict[str, SampleBatch] = {}
    for policy in sorted({row[3] for row in rows}):
        eps_id, t, agent_index = np.array([row[:3] for row in rows if row[3] == policy]).T.copy()
        number = np.arange(len(t))
        mine[policy] = SampleBatch(
            eps_id=eps_id,
            t=t,
            agent_index=agent_index,
            obs=np.repeat(number.astype(np.float32), 3).reshape(-1, 3),
            rewards=number.astype(np.float32),
            infos=np.fromiter(({"row": i} for i in number.tolist()), object),
        )
    theirs = rllib.MultiAgentBatch({policy: theirs_of(rllib, batch) for policy, batch in mine.items()}, 5)
    actual, expected = MultiAgentBatch(mine, 5).timeslices(k), theirs.timeslices(k)
    assert len(actual) == len(expected)
    for first, other in zip(actual, expected, strict=True):
        assert first.count == other.count
        assert set(first.policy_batches) == set(other.policy_batches)
        for policy, batch in first.items():
            assert {*batch, "unroll_id"} == set(other[policy].keys())
            for name in batch:
                assert plain(batch[name]) == plain(other[policy][name]), name


@given(example=batches(kinds=ARRAYS), names=policies)
def test_policies(rllib: SimpleNamespace, example: Drawn, names: list[str]) -> None:
    batch, _ = example
    mine = dict.fromkeys(names, batch)
    theirs = {name: theirs_of(rllib, batch) for name in names}
    assert_same_policies(MultiAgentBatch(mine, 3).copy(), rllib.MultiAgentBatch(theirs, 3).copy())
    assert MultiAgentBatch(mine, 3).size_bytes() == rllib.MultiAgentBatch(theirs, 3).size_bytes()
    first, other = MultiAgentBatch.wrap_as_needed(mine, 3), rllib.MultiAgentBatch.wrap_as_needed(theirs, 3)
    if isinstance(first, SampleBatch):
        assert_same(first, other)
    else:
        assert_same_policies(first, other)
    assert_same_policies(batch.as_multi_agent(), theirs_of(rllib, batch).as_multi_agent())
    assert list(batch.as_multi_agent("walker")) == list(theirs_of(rllib, batch).as_multi_agent("walker").policy_batches)
