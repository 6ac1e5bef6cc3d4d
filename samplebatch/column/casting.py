"""Exact casts of arrays and of values that environments and policies return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import describe_value
from samplebatch.column.types import holds
from samplebatch.errors import ColumnMismatchError, SampleBatchError

_KIND_RANK = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}


def cast_exactly(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Cast an array to a dtype of the same or a wider kind; return None if a value would change.

    >>> (
    ...     cast_exactly(np.array([1, 2]), np.dtype("f4")),
    ...     cast_exactly(np.array([1.5]), np.dtype("i8")),
    ... )
    (array([1., 2.], dtype=float32), None)
    >>> cast_exactly(np.array([2**53 + 1]), np.dtype("f8")) is None
    True
    """
    source = array.dtype
    if source == dtype:
        return array
    if holds(dtype, source):
        # NumPy warns about signaling NaNs, which become quiet NaNs.
        with np.errstate(invalid="ignore"):
            return array.astype(dtype)
    if _KIND_RANK.get(source.kind, 9) > _KIND_RANK.get(dtype.kind, -1):
        return None
    if not array.size:
        return array.astype(dtype)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return array.astype(dtype) if int(array.min()) >= bounds.min and int(array.max()) <= bounds.max else None
    if source.kind in "iu":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        real = cast.real
        # The cast back is undefined outside the integer's range.
        exact = bool(np.isfinite(real).all()) and float(real.max()) < 2.0 ** (
            8 * source.itemsize - (source.kind == "i")
        )
        return cast if exact and bool(np.array_equal(real.astype(source), array)) else None
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    # Part by part, because NumPy treats all complex numbers with a NaN part as equal.
    exact = all(np.array_equal(new.astype(old.dtype), old, equal_nan=True) for new, old in _parts(cast, array))
    return cast if exact else None


def _parts(new: npt.NDArray[Any], old: npt.NDArray[Any]) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Pair the real parts of two arrays and, if the old array is complex, the imaginary parts."""
    pairs = [(new.real, old.real)]
    return [*pairs, (new.imag, old.imag)] if old.dtype.kind == "c" else pairs


def as_flags(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.bool_]:
    """Cast numbers to bool.

    Raises ColumnMismatchError if a number is neither 0 nor 1.

    >>> as_flags(np.array([0.0, 1.0]), "terminated")
    array([False,  True])
    """
    if array.dtype.kind == "b":
        return array
    flags: npt.NDArray[np.bool_] = array != 0
    if not np.array_equal(flags, array):
        other = array[flags != array].tolist()[0]
        raise ColumnMismatchError(f"column {name!r} must have flags, 0 or 1 each, got {describe_value(other)}")
    return flags


def wider(stored: np.dtype[Any], new: np.dtype[Any]) -> Sequence[np.dtype[Any]]:
    """Return dtypes that may represent both operands exactly, most likely first; `cast_exactly` checks each dtype.

    >>> wider(np.dtype("i8"), np.dtype("f8")), wider(np.dtype("i8"), np.dtype("U3"))
    ((dtype('float64'), dtype('float64')), ())
    """
    try:
        promoted = np.promote_types(stored, new)
    except TypeError:
        return ()
    if _KIND_RANK.get(stored.kind) is None or _KIND_RANK.get(new.kind) is None:
        return (promoted,) if promoted.kind == stored.kind == new.kind else ()
    if stored.kind in "iu" and new.kind in "iu":
        return (promoted, new) if promoted.kind in "iu" else (new,)
    return (promoted, new)


Refuse = Callable[[str, int | None], SampleBatchError]
"""Function that creates the error from a sentence about a column and the invalid row (None: not a single row)."""

FLOAT, BOOL = np.dtype(np.float64), np.dtype(np.bool_)
"""Dtypes of rewards and flags."""

FLOATS, BOOLS = frozenset({float, np.float64, np.float32}), frozenset({bool, np.bool_})
"""Types of numbers that these dtypes represent exactly."""

_TYPES = {FLOAT: FLOATS, BOOL: BOOLS}
_NUMBERS = "biuf"


def exact_rows(
    name: str, values: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse
) -> npt.NDArray[Any]:
    """Cast values exactly to a declared dtype and shape.

    Floats that are wider than the declared float dtype are returned in the wider dtype, so that no value is rounded.
    Trailing axes of length 1 beyond the shape are removed.

    Parameters
    ----------
    name
        Name of the column, for the error.
    values
        An array or nested sequences; an array is not copied if dtype and shape match.
    dtype
        Dtype of the result: bool, an integer dtype or a float dtype.
    shape
        Shape, rows first.
    refuse
        Function that creates the error.

    Raises
    ------
    SampleBatchError
        The error from `refuse`, if values are not numeric, do not match `shape`, or would change when cast.

    Examples
    --------
    >>> from samplebatch.errors import EnvironmentSpecError
    >>> refuse = lambda sentence, row: EnvironmentSpecError(
    ...     f"{sentence} from environment {row}"
    ... )
    >>> exact_rows("terminateds", [0, 1.0], np.dtype(bool), (2,), refuse)
    array([False,  True])
    >>> exact_rows("terminateds", [0, 0.5], np.dtype(bool), (2,), refuse)
    Traceback (most recent call last):
    samplebatch.errors.EnvironmentSpecError: column 'terminateds' must have dtype bool, got a
        value of float64 that does not fit it without loss from environment 1
    """
    array = _numbers(values, shape)
    if array is not None:
        array = _in_dtype(array, dtype)
    return _row_by_row(name, values, dtype, shape, refuse, _in_dtype) if array is None else array


def exact_number(name: str, value: Any, dtype: np.dtype[Any], refuse: Refuse) -> Any:
    """Cast a single reward or flag exactly; see `exact_rows`.

    >>> exact_number(
    ...     "rewards", 7, FLOAT, lambda sentence, row: SampleBatchError(sentence)
    ... ).item()
    7.0
    """
    return value if type(value) in _TYPES[dtype] else exact_rows(name, [value], dtype, (1,), refuse)[0]


def exact_outcomes(
    rewards: Sequence[Any],
    terminateds: Sequence[Any],
    truncateds: Sequence[Any],
    refuse: Refuse,
    reward_shape: tuple[int, ...] = (),
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Cast the rewards and flags of n environments exactly; see `exact_rows`.

    Flags have shape (n,). Rewards have shape (n, *reward_shape); the shape is (n, agents) if agents take turns.

    >>> exact_outcomes(
    ...     [1.5, 2],
    ...     (False, 1),
    ...     [False, False],
    ...     lambda sentence, row: SampleBatchError(sentence),
    ... )
    (array([1.5, 2. ]), array([False,  True]), array([False, False]))
    """
    shape = (len(rewards),)
    if FLOATS.issuperset(map(type, rewards)):
        paid = np.array(rewards, FLOAT)
    else:
        paid = exact_rows(names.REWARDS, rewards, FLOAT, (*shape, *reward_shape), refuse)
    if BOOLS.issuperset(map(type, (*terminateds, *truncateds))):
        return paid, np.array(terminateds, BOOL), np.array(truncateds, BOOL)
    over = exact_rows(names.TERMINATEDS, terminateds, BOOL, shape, refuse)
    return paid, over, exact_rows(names.TRUNCATEDS, truncateds, BOOL, shape, refuse)


