"""`prio.*`: prioritized buffers of a million transitions; a call samples or updates 256 of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from benchmarks.bench_buffer import MILLION, a_million, cpprb_fields
from benchmarks.harness import Row, Way, row

ALPHA, BETA = 0.6, 0.4
BATCH = 256
FAN = 16
"""Number of weights or sums that each sum of `bare` covers."""

RNG = np.random.default_rng(7)
PRIORITIES = RNG.uniform(0.1, 2.0, MILLION)
INDICES = RNG.integers(0, MILLION, (64, BATCH))
NEW_PRIORITIES = RNG.uniform(0.1, 2.0, BATCH)


# Creating a buffer from existing rows; Tianshou and cpprb copy the rows.


def build(lib: Any, columns: dict[str, Any]) -> Any:
    return lib.PrioritizedReplayBuffer.from_data(**columns, alpha=ALPHA, beta=BETA)


def tianshou_build(lib: Any, columns: dict[str, Any]) -> Any:
    buffer = lib.PrioritizedReplayBuffer(MILLION, ALPHA, BETA)
    buffer.update(lib.ReplayBuffer.from_data(**columns))
    return buffer


def cpprb_build(lib: Any, columns: dict[str, Any]) -> Any:
    buffer = lib.PrioritizedReplayBuffer(MILLION, {**cpprb_fields(), "obs_next": {"shape": 17}}, alpha=ALPHA)
    buffer.add(**columns)
    return buffer


def bare_build(_: Any, columns: dict[str, Any]) -> Callable[[], Any]:
    """Copy every column and sum the weights."""
    pairs = [(values, np.ones_like(values)) for values in columns.values()]
    levels = sums_of(np.ones(MILLION))

    def call() -> None:
        for values, out in pairs:
            np.copyto(out, values)
        levels[0].fill(1.0)
        for below, sums in pairwise(levels):
            np.sum(below.reshape(-1, FAN), 1, out=sums[: len(below) // FAN])

    return call


def sums_of(weights: Any) -> list[Any]:
    """Sum groups of `FAN` weights, then groups of `FAN` sums; each level is padded with zeros."""
    levels = []
    for _ in range(3):
        levels.append(np.concatenate([weights, np.zeros(-len(weights) % FAN)]))
        weights = levels[-1].reshape(-1, FAN).sum(1)
    return levels


# Sampling, and updating priorities


def with_priorities(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap `make` to set the priorities of all rows of the buffer."""

    def setup(lib: Any, columns: Any) -> Any:
        buffer = make(lib, columns)
        update = getattr(buffer, "update_weight", None) or buffer.update_priorities
        update(np.arange(MILLION), PRIORITIES.copy())
        return buffer

    return setup


def sample_call(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.sample(BATCH)


def update_call(buffer: Any) -> Callable[[], Any]:
    indices = cycle(INDICES)
    return lambda: buffer.update_weight(next(indices), NEW_PRIORITIES)


def sample_and_update_call(buffer: Any) -> Callable[[], Any]:
    def call() -> None:
        _, indices = buffer.sample(BATCH)
        buffer.update_weight(indices, NEW_PRIORITIES)

    return call


def cpprb_sample_call(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.sample(BATCH, beta=BETA)


def cpprb_sample_and_update_call(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.update_priorities(buffer.sample(BATCH, beta=BETA)["indexes"], NEW_PRIORITIES)


def bare_sample_call(columns: dict[str, Any]) -> Callable[[], Any]:
    """Search precomputed cumulative sums, as if priorities never changed, and gather the rows found."""
    weights = PRIORITIES**ALPHA
    cumulative, rng = np.cumsum(weights), np.random.default_rng(7)
    pairs = [(values, np.ones((BATCH, *values.shape[1:]), values.dtype)) for values in columns.values()]

    def call() -> Any:
        indices = np.searchsorted(cumulative, rng.random(BATCH) * cumulative[-1])
        for values, out in pairs:
            values.take(indices, 0, out, "clip")
        importance = weights.take(indices) ** -BETA
        importance /= importance.max()
        return indices

    return call


def bare_update_call(_: dict[str, Any]) -> Callable[[Any], Any]:
    """Write weights and recompute the affected sums on two levels."""
    weights, sums, upper = sums_of(PRIORITIES**ALPHA)
    below, above = weights.reshape(-1, FAN), sums.reshape(-1, FAN)

    def call(indices: Any) -> None:
        weights[indices] = NEW_PRIORITIES**ALPHA
        groups = indices // FAN
        sums[groups] = below.take(groups, 0).sum(1)
        groups //= FAN
        upper[groups] = above.take(groups, 0).sum(1)

    return call


def bare_update_setup(_: Any, columns: dict[str, Any]) -> Callable[[], Any]:
    update, indices = bare_update_call(columns), cycle(INDICES)
    return lambda: update(next(indices))


def bare_sample_and_update_setup(_: Any, columns: dict[str, Any]) -> Callable[[], Any]:
    sample, update = bare_sample_call(columns), bare_update_call(columns)
    return lambda: update(sample())


def row_of_full_buffer(name: str, ours: Any, cpprb: Any, bare: Any) -> Row:
    """Declare a row with a full buffer as its data.

    Updates without sampling omit cpprb, because cpprb defers the sums until rows are sampled.
    """

    def way(make: Any, call: Any) -> Way:
        full_buffer = with_priorities(make)
        return Way(lambda lib, columns: call(full_buffer(lib, columns)))

    return row(
        f"prio.{name}",
        a_million,
        view=None,
        ours=way(build, ours),
        tianshou=way(tianshou_build, ours),
        bare=Way(bare),
        **({"cpprb": way(cpprb_build, cpprb)} if cpprb else {}),
    )


ROWS = [
    row_of_full_buffer("sample256.1e6", sample_call, cpprb_sample_call, lambda _, columns: bare_sample_call(columns)),
    row_of_full_buffer("update256.1e6", update_call, None, bare_update_setup),
    row_of_full_buffer(
        "sample+update256.1e6", sample_and_update_call, cpprb_sample_and_update_call, bare_sample_and_update_setup
    ),
    row(
        "prio.build.1e6",
        a_million,
        traffic=True,
        view=None,
        ours=Way(lambda lib, columns: lambda: build(lib, columns)),
        tianshou=Way(lambda lib, columns: lambda: tianshou_build(lib, columns)),
        cpprb=Way(lambda lib, columns: lambda: cpprb_build(lib, columns)),
        bare=Way(bare_build),
    ),
]
