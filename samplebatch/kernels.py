"""Loops that NumPy cannot vectorize efficiently, compiled by numba.

Each kernel has one signature and is compiled when this module is imported. Therefore, nothing is compiled during
training, and kernels reject arguments with an unexpected dtype or layout. With numba 0.68 on a server core at 2.7 GHz,
the first import of this module takes 1.6 s, including compilation. In later processes, the import of this module takes
0.26 s, mostly for importing numba. If SciPy is installed, numba imports SciPy, for a total of 0.42 s.

numba caches the machine code in `__pycache__` beside this file. If `__pycache__` is read-only, numba uses the user's
cache folder or the folder in `NUMBA_CACHE_DIR`. If no folder is writable, every process compiles the kernels.
Processes that compile a kernel concurrently replace each other's cache files atomically with identical code, because
each kernel has a single signature.

The kernels release Python's global interpreter lock (GIL). A kernel validates only what its docstring specifies; the
callers in `column/`, `returns/`, `buffer/` and `tokens/` validate indices.
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
Bytes = npt.NDArray[np.uint8]


def _input(item: Any, ndim: int = 1) -> Any:
    """Return the numba type of a read-only array; the type also accepts arrays in memory-mapped or shared memory."""
    return types.Array(item, ndim, "C", readonly=True)


_FLOAT, _INDEX = types.float64, types.intp
_FLOATS, _ROWS_OF_FLOATS, _FLAGS, _INDICES = _input(_FLOAT), _input(_FLOAT, 2), _input(types.boolean), _input(_INDEX)
_FLOATS_OUT, _ROWS_OUT, _INDICES_OUT = _FLOAT[::1], _FLOAT[:, ::1], _INDEX[::1]
_BYTES, _BYTES_OUT = _input(types.uint8), types.uint8[::1]


def _compiled(result: Any, *arguments: Any) -> Callable[[F], F]:
    """Compile a function for one signature, or load it from numba's cache."""
    signature = [result(*arguments)]

    def compile_(function: F) -> F:
        try:
            return cast("F", njit(signature, cache=True, nogil=True)(function))
        except (RuntimeError, OSError):
            # numba cannot cache without a writable folder; a full disk fails later.
            return cast("F", njit(signature, nogil=True)(function))

    return compile_


@_compiled(_INDEX, _FLOATS_OUT, _INDEX, _INDEX, _FLOAT, _INDICES, _FLOATS)
def tree_set(tree: Floats, leaves: int, size: int, limit: float, slots: Indices, weights: Floats) -> int:
    """Write weights to slots of a sum tree, and update the sums of all parent nodes.

    Nothing is written unless all slots are in [0, size) and all weights are in [0, limit].

    tree: shape (2 * leaves,): node k is the sum of nodes 2k and 2k + 1; the second half contains the leaves.
    leaves: number of leaves, a power of two.
    size: number of leaves in use.
    slots, weights: shape (n,). If a slot occurs several times, the last weight is stored.

    Returns: position of the first invalid slot or weight, or -1.
    """
    n = len(slots)
    for k in range(n):
        # Written so that NaN, for which all comparisons are false, is rejected.
        if not (0 <= slots[k] < size and 0.0 <= weights[k] <= limit):
            return k
    nodes = np.empty(n, np.intp)
    for k in range(n):
        leaf = leaves + slots[k]
        tree[leaf] = weights[k]
        nodes[k] = leaf >> 1
    # Each sum is recomputed from its two children and never adjusted, so rounding errors do not accumulate. Level by
    # level, because the reads of one level are independent and can be in flight together.
    width = leaves >> 1
    while width > n:
        for k in range(n):
            node = nodes[k]
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            nodes[k] = node >> 1
        width >>= 1
    # If a level has fewer nodes than there are slots, updating all nodes in order is cheaper.
    for node in range(2 * width - 1, 0, -1):
        tree[node] = tree[2 * node] + tree[2 * node + 1]
    return -1


