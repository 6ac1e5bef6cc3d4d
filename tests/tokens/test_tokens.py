"""Packing, balancing, minibatches by tokens, groups and parts, compared with plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.column import RaggedColumn
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    SequenceError,
)
from samplebatch.tokens import assign, balance, chunk, group_by, pack, repeat, token_minibatches, union
from tests.optional import HAS_TORCH

lengths_of_rows = st.lists(st.integers(0, 20), max_size=40)


def batch_of(lengths, *, in_torch=False):
    ids = [np.arange(n) + 100 * i for i, n in enumerate(lengths)]
    batch = SampleBatch(
        ids=RaggedColumn.from_rows(ids, "ids", "i8"),
        logp=RaggedColumn.from_rows([row / 2 for row in ids], "logp", "f8"),
        rewards=np.arange(len(lengths), dtype="f8"),
        text=np.array([str(i) for i in range(len(lengths))], object) if lengths else np.zeros(0, "U1"),
    )
    return batch.to_torch() if in_torch else batch


def lists(column):
    return [np.asarray(row).tolist() for row in column]


@given(lengths_of_rows, st.integers(20, 60), st.booleans())
def test_packing_agrees_with_first_fit_in_a_loop(lengths, max_tokens, in_torch):
    batch = batch_of(lengths, in_torch=in_torch and HAS_TORCH)
    packed = pack(batch, max_tokens)
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fits = [part for part in bins if sum(lengths[i] for i in part) + lengths[row] <= max_tokens]
        if fits:
            fits[0].append(row)
        else:
            bins.append([row])
    assert lists(packed.rows) == [sorted(part) for part in bins]
    ids = lists(batch["ids"])
    for number, item in enumerate(map(sorted, bins)):
        row = {name: np.asarray(packed.batch[name][number]).tolist() for name in packed.batch}
        assert row["ids"] == [token for i in item for token in ids[i]]
        assert row["rewards"] == item
        assert row["position_ids"] == [position for i in item for position in range(lengths[i])]
        assert row["segment_ids"] == [segment for segment, i in enumerate(item) for _ in range(lengths[i])]
        assert packed.cu_seqlens[number].tolist() == np.cumsum([0] + [lengths[i] for i in item]).tolist()
        assert packed.max_seqlens[number] == max(lengths[i] for i in item)
    assert packed.cu_seqlens.dtype == np.int32
    assert len(packed) == len(bins)
    if bins:
        assert packed.fill == sum(lengths) / (len(bins) * max_tokens)
    assert lists(packed.unpack(packed.batch["ids"])) == ids
    assert lists(packed.unpack(packed.batch["logp"].flat)) == lists(batch["logp"])


@given(lengths_of_rows, st.integers(1, 6), st.booleans())
@settings(max_examples=60)
def test_balanced_parts_have_every_row_once_and_similar_sizes(lengths, k, equal_size):
    batch = batch_of(lengths)
    parts = balance(batch, k, equal_size=equal_size)
    assert len(parts) == k
    assert sorted(np.concatenate(parts.rows).tolist()) == list(range(len(lengths)))
    assert parts.totals.tolist() == [sum(lengths[i] for i in rows) for rows in parts.rows]
    for part, rows in zip(parts, parts.rows, strict=True):
        assert lists(part["ids"]) == [lists(batch["ids"])[i] for i in rows]
    if equal_size:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    elif lengths:
        # The bound of the longest processing time rule.
        assert parts.totals.max() <= sum(lengths) / k + max(lengths)
    assert parts.join() == batch or not lengths
    assert np.concatenate(parts.rows)[parts.inverse].tolist() == list(range(len(lengths)))
    assert parts.join([part["rewards"] for part in parts]).tolist() == batch["rewards"].tolist()
    assert lists(parts.join([part["ids"] for part in parts])) == lists(batch["ids"])


@pytest.mark.parametrize("equal_size", [False, True])
def test_many_rows_are_balanced_within_one_percent(equal_size):
    rng = np.random.default_rng(0)
    weights = rng.lognormal(7, 1, 512).astype(int)
    batch = SampleBatch(tokens=weights)
    parts = balance(batch, 8, "tokens", equal_size=equal_size)
    assert parts.imbalance < 1.01
    if HAS_TORCH:
        import torch

        results = [torch.from_numpy(part["tokens"]) for part in parts]
        assert parts.join(results).tolist() == weights.tolist()


@given(st.integers(0, 12), st.integers(1, 6), st.booleans())
def test_chunks_are_consecutive_and_can_be_joined(count, n, pad):
    batch = SampleBatch(a=np.arange(count))
    if pad and count == 0:
        return
    parts = chunk(batch, n, pad_to_divisor=pad)
    sizes = list(map(len, parts))
    assert len(parts) == n
    assert max(sizes) - min(sizes) <= (0 if pad else 1)
    assert np.concatenate([part["a"] for part in parts])[:count].tolist() == list(range(count))
    if count:
        doubled = [SampleBatch(a=part["a"], b=part["a"] * 2) for part in parts if True]
        assert parts.join(doubled)["b"].tolist() == [2 * i for i in range(count)]
        assert parts.join()["a"].tolist() == list(range(count))
        assert np.shares_memory(parts[0]["a"], batch["a"]) or pad or not sizes[0]


@given(lengths_of_rows, st.integers(20, 60), st.integers(0, 9))
def test_minibatches_respect_the_token_budget(lengths, max_tokens, seed):
    batch = batch_of(lengths)
    parts = list(token_minibatches(batch, max_tokens, epochs=2, rng=seed))
    assert all(part["ids"].lengths.sum() <= max_tokens for part in parts)
    assert all(len(part) for part in parts)
    rows = sorted(row for part in parts for row in part["rewards"].tolist())
    assert rows == sorted(2 * list(range(len(lengths))))
    again = list(token_minibatches(batch, max_tokens, epochs=2, rng=seed))
    assert [part["rewards"].tolist() for part in parts] == [part["rewards"].tolist() for part in again]
    views = list(token_minibatches(batch, max_tokens, shuffle=False))
    assert [row for part in views for row in part["rewards"].tolist()] == list(range(len(lengths)))
    assert all(part["ids"].lengths.sum() <= max_tokens for part in views)
    totals = [part["ids"].lengths.sum() for part in views]
    firsts = [part["ids"].lengths[0] for part in views]
    assert all(total + first > max_tokens for total, first in zip(totals, firsts[1:], strict=False))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), max_size=30), st.sampled_from(["int", "text", "list"])
)
def test_groups_agree_with_a_loop(pairs, kind):
    uid = [key if kind == "int" else f"prompt {key}" for key, _ in pairs]
    rewards = np.array([reward for _, reward in pairs], "f8")
    batch = (
        SampleBatch(rewards=rewards)
        if kind == "list"
        else SampleBatch(
            uid=np.array(uid, "i8" if kind == "int" else object) if uid else np.zeros(0, "i8"), rewards=rewards
        )
    )
    groups = group_by(batch, np.array(uid, object) if kind == "list" and uid else uid if kind == "list" else "uid")
    members: dict[object, list[int]] = {}
    for row, key in enumerate(uid):
        members.setdefault(key, []).append(row)
    assert groups.keys.tolist() == list(members)
    assert groups.counts.tolist() == [len(rows) for rows in members.values()]
    for name in ("sum", "mean", "min", "max", "std"):
        expected = [getattr(np, name)(rewards[rows]) for rows in members.values()]
        np.testing.assert_allclose(getattr(groups, name)("rewards"), expected, atol=1e-9)
    np.testing.assert_allclose(
        groups.std(rewards, ddof=1),
        [rewards[r].std(ddof=1) if len(r) > 1 else np.nan for r in members.values()],
        atol=1e-9,
    )
    spread = groups.spread(groups.mean("rewards"))
    expected = [rewards[members[key]].mean() for key in uid]
    np.testing.assert_allclose(spread, expected)
    np.testing.assert_allclose(groups.normalize("rewards", scale=False), rewards - np.array(expected), atol=1e-9)
    scaled = [
        (r - rewards[members[k]].mean()) / (rewards[members[k]].std() + 1e-6) for k, r in zip(uid, rewards, strict=True)
    ]
    np.testing.assert_allclose(groups.normalize("rewards"), scaled, atol=1e-6)
    for descending in (False, True):
        ranks = groups.rank("rewards", descending=descending)
        for rows in members.values():
            order = sorted(rows, key=lambda row: -rewards[row] if descending else rewards[row])
            assert ranks[order].tolist() == list(range(len(rows)))
    for (key, part), (expected_key, rows) in zip(groups, members.items(), strict=True):
        assert key == expected_key
        assert part["rewards"].tolist() == rewards[rows].tolist()


def test_rows_are_repeated_and_columns_united():
    batch = batch_of([2, 0, 1])
    assert repeat(batch, 2)["rewards"].tolist() == [0, 0, 1, 1, 2, 2]
    assert lists(repeat(batch, 2, interleave=False)["ids"]) == lists(batch["ids"]) * 2
    assert len(repeat(batch, 0)) == 0
    more = union(batch, {"scores": [1, 2, 3], "ids": batch["ids"].copy()})
    assert list(more) == [*batch, "scores"]
    assert more["ids"] is batch["ids"]
    assert "scores" not in batch
    nested = union(SampleBatch(a=[1]), SampleBatch(obs={"x": [1.0]}))
    assert nested["obs"]["x"].tolist() == [1.0]
    changed = assign(batch, rewards=np.zeros(3))
    assert (changed["rewards"].sum(), batch["rewards"].sum()) == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: pack(b, 3), ArgumentError, "max_tokens must be at least 4, the tokens of row 1, got 3; truncate"),
        (lambda b: pack(b, 0), ArgumentError, "max_tokens must be a whole number from 1, got 0"),
        (lambda b: pack(b, -5), ArgumentError, "max_tokens must be a whole number from 1, got -5"),
        (lambda b: pack(b, 9, "rewards"), ArgumentError, "lengths must be integers, got dtype float64"),
        (
            lambda b: pack(b, 9, [1]),
            ColumnLengthError,
            r"lengths must have 2 rows, one per row of the batch, got \(1,\)",
        ),
        (lambda b: pack(b, 9, "id"), ColumnNotFoundError, "no column 'id'; did you mean 'ids'"),
        (lambda b: pack(b, 9, [1, -1]), ArgumentError, "lengths must be finite and at least 0, got -1 in row 1"),
        (
            lambda b: pack(assign(b, segment_ids=b["ids"]), 9),
            ColumnMismatchError,
            "column 'segment_ids' must not exist",
        ),
        (lambda b: pack(b.drop("ids", "logp"), 9), ArgumentError, "lengths must be passed"),
        (lambda b: pack(assign(b, p=b["ids"].truncate(1)), 9), ArgumentError, "different lengths: 'ids' and 'p'"),
        (lambda b: pack(SampleBatch(a=[1, 2], seq_lens=[2]), 9), SequenceError, "got 'seq_lens'"),
        (lambda b: pack(b, 9).unpack(np.zeros(5)), ColumnLengthError, "one element for each of 6 tokens, got 5"),
        (lambda b: pack(b, 9).unpack(b["ids"]), ColumnLengthError, "rows, one per bin, got 2"),
        (lambda b: token_minibatches(b, 3), ArgumentError, "max_tokens must be at least 4"),
        (lambda b: token_minibatches(b, 0), ArgumentError, "max_tokens must be a whole number from 1, got 0"),
        (lambda b: balance(b, 0), ArgumentError, "k must be a whole number from 1, got 0"),
        (
            lambda b: balance(b, 2, [1, np.nan]),
            ArgumentError,
            "weights must be finite and at least 0, got nan in row 1",
        ),
        (lambda b: balance(b, 2, "text"), ColumnTypeError, "weights must be numeric"),
        (lambda b: balance(b, 2).join([b]), ColumnLengthError, r"parts must have \[1, 1\] rows, got \[2\]"),
        (lambda b: chunk(b, 0), ArgumentError, "n must be a whole number from 1"),
        (lambda b: chunk(b[:0], 2), None, ""),
        (lambda b: chunk(b[:1], 2, pad_to_divisor=True), None, ""),
        (lambda b: repeat(b, -1), ArgumentError, "k must be a whole number from 0, got -1"),
        (lambda b: union(b, b[:1]), ColumnLengthError, "other must have 2 rows, got 1"),
        (lambda b: union(b, {"rewards": [5.0, 5.0]}), ColumnMismatchError, "column 'rewards' must be equal in both"),
        (lambda b: union(b, [1]), ColumnTypeError, "other must be a batch or a mapping of columns, got list"),
        (lambda b: assign(b, x=[1]), ColumnLengthError, "column 'x' must have 2 rows"),
        (lambda b: group_by(b, "ids"), ColumnTypeError, "'ids' must have one number or string per row, got a ragged"),
        (lambda b: group_by(b, "uid"), ColumnNotFoundError, "no column 'uid'"),
        (lambda b: group_by(b, [1]), ColumnLengthError, "'key' must have 2 rows, got 1"),
        (lambda b: group_by(b, np.array(["a", None], object)), ArgumentError, "must have a key in every row, got 1"),
        (lambda b: group_by(b, np.array(["a", 1], object)), ColumnTypeError, "keys of one type"),
        (lambda b: group_by(b, np.zeros((2, 2))), ColumnTypeError, "one number or string per row"),
        (lambda b: group_by(b, "text").mean("text"), ColumnTypeError, "'text' must be numeric"),
        (lambda b: group_by(b, "text").mean([1.0]), ColumnLengthError, "'values' must have one number for each of 2"),
        (lambda b: group_by(b, "text").spread([1.0]), ColumnLengthError, "values must have 2 rows, one per group"),
    ],
)
def test_bad_input_is_rejected(call, error, message):
    batch = batch_of([2, 4])
    before = batch.copy()
    if error is None:
        call(batch)
    else:
        with pytest.raises(error, match=message):
            call(batch)
    assert batch == before
    assert list(batch) == list(before)


def test_methods_of_batches_call_the_functions():
    batch = batch_of([5, 3, 2]).assign(uid=[1, 1, 2])
    assert len(batch.pack(5)) == 2
    assert batch.balance(2).join() == batch
    assert batch.chunk(2, pad_to_divisor=True).join() == batch
    assert batch.group_by("uid").counts.tolist() == [2, 1]
    assert len(batch.repeat(3)) == 9
    assert "x" in batch.union({"x": [1, 2, 3]})
    assert [len(part) for part in batch.minibatches(max_tokens=5, shuffle=False)] == [1, 2]
    assert [part["rewards"].tolist() for part in batch.minibatches(max_tokens=5, lengths=[1, 1, 5], shuffle=False)] == [
        [0, 1],
        [2],
    ]
    if HAS_TORCH:
        (part,) = batch.minibatches(max_tokens=10, device="cpu", floats="float32")
        assert str(part["logp"].dtype) == "torch.float32"
    for arguments, message in (
        ({}, "one of size and max_tokens must be passed, got none"),
        ({"size": 2, "max_tokens": 5}, "one of size and max_tokens must be passed, got both"),
        ({"size": 2, "lengths": "ids"}, "lengths must be passed with max_tokens"),
        ({"max_tokens": 4}, "max_tokens must be at least 5, the tokens of row 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            batch.minibatches(**arguments)


def test_rows_in_packing_order_are_packed_without_reordering():
    batch = batch_of([5, 3, 2])
    packed = pack(batch, 5)
    edges = packed.batch["ids"].offsets
    assert edges.tolist() == [0, 5, 10]
    assert all(stop - start <= 5 for start, stop in pairwise(edges))
