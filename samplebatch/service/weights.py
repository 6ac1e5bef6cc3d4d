"""Serialization of weights as an Arrow stream of one record batch with one row per array, without pickle.

The record batch has four columns. Column `path` contains the names from the outermost dict to the array. Column `dtype`
contains a NumPy dtype (`"<f4"`) or a torch dtype (`"torch.bfloat16"`). Column `shape` contains the shape of the array.
Column `data` contains the bytes of the array in C order and in the machine's byte order.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from samplebatch.arguments import describe_value, whole
from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, TENSOR
from samplebatch.column import memory
from samplebatch.column.arrow_bodies import decompressed_stream_nbytes
from samplebatch.column.convert import as_column
from samplebatch.column.types import check_torch_name, named_dtype, named_torch_dtype
from samplebatch.errors import CapacityError, ColumnTypeError, FormatError
from samplebatch.service.protocol import WEIGHTS_KEY, read_request, short_text, text
from samplebatch.transport.broadcast import MAX_DEPTH

MAX_NAMES: Final = 64
"""Maximum number of names under which weights are published."""

MAX_VERSION: Final = 1 << 53
"""Highest version that a publisher may specify; every JSON parser represents it exactly."""

MAX_ARRAYS: Final = 1 << 16
"""Maximum number of arrays and tensors per publication."""

_TORCH = "torch."
_MAX_AXES: Final = 32
_MAX_NBYTES: Final = 1 << 62
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.list_(pa.string())),
        pa.field("dtype", pa.string()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("data", pa.large_binary()),
    ]
)

_COLUMNS = "weights must have the uncompressed columns {}, without nulls".format(
    ", ".join(f"{field.name} ({field.type})" for field in _SCHEMA)
)


class _Array(NamedTuple):
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


class Published(NamedTuple):
    """Newest weights that a service stores under one name.

    - `version`: version number, which increases with each publication.
    - `epoch`: identifier of the service run that assigned the version. Versions from different epochs cannot be
      compared.
    - `stream`: the weights as an Arrow stream.
    """

    version: int
    epoch: str
    stream: pa.Buffer


class PublishedWeights:
    """Store of the newest weights and their versions by name, for a `ReplayServer` and its checkpoints.

    Each `PublishedWeights` object has its own epoch. `load` preserves the epoch of restored weights, so that clients
    can distinguish restored weights from weights that were published after a restart.

    Examples
    --------
    >>> published = PublishedWeights()
    >>> published.publish(pack_weights({"bias": np.zeros(2)}, "policy")).version
    1
    >>> published.versions()
    {'policy': 1}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = secrets.token_hex(8)
        self._newest: dict[str, Published] = {}

    def publish(self, raw: Any) -> Published:
        """Store weights and replace previous weights of the same name.

        Parameters
        ----------
        raw
            Result of `pack_weights`.

        Raises
        ------
        FormatError
            If `raw` does not contain weights.
        ArgumentError, CapacityError
            If the name is too long, there are more than `MAX_NAMES` names, or the publisher's last version is invalid.
        """
        about = _read(raw)[0]
        name, after = short_text("name", about["name"]), whole("after", about.get("after", 0))
        if after > MAX_VERSION:
            raise CapacityError(f"after must be at most {MAX_VERSION}, got {after}")
        with self._lock:
            previous = self._newest.get(name)
            if previous is None and len(self._newest) >= MAX_NAMES:
                raise CapacityError(f"weights must have at most {MAX_NAMES} names, got {name!r} in addition")
            version = max(after, 0 if previous is None else previous.version) + 1
            published = self._newest[name] = Published(version, self._epoch, pa.py_buffer(raw))
        return published

    def latest(self, name: str) -> Published | None:
        """Return the newest weights of a name; None if no weights were published under the name."""
        with self._lock:
            return self._newest.get(name)

    def versions(self) -> dict[str, int]:
        """Return the newest version for each name."""
        with self._lock:
            return {name: newest.version for name, newest in self._newest.items()}

    def state(self) -> dict[str, Published]:
        """Return the newest weights for each name, in the format that `load` requires."""
        with self._lock:
            return dict(self._newest)

    def load(self, state: Mapping[str, Published]) -> None:
        """Replace all weights with the weights from a checkpoint; later publications continue the version numbering.

        Raises
        ------
        FormatError, ArgumentError, CapacityError
            If a stream does not contain weights, the name in a stream differs from its key in `state`, a version or
            epoch is invalid, or there are more than `MAX_NAMES` names.
        """
        if len(state) > MAX_NAMES:
            raise CapacityError(f"weights must have at most {MAX_NAMES} names, got {len(state)}")
        for name, (version, epoch, stream) in state.items():
            short_text("epoch", epoch)
            if whole("version", version, 1) > 2 * MAX_VERSION:
                raise CapacityError(f"version must be at most {2 * MAX_VERSION}, got {version}")
            actual = _read(stream)[0]["name"]
            if actual != short_text("name", name):
                raise FormatError(f"weights {name!r} must have this name in their stream, got {describe_value(actual)}")
        with self._lock:
            self._newest = dict(state)


