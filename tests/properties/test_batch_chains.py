"""Chains of operations, each step held against the oracle; batches that were left behind stay as they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samplebatch import SampleBatch, concat_samples
from tests.properties.strategies import Leaf, Oracle, batches

fractions = st.integers(0, 24).map(lambda part: part / 24)


class Chain(RuleBasedStateMachine):
    """Batch that passes through a sequence of operations, and earlier batches, some of which share its memory."""

    batch: SampleBatch
    oracle: Oracle

    @initialize(example=batches(declared=True))
    def start(self, example: tuple[SampleBatch, Oracle]) -> None:
        self.batch, self.oracle = example
        self.behind: list[tuple[SampleBatch, Oracle]] = []
        # Views that nobody reads before the chain ends: they still have to cut their columns then.
        self.aside: list[tuple[SampleBatch, Oracle]] = []
        self.assigned = 0

    @invariant()
    def the_batch_is_what_it_must_be(self) -> None:
        if hasattr(self, "batch"):
            self.oracle.check(self.batch)

    @invariant()
    def batches_left_behind_stay(self) -> None:
        for batch, oracle in getattr(self, "behind", []):
            oracle.check(batch)

    def go_on(self, batch: SampleBatch, oracle: Oracle) -> None:
        """Replace the current batch by another batch."""
        self.behind = [*self.behind[-2:], (self.batch, self.oracle)]
        self.batch, self.oracle = batch, oracle.with_empty_sequences_of(batch)

    def row(self, part: float) -> int:
        """Return the row at a fraction of the batch."""
        return round(part * len(self.oracle))

    def bound(self, row: int, how: str) -> int:
        """Write a slice bound in one of several equivalent ways."""
        n = len(self.oracle)
        if how == "negative" and row < n:
            return row - n
        if how == "beyond" and row == n:
            return n + 3
        return row

    @rule(start=fractions, stop=fractions)
    def put_a_view_aside(self, start: float, stop: float) -> None:
        first, last = self.row(start), self.row(stop)
        view = self.batch[first:last]
        self.aside.append((view, self.oracle.snapped(first, last).with_empty_sequences_of(view)))

    def teardown(self) -> None:
        for batch, oracle in getattr(self, "aside", []):
            oracle.check(batch)

    @precondition(lambda self: self.behind)
    @rule(pick=fractions)
    def go_back(self, pick: float) -> None:
        self.go_on(*self.behind.pop(int(pick * (len(self.behind) - 1))))

    # -- parts --------------------------------------------------------------------------------------------------------

    @rule(start=fractions, stop=fractions, how=st.sampled_from(["plain", "negative", "beyond", "open"]))
    def brackets(self, start: float, stop: float, how: str) -> None:
        first, last = self.row(start), self.row(stop)
        is_complete = how == "open" and not first and last == len(self.oracle)
        part = self.batch[:] if is_complete else self.batch[self.bound(first, how) : self.bound(last, how)]
        self.go_on(part, self.oracle.snapped(first, last))

    @rule(start=fractions, stop=fractions, how=st.sampled_from(["plain", "negative", "beyond"]))
    def exact_slice(self, start: float, stop: float, how: str) -> None:
        first, last = self.row(start), self.row(stop)
        self.go_on(self.batch.slice(first, self.bound(last, how)), self.oracle.cut(first, last))

    @rule(padding=st.integers(1, 3), stop=fractions)
    def slice_with_padding(self, padding: int, stop: float) -> None:
        last = self.row(stop)
        part = self.oracle.cut(0, last).with_empty_sequences_of(self.batch.slice(0, last))
        self.go_on(self.batch.slice(-padding, last), part.padded_left(padding))

    @rule(step=st.sampled_from([-3, -1, 2, 3]))
    def stepped_slice(self, step: int) -> None:
        self.go_on(self.batch[::step], self.oracle.take(np.arange(len(self.oracle))[::step]))

    @rule(picks=st.lists(fractions, max_size=8), how=st.sampled_from(["take", "list", "mask", "negative"]))
    def gather(self, picks: list[float], how: str) -> None:
        n = len(self.oracle)
        steps = np.array([int(pick * (n - 1)) for pick in picks] if n else [], int)
        if how == "mask":
            mask = np.isin(np.arange(n), steps)
            self.go_on(self.batch[mask], self.oracle.take(np.flatnonzero(mask)))
        elif how == "negative":
            self.go_on(self.batch[(steps - n).tolist()], self.oracle.take(steps))
        else:
            result = self.batch.take(steps) if how == "take" else self.batch[steps.tolist()]
            self.go_on(result, self.oracle.take(steps))

    @precondition(lambda self: self.oracle.sequences)
    @rule(picks=st.lists(fractions, max_size=5))
    def gather_sequences(self, picks: list[float]) -> None:
        chosen = [int(pick * (len(self.oracle.sequences or []) - 1)) for pick in picks]
        self.go_on(self.batch.take_sequences(chosen), self.oracle.take_sequences(chosen))

    @rule(size=st.integers(1, 6), pick=fractions, by_number=st.booleans())
    def timeslices(self, size: int, pick: float, by_number: bool) -> None:
        parts = self.batch.timeslices(num_slices=size) if by_number else self.batch.timeslices(size)
        if by_number:
            assert len(parts) == size
        self.check_partition(parts)
        if parts:
            i = int(pick * (len(parts) - 1))
            start = sum(map(len, parts[:i]))
            part = self.oracle.cut(start, start + len(parts[i]))
            self.go_on(parts[i], Oracle(**{**vars(part), "width": self.oracle.width}))

    @rule(pick=fractions)
    def episodes(self, pick: float) -> None:
        ids = self.oracle.leaves["eps_id"].rows[self.oracle.numbers]
        parts = self.batch.split_by_episode()
        assert len(parts) == (int((np.diff(ids) != 0).sum()) + 1 if len(ids) else 0)
        assert all(len(set(np.asarray(part["eps_id"]).tolist())) == 1 for part in parts)
        self.check_partition(parts)
        if parts:
            i = int(pick * (len(parts) - 1))
            start = sum(map(len, parts[:i]))
            self.go_on(parts[i], self.oracle.cut(start, start + len(parts[i])))

    def check_partition(self, parts: list[SampleBatch]) -> None:
        """Check that parts neither lose nor repeat a step."""
        actual = [number for part in parts for number in np.asarray(part["id"])[part.mask()].tolist()]
        assert actual == self.oracle.numbers.tolist()

    # -- joins and order ----------------------------------------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.oracle) < 30)
    @rule(start=fractions, stop=fractions)
    def join_with_a_part(self, start: float, stop: float) -> None:
        first, last = self.row(start), self.row(stop)
        part, full = self.batch[first:last], self.oracle
        oracle = full.snapped(first, last).with_empty_sequences_of(part)
        self.go_on(concat_samples([self.batch, part]), full.joined(oracle) if len(oracle) else full)

    @precondition(lambda self: len(self.oracle))
    @rule(size=st.integers(1, 6))
    def take_apart_and_join(self, size: int) -> None:
        self.go_on(concat_samples(self.batch.timeslices(size)), self.oracle)

    @precondition(lambda self: self.oracle.sequences is None or self.oracle.width is not None)
    @rule(seed=st.integers(0, 99))
    def shuffle(self, seed: int) -> None:
        assert self.batch.shuffle(rng=seed) is self.batch
        self.oracle = self.oracle.in_the_order_of(self.batch)

    @rule(size=st.integers(1, 8), shuffle=st.booleans(), seed=st.integers(0, 99))
    def minibatches(self, size: int, shuffle: bool, seed: int) -> None:
        parts = list(self.batch.minibatches(size, shuffle=shuffle, rng=seed))
        actual = [number for part in parts for number in np.asarray(part["id"])[part.mask()].tolist()]
        assert sorted(actual) == sorted(self.oracle.numbers.tolist())
        if not shuffle:
            assert actual == self.oracle.numbers.tolist()
        for part in parts:
            assert len(part) <= size or len(part["seq_lens"]) == 1

    # -- layout -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.sequences is not None)
    @rule(extra=st.integers(0, 2))
    def pad(self, extra: int) -> None:
        width = max([length for _, length in self.oracle.sequences or []], default=0) + extra
        assert self.batch.right_zero_pad(width) is self.batch
        self.oracle = self.oracle.copy()
        self.oracle.width = width

    @precondition(lambda self: self.oracle.sequences is not None)
    @rule()
    def forget_sequences(self) -> None:
        dropped = ("seq_lens", "outcome", "state_in_id", "state_in_0")
        part = self.batch.drop(*[name for name in self.batch if name in dropped])
        self.go_on(part, self.oracle.without_sequences())

    # -- columns ------------------------------------------------------------------------------------------------------

    @rule(keep=st.lists(st.booleans(), min_size=9, max_size=9), drop=st.booleans())
    def choose_columns(self, keep: list[bool], drop: bool) -> None:
        tops = [name for name in self.batch if name.startswith("column")]
        removed = [name for name, retained in zip(tops, keep, strict=False) if not retained]
        remaining = [name for name in self.batch if name not in removed]
        oracle = self.oracle.copy()
        for name in list(oracle.leaves):
            if name.split(".")[0] in removed:
                del oracle.leaves[name]
        self.go_on(self.batch.drop(*removed) if drop else self.batch.select(*remaining), oracle)

    @rule()
    def assign(self) -> None:
        self.assigned += 1
        numbers = self.oracle.rows()
        self.batch[f"column {self.assigned % 8}"] = numbers * self.assigned
        self.oracle = self.oracle.copy()
        for name in list(self.oracle.leaves):
            if name.startswith(f"column {self.assigned % 8}."):
                del self.oracle.leaves[name]
        maximum = len(self.oracle.leaves["id"].rows)
        self.oracle.leaves[f"column {self.assigned % 8}"] = Leaf(np.arange(maximum) * self.assigned, "numpy")

    @rule(pick=fractions)
    def delete(self, pick: float) -> None:
        tops = [name for name in self.batch if name.startswith("column")]
        if tops:
            removed = tops[int(pick * (len(tops) - 1))]
            del self.batch[removed]
            self.oracle = self.oracle.copy()
            for name in list(self.oracle.leaves):
                if name.split(".")[0] == removed:
                    del self.oracle.leaves[name]

    # -- copies and other forms ---------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(["copy", "shallow", "copy.copy", "deepcopy", "constructor"]))
    def copied(self, how: str) -> None:
        makers: dict[str, Any] = {
            "copy": lambda batch: batch.copy(),
            "shallow": lambda batch: batch.copy(shallow=True),
            "copy.copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "constructor": lambda batch: SampleBatch(
                dict(batch),
                _zero_padded=batch.zero_padded,
                _max_seq_len=batch.max_seq_len,
                _num_grad_updates=batch.num_grad_updates,
                per_sequence=batch.per_sequence,
            ),
        }
        if how == "constructor" and self.oracle.sequences == []:
            return
        if how == "constructor" and any(leaf.rows.dtype.kind == "S" for leaf in self.oracle.leaves.values()):
            # NumPy's view of bytes is an array of objects, from which the constructor makes a column of objects.
            return
        self.go_on(makers[how](self.batch), self.oracle)

    @rule(how=st.sampled_from(["copy", "deepcopy", "take", "join", "pickle"]))
    def write_to_the_original_of_a_copy(self, how: str) -> None:
        makers: dict[str, Any] = {
            "copy": lambda batch: batch.copy(),
            "deepcopy": copy.deepcopy,
            "take": lambda batch: (
                batch.take_sequences(np.arange(len(batch["seq_lens"])))
                if self.oracle.sequences is not None
                else batch.take(np.arange(len(batch)))
            ),
            "join": lambda batch: concat_samples([batch]) if len(batch) else batch.copy(),
            "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
        }
        result = makers[how](self.batch)
        for name in self.batch.column_names:
            values = self.batch[name]
            if isinstance(values, np.ndarray) and values.dtype.kind not in "OT" and values.flags.writeable:
                values.reshape(-1).view(np.uint8)[...] = 0x5A
        # Whatever else looked at that memory has lost its rows.
        self.batch, self.behind, self.aside = result, [], []

    @rule(protocol=st.integers(2, pickle.HIGHEST_PROTOCOL))
    def pickled(self, protocol: int) -> None:
        restored = pickle.loads(pickle.dumps(self.batch, protocol))
        assert restored == self.batch
        self.go_on(restored, self.oracle)

    @rule()
    def pickled_out_of_band(self) -> None:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(self.batch, 5, buffer_callback=buffers.append)
        self.go_on(pickle.loads(data, buffers=[bytearray(buffer.raw()) for buffer in buffers]), self.oracle)

    @rule()
    def through_arrow(self) -> None:
        table = self.batch.to_arrow()
        table.validate(full=True)
        self.go_on(SampleBatch.from_arrow(table, allow_pickle=True), self.oracle)

    @rule(bulk=st.booleans())
    def compressed(self, bulk: bool) -> None:
        arrays = {name for name in self.oracle.leaves if self.batch.column(name).kind == "tensor" and name != "id"}
        before = {name: self.batch.column(name) for name in arrays}
        self.batch.compress(bulk=bulk, columns=arrays)
        assert all(self.batch.column(name).kind == "compressed" for name in arrays)
        assert all(len(self.batch.column(name)) == len(before[name]) for name in arrays)
        self.batch.decompress_if_needed(arrays)

    @rule()
    def rows(self) -> None:
        rows = list(self.batch.rows())
        assert [int(row["id"]) for row in rows] == self.oracle.numbers.tolist()
        if self.oracle.sequences is not None:
            states = [state for state, length in self.oracle.sequences for _ in range(length)]
            assert [int(row["state_in_id"]) for row in rows] == states
            assert all(row["seq_lens"] == 1 for row in rows)


TestChain = Chain.TestCase
TestChain.settings = settings(max_examples=80, stateful_step_count=20, deadline=None, derandomize=True)


@pytest.mark.long
class TestLongChain(Chain.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(max_examples=500, stateful_step_count=20, deadline=None, derandomize=True)
