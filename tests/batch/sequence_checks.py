"""Checks of batches with sequences."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import SampleBatch

LENGTHS = [2, 3, 0, 1]

both = pytest.mark.parametrize("padded", [False, True], ids=["back to back", "padded"])


def steps(batch: SampleBatch) -> list[int]:
    """Return column `a` without padding: the step numbers 0 to 5."""
    return batch["a"][batch.mask()].tolist()


def by_sequence(batch: SampleBatch) -> list[tuple[float, list[int]]]:
    """Return each sequence's state and steps."""
    ends = np.cumsum(batch["seq_lens"]).tolist()
    rows = steps(batch)
    parts = [rows[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    return list(zip(batch["state_in_0"][:, 0].tolist(), parts, strict=True))


def assert_sound(batch: SampleBatch) -> None:
    """Check that every row contains the values of its step, and that padding is zeros."""
    assert len(batch) == int(np.sum(batch["seq_lens"])) == int(batch.mask().sum())
    mask, rows = batch.mask(), np.array(steps(batch), int)
    assert batch["obs"]["x"][mask].tolist() == ((rows + 1) / 4).tolist()
    assert batch["state_out_0"][mask].tolist() == rows[:, None].tolist()
    assert [info["step"] for info in batch["infos"][mask]] == rows.tolist()
    assert np.asarray(batch["obs"]["y"][1])[mask].tolist() == (rows + 1).tolist()
    assert all(info is None for info in batch["infos"][~mask])
    assert not batch["a"][~mask].any()
    assert not batch["b"][~mask].any()
    assert not (batch["words"][~mask] != "").any()
    assert (batch["state_in_1"][:, 0] == 2 * (batch["state_in_0"][:, 0] - 1)).all()
    if batch.zero_padded:
        assert len(mask) == batch.max_seq_len * len(batch["seq_lens"])
    else:
        assert len(mask) == len(batch)
        assert batch.max_seq_len == max(batch["seq_lens"].tolist(), default=0)
    assert batch.num_grad_updates == 1.5
    assert batch.is_training
