"""Loggers of training metrics for files, services and the terminal."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from samplebatch.arguments import whole
from samplebatch.errors import require
from samplebatch.names import for_terminal
from samplebatch.rollout.statistics import PrintedAsDict

_WINDOW = 100
"""Window size of recent means."""

Metrics = dict[str, Any]
"""Numbers by name, in groups that may be nested: `{"loss": 0.5, "returns_stat": {"mean": 200.0}}`."""


def metrics_of(stats: Any) -> Metrics:
    """Return the metrics of a report by name, including nested summaries, but without arrays, batches and None.

    >>> import numpy as np
    >>> from samplebatch.rollout import CollectStats
    >>> found = metrics_of(
    ...     CollectStats.from_counts(
    ...         steps=6, time_s=2.0, returns=np.array([1.0]), lens=np.array([2])
    ...     )
    ... )
    >>> found["n_collected_steps"], found["returns_stat"]["mean"], "returns" in found
    (6, 1.0, False)
    """
    attributes = vars(stats) if hasattr(stats, "__dict__") else dict(stats)
    numbers: Metrics = {}
    for name, value in attributes.items():
        if isinstance(value, PrintedAsDict):
            numbers[name] = metrics_of(value)
        elif isinstance(value, Mapping):
            if nested := metrics_of(value):
                numbers[name] = nested
        elif isinstance(value, int | float):
            numbers[name] = value
    return numbers


def flatten_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Flatten nested metrics and join their names with `/`; values other than numbers are omitted.

    >>> flatten_metrics({"loss": 1, "returns_stat": {"mean": 2.5, "of": None}})
    {'loss': 1.0, 'returns_stat/mean': 2.5}
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": number for inner, number in flatten_metrics(value).items()}
        elif isinstance(value, int | float):
            flat[str(name)] = float(value)
    return flat


def short(value: Any) -> str:
    """Format a metric compactly.

    >>> short(12345), short(0.25), short(float("nan"))
    ('12345', '0.25', 'nan')
    """
    return str(value) if isinstance(value, int) else f"{value:.4g}"


@dataclass
class RecentMeans:
    """Moving averages of metrics for trainers, each over the metric's last 100 values; NaN if any of the 100 is NaN.

    >>> losses = RecentMeans()
    >>> losses.add({"loss": 1.0}), losses.add({"loss": 3.0}), losses.add({"loss": float("nan")})
    ({'loss': 1.0}, {'loss': 2.0}, {'loss': nan})
    """

    values: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add one value per metric, and return the moving averages of these metrics."""
        for name, value in metrics.items():
            self.values.setdefault(name, deque(maxlen=_WINDOW)).append(float(value))
        return {name: self.mean(name) for name in metrics}

    def mean(self, name: str) -> float:
        """Return the moving average of a metric; 0 if the metric has no value."""
        values = self.values.get(name)
        return sum(values) / len(values) if values else 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """Return the last 100 values of each metric, for `load_state_dict`."""
        return {name: list(values) for name, values in self.values.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore values from `state_dict`."""
        self.values = {name: deque(recent, maxlen=_WINDOW) for name, recent in state.items()}


UNITS = {"training": "env_step", "test": "env_step", "update": "update_step", "info": "epoch"}
"""Scopes of metrics and the step counter of each scope."""


_SAVED = ("save/epoch", "save/env_step", "save/update_step")
"""Names of metrics written by `save_data`."""


class Logger(ABC):
    """Base class of loggers, which trainers call with the metrics of collections, tests, updates and epochs.

    Names of metrics and step counters are the same as in Tianshou's loggers: `training/returns_stat/mean` at
    `training/env_step`.

    Parameters
    ----------
    training_interval, test_interval
        Minimum number of environment steps between two logged reports on collections, and between two logged reports on
        tests.
    update_interval
        Minimum number of update steps between two logged reports on updates.
    info_interval
        Minimum number of epochs between two logged reports on the training run.
    save_interval
        Number of epochs between two calls of the trainer's `save_checkpoint_fn`; None for a call in every epoch.

    Raises
    ------
    ArgumentError
        If an interval is not a positive integer.

    Examples
    --------
    >>> class Printing(Logger):
    ...     def write(self, step_type, step, data):
    ...         print(step_type, step, data)
    >>> Printing().log_test_data({"returns_stat": {"mean": 200.0}}, 1000)
    test/env_step 1000 {'returns_stat/mean': 200.0}
    """

    def __init__(
        self,
        training_interval: int = 1000,
        test_interval: int = 1,
        update_interval: int = 1000,
        info_interval: int = 1,
        save_interval: int | None = None,
    ) -> None:
        self._intervals = {
            "save": 1 if save_interval is None else whole("save_interval", save_interval, 1),
            "training": whole("training_interval", training_interval, 1),
            "test": whole("test_interval", test_interval, 1),
            "update": whole("update_interval", update_interval, 1),
            "info": whole("info_interval", info_interval, 1),
        }
        self._last_steps: dict[str, int] = {}

    @abstractmethod
    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write metrics.

        Parameters
        ----------
        step_type
            Scope of the metrics and step counter, such as `"training/env_step"`.
        step
            Value of the step counter.
        data
            Metrics by name; `/` separates groups.
        """

    def log_training_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a collection."""
        self._tell("training", log_data, step)

    def log_test_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of a test."""
        self._tell("test", log_data, step)

    def log_update_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of an update."""
        self._tell("update", log_data, step)

    def log_info_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Log the metrics of the training run, once per epoch."""
        self._tell("info", log_data, step)

    def save_data(
        self,
        epoch: int,
        env_step: int,
        update_step: int,
        save_checkpoint_fn: Callable[[int, int, int], Any] | None = None,
    ) -> None:
        """Save a checkpoint with a function if `save_interval` epochs have passed, and record the step numbers.

        Parameters
        ----------
        epoch, env_step, update_step
            Number of epochs, environment steps and update steps so far.
        save_checkpoint_fn
            Function that receives these three numbers; None to save nothing.
        """
        last = self._last_steps.get("save", 0)
        if save_checkpoint_fn is None or epoch - last < self._intervals["save"]:
            return
        self._last_steps["save"] = epoch
        save_checkpoint_fn(epoch, env_step, update_step)
        self.write("save/epoch", epoch, {"env_step": env_step, "update_step": update_step})

    def restore_data(self) -> tuple[int, int, int]:
        """Return the last checkpoint's epoch, environment steps and update steps, from which a resumed log continues.

        Loggers that cannot read their log return zeros.
        """
        epoch, env_step, update_step = self._saved_steps()
        if epoch:
            steps = {"save": epoch, "info": epoch, "training": env_step, "test": env_step, "update": update_step}
            self._last_steps |= steps
        return epoch, env_step, update_step

    def _saved_steps(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def _tell(self, scope: str, metrics: Mapping[str, Any], step: int) -> None:
        last = self._last_steps.get(scope)
        if last is None or step - last >= self._intervals[scope]:
            self._last_steps[scope] = step
            self.write(f"{scope}/{UNITS[scope]}", step, flatten_metrics(metrics))

    def flush(self) -> None:
        """Write all pending metrics to storage."""
        return None

    def finalize(self) -> None:
        """Close the log."""
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Flush, and return the state of the log for checkpoints."""
        self.flush()
        return {"last_steps": dict(self._last_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the log's state from `state_dict` when a training run is resumed."""
        self._last_steps = dict(state["last_steps"])


class TensorboardLogger(Logger):
    """Logger for TensorBoard, which writes with torch's `SummaryWriter`.

    Parameters
    ----------
    writer
        A `SummaryWriter`, or the folder for a new `SummaryWriter`.
    training_interval, test_interval, update_interval, info_interval, save_interval
        See `Logger`.
    write_flush
        Whether each report is flushed to disk immediately.

    Raises
    ------
    MissingExtraError
        If `tensorboard` is not installed.
    """

    def __init__(self, writer: Any, *intervals: Any, write_flush: bool = True, **options: Any) -> None:
        super().__init__(*intervals, **options)
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = writer if hasattr(writer, "add_scalar") else SummaryWriter(os.fspath(writer))
        self._flushes = write_flush

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write one scalar per metric, and one scalar for the step."""
        scope = step_type.partition("/")[0]
        self.writer.add_scalar(step_type, step, global_step=step)
        for name, value in data.items():
            self.writer.add_scalar(for_terminal(f"{scope}/{name}", 400), value, global_step=step)
        if self._flushes:
            self.flush()

    def _saved_steps(self) -> tuple[int, int, int]:
        """Read the newest values that `save_data` recorded from the event files."""
        events_module: Any = import_module("tensorboard.backend.event_processing.event_accumulator")

        self.flush()
        events = events_module.EventAccumulator(self.writer.log_dir, size_guidance={"scalars": 0})
        events.Reload()
        logged = set(events.Tags()["scalars"])
        if not logged.issuperset(_SAVED):
            return 0, 0, 0
        epoch, env_step, update_step = (int(events.Scalars(name)[-1].value) for name in _SAVED)
        return epoch, env_step, update_step

    def flush(self) -> None:
        """Write pending metrics to disk."""
        self.writer.flush()

    def finalize(self) -> None:
        """Close the writer."""
        self.writer.close()


class WandbLogger(Logger):
    """Logger for Weights & Biases.

    Parameters
    ----------
    run
        Result of `wandb.init`; by default, a run is started with the other arguments.
    project, name, run_id, config, mode
        Project, name, id, settings, and mode (`"online"` or `"offline"`) of the run. A resumed training run continues
        the Weights & Biases run with the same id.
    training_interval, test_interval, update_interval, info_interval, save_interval
        See `Logger`.

    Attributes
    ----------
    run
        The run.

    Raises
    ------
    MissingExtraError
        If `wandb` is not installed.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        **intervals: int,
    ) -> None:
        super().__init__(**intervals)
        if run is None:
            wandb: Any = require("wandb", "wandb")
            settings = None if config is None else dict(config)
            run = wandb.init(project=project, name=name, id=run_id, resume="allow", config=settings, mode=mode)
        self.run = run
        for scope, unit in UNITS.items():
            self.run.define_metric(f"{scope}/{unit}")
            self.run.define_metric(f"{scope}/*", step_metric=f"{scope}/{unit}")

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Log all metrics of a report as one row; the step is the x-axis."""
        scope = step_type.partition("/")[0]
        self.run.log({step_type: step} | {for_terminal(f"{scope}/{name}", 400): value for name, value in data.items()})

    def _saved_steps(self) -> tuple[int, int, int]:
        epoch, env_step, update_step = (int(self.run.summary.get(name) or 0) for name in _SAVED)
        return epoch, env_step, update_step

    def finalize(self) -> None:
        """Finish the run."""
        self.run.finish()


_MAX_LINE = 1000
"""Maximum characters per line."""
_PROGRESS_S = 10.0
"""Seconds between two lines of progress within an epoch."""


class Display:
    """Display of training as plain lines on standard output; base class of other displays.

    - `verbose`: whether to print lines.
    - `progress_s`: seconds between lines of progress within an epoch; None for no such lines.
    """

    def __init__(self, *, verbose: bool, progress_s: float | None = None) -> None:
        self._verbose, self._progress_s = verbose, progress_s
        self._epoch = self._total = 0
        self._last_line_s = time.monotonic()

    def begin(self, epoch: int, done: int, total: int) -> None:
        """Start the display of an epoch."""
        self._epoch, self._total = epoch, total

    def advance(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Display the newest metrics, and the number of completed steps in the epoch."""
        if self._progress_s is None or time.monotonic() - self._last_line_s < self._progress_s or done >= self._total:
            return
        listed = ", ".join(f"{name} {short(value)}" for name, value in metrics.items())
        self.say(f"epoch {self._epoch}: {done}/{self._total}, {listed}")

    def close(self) -> None:
        """Restore the terminal."""

    def say(self, line: str) -> None:
        """Print a line."""
        self._last_line_s = time.monotonic()
        if self._verbose:
            print(for_terminal(line, _MAX_LINE), flush=True)


class Bar(Display):
    """Progress bar of an epoch with the newest metrics, rendered by rich."""

    def __init__(self, *, verbose: bool) -> None:
        super().__init__(verbose=verbose)
        rich = require("rich.progress", "cli")
        columns = (
            rich.TextColumn("epoch {task.fields[epoch]}"),
            rich.BarColumn(bar_width=None),
            rich.TextColumn("{task.completed}/{task.total}  {task.fields[metrics]}", markup=False),
            rich.TimeRemainingColumn(),
        )
        self._progress = rich.Progress(*columns, transient=True)
        self._task: Any = None

    def begin(self, epoch: int, done: int, total: int) -> None:
        """Replace the previous epoch's progress bar with the progress bar of a new epoch."""
        self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("", total=total, completed=done, epoch=epoch, metrics="")

    def advance(self, done: int, metrics: Mapping[str, Any]) -> None:
        """Update bar and metrics."""
        listed = ", ".join(f"{for_terminal(name)} {short(value)}" for name, value in metrics.items())
        self._progress.update(self._task, completed=done, metrics=listed)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self._verbose:
            self._progress.console.print(for_terminal(line, _MAX_LINE), highlight=False, markup=False)


def make_display(*, verbose: bool, show_progress: bool) -> Display:
    """Create a display; `show_progress` enables a progress bar on a terminal if rich is installed, otherwise lines."""
    if show_progress and sys.stdout.isatty() and find_spec("rich") is not None:
        return Bar(verbose=verbose)
    return Display(verbose=verbose, progress_s=_PROGRESS_S if show_progress else None)
