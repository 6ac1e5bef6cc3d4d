"""Ray Data: our tables as its blocks, and its own types of tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.convert.rllib import without_ray_types
from samplebatch.errors import FormatError

ROOT = Path(__file__).parents[2]

SCRIPT = """
import numpy as np, ray
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
import pytest
from samplebatch import SampleBatch
from samplebatch.convert import from_ray_dataset, to_ray_dataset
from samplebatch.errors import EmptyBufferError
from tests.convert.experience import two_episodes

batch = two_episodes(nested=True)
batch["infos"] = [{"lives": i} for i in range(5)]
batch["ragged"] = [[1.0] * (1 + i % 3) for i in range(5)]
batch["names"] = np.array(["a", "", "dé", "b", "c"])
batch["bits"] = np.eye(5, 3, dtype=bool)
batch["half"] = np.arange(5, dtype=np.float16)
batch["unsigned"] = np.array([2**64 - 1] * 5, np.uint64)
batch["complex"] = np.arange(5) + 1j
batch["when"] = np.arange(5).astype("M8[ms]")
dataset = to_ray_dataset([batch[:2], batch[2:]])
assert dataset.num_blocks() == 2
assert from_ray_dataset(dataset) == batch
whole = from_ray_dataset(to_ray_dataset(batch))
assert whole == batch
for block, rows in zip(ray.get(dataset.to_arrow_refs()), (batch[:2], batch[2:]), strict=True):
    assert block.schema.equals(rows.to_arrow().schema, check_metadata=True)
for name in batch.column_names:
    assert whole[name].dtype == batch[name].dtype, name
for same in (dataset.map_batches(lambda table: table, batch_format="pyarrow"), dataset.repartition(1)):
    kept = from_ray_dataset(same)
    assert kept[np.lexsort((kept["t"], kept["eps_id"]))] == whole
    for name in batch.column_names:
        assert kept[name].dtype == batch[name].dtype, name

mapped = dataset.map_batches(lambda rows: {**rows, "rewards": rows["rewards"] * 2}, batch_format="numpy")
found = from_ray_dataset(mapped)
order = np.lexsort((found["t"], found["eps_id"]))
assert found["rewards"][order].tolist() == (batch["rewards"] * 2).tolist()
assert found["obs.camera"].shape == (5, 4, 1) and found["obs.camera"].dtype == np.uint8
assert found["terminateds"][order].tolist() == batch["terminateds"].tolist()
assert [row.tolist() for row in found["ragged"]] == [list(map(float, row)) for row in batch["ragged"]]
with pytest.raises(EmptyBufferError, match="must contain steps"):
    from_ray_dataset(dataset.filter(lambda row: False))
ray.shutdown()
print("all of it")
"""


@pytest.mark.long
def test_datasets_are_converted_in_both_directions() -> None:
    pytest.importorskip("ray.data")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip().endswith("all of it"), run.stderr[-3000:]


def ray_tensors(values: np.ndarray, shape: Any = None) -> pa.Table:
    """Return a column that Ray wrote to Parquet, as a process without Ray reads it."""
    flat = pa.array(values.reshape(-1))
    offsets = np.arange(len(values) + 1) * int(np.prod(values.shape[1:]))
    storage = pa.LargeListArray.from_arrays(pa.array(offsets), flat)
    metadata = {
        "ARROW:extension:name": "ray.data.arrow_tensor_v2",
        "ARROW:extension:metadata": json.dumps(list(values.shape[1:]) if shape is None else shape),
    }
    return pa.table([storage], schema=pa.schema([pa.field("obs", storage.type, metadata=metadata)]))


@pytest.mark.parametrize("dtype", ["f4", "u1", "?", "i8"])
def test_tensors_are_read_without_ray(dtype: str) -> None:
    values = np.arange(24).reshape(4, 3, 2).astype(dtype)
    actual = SampleBatch.from_arrow(without_ray_types(ray_tensors(values)))["obs"]
    assert actual.dtype == values.dtype
    assert actual.tolist() == values.tolist()


def test_tensors_are_read_without_copies() -> None:
    table = ray_tensors(np.arange(24.0).reshape(4, 3, 2))
    actual = SampleBatch.from_arrow(without_ray_types(table))["obs"]
    assert actual.ctypes.data == table.column(0).chunk(0).flatten().buffers()[1].address


@pytest.mark.parametrize("shape", [[3, 3], [], ["x"], [-1, -6], "x", {"a": 1}, [0]], ids=str)
def test_shapes_that_do_not_fit_are_rejected(shape: Any) -> None:
    with pytest.raises(FormatError, match="column 'obs' must"):
        without_ray_types(ray_tensors(np.arange(24.0).reshape(4, 3, 2), shape))


def ray_column(storage: pa.Array, kind: str, shape: str = "[2]") -> pa.Table:
    metadata = {"ARROW:extension:name": f"ray.data.{kind}", "ARROW:extension:metadata": shape}
    return pa.table([storage], schema=pa.schema([pa.field("obs", storage.type, metadata=metadata)]))


@pytest.mark.parametrize("shape", ["[" * 100_000, json.dumps([2] + [1] * 63)], ids=["deep", "many"])
def test_shapes_of_excessive_size_are_rejected(shape: str) -> None:
    with pytest.raises(FormatError, match="column 'obs' must"):
        without_ray_types(ray_column(pa.array([[1, 2], [3, 4]]), "arrow_tensor", shape))


@pytest.mark.parametrize("kind", ["arrow_tensor", "arrow_variable_shaped_tensor"])
@pytest.mark.parametrize(
    "storage",
    [
        pa.array([1, 2]),
        pa.array([[1, 2], None]),
        pa.array([{"data": [1.0, 2.0]}]),
        pa.array([{"data": [1.0, 2.0], "shape": 2}]),
        pa.array([{"data": [1.0, 2.0], "shape": None}]),
        pa.array([{"data": [1.0, 2.0], "shape": [2]}, None]),
        pa.array([{"data": [1.0, 2.0], "shape": [2, 1]}]),
    ],
    ids=lambda storage: str(storage.type),
)
def test_tensors_that_are_stored_in_another_way_are_rejected(storage: pa.Array, kind: str) -> None:
    with pytest.raises(FormatError, match="column 'obs' must have"):
        without_ray_types(ray_column(storage, kind))


def test_rows_of_one_dimension_may_vary() -> None:
    storage = pa.array([{"data": [1.0, 2.0], "shape": [2]}, {"data": [3.0], "shape": [1]}])
    actual = SampleBatch.from_arrow(without_ray_types(ray_column(storage, "arrow_variable_shaped_tensor")))["obs"]
    assert [row.tolist() for row in actual] == [[1, 2], [3]]
