"""Blocks of rows that are known to be alike are joined as all others are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.env.stacking import join_alike, join_blocks

BLOCKS = {
    "numbers": [np.arange(4.0), np.arange(4.0) + 9],
    "rows": [np.arange(8, dtype=np.int8).reshape(2, 4)] * 3,
    "large": [np.arange(4096).reshape(2, -1), np.ones((2, 2048), int)],
    "strided": [np.arange(8.0)[::2], np.arange(8.0)[1::2]],
    "columns first": [np.arange(6.0).reshape(2, 3).T] * 2,
    "read-only": [np.frombuffer(b"abcd", np.uint8)] * 2,
    "one": [np.arange(3)],
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_they_are_joined_in_memory_of_their_own(kind: str) -> None:
    blocks: list[Any] = BLOCKS[kind]
    joined, expected = join_alike("obs", blocks), join_blocks("obs", blocks)
    assert joined.dtype == expected.dtype
    np.testing.assert_array_equal(joined, expected)
    assert joined.flags.writeable
    assert not any(np.shares_memory(joined, block) for block in blocks)
