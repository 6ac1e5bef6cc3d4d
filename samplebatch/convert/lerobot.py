"""LeRobot datasets of layout version 3: folders of Parquet files with one row per frame, and JSON metadata.

A folder is untrusted: metadata is validated, data paths outside the folder are rejected, and rows are checked against
the metadata.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import errors, names
from samplebatch.arguments import describe_value
from samplebatch.batch.action_unit import ENVIRONMENT
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.casting import as_flags
from samplebatch.column.memory import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.convert import experience
from samplebatch.storage.tables.parquet import open_parquet

NAMES = names.PEERS["lerobot"]
VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes"
PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = f"data/{PLACE}"
STATE = f"{NAMES[names.OBS]}.state"
"""Feature name of observations that are a single array."""

EPISODE, FRAME = NAMES[names.EPS_ID], NAMES[names.T]
TIMESTAMP, INDEX, TASK = "timestamp", "index", "task_index"
CHUNK_AT, FILE_AT = "data/chunk_index", "data/file_index"
LENGTH = "length"
_WHERE = (EPISODE, LENGTH, CHUNK_AT, FILE_AT)

_FIELD = re.compile(r"\{(chunk_index|file_index)(?::0?([1-9])d)?\}")
Numbers = npt.NDArray[np.int64]


class Feature(NamedTuple):
    """Description of a column in `info.json`.

    - `dtype`: name of a NumPy dtype, `"string"`, `"image"` or `"video"`.
    - `shape`: shape of a row; () for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]


class Episodes(NamedTuple):
    """Locations of the rows of all episodes, in episode order.

    - `number`, `length`, `chunk`, `file`: episode number, frame count, chunk index and file index of each episode,
      shape (k,) each.
    """

    number: Numbers
    length: Numbers
    chunk: Numbers
    file: Numbers

    def at(self, which: npt.NDArray[Any]) -> Episodes:
        """Select episodes by index or mask."""
        return Episodes(*(values[which] for values in self))


