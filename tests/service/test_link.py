"""A client that cannot reach its service tries again, less and less often, and for no longer than it is to."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise, repeat
from types import SimpleNamespace

import numpy as np
import pytest

from samplebatch.errors import ServiceError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service import link as links
from samplebatch.service.link import Link, Patience
from samplebatch.service.protocol import LostError
from tests.service.slow_link import slow_link
from tests.service.table_rows import episode

URI = "grpc://127.0.0.1:1"
LOST = LostError("the connection is gone")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by one that advances only in pauses; return the list of pauses."""
    actual: list[float] = []
    monkeypatch.setattr(links, "time", SimpleNamespace(sleep=actual.append, monotonic=lambda: sum(actual)))
    return actual


def test_retry_pauses_grow_to_one_second_and_end_at_the_timeout(pauses: list[float]) -> None:
    patience = Patience(URI, 60.0)
    with pytest.raises(
        ServiceError, match=r"must be reachable, got no answer for 60 s in \d+ attempts: the connection"
    ):
        deque(map(patience.wait, repeat(LOST)))
    assert sum(pauses) == pytest.approx(60.0)
    assert all(
        0.5 * maximum <= pause <= maximum for pause, maximum in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.8), strict=False)
    )
    assert all(0.5 <= pause <= 1.0 for pause in pauses[5:-1])
    assert len(pauses) < 130


def test_clients_reconnect_after_random_pauses(pauses: list[float]) -> None:
    for _ in range(50):
        Patience(URI, 60.0).wait(LOST)
    assert all(first != other for first, other in pairwise(pauses))
    assert 0.025 <= min(pauses) < 0.03
    assert 0.045 < max(pauses) <= 0.05


def test_a_blocked_call_is_repeated_after_a_lost_connection(pauses: list[float]) -> None:
    link, calls = Link(URI, None, None, reconnect_s=60.0), []

    def call() -> str:
        calls.append(1)
        if len(calls) < 3:
            pauses.append(600.0 if len(calls) == 1 else 1.0)
            raise LOST
        return "held back no more"

    assert link.retry(call) == "held back no more"
    link.close()


def test_a_writer_reports_how_long_it_retried_a_failing_link() -> None:
    rows = episode(0, range(2))
    rows["frame"] = np.zeros((2, 400, 400), np.uint8)
    with (
        ReplayServer([ReplayTable("replay", capacity=100)]) as server,
        slow_link(server.port, cut_sent=5e3) as link,
        ReplayClient(link.uri, "replay", reconnect_s=2.0) as client,
    ):
        began, used = time.monotonic(), time.process_time()
        with pytest.raises(ServiceError, match=r"got no answer for 2 s in \d+ attempts"):
            deque(map(client.extend, repeat(rows)))
        assert 2.0 <= time.monotonic() - began < 10.0
        assert time.process_time() - used < 1.5
        assert 4 <= link.cuts < 30
        assert client.written.rows == 0
        # Closing would send it again.
        client._end()
