"""Weights as an Arrow stream of one record batch, a row for each array, and back; nothing is pickled.

The columns are `path`, the names from the outermost dict to the array; `dtype`, NumPy's (`"<f4"`) or torch's
(`"torch.bfloat16"`); `shape`; and `data`, the bytes in C order and the machine's byte order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, TENSOR
from samplebatch.column import memory
from samplebatch.column.convert import as_column
from samplebatch.column.types import named_dtype
from samplebatch.errors import ColumnTypeError, FormatError
from samplebatch.service.protocol import WEIGHTS_KEY

_TORCH = "torch."
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.list_(pa.string())),
        pa.field("dtype", pa.string()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("data", pa.large_binary()),
    ]
)


def pack_weights(weights: Mapping[str, Any], name: str) -> pa.Buffer:
    """Write weights, with one copy.

    Parameters
    ----------
    weights
        A dict of arrays, tensors and numbers, flat or nested.
    name
        The name that they are published under.

    Raises
    ------
    ColumnTypeError
        If they are no such dict; names the value.
    DeviceError
        If a tensor is not in host memory; names it.

    Examples
    --------
    >>> weights = {"layer.0": {"bias": np.arange(2.0)}, "step": 7}
    >>> name, found = unpack_weights(pack_weights(weights, "policy"))
    >>> name, found["layer.0"], found["step"].item()
    ('policy', {'bias': array([0., 1.])}, 7)
    """
    rows = [(path, *_describe(".".join(path), value)) for path, value in _leaves(weights, ())]
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
    schema = _SCHEMA.with_metadata({WEIGHTS_KEY: json.dumps({"name": name}).encode()})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


def unpack_weights(raw: Any) -> tuple[str, dict[str, Any]]:
    """Read weights, and the name that they are published under; arrays are views of the bytes, read-only if these are.

    Raises
    ------
    FormatError
        If the bytes are no weights.
    """
    name, batch = _read(raw)
    weights: dict[str, Any] = {}
    described = zip(*(batch.column(own).to_pylist() for own in ("path", "dtype", "shape")), strict=True)
    try:
        for (path, dtype, shape), data in zip(described, batch.column("data"), strict=True):
            _put(weights, path, _restore(data.as_buffer(), dtype, shape))
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"weights must be arrays that fit their descriptions, one does not: {error}") from error
    return name, weights


def _read(raw: Any) -> tuple[str, pa.RecordBatch]:
    """Read the record batch of weights, and their name."""
    try:
        with ipc.open_stream(raw) as stream:
            schema = stream.schema
            name = str(json.loads((schema.metadata or {})[WEIGHTS_KEY])["name"])
            batch = stream.read_next_batch()
        batch.validate(full=True)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, RecursionError, StopIteration) as error:
        raise FormatError("weights must come as an Arrow stream that names them, they do not") from error
    if not schema.equals(_SCHEMA) or any(column.null_count for column in batch.columns):
        wanted = ", ".join(f"{field.name} ({field.type})" for field in _SCHEMA)
        raise FormatError(f"weights must have the columns {wanted}, without nulls, they have not")
    return name, batch


def name_of_weights(raw: Any) -> str:
    """Check weights that a client publishes, without making arrays of them, and return their name.

    Raises
    ------
    FormatError
        If the bytes are no weights.
    """
    return _read(raw)[0]


def _leaves(weights: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(weights, Mapping):
        raise ColumnTypeError(f"weights must be a dict of arrays and tensors, got a {type(weights).__name__}")
    for name, value in weights.items():
        if not isinstance(name, str):
            where = ".".join(path) or "them"
            raise ColumnTypeError(f"weights must have strings for names, got a {type(name).__name__} in {where}")
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _describe(name: str, value: Any) -> tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]:
    """Return the dtype, the shape and the bytes of an array or tensor."""
    kind = KINDS[type(value)]
    if kind == TENSOR:
        column = as_column(value.detach().reshape(1, -1), name)
        (_, dtype, _), (bits,) = column.dump()
        return _TORCH + dtype, tuple(value.shape), np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    array = np.asarray(value) if kind in (ARRAY, NUMBER) else None
    if array is None or array.dtype.hasobject:
        raise ColumnTypeError(f"weights must be arrays and tensors, {name!r} is a {type(value).__name__}")
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array.dtype.str, array.shape, array.reshape(-1).view(np.uint8)


def _restore(data: pa.Buffer, dtype: str, shape: list[int]) -> Any:
    """View the bytes of an array; those of a tensor are copied, as tensors are always writable.

    Raises
    ------
    ValueError, TypeError
        If they are not those of the dtype and the shape.
    """
    if dtype.startswith(_TORCH):
        import torch

        own: Any = getattr(torch, dtype.removeprefix(_TORCH), None)
    else:
        own = named_dtype(dtype)
    if min(shape, default=0) < 0 or own.itemsize * prod(shape) != data.size:
        raise ValueError("other bytes than those of the shape")
    if not dtype.startswith(_TORCH):
        return memory.as_array(data, own, shape)
    return torch.frombuffer(bytearray(data), dtype=own).reshape(shape) if data.size else torch.empty(shape, dtype=own)


def _put(weights: dict[str, Any], path: list[str], value: Any) -> None:
    *folders, name = path
    for folder in folders:
        weights = weights.setdefault(folder, {})
    if name in weights:
        raise ValueError("two arrays of one name")
    weights[name] = value
