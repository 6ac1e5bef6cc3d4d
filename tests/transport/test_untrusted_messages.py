"""Messages of any kind and depth execute no code of the sender unless the receiver allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, MultiAgentBatch, SampleBatch, broadcast, channel, gather
from samplebatch.column.interface import Header
from samplebatch.column.objects import ObjectColumn
from samplebatch.errors import CapacityError, FormatError, UntrustedPickleError
from samplebatch.transport.schema import Schema
from tests.malice import NESTINGS, ROWS, MaliciousColumn


def messages(nesting: str, mark: Path) -> dict[str, Any]:
    """Return one batch of every kind with a malicious column, whose name ends in `metadata`."""
    column = MaliciousColumn.of(nesting, mark)
    plain = SampleBatch._of({"metadata": column})
    return {
        "SampleBatch": plain,
        "MultiAgentBatch": MultiAgentBatch({"wolf": plain}, ROWS),
        "Batch": Batch(x=np.zeros(ROWS), info=Batch(metadata=column)),
    }


NAMES = {"SampleBatch": "metadata", "MultiAgentBatch": "metadata", "Batch": r"info\.metadata"}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("receive", ["recv", "gather"])
def test_messages_are_not_unpickled(receive: str, kind: str, nesting: str, mark: Path) -> None:
    producer, consumer = channel(1 << 18, allow_pickle=True)
    # A sender has what it says of itself in its own hands; what the receiver was made with counts.
    consumer._allow_pickle = False
    with producer, consumer:
        producer.send(messages(nesting, mark)[kind])
        source = consumer if receive == "recv" else gather([consumer])
        with pytest.raises(UntrustedPickleError, match=f"column '{NAMES[kind]}' holds pickled objects"):
            source.recv(timeout_s=5)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("kind", NAMES)
def test_publications_are_not_unpickled(kind: str, nesting: str, mark: Path) -> None:
    publisher, subscription = broadcast(1 << 18, allow_pickle=True)
    subscription._allow_pickle = False
    with publisher, subscription:
        publisher.publish(messages(nesting, mark)[kind])
        with pytest.raises(UntrustedPickleError, match=f"column '{NAMES[kind]}' holds pickled objects"):
            subscription.latest(timeout_s=5)


def test_committed_reservations_are_not_unpickled(mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectColumn, "dump", MaliciousColumn.of("list", mark).dump)
    producer, consumer = channel(1 << 18, allow_pickle=True)
    consumer._allow_pickle = False
    with producer, consumer:
        reservation = producer.reserve({"obs": np.dtype("f4")}, ROWS)
        reservation.commit(extra={"metadata": [{}] * ROWS})
        with pytest.raises(UntrustedPickleError, match="column 'metadata' holds pickled objects"):
            consumer.recv(timeout_s=5)


@pytest.mark.parametrize(
    ("torch_name", "refusal"),
    [
        ("qint8", "got 'qint8'"),
        ("quint4x2", "got 'quint4x2'"),
        ("nn", "got 'nn'"),
        (3, "got '3'"),
        ("int16", "must have elements of 1 bytes, got 2 bytes"),
    ],
)
def test_dtypes_in_schemas_must_be_constructible_from_bytes(torch_name: Any, refusal: str) -> None:
    described = {"kind": "SampleBatch", "parts": [["", [["w", "|u1", [2], torch_name, ""]], None]]}
    with pytest.raises(FormatError, match=refusal):
        Schema.read(described)
    described["parts"][0][1][0][3] = "int8"  # type: ignore[index]
    assert Schema.read(described).describe()["kind"] == "SampleBatch"


class BombColumn(ObjectColumn):
    """Objects that require more memory than the size of their message."""

    def __init__(self, header: Header, buffers: list[Any]) -> None:
        super().__init__(np.array([None, None]))
        self.dumped = header, buffers

    def dump(self) -> tuple[Header, list[Any]]:
        return self.dumped


def stream(array: pa.Array, compression: str | None = None) -> list[Any]:
    """Write an array as `ObjectColumn.dump` does, compressed if asked for."""
    batch = pa.record_batch([array], ["values"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return [sink.getvalue()]


ROWS_WITHOUT_BYTES = 1 << 33
BOMBS = {
    "None": (("object", ROWS_WITHOUT_BYTES, '{"kind":"none"}', True), []),
    "empty dicts": (("object", ROWS_WITHOUT_BYTES, '{"kind":"dict"}', False), []),
    "nulls in a stream": (("object", 1 << 30, '{"kind":"none"}', False), stream(pa.nulls(1 << 30))),
    "compressed": (
        ("object", 1 << 20, '{"kind":"int"}', False),
        stream(pa.array(np.zeros(1 << 20, np.int64)), "zstd"),
    ),
}


@pytest.mark.parametrize("kind", ["SampleBatch", "Batch"])
@pytest.mark.parametrize("name", BOMBS)
def test_objects_use_no_more_memory_than_their_message_allows(name: str, kind: str) -> None:
    column = BombColumn(*BOMBS[name])
    plain = SampleBatch._of({"metadata": column})
    producer, consumer = channel(1 << 18, allow_pickle=True)
    with producer, consumer:
        producer.send(plain if kind == "SampleBatch" else Batch(x=np.zeros(2), info=Batch(metadata=column)))
        with pytest.raises((CapacityError, FormatError), match="metadata"):
            consumer.recv()
