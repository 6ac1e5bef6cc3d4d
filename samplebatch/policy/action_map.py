"""Action maps: how actions of a policy become those that an environment takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from samplebatch.batch.action_unit import ENVIRONMENT, ActionUnit
from samplebatch.errors import PolicySpecError

ActionMap = Literal["clip", "scale"] | Callable[[Any], Any]
"""How actions become what environments take: cut off at the bounds, scaled to them from [-1, 1], or by a function."""


def check_action_map(wanted: Any) -> None:
    """Check a `map_action`; functions pass."""
    if not callable(wanted) and wanted not in (None, "clip", "scale"):
        raise PolicySpecError(f"map_action must be 'clip', 'scale' or a function, got {wanted!r}")


def make_action_map(wanted: ActionMap, space: Any) -> Callable[[Any], Any]:
    """Make the function that a `map_action` stands for.

    Returns
    -------
    Callable
        Takes actions of n environments, shape (n, ...), and returns as many.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(5), (1,))
    >>> make_action_map("scale", steer)(np.array([[-1.0], [0.0], [7.0]]))
    array([[-3.],
           [ 1.],
           [ 5.]])
    """
    return wanted if callable(wanted) else ActionUnit(wanted, *_bounds(wanted, space)).to_environment


def unit_of_actions(policy: Any, wanted: ActionMap | None, space: Any) -> ActionUnit | None:
    """Return the unit of the actions that a policy returns, before they are mapped to the environment's.

    Returns
    -------
    ActionUnit or None
        None for an environment whose actions are numbers of choices, which nothing maps: there is but one unit.
    """
    if wanted is not None:
        return _FUNCTION if callable(wanted) else ActionUnit(wanted, *_bounds(wanted, space))
    method = getattr(policy, "map_action", None)
    if method is None:
        return unit_of_space(space)
    unit = getattr(policy, "action_unit", _FUNCTION)
    if unit is _FUNCTION and str(getattr(method, "__module__", "")).startswith("tianshou."):
        bounds, scaling = (getattr(policy, name, None) for name in ("action_bound_method", "action_scaling"))
        return unit_of_policy(policy.action_space, bounds, bool(scaling))
    return unit if unit is None or isinstance(unit, ActionUnit) else _FUNCTION


def unit_of_space(space: Any) -> ActionUnit | None:
    """Return the environment's unit, or None for a space in which actions are numbers of choices, from 0 on.

    Examples
    --------
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
    """Return the unit of actions that are bounded to [-1, 1] by a method, then scaled to a space or not.

    Examples
    --------
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


def map_of_draws(wanted: ActionMap | None) -> Literal["scale"] | None:
    """Return the `map_action` of random actions, which are only mapped where that is scaling."""
    check_action_map(wanted)
    return "scale" if wanted == "scale" else None


def space_to_draw(wanted: ActionMap | None, space: Any) -> Any:
    """Return the space that random actions are drawn from, so that a `map_action` leads all over an action space.

    Where actions are scaled, that is the space from -1 to 1, so that those that are kept are like a policy's.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(5), (1,))
    >>> space_to_draw("scale", steer)
    Box(-1.0, 1.0, (1,), float32)
    >>> space_to_draw("clip", steer) is steer
    True
    """
    if wanted != "scale":
        return space
    low, _ = _bounds(wanted, space)
    return type(space)(-1.0, 1.0, space.shape, low.dtype if low.dtype.kind == "f" else np.float32)


def _bounds(wanted: Any, space: Any) -> tuple[Any, Any]:
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:
        raise PolicySpecError(f"map_action={wanted!r} needs a Box of actions, got {type(space).__name__}")
    if wanted == "scale" and not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise PolicySpecError("map_action='scale' needs bounds on every action; use 'clip' or a function")
    return low, high
