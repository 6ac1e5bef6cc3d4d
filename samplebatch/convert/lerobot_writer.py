"""Writing of datasets in LeRobot's layout, version 3."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.convert.lerobot_layout import (
    CHUNK_AT,
    DATA,
    EPISODE,
    EPISODES,
    FILE_AT,
    FRAME,
    INDEX,
    INFO,
    LENGTH,
    NAMES,
    PLACE,
    STATE,
    STATS,
    TASK,
    TASKS,
    TIMESTAMP,
    VERSION,
)
from samplebatch.convert.steps import Source, Steps, arrays_of, as_steps, flags_of, map_leaves, require_columns
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnTypeError, StorageError

_FILE_MIB, _VIDEO_MIB, _CHUNK_FILES = 100, 200, 1000
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
_MAX_DIMENSIONS = 5
_LEFT_OUT = frozenset(
    (
        *(names.NEXT_OBS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES, names.EPS_ID, names.T),
        *(TIMESTAMP, INDEX, TASK),
    )
)
Columns = dict[str, npt.NDArray[Any]]
Statistics = dict[str, npt.NDArray[Any]]


def write_lerobot(
    source: Source, folder: str | os.PathLike[str], *, fps: float, task: str | Sequence[str] = "", robot: str = ""
) -> None:
    """Write steps as a dataset in LeRobot's layout: a new folder, whole or not at all.

    Observations of one array are `observation.state`, those of a dict `observation.*`. `actions`, `rewards` and the
    flags are `action`, `next.reward`, `next.done` and `next.truncated`; the last step of an unfinished episode counts
    as truncated. Other columns keep their names. Next observations are left out, as the layout has no place for them,
    and episodes are numbered from 0. Frames lie `1 / fps` seconds apart.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    folder
        The folder, which must not be there yet, or be empty. The one that it is in must exist.
    fps
        Frames a second.
    task
        The task of all steps in words, or those that column `task_index` counts.
    robot
        The type of the robot, if any.

    Raises
    ------
    ArgumentError
        If `fps` is not above 0, or there is no task.
    ColumnNotFoundError
        If observations or actions are missing, or nothing tells episodes apart.
    ColumnTypeError
        If a column varies in shape, has more than 5 dimensions a row, or holds no numbers; names it.
    ColumnMismatchError
        If two columns have one name there, `task_index` counts other tasks than are given, or flags are other numbers
        than 0 and 1.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are none.
    StorageError
        If the folder has files.
    OSError
        If it cannot be written.
    """
    if isinstance(fps, bool) or not (math.isfinite(fps) and fps > 0):
        raise ArgumentError(f"fps must be above 0, got {fps!r}")
    steps = as_steps(source)
    require_columns(steps.batch, names.OBS, names.ACTIONS)
    tasks = [task] if isinstance(task, str) else list(task)
    columns = _columns_of(steps)
    for name, values in _counters(steps, fps, _task_numbers(steps.batch, tasks, single=isinstance(task, str))).items():
        _add(columns, name, values)
    features = {name: _feature(name, values) for name, values in columns.items()}
    with _new_folder(folder) as place:
        statistics = {name: [_statistics(rows) for rows in _cut(values, steps)] for name, values in columns.items()}
        _write(place, steps, columns, statistics, tasks)
        joined = {name: _join_statistics(rows) for name, rows in statistics.items()}
        _write_json(place / STATS, {name: {k: v.tolist() for k, v in found.items()} for name, found in joined.items()})
        _write_json(place / INFO, _info(steps, features, fps, len(tasks), robot))


def _columns_of(steps: Steps) -> Columns:
    """Return the columns of a dataset by LeRobot's names, but for its counters."""
    columns: Columns = {}
    for name in steps.batch:
        if name not in _LEFT_OUT:
            values = arrays_of(steps.batch, name)
            theirs = STATE if name == names.OBS and isinstance(values, np.ndarray) else NAMES.get(name, name)
            map_leaves(partial(_add, columns), values, theirs)
    if names.TERMINATEDS in steps.batch or names.DONES in steps.batch:
        terminated, truncated = flags_of(steps.batch)
        done = terminated | truncated
        done[steps.bounds[1:] - 1] = True
        _add(columns, NAMES[names.DONES], done)
        _add(columns, NAMES[names.TRUNCATEDS], done & ~terminated)
    return columns


