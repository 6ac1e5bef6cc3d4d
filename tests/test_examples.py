"""The examples in docs/examples run, and learners improve in shortened runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore torch's number of threads, which an example changes."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["ppo_cartpole", pytest.param("dqn_cartpole", marks=pytest.mark.long)])
def test_learners_become_better_than_random_actions(script: str) -> None:
    pytest.importorskip("gymnasium")
    returned = runpy.run_path(str(EXAMPLES / f"{script}.py"))["main"](10_000, seed=0)
    assert returned > 50  # random actions bring 22


@pytest.mark.long
def test_two_policies_become_better_than_random_actions() -> None:
    pytest.importorskip("mpe2")
    trained, random = runpy.run_path(str(EXAMPLES / "ppo_speaker_listener.py"))["main"](16_000, seed=0)
    assert trained > random + 4


def test_two_processes_transfer_every_step() -> None:
    pytest.importorskip("gymnasium")
    steps = [int(actual) for actual in re.findall(r"(\d+) steps", run("two_processes.py"))]
    assert steps == list(range(200, 2001, 200))


def test_many_workers_send_every_step_and_receive_new_weights() -> None:
    pytest.importorskip("gymnasium")
    lines = run("many_workers.py", "--workers", "4", "--fragments", "3").splitlines()
    assert [int(line.split()[0]) for line in lines] == [200, 400, 600]
    assert all(re.search(r"by version (\d+) of \d+$", line) for line in lines)


def test_grpo_raises_the_reward_through_a_table_of_rows() -> None:
    lines = run("grpo.py", "--steps", "45").splitlines()
    rewards = [float(actual) for line in lines for actual in re.findall(r"reward (0\.\d+)", line)]
    assert [int(line.split()[0]) for line in lines] == [1, 21, 41, 45]
    assert rewards[0] < 0.12  # by chance
    assert rewards[-1] > 0.25
    # The capacity of the table bounds how old answers are.
    assert all(0 <= float(actual) <= 5 for line in lines for actual in re.findall(r"([\d.]+) versions behind", line))


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_examples_are_short(script: str) -> None:
    # GRPO has a model, workers, a judge and a learner, in lines that fit a page of the site.
    limit = 240 if script == "grpo.py" else 150
    assert len((EXAMPLES / script).read_text().splitlines()) < limit
