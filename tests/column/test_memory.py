from __future__ import annotations

import gc
import itertools
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from samplebatch.column import memory

DTYPES = [np.dtype(code) for code in ("?", "u1", "f2", "f4", "f8", "c16", "S5", "U3", "M8[ns]", "m8[D]")]
SHAPES = [(0,), (1,), (7,), (5, 3), (4, 0), (0, 4), (2, 3, 5)]


@pytest.mark.parametrize("make", [memory.empty, memory.zeros])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_aligned_and_writable(make, dtype):
    for shape in [*SHAPES, (100_000,), (3, 8191)]:
        array = make(shape, dtype)
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % memory.ALIGNMENT == 0
        assert array.flags.c_contiguous
        assert array.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_equals_numpy_zeros_in_reused_memory(dtype):
    dirty = memory.empty((64, 64), dtype)
    dirty.reshape(-1).view(np.uint8).fill(0xA5)
    del dirty
    assert (memory.zeros((64, 64), dtype) == np.zeros((64, 64), dtype)).all()


FREE_AND_ALLOCATE = """
import gc
import sys
import numpy as np
from samplebatch.column import memory
dtype, nbytes = np.dtype("u1"), int(sys.argv[1])
block = memory.empty((nbytes,), dtype)
first = block.ctypes.data
del block
gc.collect()
addresses = set()
for _ in range(5):
    again = memory.empty((nbytes,), dtype)
    addresses.add(again.ctypes.data)
    del again
assert addresses == {first}, (first, addresses)
"""


@pytest.mark.parametrize("nbytes", [16 << 20, 64 << 20])
def test_a_freed_block_is_reused(nbytes):
    if nbytes >= 32 << 20 and int(pa.__version__.partition(".")[0]) < 21:
        pytest.skip("the mimalloc of pyarrow before 21 gives such blocks back to the system")
    # Its own process: blocks and threads that other tests left behind compete for the same addresses.
    subprocess.run([sys.executable, "-c", FREE_AND_ALLOCATE, str(nbytes)], check=True, timeout=120)


def test_copies_of_a_column_reuse_pages():
    source = np.arange(1 << 20)
    copy = memory.copy_of(source)
    first = copy.ctypes.data
    del copy
    assert memory.copy_of(source).ctypes.data == first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_of_any_layout_is_contiguous_and_equal(dtype):
    source = np.arange(60).astype("i8").view("u1")[: 12 * 1].astype(dtype) if dtype.kind in "SU" else None
    source = np.arange(60).astype(dtype) if source is None else np.resize(source, 60)
    source = source.reshape(3, 4, 5)
    for layout in (source, source[::-1], source[:, ::2], source.T, np.asfortranarray(source), source[:0]):
        copy = memory.copy_of(layout)
        assert copy.flags.c_contiguous
        assert not np.shares_memory(copy, source)
        assert copy.dtype == dtype
        assert np.array_equal(copy, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_buffers_share_memory_and_round_trip(dtype, shape):
    array = memory.zeros(shape, dtype)
    view = memory.as_bytes(array)
    assert view.nbytes == array.nbytes
    back = memory.as_array(memory.as_buffer(array), dtype, shape)
    assert np.shares_memory(back, array) == bool(array.nbytes)
    assert np.array_equal(back, array)


def test_a_buffer_keeps_its_array_alive():
    buffer = memory.as_buffer(np.arange(1000))
    gc.collect()
    assert np.frombuffer(buffer, np.int64).sum() == 499_500


def test_read_only_memory_gives_read_only_arrays():
    source = np.arange(10)
    source.flags.writeable = False
    assert not memory.as_array(memory.as_buffer(source), source.dtype, (10,)).flags.writeable
    assert memory.copy_of(source).flags.writeable


def test_an_unaligned_buffer_is_copied_into_aligned_memory():
    raw = memoryview(bytearray(81))[1:]
    array = memory.as_array(raw, np.dtype("f8"), (10,))
    assert array.flags.aligned
    assert not np.shares_memory(array, np.frombuffer(raw, "u1"))


@pytest.mark.parametrize(("have", "need"), [(0, 1), (79, 10), (8, 2)])
def test_a_buffer_that_is_too_short_is_rejected(have, need):
    with pytest.raises((ValueError, TypeError)):
        memory.as_array(bytes(have), np.dtype("f8"), (need,))


def test_the_pool_is_mimalloc_if_pyarrow_has_it():
    backend = "mimalloc" if "mimalloc" in pa.supported_memory_backends() else pa.default_memory_pool().backend_name
    pool = {"mimalloc": pa.mimalloc_memory_pool}.get(backend, pa.default_memory_pool)()
    before = pool.bytes_allocated()
    stored = [memory.empty((extent,), np.dtype("f8")) for extent in itertools.repeat(1000, 10)]
    assert pool.bytes_allocated() - before >= 80_000
    del stored
    assert pool.bytes_allocated() - before < 80_000