def pack_weights(weights: Mapping[str, Any], name: str, after: int = 0) -> pa.Buffer:
    """Serialize weights as an Arrow stream, for `PublishedWeights.publish`.

    - `weights`: a flat or nested dict of arrays, tensors and numbers.
    - `name`: name under which the weights are published.
    - `after`: highest version that the publisher has received; the service assigns a higher version.

    Raises ColumnTypeError if `weights` is not a dict of arrays, tensors and numbers, has more than 32 levels of dicts,
    or contains a dtype that cannot be restored from bytes. Raises CapacityError if there are more than 65,536 arrays.
    Raises DeviceError if a tensor is not in host memory.

    >>> weights = {"layer.0": {"bias": np.arange(2.0)}, "step": 7}
    >>> name, weights = unpack_weights(pack_weights(weights, "policy"))
    >>> name, weights["layer.0"], weights["step"].item()
    ('policy', {'bias': array([0., 1.])}, 7)
    """
    rows = [(path, *_describe(".".join(path), value)) for path, value in _leaves(weights, ())]
    _check_count(len(rows))
    ends = np.cumsum([0, *(bits.nbytes for *_, bits in rows)])
    data = memory.empty((int(ends[-1]),), np.dtype(np.uint8))
    for (*_, bits), start, stop in zip(rows, ends[:-1], ends[1:], strict=True):
        data[start:stop] = bits
    offsets = memory.as_buffer(ends.astype(np.int64))
    arrays = [
        pa.array([list(path) for path, *_ in rows], _SCHEMA.field("path").type),
        pa.array([dtype for _, dtype, *_ in rows], pa.string()),
        pa.array([list(shape) for _, _, shape, _ in rows], _SCHEMA.field("shape").type),
        pa.Array.from_buffers(pa.large_binary(), len(rows), [None, offsets, memory.as_buffer(data)]),
    ]
    about = {"name": name, "after": after} if after else {"name": name}
    schema = _SCHEMA.with_metadata({WEIGHTS_KEY: json.dumps(about).encode()})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


def unpack_weights(raw: Any) -> tuple[str, dict[str, Any]]:
    """Deserialize the result of `pack_weights`; return the name and the weights.

    Arrays are views of `raw`, and are read-only if `raw` is read-only. Tensors are writable copies.

    Raises FormatError if `raw` does not contain weights, or a dtype cannot be restored from bytes. Raises CapacityError
    if there are more than 65,536 arrays.
    """
    about, arrays, data = _read(raw)
    weights: dict[str, Any] = {}
    for (path, dtype, shape), values in zip(arrays, data, strict=True):
        try:
            _put(weights, path, _restore(values.as_buffer(), dtype, shape))
        except ColumnTypeError as error:  # the installed torch lacks the dtype
            raise FormatError(f"weights must have dtypes that this process supports: {error}") from error
    return about["name"], weights


def _read(raw: Any) -> tuple[dict[str, Any], list[_Array], pa.Array]:
    """Validate weights, without creating arrays or importing torch.

    Return the metadata, the path, dtype and shape of each array, and the column of bytes. In the result, the number of
    bytes of each array matches the array's dtype and shape.
    """
    try:
        # Validated before reading: Arrow allocates the size that the prefix of a compressed buffer declares.
        is_plain = not decompressed_stream_nbytes(pa.py_buffer(raw))
        with ipc.open_stream(raw) as stream:
            schema = stream.schema
            about = read_request((schema.metadata or {})[WEIGHTS_KEY], "the description of weights")
            about["name"] = text("name", about["name"])
            batch = stream.read_next_batch() if is_plain and schema.equals(_SCHEMA) else None
        if batch is not None:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, RecursionError, StopIteration) as error:
        raise FormatError("weights must be an Arrow stream with their name, got none") from error
    if batch is None:
        raise FormatError(_COLUMNS)
    paths, dtypes, shapes, data = batch.columns
    if any(column.null_count for column in (*batch.columns, paths.flatten(), shapes.flatten())):
        raise FormatError(_COLUMNS)
    _check_count(batch.num_rows)
    ends = np.frombuffer(data.buffers()[1], np.int64, len(data) + 1, 8 * data.offset) if len(data) else np.zeros(1)
    arrays = [
        _Array(tuple(path), dtype, tuple(shape))
        for path, dtype, shape in zip(paths.to_pylist(), dtypes.to_pylist(), shapes.to_pylist(), strict=True)
    ]
    tree: dict[str, Any] = {}
    for array, size in zip(arrays, np.diff(ends).tolist(), strict=True):
        try:
            _check_array(array, size)
        except (ColumnTypeError, ValueError) as error:
            raise FormatError(f"weights must be arrays that fit their descriptions: {error}") from error
        _put(tree, array.path, None)
    return about, arrays, data


