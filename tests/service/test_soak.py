"""Writers and learners in processes, some of which are killed and stopped: every inserted step is accounted for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.service.soak import STEPS, Soak, account


@pytest.mark.parametrize(
    ("writers", "learners", "seconds", "kill_server_every"),
    [
        pytest.param(2, 1, 3.0, 0.0, id="few"),
        pytest.param(8, 2, 60.0, 0.0, id="clients", marks=pytest.mark.long),
        pytest.param(8, 2, 60.0, 13.0, id="service", marks=pytest.mark.long),
    ],
)
def test_every_step_is_accounted_for(
    tmp_path: Path, writers: int, learners: int, seconds: float, kill_server_every: float
) -> None:
    with Soak(tmp_path, writers, learners, 500_000, 20.0, 0) as soak:
        soak.run(seconds, kill_server_every, 1.5)
        report = soak.end()
    assert not report.faults
    figures = report.figures
    assert figures["samples"] > 0 or seconds < 60.0
    assert figures["acknowledged"] > 0
    if not kill_server_every:
        assert figures["acknowledged and lost"] == figures["twice"] == 0
        assert figures["acknowledged"] <= figures["inserted"] == figures["rows"] <= figures["sent"]
    else:
        assert figures["service killed"] > 1


LINES = [[0.0, STEPS, 0, 1], [1.0, 2 * STEPS, STEPS, 2], [2.0, 3 * STEPS, STEPS, 3], [3.0, 3 * STEPS, 3 * STEPS, 4]]
"""Three fragments are sent, each on another stream; the first is known to be acknowledged at 1.0, the others at 3.0."""


@pytest.mark.parametrize(
    ("times", "losses", "kills", "fault"),
    [
        ((1, 1, 1), [], [], None),
        ((0, 1, 1), [], [], "fragment 0, sent at 0.00, is lost"),
        ((0, 1, 1), [(0.5, 0.9)], [0.9], None),
        ((0, 1, 1), [(1.5, 1.7)], [1.7], "is lost"),
        ((1, 2, 1), [], [], "fragment 1, sent at 1.00, is there 2 times"),
        ((1, 2, 1), [(0.0, 2.5)], [2.5], None),
        ((1, 1, 1, 1), [], [], "was never sent"),
    ],
)
def test_a_soak_finds_faults(
    times: tuple[int, ...], losses: list[tuple[float, float]], kills: list[float], fault: str
) -> None:
    faults, _ = account(LINES, np.repeat(times, STEPS), losses, kills)
    assert len(faults) == bool(fault)
    assert not fault or fault in faults[0]


def test_a_soak_finds_a_fragment_that_is_there_in_part() -> None:
    counted = np.ones(3 * STEPS, int)
    counted[2 * STEPS + 1] = 0
    assert account(LINES, counted, [], [])[0] == ["fragment 2 is there in part"]
