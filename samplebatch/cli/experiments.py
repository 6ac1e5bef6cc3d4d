"""Training with several seeds: supervision of the runs, and means and intervals of their metrics."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from samplebatch.cli.curves import FACTS, LOG
from samplebatch.cli.report import check_picture
from samplebatch.cli.terminal import FAILED, Interruption, complain, guard, number, say
from samplebatch.cli.training import (
    Training,
    allow_imports,
    check_environment,
    new_folder,
    read_resumed,
    run_training,
    show_run,
    write_config,
)
from samplebatch.errors import ArgumentError, FormatError
from samplebatch.learn.checkpoint import FILE
from samplebatch.loggers.training_log import LearningCurve, TrainingLog, learning_curves
from samplebatch.storage.files import replacing
from samplebatch.transport.peers import ChildExit, begin_child, end_children, start_child, wait_for_exit

Floats = npt.NDArray[np.float64]

STATUS = "seeds.json"
"""File in the folder of an experiment with the status of each seed that ended."""
_FINISHED = "finished"
_RETURNS = "test/returns_stat/mean"
_LOOK_S = 0.2
"""Maximum seconds until a signal is handled."""
_GRACE_S = 5.0
_MAX_POINTS = 1000
"""Maximum number of points of a curve whose runs have different steps."""
_DRAWS = 2000
"""Bootstrap samples of an interval."""
_BLOCK = 100
"""Points whose samples are in memory at a time."""
_LEVEL = 95
"""Percentage of an interval."""
_MIN_QUARTILES = 4
"""Minimum number of runs whose lowest and highest quarter can be left out."""


def train_any(training: Training, folder: Path | None, *, plot: Path | None = None, allow_pickle: bool = False) -> int:
    """Train with one or several seeds in a new folder, and return the exit status; None selects the default folder."""
    if training.seeds is None:
        target = new_folder(training, folder, FILE)
        return run_training(training, target, is_resumed=False, plot=plot, allow_pickle=allow_pickle)
    target = new_folder(training, folder, STATUS)
    new_folder(training, target, FILE)
    return _run(training, target, plot=plot, is_resumed=False, allow_pickle=allow_pickle)


def resume_any(folder: Path, flags: Mapping[str, Any], *, plot: Path | None = None, allow_pickle: bool = False) -> int:
    """Resume the run, or all unfinished runs of an experiment, in a folder; return the exit status."""
    parallel = flags["parallel"]
    training = read_resumed(folder, {**flags, "parallel": None}, allow_pickle=allow_pickle)
    if training.seeds is not None:
        if parallel is not None:
            training = replace(training, parallel=parallel)
        return _run(training, folder, plot=plot, is_resumed=True, allow_pickle=allow_pickle)
    if parallel is not None:
        raise ArgumentError(f"parallel must be omitted for {str(folder)!r}, which has a single run, got {parallel}")
    return run_training(training, folder, is_resumed=True, plot=plot, allow_pickle=allow_pickle)


def _run(training: Training, folder: Path, *, plot: Path | None, is_resumed: bool, allow_pickle: bool = False) -> int:
    start = time.monotonic()
    allow_imports(training, allow_pickle=allow_pickle)
    if plot is not None:
        check_picture(plot)
    # Report an unsuitable environment once here, instead of once per seed in the child processes.
    check_environment(training)
    experiment = Experiment(training, folder, allow_pickle=allow_pickle)
    if is_resumed:
        experiment.load_status()
    else:
        write_config(training, folder)
        experiment.save_status()
    with Interruption(experiment.request_stop) as interruption:
        experiment.run()
    finished = experiment.finished
    if finished:
        write_combined([folder_of(folder, seed) for seed in finished], folder)
        show_run(folder, plot)
        _summarize(experiment, folder, time.monotonic() - start)
    if len(finished) == training.seeds:
        return 0
    for seed, how in experiment.failed.items():
        complain(f"seed {seed} {how}")
    if interruption.status:
        say(f"Interrupted with {len(finished)} of {training.seeds} seeds finished.", stderr=True)
    say(f"Resume with: samplebatch train --resume {folder} --allow-pickle", stderr=True)
    return interruption.status or FAILED


def _summarize(experiment: Experiment, folder: Path, seconds: float) -> None:
    curves = learning_curves(folder / LOG)
    result = ""
    if _RETURNS in curves:
        parts = []
        for name, title in ((_RETURNS, "mean return"), (f"{_RETURNS}/iqm", "interquartile mean")):
            if name in curves:
                mean, low, high = (float(curves[f"{name}{end}"].values[-1]) for end in ("", "/low", "/high"))
                parts.append(f"{title} {number(mean)}, {_LEVEL} % interval {number(low)} to {number(high)}")
        result = f" Last test: {'; '.join(parts)}."
    say(f"Trained {len(experiment.finished)} of {len(experiment.seeds)} seeds in {seconds:.0f} s.{result}")
    say(f"Wrote each run to {folder_of(folder, 'N')}, mean and interval of the metrics to {folder / LOG}")


def folder_of(folder: Path, seed: object) -> Path:
    """Return the folder of a seed's run.

    >>> folder_of(Path("runs"), 3).name
    'seed-3'
    """
    return folder / f"seed-{seed}"


class Experiment:
    """Training runs with several seeds, each in its own child process.

    - `training`, `folder`: options of the runs, and the parent folder, which contains one folder per seed.
    - `allow_pickle`: whether resumed runs may load pickled objects.

    Instance attributes:
    - `seeds`: seeds of all runs.
    - `failed`: description of how each failed run of this process ended, by seed.
    """

    def __init__(self, training: Training, folder: Path, *, allow_pickle: bool = False) -> None:
        self.seeds = range(training.seed, training.seed + (training.seeds or 1))
        self.failed: dict[int, str] = {}
        self._training, self._folder, self._allow_pickle = training, folder, allow_pickle
        self._finished: set[int] = set()
        self._stop_requested = False

    @property
    def finished(self) -> list[int]:
        """Seeds of complete runs, in ascending order."""
        return sorted(self._finished)

    def load_status(self) -> None:
        """Read the status of each run.

        Raises FormatError if the status file is damaged.
        """
        path = self._folder / STATUS
        try:
            status = json.loads(path.read_text())
            self._finished = {seed for seed in self.seeds if status.get(str(seed)) == _FINISHED}
        except (ValueError, AttributeError) as error:
            raise FormatError(f"{str(path)!r} must be a JSON object with the status of each seed: {error}") from error

    def save_status(self) -> None:
        """Write the status of each run that has ended."""
        status = dict.fromkeys(self.finished, _FINISHED) | self.failed
        with replacing(self._folder / STATUS) as file:
            file.write(json.dumps(status).encode())

    def request_stop(self) -> None:
        """Start no further runs, and request running processes to save and exit; callable in signal handlers."""
        self._stop_requested = True

    def run(self) -> None:
        """Execute all unfinished runs, at most `parallel` at a time, and wait until all runs have ended."""
        pending = [seed for seed in self.seeds if seed not in self._finished]
        limit = self._training.parallel or max(1, _processors() // (1 + self._training.workers))
        running: list[SeedRun] = []
        try:
            while running or (pending and not self._stop_requested):
                while pending and len(running) < limit and not self._stop_requested:
                    running.append(self._start(pending.pop(0)))
                wait([handle for run in running for handle in run.waits_on], _LOOK_S)
                if self._stop_requested:
                    for run in running:
                        run.request_stop()
                running = [run for run in running if not self._has_ended(run)]
        finally:
            end_children([run.process for run in running], _GRACE_S)

    def _start(self, seed: int) -> SeedRun:
        training = replace(self._training, seed=seed, seeds=None, parallel=None)
        return SeedRun(training, folder_of(self._folder, seed), allow_pickle=self._allow_pickle)

    def _has_ended(self, run: SeedRun) -> bool:
        for line in run.read_lines():
            say(f"seed {run.seed}: {line}")
        if run.process.is_alive():
            return False
        end, last_line = run.close()
        if last_line:
            say(f"seed {run.seed}: {last_line}")
        if end.status == 0:
            self._finished.add(run.seed)
        elif not self._stop_requested:
            self.failed[run.seed] = f"{end.how}{f'; {end.advice}' if end.advice else ''}"
        self.save_status()
        return True


class SeedRun:
    """Child process that trains with one seed, with a reader of the process's output.

    - `seed`, `process`: seed of the run, and the process.
    """

    def __init__(self, training: Training, folder: Path, *, allow_pickle: bool = False) -> None:
        self.seed = training.seed
        context = multiprocessing.get_context("spawn")
        self._output, output = context.Pipe(duplex=False)
        self._text = b""
        self._has_output, self._is_stopping = True, False
        try:
            args = (output, training, folder, allow_pickle)
            requirement = "options of a run must be plain values"
            self.process = start_child(context, train_seed, args, name=f"seed-{self.seed}", requirement=requirement)
        finally:
            output.close()

    @property
    def waits_on(self) -> list[Any]:
        """Objects that become ready when output is available or the process has exited."""
        return [self.process.sentinel, *([self._output] if self._has_output else [])]

    def request_stop(self) -> None:
        """Request the process to save a checkpoint and exit."""
        if not self._is_stopping:
            self._is_stopping = True
            self.process.terminate()

    def read_lines(self) -> list[str]:
        """Return the complete lines of output since the last call."""
        while self._has_output and self._output.poll(0):
            part = os.read(self._output.fileno(), 1 << 16)
            self._has_output = bool(part)
            self._text += part
        *lines, self._text = self._text.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> tuple[ChildExit, str]:
        """Release the exited process; return how the process ended, and the last line of output if incomplete."""
        end = wait_for_exit(self.process, _GRACE_S)
        self._output.close()
        self.process.close()
        return end, self._text.decode(errors="replace")


def train_seed(output: Connection, training: Training, folder: Path, allow_pickle: bool) -> None:
    """Train with one seed in this child process, or resume the run from its checkpoint; write the output to a pipe."""
    begin_child()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    # A pipe would be written in blocks.
    cast("Any", sys.stdout).reconfigure(line_buffering=True)
    is_resumed = (folder / FILE).exists()
    if not is_resumed:
        # The run was killed before its first checkpoint, and starts again.
        shutil.rmtree(folder, ignore_errors=True)
    status = guard(
        lambda: run_training(training, folder, is_resumed=is_resumed, shows_curves=False, allow_pickle=allow_pickle)
    )
    sys.stdout.flush()
    sys.exit(status)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Metrics over seeds


def write_combined(runs: Sequence[Path], folder: Path) -> None:
    """Write the log of an experiment, which contains the mean and interval of each learning metric over runs."""
    log = TrainingLog(folder / LOG)
    for name, curve in combine_curves([learning_curves(run / LOG) for run in runs]).items():
        scope, _, metric = name.partition("/")
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            log.write(f"{scope}/{curve.unit}", step, {metric: value})
    log.finalize()


def combine_curves(logs: Sequence[Mapping[str, LearningCurve]]) -> dict[str, LearningCurve]:
    """Compute, for each learning metric that exists in all runs, the mean and the interval over the runs.

    The curve `NAME` is the mean of a metric, and the curves `NAME/low` and `NAME/high` are the ends of its 95 %
    percentile bootstrap interval over runs. With four or more runs, `test/returns_stat/mean/iqm` is the interquartile
    mean, with an interval of the same kind.

    >>> curves = [
    ...     LearningCurve("update_step", np.array([1, 2]), np.array([loss, 2 * loss]))
    ...     for loss in (1.0, 3.0)
    ... ]
    >>> runs = [{"update/loss": curve} for curve in curves]
    >>> [(name, curve.values.tolist()) for name, curve in combine_curves(runs).items()]
    [('update/loss', [2.0, 4.0]), ('update/loss/low', [1.0, 2.0]),
     ('update/loss/high', [3.0, 6.0])]
    """
    combined: dict[str, LearningCurve] = {}
    for name, first in logs[0].items():
        if name.startswith(FACTS) or name.rpartition("/")[2] in ("std", "min", "max"):
            continue
        if not all(name in log for log in logs):
            continue
        steps, values = align_curves([log[name] for log in logs])
        if not len(steps):
            continue
        means = {"": mean_of}
        if name == _RETURNS and len(logs) >= _MIN_QUARTILES:
            means["/iqm"] = interquartile_mean
        for kind, mean in means.items():
            for end, curve in zip(
                ("", "/low", "/high"), (mean(values), *bootstrap_interval(values, mean)), strict=True
            ):
                combined[f"{name}{kind}{end}"] = LearningCurve(first.unit, steps, curve)
    return combined


def align_curves(curves: Sequence[LearningCurve]) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return common steps for all curves, shape (n,), and the values at these steps, shape (curves, n).

    Curves whose steps differ from each other are interpolated linearly, within the range common to all curves.

    >>> short = LearningCurve("env_step", np.array([0, 10]), np.array([0.0, 1.0]))
    >>> long = LearningCurve("env_step", np.array([5, 15]), np.array([2.0, 4.0]))
    >>> align_curves([short, long])
    (array([ 5, 10]), array([[0.5, 1. ],
           [2. , 3. ]]))
    """
    steps = curves[0].steps
    if all(np.array_equal(steps, curve.steps) for curve in curves):
        return steps, np.stack([curve.values for curve in curves])
    start, stop = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    steps = steps[(steps >= start) & (steps <= stop)]
    if len(steps) > _MAX_POINTS:
        steps = steps[np.linspace(0, len(steps) - 1, _MAX_POINTS).astype(np.intp)]
    return steps, np.stack([np.interp(steps, curve.steps, curve.values) for curve in curves])


def bootstrap_interval(values: Floats, mean: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return the ends of the 95 % percentile bootstrap interval of a mean over rows; each end has shape (points,).

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; the random draws are seeded.
    """
    draws = np.random.default_rng(0).integers(0, len(values), (len(values), _DRAWS))
    tail = (100 - _LEVEL) / 2
    blocks = np.array_split(values, -(-values.shape[1] // _BLOCK), axis=1)
    ends = [np.percentile(mean(block[draws]), (tail, 100 - tail), axis=0) for block in blocks]
    low, high = np.concatenate(ends, axis=1)
    return low, high


def mean_of(values: Floats) -> Floats:
    """Return the mean over the first axis."""
    mean: Floats = values.mean(0)
    return mean


def interquartile_mean(values: Floats) -> Floats:
    """Return the interquartile mean over the first axis, as rliable's `aggregate_iqm` does.

    The lowest and the highest quarter of the values are omitted.

    Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv:2108.13264).

    >>> float(interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])))
    5.5
    """
    quarter = len(values) // 4
    return mean_of(np.sort(values, axis=0)[quarter : len(values) - quarter])
