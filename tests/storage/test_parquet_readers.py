"""Parquet files and other tools: booleans and lists are readable, and other layouts are read or rejected."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import MultiAgentBatch, SampleBatch, read_parquet, write_arrow, write_parquet
from samplebatch.errors import FormatError
from samplebatch.storage.tables.parquet import SCHEMA_KEY

N = 6


def steps() -> SampleBatch:
    return SampleBatch(
        obs=np.arange(N * 3, dtype=np.float32).reshape(N, 3),
        image=np.arange(N * 4, dtype=np.uint8).reshape(N, 2, 2),
        hits=np.arange(N * 2).reshape(N, 2) % 3 == 0,
        rewards=np.arange(N) / 2,
        terminateds=np.arange(N) % 3 == 2,
        infos=[{"lives": i} for i in range(N)],
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_parquet(steps(), tmp_path / "steps.parquet")
    return tmp_path / "steps.parquet"


def test_polars_filters_by_flags_and_reads_nested_arrays(path: Path) -> None:
    frame = pl.read_parquet(path)
    assert frame.filter(pl.col("terminateds"))["rewards"].to_list() == [1.0, 2.5]
    assert frame["terminateds"].mean() == pytest.approx(1 / 3)
    assert frame["image"].to_list()[1] == [[4, 5], [6, 7]]
    assert frame["hits"].to_list()[0] == [True, False]
    assert pl.scan_parquet(path).filter(pl.col("terminateds")).select("rewards").collect().height == 2


def test_duckdb_filters_by_flags_and_unnests_lists(path: Path) -> None:
    rows = duckdb.sql(f"select rewards, obs[2], image[1][2], hits from '{path}' where terminateds").fetchall()
    assert [row[:3] for row in rows] == [(1.0, 7.0, 9), (2.5, 16.0, 21)]
    assert rows[0][3] == [False, False] or rows[0][3] == (False, False)


def test_pandas_reads_flags_as_booleans(path: Path) -> None:
    frame = pd.read_parquet(path)
    assert frame["terminateds"].dtype == np.bool_
    assert frame[frame["terminateds"]]["rewards"].tolist() == [1.0, 2.5]
    assert frame["obs"].iloc[1].tolist() == [3.0, 4.0, 5.0]


def test_hugging_face_loads_filters_and_formats_the_columns(path: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert loaded.column_names == ["obs", "image", "hits", "rewards", "terminateds", "infos"]
    assert loaded.filter(lambda row: row["terminateds"])["rewards"][:] == [1.0, 2.5]
    assert np.array_equal(loaded.with_format("numpy")[1]["image"], [[4, 5], [6, 7]])


def test_pyarrow_reads_plain_types_only(path: Path) -> None:
    schema = parquet.read_schema(path)
    assert schema.field("terminateds").type == pa.bool_()
    for field in schema:
        assert not isinstance(field.type, pa.BaseExtensionType)
    image = schema.field("image").type
    assert (image.list_size, image.value_type.list_size, image.value_type.value_type) == (2, 2, pa.uint8())


def test_columns_use_encodings_that_all_readers_support(path: Path) -> None:
    about = parquet.read_metadata(path).row_group(0)
    actual = {encoding for i in range(about.num_columns) for encoding in about.column(i).encodings}
    assert actual <= {"PLAIN", "RLE", "RLE_DICTIONARY"}


def test_byte_stream_split_encoding_is_read(path: Path, tmp_path: Path) -> None:
    split = tmp_path / "split.parquet"
    parquet.write_table(
        parquet.read_table(path), split, use_dictionary=False, use_byte_stream_split=["obs.list.element", "rewards"]
    )
    assert "BYTE_STREAM_SPLIT" in parquet.read_metadata(split).row_group(0).column(0).encodings
    assert read_parquet(split) == steps()


def test_columns_missing_for_a_policy_are_null_for_other_readers(tmp_path: Path) -> None:
    batch = MultiAgentBatch({"a": steps(), "b": SampleBatch(rewards=[1.0, 2.0])}, N)
    write_parquet(batch, tmp_path / "agents.parquet")
    assert read_parquet(tmp_path / "agents.parquet") == batch
    frame = pl.read_parquet(tmp_path / "agents.parquet")
    assert frame["terminateds"].null_count() == 2
    assert frame["image"].to_list()[:2] == steps()["image"][:2].tolist()
    assert frame["image"].to_list()[N:] == [None, None]


def write_with_extension_types(batch: SampleBatch, path: Path, *, schema: bool) -> None:
    """Write a table with Arrow's extension types, as earlier versions did."""
    table = batch.select(*[name for name in batch if name != "infos"]).to_arrow()
    if schema:
        plain = table.schema.remove_metadata().serialize().to_pybytes()
        table = table.replace_schema_metadata({**table.schema.metadata, SCHEMA_KEY: base64.b64encode(plain)})
    parquet.write_table(table, path)


