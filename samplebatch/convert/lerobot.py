"""LeRobot's datasets, version 3 of their layout: a folder of Parquet files, a row a frame, described in JSON.

Nothing in the folder is trusted: the description is validated, its paths lead into the folder alone, and rows are held
against it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.casting import as_flags
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.types import named_dtype
from samplebatch.convert.lerobot_layout import EPISODE, FRAME, INDEX, NAMES, STATE, Episodes, Feature, Layout
from samplebatch.convert.steps import join_episodes
from samplebatch.errors import ColumnTypeError, FormatError, MissingExtraError, RowIndexError, no_such_column, require
from samplebatch.storage.parquet import open_parquet

_TO_FLAT = {theirs: name for name, theirs in NAMES.items()}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's modes by the channels of an image."""


def read_lerobot(
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    episodes: Iterable[int] | None = None,
    max_nbytes: int | None = None,
) -> SampleBatch:
    """Read the frames of a dataset in LeRobot's layout, episode by episode, as steps.

    `observation.*` become nested `obs`; where `observation.state` is the only one that is read, it is `obs` itself.
    `action`, `next.reward`, `episode_index` and `frame_index` become `actions`, `rewards`, `eps_id` and `t`;
    `next.done` is `dones`, or `terminateds` and `truncateds` if there is `next.truncated`, too. `index`, the number of
    the row, is left out, and other features keep their names. There is no `new_obs`: the layout has no observation
    after the last action. A feature of shape (1,) without names is a number a step. Images become arrays of shape
    (height, width, channels).

    Parameters
    ----------
    folder
        The dataset, on the disk.
    columns
        Features to be read, by LeRobot's names, beside the numbers of episode and frame; all if None. Videos are not
        read: a dataset with some is read by the names of others.
    episodes
        Numbers of the episodes to be read; all if None.
    max_nbytes
        Bytes of memory that may be made of each file; 256 MiB or 1024 times its own, whichever is more, if None.

    Raises
    ------
    FormatError
        If the description is not as LeRobot writes it, leads out of the folder, or rows are others than it says; or if
        a file is damaged. Names file or column.
    ColumnNotFoundError
        If there is no such feature.
    ColumnTypeError
        If a feature is a video, or of a dtype that no column can hold; names it.
    RowIndexError
        If there is no such episode.
    CapacityError
        If more memory would be made of a file than `max_nbytes`; names the column.
    MissingExtraError
        If there are images and Pillow is not installed; names the column.
    OSError
        If a file cannot be read.
    """
    layout = Layout(folder)
    wanted = _choose_features(layout.features, columns)
    found = layout.episodes(max_nbytes)
    chosen = _choose_episodes(found, episodes)
    parts = []
    for key in np.unique(np.stack([found.chunk, found.file]), axis=1).T.tolist():
        here = (found.chunk == key[0]) & (found.file == key[1])
        if np.any(chosen[here]):
            path = os.fspath(layout.data_path(*key))
            parts.append(_read_file(path, wanted, found.at(here), chosen[here], max_nbytes))
    return SampleBatch(_as_columns(join_episodes(parts), wanted))


def _choose_features(features: Mapping[str, Feature], columns: Sequence[str] | None) -> dict[str, Feature]:
    """Choose the features to be read, and refuse by name those that cannot be."""
    listed = [name for name in features if name != INDEX] if columns is None else list(columns)
    for name in listed:
        if name not in features:
            raise no_such_column(name, features)
    wanted = {name: features[name] for name in dict.fromkeys((*listed, EPISODE, FRAME))}
    for name, feature in wanted.items():
        if feature.dtype == "video":
            raise ColumnTypeError(f"column {name!r} must not be a video to be read; name the others with columns=")
        if feature.dtype not in ("image", "string") and not _holds_numbers(feature.dtype):
            raise ColumnTypeError(f"column {name!r} must hold numbers, strings or images, got {feature.dtype!r}")
    _check_places(wanted)
    return wanted


def _holds_numbers(dtype: str) -> bool:
    try:
        return named_dtype(dtype).kind in "biuf"
    except ColumnTypeError:
        return False


def _check_places(wanted: Iterable[str]) -> None:
    """Check that no two features become one column, and none is nested in another."""
    places: dict[str, str] = {}
    for name in wanted:
        place = _place(name)
        if place in places:
            raise FormatError(f"column {name!r} must not stand for the same as {places[place]!r}; leave one out")
        places[place] = name
    for place, name in places.items():
        parts = place.split(".")
        for outer in (".".join(parts[:i]) for i in range(1, len(parts))):
            if outer in places:
                raise FormatError(f"column {name!r} must not be nested in {places[outer]!r}, which is a column itself")


def _place(name: str) -> str:
    """Return the dotted name in a batch of a feature's."""
    if name in _TO_FLAT:
        return _TO_FLAT[name]
    first, dot, rest = name.partition(".")
    return _TO_FLAT.get(first, first) + dot + rest


def _choose_episodes(found: Episodes, episodes: Iterable[int] | None) -> npt.NDArray[np.bool_]:
    if episodes is None:
        return np.ones(len(found.number), np.bool_)
    wanted = list(episodes)
    known = set(found.number.tolist())
    for number in wanted:
        if number not in known:
            raise RowIndexError(f"episode {number!r} must be one of the dataset, which has {len(known)}")
    if not wanted:
        raise RowIndexError("episodes must name an episode at least, got none")
    return np.isin(found.number, wanted)


