"""Rings against a plain list of steps each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.buffer.ring import Rings
from samplebatch.errors import EmptyBufferError, FormatError, RingError


class Lists:
    """Expected state of rings: for each ring, the slots and flags of its steps, oldest first."""

    def __init__(self, maxsizes: list[int]) -> None:
        self.maxsizes = maxsizes
        self.bases = np.concatenate([[0], np.cumsum(maxsizes)]).tolist()
        self.steps: list[list[tuple[int, bool]]] = [[] for _ in maxsizes]
        self.writes = [0] * len(maxsizes)
        self.episodes: list[list[float]] = [[] for _ in maxsizes]
        self.starts = self.bases[:-1]
        self.done = np.zeros(sum(maxsizes), bool)

    def store(self, ring: int, done: bool) -> int:
        slot = self.bases[ring] + self.writes[ring] % self.maxsizes[ring]
        self.writes[ring] += 1
        self.steps[ring] = [*self.steps[ring], (slot, done)][-self.maxsizes[ring] :]
        self.done[slot] = done
        return slot

    def add(self, ring: int, done: bool, rew: float) -> tuple[int, float, int, int]:
        slot = self.store(ring, done)
        self.episodes[ring].append(rew)
        start = self.starts[ring]
        if not done:
            return slot, 0.0, 0, start
        total, length = sum(self.episodes[ring]), len(self.episodes[ring])
        self.episodes[ring] = []
        self.starts[ring] = self.bases[ring] + self.writes[ring] % self.maxsizes[ring]
        return slot, total, length, start

    def reset(self, ring: int) -> None:
        self.steps[ring], self.episodes[ring], self.writes[ring] = [], [], 0
        self.starts[ring] = self.bases[ring]

    def slots(self) -> list[int]:
        return [slot for steps in self.steps for slot, _ in steps]

    def neighbours(self, step: int) -> list[int]:
        actual = []
        for steps in self.steps:
            for i in range(len(steps)):
                blocked = (i == 0 or steps[i - 1][1]) if step < 0 else (i == len(steps) - 1 or steps[i][1])
                actual.append(steps[i if blocked else i + step][0])
        return actual


def check(rings: Rings, lists: Lists) -> None:
    slots = lists.slots()
    assert len(rings) == len(slots)
    assert rings.chronological().tolist() == slots
    assert rings.stored_slots().tolist() == sorted(slots)
    assert rings.sizes_of_all().tolist() == [len(steps) for steps in lists.steps]
    for ring, steps in enumerate(lists.steps):
        ours = [slot for slot, _ in steps]
        assert rings.chronological(ring).tolist() == ours
        assert rings.newest(2, ring).tolist() == ours[-2:]
    assert rings.last_index.tolist() == [
        steps[-1][0] if steps else base for steps, base in zip(lists.steps, lists.bases, strict=False)
    ]
    assert rings.unfinished(lists.done).tolist() == [s[-1][0] for s in lists.steps if s and not s[-1][1]]
    if not slots:
        return
    index = np.array(slots)
    assert rings.prev(index, lists.done).tolist() == lists.neighbours(-1)
    assert rings.next(index, lists.done).tolist() == lists.neighbours(1)
    assert set(rings.draw(40, np.random.default_rng(0)).tolist()) <= set(slots)
    expected = [index]
    for _ in range(3):
        expected.insert(0, rings.prev(expected[0], lists.done))
    assert rings.frames(index, 4, lists.done).tolist() == np.stack(expected, 1).tolist()
    full = [len(set(row)) == 4 for row in np.stack(expected, 1).tolist()]
    assert rings.has_frames(index, 4, lists.done).tolist() == full
    assert rings.frames(index, 1, lists.done).tolist() == index[:, None].tolist()


@pytest.mark.parametrize("maxsizes", [[1], [4], [3, 3], [1, 1, 1], [2, 5, 3], [0, 2]])
@pytest.mark.parametrize("seed", range(3))
def test_rings_agree_with_lists(maxsizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rings, lists = Rings(maxsizes), Lists(maxsizes)
    usable = [ring for ring, size in enumerate(maxsizes) if size]
    check(rings, lists)
    for step in range(60):
        kind = rng.integers(12)
        if kind == 0:
            chosen = rng.permutation(usable)[: rng.integers(1, len(usable) + 1)].tolist()
            rings.reset(None if kind % 2 and len(usable) == rings.n else chosen)
            for ring in chosen:
                lists.reset(ring)
        elif kind == 1:
            ring = int(rng.choice(usable))
            flag = bool(rng.integers(2))
            assert rings.append(ring, 1).tolist() == [lists.store(ring, flag)]
        else:
            every = kind > 5 and len(usable) == rings.n
            chosen = usable if every else rng.permutation(usable)[: rng.integers(1, len(usable) + 1)].tolist()
            done = rng.random(len(chosen)) < 0.3
            rew = rng.integers(-3, 4, len(chosen)).astype(float)
            target = rings.targets(None if every else np.array(chosen))
            actual = rings.advance(None if every else np.array(chosen), done, rew)
            assert np.arange(rings.capacity)[target].reshape(-1).tolist() == actual[0].tolist()
            expected = [lists.add(*row) for row in zip(chosen, done.tolist(), rew.tolist(), strict=True)]
            assert [part.tolist() for part in actual] == [list(part) for part in zip(*expected, strict=True)], step
        check(rings, lists)
        again = Rings(maxsizes)
        again.load_state_dict(rings.state_dict())
        check(again, lists)
        if kind % 3 == 0:
            rings = again


def first(rings: Rings, done: bool, rew: float) -> tuple[Any, ...]:
    return tuple(part.tolist()[0] for part in rings.advance(None, np.array([done]), np.array([rew])))


def test_run_on_agrees_with_a_step_without_an_episode_end() -> None:
    rings, lists = Rings([3]), Lists([3])
    for done in (False, True, False, False, True, True, False):
        if done:
            assert first(rings, True, 1.5) == lists.add(0, True, 1.5)
        else:
            assert tuple(part.tolist()[0] for part in rings.run_on(1.5)) == lists.add(0, False, 1.5)
        check(rings, lists)


def test_running_returns_are_reset_to_positive_zero() -> None:
    rings = Rings([3])
    assert str(first(rings, False, -1.0)[1]) == "0.0"
    assert first(rings, True, float("-inf"))[1] == float("-inf")
    assert first(rings, True, 2.0)[1] == 2.0


def test_arrays_shared_between_steps_are_read_only() -> None:
    rings = Rings([3])
    slots, *shared = rings.run_on(1.0)
    slots[0] = 7
    for array in shared:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    assert rings.run_on(1.0)[0].tolist() == [1]


def test_vector_rewards_add_up() -> None:
    for maxsizes in ([4], [4, 4], [4, 3]):
        rings = Rings(maxsizes)
        rings.expect((2,))
        n = len(maxsizes)
        rew = np.arange(2.0 * n).reshape(n, 2)
        assert rings.advance(None, np.zeros(n, bool), rew)[1].tolist() == np.zeros((n, 2)).tolist()
        assert rings.advance(None, np.ones(n, bool), rew)[1].tolist() == (2 * rew).tolist()
        again = Rings(maxsizes)
        again.load_state_dict(rings.state_dict())
        assert again.advance(None, np.ones(n, bool), rew)[1].tolist() == rew.tolist()


def test_rows_appended_directly_do_not_extend_the_episode() -> None:
    rings = Rings([5])
    first(rings, False, 1.0)
    assert rings.append(0, 2).tolist() == [1, 2]
    assert first(rings, True, 1.0) == (3, 2.0, 2, 0)


@pytest.mark.parametrize("maxsizes", [[5], [5, 5], [5, 4]])
def test_statistics_can_be_kept_over_a_reset(maxsizes: list[int]) -> None:
    n = len(maxsizes)
    for keep in (True, False):
        rings = Rings(maxsizes)
        for _ in range(3):
            rings.advance(None, np.zeros(n, bool), np.ones(n))
        rings.reset(keep_statistics=keep)
        slots, returns, lengths, starts = rings.advance(None, np.ones(n, bool), np.ones(n))
        assert slots.tolist() == starts.tolist() == rings.bases.tolist()
        assert returns.tolist() == [4.0 if keep else 1.0] * n
        assert lengths.tolist() == [4 if keep else 1] * n


@pytest.mark.parametrize("maxsizes", [[3], [3, 3], [3, 2]])
def test_generations_count_overwritten_rows(maxsizes: list[int]) -> None:
    n = len(maxsizes)
    rings = Rings(maxsizes)
    every = np.arange(rings.capacity)
    counted = np.full(rings.capacity, -1)
    assert rings.generation(every).tolist() == counted.tolist()
    for _ in range(8):
        slots, *_ = rings.advance(None, np.zeros(n, bool), np.ones(n))
        counted[slots] += 1
        assert rings.generation(every).tolist() == counted.tolist()
    before = rings.generation(every)
    rings.reset()
    assert (rings.generation(every) > before).all()
    if n > 1:
        before = rings.generation(every)
        rings.reset([1])
        rings.advance(np.array([1]), np.zeros(1, bool), np.ones(1))
        changed = rings.generation(every) != before
        assert changed[3]
        assert not changed[:3].any()


def test_rings_share_one_cursor_again_after_a_reset() -> None:
    rings = Rings([3, 3])
    rings.advance(np.array([1]), np.zeros(1, bool), np.ones(1))
    assert not rings.together
    rings.reset()
    assert rings.together
    assert rings.advance(None, np.ones(2, bool), np.ones(2))[2].tolist() == [1, 1]


def test_draws_are_uniform() -> None:
    for maxsizes, steps in (([10], 4), ([10, 10], 4), ([10, 10], 13), ([6, 10], 8)):
        rings = Rings(maxsizes)
        for _ in range(steps):
            rings.advance(None, np.zeros(rings.n, bool), np.ones(rings.n))
        rings.advance(np.array([0]), np.zeros(1, bool), np.ones(1))
        slots = rings.stored_slots()
        counts = np.bincount(rings.draw(100 * len(slots), np.random.default_rng(1)), minlength=rings.capacity)
        assert counts[slots].min() > 60
        assert counts.sum() == counts[slots].sum()
        of_one = rings.draw(50, np.random.default_rng(1), rings.n - 1)
        assert set(of_one.tolist()) <= set(rings.chronological(rings.n - 1).tolist())


def test_nothing_is_drawn_from_empty_rings() -> None:
    for rings in (Rings([3]), Rings([3, 3]), Rings([3, 2])):
        assert rings.draw(0, np.random.default_rng(0)).tolist() == [] if len(rings) else True
        with pytest.raises(EmptyBufferError, match="must have rows"):
            rings.draw(1, np.random.default_rng(0))


def test_intervals() -> None:
    rings = Rings([5, 5])
    assert rings.interval(6, 9).tolist() == [6, 7, 8]
    assert rings.interval(8, 7).tolist() == [8, 9, 5, 6]
    assert rings.interval(5, 10).tolist() == [5, 6, 7, 8, 9]
    assert rings.interval(3, 3).tolist() == rings.interval(0, 0).tolist() == []
    for start, stop in ((-1, -1), (1, 6), (8, 1), (-1, 3), (3, 11), (6, 5), (10, 9)):
        with pytest.raises(RingError, match=f"{start} and {stop}"):
            rings.interval(start, stop)


def test_state_of_other_rings_is_rejected() -> None:
    with pytest.raises(FormatError, match=r"\[3, 3\] slots, got \[3\]"):
        Rings([3, 3]).load_state_dict(Rings([3]).state_dict())


def test_state_is_plain() -> None:
    def plain(value: Any) -> bool:
        return value is None or isinstance(value, bool | np.ndarray)

    assert all(map(plain, Rings([3, 3]).state_dict().values()))


def test_rings_report_whether_rows_were_overwritten() -> None:
    rings = Rings([2, 3])
    ends = np.zeros(2, np.bool_)
    actual = []
    for step in range(6):
        if step == 3:
            rings.reset([0])
        rings.advance(None, ends, np.zeros(2))
        again = Rings([2, 3])
        again.load_state_dict(rings.state_dict())
        assert again.overwritten().tolist() == rings.overwritten().tolist()
        actual.append(rings.overwritten().tolist())
    assert actual == [[False, False]] * 2 + [[True, False], [False, True], [False, True], [True, True]]
    rings.reset()
    assert rings.overwritten().tolist() == [False, False]