@pytest.mark.parametrize("schema", [False, True])
def test_a_file_with_extension_types_is_read(tmp_path: Path, schema: bool) -> None:
    write_with_extension_types(steps(), tmp_path / "old.parquet", schema=schema)
    back = read_parquet(tmp_path / "old.parquet")
    assert back == steps().select(*[name for name in steps() if name != "infos"])
    assert back["terminateds"].dtype == np.bool_


def change(path: Path, to: Any) -> None:
    """Rewrite a file with another table and its original metadata."""
    table = parquet.read_table(path)
    parquet.write_table(to(table).replace_schema_metadata(table.schema.metadata), path)


def test_columns_that_contradict_the_description_are_rejected(path: Path) -> None:
    change(path, lambda table: table.set_column(4, "terminateds", pa.array(["x"] * N)))
    with pytest.raises(FormatError, match="must be stored as bool, got string"):
        read_parquet(path)


def test_tensors_with_nulls_are_rejected_with_the_column_name(path: Path) -> None:
    lists = pa.array([[[1, 2], [3, None]]] * N, pa.list_(pa.list_(pa.uint8(), 2), 2))
    change(path, lambda table: table.set_column(1, "image", lists))
    with pytest.raises(FormatError, match="image"):
        read_parquet(path)


WORDS = ["left", "", "naïve 漢字", None, "x" * 1000, "a"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    batch = SampleBatch(task=WORDS, raw=[b"a\0", b"", None, b"\xff", b"b", b"c"], rewards=np.arange(6.0))
    write_parquet(batch, tmp_path / "text.parquet")
    write_arrow(batch, tmp_path / "text.arrow")
    return tmp_path


def test_every_reader_reads_text_as_strings(text: Path) -> None:
    frames = [pl.read_parquet(text / "text.parquet"), pl.read_ipc(text / "text.arrow")]
    for frame in (*frames, pl.DataFrame(read_parquet(text / "text.parquet").to_arrow())):
        assert frame["task"].to_list() == WORDS
        assert frame.schema["task"] == pl.String
        assert frame.schema["raw"] == pl.Binary
        assert frame.filter(pl.col("task") == "left")["rewards"].to_list() == [0.0]
    assert pd.read_parquet(text / "text.parquet")["task"].tolist() == WORDS
    actual = duckdb.sql(f"select task from '{text / 'text.parquet'}' where task like 'na%'").fetchall()
    assert actual == [("naïve 漢字",)]
    assert parquet.read_schema(text / "text.parquet").field("task").type == pa.large_string()


def test_hugging_face_reads_text_as_strings(text: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_parquet(str(text / "text.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded["task"][:] == WORDS
    assert loaded.features["task"].dtype == "large_string"


def test_text_written_by_other_tools_is_read_as_text(tmp_path: Path) -> None:
    frame = pl.DataFrame({"task": WORDS, "kind": pl.Series(["a", "b"] * 3, dtype=pl.Categorical)})
    frame.write_parquet(tmp_path / "polars.parquet")
    pd.DataFrame({"task": WORDS, "kind": ["a", "b"] * 3}).to_parquet(tmp_path / "pandas.parquet")
    duckdb.sql("copy (select task, kind from frame) to '" + str(tmp_path / "duckdb.parquet") + "' (format parquet)")
    for name in ("polars", "pandas", "duckdb"):
        batch = SampleBatch.from_arrow(parquet.read_table(tmp_path / f"{name}.parquet"))
        assert batch.column("task").kind == batch.column("kind").kind == "text"
        assert batch["task"].tolist() == WORDS
        assert batch["kind"].tolist() == ["a", "b"] * 3
    assert SampleBatch.from_arrow(frame)["kind"].tolist() == ["a", "b"] * 3
