"""A table that is distributed over several services acts as one buffer, and survives the loss of a service."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, concat_samples
from samplebatch.errors import ArgumentError, CapacityError, ColumnTypeError, RowIndexError, ServiceError
from samplebatch.service import RateLimiter, ReplayClient, ReplayServer, ReplayTable
from tests.service.table_rows import episode, fragment

SERVE = """
import sys, time
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
with ReplayServer([ReplayTable("replay", capacity=10_000, streams=8)], port=int(sys.argv[1])) as server:
    print(server.uri, flush=True)
    while True:
        time.sleep(1)
"""


def tables(**options: Any) -> list[ReplayTable]:
    return [ReplayTable("replay", **{"capacity": 4000, "streams": 8, "seed": seed, **options}) for seed in range(2)]


@contextlib.contextmanager
def serving(*shards: ReplayTable, **options: Any) -> Iterator[ReplayClient]:
    with contextlib.ExitStack() as stack:
        uris = [stack.enter_context(ReplayServer([table])).uri for table in shards]
        yield stack.enter_context(ReplayClient(uris, "replay", seed=0, **options))


def test_environments_are_assigned_to_services_by_share() -> None:
    first, second = tables(capacity=200_000, streams=300)
    with serving(first, second, shares=[1, 3]) as client:
        for start in range(0, 8, 4):
            for env in range(0, 200, 50):
                parts = [episode(i, range(start, start + 4), done=start == 4, env_id=i) for i in range(env, env + 50)]
                client.extend(concat_samples(parts))
        client.flush()
        reported = client.info()
        samples = [table.sample(50, mode="episodes") for table in (first, second)]
    assert reported["size"] == 1600
    sizes = [reported["shards"][uri]["size"] for uri in client.uris]
    assert all(size % 8 == 0 for size in sizes)
    assert 0.6 < sizes[1] / 1600 < 0.9
    for sample in samples:
        assert sample.lengths is not None
        assert set(sample.lengths.tolist()) == {8}


def test_ids_that_do_not_distinguish_rows_are_rejected() -> None:
    rows = episode(0, range(3))
    rows["env_id"] = np.array([1, "a", None], object)
    with (
        serving(*tables()) as client,
        pytest.raises(ColumnTypeError, match="column 'env_id' must have one sortable id"),
    ):
        client.extend(rows)


def test_rows_of_add_are_sent_to_the_service_of_their_environment() -> None:
    with serving(*tables(streams=64)) as client:
        ids = np.arange(40)
        for t in range(5):
            client.add(
                {"obs": ids * 10 + t, "act": ids, "rew": ids * 1.0, "terminated": ids < 0, "truncated": ids < 0}, ids
            )
        client.add({"obs": 7, "act": 0, "rew": 1.0, "terminated": True, "truncated": False})
        assert len(client) == 201
        assert all(shard["size"] for shard in client.info()["shards"].values())


def test_rows_are_drawn_as_often_as_from_one_table() -> None:
    first, second = tables()
    with serving(first, second) as client:
        for number in range(60):
            client.extend(episode(number, range(2 + number % 7)))
        client.flush()
        sizes = [len(first), len(second)]
        samples = [client.sample(64) for _ in range(300)]
    owners = np.array([indices[0] >> 48 for _, indices in samples])
    share = sizes[1] / sum(sizes)
    assert abs(owners.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(samples))
    for number, size in enumerate(sizes):
        sampled = Counter(obs for batch, indices in samples if indices[0] >> 48 == number for obs in batch.obs.tolist())
        expected = sampled.total() / size
        square = sum((actual - expected) ** 2 / expected for actual in sampled.values())
        assert len(sampled) == size
        assert abs(square - size) < 4 * np.sqrt(2 * size)


def test_priorities_are_sent_to_the_service_of_their_rows() -> None:
    shards = tables(kind="prioritized", alpha=1.0, beta=1.0)
    with serving(*shards) as client:
        for number in range(20):
            client.extend(episode(number, range(3)), priorities=np.ones(3))
        favourite = 500.0
        for _ in range(60):
            batch, indices = client.sample(64)
            client.update_weight(indices, np.where(batch.obs == favourite, 1e6, 1e-3), generation=batch.generation)
        time.sleep(1.1)  # weights of services are believed for a second
        batch, _ = client.sample(64)
        assert (batch.obs == favourite).mean() > 0.9
        with pytest.raises(RowIndexError, match="indices must come from samples of this client"):
            client.update_weight(np.array([5 << 48]), 1.0)


def test_a_stream_receives_fragments_of_all_services_once() -> None:
    shards = tables(kind="fifo", capacity=100, max_times_sampled=1, streams=1)
    with serving(*shards) as client:
        for number in range(30):
            client.extend(fragment(number))
        client.flush()
        assert all(part["size"] for part in client.info()["shards"].values())
        stream = client.stream()
        assert sorted(int(next(stream)["number"][0]) for _ in range(30)) == [*range(30)]
        stream.close()


def test_batches_of_several_policies_are_not_split() -> None:
    with serving(*tables(kind="fifo", capacity=100, streams=1)) as client:
        for env in range(6):
            rows = episode(env, range(3), env_id=env)
            client._add_fragment(MultiAgentBatch({"one": rows, "two": rows[:2]}, 3))
        client.flush()
        assert client.info()["size"] == 6
        assert isinstance(client.sample(1)[0], MultiAgentBatch)


def test_weights_are_published_on_all_services_and_read_from_any() -> None:
    with serving(*tables()) as client:
        assert client.latest() is None
        assert client.publish({"w": np.arange(3.0)}) == 1
        assert client.publish({"w": np.arange(4.0)}) == 2
        actual = client.latest(1)
        assert actual is not None
        assert (actual.version, actual.value["w"].tolist()) == (2, [0.0, 1.0, 2.0, 3.0])
        assert client.latest(2) is None


def test_a_restarted_service_continues_the_versions_of_weights() -> None:
    shards = tables()
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(ReplayServer([table])) for table in shards]
        ports = [server.port for server in first]
        learner, actor = (
            stack.enter_context(ReplayClient([server.uri for server in first], shards[0].name, reconnect_s=0.1))
            for _ in range(2)
        )
        for number in range(1, 4):
            assert learner.publish({"w": np.array([number])}) == number
        assert followed(actor, 0) == [3]
        first[0].close()
        stack.enter_context(ReplayServer([ReplayTable(shards[0].name, capacity=9)], port=ports[0]))
        # It has no weights yet; the others have version 3.
        assert followed(actor, 3) == []
        assert learner.publish({"w": np.array([4])}) == 4
        assert followed(actor, 3) == [4]
        assert followed(actor, 4) == []
        with ReplayClient(actor.uris, shards[0].name) as another:
            assert another.publish({"w": np.array([5])}) == 5
        assert followed(actor, 4) == [5]


def followed(actor: ReplayClient, version: int) -> list[int]:
    """Poll for new weights like an actor; list the received versions."""
    actual: list[int] = []
    for _ in range(4):
        publication = actor.latest(version)
        if publication is not None:
            assert publication.value["w"].tolist() == [publication.version]
            version = publication.version
            actual.append(version)
    return actual


def test_a_client_can_be_sent_to_another_process_by_pickle() -> None:
    with serving(*tables()) as client:
        client.extend(episode(1, range(5)))
        client.flush()
        with pickle.loads(pickle.dumps(client)) as other:
            assert (len(other), other.uris) == (5, client.uris)


def test_closing_sends_to_every_service_despite_rejections() -> None:
    first, second = tables(streams=16)
    with contextlib.ExitStack() as stack:
        uris = [stack.enter_context(ReplayServer([table])).uri for table in (first, second)]
        client = ReplayClient(uris, "replay", max_unacknowledged=100)
        client.extend(concat_samples([episode(i, range(4), env_id=i) for i in range(16)]))
        client.flush()
        client.extend(concat_samples([episode(i, range(300), env_id=i) for i in range(16)]))
        with pytest.raises(CapacityError, match="at most 250 steps"):
            client.close()
        assert all(shard.connection._closed for shard in client._shards.all)


def test_limits_and_reset_apply_to_all_tables() -> None:
    with serving(*tables()) as client:
        client.extend(episode(1, range(5)))
        reported = client.set_limits(min_size=3)
        assert [part["limits"]["min_size"] for part in reported["shards"].values()] == [3, 3]
        client.reset()
        assert len(client) == 0


@pytest.mark.parametrize(
    ("uris", "shares", "message"),
    [
        ([], None, "must have the address of one service or more, got no addresses"),
        (["grpc://127.0.0.1:1", "grpc://127.0.0.1:1"], None, "addresses must be different"),
        (["grpc://127.0.0.1:1"], [1, 2], "shares must have one value per address, 1, got 2"),
        (["grpc://127.0.0.1:1"], [0], "a share"),
    ],
)
def test_other_arguments_are_rejected(uris: list[str], shares: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ReplayClient(uris, "replay", shares=shares)


def start(port: int = 0) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_writers_and_learners_continue_if_a_service_is_restarted() -> None:
    (single, first), (two, second) = start(), start()
    try:
        with ReplayClient([first, second], "replay", retry_s=0.5, reconnect_s=0.3, seed=1) as client:
            for number in range(40):
                client.extend(episode(number, range(4)))
            client.flush()
            left = client.info()["shards"][second]["size"]
            assert 0 < left < 160
            kill(single)
            before = client.written
            for number in range(40, 80):
                client.extend(episode(number, range(4)))
                client.sample(8)
            client.flush()
            assert client.lost == [first]
            # Fragments that were sent to the one that is gone are kept for it.
            count = client.written.sent - client.written.fragments
            assert client.info()["size"] == left + 4 * (40 - count)
            assert before.sent == before.fragments == 40
            single, _ = start(int(first.rsplit(":", 1)[1]))
            time.sleep(0.6)
            for number in range(80, 120):
                client.extend(episode(number, range(4)))
            client.flush()
            assert client.lost == []
            assert client.written.sent == client.written.fragments == 120
            assert client.info()["size"] == left + 4 * 80
            for process in (single, two):
                kill(process)
            with pytest.raises(ServiceError, match="one of the replay services"):
                client.sample(8)
            with pytest.raises(ServiceError):
                client.extend(episode(1, range(4)))
    finally:
        for process in (single, two):
            if process.poll() is None:
                kill(process)


def test_closing_sends_fragments_and_wakes_waiting_threads() -> None:
    reported: list[str] = []

    def draw() -> None:
        try:
            client.sample(8)
        except ServiceError as error:
            reported.append(str(error))

    first, second = tables(limiter=RateLimiter(100))
    with serving(first, second) as client:
        for number in range(6):
            client.extend(episode(number, range(4)))
        thread = threading.Thread(target=draw)
        thread.start()
        while not (first.info()["held_back"] or second.info()["held_back"]):
            time.sleep(0.01)
        client.close()
        thread.join(20)
        assert first.info()["size"] + second.info()["size"] == 24
    assert len(reported) == 1
