"""`prio.*`: prioritized buffers of a million transitions; 256 are sampled or given new priorities."""

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
"""Number of weights or sums per sum of the bare way."""

RNG = np.random.default_rng(7)
PRIORITIES = RNG.uniform(0.1, 2.0, MILLION)
PICKED = RNG.integers(0, MILLION, (64, BATCH))
NEW = RNG.uniform(0.1, 2.0, BATCH)


# Creating a buffer from existing rows, which Tianshou and cpprb copy.


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
    """Copy every column, and sum the weights."""
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
    """Sum groups of 16 weights, and again 16 sums, with levels padded with zeros."""
    levels = []
    for _ in range(3):
        levels.append(np.concatenate([weights, np.zeros(-len(weights) % FAN)]))
        weights = levels[-1].reshape(-1, FAN).sum(1)
    return levels


# Sampling, and new priorities


def with_priorities(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Set the priorities of all rows of a buffer."""

    def setup(lib: Any, columns: Any) -> Any:
        buffer = make(lib, columns)
        update = getattr(buffer, "update_weight", None) or buffer.update_priorities
        update(np.arange(MILLION), PRIORITIES.copy())
        return buffer

    return setup


def sampling(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.sample(BATCH)


def updating(buffer: Any) -> Callable[[], Any]:
    picked = cycle(PICKED)
    return lambda: buffer.update_weight(next(picked), NEW)


def learning(buffer: Any) -> Callable[[], Any]:
    def call() -> None:
        _, indices = buffer.sample(BATCH)
        buffer.update_weight(indices, NEW)

    return call


def cpprb_sampling(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.sample(BATCH, beta=BETA)


def cpprb_learning(buffer: Any) -> Callable[[], Any]:
    return lambda: buffer.update_priorities(buffer.sample(BATCH, beta=BETA)["indexes"], NEW)


def bare_sampling(columns: dict[str, Any]) -> Callable[[], Any]:
    """Search precomputed cumulative sums, as if priorities never changed, and gather the rows."""
    weights = PRIORITIES**ALPHA
    before, rng = np.cumsum(weights), np.random.default_rng(7)
    pairs = [(values, np.ones((BATCH, *values.shape[1:]), values.dtype)) for values in columns.values()]

    def call() -> Any:
        picked = np.searchsorted(before, rng.random(BATCH) * before[-1])
        for values, out in pairs:
            values.take(picked, 0, out, "clip")
        importance = weights.take(picked) ** -BETA
        importance /= importance.max()
        return picked

    return call


def bare_updating(_: dict[str, Any]) -> Callable[[Any], Any]:
    """Write weights, and recompute the affected sums on two levels."""
    weights, sums, upper = sums_of(PRIORITIES**ALPHA)
    below, above = weights.reshape(-1, FAN), sums.reshape(-1, FAN)

    def call(picked: Any) -> None:
        weights[picked] = NEW**ALPHA
        groups = picked // FAN
        sums[groups] = below.take(groups, 0).sum(1)
        groups //= FAN
        upper[groups] = above.take(groups, 0).sum(1)

    return call


def bare_updating_setup(_: Any, columns: dict[str, Any]) -> Callable[[], Any]:
    update, picked = bare_updating(columns), cycle(PICKED)
    return lambda: update(next(picked))


def bare_learning_setup(_: Any, columns: dict[str, Any]) -> Callable[[], Any]:
    sample, update = bare_sampling(columns), bare_updating(columns)
    return lambda: update(sample())


def with_rows(name: str, ours: Any, theirs: Any, bare: Any) -> Row:
    """Declare work on a full buffer.

    Priority updates of cpprb alone are omitted, because it defers the sums until rows are sampled.
    """

    def way(make: Any, call: Any) -> Way:
        ready = with_priorities(make)
        return Way(lambda lib, columns: call(ready(lib, columns)))

    return row(
        f"prio.{name}",
        a_million,
        view=None,
        ours=way(build, ours),
        tianshou=way(tianshou_build, ours),
        bare=Way(bare),
        **({"cpprb": way(cpprb_build, theirs)} if theirs else {}),
    )


ROWS = [
    with_rows("sample256.1e6", sampling, cpprb_sampling, lambda _, columns: bare_sampling(columns)),
    with_rows("update256.1e6", updating, None, bare_updating_setup),
    with_rows("sample+update256.1e6", learning, cpprb_learning, bare_learning_setup),
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