def nearest_rows(
    name: str, values: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse
) -> npt.NDArray[Any]:
    """Cast values like `exact_rows`, but round floats to a declared float dtype.

    Gymnasium's vector environments also round floats to the declared dtype. Overflow of a finite value to infinity is
    an error.
    """
    array = _numbers(values, shape)
    if array is not None:
        array = _nearest(array, dtype)
    return _row_by_row(name, values, dtype, shape, refuse, _nearest) if array is None else array


def _numbers(values: Any, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    """View values as a numeric array of shape `shape`.

    Returns None if the values are not numeric, have another shape, or would be rounded.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        return None
    if array.dtype.kind not in _NUMBERS or _rounds(values, array):
        return None
    if array.shape == shape:
        return array
    return array.reshape(shape) if array.shape == shape + (1,) * (array.ndim - len(shape)) else None


def _rounds(values: Any, array: npt.NDArray[Any]) -> bool:
    """Return whether NumPy rounded integers during the conversion of a sequence of integers and floats."""
    if isinstance(values, np.ndarray) or array.dtype.kind != "f" or not array.ndim:
        return False
    types = set(map(type, values))
    if types <= FLOATS or (types == {np.ndarray} and len({value.dtype for value in values}) == 1):
        return False
    return not ((np.array(values, object) == array) | np.isnan(array)).all()


def _in_dtype(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Cast numbers exactly, or keep a wider float dtype; return None if a number would change."""
    source = array.dtype
    if source == dtype or (source.kind == "f" == dtype.kind and not holds(dtype, source) and source.itemsize <= 8):
        return array
    exact = cast_exactly(array, dtype)
    if exact is not None or dtype.kind == "f" or source.kind == "b" or (dtype.kind in "iu" and source.kind != "f"):
        return exact
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        # The cast back is undefined outside the integers' range, and floats may lack their maximum.
        if not (np.isfinite(array).all() and (array >= bounds.min).all() and (array < float(bounds.max) + 1.0).all()):
            return None
    cast = array.astype(dtype)
    return cast if np.array_equal(cast.astype(source), array) else None


def _nearest(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Round floats, and cast all other numbers exactly; return None if a float overflows or an exact cast fails."""
    if not array.dtype.kind == "f" == dtype.kind:
        return _in_dtype(array, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = array.astype(dtype, copy=False)
    return rounded if np.array_equal(np.isinf(rounded), np.isinf(array)) else None


def _row_by_row(
    name: str, values: Any, dtype: np.dtype[Any], shape: tuple[int, ...], refuse: Refuse, convert: Callable[..., Any]
) -> npt.NDArray[Any]:
    """Cast rows one at a time if NumPy cannot combine rows exactly; raise an error for the first invalid row."""
    count, row_shape = shape[0], shape[1:]
    rows = list(values) if isinstance(values, list | tuple) or np.ndim(values) else None
    if rows is None or len(rows) != count:
        actual = f"a single {type(values).__name__}" if rows is None else len(rows)
        raise refuse(f"column {name!r} must have {count} rows, got {actual}", None)
    for row, value in enumerate(rows):
        requirement = _fault(value, dtype, row_shape, convert)
        if requirement is not None:
            raise refuse(f"column {name!r} must {requirement}", row)
    arrays = [_numbers(value, row_shape) for value in rows]
    return np.concatenate([convert(array[None], dtype) for array in arrays if array is not None])


def _fault(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], convert: Callable[..., Any]) -> str | None:
    """Return the requirement that a row violates; None if the row is valid."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        return f"have rows of shape {shape}, got lists of different lengths"
    if array.dtype.kind not in _NUMBERS:
        is_typed = array.ndim and array.dtype.kind != "O"
        return f"contain numbers, got {f'rows of {array.dtype}' if is_typed else f'a {type(value).__name__}'}"
    row = _numbers(value, shape)
    if row is None:
        return f"have rows of shape {shape}, got {array.shape}"
    is_exact = convert(row[None], dtype) is not None
    return None if is_exact else f"have dtype {dtype}, got a value of {array.dtype} that does not fit it without loss"
