"""Small files that would require much memory or time are rejected with the column and the bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import (
    Dataset,
    MultiAgentBatch,
    SampleBatch,
    read_arrow,
    read_parquet,
    write_arrow,
    write_parquet,
)
from samplebatch.errors import CapacityError, FormatError
from tests.storage.parts import commit

ROWS = 20_000_000
TEXT = "x" * (1 << 16)
RUNS = pa.run_end_encoded(pa.int32(), pa.string())


def views(count: int) -> pa.Array:
    """Return string views of one long text, count times."""
    first = pa.array([TEXT], pa.string_view()).buffers()
    return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(first[1].to_pybytes() * count), first[2]])


def overlapping_lists(count: int) -> pa.Array:
    values = pa.array(np.arange(1 << 14))
    sizes = pa.array(np.full(count, 1 << 14, np.int32))
    return pa.ListViewArray.from_arrays(pa.array(np.zeros(count, np.int32)), sizes, values)


BOMBS: dict[str, tuple[pa.Array, str]] = {
    "nulls": (pa.nulls(ROWS), '{"kind":"none","nullable":true}'),
    "nulls alone": (pa.nulls(ROWS), ""),
    "structs": (pa.Array.from_buffers(pa.struct([]), ROWS, [None]), '{"kind":"dict"}'),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), pa.array(["a"]), RUNS),
        "",
    ),
    "dictionary": (pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000, np.int8)), pa.array([TEXT])), ""),
    "views": (views(10_000), '{"kind":"str"}'),
    "views alone": (views(10_000), ""),
    "lists that overlap": (overlapping_lists(10_000), ""),
    "empty rows": (
        pa.Array.from_buffers(pa.list_(pa.int64(), 0), ROWS, [None], children=[pa.array([], pa.int64())]),
        '{"kind":"array","dtype":"<i8","shape":[0]}',
    ),
    "structs in lists": (
        pa.LargeListArray.from_arrays(pa.array([0, ROWS]), pa.Array.from_buffers(pa.struct([]), ROWS, [None])),
        '{"kind":"list","children":[{"kind":"dict"}]}',
    ),
}  # fmt: skip


def about(table: pa.Table) -> pa.Table:
    """Add the metadata of a batch to a table."""
    return table.replace_schema_metadata(SampleBatch(a=[1]).to_arrow().schema.metadata)


def table_with(array: pa.Array, form: str) -> pa.Table:
    field = pa.field("infos", array.type, metadata={"samplebatch.objects": form} if form else None)
    return about(pa.Table.from_arrays([array], schema=pa.schema([field])))


def written(table: pa.Table, path: Path, compression: str | None = None) -> Path:
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", BOMBS)
def test_rows_without_bytes_in_the_file_are_rejected(name: str, tmp_path: Path) -> None:
    table = table_with(*BOMBS[name])
    path = written(table, tmp_path / "bomb.arrow")
    assert path.stat().st_size < 1 << 22
    start = time.monotonic()
    with pytest.raises(CapacityError, match=r"column 'infos' must fit into .* for '.*bomb.arrow'.* max_nbytes"):
        read_arrow(path)
    with pytest.raises(CapacityError, match=r"column 'infos' must fit into .* for the table, .* max_nbytes"):
        SampleBatch.from_arrow(table)
    assert time.monotonic() - start < 5


def test_large_compressed_zeros_are_rejected_before_decompression(tmp_path: Path) -> None:
    path = written(about(pa.table({"obs": np.zeros((1 << 25) + 1)})), tmp_path / "bomb.arrow", "zstd")
    stored = pa.total_allocated_bytes()
    with pytest.raises(CapacityError, match=r"compressed data must fit into .* got 268435464 bytes"):
        read_arrow(path)
    assert pa.total_allocated_bytes() == stored


def test_the_claimed_size_of_a_compressed_buffer_is_limited(tmp_path: Path) -> None:
    data = written(about(pa.table({"obs": np.zeros(1000)})), tmp_path / "bomb.arrow", "zstd").read_bytes()
    claim = (8000).to_bytes(8, "little")
    assert data.count(claim) == 1
    (tmp_path / "bomb.arrow").write_bytes(data.replace(claim, (1 << 40).to_bytes(8, "little")))
    with pytest.raises(CapacityError, match=r"must fit into .* got 1099511627776 bytes"):
        read_arrow(tmp_path / "bomb.arrow")


def test_the_memory_limit_is_configurable(tmp_path: Path) -> None:
    infos: list[Any] = [{}] * 3_000_000
    batch = SampleBatch(infos=infos)
    write_arrow(batch, tmp_path / "batch.arrow")
    with pytest.raises(CapacityError, match=r"column 'infos' must fit into .* got 384000000 bytes"):
        read_arrow(tmp_path / "batch.arrow")
    assert len(read_arrow(tmp_path / "batch.arrow", max_nbytes=1 << 29)["infos"]) == len(infos)
    with pytest.raises(CapacityError, match="column 'infos'"):
        SampleBatch.from_arrow(SampleBatch(infos=infos[:100]).to_arrow(), max_nbytes=1000)
    for wrong in (-1, float("nan"), True):
        with pytest.raises(CapacityError, match="max_nbytes must be"):
            read_arrow(tmp_path / "batch.arrow", max_nbytes=wrong)  # type: ignore[arg-type]


def test_highly_compressible_experience_is_read(tmp_path: Path) -> None:
    n = 100_000
    agents = MultiAgentBatch(
        {
            "a": SampleBatch(obs=np.zeros((n, 64), np.float32), infos=[{}] * n, words=["up"] * n),
            "b": SampleBatch(obs=np.zeros((n, 64), np.float32), infos=[{"lives": 3}] * n, words=[None] * n),
        },
        n,
    )
    write_arrow(agents, tmp_path / "batch.arrow")
    assert read_arrow(tmp_path / "batch.arrow") == agents
    write_parquet(agents, tmp_path / "batch.parquet")
    assert read_parquet(tmp_path / "batch.parquet") == agents


def test_column_names_of_invalid_utf_8_are_rejected(tmp_path: Path) -> None:
    for write, read in ((written, read_arrow), (lambda t, path: parquet.write_table(t, path), read_parquet)):
        write(about(pa.table({"abcdefgh": [1]})), tmp_path / "batch")
        data = (tmp_path / "batch").read_bytes()
        (tmp_path / "batch").write_bytes(data.replace(b"abcdefgh", b"abcd\xfefgh"))
        with pytest.raises(FormatError, match="batch"):
            read(tmp_path / "batch")


def test_a_footer_with_false_values_is_rejected(tmp_path: Path) -> None:
    path = written(table_with(pa.array([1, 2]), ""), tmp_path / "batch.arrow")
    data = path.read_bytes()
    for nbytes in (0, 4, len(data), 1 << 30, -5):
        path.write_bytes(data[:-10] + nbytes.to_bytes(4, "little", signed=True) + data[-6:])
        with pytest.raises(FormatError):
            read_arrow(path)


@pytest.mark.parametrize(
    "column",
    [
        lambda: pa.array(np.zeros((1 << 25) + 1)),
        lambda: pa.repeat("a", 1 << 26),
        lambda: pa.repeat(TEXT, 10_000),
    ],
    ids=["numbers", "short strings", "long strings"],
)
def test_parquet_files_that_repeat_a_value_are_rejected(column: Callable[[], pa.Array], tmp_path: Path) -> None:
    path = tmp_path / "part-000000-00000000.parquet"
    parquet.write_table(about(pa.table({"infos": column()})), path, compression="zstd")
    assert path.stat().st_size < 1 << 19
    stored = pa.total_allocated_bytes()
    with pytest.raises(CapacityError, match=r"column 'infos.* for '.*parquet'.* max_nbytes"):
        read_parquet(path)
    assert pa.total_allocated_bytes() - stored < 1 << 20
    commit(path)
    with pytest.raises(CapacityError, match="max_nbytes"):
        Dataset(tmp_path).read()
    with pytest.raises(CapacityError, match="the 1000 bytes of memory"):
        Dataset(tmp_path, max_nbytes=1000).read()


def test_repeated_strings_of_parquet_dictionaries_are_read(tmp_path: Path) -> None:
    words = pa.array(["up", "down"] * 5000)
    parquet.write_table(about(pa.table({"words": words, "t": np.arange(10_000)})), tmp_path / "words.parquet")
    actual = read_parquet(tmp_path / "words.parquet")
    assert actual["words"].tolist() == words.to_pylist()
    assert actual["t"].tolist() == list(range(10_000))
