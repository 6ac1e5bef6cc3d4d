"""Reservations: columns that are filled in their block, and sent without a copy."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch, channel
from samplebatch.errors import (
    CapacityError,
    ChannelClosedError,
    ChannelTimeoutError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    PeerDiedError,
    ReleasedError,
    RowIndexError,
    SequenceError,
    UntrustedPickleError,
)
from samplebatch.transport.consumer import Consumer
from samplebatch.transport.producer import Producer
from tests.optional import torch

COLUMNS = {"camera": (np.uint8, (4, 4)), "speed": ("f8", (2,)), "lives": np.int32, "rewards": "f4", "when": "M8[ms]"}


@pytest.fixture
def ends() -> Iterator[tuple[Producer, Consumer]]:
    producer, consumer = channel(1 << 20)
    yield producer, consumer
    producer.close()
    consumer.close()


def all_free(producer: Producer) -> bool:
    gc.collect()
    producer._blocks.collect()
    return producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes


def test_filled_rows_are_received(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    for seed in range(3):
        rng = np.random.default_rng(seed)
        camera = rng.integers(0, 255, (50, 4, 4), np.uint8)
        block = producer.reserve(COLUMNS, 50)
        assert block.rows == 50
        assert list(block) == ["camera", "speed", "lives", "rewards", "when"]
        block["camera"][:] = camera
        block["speed"][:] = seed
        block["lives"][:] = np.arange(50)
        for t in range(50):
            block["rewards"][t] = t / 2
        block["when"][:] = np.datetime64("2024-01-01")
        block.commit()
        batch = consumer.recv(timeout_s=1)
        assert isinstance(batch, SampleBatch)
        assert batch == SampleBatch(
            camera=camera,
            speed=np.full((50, 2), float(seed)),
            lives=np.arange(50, dtype=np.int32),
            rewards=(np.arange(50) / 2).astype(np.float32),
            when=np.full(50, np.datetime64("2024-01-01"), "M8[ms]"),
        )


def test_nothing_is_copied(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    block = producer.reserve({"obs": ("f4", (17,))}, 1000)
    mine = block["obs"]
    block.commit()
    theirs = consumer.recv(timeout_s=1)["obs"]
    theirs[3, 4] = 42
    assert mine[3, 4] == 42
    assert mine.ctypes.data % 64 == 0


@pytest.mark.parametrize("used", [0, 1, 49, 50])
def test_fewer_rows_than_reserved_may_be_committed(ends: tuple[Producer, Consumer], used: int) -> None:
    producer, consumer = ends
    for _ in range(2):
        with producer.reserve(COLUMNS, 50) as block:
            block["rewards"][:used] = 7
            block["lives"][:used] = np.arange(used)
            block.commit(used)
        batch = consumer.recv(timeout_s=1)
        assert len(batch) == used
        assert batch["lives"].tolist() == list(range(used))
        assert (batch["rewards"] == 7).all()
        assert batch["camera"].shape == (used, 4, 4)


def test_columns_of_tensors_can_be_reserved(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    with producer.reserve({"half": (torch.bfloat16, (3,))}, 4) as block:
        block["half"][:] = torch.arange(12.0).reshape(4, 3)
    batch = consumer.recv(timeout_s=1)
    assert batch["half"].dtype == torch.bfloat16
    assert batch["half"].sum() == 66


def test_extra_columns_are_sent_with_the_reserved_ones(ends: tuple[Producer, Consumer]) -> None:
    """Columns that cannot be filled in place are passed to `commit`."""
    producer, consumer = ends
    for n, m in ((6, 6), (6, 4)):
        block = producer.reserve({"x": "f8"}, n)
        block["x"][:] = np.arange(n)
        extra = {
            "obs": {"text": np.array([f"row {i}" for i in range(m)], object)},
            "infos": [{"lives": i} for i in range(m)],
            "path": [np.arange(i) for i in range(m)],
            "state_in_0": np.ones((2, 2)),
            "seq_lens": [m - 1, 1],
        }
        block.commit(m, extra=extra)
        batch = consumer.recv(timeout_s=1)
        assert isinstance(batch, SampleBatch)
        assert batch["x"].tolist() == list(range(m))
        assert batch["obs"]["text"].tolist() == [f"row {i}" for i in range(m)]
        assert batch["infos"][1] == {"lives": 1}
        assert [row.tolist() for row in batch["path"]] == [list(range(i)) for i in range(m)]
        assert batch["seq_lens"].tolist() == [m - 1, 1]
        assert batch.max_seq_len == m - 1
        assert batch["state_in_0"].shape == (2, 2)
        del batch
    assert all_free(producer)


def test_large_extra_columns_get_a_separate_block(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    rows = 2000
    block = producer.reserve({"x": "f8"}, rows)
    block["x"][:] = 5
    extra = np.arange(rows * 10).reshape(rows, 10)
    block.commit(extra={"more": extra})
    batch = consumer.recv(timeout_s=1)
    more = batch["more"]
    assert np.array_equal(more, extra)
    assert batch["x"].sum() == 5 * rows
    del batch
    assert not all_free(producer)
    assert np.array_equal(more, extra)
    del more
    assert all_free(producer)


class TestRejectedCalls:
    """A rejected call does not change the channel."""

    def test_incompatible_extra_columns(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        block = producer.reserve({"x": "f8"}, 3)
        for wrong, error in (
            ({"infos": [{}] * 2}, ColumnLengthError),
            ({"infos": [{}] * 3, "x": np.zeros(3)}, ColumnMismatchError),
            ({"infos": [{1}] * 3}, UntrustedPickleError),
            ({"infos": [{}] * 3, "seq_lens": [2, 2]}, (SequenceError, ColumnLengthError)),
        ):
            with pytest.raises(error, match=r"'(infos|x)'"):
                block.commit(extra=wrong)
        block["x"][:] = 2
        block.commit(extra={"infos": [{}] * 3})
        assert consumer.recv(timeout_s=1) == SampleBatch(x=[2.0] * 3, infos=[{}] * 3)

    def test_invalid_numbers_of_rows(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        for rows in (-1, {"a": 3}, 2.5, True):
            with pytest.raises(RowIndexError, match="rows must be a whole number from 0"):
                producer.reserve(COLUMNS, rows)
        with producer.reserve(COLUMNS, 3) as block:
            for rows in (4, -1):
                with pytest.raises(RowIndexError):
                    block.commit(rows)
            block.commit(3)
        assert len(consumer.recv(timeout_s=1)) == 3

    def test_invalid_column_names(self, ends: tuple[Producer, Consumer]) -> None:
        producer, _ = ends
        block = producer.reserve(COLUMNS, 3)
        with pytest.raises(ColumnNotFoundError, match="rewards"):
            block["reward"]
        block.cancel()

    @pytest.mark.parametrize("columns", [3, None, [1, 2], SampleBatch(x=[1])])
    def test_columns_that_are_not_a_mapping(self, ends: tuple[Producer, Consumer], columns: Any) -> None:
        with pytest.raises(ColumnTypeError, match="columns must be a mapping from names to dtypes"):
            ends[0].reserve(columns, 3)

    @pytest.mark.parametrize("value", [{"camera": "f4"}, "O", "f5", 3, ("f4", "wide"), ("f4", (-1,)), None.__class__])
    def test_columns_without_a_fixed_size(self, ends: tuple[Producer, Consumer], value: Any) -> None:
        with pytest.raises(ColumnTypeError, match="column 'obs' must have a dtype of fixed size"):
            ends[0].reserve({"rewards": "f4", "obs": value}, 3)

    def test_reservations_larger_than_the_arena(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        with pytest.raises(CapacityError, match="1048576"):
            producer.reserve(COLUMNS, 1 << 20)
        block = producer.reserve({"x": "f8"}, 10)
        with pytest.raises(CapacityError, match="extra"):
            block.commit(extra={"y": np.zeros((10, 20_000))})
        block.commit()
        assert len(consumer.recv(timeout_s=1)) == 10


class TestBlockLifetime:
    """The producer owns a block until it is sent, then the consumer owns it."""

    def test_cancelled_blocks_are_free(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        for _ in range(100):
            producer.reserve({"x": "f8"}, 100_000).cancel()
        with pytest.raises(ZeroDivisionError), producer.reserve({"x": "f8"}, 100_000):
            raise ZeroDivisionError
        producer.reserve({"x": "f8"}, 100_000)
        assert all_free(producer)
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0)

    def test_a_cancelled_block_is_retained_by_views(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        block = producer.reserve({"x": "f8"}, 100_000)
        row = block["x"][5:6]
        row[:] = 7
        block.cancel()
        with pytest.raises(ChannelTimeoutError):
            producer.send(SampleBatch(x=np.zeros(100_000)), timeout_s=0)
        assert row == 7
        del row, block
        producer.send(SampleBatch(x=np.zeros(100_000)), timeout_s=0)
        assert consumer.recv(timeout_s=1)["x"].sum() == 0

    def test_sent_arrays_are_read_only_for_the_producer(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        block = producer.reserve({"x": "f8"}, 5)
        array = block["x"]
        array[:] = 1
        block.commit()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
        for use in (block.commit, lambda: block["x"], lambda: list(block), lambda: len(block)):
            with pytest.raises(ReleasedError, match="committed"):
                use()
        block.cancel()
        assert consumer.recv(timeout_s=1)["x"].sum() == 5

    def test_arrays_kept_after_sending_do_not_free_the_block(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        block = producer.reserve({"x": "f8"}, 100_000)
        array = block["x"]
        array[:] = 3
        block.commit()
        del array, block
        gc.collect()
        with pytest.raises(ChannelTimeoutError):
            producer.send(SampleBatch(x=np.zeros(100_000)), timeout_s=0)
        assert consumer.recv(timeout_s=1)["x"].sum() == 300_000

    def test_several_blocks_may_be_sent_in_any_order(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        blocks = [producer.reserve({"x": "i8"}, 10) for _ in range(5)]
        for i in (3, 0, 4, 1, 2):
            blocks[i]["x"][:] = i
        for i in (2, 4, 0):
            blocks[i].commit()
        producer.send(SampleBatch(x=[9]))
        blocks[1].commit()
        blocks[3].cancel()
        assert [consumer.recv(timeout_s=1)["x"][0] for _ in range(5)] == [2, 4, 0, 9, 1]

    def test_a_block_sends_all_rows(self, ends: tuple[Producer, Consumer]) -> None:
        producer, consumer = ends
        with producer.reserve({"x": "i8"}, 4) as block:
            block["x"][:] = 1
        assert consumer.recv(timeout_s=1)["x"].sum() == 4
        with producer.reserve({"x": "i8"}, 4) as block:
            block.cancel()
        with pytest.raises(ChannelTimeoutError):
            consumer.recv(timeout_s=0)

    def test_a_block_can_be_sent_again_after_a_timeout(self) -> None:
        producer, consumer = channel(1 << 16)
        with producer, consumer:
            block = producer.reserve({"x": "i8"}, 5000)
            block["x"][:] = 8
            with pytest.raises(ChannelTimeoutError):
                block.commit(extra={"more": np.zeros((5000, 1))}, timeout_s=0.01)
            block["x"][0] = 9
            block.commit(timeout_s=0)
            assert consumer.recv(timeout_s=1)["x"].sum() == 8 * 5000 + 1

    def test_sending_without_a_consumer_is_an_error(self) -> None:
        producer, consumer = channel(1 << 16)
        block = producer.reserve({"x": "i8"}, 5)
        consumer.close()
        with pytest.raises(ChannelClosedError):
            block.commit()
        block.cancel()
        producer.close()
        with pytest.raises(ChannelClosedError):
            producer.reserve({"x": "i8"}, 5)

    def test_a_producer_that_is_killed_while_it_fills_sends_nothing(self) -> None:
        producer, consumer = channel(1 << 16)

        def work() -> None:
            with producer.reserve({"x": "i8"}, 5) as block:
                block["x"][:] = 1
            block = producer.reserve({"x": "i8"}, 5)
            block["x"][:3] = 2
            os.kill(os.getpid(), signal.SIGKILL)

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        assert consumer.recv(timeout_s=10)["x"].sum() == 5
        with pytest.raises(PeerDiedError):
            consumer.recv(timeout_s=10)
        child.join()
        producer.close()
        consumer.close()


def test_changed_columns_are_validated_again(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    described: list[dict[str, Any]] = [
        {"x": "f8", "y": "f8"},
        {"y": "f8", "x": "f8"},
        {"x": "f8", "y": ("f8", (1,))},
        {"x": "f8", "y": "f4"},
        {"x": "f8", "y": torch.float64},
        {"x": "f8"},
        {"x": np.dtype("f8"), "y": np.float64},
    ]
    order = np.random.default_rng(0).integers(0, len(described), 60).tolist()
    for i in [*range(len(described)), *order]:
        for _ in range(2):
            producer.reserve(described[i], 1).commit()
            batch = consumer.recv(timeout_s=1)
            assert list(batch) == list(described[i])
            for name, value in described[i].items():
                dtype, row_shape = value if isinstance(value, tuple) else (value, ())
                assert batch[name].shape == (1, *row_shape)
                assert batch[name].dtype == dtype


def test_a_description_modified_by_the_caller_is_validated_again(ends: tuple[Producer, Consumer]) -> None:
    producer, consumer = ends
    columns: dict[str, Any] = {"x": "f8", "y": "f8"}
    dtypes = ["f4", "i2", "u1", "f8", "c8"]
    for i in range(50):
        dtype, row_shape = dtypes[i % 5], (i % 3,)
        columns["x"] = (dtype, row_shape)
        for _ in range(2):
            with producer.reserve(columns, 2) as block:
                assert block["x"].dtype == dtype
                assert block["x"].shape == (2, *row_shape)
            assert consumer.recv(timeout_s=1)["x"].dtype == dtype
    del columns["y"]
    assert list(producer.reserve(columns, 2)) == ["x"]
