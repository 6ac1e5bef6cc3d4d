"""Checks of every batch of steps."""

from __future__ import annotations

import itertools

import numpy as np

from samplebatch import SampleBatch


def check_trajectories(batch: SampleBatch) -> None:
    """Check that a batch contains consecutive trajectories without missing steps."""
    changed = np.flatnonzero(np.diff(batch["eps_id"])) + 1
    bounds = [0, *changed.tolist(), len(batch)]
    assert len(np.unique(batch["eps_id"])) == len(bounds) - 1
    env_id = batch["env_id"]
    assert (np.diff(env_id) >= 0).all()
    for start, stop in itertools.pairwise(bounds):
        first = batch[start:stop]
        assert len(np.unique(first["env_id"])) == 1
        assert first["t"].tolist() == list(range(first["t"][0], first["t"][0] + len(first)))
        assert (first["new_obs"][:-1] == first["obs"][1:]).all()
        assert not first["dones"][:-1].any()
        continues = stop < len(batch) and env_id[stop] == env_id[start]
        assert first["dones"][-1] or not continues
