"""Small HDF5 and buffer files that would require much memory or time are rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, ReplayBuffer
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import CapacityError, FormatError
from samplebatch.storage.foreign.hdf5 import check_heaps
from samplebatch.storage.hdf5 import from_hdf5, to_hdf5

h5py = pytest.importorskip("h5py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bomb.hdf5"


def filled(shape: tuple[int, ...] = (20,), **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(*shape, **options)
    for i in range(5):
        buffer.add(Batch(obs=np.full((8, 8), i), act=0, rew=1.0, terminated=False, truncated=False))
    return buffer


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (1 << 28,), "chunks": (1 << 10,)},
        {"shape": (1 << 28,), "chunks": (1 << 10,), "fillvalue": 7.0},
        {"shape": (1 << 10,), "maxshape": (None,), "chunks": (1 << 28,)},
        {"shape": (1 << 60,), "chunks": (1 << 10,)},
    ],
)
def test_datasets_without_bytes_in_the_file_are_rejected(path: Path, options: dict[str, Any]) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("obs", dtype="f8", **options).attrs["__data_type__"] = "ndarray"
    assert path.stat().st_size < 1 << 14
    with (
        h5py.File(path) as file,
        pytest.raises(CapacityError, match=r"'/obs' must fit into .* for '.*hdf5'.* max_nbytes"),
    ):
        from_hdf5(file)


def test_repeated_strings_are_counted_for_each_occurrence(path: Path) -> None:
    with h5py.File(path, "w") as file:
        words = file.create_dataset("words", (1 << 15,), h5py.string_dtype(), chunks=(1 << 15,), compression="gzip")
        words[0] = "x" * (1 << 14)
    with h5py.File(path) as file:
        assert len(from_hdf5(file)["words"]) == 1 << 15
        with pytest.raises(CapacityError, match="'/words'"):
            from_hdf5(file, max_nbytes=1 << 16)


def test_exponentially_nested_groups_are_rejected(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("a")
        for _ in range(40):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner
    with h5py.File(path) as file, pytest.raises(CapacityError, match="max_nbytes"):
        from_hdf5(file)


def test_values_with_exponential_or_cyclic_nesting_are_rejected(path: Path) -> None:
    shared: Any = [1]
    for _ in range(60):
        shared = [shared, shared]
    loop: list[Any] = []
    loop += [loop, loop]
    for value, why in ((shared, "nested repetitions"), (loop, "must not contain itself")):
        with h5py.File(path, "w") as file:
            to_hdf5({"a": value}, file)
        with h5py.File(path) as file, pytest.raises(FormatError, match=why):
            from_hdf5(file)


@pytest.mark.parametrize("shift", range(8))
def test_heaps_are_found_at_any_byte(path: Path, shift: int) -> None:
    free = bytes(32)
    path.write_bytes(bytes(shift) + b"GCOL\1\0\0\0" + (16 + len(free)).to_bytes(8, "little") + free)
    with pytest.raises(FormatError, match=f"an endless one at {shift}"):
        check_heaps(str(path))


def test_cyclic_heap_objects_are_rejected(path: Path) -> None:
    first = (1).to_bytes(8, "little")
    path.write_bytes(
        b"GCOL\1\0\0\0" + (64).to_bytes(8, "little") + first + (2**64 - 16).to_bytes(8, "little") + bytes(32)
    )
    with pytest.raises(FormatError, match="heaps of strings that end"):
        check_heaps(str(path))


def test_unterminated_heaps_of_strings_are_rejected(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=1).attrs["text"] = "hello"
    check_heaps(str(path))
    data = path.read_bytes()
    heap = data.index(b"GCOL")
    free = data.index(b"\0" * 8, heap + 40)
    path.write_bytes(data[:free] + bytes(16) + data[free + 16 :])
    with pytest.raises(FormatError, match="heaps of strings that end"):
        check_heaps(str(path))


def test_attributes_of_a_damaged_type_are_rejected(path: Path) -> None:
    with h5py.File(path, "w") as file:
        to_hdf5({"inner": Batch(a=1.0)}, file)
    data = path.read_bytes()
    string = data.index(b"\x19\x01")
    path.write_bytes(data[: string + 1] + b"\x7f" + data[string + 2 :])
    # libhdf5 ends the process where it reads one.
    code = f"import h5py; from samplebatch import from_hdf5; from_hdf5(h5py.File({str(path)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "FormatError: attribute '__data_type__' of '/inner' must be numeric or a string" in ended.stderr


def test_a_buffer_with_few_rows_uses_memory_only_for_them(path: Path) -> None:
    buffer = filled((1 << 20,))
    buffer.save_hdf5(path)
    again = ReplayBuffer.load_hdf5(path, max_nbytes=1 << 24)
    assert again.obs.nbytes == 1 << 29
    assert np.array_equal(again[:].obs, buffer[:].obs)
    with pytest.raises(CapacityError, match="max_nbytes"):
        ReplayBuffer.load_hdf5(path, max_nbytes=1 << 10)


def claimed(path: Path, **changes: Any) -> Path:
    """Save a buffer and change the description of its rings."""
    filled().save(path)
    table = pa.ipc.open_file(path).read_all()
    about = json.loads(table.schema.metadata[METADATA_KEY])
    about["rings"] |= changes
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def test_missing_rows_of_a_buffer_file_are_rejected_early(tmp_path: Path) -> None:
    n = 1 << 40
    path = claimed(tmp_path / "a.arrow", maxsizes=[n], sizes=[n], cursors=[0], writes=[n])
    with pytest.raises(FormatError, match=f"must have {n} rows, got a file with 5"):
        ReplayBuffer.load(path)
    with pytest.raises((CapacityError, FormatError)):
        ReplayBuffer.load(claimed(tmp_path / "b.arrow", maxsizes=[1 << 60]))


def test_the_memory_limit_of_a_buffer_file_is_configurable(tmp_path: Path) -> None:
    buffer = ReplayBuffer(20)
    buffer.add(Batch(obs=0, act=0, rew=1.0, terminated=False, truncated=False, info={"text": "x" * 2000}))
    buffer.save(tmp_path / "a.arrow")
    assert len(ReplayBuffer.load(tmp_path / "a.arrow")) == 1
    with pytest.raises(CapacityError, match=r"column 'info.text' must fit into .* pass a larger max_nbytes"):
        ReplayBuffer.load(tmp_path / "a.arrow", max_nbytes=1000)
