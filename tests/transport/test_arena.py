"""The arena: slots never overlap, and what is given back can be taken again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.transport.arena import SMALL_NBYTES, Arena, slot_nbytes

START = 1 << 14
sizes = st.one_of(st.integers(0, 2000), st.integers(0, 1 << 18))


@settings(max_examples=100)
@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_by_little(nbytes: int) -> None:
    size = slot_nbytes(nbytes)
    assert size % 64 == 0
    assert nbytes <= size <= max(64, nbytes * 9 / 8 + 64)
    assert slot_nbytes(size) == size


def test_small_sizes_are_few() -> None:
    assert len({slot_nbytes(nbytes) for nbytes in range(SMALL_NBYTES + 1)}) < 80


@settings(max_examples=60)
@given(st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=120), st.randoms(use_true_random=False))
def test_slots_never_overlap(steps: list[tuple[int, int]], order: random.Random) -> None:
    stop = START + (1 << 19)
    arena = Arena(START, stop)
    taken: list[tuple[int, int]] = []
    for nbytes, action in steps:
        if action == 0 and taken:
            arena.give(*taken.pop(order.randrange(len(taken))))
            continue
        size = slot_nbytes(nbytes)
        start = arena.take(size)
        if start is None:
            continue
        assert start % 64 == 0
        assert START <= start <= stop - size
        assert all(start + size <= other or start >= other + length for other, length in taken)
        taken.append((start, size))
        assert arena.free_nbytes == arena.nbytes - sum(length for _, length in taken)
    while taken:
        arena.give(*taken.pop(order.randrange(len(taken))))
    assert arena.free_nbytes == arena.nbytes
    # All of it in one piece.
    assert arena.take(arena.nbytes) == START
    assert arena.take(64) is None


@settings(max_examples=40)
@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=60))
def test_what_fits_in_free_ranges_is_found(wanted: list[int]) -> None:
    """A range is refused only if no free one is as long: compared with a map of every cell."""
    cells = (1 << 19) // 64
    arena = Arena(0, 1 << 19)
    free = [True] * cells
    held: list[tuple[int, int]] = []
    for i, nbytes in enumerate(wanted):
        size = slot_nbytes(nbytes)
        start = arena.take(size)
        longest = max(map(len, "".join("x" if cell else " " for cell in free).split()), default=0)
        assert (start is not None) == (longest * 64 >= size)
        if start is not None:
            free[start // 64 : (start + size) // 64] = [False] * (size // 64)
            held.append((start, size))
        if i % 3 == 2 and held:
            start, size = held.pop(len(held) // 2)
            arena.give(start, size)
            free[start // 64 : (start + size) // 64] = [True] * (size // 64)


@pytest.mark.parametrize("size", [64, 4096, 1 << 17])
def test_what_was_used_last_is_used_next(size: int) -> None:
    arena = Arena(0, 1 << 20)
    first = arena.take(size)
    assert first is not None
    arena.give(first, size)
    assert [arena.take(size) for _ in range(1)] == [first]


def test_kept_small_slots_do_not_cut_large_ones() -> None:
    arena = Arena(0, 1 << 20)
    large = 1 << 18
    for _ in range(4):
        kept = [arena.take(64) for _ in range(20)]
        starts = [arena.take(large) for _ in range(3)]
        assert None not in starts
        for start in starts:
            assert start is not None
            arena.give(start, large)
        assert None not in kept
    assert [arena.take(large) for _ in range(3)] == [0, large, 2 * large]
