"""Parquet files: round trips, rejection of damaged files, and reading by other tools."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from samplebatch import Batch, MultiAgentBatch, SampleBatch, load, read_parquet, write_parquet
from samplebatch.column.arrow import Recent
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import ArgumentError, FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.storage.tables.parquet_layout import from_parquet, parquet_type, to_parquet
from tests.optional import torch


def objects(*rows: Any) -> np.ndarray:
    return np.fromiter(rows, object, len(rows))


def steps(n: int = 6) -> SampleBatch:
    return SampleBatch(
        obs={"camera": np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2), "arm": np.arange(n) / 7},
        done=np.arange(n) % 2 == 0,
        hit=np.arange(2 * n).reshape(n, 2) % 3 == 0,
        half=np.arange(n).astype(np.float16),
        when=np.arange(n).astype("M8[ms]"),
        second=np.arange(n).astype("M8[s]") + np.timedelta64(2**62, "s"),
        phase=np.arange(n) * 1j,
        nothing=np.zeros((n, 0), np.float32),
        words=RaggedColumn.from_rows([np.arange(i % 3, dtype=np.int16) for i in range(n)], "words")
        if n
        else np.zeros(0),
        infos=[{"hit": bool(i % 2), "at": [i] * i, "empty": {}} for i in range(n)],
        who=[f"agent_{i}" for i in range(n)],
    )


def recurrent() -> SampleBatch:
    return SampleBatch(obs=np.arange(6).reshape(6, 1), infos=[{}] * 6, state_in_0=np.zeros((3, 2)), seq_lens=[1, 2, 3])


def tensors() -> SampleBatch:
    return SampleBatch(a=torch.ones(3, 2, dtype=torch.bfloat16), b=torch.tensor([True, False, True]))


BATCHES: dict[str, Any] = {
    "flat": steps,
    "slice": lambda: steps()[1:4],
    "no rows": lambda: steps()[:0],
    "recurrent": recurrent,
    "padded": lambda: recurrent().right_zero_pad(4),
    "tensors": tensors,
    "no columns": SampleBatch,
    "infos that are empty": lambda: SampleBatch(t=[0, 1, 2], infos=objects({}, None, {})),
    "infos that are strange": lambda: SampleBatch(infos=objects([{}], [], [{}, {}])),
    "agents": lambda: MultiAgentBatch({"left": steps(3), "right": steps(5)}, 5),
    "agents that differ": lambda: MultiAgentBatch(
        {
            "a": SampleBatch(obs=[1.0], second=np.zeros(1, "M8[s]")),
            "b": SampleBatch(obs=[[1, 2]], infos=[{}], none=np.zeros((1, 0))),
        },
        1,
    ),
    "an agent without rows": lambda: MultiAgentBatch({"a": SampleBatch(obs=[1.0]), "b": SampleBatch()}, 1),
    "no agents": lambda: MultiAgentBatch({}, 3),
}


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_restored_exactly(tmp_path: Path, name: str, compression: str) -> None:
    batch = BATCHES[name]()
    write_parquet(batch, tmp_path / "batch.parquet", compression=compression)
    back = read_parquet(tmp_path / "batch.parquet")
    assert type(back) is type(batch)
    assert back == batch
    assert os.listdir(tmp_path) == ["batch.parquet"]


SHAPES = ((), (3,), (2, 2), (0,), (1,))
DTYPES = ("?", "i1", "i8", "u2", "u8", "f2", "f4", "f8", "c8", "c16", "M8[D]", "M8[s]", "M8[ns]", "m8[s]", "S3", "U4")


@settings(max_examples=60)
@given(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 4), st.integers(0, 2**32))
def test_every_dtype_and_shape_is_restored_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, name: str, shape: tuple[int, ...], n: int, seed: int
) -> None:
    dtype, rng = np.dtype(name), np.random.default_rng(seed)
    if dtype.kind in "bSU":
        values = rng.integers(0, 2, (n, *shape)).astype(dtype)
    else:
        values = np.frombuffer(rng.bytes(int(np.prod((n, *shape))) * dtype.itemsize), dtype).reshape(n, *shape)
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    write_parquet(MultiAgentBatch({"a": SampleBatch(x=values), "b": SampleBatch(t=[1, 2])}, 2), path)
    back = read_parquet(path)["a"]["x"]
    assert back.dtype == SampleBatch(x=values)["x"].dtype
    assert back.shape == values.shape
    assert back.tolist() == values.tolist() if dtype.kind in "SU" else back.tobytes() == values.tobytes()


def test_other_tools_read_plain_columns_and_skip_other_policies(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    batch = MultiAgentBatch({"a": SampleBatch(t=[0, 1], x=[1.0, 2.0]), "b": SampleBatch(t=[2])}, 2)
    write_parquet(batch, path)
    table = parquet.read_table(path, filters=[("policy_id", "=", "a")])
    assert table.column("policy_id").to_pylist() == ["a", "a"]
    assert table.column("x").to_pylist() == [1.0, 2.0]
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        assert [group.num_rows for group in groups] == [2, 1]
        assert {group.column(0).compression for group in groups} == {"ZSTD"}


def test_layouts_of_slices_and_nulls_are_restored() -> None:
    inner = pa.struct([pa.field("empty", pa.struct([])), pa.field("when", pa.timestamp("s"))])
    rows = [
        [{"empty": {}, "when": 5}, None],
        None,
        [],
        [{"empty": None, "when": None}],
        [{"empty": {}, "when": 2**62}, {"empty": {}, "when": 1}],
    ]
    array = pa.array(rows, pa.large_list(inner))
    for start in range(5):
        part = array.slice(start)
        layout = to_parquet(part)
        assert (
            layout.type
            == parquet_type(array.type)
            == pa.large_list(pa.struct([pa.field("empty", pa.bool_()), pa.field("when", pa.int64())]))
        )
        layout.validate(full=True)
        back = from_parquet(layout, array.type)
        back.validate(full=True)
        assert back.equals(part)
    fixed = pa.array([[{}, None], None, [None, {}]], pa.list_(pa.struct([]), 2)).slice(1)
    assert from_parquet(to_parquet(fixed), fixed.type).equals(fixed)
    numbers = pa.array([[1, 2], None, None, [3, 4], None], pa.list_(pa.int64(), 2))
    for start in range(6):
        part = numbers.slice(start)
        assert to_parquet(part, nullable=True).to_pylist() == part.to_pylist()
        assert from_parquet(to_parquet(part, nullable=True), part.type, nullable=True).equals(part)
    with pytest.raises(FormatError, match="must be stored as bool"):
        from_parquet(pa.array([1]), pa.struct([]))
    with pytest.raises(FormatError, match="lists must have size 2"):
        from_parquet(pa.array([[1, 2], [3]], pa.large_list(pa.int64())), numbers.type, nullable=True)


def test_a_file_truncated_anywhere_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    write_parquet(MultiAgentBatch({"a": steps(), "b": recurrent()}, 6), path)
    data = path.read_bytes()
    for length in [*range(0, 16), *range(16, len(data), 397), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"batch\.parquet"):
            read_parquet(path)


def test_damaged_values_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    batch = SampleBatch(obs=np.random.default_rng(0).normal(size=(500, 8)))
    write_parquet(batch, path, compression="none")
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for at in rng.integers(100, 30_000, 25).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(FormatError, match=r"batch\.parquet"):
            read_parquet(path)


def test_a_damaged_description_is_rejected_or_decoded_safely(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    write_parquet(steps(), path)
    data = path.read_bytes()
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        bad = bytearray(data)
        for at in rng.integers(footer, len(data), 3):
            bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            batch = read_parquet(path)
        except SampleBatchError:
            refused += 1
        else:
            repr(batch), str(batch)
    assert refused > 50


@pytest.mark.parametrize("content", [b"", b"ARROW1 not parquet", b"PAR1", b"PAR1" + bytes(50) + b"PAR1"])
def test_a_file_of_another_format_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.parquet"):
        read_parquet(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {b"samplebatch": b"{"},
        {b"samplebatch": b'{"version": 1, "type": "X"}'},
        {b"samplebatch.arrow_schema": b"!"},
        {b"samplebatch.arrow_schema": b"QUJD"},
    ],
)
def test_a_table_without_batch_metadata_is_rejected(tmp_path: Path, metadata: dict[bytes, bytes]) -> None:
    parquet.write_table(pa.table({"a": [1, 2]}).replace_schema_metadata(metadata or None), tmp_path / "x.parquet")
    with pytest.raises(FormatError, match=r"x\.parquet"):
        read_parquet(tmp_path / "x.parquet")


def test_pickled_objects_are_unpickled_only_if_allowed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(SampleBatch(a=[1], infos=[{"x": {1, 2}}]), path)
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        read_parquet(path)
    assert list(read_parquet(path, allow_pickle=True)["infos"]) == [{"x": {1, 2}}]


def test_pickle_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(FormatError):
        read_parquet(tmp_path / "x.parquet")


def test_wrong_arguments_are_rejected_before_a_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'none', got 'zstandard'; did you mean 'zstd'"):
        write_parquet(SampleBatch(a=[1]), tmp_path / "x.parquet", compression="zstandard")
    with pytest.raises(FileNotFoundError, match="missing"):
        write_parquet(SampleBatch(a=[1]), tmp_path / "missing" / "x.parquet")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_parquet(tmp_path / "nowhere.parquet")
    assert os.listdir(tmp_path) == []


def test_filters_reject_a_column_that_is_of_two_types(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    SampleBatch(obs=np.zeros(3), rewards=np.arange(3)).save(path)
    data = path.read_bytes()
    # In the metadata of a row group: the type, a 64-bit integer, and the list of encodings.
    typed = data.rindex(b"\x15\x04\x19")
    path.write_bytes(data[: typed + 1] + b"\x05" + data[typed + 2 :])
    with pytest.raises(FormatError, match="column 'rewards' must be INT64, got UNKNOWN"):
        load(path, filters=[("rewards", ">", 1)], verify=False)


def test_filters_reject_inconsistent_row_group_statistics(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"rewards": pa.array([0, 1, None])}), path)
    data = path.read_bytes()
    # In the schema: a 64-bit integer, optional. Row groups count its missing values, which is one count too many then.
    optional = data.rindex(b"\x15\x04\x25\x02\x18\x07rewards")
    path.write_bytes(data[: optional + 3] + b"\x00" + data[optional + 4 :])
    with pytest.raises(FormatError, match="a row group must have size statistics of column 'rewards', got others"):
        load(path, filters=[("rewards", ">", 1)])


def test_a_schema_is_analysed_once_and_cached_separately(tmp_path: Path) -> None:
    nested = Batch(obs={"x": np.arange(3.0)}).as_sample_batch()
    batches: list[SampleBatch] = [
        SampleBatch(obs={"x": np.arange(3.0)}),
        SampleBatch({"obs.x": np.arange(3.0)}),
        SampleBatch(obs={"x": np.arange(9.0)}),
        SampleBatch(obs={"x": np.arange(3.0, dtype=np.float32)}),
        nested,
    ]
    for number, batch in enumerate(batches):
        batch.save(tmp_path / f"{number}.parquet")
    cache = Recent[bytes, Any](limit=8)
    with mock.patch("samplebatch.storage.tables.parquet._schemas", cache):
        for _ in range(2):
            for number, batch in enumerate(batches):
                again = load(tmp_path / f"{number}.parquet")
                assert again == batch
                assert (again.column_names, again["obs"]["x"].dtype if number != 1 else None) == (
                    batch.column_names,
                    batch["obs"]["x"].dtype if number != 1 else None,
                )
        assert len(cache) == 3