class Layout:
    """Validated metadata of a dataset folder.

    - `features`: descriptions of the columns by name.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._name = str(self._folder / INFO)
        info = self._load()
        version = info.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            actual = describe_value(version)
            raise self._fault(f"must have layout version 3, got {actual}; convert older datasets with LeRobot")
        features = info.get("features")
        if not isinstance(features, dict):
            raise self._fault(f"must have an object as 'features', got a {type(features).__name__}")
        self.features = {name: self._feature(name, about) for name, about in features.items()}
        for name in (EPISODE, FRAME):
            if name not in self.features:
                raise self._fault(f"must have feature {name!r}; {errors.near_names(name, self.features)}")
        self._template = self._path_template(info.get("data_path", DATA))

    def data_path(self, chunk: int, file: int) -> Path:
        """Return the path of a data file."""
        numbers = {"chunk_index": chunk, "file_index": file}
        filled = _FIELD.sub(lambda match: f"{numbers[match[1]]:0{match[2] or 1}d}", self._template)
        return self._folder / filled

    def episodes(self, max_nbytes: int | None) -> Episodes:
        """Read and validate the locations of all episodes."""
        folder = self._folder / EPISODES
        parts = [_episodes_in(path, max_nbytes) for path in experience.files_in(folder, ".parquet")]
        episodes = Episodes(*map(np.concatenate, zip(*parts, strict=True)))
        if not len(episodes.number):
            raise errors.FormatError(f"{str(folder)!r} must have episodes, got none")
        episodes = episodes.at(np.argsort(episodes.number, kind="stable"))
        is_repeated = episodes.number[1:] == episodes.number[:-1]
        if is_repeated.any():
            repeated = episodes.number[is_repeated.argmax()]
            raise errors.FormatError(f"{str(folder)!r} must list each episode once, got episode {repeated} twice")
        return episodes

    def _load(self) -> dict[str, Any]:
        try:
            info = json.loads(Path(self._name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._fault(f"must be valid JSON: {error}") from error
        if not isinstance(info, dict):
            raise self._fault(f"must be a JSON object, got a {type(info).__name__}")
        return info

    def _feature(self, name: str, about: Any) -> Feature:
        fields = about if isinstance(about, Mapping) else {}
        dtype, shape = fields.get("dtype"), fields.get("shape")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise self._fault(
                f"must define a dtype and a shape of positive integers for feature {name!r:.80}, got dtype "
                f"{describe_value(dtype)} and shape {shape!r:.80}"
            )
        if shape == [1] and fields.get("names") is None:
            shape = []
        return Feature(dtype, tuple(shape))

    def _path_template(self, template: Any) -> str:
        """Check that a path template contains only the two index fields and no path outside the folder.

        Symbolic links are followed, because Hugging Face's download cache stores files as links to blobs.
        """
        if isinstance(template, str):
            plain = _FIELD.sub("0", template)
            path = PurePosixPath(plain)
            inside = not path.is_absolute() and ".." not in path.parts
            if inside and not set(plain) & set("{}\\:\0") and plain.endswith(".parquet"):
                return template
        raise self._fault(
            "must have a 'data_path' to Parquet files in the folder, with chunk_index and file_index, got "
            f"{describe_value(template)}"
        )

    def _fault(self, requirement: str) -> errors.FormatError:
        return errors.FormatError(f"{self._name!r} {requirement}")


def _is_size(size: Any) -> bool:
    return type(size) is int and size >= 1


def _episodes_in(path: Path, max_nbytes: int | None) -> Episodes:
    file, bound = open_parquet(path, max_nbytes=max_nbytes)
    for name in _WHERE:
        if name not in file.schema.names:
            raise errors.FormatError(
                f"{file.name!r} must have column {name!r}; {errors.near_names(name, file.schema.names)}"
            )
    # In file order, as the reader requires; the statistics columns may be large and are not read.
    table = file.read(range(file.num_groups), [name for name in file.schema.names if name in _WHERE], bound)
    return Episodes(*(_numbers_in(table[name], name, file.name) for name in _WHERE))


def _numbers_in(column: pa.ChunkedArray, name: str, path: str) -> Numbers:
    minimum = int(name == LENGTH)
    if pa.types.is_integer(column.type) and not column.null_count:
        numbers: Numbers = column.to_numpy().astype(np.int64)
        if np.all(numbers >= minimum):
            return numbers
        actual = str(numbers.min())
    else:
        actual = f"{column.type!s:.80} with {column.null_count} nulls"
    raise errors.FormatError(
        f"column {name!r} of {path!r} must contain only integers of at least {minimum}, got {actual}"
    )


_TO_FLAT = {theirs: name for name, theirs in NAMES.items()}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes by number of image channels."""


def read_lerobot(
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    episodes: Iterable[int] | None = None,
    max_nbytes: int | None = None,
) -> SampleBatch:
    """Read the frames of a LeRobot dataset as steps, grouped by episode.

    Features `observation.*` become nested `obs`; if `observation.state` is the only observation that is read,
    `observation.state` becomes `obs`. `action`, `next.reward`, `episode_index` and `frame_index` become `actions`,
    `rewards`, `eps_id` and `t`. `next.done` becomes `dones`, or `terminateds` and `truncateds` if `next.truncated`
    exists. The row number `index` is omitted; other features keep their names. The result has no `new_obs`, because the
    layout has no observation after the last action. A feature of shape (1,) without names becomes one number per step.
    Images become arrays of shape (height, width, channels).

    Parameters
    ----------
    folder
        Folder of the dataset.
    columns
        LeRobot's names of the features to read; None for all features. Episode and frame numbers are always read.
        Videos cannot be read: for a dataset with videos, list the other features.
    episodes
        Numbers of the episodes to read; None for all episodes.
    max_nbytes
        Maximum number of bytes to allocate per file; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If metadata is invalid or refers to files outside the folder, rows contradict the metadata, or a file is
        damaged.
    ColumnNotFoundError
        If a feature does not exist.
    ColumnTypeError
        If a feature is a video, or has an unsupported dtype.
    RowIndexError
        If an episode does not exist.
    CapacityError
        If more memory than `max_nbytes` would be allocated.
    MissingExtraError
        If a feature contains images and Pillow is not installed.
    OSError
        If a file cannot be read.
    """
    layout = Layout(folder)
    features = _choose_features(layout.features, columns)
    available = layout.episodes(max_nbytes)
    chosen = _choose_episodes(available, episodes)
    parts = []
    for key in np.unique(np.stack([available.chunk, available.file]), axis=1).T.tolist():
        in_file = (available.chunk == key[0]) & (available.file == key[1])
        if np.any(chosen[in_file]):
            path = os.fspath(layout.data_path(*key))
            parts.append(_read_file(path, features, available.at(in_file), chosen[in_file], max_nbytes))
    return SampleBatch(_as_columns(experience.join_episodes(parts), features), _action_unit=ENVIRONMENT)


