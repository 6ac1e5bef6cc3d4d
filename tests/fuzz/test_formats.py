"""Damaged files, folders, states and columns are refused by an error of the library's, or read right."""

from __future__ import annotations

import pytest

from tests.fuzz.driver import CASES, SEED, fuzz
from tests.fuzz.formats import TARGETS

pytest.importorskip("h5py")
pytest.importorskip("tianshou")


@pytest.mark.parametrize(
    ("cases", "seed"),
    [
        pytest.param(CASES, SEED, id="few"),
        pytest.param(5 * CASES, SEED + 1, id="many", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "name",
    # Its process imports Tianshou first, which takes as long as all cases of others.
    [pytest.param(name, marks=pytest.mark.long) if name == "TIANSHOU_HDF5" else name for name in TARGETS],
)
def test_damage_is_refused_or_read(name: str, cases: int, seed: int) -> None:
    outcomes, faults = fuzz(TARGETS[name], cases, seed)
    assert not faults, "\n".join([str(dict(outcomes)), *faults])
