"""Collectors and workers write to a replay service as they write to a buffer of their own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from samplebatch import Collector, MultiAgentCollector, ReplayBuffer, RolloutWorkers, SampleBatch, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable

_STEPS = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")


def held(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return the columns of a buffer's rows that every collector writes."""
    rows = buffer[:]
    return {name: rows[name].tolist() for name in _STEPS}


def buffer_of(table: ReplayTable) -> ReplayBuffer:
    buffer: ReplayBuffer = table._items.buffer  # type: ignore[attr-defined]
    return buffer


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_collector_fills_a_table_like_a_local_buffer(num_envs: int) -> None:
    table = ReplayTable("replay", capacity=600, streams=num_envs, seed=5)
    local = ReplayBuffer(600, random_seed=5) if num_envs == 1 else VectorReplayBuffer(600, num_envs, random_seed=5)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        for buffer in (client, local):
            with Collector("random", "CartPole-v1", buffer, num_envs=num_envs, seed=1) as collector:
                stats = [collector.collect(n_step=60) for _ in range(2)]
                assert [item.batch for item in stats] == [None, None]
        assert len(client) == len(local) == 120
        assert held(buffer_of(table)) == held(local)
        (actual, indices), (expected, is_present) = client.sample(32), local.sample(32)
        assert indices.tolist() == is_present.tolist()
        assert {name: actual[name].tolist() for name in _STEPS} == {name: expected[name].tolist() for name in _STEPS}


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_workers_write_directly_to_the_service(backend: Any) -> None:
    table, local = ReplayTable("replay", capacity=400, streams=4), VectorReplayBuffer(400, 4)
    reports = []
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        for buffer in (client, local):
            options: Any = {"num_workers": 2, "envs_per_worker": 2, "seed": 3}
            kind = backend if buffer is client else "inline"
            with RolloutWorkers("random", "CartPole-v1", buffer, backend=kind, **options) as workers:
                reports.append([workers.collect(n_step=80) for _ in range(2)])
        assert len(client) == len(local) == 160
    for report, expected in zip(*reports, strict=True):
        assert report.batch is None
        assert report.n_collected_steps == expected.n_collected_steps == 80
        assert sorted(report.returns) == sorted(expected.returns)
    assert held(buffer_of(table)) == held(local)


@pytest.fixture
def shards() -> Iterator[tuple[list[ReplayTable]]]:
    tables = [ReplayTable("replay", capacity=1600, streams=16, seed=seed) for seed in range(2)]
    with ExitStack() as stack:
        uris = [stack.enter_context(ReplayServer([table])).uri for table in tables]
        # By this name, some environments go to each.
        yield tables, stack.enter_context(ReplayClient(uris, "replay", writer="w", seed=0))


@pytest.mark.parametrize("way", ["collector", "inline", "process"])
def test_each_environment_is_collected_into_one_of_several_services(way: Any, shards: tuple[list[ReplayTable]]) -> None:
    tables, client = shards
    local = VectorReplayBuffer(1600, 4)
    for buffer in (client, local):
        if way == "collector":
            with Collector("random", "CartPole-v1", buffer, num_envs=4, seed=1) as collector:
                collected = [collector.collect(n_step=80) for _ in range(2)]
        else:
            options: Any = {"num_workers": 2, "envs_per_worker": 2, "seed": 1}
            kind = way if buffer is client else "inline"
            with RolloutWorkers("random", "CartPole-v1", buffer, backend=kind, **options) as workers:
                collected = [workers.collect(n_step=80) for _ in range(2)]
        assert [(item.batch, item.n_collected_steps) for item in collected] == [(None, 80)] * 2
    assert len(client) == len(local) == 160
    # Which service an environment goes to depends on the addresses; one may have got none of four.
    rows = [buffer_of(table)[:] for table in tables if len(table)]
    for env in range(4):
        (full,) = [part[part.env_id == env] for part in rows if env in part.env_id]
        expected = local[:][env * 40 : env * 40 + 40]
        assert {name: full[name].tolist() for name in _STEPS} == {name: expected[name].tolist() for name in _STEPS}


def test_iteration_yields_batches_with_statistics_columns_only() -> None:
    table = ReplayTable("queue", kind="queue", capacity=50)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "queue") as client:
        with RolloutWorkers("random", "CartPole-v1", client, backend="inline") as workers:
            fragments = list(workers.fragments(n_step=80, fragment_length=20))
        assert "obs" not in fragments[0]
        assert sum(len(fragment) for fragment in fragments) == 80
        stream = client.stream(prefetch=0)
        assert sum(len(next(stream)["obs"]) for _ in fragments) == 80
        stream.close()


def test_environments_of_several_agents_are_collected_into_a_service() -> None:
    table = ReplayTable("queue", kind="queue", capacity=50)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "queue") as client:
        with MultiAgentCollector("random", "mpe2/simple_spread_v3", buffer=client, seed=1) as collector:
            collector.collect(n_step=10)
        actual, _ = client.sample(1)
        assert actual.env_steps() == 10
        # Workers tell the version of the weights, too.
        client.reset()
        with RolloutWorkers("random", "mpe2/simple_spread_v3", client, num_workers=1, backend="inline") as workers:
            assert sum(fragment.env_steps() for fragment in workers.fragments(n_step=20, fragment_length=10)) == 20
        assert [client.sample(1)[0].env_steps() for _ in range(2)] == [10, 10]


def test_infos_are_columns_of_a_table_of_steps() -> None:
    table = ReplayTable("replay", capacity=100)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        infos = [{}, {"lives": 3}]
        for part in (infos, [{}, {}]):
            rows: dict[str, Any] = {"obs": [1, 2], "actions": [0, 0], "rewards": [0.0, 0.0], "eps_id": [7, 7]}
            client._add_fragment(SampleBatch(**rows, terminateds=[False, True], infos=np.array(part, object)))
        assert client.sample(64)[0].info.lives.max() == 3


def test_max_lag_is_rejected_for_replay_clients() -> None:
    with ReplayServer([ReplayTable("replay", capacity=10)]) as server:
        client = ReplayClient(server.uri, "replay")
        with pytest.raises(ArgumentError, match="max_lag must be None"):
            RolloutWorkers("random", "CartPole-v1", client, max_lag=1)
        client.close()
