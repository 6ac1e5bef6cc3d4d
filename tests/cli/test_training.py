"""`samplebatch train`: options, what a run leaves behind, interruptions and resuming."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner

from samplebatch import Collector, Dataset, VectorReplayBuffer, load
from samplebatch.cli import application
from samplebatch.cli.recipes import RECIPES, complete_settings
from samplebatch.cli.terminal import Interruption
from samplebatch.cli.training import _fill, choose_storage, make_trainer, read_training
from samplebatch.errors import ArgumentError
from samplebatch.learn import learning_curves
from samplebatch.learn.checkpoint import read_checkpoint
from samplebatch.rollout import load_policy
from tests.optional import torch

SHORT = ["max_epochs=2", "epoch_num_steps=40", "test_step_num_episodes=1", "num_envs=2"]
QUICK_PPO = [*SHORT, "collection_step_num_env_steps=20", "batch_size=20"]
QUICK = [*SHORT, "start_steps=20", "collection_step_num_env_steps=10", "batch_size=8", "hidden_sizes=[8]"]


@pytest.fixture(autouse=True)
def _one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write runs to the test's folder, and restore the number of threads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def assignments(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_a_run_learns_prints_its_curve_and_writes_its_folder(tmp_path: Path) -> None:
    code, printed = invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--plot", "curve.png")
    assert code == 0, printed
    assert "epoch 2: updates 40, env steps 80" in printed
    assert "test/returns_stat/mean over env_step" in printed
    assert "Trained for 80 environment steps and 40 gradient steps" in printed
    run = tmp_path / "runs" / "dqn-CartPole-v1"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint.pt", "log", "policy.pt", "train.toml"]
    assert learning_curves(run / "log")["test/returns_stat/mean"].steps.tolist() == [0, 40, 80]
    assert (tmp_path / "curve.png").exists()


def test_a_normalized_run_saves_a_policy_with_statistics_and_is_resumed() -> None:
    words = ["train", "ppo", "CartPole-v1", *assignments(QUICK_PPO), "--normalize", "--out", "run"]
    code, printed = invoke(*words)
    assert code == 0, printed
    assert "normalize = true" in Path("run/train.toml").read_text()
    policy = torch.load("run/policy.pt", weights_only=False)
    assert policy.obs_rms.shape == (4,)
    state = read_checkpoint(Path("run"), allow_pickle=True)["parts"]
    assert state["algorithm"]["policy.obs_rms.count"] == state["algorithm"]["rew_rms.count"] >= 80
    assert invoke("train", "--resume", "run", "--allow-pickle")[0] == 0


@pytest.mark.parametrize(("name", "env"), [("dqn", "CartPole-v1"), ("sac", "Pendulum-v1"), ("ddpg", "Pendulum-v1")])
def test_a_normalized_off_policy_run_counts_its_steps(name: str, env: str) -> None:
    code, printed = invoke("train", name, env, *assignments(QUICK), "--normalize", "--out", "run")
    assert code == 0, printed
    state = read_checkpoint(Path("run"), allow_pickle=True)["parts"]
    assert state["algorithm"]["policy.obs_rms.count"] == len(state["buffer"]["table"]["columns"]["columns"][0]) > 0


def test_the_policy_of_a_run_can_collect() -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    code, printed = invoke(
        *("collect", "CartPole-v1", "--policy", "run/policy.pt", "--allow-pickle"),
        *("--workers", 1, "--steps", 20, "--out", "a.arrow"),
    )
    assert code == 0, printed
    assert len(load("a.arrow")) == 20


def test_a_folder_with_a_run_is_not_overwritten() -> None:
    words = ["train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run"]
    assert invoke(*words)[0] == 0
    code, printed = invoke(*words)
    assert code == 2
    assert "'run' must not contain a run, got one; resume it with --resume run, or give another --out" in printed


ENVIRONMENTS = {
    "ppo": "Pendulum-v1",
    "a2c": "CartPole-v1",
    "impala": "CartPole-v1",
    "appo": "Pendulum-v1",
    "reinforce": "CartPole-v1",
    "dqn": "CartPole-v1",
    "c51": "CartPole-v1",
    "qrdqn": "CartPole-v1",
    "rainbow": "CartPole-v1",
    "td3": "Pendulum-v1",
    "ddpg": "Pendulum-v1",
    "dsac": "CartPole-v1",
    "sac": "Pendulum-v1",
}
DATA = {"bc": "CartPole-v1", "bcq": "CartPole-v1", "cql": "Pendulum-v1", "iql": "Pendulum-v1"}


def test_images_are_stored_once_and_compressed() -> None:
    settings = complete_settings("dqn", {})
    image = gymnasium.spaces.Box(0, 255, (84, 84, 3), np.uint8)
    assert choose_storage("Race-v0", image, settings) == {"ignore_obs_next": True, "compress": True}
    frames = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    stored = {"ignore_obs_next": True, "compress": True, "stack_num": 4, "save_only_last_obs": True}
    assert choose_storage("ALE/Breakout-v5", frames, settings) == stored
    typed = complete_settings("dqn", {"compress": False, "stack_num": 1})
    assert choose_storage("ALE/Breakout-v5", frames, typed) == {"ignore_obs_next": True, "compress": False}
    vector = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    assert choose_storage("CartPole-v1", vector, settings) == {}
    assert choose_storage("ALE/Breakout-v5", frames, complete_settings("ppo", {})) == {}


def test_frames_of_other_environments_are_not_stacked() -> None:
    code, printed = invoke("train", "dqn", "CartPole-v1", *assignments([*QUICK, "stack_num=4"]))
    assert code == 2
    assert "stack_num must be omitted for 'CartPole-v1', because only frames of Atari are stacked, got" in printed


def test_missing_atari_packages_are_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    code, printed = invoke("train", "dqn", "ALE/Breakout-v5", *assignments(QUICK))
    assert code == 2
    assert "'cv2' is not installed; install it with: pip install 'samplebatch[atari]'" in printed


@pytest.mark.parametrize(
    ("name", "workers"), [("dqn", 0), ("ppo", 0), ("rainbow", 0), pytest.param("rainbow", 1, marks=pytest.mark.long)]
)
def test_atari_is_learned_from_frames(name: str, workers: int, tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    words = ["max_epochs=1", "epoch_num_steps=20", "test_step_num_episodes=1", "num_envs=1", "batch_size=8"]
    words += ["collection_step_num_env_steps=10"]
    if name != "ppo":
        words += ["start_steps=20", "buffer_size=200", "random_shift=4"]
    arguments = ["train", name, "ALE/Breakout-v5", *assignments(words), "--workers", workers, "--out", "run"]
    code, printed = invoke(*arguments)
    assert code == 0, printed
    policy = load_policy(tmp_path / "run" / "policy.pt", allow_pickle=True)
    assert policy.observation_space.shape == (4, 84, 84)
    code, printed = invoke("train", "--resume", "run", "--allow-pickle")
    assert code == 0, printed


def test_every_algorithm_is_listed_by_the_help_and_tested_below() -> None:
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
        Dataset(form).extend(rows)
    else:
        rows.save(form)
    settings = assignments(
        ["max_epochs=1", "epoch_num_steps=2", "batch_size=8", "num_envs=1", "test_step_num_episodes=1"]
    )
    with_tests = ["--env", DATA[name]] if form == "rows.arrow" else []
    code, printed = invoke("train", name, form, *with_tests, *settings, "--out", "run")
    assert code == 0, printed
    assert "Trained for 2 gradient steps" in printed
    assert ("Best mean return of a test" in printed) == bool(with_tests)
    assert (tmp_path / "run" / "policy.pt").exists()


def test_an_algorithm_learns_from_a_saved_replay_buffer() -> None:
    buffer = VectorReplayBuffer(100, 2)
    Collector("random", "CartPole-v1", buffer, num_envs=2, seed=1).collect(n_step=60)
    buffer.save("buffer.arrow")
    code, printed = invoke("train", "bc", "buffer.arrow", *assignments(["max_epochs=1", "epoch_num_steps=2"]))
    assert code == 0, printed


@pytest.mark.parametrize("form", ["rows.arrow", "dataset"])
def test_data_that_do_not_match_the_test_environment_are_rejected(form: str, tmp_path: Path) -> None:
    rows: Any = Collector("random", "CartPole-v1", num_envs=2, seed=1, infos=False).collect(n_step=20).batch
    if form == "dataset":
        Dataset(form).extend(rows)
    else:
        rows.save(form)
    code, printed = invoke("train", "bc", form, "--env", "Pendulum-v1", "--out", "run")
    assert code == 2
    assert "column 'obs' must have rows of shape (3,), the shape in 'Pendulum-v1', got (4,)" in printed
    assert not (tmp_path / "run").exists()


def test_workers_collect_with_the_latest_weights() -> None:
    code, printed = invoke("train", "dqn", "CartPole-v1", "--workers", 1, *assignments(QUICK), "--out", "run")
    assert code == 0, printed
    assert "Trained for 80 environment steps" in printed


@pytest.mark.parametrize("workers", [0, 1])
def test_random_steps_are_first_for_every_collector(workers: int, tmp_path: Path) -> None:
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


def test_flags_override_a_file_and_assignments_override_flags(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('algorithm = "dqn"\nsource = "CartPole-v1"\nseed = 1\nlr = 0.1\ngamma = 0.5\n')
    actual = read_training(tmp_path / "mine.toml", {"seed": 2, "workers": None}, ["lr=1", "hidden_sizes=[3]"])
    assert (actual.algorithm, actual.source, actual.seed, actual.workers) == ("dqn", "CartPole-v1", 2, 0)
    assert [actual.settings[name] for name in ("lr", "gamma", "hidden_sizes", "num_envs")] == [1.0, 0.5, [3], 8]
    (tmp_path / "again.toml").write_text(actual.as_toml())
    assert read_training(tmp_path / "again.toml", {}, ()) == actual


def test_steps_are_those_of_the_entire_run() -> None:
    quick = ["start_steps=20", "collection_step_num_env_steps=10", "num_envs=2", "test_step_num_episodes=1"]
    words = ["train", "dqn", "CartPole-v1", *assignments(quick), "--out", "run"]
    code, printed = invoke(*words, "--steps", 130)
    assert code == 0, printed
    assert "Trained for 130 environment steps" in printed
    assert read_training(Path("run/train.toml"), {}, ()).settings["epoch_num_steps"] == 130


def test_the_steps_in_a_file_are_split_into_epochs_of_its_length(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'algorithm = "dqn"\nsource = "CartPole-v1"\nsteps = 1000\nepoch_num_steps = 300\n'
    )
    for flags, settings in (({}, (3, 334)), ({"steps": 100}, (1, 100))):
        actual = read_training(tmp_path / "mine.toml", flags, ()).settings
        assert (actual["max_epochs"], actual["epoch_num_steps"]) == settings
    with pytest.raises(ArgumentError, match="steps must be passed without max_epochs, which it sets"):
        read_training(tmp_path / "mine.toml", {}, ["max_epochs=3"])


def test_settings_are_printed_in_the_format_of_a_settings_file() -> None:
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
        (["dqn", "CartPole-v1", "--set", "lr"], "--set must have the form NAME=VALUE, got 'lr'"),
        (["dqn", "CartPole-v1", "--set", "num_envs=many"], "setting 'num_envs' must be of type int, got str"),
        (["dqn", "CartPole-v1", "--set", "batch_size=0"], "batch_size must be a whole number from 1, got 0"),
        (["dqn"], "source must be passed as an argument or in the file"),
        (["sac", "CartPole-v1"], "actions must be continuous for sac, got Discrete(2)"),
        (["dqn", "Pendulum-v1"], "actions must be discrete for dqn, got Box"),
        (["ppo", "CartPole-v1", "--set", "lr=-1"], "lr must be a number above 0, got -1.0"),
        (["--config", "tables.toml"], "'tables.toml' must have only settings NAME = VALUE, got a table [settings]"),
        (["dqn", "Cartpole-v1"], "CartPole-v1"),
        (["dqn", "mpe2/simple_spread_v3"], "environment 'mpe2/simple_spread_v3' must have one agent for training"),
        (["bc", "nothing.arrow"], "No such file or folder to learn from: 'nothing.arrow'"),
        (["--resume", "nowhere"], "No such file or directory: 'nowhere/train.toml'"),
        (["--config", "broken.toml"], "'broken.toml' must be a TOML file: "),
        (["--seed", "1", "--resume", "run"], "options must be omitted with --resume"),
        (["--steps", "9", "--resume", "run"], "options must be omitted with --resume"),
        (["ppo", "CartPole-v1", "--set", "steps=many"], "steps must be a whole number from 1, got 'many'"),
        (["--config", "list.toml"], "source must be a string, got a list"),
        (["--config", "list.toml", "--set", "source=CartPole-v1"], "workers must be a whole number from 0, got 'many'"),
    ],
)
def test_invalid_options_are_rejected_in_one_sentence(words: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("a = = 1")
    (tmp_path / "list.toml").write_text('algorithm = "ppo"\nsource = ["evil:make"]\nworkers = "many"')
    (tmp_path / "tables.toml").write_text('algorithm = "ppo"\n[settings]\nlr = 1.0')
    code, printed = invoke("train", *words)
    assert code == 2
    assert sentence in printed
    assert not (tmp_path / "runs").exists()


EVIL = """
import pathlib
pathlib.Path("imported").touch()
import gymnasium
def make():
    return gymnasium.make("CartPole-v1")
