"""The arena: blocks never overlap and are returned through a pipe, and are limited to the messages in flight."""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch.transport.arena import SMALL_NBYTES, Arena, Blocks, block_nbytes, pack_ident

START = 1 << 14
ARENA_NBYTES = 64 << 20
sizes = st.one_of(st.integers(0, 2000), st.integers(0, 1 << 18))


@settings(max_examples=100)
@given(st.integers(0, 1 << 40))
def test_sizes_are_rounded_up_by_a_small_fraction(nbytes: int) -> None:
    size = block_nbytes(nbytes)
    assert size % 64 == 0
    assert nbytes <= size <= max(64, nbytes * 9 / 8 + 64)
    assert block_nbytes(size) == size


def test_small_blocks_have_few_distinct_sizes() -> None:
    assert len({block_nbytes(nbytes) for nbytes in range(SMALL_NBYTES + 1)}) < 80


@settings(max_examples=60)
@given(st.lists(st.tuples(sizes, st.integers(0, 3)), max_size=120), st.randoms(use_true_random=False))
def test_blocks_never_overlap(steps: list[tuple[int, int]], order: random.Random) -> None:
    stop = START + (1 << 19)
    arena = Arena(START, stop)
    allocated: list[tuple[int, int]] = []
    for nbytes, action in steps:
        if action == 0 and allocated:
            arena.give(*allocated.pop(order.randrange(len(allocated))))
            continue
        size = block_nbytes(nbytes)
        start = arena.take(size)
        if start is None:
            continue
        assert start % 64 == 0
        assert START <= start <= stop - size
        assert all(start + size <= other or start >= other + length for other, length in allocated)
        allocated.append((start, size))
        assert arena.free_nbytes == arena.nbytes - sum(length for _, length in allocated)
    while allocated:
        arena.give(*allocated.pop(order.randrange(len(allocated))))
    assert arena.free_nbytes == arena.nbytes
    # All of it in one piece.
    assert arena.take(arena.nbytes) == START
    assert arena.take(64) is None


@settings(max_examples=40)
@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=60))
def test_requests_that_fit_a_free_range_are_accepted(expected: list[int]) -> None:
    """A range is rejected only if no free range is long enough, compared with a map of every cell."""
    cells = (1 << 19) // 64
    arena = Arena(0, 1 << 19)
    free = [True] * cells
    stored: list[tuple[int, int]] = []
    for i, nbytes in enumerate(expected):
        size = block_nbytes(nbytes)
        start = arena.take(size)
        longest = max(map(len, "".join("x" if cell else " " for cell in free).split()), default=0)
        assert (start is not None) == (longest * 64 >= size)
        if start is not None:
            free[start // 64 : (start + size) // 64] = [False] * (size // 64)
            stored.append((start, size))
        if i % 3 == 2 and stored:
            start, size = stored.pop(len(stored) // 2)
            arena.give(start, size)
            free[start // 64 : (start + size) // 64] = [True] * (size // 64)


@pytest.mark.parametrize("size", [64, 4096, 1 << 17])
def test_the_block_released_last_is_used_next(size: int) -> None:
    arena = Arena(0, 1 << 20)
    first = arena.take(size)
    assert first is not None
    arena.give(first, size)
    assert [arena.take(size) for _ in range(1)] == [first]


def test_retained_small_blocks_do_not_fragment_large_ones() -> None:
    arena = Arena(0, 1 << 20)
    large = 1 << 18
    for _ in range(4):
        retained = [arena.take(64) for _ in range(20)]
        starts = [arena.take(large) for _ in range(3)]
        assert None not in starts
        for start in starts:
            assert start is not None
            arena.give(start, large)
        assert None not in retained
    assert [arena.take(large) for _ in range(3)] == [0, large, 2 * large]


class Stream:
    """Producer that allocates one block per message, and consumer that returns the oldest block."""

    def __init__(self) -> None:
        self.back, self.writer = os.pipe()
        os.set_blocking(self.back, False)
        self.blocks = Blocks(0, ARENA_NBYTES, self.back)
        self.under_way: deque[int] = deque()
        self.starts: set[int] = set()
        self.idents = count(1)

    def run(self, messages: int, nbytes: int, max_under_way: int) -> None:
        for _ in range(messages):
            ident = next(self.idents)
            block = self.blocks.take(nbytes)
            assert block is not None
            self.starts.add(block[0])
            assert block[1] >= nbytes
            self.blocks.lent[ident] = (block,)
            self.blocks.is_settled = True
            self.under_way.append(ident)
            while len(self.under_way) > max_under_way:
                os.write(self.writer, pack_ident(self.under_way.popleft()))

    def close(self) -> None:
        os.close(self.back)
        os.close(self.writer)


@pytest.fixture
def stream():
    result = Stream()
    yield result
    result.close()


@pytest.mark.parametrize(
    ("nbytes", "max_under_way", "max_blocks"),
    [(1000, 0, 130), (1000, 600, 900), (64, 500, 2700), (5000, 100, 160), (200_000, 10, 14), (1 << 20, 0, 1)],
)
def test_a_long_stream_uses_few_blocks(stream, nbytes, max_under_way, max_blocks) -> None:
    stream.run(20_000, nbytes, max_under_way)
    assert len(stream.starts) <= max_blocks
    assert stream.blocks.arena.free_nbytes > ARENA_NBYTES - 2 * max_blocks * nbytes - (1 << 20)


def test_changing_sizes_do_not_leak_memory(stream) -> None:
    for nbytes in (1000, 3_000_000, 70_000, 64, 1000, 20_000_000):
        stream.run(30, nbytes, 1)
    while stream.under_way:
        os.write(stream.writer, pack_ident(stream.under_way.popleft()))
    stream.blocks.collect()
    assert stream.blocks.arena.free_nbytes == ARENA_NBYTES
    assert not stream.blocks.lent


def test_a_reserved_block_is_released_with_its_last_reference(stream) -> None:
    blocks, keepers = stream.blocks, [np.zeros(1)]
    block = blocks.take(ARENA_NBYTES)
    blocks.reserved[block[0]] = block, weakref.ref(keepers[0])
    blocks.is_settled = True
    assert blocks.take(64) is None
    keepers.clear()
    assert blocks.take(64) is not None


def test_an_unused_allocated_block_is_reclaimed(stream) -> None:
    blocks = stream.blocks
    stream.run(3, 100_000, 3)
    free_nbytes = blocks.arena.free_nbytes
    # As an exception leaves it that comes before the block is lent, and one that comes while the message is written.
    blocks.take(300_000)
    blocks.collect()
    assert blocks.arena.free_nbytes == free_nbytes
    blocks.lent[4] = (blocks.take(300_000),)
    blocks.sending, blocks.is_sent = 4, False
    blocks.collect()
    assert blocks.arena.free_nbytes == free_nbytes
    blocks.lent[5] = (blocks.take(300_000),)
    blocks.sending, blocks.is_sent = 5, True
    blocks.collect()
    assert blocks.arena.free_nbytes < free_nbytes
    for ident in (1, 2, 3, 5):
        os.write(stream.writer, pack_ident(ident))
    blocks.collect()
    assert blocks.arena.free_nbytes == ARENA_NBYTES


def test_unknown_lease_numbers_are_ignored(stream) -> None:
    stream.run(1, 100, 1)
    for ident in (1, 1, 5, 2**64 - 1):
        os.write(stream.writer, pack_ident(ident))
    stream.blocks.collect()
    assert stream.blocks.arena.free_nbytes == ARENA_NBYTES