@_compiled(types.void, _FLOATS, _INDEX, _FLOATS, _INDICES_OUT)
def tree_find(tree: Floats, leaves: int, values: Floats, slots: Indices) -> None:
    """Find, for each value, the first slot of positive weight whose prefix sum is at least the value.

    tree, leaves: sum tree and its number of leaves, see `tree_set`.
    values: prefix sums to find, shape (n,), from 0 to the sum of all weights; this sum must be positive.
    slots: output, shape (n,).
    """
    n = len(values)
    left_over = values.copy()
    slots[:] = 1
    width = 1
    # All values descend together: the reads of one level are independent, so their cache misses overlap.
    while width < leaves:
        for k in range(n):
            child = 2 * slots[k]
            left = tree[child]
            value = left_over[k]
            right = value > left
            left_over[k] = value - left * right
            slots[k] = child + right
        width *= 2
    for k in range(n):
        if tree[slots[k]] == 0.0:
            # The value is 0, or rounding moved its remainder past the last positive leaf.
            value = values[k]
            node = 1
            while node < leaves:
                node *= 2
                left, right = tree[node], tree[node + 1]
                if left == 0.0 or (value > left and right > 0.0):
                    value -= left
                    node += 1
            slots[k] = node
        slots[k] -= leaves


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
    """Estimate advantages in one backward pass over steps in time order.

    rewards, terminated, values, next_values: shape (n,); `next_values` at terminated steps is ignored.
    cut: shape (n,): True if the next row does not continue the row's episode.
    gamma, gae_lambda: discount per step, and decay of the estimates.
    advantages, returns: outputs, shape (n,); returns are advantages plus values.
    """
    decay = gamma * gae_lambda
    advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = 0.0 if terminated[t] else next_values[t]
        advantage = rewards[t] + gamma * following - values[t] + (0.0 if cut[t] else decay * advantage)
        advantages[t] = advantage
        returns[t] = advantage + values[t]


