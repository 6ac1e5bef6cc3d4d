"""Batches as Arrow tables: exact in both directions, over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import (
    SequenceError,
)
from tests.batch.arrow_tables import PICKLED, address, through_ipc
from tests.batch.every_kind import DATES, NUMBERS, STRINGS, TORCH, every_kind, in_sequences, numbers, tensor

# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(2, 5), slice(3, 3), slice(6, 7)], ids=str)
@pytest.mark.parametrize("through", [lambda table: table, through_ipc], ids=["table", "ipc"])
def test_every_kind_of_column_round_trips_exactly(rows: slice, through: Callable[[pa.Table], pa.Table]) -> None:
    batch = SampleBatch(every_kind(7))[rows]
    table = through(batch.to_arrow())
    table.validate(full=True)
    assert table.num_rows == len(batch)
    restored = SampleBatch.from_arrow(table, allow_pickle=True)
    assert restored == batch
    assert list(restored) == list(batch)
    assert restored.column_names == batch.column_names
    assert [restored.column(name).kind for name in restored.column_names] == [
        batch.column(name).kind for name in batch.column_names
    ]


@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES, *STRINGS])
@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (0,), (0, 2), (5, 0), (5, 0, 2), (5, 1)], ids=str)
def test_every_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=numbers(dtype, *shape))
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        restored = SampleBatch.from_arrow(table)["a"]
        assert restored.dtype == batch["a"].dtype
        assert restored.shape == shape
        assert restored.tolist() == numbers(dtype, *shape).tolist()


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(5,), (5, 2), (0,), (0, 2)], ids=str)
def test_every_torch_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    batch = SampleBatch(a=tensor(dtype, *shape))
    for table in (batch.to_arrow(), through_ipc(batch.to_arrow())):
        restored = SampleBatch.from_arrow(table)
        assert restored == batch
        assert str(restored["a"].dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("padded", [False, True])
def test_sequences_are_lists(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.num_rows == 4
    assert table["seq_lens"].to_pylist() == [2, 3, 0, 1]
    assert table["state_in_0"].to_pylist() == [[1.0], [2.0], [3.0], [4.0]]
    lists = [[0, 1, 0, 0], [2, 3, 4, 0], [0] * 4, [5, 0, 0, 0]] if padded else [[0, 1], [2, 3, 4], [], [5]]
    assert table["a"].to_pylist() == lists
    assert pa.types.is_large_list(table.schema.field("obs.y.0").type)
    for restored in (SampleBatch.from_arrow(table), SampleBatch.from_arrow(through_ipc(table))):
        assert restored == batch
        assert list(restored) == list(batch)
        assert restored.zero_padded == padded
        assert restored.max_seq_len == batch.max_seq_len
        assert restored.num_grad_updates == 1.5
        assert restored.is_training


@pytest.mark.parametrize("padded", [False, True])
def test_views_of_sequences(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    for part in (batch[2:], batch.slice(1, 4), batch[:0], batch.take_sequences([3, 1])):
        assert SampleBatch.from_arrow(part.to_arrow()) == part
        assert part.to_arrow().num_rows == len(part["seq_lens"])


def test_padded_states_are_lists_too() -> None:
    padded = SampleBatch(a=[1, 2, 3], state_in_0=[1.0, 2.0], seq_lens=[1, 2]).right_zero_pad(2, exclude_states=False)
    assert SampleBatch.from_arrow(padded.to_arrow()) == padded
    assert padded.to_arrow()["state_in_0"].to_pylist() == [[1.0, 0.0], [2.0, 0.0]]


def test_flags_round_trip() -> None:
    batch = SampleBatch(a=[1], _num_grad_updates=2.5, _is_training=True, _time_major=False)
    restored = SampleBatch.from_arrow(through_ipc(batch.to_arrow()))
    assert (restored.num_grad_updates, restored.is_training, restored.time_major) == (2.5, True, False)


def test_flags_may_be_numpy_numbers() -> None:
    batch = SampleBatch(
        a=np.zeros(4),
        seq_lens=[2, 1],
        _num_grad_updates=np.float32(2.5),
        _max_seq_len=np.int64(2),
        _zero_padded=np.bool_(True),
        _time_major=np.bool_(False),
        _is_training=np.bool_(True),
    )
    restored = SampleBatch.from_arrow(batch.to_arrow())
    assert restored == batch
    assert restored.num_grad_updates == 2.5
    assert restored.max_seq_len == 2


def test_column_names_may_contain_any_characters() -> None:
    batch = SampleBatch({"": [1, 2], "a b": [3, 4], "ä/ö": [5, 6], "a.b.c": [7, 8], "\0": [9, 10]})
    assert SampleBatch.from_arrow(through_ipc(batch.to_arrow())) == batch


def test_a_batch_without_columns() -> None:
    table = SampleBatch().to_arrow()
    assert table.num_columns == 0
    assert SampleBatch.from_arrow(table) == SampleBatch()


def test_time_major_has_no_rows_of_steps() -> None:
    batch = SampleBatch(a=np.zeros((2, 2)), seq_lens=[2, 1], _time_major=True)
    with pytest.raises(SequenceError, match="to_batch_major"):
        batch.to_arrow()
    assert batch.to_batch_major().to_arrow().num_rows == 2


def test_parquet_files_restore_every_column_exactly(tmp_path: Path) -> None:
    plain = {name: values for name, values in every_kind(5).items() if name not in PICKLED and "zero" not in name}
    for batch in (
        SampleBatch(a=numbers("f4", 5, 2), b=numbers("i8", 5), infos=plain["infos"]),
        in_sequences(padded=True),
    ):
        pq.write_table(batch.to_arrow(), tmp_path / "batch.parquet")
        assert SampleBatch.from_arrow(pq.read_table(tmp_path / "batch.parquet")) == batch


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), slice(2, 6)], ids=["whole", "view"])
@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES])
def test_no_array_is_copied(dtype: str, rows: slice) -> None:
    batch = SampleBatch(flat=numbers(dtype, 8), wide=numbers(dtype, 8, 2, 3))[rows]
    table = batch.to_arrow()
    restored = SampleBatch.from_arrow(table)
    for name in batch:
        assert address(table[name].chunk(0)) == batch[name].ctypes.data
        assert np.shares_memory(restored[name], batch[name])
        assert restored[name].ctypes.data == batch[name].ctypes.data


@pytest.mark.parametrize("dtype", TORCH)
def test_no_tensor_is_copied_into_arrow(dtype: str) -> None:
    batch = SampleBatch(a=tensor(dtype, 8, 2))[2:6]
    table = batch.to_arrow()
    assert address(table["a"].chunk(0)) == batch["a"].data_ptr()
    # A tensor cannot be read-only, as what comes out of Arrow is: it is copied, so that nobody writes to it.
    restored = SampleBatch.from_arrow(table)
    restored["a"][0] = 0
    assert batch["a"][0].any()


@pytest.mark.parametrize("padded", [False, True])
def test_no_sequence_is_copied(padded: bool) -> None:
    batch = in_sequences(padded=padded)
    table = batch.to_arrow()
    restored = SampleBatch.from_arrow(table)
    for name in ("a", "b", "obs.x", "obs.y.0", "state_in_0", "state_in_1", "state_out_0"):
        assert np.shares_memory(restored[name], batch[name]), name
    # Whoever else has the memory must not move sequences.
    assert not np.shares_memory(restored["seq_lens"], batch["seq_lens"])
    part = SampleBatch.from_arrow(table.slice(1, 1))
    assert np.shares_memory(part["a"], batch["a"])


def test_elements_of_ragged_columns_are_shared_and_offsets_copied() -> None:
    batch = SampleBatch(r=[[1.0], [2.0, 3.0], []])
    restored = SampleBatch.from_arrow(batch.to_arrow())
    assert np.shares_memory(restored["r"].elements, batch["r"].elements)
    assert not np.shares_memory(restored["r"].offsets, batch["r"].offsets)


def test_columns_from_foreign_tables_are_read_only() -> None:
    restored = SampleBatch.from_arrow(
        pa.ipc.open_stream(pa.py_buffer(ipc_bytes(SampleBatch(a=np.arange(4))))).read_all()
    )
    with pytest.raises(ValueError, match="read-only"):
        restored["a"][0] = 1
    restored.copy()["a"][0] = 1


def ipc_bytes(batch: SampleBatch) -> bytes:
    sink = pa.BufferOutputStream()
    table = batch.to_arrow()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_table_keeps_a_reference_to_the_memory() -> None:
    table = SampleBatch(a=np.arange(1000)).to_arrow()
    restored = SampleBatch.from_arrow(table)
    del table
    filler = [np.zeros(1000, np.int64) for _ in range(10)]
    assert restored["a"].tolist() == list(range(1000))
    assert len(filler) == 10
