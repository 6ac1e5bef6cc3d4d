"""Ragged columns remain ragged between processes and in datasets, for any row lengths."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Dataset, MultiAgentBatch, SampleBatch, broadcast, channel, concat_samples
from samplebatch.column.ragged import RaggedColumn
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable, RowClient, RowTable

ROOT = Path(__file__).parents[2]
LENGTHS = {
    "various lengths": [2, 0, 3, 1],
    "equal lengths": [3, 3, 3, 3],
    "one element each": [1, 1, 1, 1],
    "rows without elements": [0, 0, 0, 0],
    "one row": [5],
    "one empty row": [0],
    "no rows": [],
}
of_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


RAGGED = {"ids": "int32", "logp": "float32", "obs.mask": "bool"}


def rollouts(lengths: list[int]) -> SampleBatch[Any]:
    """Return rollouts with ragged columns of several dtypes, one of them nested."""
    values = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []
    columns = {
        name: RaggedColumn.from_rows([row.astype(dtype) for row in values], dtype=dtype)
        for name, dtype in RAGGED.items()
    }
    return SampleBatch({**columns, "reward": np.arange(len(lengths), dtype=np.float64)})


def check(received: Any, *parts: list[int]) -> None:
    """Check kinds, dtypes, lengths and values of received rollouts, joined from parts."""
    sent, lengths = concat_samples(list(map(rollouts, parts))), list(chain.from_iterable(parts))
    assert {name for name in sent.column_names if sent.column(name).kind == "ragged"} == set(RAGGED)
    for name in sent.column_names:
        column, expected = received.column(name), sent.column(name)
        assert (column.kind, column.dtype) == (expected.kind, expected.dtype), name
        if expected.kind == "ragged":
            assert received[name].lengths.tolist() == lengths, name
    assert received == sent


@of_lengths
def test_ragged_columns_are_sent_through_a_channel(lengths: list[int]) -> None:
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        # A repeated layout is sent without its description.
        for _ in range(3):
            producer.send(rollouts(lengths))
            check(consumer.recv(timeout_s=5), lengths)
        producer.send(MultiAgentBatch({"writer": rollouts(lengths)}, len(lengths)))
        check(consumer.recv(timeout_s=5).policy_batches["writer"], lengths)


def test_ragged_columns_of_changing_lengths_share_a_channel() -> None:
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        for lengths in (*LENGTHS.values(), *reversed(LENGTHS.values())):
            producer.send(rollouts(lengths))
            check(consumer.recv(timeout_s=5), lengths)


@of_lengths
def test_ragged_columns_are_published_and_pickled(lengths: list[int]) -> None:
    publisher, subscription = broadcast(1 << 20)
    with publisher, subscription:
        publisher.publish(rollouts(lengths))
        check(subscription.latest().value, lengths)
    check(pickle.loads(pickle.dumps(rollouts(lengths), 5)), lengths)


@of_lengths
@pytest.mark.parametrize("shared_memory", [True, False])
def test_ragged_columns_are_stored_in_a_table_of_fragments(lengths: list[int], shared_memory: bool) -> None:
    table = ReplayTable("queue", kind="queue", capacity=10)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "queue", shared_memory=shared_memory) as client:
        for _ in range(3):
            client.extend(rollouts(lengths))
        # A fragment without rows is not sent.
        for _ in range(3 if lengths else 0):
            check(client.sample(1).batch, lengths)
        assert client.info()["size"] == 0


@of_lengths
@pytest.mark.parametrize("shared_memory", [True, False])
def test_ragged_columns_are_stored_in_a_table_of_rows(lengths: list[int], shared_memory: bool) -> None:
    keys = list(range(len(lengths)))
    with (
        ReplayServer([RowTable("rows", 100)]) as server,
        RowClient(server.uri, "rows", timeout_s=5, shared_memory=shared_memory) as client,
    ):
        client.put([100], rollouts([2]))
        assert len(client.put(keys, rollouts(lengths))) == len(lengths)
        if lengths:
            check(client.get(keys, columns=rollouts(lengths).column_names).drop("key"), lengths)
        check(client.get([100], columns=rollouts([2]).column_names).drop("key"), [2])


@of_lengths
def test_ragged_columns_are_stored_in_a_dataset(lengths: list[int], tmp_path: Path) -> None:
    dataset = Dataset(tmp_path)
    for _ in range(2):
        dataset.extend(rollouts(lengths))
    if lengths:
        check(Dataset(tmp_path).read(), lengths, lengths)
        dataset.extend(rollouts([1, 4]))
        check(Dataset(tmp_path).read(), lengths, lengths, [1, 4])


@of_lengths
def test_ragged_columns_are_restored_from_arrow(lengths: list[int]) -> None:
    table = rollouts(lengths).to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.open_stream(sink.getvalue()) as stream:
        check(SampleBatch.from_arrow(stream.read_all()), lengths)


ON_RAY = """
import ray
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
import pytest
from samplebatch.convert import from_ray_dataset, to_ray_dataset
from samplebatch.workers.ray_backend import StoredFragments, pack
from tests.tokens.test_between_processes import LENGTHS, check, rollouts

@ray.remote
def echo(batch):
    return batch

for lengths in LENGTHS.values():
    check(ray.get(ray.put(rollouts(lengths))), lengths)
    check(ray.get(echo.remote(rollouts(lengths))), lengths)
    check(StoredFragments(1 << 30).open(ray.get(ray.put(pack(rollouts(lengths))))), lengths)
    if lengths:
        check(from_ray_dataset(to_ray_dataset(rollouts(lengths))), lengths)
print("done")
"""


def test_ragged_columns_are_sent_through_ray() -> None:
    pytest.importorskip("ray")
    script = subprocess.run([sys.executable, "-c", ON_RAY], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert script.stdout.splitlines()[-1:] == ["done"], script.stderr[-2000:]
