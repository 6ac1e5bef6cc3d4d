"""Property: `extend` with rows of one stream stores the same rows as `add` with one step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import ReplayBuffer, SampleBatch, VectorReplayBuffer

FRAGMENTS = st.lists(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans(), st.booleans()), min_size=1, max_size=40),
    min_size=1,
    max_size=6,
)


def _assert_equal(extended: Any, added: Any) -> None:
    np.testing.assert_equal(extended.subbuffer_edges, added.subbuffer_edges)
    np.testing.assert_equal(extended.last_index, added.last_index)
    np.testing.assert_equal(extended.unfinished_index(), added.unfinished_index())
    assert len(extended) == len(added)
    for name in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next"):
        np.testing.assert_array_equal(extended[name], added[name], err_msg=name)


@pytest.mark.parametrize("rings", [1, 3])
@pytest.mark.parametrize("flags", ["both", "done"])
@given(fragments=FRAGMENTS, seed=st.integers(0, 2**16))
def test_extend_equals_single_adds(rings: int, flags: str, fragments: Any, seed: int) -> None:
    """Returns of episodes are bit-identical, because rewards are summed in step order."""
    rng = np.random.default_rng(seed)
    extended, added = (ReplayBuffer(32) if rings == 1 else VectorReplayBuffer(32 * rings, rings) for _ in range(2))
    for fragment in fragments:
        rewards, terminated, truncated = (np.array(values) for values in zip(*fragment, strict=True))
        ring, count = int(rng.integers(rings)), len(rewards)
        obs = rng.random((count, 2))
        ends = {"terminateds": terminated, "truncateds": truncated} if flags == "both" else {"dones": terminated}
        environments = {} if rings == 1 else {"env_id": np.full(count, ring)}
        rows = SampleBatch(obs=obs, new_obs=obs + 1, actions=np.arange(count), rewards=rewards, **ends, **environments)
        slots = extended.extend(rows)
        for row, slot in enumerate(slots):
            step = {name: values[row : row + 1] for name, values in rows.as_batch("tianshou").items()}
            assert added.add(step, buffer_ids=[ring])[0][0] == slot
        _assert_equal(extended, added)
    final = {"obs": np.zeros((1, 2)), "obs_next": np.zeros((1, 2)), "act": [0], "rew": [0.5]}
    final |= {"terminated": [True], "truncated": [False]} | ({} if rings == 1 else {"env_id": [0]})
    for ring in range(rings):
        ends = [buffer.add(dict(final), buffer_ids=[ring]) for buffer in (extended, added)]
        np.testing.assert_equal(ends[0], ends[1])
