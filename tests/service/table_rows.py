"""Fragments for the tests of replay tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch import SampleBatch


def episode(eps_id: int, t: range, *, done: bool = True, **columns: Any) -> SampleBatch[Any]:
    """Return steps of an episode; the observation is 100 * episode + time."""
    times = np.array(t)
    return SampleBatch(
        obs=100.0 * eps_id + times,
        new_obs=100.0 * eps_id + times + 1,
        actions=times,
        rewards=np.ones(len(times)),
        terminateds=(times == t[-1]) & done,
        truncateds=np.zeros(len(times), bool),
        eps_id=np.full(len(times), eps_id),
        t=times,
        **{name: np.full(len(times), value) for name, value in columns.items()},
    )


def fragment(number: int, rows: int = 2) -> SampleBatch[Any]:
    """Return a fragment whose rows hold its number."""
    return SampleBatch(number=np.full(rows, number))