@_compiled(
    types.void,
    *(_FLOATS, _FLAGS, _FLAGS, _FLOATS, _FLOATS, _FLOATS, _FLOAT, _FLOAT, _FLOAT, _FLOAT, _FLOAT),
    *(_FLOATS_OUT, _FLOATS_OUT),
)
def vtrace(
    rewards: Floats,
    terminated: Flags,
    cut: Flags,
    values: Floats,
    next_values: Floats,
    log_ratios: Floats,
    gamma: float,
    vtrace_lambda: float,
    rho_clip: float,
    c_clip: float,
    advantage_rho_clip: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Estimate V-trace targets and advantages in one backward pass over steps in time order.

    rewards, terminated, cut, values, next_values: as in `gae`.
    log_ratios: log-ratio of the target to the behaviour probability of each action, shape (n,).
    gamma, vtrace_lambda: discount per step, and decay of the traces in addition to the discount.
    rho_clip, c_clip, advantage_rho_clip: upper bounds of the ratios in temporal differences, in traces and in
        advantages.
    advantages, returns: outputs, shape (n,); the returns are the V-trace targets.
    """
    correction = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        following = 0.0 if terminated[t] else next_values[t]
        if cut[t]:
            correction = 0.0
        ratio = np.exp(log_ratios[t])
        # Comparisons are written so that a ratio of NaN stays NaN.
        rho = rho_clip if ratio > rho_clip else ratio
        trace = c_clip if ratio > c_clip else ratio
        weight = advantage_rho_clip if ratio > advantage_rho_clip else ratio
        advantages[t] = weight * (rewards[t] + gamma * (following + correction) - values[t])
        difference = rho * (rewards[t] + gamma * following - values[t])
        correction = difference if cut[t] else difference + gamma * vtrace_lambda * trace * correction
        returns[t] = values[t] + correction


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
    """Sum the discounted rewards of up to n steps from each slot, up to the newest stored step of the slot's episode.

    rewards: shape (slots, m), m rewards per step.
    terminated, done: shape (slots,).
    edges: shape (rings + 1,): ring r consists of the slots from `edges[r]` to `edges[r + 1]` and wraps around.
    newest: shape (rings,): slot of each ring's newest step; each window ends there at the latest.
    slots: shape (n,): first slot of each window.
    n_step: maximum number of steps per window, at least 1.
    gamma: discount per step.
    returns: output, shape (n, m): discounted sums.
    discounts: output, shape (n,): gamma to the number of steps, or 0 if the window's last step is terminated.
    last: output, shape (n,): last slot of each window.

    Returns: position of the first invalid slot, or -1.
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


@_compiled(types.void, _FLOATS, _INDICES, _FLOATS, _FLOAT, types.boolean, _FLOATS_OUT)
def accumulate_rows(
    values: Floats, offsets: Indices, initial: Floats, decay: float, backwards: bool, sums: Floats
) -> None:
    """Compute the decayed cumulative sums of each row's elements, forwards or backwards.

    values: elements of all rows, shape (m,).
    offsets: offsets of rows, shape (n + 1,).
    initial: initial sum of each row, shape (n,).
    decay: factor of the sum per element; 1 for plain sums.
    backwards: whether the sums start at the last element of each row.
    sums: output, shape (m,).
    """
    for row in range(len(offsets) - 1):
        total = initial[row]
        start, stop = offsets[row], offsets[row + 1]
        if backwards:
            for t in range(stop - 1, start - 1, -1):
                total = values[t] + decay * total
                sums[t] = total
        else:
            for t in range(start, stop):
                total = values[t] + decay * total
                sums[t] = total


@_compiled(types.void, _FLOATS, _FLOATS, _FLOATS, _INDICES, _FLOAT, _FLOAT, _FLOATS_OUT, _FLOATS_OUT)
def gae_rows(
    rewards: Floats,
    values: Floats,
    last_values: Floats,
    offsets: Indices,
    gamma: float,
    gae_lambda: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Estimate advantages in one backward pass per row, where each row is one trajectory.

    rewards, values: elements of all rows, shape (m,).
    last_values: estimates after the last element of each row, shape (n,).
    offsets: offsets of rows, shape (n + 1,).
    gamma, gae_lambda: discount per step, and decay of the estimates.
    advantages, returns: outputs, shape (m,); returns are advantages plus values.
    """
    decay = gamma * gae_lambda
    for row in range(len(offsets) - 1):
        following, advantage = last_values[row], 0.0
        for t in range(offsets[row + 1] - 1, offsets[row] - 1, -1):
            value = values[t]
            advantage = rewards[t] + gamma * following - value + decay * advantage
            advantages[t] = advantage
            returns[t] = advantage + value
            following = value


@_compiled(types.void, _INDICES, _INDICES_OUT)
def count_positions(offsets: Indices, positions: Indices) -> None:
    """Count the elements of each row from 0.

    offsets: offsets of rows, shape (n + 1,), from 0 to m.
    positions: output, shape (m,): position of each element in its row.
    """
    for row in range(len(offsets) - 1):
        counted = positions[offsets[row] : offsets[row + 1]]
        for k in range(len(counted)):
            counted[k] = k


@_compiled(types.void, _BYTES, _INDICES, _INDICES, _BYTES_OUT)
def copy_rows(source: Bytes, starts: Indices, lengths: Indices, target: Bytes) -> None:
    """Copy rows of any lengths into contiguous memory, as fast as a single copy of all bytes.

    source: array of bytes that contains the rows.
    starts, lengths: first byte and number of bytes of each row, shape (n,), within `source`.
    target: output: concatenated bytes of all rows; the size is the sum of the lengths.
    """
    stop = 0
    for k in range(len(starts)):
        # A loop over two views, which becomes vector instructions; an assignment of slices does not.
        row = source[starts[k] : starts[k] + lengths[k]]
        out = target[stop : stop + lengths[k]]
        for byte in range(len(row)):
            out[byte] = row[byte]
        stop += lengths[k]


@_compiled(_INDEX, _INDICES, _INDEX, _INDICES_OUT, _INDICES_OUT)
def first_fit(weights: Indices, capacity: int, tree: Indices, bins: Indices) -> int:
    """Assign each item, in order, to the first bin with sufficient free capacity; return the number of bins.

    weights: weight of each item, shape (n,), from 0 to `capacity`.
    capacity: maximum sum of weights per bin.
    tree: scratch array of length 2 * leaves, where leaves is a power of two and at least n.
    bins: output, shape (n,): bin of each item.
    """
    # Each node is the maximum free capacity of the bins below it, so the first fitting bin is found in log(n) steps.
    leaves = len(tree) >> 1
    tree[:] = capacity
    used = 0
    for k in range(len(weights)):
        weight = weights[k]
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < weight:
                node += 1
        bins[k] = node - leaves
        used = max(used, node - leaves + 1)
        tree[node] -= weight
        node >>= 1
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node >>= 1
    return used


@_compiled(types.void, _FLOATS, _INDICES, _INDEX, types.boolean, _INDICES_OUT, _FLOATS_OUT)
def balance(weights: Floats, order: Indices, largest: int, is_equal_size: bool, parts: Indices, totals: Floats) -> None:
    """Assign items to parts of nearly equal weight.

    Items are first assigned in order of decreasing weight, and then moved or exchanged between the heaviest and the
    lightest part.

    weights: weight of each item, shape (n,), non-negative.
    order: indices of the items by decreasing weight, shape (n,).
    largest: maximum number of items per part.
    is_equal_size: whether the sizes of parts may differ by at most one item; if true, items are only exchanged, because
        moving an item would change the sizes.
    parts: output, shape (n,): part of each item.
    totals: output, shape (k,): total weight of each part.
    """
    k, n = len(totals), len(weights)
    sizes = np.zeros(k, np.intp)
    totals[:] = 0.0
    # When the maximum number of parts has the larger size, the others are full with one item less.
    spare = n - (largest - 1) * k
    for item in order:
        best = -1
        for part in range(k):
            is_full = sizes[part] >= largest or (sizes[part] == largest - 1 and spare <= 0 and is_equal_size)
            if not is_full and (best < 0 or totals[part] < totals[best]):
                best = part
        parts[item] = best
        totals[best] += weights[item]
        sizes[best] += 1
        spare -= sizes[best] == largest
    heavy, light = np.empty(n, np.intp), np.empty(n, np.intp)
    for _ in range(16 * k):
        high = low = 0
        for part in range(1, k):
            high = part if totals[part] > totals[high] else high
            low = part if totals[part] < totals[low] else low
        gap = totals[high] - totals[low]
        heavies = lights = 0
        for item in range(n):
            if parts[item] == high:
                heavy[heavies] = item
                heavies += 1
            elif parts[item] == low:
                light[lights] = item
                lights += 1
        if heavies * lights > 1 << 20:
            return
        # Moving half of the gap evens the two parts; more than the whole gap would reverse it.
        min_distance, first, second = gap * (1.0 - 1e-9), -1, -1
        for a in range(heavies):
            weight = weights[heavy[a]]
            if not is_equal_size and abs(gap - 2.0 * weight) < min_distance:
                min_distance, first, second = abs(gap - 2.0 * weight), heavy[a], -1
            for b in range(lights):
                distance = abs(gap - 2.0 * (weight - weights[light[b]]))
                if distance < min_distance:
                    min_distance, first, second = distance, heavy[a], light[b]
        if first < 0:
            return
        moved = weights[first]
        parts[first] = low
        if second >= 0:
            moved -= weights[second]
            parts[second] = high
        totals[high] -= moved
        totals[low] += moved
