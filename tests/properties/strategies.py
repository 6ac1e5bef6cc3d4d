"""Batches for Hypothesis to draw, and a plain-NumPy oracle that knows what every operation must make of them.

The oracle never looks at values. There is a universe of rows, numbered from 1, and a batch over all of them; from then
on the oracle keeps the numbers of the rows that the batch must hold, in order, 0 standing for a row of zeros (None for
objects). Whatever was done to the batch, each column must hold exactly `universe[numbers]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from samplebatch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.ragged import RaggedColumn
from tests.optional import torch

NUMPY = ("?", "i1", "i4", "i8", "u1", "u2", "u8", "f2", "f4", "f8", "c8", "c16", "M8[D]", "M8[ns]", "m8[s]", "S3", "U4")
TORCH = ("bfloat16", "float32", "int64", "bool")
OTHER = ("infos", "mixed infos", "words", "ragged")
Kinds = tuple[tuple[str, ...], ...]
EVERY_KIND: Kinds = (NUMPY, TORCH, OTHER)
FORMS = ("flat", "flat", "flat", "flat", "dict", "tuple")


@dataclass(frozen=True)
class Leaf:
    """Rows of one column; row 0 is the padding.

    `rows` is an array of numbers, of the bits of tensors if `torch_dtype` is set, or of objects.
    """

    rows: np.ndarray
    kind: str
    torch_dtype: str = ""

    def given(self) -> Any:
        """Return rows 1 and following in the form in which they are passed to a batch."""
        rows = self.rows[1:]
        if self.kind == "torch":
            return torch.from_numpy(rows.copy()).view(getattr(torch, self.torch_dtype))
        if self.kind == "words":
            return np.array(rows.tolist(), np.dtypes.StringDType())
        if self.kind == "ragged":
            return RaggedColumn.from_rows([np.zeros(0, np.int16), *rows], "ragged")[1:]
        # A list is one of objects if any row is a dict; others would be taken for lists of numbers.
        return rows.tolist() if any(isinstance(row, dict) for row in rows) else rows.copy()

    def matches(self, column: Column, numbers: np.ndarray) -> bool:
        """Return whether a column contains exactly the rows with the given numbers."""
        expected = self.rows[numbers]
        values = column.values
        if self.kind == "infos":
            return bool(column.kind == "object" and values.tolist() == expected.tolist())
        if self.kind == "words":
            return bool(isinstance(values.dtype, np.dtypes.StringDType) and values.tolist() == expected.tolist())
        if self.kind == "ragged":
            rows = [(row.dtype, row.tolist()) for row in column]  # type: ignore[attr-defined]
            return rows == [(np.int16, row.tolist()) for row in expected]
        if self.rows.dtype.kind in "SU":
            return column.kind == "text" and values.shape == expected.shape and values.tolist() == expected.tolist()
        if isinstance(values, torch.Tensor):
            reference = self.torch_dtype or self.rows.dtype.name
            if str(values.dtype) != f"torch.{reference}":
                return False
            values = values.contiguous().view(_bits(reference)).numpy()
        elif self.kind == "torch":
            return False
        return (
            values.shape == expected.shape and values.dtype == expected.dtype and values.tobytes() == expected.tobytes()
        )


def _bits(torch_dtype: str) -> torch.dtype:
    return torch.int16 if torch_dtype == "bfloat16" else getattr(torch, torch_dtype)


def _leaf(kind: str, rng: np.random.Generator, n: int, row_shape: tuple[int, ...]) -> Leaf:
    if kind == "infos":
        return _objects([{"lives": i, "name": f"agent {i}", "at": [i, i + 1]} for i in range(n)])
    if kind == "mixed infos":
        choices = [lambda i: None, lambda i: {}, lambda i: {"x": i}, lambda i: {"y": (i, {"set": {i}})}, lambda i: [i]]
        return _objects([choices[rng.integers(len(choices))](i) for i in range(n)])
    if kind == "words":
        return replace(_objects(["é" * int(rng.integers(30)) + str(i) for i in range(n)], missing=""), kind="words")
    if kind == "ragged":
        shapes = [int(rng.integers(4)) for _ in range(n)]
        rows = [np.zeros(0, np.int16), *(rng.integers(0, 99, size).astype(np.int16) for size in shapes)]
        return Leaf(np.fromiter(rows, object, n + 1), "ragged")
    if kind in TORCH:
        bits = torch.empty(0, dtype=_bits(kind)).numpy().dtype
        return Leaf(_array(bits, rng, n, row_shape), "torch", kind)
    return Leaf(_array(np.dtype(kind), rng, n, row_shape), "numpy")


def _array(dtype: np.dtype[Any], rng: np.random.Generator, n: int, row_shape: tuple[int, ...]) -> np.ndarray:
    """Return random bytes as n rows, including NaN and NaT, after a row of zeros."""
    shape = (n + 1, *row_shape)
    if dtype.kind in "bSU":
        rows = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    else:
        rows = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    rows[:1] = np.zeros(1, dtype)
    return rows


def _objects(rows: list[Any], missing: Any = None) -> Leaf:
    return Leaf(np.fromiter([missing, *rows], object, len(rows) + 1), "infos")


@dataclass
class Oracle:
    """Expected contents of a batch: the numbers of its rows, and its sequences.

    Attributes
    ----------
    leaves
        Columns with one row per step, by dotted name.
    states
        Columns with one row per sequence, such as states, by dotted name.
    numbers
        Row numbers of the steps without padding, shape (n,).
    sequences
        State number and number of steps of each sequence; None without sequences.
    width
        Rows of each padded sequence; None without padding.
    """

    leaves: dict[str, Leaf]
    states: dict[str, Leaf]
    numbers: np.ndarray
    sequences: list[tuple[int, int]] | None = None
    width: int | None = None
    updates: float | None = field(default=None)

    def __len__(self) -> int:
        return len(self.numbers)

    def copy(self) -> Oracle:
        return replace(self, leaves=dict(self.leaves), states=dict(self.states))

    def rows(self) -> np.ndarray:
        """Return the numbers of the stored rows, including padding."""
        if self.width is None or self.sequences is None:
            return self.numbers
        stored = np.zeros((len(self.sequences), self.width), int)
        start = 0
        for i, (_, length) in enumerate(self.sequences):
            stored[i, :length] = self.numbers[start : start + length]
            start += length
        return stored.reshape(-1)

    def bounds(self) -> list[tuple[int, int, int]]:
        """Return state, first step and end of each sequence."""
        ends = np.cumsum([length for _, length in self.sequences or []]).tolist()
        return [(state, end - length, end) for (state, length), end in zip(self.sequences or [], ends, strict=True)]

    def check(self, batch: SampleBatch) -> None:
        """Compare a batch with its oracle."""
        assert type(batch) is SampleBatch
        assert len(batch) == batch.count == len(self.numbers)
        per_sequence = {*self.states, "seq_lens"} if self.sequences is not None else set()
        assert set(batch.column_names) == {*self.leaves, *per_sequence}
        rows = self.rows()
        for name, leaf in self.leaves.items():
            assert leaf.matches(batch.column(name), rows), f"{name}: {batch[name]!r} is not {leaf.rows[rows]!r}"
        assert batch.zero_padded == (self.width is not None)
        assert batch.num_grad_updates == self.updates
        assert batch.mask().tolist() == self._mask()
        if self.sequences is None:
            return
        states, lengths = ([part[i] for part in self.sequences] for i in (0, 1))
        assert np.asarray(batch["seq_lens"]).tolist() == lengths
        for name, leaf in self.states.items():
            assert leaf.matches(batch.column(name), np.array(states, int)), name
        if self.width is not None:
            assert batch.max_seq_len == self.width
        else:
            assert batch.max_seq_len >= max(lengths, default=0)

    def _mask(self) -> list[bool]:
        if self.width is None or self.sequences is None:
            return [True] * len(self.numbers)
        return [step < length for _, length in self.sequences for step in range(self.width)]

    # -- what operations make of it -----------------------------------------------------------------------------------

    def take(self, steps: np.ndarray) -> Oracle:
        """Gather steps; consecutive steps of one sequence form a sequence."""
        result = replace(self, numbers=self.numbers[steps], width=None)
        if self.sequences is not None:
            owner = np.repeat(np.arange(len(self.sequences)), [length for _, length in self.sequences])[steps]
            result.sequences = []
            for i, sequence in enumerate(owner.tolist()):
                if i and owner[i - 1] == sequence:
                    state, length = result.sequences.pop()
                    result.sequences.append((state, length + 1))
                else:
                    result.sequences.append((self.sequences[sequence][0], 1))
        return result

    def take_sequences(self, chosen: list[int]) -> Oracle:
        bounds = self.bounds()
        numbers = [self.numbers[bounds[i][1] : bounds[i][2]] for i in chosen]
        sequences = [(bounds[i][0], bounds[i][2] - bounds[i][1]) for i in chosen]
        return replace(self, numbers=np.concatenate([np.empty(0, int), *numbers]), sequences=sequences)

    def cut(self, start: int, stop: int) -> Oracle:
        """Slice steps exactly; sequences without steps are not counted."""
        stop = max(start, stop)
        result = replace(self, numbers=self.numbers[start:stop], width=None)
        if self.sequences is not None:
            result.sequences = [
                (state, min(end, stop) - max(begin, start))
                for state, begin, end in self.bounds()
                if min(end, stop) > max(begin, start)
            ]
        return result

    def snapped(self, start: int, stop: int) -> Oracle:
        """Slice at starts of sequences, at or before both bounds."""
        if self.sequences is None:
            return self.cut(start, stop)
        begins = [begin for _, begin, _ in self.bounds()] + [len(self)]
        start, stop = (max(begin for begin in [0, *begins] if begin <= end) for end in (start, max(start, stop)))
        return replace(self.cut(start, stop), width=self.width)

    def padded_left(self, padding: int) -> Oracle:
        result = replace(self, numbers=np.concatenate([np.zeros(padding, int), self.numbers]))
        if self.sequences is not None:
            (state, length), *others = self.sequences or [(0, 0)]
            result.sequences = [(state, length + padding), *others]
        return result

    def joined(self, other: Oracle) -> Oracle:
        sequences = None if self.sequences is None else self.sequences + (other.sequences or [])
        return replace(self, numbers=np.concatenate([self.numbers, other.numbers]), sequences=sequences)

    def without_sequences(self) -> Oracle:
        return replace(self, numbers=self.rows(), sequences=None, width=None, states={})

    # -- what only the batch can tell ---------------------------------------------------------------------------------

    def with_empty_sequences_of(self, batch: SampleBatch) -> Oracle:
        """Adopt the sequences of a batch after checking that they differ only by sequences without steps."""
        if self.sequences is None:
            return self
        states = np.asarray(batch["state_in_id"]).tolist()
        actual = list(zip(states, np.asarray(batch["seq_lens"]).tolist(), strict=True))
        assert [part for part in actual if part[1]] == [part for part in self.sequences if part[1]]
        return replace(self, sequences=actual)

    def in_the_order_of(self, batch: SampleBatch) -> Oracle:
        """Adopt the order of a shuffled batch after checking that it has the same rows or sequences."""
        if self.sequences is None:
            numbers = np.array(batch["id"])
            assert sorted(numbers.tolist()) == sorted(self.numbers.tolist())
            return replace(self, numbers=numbers)
        order = []
        left = list(range(len(self.sequences)))
        mask, ids = batch.mask(), np.array(batch["id"])
        numbers = ids[mask]
        bounds = self.bounds()
        start = 0
        for state, length in zip(
            np.asarray(batch["state_in_id"]).tolist(), np.asarray(batch["seq_lens"]).tolist(), strict=True
        ):
            rows = numbers[start : start + length].tolist()
            start += length
            actual = next(
                i for i in left if bounds[i][0] == state and self.numbers[bounds[i][1] : bounds[i][2]].tolist() == rows
            )
            left.remove(actual)
            order.append(actual)
        assert not left
        return self.take_sequences(order)


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    min_rows: int = 0,
    sequences: bool | None = None,
    padded: bool | None = None,
    kinds: Kinds = EVERY_KIND,
    forms: tuple[str, ...] = FORMS,
    declared: bool = False,
) -> tuple[SampleBatch, Oracle]:
    """Draw a batch with one to six columns besides `id` and `eps_id`, and its oracle.

    With `declared`, sequences may have a column `outcome` with one row per sequence, of any kind and form.
    `sequences`, `padded`: whether the batch has sequences and padding; None for either. With `min_rows` above 0, every
    sequence has steps.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    in_sequences = draw(st.booleans()) if sequences is None else sequences
    sizes = st.sampled_from([3, 1, 2, 5] if min_rows else [3, 0, 1, 2, 5])
    lengths = draw(st.lists(sizes, min_size=1, max_size=6)) if in_sequences else []
    n = sum(lengths) if in_sequences else draw(st.sampled_from([n for n in (12, 6, 2, 1, 0) if n >= min_rows]))
    leaves = {
        "id": Leaf(np.arange(n + 1), "numpy"),
        "eps_id": Leaf(np.concatenate([[0], np.sort(rng.integers(1, 5, n))]), "numpy"),
    }
    columns: dict[str, Any] = {name: leaf.given() for name, leaf in leaves.items()}
    sampled = _Columns(draw, rng, kinds, forms)
    for i in range(draw(st.integers(1, 6))):
        columns[f"column {i}"] = sampled.column(n, f"column {i}", leaves)
    states: dict[str, Leaf] = {}
    if in_sequences:
        states["state_in_id"] = Leaf(np.arange(len(lengths) + 1), "numpy")
        columns["state_in_id"] = states["state_in_id"].given()
        if draw(st.booleans()):
            columns["state_in_0"] = replace(sampled, kinds=kinds[:1]).column(len(lengths), "state_in_0", states)
        if declared and draw(st.booleans()):
            columns["outcome"] = sampled.column(len(lengths), "outcome", states)
        columns["seq_lens"] = np.array(lengths, draw(st.sampled_from([np.int32, np.int64])))
    updates = draw(st.sampled_from([None, 2.5]))
    names = draw(st.permutations(sorted(columns)))
    batch = SampleBatch(
        {name: columns[name] for name in names},
        _num_grad_updates=updates,
        per_sequence=["outcome"] if "outcome" in columns else (),
    )
    pairs = [(i + 1, length) for i, length in enumerate(lengths)] if in_sequences else None
    oracle = Oracle(leaves, states, np.arange(1, n + 1), pairs, updates=updates)
    if in_sequences and (draw(st.booleans()) if padded is None else padded):
        oracle.width = max(lengths) + draw(st.integers(0, 2))
        batch.right_zero_pad(oracle.width)
    return batch, oracle


@dataclass
class _Columns:
    """Source of columns of n rows; stores their leaves."""

    draw: st.DrawFn
    rng: np.random.Generator
    kinds: Kinds
    forms: tuple[str, ...]

    def column(self, n: int, path: str, leaves: dict[str, Leaf]) -> Any:
        """Draw a column, which may be nested, and store its leaves."""
        form = self.draw(st.sampled_from(self.forms))
        if form == "dict":
            return {key: self.column(n, f"{path}.{key}", leaves) for key in ("x", "y")[: self.draw(st.integers(1, 2))]}
        if form == "tuple":
            return tuple(self.column(n, f"{path}.{i}", leaves) for i in range(self.draw(st.integers(1, 2))))
        kind = self.draw(st.sampled_from(self.draw(st.sampled_from(self.kinds))))
        row_shape = self.draw(st.sampled_from([(), (), (3,), (2, 2), (0,)]))
        leaves[path] = _leaf(kind, self.rng, n, row_shape)
        return leaves[path].given()
