"""Checksums depend on the bytes in memory only."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from samplebatch.column.checksum import BLOCK_NBYTES, block_checksums, checksum


def random_bytes(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 100, 4095, 4096, 4097, 50_000])
def test_every_byte_changes_the_checksum(nbytes: int) -> None:
    data = random_bytes(nbytes)
    before = checksum(data)
    rng = np.random.default_rng(0)
    for at in [0, nbytes - 1, *rng.integers(0, nbytes, 100).tolist()]:
        data[at] ^= 1 << int(rng.integers(8))
        assert checksum(data) != before
        data[at] ^= 255
        assert checksum(data) != before
        data[:] = random_bytes(nbytes)
    assert checksum(data) == before


@pytest.mark.parametrize("nbytes", [8, 512, 4096, 8192])
def test_the_order_of_bytes_changes_the_checksum(nbytes: int) -> None:
    data = random_bytes(16 * 8192)
    moved = data.copy()
    moved[:nbytes], moved[-nbytes:] = data[-nbytes:], data[:nbytes]
    neighbours = data.copy()
    neighbours[:nbytes], neighbours[nbytes : 2 * nbytes] = data[nbytes : 2 * nbytes], data[:nbytes]
    assert len({checksum(data), checksum(moved), checksum(neighbours)}) == 3


def test_the_length_of_zeros_changes_the_checksum() -> None:
    assert len({checksum(bytes(n)) for n in range(0, 20_000, 7)}) == len(range(0, 20_000, 7))


def test_the_address_does_not_change_the_checksum() -> None:
    data = random_bytes(30_001)
    shifted = np.empty(30_004, np.uint8)[3:]
    shifted[:] = data
    assert checksum(shifted) == checksum(data.tobytes()) == checksum(memoryview(data)) == checksum(data)
    numbers = np.arange(6000.0).reshape(100, 60)
    assert checksum(numbers) == checksum(numbers.tobytes())


def test_short_memory_has_a_crc_checksum() -> None:
    assert checksum(b"") == 0
    assert checksum(b"short") == zlib.crc32(b"short")


@pytest.mark.parametrize("blocks", [0, 1, 9])
def test_blocks_are_checked_separately_on_any_core(blocks: int) -> None:
    data = random_bytes(blocks * BLOCK_NBYTES + 5)
    expected = [checksum(data[start : start + BLOCK_NBYTES]) for start in range(0, len(data), BLOCK_NBYTES)]
    assert block_checksums(data) == expected
