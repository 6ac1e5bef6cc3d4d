"""Damaged files, folders, states and columns are refused by an error of the library's, or read right."""

from __future__ import annotations

import pytest

from tests.fuzz.driver import CASES, SEED, fuzz

pytest.importorskip("h5py")
pytest.importorskip("tianshou")
pytest.importorskip("ray")
pytest.importorskip("grpc")
from tests.fuzz import foreign, formats, wire

TARGETS = formats.TARGETS | foreign.TARGETS | wire.TARGETS
SLOW = ("TIANSHOU_HDF5", "RLLIB_EPISODES")
"""Formats whose process imports their library first, which takes as long as all cases of others."""


@pytest.mark.parametrize(
    ("cases", "seed"),
    [
        pytest.param(CASES, SEED, id="few"),
        pytest.param(5 * CASES, SEED + 1, id="many", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in TARGETS],
)
def test_damage_is_refused_or_read(name: str, cases: int, seed: int) -> None:
    outcomes, faults = fuzz(TARGETS[name], cases, seed)
    assert not faults, "\n".join([str(dict(outcomes)), *faults])
