"""Pickles: columns are out-of-band buffers, a slice contains only its rows, and batches are restored exactly."""

from __future__ import annotations

import io
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch import frame
from samplebatch.errors import FormatError, UntrustedPickleError
from tests.batch.every_kind import (
    DATES,
    NUMBERS,
    STRINGS,
    TORCH,
    every_kind,
    in_sequences,
    numbers,
    tensor,
    with_every_kind,
)
from tests.optional import torch

ROOT = Path(__file__).parents[2]
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def out_of_band(value: object) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, 5, buffer_callback=buffers.append), buffers


def received(value: object) -> Any:
    """Pickle a value with out-of-band buffers and load it from the same memory."""
    data, buffers = out_of_band(value)
    return pickle.loads(data, buffers=buffers)


def nbytes(buffers: list[pickle.PickleBuffer]) -> int:
    return sum(buffer.raw().nbytes for buffer in buffers)


class Echo:
    """Child process that receives a batch, modifies it, and sends it with its original values to another queue."""

    def __call__(self, inbox: Any, outbox: Any) -> None:
        for batch in iter(inbox.get, None):
            observed = {name: str(batch.column(name).dtype) for name in batch.column_names}
            if "a" in batch:
                batch["a"][:] += 1
            outbox.put((batch, observed))


# -- out of band ------------------------------------------------------------------------------------------------------


def test_every_column_is_a_buffer() -> None:
    batch = SampleBatch(a=np.zeros((100, 4)), b=np.zeros(100, np.int16), t=torch.zeros(100), o={"x": ["abc"] * 100})
    data, buffers = out_of_band(batch)
    assert [buffer.raw().nbytes for buffer in buffers] == [3200, 200, 400, 300, 808]
    assert len(data) < 1000


def test_the_pickle_itself_does_not_grow_with_the_rows() -> None:
    def size(rows: int) -> int:
        return len(out_of_band(SampleBatch(every_kind(rows)))[0])

    assert size(400) < size(4) + 600


def test_nothing_is_copied_in_either_direction() -> None:
    batch = SampleBatch(a=np.arange(100.0), t=torch.arange(100), r=[[1], [2, 3]] * 50, s=np.zeros((100, 8)))
    batch.compress(columns={"s"})
    data, buffers = out_of_band(batch)
    assert np.shares_memory(np.frombuffer(buffers[0]), batch["a"])
    restored = pickle.loads(data, buffers=buffers)
    assert restored == batch
    assert np.shares_memory(restored["a"], batch["a"])
    assert restored["t"].data_ptr() == batch["t"].data_ptr()
    assert np.shares_memory(restored["r"].elements, batch["r"].elements)
    restored["a"][3] = -1
    assert batch["a"][3] == -1


@pytest.mark.parametrize("rows", [slice(3, 7), slice(0, 1), slice(5, 5), slice(-2, None)], ids=str)
def test_a_pickled_slice_contains_only_its_rows(rows: slice) -> None:
    columns = {name: values for name, values in every_kind(100).items() if name.split()[0] in ("flat", "wide", "torch")}
    part = SampleBatch(columns)[rows]
    _, buffers = out_of_band(part)
    assert nbytes(buffers) == part.size_bytes()
    assert received(part) == part


def test_a_pickled_slice_of_every_kind_contains_only_its_rows() -> None:
    batch = SampleBatch(
        visited=[np.arange(i, dtype=np.float64) for i in range(100)],
        infos=[{"payload": "x" * 1000} for _ in range(100)],
        words=np.array(["y" * 1000] * 100, np.dtypes.StringDType()),
        mixed=[{"payload": "x" * 1000, "other": {i}} for i in range(100)],
    )
    for name in batch:
        full, part = (nbytes(out_of_band(result.select(name))[1]) for result in (batch, batch[10:12]))
        assert part < full / 10, name
    squeezed = SampleBatch(obs=np.random.default_rng(0).random((4000, 100))).compress()
    assert nbytes(out_of_band(squeezed[10:12])[1]) < squeezed.size_bytes() / 10


def test_a_pickled_slice_of_sequences_contains_only_its_rows() -> None:
    batch = SampleBatch(a=np.zeros(1000), state_in_0=np.zeros((100, 8)), seq_lens=[10] * 100)
    part = batch[100:200]
    _, buffers = out_of_band(part)
    assert nbytes(buffers) == part.size_bytes() == 100 * 8 + 10 * 64 + 10 * 4