def _choose_features(features: Mapping[str, Feature], columns: Sequence[str] | None) -> dict[str, Feature]:
    listed = [name for name in features if name != INDEX] if columns is None else list(columns)
    for name in listed:
        if name not in features:
            raise errors.no_such_column(name, features)
    selected = {name: features[name] for name in dict.fromkeys((*listed, EPISODE, FRAME))}
    for name, feature in selected.items():
        if feature.dtype == "video":
            raise errors.ColumnTypeError(f"column {name!r} must not be a video; list the other features in columns")
        if feature.dtype not in ("image", "string") and not _holds_numbers(feature.dtype):
            raise errors.ColumnTypeError(
                f"column {name!r} must contain numbers, strings or images, got {feature.dtype!r}"
            )
    _check_targets(selected)
    return selected


def _holds_numbers(dtype: str) -> bool:
    try:
        return named_dtype(dtype).kind in "biuf"
    except errors.ColumnTypeError:
        return False


def _check_targets(features: Iterable[str]) -> None:
    """Check that features map to distinct columns, and that no column is nested in another column."""
    features_by_column: dict[str, str] = {}
    for name in features:
        column = _target_column(name)
        if column in features_by_column:
            raise errors.FormatError(
                f"column {name!r} must not map to the same column as {features_by_column[column]!r}; read only one of "
                "the two"
            )
        features_by_column[column] = name
    for column, name in features_by_column.items():
        parts = column.split(".")
        for outer in (".".join(parts[:i]) for i in range(1, len(parts))):
            if outer in features_by_column:
                raise errors.FormatError(
                    f"column {name!r} must not be nested in {features_by_column[outer]!r}, which is a column"
                )


def _target_column(name: str) -> str:
    if name in _TO_FLAT:
        return _TO_FLAT[name]
    first, dot, suffix = name.partition(".")
    return _TO_FLAT.get(first, first) + dot + suffix


def _choose_episodes(available: Episodes, episodes: Iterable[int] | None) -> npt.NDArray[np.bool_]:
    if episodes is None:
        return np.ones(len(available.number), np.bool_)
    requested = list(episodes)
    numbers = set(available.number.tolist())
    for number in requested:
        if number not in numbers:
            raise errors.RowIndexError(f"episode {number!r} must be one of the dataset's {len(numbers)} episodes")
    if not requested:
        raise errors.RowIndexError("episodes must contain at least one episode, got none")
    return np.isin(available.number, requested)


def _read_file(
    path: str,
    features: Mapping[str, Feature],
    episodes: Episodes,
    chosen: npt.NDArray[np.bool_],
    max_nbytes: int | None,
) -> SampleBatch:
    file, bound = open_parquet(path, max_nbytes=max_nbytes)
    for name in features:
        if name not in file.schema.names:
            hint = errors.near_names(name, file.schema.names)
            raise errors.FormatError(f"{path!r} must have column {name!r}, which meta/info.json lists; {hint}")
    # In file order, as the reader requires.
    listed = [name for name in file.schema.names if name in features]
    table = file.read(range(file.num_groups), listed, bound)
    # Compare each length first, because the sum may overflow.
    if np.any(episodes.length > table.num_rows) or int(episodes.length.sum()) != table.num_rows:
        raise errors.FormatError(f"{path!r} must contain one row per frame of its episodes, got {table.num_rows} rows")
    expected = {
        EPISODE: np.repeat(episodes.number, episodes.length),
        FRAME: np.arange(table.num_rows) - np.repeat(np.cumsum(episodes.length) - episodes.length, episodes.length),
    }
    for name, numbers in expected.items():
        if not np.array_equal(_values(table[name], name, features[name], bound), numbers):
            raise errors.FormatError(
                f"column {name!r} of {path!r} must agree with the episodes in {EPISODES}, got other numbers"
            )
    if not chosen.all():
        table = table.filter(pa.array(np.repeat(chosen, episodes.length)))
    return SampleBatch(
        {str(i): _values(table[name], name, feature, bound) for i, (name, feature) in enumerate(features.items())}
    )


