"""Arrow files: round trips by memory mapping, rejection of damaged files, and killed writers."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch, load, read_arrow, write_arrow
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import CapacityError, FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.storage.files import check_writable
from samplebatch.storage.tables.arrow import arrow_writer, open_arrow
from samplebatch.storage.tables.batches import to_table


def steps(n: int = 6) -> SampleBatch:
    return SampleBatch(
        obs={"camera": np.arange(4 * n, dtype=np.uint8).reshape(n, 2, 2), "arm": np.arange(n) / 7},
        done=np.arange(n) % 2 == 0,
        hit=np.arange(2 * n).reshape(n, 2) % 3 == 0,
        half=np.arange(n).astype(np.float16),
        when=np.arange(n).astype("M8[ms]"),
        phase=np.arange(n) * 1j,
        infos=[{"hit": bool(i % 2), "at": [i] * i} for i in range(n)],
        who=[f"agent_{i}" for i in range(n)],
    )


def recurrent() -> SampleBatch:
    return SampleBatch(obs=np.arange(6).reshape(6, 1), state_in_0=np.zeros((3, 2)), seq_lens=[1, 2, 3])


BATCHES: dict[str, Any] = {
    "flat": steps,
    "slice": lambda: steps()[1:4],
    "no rows": lambda: steps()[:0],
    "recurrent": recurrent,
    "padded": lambda: recurrent().right_zero_pad(4),
    "no columns": SampleBatch,
    "agents": lambda: MultiAgentBatch({"left": steps(3), "right": steps(5)}, 5),
    "agents that differ": lambda: MultiAgentBatch(
        {"a": SampleBatch(obs=[1.0]), "b": SampleBatch(obs=[[1, 2]], x=[1])}, 1
    ),
    "no agents": lambda: MultiAgentBatch({}, 3),
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_restored_exactly(tmp_path: Path, name: str, mapped: bool) -> None:
    batch = BATCHES[name]()
    write_arrow(batch, tmp_path / "batch.arrow")
    back = read_arrow(tmp_path / "batch.arrow", memory_map=mapped)
    assert type(back) is type(batch)
    assert back == batch
    assert os.listdir(tmp_path) == ["batch.arrow"]


def test_columns_are_in_the_mapped_file_and_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    n = 200_000
    write_arrow(
        MultiAgentBatch({"a": SampleBatch(obs=np.ones((n, 4), "f4")), "b": SampleBatch(obs=np.ones((n, 4), "f4"))}, n),
        path,
    )
    before = pa.total_allocated_bytes()
    batch = read_arrow(path)
    assert pa.total_allocated_bytes() - before < 100_000
    for policy in "ab":
        column = batch[policy]["obs"]
        assert not column.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 2
        assert _lies_in(path, column)


def _lies_in(path: Path, column: Any) -> bool:
    return any(
        int(start, 16) <= column.ctypes.data < int(stop, 16) and line.endswith(str(path))
        for line in Path("/proc/self/maps").read_text().splitlines()
        for start, stop in [line.split()[0].split("-")]
    )


def test_selected_columns_are_in_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(SampleBatch(obs=np.ones((1000, 4), "f4"), rewards=np.arange(1000.0)), path)
    rewards = load(path, columns=["rewards"])["rewards"]
    assert _lies_in(path, rewards)
    assert rewards.tolist() == list(range(1000))


def test_rows_of_a_compressed_file_are_counted_without_decompressing(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    table = SampleBatch(a=np.zeros(1 << 20)).to_arrow()
    with arrow_writer(path, table.schema, "zstd") as writer:
        writer.write_table(table, max_chunksize=1 << 19)
    pool, default = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        file, _ = open_arrow(path)
        assert file.group_rows == [1 << 19, 1 << 19]
    finally:
        pa.set_memory_pool(default)
    assert pool.max_memory() < 1 << 16


def test_a_mapped_batch_remains_valid_if_its_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(SampleBatch(a=[1, 2, 3]), path)
    old = read_arrow(path)
    write_arrow(SampleBatch(a=[9]), path)
    assert old["a"].tolist() == [1, 2, 3]
    assert read_arrow(path)["a"].tolist() == [9]


def test_other_readers_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(MultiAgentBatch({"a": SampleBatch(t=[0, 1]), "b": SampleBatch(t=[2])}, 2), path)
    table = pa.ipc.open_file(str(path)).read_all()
    assert table.column("policy_id").to_pylist() == ["a", "a", "b"]
    assert table.column("t").to_pylist() == [0, 1, 2]


def test_a_file_truncated_anywhere_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(MultiAgentBatch({"a": steps(), "b": recurrent()}, 6), path)
    data = path.read_bytes()
    for length in [*range(0, 64), *range(64, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"batch\.arrow"):
            read_arrow(path)


def test_a_damaged_file_is_rejected_or_decoded_safely(tmp_path: Path) -> None:
    path = tmp_path / "batch.arrow"
    write_arrow(steps(), path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        bad = bytearray(data)
        for at in rng.integers(8, len(data), 4):
            bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            batch = read_arrow(path)
        except SampleBatchError:
            refused += 1
        else:
            # Damage within the values themselves cannot be told from values.
            repr(batch), str(batch)
    assert refused > 10


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1 not arrow", b"ARROW1", b"ARROW1\0\0" + bytes(100), pickle.dumps({"a": 1})],
)
def test_a_file_of_another_format_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.arrow"):
        read_arrow(path)


@pytest.mark.parametrize(
    "about", [None, b"{", b"[]", b'{"version": 1}', b'{"version": 99}', b'{"version": 1, "type": "X"}']
)
def test_an_arrow_table_without_batch_metadata_is_rejected(tmp_path: Path, about: bytes | None) -> None:
    table = pa.table({"a": [1, 2]})
    if about is not None:
        table = table.replace_schema_metadata({b"samplebatch": about})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError):
        read_arrow(tmp_path / "x.arrow")


def test_a_file_without_the_rows_it_counts_is_rejected(tmp_path: Path) -> None:
    table = MultiAgentBatch({"a": SampleBatch(t=[0, 1]), "b": SampleBatch(t=[2])}, 2).to_arrow().slice(0, 2)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError):
        read_arrow(tmp_path / "x.arrow")


class Strange:
    """Object that no Arrow type can represent."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strange)

    __hash__ = None