gymnasium.register("Evil-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""
"""A module that leaves a mark where it is imported, and makes an environment by a function and by an id."""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an importable module that creates a file; return the path of the file."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.delitem(gymnasium.registry, "Evil-v0", raising=False)
    return tmp_path / "imported"


def rename_environment(config: Path, name: str) -> None:
    """Replace the environment in a run's file, as another user with access to the folder could."""
    config.write_text(config.read_text().replace('"CartPole-v1"', f'"{name}"'))


@pytest.mark.parametrize("name", ["evil:make", "evil:Evil-v0", "evil/make", "evil.make", "evil:make-v0"])
def test_names_of_a_resumed_folder_are_not_imported(name: str, evil: Path) -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    rename_environment(Path("run/train.toml"), name)
    code, printed = invoke("train", "--resume", "run")
    assert code == 2
    assert f"source must be the id of a registered environment in 'run/train.toml', got '{name}'" in printed
    assert not evil.exists()


def test_resuming_imports_no_module_of_the_current_folder(evil: Path, tmp_path: Path) -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    rename_environment(Path("run/train.toml"), "evil:make")
    process = start("--resume", "run")
    _, complaints = process.communicate(timeout=120)
    assert (process.returncode, "imports a module" in complaints) == (2, True)
    assert not evil.exists()


def test_the_environment_of_tests_of_a_resumed_folder_is_not_imported(evil: Path) -> None:
    rows: Any = Collector("random", "CartPole-v1", seed=1, infos=False).collect(n_step=20).batch
    rows.save("evil.arrow")
    settings = assignments(["max_epochs=1", "epoch_num_steps=2", "batch_size=8", "test_step_num_episodes=1"])
    assert invoke("train", "bc", "evil.arrow", "--env", "CartPole-v1", *settings, "--out", "run")[0] == 0
    rename_environment(Path("run/train.toml"), "evil:make")
    code, printed = invoke("train", "--resume", "run")
    assert (code, "env must be the id of a registered environment" in printed) == (2, True), printed
    assert not evil.exists()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_of_a_registered_environment_is_resumed_without_unpickling(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train", "dqn", "CartPole-v1", *assignments(QUICK), "--workers", str(workers), "--out", "run")
    assert invoke(*words)[0] == 0
    config = Path("run/train.toml")
    config.write_text(config.read_text().replace("max_epochs = 2", "max_epochs = 3"))

    def refuse(*_: Any) -> None:
        raise AssertionError("an environment was unpickled")

    monkeypatch.setattr("samplebatch.env.environment_state.load_environment", refuse)
    code, printed = invoke("train", "--resume", "run")
    assert code == 0, printed
    assert "Environments begin new episodes: they are pickled, and --allow-pickle is not there" in printed
    assert "Trained for 120 environment steps" in printed
    assert learning_curves("run/log")["info/update_step"].steps.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", ["evil:make", "evil:Evil-v0"])
def test_names_of_a_file_of_options_are_not_imported(name: str, evil: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'algorithm = "dqn"\nsource = "{name}"\nmax_epochs = 1\n')
    code, printed = invoke("train", "--config", "mine.toml")
    assert (code, "repeat 'evil:" in printed) == (2, True), printed
    assert not evil.exists()
    words = assignments([*QUICK, "max_epochs=1", f"source={name}"])
    assert invoke("train", "--config", "mine.toml", *words, "--out", "run")[0] == 0
    assert evil.exists()


@pytest.mark.parametrize("words", [["--allow-pickle"], ["dqn", "evil:make", "--allow-pickle"]])
def test_names_of_a_resumed_folder_are_imported_with_permission(words: list[str], evil: Path) -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    rename_environment(Path("run/train.toml"), "evil:make")
    code, printed = invoke("train", "--resume", "run", *words)
    assert (code, evil.exists()) == (0, True), printed


def test_a_repeated_name_must_be_that_of_the_resumed_folder(evil: Path) -> None:
    assert invoke("train", "dqn", "CartPole-v1", *assignments(QUICK), "--out", "run")[0] == 0
    code, printed = invoke("train", "dqn", "evil:make", "--resume", "run")
    assert code == 2
    assert "source must be 'CartPole-v1', the value in 'run/train.toml', got 'evil:make'" in printed
    assert not evil.exists()


def test_a_setting_that_is_none_by_default_accepts_any_value() -> None:
    assert complete_settings("dqn", {"huber_loss_delta": 1.0})["huber_loss_delta"] == 1.0
    with pytest.raises(ArgumentError, match="must be of type list"):
        complete_settings("dqn", {"hidden_sizes": 3})


SIGNALS = [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]


def start(*words: str) -> subprocess.Popen[str]:
    """Start the command in a new process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "samplebatch", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "200"},
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Read the output of a process up to the first line with a prefix."""
    assert process.stdout is not None
    while not (printed := process.stdout.readline()).startswith(line):
        assert printed, process.communicate(timeout=120)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_a_checkpoint_and_reports_how_to_resume(number: signal.Signals, tmp_path: Path) -> None:
    long = [*QUICK, "max_epochs=100000"]
    process = start("dqn", "CartPole-v1", *assignments(long), "--out", "run")
    wait_for(process, "epoch 2")
    process.send_signal(number)
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 128 + number, complaints
    assert "Resume with: samplebatch train --resume run --allow-pickle" in complaints
    steps = int(re.search(r"Interrupted after (\d+) environment steps", complaints)[1])  # type: ignore[index]
    config = tmp_path / "run" / "train.toml"
    config.write_text(config.read_text().replace("max_epochs = 100000", f"max_epochs = {steps // 40 + 2}"))
    code, printed = invoke("train", "--resume", "run", "--allow-pickle")
    assert code == 0, printed
    assert "Resumed in epoch" in printed
    assert f"Trained for {(steps // 40 + 2) * 40} environment steps" in printed
    assert learning_curves("run/log")["info/update_step"].steps.tolist() == list(range(1, steps // 40 + 3))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_finish_their_step_after_a_signal_to_the_group(number: signal.Signals, tmp_path: Path) -> None:
    long = [*QUICK, "max_epochs=100000"]
    process = start("dqn", "CartPole-v1", "--workers", "2", *assignments(long), "--out", "run")
    wait_for(process, "epoch 1")
    # A batch system signals each process, and `timeout` sends two.
    os.killpg(process.pid, number)
    if number == signal.SIGTERM:
        os.killpg(process.pid, number)
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 128 + number, complaints
    assert "Traceback" not in complaints
    state = read_checkpoint("run", allow_pickle=True)
    assert f"Interrupted after {state['parts']['counters']['env_step']} environment steps" in complaints


def test_a_signal_before_the_first_epoch_saves_a_checkpoint(tmp_path: Path) -> None:
    training = read_training(None, {"algorithm": "dqn", "source": "CartPole-v1"}, QUICK)
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(training, tmp_path, stack)
        trainer.params.test_fn = lambda *_: signal.raise_signal(signal.SIGTERM)
        with Interruption(trainer.request_stop) as interruption:
            trainer.run()
    assert interruption.status == 143
    assert read_checkpoint(tmp_path, allow_pickle=True)["parts"]["counters"]["epoch"] == 0


LEAVING = """
import sys
import gymnasium
class Leaving(gymnasium.Wrapper):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps > 30:
            sys.exit(0)
        return super().step(action)
def make():
    return Leaving(gymnasium.make("CartPole-v1"))
"""
"""A module with an environment that ends the program as if all were well."""


def test_an_environment_that_exits_is_reported_as_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(tmp_path)
    code, printed = invoke("train", "dqn", "leaving:make", *assignments(QUICK), "--out", "run")
    assert (code, "sys.exit(0) was called in it" in printed) == (1, True), printed


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_exits_the_program_causes_an_error_status(workers: int, tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    process = start("dqn", "leaving:make", "--workers", str(workers), *assignments(QUICK), "--out", "run")
    printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 1, printed
    # A worker's end is seen by its status or by its stream, whichever is looked at first.
    observed = r"worker 0 .*(exited with status 0|closed its stream)" if workers else r"sys\.exit\(0\) was called in it"
    assert re.search(observed, complaints), complaints
    assert "Traceback" not in complaints


BROKEN = """
import gymnasium, numpy
class Broken(gymnasium.Wrapper):
    steps = 0
    def step(self, action):
        obs, *others = super().step(action)
        self.steps += 1
        return numpy.full_like(obs, numpy.nan) if self.steps == 25 else obs, *others
def make():
    return Broken(gymnasium.make("CartPole-v1"))
"""
"""A module with an environment of which one observation is NaN."""


def test_a_full_disk_ends_a_run_with_an_error_that_contains_the_path() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        code, printed = invoke(
            "train", "dqn", "CartPole-v1", *assignments([*QUICK, "hidden_sizes=[300, 300]"]), "--out", "run"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code != 0
    assert "File too large: 'run/policy.pt'" in printed
    assert "Traceback" not in printed


def test_one_observation_of_nan_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    code, printed = invoke("train", "dqn", "broken:make", *assignments(QUICK), "--out", "run")
    assert code == 1, printed
    sentence = (
        r"a loss must be finite, got nan in update \d+; columns with such values: ('\w+', )*'\w+'; add --set allow_nonf"
    )
    assert re.search(sentence, printed), printed
    words = assignments([*QUICK, "allow_nonfinite=true"])
    code, printed = invoke("train", "dqn", "broken:make", *words, "--out", "again")
    assert (code, "loss nan" in printed) == (0, True), printed


def test_actions_are_not_drawn_for_observations_of_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    words = assignments([*SHORT, "collection_step_num_env_steps=60"])
    code, printed = invoke("train", "ppo", "broken:make", *words, "--out", "run")
    assert code == 2, printed
    assert "observations must be finite for actions to be drawn" in printed


CHANCE = """
import random
from pathlib import Path
import gymnasium
class Chance(gymnasium.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        drawn = random.random()
        with Path("draws.txt").open("a") as file:
            file.write(f"{drawn}\\n")
        return obs, reward * drawn, terminated, truncated, info
def make():
    return Chance(gymnasium.make("CartPole-v1"))
"""
"""A module with an environment that draws from Python's own generator, which the state of the environment has not."""


@pytest.mark.long
def test_a_resumed_run_restores_the_state_of_the_random_module(tmp_path: Path) -> None:
    draws, runs = {}, {"whole": [3], "resumed": [2, 3]}
    for name, epochs in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "chance.py").write_text(CHANCE)
        for number, until in enumerate(epochs):
            words = ["dqn", "chance:make", *assignments([*QUICK, f"max_epochs={until}"]), "--out", "run"]
            if number:
                config = folder / "run" / "train.toml"
                config.write_text(config.read_text().replace("max_epochs = 2", "max_epochs = 3"))
                words = ["--resume", "run", "--allow-pickle"]
            with contextlib.chdir(folder):
                process = start(*words)
            assert process.communicate(timeout=120) is not None
            assert process.returncode == 0
        draws[name] = (folder / "draws.txt").read_text().split()
    assert draws["resumed"] == draws["whole"]
