"""The learning benchmark runs, for every contestant that is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium")
from benchmarks.learning_curves import CONTESTANTS, Outcome, run_in_process, runs_of, smooth, table
from benchmarks.learning_tasks import TASKS


def test_every_run_is_of_a_task() -> None:
    pytest.importorskip("tianshou")
    pytest.importorskip("stable_baselines3")
    for who in CONTESTANTS:
        assert set(runs_of(who)) <= set(TASKS)
    assert set(runs_of("ours")) == set(TASKS)


def test_curves_are_smoothed_over_the_last_episodes() -> None:
    curve = [(10 * number, float(number)) for number in range(1, 41)]
    assert smooth(curve, np.array([5, 10, 400])).tolist() == [1.0, 1.0, 30.5]


def test_ratios_are_of_the_median_rates() -> None:
    runs = [Outcome(who, "ppo", 0, 100, seconds, 1.0, 2.0, []) for who, seconds in (("ours", 1.0), ("sb3", 2.0))]
    assert table(runs).splitlines()[-1].split()[-1] == "2.00"


@pytest.mark.long
@pytest.mark.parametrize("who", CONTESTANTS)
@pytest.mark.parametrize("name", ["ppo", "td3", "bc"])
def test_runs_learn_and_are_tried(who: str, name: str, tmp_path: Path) -> None:
    found = run_in_process(who, name, 0, 0.1)
    if found is None:
        pytest.skip("not installed, or without this task")
    assert found.steps >= TASKS[name].steps * 0.1
    assert np.isfinite(found.tried)