def _read_file(
    path: str,
    wanted: Mapping[str, Feature],
    episodes: Episodes,
    chosen: npt.NDArray[np.bool_],
    max_nbytes: int | None,
) -> SampleBatch:
    """Read a data file, and hold its rows against the episodes that it should have."""
    file, bound = open_parquet(path, max_nbytes=max_nbytes)
    for name in wanted:
        if name not in file.schema.names:
            raise FormatError(f"{path!r} must have column {name!r}, as meta/info.json says")
    # In their order in the file, as the reader takes them.
    listed = [name for name in file.schema.names if name in wanted]
    table = file.read(range(file.num_groups), listed, bound)
    # Each alone first, as their sum may be beyond the largest number.
    if np.any(episodes.length > table.num_rows) or int(episodes.length.sum()) != table.num_rows:
        raise FormatError(f"{path!r} must have the rows of its episodes, it has {table.num_rows}")
    expected = {
        EPISODE: np.repeat(episodes.number, episodes.length),
        FRAME: np.arange(table.num_rows) - np.repeat(np.cumsum(episodes.length) - episodes.length, episodes.length),
    }
    for name, numbers in expected.items():
        if not np.array_equal(_values(table[name], name, wanted[name], bound), numbers):
            raise FormatError(f"column {name!r} of {path!r} must number its episodes' frames in order")
    if not chosen.all():
        table = table.filter(pa.array(np.repeat(chosen, episodes.length)))
    return SampleBatch(
        {str(i): _values(table[name], name, feature, bound) for i, (name, feature) in enumerate(wanted.items())}
    )


def _values(column: pa.ChunkedArray, name: str, feature: Feature, bound: MemoryBound) -> Any:
    """Return the values of a column, as its feature says that they are."""
    array = column.combine_chunks()
    array = getattr(array, "storage", array)
    if feature.dtype == "image":
        return _decode_images(array, name, feature.shape, bound)
    rows = len(array)
    sizes = feature.shape or (1,)
    for size in sizes if _is_list(array.type) or feature.shape not in ((), (1,)) else ():
        if not _is_list(array.type) or array.null_count or not _has_lists_of(array, size):
            raise FormatError(f"column {name!r} must have rows of shape {feature.shape}, as meta/info.json says")
        array = array.flatten()
    if array.null_count or _is_list(array.type):
        raise FormatError(f"column {name!r} must have no nulls, and rows of shape {feature.shape}")
    return _cast(array, name, feature, bound).reshape(rows, *feature.shape)


def _decode_images(array: pa.Array, name: str, shape: tuple[int, ...], bound: MemoryBound) -> npt.NDArray[np.uint8]:
    """Decode images that are embedded in their column, shape (n, height, width, channels)."""
    try:
        image = require("PIL.Image", "lerobot")
    except MissingExtraError as error:
        raise MissingExtraError(f"column {name!r} has images: {error}") from error
    if not pa.types.is_struct(array.type) or array.type.get_field_index("bytes") < 0 or array.null_count:
        raise FormatError(f"column {name!r} must have images embedded in it, as bytes")
    if len(shape) != 3:
        raise FormatError(f"column {name!r} must have images of three dimensions, meta/info.json says {shape}")
    height, width, channels = shape if shape[2] in _MODES else (*shape[1:], shape[0])
    mode = _MODES.get(channels)
    if mode is None:
        raise FormatError(f"column {name!r} must have images of 1, 3 or 4 channels, meta/info.json says {shape}")
    data = array.field("bytes")
    bound.take(len(data) * height * width * channels, f"column {name!r}")
    images = np.empty((len(data), height, width, channels), np.uint8)
    for row, encoded in enumerate(data):
        try:
            # The size stands in the first bytes: nothing is decoded before it is known to be as described.
            with image.open(io.BytesIO(encoded.as_py()), formats=("PNG", "JPEG")) as opened:
                fits: bool = opened.size == (width, height)
                if fits:
                    images[row] = np.asarray(opened.convert(mode)).reshape(height, width, channels)
        # Pillow words damage in many ways, and warns of sizes that it takes for an attack.
        except (OSError, ValueError, SyntaxError, TypeError, image.DecompressionBombError, Warning) as error:
            raise FormatError(f"row {row} of column {name!r} must be an embedded PNG or JPEG, and it is not") from error
        if not fits:
            raise FormatError(f"row {row} of column {name!r} must be an image of {width} by {height}")
    return images


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _has_lists_of(array: pa.Array, size: int) -> bool:
    return bool(np.all(array.value_lengths().to_numpy(zero_copy_only=False) == size))


def _cast(array: pa.Array, name: str, feature: Feature, bound: MemoryBound) -> npt.NDArray[Any]:
    text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if text != (feature.dtype == "string"):
        raise FormatError(f"column {name!r} must hold {feature.dtype}, as meta/info.json says, got {array.type}")
    if text:
        rows: list[str] = array.to_pylist()
        # Each takes as much as the longest, 4 bytes a letter.
        bound.take(4 * len(rows) * max(map(len, rows), default=0), f"column {name!r}")
        return np.array(rows, np.str_)
    values = array.to_numpy(zero_copy_only=False)
    wanted = np.dtype(feature.dtype)
    if not np.can_cast(values.dtype, wanted, "same_kind"):
        raise FormatError(f"column {name!r} must hold {feature.dtype}, as meta/info.json says, got {array.type}")
    cast: npt.NDArray[Any] = values.astype(wanted, copy=False)
    return cast


def _as_columns(flat: SampleBatch, wanted: Mapping[str, Feature]) -> dict[str, Any]:
    """Name columns as this library does, nested as the dots of their names say."""
    named = dict(zip(wanted, (flat[str(i)] for i in range(len(wanted))), strict=True))
    observations = [name for name in named if name.split(".")[0] == NAMES[names.OBS]]
    columns: dict[str, Any] = {}
    if observations == [STATE]:
        columns[names.OBS] = named.pop(STATE)
    for name, values in named.items():
        *outer, last = _place(name).split(".")
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
