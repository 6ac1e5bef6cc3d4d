"""ActionUnit: whether actions are in environment or policy units, and the mapping between the two."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.errors import ColumnMismatchError

ActionMapping = Literal["clip", "limit", "scale", "tanh", "shift", "function"]
"""Mapping of a policy's actions to the environment's; see `ActionUnit`."""

_MAPPINGS: Final = get_args(ActionMapping)
_WITHOUT_BOUNDS: Final = ("function",)
_TINY: Final = float(np.finfo(np.float32).eps)
_MAX_AXES: Final = 32
"""Number of axes of bounds in a description."""
_MAX_BOUNDS: Final = 1 << 20
"""Bounds in a description: no space of actions has as many numbers."""


class ActionUnit:
    """Unit of a batch's actions: environment units, or policy units with their mapping to environment units.

    Units are immutable, comparable, hashable and picklable.

    Parameters
    ----------
    mapping
        Mapping from stored actions to environment actions; None if the stored actions are environment actions.

        - `"scale"`: clip to [-1, 1], then scale to `low` and `high`;
        - `"tanh"`: hyperbolic tangent, then scale to `low` and `high` if specified;
        - `"clip"`: clip to `low` and `high`, the bounds of the action space;
        - `"limit"`: clip to `low` and `high`, which are narrower than the action space;
        - `"shift"`: add `low`, the number of the first action of a `Discrete` space;
        - `"function"`: apply a function; the function is not recorded, so these actions cannot be converted.
    low, high
        Lower and upper bound of environment actions: a number, or an array with the shape of one action.

    Attributes
    ----------
    mapping
        Mapping as passed to the constructor.
    low, high
        Bounds as read-only arrays, with shape () if all numbers of a bound are equal; None without bounds.

    Raises
    ------
    ValueError
        If the mapping is unknown or lacks bounds.

    Examples
    --------
    >>> unit = ActionUnit("scale", np.float32(-2), np.float32(2))
    >>> unit, unit.to_environment(np.array([[-1.0], [0.5]], np.float32)).tolist()
    (ActionUnit('scale', low=-2.0, high=2.0), [[-2.0], [1.0]])
    """

    __slots__ = ("_key", "high", "low", "mapping")

    mapping: ActionMapping | None
    low: npt.NDArray[Any] | None
    high: npt.NDArray[Any] | None

    def __init__(
        self, mapping: ActionMapping | None = None, low: npt.ArrayLike | None = None, high: npt.ArrayLike | None = None
    ) -> None:
        if mapping is not None and mapping not in _MAPPINGS:
            raise ValueError(f"mapping must be one of {', '.join(map(repr, _MAPPINGS))} or None, got {mapping!r}")
        unbounded = mapping is None or mapping in _WITHOUT_BOUNDS or (mapping == "tanh" and low is None)
        if unbounded:
            low = high = None
        elif low is None or (high is None and mapping != "shift"):
            raise ValueError(f"mapping {mapping!r} must have bounds, got none")
        self.mapping = mapping
        self.low, self.high = _as_bound(low), _as_bound(None if mapping == "shift" else high)
        self._key = (mapping, _key_of(self.low), _key_of(self.high))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ActionUnit) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return ActionUnit, (self.mapping, self.low, self.high)

    def __copy__(self) -> ActionUnit:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActionUnit:
        return self

    def __repr__(self) -> str:
        if self.mapping is None:
            return "ActionUnit()"
        bounds = {name: bound for name in ("low", "high") if (bound := getattr(self, name)) is not None}
        description = "".join(f", {name}={bound.tolist()}" for name, bound in bounds.items())
        return f"ActionUnit({self.mapping!r}{description})"

    def __str__(self) -> str:
        return "the environment's" if self.mapping is None else f"a policy's ({self.mapping})"

    @property
    def is_environment(self) -> bool:
        """Whether actions are the environment's."""
        return self.mapping is None

    def to_environment(self, actions: Any) -> Any:
        """Map an array or tensor of actions, shape (n, ...), to environment actions.

        Raises ColumnMismatchError if the mapping is a function, or the shape of the bounds differs from the shape of an
        action.
        """
        if self.mapping is None:
            return actions
        low, high = self._bounds_for(
            actions,
            "must be converted by that function; assign its results to the column, and set action_unit to ActionUnit()",
        )
        if self.mapping == "shift":
            return actions + low
        if self.mapping in ("clip", "limit"):
            return actions.clip(low, high)
        if self.mapping == "tanh":
            squashed = np.tanh(actions) if isinstance(actions, np.ndarray | np.generic) else actions.tanh()
            return squashed if low is None else (low + (squashed + 1.0) * ((high - low) / 2.0)).clip(low, high)
        return (low + (actions.clip(-1.0, 1.0) + 1.0) * ((high - low) / 2.0)).clip(low, high)

    def from_environment(self, actions: Any) -> Any:
        """Map environment actions to this unit; inverse of `to_environment`.

        With `"tanh"`, actions at a bound become large finite numbers, because the inverse hyperbolic tangent is
        infinite at the bounds.

        Parameters
        ----------
        actions
            Array or tensor of the environment's actions, shape (n, ...).

        Raises
        ------
        ColumnMismatchError
            As in `to_environment`.

        Examples
        --------
        >>> ActionUnit("scale", -2.0, 2.0).from_environment(np.array([[1.0], [2.0]])).tolist()
        [[0.5], [1.0]]
        """
        if self.mapping in (None, "clip", "limit"):
            return actions
        low, high = self._bounds_for(
            actions, "cannot be made from these; use map_action='scale' or 'clip', whose inverse is known"
        )
        if self.mapping == "shift":
            return actions - low
        is_array = isinstance(actions, np.ndarray | np.generic)
        if low is not None:
            width = np.maximum(high - low, _TINY) if is_array else (high - low).clamp(min=_TINY)
            actions = ((actions - low) * 2.0 / width - 1.0).clip(-1.0, 1.0)
        if self.mapping == "tanh":
            inner = actions.clip(_TINY - 1.0, 1.0 - _TINY)
            actions = np.arctanh(inner) if is_array else inner.arctanh()
        return actions

    def _bounds_for(self, actions: Any, rule: str) -> tuple[Any, Any]:
        """Validate the bounds' shape; return the bounds as arrays if `actions` is an array, otherwise as tensors.

        Raises ColumnMismatchError if the shapes differ or the mapping is a function; `rule` ends the message about a
        function.
        """
        if self.mapping == "function":
            raise ColumnMismatchError(f"actions that a function maps to the environment's {rule}")
        low, high = self.low, self.high
        for bound in (low, high):
            if bound is not None and bound.ndim and tuple(actions.shape[1:]) != bound.shape:
                raise ColumnMismatchError(
                    f"column 'actions' must have rows of shape {bound.shape}, as the bounds of its unit, "
                    f"got {tuple(actions.shape[1:])}"
                )
        if isinstance(actions, np.ndarray | np.generic):
            return low, high
        torch = sys.modules["torch"]
        kind = {"device": actions.device, "dtype": actions.dtype}
        return tuple(None if bound is None else torch.tensor(bound.tolist(), **kind) for bound in (low, high))  # type: ignore[return-value]

    def describe(self) -> dict[str, Any]:
        """Return the unit as JSON values that `from_description` reads; infinite bounds are None."""
        description: dict[str, Any] = {"mapping": self.mapping}
        if self.low is not None:
            description |= {"dtype": self.low.dtype.name, "low": _plain(self.low)}
        if self.high is not None:
            description["high"] = _plain(self.high)
        return description

    @classmethod
    def from_description(cls, plain: Any) -> ActionUnit:
        """Create a unit from untrusted plain values; raises ValueError or TypeError if a value is invalid.

        >>> ActionUnit.from_description(ActionUnit("clip", [-1.0, 0.0], [1.0, np.inf]).describe())
        ActionUnit('clip', low=[-1.0, 0.0], high=[1.0, inf])
        """
        if not isinstance(plain, Mapping):
            raise ValueError(f"the unit of actions must be a dict, got {describe_value(plain)}")
        if unknown := plain.keys() - {"mapping", "dtype", "low", "high"}:
            raise ValueError(
                "the unit of actions must have only the entries 'mapping', 'dtype', 'low' and 'high', got "
                f"{describe_value(min(unknown, key=str))}"
            )
        mapping = plain.get("mapping")
        if mapping is None:
            return ENVIRONMENT
        if mapping not in _MAPPINGS:
            options = ", ".join(map(repr, _MAPPINGS))
            raise ValueError(f"the mapping of actions must be one of {options}, got {describe_value(mapping)}")
        if "low" not in plain:
            return cls(mapping)
        name = plain.get("dtype")
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(f"the bounds of actions must have a numeric dtype, got {describe_value(name)}")
        low = _read_bound(plain["low"], np.dtype(name), -math.inf)
        high = _read_bound(plain["high"], np.dtype(name), math.inf) if "high" in plain else None
        if high is not None and low.ndim and high.ndim and low.shape != high.shape:
            raise ValueError(f"the bounds of actions must be of one shape, got {low.shape} and {high.shape}")
        return cls(mapping, low, high)


