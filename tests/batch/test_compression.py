"""In-place compression and decompression of columns, completely or in blocks of rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, concat_samples
from samplebatch.column.compressed import CompressedColumn
from samplebatch.errors import ColumnMismatchError, ColumnTypeError
from tests.batch.every_kind import DATES, NUMBERS, in_sequences, numbers
from tests.optional import torch

both = pytest.mark.parametrize("bulk", [False, True], ids=["rows", "bulk"])


@both
@pytest.mark.parametrize("dtype", [*NUMBERS, *DATES])
@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (0,), (0, 3), (3, 0), (1000, 40)], ids=str)
def test_every_dtype_round_trips_exactly(bulk: bool, dtype: str, shape: tuple[int, ...]) -> None:
    values = numbers(dtype, *shape)
    batch = SampleBatch(obs=values.copy()).compress(bulk=bulk)
    column = batch["obs"]
    assert isinstance(column, CompressedColumn)
    assert len(column) == len(batch) == shape[0]
    assert column.dtype == values.dtype
    assert column.row_shape == shape[1:]
    back = batch.decompress_if_needed()["obs"]
    assert isinstance(back, np.ndarray)
    assert back.dtype == values.dtype
    assert back.shape == shape
    assert back.flags.writeable
    assert back.tobytes() == values.tobytes()


@both
def test_repetitive_columns_shrink(bulk: bool) -> None:
    frames = np.zeros((64, 84, 84, 4), np.uint8)
    batch = SampleBatch(obs=frames).compress(bulk=bulk)
    assert batch.size_bytes() < frames.nbytes / 50
    assert batch["obs"].nbytes == batch.size_bytes()


@both
def test_nested_columns_are_compressed_leaf_by_leaf(bulk: bool) -> None:
    batch = SampleBatch(obs={"camera": np.zeros((3, 4)), "arm": (np.ones(3), np.ones((3, 2)))}, rewards=np.ones(3))
    batch.compress(bulk=bulk)
    assert isinstance(batch["obs"]["camera"], CompressedColumn)
    assert all(isinstance(leaf, CompressedColumn) for leaf in batch["obs"]["arm"])
    assert isinstance(batch["rewards"], np.ndarray)
    batch.decompress_if_needed()
    assert batch["obs"]["arm"][1].tolist() == [[1, 1]] * 3


@both
def test_one_leaf_of_a_nested_column(bulk: bool) -> None:
    batch = SampleBatch(obs={"camera": np.zeros((3, 4)), "arm": np.ones(3)})
    batch.compress(bulk=bulk, columns={"obs.camera"})
    assert [batch.column(path).kind for path in batch.column_names] == ["compressed", "tensor"]
    batch.decompress_if_needed(columns=["obs.camera"])
    assert batch.column("obs.camera").kind == "tensor"


@both
def test_compressing_again_changes_nothing(bulk: bool) -> None:
    batch = SampleBatch(obs=np.arange(10.0)).compress(bulk=bulk)
    column = batch["obs"]
    assert batch.compress(bulk=True)["obs"] is column
    assert batch.compress(bulk=False)["obs"] is column


def test_decompressing_again_changes_nothing() -> None:
    values = np.arange(10.0)
    batch = SampleBatch(obs=values)
    assert batch.decompress_if_needed()["obs"] is values


@both
def test_missing_columns_are_ignored(bulk: bool) -> None:
    batch = SampleBatch(rewards=np.ones(3))
    assert batch.compress(bulk=bulk) is batch
    assert batch.compress(bulk=bulk, columns={"nothing", "rewards"}).column("rewards").kind == "compressed"
    assert batch.decompress_if_needed(columns={"nothing"}) is batch
    SampleBatch().compress(bulk=bulk).decompress_if_needed()


@both
@pytest.mark.parametrize(
    "values",
    [[{}, {}], torch.zeros(2), [[1], [2, 3]], np.array([object(), None])],
    ids=["infos", "torch", "ragged", "objects"],
)
def test_non_numeric_columns_are_rejected_with_the_column_name(bulk: bool, values: object) -> None:
    batch = SampleBatch(obs=values, new_obs=np.zeros(2))
    with pytest.raises(ColumnTypeError, match="'obs' must be an array to be compressed"):
        batch.compress(bulk=bulk)
    assert batch.column("obs").kind != "compressed"


@both
def test_a_rejected_compression_changes_no_column(bulk: bool) -> None:
    batch = SampleBatch({"obs": np.zeros(2), "new_obs": [{}, {}]})
    with pytest.raises(ColumnTypeError, match="'new_obs'"):
        batch.compress(bulk=bulk, columns=["obs", "new_obs"])
    assert batch.column("obs").kind == "tensor"


@both
def test_rows_of_a_compressed_column_can_be_read(bulk: bool) -> None:
    values = np.random.default_rng(0).integers(0, 4, (500, 64)).astype(np.uint8)
    batch = SampleBatch(obs=values.copy()).compress(bulk=bulk)
    assert batch["obs"][7].tolist() == values[7].tolist()
    assert batch["obs"][-1].tolist() == values[-1].tolist()
    assert np.asarray(batch["obs"]).tolist() == values.tolist()
    assert batch[100:200]["obs"][5].tolist() == values[105].tolist()
    assert batch.take([400, 3])["obs"].tolist() == values[[400, 3]].tolist()
    assert [row["obs"].tolist() for row in batch[10:13].rows()] == values[10:13].tolist()


@both
def test_slices_joins_and_pickles_keep_columns_compressed(bulk: bool) -> None:
    values = np.random.default_rng(0).integers(0, 4, (500, 64)).astype(np.uint8)
    batch = SampleBatch(obs=values.copy(), a=np.arange(500)).compress(bulk=bulk)
    for result in (
        batch[:],
        batch.copy(),
        concat_samples([batch[:123], batch[123:400], batch[400:]]),
        concat_samples(batch.timeslices(77)),
        pickle.loads(pickle.dumps(batch, 5)),
    ):
        assert result.column("obs").kind == "compressed"
        assert result == batch
        assert result.copy().decompress_if_needed()["obs"].tolist() == values.tolist()
    # Other tools read the rows, so Arrow gets them decompressed.
    assert SampleBatch.from_arrow(batch[3:].to_arrow()) == batch[3:].decompress_if_needed()
    part = batch[123:321]
    assert part.decompress_if_needed()["obs"].tolist() == values[123:321].tolist()
    assert batch.column("obs").kind == "compressed"


def test_equality_compares_rows_and_not_compressed_blocks() -> None:
    values = np.arange(100_000.0)
    rows, bulk = SampleBatch(obs=values).compress(), SampleBatch(obs=values).compress(bulk=True)
    assert rows == bulk
    assert rows[10:] == bulk[10:]
    assert rows[:-1] != bulk[1:]
    assert rows != SampleBatch(obs=values)


def test_compressed_and_plain_columns_are_not_joined() -> None:
    batch = SampleBatch(obs=np.zeros(4))
    with pytest.raises(
        ColumnMismatchError, match="'obs' must be of one kind to be concatenated, got tensor and compressed"
    ):
        concat_samples([batch.copy(), batch.compress()])


@both
def test_compressed_sequences_can_be_padded_and_cut(bulk: bool) -> None:
    batch = in_sequences(padded=False).drop("words", "infos")
    squeezed = batch.copy().compress(bulk=bulk, columns={"a", "b"})
    assert squeezed.slice(1, 4).decompress_if_needed({"a", "b"}) == batch.slice(1, 4)
    assert squeezed[2:].decompress_if_needed({"a", "b"}) == batch[2:]
    assert squeezed.take_sequences([3, 0]).decompress_if_needed({"a", "b"}) == batch.take_sequences([3, 0])
    assert squeezed.right_zero_pad(4).decompress_if_needed({"a", "b"}) == batch.right_zero_pad(4)


def test_policies_are_compressed_in_place() -> None:
    batch = MultiAgentBatch({"p": SampleBatch(obs=np.ones(4)), "q": SampleBatch(a=np.ones(2))}, 4)
    assert batch.compress(bulk=True, columns={"obs", "a"}) is None
    assert batch["p"].column("obs").kind == batch["q"].column("a").kind == "compressed"
    assert batch.decompress_if_needed(columns={"a"}) is batch
    assert [batch["p"].column("obs").kind, batch["q"].column("a").kind] == ["compressed", "tensor"]
