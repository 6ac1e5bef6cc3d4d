"""The protocols of nested batches do their work under mypy's strict mode, without casts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

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
    api = pytest.importorskip("mypy.api")
    source = tmp_path / "typed_use.py"
    source.write_text(SOURCE)
    root = Path(__file__).parents[2]
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = [f"--config-file={config}", f"--cache-dir={root / '.mypy_cache' / 'typed'}"]
    limit = sys.getrecursionlimit()
    try:
        report, errors, _ = api.run([str(source), *options])
    finally:
        # mypy raises it, and leaves it there.
        sys.setrecursionlimit(limit)
    assert not errors
    revealed = [re.sub(r"\w+\.(?=\w)", "", found) for found in re.findall(r'Revealed type is "(.*)"', report)]
    array = "ndarray[tuple[Any, ...], dtype[Any]]"
    assert revealed == [f"RolloutBatch[{array}]", array, array, array, "Batch", "Any", "Batch"]
    complaints = [line for line in report.splitlines() if "error:" in line]
    assert len(complaints) == 1
    assert 'has no attribute "nope"' in complaints[0]
