"""Derivation of seeds for environments, policies and random actions, and state of global random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from samplebatch.errors import ArgumentError, EnvironmentSpecError

POLICY, RANDOM, ENVIRONMENT, PROCESS, RESTART = range(5)
"""Spawn keys of seeds for: policies, random actions by `env_id`, environments by `env_id`, process-wide generators of
workers, and replacement workers."""


def as_seeds(seed: Any) -> np.random.SeedSequence:
    """Convert an integer, a SeedSequence (returned unchanged) or None (a random seed) to a SeedSequence.

    >>> as_seeds(5).entropy, as_seeds(np.random.SeedSequence(7)).entropy
    (5, 7)
    """
    if isinstance(seed, np.random.SeedSequence):
        return seed
    try:
        return np.random.SeedSequence(seed)
    except (TypeError, ValueError):
        actual = f"a {type(seed).__name__}" if not isinstance(seed, int) else seed
        raise ArgumentError(f"seed must be a non-negative integer, a SeedSequence or None, got {actual}") from None


def seeds_at(seeds: np.random.SeedSequence, *key: int) -> np.random.SeedSequence:
    """Return the child SeedSequence at a spawn key; the result does not depend on earlier calls to `spawn`.

    >>> root = np.random.SeedSequence(5)
    >>> seeds_at(root, 1).generate_state(1) == root.spawn(2)[1].generate_state(1)
    array([ True])
    """
    return np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, *key), pool_size=seeds.pool_size)


def seed_number(seeds: np.random.SeedSequence) -> int:
    """Return a single integer seed that is derived from a SeedSequence."""
    return int(seeds.generate_state(1)[0])


def seeds_of_reset(count: int, seeds: Sequence[int] | None, seed: Any) -> Sequence[int | None]:
    """Return one seed per environment for a reset of all environments; None continues an environment's generator.

    - `count`: number of environments.
    - `seeds`: default seed of each environment; None if there are no default seeds.
    - `seed`: seeds passed by the caller, which have precedence over `seeds`: one per environment, or a single seed of
      the first environment. If `seed` is a single seed, environment i receives `seed + i`.

    >>> list(seeds_of_reset(2, [5, 3], 7))
    [7, 8]
    """
    numbers: Sequence[int | None] = seeds or [None] * count
    if isinstance(seed, int | np.integer):
        numbers = range(int(seed), int(seed) + count)
    elif seed is not None:
        numbers = seed
    if len(numbers) != count:
        raise EnvironmentSpecError(f"seed must have one number for each of {count} environments, got {len(numbers)}")
    return numbers


def generators_state() -> dict[str, Any]:
    """Return the states of the global generators of `random`, NumPy and torch (None if torch is not imported)."""
    torch = sys.modules.get("torch")
    torch_state = None if torch is None else torch.get_rng_state()
    return {"random": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch_state}


def load_generators(state: Mapping[str, Any] | None) -> None:
    """Restore global generators from `generators_state`; do nothing for None, the state of inline workers.

    >>> state = generators_state()
    >>> drawn = random.random(), np.random.random()
    >>> load_generators(state)
    >>> drawn == (random.random(), np.random.random())
    True
    """
    if state is None:
        return
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    if state["torch"] is not None:
        import_module("torch").set_rng_state(state["torch"])
