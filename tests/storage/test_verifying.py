"""Files and folders of every format are held against their checksums, from Python and from the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from samplebatch import Batch, Dataset, ReplayBuffer, SampleBatch, verify, write_arrow, write_parquet
from samplebatch.cli import application
from samplebatch.errors import FormatError, StorageError
from tests.storage.flips import COUNT


def steps(n: int = 40) -> SampleBatch:
    return SampleBatch(obs=np.arange(4 * n).reshape(n, 4), who=[f"agent {i}" for i in range(n)])


def filled(**options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(20, **options)
    for i in range(30):
        buffer.add(Batch(obs=i, act=i, rew=1.0, terminated=False, truncated=i % 7 == 6))
    return buffer


def dataset(path: Path) -> None:
    for n in (3, 40, 5):
        Dataset(path).extend(steps(n))


MAKERS: dict[str, Callable[[Path], Any]] = {
    "batch.arrow": lambda path: write_arrow(steps(), path),
    "batch.parquet": lambda path: write_parquet(steps(), path),
    "parts": dataset,
    "buffer.arrow": lambda path: filled().save(path),
    "buffer.hdf5": lambda path: filled().save_hdf5(path),
    "folder": lambda path: filled(storage=path).close(),
}


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.stat().st_size)


def invoke(path: Path) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(application(), ["verify", str(path)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("name", MAKERS)
def test_written_files_verify_without_faults(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    MAKERS[name](path)
    before = {file: file.read_bytes() for file in files_of(path)}
    reports = verify(path)
    assert all(report.has_checksums and not report.fault for report in reports)
    assert len(reports) >= {"parts": 3, "folder": 10}.get(name, 1)
    assert sum(report.nbytes for report in reports) > 100
    assert {file: file.read_bytes() for file in files_of(path)} == before
    code, printed = invoke(path)
    assert code == 0
    assert "intact" in printed
    assert "damaged" not in printed


@pytest.mark.parametrize("name", MAKERS)
def test_any_changed_byte_is_reported_with_its_file(tmp_path: Path, name: str) -> None:
    path, copy = tmp_path / name, tmp_path / f"copy of {name}"
    MAKERS[name](path)
    shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    rng = np.random.default_rng(0)
    # The lock of a folder holds the process that had it last, for errors, and nothing of the data.
    files = [file for file in files_of(copy) if file.name != "lock"]
    unnoticed = []
    for trial in range(COUNT // 3):
        file = files[trial % len(files)]
        data = file.read_bytes()
        at = int(rng.integers(len(data)))
        bad = bytearray(data)
        bad[at] ^= int(rng.integers(1, 256))
        file.write_bytes(bad)
        faults = [report for report in verify(copy) if report.fault]
        # Without the magic of its checksums a file has none, and is otherwise as it was.
        magic = data.rfind(b"SBCHECKS")
        if not faults and not (magic >= 0 and magic <= at < magic + 8):
            unnoticed.append((file.name, at))
        assert all(str(file) in report.fault or str(copy) in report.fault for report in faults)
        file.write_bytes(data)
    # The name of a checksum's key in `status.json` may change: then it has none, and says the same.
    assert [entry for entry in unnoticed if entry[0] != "status.json"] == []
    assert len(unnoticed) < COUNT // 30


def test_the_command_exits_with_1_and_reports_the_first_fault(tmp_path: Path) -> None:
    dataset(tmp_path / "parts")
    parts = sorted((tmp_path / "parts").glob("part-*.parquet"))
    for part in parts[1:]:
        data = bytearray(part.read_bytes())
        data[200] ^= 1
        part.write_bytes(data)
    code, printed = invoke(tmp_path / "parts")
    assert code == 1
    assert f"{parts[0].name} │ Parquet" in printed
    assert printed.count("damaged │") == 2
    assert f"Error: '{parts[1]}' must have the bytes that were written" in printed
    assert printed.endswith("1 more files are damaged")


@pytest.mark.parametrize("name", ["batch.arrow", "batch.parquet", "buffer.hdf5"])
@pytest.mark.parametrize("harm", ["start", "end", "cut", "empty"])
def test_files_with_damaged_starts_or_ends_are_reported(tmp_path: Path, name: str, harm: str) -> None:
    path = tmp_path / name
    MAKERS[name](path)
    data = bytearray(path.read_bytes())
    if harm == "start":
        data[:4] = b"xxxx"
    elif harm == "end":
        data[-300:] = bytes(300)
    path.write_bytes({"cut": data[:-9], "empty": b""}.get(harm, data))
    (report,) = verify(path)
    # HDF5 does not look behind its end, where only checksums are.
    assert bool(report.fault) != (name == "buffer.hdf5" and harm in ("end", "cut") and not report.has_checksums)
    assert invoke(path)[0] == bool(report.fault)


def test_files_without_checksums_are_reported(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    parquet.write_table(table, tmp_path / "x.parquet", write_page_checksum=True)
    for name in ("x.arrow", "x.parquet"):
        (report,) = verify(tmp_path / name)
        assert (report.has_checksums, report.fault) == (False, "")
        code, printed = invoke(tmp_path / name)
        assert code == 0
        assert "readable; it has no checksums" in printed
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[40] ^= 255
    (tmp_path / "x.parquet").write_bytes(data)
    assert "must be an intact Parquet file" in verify(tmp_path / "x.parquet")[0].fault


def test_an_unclosed_folder_has_no_checksums_and_its_copy_is_damaged(tmp_path: Path) -> None:
    buffer = filled(storage=tmp_path / "folder")
    with pytest.raises(StorageError, match="must not be open elsewhere"):
        verify(tmp_path / "folder")
    shutil.copytree(tmp_path / "folder", tmp_path / "copy")
    buffer._journal.folder._abandon("crashed")
    (report,) = verify(tmp_path / "folder")
    assert (report.has_checksums, report.fault) == (False, "")
    (report,) = verify(tmp_path / "copy")
    assert "it was copied without being closed" in report.fault
    assert len(ReplayBuffer.open(tmp_path / "folder")) == 20


def test_files_of_other_formats_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("about batches")
    with pytest.raises(FormatError, match=r"thesis\.tex' must be an Arrow, Parquet or HDF5 file"):
        verify(tmp_path / "thesis.tex")
    with pytest.raises(FormatError, match="must be the folder of a dataset or of a replay buffer, got another"):
        verify(tmp_path)
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "nowhere")
    assert invoke(tmp_path / "thesis.tex")[0] == invoke(tmp_path / "nowhere")[0] == 2
