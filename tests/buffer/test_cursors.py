"""Neighbours of slots against episodes that are kept as plain lists, on random histories of rings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.buffer import writing
from samplebatch.buffer.ring import Ints, Rings
from samplebatch.buffer.writing import Series


class Histories:
    """Reference implementation of n rings: lists of (slot, episode), oldest first."""

    def __init__(self, maxsizes: list[int]) -> None:
        self.maxsizes = maxsizes
        self.bases = [sum(maxsizes[:ring]) for ring in range(len(maxsizes))]
        self.rows: list[list[tuple[int, int]]] = [[] for _ in maxsizes]
        self.written = [0] * len(maxsizes)
        self.episodes = list(range(len(maxsizes)))

    def write(self, ring: int, *, ends: bool) -> None:
        slot = self.bases[ring] + self.written[ring] % self.maxsizes[ring]
        self.rows[ring] = [*self.rows[ring], (slot, self.episodes[ring])][-self.maxsizes[ring] :]
        self.written[ring] += 1
        if ends:
            self.episodes[ring] = max(self.episodes) + 1

    def stored(self) -> Ints:
        return np.array(sorted(slot for rows in self.rows for slot, _ in rows), np.intp)

    def shift(self, slot: int, offset: int) -> int:
        """Return the slot at an offset in the same episode, limited to the episode's first and last steps."""
        rows = next(rows for rows in self.rows if slot in [part for part, _ in rows])
        position = [part for part, _ in rows].index(slot)
        episode = rows[position][1]
        positions = [at for at, (_, ours) in enumerate(rows) if ours == episode]
        return rows[min(max(position + offset, positions[0]), positions[-1])][0]

    def frames(self, slot: int, count: int) -> list[int]:
        return [self.shift(slot, offset) for offset in range(1 - count, 1)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rings, np.ndarray, Histories]:
    """Draw rings whose rows were written together, one by one, or both, and may have been overwritten."""
    maxsizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    if draw(st.booleans()):
        maxsizes = [maxsizes[0]] * len(maxsizes)
    rings, plain = Rings(maxsizes), Histories(maxsizes)
    done = np.zeros(rings.capacity, np.bool_)
    for _ in range(draw(st.integers(1, 2 * max(maxsizes) + 3))):
        all_rows = draw(st.booleans()) or len(maxsizes) == 1
        chosen = list(range(len(maxsizes))) if all_rows else [draw(st.integers(0, len(maxsizes) - 1))]
        ends = np.array([draw(st.integers(0, 4)) == 0 for _ in chosen])
        targets = rings.targets(None if all_rows else np.array(chosen))
        done[targets] = ends if len(maxsizes) > 1 else ends[0]
        rings.advance(None if all_rows else np.array(chosen), ends, np.zeros(len(chosen)))
        for ring, end in zip(chosen, ends, strict=True):
            plain.write(ring, ends=bool(end))
    return rings, done, plain


@settings(max_examples=400, deadline=None)
@given(histories(), st.integers(2, 5), st.data())
def test_neighbours_and_frames_agree_with_plain_lists(
    history: tuple[Rings, np.ndarray, Histories], count: int, data: st.DataObject
) -> None:
    rings, done, plain = history
    stored = plain.stored()
    assert sorted(rings.stored_slots().tolist()) == stored.tolist()
    slots = stored[data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=12))]
    assert rings.prev(slots, done).tolist() == [plain.shift(slot, -1) for slot in slots.tolist()]
    assert rings.next(slots, done).tolist() == [plain.shift(slot, 1) for slot in slots.tolist()]
    frames = [plain.frames(slot, count) for slot in slots.tolist()]
    assert rings.frames(slots, count, done).tolist() == frames
    has_frames = [plain.shift(slot, 1 - count) != plain.shift(slot, 2 - count) for slot in slots.tolist()]
    assert rings.has_frames(slots, count, done).tolist() == has_frames


@settings(max_examples=400, deadline=None)
@given(histories(), st.integers(2, 5), st.data())
def test_fast_paths_of_one_ring_agree_with_the_general_paths(
    history: tuple[Rings, np.ndarray, Histories], count: int, data: st.DataObject
) -> None:
    rings, done, plain = history
    stored = plain.stored()
    slots = stored[data.draw(st.lists(st.integers(0, len(stored) - 1), min_size=1, max_size=12))]
    check_short_ways(rings, done, slots, count)
    check_neighbours_within(rings, done, slots)


def check_neighbours_within(rings: Rings, done: np.ndarray, slots: Ints) -> tuple[bool, bool]:
    """Compare the neighbours within one ring with the general ones; return which of the two functions applied."""
    previous, following = rings.prev_within(slots, done), rings.next_within(slots, done)
    assert previous is None or previous.tolist() == rings.prev(slots, done).tolist()
    assert following is None or following.tolist() == rings.next(slots, done).tolist()
    assert rings.n == 1 or (previous is None and following is None)
    return previous is not None, following is not None


