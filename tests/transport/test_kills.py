"""Either end is killed at random moments, hundreds of times: the other comes to a clear end, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).parent / "kill_rounds.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the rounds fork those who kill")
@pytest.mark.parametrize(("method", "rounds"), [("fork", 240), ("forkserver", 12), ("spawn", 12)])
def test_a_killed_end_leaves_the_other_with_a_clear_end(method: str, rounds: int) -> None:
    done = subprocess.run(
        [sys.executable, str(ROUNDS), "--method", method, "--rounds", str(rounds), "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert sum(int(times) for times, _ in ends) == rounds
    assert {"times the consumer was told that the producer died"} <= {how for _, how in ends}
