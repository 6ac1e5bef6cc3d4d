"""The learning benchmark runs, for every contestant that is installed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium")
from benchmarks.scripts.learning_curves import (
    CONTESTANTS,
    Outcome,
    merge,
    run_in_process,
    runs_of,
    smooth,
    table,
    write_data,
)
from benchmarks.training.data import write_replay
from benchmarks.training.tasks import TASKS, Curve
from samplebatch import load


def test_every_run_is_of_a_task() -> None:
    pytest.importorskip("tianshou")
    pytest.importorskip("stable_baselines3")
    for contestant in CONTESTANTS:
        assert set(runs_of(contestant)) <= set(TASKS)
    assert set(runs_of("ours")) == set(TASKS)


def test_curves_are_smoothed_over_the_last_episodes() -> None:
    curve = [(10 * number, float(number)) for number in range(1, 41)]
    assert smooth(curve, np.array([5, 10, 400])).tolist() == [1.0, 1.0, 30.5]


def test_ratios_are_of_the_median_rates() -> None:
    runs = [
        Outcome(contestant, "ppo", 0, 100, seconds, 1.0, 2.0, [])
        for contestant, seconds in (("ours", 1.0), ("sb3", 2.0))
    ]
    assert table(runs).splitlines()[-1].split()[-1] == "2.00"


def test_learning_from_data_has_no_return_of_training_episodes() -> None:
    line = table([Outcome("ours", "bc", 0, 100, 1.0, float("nan"), 2.0, [])]).splitlines()[-1]
    assert line.split() == ["bc", "ours", *["-"] * 4, "2.0", "+-", "0.0", "100"]


def test_results_of_files_are_merged_and_the_last_of_a_run_is_used(tmp_path: Path) -> None:
    first = Outcome("ours", "ppo", 0, 100, 1.0, 1.0, 2.0, [(5, 1.0)])
    other, again = replace(first, task="dqn"), replace(first, tried=3.0)
    for name, outcomes in (("one", [first, other]), ("two", [again])):
        (tmp_path / name).write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    actual = merge([tmp_path / "one", tmp_path / "two"])
    assert [(item.task, item.tried) for item in actual] == [("ppo", 3.0), ("dqn", 2.0)]


def test_agents_of_a_team_count_as_one_environment() -> None:
    pytest.importorskip("mpe2")
    from benchmarks.training.team import seats

    curve = Curve()
    agents = seats(replace(TASKS["mappo"], envs=2), curve, seed=0)
    assert len(agents) == 6
    for agent in agents:
        agent.send(None)
    first = [agent.receive()[0] for agent in agents]
    assert not np.array_equal(first[0], first[3]), "environments have seeds of their own"
    total = np.zeros(6)
    for _ in range(25):
        for agent in agents:
            agent.send(1)
        actual = [agent.receive() for agent in agents]
        total += [step[1] for step in actual]
    assert [step[2] or step[3] for step in actual] == [True] * 6
    assert curve.steps == 50
    np.testing.assert_allclose([total[:3].mean(), total[3:].mean()], [points[1] for points in curve.points])


def test_data_are_written_once_and_the_same_each_time(tmp_path: Path) -> None:
    first = write_data("bc", tmp_path / "one")
    assert first is not None
    written = first.stat().st_mtime_ns
    assert write_data("bc", tmp_path / "one") == first
    assert first.stat().st_mtime_ns == written
    again = write_data("bc", tmp_path / "two")
    assert again is not None
    for name in ("obs", "actions", "rewards", "terminateds", "truncateds", "new_obs"):
        np.testing.assert_array_equal(load(first)[name], load(again)[name])
    assert write_data("ppo", tmp_path) is None


def test_the_replay_of_a_run_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_replay(tmp_path / f"{name}.parquet", steps=520)
    first, second = (load(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert first.count == 520
    assert np.abs(first["act"]).max() <= 1.0
    for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.long
@pytest.mark.parametrize("contestant", CONTESTANTS)
@pytest.mark.parametrize("name", ["ppo", "td3", "bc", "mappo"])
def test_runs_learn_and_are_evaluated(
    contestant: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if contestant == "tianshou":
        # It compiles functions that are called for a second.
        monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    actual = run_in_process(contestant, name, 0, 0.1, write_data(name, tmp_path))
    if actual is None:
        pytest.skip("not installed, or without this task")
    assert actual.steps >= TASKS[name].steps * 0.1
    assert np.isfinite(actual.tried)
