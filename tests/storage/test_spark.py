"""Spark reads our Parquet files and datasets with its own reader; only where it is installed, with Java."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Dataset, MultiAgentBatch, SampleBatch

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # Spark's own


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql")
    options = {"ui.enabled": "false", "driver.bindAddress": "127.0.0.1", "driver.host": "127.0.0.1"}
    builder = sql.SparkSession.builder.master("local[1]")
    for name, value in options.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    yield session
    session.stop()


def steps(n: int = 10) -> SampleBatch:
    t = np.arange(n)
    return SampleBatch(
        obs=np.arange(n * 3, dtype=np.float32).reshape(n, 3),
        image=np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2),
        actions=t.astype(np.int8),
        rewards=t / 2,
        terminateds=t % 5 == 4,
        eps_id=t.astype(np.uint64) // 5,
        when=t.astype("M8[ms]"),
        took=t.astype("m8[ns]"),
        seen=[np.arange(i % 3, dtype=np.float32) for i in range(n)],
        infos=[{"lives": i, "name": "x"} for i in range(n)],
    )


def test_every_column_of_a_file_is_read(spark: Any, tmp_path: Path) -> None:
    steps().save(tmp_path / "steps.parquet")
    rows = spark.read.parquet(str(tmp_path / "steps.parquet")).orderBy("rewards").collect()
    assert [row.obs for row in rows] == steps()["obs"].tolist()
    assert [row.image for row in rows] == steps()["image"].tolist()
    assert [row.rewards for row in rows] == steps()["rewards"].tolist()
    assert [row.actions for row in rows] == list(range(10))
    assert [int(row.eps_id) for row in rows] == [0] * 5 + [1] * 5
    assert [row.seen for row in rows] == [value.tolist() for value in steps()["seen"]]
    assert rows[3].infos.lives == 3
    assert [row.took for row in rows] == list(range(10))
    assert [row.when.microsecond for row in rows] == list(range(0, 10_000, 1000))


def test_filters_on_flags_and_elements_of_tensors(spark: Any, tmp_path: Path) -> None:
    steps().save(tmp_path / "steps.parquet")
    frame = spark.read.parquet(str(tmp_path / "steps.parquet"))
    rows = frame.where("terminateds and image[1][0] > 20").selectExpr("obs[1]", "image[1]").collect()
    assert [tuple(row) for row in rows] == [(28.0, [38, 39])]


def test_a_dataset_folder_is_read_unchanged(spark: Any, tmp_path: Path) -> None:
    dataset = Dataset(tmp_path / "experience")
    for _ in range(3):
        dataset.extend(steps())
    frame = spark.read.parquet(str(tmp_path / "experience"))
    assert frame.count() == 30
    assert frame.where("terminateds").agg({"rewards": "sum"}).first()[0] == 3 * (2.0 + 4.5)


def test_rows_of_policies_are_distinguished(spark: Any, tmp_path: Path) -> None:
    parts = {"left": steps(4), "right": steps(6).select("obs", "rewards")}
    MultiAgentBatch(parts, 6).save(tmp_path / "steps.parquet")
    frame = spark.read.parquet(str(tmp_path / "steps.parquet"))
    assert sorted(map(tuple, frame.groupBy("policy_id").count().collect())) == [("left", 4), ("right", 6)]
