"""A short run of the soak test of channels, which detects growing memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scripts.soak_channel import GROWTH_NBYTES, Footprint, Report

ROOT = Path(__file__).parents[2]


def test_a_channel_does_not_grow_for_a_second() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.scripts", "soak_channel", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("messages/s") == 2
    assert done.stdout.endswith("memory is flat\n")
    assert "GROWN" not in done.stdout


@pytest.mark.parametrize(
    ("change", "grown"),
    [
        ({}, False),
        ({"shared_nbytes": 1 << 40}, False),
        ({"private_nbytes": GROWTH_NBYTES}, False),
        ({"private_nbytes": GROWTH_NBYTES + 1}, True),
        ({"descriptors": 11}, True),
        ({"descriptors": 9}, False),
    ],
)
def test_growth_is_detected(change, grown) -> None:
    early = Footprint(private_nbytes=0, shared_nbytes=0, descriptors=10)
    assert Report(early, replace(early, **change)).has_grown is grown
