"""Seeds of environments, policies and random actions, each by its place in the seeds of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from samplebatch.errors import ArgumentError, EnvironmentSpecError

POLICY, RANDOM, ENVIRONMENT, PROCESS, RESTART = range(5)
"""Places of the seeds of: policies, random actions by `env_id`, environments by `env_id`, the generators that a
worker's process has by itself, and workers that replace others."""


def as_seeds(seed: Any) -> np.random.SeedSequence:
    """Return the seeds of a run that `seed` stands for: a whole number, NumPy's seeds as they are, or None for any.

    Raises
    ------
    ArgumentError
        If it is none of these.

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

    Raises
    ------
    EnvironmentSpecError
        If there are not as many seeds as environments.

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
