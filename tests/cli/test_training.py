"""`samplebatch train`: options, what a run leaves behind, interruptions and resuming."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from samplebatch import Collector, Dataset, VectorReplayBuffer, load
from samplebatch.cli import application
from samplebatch.cli.recipes import RECIPES, complete_settings
from samplebatch.cli.training import _fill, make_trainer, read_training
from samplebatch.errors import ArgumentError
from samplebatch.learn import learning_curves

SHORT = ["max_epochs=2", "epoch_num_steps=40", "test_step_num_episodes=1", "num_envs=2"]
QUICK = [*SHORT, "start_steps=20", "collection_step_num_env_steps=10", "batch_size=8", "hidden_sizes=[8]"]


@pytest.fixture(autouse=True)
def _one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs lie in a folder of the test's, and keep threads as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def assignments(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_a_run_learns_shows_its_curve_and_leaves_its_folder(tmp_path: Path) -> None:
    code, printed = invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--plot", "curve.png")
    assert code == 0, printed
    assert "epoch 2: updates 8, env steps 80" in printed
    assert "test/returns_stat/mean over env_step" in printed
    assert "Trained for 80 environment steps and 8 updates" in printed
    run = tmp_path / "runs" / "dqn-CartPole-v1"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint.pt", "log", "policy.pt", "train.toml"]
    assert learning_curves(run / "log")["test/returns_stat/mean"].steps.tolist() == [0, 40, 80]
    assert (tmp_path / "curve.png").exists()


def test_the_policy_of_a_run_can_collect() -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    code, printed = invoke(
        "collect", "CartPole-v1", "--policy", "run/policy.pt", "--allow-pickle", "--steps", 20, "--out", "a.arrow"
    )
    assert code == 0, printed
    assert len(load("a.arrow")) == 20


def test_a_folder_with_a_training_is_not_begun_again() -> None:
    words = ["train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run"]
    assert invoke(*words)[0] == 0
    code, printed = invoke(*words)
    assert code == 2
    assert "'run' must not hold a training already; go on by --resume run, or give another --out" in printed


ENVIRONMENTS = {
    "ppo": "Pendulum-v1",
    "reinforce": "CartPole-v1",
    "dqn": "CartPole-v1",
    "td3": "Pendulum-v1",
    "sac": "Pendulum-v1",
}
DATA = {"bc": "CartPole-v1", "bcq": "CartPole-v1", "cql": "Pendulum-v1"}


def test_every_algorithm_is_named_by_the_help_and_tried_below() -> None:
    printed = invoke("train", "--help")[1]
    assert all(re.search(rf"\b{name}\b", printed) for name in RECIPES)
    assert set(ENVIRONMENTS) | set(DATA) == set(RECIPES)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_algorithm_learns_in_an_environment(name: str, tmp_path: Path) -> None:
    known = complete_settings(name, {})
    settings = [text for text in [*QUICK, "epoch_num_steps=20"] if text.partition("=")[0] in known]
    code, printed = invoke("train", name, ENVIRONMENTS[name], *assignments(settings), "--out", tmp_path / name)
    assert code == 0, printed
    assert (tmp_path / name / "policy.pt").exists()


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("form", ["rows.arrow", "rows.parquet", "dataset"])
def test_every_offline_algorithm_learns_from_data(name: str, form: str, tmp_path: Path) -> None:
    rows: Any = Collector("random", DATA[name], num_envs=2, seed=1, infos=False).collect(n_step=60).batch
    if form == "dataset":
        Dataset(form).append(rows)
    else:
        rows.save(form)
    settings = assignments(
        ["max_epochs=1", "epoch_num_steps=2", "batch_size=8", "num_envs=1", "test_step_num_episodes=1"]
    )
    with_tests = ["--env", DATA[name]] if form == "rows.arrow" else []
    code, printed = invoke("train", name, form, *with_tests, *settings, "--out", "run")
    assert code == 0, printed
    assert "Trained for 2 updates" in printed
    assert ("Best mean return of a test" in printed) == bool(with_tests)
    assert (tmp_path / "run" / "policy.pt").exists()


def test_a_replay_buffer_is_learned_from() -> None:
    buffer = VectorReplayBuffer(100, 2)
    Collector("random", "CartPole-v1", buffer, num_envs=2, seed=1).collect(n_step=60)
    buffer.save("buffer.arrow")
    code, printed = invoke("train", "bc", "buffer.arrow", *assignments(["max_epochs=1", "epoch_num_steps=2"]))
    assert code == 0, printed


@pytest.mark.parametrize("form", ["rows.arrow", "dataset"])
def test_data_of_another_environment_than_that_of_the_tests_are_refused(form: str, tmp_path: Path) -> None:
    rows: Any = Collector("random", "CartPole-v1", num_envs=2, seed=1, infos=False).collect(n_step=20).batch
    if form == "dataset":
        Dataset(form).append(rows)
    else:
        rows.save(form)
    code, printed = invoke("train", "bc", form, "--env", "Pendulum-v1", "--out", "run")
    assert code == 2
    assert "column 'obs' must have elements of shape (3,), as in 'Pendulum-v1', got (4,)" in printed
    assert not (tmp_path / "run").exists()


def test_workers_collect_with_the_newest_weights() -> None:
    code, printed = invoke("train", "dqn", "CartPole-v1", "--workers", 1, *assignments(QUICK), "--out", "run")
    assert code == 0, printed
    assert "Trained for 80 environment steps" in printed


@pytest.mark.parametrize("workers", [0, 1])
def test_random_steps_come_first_whoever_collects_the_others(workers: int, tmp_path: Path) -> None:
    flags = {"algorithm": "dqn", "source": "CartPole-v1", "workers": workers}
    training = read_training(None, flags, QUICK)
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(training, tmp_path, stack)
        _fill(training, trainer)
        buffer = trainer.params.training_collector.buffer
        assert len(buffer) == 20
        assert len(buffer.unfinished_index()) == (0 if workers else 2)
        trainer.run()
        assert len(buffer) == 100


def test_settings_of_a_file_yield_to_flags_and_those_to_assignments(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('algorithm = "dqn"\nsource = "CartPole-v1"\nseed = 1\nlr = 0.1\ngamma = 0.5\n')
    found = read_training(tmp_path / "mine.toml", {"seed": 2, "workers": None}, ["lr=1", "hidden_sizes=[3]"])
    assert (found.algorithm, found.source, found.seed, found.workers) == ("dqn", "CartPole-v1", 2, 0)
    assert [found.settings[name] for name in ("lr", "gamma", "hidden_sizes", "num_envs")] == [1.0, 0.5, [3], 8]
    (tmp_path / "again.toml").write_text(found.as_toml())
    assert read_training(tmp_path / "again.toml", {}, ()) == found


def test_settings_are_printed_as_a_file_can_have_them() -> None:
    code, printed = invoke("train", "sac", "--settings")
    assert code == 0
    assert complete_settings("sac", tomllib.loads(printed)) == complete_settings("sac", {})
    listed = invoke("train", "--settings")[1]
    assert [line.partition(":")[0] for line in listed.splitlines()] == list(RECIPES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dpn", "CartPole-v1"], "there is no algorithm 'dpn'; did you mean 'dqn'?"),
        (["dqn", "CartPole-v1", "--set", "gama=1"], "dqn has no setting 'gama'; did you mean 'gamma'?"),
        (["dqn", "CartPole-v1", "--set", "lr"], "--set must be given NAME=VALUE, got 'lr'"),
        (["dqn", "CartPole-v1", "--set", "num_envs=many"], "setting 'num_envs' must be of type int, got str"),
        (["dqn", "CartPole-v1", "--set", "batch_size=0"], "batch_size must be a whole number from 1, got 0"),
        (["dqn"], "source must be given, as an argument or in the file"),
        (["sac", "CartPole-v1"], "sac must be given continuous actions, got Discrete(2)"),
        (["dqn", "Pendulum-v1"], "dqn must be given discrete actions, got Box"),
        (["ppo", "CartPole-v1", "--set", "lr=-1"], "lr must be a number above 0, got -1.0"),
        (["--config", "tables.toml"], "'tables.toml' must have every setting as NAME = VALUE, got a table [settings]"),
        (["dqn", "Cartpole-v1"], "CartPole-v1"),
        (["dqn", "mpe2/simple_spread_v3"], "environment 'mpe2/simple_spread_v3' must be of one agent to be trained in"),
        (["bc", "nothing.arrow"], "No such file or folder to learn from: 'nothing.arrow'"),
        (["--resume", "nowhere"], "No such file or directory: 'nowhere/train.toml'"),
        (["--config", "broken.toml"], "'broken.toml' must be a TOML file: "),
        (["dqn", "--resume", "run"], "the folder has all options"),
    ],
)
def test_options_are_refused_in_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("a = = 1")
    (tmp_path / "tables.toml").write_text('algorithm = "ppo"\n[settings]\nlr = 1.0')
    code, printed = invoke("train", *words)
    assert code == 2
    assert sentence in printed
    assert not (tmp_path / "runs").exists()


def test_a_setting_that_is_none_by_default_takes_any_value() -> None:
    assert complete_settings("dqn", {"huber_loss_delta": 1.0})["huber_loss_delta"] == 1.0
    with pytest.raises(ArgumentError, match="must be of type list"):
        complete_settings("dqn", {"hidden_sizes": 3})


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    long = [*QUICK, "max_epochs=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "samplebatch", "train", "dqn", "CartPole-v1", *assignments(long), "--out", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 2"):
        pass
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "Go on with: samplebatch train --resume run --allow-pickle" in complaints
    steps = int(re.search(r"Interrupted after (\d+) environment steps", complaints)[1])  # type: ignore[index]
    config = tmp_path / "run" / "train.toml"
    config.write_text(config.read_text().replace("max_epochs = 100000", f"max_epochs = {steps // 40 + 2}"))
    code, printed = invoke("train", "--resume", "run")
    assert code == 1
    assert "its writer chose; if you trust who wrote it, add --allow-pickle" in " ".join(printed.split())
    code, printed = invoke("train", "--resume", "run", "--allow-pickle")
    assert code == 0, printed
    assert "Resumed in epoch" in printed
    assert f"Trained for {(steps // 40 + 2) * 40} environment steps" in printed
    assert learning_curves("run/log")["info/update_step"].steps.tolist() == list(range(1, steps // 40 + 3))
