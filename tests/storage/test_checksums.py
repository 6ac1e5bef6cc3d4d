"""Bytes that change in files are noticed: one at a time, a page of zeros, and pages that change places."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import (
    Batch,
    Dataset,
    MultiAgentBatch,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    load,
    read_arrow,
    read_parquet,
    write_arrow,
    write_parquet,
)
from samplebatch.column.checksum import BLOCK_NBYTES as MIB
from samplebatch.column.checksum import block_checksums
from samplebatch.errors import FormatError
from samplebatch.storage.checksums import ARROW, PARQUET, Format, SummedFile
from tests.storage.flips import unnoticed

READERS: dict[str, Callable[[Path], Any]] = {
    "arrow": lambda path: read_arrow(path, memory_map=False),
    "arrow mapped": lambda path: read_arrow(path, verify=True),
    "parquet": read_parquet,
}
FORMATS = {"arrow": ARROW, "arrow mapped": ARROW, "parquet": PARQUET}


def steps(n: int) -> SampleBatch:
    return SampleBatch(
        obs={"camera": np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2), "arm": np.arange(n) / 7},
        done=np.arange(n) % 2 == 0,
        infos=[{"hit": bool(i % 2), "at": [i] * (i % 3)} for i in range(n)],
        who=[f"agent_{i}" for i in range(n)],
    )


def write(batch: SampleBatch | MultiAgentBatch, path: Path, kind: str) -> None:
    (write_parquet if kind == "parquet" else write_arrow)(batch, path)


def without_checksums(path: Path, form: Format) -> None:
    """Remove the checksums of a file, as an older version wrote it."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, len(data) - len(form.magic) - 4)
    footer = data[-length - 4 - len(form.magic) :]
    trailer = data[: -len(footer)][-24:]
    assert trailer[-8:] == b"SBCHECKS"
    path.write_bytes(data[: struct.unpack_from("<Q", trailer)[0]] + footer)


@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("kind", READERS)
def test_a_changed_byte_in_a_batch_file_is_detected(tmp_path: Path, kind: str, agents: bool) -> None:
    path = tmp_path / "batch"
    batch = MultiAgentBatch({"left": steps(30), "right": steps(5)}, 30) if agents else steps(40)
    write(batch, path, kind)
    assert unnoticed(path, lambda: READERS[kind](path), lambda back: back == batch) == []


