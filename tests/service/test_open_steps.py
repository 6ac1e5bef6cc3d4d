"""A client collects single steps into fragments; each step is inserted into the table once, in order."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError, SampleBatchError, ServiceError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from tests.service.table_rows import episode


@contextmanager
def serving(streams: int = 1, steps: int = 4, **options: Any) -> Iterator[tuple[ReplayTable, ReplayClient]]:
    table = ReplayTable("replay", capacity=120, streams=streams, seed=3)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay", fragment_steps=steps, **options) as client:
        yield table, client


def step(t: int, *, done: bool = False, **columns: Any) -> Batch:
    return Batch(obs=t, act=0, rew=1.0, terminated=done, truncated=False, obs_next=t + 1, **columns)


def steps(t: int, ends: Any) -> dict[str, Any]:
    """Return a row for each of some environments."""
    count = len(ends)
    return {
        "obs": np.arange(count) * 100 + t,
        "act": np.zeros(count),
        "rew": np.ones(count),
        "terminated": np.array(ends),
        "truncated": np.zeros(count, bool),
        "obs_next": np.arange(count) * 100 + t + 1,
    }


def held(table: ReplayTable) -> Any:
    return table._items.buffer[:]  # type: ignore[attr-defined]


def test_a_fragment_is_sent_after_the_configured_number_of_steps() -> None:
    with serving() as (_, client):
        for t in range(11):
            client.add(step(t))
            assert client.written.sent == (t + 1) // 4
        client.flush()
        assert (client.written.fragments, client.written.rows) == (3, 11)


def test_the_end_of_an_episode_sends_its_steps() -> None:
    with serving() as (_, client):
        sent = []
        for t in range(6):
            client.add(step(t, done=t in (1, 2)))
            sent.append(client.written.sent)
    assert sent == [0, 1, 2, 2, 2, 2]


def test_each_environment_has_separate_fragments() -> None:
    with serving(streams=3) as (table, client):
        for t in range(5):
            client.add(steps(t, [False, t == 1, False]), buffer_ids=[0, 1, 2])
        # At the end of an episode of the second one, and when the first and third had four steps.
        assert client.written.sent == 2
        client.flush()
        assert client.written.rows == 15
    assert held(table).obs.tolist() == [*range(5), *range(100, 105), *range(200, 205)]


@pytest.mark.parametrize("steps_of_a_fragment", [1, 3, 7, 1000])
def test_the_table_receives_the_same_steps_as_a_local_buffer(steps_of_a_fragment: int) -> None:
    local = VectorReplayBuffer(120, 3, random_seed=3)
    rng = np.random.default_rng(1)
    with serving(3, steps_of_a_fragment) as (table, client):
        for t in range(60):
            ids = np.flatnonzero(rng.random(3) < 0.8)
            if len(ids):
                rows = steps(t, rng.random(len(ids)) < 0.1)
                client.add(rows, buffer_ids=ids)
                local.add(Batch(rows), buffer_ids=ids)
        actual, expected = client.sample(64, n_step=3), local.sample(64, n_step=3)
        assert actual[1].tolist() == expected[1].tolist()
        for name in ("obs", "rew", "obs_next", "terminated", "done", "returns", "discount"):
            assert actual[0][name].tolist() == expected[0][name].tolist()
        assert len(table) == len(local)


def test_readers_of_the_table_receive_all_steps() -> None:
    for look in (len, lambda client: client.info()["size"], lambda client: client.sample(4) and 3):
        with serving() as (_, client):
            for t in range(3):
                client.add(step(t))
            assert look(client) == 3


def test_closing_sends_open_steps_and_an_error_discards_them() -> None:
    with serving() as (table, client):
        client.add(step(0))
        client.close()
        assert len(table) == 1
    with serving() as (table, client):
        client.add(step(0))
        client.__exit__(KeyError)
        assert len(table) == 0


def test_fragments_are_sent_after_earlier_steps() -> None:
    with serving() as (table, client):
        client.add(step(0))
        client.extend(episode(7, range(2)))
        client.flush()
        assert held(table).obs.tolist() == [0, 700, 701]


def test_a_step_with_other_columns_starts_a_new_fragment() -> None:
    local = ReplayBuffer(120)
    with serving() as (table, client):
        for item in (step(0), step(1), step(2, info={"lives": 3}), step(3, info={"lives": 2})):
            client.add(item)
            local.add(item)
        assert client.written.sent == 1
        client.flush()
        assert client.written.sent == 2
        assert held(table) == local[:]


def test_arrays_may_be_overwritten_after_they_are_added() -> None:
    with serving(2) as (table, client):
        rows = steps(0, [False, False])
        for t in range(3):
            rows["obs"][:] = [t, 100 + t]
            client.add(rows, buffer_ids=[0, 1])
        client.flush()
        assert held(table).obs.tolist() == [0, 1, 2, 100, 101, 102]


def test_a_rejected_step_does_not_change_earlier_steps() -> None:
    with serving() as (table, client):
        client.add(step(0))
        with pytest.raises(ColumnNotFoundError, match="'rew'"):
            client.add(obs=1, act=0, terminated=False, truncated=False)
        client.add(step(1))
        client.flush()
        assert held(table).obs.tolist() == [0, 1]


def test_a_step_that_could_not_be_sent_is_discarded() -> None:
    table = ReplayTable("replay", capacity=120)
    server = ReplayServer([table]).start()
    options: dict[str, Any] = {"fragment_steps": 2, "reconnect_s": 0.2, "max_unacknowledged": 1}
    client = ReplayClient(server.uri, "replay", **options)
    client.add(step(0))
    client.add(step(1))
    client.add(step(2))
    client.flush()
    port = server.port
    server.close()
    client.add(step(3))
    with pytest.raises(ServiceError):
        client.add(step(4, done=True))
    assert client.written.sent == 3
    with pytest.raises(ServiceError):
        client.add(step(5, done=True))
    with ReplayServer([ReplayTable("replay", capacity=120)], port=port) as again:
        client.add(step(6))
        client.flush()
        assert held(again.tables["replay"]).obs.tolist() == [3, 4, 6]
        client.close()


def test_only_the_fragment_that_the_table_rejects_is_dropped() -> None:
    with serving(steps=2) as (table, client):
        client.add(step(0))
        client.add(step(1))
        client.add(Batch(step(2), obs=np.zeros((2, 2))))
        with pytest.raises(SampleBatchError):
            client.flush()
        client.add(step(3))
        client.flush()
        assert held(table).obs.tolist() == [0, 1, 3]
        assert client.written.refused == 1


def test_a_client_can_be_sent_to_other_processes_without_its_steps() -> None:
    with serving() as (table, client):
        client.add(step(0))
        with pickle.loads(pickle.dumps(client)) as other:
            other.add(step(1))
            assert other.written.sent == 0
        assert held(table).obs.tolist() == [1]


def test_several_services_receive_fragments_of_steps() -> None:
    tables = [ReplayTable("replay", capacity=400, streams=8) for _ in range(2)]
    with (
        ReplayServer(tables[:1]) as first,
        ReplayServer(tables[1:]) as second,
        ReplayClient([first.uri, second.uri], "replay", fragment_steps=5) as client,
    ):
        for t in range(7):
            client.add(steps(t, [False] * 6), buffer_ids=range(6))
        assert len(client) == 42
        assert 2 <= client.written.fragments <= 12


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_numbers_of_steps_are_checked(count: Any) -> None:
    with pytest.raises(ArgumentError, match="fragment_steps"):
        ReplayClient("grpc://127.0.0.1:1", "replay", fragment_steps=count)


@pytest.mark.parametrize("fragment_steps", [1, 3])
def test_names_without_values_agree_with_a_local_buffer(fragment_steps: int) -> None:
    local = ReplayBuffer(120, random_seed=3)
    forms: list[dict[str, Any]] = [
        {"obs": {"a": np.ones(2), "b": Batch()}, "info": {"episode": {"r": {}}}},
        {"obs": {"a": np.ones(2)}, "info": {"n": 1, "c": {}}},
        {"obs": {"a": np.ones(2), "b": {"d": Batch()}}, "info": {}},
    ]
    with serving(steps=fragment_steps) as (_, client):
        for number, samples in ((0, False), (0, True), (0, False), (1, False), (2, False), (2, True), (0, False)):
            for buffer in (local, client):
                buffer.add(Batch(act=0, rew=1.0, terminated=False, truncated=False, **forms[number]))
            if samples:
                assert repr(client.sample(4)) == repr(local.sample(4))
        assert repr(client.sample(64)) == repr(local.sample(64))


def test_names_without_values_of_batches_agree_with_a_local_buffer() -> None:
    local = ReplayBuffer(120, random_seed=3)
    flags = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    rows = Batch(
        obs={"a": np.ones(2), "b": Batch()}, act=np.zeros(2), rew=np.ones(2), extra={}, info={"e": {}}, **flags
    )
    with serving(steps=1) as (_, client):
        for buffer in (local, client):
            buffer.extend(rows)
        assert repr(client.sample(4)) == repr(local.sample(4))
