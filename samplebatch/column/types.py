"""Table of dtypes in NumPy, Arrow and torch.

Every entry defines how elements of a NumPy dtype are stored unchanged in an Arrow buffer. For dtypes that the Arrow
type does not determine (complex numbers, fixed-width strings, dates in days, multi-dimensional bool), the field's
metadata contains the dtype's name under `DTYPE_KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from samplebatch.errors import ColumnTypeError, near_names, require_torch

if TYPE_CHECKING:
    import torch

DTYPE_KEY = b"samplebatch.dtype"
"""Metadata key of the dtype's name, if the Arrow type does not determine the dtype."""

TORCH_KEY = b"samplebatch.torch"
"""Metadata key of a torch column's dtype. bfloat16 and the 8-bit floats, which NumPy lacks, are stored in Arrow as
unsigned integers of their size."""

NUMBERS = frozenset(
    np.dtype(t) for t in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
)
"""Native numeric dtypes, which require no further validation."""

_ARROW_NUMBERS: dict[np.dtype[Any], pa.DataType] = {
    np.dtype("i1"): pa.int8(),
    np.dtype("i2"): pa.int16(),
    np.dtype("i4"): pa.int32(),
    np.dtype("i8"): pa.int64(),
    np.dtype("u1"): pa.uint8(),
    np.dtype("u2"): pa.uint16(),
    np.dtype("u4"): pa.uint32(),
    np.dtype("u8"): pa.uint64(),
    np.dtype("f2"): pa.float16(),
    np.dtype("f4"): pa.float32(),
    np.dtype("f8"): pa.float64(),
}
_NUMPY_NUMBERS: dict[pa.DataType, np.dtype[Any]] = {arrow: dtype for dtype, arrow in _ARROW_NUMBERS.items()}
_ARROW_TIME_UNITS = ("s", "ms", "us", "ns")
_TORCH_NAMES = {dtype: dtype.name for dtype in NUMBERS}

