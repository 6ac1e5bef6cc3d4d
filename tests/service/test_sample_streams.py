"""Samples of a form that came before are written and read without Arrow, and are the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Batch, SampleBatch
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.nested.node import set_unit, unit_of
from samplebatch.buffer.store import DenseStore
from samplebatch.column import memory
from samplebatch.errors import CapacityError, FormatError, SampleBatchError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.items import Sample
from samplebatch.service.samples import (
    _MAX_FORMS,
    LaidOutStream,
    RowsStream,
    SampleReader,
    SampleWriter,
    cut_inline,
    inline,
    pack,
    split_inline,
    unpack,
)
from tests.service.table_rows import episode

RNG = np.random.default_rng(5)


def sample_of(rows: int, **columns: Any) -> Sample:
    return Sample(Batch(**columns), RNG.integers(0, 99, rows), RNG.integers(0, 9, rows))


def flat(rows: int = 4) -> Sample:
    return sample_of(rows, obs=RNG.random((rows, 3)), done=RNG.random(rows) < 0.5)


def nested() -> Sample:
    obs = {"camera": RNG.integers(0, 255, (4, 2, 2), np.uint8), "arm": {"joint": RNG.random(4)}}
    return sample_of(4, obs=obs, rew=RNG.random(4), info=Batch(), policy={"hidden": Batch(), "state": RNG.random(4)})


def prioritized() -> Sample:
    return sample_of(4, obs=RNG.random(4), weight=RNG.random(4), generation=np.arange(4))


def sent(writer: SampleWriter, reader: SampleReader, sample: Sample) -> Any:
    stream, _ = writer.prepare(sample)
    metadata, received = cut_inline(inline([stream]))
    (only,) = split_inline(received, json.loads(metadata)["streams"])
    return reader.read(only)


@pytest.mark.parametrize("make", [flat, nested, prioritized])
def test_samples_of_a_cached_layout_are_received_unchanged(make: Any) -> None:
    writer, reader = SampleWriter(), SampleReader()
    for turn in range(4):
        sample = make()
        assert isinstance(writer.prepare(sample)[0], LaidOutStream) == (turn > 0)
        batch, indices = sent(writer, reader, sample)
        reference, expected = unpack(*pack(sample))
        assert batch == reference
        assert str(batch) == str(reference)
        assert indices.tolist() == expected.tolist() == sample.indices.tolist()
    assert len(reader._layouts) == 1


def test_arrays_are_read_only() -> None:
    writer, reader = SampleWriter(), SampleReader()
    for _ in range(3):
        batch, indices = sent(writer, reader, flat())
        assert not batch.obs.flags.writeable
        assert not indices.flags.writeable


def test_a_sample_with_other_names_without_values_has_a_new_layout() -> None:
    writer, reader = SampleWriter(), SampleReader()
    for names in (["info"], ["info"], [], [], ["info"], ["policy"], ["policy"], ["info", "policy"], []):
        sample = sample_of(2, obs=np.arange(2.0), **{name: Batch() for name in names})
        assert list(sent(writer, reader, sample).batch.keys()) == ["obs", *names]


def test_samples_of_changing_size_are_complete() -> None:
    writer, reader = SampleWriter(), SampleReader()
    for rows in (1, 2, 2, 3, 2, 3, 3, 1, 1, *range(1, 40), 2, 2):
        sample = flat(rows)
        assert sent(writer, reader, sample).batch == sample.batch
    assert len(writer._forms) <= _MAX_FORMS
    assert len(reader._layouts) <= _MAX_FORMS


@pytest.mark.parametrize(
    "columns",
    [
        {"obs": np.array(["word", None], object)},
        {"obs": np.array([np.zeros(1), np.zeros(2)], object)},
        {"obs": np.arange(4.0).reshape(2, 2)[:0]},
    ],
    ids=["objects", "rows that vary", "no rows"],
)
def test_samples_that_require_arrow_use_the_general_stream(columns: dict[str, Any]) -> None:
    rows = len(columns["obs"])
    writer, reader = SampleWriter(), SampleReader()
    for _ in range(3):
        sample = Sample(Batch(rew=np.arange(rows), **columns), np.arange(rows), np.arange(rows))
        assert isinstance(writer.prepare(sample)[0], RowsStream)
        assert sent(writer, reader, sample).indices.tolist() == list(range(rows))
    assert not reader._layouts


def test_episodes_and_fragments_use_the_general_stream() -> None:
    steps, queue = ReplayTable("replay", capacity=100), ReplayTable("queue", kind="fifo", capacity=9)
    for table in (steps, queue):
        table.extend(episode(0, range(5)))
    for sample in (steps.sample(2, mode="episodes"), queue.sample(1)):
        writer = SampleWriter()
        assert all(isinstance(writer.prepare(sample)[0], RowsStream) for _ in range(3))


def test_bytes_that_are_not_a_stream_are_rejected() -> None:
    stream = np.frombuffer(b"neither head nor tail", np.uint8)
    with pytest.raises(FormatError, match="must be an Arrow stream with a record batch"):
        SampleReader().read(stream)


def test_a_stream_that_is_not_a_sample_is_rejected() -> None:
    rows = RowsStream(SampleBatch(obs=[1, 2]).to_arrow().to_batches()[0])
    out = np.empty(rows.nbytes, np.uint8)
    rows.write(out)
    with pytest.raises(FormatError, match="must describe the sample, got damaged or missing metadata"):
        SampleReader().read(out)


def test_several_samples_share_one_message() -> None:
    writer, reader = SampleWriter(), SampleReader()
    writer.prepare(flat(3))
    samples = [flat(3) for _ in range(5)]
    metadata, received = cut_inline(inline([writer.prepare(sample)[0] for sample in samples]))
    parts = split_inline(received, json.loads(metadata)["streams"])
    assert [reader.read(part).batch for part in parts] == [sample.batch for sample in samples]


def test_uninitialized_memory_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SampleWriter()
    writer.prepare(flat(3))
    streams = [writer.prepare(flat(3))[0] for _ in range(2)]

    def sent_from(byte: int) -> bytes:
        monkeypatch.setattr(memory, "empty", lambda shape, dtype: np.full(shape, byte, dtype))
        return inline(streams).tobytes()

    assert len(streams) == 2
    assert sent_from(0) == sent_from(255)


@pytest.mark.parametrize("letters", [10, 5000, 200_000])
def test_a_message_is_split_after_json_of_any_length(letters: int) -> None:
    metadata, stream = cut_inline(json.dumps({"numbers": "7" * letters}).encode() + b"\n" + b"stream\n")
    assert json.loads(metadata) == {"numbers": "7" * letters}
    assert stream.tobytes() == b"stream\n"


@pytest.mark.parametrize("sizes", [7, [0], [-1], ["8"], [129], [64, 65]])
def test_messages_with_wrong_sizes_are_rejected(sizes: Any) -> None:
    with pytest.raises(FormatError, match="must have the sizes that their message declares"):
        split_inline(np.zeros(128, np.uint8), sizes)


def large(rows: int = 4) -> Sample:
    obs = {"camera": RNG.integers(0, 255, (rows, 100, 99), np.uint8), "arm": RNG.random(rows)}
    return sample_of(rows, obs=obs, rew=RNG.random(rows), info=Batch(), obs_next=RNG.random((rows, 2000)))


def test_large_samples_are_viewed_in_their_stream() -> None:
    writer, reader = SampleWriter(), SampleReader()
    sent(writer, reader, large())
    for _ in range(3):
        sample = large()
        stream, _ = writer.prepare(sample)
        out = np.empty(stream.nbytes, np.uint8)
        stream.write(out)
        sampled = reader.read(out)
        assert sampled.batch == unpack(*pack(sample)).batch
        assert list(sampled.batch) == list(sample.batch)
        assert sampled.indices.tolist() == sample.indices.tolist()
        assert isinstance(stream, LaidOutStream)
    assert np.shares_memory(sampled.batch.obs_next, out)


def objects(rows: int) -> Sample:
    infos = [{"lives": int(n), "name": "x" * int(n)} for n in RNG.integers(0, 9, rows)]
    obs = {"camera": RNG.random((rows, 2)), "words": np.array([[], ["a"], ["b", "c"]] * rows, object)[:rows]}
    return sample_of(rows, obs=obs, rew=RNG.random(rows), info=np.array(infos, object), policy=Batch())


def test_the_object_reader_agrees_with_the_general_reader() -> None:
    writer, reader = SampleWriter(), SampleReader()
    for rows in (3, 3, 5, 3, 4, 8):
        sample = objects(rows)
        sampled, expected = sent(writer, reader, sample), unpack(*pack(sample))
        assert str(sampled.batch) == str(expected.batch)
        assert sampled.batch.obs.words.tolist() == sample.batch.obs.words.tolist()
        assert sampled.batch.info.lives.tolist() == sample.batch.info.lives.tolist()
        assert sampled.indices.tolist() == expected.indices.tolist()
        assert not sampled.batch.obs.camera.flags.writeable
    assert not reader._layouts
    assert all(reader._readers.values())


def test_samples_with_one_schema_and_damaged_objects_are_rejected() -> None:
    reader = SampleReader()
    rows = pack(objects(4)).batch
    for batch in (rows, rows):
        reader.read(bytes_of(batch))
    position = rows.schema.get_field_index("obs.words")
    words = rows.column(position)
    # A list of negative length.
    offsets = pa.py_buffer(np.array([0, 3, 0, 3, 3], np.int64))
    damaged = pa.Array.from_buffers(words.type, 4, [None, offsets], children=[words.values])
    changed = rows.set_column(position, rows.schema.field(position), damaged)
    with pytest.raises((SampleBatchError, pa.ArrowException)) as general:
        unpack(changed, {})
    with pytest.raises(general.type):
        reader.read(bytes_of(changed))


def test_samples_with_one_schema_and_columns_of_other_lengths_are_rejected() -> None:
    reader = SampleReader()
    rows = pack(objects(4)).batch
    reader.read(bytes_of(rows))
    (known,) = reader._readers.values()
    assert known is not None
    shorter = rows.columns
    shorter[rows.schema.get_field_index("rew")] = shorter[0].slice(0, 3)

    class Lying:
        num_rows, schema, columns = 4, rows.schema, shorter

    assert known._plan.read(Lying()) is None  # type: ignore[arg-type]


def test_later_samples_preserve_the_action_unit() -> None:
    unit = ActionUnit("scale", -2.0, 2.0)
    for make in (flat, lambda: objects(4)):
        writer, reader = SampleWriter(), SampleReader()
        for part in (None, None, unit, unit, unit, None):
            sample = make()
            set_unit(sample.batch, part)
            assert unit_of(sent(writer, reader, sample).batch) == part


def bytes_of(rows: pa.RecordBatch) -> Any:
    stream = RowsStream(rows)
    out = memory.empty((stream.nbytes,), np.dtype(np.uint8))
    stream.write(out)
    return out


def test_a_reader_without_the_cached_layout_decodes_the_stream() -> None:
    writer = SampleWriter()
    writer.prepare(large())
    sample = large()
    sampled = sent(writer, SampleReader(), sample)
    assert sampled.batch == unpack(*pack(sample)).batch
    assert not sampled.batch.rew.flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_samples_with_a_cached_layout_agree_with_arrow(data: st.DataObject) -> None:
    writer, reader = SampleWriter(), SampleReader()
    names = ["obs", "act", "rew"]
    forms = []
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 4))
        dtypes = st.sampled_from(["f4", "f8", "i8", "u1", "?", "f2", "M8[s]"])
        shapes = st.sampled_from([(), (2,), (2, 3)])
        forms.append([(name, (rows, *data.draw(shapes)), data.draw(dtypes)) for name in names])
    for form in data.draw(st.lists(st.sampled_from(forms), min_size=1, max_size=8)):
        columns = {name: RNG.integers(0, 2, shape).astype(dtype) for name, shape, dtype in form}
        sample = sample_of(form[0][1][0], **columns, info=Batch())
        sampled, expected = sent(writer, reader, sample), unpack(*pack(sample))
        assert sampled.batch == expected.batch
        assert str(sampled.batch) == str(expected.batch)
        assert sampled.indices.tolist() == expected.indices.tolist()


ROWS = 64
"""Slots of the ring of frames; each row of a frame has the number of its step."""


def frames(first: int, rows: int) -> SampleBatch[Any]:
    numbers = np.arange(first, first + rows)
    images = np.broadcast_to(numbers[:, None].astype(np.uint16), (rows, 4000))
    return SampleBatch(
        obs=images, new_obs=images + 1, actions=numbers, rewards=np.zeros(rows), terminateds=np.ones(rows, np.bool_)
    )


@pytest.fixture
def learner() -> Iterator[ReplayClient]:
    table = ReplayTable("frames", capacity=ROWS, seed=3)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "frames", shared_memory=False) as client:
        client.extend(frames(0, ROWS))
        for _ in range(3):
            client.sample(ROWS)
        yield client


def test_large_samples_are_consistent_while_a_writer_overwrites_rows(learner: ReplayClient) -> None:
    done = threading.Event()

    def write() -> None:
        with ReplayClient(learner.uris, "frames") as writer:
            first = ROWS
            while not done.is_set():
                writer.extend(frames(first, ROWS // 2))
                first = (first + ROWS // 2) % 60000

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            batch, _ = learner.sample(ROWS)
            assert (batch.obs == batch.act[:, None]).all()
            assert (batch.obs_next == batch.act[:, None] + 1).all()
    finally:
        done.set()
        thread.join()


def test_the_session_continues_after_an_error_in_a_column(
    learner: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = DenseStore.take

    def fail(store: DenseStore, slots: Any) -> Any:
        if store.name == "obs_next":
            raise CapacityError("column 'obs_next' must have memory, there is none")
        return take(store, slots)

    with monkeypatch.context() as patch:
        patch.setattr(DenseStore, "take", fail)
        with pytest.raises(CapacityError, match="column 'obs_next' must have memory"):
            learner.sample(ROWS)
    batch, indices = learner.sample(ROWS)
    assert (batch.obs[:, 0] == indices).all()


def test_the_session_continues_after_an_error_in_writing_a_sample(
    learner: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(streams: Any, reported: Any) -> Any:
        raise CapacityError("a message must have memory, there is none")

    with monkeypatch.context() as patch:
        patch.setattr("samplebatch.service.samples.inline", fail)
        with pytest.raises(CapacityError, match="a message must have memory"):
            learner.sample(ROWS)
    batch, indices = learner.sample(ROWS)
    assert (batch.obs_next[:, 0] == indices + 1).all()