@pytest.mark.parametrize("kind", READERS)
def test_the_error_contains_the_changed_column(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "batch"
    n = 1 << 20
    numbers = np.random.default_rng(0).integers(0, 256, (3, n), dtype=np.uint8)
    write(SampleBatch(first=numbers[0], second=numbers[1], third=numbers[2]), path, kind)
    data = bytearray(path.read_bytes())
    at = bytes(data).find(numbers[1, : 1 << 16].tobytes()[:64]) if kind != "parquet" else len(data) // 2
    data[at + (n // 2 if kind != "parquet" else 0)] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"got changed bytes between .*, in columns? ('first', )?'second'"):
        READERS[kind](path)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("harm", ["zeros", "moved", "cut and filled"])
def test_lost_and_swapped_pages_are_detected(tmp_path: Path, kind: str, harm: str) -> None:
    path = tmp_path / "batch"
    numbers = np.random.default_rng(0).integers(0, 256, (2, 100_000), dtype=np.uint8)
    write(SampleBatch(a=numbers[0], b=numbers[1]), path, kind)
    data = bytearray(path.read_bytes())
    if harm == "zeros":
        data[16384:20480] = bytes(4096)
    elif harm == "moved":
        data[16384:20480], data[32768:36864] = data[32768:36864], data[16384:20480]
    else:
        data[-8192:] = bytes(8192)
    path.write_bytes(data)
    with pytest.raises(FormatError, match="damaged"):
        READERS[kind](path)


def test_only_the_footer_of_a_mapped_file_is_checked_by_default(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(SampleBatch(a=np.arange(1000)), path)
    data = bytearray(path.read_bytes())
    data[bytes(data).find(np.arange(100, 110).tobytes())] ^= 1
    path.write_bytes(data)
    assert read_arrow(path)["a"][100] == 101
    assert read_arrow(path, memory_map=False, verify=False)["a"][100] == 101
    for options in ({"verify": True}, {"memory_map": False}):
        with pytest.raises(FormatError, match=r"got changed bytes between .*, in column 'a'; the file is damaged"):
            read_arrow(path, **options)
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="must have the footer that was written"):
        read_arrow(path)


@pytest.mark.parametrize("kind", READERS)
def test_a_file_without_checksums_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "batch"
    write(steps(7), path, kind)
    without_checksums(path, FORMATS[kind])
    assert READERS[kind](path) == steps(7)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_rewritten_by_another_tool_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "batch"
    write(steps(7), path, kind)
    if kind == "parquet":
        parquet.write_table(parquet.read_table(path), path)
    else:
        table = pa.ipc.open_file(path.read_bytes()).read_all()
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert READERS[kind](path) == steps(7)


def test_a_changed_page_of_a_parquet_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "batch.parquet"
    write_parquet(SampleBatch(a=np.random.default_rng(0).random(1000)), path)
    without_checksums(path, PARQUET)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="damaged"):
        read_parquet(path)


def test_a_changed_byte_in_any_part_of_a_dataset_is_detected(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path / "parts")
    parts = [dataset.extend(steps(n)) for n in (3, 9)]
    full = dataset.read()
    for part in parts:
        assert unnoticed(part, dataset.read, lambda back: back == full, 150) == []


def filled(cls: type[ReplayBuffer], **options: Any) -> ReplayBuffer:
    buffer = cls(9, **options)
    for i in range(13):
        buffer.add(
            Batch(obs={"x": np.full(3, i), "text": f"step {i}"}, act=i, rew=i / 2, terminated=i % 4 == 3,
                  truncated=False, obs_next={"x": np.full(3, i + 1), "text": f"step {i + 1}"}, info={"at": [i]})
        )  # fmt: skip
    return buffer


def content(buffer: ReplayBuffer) -> str:
    """Describe the contents of a buffer, independent of attribute order: rows, rings, sampler and generator."""
    state = buffer.state_dict()
    attributes = sorted(state["own"].items())
    return repr([buffer[:], state["table"]["rings"], state["sampler"], state["generator"], attributes])


@pytest.mark.parametrize("kind", ["plain", "prioritized", "ignoring next"])
def test_a_changed_byte_in_a_buffer_file_is_detected(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "buffer.arrow"
    if kind == "prioritized":
        buffer = filled(PrioritizedReplayBuffer, alpha=0.6, beta=0.4)
    else:
        buffer = filled(ReplayBuffer, ignore_obs_next=kind == "ignoring next")
    buffer.save(path)
    before = content(buffer)
    assert unnoticed(path, lambda: ReplayBuffer.load(path), lambda back: content(back) == before) == []
    without_checksums(path, ARROW)
    assert content(ReplayBuffer.load(path)) == before


@pytest.mark.parametrize("kind", ["plain", "prioritized", "ignoring next"])
def test_a_changed_byte_in_an_hdf5_buffer_file_is_detected(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("h5py")
    path = tmp_path / "buffer.hdf5"
    if kind == "prioritized":
        buffer = filled(PrioritizedReplayBuffer, alpha=0.6, beta=0.4)
    else:
        buffer = filled(ReplayBuffer, ignore_obs_next=kind == "ignoring next")
    buffer.save_hdf5(path)
    before = content(ReplayBuffer.load_hdf5(path))
    assert unnoticed(path, lambda: ReplayBuffer.load_hdf5(path), lambda back: content(back) == before, 150) == []


def test_the_changed_column_of_an_hdf5_file_is_reported_if_checked(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "buffer.hdf5"
    for compression in (None, "gzip"):
        buffer = ReplayBuffer(50)
        for i in range(50):
            buffer.add(Batch(obs={"x": i}, act=0, rew=0.0, terminated=False, truncated=False))
        buffer.save_hdf5(path, compression=compression)
        with h5py.File(path) as file:
            rows = file["_meta/obs/x"].id
            at = rows.get_chunk_info(0).byte_offset if compression else rows.get_offset()
        data = bytearray(path.read_bytes())
        data[at + 8 if not compression else at] ^= 2
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"got changed bytes between .*, in columns? .*'obs\.x'"):
            ReplayBuffer.load_hdf5(path)
        if not compression:
            assert ReplayBuffer.load_hdf5(path, verify=False)[1].obs.x == 3


def test_an_hdf5_file_changed_by_another_tool_is_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "buffer.hdf5"
    filled(ReplayBuffer).save_hdf5(path)
    with h5py.File(path, "r+") as file:
        file["_meta/rew"][0] = 77.0
    assert ReplayBuffer.load_hdf5(path)[0].rew == 77
    filled(ReplayBuffer).save_hdf5(path)
    with h5py.File(path, "r+") as file:
        file["_meta/info/more"] = np.zeros((9, 1000))
    assert len(ReplayBuffer.load_hdf5(path)) == 9


def test_a_buffer_file_is_read_without_a_check_on_request(tmp_path: Path) -> None:
    path = tmp_path / "buffer.arrow"
    buffer = ReplayBuffer(50)
    for i in range(50):
        buffer.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
    buffer.save(path)
    data = bytearray(path.read_bytes())
    data[bytes(data).find(np.arange(20, 30).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"got changed bytes between .*, in columns? .*'obs'"):
        ReplayBuffer.load(path)
    with pytest.raises(FormatError):
        load(path)
    assert ReplayBuffer.load(path, verify=False)[20].obs == 21
    assert load(path, verify=False)[20].obs == 21


@pytest.mark.parametrize("nbytes", [[0], [5], [MIB], [3, 3 * MIB + 7, 0, 11], [2 * MIB - 1, 1]])
def test_checksums_are_computed_while_blocks_are_written(tmp_path: Path, nbytes: list[int]) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "file").open("w+b") as file:
        summed = SummedFile(file)
        written = b""
        for count in nbytes:
            piece = rng.bytes(count)
            assert summed.write(piece) == count
            written += piece
            assert summed.tell() == len(written)
        summed.flush()
        assert (tmp_path / "file").read_bytes() == written
    full = dict(enumerate(block_checksums(written)))
    assert summed.blocks.items() <= full.items()
    if nbytes == [MIB]:
        assert summed.blocks == full


def test_only_blocks_written_in_several_pieces_are_read_again(tmp_path: Path) -> None:
    batch = SampleBatch(obs=np.arange(1 << 20), rewards=np.arange(1 << 20) / 7)
    with mock.patch("samplebatch.storage.checksums.block_checksums", wraps=block_checksums) as summed:
        batch.save(tmp_path / "batch.arrow")
    _, checksums = summed.call_args.args
    assert len(checksums) >= 8
    assert load(tmp_path / "batch.arrow", verify=True) == batch


def test_checksums_of_blocks_exclude_bytes_of_the_footer(tmp_path: Path) -> None:
    names = [f"a column with a name of some length, and the number {number}" for number in range(6000)]
    batch = SampleBatch({name: np.arange(2) for name in names})
    batch.save(tmp_path / "batch.arrow")
    assert load(tmp_path / "batch.arrow", verify=True) == batch
