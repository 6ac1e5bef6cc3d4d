"""Clients on links with delays, and on links that break: streams fill them, and no fragment is lost or doubled."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from tests.service.slow_link import SlowLink, slow_link
from tests.service.table_rows import episode
from tests.soaks import rounds

DELAY_S = 0.03
ROUND_TRIP_S = 2 * DELAY_S
AHEAD = 3


def seconds_of(call: Callable[[], Any], times: int) -> float:
    began = time.monotonic()
    for _ in range(times):
        call()
    return time.monotonic() - began


def filmed(number: int) -> SampleBatch[Any]:
    """Return a fragment of 8 KB, all of whose bytes of frames are its number."""
    rows = episode(number, range(2))
    rows["frame"] = np.full((2, 64, 64), number % 256, np.uint8)
    return rows


def number_of(rows: Any) -> int:
    """Return the number of a fragment, which must be equal in all rows."""
    (number,) = set(rows["eps_id"].tolist())
    assert rows["frame"].shape == (2, 64, 64)
    assert (rows["frame"] == number % 256).all()
    return int(number)


def test_a_stream_has_several_samples_in_flight() -> None:
    table = ReplayTable("replay", capacity=100)
    table.extend(episode(0, range(20)))
    with (
        ReplayServer([table]) as server,
        slow_link(server.port, DELAY_S) as link,
        ReplayClient(link.uri, "replay", shared_memory=False) as client,
    ):
        client.sample(4)
        assert seconds_of(lambda: client.sample(4), 4) >= 4 * ROUND_TRIP_S
        stream = client.stream(4, prefetch=16)
        next(stream)
        assert seconds_of(lambda: next(stream), 48) < 48 * ROUND_TRIP_S / 4
        stream.close()


@pytest.mark.parametrize("shared", [True, False])
def test_the_prefetch_queue_is_filled_while_a_learner_computes(shared: bool) -> None:
    table = ReplayTable("replay", capacity=100)
    frames = np.zeros((8, 300, 300), np.uint8)
    table.extend(SampleBatch(obs=frames, actions=[0] * 8, rewards=np.zeros(8), terminateds=[False] * 7 + [True]))
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay", shared_memory=shared) as client:
        stream = client.stream(4, prefetch=5)
        end = time.monotonic() + 20
        for number in range(12):
            next(stream)
            expected = 4 * (number + 6)
            while table.info()["sampled"] < expected and time.monotonic() < end:
                time.sleep(0.001)
            assert table.info()["sampled"] == expected
        stream.close()


def test_a_writer_has_several_fragments_in_flight() -> None:
    table = ReplayTable("replay", capacity=1000)
    with (
        ReplayServer([table]) as server,
        slow_link(server.port, DELAY_S) as link,
        ReplayClient(link.uri, "replay", max_unacknowledged=16) as client,
    ):
        fragments = (episode(number, range(5)) for number in itertools.count())
        assert seconds_of(lambda: (client.extend(next(fragments)), client.flush()), 4) >= 4 * ROUND_TRIP_S
        assert seconds_of(lambda: client.extend(next(fragments)), 48) < 48 * ROUND_TRIP_S / 4
        assert len(client) == client.written.rows == 52 * 5


@pytest.mark.parametrize("cuts", [{"cut_sent": 60e3}, {"cut_received": 1e3}], ids=["fragments", "acknowledgements"])
def test_fragments_are_inserted_once_over_a_failing_link(cuts: dict[str, float]) -> None:
    table = ReplayTable("replay", capacity=1000)
    with (
        ReplayServer([table]) as server,
        slow_link(server.port, 0.002, seed=1, **cuts) as link,
        ReplayClient(link.uri, "replay") as client,
    ):
        for number in range(40):
            client.extend(filmed(number))
        client.flush()
        assert link.cuts >= 2
        assert (client.written.fragments, client.written.rows) == (40, 80)
        actual = table._items.buffer[:]  # type: ignore[attr-defined]
        assert sorted(actual.obs.tolist()) == [100.0 * number + t for number in range(40) for t in range(2)]
        assert (actual.frame == actual.obs.astype(int)[:, None, None] // 100).all()


def read_all(link: SlowLink, last: int, actual: list[int]) -> None:
    """Read a queue until the last fragment or a later fragment has arrived."""
    with ReplayClient(link.uri, "queue", shared_memory=False) as reader:
        for rows in reader.stream(prefetch=AHEAD):
            actual.append(number_of(rows))
            if actual[-1] >= last - 1:
                return


def carry(fragments: int, cut_bytes: float, delay_s: float, seed: int) -> tuple[SlowLink, SlowLink]:
    """Carry fragments through a queue whose writer and reader have links that break; return the links."""
    table = ReplayTable("queue", kind="fifo", capacity=4 * fragments, max_times_sampled=1)
    actual: list[int] = []
    with (
        ReplayServer([table]) as server,
        slow_link(server.port, delay_s, seed=seed, cut_sent=4 * cut_bytes, cut_received=cut_bytes / 8) as wide,
        slow_link(server.port, delay_s, seed=seed + 1, cut_received=cut_bytes) as narrow,
        ReplayClient(wide.uri, "queue") as writer,
    ):
        reading = threading.Thread(target=read_all, args=(narrow, fragments, actual), daemon=True)
        reading.start()
        sent = 0
        while sent < fragments or reading.is_alive():
            writer.extend(filmed(sent))
            sent += 1
            # Those after the last are for a reader that has lost it.
            reading.join(0.02 * (sent > fragments))
        writer.flush()
        assert table.info()["inserted"] == writer.written.fragments == sent
    assert actual == sorted(set(actual))
    # No more are lost than were on their way to the reader when its connection broke.
    assert actual[-1] + 1 - len(actual) <= narrow.cuts * (1 + AHEAD)
    return wide, narrow


def test_a_queue_delivers_fragments_once_over_failing_links() -> None:
    writing, reading = carry(40, 60e3, 0.002, seed=3)
    assert min(writing.cuts, reading.cuts) >= 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_queue_works_for_a_long_time_over_failing_links(seed: int) -> None:
    fragments = rounds(40)
    writing, reading = carry(fragments, 500.0 * fragments, DELAY_S / 2, seed=10 * seed)
    assert min(writing.cuts, reading.cuts) >= 5
