"""Training log: a dataset with one row per metric value, written by a logger and read as learning curves."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import FormatError
from samplebatch.loggers.logger import Logger
from samplebatch.storage.datasets.dataset import Dataset

COLUMNS = ("row", "time", "name", "unit", "step", "value")
_FLUSH_S = 10.0
"""Maximum seconds before metrics in memory are flushed."""
_MAX_WAITING = 10_000


class TrainingLog(Logger):
    """Logger that appends metrics to a dataset, for `samplebatch inspect` and any reader of Parquet files.

    Each metric value is a row: `name`, such as `test/returns_stat/mean`; `step` and its `unit`, such as `env_step`;
    `value`; `time` in seconds since 1970; and `row`, the number of the metric value in the training run, counted from
    0. A killed process loses at most the metrics of the last ten seconds. A training run that is resumed from a
    checkpoint logs the metrics after this checkpoint again, with the same row numbers; readers select the newest rows
    (see `read_log`).

    Parameters
    ----------
    folder
        Folder of the dataset; it is created when the first metrics are written.
    training_interval, test_interval, update_interval, info_interval, save_interval
        See `Logger`; by default, every report is logged.

    Examples
    --------
    >>> import tempfile
    >>> log = TrainingLog(tempfile.mkdtemp() + "/log")
    >>> for step in (100, 200):
    ...     log.log_test_data({"returns_stat": {"mean": step / 10}}, step)
    >>> log.finalize()
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
        """Queue one row per metric; flush if 10,000 rows are pending or the last flush was over ten seconds ago."""
        scope, _, unit = step_type.partition("/")
        now = time.time()
        for name, value in data.items():
            self._waiting.append((self._rows, now, f"{scope}/{name}", unit, step, value))
            self._rows += 1
        if len(self._waiting) >= _MAX_WAITING or time.monotonic() - self._flushed_s > _FLUSH_S:
            self.flush()

    def _saved_steps(self) -> tuple[int, int, int]:
        self.flush()
        if not self._dataset.parts():
            return 0, 0, 0
        log = read_log(self.folder)
        curves, self._rows = learning_curves(log), int(np.max(log["row"], initial=-1)) + 1
        if "save/env_step" not in curves:
            return 0, 0, 0
        env_steps, updates = curves["save/env_step"], curves["save/update_step"]
        return int(env_steps.steps[-1]), int(env_steps.values[-1]), int(updates.values[-1])

    def flush(self) -> None:
        """Append pending rows to the dataset."""
        self._flushed_s = time.monotonic()
        if self._waiting:
            columns: dict[str, Any] = dict(zip(COLUMNS, map(list, zip(*self._waiting, strict=True)), strict=True))
            for name in ("name", "unit"):
                columns[name] = np.array(columns[name], dtype=object)
            self._dataset.extend(SampleBatch(columns))
            self._waiting = []

    def finalize(self) -> None:
        """Append pending rows and compact the dataset."""
        self.flush()
        if self._dataset.parts():
            self._dataset.compact()

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's state for checkpoints, which includes the number of logged metrics."""
        return super().state_dict() | {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the log after the metrics of a checkpoint; later metrics are logged again."""
        super().load_state_dict(state)
        self._rows, self._waiting = state["rows"], []


class LearningCurve(NamedTuple):
    """Learning curve: the values of one metric over a training run.

    - `unit`: unit of steps: `"env_step"`, `"update_step"` or `"epoch"`.
    - `steps`, `values`: steps at which the metric was logged, and the metric's values, shape (n,) each.
    """

    unit: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def is_log(batch: object) -> TypeGuard[SampleBatch]:
    """Return whether a batch has the columns of a training log."""
    return isinstance(batch, SampleBatch) and set(COLUMNS) <= set(batch.column_names)


def read_log(folder: str | os.PathLike[str]) -> SampleBatch:
    """Read the metrics of a training run; rows that a resumed run has replaced are omitted.

    Raises
    ------
    FormatError
        If the folder contains no log.
    """
    log = Dataset(folder).read()
    if not is_log(log):
        actual = f"columns {', '.join(log.column_names)}"[:200] if isinstance(log, SampleBatch) else describe_value(log)
        raise FormatError(
            f"{os.fspath(folder)!r} must be a training log with columns {', '.join(COLUMNS)}, got {actual}"
        )
    return newest_metrics(log)


def newest_metrics(log: SampleBatch) -> SampleBatch:
    """Remove outdated rows: rows that precede a row with the same or a smaller row number.

    >>> newest_metrics(SampleBatch(row=[0, 1, 2, 1], value=[0.0, 1.0, 2.0, 1.5]))["value"]
    array([0. , 1.5])
    """
    rows = np.asarray(log["row"])
    if not len(rows):
        return log
    least_after = np.append(np.minimum.accumulate(rows[::-1])[::-1][1:], np.iinfo(np.int64).max)
    return log[np.flatnonzero(rows < least_after)]


def learning_curves(log: SampleBatch | str | os.PathLike[str]) -> dict[str, LearningCurve]:
    """Return the learning curve of each metric, by metric name.

    Parameters
    ----------
    log
        Folder of a log, or the result of `read_log`.

    Raises
    ------
    FormatError
        If the folder contains no log.
    """
    rows_of_log = log if isinstance(log, SampleBatch) else read_log(log)
    names, figure_of_row = np.unique(np.asarray(rows_of_log["name"]).astype(str), return_inverse=True)
    steps, values, units = (np.asarray(rows_of_log[column]) for column in ("step", "value", "unit"))
    curves = {}
    for index, name in enumerate(names.tolist()):
        rows = np.flatnonzero(figure_of_row == index)
        curves[name] = LearningCurve(str(units[rows[0]]), steps[rows], values[rows])
    return curves