TORCH_NBYTES: Final[Mapping[str, int]] = {
    **{dtype.name: dtype.itemsize for dtype in sorted(NUMBERS, key=str)},
    "bfloat16": 2,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Element size in bytes of each torch dtype whose tensors can be built from bytes, by name without `torch.`.

The table is complete on purpose. torch crashes if a tensor of a quantized dtype such as `qint8` is built from bytes,
and has no copy operation for its dtypes of less than one byte, such as `uint4`.
"""


class Storage(NamedTuple):
    """Storage of a dtype's elements in Arrow.

    arrow: Arrow type of one value.
    per_element: values per element, as a trailing shape: `(2,)` for complex numbers, otherwise `()`.
    named: whether the field's metadata must contain the dtype, because the Arrow type does not determine the dtype.
    """

    arrow: pa.DataType
    per_element: tuple[int, ...]
    named: bool


@lru_cache(maxsize=256)
def storage_of(dtype: np.dtype[Any]) -> Storage:
    """Return the storage of a dtype in Arrow.

    Raises ColumnTypeError if no Arrow layout stores elements of the dtype unchanged.

    >>> storage_of(np.dtype("f4")).arrow, storage_of(np.dtype("c8"))[1:]
    (DataType(float), ((2,), True))
    """
    if dtype in _ARROW_NUMBERS:
        return Storage(_ARROW_NUMBERS[dtype], (), named=False)
    if dtype.kind == "b":
        return Storage(pa.int8(), (), named=True)
    if dtype.kind == "c" and dtype.itemsize in (8, 16):
        return Storage(pa.float32() if dtype.itemsize == 8 else pa.float64(), (2,), named=True)
    if dtype.kind in "SU":
        return Storage(pa.binary(dtype.itemsize), (), named=True)
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        if unit in _ARROW_TIME_UNITS and count == 1:
            return Storage(pa.duration(unit) if dtype.kind == "m" else pa.timestamp(unit), (), named=False)
        return Storage(pa.int64(), (), named=True)
    raise ColumnTypeError(f"a dtype must be one that columns support, got {dtype}")


def dtype_of(arrow: pa.DataType) -> np.dtype[Any] | None:
    """Return the NumPy dtype with the memory layout of an Arrow type; None if no dtype has that layout."""
    number: np.dtype[Any] | None = _NUMPY_NUMBERS.get(arrow)
    if number is not None:
        return number
    if pa.types.is_timestamp(arrow) and arrow.tz is None:
        return np.dtype(f"M8[{arrow.unit}]")
    if pa.types.is_duration(arrow):
        return np.dtype(f"m8[{arrow.unit}]")
    if pa.types.is_fixed_size_binary(arrow):
        return np.dtype(f"S{arrow.byte_width}")
    return None


_PLAIN_NAME = re.compile(r"(?![|<>=]?a\d*$)[^\[/]*(\[([1-9][0-9]{0,8})?[a-zA-Zμ]+\])?")
"""Dtype names whose unit, if any, is a multiple of a NumPy unit; without NumPy's deprecated alias `a` of `S`."""


@lru_cache(maxsize=256)
def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that an untrusted name specifies; raises ColumnTypeError for an unsupported dtype."""
    # NumPy crashes if a number in a date's unit is zero.
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
        raise ColumnTypeError(f"a dtype must be one that columns support, got the name {name!r}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ColumnTypeError(f"a dtype must have a valid name, got {name!r}") from error
    if not dtype.isnative or dtype.kind not in "biufcSUmM":
        raise ColumnTypeError(f"a dtype must be one that columns support, got {name!r}")
    storage_of(dtype)
    return dtype


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return the torch dtype that corresponds to a NumPy dtype; None if torch has none (strings, dates).

    Raises MissingExtraError if torch is not installed.
    """
    name = _TORCH_NAMES.get(dtype)
    if name is None:
        return None
    require_torch()
    import torch

    dtype_in_torch: torch.dtype | None = getattr(torch, name, None)
    return dtype_in_torch


def check_torch_name(name: object) -> int:
    """Return the element size in bytes of a torch dtype named in a file or a message, without importing torch.

    Raises ColumnTypeError if tensors of the dtype cannot be built from bytes, or torch has no such dtype; the message
    suggests similar names.

    >>> check_torch_name("bfloat16")
    2
    >>> check_torch_name("qint8")
    Traceback (most recent call last):
    samplebatch.errors.ColumnTypeError: a torch dtype must be one whose tensors can be built
        from bytes, got 'qint8'; did you mean 'int8' or 'uint8' or 'int64'?
    """
    nbytes = TORCH_NBYTES.get(name) if isinstance(name, str) else None
    if nbytes is None:
        text = str(name)[:40]
        hint = near_names(text, TORCH_NBYTES)
        raise ColumnTypeError(f"a torch dtype must be one whose tensors can be built from bytes, got {text!r}; {hint}")
    return nbytes


@lru_cache(maxsize=256)
def named_torch_dtype(name: str) -> torch.dtype:
    """Return a torch dtype named in a file or a message.

    Raises ColumnTypeError if the name is invalid (see `check_torch_name`), or the installed torch lacks the dtype.
    Raises MissingExtraError if torch is not installed.
    """
    check_torch_name(name)
    require_torch()
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ColumnTypeError(f"torch must have dtype {name!r} to read it, got torch {torch.__version__} without it")
    return dtype


def movable(values: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements in another dtype of equal size that torch can gather and scatter.

    torch lacks gather and scatter for wide unsigned integers, and some of these operations for 8-bit floats.
    """
    return values.view(_movable_dtype(values.dtype))


@lru_cache(maxsize=256)
def _movable_dtype(dtype: torch.dtype) -> torch.dtype:
    return named_torch_dtype({1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[dtype.itemsize])


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the NumPy dtype that corresponds to a torch dtype; None if NumPy has none (bfloat16, 8-bit floats).

    >>> import torch
    >>> numpy_dtype(torch.float32), numpy_dtype(torch.bfloat16)
    (dtype('float32'), None)
    """
    name = str(dtype).removeprefix("torch.")
    try:
        candidate = np.dtype(name)
    except TypeError:
        return None
    return candidate if candidate in NUMBERS else None


def holds(wide: np.dtype[Any], narrow: np.dtype[Any]) -> bool:
    """Return whether the wide dtype represents every value of the narrow dtype exactly.

    The rule is stricter than NumPy's "safe" casting, which permits casts from 64-bit integers to float64, and casts of
    dates that can overflow.

    >>> f8, f4, i4, i8 = map(np.dtype, ("f8", "f4", "i4", "i8"))
    >>> holds(f8, f4), holds(f8, i4), holds(f8, i8)
    (True, True, False)
    """
    if wide == narrow:
        return True
    if narrow.kind in "iu" and wide.kind in "fc" and narrow.itemsize == 8:
        return False
    if wide.kind in "SUmM" and wide.kind != narrow.kind:
        return False
    if wide.kind in "mM":
        return False
    return np.can_cast(narrow, wide, "safe")


def common_dtype(dtypes: list[np.dtype[Any]]) -> np.dtype[Any] | None:
    """Return the dtype in `dtypes` that represents all other dtypes exactly; None if no dtype in `dtypes` does."""
    distinct = list(dict.fromkeys(dtypes))
    for wide in distinct:
        if all(holds(wide, narrow) for narrow in distinct):
            return wide
    return None
