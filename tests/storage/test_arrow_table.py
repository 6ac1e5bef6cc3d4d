"""Arrow files of numbers are viewed by a plan that is made once; all others are read as tables, to the same effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, SampleBatch, load, write_arrow
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import ColumnNotFoundError, FormatError
from samplebatch.storage.tables.arrow import ArrowTable
from samplebatch.storage.tables.arrow import _schemas as remembered

N = 5


def numbers() -> SampleBatch:
    """Return every kind of tensor column."""
    return SampleBatch(
        obs={"camera": np.arange(4 * N, dtype=np.uint8).reshape(N, 2, 2), "arm": np.arange(N) / 7},
        done=np.arange(N) % 2 == 0,
        hit=np.arange(2 * N).reshape(N, 2) % 3 == 0,
        half=np.arange(N).astype(np.float16),
        when=np.arange(N).astype("M8[ms]"),
        day=np.arange(N).astype("M8[D]"),
        phase=np.arange(N) * 1j,
        none=np.zeros((N, 0)),
    )


def without_plans() -> Any:
    return mock.patch.object(ArrowTable, "view", return_value=None)


def without_tables() -> Any:
    return mock.patch.object(ArrowTable, "read", side_effect=AssertionError("read as a table"))


@pytest.mark.parametrize("columns", [None, ["obs"], ["when", "hit"], ["obs.arm", "rewards"]])
def test_views_of_a_file_equal_its_decoded_columns(tmp_path: Path, columns: list[str] | None) -> None:
    path = tmp_path / "batch.arrow"
    batch = numbers()
    batch["rewards"] = np.arange(N)
    batch.save(path)
    with without_plans():
        read = load(path, columns=columns)
    for _ in range(2):
        with without_tables():
            viewed = load(path, columns=columns)
        assert viewed == read
        assert list(viewed.keys()) == list(read.keys())
        assert all(viewed[name].dtype == read[name].dtype for name in read if name != "obs")
        assert not any(array.flags.writeable for name, array in viewed.items() if name != "obs")


def test_nested_batches_are_read_as_views(tmp_path: Path) -> None:
    batch = Batch(obs={"x": np.arange(N)}, info=Batch(), policy=None)
    batch.save(tmp_path / "batch.arrow")
    with without_tables():
        again = load(tmp_path / "batch.arrow")
    assert again == batch
    assert again.policy is None


def test_a_schema_is_decoded_once(tmp_path: Path) -> None:
    for number in range(3):
        SampleBatch(obs=np.arange(N * (number + 1)), once=np.zeros(N * (number + 1))).save(tmp_path / f"{number}.arrow")
    load(tmp_path / "0.arrow")
    with mock.patch.object(pa.ipc, "open_file", side_effect=AssertionError("opened by Arrow")):
        assert [len(load(tmp_path / f"{number}.arrow")) for number in range(3)] == [5, 10, 15]


def test_batches_of_other_columns_are_read_as_tables(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    for batch in (
        SampleBatch(obs=np.arange(N), infos=[{}] * N),
        SampleBatch(obs=np.arange(4), state_in_0=np.zeros((2, 1)), seq_lens=[1, 3]),
        SampleBatch(obs=np.arange(0)),
    ):
        batch.save(path)
        assert load(path) == batch


def written(path: Path, table: pa.Table, **options: Any) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, **options)
    return path


def test_files_of_other_writers_are_read_by_arrow(tmp_path: Path) -> None:
    batch = SampleBatch(obs=np.arange(2 * N).reshape(N, 2), rewards=np.arange(N))
    table = batch.to_arrow()
    several = written(tmp_path / "several.arrow", table, max_chunksize=2)
    assert load(several) == batch
    compressed = tmp_path / "compressed.arrow"
    write_arrow(batch, compressed, compression="zstd")
    assert load(compressed) == batch
    days = table.append_column(pa.field("day", pa.date32(), nullable=False), pa.array([1] * N, pa.date32()))
    flags = days.append_column(pa.field("flag", pa.bool_(), nullable=False), pa.array([True] * N))
    for table in (days, flags):
        read = load(written(tmp_path / "other.arrow", table))
        assert len(read) == N
        assert np.array_equal(read["obs"], batch["obs"])


def test_nulls_are_rejected_with_a_cached_schema(tmp_path: Path) -> None:
    batch = SampleBatch(obs=np.arange(N), rewards=np.arange(N))
    table = batch.to_arrow()
    load(written(tmp_path / "whole.arrow", table))
    nulls = pa.array([None, *range(N - 1)], pa.int64())
    with pytest.raises(FormatError, match="column 'rewards' must have no nulls, got 1"):
        load(written(tmp_path / "nulls.arrow", table.set_column(1, table.schema.field(1), nulls)))


def test_numbers_of_another_byte_order_are_not_viewed(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    batch = SampleBatch(foreign=np.arange(N))
    batch.save(path)
    with mock.patch("samplebatch.storage.tables.arrow.ArrowLayout.is_native", return_value=False):
        assert load(path) == batch
        with without_tables(), pytest.raises(FormatError):
            load(path)


@pytest.mark.parametrize(("at", "value"), [(0, -8), (0, 1 << 40), (8, 8), (8, -1)])
def test_buffers_outside_of_the_message_body_are_rejected(tmp_path: Path, at: int, value: int) -> None:
    path = tmp_path / "batch.arrow"
    rows = 40
    written(path, SampleBatch(obs=np.arange(rows), rewards=np.arange(rows)).to_arrow())
    load(path)
    data = bytearray(path.read_bytes())
    # The place of the first buffer that has values, in the message of the record batch.
    position = data.index((0).to_bytes(8, "little") + (8 * rows).to_bytes(8, "little"))
    data[position + at : position + at + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(data)
    with pytest.raises(FormatError):
        load(path)


def test_a_missing_column_name_is_rejected_with_a_cached_schema(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    numbers().save(path)
    for _ in range(2):
        with pytest.raises(ColumnNotFoundError, match="has no column 'camera'"):
            load(path, columns=["camera"])


def test_incomplete_metadata_is_rejected_each_time(tmp_path: Path) -> None:
    table = pa.table({"a": [1]}).replace_schema_metadata({METADATA_KEY: b'{"version": 1, "type": "SampleBatch"}'})
    path = written(tmp_path / "batch.arrow", table)
    for _ in range(2):
        with pytest.raises(FormatError, match="must be an intact Arrow file"):
            load(path)


def test_the_number_of_cached_schemas_is_bounded(tmp_path: Path) -> None:
    for number in range(40):
        SampleBatch({f"column {number}": [1.0]}).save(tmp_path / "batch.arrow")
        load(tmp_path / "batch.arrow")
    assert len(remembered) == 32
