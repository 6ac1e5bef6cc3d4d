"""Seeds of environments, policies and random actions, each by its place in the seeds of a run."""

from __future__ import annotations

import numpy as np

POLICY, RANDOM, ENVIRONMENT, PROCESS, RESTART = range(5)
"""Places of the seeds of: policies, random actions by `env_id`, environments by `env_id`, the generators that a
worker's process has by itself, and workers that replace others."""


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