def test_read_only_buffers_give_read_only_arrays() -> None:
    data, buffers = out_of_band(SampleBatch(a=np.arange(4), t=torch.arange(4)))
    restored = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    with pytest.raises(ValueError, match="read-only"):
        restored["a"][0] = 1
    restored["t"][0] = 7
    assert restored["a"].tolist() == [0, 1, 2, 3]


def test_buffers_at_any_address_are_accepted() -> None:
    batch = SampleBatch({dtype: numbers(dtype, 5, 2) for dtype in (*NUMBERS, *DATES, *STRINGS)}, t=tensor("float64", 5))
    data, buffers = out_of_band(batch)
    shifted = [memoryview(bytearray(b"\0" + bytes(buffer.raw())))[1:] for buffer in buffers]
    restored = pickle.loads(data, buffers=shifted)
    assert restored == batch
    assert all(restored.column(name).values.flags.aligned for name in batch if name != "t")


def test_buffers_that_do_not_fit_are_rejected() -> None:
    data, buffers = out_of_band(SampleBatch(a=np.arange(4.0), r=[[1], [2, 3], [4], []]))
    raw = [bytes(buffer.raw()) for buffer in buffers]
    with pytest.raises(FormatError):
        pickle.loads(data, buffers=[raw[0][:-1], *raw[1:]])
    with pytest.raises(FormatError):
        pickle.loads(data, buffers=[raw[0], raw[1][:-8], *raw[2:]])


# -- everything arrives as it was -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_every_kind_by_every_protocol(protocol: int, rows: int) -> None:
    batch = with_every_kind(7)[:rows]
    restored = pickle.loads(pickle.dumps(batch, protocol))
    assert type(restored) is SampleBatch
    assert restored == batch
    assert list(restored) == list(batch)
    assert [restored.column(name).kind for name in restored.column_names] == [
        batch.column(name).kind for name in batch.column_names
    ]


@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES, *STRINGS])
@pytest.mark.parametrize("shape", [(4,), (4, 2), (0,), (0, 3), (4, 0)], ids=str)
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=numbers(dtype, *shape))
    for restored in (received(batch), *(pickle.loads(pickle.dumps(batch, protocol)) for protocol in PROTOCOLS)):
        assert restored == batch
        assert restored["a"].dtype == batch["a"].dtype
        assert restored["a"].shape == shape
        assert restored["a"].flags.writeable == (dtype not in STRINGS)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(4,), (4, 2), (0,), (0, 3)], ids=str)
def test_every_torch_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=tensor(dtype, *shape))
    for restored in (received(batch), *(pickle.loads(pickle.dumps(batch, protocol)) for protocol in PROTOCOLS)):
        assert restored == batch
        assert isinstance(restored["a"], torch.Tensor)
        assert str(restored["a"].dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    "infos",
    [
        [{}, {}, {}],
        [None, None, None],
        [{"a": 1}, {"a": 2}, {"a": 3}],
        [{"a": 1}, {}, None],
        [{"a": np.arange(3)}, {"a": np.arange(2.0)}, {"b": "x"}],
        [{"set": {1, 2}}, {"type": int}, {"path": Path("x")}],
        [[1], (2,), "three"],
    ],
    ids=["empty", "none", "uniform", "optional", "arrays", "pickled", "mixed"],
)
def test_objects(infos: list[Any]) -> None:
    batch = SampleBatch(infos=np.fromiter(infos, object, 3), a=[1, 2, 3])
    assert received(batch) == batch
    for protocol in PROTOCOLS:
        restored = pickle.loads(pickle.dumps(batch, protocol))
        assert restored == batch
        assert [type(info) for info in restored["infos"]] == [type(info) for info in infos]