def _values(column: pa.ChunkedArray, name: str, feature: Feature, bound: MemoryBound) -> Any:
    array = column.combine_chunks()
    array = getattr(array, "storage", array)
    if feature.dtype == "image":
        return _decode_images(array, name, feature.shape, bound)
    rows = len(array)
    sizes = feature.shape or (1,)
    for size in sizes if _is_list(array.type) or feature.shape not in ((), (1,)) else ():
        if not _is_list(array.type) or array.null_count or not _has_lists_of(array, size):
            actual = f"{array.type!s:.80} with {array.null_count} nulls"
            if _is_list(array.type) and not array.null_count:
                actual = f"lists that do not have {size} elements"
            raise errors.FormatError(
                f"column {name!r} must have rows of shape {feature.shape}, the shape in meta/info.json, got {actual}"
            )
        array = array.flatten()
    if array.null_count or _is_list(array.type):
        raise errors.FormatError(
            f"column {name!r} must have no nulls and rows of shape {feature.shape}, got {array.type}"
        )
    return _cast(array, name, feature, bound).reshape(rows, *feature.shape)


def _decode_images(array: pa.Array, name: str, shape: tuple[int, ...], bound: MemoryBound) -> npt.NDArray[np.uint8]:
    try:
        image = errors.require("PIL.Image", "lerobot")
    except errors.MissingExtraError as error:
        raise errors.MissingExtraError(f"column {name!r} must be decoded with Pillow: {error}") from error
    if not pa.types.is_struct(array.type) or array.type.get_field_index("bytes") < 0 or array.null_count:
        raise errors.FormatError(f"column {name!r} must contain images that are embedded as bytes, got {array.type}")
    if len(shape) != 3:
        raise errors.FormatError(
            f"column {name!r} must have images of three dimensions, got shape {shape} in meta/info.json"
        )
    height, width, channels = shape if shape[2] in _MODES else (*shape[1:], shape[0])
    mode = _MODES.get(channels)
    if mode is None:
        raise errors.FormatError(
            f"column {name!r} must have images of 1, 3 or 4 channels, got shape {shape} in meta/info.json"
        )
    data = array.field("bytes")
    bound.take(len(data) * height * width * channels, f"column {name!r}")
    images = np.empty((len(data), height, width, channels), np.uint8)
    for row, encoded in enumerate(data):
        try:
            # The image header contains the size: it is checked before any pixel is decoded.
            with image.open(io.BytesIO(encoded.as_py()), formats=("PNG", "JPEG")) as opened:
                size = opened.size
                if size == (width, height):
                    images[row] = np.asarray(opened.convert(mode)).reshape(height, width, channels)
        # Pillow raises exceptions of many types for damaged images, and warns about suspiciously large images.
        except (OSError, ValueError, SyntaxError, TypeError, image.DecompressionBombError, Warning) as error:
            raise errors.FormatError(
                f"row {row} of column {name!r} must be an embedded PNG or JPEG, got other or damaged data"
            ) from error
        if size != (width, height):
            raise errors.FormatError(
                f"row {row} of column {name!r} must be an image of {width} by {height} pixels, got "
                f"{size[0]} by {size[1]}"
            )
    return images


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _has_lists_of(array: pa.Array, size: int) -> bool:
    return bool(np.all(array.value_lengths().to_numpy(zero_copy_only=False) == size))


