"""The few loops that NumPy cannot do well, compiled by numba.

Each kernel has one signature and is compiled when this module is imported, so nothing compiles later in the middle of
training, and a dtype or layout that was not meant is refused rather than compiled for. That takes 1.6 s the first time
on a machine, and 0.35 s in every process after it, most of which is numba's own start (measured with numba 0.68 on a
server's core at 2.7 GHz; importing numba before that took 0.15 s).

numba keeps the machine code in `__pycache__` beside this file; where that cannot be written to, in the user's cache
folder, or in the folder that the environment variable `NUMBA_CACHE_DIR` names. Where no folder can be written to, every
process compiles for itself. Processes that compile at the same time replace each other's files as a whole, and by the
same code, because no kernel has a second signature whose code could take its place.

The kernels let go of the interpreter. They check nothing but what they say: the callers in `sum_tree.py`, `returns.py`
and `buffer/` hold indices against their bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit, types

F = TypeVar("F", bound=Callable[..., Any])

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


def _input(item: Any, ndim: int = 1) -> Any:
    """Declare an array that is only read, so that mapped and shared memory will do as well."""
    return types.Array(item, ndim, "C", readonly=True)


_FLOAT, _INDEX = types.float64, types.intp
_FLOATS, _ROWS_OF_FLOATS, _FLAGS, _INDICES = _input(_FLOAT), _input(_FLOAT, 2), _input(types.boolean), _input(_INDEX)
_FLOATS_OUT, _ROWS_OUT, _INDICES_OUT = _FLOAT[::1], _FLOAT[:, ::1], _INDEX[::1]


def _compiled(result: Any, *arguments: Any) -> Callable[[F], F]:
    """Compile for one signature, from numba's cache where there is one."""
    signature = [result(*arguments)]

    def compile_(function: F) -> F:
        try:
            return cast("F", njit(signature, cache=True, nogil=True)(function))
        except (RuntimeError, OSError):
            # numba refuses to cache where it finds no folder to write to; a full disk fails later.
            return cast("F", njit(signature, nogil=True)(function))

    return compile_


@_compiled(_INDEX, _FLOATS_OUT, _INDEX, _INDEX, _FLOAT, _INDICES, _FLOATS)
def tree_set(tree: Floats, leaves: int, size: int, limit: float, slots: Indices, weights: Floats) -> int:
    """Write weights to slots of a sum tree, and recompute every sum above them.

    Nothing is written unless all slots lie in [0, size) and all weights in [0, limit].

    Parameters
    ----------
    tree
        Shape (2 * leaves,): node k is the sum of nodes 2k and 2k + 1, the leaves are the second half.
    leaves
        A power of two.
    size
        How many leaves are in use.
    limit
        The largest weight allowed.
    slots, weights
        Shape (n,). On duplicate slots the last weight wins.

    Returns
    -------
    int
        The position of the first slot or weight that is not allowed, or -1.
    """
    n = len(slots)
    for k in range(n):
        # Written so that NaN, which compares false to everything, is refused.
        if not (0 <= slots[k] < size and 0.0 <= weights[k] <= limit):
            return k
    nodes = np.empty(n, np.intp)
    for k in range(n):
        leaf = leaves + slots[k]
        tree[leaf] = weights[k]
        nodes[k] = leaf >> 1
    # Each sum is made from its two parts and never adjusted, so rounding does not add up over updates. Level by level,
    # because the reads of one level are independent and can be under way at once.
    width = leaves >> 1
    while width > n:
        for k in range(n):
            node = nodes[k]
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            nodes[k] = node >> 1
        width >>= 1
    # Where a level has fewer nodes than there are slots, all of them in order cost less.
    for node in range(2 * width - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]
    return -1


