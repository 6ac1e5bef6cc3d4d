"""Memory that changes after validation: the reader gets data or an error and is never killed."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import SampleBatch, channel
from samplebatch.errors import CompressedColumnError
from tests.fuzz.driver import CASES, fuzz
from tests.transport.rewrites import block_of


@pytest.mark.parametrize("target", ["BLOCKS", "FILES"])
def test_rewriting_received_memory_crashes_no_process(target: str) -> None:
    outcomes, faults = fuzz(f"tests.transport.rewrites:{target}", CASES // 10)
    assert not faults, "\n".join([str(dict(outcomes)), *faults])


def test_rewritten_elements_change_and_row_boundaries_do_not() -> None:
    producer, consumer = channel(1 << 18)
    batch = SampleBatch(
        a=np.arange(4), r=[[1, 2], [], [3], [4]], s=[np.ones((2, 1))] * 4, state_in_0=[0, 0], seq_lens=[3, 1]
    )
    with producer, consumer:
        producer.send(batch)
        received = consumer.recv(timeout_s=5)
        block_of(producer, consumer)[:] = 255
        assert received["a"].tolist() == [-1] * 4
        assert received["r"].lengths.tolist() == [2, 0, 1, 1]
        assert [row.tolist() for row in received["r"]] == [[-1, -1], [], [-1], [-1]]
        assert [row.shape for row in received["s"]] == [(2, 1)] * 4
        assert received["seq_lens"].tolist() == [3, 1]
        assert received.to_arrow().column("r").combine_chunks().flatten().offsets.to_pylist() == [0, 2, 2, 3, 4]


def test_blocks_that_change_are_rejected() -> None:
    producer, consumer = channel(1 << 18)
    with producer, consumer:
        producer.send(SampleBatch(a=np.zeros((64, 8))).compress(columns={"a"}))
        received = consumer.recv(timeout_s=5)
        block_of(producer, consumer)[:] = 255
        with pytest.raises(CompressedColumnError):
            received["a"][:].to_numpy()