def _add(columns: Columns, name: str, values: npt.NDArray[Any]) -> None:
    if name in columns:
        raise ColumnMismatchError(f"column {name!r} must be there once in a dataset of LeRobot; rename or drop one")
    columns[name] = values


def _task_numbers(batch: SampleBatch, tasks: list[str], *, single: bool) -> npt.NDArray[np.int64]:
    if not tasks:
        raise ArgumentError("task must name a task at least, got none")
    if len(set(tasks)) < len(tasks):
        raise ArgumentError("task must name each task once, some are there twice")
    if single:
        return np.zeros(batch.count, np.int64)
    require_columns(batch, TASK)
    numbers = np.asarray(batch[TASK])
    if (
        numbers.shape != (batch.count,)
        or numbers.dtype.kind not in "iu"
        or not np.all((numbers >= 0) & (numbers < len(tasks)))
    ):
        raise ColumnMismatchError(f"column {TASK!r} must count the {len(tasks)} tasks that are given")
    return numbers.astype(np.int64)


def _counters(steps: Steps, fps: float, tasks: npt.NDArray[np.int64]) -> Columns:
    times = steps.times()
    return {
        TIMESTAMP: (times / fps).astype(np.float32),
        FRAME: times,
        EPISODE: steps.numbers(),
        INDEX: np.arange(steps.batch.count),
        TASK: tasks,
    }


