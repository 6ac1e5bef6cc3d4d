"""Loggers: destinations, names and steps of logged figures, also after a crash."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting import Counting

from samplebatch import Collector, Dataset, SampleBatch, VectorReplayBuffer
from samplebatch.errors import ArgumentError, FormatError
from samplebatch.learn import (
    Logger,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    TensorboardLogger,
    TrainingLog,
    WandbLogger,
    learning_curves,
    read_log,
)
from samplebatch.loggers.logger import make_display

RETURNS = "test/returns_stat/mean"


class Noting(Logger):
    """Logger that stores metrics in memory."""

    def __init__(self, **intervals: int) -> None:
        super().__init__(**intervals)
        self.told: list[tuple[str, int]] = []
        self.names: set[str] = set()

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        self.told.append((step_type, step))
        self.names |= {f"{step_type.partition('/')[0]}/{name}" for name in data}


def train(logger: Any, epochs: int = 2) -> OnPolicyTrainer:
    """Train for epochs of 100 environment steps with an update after every 50 steps, and log metrics."""
    algorithm = Counting()
    params = OnPolicyTrainerParams(
        training_collector=Collector(algorithm.policy, "CartPole-v1", VectorReplayBuffer(200, 2), num_envs=2, seed=1),
        test_collector=Collector(algorithm.policy, "CartPole-v1", seed=2),
        max_epochs=epochs,
        epoch_num_steps=100,
        collection_step_num_env_steps=50,
        logger=logger,
        verbose=False,
        show_progress=False,
    )
    trainer = OnPolicyTrainer(algorithm, params)
    trainer.run()
    return trainer


def test_a_trainer_logs_every_kind_of_figure_with_its_steps() -> None:
    logger = Noting(training_interval=1, update_interval=1)
    train(logger)
    reported = {scope: [step for kind, step in logger.told if kind == scope] for scope, _ in logger.told}
    assert reported == {
        "test/env_step": [0, 100, 200],
        "training/env_step": [50, 100, 150, 200],
        "update/update_step": [1, 2, 3, 4],
        "info/epoch": [1, 2],
    }
    assert {
        RETURNS,
        "training/returns_stat/std",
        "training/n_collected_steps",
        "update/loss",
        "update/smoothed_loss/loss",
        "info/best_reward",
        "info/timing/total_time",
    } <= logger.names


def test_figures_within_an_interval_are_omitted() -> None:
    logger = Noting(training_interval=100, update_interval=3, info_interval=2)
    train(logger)
    assert [step for kind, step in logger.told if kind == "training/env_step"] == [50, 150]
    assert [step for kind, step in logger.told if kind == "update/update_step"] == [1, 4]
    assert [step for kind, step in logger.told if kind == "info/epoch"] == [1]


def test_several_loggers_receive_the_same_figures() -> None:
    loggers = Noting(), Noting()
    train(loggers)
    assert loggers[0].told == loggers[1].told != []


def test_an_interval_of_zero_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="test_interval must be a whole number from 1, got 0"):
        Noting(test_interval=0)


def test_tensorboard_has_the_figures_by_name_and_step(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorboardLogger(tmp_path / "events", update_interval=1)
    train(logger)
    logger.finalize()
    events = reading.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars(RETURNS)] == [0, 100, 200]
    assert [(event.step, event.value) for event in events.Scalars("update/loss")] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_logger_of_tianshou_is_accepted(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    theirs = pytest.importorskip("tianshou.utils")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    train(theirs.TensorboardLogger(writer, update_interval=1))
    writer.close()
    events = reading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars(RETURNS)] == [0, 100, 200]


def test_weights_and_biases_has_the_figures_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    logger = WandbLogger(project="cartpole", run_id="one", mode="offline", config={"lr": 1e-3}, update_interval=1)
    train(logger)
    observed = dict(logger.run.summary)
    logger.finalize()
    assert observed["test/env_step"] == 200
    assert (observed["update/loss"], observed["update/update_step"]) == (4.0, 4)
    assert RETURNS in observed
    assert list(tmp_path.glob("wandb/offline-run-*-one"))


class Run:
    """Run of Weights & Biases that stores metrics."""

    def __init__(self) -> None:
        self.metrics: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.is_finished = True


def test_an_existing_weights_and_biases_run_is_used() -> None:
    run = Run()
    logger = WandbLogger(run, update_interval=1)
    train(logger)
    logger.finalize()
    assert run.metrics["test/*"] == "test/env_step"
    assert [row["update/loss"] for row in run.logged if "update/loss" in row] == [1, 2, 3, 4]
    assert [row["test/env_step"] for row in run.logged if RETURNS in row] == [0, 100, 200]
    assert run.is_finished


def test_a_log_has_a_curve_for_each_figure(tmp_path: Path) -> None:
    train(TrainingLog(tmp_path / "log"))
    curves = learning_curves(tmp_path / "log")
    assert curves[RETURNS].unit == "env_step"
    assert curves[RETURNS].steps.tolist() == [0, 100, 200]
    assert curves["update/loss"].values.tolist() == [1, 2, 3, 4]
    assert curves["info/update_step"].values.tolist() == [2, 4]


def test_a_log_can_be_queried_by_other_tools(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    train(TrainingLog(tmp_path / "log"))
    actual = polars.scan_parquet(str(tmp_path / "log" / "*.parquet")).filter(polars.col("name") == "update/loss")
    assert actual.collect()["value"].to_list() == [1, 2, 3, 4]


def test_an_ended_log_is_one_file(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log")
    for step in range(3):
        log.log_info_data({"a": step}, step)
        log.flush()
    before = read_log(tmp_path / "log")
    log.finalize()
    assert len(Dataset(tmp_path / "log").parts()) == 1
    assert read_log(tmp_path / "log") == before


def test_figures_that_are_reported_again_replace_those_after_the_checkpoint(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log")
    log.log_info_data({"a": 1}, 1)
    state = log.state_dict()
    for step in (2, 3, 4):
        log.log_info_data({"a": -step}, step)
    log.flush()
    resumed = TrainingLog(tmp_path / "log")
    resumed.load_state_dict(state)
    for step in (2, 3):
        resumed.log_info_data({"a": step}, step)
    resumed.flush()
    curve = learning_curves(tmp_path / "log")["info/a"]
    assert (curve.steps.tolist(), curve.values.tolist()) == ([1, 2, 3], [1.0, 2.0, 3.0])


def _log_and_die(folder: str) -> None:
    log = TrainingLog(folder)
    log.log_info_data({"a": 1}, 1)
    log.flush()
    log.log_info_data({"a": 2}, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_a_log_that_can_be_read_and_continued(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_log_and_die, args=(str(tmp_path / "log"),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert learning_curves(tmp_path / "log")["info/a"].values.tolist() == [1.0]
    log = TrainingLog(tmp_path / "log")
    log.load_state_dict({"last_steps": {"info": 1}, "rows": 1})
    log.log_info_data({"a": 2}, 2)
    log.finalize()
    assert learning_curves(tmp_path / "log")["info/a"].values.tolist() == [1.0, 2.0]


def test_a_dataset_of_steps_is_rejected_as_a_log(tmp_path: Path) -> None:
    Dataset(tmp_path / "steps").extend(SampleBatch(obs=np.zeros(3)))
    with pytest.raises(FormatError, match="must be a training log with columns row, time"):
        read_log(tmp_path / "steps")


def test_progress_lines_appear_between_epoch_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("samplebatch.loggers.logger.time", SimpleNamespace(monotonic=lambda: now))
    display = make_display(verbose=True, show_progress=True)
    display.begin(3, 0, 100)
    for done in range(10, 101, 10):
        now += 3.0
        display.advance(done, {"updates": done * 2})
        if done == 50:
            display.say("a test")
    # A line ten seconds after the last line of any kind, and none for a complete epoch.
    assert capsys.readouterr().out.splitlines() == [
        "epoch 3: 40/100, updates 80",
        "a test",
        "epoch 3: 90/100, updates 180",
    ]
    quiet = make_display(verbose=True, show_progress=False)
    now += 100.0
    quiet.advance(10, {"updates": 1})
    assert capsys.readouterr().out == ""
