"""Action maps: conversion of policy actions to environment actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from samplebatch.batch.action_unit import ENVIRONMENT, ActionUnit
from samplebatch.errors import PolicySpecError

ActionMap = Literal["clip", "scale"] | Callable[[Any], Any]
"""Conversion to environment actions: clip to the bounds, scale from [-1, 1] to the bounds, or a function."""


def check_action_map(map_action: Any) -> None:
    """Validate the value of `map_action`; functions are not inspected."""
    if not callable(map_action) and map_action not in (None, "clip", "scale"):
        raise PolicySpecError(f"map_action must be 'clip', 'scale' or a function, got {map_action!r}")


def make_action_map(map_action: ActionMap, space: Any) -> Callable[[Any], Any]:
    """Return the function that the value of `map_action` specifies.

    Returns
    -------
    Callable
        Function that maps actions of n environments, shape (n, ...), to an array of the same shape.

    Raises
    ------
    PolicySpecError
        If the space is not a `Box`, or `"scale"` is requested and a bound is infinite.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(5), (1,))
    >>> make_action_map("scale", steer)(np.array([[-1.0], [0.0], [7.0]]))
    array([[-3.],
           [ 1.],
           [ 5.]])
    """
    return map_action if callable(map_action) else ActionUnit(map_action, *_bounds(map_action, space)).to_environment


def unit_of_actions(policy: Any, map_action: ActionMap | None, space: Any) -> ActionUnit | None:
    """Return the unit of a policy's actions before `map_action`.

    Returns
    -------
    ActionUnit or None
        None for discrete action spaces that start at 0, whose actions are never mapped.

    Raises
    ------
    PolicySpecError
        As `make_action_map`.
    """
    if map_action is not None:
        return _FUNCTION if callable(map_action) else ActionUnit(map_action, *_bounds(map_action, space))
    method = getattr(policy, "map_action", None)
    if method is None:
        return unit_of_space(space)
    unit = getattr(policy, "action_unit", _FUNCTION)
    if unit is _FUNCTION and str(getattr(method, "__module__", "")).startswith("tianshou."):
        bounds, scaling = (getattr(policy, name, None) for name in ("action_bound_method", "action_scaling"))
        return unit_of_policy(policy.action_space, bounds, bool(scaling))
    return unit if unit is None or isinstance(unit, ActionUnit) else _FUNCTION


def unit_of_space(space: Any) -> ActionUnit | None:
    """Return the unit of actions in the environment; None for discrete spaces that start at 0.

    >>> from gymnasium import spaces
    >>> unit_of_space(spaces.Dict(gear=spaces.Discrete(5), steer=spaces.Box(-1, 1)))
    ActionUnit()
    >>> unit_of_space(spaces.Discrete(5))
    """
    parts = getattr(space, "spaces", None)
    if parts is not None:
        leaves = parts.values() if isinstance(parts, Mapping) else parts
        return ENVIRONMENT if any(unit_of_space(leaf) for leaf in leaves) else None
    return ENVIRONMENT if hasattr(space, "low") or np.any(getattr(space, "start", 0)) else None


def unit_of_policy(space: Any, bound_method: str | None, scaling: bool) -> ActionUnit | None:
    """Return the unit of actions before bounding by `bound_method` and optional scaling to the space.

    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(3), (1,))
    >>> unit_of_policy(steer, "tanh", True), unit_of_policy(steer, "clip", False)
    (ActionUnit('tanh', low=-3.0, high=3.0), ActionUnit('limit', low=-1.0, high=1.0))
    """
    if not (hasattr(space, "low") and hasattr(space, "high")):
        start = getattr(space, "start", 0)
        return ActionUnit("shift", start) if np.ndim(start) == 0 and start else unit_of_space(space)
    if bound_method == "tanh":
        return ActionUnit("tanh", space.low, space.high) if scaling else ActionUnit("tanh")
    if scaling:
        return ActionUnit("scale", space.low, space.high)
    if bound_method is None:
        return ENVIRONMENT
    is_narrow = np.any(space.low < -1.0) or np.any(space.high > 1.0)
    return ActionUnit("limit" if is_narrow else "clip", np.float32(-1.0), np.float32(1.0))


_FUNCTION = ActionUnit("function")


def random_action_map(map_action: ActionMap | None) -> Literal["scale"] | None:
    """Return the value of `map_action` for random actions: `"scale"` if `map_action` is `"scale"`, otherwise None.

    Raises PolicySpecError if `map_action` has an invalid value.
    """
    check_action_map(map_action)
    return "scale" if map_action == "scale" else None


def space_to_draw(map_action: ActionMap | None, space: Any) -> Any:
    """Return the space from which random actions are sampled, so that the mapped actions cover the action space.

    With `"scale"`, the bounds of the space are -1 and 1, so recorded random actions have the same unit as the policy's
    actions.

    Raises PolicySpecError in the same cases as `make_action_map`.

    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(5), (1,))
    >>> space_to_draw("scale", steer)
    Box(-1.0, 1.0, (1,), float32)
    >>> space_to_draw("clip", steer) is steer
    True
    """
    if map_action != "scale":
        return space
    low, _ = _bounds(map_action, space)
    return type(space)(-1.0, 1.0, space.shape, low.dtype if low.dtype.kind == "f" else np.float32)


def _bounds(map_action: Any, space: Any) -> tuple[Any, Any]:
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:
        raise PolicySpecError(
            f"the action space must be a Box for map_action={map_action!r}, got {type(space).__name__}"
        )
    if map_action == "scale" and not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise PolicySpecError(
            "the action space must have finite bounds for map_action='scale', got infinite ones; use 'clip' or "
            "a function"
        )
    return low, high