def _cast(array: pa.Array, name: str, feature: Feature, bound: MemoryBound) -> npt.NDArray[Any]:
    text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if text != (feature.dtype == "string"):
        raise errors.FormatError(
            f"column {name!r} must contain {feature.dtype}, as declared in meta/info.json, got {array.type}"
        )
    if text:
        rows: list[str] = array.to_pylist()
        # Each row occupies as many bytes as the longest row, 4 per character.
        bound.take(4 * len(rows) * max(map(len, rows), default=0), f"column {name!r}")
        return np.array(rows, np.str_)
    values = array.to_numpy(zero_copy_only=False)
    dtype = np.dtype(feature.dtype)
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise errors.FormatError(
            f"column {name!r} must contain {feature.dtype}, as declared in meta/info.json, got {array.type}"
        )
    cast: npt.NDArray[Any] = values.astype(dtype, copy=False)
    return cast


def _as_columns(flat: SampleBatch, features: Mapping[str, Feature]) -> dict[str, Any]:
    named = dict(zip(features, (flat[str(i)] for i in range(len(features))), strict=True))
    observations = [name for name in named if name.split(".")[0] == NAMES[names.OBS]]
    columns: dict[str, Any] = {}
    if observations == [STATE]:
        columns[names.OBS] = named.pop(STATE)
    for name, values in named.items():
        *outer, last = _target_column(name).split(".")
        inner = columns
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = values
    for name in (names.DONES, names.TRUNCATEDS):
        if name in columns:
            columns[name] = as_flags(columns[name], name)
    if names.DONES in columns and names.TRUNCATEDS in columns:
        columns[names.TERMINATEDS] = columns.pop(names.DONES) & ~columns[names.TRUNCATEDS]
    return columns


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
    source: experience.Source,
    folder: str | os.PathLike[str],
    *,
    fps: float,
    task: str | Sequence[str] = "",
    robot: str = "",
) -> None:
    """Write steps as a new folder in LeRobot's layout, atomically.

    A single observation array becomes `observation.state`; the items of an observation dict become `observation.*`.
    `actions`, `rewards` and the flags become `action`, `next.reward`, `next.done` and `next.truncated`. The last step
    of an unfinished episode is written as truncated. Other columns keep their names. Next observations and empty infos
    are omitted, because the layout cannot represent them. Episodes are numbered from 0. Timestamps are `1 / fps`
    seconds apart.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.
    folder
        Folder to create. The folder must not exist or must be empty, and its parent folder must exist.
    fps
        Frames per second.
    task
        Description of the task of all steps, or a list of task descriptions to which the column `task_index` refers.
    robot
        Robot type; an empty string if it is unknown.

    Raises
    ------
    ArgumentError
        If `fps` is not positive, `task` is an empty list, or `task` contains a description twice.
    ColumnNotFoundError
        If observations or actions are missing, or no column delimits episodes.
    ColumnTypeError
        If a column is not numeric, or has rows of varying shape or of more than 5 dimensions.
    ColumnMismatchError
        If two columns map to the same name, `task_index` is not an index of `task`, or flags are not 0 or 1.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are no steps.
    StorageError, OSError
        If the folder is not empty or cannot be written.
    """
    if isinstance(fps, bool) or not (math.isfinite(fps) and fps > 0):
        raise errors.ArgumentError(f"fps must be positive, got {fps!r}")
    steps = experience.as_steps(source)
    experience.require_columns(steps.batch, names.OBS, names.ACTIONS)
    tasks = [task] if isinstance(task, str) else list(task)
    columns = _columns_of(steps)
    for name, values in _counters(steps, fps, _task_numbers(steps.batch, tasks, single=isinstance(task, str))).items():
        _add(columns, name, values)
    features = {name: _feature(name, values) for name, values in columns.items()}
    with _new_folder(folder) as temporary:
        statistics = {name: [_statistics(rows) for rows in _cut(values, steps)] for name, values in columns.items()}
        _write(temporary, steps, columns, statistics, tasks)
        joined = {name: _join_statistics(rows) for name, rows in statistics.items()}
        _write_json(
            temporary / STATS,
            {name: {k: v.tolist() for k, v in statistic.items()} for name, statistic in joined.items()},
        )
        _write_json(temporary / INFO, _info(steps, features, fps, len(tasks), robot))


