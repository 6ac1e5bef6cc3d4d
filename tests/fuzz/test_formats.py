"""Damaged files, folders, states and columns raise a library error or are read correctly."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.fuzz.driver import CASES, SEED, fuzz

pytest.importorskip("h5py")
pytest.importorskip("tianshou")
pytest.importorskip("ray")
from tests.fuzz.targets import NEEDS, TARGETS

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
def test_damaged_bytes_are_rejected_or_decoded(name: str, cases: int, seed: int) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    outcomes, faults = fuzz(TARGETS[name], cases, seed)
    assert not faults, "\n".join([str(dict(outcomes)), *faults])


def test_only_targets_with_a_missing_package_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "tests.fuzz.wire", raising=False)
    try:
        damage = runpy.run_path(__file__)["test_damaged_bytes_are_rejected_or_decoded"]
    except pytest.skip.Exception as error:
        raise AssertionError("other targets are skipped, too") from error
    with pytest.raises(pytest.skip.Exception, match="grpc"):
        damage("REPLAY_SERVICE", 1, SEED)
