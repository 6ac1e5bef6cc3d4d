"""Either end is killed at random moments: the other end gets an error, and nothing is leaked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).parent / "kill_rounds.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the rounds fork those who kill")
@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        ("fork", 60),
        ("forkserver", 6),
        ("spawn", 6),
        pytest.param("fork", 180, marks=pytest.mark.long),
        pytest.param("forkserver", 24, marks=pytest.mark.long),
        pytest.param("spawn", 24, marks=pytest.mark.long),
    ],
)
def test_survivors_of_a_killed_process_are_reported(method: str, rounds: int) -> None:
    rounds = int(os.environ.get("SAMPLEBATCH_KILLS", rounds))
    done = subprocess.run(
        [sys.executable, str(ROUNDS), "--method", method, "--rounds", str(rounds), "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300 + 5 * rounds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert sum(int(times) for times, _ in ends) == rounds
    report = "\n".join(how for _, how in ends)
    assert all(f"the {role} died" in report for role in ("producer", "consumer", "publisher"))
