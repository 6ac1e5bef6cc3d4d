"""Training with several seeds: runs in child processes, their figures together, kills, signals and resuming."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from samplebatch.cli import application, experiments
from samplebatch.cli.experiments import bootstrap_interval, combine_curves, mean_of
from samplebatch.loggers.training_log import LearningCurve, learning_curves
from tests.optional import torch

SETTINGS = [
    "max_epochs=2", "epoch_num_steps=40", "test_step_num_episodes=1", "num_envs=2", "start_steps=20",
    "collection_step_num_env_steps=10", "batch_size=8", "hidden_sizes=[8]",
]  # fmt: skip
RETURN = "test/returns_stat/mean"


@pytest.fixture(autouse=True)
def _one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture
def _forked_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of seeds, which need seven seconds of processor time each if they import everything again."""
    fork, train_seed = multiprocessing.get_context("fork"), experiments.train_seed

    def train_in_fork(*arguments: Any) -> None:
        # The command line of this process prints to memory.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        train_seed(*arguments)

    monkeypatch.setattr(experiments, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    monkeypatch.setattr(experiments, "train_seed", train_in_fork)


def words(*settings: str) -> list[str]:
    return ["dqn", "CartPole-v1", *(word for setting in (*SETTINGS, *settings) for word in ("--set", setting))]


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), ["train", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samplebatch", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen[str], *lines: str) -> None:
    """Read output until lines with all given prefixes have been read."""
    waiting, observed = set(lines), ""
    assert process.stdout is not None
    while waiting:
        line = process.stdout.readline()
        observed += line
        assert line, observed
        waiting = {beginning for beginning in waiting if not line.startswith(beginning)}


def children(pid: int) -> list[int]:
    """Return the processes of seeds, without the resource tracker of `multiprocessing`."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in pids if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def policy_of(run: str) -> dict[str, Any]:
    return torch.load(f"{run}/policy.pt", weights_only=False).state_dict()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_forked_seeds")
def test_each_seed_equals_a_single_run_and_the_log_has_the_mean(tmp_path: Path) -> None:
    code, printed = invoke(*words(), "--seeds", 2, "--seed", 3, "--parallel", 2, "--out", "both", "--plot", "both.png")
    assert code == 0, printed
    assert "Trained 2 of 2 seeds" in printed
    assert "seed 4: epoch 2: updates 40, env steps 80" in printed
    assert (tmp_path / "both.png").exists()
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == [
        "log", "seed-3", "seed-4", "seeds.json", "train.toml",
    ]  # fmt: skip
    assert invoke(*words(), "--seed", 4, "--out", "alone")[0] == 0
    alone, together = policy_of("alone"), policy_of("both/seed-4")
    assert all(torch.equal(value, together[name]) for name, value in alone.items())
    curves, runs = learning_curves("both/log"), [learning_curves(f"both/seed-{seed}/log") for seed in (3, 4)]
    values = np.stack([run[RETURN].values for run in runs])
    np.testing.assert_array_equal(curves[RETURN].values, values.mean(0))
    np.testing.assert_array_equal(curves[f"{RETURN}/low"].values, values.min(0))
    np.testing.assert_array_equal(curves[f"{RETURN}/high"].values, values.max(0))
    inspected = CliRunner().invoke(application(), ["inspect", "both"], env={"COLUMNS": "200"})
    assert f"{RETURN} over env_step" in inspected.output
    code, printed = invoke(*words(), "--seeds", 2, "--out", "both")
    assert code == 2
    assert "'both' must not contain a run, got one; resume it with --resume both" in printed


@pytest.mark.usefixtures("_forked_seeds")
def test_a_killed_seed_is_reported_and_resumed_and_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    make = experiments.SeedRun

    def kill_seed_1(training: Any, *args: Any, **options: Any) -> Any:
        run = make(training, *args, **options)
        if training.seed == 1:
            run.process.kill()
        return run

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "SeedRun", kill_seed_1)
        code, printed = invoke(*words(), "--seeds", 2, "--parallel", 2, "--out", "run")
    assert code == 1, printed
    assert "seed 1 was killed by SIGKILL" in printed
    assert "Resume with: samplebatch train --resume run --allow-pickle" in printed
    code, printed = invoke("--resume", "run", "--allow-pickle")
    assert code == 0, printed
    assert "seed 0:" not in printed
    assert "Trained 2 of 2 seeds" in printed
    assert json.loads(Path("run/seeds.json").read_text()) == {"0": "finished", "1": "finished"}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds child processes in /proc")
def test_seeds_killed_during_training_are_resumed_from_their_checkpoints() -> None:
    process = start(*words("max_epochs=400"), "--seeds", "2", "--parallel", "2", "--out", "run")
    read_until(process, "seed 0: epoch 2", "seed 1: epoch 2")
    # Children are listed in order of their start.
    os.kill(children(process.pid)[1], signal.SIGKILL)
    os.kill(children(process.pid)[0], signal.SIGTERM)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 1, printed
    assert "seed 1 was killed by SIGKILL" in printed
    assert "seed 0 exited with status 143" in printed
    assert "Resume with: samplebatch train --resume run --allow-pickle" in printed
    for path in Path("run").rglob("train.toml"):
        path.write_text(path.read_text().replace("max_epochs = 400", "max_epochs = 4"))
    code, printed = invoke("--resume", "run", "--allow-pickle", "--parallel", 1)
    assert code == 0, printed
    assert printed.count("Resumed in epoch") == 2
    assert "Trained 2 of 2 seeds" in printed
    assert json.loads(Path("run/seeds.json").read_text()) == {"0": "finished", "1": "finished"}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds child processes in /proc")
def test_a_killed_parent_ends_all_seeds_and_finished_ones_are_kept() -> None:
    process = start(*words(), "--seeds", "3", "--parallel", "1", "--out", "run")
    read_until(process, "seed 0: Trained for", "seed 1: before training")
    (child,) = children(process.pid)
    process.kill()
    process.communicate(timeout=240)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    code, printed = invoke("--resume", "run", "--allow-pickle")
    assert code == 0, printed
    assert "seed 0:" not in printed
    assert "Trained 3 of 3 seeds" in printed


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_to_group", [True, False])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds child processes in /proc")
def test_a_signal_ends_all_seeds_with_checkpoints(number: signal.Signals, is_to_group: bool) -> None:
    process = start(*words("max_epochs=100000"), "--seeds", "3", "--parallel", "2", "--out", "run")
    read_until(process, "seed 0: epoch 1", "seed 1: epoch 1")
    pids = children(process.pid)
    (os.killpg if is_to_group else os.kill)(process.pid, number)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + number, printed
    assert "Interrupted with 0 of 3 seeds finished" in printed
    assert "Traceback" not in printed
    assert "Error" not in printed
    assert not any(map(is_running, pids))
    assert sorted(str(path.parent) for path in Path("run").rglob("checkpoint.pt")) == ["run/seed-0", "run/seed-1"]
    assert not Path("run/seed-2").exists()


def test_a_second_interrupt_ends_all_seeds_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    started: list[Any] = []
    make = experiments.SeedRun
    monkeypatch.setattr(
        experiments, "SeedRun", lambda *args, **options: started.append(make(*args, **options)) or started[-1]
    )
    monkeypatch.setattr(experiments, "wait", interrupt)
    code, printed = invoke(*words("max_epochs=100000"), "--seeds", 2, "--parallel", 2)
    assert code == 130
    assert "interrupted" in printed
    assert len(started) == 2
    assert not any(run.process.is_alive() for run in started)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--parallel", "2"], "seeds must be passed with parallel, got None"),
        (["--seeds", "2", "--set", "parallel=0"], "parallel must be a whole number from 1, got 0"),
        (["--seeds", "2", "--env", "x", "--set", "seeds=two"], "seeds must be a whole number"),
    ],
)
def test_unsuitable_numbers_of_seeds_are_rejected(arguments: list[str], sentence: str) -> None:
    code, printed = invoke(*words(), *arguments)
    assert code == 2
    assert sentence in printed


@pytest.mark.parametrize(
    ("algorithm", "env", "sentence"),
    [("dqn", "CartPole-v9", "CartPole"), ("dqn", "Pendulum-v1", "actions must be discrete for dqn")],
)
def test_an_unsuitable_environment_is_one_error_before_any_run(algorithm: str, env: str, sentence: str) -> None:
    code, printed = invoke(algorithm, env, "--seeds", 3)
    assert code == 2
    assert printed.count("Error") == 1
    assert sentence in printed
    assert not Path("runs").exists()


def test_a_damaged_status_and_a_single_run_are_rejected() -> None:
    Path("run").mkdir()
    config = 'algorithm = "dqn"\nsource = "CartPole-v1"\n'
    Path("run/train.toml").write_text(config + "seeds = 2\n")
    for text in ("{", "[1]"):
        Path("run/seeds.json").write_text(text)
        code, printed = invoke("--resume", "run")
        assert code == 2
        assert "'run/seeds.json' must be a JSON object with the status of each seed" in printed
    Path("run/train.toml").write_text(config)
    code, printed = invoke("--resume", "run", "--parallel", 2)
    assert code == 2
    assert "parallel must be omitted for 'run', which has a single run" in printed


def curve(steps: list[int], values: Any) -> LearningCurve:
    return LearningCurve("env_step", np.array(steps), np.array(values))


def test_runs_of_different_lengths_are_combined_where_they_overlap() -> None:
    runs = [{"update/loss": curve([0, 10, 20], [0.0, 1.0, 2.0])}, {"update/loss": curve([5, 15], [3.0, 5.0])}]
    combined = combine_curves(runs)
    assert combined["update/loss"].steps.tolist() == [5, 10, 15]
    assert combined["update/loss"].values.tolist() == [1.75, 2.5, 3.25]
    assert combine_curves([{"update/loss": curve([0, 1], [0, 1])}, {"update/loss": curve([5], [3])}]) == {}


def test_spreads_times_and_figures_of_some_runs_are_omitted() -> None:
    names = ["info/update_step", "test/returns_stat/std", "test/collect_time", "update/train_time", RETURN]
    run = {name: curve([0], [1.0]) for name in names}
    assert list(combine_curves([run, run | {"update/more": curve([0], [1.0])}])) == [
        RETURN, f"{RETURN}/low", f"{RETURN}/high",
    ]  # fmt: skip


def test_an_interval_contains_the_mean_and_nan_remains_nan() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, (200, 3))
    low, high = bootstrap_interval(values, mean_of)
    error = 1.96 * values.std(0) / 200**0.5
    np.testing.assert_allclose(low, values.mean(0) - error, atol=0.05)
    np.testing.assert_allclose(high, values.mean(0) + error, atol=0.05)
    combined = combine_curves([{"update/loss": curve([0, 1], [1.0, np.nan])}] * 2)
    assert np.isnan(combined["update/loss/high"].values).tolist() == [False, True]


def test_the_interquartile_mean_is_a_trimmed_mean_from_four_runs_on() -> None:
    stats = pytest.importorskip("scipy.stats")
    for count in (4, 5, 8, 11):
        values = np.random.default_rng(count).normal(size=(count, 3))
        runs = [{RETURN: curve([0, 1, 2], row)} for row in values]
        combined = combine_curves(runs)
        # As rliable.metrics.aggregate_iqm
        np.testing.assert_allclose(combined[f"{RETURN}/iqm"].values, stats.trim_mean(values, 0.25))
        assert (combined[f"{RETURN}/iqm/low"].values <= combined[f"{RETURN}/iqm"].values).all()
        assert (combined[f"{RETURN}/iqm/high"].values >= combined[f"{RETURN}/iqm"].values).all()
    assert f"{RETURN}/iqm" not in combine_curves(runs[:3])
