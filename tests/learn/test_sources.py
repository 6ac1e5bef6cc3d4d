"""Algorithms learn the same from a buffer, a dataset and a folder of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from gymnasium.spaces import Discrete

from samplebatch import (
    Collector,
    Dataset,
    MixedSampler,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
)
from samplebatch.errors import ArgumentError, ColumnNotFoundError, FormatError
from samplebatch.learn import (
    CQL,
    DQN,
    TD3,
    AdamOptimizerFactory,
    BehaviourCloning,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteBCQ,
    DiscreteBCQPolicy,
    DiscreteQLearningPolicy,
    ImitationPolicy,
    Net,
    OfflineTrainerParams,
    SACPolicy,
)
from samplebatch.rollout import NStepReturns
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_equal_parameters, filled, parameters_of, seeded

ADAM = AdamOptimizerFactory()


def cloning(space: Any = CHOICES) -> BehaviourCloning:
    actor = seeded(0, 3, 16, 4 if space is CHOICES else 2)
    return BehaviourCloning(policy=ImitationPolicy(actor=actor, action_space=space), optim=ADAM)


def bcq(n_step: int = 1) -> DiscreteBCQ:
    policy = DiscreteBCQPolicy(model=seeded(0, 3, 16, 4), imitator=seeded(1, 3, 16, 4), action_space=CHOICES)
    return DiscreteBCQ(policy=policy, optim=ADAM, n_step_return_horizon=n_step)


def q_learning() -> DQN:
    policy = DiscreteQLearningPolicy(model=seeded(0, 3, 16, 4), action_space=CHOICES)
    return DQN(policy=policy, optim=ADAM, n_step_return_horizon=3)


def cql(calibrated: bool = False) -> CQL:
    torch.manual_seed(0)
    actor = ContinuousActorProbabilistic.for_space(Net.for_space(OBS, [16]), MEASURES, conditioned_sigma=True)
    return CQL(
        policy=SACPolicy(actor=actor, action_space=MEASURES),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        policy_optim=ADAM,
        critic_optim=ADAM,
        calibrated=calibrated,
    )


def td3() -> TD3:
    torch.manual_seed(0)
    actor = ContinuousActorDeterministic.for_space(Net.for_space(OBS, [16]), MEASURES)
    return TD3(
        policy=ContinuousDeterministicPolicy(actor=actor, action_space=MEASURES),
        critic=ContinuousCritic.for_space(OBS, MEASURES, [16]),
        policy_optim=ADAM,
        critic_optim=ADAM,
    )


def steps_of(buffer: Any) -> SampleBatch:
    """Return the rows of a buffer in time order with RLlib's names."""
    rows = buffer[:]
    return SampleBatch(
        obs=rows.obs,
        new_obs=rows.obs_next,
        actions=rows.act,
        rewards=rows.rew,
        terminateds=rows.terminated,
        truncateds=rows.truncated,
    )


def in_dataset(rows: Any, folder: Path) -> Dataset:
    """Append rows to a dataset in two parts."""
    dataset = Dataset(folder)
    dataset.extend(rows[:30])
    dataset.extend(rows[30:])
    return dataset


def in_polars(rows: SampleBatch, folder: Path) -> Path:
    """Write rows into two files with Polars: the same names, without the metadata of this library."""
    folder.mkdir()
    columns = {
        name: pl.Series(name, values, dtype=pl.Array(pl.Float32, values.shape[1]) if values.ndim == 2 else None)
        for name, values in rows.items()
    }
    frame = pl.DataFrame(columns)
    frame[:30].write_parquet(folder / "a.parquet")
    frame[30:].write_parquet(folder / "b.parquet")
    return folder


def update(algorithm: Any, source: Any) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        algorithm.update(buffer=source, sample_size=0)


@pytest.mark.parametrize(
    ("make", "actions"),
    [(cloning, CHOICES), (lambda: cloning(MEASURES), MEASURES), (bcq, CHOICES), (cql, MEASURES), (td3, MEASURES)],
)
def test_updates_are_the_same_from_every_source(make: Any, actions: Any, tmp_path: Path) -> None:
    buffer = filled(actions=actions)
    rows = steps_of(buffer)
    dataset = in_dataset(rows, tmp_path / "rllib")
    nested = in_dataset(rows.as_batch("tianshou"), tmp_path / "tianshou")
    opener = cloning()
    folder = opener.process_buffer(tmp_path / "rllib")
    foreign = opener.process_buffer(str(in_polars(rows, tmp_path / "polars")))
    assert isinstance(folder, Dataset)
    assert isinstance(foreign, ReplayBuffer)
    expected, untouched = make(), parameters_of(make())
    update(expected, buffer)
    pairs = zip(untouched, expected.parameters(), strict=True)
    assert any((first != second).any() for first, second in pairs)
    for source in (dataset, nested, folder, foreign):
        algorithm = make()
        update(algorithm, source)
        assert_equal_parameters(algorithm, expected)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_updates_are_the_same_from_a_table_of_a_service(kind: Any) -> None:
    prioritized = {"alpha": 0.6, "beta": 0.4} if kind == "prioritized" else {}
    local = (PrioritizedReplayBuffer if prioritized else ReplayBuffer)(100, random_seed=3, **prioritized)
    table = ReplayTable("replay", kind=kind, capacity=100, seed=3, **prioritized)
    rows = steps_of(filled())
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as remote:
        actual = []
        for buffer in (local, remote):
            buffer.extend(rows)
            algorithm = q_learning()
            for _ in range(3):
                algorithm.update(buffer, 8)
            actual.append(algorithm)
    # Sums are rounded by how arrays lie in memory.
    assert_equal_parameters(*actual, atol=1e-6)