def test_pickled_objects_are_unpickled_only_if_allowed(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_arrow(SampleBatch(a=[1], infos=[{"x": {1, 2}}]), path)
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        read_arrow(path)
    assert list(read_arrow(path, allow_pickle=True)["infos"]) == [{"x": {1, 2}}]


def test_missing_files_and_folders_are_reported(tmp_path: Path) -> None:
    batch = SampleBatch(a=[1])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_arrow(tmp_path / "nowhere.arrow")
    for write in (lambda path: write_arrow(batch, path), check_writable):
        with pytest.raises(FileNotFoundError, match=r"no '.*missing'; create it first"):
            write(tmp_path / "missing" / "x.arrow")
        with pytest.raises(IsADirectoryError, match="folder"):
            write(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mapped", [True, False])
def test_the_error_for_a_missing_file_contains_its_name(tmp_path: Path, mapped: bool) -> None:
    with pytest.raises(FileNotFoundError, match="No such file") as raised:
        load(tmp_path / "none.arrow", memory_map=mapped)
    assert raised.value.filename == str(tmp_path / "none.arrow")
    with pytest.raises(IsADirectoryError):
        read_arrow(tmp_path, memory_map=mapped)


def test_checking_write_access_does_not_change_files(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    check_writable(path)
    assert os.listdir(tmp_path) == []
    write_arrow(SampleBatch(a=[1]), path)
    check_writable(path)
    assert read_arrow(path)["a"].tolist() == [1]


def test_saving_to_a_link_writes_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "real.arrow").touch()
    (tmp_path / "link.arrow").symlink_to("real.arrow")
    write_arrow(SampleBatch(a=[1]), tmp_path / "link.arrow")
    assert (tmp_path / "link.arrow").is_symlink()
    assert read_arrow(tmp_path / "real.arrow")["a"].tolist() == [1]


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "x.arrow"
    write_arrow(SampleBatch(a=[1]), path)

    class Failing(SampleBatch):
        def to_arrow(self) -> Any:
            table = super().to_arrow()

            class Torn:
                schema = table.schema
                get_total_buffer_size = staticmethod(lambda: nbytes)

            return Torn()

    with pytest.raises(TypeError):
        write_arrow(Failing(a=[2]), path)
    assert os.listdir(tmp_path) == ["x.arrow"]
    assert read_arrow(path)["a"].tolist() == [1]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_small_file_written_at_once_equals_a_streamed_file(tmp_path: Path, compression: str) -> None:
    batch = SampleBatch(obs=np.arange(600.0).reshape(100, 6), done=np.arange(100) % 9 == 8, who=["left", "right"] * 50)
    write_arrow(batch, tmp_path / "small.arrow", compression=compression)
    with arrow_writer(tmp_path / "streamed.arrow", to_table(batch).schema, compression) as writer:
        writer.write_table(to_table(batch))
    assert (tmp_path / "small.arrow").read_bytes() == (tmp_path / "streamed.arrow").read_bytes()
    assert load(tmp_path / "small.arrow", verify=True) == batch


def without_blocks(error: int) -> Any:
    def posix_fallocate(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    return posix_fallocate


@pytest.mark.parametrize(("rows", "durable"), [(10, False), (200_000, True), (200_000, False)])
def test_reserved_blocks_are_not_part_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, durable: bool
) -> None:
    batch = SampleBatch(obs=np.arange(6.0 * rows).reshape(rows, 6), t=np.arange(rows))
    write_arrow(batch, tmp_path / "reserved.arrow", durable=durable)
    monkeypatch.setattr(os, "posix_fallocate", without_blocks(errno.EOPNOTSUPP))
    write_arrow(batch, tmp_path / "found.arrow", durable=durable)
    assert (tmp_path / "reserved.arrow").read_bytes() == (tmp_path / "found.arrow").read_bytes()
    assert load(tmp_path / "reserved.arrow", verify=True) == batch


@pytest.mark.parametrize(("rows", "durable"), [(10, False), (200_000, True)])
def test_a_full_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, durable: bool
) -> None:
    path = tmp_path / "x.arrow"
    write_arrow(SampleBatch(a=[1]), path)
    monkeypatch.setattr(os, "posix_fallocate", without_blocks(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        write_arrow(SampleBatch(a=np.zeros((rows, 6))), path, durable=durable)
    assert os.listdir(tmp_path) == ["x.arrow"]
    assert read_arrow(path)["a"].tolist() == [1]


WRITER = """
import sys
import numpy as np
from samplebatch import SampleBatch, write_arrow
path, i = sys.argv[1], 0
while True:
    i += 1
    write_arrow(SampleBatch(a=np.full(500_000, i), b=np.full(500_000, i)), path)
    print(i, flush=True)
"""


def test_a_killed_writer_leaves_a_complete_file(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    rng = np.random.default_rng()
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(float(rng.uniform(0, 0.05)))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        batch = read_arrow(path)
        assert len(batch) == 500_000
        assert len(np.unique(np.concatenate([batch["a"], batch["b"]]))) == 1


@pytest.mark.parametrize(("column", "filters"), [("policy_id", [("obs", ">=", 0)]), ("words", [("words", "==", "up")])])
def test_filters_reject_strings_with_invalid_offsets(tmp_path: Path, column: str, filters: list[Any]) -> None:
    words = SampleBatch(obs=[0, 1], words=["up", "down"])
    table = MultiAgentBatch({"one": words, "two": words}, 2).to_arrow()
    offsets = pa.py_buffer(np.array([0, 9, 6, 6, 6], np.int32))
    damaged: Any = pa.StringArray.from_buffers(4, offsets, pa.py_buffer(b"onetwo"))
    if column == "policy_id":
        damaged = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, 1], pa.int32()), damaged, safe=False)
    position = table.schema.get_field_index(column)
    table = table.set_column(position, table.schema.field(column).with_type(damaged.type), damaged)
    path = tmp_path / "batch.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError, match=r"must be intact, got damaged data.* out of bounds: 9 > 6"):
        load(path, filters=filters)


def long_rows() -> SampleBatch:
    return SampleBatch(
        ids=[np.arange(i % 5) for i in range(40)],
        boxes=[np.full((i % 3, 2), i, np.int16) for i in range(40)],
        image=np.arange(40 * 6, dtype=np.uint8).reshape(40, 2, 3),
        phase=np.arange(80).reshape(40, 2) * 1j,
        infos=[{"at": [i] * (i % 4)} for i in range(40)],
        t=np.arange(40),
    )


@pytest.mark.parametrize("limit", [6, 12, 50, 1000])
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_columns_longer_than_a_record_batch_are_written_in_several(
    limit: int, compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samplebatch.storage.tables.arrow.MAX_LENGTH", limit)
    path = tmp_path / "rows.arrow"
    for batch in (long_rows(), long_rows()[3:-2], MultiAgentBatch({"a": long_rows(), "b": long_rows()[:7]}, 40)):
        batch.save(path, compression=compression)
        assert load(path) == batch
        with pa.memory_map(str(path)) as source:
            parts = pa.ipc.open_file(source)
            sizes = [parts.get_batch(i).num_rows for i in range(parts.num_record_batches)]
            longest = max(len(parts.get_batch(i).column("ids").flatten()) for i in range(len(sizes)))
        assert sum(sizes) == len(batch) if isinstance(batch, SampleBatch) else True
        assert longest <= limit
        assert (len(sizes) > 1) == (limit < 1000 or isinstance(batch, MultiAgentBatch))


def test_a_row_longer_than_a_record_batch_is_rejected_with_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samplebatch.storage.tables.arrow.MAX_LENGTH", 8)
    with pytest.raises(CapacityError, match=r"column 'ids' must have rows of at most 8 elements .*, got 9"):
        SampleBatch(ids=[np.arange(9), np.arange(2)]).save(tmp_path / "rows.arrow")
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_ragged_columns_and_arrays_of_more_than_2_31_elements_are_saved(tmp_path: Path) -> None:
    count, path = (1 << 31) + 64, tmp_path / "rows.arrow"
    elements = np.zeros(count, np.int8)
    elements[-1] = 7
    offsets = np.array([0, count // 2, count - 3, count])
    for batch in (SampleBatch(a=RaggedColumn(elements, offsets)), SampleBatch(a=elements.reshape(64, -1))):
        batch.save(path, durable=False)
        read = load(path)
        assert (read.column("a").kind, len(read)) == (batch.column("a").kind, len(batch))
        assert read["a"][len(read) - 1].tolist()[-3:] == [0, 0, 7]
        del read


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(0, 40),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    codec=st.sampled_from([None, "lz4"]),
)
def test_small_files_have_the_same_layout_as_large_ones(
    tmp_path: Path, n: int, widths: list[int], codec: str | None
) -> None:
    columns = {f"x{i}": np.arange(n * width).reshape(n, width) for i, width in enumerate(widths)}
    batch = SampleBatch(columns, who=["a"] * n)
    write_arrow(batch, tmp_path / "small.arrow", compression=codec)
    table = to_table(batch)
    with arrow_writer(tmp_path / "large.arrow", table.schema, codec or "none", nbytes=table.nbytes) as writer:
        writer.write_table(table)
    assert (tmp_path / "small.arrow").read_bytes() == (tmp_path / "large.arrow").read_bytes()
