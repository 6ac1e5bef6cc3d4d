"""Methods of ragged columns agree with a loop over rows, for arrays and tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.column import RaggedColumn, unpad
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnTypeError,
    RowIndexError,
)
from tests.optional import HAS_TORCH

KINDS = ["array", "tensor"] if HAS_TORCH else ["array"]
DTYPES = ["i8", "i4", "u1", "f4", "f8", "?"]
LENGTHS = [(2, 0, 5, 1), (), (0,), (0, 0), (3,), (400, 1, 0, 90), (4, 4, 4)]

by_kind = pytest.mark.parametrize("kind", KINDS)


def rows_of(dtype, lengths, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        # Sums of these are exact in any order.
        return [(rng.integers(-64, 64, n) / 8).astype(dtype) for n in lengths]
    return [rng.integers(0, 2 if dtype == "?" else 9, n).astype(dtype) for n in lengths]


def column_of(rows, kind="array", dtype=None):
    column = RaggedColumn.from_rows(rows, "x", dtype if rows else dtype or "f8")
    return SampleBatch(x=column).to_torch()["x"] if kind == "tensor" else column


def same(actual, expected, *, exact=True):
    actual = actual.numpy() if hasattr(actual, "detach") else np.asarray(actual)
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    if exact:
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def same_rows(column, expected, *, exact=True):
    assert len(column) == len(expected)
    for actual, row in zip(column, expected, strict=True):
        same(actual, row, exact=exact)


@st.composite
def made(draw):
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.integers(0, 6) | st.just(300), max_size=8))
    rows = rows_of(dtype, lengths, draw(st.integers(0, 99)))
    column = column_of(rows, draw(st.sampled_from(KINDS)), dtype)
    first = draw(st.integers(0, len(rows)))
    # A slice: its offsets begin past zero.
    return rows[first:], column[first:], dtype


@given(made())
def test_reductions_agree_with_a_loop(case):
    rows, column, _ = case
    same(column.sum(), [row.sum() for row in rows], exact=False)
    with np.errstate(invalid="ignore"):
        same(column.mean(), [row.mean() if len(row) else np.nan for row in rows], exact=False)
    same(column.min(initial=0), [row.min() if len(row) else 0 for row in rows])
    same(column.max(initial=0), [row.max() if len(row) else 0 for row in rows])
    same(column.any(), [row.any() for row in rows])
    same(column.all(), [row.all() for row in rows])


@given(made())
def test_argmax_agrees_with_a_loop(case):
    rows, column, _ = case
    full = [i for i, row in enumerate(rows) if len(row)]
    same(column[full].argmax(), [rows[i].argmax() for i in full])


@given(made(), st.integers(0, 99))
def test_masked_reductions_agree_with_a_loop(case, seed):
    rows, column, dtype = case
    rng = np.random.default_rng(seed)
    flags = [rng.random(len(row)) < 0.5 for row in rows]
    kind = "array" if isinstance(column, RaggedColumn) else "tensor"
    mask = column_of(flags, kind, "?")
    chosen = [row[flag] for row, flag in zip(rows, flags, strict=True)]
    same(column.sum(mask=mask), [row.sum() for row in chosen], exact=False)
    same(column.mean(mask=mask), [row.mean() if len(row) else np.nan for row in chosen], exact=False)
    same(column.min(mask=mask, initial=0), [row.min() if len(row) else 0 for row in chosen])
    same(column.any(mask=mask), [row.any() for row in chosen])
    same(column.all(mask=mask), [row.all() for row in chosen])
    same_rows(column.filter(mask), chosen)
    full = [i for i, row in enumerate(chosen) if len(row)]
    expected = [np.flatnonzero(flags[i])[chosen[i].argmax()] for i in full]
    same(column[full].argmax(mask=mask[full]), expected)
    assert np.dtype(dtype) == np.dtype(str(column.dtype).removeprefix("torch."))


@given(made())
def test_running_sums_agree_with_a_loop(case):
    rows, column, dtype = case
    wide = "f8" if np.dtype(dtype).kind == "f" else "i8"
    same_rows(column.cumsum(), [row.astype(wide).cumsum() for row in rows], exact=False)
    back = [row.astype(wide)[::-1].cumsum()[::-1] for row in rows]
    same_rows(column.cumsum(reverse=True), back, exact=False)


@given(made(), st.sampled_from(["left", "right"]), st.sampled_from([None, 1, 8]), st.integers(0, 3) | st.none())
def test_padding_agrees_with_a_loop_and_back(case, side, multiple_of, spare):
    rows, column, dtype = case
    longest = max(map(len, rows), default=0)
    length = None if spare is None else longest + spare
    width = longest if length is None else length
    width = width if multiple_of is None else -(-width // multiple_of) * multiple_of
    value = 1
    expected = np.full((len(rows), width), value, dtype)
    mask, positions = np.zeros((len(rows), width), bool), np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        position = slice(width - len(row), width) if side == "left" else slice(len(row))
        expected[i, position], mask[i, position], positions[i, position] = row, True, np.arange(len(row))
    how = {"side": side, "multiple_of": multiple_of, "length": length}
    padded = column.pad(value, **how)
    same(padded, expected)
    same(column.mask(**how), mask)
    same(column.positions(**how), positions)
    assert unpad(padded, column.lengths, side=side).equals(column)
    assert unpad(padded, mask=column.mask(**how)).equals(column)
    same(column.seq_lens, [len(row) for row in rows])
    same(column.cu_seqlens, np.cumsum([0, *map(len, rows)]))
    assert column.max_seqlen == longest


@by_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_more_dimensions_are_padded_and_unpadded(kind, side):
    rows = [np.arange(6.0).reshape(3, 2), np.zeros((0, 2)), np.ones((1, 2))]
    column = column_of(rows, kind)
    padded = column.pad(-1, side=side, length=4)
    for actual, row in zip(padded, rows, strict=True):
        inside = slice(4 - len(row), 4) if side == "left" else slice(len(row))
        same(actual[inside], row)
        assert int((actual == -1).sum()) == 2 * (4 - len(row))
    assert unpad(padded, [3, 0, 1], side=side).equals(column)
    assert unpad(padded, mask=column.mask(side=side, length=4)).equals(column)
    # Long rows, which are copied one by one, and rows whose other extents differ.
    long = [np.arange(200.0).reshape(100, 2), np.ones((50, 2))]
    same(column_of(long, kind).pad(side=side)[0], long[0])
    uneven = column_of([np.ones((1, 2)), np.full((2, 1), 2.0)], kind).pad(side=side)
    expected = [[[0, 0], [1, 1]], [[2, 0], [2, 0]]] if side == "left" else [[[1, 1], [0, 0]], [[2, 0], [2, 0]]]
    same(uneven, expected)


@by_kind
def test_padding_writes_to_an_output_array(kind):
    column = column_of([[1, 2], [3]], kind)
    out = np.full((2, 4), 9)
    assert column.pad(-1, out=out) is out
    assert out.tolist() == [[1, 2, -1, -1], [3, -1, -1, -1]]
    if HAS_TORCH:
        import torch

        tensor = torch.full((2, 3), 9)
        assert column.pad(0, side="left", out=tensor) is tensor
        assert tensor.tolist() == [[0, 1, 2], [0, 0, 3]]
        apart = torch.full((3, 2), 9).T
        column.pad(0, out=apart)
        assert apart.tolist() == [[1, 2, 0], [3, 0, 0]]


@by_kind
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_operators_agree_with_a_loop(kind, lengths):
    rows, others = rows_of("f8", lengths), rows_of("f8", lengths, 1)
    column, other = column_of(rows, kind, "f8"), column_of(others, kind, "f8")
    single = np.arange(1.0, len(rows) + 1)
    same_rows(column + other, [a + b for a, b in zip(rows, others, strict=True)])
    same_rows(column - single, [a - b for a, b in zip(rows, single, strict=True)])
    same_rows(single / (column + 10), [b / (a + 10) for a, b in zip(rows, single, strict=True)])
    same_rows(2 * column, [2 * a for a in rows])
    same_rows(1 - column, [1 - a for a in rows])
    same_rows(np.float64(2) * column, [2 * a for a in rows])
    same_rows(abs(-column), [abs(a) for a in rows])
    same_rows(column > other, [a > b for a, b in zip(rows, others, strict=True)])
    same_rows(column == column, [a == a for a in rows])
    same_rows(~((column < 0) | (column != other)), [~((a < 0) | (a != b)) for a, b in zip(rows, others, strict=True)])
    same_rows(column.clip(-0.5, single), [a.clip(-0.5, b) for a, b in zip(rows, single, strict=True)])
    same_rows(column.clip(low=0), [a.clip(0) for a in rows])
    same_rows(column.map(lambda flat: flat * 3), [a * 3 for a in rows])
    same_rows((column**2) // 1 % 2, [a**2 // 1 % 2 for a in rows])


def test_numpy_functions_accept_ragged_columns():
    rows = rows_of("f8", (2, 0, 3))
    column = column_of(rows)
    same_rows(np.exp(column), [np.exp(row) for row in rows])
    same_rows(np.maximum(column, np.array([0.0, 1.0, 2.0])), [np.maximum(row, i) for i, row in enumerate(rows)])
    quotient, remainder = np.divmod(column, 2)
    same_rows(quotient, [row // 2 for row in rows])
    same_rows(remainder, [row % 2 for row in rows])
    out = column.copy()
    assert np.multiply(column, 2, out=out) is out
    same_rows(out, [row * 2 for row in rows])
    same_rows(np.add(column, 1, out=column.copy(), where=column > 0), [np.where(r > 0, r + 1, r) for r in rows])
    with pytest.raises(ArgumentError, match=r"add\.reduce must be applied to row\.flat"):
        np.add.reduce(column)
    with pytest.raises(ColumnMismatchError, match="out must be a ragged column"):
        np.add(column, 1, out=np.zeros(5))


@by_kind
def test_rows_of_more_dimensions_are_reduced_and_calculated_with(kind):
    rows = [np.arange(6.0).reshape(3, 2), np.zeros((0, 2)), np.ones((1, 2))]
    column = column_of(rows, kind)
    same(column.sum(), [15, 0, 2])
    same_rows(column * column, [row * row for row in rows])
    same_rows(column + np.array([1, 2, 3]), [row + i for row, i in zip(rows, (1, 2, 3), strict=True)])
    same(column.seq_lens, [3, 0, 1])
    same(column.cu_seqlens, [0, 3, 3, 4])
    first, second = column.split([1, 0, 1])
    same_rows(first, [rows[0][:1], rows[1], rows[2]])
    same_rows(second, [rows[0][1:], rows[1], rows[2][1:]])
    same_rows(first.join(second), rows)
    same_rows(column.truncate(2), [rows[0][:2], rows[1], rows[2]])
    same(column[[0, 2]].gather([-1, 0]), [rows[0][-1], rows[2][0]])


@given(made(), st.integers(0, 99))
def test_slices_and_joins_agree_with_a_loop(case, seed):
    rows, column, _ = case
    rng = np.random.default_rng(seed)
    cuts = np.array([rng.integers(0, len(row) + 1) for row in rows], np.int64)
    left, right = column.split(cuts)
    same_rows(left, [row[:cut] for row, cut in zip(rows, cuts, strict=True)])
    same_rows(right, [row[cut:] for row, cut in zip(rows, cuts, strict=True)])
    same_rows(left.join(right), rows)
    same_rows(column.join(column, left), [np.concatenate([r, r, r[:c]]) for r, c in zip(rows, cuts, strict=True)])
    same_rows(column.truncate(3), [row[:3] for row in rows])
    same_rows(column.truncate(3, side="left"), [row[max(len(row) - 3, 0) :] for row in rows])
    same_rows(column.truncate(cuts), [row[:cut] for row, cut in zip(rows, cuts, strict=True)])
    full = [i for i, row in enumerate(rows) if len(row)]
    among = [rows[i] for i in full]
    same(column[full].gather(-1), [row[-1] for row in among])
    pairs = np.array([rng.integers(-len(row), len(row), 2) for row in among], np.int64).reshape(len(full), 2)
    same(column[full].gather(pairs), np.array([r[p] for r, p in zip(among, pairs, strict=True)]).reshape(-1, 2))
    counts = [rng.integers(0, 4) if len(row) else 0 for row in rows]
    places = [rng.integers(0, max(len(row), 1), count) for row, count in zip(rows, counts, strict=True)]
    actual = column.gather(RaggedColumn.from_rows(places, "p", "i8"))
    same_rows(actual, [row[position] for row, position in zip(rows, places, strict=True)])


@by_kind
def test_rows_are_built_from_values_and_lengths(kind):
    values = np.arange(12).reshape(6, 2)
    given_values = values
    cls = RaggedColumn
    if kind == "tensor":
        import torch

        from samplebatch.column import RaggedTorchColumn

        given_values, cls = torch.from_numpy(values), RaggedTorchColumn
    column = cls.from_lengths(given_values, [2, 0, 4])
    same_rows(column, [values[:2], values[:0], values[2:]])
    assert np.shares_memory(np.asarray(column.elements), values)
    same_rows(cls.from_lengths(given_values[:0, 0], []), [])
    for lengths, message in (([2, 3], "a sum of 5"), ([-1, 7], "-1 in row 0"), ([[6]], r"shape \(1, 1\)")):
        with pytest.raises(ColumnLengthError, match=f"with a sum of 6, got {message}"):
            cls.from_lengths(given_values, lengths)


def test_lists_and_arrays_are_concatenated():
    for rows in ([np.arange(3), np.arange(0)], [[1, 2], [], [3]], [[0.5], [1, 2.5]], [[2**63], [1, 2]], [[True], [1]]):
        column = SampleBatch(x=rows)["x"]
        assert column.dtype == np.concatenate([np.asarray(row) for row in rows if len(row)]).dtype
        same_rows(column, rows)
    large = [np.arange(n) for n in (300_000, 0, 5, 700_000)]
    same_rows(SampleBatch(x=large)["x"], large)
    assert SampleBatch(x=[[1.5], [2, 3]], ragged={"x": "f4"})["x"].dtype == np.float32
    with pytest.raises(ColumnMismatchError, match="column 'x' must store its values without loss"):
        SampleBatch(x=[[300], [2, 3]], ragged={"x": "u1"})


def test_messages_become_objects_in_arrow_lists():
    messages = [
        [{"role": "user", "content": "1+1"}],
        [{"role": "user", "content": "2"}, {"role": "bot", "content": "4"}],
    ]
    for rows in (messages, messages[:1], [messages[0], []]):
        batch = SampleBatch(messages=rows, text=["a"] * len(rows))
        assert batch["messages"].tolist() == rows
        assert SampleBatch.from_arrow(batch.to_arrow())["messages"].tolist() == rows


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_nested_tensors_share_memory_and_store_their_extremes():
    import torch

    column = column_of([[1, 2], [3], []])
    nested = column.to_nested()
    assert (nested._min_seqlen, nested._max_seqlen) == (0, 2)
    assert nested.values().data_ptr() == column.elements.ctypes.data
    back = SampleBatch(x=nested)["x"]
    assert back.elements.data_ptr() == column.elements.ctypes.data
    same_rows(back, [[1, 2], [3], []])
    assert column_of([[1], [2]])[:0].to_nested().shape[0] == 0
    shared = SampleBatch(x=torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged))
    assert shared["x"].max_seqlen == 3


def test_offsets_beyond_32_bits():
    n = 2**31 + 2**20
    flags = np.zeros(n, np.bool_)
    flags[-1] = flags[0] = True
    column = RaggedColumn.from_lengths(flags, [2**31, 2**20 - 1, 0, 1])
    assert column.any().tolist() == [True, False, False, True]
    assert column[1:].sum().tolist() == [0, 0, 1]
    assert column[[3]].gather(-1).tolist() == [True]
    assert column[3].tolist() == [True]
    with pytest.raises(ColumnLengthError, match="cu_seqlens must fit 32 bits"):
        _ = column.cu_seqlens


ids = column_of([[1, 2, 3], [4]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ids.pad(side="middle"), ArgumentError, "side must be one of 'left', 'right'"),
        (lambda: ids.pad(length=2), ColumnLengthError, "length must be at least 3"),
        (lambda: ids.pad(multiple_of=0), ArgumentError, "multiple_of must be a whole number from 1, got 0"),
        (lambda: ids.mask(length=-1), ArgumentError, "length must be a whole number from 0"),
        (
            lambda: ids.pad(out=np.zeros((3, 3), int)),
            ColumnMismatchError,
            r"out must have shape \(2, 3\), got \(3, 3\)",
        ),
        (lambda: ids.pad(out=np.zeros((2, 2), int)), ColumnLengthError, "length must be at least 3"),
        (lambda: ids.pad(out=np.zeros((2, 3), "i4")), ColumnMismatchError, "out must have dtype int64, got int32"),
        (lambda: ids.pad(out=[[0]]), ColumnMismatchError, "out must have shape"),
        (lambda: unpad(np.zeros(3), [1]), ColumnTypeError, "padded must be"),
        (lambda: unpad(np.zeros((1, 3))), ArgumentError, "exactly one of lengths and mask must be passed, got none"),
        (lambda: unpad(np.zeros((1, 3)), [1], mask=[[1, 1, 1]]), ArgumentError, "got both"),
        (lambda: unpad(np.zeros((1, 3)), [4]), ColumnLengthError, r"lengths must be in \[0, 3\], got 4 in row 0"),
        (lambda: unpad(np.zeros((1, 3)), [1, 1]), ColumnLengthError, "lengths must have 1 rows"),
        (lambda: unpad(np.zeros((1, 3)), mask=[[1]]), ColumnLengthError, r"mask must have shape \(1, 3\)"),
        (lambda: ids + column_of([[1, 2], [4]]), ColumnLengthError, r"got \(2,\) for \(3,\) in row 0"),
        (lambda: ids + ids[:1], ColumnLengthError, "an operand must have 2 rows, got 1"),
        (lambda: ids + np.zeros(3), ColumnLengthError, r"one value per row, shape \(2,\)"),
        (lambda: ids.sum(mask=[True]), ColumnTypeError, "mask must be a ragged column"),
        (lambda: ids.sum(mask=ids[:1] > 0), ColumnLengthError, "mask must have 2 rows, got 1"),
        (lambda: column_of([[1], []]).max(), ArgumentError, "have a max, got none in row 1; pass initial"),
        (lambda: ids.argmax(mask=ids > 3), ArgumentError, "have a max, got none in row 0"),
        (lambda: ids.clip(), ArgumentError, "one of low and high must be passed"),
        (lambda: ids.map(lambda flat: flat[:2]), ColumnLengthError, "must return one element for each of 4"),
        (lambda: bool(ids == ids), ArgumentError, "a ragged column has no truth value"),
        (lambda: ids.join(ids[:1]), ColumnLengthError, "rows must be joined with 2 rows, got 1"),
        (lambda: ids.join([[1], [2]]), ColumnTypeError, "got list"),
        (lambda: ids.split([1, 2]), RowIndexError, "got 2 of 1 in row 1"),
        (lambda: ids.split(0.5), ArgumentError, "positions must be integers, got dtype float64"),
        (lambda: ids.split([1]), ColumnLengthError, r"positions must be a number or have 2 rows, got shape \(1,\)"),
        (lambda: ids.truncate(-1), ArgumentError, "length must be at least 0, got -1"),
        (lambda: ids.truncate(1, side="both"), ArgumentError, "side must be one of"),
        (lambda: ids.gather([0, 1]), RowIndexError, "got 1 of 1 in row 1"),
        (lambda: ids.gather([0]), ColumnLengthError, "positions must have 2 rows, got 1"),
        (lambda: ids.gather(0.5), ArgumentError, "positions must be integers"),
        (lambda: RaggedColumn.from_lengths(np.float64(1), [1]), ColumnTypeError, "values must have one dimension"),
    ],
)
def test_invalid_input_is_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_arrays_and_tensors_do_not_mix():
    with pytest.raises(
        ColumnMismatchError, match="an operand must be a ragged column, like the rows, got ragged_torch"
    ):
        _ = ids + column_of([[1, 2, 3], [4]], "tensor")


def test_rows_are_written_only_with_equal_length():
    batch = SampleBatch(ids=[[1, 2], [3, 4]], ragged="ids")
    batch["ids"][1] = [5, 6]
    same_rows(batch["ids"], [[1, 2], [5, 6]])
    with pytest.raises(ColumnMismatchError, match="other lengths need a new column: assign all rows"):
        batch["ids"][1] = [5]
    same_rows(batch["ids"], [[1, 2], [5, 6]])