def test_rows_of_a_dataset_are_drawn_in_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    dataset = in_dataset(steps_of(filled()), tmp_path / "steps")
    algorithm = bcq().double()
    batch, rows = algorithm._sample_batch(dataset, 16)
    assert batch.obs.dtype == batch.returns.dtype == batch.discount.dtype == torch.float64
    assert batch.act.dtype == torch.int64
    np.testing.assert_array_equal(batch.act.numpy(), dataset.take(rows)["actions"])


def test_an_offline_run_reads_a_folder_that_a_collector_wrote(tmp_path: Path) -> None:
    with Collector("random", "CartPole-v1", num_envs=2, seed=0) as collector:
        Dataset(tmp_path / "steps").extend(collector.collect(n_step=100).batch)
    policy = DiscreteBCQPolicy(model=seeded(0, 4, 16, 2), imitator=seeded(1, 4, 16, 2), action_space=Discrete(2))
    algorithm = DiscreteBCQ(policy=policy, optim=ADAM)
    before = parameters_of(algorithm.policy.model)
    params = OfflineTrainerParams(
        buffer=tmp_path / "steps", max_epochs=2, epoch_num_steps=3, batch_size=32, verbose=False, show_progress=False
    )
    algorithm.run_training(params)
    assert algorithm.updates == 6
    assert any(
        (first != second).any() for first, second in zip(before, algorithm.policy.model.parameters(), strict=True)
    )


def test_windows_created_by_hooks_are_preserved(tmp_path: Path) -> None:
    hook = NStepReturns(3, gamma=0.5)
    with Collector("random", "CartPole-v1", num_envs=2, seed=0, hooks=[hook]) as collector:
        rows = collector.collect(n_step=100).batch
    dataset = in_dataset(rows, tmp_path / "steps")
    batch, _ = bcq(n_step=3)._sample_batch(dataset, 0)
    np.testing.assert_array_equal(batch.returns.numpy(), rows["returns"].astype(np.float32))
    assert batch.returns.max() > 1.0


def test_single_steps_are_not_treated_as_windows(tmp_path: Path) -> None:
    dataset = in_dataset(steps_of(filled()), tmp_path / "steps")
    with pytest.raises(ArgumentError, match="n_step_return_horizon must be 1 for rows that are single steps, got 2"):
        bcq(n_step=2).update(dataset, 8)


@pytest.mark.parametrize(("column", "name"), [("new_obs", "obs_next"), ("terminateds", "terminated")])
def test_rows_without_a_column_for_targets_are_rejected(column: str, name: str, tmp_path: Path) -> None:
    rows = steps_of(filled()).drop(column)
    dataset = in_dataset(rows, tmp_path / "steps")
    with pytest.raises(ColumnNotFoundError, match=f"rows must have column '{name}' to compute targets"):
        bcq().update(dataset, 8)
    cloning().update(dataset, 8)


def test_folders_without_rows_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"must be a folder with \.parquet files"):
        cloning().process_buffer(tmp_path)
    with pytest.raises(FileNotFoundError):
        cloning().process_buffer(tmp_path / "nowhere")


def test_rows_outside_a_buffer_or_dataset_are_rejected() -> None:
    sentence = "source must be a buffer, a dataset or a path, got a SampleBatch"
    with pytest.raises(ArgumentError, match=sentence):
        cloning().create_trainer(OfflineTrainerParams(buffer=steps_of(filled())))


def test_an_algorithm_learns_from_a_dataset_and_a_buffer_together(tmp_path: Path) -> None:
    dataset = in_dataset(steps_of(filled(actions=MEASURES)), tmp_path / "steps")
    buffer = PrioritizedReplayBuffer(40, alpha=1.0, beta=1.0)
    for row in dataset.read().as_batch("tianshou")[:40]:
        buffer.add(row)
    before = np.asarray(buffer.weight[:]).copy()
    sampler = MixedSampler({"offline": dataset, "online": buffer}, missing="drop")
    algorithm = td3()
    algorithm.update(sampler, 64)
    assert algorithm.updates == 1
    changed = (np.asarray(buffer.weight[:]) != before).mean()
    assert 0.2 < changed < 0.9