def _feature(name: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    """Describe a column; a vector has names, which tell one of a single number from a number."""
    if "/" in name:
        raise ColumnTypeError(f"column {name!r} must have no '/' in its name in a dataset of LeRobot; rename it")
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise ColumnTypeError(f"column {name!r} must hold numbers in a dataset of LeRobot, got {values.dtype}; drop it")
    shape = values.shape[1:]
    if len(shape) > _MAX_DIMENSIONS or 0 in shape:
        raise ColumnTypeError(f"column {name!r} must have rows of 1 to 5 dimensions, none of them 0, got {shape}")
    last = name.rsplit(".", 1)[-1]
    named = [f"{last}_{i}" for i in range(shape[0])] if len(shape) == 1 else None
    return {"dtype": values.dtype.name, "shape": list(shape or (1,)), "names": named}


def _info(steps: Steps, features: Mapping[str, Any], fps: float, tasks: int, robot: str) -> dict[str, Any]:
    episodes = len(steps.bounds) - 1
    return {
        "codebase_version": VERSION,
        "robot_type": robot or None,
        "total_episodes": episodes,
        "total_frames": steps.batch.count,
        "total_tasks": tasks,
        "chunks_size": _CHUNK_FILES,
        "data_files_size_in_mb": _FILE_MIB,
        "video_files_size_in_mb": _VIDEO_MIB,
        # Readers count with whole numbers where they can.
        "fps": int(fps) if fps == int(fps) else float(fps),
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA,
        "video_path": None,
        "features": features,
    }


# Files


@contextlib.contextmanager
def _new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder that takes its place when the block ends well, and vanishes when it does not."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(f"{str(target)!r} must be a new folder or an empty one, and it is not")
    place = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    place.mkdir()
    try:
        yield place
        place.replace(target)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _cut(values: npt.NDArray[Any], steps: Steps) -> list[npt.NDArray[Any]]:
    """Cut the rows of a column into those of each episode."""
    return np.split(values, steps.bounds[1:-1])


def _write(
    place: Path, steps: Steps, columns: Columns, statistics: Mapping[str, list[Statistics]], tasks: list[str]
) -> None:
    table = pa.table({name: _arrow(values) for name, values in columns.items()})
    numbers = _file_numbers(steps, table.nbytes)
    for number in range(int(numbers[-1]) + 1):
        first, last = np.searchsorted(numbers, [number, number + 1])
        start, stop = int(steps.bounds[first]), int(steps.bounds[last])
        chunk, file = divmod(number, _CHUNK_FILES)
        _write_table(place / DATA.format(chunk_index=chunk, file_index=file), table.slice(start, stop - start))
    named = [[tasks[i] for i in np.unique(rows)] for rows in _cut(columns[TASK], steps)]
    first_file = PLACE.format(chunk_index=0, file_index=0)
    _write_table(place / EPISODES / first_file, _episodes_table(steps, numbers, named, statistics))
    _write_table(place / TASKS, _tasks_table(tasks))


def _file_numbers(steps: Steps, nbytes: int) -> npt.NDArray[np.intp]:
    """Number the file of each episode, shape (k,): a file begins with the first episode beyond the size of one."""
    beyond = steps.bounds[:-1] * (nbytes / steps.batch.count) // (_FILE_MIB << 20)
    numbers: npt.NDArray[np.intp] = np.unique(beyond, return_inverse=True)[1].reshape(-1)
    return numbers


def _arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Lay an array out as lists in lists; a vector as a list of fixed length, as LeRobot does."""
    values = np.ascontiguousarray(values)
    array = pa.array(values.reshape(-1))
    shape = values.shape[1:]
    if len(shape) == 1:
        return array if shape == (1,) else pa.FixedSizeListArray.from_arrays(array, shape[0])
    for level in range(len(shape), 0, -1):
        n = math.prod(values.shape[:level])
        offsets = np.arange(n + 1) * shape[level - 1]
        small = len(array) < 1 << 31
        kind = pa.ListArray if small else pa.LargeListArray
        array = kind.from_arrays(pa.array(offsets.astype(np.int32 if small else np.int64)), array)
    return array


def _episodes_table(
    steps: Steps,
    numbers: npt.NDArray[np.intp],
    tasks: list[list[str]],
    statistics: Mapping[str, list[Statistics]],
) -> pa.Table:
    starts, stops = steps.bounds[:-1], steps.bounds[1:]
    zeros = np.zeros(len(starts), np.int64)
    found: dict[str, Any] = {
        EPISODE: np.arange(len(starts)),
        "tasks": tasks,
        LENGTH: stops - starts,
        CHUNK_AT: numbers // _CHUNK_FILES,
        FILE_AT: numbers % _CHUNK_FILES,
        "dataset_from_index": starts,
        "dataset_to_index": stops,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    for name, rows in statistics.items():
        found |= {f"stats/{name}/{key}": [row[key] for row in rows] for key in rows[0]}
    return pa.table(found)


def _statistics(values: npt.NDArray[Any]) -> Statistics:
    """Describe the numbers of rows by their last dimension, as LeRobot does; a number is a row of one."""
    width = values.shape[-1] if values.ndim > 1 else 1
    rows: npt.NDArray[Any] = values.reshape(-1, width).astype(np.float64)
    # Infinite numbers have no mean.
    with np.errstate(invalid="ignore"):
        found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
        quantiles = np.quantile(rows, _QUANTILES, axis=0)
    found |= {f"q{int(100 * q):02d}": values for q, values in zip(_QUANTILES, quantiles, strict=True)}
    return {"count": np.array([len(values)])} | found


def _join_statistics(rows: list[Statistics]) -> Statistics:
    """Join the statistics of episodes into those of all rows; quantiles are means of theirs, as LeRobot's are."""
    stacked = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    count = stacked.pop("count")
    with np.errstate(invalid="ignore"):
        found = {key: (values * count).sum(0) / count.sum() for key, values in stacked.items()}
        spread = stacked["std"] ** 2 + (stacked["mean"] - found["mean"]) ** 2
        deviation = np.sqrt((spread * count).sum(0) / count.sum())
    return found | {
        "min": stacked["min"].min(0),
        "max": stacked["max"].max(0),
        "std": deviation,
        "count": count.sum(0),
    }


def _tasks_table(tasks: list[str]) -> pa.Table:
    """Lay tasks out as pandas writes a frame with the tasks as its index, which readers expect."""
    column = {"name": TASK, "field_name": TASK, "pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    index = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    about = {"index_columns": ["task"], "column_indexes": [], "columns": [column, index], "pandas_version": "2.2.0"}
    table = pa.table({TASK: np.arange(len(tasks)), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(about)})


def _write_table(path: Path, table: pa.Table) -> None:
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, compression="snappy", write_page_checksum=True)


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), encoding="utf-8")
