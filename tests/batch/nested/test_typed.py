"""The protocols of nested batches type-check under mypy's strict mode without casts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strict_mypy import check_types

SOURCE = """
from typing import Any

import numpy.typing as npt

from samplebatch.batch import Batch, PrioritizedBatch, RolloutBatch

Array = npt.NDArray[Any]


def returns(batch: RolloutBatch[Array], gamma: float) -> Array:
    for part in batch.split(32):
        reveal_type(part)
    reveal_type(batch[1:].obs)
    return batch.rew + gamma * batch[1:].rew


def loss(batch: PrioritizedBatch[Array]) -> Array:
    batch.weight = batch.weight / 2
    return batch.weight * batch.rew


reveal_type(returns(Batch(rew=[1.0]), 0.9))
made: PrioritizedBatch[Array] = Batch(rew=[1.0]).to_torch()
reveal_type(made.obs_next)
reveal_type(Batch(a=1)[0])
reveal_type(Batch(a=1).a)
reveal_type(Batch(a=1) + 1)
loss(made).nope
"""


@pytest.mark.long
def test_protocols_under_strict_mypy(tmp_path: Path) -> None:
    revealed, errors = check_types(SOURCE, tmp_path)
    array = "ndarray[tuple[Any, ...], dtype[Any]]"
    assert revealed == [f"RolloutBatch[{array}]", array, array, array, "Batch", "Any", "Batch"]
    assert len(errors) == 1, errors
    assert 'has no attribute "nope"' in errors[0]
