"""Fast paths for blocks and values of one dtype and shape agree with the general functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.env import stacking
from samplebatch.env.stacking import join_alike, join_blocks, join_steps, stack_rows
from samplebatch.errors import ColumnMismatchError

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
def test_joined_blocks_do_not_share_memory(kind: str) -> None:
    blocks: list[Any] = BLOCKS[kind]
    joined, expected = join_alike("obs", blocks), join_blocks("obs", blocks)
    assert joined.dtype == expected.dtype
    np.testing.assert_array_equal(joined, expected)
    assert joined.flags.writeable
    assert not any(np.shares_memory(joined, block) for block in blocks)


def random_values(rng: np.random.Generator, count: int) -> list[Any]:
    """Draw arrays, mostly of one dtype and shape in C order; other arrays require the general functions."""
    shape = tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist())
    dtype = str(rng.choice(["?", "u1", "i4", "i8", "f4", "f8", "c8", ">f4"]))
    values: list[Any] = []
    for _ in range(count):
        own_shape = shape if rng.random() < 0.97 else (*shape, 1)
        own_dtype = dtype if rng.random() < 0.93 else str(rng.choice(["i8", "f8", "O"]))
        array = rng.integers(0, 100, own_shape).astype(own_dtype)
        values.append(array if rng.random() < 0.9 else np.asfortranarray(array))
    return values


def outcome_of(function: Any, *arguments: Any) -> Any:
    """Return dtype, shape and values of the result, or the error."""
    try:
        array = function(*arguments)
    except ColumnMismatchError as error:
        return str(error)
    listed = [np.asarray(row).tolist() for row in array] if array.dtype == object else array.tolist()
    return array.dtype, array.shape, array.flags.writeable, listed


@pytest.mark.parametrize("seed", range(300))
def test_values_of_one_dtype_and_shape_are_stacked_like_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = random_values(rng, int(rng.integers(1, 9)))
    assert outcome_of(stack_rows, "obs", values) == outcome_of(stacking._stack_leaf, "obs", values)


@pytest.mark.parametrize("seed", range(300))
def test_steps_of_one_dtype_and_shape_are_joined_like_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(stacking, "_MAX_SMALL_NBYTES", int(rng.integers(0, 200)))
    # Steps have blocks of one shape.
    values = random_values(rng, int(rng.integers(1, 9)))
    blocks = [value for value in values if value.shape == values[0].shape]
    assert outcome_of(join_steps, "obs", blocks) == outcome_of(join_blocks, "obs", blocks)
