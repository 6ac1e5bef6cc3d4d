"""Loggers: where trainers tell their figures, a dataset, TensorBoard, Weights & Biases, or a base for others."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from samplebatch.arguments import whole
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import require
from samplebatch.storage.dataset import Dataset
from samplebatch.storage.training_log import COLUMNS

UNITS = {"training": "env_step", "test": "env_step", "update": "update_step", "info": "epoch"}
"""Kinds of figures, and the steps that each is told at."""
_FLUSH_S = 10.0
"""Seconds for which figures may wait in memory."""
_MAX_WAITING = 10_000


class Logger(ABC):
    """Base of loggers, which trainers call with the figures of collecting, tests, updates and epochs.

    Names of figures and of steps are those of Tianshou's loggers: `training/returns_stat/mean` at `training/env_step`.

    Parameters
    ----------
    training_interval, test_interval
        Environment steps from one report on collecting, or on a test, to the next that is written.
    update_interval
        Training steps from one report on updates to the next.
    info_interval
        Epochs from one report on the whole training to the next.

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
    ) -> None:
        self._intervals = {
            "training": whole("training_interval", training_interval, 1),
            "test": whole("test_interval", test_interval, 1),
            "update": whole("update_interval", update_interval, 1),
            "info": whole("info_interval", info_interval, 1),
        }
        self._last_steps: dict[str, int] = {}

    @abstractmethod
    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write figures.

        Parameters
        ----------
        step_type
            The kind of figures and of steps, such as `"training/env_step"`.
        step
            The step that they belong to.
        data
            The figures, by names in which `/` parts groups.
        """

    def log_training_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of collecting."""
        self._tell("training", log_data, step)

    def log_test_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of a test."""
        self._tell("test", log_data, step)

    def log_update_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of an update."""
        self._tell("update", log_data, step)

    def log_info_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of the whole training, once an epoch."""
        self._tell("info", log_data, step)

    def _tell(self, scope: str, figures: Mapping[str, Any], step: int) -> None:
        last = self._last_steps.get(scope)
        if last is None or step - last >= self._intervals[scope]:
            self._last_steps[scope] = step
            self.write(f"{scope}/{UNITS[scope]}", step, flat_figures(figures))

    def flush(self) -> None:
        """Bring all that was written to where it lasts."""
        return None

    def finalize(self) -> None:
        """End the log."""
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the log, for checkpoints; all before it lasts."""
        self.flush()
        return {"last_steps": dict(self._last_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the log of a training that is resumed."""
        self._last_steps = dict(state["last_steps"])


class TensorboardLogger(Logger):
    """Logger for TensorBoard, through torch's `SummaryWriter`.

    Parameters
    ----------
    writer
        A `SummaryWriter`, or the folder to make one for.
    training_interval, test_interval, update_interval, info_interval
        As for `Logger`.

    Raises
    ------
    MissingExtraError
        If `tensorboard` is not installed.
    """

    def __init__(self, writer: Any, **intervals: int) -> None:
        super().__init__(**intervals)
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = writer if hasattr(writer, "add_scalar") else SummaryWriter(os.fspath(writer))

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write a scalar for each figure, and one for the step."""
        scope = step_type.partition("/")[0]
        self.writer.add_scalar(step_type, step, global_step=step)
        for name, value in data.items():
            self.writer.add_scalar(f"{scope}/{name}", value, global_step=step)

    def flush(self) -> None:
        """Write to the disk."""
        self.writer.flush()

    def finalize(self) -> None:
        """Close the writer."""
        self.writer.close()


class WandbLogger(Logger):
    """Logger for Weights & Biases.

    Parameters
    ----------
    run
        A run that `wandb.init` returned; by default one is begun with the rest of the arguments.
    project, name, run_id, config, mode
        The run's project, name, id, settings, and whether it is `"online"` or `"offline"`. A training that is resumed
        goes on in the run of the same id.
    training_interval, test_interval, update_interval, info_interval
        As for `Logger`.

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
        """Log all figures of a report as one row, with the step that they are drawn over."""
        scope = step_type.partition("/")[0]
        self.run.log({step_type: step} | {f"{scope}/{name}": value for name, value in data.items()})

    def finalize(self) -> None:
        """Finish the run."""
        self.run.finish()


class TrainingLog(Logger):
    """Logger that appends to a dataset, which `samplebatch inspect` draws and any Parquet reader can query.

    Each figure is a row: `name`, such as `test/returns_stat/mean`; `step` and its `unit`, such as `env_step`; `value`;
    `time`, in seconds since 1970; and `row`, its number in the training. A process that is killed costs the figures of
    the last ten seconds at most. Where a training is resumed from a checkpoint, the figures after that are told again,
    with the same row numbers; readers take the newest (see `read_log`).

    Parameters
    ----------
    folder
        The folder of the dataset; it is made with the first figures.
    training_interval, test_interval, update_interval, info_interval
        As for `Logger`; by default nothing is left out.

    Examples
    --------
    >>> import tempfile
    >>> log = TrainingLog(tempfile.mkdtemp() + "/log")
    >>> for step in (100, 200):
    ...     log.log_test_data({"returns_stat": {"mean": step / 10}}, step)
    >>> log.finalize()
    >>> from samplebatch.learn import learning_curves
    >>> learning_curves(log.folder)["test/returns_stat/mean"]
    LearningCurve(unit='env_step', steps=array([100, 200]), values=array([10., 20.]))
    """

    def __init__(self, folder: str | os.PathLike[str], training_interval: int = 1, **intervals: int) -> None:
        super().__init__(training_interval, **{"update_interval": 1} | intervals)
        self.folder = folder
        self._dataset = Dataset(folder)
        self._rows = 0
        self._waiting: list[tuple[Any, ...]] = []
        self._flushed_s = time.monotonic()

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Add a row for each figure."""
        scope, _, unit = step_type.partition("/")
        now = time.time()
        for name, value in data.items():
            self._waiting.append((self._rows, now, f"{scope}/{name}", unit, step, value))
            self._rows += 1
        if len(self._waiting) >= _MAX_WAITING or time.monotonic() - self._flushed_s > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Append the rows that wait to the dataset."""
        self._flushed_s = time.monotonic()
        if self._waiting:
            columns: dict[str, Any] = dict(zip(COLUMNS, map(list, zip(*self._waiting, strict=True)), strict=True))
            for name in ("name", "unit"):
                columns[name] = np.array(columns[name], dtype=object)
            self._dataset.append(SampleBatch(columns))
            self._waiting = []

    def finalize(self) -> None:
        """Append the rest, and join the many small files."""
        self.flush()
        if self._dataset.parts():
            self._dataset.compact()

    def state_dict(self) -> dict[str, Any]:
        """Return how many figures there are."""
        return super().state_dict() | {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the figures of a checkpoint; those after them are told again."""
        super().load_state_dict(state)
        self._rows, self._waiting = state["rows"], []


def flat_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return figures with `/` between the names of groups and those in them; others than numbers are left out.

    Examples
    --------
    >>> flat_figures({"loss": 1, "returns_stat": {"mean": 2.5, "of": None}})
    {'loss': 1.0, 'returns_stat/mean': 2.5}
    """
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flat_figures(value).items()}
        elif isinstance(value, int | float):
            found[str(name)] = float(value)
    return found
