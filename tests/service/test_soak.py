"""Writers and learners in processes, some of which are killed and stopped: every inserted step is accounted for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.service.soak import Soak
from tests.service.soak_accounts import STEPS, account, rate
from tests.soaks import SECONDS


@pytest.mark.parametrize(
    ("writers", "learners", "seconds", "kill_server_every"),
    [
        pytest.param(2, 1, 4.0, 0.0, id="few"),
        pytest.param(8, 2, SECONDS, 0.0, id="clients", marks=pytest.mark.long),
        pytest.param(8, 2, SECONDS, min(13.0, SECONDS / 4), id="service", marks=pytest.mark.long),
    ],
)
def test_every_step_is_accounted_for(
    tmp_path: Path, writers: int, learners: int, seconds: float, kill_server_every: float
) -> None:
    capacity = 20 * STEPS * writers
    with Soak(tmp_path, writers, learners, capacity, 20.0, 0) as soak:
        soak.run(seconds, kill_server_every, 1.5, seconds / 4)
        report = soak.end()
    assert not report.faults
    figures = report.figures
    is_long = seconds >= 15.0
    assert figures["samples"] > 0 or not is_long
    assert figures["acknowledged"] > 0
    if kill_server_every:
        # While the service restarts, which takes long on a busy machine, nobody writes or samples.
        assert figures["service killed"] > 1
        return
    assert figures["acknowledged and lost"] == figures["twice"] == 0
    assert figures["acknowledged"] <= figures["inserted"] <= figures["sent"]
    assert figures["rows"] == min(figures["inserted"], capacity)
    if is_long:
        assert figures["acknowledged and written over"] > 0
        assert figures["samples of the slow client"] > 0
        assert figures["rows/s beside the slow client"] > 0.2 * figures["rows/s without it"]


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
def test_the_soak_check_detects_faults(
    times: tuple[int, ...], losses: list[tuple[float, float]], kills: list[float], fault: str
) -> None:
    faults, _ = account(LINES, np.repeat(times, STEPS), losses, kills)
    assert len(faults) == bool(fault)
    assert not fault or fault in faults[0]


@pytest.mark.parametrize(
    ("times", "removed", "lost"),
    [((0, 1, 1), 0.5, 0), ((0, 0, 1), 1.0, 0), ((0, 0, 0), 2.5, 0), ((0, 0, 1), 0.5, 1), ((1, 0, 1), 2.5, 1)],
)
def test_the_soak_check_accounts_for_overwritten_rows(times: tuple[int, ...], removed: float, lost: int) -> None:
    faults, sums = account(LINES, np.repeat(times, STEPS), [], [], removed)
    assert [fault.endswith("is lost") for fault in faults] == [True] * lost
    assert sums["acknowledged and written over"] == (times.count(0) - lost) * STEPS
    assert sums["acknowledged and lost"] == lost * STEPS


def test_rates_are_computed_per_interval_over_all_processes(tmp_path: Path) -> None:
    for name, lines in (("a", "0 0\n10 100\n20 100\n"), ("b", "5 0\n15 10\n"), ("c", "")):
        (tmp_path / name).write_text(lines)
    paths = [tmp_path / name for name in "abc"]
    assert rate(paths, 1, [(0.0, 10.0)]) == 10.5
    assert rate(paths, 1, [(0.0, 5.0), (15.0, 20.0)]) == 5.0


def test_the_soak_check_detects_a_partial_fragment() -> None:
    counted = np.ones(3 * STEPS, int)
    counted[2 * STEPS + 1] = 0
    assert account(LINES, counted, [], [])[0] == ["fragment 2 is there in part"]


def test_a_writer_that_sent_nothing_has_nothing_to_account_for() -> None:
    faults, sums = account([[1.0, 0.0, 0.0, 1.0]], np.bincount(np.empty(0, int)), [(0.5, 0.75)], [0.75])
    assert not faults
    assert not sums["sent"]
