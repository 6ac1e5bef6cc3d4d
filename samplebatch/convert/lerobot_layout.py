"""The layout of LeRobot's datasets, version 3: the description in `meta/`, and where the rows of episodes lie."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.convert.parquet_tables import files_in
from samplebatch.errors import FormatError, near_names
from samplebatch.storage.parquet import open_parquet

NAMES = names.PEERS["lerobot"]
VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes"
PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = f"data/{PLACE}"
STATE = f"{NAMES[names.OBS]}.state"
"""The feature that observations are which are one array."""

EPISODE, FRAME = NAMES[names.EPS_ID], NAMES[names.T]
TIMESTAMP, INDEX, TASK = "timestamp", "index", "task_index"
CHUNK_AT, FILE_AT = "data/chunk_index", "data/file_index"
LENGTH = "length"
_WHERE = (EPISODE, LENGTH, CHUNK_AT, FILE_AT)

_FIELD = re.compile(r"\{(chunk_index|file_index)(?::0?([1-9])d)?\}")
Numbers = npt.NDArray[np.int64]


class Feature(NamedTuple):
    """A column as `info.json` describes it.

    Attributes
    ----------
    dtype
        A NumPy dtype's name, `"string"`, `"image"` or `"video"`.
    shape
        Of a row; () for one number.
    """

    dtype: str
    shape: tuple[int, ...]


class Episodes(NamedTuple):
    """Where the rows of episodes lie, a row an episode, in order.

    Attributes
    ----------
    number, length, chunk, file
        The number of each episode, its frames, and the chunk and the file that they lie in, shape (k,) each.
    """

    number: Numbers
    length: Numbers
    chunk: Numbers
    file: Numbers

    def at(self, which: npt.NDArray[Any]) -> Episodes:
        """Return some of the episodes."""
        return Episodes(*(values[which] for values in self))


class Layout:
    """The description of a dataset, read from its folder and validated; held by the reader.

    Attributes
    ----------
    features
        The columns by name.

    Raises
    ------
    FormatError
        If `meta/info.json` is not as LeRobot writes it.
    OSError
        If it cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._name = str(self._folder / INFO)
        info = self._load()
        version = info.get("codebase_version")
        if not isinstance(version, str) or not version.startswith("v3."):
            raise self._fault("must be of version 3 of the layout; convert older datasets with LeRobot")
        features = info.get("features")
        if not isinstance(features, dict):
            raise self._fault("must have 'features', an object")
        self.features = {name: self._feature(name, about) for name, about in features.items()}
        for name in (EPISODE, FRAME):
            if name not in self.features:
                raise self._fault(f"must have feature {name!r}; {near_names(name, self.features)}")
        self._template = self._path_template(info.get("data_path", DATA))

    def data_path(self, chunk: int, file: int) -> Path:
        """Return the path of a data file."""
        numbers = {"chunk_index": chunk, "file_index": file}
        filled = _FIELD.sub(lambda found: f"{numbers[found[1]]:0{found[2] or 1}d}", self._template)
        return self._folder / filled

    def episodes(self, max_nbytes: int | None) -> Episodes:
        """Read where episodes lie.

        Raises
        ------
        FormatError
            If a file is damaged, or a column is missing, has nulls, or numbers that cannot be; names it.
        CapacityError
            If more memory would be made of a file than `max_nbytes`.
        OSError
            If a file cannot be read.
        """
        place = self._folder / EPISODES
        parts = [_episodes_in(path, max_nbytes) for path in files_in(place, ".parquet")]
        found = Episodes(*map(np.concatenate, zip(*parts, strict=True)))
        if not len(found.number):
            raise FormatError(f"{str(place)!r} must have episodes, it has none")
        found = found.at(np.argsort(found.number, kind="stable"))
        if np.any(found.number[1:] == found.number[:-1]):
            raise FormatError(f"{str(place)!r} must have each episode once, some are there twice")
        return found

    def _load(self) -> dict[str, Any]:
        try:
            info = json.loads(Path(self._name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._fault("must be JSON, and it is not") from error
        if not isinstance(info, dict):
            raise self._fault("must be an object of JSON")
        return info

    def _feature(self, name: str, about: Any) -> Feature:
        found = about if isinstance(about, Mapping) else {}
        dtype, shape = found.get("dtype"), found.get("shape")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise self._fault(f"must give feature {name!r} a dtype and a shape of numbers from 1")
        if shape == [1] and found.get("names") is None:
            shape = []
        return Feature(dtype, tuple(shape))

    def _path_template(self, given: Any) -> str:
        """Check that a template has the places of two numbers alone, and leads nowhere but into the folder.

        Links are followed: the cache of downloads keeps files as links to its own.
        """
        if isinstance(given, str):
            plain = _FIELD.sub("0", given)
            path = PurePosixPath(plain)
            inside = not path.is_absolute() and ".." not in path.parts
            if inside and not set(plain) & set("{}\\:\0") and plain.endswith(".parquet"):
                return given
        raise self._fault("must have a 'data_path' of Parquet files in its folder, with chunk_index and file_index")

    def _fault(self, must: str) -> FormatError:
        return FormatError(f"{self._name!r} {must}")


def _is_size(size: Any) -> bool:
    return type(size) is int and size >= 1


def _episodes_in(path: Path, max_nbytes: int | None) -> Episodes:
    file, bound = open_parquet(path, max_nbytes=max_nbytes)
    for name in _WHERE:
        if name not in file.schema.names:
            raise FormatError(f"{file.name!r} must have column {name!r}; {near_names(name, file.schema.names)}")
    # In their order in the file, as the reader takes them; the statistics beside them may be large.
    table = file.read(range(file.num_groups), [name for name in file.schema.names if name in _WHERE], bound)
    return Episodes(*(_numbers_in(table[name], name, file.name) for name in _WHERE))


def _numbers_in(column: pa.ChunkedArray, name: str, path: str) -> Numbers:
    least = int(name == LENGTH)
    if pa.types.is_integer(column.type) and not column.null_count:
        numbers: Numbers = column.to_numpy().astype(np.int64)
        if np.all(numbers >= least):
            return numbers
    raise FormatError(f"column {name!r} of {path!r} must have whole numbers from {least} alone")