def _check_array(array: _Array, size: int) -> None:
    dtype, shape = array.dtype, array.shape
    is_tensor = dtype.startswith(_TORCH)
    itemsize = check_torch_name(dtype.removeprefix(_TORCH)) if is_tensor else named_dtype(dtype).itemsize
    # For an array with an empty axis, NumPy and torch also limit the product of the other axes.
    if len(shape) > _MAX_AXES or min(shape, default=0) < 0 or itemsize * prod(max(1, n) for n in shape) > _MAX_NBYTES:
        raise ValueError(
            f"an array must have at most {_MAX_AXES} axes of extents from 0 and {_MAX_NBYTES} bytes, got {dtype} of "
            f"shape {shape!r:.80}"
        )
    if not itemsize:
        raise ValueError(f"an array must have elements of 1 byte or more, got {dtype}")
    if itemsize * prod(shape) != size:
        raise ValueError(f"an array of {dtype} and shape {shape} must have {itemsize * prod(shape)} bytes, got {size}")


def _check_count(count: int) -> None:
    if count > MAX_ARRAYS:
        raise CapacityError(f"weights must have at most {MAX_ARRAYS} arrays, got {count}; concatenate small arrays")


def _leaves(weights: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(weights, Mapping):
        raise ColumnTypeError(f"weights must be a dict of arrays and tensors, got a {type(weights).__name__}")
    if len(path) >= MAX_DEPTH:
        raise ColumnTypeError(f"weights must be at most {MAX_DEPTH} dicts deep, got another dict in {'.'.join(path)!r}")
    for name, value in weights.items():
        if not isinstance(name, str):
            where = ".".join(path) or "them"
            raise ColumnTypeError(f"names of weights must be strings, got a {type(name).__name__} in {where}")
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _describe(name: str, value: Any) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    kind = KINDS[type(value)]
    if kind == TENSOR:
        column = as_column(value.detach().reshape(1, -1), name)
        (_, dtype, _), (bits,) = column.dump()
        return _TORCH + dtype, tuple(value.shape), np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    array = np.asarray(value) if kind in (ARRAY, NUMBER) else None
    if array is None or array.dtype.hasobject:
        raise ColumnTypeError(f"weights must be arrays and tensors, got a {type(value).__name__} for {name!r}")
    dtype = array.dtype.newbyteorder("=").str
    try:
        named_dtype(dtype)
    except ColumnTypeError as error:
        raise ColumnTypeError(f"weights {name!r} must have a dtype that can be restored from bytes: {error}") from error
    array = np.ascontiguousarray(array, dtype).reshape(array.shape)
    return dtype, array.shape, array.reshape(-1).view(np.uint8)


def _restore(data: pa.Buffer, dtype: str, shape: Sequence[int]) -> Any:
    if not dtype.startswith(_TORCH):
        return memory.as_array(data, named_dtype(dtype), shape)
    torch_dtype = named_torch_dtype(dtype.removeprefix(_TORCH))
    import torch

    return (
        torch.frombuffer(bytearray(data), dtype=torch_dtype).reshape(shape)
        if data.size
        else torch.empty(shape, dtype=torch_dtype)
    )


def _put(weights: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Insert an array into nested dicts; raises FormatError if the path is empty, too long or already used."""
    if not 1 <= len(path) <= MAX_DEPTH:
        raise FormatError(f"an array of weights must have 1 to {MAX_DEPTH} names on its path, got {len(path)}")
    *folders, name = path
    for folder in folders:
        weights = weights.setdefault(folder, {})
        if not isinstance(weights, dict):
            raise FormatError(f"weights must have one array or dict per name, got both for {folder!r:.80}")
    if name in weights:
        raise FormatError(f"weights must have one array or dict per name, got two for {name!r:.80}")
    weights[name] = value
