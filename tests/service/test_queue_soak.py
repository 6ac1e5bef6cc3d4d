"""Writers and readers of a queue, some of which are killed, and its service, too: every fragment is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.queue_soak import QueueSoak, account_queue
from tests.soaks import SECONDS


@pytest.mark.parametrize(
    ("seconds", "kill_every"),
    [
        pytest.param(3.0, 10.0, id="few"),
        pytest.param(SECONDS, min(7.0, SECONDS / 9), id="killed", marks=pytest.mark.long),
    ],
)
def test_every_fragment_is_accounted_for(tmp_path: Path, seconds: float, kill_every: float) -> None:
    with QueueSoak(tmp_path, 2, 2, 16) as soak:
        soak.run(seconds, kill_every)
        faults, figures = soak.end()
    assert not faults
    if kill_every > seconds:
        assert figures["read"] + figures["still there"] == figures["acknowledged"] == figures["sent"]
    else:
        assert figures["service killed"] > 1
        assert figures["readers killed"] > 1


LINES = [[0.0, 1, 0, 1], [1.0, 2, 1, 2], [2.0, 3, 2, 2], [3.0, 3, 3, 3]]
"""Three fragments are sent; the first is known to be acknowledged at 1.0, the second at 2.0 and the third at 3.0."""


@pytest.mark.parametrize(
    ("readings", "left", "losses", "fault", "sums"),
    [
        ({0: [1.5], 1: [2.5]}, {2: 1}, [], None, {}),
        ({0: [1.5], 1: [2.5]}, {}, [], None, {"on their way": 1}),
        ({0: [1.5], 2: [3.5]}, {}, [(1.7, 2.5)], None, {"lost by a restart": 1}),
        ({0: [1.5], 2: [3.5]}, {}, [(0.2, 0.5)], None, {"on their way": 1}),
        ({0: [1.5, 2.5], 1: [2.6]}, {2: 1}, [], "fragment 0 was read at", {}),
        ({0: [1.5, 2.5], 1: [2.6]}, {2: 1}, [(1.2, 2.0)], None, {"handed out again": 1}),
        ({0: [1.5, 2.5], 1: [2.6]}, {2: 1}, [(1.7, 2.0)], "fragment 0 was read at", {}),
        ({0: [1.5], 1: [2.5]}, {1: 1, 2: 1}, [], "fragment 1 was read at", {}),
        ({0: [1.5], 1: [2.5], 7: [3.0]}, {2: 1}, [], "fragment 7 was never sent", {}),
    ],
)
def test_the_queue_check_detects_faults(
    readings: dict[int, list[float]],
    left: dict[int, int],
    losses: list[tuple[float, float]],
    fault: str | None,
    sums: dict[str, int],
) -> None:
    faults, actual = account_queue(LINES, readings, left, losses)
    assert [item.startswith(fault or "") for item in faults] == [True] * bool(fault)
    for name in ("on their way", "lost by a restart"):
        assert actual[name] == sums.get(name, 0)
    if "handed out again" in sums:
        assert actual["handed out again"] == sums["handed out again"]
