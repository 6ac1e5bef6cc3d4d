"""Trainers with rollout workers: the weights of each step, and steps collected during updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counting import Counting, Stats
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn import (
    ContinuousDeterministicPolicy,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    OUNoise,
    load_checkpoint,
    save_checkpoint,
)
from tests.learn.learning import seeded


class Counted(nn.Module):
    """Policy that records in each step how often it has been updated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.is_within_training_step = False
        self.noted = 0

    def note_steps(self, steps: int) -> None:
        self.noted += steps

    def forward(self, batch: Any, state: Any = None) -> Batch:
        rows = len(batch.obs)
        actions = (np.asarray(batch.obs)[:, 2] > 0).astype(np.int64)
        return Batch(act=actions, policy=Batch(updates=np.full(rows, self.weight.item())))


class Seeing(Counting):
    """Algorithm that records at each update which policies collected the rows of the buffer."""

    allows_stale_steps = True

    def __init__(self) -> None:
        super().__init__()
        self.policy: Any = Counted()
        self.seen: list[list[float]] = []
        self.kept: list[float] = []

    def update(self, buffer: Any, **options: Any) -> Stats:
        rows, _ = buffer.sample(0)
        self.seen.append(sorted(set(rows.policy.updates.tolist())))
        self.kept.append(float(rows.obs.sum()))
        return super().update(buffer, **options)


@pytest.fixture(params=["inline", pytest.param("process", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def workers(algorithm: Seeing, backend: Any = "inline") -> RolloutWorkers:
    return RolloutWorkers(
        algorithm.policy,
        "CartPole-v1",
        VectorReplayBuffer(400, 2),
        num_workers=2,
        seed=1,
        backend=backend,
        # Each spawned worker would import torch; tests/workers and tests/cli spawn workers with torch.
        start_method="fork",
    )


def on_policy(algorithm: Seeing, collector: Any, **options: Any) -> OnPolicyTrainer:
    params = OnPolicyTrainerParams(
        training_collector=collector,
        max_epochs=2,
        epoch_num_steps=40,
        collection_step_num_env_steps=20,
        verbose=False,
        show_progress=False,
        **options,
    )
    return OnPolicyTrainer(algorithm, params)


def test_steps_are_collected_with_the_latest_weights(backend: str) -> None:
    algorithm = Seeing()
    with workers(algorithm, backend) as collector:
        info = on_policy(algorithm, collector).run()
    assert algorithm.seen == [[0.0], [1.0], [2.0], [3.0]]
    assert [rows for rows, *_ in algorithm.updates] == [20] * 4
    assert info.train_step == algorithm.policy.noted == 80


def test_steps_that_are_collected_during_updates_are_one_update_old(backend: str) -> None:
    algorithm = Seeing()
    with workers(algorithm, backend) as collector:
        info = on_policy(algorithm, collector, overlap=True).run()
        assert collector.stats.n_collected_steps == info.train_step == 80
    assert algorithm.seen == [[0.0], [0.0], [1.0], [2.0]]
    assert [rows for rows, *_ in algorithm.updates] == [20] * 4


def test_the_buffer_does_not_change_during_an_off_policy_update() -> None:
    algorithm = Seeing()
    with workers(algorithm, "process") as collector:
        params = OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=60,
            collection_step_num_env_steps=20,
            update_step_num_gradient_steps_per_sample=0.2,
            overlap=True,
            verbose=False,
            show_progress=False,
        )
        OffPolicyTrainer(algorithm, params).run()
    assert [rows for rows, *_ in algorithm.updates] == [20] * 4 + [40] * 4 + [60] * 4
    assert algorithm.seen[::4] == [[0.0], [0.0], [0.0, 4.0]]
    assert [len(set(algorithm.kept[position : position + 4])) for position in (0, 4, 8)] == [1, 1, 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_training_with_workers_is_resumed_exactly(overlap: bool, tmp_path: Path) -> None:
    uninterrupted, cut, resumed = Seeing(), Seeing(), Seeing()
    with workers(uninterrupted) as collector:
        on_policy(uninterrupted, collector, overlap=overlap).run()
    with workers(cut) as collector:
        trainer = on_policy(cut, collector, overlap=overlap)
        trainer.reset()
        trainer.execute_epoch()
        save_checkpoint(trainer, tmp_path)
    with workers(resumed) as collector:
        trainer = on_policy(resumed, collector, overlap=overlap)
        assert load_checkpoint(trainer, tmp_path, allow_pickle=True) is None
        assert trainer.run().train_step == 80
    assert cut.seen + resumed.seen == uninterrupted.seen
    assert cut.kept + resumed.kept == uninterrupted.kept


def test_algorithms_that_require_current_steps_reject_overlap() -> None:
    algorithm = Counting()
    with pytest.raises(
        ArgumentError, match="overlap must be False for Counting, which treats all steps as collected by"
    ):
        on_policy(algorithm, workers(algorithm), overlap=True)  # type: ignore[arg-type]


def test_the_noise_state_of_each_worker_is_saved(backend: str) -> None:
    box = spaces.Box(-2.0, 2.0, (1,), np.float32)
    policy = ContinuousDeterministicPolicy(
        actor=seeded(0, 3, 1), action_space=box, exploration_noise=OUNoise(mu=1.0, sigma=0.0, theta=1.0)
    )

    def create() -> RolloutWorkers:
        return RolloutWorkers(
            policy,
            "Pendulum-v1",
            num_workers=2,
            seed=1,
            backend=backend,
            start_method="fork",
            exploration_noise=True,
            infos=False,  # type: ignore[arg-type]
        )

    with create() as first, create() as second:
        first.collect(n_step=20)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        left, other = (np.asarray(part.collect(n_step=20).batch["actions"]) for part in (first, second))
    assert np.array_equal(left, other)