def test_objects_that_cannot_be_pickled_are_rejected_with_the_name() -> None:
    batch = SampleBatch(infos=[{"stream": io.StringIO()}, {"function": lambda: 0}])
    with pytest.raises(TypeError):
        pickle.dumps(batch, 5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sequences_and_flags(padded: bool, protocol: int) -> None:
    batch = in_sequences(padded=padded)
    for result in (
        pickle.loads(pickle.dumps(batch, protocol)),
        received(batch),
        pickle.loads(pickle.dumps(batch[2:], protocol)),
        pickle.loads(pickle.dumps(batch.slice(1, 4), protocol)),
    ):
        assert result.zero_padded == (padded and len(result) != 3)
        assert result.num_grad_updates == 1.5
        assert result.is_training
        assert result.max_seq_len == (4 if result.zero_padded else max(result["seq_lens"]))
    assert received(batch) == batch
    assert received(batch[2:]) == batch[2:]
    assert received(batch.slice(1, 4)) == batch.slice(1, 4)


def test_time_major() -> None:
    batch = SampleBatch(a=np.zeros((3, 2)), seq_lens=[3, 2], _time_major=True)
    restored = received(batch)
    assert restored == batch
    assert restored.time_major


def test_a_batch_without_columns() -> None:
    assert received(SampleBatch()) == SampleBatch()
    restored = received(SampleBatch(_num_grad_updates=3))
    assert restored.num_grad_updates == 3


def test_policies() -> None:
    batch = MultiAgentBatch({"p": with_every_kind(4), "q": in_sequences(padded=True), "r": SampleBatch()}, 5)
    data, buffers = out_of_band(batch)
    restored = pickle.loads(data, buffers=buffers)
    assert restored == batch
    assert list(restored) == ["p", "q", "r"]
    assert np.shares_memory(restored["p"]["flat f8"], batch["p"]["flat f8"])
    for protocol in PROTOCOLS:
        assert pickle.loads(pickle.dumps(batch, protocol)) == batch


class Experience(SampleBatch):
    """Subclass of a batch that a user defines."""


def test_subclasses_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Experience(a=[1, 2, 3])
    assert type(received(batch)) is Experience
    assert type(batch[1:]) is type(batch.copy()) is type(batch.take([0])) is Experience


def test_a_batch_inside_other_objects() -> None:
    batch = SampleBatch(a=np.arange(3))
    restored = received({"batches": [batch, batch[1:]], "again": batch})
    assert restored["batches"] == [batch, batch[1:]]
    assert restored["again"] is restored["batches"][0]


# -- frames: what channels and files carry ----------------------------------------------------------------------------


def test_a_frame_is_unpickled_only_if_allowed() -> None:
    columns = SampleBatch(infos=[{"set": {1}}])._all()
    header, buffers = frame.dump_columns(columns)
    with pytest.raises(UntrustedPickleError):
        frame.load_columns(header, buffers, allow_pickle=False)
    loaded = frame.load_columns(header, buffers, allow_pickle=True)
    assert loaded["infos"].values.tolist() == [{"set": {1}}]


def test_frames_that_are_not_what_they_claim_are_rejected() -> None:
    header, buffers = frame.dump_columns(SampleBatch(a=np.arange(3.0), b=np.arange(3))._all())
    with pytest.raises(FormatError, match="buffers"):
        frame.load_columns(header, [*buffers, b""], allow_pickle=False)
    with pytest.raises(FormatError):
        frame.load_columns(header, buffers[:1], allow_pickle=False)
    name, count, rows = header[0]
    with pytest.raises(FormatError, match="'a' must be of a known kind, got 'mystery'"):
        frame.load_columns(((name, count, ("mystery", *rows[1:])),), buffers[:1], allow_pickle=False)
    for strange in ("O", "V8", "no dtype", ">f8", "f16"):
        with pytest.raises(FormatError):
            frame.load_columns(((name, count, (rows[0], strange, rows[2])),), buffers[:1], allow_pickle=False)
    for shape in ((4,), (-3,), (3, 2), ("x",), None):
        with pytest.raises(FormatError):
            frame.load_columns(((name, count, (rows[0], rows[1], shape)),), buffers[:1], allow_pickle=False)


# -- between processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable by name in child processes."""
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.usefixtures("importable")
def test_batches_are_sent_through_queues_to_a_process_and_back() -> None:
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=Echo(), args=(inbox, outbox))
    child.start()
    try:
        sent = [
            SampleBatch(every_kind(9), a=np.arange(9)),
            SampleBatch(every_kind(9), a=np.arange(9))[2:5],
            in_sequences(padded=True),
            SampleBatch(),
        ]
        for batch in sent:
            inbox.put(batch)
        for batch in sent:
            result, observed = outbox.get(timeout=60)
            assert observed == {name: str(batch.column(name).dtype) for name in batch.column_names}
            if "a" in batch:
                expected = batch["a"] + 1
                assert result["a"].tolist() == expected.tolist()
                result["a"] = batch["a"]
            assert result == batch
    finally:
        inbox.put(None)
        child.join(30)
        child.kill()
    assert child.exitcode == 0


def test_batches_are_sent_through_a_pool_of_processes() -> None:
    batch = MultiAgentBatch(
        {"p": SampleBatch(a=np.arange(5), t=np.arange(5), eps_id=np.zeros(5, int), infos=[{"i": i} for i in range(5)])},
        5,
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        parts = pool.submit(MultiAgentBatch.timeslices, batch, 2).result(60)
        sent_back = pool.submit(SampleBatch.take, batch["p"], [3, 1]).result(60)
    assert parts == batch.timeslices(2)
    assert sent_back == batch["p"].take([3, 1])
