"""A folder of Parquet files: parts come back in order, one by one or joined, whatever else lies there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from samplebatch import MultiAgentBatch, ParquetDataset, SampleBatch, concat_samples
from samplebatch.errors import ColumnMismatchError, FormatError, UntrustedPickleError


def fragment(i: int) -> MultiAgentBatch:
    rows = SampleBatch(t=[2 * i, 2 * i + 1], obs=np.full((2, 3), i, np.float32), infos=[{}, {"at": i}])
    return MultiAgentBatch({"a": rows, "b": rows[:1]} if i % 2 else {"a": rows}, 2)


def test_parts_come_back_in_order_one_by_one_or_joined(tmp_path: Path) -> None:
    fragments = [fragment(i) for i in range(12)]
    for half in (fragments[:7], fragments[7:]):
        dataset = ParquetDataset(tmp_path / "steps")
        for part in half:
            dataset.append(part)
    again = ParquetDataset(tmp_path / "steps")
    assert list(again) == fragments
    assert again.read() == concat_samples(fragments)
    assert (len(again), repr(again)) == (12, f"ParquetDataset('{tmp_path}/steps': 12 parts)")


def test_flat_batches_stay_flat(tmp_path: Path) -> None:
    dataset = ParquetDataset(tmp_path)
    dataset.append(SampleBatch(a=[1, 2]))
    dataset.append(SampleBatch(a=[3]))
    assert dataset.read() == SampleBatch(a=[1, 2, 3])
    dataset.append(SampleBatch(b=[3]))
    with pytest.raises(ColumnMismatchError, match="'b'"):
        dataset.read()


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    dataset = ParquetDataset(tmp_path)
    dataset.append(SampleBatch(a=[1]))
    for name in (".part-000001-00000000.parquet.1f.tmp", "notes.txt", "part-x.parquet"):
        (tmp_path / name).write_text("mine")
    assert dataset.read() == SampleBatch(a=[1])
    assert len(os.listdir(tmp_path)) == 4


def test_other_tools_read_the_folder_as_one_table(tmp_path: Path) -> None:
    dataset = ParquetDataset(tmp_path)
    for i in range(3):
        dataset.append(SampleBatch(t=[2 * i, 2 * i + 1], rewards=[0.5, 1.0]))
    table = pyarrow.dataset.dataset(tmp_path, format="parquet").to_table()
    assert sorted(table.column("t").to_pylist()) == list(range(6))


def append_some(folder: Path, who: int) -> None:
    dataset = ParquetDataset(folder)
    for i in range(5):
        dataset.append(SampleBatch(who=[who], i=[i]))


def test_several_processes_append_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_some, args=(tmp_path, who)) for who in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    joined = ParquetDataset(tmp_path).read()
    for who in range(2):
        assert joined["i"][joined["who"] == who].tolist() == list(range(5))


WRITER = """
import sys
import numpy as np
from samplebatch import ParquetDataset, SampleBatch
dataset, i = ParquetDataset(sys.argv[1]), 0
while True:
    dataset.append(SampleBatch(a=np.full(50_000, i), b=np.full(50_000, i)))
    i += 1
    print(i, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_parts(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(3):
        assert writer.stdout.readline()
    time.sleep(0.005)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    parts = list(ParquetDataset(tmp_path))
    assert len(parts) >= 3
    for i, part in enumerate(parts):
        assert len(part) == 50_000
        assert (part["a"] == i).all()
        assert (part["b"] == i).all()


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="must be a folder"):
        ParquetDataset(tmp_path / "file").append(SampleBatch(a=[1]))
    empty = ParquetDataset(tmp_path / "nothing yet")
    assert len(empty) == 0
    with pytest.raises(FileNotFoundError, match="nothing yet"):
        empty.read()
    with pytest.raises(FileNotFoundError, match="missing"):
        ParquetDataset(tmp_path / "missing" / "x").append(SampleBatch(a=[1]))
    strange = ParquetDataset(tmp_path / "strange")
    strange.append(SampleBatch(infos=[{"x": {1}}]))
    with pytest.raises(UntrustedPickleError, match="'infos'"):
        list(strange)
    assert list(ParquetDataset(tmp_path / "strange", allow_pickle=True).read()["infos"]) == [{"x": {1}}]
    (damaged,) = strange.parts()
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(FormatError, match="part-000000"):
        list(strange)
