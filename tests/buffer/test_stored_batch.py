"""The stored batch of a buffer, `_meta`: reading its columns, setting them, and as Tianshou's algorithms do it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ColumnLengthError, ColumnTypeError, RingError, StorageError
from tests.buffer.oracle import step, steps
from tests.optional import torch


def of_two_agents() -> VectorReplayBuffer:
    buf = VectorReplayBuffer(8, 2)
    for n in range(3):
        buf.add(steps([n, n + 10], rew=[[1.0, 2.0], [3.0, 4.0]]))
    return buf


def test_the_stored_batch_shares_memory_with_the_buffer() -> None:
    buf = of_two_agents()
    assert buf._meta.obs is buf.obs
    assert buf._meta.keys() == {*buf._table.columns.tree}
    buf._meta.obs[0] = 77
    assert buf[0].obs == 77
    assert buf.buffers[1]._meta.obs.tolist() == buf.obs[4:].tolist()


def test_an_assigned_column_is_used_until_the_next_assignment() -> None:
    buf = of_two_agents()
    rew, meta = buf.rew, buf._meta
    meta.rew = Batch()
    assert buf.rew == Batch()
    meta.rew = rew[:, 1]
    assert buf[[0, 4]].rew.tolist() == [2.0, 4.0]
    meta["rew"] = rew
    assert buf.rew is rew
    actual = buf.add(steps([9, 9], rew=[[1.0, 2.0], [3.0, 4.0]], terminated=[True, True]))
    assert actual[1].tolist() == [[4, 8], [12, 16]]


def test_an_assigned_batch_adds_its_columns() -> None:
    buf = of_two_agents()
    obs, rew = buf.obs, buf.rew
    buf._meta = Batch(**buf._meta.__dict__, returns=np.arange(6.0), n={"slot": np.arange(8)})
    assert buf.obs is obs
    assert buf.rew is rew
    assert buf[:].returns.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert buf[:].n.slot.tolist() == [0, 1, 2, 4, 5, 6]
    buf.add(steps([7, 8], rew=np.zeros((2, 2))))
    assert buf[[2, 3]].returns.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("kind", ["compressed", "ragged", "torch", "objects"])
def test_columns_in_another_layout_are_unchanged(kind: str) -> None:
    options: dict[str, Any] = {"compressed": {"compress": "obs"}, "ragged": {"ragged": "obs"}}.get(kind, {})
    buf = ReplayBuffer(4, **options)
    rows = {"torch": torch.arange(3), "objects": "xyz", "ragged": [np.arange(n) for n in range(3)]}
    for obs in rows.get(kind, np.arange(3)):
        buf.add(step(0, obs=obs))
    before = buf._table.columns.tree["obs"]
    buf._meta = Batch(**buf._meta.__dict__, value=np.arange(4))
    assert buf._table.columns.tree["obs"] is before
    assert buf.value.tolist() == [0, 1, 2, 3]


def test_copies_are_independent_of_the_buffer() -> None:
    buf = of_two_agents()
    for other in (copy.deepcopy(buf._meta), pickle.loads(pickle.dumps(buf._meta)), buf._meta[:2], buf._meta.copy()):
        other.rew = np.zeros(3)
        assert type(other.__dict__) is dict
    assert buf.rew.shape == (8, 2)


def test_invalid_columns_are_rejected(tmp_path: Path) -> None:
    buf = of_two_agents()
    before = repr(buf._meta)
    with pytest.raises(ColumnLengthError, match="column 'x' must have 8 rows, one per slot, or 6, got 5"):
        buf._meta.x = np.arange(5)
    with pytest.raises(ColumnLengthError, match="'x'"):
        buf._meta = Batch(act=np.zeros(8), x=np.arange(5))
    with pytest.raises(ColumnTypeError, match="must be a Batch or dict, got int"):
        buf._meta = 3  # type: ignore[assignment]
    with pytest.raises(RingError, match="got one part"):
        buf.buffers[0]._meta.x = np.arange(4)
    assert repr(buf._meta) == before
    with ReplayBuffer(4, storage=tmp_path / "rows") as stored:
        stored.add(step(0))
        with pytest.raises(StorageError, match="use set_array_at_key"):
            stored._meta.x = np.arange(4)
