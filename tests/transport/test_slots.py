"""Slots come back through a pipe, and no more of them are cut than are under way."""

from __future__ import annotations

import os
import weakref
from collections import deque
from itertools import count

import numpy as np
import pytest

from samplebatch.transport.arena import Slots
from samplebatch.transport.lease import pack_ident

ARENA_NBYTES = 64 << 20


class Stream:
    """A producer that takes a slot a message, and a consumer that gives back the oldest when it has some."""

    def __init__(self) -> None:
        self.back, self.writer = os.pipe()
        os.set_blocking(self.back, False)
        self.slots = Slots(0, ARENA_NBYTES, self.back)
        self.under_way: deque[int] = deque()
        self.starts: set[int] = set()
        self.idents = count(1)

    def run(self, messages: int, nbytes: int, most_under_way: int) -> None:
        for _ in range(messages):
            ident = next(self.idents)
            slot = self.slots.take(nbytes)
            assert slot is not None
            self.starts.add(slot[0])
            assert slot[1] >= nbytes
            self.slots.lent[ident] = (slot,)
            self.slots.is_settled = True
            self.under_way.append(ident)
            while len(self.under_way) > most_under_way:
                os.write(self.writer, pack_ident(self.under_way.popleft()))

    def close(self) -> None:
        os.close(self.back)
        os.close(self.writer)


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("nbytes", "most_under_way", "most_slots"),
    [(1000, 0, 130), (1000, 600, 900), (64, 500, 2700), (5000, 100, 160), (200_000, 10, 14), (1 << 20, 0, 1)],
)
def test_a_long_stream_uses_few_slots(stream, nbytes, most_under_way, most_slots) -> None:
    stream.run(20_000, nbytes, most_under_way)
    assert len(stream.starts) <= most_slots
    assert stream.slots.arena.free_nbytes > ARENA_NBYTES - 2 * most_slots * nbytes - (1 << 20)


def test_sizes_that_change_leave_nothing_behind(stream) -> None:
    for nbytes in (1000, 3_000_000, 70_000, 64, 1000, 20_000_000):
        stream.run(30, nbytes, 1)
    while stream.under_way:
        os.write(stream.writer, pack_ident(stream.under_way.popleft()))
    stream.slots.collect()
    assert stream.slots.arena.free_nbytes == ARENA_NBYTES
    assert not stream.slots.lent


def test_a_reserved_slot_is_free_again_when_nobody_keeps_it(stream) -> None:
    slots, keepers = stream.slots, [np.zeros(1)]
    slot = slots.take(ARENA_NBYTES)
    slots.reserved[slot[0]] = slot, weakref.ref(keepers[0])
    slots.is_settled = True
    assert slots.take(64) is None
    keepers.clear()
    assert slots.take(64) is not None


def test_a_slot_that_was_taken_for_nothing_is_found(stream) -> None:
    slots = stream.slots
    stream.run(3, 100_000, 3)
    free_nbytes = slots.arena.free_nbytes
    # As an exception leaves it that comes before the slot is lent, and one that comes while the message is written.
    slots.take(300_000)
    slots.collect()
    assert slots.arena.free_nbytes == free_nbytes
    slots.lent[4] = (slots.take(300_000),)
    slots.sending, slots.is_sent = 4, False
    slots.collect()
    assert slots.arena.free_nbytes == free_nbytes
    slots.lent[5] = (slots.take(300_000),)
    slots.sending, slots.is_sent = 5, True
    slots.collect()
    assert slots.arena.free_nbytes < free_nbytes
    for ident in (1, 2, 3, 5):
        os.write(stream.writer, pack_ident(ident))
    slots.collect()
    assert slots.arena.free_nbytes == ARENA_NBYTES


def test_numbers_that_nobody_was_lent_are_ignored(stream) -> None:
    stream.run(1, 100, 1)
    for ident in (1, 1, 5, 2**64 - 1):
        os.write(stream.writer, pack_ident(ident))
    stream.slots.collect()
    assert stream.slots.arena.free_nbytes == ARENA_NBYTES
