"""Sequences for recurrent learners: starts and ends, padding, and probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import EmptyBufferError, SampleBatchError
from tests.buffer.oracle import Oracle, same, step, steps
from tests.buffer.test_episodes import SIZES, stream
from tests.optional import torch


def places(oracle: Oracle) -> dict[int, tuple[list[int], int]]:
    """Return, per index, the stored indices of its episode, and the position of the index among them."""
    return {index: (indices, i) for indices, _, _ in oracle.episodes() for i, index in enumerate(indices)}


@pytest.mark.parametrize("seed", range(0, 10, 2))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("length", "burn_in"), [(1, 0), (3, 0), (4, 3), (5, 2), (50, 40)])
def test_sequences_of_given_steps(seed: int, sizes: list[int], length: int, burn_in: int) -> None:
    buf, oracle = stream(seed, sizes, 1 + 5 * seed)
    valid = places(oracle)
    requested = oracle.indices()
    if not requested:
        return
    batch, indices = buf.get_sequences(requested, length, burn_in=burn_in)
    for row, index in enumerate(requested):
        episode, at = valid[index]
        before = min(at, burn_in)
        expected = episode[at - before :][:length]
        n = len(expected)
        assert indices[row].tolist() == expected + [-1] * (length - n)
        assert batch.mask[row].tolist() == [True] * n + [False] * (length - n)
        assert batch.burn_in[row].tolist() == [True] * before + [False] * (length - before)
        assert indices[row, batch.burn_in[row].sum()] == index
        rows = buf[expected]
        for name in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next"):
            assert same(batch[name][row, :n], np.asarray(rows[name])), name
            assert not batch[name][row, n:].any()
        assert same(batch.info.n[row, :n], np.asarray(rows.info.n))
        assert not batch.policy.logits[row, n:].any()
    for ring, part in enumerate(buf.buffers):
        if len(part):
            ours = [index - oracle.offsets[ring] for index in requested if index in valid]
            ours = [index for index in ours if 0 <= index < sizes[ring]]
            actual, where = part.get_sequences(ours, length, burn_in=burn_in)
            rows = [requested.index(index + oracle.offsets[ring]) for index in ours]
            assert (actual.obs == batch.obs[rows]).all()
            assert (where == np.where(batch.mask[rows], indices[rows] - oracle.offsets[ring], -1)).all()


def test_each_step_is_equally_likely() -> None:
    buf, oracle = stream(5, [9, 14, 11], 40)
    n = 40_000
    batch, indices = buf.sample_sequences(n, 4, burn_in=2)
    sampled = indices[np.arange(n), batch.burn_in.sum(1)]
    actual, counts = np.unique(sampled, return_counts=True)
    assert actual.tolist() == sorted(oracle.indices())
    share = n / len(actual)
    assert (abs(counts - share) < 5 * share**0.5).all()


@pytest.mark.parametrize("burn_in", [0, 2])
def test_each_range_is_equally_likely(burn_in: int) -> None:
    buf, oracle = stream(8, [19, 24, 11], 60)
    length, n = 3, 30_000
    expected = {
        tuple(indices[i : i + length]): 0
        for indices, _, _ in oracle.episodes()
        for i in range(len(indices) - length + 1)
    }
    assert len(expected) > 8
    batch, indices = buf.sample_sequences(n, length, burn_in=burn_in, padded=False)
    assert batch.mask.all()
    assert batch.burn_in.sum(1).tolist() == [burn_in] * n
    for rows in map(tuple, indices.tolist()):
        expected[rows] += 1
    share = n / len(expected)
    assert all(abs(count - share) < 5 * share**0.5 for count in expected.values())


def test_steps_are_drawn_by_their_priority() -> None:
    buf = PrioritizedVectorReplayBuffer(16, 2, alpha=1.0, beta=1.0)
    for n in range(9):
        buf.add(steps([n, n + 20], terminated=[n == 4, False]))
    priorities = np.arange(16.0)
    buf.update_weight(np.arange(16), priorities)
    n = 50_000
    batch, indices = buf.sample_sequences(n, 3, burn_in=1)
    sampled = indices[np.arange(n), batch.burn_in.sum(1)]
    counts = np.bincount(sampled, minlength=16)
    expected = priorities / priorities.sum() * n
    assert (abs(counts - expected) <= 5 * expected**0.5 + 0.1).all()
    assert batch.weight.shape == batch.generation.shape == (n,)
    weights = buf[sampled].weight
    np.testing.assert_allclose(batch.weight, weights / weights.max())
    buf.update_weight(sampled[:4], np.full(4, 2.0), generation=batch.generation[:4])
    assert buf.get_weight(sampled[:4]).tolist() == pytest.approx([buf.get_weight(int(sampled[0]))] * 4)


def test_sampling_depends_on_the_generator() -> None:
    first, _ = stream(2, [12, 9], 30)
    other, _ = stream(2, [12, 9], 30)
    for options in ({}, {"padded": False}):
        (rows, indices), (same_rows, same_indices) = (b.sample_sequences(7, 2, **options) for b in (first, other))
        assert indices.tolist() == same_indices.tolist()
        assert rows == same_rows
    all_rows, indices = first.sample_sequences(0, 2)
    assert indices[:, 0].tolist() == first.sample_indices(0).tolist()
    assert len(all_rows) == len(first)


@pytest.mark.parametrize("ignore_obs_next", [False, True])
def test_stacked_frames_and_final_observations(ignore_obs_next: bool) -> None:
    buf = ReplayBuffer(20, stack_num=2, ignore_obs_next=ignore_obs_next)
    for n in range(6):
        buf.add(step(10 * n, obs_next=10 * n + (5 if n == 2 else 10), truncated=n == 2))
    batch, _ = buf.get_sequences([1, 4], 3)
    assert batch.obs.tolist() == [[[0, 10], [10, 20], [0, 0]], [[30, 40], [40, 50], [0, 0]]]
    assert batch.obs_next[:, 1].tolist() == [[20, 25], [50, 60]]
    assert batch.obs_next[:, 2].tolist() == [[0, 0], [0, 0]]


def test_padding_of_other_kinds() -> None:
    buf = ReplayBuffer(8)
    for n in range(1, 4):
        obs = {"t": torch.full((2,), float(n)), "word": f"w{n}", "when": np.datetime64(n, "D")}
        buf.add(step(n, obs=obs, obs_next=obs, extra=None if n == 1 else {n}))
    batch, _ = buf.get_sequences([1], 4)
    assert batch.obs.t[0, :, 0].tolist() == [2.0, 3.0, 0.0, 0.0]
    assert batch.obs.word.tolist() == [["w2", "w3", None, None]]
    assert batch.obs.when.tolist() == np.array([[2, 3, 0, 0]], "M8[D]").tolist()
    assert batch.extra.tolist() == [[{2}, {3}, None, None]]


def test_invalid_arguments_are_rejected() -> None:
    buf = VectorReplayBuffer(12, 2)
    for sample in (buf.sample_sequences, buf.get_sequences):
        for length, burn_in in ((0, 0), (3, 3), (2, -1)):
            with pytest.raises(ValueError, match=r"length|burn_in"):
                sample(1, length, burn_in=burn_in)
    for options in ({}, {"padded": False}):
        with pytest.raises(EmptyBufferError):
            buf.sample_sequences(2, 3, **options)
    buf.add(steps([0, 1]))
    with pytest.raises(EmptyBufferError, match="an episode of 2 steps"):
        buf.sample_sequences(2, 2, padded=False)
    with pytest.raises(IndexError):
        buf.get_sequences([12], 2)
    buf.add(steps([2, 3], mask=[1, 1]))
    with pytest.raises(SampleBatchError, match="'mask'"):
        buf.sample_sequences(2, 2)


def test_no_sequences() -> None:
    buf, _ = stream(1, [8], 20)
    batch, indices = buf.get_sequences([], 4, burn_in=1)
    assert batch.obs.shape == batch.mask.shape == indices.shape == (0, 4)
    assert buf.sample_sequences(-1, 2)[1].shape == (0, 2)


@pytest.mark.parametrize("size", [40, 1000])
def test_long_episodes(size: int) -> None:
    """Episodes are longer than the range that is searched first."""
    buf: Any = ReplayBuffer(size)
    for n in range(size + size // 3):
        buf.add(step(n, terminated=n == size // 2))
    batch, indices = buf.get_sequences(buf.sample_indices(0), size, burn_in=size // 4)
    assert batch.mask.sum() == (indices >= 0).sum()
    obs = np.where(batch.mask, batch.obs, -1)
    following = (obs[:, 1:] == obs[:, :-1] + 1) | ~batch.mask[:, 1:]
    assert following.all()
    ends = np.take_along_axis(batch.obs, batch.mask.sum(1)[:, None] - 1, 1)[:, 0]
    assert set(ends.tolist()) <= {size // 2, size + size // 3 - 1, *range(size)}
    sampled = batch.obs[np.arange(size), batch.burn_in.sum(1)]
    assert sampled.tolist() == list(range(size // 3, size + size // 3))
