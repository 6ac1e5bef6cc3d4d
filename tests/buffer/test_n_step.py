"""Rows that represent several steps, compared with loops over lists of steps."""

from __future__ import annotations

import tracemalloc
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    VectorReplayBuffer,
)
from samplebatch.errors import EmptyBufferError
from samplebatch.returns.arrays import nstep_of_rings

PRIORITIES = {"alpha": 0.6, "beta": 0.4}


@dataclass
class Step:
    """Step: the unique numbers of its observation and next observation, its reward and its flags."""

    obs: int
    obs_next: int
    rew: float
    terminated: bool
    truncated: bool


def window(ring: list[Step], first: int, n_step: int, gamma: float) -> tuple[float, float, Step]:
    """Return the discounted rewards of a window, the discount of the estimate and the last step."""
    total = 0.0
    for k in range(n_step):
        step = ring[first + k]
        total += gamma**k * step.rew
        if step.terminated:
            return total, 0.0, step
        if step.truncated or first + k + 1 == len(ring):
            break
    return total, gamma ** (k + 1), step


class Rings:
    """Environments that are stepped together, and the newest steps of each."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        self.rings: list[deque[Step]] = [deque(maxlen=size) for size in sizes]
        self.rng = np.random.default_rng(seed)
        self.current: dict[int, int] = {}
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def step(self, envs: list[int], ends: float = 0.2) -> Batch:
        created = []
        for env in envs:
            terminated, truncated = (bool(draw < ends / 2) for draw in self.rng.random(2))
            obs, following = self.current.pop(env, None) or self.number(), self.number()
            created.append(Step(obs, following, float(self.rng.integers(-9, 10)), terminated, truncated))
            if not (terminated or truncated):
                self.current[env] = following
            self.rings[env].append(created[-1])
        names = ("obs", "obs_next", "rew", "terminated", "truncated")
        return Batch(
            {name: np.array([getattr(step, name) for step in created]) for name in names} | {"act": [0] * len(envs)}
        )

    def expected(self, obs: int, n_step: int, gamma: float) -> tuple[float, float, Step]:
        """Return the window that starts at the step with an observation."""
        for ring in map(list, self.rings):
            for position, step in enumerate(ring):
                if step.obs == obs:
                    return window(ring, position, n_step, gamma)
        raise AssertionError(f"{obs} is not there")

    def check(self, rows: Any, n_step: int, gamma: float, *, kept_next: bool = True) -> None:
        """Compare n-step rows with a loop that starts at each row."""
        actual = [self.expected(int(obs), n_step, gamma) for obs in rows.obs]
        np.testing.assert_allclose(rows.returns, [total for total, _, _ in actual], atol=1e-12)
        np.testing.assert_allclose(rows.discount, [discount for _, discount, _ in actual], atol=1e-12)
        # Where next observations are not stored, that of a terminated step is its own, and nothing asks for it.
        after = [last.obs_next if kept_next or not last.terminated else last.obs for _, _, last in actual]
        assert rows.obs_next.tolist() == after


def buffer_of(kind: str, sizes: list[int], **options: Any) -> Any:
    size, n = sizes[0], len(sizes)
    if kind == "plain":
        return ReplayBuffer(size, **options)
    if kind == "prioritized":
        return PrioritizedReplayBuffer(size, **PRIORITIES, **options)
    if kind == "vector":
        return VectorReplayBuffer(size * n, n, **options)
    if kind == "prioritized vector":
        return PrioritizedVectorReplayBuffer(size * n, n, **PRIORITIES, **options)
    return ReplayBufferManager([ReplayBuffer(size, **options) for size in sizes])


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["plain", "vector", "manager", "prioritized", "prioritized vector"]),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    ignore_obs_next=st.booleans(),
    adds=st.integers(1, 25),
    n_step=st.integers(1, 9),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_windows_of_every_buffer(
    kind: str, sizes: list[int], ignore_obs_next: bool, adds: int, n_step: int, gamma: float, seed: int
) -> None:
    single = kind in ("plain", "prioritized")
    sizes = sizes[:1] if single else sizes if kind == "manager" else [sizes[0]] * len(sizes)
    buf, rings = buffer_of(kind, sizes, ignore_obs_next=ignore_obs_next), Rings(sizes, seed)
    for _ in range(adds):
        chosen = [env for env in range(len(sizes)) if rings.rng.random() < 0.8] or [0]
        buf.add(rings.step(chosen), buffer_ids=chosen)
    for size in (0, None, 16):
        rows, indices = buf.sample(size, n_step=n_step, gamma=gamma)
        rings.check(rows, n_step, gamma, kept_next=not ignore_obs_next)
        assert np.array_equal(rows.obs, buf.obs[indices])
        assert ("weight" in rows) == ("prioritized" in kind)


@pytest.mark.parametrize("ignore_obs_next", [False, True])
def test_windows_of_cached_buffers(ignore_obs_next: bool) -> None:
    buf = CachedReplayBuffer(ReplayBuffer(30, ignore_obs_next=ignore_obs_next), 2, 6)
    caches, main = Rings([6, 6], 3), Rings([30], 3)
    for _ in range(40):
        row = caches.step([0, 1])
        buf.add(row)
        for env in (0, 1):
            steps = list(caches.rings[env])
            if steps[-1].terminated or steps[-1].truncated:
                main.rings[0].extend(steps)
                caches.rings[env].clear()
    caches.rings += main.rings
    for n_step in (1, 3, 40):
        rows, _ = buf.sample(0, n_step=n_step, gamma=0.9)
        assert len(rows.obs) == sum(map(len, caches.rings))
        caches.check(rows, n_step, 0.9, kept_next=not ignore_obs_next)


def test_windows_of_a_part() -> None:
    buf, rings = VectorReplayBuffer(15, 3), Rings([5, 5, 5], 1)
    for _ in range(8):
        buf.add(rings.step([0, 1, 2]))
    for env, part in enumerate(buf.buffers):
        rows, indices = part.sample(0, n_step=3, gamma=0.5)
        assert rows.obs.tolist() == [step.obs for step in rings.rings[env]]
        rings.check(rows, 3, 0.5)
        assert indices.max() < 5


def test_a_window_ends_with_its_episode_and_before_the_cursor() -> None:
    buf = ReplayBuffer(6)
    for n in range(9):
        buf.add(Batch(obs=n, act=0, rew=1.0, terminated=n == 5, truncated=n == 3, obs_next=n + 0.5))
    rows, indices = buf.sample(0, n_step=4, gamma=0.5)
    assert indices.tolist() == [3, 4, 5, 0, 1, 2]
    assert rows.obs.tolist() == [3, 4, 5, 6, 7, 8]
    assert rows.returns.tolist() == [1.0, 1.5, 1.0, 1.75, 1.5, 1.0]
    assert rows.discount.tolist() == [0.5, 0.0, 0.0, 0.125, 0.25, 0.5]
    assert rows.obs_next.tolist() == [3.5, 5.5, 5.5, 8.5, 8.5, 8.5]


@pytest.mark.parametrize("ignore_obs_next", [False, True])
def test_stacked_observations_after_the_last_step(ignore_obs_next: bool) -> None:
    buf = ReplayBuffer(10, stack_num=3, ignore_obs_next=ignore_obs_next)
    for n in range(7):
        buf.add(Batch(obs=n, act=0, rew=1.0, terminated=False, truncated=n == 4, obs_next=n + 1))
    rows, _ = buf.sample(0, n_step=2)
    assert rows.obs_next.tolist() == buf[[1, 2, 3, 4, 4, 6, 6]].obs_next.tolist()
    assert rows.obs_next[:, -1].tolist() == [2, 3, 4, 5, 5, 7, 7]


def test_several_rewards_and_nested_observations() -> None:
    buf = ReplayBuffer(5)
    for n in range(4):
        obs, after = {"a": n, "b": [n, n]}, {"a": n + 1, "b": [n + 1, n + 1]}
        buf.add(Batch(obs=obs, act=0, rew=[1.0, n], terminated=n == 3, truncated=False, obs_next=after))
    rows, _ = buf.sample(0, n_step=2, gamma=0.5)
    assert rows.returns.tolist() == [[1.5, 0.5], [1.5, 2.0], [1.5, 3.5], [1.0, 3.0]]
    assert rows.obs_next.a.tolist() == [2, 3, 4, 4]
    assert rows.obs_next.b.shape == (4, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
def test_rewards_of_any_kind_are_summed_in_double_precision(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    rewards = rng.integers(-50, 50, (12, 2)).astype(dtype)
    over, ended = rng.random(12) < 0.1, rng.random(12) < 0.2
    windows: Any = (over, over | ended, [0, 5, 12], [2, 8], rng.integers(0, 12, 200), 4, 0.9)
    actual, expected = nstep_of_rings(rewards, *windows), nstep_of_rings(rewards.astype(np.float64), *windows)
    for first, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(first, other)
        assert first.dtype == other.dtype


def test_a_few_windows_of_many_rewards_convert_no_others() -> None:
    slots, flags = 1_000_000, np.zeros(1_000_000, bool)
    rewards = np.ones(slots, np.float32)
    some = np.arange(100)
    nstep_of_rings(rewards, flags, flags, [0, slots], [slots - 1], some, 3, 0.5)
    tracemalloc.start()
    try:
        actual = nstep_of_rings(rewards, flags, flags, [0, slots], [slots - 1], some, 3, 0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (actual.returns == 1.75).all()
    assert peak < 100_000


def test_invalid_arguments_are_rejected() -> None:
    buf = ReplayBuffer(5)
    with pytest.raises(EmptyBufferError):
        buf.sample(3, n_step=2)
    buf.add(Batch(obs=0, act=0, rew=1.0, terminated=False, truncated=False))
    with pytest.raises(ValueError, match="n_step must be a whole number from 1, got 0"):
        buf.sample(3, n_step=0)
    rows, _ = buf.sample(3)
    assert "returns" not in rows


def test_targets_agree_with_tianshou() -> None:
    data = pytest.importorskip("tianshou.data")
    algorithm = pytest.importorskip("tianshou.algorithm").Algorithm
    import torch

    ours, theirs, rings = VectorReplayBuffer(21, 3), data.VectorReplayBuffer(21, 3), Rings([7, 7, 7], 5)
    for _ in range(17):
        chosen = [env for env in range(3) if rings.rng.random() < 0.8] or [1]
        row = rings.step(chosen)
        ours.add(row, buffer_ids=chosen)
        theirs.add(data.Batch(info=[{}] * len(chosen), **dict(row.items())), buffer_ids=chosen)
    estimates = torch.from_numpy(rings.rng.normal(size=rings.numbers + 2))
    for n_step in (1, 3, 8):
        rows, indices = ours.sample(0, n_step=n_step, gamma=0.9)
        actual = rows.returns + rows.discount * estimates[torch.from_numpy(rows.obs_next)].numpy()
        expected = algorithm.compute_nstep_return(
            theirs[indices], theirs, indices, lambda buf, last: estimates[buf.obs_next[last]], 0.9, n_step
        )
        np.testing.assert_allclose(actual, expected.returns[:, 0])