def _is_empty_infos(name: str, batch: SampleBatch) -> bool:
    return name == names.INFOS and batch[name].dtype == object and not any(batch[name].tolist())


def _columns_of(steps: experience.Steps) -> Columns:
    columns: Columns = {}
    for name in steps.batch:
        if name not in _LEFT_OUT and not _is_empty_infos(name, steps.batch):
            values = experience.arrays_of(steps.batch, name)
            theirs = STATE if name == names.OBS and isinstance(values, np.ndarray) else NAMES.get(name, name)
            experience.map_leaves(partial(_add, columns), values, theirs)
    if names.TERMINATEDS in steps.batch or names.DONES in steps.batch:
        terminated, truncated = experience.flags_of(steps.batch)
        done = terminated | truncated
        done[steps.bounds[1:] - 1] = True
        _add(columns, NAMES[names.DONES], done)
        _add(columns, NAMES[names.TRUNCATEDS], done & ~terminated)
    return columns


def _add(columns: Columns, name: str, values: npt.NDArray[Any]) -> None:
    if name in columns:
        raise errors.ColumnMismatchError(
            f"column {name!r} must be unique in a LeRobot dataset, got two; rename or drop one"
        )
    columns[name] = values


def _task_numbers(batch: SampleBatch, tasks: list[str], *, single: bool) -> npt.NDArray[np.int64]:
    if not tasks:
        raise errors.ArgumentError("task must contain at least one description, got none")
    if len(set(tasks)) < len(tasks):
        repeated = next(task for task in tasks if tasks.count(task) > 1)
        raise errors.ArgumentError(f"task must contain each description only once, got {repeated!r} twice")
    if single:
        return np.zeros(batch.count, np.int64)
    experience.require_columns(batch, TASK)
    numbers = np.asarray(batch[TASK])
    if numbers.shape != (batch.count,) or numbers.dtype.kind not in "iu":
        actual = f"{numbers.dtype} of shape {numbers.shape}"
    elif np.all(is_index := (numbers >= 0) & (numbers < len(tasks))):
        return numbers.astype(np.int64)
    else:
        actual = str(numbers[is_index.argmin()])
    raise errors.ColumnMismatchError(
        f"column {TASK!r} must contain indices of task, from 0 to {len(tasks) - 1}, got {actual}"
    )


def _counters(steps: experience.Steps, fps: float, tasks: npt.NDArray[np.int64]) -> Columns:
    times = steps.times()
    return {
        TIMESTAMP: (times / fps).astype(np.float32),
        FRAME: times,
        EPISODE: steps.numbers(),
        INDEX: np.arange(steps.batch.count),
        TASK: tasks,
    }


def _feature(name: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    """Describe a column; elements of a vector have names, so that a vector of length 1 differs from a scalar."""
    if "/" in name:
        raise errors.ColumnTypeError(f"column {name!r} must have no '/' in its name in a LeRobot dataset; rename it")
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise errors.ColumnTypeError(
            f"column {name!r} must be numeric in a LeRobot dataset, got {values.dtype}; drop it"
        )
    shape = values.shape[1:]
    if len(shape) > _MAX_DIMENSIONS or 0 in shape:
        raise errors.ColumnTypeError(
            f"column {name!r} must have rows of at most 5 dimensions, all positive, got {shape}"
        )
    last = name.rsplit(".", 1)[-1]
    named = [f"{last}_{i}" for i in range(shape[0])] if len(shape) == 1 else None
    return {"dtype": values.dtype.name, "shape": list(shape or (1,)), "names": named}


def _info(steps: experience.Steps, features: Mapping[str, Any], fps: float, tasks: int, robot: str) -> dict[str, Any]:
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
        # Readers expect an integer if the value is integral.
        "fps": int(fps) if fps == int(fps) else float(fps),
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA,
        "video_path": None,
        "features": features,
    }


