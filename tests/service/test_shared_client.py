"""Threads that share a client do not wait for a thread that the table's limits block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from tests.service.table_rows import fragment


def stream_while_another_thread_writes(client: ReplayClient, count: int, between: Callable[[], Any]) -> list[int]:
    """Write numbered fragments in a thread, and return the numbers that a stream of the same client reads."""
    writing = threading.Thread(target=lambda: [client.extend(fragment(number)) for number in range(count)], daemon=True)
    actual: list[int] = []

    def read() -> None:
        samples = client.stream()
        while actual[-1:] != [count - 1]:
            actual.append(int(next(samples)["number"][0]))
            if len(actual) == count // 2:
                between()
        samples.close()

    writing.start()
    while client.written.sent < 2:
        time.sleep(0.01)
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(30)
    writing.join(30)
    return actual


def full_queue() -> ReplayTable:
    return ReplayTable("queue", kind="queue", capacity=1)


def test_a_streaming_thread_does_not_wait_for_a_blocked_writer() -> None:
    with ReplayServer([full_queue()]) as server:
        client = ReplayClient(server.uri, "queue", max_unacknowledged=1)
        assert stream_while_another_thread_writes(client, 20, lambda: None) == list(range(20))
        client.close()


def test_a_shared_client_continues_writing_and_streaming_after_a_restart() -> None:
    servers = [ReplayServer([full_queue()])]

    def restart() -> None:
        port = servers[0].port
        servers.pop().close()
        servers.append(ReplayServer([full_queue()], port=port))

    client = ReplayClient(servers[0].uri, "queue", max_unacknowledged=1)
    actual = stream_while_another_thread_writes(client, 40, restart)
    client.close()
    servers[0].close()
    assert actual == sorted(set(actual))
    # One in the table, and those on their way to the stream, are lost with the service.
    assert len(actual) >= 35