@pytest.mark.parametrize("writes", [1, 2, 9, 10, 11, 15, 20, 23])
@pytest.mark.parametrize("ends", [(), (2,), (0, 3, 7), (9,), (10, 12, 19)])
def test_neighbours_within_a_ring_agree_with_the_general_ones(writes: int, ends: tuple[int, ...]) -> None:
    rings, done = Rings([10]), np.zeros(10, np.bool_)
    for step in range(writes):
        end = np.array([step in ends])
        done[rings.cursor] = end[0]
        rings.advance(None, end, np.zeros(1))
    applied = [check_neighbours_within(rings, done, np.array([slot])) for slot in rings.stored_slots().tolist()]
    # The first slot has no slot before it, the last row none after it.
    size = min(writes, 10)
    assert [sum(each) for each in zip(*applied, strict=True)] == [size - 1, size - 1]
    for slot in (-11, -1, 10, 11, 2**62):
        assert check_neighbours_within(rings, done, np.array([slot])) == (False, False)


def check_short_ways(rings: Rings, done: np.ndarray, slots: Ints, count: int) -> bool:
    """Compare the fast path for windows with the general one; return whether the fast path applied."""
    window = rings.window_of_one(slots, count, done)
    if window is None:
        return False
    assert rings.n == 1
    observed, following, final = window
    next_slots = rings.next(slots, done)
    assert observed.tolist() == rings.frames(slots, count, done).tolist()
    assert following[..., :-1].tolist() == observed[..., 1:].tolist()
    assert following[..., -1].tolist() == next_slots.tolist()
    assert final.tolist() == (next_slots == slots).tolist()
    return True


@pytest.mark.parametrize("writes", [1, 2, 9, 10, 11, 15, 20, 23])
@pytest.mark.parametrize("ends", [(), (2,), (0, 3, 7), (9,), (10, 12, 19)])
def test_fast_paths_agree_at_each_slot_of_a_ring(writes: int, ends: tuple[int, ...]) -> None:
    rings, done = Rings([10]), np.zeros(10, np.bool_)
    for step in range(writes):
        end = np.array([step in ends])
        done[rings.cursor] = end[0]
        rings.advance(None, end, np.zeros(1))
    applied = [check_short_ways(rings, done, np.array([slot]), 3) for slot in rings.stored_slots().tolist()]
    if writes > 5:
        # It is there for the common case: all but the slots at the edges of the ring.
        assert sum(applied) >= min(writes, 10) - 4


def test_previous_steps_of_a_full_ring_stop_at_the_cursor() -> None:
    rings, done = Rings([10]), np.zeros(10, np.bool_)
    for _ in range(12):
        rings.advance(None, np.zeros(1, np.bool_), np.zeros(1))
    assert rings.cursor == 2
    assert rings.prev(np.array([2, 3, 4]), done).tolist() == [2, 2, 3]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.floats(-4, 4, width=32)), min_size=1, max_size=30))
def test_steps_of_one_ring_and_of_several_rings_are_counted_alike(
    maxsize: int, steps: list[tuple[bool, float]]
) -> None:
    """One ring, three rings with one cursor and three with separate cursors give the same counts."""
    single, together, apart = Rings([maxsize]), Rings([maxsize] * 3), Rings([maxsize] * 3)
    apart._separate()
    for end, reward in steps:
        ends, rewards = np.array([end]), np.array([reward], np.float64)
        expected = single.advance(None, ends, rewards)
        several = together.advance(None, ends.repeat(3), rewards.repeat(3))
        chosen = apart.advance(np.arange(3), ends.repeat(3), rewards.repeat(3))
        for ours, every, some, offset in zip(expected, several, chosen, (maxsize, 0, 0, maxsize), strict=True):
            shifted = ours.repeat(3) + offset * np.arange(3)
            assert np.asarray(every).tolist() == shifted.tolist()
            assert np.asarray(some).tolist() == shifted.tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9),
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(-1e6, 1e6)), min_size=1, max_size=25), min_size=1, max_size=6),
    st.booleans(),
)
def test_steps_counted_by_episode_agree_with_steps_counted_by_sorting(
    maxsize: int, chunks: list[list[tuple[bool, float]]], vectors: bool
) -> None:
    by_episode, by_sorting = Rings([maxsize]), Rings([maxsize])
    for chunk in chunks:
        done = np.array([end for end, _ in chunk])
        rew = np.array([reward for _, reward in chunk])
        if vectors:
            rew = np.stack([rew, -rew], axis=1)
        for rings in (by_episode, by_sorting):
            if not rings.size:
                rings.expect(rew.shape[1:])
        numbers = np.zeros(len(chunk), np.intp)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "_FEW_ENDS", len(chunk))
            added = Series(by_episode, numbers).advance(done, rew)
            patch.setattr(writing, "_FEW_ENDS", -1)
            others = Series(by_sorting, numbers).advance(done, rew)
        for first, other in zip(added, others, strict=True):
            np.testing.assert_array_equal(first, other, strict=True)
        states = by_episode.state_dict(), by_sorting.state_dict()
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            np.testing.assert_array_equal(states[0][name], states[1][name], strict=True)
        assert type(by_episode.ep_return) is type(by_sorting.ep_return)
