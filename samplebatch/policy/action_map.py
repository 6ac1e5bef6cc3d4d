"""Action maps: how actions of a policy become those that an environment takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from samplebatch.errors import PolicySpecError

ActionMap = Literal["clip", "scale"] | Callable[[Any], Any]
"""How actions become what environments take: cut off at the bounds, scaled to them from [-1, 1], or by a function."""


def check_action_map(wanted: Any) -> None:
    """Check a `map_action`; functions pass.

    Raises
    ------
    PolicySpecError
        If it is no word for a map, no function and not None.
    """
    if not callable(wanted) and wanted not in (None, "clip", "scale"):
        raise PolicySpecError(f"map_action must be 'clip', 'scale' or a function, got {wanted!r}")


def make_action_map(wanted: ActionMap, space: Any) -> Callable[[Any], Any]:
    """Make the function that a `map_action` stands for.

    Parameters
    ----------
    wanted
        The `map_action`.
    space
        The space of one environment's actions.

    Returns
    -------
    Callable
        Takes actions of n environments, shape (n, ...), and returns as many.

    Raises
    ------
    PolicySpecError
        If actions of the space cannot be mapped so.

    Examples
    --------
    >>> from gymnasium import spaces
    >>> steer = spaces.Box(np.float32(-3), np.float32(5), (1,))
    >>> make_action_map("scale", steer)(np.array([[-1.0], [0.0], [7.0]]))
    array([[-3.],
           [ 1.],
           [ 5.]])
    """
    if callable(wanted):
        return wanted
    low, high = _bounds(wanted, space)
    if wanted == "clip":
        return lambda act: act.clip(low, high)
    return lambda act: (low + (act.clip(-1.0, 1.0) + 1.0) * ((high - low) / 2.0)).clip(low, high)


def map_of_draws(wanted: ActionMap | None) -> Literal["scale"] | None:
    """Return the `map_action` of random actions: these are an environment's own, and only mapped where that is scaling.

    Raises
    ------
    PolicySpecError
        As `check_action_map` does.
    """
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