_DTYPES: Final = frozenset(
    ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


def common_unit(units: Iterable[ActionUnit | None]) -> ActionUnit | None:
    """Return the common action unit of rows that are to be combined; None if no unit is known.

    Rows with an unknown unit are assigned the common unit. Rows in environment units may be combined with rows that are
    clipped to the environment's bounds. Raises ColumnMismatchError if two of the units differ.

    >>> common_unit([None, ActionUnit(), ActionUnit("clip", -1.0, 1.0)])
    ActionUnit('clip', low=-1.0, high=1.0)
    >>> common_unit([ActionUnit(), ActionUnit("scale", -2.0, 2.0)])
    Traceback (most recent call last):
        ...
    samplebatch.errors.ColumnMismatchError: column 'actions' must be in one unit to be
        combined, got the environment's and a policy's (scale); call
        to_environment_actions() first
    """
    common: ActionUnit | None = None
    for unit in units:
        if unit is None or unit is common:
            continue
        if common is None or (common.mapping is None and unit.mapping == "clip"):
            common = unit
        elif unit != common and not (unit.mapping is None and common.mapping == "clip"):
            bounds = " of other bounds" if unit.mapping == common.mapping else ""
            raise ColumnMismatchError(
                f"column 'actions' must be in one unit to be combined, got {common} and {unit}{bounds}; "
                "call to_environment_actions() first"
            )
    return common


def _as_bound(bound: npt.ArrayLike | None) -> npt.NDArray[Any] | None:
    """Return a read-only copy of a bound; the copy has shape () if all numbers of the bound are equal."""
    if bound is None:
        return None
    array = np.array(bound)
    if array.dtype.kind not in "iuf" or not array.size or np.isnan(array).any():
        raise ValueError(f"the bounds of actions must be numbers, got {array.dtype} of shape {array.shape}")
    if array.ndim and (array == array.flat[0]).all():
        array = np.array(array.flat[0])
    array.flags.writeable = False
    return array


def _key_of(bound: npt.NDArray[Any] | None) -> tuple[Any, ...] | None:
    return None if bound is None else (bound.dtype.str, bound.shape, bound.tobytes())


def _plain(bound: npt.NDArray[Any]) -> Any:
    """Return a bound as nested lists or one number, with None for infinity."""
    return bound.tolist() if np.isfinite(bound).all() else np.where(np.isinf(bound), np.array(None), bound).tolist()


def _read_bound(plain: Any, dtype: np.dtype[Any], infinity: float) -> npt.NDArray[Any]:
    """Convert a bound from the form of `_plain` to an array; raises ValueError or TypeError if the form is invalid."""
    shape: list[int] = []
    inner = plain
    while isinstance(inner, list):
        if not inner or len(shape) == _MAX_AXES or len(inner) * math.prod(shape) > _MAX_BOUNDS:
            raise ValueError(
                f"the bounds of actions must be 1 to {_MAX_BOUNDS} numbers in at most {_MAX_AXES} axes, got shape "
                f"{(*shape, len(inner))}"
            )
        shape.append(len(inner))
        inner = inner[0]
    flat: list[Any] = [plain]
    for _ in shape:
        flat = [number for part in flat for number in part]
    other = next((number for number in flat if type(number) not in (int, float, NoneType)), None)
    if other is not None:
        raise ValueError(f"the bounds of actions must be numbers, got {describe_value(other)}")
    if len(flat) != math.prod(shape):
        raise ValueError(f"the bounds of actions must have shape {tuple(shape)}, got {len(flat)} numbers")
    filled = [infinity if number is None else number for number in flat]
    try:
        return np.array(filled, dtype).reshape(shape)
    except OverflowError as error:
        raise ValueError(
            f"the bounds of actions must fit their dtype {dtype}, got a number outside its range"
        ) from error


ENVIRONMENT: Final = ActionUnit()
"""Unit of actions that the environment accepts unchanged."""
