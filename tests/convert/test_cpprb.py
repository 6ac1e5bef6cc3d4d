"""Buffers of cpprb, filled and sampled by itself."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch.convert import from_cpprb, to_cpprb
from samplebatch.errors import CapacityError, ColumnNotFoundError, ColumnTypeError, EmptyBufferError
from tests.convert.experience import two_episodes

cpprb = pytest.importorskip("cpprb")


def test_a_batch_is_restored() -> None:
    buffer = to_cpprb(two_episodes())
    actual = from_cpprb(buffer)
    for name in two_episodes():
        assert actual[name].tolist() == two_episodes()[name].tolist()
        assert actual[name].dtype == two_episodes()[name].dtype
    sample = buffer.sample(20)
    # Truncation is no termination: only the first episode's last step counts as done.
    assert {tuple(row) for row in sample["obs"][sample["done"][:, 0] > 0].tolist()} <= {(2.0, 2.5)}


def test_steps_of_a_full_buffer_are_in_time_order() -> None:
    buffer = cpprb.ReplayBuffer(4, {"obs": {"shape": 2}, "rew": {}, "done": {}, "act": {"dtype": np.int32}})
    for i in range(6):
        buffer.add(obs=[i, i], rew=i / 2, done=i == 4, act=i)
    actual = from_cpprb(buffer)
    assert actual["obs"].tolist() == [[i, i] for i in range(2, 6)]
    assert actual["rewards"].tolist() == [1, 1.5, 2, 2.5]
    assert actual["actions"].tolist() == [2, 3, 4, 5]
    assert actual["terminateds"].tolist() == [False, False, True, False]


def test_unsupported_columns_are_rejected_with_the_name() -> None:
    with pytest.raises(ColumnTypeError, match="column 'obs' must be a single numeric array for a cpprb buffer"):
        to_cpprb(two_episodes(nested=True))
    with pytest.raises(ColumnNotFoundError, match="column 'rewards' must exist"):
        to_cpprb(two_episodes().drop("rewards"))
    with pytest.raises(CapacityError, match="capacity must be at least 5, the number of steps, got 4"):
        to_cpprb(two_episodes(), capacity=4)
    with pytest.raises(EmptyBufferError, match="a cpprb buffer must contain steps"):
        from_cpprb(cpprb.ReplayBuffer(4, {"obs": {}}))
