"""Learning curves and environment steps per second of our, Tianshou's and Stable-Baselines3's training loops.

Each run is a separate process with one torch thread. A run learns for a fixed number of environment steps; its policy
is then evaluated without exploration. Contestants alternate, so that other programs slow all contestants equally:

    python -m benchmarks.scripts learning_curves --seeds 3 --plot curves.png
    python -m benchmarks.scripts learning_curves ppo sac --only ours,sb3

A long measurement may be split into parts, whose results are merged afterwards:

    python -m benchmarks.scripts learning_curves ppo --json ppo.json
    python -m benchmarks.scripts learning_curves dqn --json dqn.json
    python -m benchmarks.scripts learning_curves --merge ppo.json dqn.json --plot curves.png
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.training.tasks import TASKS, Act, Curve, Task, play

CONTESTANTS = {"ours": "ours", "tianshou": "Tianshou", "sb3": "Stable-Baselines3", "cleanrl": "CleanRL's loop"}
LAST = 20
"""Number of training episodes at the end of a run whose returns are averaged."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    who: str
    task: str
    seed: int
    steps: int
    seconds: float
    trained: float
    """Mean return of the last training episodes."""
    tried: float
    """Mean return of the trained policy, without exploration."""
    curve: list[tuple[int, float]]


def runs_of(contestant: str) -> dict[str, Any]:
    """Return the run functions of a contestant by task name."""
    runs: dict[str, Any] = importlib.import_module(f"benchmarks.training.{contestant}").RUNS
    return runs