# Files


@contextlib.contextmanager
def _new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Create a temporary folder that replaces the target on success and is removed on failure."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        kind = "a folder with files" if target.is_dir() else "a file"
        raise errors.StorageError(f"{str(target)!r} must be a new or empty folder, got {kind}")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _cut(values: npt.NDArray[Any], steps: experience.Steps) -> list[npt.NDArray[Any]]:
    return np.split(values, steps.bounds[1:-1])


def _write(
    folder: Path,
    steps: experience.Steps,
    columns: Columns,
    statistics: Mapping[str, list[Statistics]],
    tasks: list[str],
) -> None:
    table = pa.table({name: _arrow(values) for name, values in columns.items()})
    numbers = _file_numbers(steps, table.nbytes)
    for number in range(int(numbers[-1]) + 1):
        first, last = np.searchsorted(numbers, [number, number + 1])
        start, stop = int(steps.bounds[first]), int(steps.bounds[last])
        chunk, file = divmod(number, _CHUNK_FILES)
        _write_table(folder / DATA.format(chunk_index=chunk, file_index=file), table.slice(start, stop - start))
    named = [[tasks[i] for i in np.unique(rows)] for rows in _cut(columns[TASK], steps)]
    first_file = PLACE.format(chunk_index=0, file_index=0)
    _write_table(folder / EPISODES / first_file, _episodes_table(steps, numbers, named, statistics))
    _write_table(folder / TASKS, _tasks_table(tasks))


def _file_numbers(steps: experience.Steps, nbytes: int) -> npt.NDArray[np.intp]:
    """Return the file number of each episode, shape (k,); a file contains at most approximately `_FILE_MIB` MiB."""
    beyond = steps.bounds[:-1] * (nbytes / steps.batch.count) // (_FILE_MIB << 20)
    numbers: npt.NDArray[np.intp] = np.unique(beyond, return_inverse=True)[1].reshape(-1)
    return numbers


def _arrow(values: npt.NDArray[Any]) -> pa.Array:
    """Convert an array to nested Arrow lists; vectors become fixed-size lists, or scalars if their length is 1."""
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
    steps: experience.Steps,
    numbers: npt.NDArray[np.intp],
    tasks: list[list[str]],
    statistics: Mapping[str, list[Statistics]],
) -> pa.Table:
    starts, stops = steps.bounds[:-1], steps.bounds[1:]
    zeros = np.zeros(len(starts), np.int64)
    columns: dict[str, Any] = {
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
        columns |= {f"stats/{name}/{key}": [row[key] for row in rows] for key in rows[0]}
    return pa.table(columns)


def _statistics(values: npt.NDArray[Any]) -> Statistics:
    """Compute statistics over all dimensions but the last, as LeRobot does; statistics of scalars have shape (1,)."""
    width = values.shape[-1] if values.ndim > 1 else 1
    rows: npt.NDArray[Any] = values.reshape(-1, width).astype(np.float64)
    # Infinite values have no mean.
    with np.errstate(invalid="ignore"):
        results = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
        quantiles = np.quantile(rows, _QUANTILES, axis=0)
    results |= {f"q{int(100 * q):02d}": values for q, values in zip(_QUANTILES, quantiles, strict=True)}
    return {"count": np.array([len(values)])} | results


def _join_statistics(rows: list[Statistics]) -> Statistics:
    """Merge the statistics of episodes; quantiles are averaged, as LeRobot does."""
    stacked = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    count = stacked.pop("count")
    with np.errstate(invalid="ignore"):
        means = {key: (values * count).sum(0) / count.sum() for key, values in stacked.items()}
        spread = stacked["std"] ** 2 + (stacked["mean"] - means["mean"]) ** 2
        deviation = np.sqrt((spread * count).sum(0) / count.sum())
    return means | {
        "min": stacked["min"].min(0),
        "max": stacked["max"].max(0),
        "std": deviation,
        "count": count.sum(0),
    }


def _tasks_table(tasks: list[str]) -> pa.Table:
    """Create the table that pandas would write for a data frame indexed by task; LeRobot requires this table."""
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
