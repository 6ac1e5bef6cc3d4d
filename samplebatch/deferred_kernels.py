"""Kernels that run in NumPy until their total running time justifies importing the compiled kernels.

Importing numba requires up to one second. A program that computes few samples or advantages never imports numba,
because each kernel in this module has a NumPy version that returns bitwise identical results. `samplebatch.kernels` is
imported when the NumPy versions have run for `BUDGET_S` seconds in total. A program that imports `samplebatch.kernels`
itself avoids a pause for this import during training:

>>> import samplebatch.kernels
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

F = TypeVar("F", bound=Callable[..., Any])

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

BUDGET_S = 0.5
"""Seconds in NumPy's versions after which the compiled kernels are imported: about as long as the import takes."""

_spent_s = 0.0


def _deferred(plain: F) -> F:
    """Call the NumPy version `plain` until the compiled kernel is available, then replace `plain` in this module."""
    name = plain.__name__

    @wraps(plain)
    def call(*arguments: Any) -> Any:
        global _spent_s
        # Another thread may be importing the module.
        kernel = getattr(sys.modules.get("samplebatch.kernels"), name, None)
        if kernel is None and _spent_s > BUDGET_S:
            from samplebatch import kernels

            kernel = getattr(kernels, name)
        if kernel is not None:
            globals()[name] = kernel
            return kernel(*arguments)
        start = perf_counter()
        with np.errstate(all="ignore"):
            result = plain(*arguments)
        _spent_s += perf_counter() - start
        return result

    return cast("F", call)


@_deferred
def tree_set(tree: Floats, leaves: int, size: int, limit: float, slots: Indices, weights: Floats) -> int:
    """Write weights to slots of a sum tree; see `kernels.tree_set`."""
    # Written so that NaN, for which all comparisons are false, is rejected.
    valid = (slots >= 0) & (slots < size) & (weights >= 0.0) & (weights <= limit)
    if not valid.all():
        return int(valid.argmin())
    nodes = slots + leaves
    tree[nodes] = weights
    for _ in range(leaves.bit_length() - 1):
        nodes >>= 1
        tree[nodes] = tree[2 * nodes] + tree[2 * nodes + 1]
    return -1


@_deferred
def tree_find(tree: Floats, leaves: int, values: Floats, slots: Indices) -> None:
    """Find the slots of prefix sums in a sum tree; see `kernels.tree_find`."""
    remainders, nodes = values.copy(), np.ones(len(values), np.intp)
    for _ in range(leaves.bit_length() - 1):
        nodes *= 2
        left = tree[nodes]
        is_right = remainders > left
        remainders -= left * is_right
        nodes += is_right
    for k in np.flatnonzero(tree[nodes] == 0.0).tolist():
        nodes[k] = _find_positive(tree, leaves, float(values[k]))
    np.subtract(nodes, leaves, out=slots)


def _find_positive(tree: Floats, leaves: int, value: float) -> int:
    """Find the leaf for a prefix sum that is 0, or that rounding errors have moved beyond the last positive leaf."""
    node = 1
    while node < leaves:
        node *= 2
        left, right = float(tree[node]), float(tree[node + 1])
        if left == 0.0 or (value > left and right > 0.0):
            value -= left
            node += 1
    return node


@_deferred
def windows(
    rewards: Floats,
    terminated: Flags,
    done: Flags,
    edges: Indices,
    newest: Indices,
    slots: Indices,
    n_step: int,
    gamma: float,
    returns: Floats,
    discounts: Floats,
    last: Indices,
) -> int:
    """Sum the discounted rewards of up to n steps from each slot; see `kernels.windows`."""
    valid = (slots >= 0) & (slots < len(rewards))
    if not valid.all():
        return int(valid.argmin())
    ring = np.searchsorted(edges[1:-1], slots, side="right")
    start, stop, end = edges[ring], edges[ring + 1], newest[ring]
    # The windows that go on, and their sums up to their last slots.
    rows, slot, factor, length = np.arange(len(slots)), slots, 1.0, 1
    returns[:], last[:], discounts[:] = 0.0, slots, gamma
    while True:
        returns[rows] += factor * rewards[slot]
        factor *= gamma
        goes_on = (slot != end) & ~done[slot]
        if length >= n_step or not goes_on.any():
            break
        rows, start, stop, end = rows[goes_on], start[goes_on], stop[goes_on], end[goes_on]
        slot = slot[goes_on] + 1
        slot = np.where(slot < stop, slot, start)
        last[rows] = slot
        discounts[rows] *= gamma
        length += 1
    discounts[terminated[last]] = 0.0
    return -1


@_deferred
def gae(
    rewards: Floats,
    terminated: Flags,
    cut: Flags,
    values: Floats,
    next_values: Floats,
    gamma: float,
    gae_lambda: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Estimate advantages in one backward pass over steps in time order; see `kernels.gae`."""
    decay = gamma * gae_lambda
    following = np.where(terminated, 0.0, next_values)
    errors = rewards + gamma * following - values
    advantage, estimates = 0.0, []
    for error, is_cut in zip(errors[::-1].tolist(), cut[::-1].tolist(), strict=True):
        advantage = error + (0.0 if is_cut else decay * advantage)
        estimates.append(advantage)
    advantages[:] = estimates[::-1]
    np.add(advantages, values, out=returns)