def run(contestant: str, name: str, seed: int, scale: float, data: str | None) -> Outcome:
    """Learn a task in this process for the fraction `scale` of its budget; `data` is the file of an offline task."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    task = replace(TASKS[name], steps=int(TASKS[name].steps * scale))
    if data is not None:
        task = replace(task, options={**task.options, "data": data})
    curve = Curve()
    learn = runs_of(contestant)[name](task, curve, seed)
    start = perf_counter()
    act = learn()
    seconds = perf_counter() - start
    trained = (
        float(np.mean([episode_return for _, episode_return in curve.points[-LAST:]])) if curve.points else float("nan")
    )
    tried = float(np.mean(_play(task, act)))
    return Outcome(contestant, name, seed, curve.steps, seconds, trained, tried, curve.points)


def _play(task: Task, act: Act) -> list[float]:
    if task.agents == 1:
        return play(task.make, act, task.episodes)
    from benchmarks.training.team import play_team

    return play_team(task.make, act, task.episodes)


def run_in_process(contestant: str, name: str, seed: int, scale: float, data: Path | None) -> Outcome | None:
    """Learn a task in a separate process; None if the contestant is not installed or cannot run the task."""
    code = "from benchmarks.scripts.learning_curves import child; child()"
    options = json.dumps([contestant, name, seed, scale, None if data is None else str(data)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, options],
        capture_output=True, text=True, env={**os.environ, "TQDM_DISABLE": "1"},
    )  # fmt: skip
    if done.returncode == _ABSENT:
        return None
    if done.returncode:
        raise RuntimeError(f"{contestant} did not learn {name}: {done.stderr[-2000:]}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


_ABSENT = 3


def child() -> None:
    """Run the task that the last argument describes, and print the outcome on the last line."""
    contestant, name, *options = json.loads(sys.argv[-1])
    with redirect_stdout(sys.stderr), redirect_stderr(open(os.devnull, "w")):
        try:
            missing = name not in runs_of(contestant)
            outcome = None if missing else run(contestant, name, *options)
        except ModuleNotFoundError:
            sys.exit(_ABSENT)
    if outcome is None:
        sys.exit(_ABSENT)
    print(json.dumps(asdict(outcome)))


def smooth(curve: Sequence[tuple[int, float]], at: Any) -> Any:
    """Return the mean return of the last training episodes before each of the given environment steps."""
    steps, returns = np.array(curve).T
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    ends = np.maximum(np.searchsorted(steps, at, side="right"), 1)
    starts = np.maximum(ends - LAST, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def merge(paths: Sequence[Path]) -> list[Outcome]:
    """Read outcomes from files; if several files contain a run, use the last file."""
    runs = [Outcome(**fields) for path in paths for fields in json.loads(path.read_text())]
    return list({(run.who, run.task, run.seed): run for run in runs}.values())


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot the learning curves: the mean over the seeds, and the range from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in TASKS if any(outcome.task == name and outcome.curve for outcome in outcomes)]
    figure, all_axes = pyplot.subplots(1, len(names), figsize=(4 * len(names), 3), squeeze=False)
    for axes, name in zip(all_axes[0], names, strict=True):
        at = np.linspace(0, TASKS[name].steps, 60)[1:]
        for contestant, label in CONTESTANTS.items():
            selected = [outcome for outcome in outcomes if (outcome.task, outcome.who) == (name, contestant)]
            runs = [smooth(outcome.curve, at) for outcome in selected]
            if runs:
                (line,) = axes.plot(at, np.mean(runs, 0), label=label)
                axes.fill_between(at, np.min(runs, 0), np.max(runs, 0), alpha=0.2, color=line.get_color())
        axes.set(title=name, xlabel="environment steps")
    all_axes[0][0].set_ylabel("return of training episodes")
    all_axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def table(outcomes: Sequence[Outcome]) -> str:
    """Format one line per task and contestant: returns over the seeds, steps per second, and our relative speed.

    Training returns are means of the last episodes before a quarter, half, three quarters and the end of the budget.
    """
    quarters = " ".join(f"{f'{percent} %':>8}" for percent in (25, 50, 75))
    heading = f"{'task':10} {'contestant':18} {quarters} {'training return':>20} {'evaluation':>20}"
    lines = [f"{heading} {'steps/s':>8} {'ours/it':>8}"]
    for name in TASKS:
        rates = {}
        for contestant in CONTESTANTS:
            selected = [outcome for outcome in outcomes if (outcome.task, outcome.who) == (name, contestant)]
            if not selected:
                continue
            rates[contestant] = float(np.median([run.steps / run.seconds for run in selected]))
            spreads = []
            for values in ([run.trained for run in selected], [run.tried for run in selected]):
                # Offline runs have no training episodes.
                spreads.append("-" if np.isnan(values).all() else f"{np.mean(values):9.1f} +- {np.std(values):7.1f}")
            ratio = f"{rates['ours'] / rates[contestant]:8.2f}" if "ours" in rates and contestant != "ours" else ""
            cells = f"{name:10} {CONTESTANTS[contestant]:18} {_quarters(selected)} {spreads[0]:>20} {spreads[1]:>20}"
            lines.append(f"{cells} {rates[contestant]:8.0f} {ratio}")
    return "\n".join(lines)


def _quarters(outcomes: Sequence[Outcome]) -> str:
    """Format the training returns at a quarter, half and three quarters of the budget, averaged over the runs."""
    runs = [smooth(run.curve, np.array([0.25, 0.5, 0.75]) * run.steps) for run in outcomes if run.curve]
    return " ".join(f"{value:8.1f}" for value in np.mean(runs, 0)) if runs else f"{'-':>8} {'-':>8} {'-':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts learning_curves")
    parser.add_argument("tasks", nargs="*", help=f"any of: {', '.join(TASKS)}; all by default")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the budgets of environment steps")
    parser.add_argument("--plot", type=Path, help="image file to write the curves to")
    parser.add_argument("--json", type=Path, help="file to store the outcomes in; runs in the file are not repeated")
    parser.add_argument(
        "--data", type=Path, help="folder to store the data of offline tasks in; existing files are reused"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="JSON", help="run nothing; merge the outcomes of these files"
    )
    options = parser.parse_args()
    outcomes = merge(options.merge) if options.merge else learn_all(options)
    print(table(outcomes))
    if options.plot:
        draw(outcomes, options.plot)


def learn_all(options: argparse.Namespace) -> list[Outcome]:
    """Run the requested tasks that the outcome file does not contain; append each outcome to the file."""
    outcomes = merge([options.json]) if options.json and options.json.exists() else []
    with tempfile.TemporaryDirectory(prefix="samplebatch-learning-") as folder:
        learn_rest(options, outcomes, options.data or Path(folder))
    return outcomes


def learn_rest(options: argparse.Namespace, outcomes: list[Outcome], folder: Path) -> None:
    """Execute the requested runs that are missing from `outcomes` and append them; offline data is in `folder`."""
    for seed in range(options.seeds):
        for name in options.tasks or TASKS:
            for contestant in options.only.split(","):
                if any((run.who, run.task, run.seed) == (contestant, name, seed) for run in outcomes):
                    continue
                outcome = run_in_process(contestant, name, seed, options.scale, write_data(name, folder))
                if outcome is None:
                    continue
                outcomes.append(outcome)
                message = f"{name} {contestant} {seed}: {outcome.trained:.1f}, {outcome.seconds:.0f} s"
                print(message, file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps([asdict(run) for run in outcomes]))


def write_data(name: str, folder: Path) -> Path | None:
    """Write the data of an offline task unless the file exists; return the file, or None for other tasks."""
    from benchmarks.training.data import WRITERS

    if name not in WRITERS:
        return None
    path = folder / f"{name}.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[name](path)
    return path
