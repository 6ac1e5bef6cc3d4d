"""The values of a step as a buffer stores them: whatever was given, flags are bool and rewards float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR, node, values_of
from samplebatch.batch.nested.tensors import array_of
from samplebatch.column.casting import as_flags
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    near_names,
)

FLAGS: Final = ("terminated", "truncated")
"""The flags that a step is given with; `done` is made of them."""

_MAX_FRAMES = 16
"""What is longer is no stack of frames, where the rest of the shape is that of an image."""

_REQUIRED = ("obs", "act", "rew", *FLAGS)


def stored_values(held: Mapping[str, Any], n: int, *, single: bool, last_frame: bool) -> dict[str, Any]:
    """Return the values to be stored of n rows, or of a single one without a leading axis.

    `done` alone stands for `terminated`. With `last_frame`, observations are stacks of frames of which the newest is
    taken.

    Raises
    ------
    ColumnNotFoundError
        If a column is missing that every step must have; names it.
    ColumnLengthError, ColumnMismatchError, ColumnTypeError
        If rewards or flags are no numbers, or not one a row; names the column.

    Examples
    --------
    >>> stored_values({"obs": 1, "act": 2, "rew": 3, "done": 1}, 1, single=True, last_frame=False)["done"]
    array(True)
    """
    values = dict(held)
    if "terminated" not in values and "truncated" not in values and "done" in values:
        # The older form took any number but 0 for true.
        values["terminated"] = numbers(values["done"], "done", () if single else (n,), np.float64) != 0.0
        values["truncated"] = np.zeros(() if single else n, np.bool_)
    for name in _REQUIRED:
        if name not in values:
            raise ColumnNotFoundError(f"a step must have column {name!r}; {near_names(name, held)}")
    lead = () if single else (n,)
    values["rew"] = numbers(values["rew"], "rew", lead, np.float64)
    for name in FLAGS:
        values[name] = numbers(values[name], name, lead, np.bool_).reshape(lead)
    values["done"] = np.asarray(values["terminated"] | values["truncated"])
    if last_frame:
        for name in ("obs", "obs_next"):
            if name in values:
                values[name] = newest_frame(values[name], name, single=single)
    return values


def numbers(value: Any, name: str, lead: tuple[int, ...], kind: type[Any]) -> npt.NDArray[Any]:
    """Convert rewards or flags to numbers of a kind.

    Parameters
    ----------
    lead
        The number of rows, in a tuple; an empty one for a single row without a leading axis.

    Raises
    ------
    ColumnLengthError
        If there are not as many rows; names the column.
    ColumnMismatchError
        If there are several flags a row, or one that is neither 0 nor 1; names the column.
    ColumnTypeError
        If they are no real numbers; names the column.

    Examples
    --------
    >>> numbers([1, 0], "terminated", (2,), np.bool_)
    array([ True, False])
    """
    array = array_of(value) if KINDS[type(value)] == TENSOR else np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ColumnTypeError(f"column {name!r} must have numbers, got {array.dtype}")
    if array.shape[: len(lead)] != lead:
        found = array.shape[0] if array.ndim else "a single number"
        raise ColumnLengthError(f"column {name!r} must have {lead[0]} rows, got {found}")
    if kind is np.bool_ and array.size != (lead[0] if lead else 1):
        raise ColumnMismatchError(f"column {name!r} must have one flag a row, got shape {array.shape[len(lead) :]}")
    return as_flags(array, name) if kind is np.bool_ else array.astype(kind, copy=False)


def newest_frame(value: Any, path: str, *, single: bool) -> Any:
    """Take the last frame of stacked observations, of one row or of each.

    Raises
    ------
    ColumnMismatchError
        If observations are no stacks, or images whose first axis is one of pixels; names the column.
    """
    names = values_of(value)
    if names is not None:
        return node(
            Batch, {name: newest_frame(inner, f"{path}.{name}", single=single) for name, inner in names.items()}
        )
    shape = np.shape(value) if single else np.shape(value)[1:]
    if _has_pixels_first(shape, getattr(value, "dtype", None)):
        raise ColumnMismatchError(
            f"column {path!r} must have its frames along the first axis for only the last to be saved, got rows of "
            f"shape {shape}, which are images; move the axis of frames to the front, or give the newest as a stack of 1"
        )
    try:
        return value[-1] if single else value[:, -1]
    except (TypeError, IndexError) as error:
        raise ColumnMismatchError("observations must be stacks of frames for only the last to be saved") from error


def _has_pixels_first(shape: tuple[int, ...], dtype: Any) -> bool:
    """Tell whether rows look like images with channels last, or without any, rather than like stacks of frames."""
    if not shape or shape[0] <= _MAX_FRAMES:
        return False
    return (len(shape) == 3 and shape[-1] <= _MAX_FRAMES) or (len(shape) == 2 and dtype == np.uint8)


def rows_at(values: Any, index: Any) -> Any:
    """Take rows of values; a name without values has them all."""
    return values if KINDS[type(values)] == NODE and not values.__dict__ else values[index]