@_compiled(types.void, _FLOATS, _INDEX, _FLOATS, _INDICES_OUT)
def tree_find(tree: Floats, leaves: int, values: Floats, found: Indices) -> None:
    """Find the first slot of positive weight at which the prefix sum reaches each value.

    The tree's total must be positive.

    Parameters
    ----------
    tree, leaves
        See `tree_set`.
    values
        Shape (n,), from 0 to the tree's total.
    found
        Takes the slots, shape (n,).
    """
    n = len(values)
    left_over = values.copy()
    found[:] = 1
    width = 1
    # All values go down together: the reads of one level are independent, so their cache misses overlap.
    while width < leaves:
        for k in range(n):
            child = 2 * found[k]
            left = tree[child]
            value = left_over[k]
            right = value > left
            left_over[k] = value - left * right
            found[k] = child + right
        width *= 2
    for k in range(n):
        if tree[found[k]] == 0.0:
            # The value is 0, or what was left of it had been rounded up past the last positive leaf.
            value = values[k]
            node = 1
            while node < leaves:
                node *= 2
                left, right = tree[node], tree[node + 1]
                if left == 0.0 or (value > left and right > 0.0):
                    value -= left
                    node += 1
            found[k] = node
        found[k] -= leaves


@_compiled(types.void, _FLOATS, _FLAGS, _FLAGS, _FLOATS, _FLOATS, _FLOAT, _FLOAT, _FLOATS_OUT, _FLOATS_OUT)
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
    """Estimate advantages backwards through steps in time order, in one pass.

    Parameters
    ----------
    rewards, terminated, values, next_values
        Shape (n,); what stands in `next_values` at terminated steps does not count.
    cut
        Shape (n,): whether the next row belongs to another episode, or to the same one with steps missing between.
    gamma, gae_lambda
        The discount of a step, and the decay of the estimate on top of it.
    advantages, returns
        Take the results, shape (n,); the returns are the advantages plus the values.
    """
    decay = gamma * gae_lambda
    advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = 0.0 if terminated[t] else next_values[t]
        advantage = rewards[t] + gamma * following - values[t] + (0.0 if cut[t] else decay * advantage)
        advantages[t] = advantage
        returns[t] = advantage + values[t]


@_compiled(
    _INDEX,
    *(_ROWS_OF_FLOATS, _FLAGS, _FLAGS, _INDICES, _INDICES, _INDICES, _INDEX, _FLOAT),
    *(_ROWS_OUT, _FLOATS_OUT, _INDICES_OUT),
)
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
    """Sum the discounted rewards of up to n steps from each slot, up to the newest stored step of its episode.

    Parameters
    ----------
    rewards
        Shape (slots, m), m of them a step.
    terminated, done
        Shape (slots,).
    edges
        Shape (rings + 1,): ring r has the slots from `edges[r]` to `edges[r + 1]`, and goes on at its first after its
        last.
    newest
        Shape (rings,): the slot of each ring's newest step, where every window ends.
    slots
        Shape (n,): where the windows start.
    n_step
        The most steps in a window, at least 1.
    gamma
        The discount of a step.
    returns
        Takes the sums, shape (n, m).
    discounts
        Takes gamma to the number of steps in the window, or 0 if the window's last step is terminated; shape (n,).
    last
        Takes the slots of the windows' last steps, shape (n,).

    Returns
    -------
    int
        The position of the first slot that is none, or -1.
    """
    m = rewards.shape[1]
    for k in range(len(slots)):
        first = slots[k]
        if not 0 <= first < len(rewards):
            return k
        low, high = 0, len(newest)
        while high - low > 1:
            middle = (low + high) >> 1
            if first < edges[middle]:
                high = middle
            else:
                low = middle
        start, stop, end = edges[low], edges[low + 1], newest[low]
        slot, steps, discount = first, 1, gamma
        while steps < n_step and slot != end and not done[slot]:
            slot = slot + 1 if slot + 1 < stop else start
            discount *= gamma
            steps += 1
        last[k] = slot
        discounts[k] = 0.0 if terminated[slot] else discount
        for column in range(m):
            slot, total, factor = first, 0.0, 1.0
            for _ in range(steps):
                total += factor * rewards[slot, column]
                factor *= gamma
                slot = slot + 1 if slot + 1 < stop else start
            returns[k, column] = total
    return -1
