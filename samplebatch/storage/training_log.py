"""The log of a training, a dataset with a row for each figure: its columns, and the curves in it."""

from __future__ import annotations

import os
from typing import NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import FormatError
from samplebatch.storage.dataset import Dataset

COLUMNS = ("row", "time", "name", "unit", "step", "value")


class LearningCurve(NamedTuple):
    """Values of one figure over a training.

    Attributes
    ----------
    unit
        The kind of steps: `"env_step"`, `"update_step"` or `"epoch"`.
    steps, values
        Where and how much, each of shape (n,).
    """

    unit: str
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def is_log(batch: object) -> TypeGuard[SampleBatch]:
    """Tell whether a batch has the columns of a log."""
    return isinstance(batch, SampleBatch) and set(COLUMNS) <= set(batch.column_names)


def read_log(folder: str | os.PathLike[str]) -> SampleBatch:
    """Read the figures of a training, each once where a resumed training has told it again.

    Raises
    ------
    FormatError
        If there is no log in the folder.
    """
    found = Dataset(folder).read()
    if not is_log(found):
        raise FormatError(f"{os.fspath(folder)!r} must be a log of a training, and has other columns")
    return newest_figures(found)


def newest_figures(log: SampleBatch) -> SampleBatch:
    """Leave out rows that were told again: those with a number that comes later once more, or a smaller one does.

    Examples
    --------
    >>> newest_figures(SampleBatch(row=[0, 1, 2, 1], value=[0.0, 1.0, 2.0, 1.5]))["value"]
    array([0. , 1.5])
    """
    rows = np.asarray(log["row"])
    if not len(rows):
        return log
    least_after = np.append(np.minimum.accumulate(rows[::-1])[::-1][1:], np.iinfo(np.int64).max)
    return log[np.flatnonzero(rows < least_after)]


def learning_curves(log: SampleBatch | str | os.PathLike[str]) -> dict[str, LearningCurve]:
    """Return the curve of each figure, by name.

    Parameters
    ----------
    log
        The folder of a log, or the rows that `read_log` returned.

    Raises
    ------
    FormatError
        If there is no log in the folder.
    """
    found = log if isinstance(log, SampleBatch) else read_log(log)
    names, places = np.unique(np.asarray(found["name"]).astype(str), return_inverse=True)
    steps, values, units = (np.asarray(found[column]) for column in ("step", "value", "unit"))
    curves = {}
    for place, name in enumerate(names.tolist()):
        rows = np.flatnonzero(places == place)
        curves[name] = LearningCurve(str(units[rows[0]]), steps[rows], values[rows])
    return curves
