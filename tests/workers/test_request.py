"""Requests: workers start to collect, and a later call of `collect` receives the steps."""

from __future__ import annotations

import pytest

from samplebatch import RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError, WorkerError


def workers(buffer: VectorReplayBuffer | None = None) -> RolloutWorkers:
    return RolloutWorkers("random", "CartPole-v1", buffer, num_workers=2, seed=1, backend="inline")


def test_collect_returns_the_requested_steps() -> None:
    with workers() as single, workers() as other:
        single.request(n_step=30)
        for _ in range(2):
            first, again = single.collect(n_step=30).batch, other.collect(n_step=30).batch
            assert first is not None
            assert again is not None
            assert (first["obs"] == again["obs"]).all()
            assert (first["t"] == again["t"]).all()
        assert single.stats.n_collected_steps == other.stats.n_collected_steps == 60


def test_steps_of_an_unused_request_are_returned_by_iteration() -> None:
    with workers() as collector:
        collector.request(n_step=30)
        assert collector.collect(n_step=10).n_collected_steps == 10
        assert collector.stats.n_collected_steps == 40


def test_requested_steps_are_stored_when_they_are_collected() -> None:
    buffer = VectorReplayBuffer(100, 2)
    with workers(buffer) as collector:
        collector.request(n_step=30)
        assert len(buffer) == 0
        assert collector.collect(n_step=30).n_collected_steps == 30
        assert len(buffer) == 30


def test_a_state_contains_the_requested_steps() -> None:
    with workers() as first, workers() as other, workers() as full:
        first.request(n_step=30)
        other.load_state_dict(first.state_dict(), allow_pickle=True)
        full.collect(n_step=30)
        assert other.stats.n_collected_steps == 30
        actual, expected = other.collect(n_step=20).batch, full.collect(n_step=20).batch
        assert actual is not None
        assert expected is not None
        assert (actual["obs"] == expected["obs"]).all()


def test_amounts_are_validated_like_in_collect() -> None:
    with workers() as collector, pytest.raises(ArgumentError, match="exactly one of n_step and n_episode"):
        collector.request()
    with pytest.raises(WorkerError, match="workers must be started"):
        workers().request(n_step=1)
