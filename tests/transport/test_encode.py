"""Frames and messages: messages of other processes are validated before memory is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import ActionUnit, Batch, MultiAgentBatch, SampleBatch, channel
from samplebatch.batch.nested.node import unit_of
from samplebatch.errors import ColumnTypeError, DeviceError, FormatError, SampleBatchError
from samplebatch.transport.channel_end import HEADER_NBYTES
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.encode import Encoder
from samplebatch.transport.producer import Producer
from samplebatch.transport.schema import Fixed, Schema, Variable, align
from samplebatch.transport.wire import (
    BATCH,
    FAILURE,
    HELLO,
    MESSAGE_NBYTES,
    pack,
    unpack,
    unpack_metadata,
    write_metadata,
)
from tests.batch.every_kind import in_sequences, with_every_kind


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    producer, consumer = channel(1 << 18, allow_pickle=True)
    yield producer, consumer
    producer.close()
    consumer.close()


# -- frames ------------------------------------------------------------------------------------------------------------


UNITS = [None, ActionUnit("tanh"), ActionUnit("clip", -1.0, 1.0), None, ActionUnit("tanh")]

BARE = {
    "numbers": lambda rows: {"a": np.arange(rows), "b": np.arange(rows, dtype=np.float32)},
    "other order": lambda rows: {"b": np.arange(rows, dtype=np.float32), "a": np.arange(rows)},
    "other dtype": lambda rows: {"a": np.arange(rows, dtype=np.int16), "b": np.arange(rows, dtype=np.float32)},
    "rows": lambda rows: {"a": np.arange(2 * rows).reshape(rows, 2), "b": np.arange(rows, dtype=np.float32)},
    "more columns": lambda rows: {"a": np.arange(rows), "b": np.arange(rows, dtype=np.float32), "c": np.ones(rows)},
    "empty infos": lambda rows: {"a": np.arange(rows), "b": [{}] * rows},
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(BARE)), st.integers(1, 5), st.sampled_from(UNITS)), min_size=1, max_size=8
    )
)
def test_batches_of_plain_arrays_use_the_same_message_format(sampled: list[tuple[str, int, Any]]) -> None:
    """The fast path caches the columns of the last batch, so its result depends on earlier batches."""
    short, general = Encoder(), Encoder()
    for kind, rows, unit in sampled:
        batch = SampleBatch(BARE[kind](rows))
        batch.action_unit = unit
        frame, expected = short.encode(batch), general._of_sample_batch(batch, batch._all())
        assert frame.schema.describe() == expected.schema.describe()
        assert (frame.rows, frame.metadata, frame.buffers) == (expected.rows, expected.metadata, expected.buffers)
        assert [array.tobytes() for array in frame.arrays] == [array.tobytes() for array in expected.arrays]
        assert [array.dtype for array in frame.arrays] == [array.dtype for array in expected.arrays]


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        with_every_kind(5),
        in_sequences(padded=True),
        MultiAgentBatch({"a": with_every_kind(3), "b": SampleBatch(x=[1])}, 3),
        Batch(obs=Batch(x=np.zeros((2, 3)), empty=Batch()), n=np.float32(1), z=np.array(2.0), s="a"),
    ],
    ids=["every kind", "sequences", "multi-agent", "nested"],
)
def test_a_schema_round_trips(batch: Any) -> None:
    schema = Encoder(allow_pickle=True).encode(batch).schema
    again = Schema.read(json.loads(json.dumps(schema.describe())))
    assert again.kind == schema.kind
    for mine, theirs in zip(again.parts, schema.parts, strict=True):
        assert (mine.label, mine.columns, mine.nested, mine.has_variable) == (
            theirs.label,
            theirs.columns,
            theirs.nested,
            theirs.has_variable,
        )


def test_a_schema_is_sent_once(ends: tuple[Producer, Consumer], monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = ends
    batch = MultiAgentBatch({"a": SampleBatch(obs={"x": np.zeros((4, 3))}, infos=[{}] * 4)}, 4)
    texts = []

    def noted(*arguments: Any) -> bytes:
        texts.append(write_metadata(*arguments))
        return texts[-1]

    monkeypatch.setattr("samplebatch.transport.wire.write_metadata", noted)
    for n in (4, 3, 0, 4):
        producer.send(MultiAgentBatch({"a": batch["a"][:n]}, n))
        assert len(consumer.recv(timeout_s=1)["a"]) == n
    assert [b'"obs.x"' in raw for raw in texts] == [True, False, False, False]
    texts.clear()
    for n in (4, 3, 0, 4):
        producer.send(SampleBatch(obs=np.zeros((n, 3))))
        assert len(consumer.recv(timeout_s=1)) == n
    assert [bool(raw) for raw in texts] == [True, False, False, False]


GOOD = Encoder(allow_pickle=False).encode(SampleBatch(obs={"x": np.zeros((2, 3))}, infos=[{}] * 2)).schema.describe()


def changed(*path: Any, value: Any) -> Any:
    described = json.loads(json.dumps(GOOD))
    inner = described
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return described


@pytest.mark.parametrize(
    "described",
    [
        None,
        [],
        {},
        {"kind": "SampleBatch"},
        changed("kind", value="Batches"),
        changed("kind", value=None),
        changed("parts", value=[]),
        changed("parts", value=None),
        changed("parts", value=GOOD["parts"] * 2),
        changed("parts", 0, value=[]),
        changed("parts", 0, 0, value=3),
        changed("parts", 0, 1, value=3),
        changed("parts", 0, 1, 0, value=[]),
        changed("parts", 0, 1, 0, 0, value=3),
        changed("parts", 0, 1, 0, 1, value="O"),
        changed("parts", 0, 1, 0, 1, value=">f8"),
        changed("parts", 0, 1, 0, 1, value="V8"),
        changed("parts", 0, 1, 0, 1, value="nonsense"),
        changed("parts", 0, 1, 0, 1, value=8),
        changed("parts", 0, 1, 0, 2, value=[-1]),
        changed("parts", 0, 1, 0, 2, value=[1.5]),
        changed("parts", 0, 1, 0, 2, value=["3"]),
        changed("parts", 0, 1, 0, 2, value=3),
        changed("parts", 0, 1, 0, 3, value=3),
        changed("parts", 0, 1, 0, 4, value=None),
        changed("parts", 0, 2, value="{"),
        changed("parts", 0, 2, value="[1]"),
        changed("parts", 0, 2, value='{"obs": {"y": null}}'),
        changed("parts", 0, 2, value='{"obs": 3}'),
        changed("parts", 0, 2, value="[" * 100_000),
    ],
    ids=str,
)
def test_a_damaged_schema_is_rejected(described: Any) -> None:
    with pytest.raises(FormatError):
        Schema.read(described)


def test_columns_of_a_schema() -> None:
    (part,) = (
        Encoder(allow_pickle=False).encode(SampleBatch(a=np.zeros((2, 3), np.float32), infos=[{}] * 2)).schema.parts
    )
    assert part.columns == (Fixed("a", np.dtype("f4"), (3,)), Variable("infos"))


# -- messages ----------------------------------------------------------------------------------------------------------


def test_every_changed_bit_of_a_message_is_detected() -> None:
    raw = pack(BATCH, 1, 2, 3, 1 << 14, 640, 1 << 15, 12, 99, 10)
    assert unpack(raw) == (BATCH, 1, 2, 3, 1 << 14, 640, 1 << 15, 12, 99, 10)
    for bit in range(8 * MESSAGE_NBYTES):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            unpack(bytes(damaged))
    for length in (0, 63, 65):
        with pytest.raises(FormatError, match="64 bytes"):
            unpack((raw * 2)[:length])


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_metadata_is_rejected(raw: bytes) -> None:
    with pytest.raises(FormatError):
        unpack_metadata(raw, crc32(raw))
    with pytest.raises(FormatError, match="checksum"):
        unpack_metadata(b"{}", 5)


def fields_of(raw: bytes) -> dict[str, int]:
    return unpack(raw)._asdict()


def sent(producer: Producer, consumer: Consumer, batch: Any) -> bytes:
    """Send a batch and read its message from the pipe."""
    producer.send(batch)
    return os.read(consumer._pipe, MESSAGE_NBYTES)


def put(producer: Producer, raw: bytes) -> None:
    os.write(producer._pipe, raw)


PLAIN = SampleBatch(a=np.arange(100.0), b=np.zeros((100, 3), np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", 0),
        ("kind", 77),
        ("flags", 1),
        ("flags", 4),
        ("schema", 1),
        ("schema", 2**32 - 1),
        ("ident", 0),
        ("ident", 2**64 - 1),
        ("ident", 2**64 - 2),
        ("start", 0),
        ("start", HEADER_NBYTES + 1),
        ("start", HEADER_NBYTES - 64),
        ("start", 2**64 - 64),
        ("start", HEADER_NBYTES + (1 << 18)),
        ("nbytes", 0),
        ("nbytes", 1983),
        ("nbytes", 2**64 - 1),
        ("nbytes", 1 << 19),
        ("metadata_start", 7),
        ("metadata_start", 0),
        ("metadata_start", 2**64 - 64),
        ("metadata_nbytes", 1),
        ("metadata_nbytes", 2**32 - 1),
        ("rows", 120),
        ("rows", 2**63),
        ("rows", 2**64 - 1),
    ],
)
def test_messages_with_invalid_offsets_are_rejected(ends: tuple[Producer, Consumer], field: str, value: int) -> None:
    producer, consumer = ends
    producer.send(PLAIN)
    assert consumer.recv(timeout_s=1) == PLAIN
    raw = sent(producer, consumer, PLAIN)
    fields = fields_of(raw)
    if field.startswith("metadata"):
        fields |= {"metadata_start": HEADER_NBYTES, "metadata_nbytes": 2}
    put(producer, pack(**{**fields, field: value}))
    for _ in range(2):
        with pytest.raises(FormatError):
            consumer.recv(timeout_s=1)
    assert consumer.poll()


def test_a_message_is_received_once(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    raw = sent(producer, consumer, PLAIN)
    put(producer, raw)
    put(producer, raw)
    assert consumer.recv(timeout_s=1) == PLAIN
    with pytest.raises(FormatError, match="greater"):
        consumer.recv(timeout_s=1)


def test_foreign_bytes_in_the_pipe_are_rejected(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    put(producer, pack(HELLO))
    put(producer, b"something else entirely, which is longer than a message is and so it goes on")
    with pytest.raises(FormatError, match="must start with"):
        consumer.recv(timeout_s=1)


def test_any_number_of_hello_messages_is_skipped(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    for _ in range(1000):
        put(producer, pack(HELLO))
    producer.send(PLAIN)
    assert consumer.recv(timeout_s=1) == PLAIN


def test_a_failure_message_must_be_in_the_failure_area(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    put(producer, pack(FAILURE, metadata_start=64, metadata_nbytes=64, metadata_sum=0))
    with pytest.raises(FormatError):
        consumer.recv(timeout_s=1)


# -- metadata ----------------------------------------------------------------------------------------------------------

NOTED = MultiAgentBatch(
    {
        "a": SampleBatch(x=np.arange(4), infos=[{"k": i} for i in range(4)], path=[np.arange(i) for i in range(4)]),
        "b": in_sequences(padded=True),
        "c": SampleBatch(z=np.zeros((64, 8)), _is_training=True).compress(columns={"z"}),
    },
    4,
)
TREE = Batch(obs=Batch(x=np.zeros((2, 3))), n=None, s=np.float32(1), o=np.array([{}, None], object))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in metadata."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from paths(inner, (*path, i))


STRANGE: list[Any] = [None, True, -1, 1, 5, 2**40, 2**70, 1.5, "x", "", [], [1], [[-1]], {}, {"a": 1}, "drop"]


@pytest.mark.parametrize("batch", [NOTED, TREE], ids=["multi-agent", "nested"])
def test_random_metadata_is_rejected_or_received(batch: Any) -> None:
    """Invalid metadata never causes a crash, a hang or an undocumented error in the consumer."""
    producer, consumer = channel(1 << 18)
    raw = sent(producer, consumer, batch)
    fields = fields_of(raw)
    start, nbytes = fields["metadata_start"], fields["metadata_nbytes"]
    metadata = json.loads(producer._memory[start : start + nbytes].tobytes())
    original = producer._memory.copy()
    buffers = original[start + align(nbytes) : fields["start"] + fields["nbytes"]]
    observed = set()
    for count, path in enumerate(paths(metadata)):
        # A few of the strange values for each place, all of them over all places.
        for strange in STRANGE[count % 4 :: 4]:
            damaged = json.loads(json.dumps(metadata))
            inner = damaged
            for step in path[:-1]:
                inner = inner[step]
            if strange == "drop":
                del inner[path[-1]]
            else:
                inner[path[-1]] = strange
            written = json.dumps(damaged, separators=(",", ":")).encode()
            where = HEADER_NBYTES + (1 << 17)
            producer._memory[:] = original
            producer._memory[where : where + len(written)] = np.frombuffer(written, np.uint8)
            behind = where + align(len(written))
            producer._memory[behind : behind + len(buffers)] = buffers
            producer._blocks.sending += 1
            put(
                producer,
                pack(
                    **{
                        **fields,
                        "ident": producer._blocks.sending,
                        "metadata_start": where,
                        "metadata_nbytes": len(written),
                        "metadata_sum": crc32(written),
                    }
                ),
            )
            try:
                str(consumer.recv(timeout_s=1))
                observed.add("received")
            except FormatError:
                observed.add("refused")
                consumer.close()
                producer, consumer = reopened(producer)
            except SampleBatchError as error:
                observed.add(type(error).__name__)
    producer.close()
    consumer.close()
    assert {"received", "refused"} <= observed
    assert observed <= {"received", "refused", "UntrustedPickleError", "CompressedColumnError"}


def reopened(producer: Producer) -> tuple[Producer, Consumer]:
    """Create a new channel with the same bytes in its arena, because the damage closed the old channel."""
    other, consumer = channel(1 << 18)
    other._acquire()
    other._memory[HEADER_NBYTES:] = producer._memory[HEADER_NBYTES:]
    producer.close()
    return other, consumer


# -- what cannot be sent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda torch: Batch(a=Batch(b=torch.ones(3, requires_grad=True) * 2)), ColumnTypeError, "a.b"),
        (lambda torch: Batch(a=Batch(b=torch.ones(3, device="meta"))), DeviceError, "a.b"),
        (lambda torch: Batch(a=Batch(b=torch.eye(3).to_sparse())), ColumnTypeError, "a.b"),
        (lambda torch: Batch(a=Batch(b=lambda: None)), ColumnTypeError, "a.b"),
        (lambda torch: SampleBatch(a=np.array([lambda: None])), ColumnTypeError, "a"),
    ],
)
def test_columns_that_cannot_be_sent_are_reported(
    ends: tuple[Producer, Consumer], make: Callable[[Any], Any], error: type[Exception], name: str
) -> None:
    import torch

    producer, consumer = ends
    with pytest.raises(error, match=f"'{name}'"):
        producer.send(make(torch))
    producer.send(PLAIN)
    assert consumer.recv(timeout_s=1) == PLAIN


def test_values_of_nested_batches_are_received_unchanged(ends: tuple[Producer, Consumer]) -> None:
    import torch

    producer, consumer = ends
    batch = Batch(
        strided=np.arange(24.0).reshape(4, 6)[::2, ::-3],
        fortran=np.asfortranarray(np.arange(6).reshape(2, 3)),
        swapped=np.arange(4, dtype=">i4"),
        none=None,
        text="ünï \ud800",
        whole=np.array(3.5),
        transposed=torch.arange(6).reshape(2, 3).T,
        conjugate=torch.tensor([1 + 2j]).conj(),
        zero=torch.tensor(5.0),
        leaf=torch.ones(2, requires_grad=True),
        objects=np.array([[{"a": 1}, None], ["x", 2.5]], object),
        words=np.array(["a", "bc"], np.dtypes.StringDType()),
        when=np.array(["2024-01-01"], "M8[D]"),
        empty=np.zeros((0, 3)),
        **{"a.b": np.arange(2), "": np.arange(3)},
    )
    batch.__dict__["scalar"] = np.int16(7)
    batch.__dict__["date"] = np.datetime64("2024-05-01", "D")
    batch.__dict__["bytes"] = b"raw"
    batch.__dict__["record"] = np.zeros(2, [("x", "f4")])
    for _ in range(2):
        producer.send(batch)
        actual = consumer.recv(timeout_s=1)
        assert isinstance(actual, Batch)
        assert list(actual.__dict__) == list(batch.__dict__)
        for name, value in batch.__dict__.items():
            mine = actual.__dict__[name]
            assert type(mine) is type(value), name
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine, value.resolve_conj()), name
                assert mine.requires_grad == value.requires_grad
            elif isinstance(value, np.ndarray):
                assert mine.dtype == value.dtype.newbyteorder("="), name
                assert mine.shape == value.shape
                assert mine.tolist() == value.tolist(), name
            else:
                assert mine == value, name


def test_the_version_field_has_a_fixed_position() -> None:
    """The magic bytes and the version never move, so releases detect messages of other releases."""
    assert struct.unpack_from("<4sB", pack(HELLO)) == (b"SBMS", 1)


def unit_in(batch: Any) -> ActionUnit | None:
    if isinstance(batch, Batch):
        return unit_of(batch)
    only: Any = batch.policy_batches["a"] if isinstance(batch, MultiAgentBatch) else batch
    return only.action_unit


@pytest.mark.parametrize(
    "make",
    [
        lambda unit: SampleBatch(actions=np.zeros(2), rewards=np.ones(2), _action_unit=unit),
        lambda unit: SampleBatch(actions=np.zeros(2), names=["a", "b"], _action_unit=unit),
        lambda unit: SampleBatch(actions=np.zeros(2), _action_unit=unit).as_batch(),
        lambda unit: MultiAgentBatch({"a": SampleBatch(actions=np.zeros(2), _action_unit=unit)}, 2),
    ],
    ids=["plain", "variable", "nested", "multi-agent"],
)
def test_action_units_are_sent_with_the_schema_and_may_change(make: Any) -> None:
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        for unit in UNITS * 2:
            batch = make(unit)
            producer.send(batch)
            received = consumer.recv()
            assert unit_in(received) == unit_in(batch) == unit
            assert received == batch
