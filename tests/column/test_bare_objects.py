"""Columns of empty dicts, such as empty infos, create their objects on first access."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch import AsyncCollector, Collector, MultiAgentBatch, MultiAgentCollector, SampleBatch, concat_samples
from samplebatch.column.objects import ObjectColumn
from samplebatch.errors import CapacityError, FormatError
from samplebatch.transport.channel import channel


def bare(rows: int) -> SampleBatch:
    return SampleBatch._of({**SampleBatch(a=np.arange(rows))._all(), "infos": ObjectColumn.empty_dicts(rows)}, {})


def is_bare(batch: SampleBatch) -> bool:
    column = batch.column("infos")
    assert isinstance(column, ObjectColumn)
    return column.is_bare


def test_counting_copying_joining_and_pickling_create_no_objects() -> None:
    batch = bare(3)
    assert batch.size_bytes() == 3 * 8 + 3 * 64
    for other in (batch.copy(), concat_samples([batch] * 2), pickle.loads(pickle.dumps(batch))):
        assert is_bare(other)
    assert is_bare(batch)
    assert concat_samples([batch, batch])["infos"].tolist() == [{}] * 6


def test_objects_are_created_on_first_access() -> None:
    batch = bare(3)
    batch["infos"][0]["lives"] = 2
    assert not is_bare(batch)
    assert concat_samples([batch, bare(1)])["infos"].tolist() == [{"lives": 2}, {}, {}, {}]
    assert concat_samples([bare(1), batch])["infos"].tolist() == [{}, {"lives": 2}, {}, {}]
    first, other = bare(2)["infos"]
    assert first is not other
    part = (full := bare(3))[1:]
    part["infos"][0]["lives"] = 2
    assert full["infos"].tolist() == [{}, {"lives": 2}, {}]
    assert full == full.copy() != bare(3)
    assert bare(3) == SampleBatch(a=[0, 1, 2], infos=[{}, {}, {}])


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_channels_send_empty_dicts_without_bytes(allow_pickle: bool) -> None:
    producer, consumer = channel(1 << 16, allow_pickle=allow_pickle)
    with producer, consumer:
        output = bare(2)
        output["infos"][1]["lives"] = 2
        for batch in (bare(2), bare(2), output, bare(3), bare(0), MultiAgentBatch({"p": bare(2), "q": output}, 2)):
            producer.send(batch)
            received = consumer.recv().copy()
            assert received == batch
            parts = received.as_multi_agent().policy_batches.values()
            for part, item in zip(parts, batch.as_multi_agent().policy_batches.values(), strict=True):
                assert is_bare(part) == is_bare(item)
        producer.send(bare(2).as_batch())
        assert consumer.recv().infos.tolist() == [{}, {}]


def test_rows_beyond_the_message_limit_are_rejected() -> None:
    producer, consumer = channel(1 << 16)
    with producer, consumer:
        producer.send(SampleBatch._of({"infos": ObjectColumn.empty_dicts(1 << 40)}, {}))
        with pytest.raises((FormatError, CapacityError), match="send fewer rows at a time"):
            consumer.recv()


def test_collectors_store_empty_infos_as_bare_objects() -> None:
    with AsyncCollector("random", "CartPole-v1", start_method="fork") as asynchronous:
        assert is_bare(asynchronous.collect(n_step=5).batch)
    with Collector("random", "CartPole-v1") as collector:
        assert is_bare(collector.collect(n_step=5).batch)
    with MultiAgentCollector("random", "mpe2/simple_spread_v3") as several:
        assert is_bare(several.collect(n_step=5).batch["agent"])
