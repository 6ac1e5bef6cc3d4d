"""Fast paths of batches and columns agree with the general paths on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, SampleBatch, SampleBatchBuilder
from samplebatch.batch import bulk, sequences, tree
from samplebatch.batch.episodes import by_stream
from samplebatch.batch.nested.rows import select
from samplebatch.column import casting, memory, threads, varying_rows
from samplebatch.column.convert import as_column, plain_columns
from samplebatch.column.interface import Column, resolve
from samplebatch.column.tensor import TensorColumn
from samplebatch.errors import SampleBatchError

SEEDS = range(20)
DTYPES = ("?", "i1", "u2", "i4", "i8", "f4", "f8", "c8", "M8[s]")


def random_columns(rng: np.random.Generator, rows: int) -> dict[str, Column]:
    columns = {}
    for position in range(rng.integers(1, 6)):
        shape = (rows, *rng.integers(0, 4, rng.integers(0, 3)))
        values = rng.integers(0, 2**31, shape).astype(str(rng.choice(DTYPES)))
        columns[f"c{position}"] = as_column(values, f"c{position}")
    if rng.random() < 0.3:
        columns["infos"] = as_column([{"step": row} for row in range(rows)], "infos")
    return columns


def assert_equal(columns: Any, expected: dict[str, Column]) -> None:
    assert list(columns) == list(expected)
    for name, column in expected.items():
        assert columns[name].dtype == column.dtype
        assert columns[name].equals(column), name


@pytest.fixture
def shared_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share copies of any size between two threads."""
    monkeypatch.setattr(threads, "PIECE_NBYTES", 64)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_all_columns_at_once(seed: int, shared_always: None) -> None:
    rng = np.random.default_rng(seed)
    columns = random_columns(rng, int(rng.integers(0, 50)))
    expected = {name: column.copy() for name, column in columns.items()}
    assert_equal(bulk.copy_large(columns), expected)
    assert_equal(bulk.copy(columns, 50), expected)
    small = bulk.copy_small(columns)
    assert (small is None) == ("infos" in columns)
    if small is not None:
        assert_equal(small, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_all_columns_gathered_at_once(seed: int, shared_always: None) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 50))
    columns = random_columns(rng, rows)
    indices = rng.integers(0, rows, int(rng.integers(0, 80)))
    expected = {name: column.take(indices) for name, column in columns.items()}
    nbytes = bulk.nbytes_of(columns.values(), len(indices), rows)
    assert_equal(bulk.gather_small(columns, indices, nbytes), expected)
    assert_equal(bulk.gather_large(columns, indices), expected)
    assert_equal(bulk.gather(columns, indices, rows), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_columns_joined_at_once(seed: int, shared_always: None) -> None:
    rng = np.random.default_rng(seed)
    full = random_columns(rng, 60)
    cuts = np.sort(rng.integers(0, 61, 3)).tolist()
    groups = [
        {name: column.slice(start, stop) for name, column in full.items()}
        for start, stop in zip([0, *cuts], [*cuts, 60], strict=True)
    ]
    nbytes = bulk.nbytes_of(full.values(), 60, 60)
    small = bulk.join_small(groups, 60, nbytes)
    assert (small is None) == ("infos" in full)
    if small is not None:
        assert_equal(small, full)
    pieces = {name: [group[name] for group in groups] for name in full}
    assert_equal(bulk.join_large(pieces, lambda value, name: type(value[0]).concat(value, name)), full)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_counted_without_inspecting_each_column(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = random_columns(rng, int(rng.integers(1, 9)))
    assert bulk.count_rows(columns) == len(columns["c0"])
    columns["short"] = as_column(np.zeros(20), "short")
    with pytest.raises(SampleBatchError, match="'short' must have"):
        bulk.count_rows(columns)


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_arrays_become_columns_like_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = {name: column.values for name, column in random_columns(rng, 7).items()}
    built = plain_columns(arrays)
    if built is not None:
        assert_equal(built, {name: as_column(values, name) for name, values in arrays.items()})
        assert all(built[name].values is values for name, values in arrays.items())
    assert plain_columns({**arrays, "list": [1] * 7}) is None
    assert plain_columns({**arrays, "strided": np.zeros(14)[::2]}) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_arrays_are_assigned_to_existing_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain, general = SampleBatch(a=np.zeros(5), actions=np.zeros(5)), SampleBatch(a=np.zeros(5), actions=np.zeros(5))
    name = str(rng.choice(["a", "actions"]))
    values = rng.random((int(rng.choice([5, 4])), *rng.integers(1, 3, rng.integers(0, 2)))).astype(
        rng.choice(["f4", "i8"])
    )

    def outcome(assign: Callable[[], None], batch: SampleBatch) -> Any:
        try:
            assign()
        except SampleBatchError as error:
            return str(error), batch
        return None, batch

    fast = outcome(lambda: plain.__setitem__(name, values), plain)
    assert fast == outcome(lambda: tree.assign(general, name, values), general)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_numbers_of_the_native_type_are_resolved_like_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    rows = rng.integers(-n - (seed % 2), n + (seed % 2), int(rng.integers(0, 9)))
    results = []
    for key in (rows, rows.astype(np.int32), rows.tolist()):
        try:
            resolved = resolve(key, n)
        except SampleBatchError as error:
            results.append(str(error))
        else:
            assert isinstance(resolved, np.ndarray)
            assert resolved is not key
            results.append(str(resolved.tolist()))
    assert len(set(results)) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_are_ordered_by_radix_as_by_comparison(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, int(rng.choice([3, 1 << 16, 1 << 17])), 200)
    np.testing.assert_array_equal(by_stream(keys), np.lexsort([keys]))
    np.testing.assert_array_equal(by_stream(keys), by_stream(keys + (1 << 40)))
    np.testing.assert_array_equal(by_stream(keys), by_stream(keys, np.zeros(200, int)))


@pytest.mark.parametrize("seed", SEEDS)
def test_few_and_many_sequences_are_split_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, int(rng.integers(0, 30)))
    start, stop = sorted(rng.integers(0, lengths.sum() + 1, 2).tolist())
    ends = [0, *lengths.cumsum().tolist()]
    part = sequences.snap(lengths, start, stop)
    # Sequences without steps, at an end, belong to what comes before.
    first, last = (max(i for i, end in enumerate(ends) if end <= bound) for bound in (start, stop))
    assert part == (ends[first], ends[last], first, last)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mean", [3, 400])
def test_short_and_long_ragged_rows_are_gathered_like_slices(seed: int, mean: int) -> None:
    rng = np.random.default_rng(seed)
    offsets = varying_rows.offsets_of(rng.integers(0, 2 * mean, 10))
    elements = rng.random(int(offsets[-1]))
    rows = rng.integers(0, 10, 6)
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    gathered, places = varying_rows.gather(elements, starts, lengths)
    slices = [elements[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    np.testing.assert_array_equal(gathered, np.concatenate(slices))
    np.testing.assert_array_equal(places, varying_rows.offsets_of(lengths))


@pytest.mark.parametrize("seed", SEEDS)
def test_iteration_returns_the_same_nested_rows_as_selection(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = Batch(
        a=rng.random((5, 2)),
        b=Batch(c=rng.integers(0, 9, 5), d=np.array(["x", None, "y", 1, {}], object)),
        none=None,
        empty=Batch(),
    )
    assert list(batch) == [select(batch, row) for row in range(5)] == [batch[np.array([row])][0] for row in range(5)]


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_written_directly_extend_columns_like_puts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [
        {"obs": rng.random(3).astype(np.float32), "rewards": rng.choice([1, 0.5, True, np.float32(2)]), "t": int(t)}
        for t in range(6)
    ]
    direct, put = SampleBatchBuilder(capacity=2), SampleBatchBuilder(capacity=2)
    for step in steps:
        direct.add_values(**step)
        put.add_steps(**{name: [value] for name, value in step.items()})
    assert direct.build_and_reset() == put.build_and_reset()


@pytest.mark.parametrize("seed", SEEDS)
def test_results_of_common_types_are_converted_like_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    refuse = lambda sentence, row: SampleBatchError(sentence)  # noqa: E731
    rewards = [float(value) for value in rng.random(4)]
    flags = [bool(value) for value in rng.integers(0, 2, 4)]
    default = casting.exact_outcomes(rewards, flags, flags, refuse)
    others = casting.exact_outcomes(
        [np.longdouble(r) for r in rewards], [int(f) for f in flags], [float(f) for f in flags], refuse
    )
    for array, other in zip(default, others, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)
    number = rewards[0]
    assert casting.exact_number("rewards", number, casting.FLOAT, refuse) == casting.exact_rows(
        "rewards", [number], casting.FLOAT, (1,), refuse
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_large_copies_agree_with_numpy(seed: int, shared_always: None) -> None:
    rng = np.random.default_rng(seed)
    array = rng.random((int(rng.integers(1, 40)), 3))[:: int(rng.integers(1, 3))]
    copy, jobs = memory.copying(array)
    threads.share(jobs)
    np.testing.assert_array_equal(copy, array)
    np.testing.assert_array_equal(memory.copy_of(array), array)
    assert TensorColumn(copy).equals(TensorColumn(array))
