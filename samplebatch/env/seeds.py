"""Seeds of environments, policies and random actions, by purpose, and the state of a process's own generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from samplebatch.errors import ArgumentError, EnvironmentSpecError

POLICY, RANDOM, ENVIRONMENT, PROCESS, RESTART = range(5)
"""Places of the seeds of: policies, random actions by `env_id`, environments by `env_id`, the generators that a
worker's process has by itself, and workers that replace others."""


def as_seeds(seed: Any) -> np.random.SeedSequence:
    """Return the seeds of a run that `seed` stands for: a whole number, NumPy's seeds as they are, or None for any.

    Examples
    --------
    >>> as_seeds(5).entropy, as_seeds(np.random.SeedSequence(7)).entropy
    (5, 7)
    """
    if isinstance(seed, np.random.SeedSequence):
        return seed
    try:
        return np.random.SeedSequence(seed)
    except (TypeError, ValueError):
        found = f"a {type(seed).__name__}" if not isinstance(seed, int) else seed
        raise ArgumentError(f"seed must be a whole number from 0, a SeedSequence or None, got {found}") from None


def seeds_at(seeds: np.random.SeedSequence, *place: int) -> np.random.SeedSequence:
    """Return the seeds of a place, regardless of others that were spawned before.

    >>> root = np.random.SeedSequence(5)
    >>> seeds_at(root, 1).generate_state(1) == root.spawn(2)[1].generate_state(1)
    array([ True])
    """
    return np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, *place), pool_size=seeds.pool_size)


def seed_number(seeds: np.random.SeedSequence) -> int:
    """Return a seed for code that takes a single number."""
    return int(seeds.generate_state(1)[0])


def seeds_of_reset(count: int, seeds: Sequence[int] | None, seed: Any) -> Sequence[int | None]:
    """Return the seed of each of `count` environments that are reset together; None leaves a generator running.

    Parameters
    ----------
    count
        How many environments there are.
    seeds
        A seed for each, by default; None for none.
    seed
        The caller's own in place of these: a seed for each, or that of the first, from which the others count on.

    Examples
    --------
    >>> list(seeds_of_reset(2, [5, 3], 7))
    [7, 8]
    """
    numbers: Sequence[int | None] = seeds or [None] * count
    if isinstance(seed, int | np.integer):
        numbers = range(int(seed), int(seed) + count)
    elif seed is not None:
        numbers = seed
    if len(numbers) != count:
        raise EnvironmentSpecError(f"there must be a seed for each of {count} environments, got {len(numbers)}")
    return numbers


def generators_state() -> dict[str, Any]:
    """Return the states of the process's own generators; None for that of torch where nobody has imported it."""
    torch = sys.modules.get("torch")
    drawn = None if torch is None else torch.get_rng_state()
    return {"random": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": drawn}


def load_generators(state: Mapping[str, Any] | None) -> None:
    """Let the process's own generators go on; a worker without a process leaves those of its caller alone.

    Examples
    --------
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
