"""BufferFolder: columns in files with one commit per step, also if the process dies."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch.errors import FormatError, StorageError
from samplebatch.storage.buffers.folder import BufferFolder
from tests.storage.buffer_folder.folder_writer import SLOTS, WIDTHS, create
from tests.storage.buffer_folder.nursery import ROOT, forked, nursery, payload

I8 = np.dtype(np.int64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


def filled(path: Path) -> BufferFolder:
    """Create a folder with one column of three rows; the last step has overwritten a row."""
    folder = BufferFolder.create(path, {"size": 3}, b"0")
    folder.allocate("a", (3,), I8)[:] = 1, 2, 3
    folder.note({"kinds": ["dense"]})
    folder.commit(b"1")
    folder.begin([(["a"], 0)])
    folder.columns["a"][0] = 4
    folder.commit(b"2")
    return folder


def crash(folder: BufferFolder) -> None:
    """Release a folder without closing it, like a process that dies."""
    folder._abandon("crashed")


def test_a_folder_is_restored_exactly(path: Path) -> None:
    filled(path).close()
    folder = BufferFolder.open(path)
    assert (folder.about, folder.state, folder.notes) == ({"size": 3}, b"2", {"kinds": ["dense"]})
    assert folder.columns["a"].tolist() == [4, 2, 3]
    folder.close()


def test_columns_of_every_dtype_are_restored(path: Path) -> None:
    folder = BufferFolder.create(path, {}, b"")
    dtypes = ["?", "i1", "u2", "f2", "f8", "c16", "M8[ns]", "m8[s]"]
    for dtype in dtypes:
        folder.allocate(dtype, (2, 3), np.dtype(dtype))[1] = np.arange(3).astype(dtype)
    folder.allocate("empty", (0, 5), I8)
    folder.commit(b"")
    folder.close()
    folder = BufferFolder.open(path)
    for dtype in dtypes:
        assert folder.columns[dtype].dtype == dtype
        assert np.array_equal(folder.columns[dtype], np.stack([np.zeros(3), np.arange(3)]).astype(dtype))
    assert folder.columns["empty"].shape == (0, 5)
    folder.close()


def test_a_step_that_was_not_committed_is_undone(path: Path) -> None:
    folder = filled(path)
    folder.begin([(["a"], np.array([2, 1])), (["a"], slice(0, 1))])
    folder.columns["a"][:] = 7, 8, 9
    crash(folder)
    for _ in range(2):
        folder = BufferFolder.open(path)
        assert (folder.state, folder.columns["a"].tolist()) == (b"2", [4, 2, 3])
        crash(folder)


def test_an_interrupted_recovery_is_completed(path: Path) -> None:
    folder = filled(path)
    folder.begin([(["a"], slice(0, 3))])
    folder.columns["a"][:] = 7, 8, 9
    folder.columns["a"][1] = 2
    crash(folder)
    assert BufferFolder.open(path).columns["a"].tolist() == [4, 2, 3]


def test_a_failed_step_is_undone_before_the_next_one(path: Path) -> None:
    folder = filled(path)
    folder.begin([(["a"], 1)])
    folder.columns["a"][1] = 8
    folder.begin([(["a"], 2)])
    assert folder.columns["a"].tolist() == [4, 2, 3]
    folder.columns["a"][2] = 9
    crash(folder)
    folder = BufferFolder.open(path)
    assert folder.columns["a"].tolist() == [4, 2, 3]
    folder.begin([(["a"], 1)])
    folder.columns["a"][1] = 8
    folder.close()
    assert BufferFolder.open(path).columns["a"].tolist() == [4, 2, 3]


def test_columns_of_a_step_that_was_not_committed_are_removed(path: Path) -> None:
    folder = filled(path)
    folder.allocate("b", (3,), I8)
    folder.allocate("a", (5,), I8)
    folder.note("other")
    crash(folder)
    folder = BufferFolder.open(path)
    assert (list(folder.columns), folder.columns["a"].tolist(), folder.notes) == (
        ["a"],
        [4, 2, 3],
        {"kinds": ["dense"]},
    )
    assert sorted(entry.name for entry in path.glob("*.column")) == ["0.column"]
    folder.close()


def test_a_column_can_grow(path: Path) -> None:
    folder = filled(path)
    old = folder.columns["a"]
    folder.allocate("a", (5,), I8)[:3] = old
    folder.begin([(["a"], slice(0, 5))])
    folder.columns["a"][4] = 5
    folder.commit(b"3")
    assert len(list(path.glob("*.column"))) == 1
    assert old.tolist() == [4, 2, 3]
    folder.close()
    assert BufferFolder.open(path).columns["a"].tolist() == [4, 2, 3, 0, 5]


def test_a_torn_commit_keeps_the_previous_one(path: Path) -> None:
    folder = filled(path)
    folder.begin([(["a"], slice(0, 3))])
    folder.columns["a"][:] = 7, 8, 9
    folder.commit(b"3")
    crash(folder)
    newest = max(path.glob("commit.*"), key=lambda file: file.read_bytes()[16:24])
    data = bytearray(newest.read_bytes())
    data[40] ^= 1
    newest.write_bytes(data)
    folder = BufferFolder.open(path)
    assert (folder.state, folder.columns["a"].tolist()) == (b"2", [4, 2, 3])
    folder.close()


def unchecked(file: Path) -> str:
    """Return the JSON of a file without its checksum."""
    plain = json.loads(file.read_text())
    del plain["checksum"]
    return json.dumps(plain)


def damage_size(path: Path) -> None:
    os.truncate(path / "0.column", 23)


def damage_missing(path: Path) -> None:
    (path / "0.column").unlink()


def damage_commits(path: Path) -> None:
    for file in path.glob("commit.*"):
        file.write_bytes(file.read_bytes().replace(b"SB", b"XX"))


def damage_one_commit(path: Path) -> None:
    """Remove the commit that precedes the intent."""
    newest = max(path.glob("commit.*"), key=lambda file: file.read_bytes()[16:24])
    newest.write_bytes(bytes(100))


def damage_version(path: Path) -> None:
    (path / "buffer.json").write_text('{"version": 99, "about": {}}')


def damage_commit_version(path: Path) -> None:
    for file in path.glob("commit.*"):
        data = bytearray(file.read_bytes())
        data[8] = 99
        file.write_bytes(data)


def damage_about(path: Path) -> None:
    (path / "buffer.json").write_text('{"version": 1')


def damage_about_kind(path: Path) -> None:
    (path / "buffer.json").write_text('{"version": 1, "about": 3}')


def damage_layout(path: Path) -> None:
    next(path.glob("layout.*")).write_text('{"columns": [1]}')


def damage_no_object(path: Path) -> None:
    next(path.glob("layout.*")).write_text("[]")


def damage_dtype(path: Path) -> None:
    (file,) = path.glob("layout.*")
    file.write_text(unchecked(file).replace("<i8", "|O"))


def damage_shape(path: Path) -> None:
    (file,) = path.glob("layout.*")
    file.write_text(unchecked(file).replace("[3]", "[-3]"))


def damage_no_intent(path: Path) -> None:
    (path / "intent").unlink()


def damage_undo(path: Path) -> None:
    os.truncate(path / "undo", 3)


@pytest.mark.parametrize(
    ("damage", "actual"),
    [
        (damage_size, "must have the 24 bytes of column 'a', got 23"),
        (damage_missing, "must contain column 'a', got no file"),
        (damage_commits, "must have a valid commit, got none"),
        (damage_one_commit, "must have the commit of step 3, got step 2"),
        (damage_version, "must have version 1 or 2, got version 99"),
        (damage_commit_version, "must have version 1, got version 99"),
        (damage_about, "must be an intact file of a buffer"),
        (damage_about_kind, "must describe a buffer in a dict, got"),
        (damage_layout, "must have a dict of columns, got"),
        (damage_no_object, "must contain a JSON object, got a"),
        (damage_dtype, "must describe column 'a':"),
        (damage_shape, "must describe column 'a':"),
        (damage_no_intent, "intent' must exist, got no file"),
        (damage_undo, "must have 8 overwritten bytes, got 3"),
    ],
)
def test_damage_is_detected_on_opening(path: Path, damage: Any, actual: str) -> None:
    folder = filled(path)
    folder.begin([(["a"], 2)])
    crash(folder)
    damage(path)
    with pytest.raises(FormatError, match=actual):
        BufferFolder.open(path)
    # What could not be opened is not locked either.
    with pytest.raises(FormatError):
        BufferFolder.open(path)


def test_a_folder_can_be_opened_once_at_a_time(path: Path) -> None:
    folder = filled(path)
    with pytest.raises(StorageError, match="must not be open elsewhere"):
        BufferFolder.open(path)
    with pytest.raises(StorageError, match="got an existing buffer; open it with open"):
        BufferFolder.create(path, {}, b"")
    folder.close()
    BufferFolder.open(path).close()


def test_a_garbage_collected_folder_is_unlocked(path: Path) -> None:
    filled(path)
    gc.collect()
    BufferFolder.open(path).close()


def test_another_process_is_rejected_until_the_first_has_ended(path: Path) -> None:
    create(str(path))
    imported = "from samplebatch.storage.buffers.folder import BufferFolder"
    code = f"{imported}\nBufferFolder.open({str(path)!r})\nprint('opened')\n"
    with nursery("tests.storage.buffer_folder.folder_writer") as children:
        pid = children.start("write", str(path))
        other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert f"must not be open elsewhere, and process {pid} has it open" in other.stderr
        assert children.kill(pid) == 9
    BufferFolder.open(path).close()


def test_a_forked_child_reads_but_neither_writes_nor_locks(path: Path) -> None:
    folder = filled(path)
    pid = forked()
    if not pid:
        try:
            ok = folder.columns["a"].tolist() == [4, 2, 3]
            try:
                folder.begin([])
                ok = False
            except StorageError as error:
                ok = ok and "this one was forked from it" in str(error)
            os.read(0, 0)
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    folder.begin([])
    folder.commit(b"3")
    folder.close()


def test_a_closed_folder_rejects_changes(path: Path) -> None:
    folder = filled(path)
    values = folder.columns["a"]
    folder.close()
    folder.close()
    assert folder.closed
    for call in (
        lambda: folder.begin([]),
        lambda: folder.commit(b""),
        folder.flush,
        lambda: folder.allocate("b", (1,), I8),
    ):
        with pytest.raises(StorageError, match="must be open to be written to: it was closed"):
            call()
    assert values.tolist() == [4, 2, 3]


def test_only_new_folders_and_buffer_folders_are_accepted(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"must be the folder of a buffer, got one without 'buffer\.json'"):
        BufferFolder.open(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StorageError, match=r"must be a new or empty folder, got one with 'thesis\.tex'"):
        BufferFolder.create(tmp_path, {}, b"")
    with pytest.raises(FileExistsError):
        BufferFolder.create(tmp_path / "thesis.tex", {}, b"")
    with pytest.raises(FileNotFoundError):
        BufferFolder.create(tmp_path / "no" / "such", {}, b"")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_incompletely_created_folder_is_created_again(path: Path) -> None:
    filled(path).close()
    for name in ("buffer.json", "0.column", "layout.1.json"):
        (path / name).unlink()
    (path / "buffer.json.tmp").write_text("{")
    folder = BufferFolder.create(path, {"size": 1}, b"new")
    assert (folder.columns, folder.state) == ({}, b"new")
    folder.close()
    assert BufferFolder.open(path).state == b"new"


def test_a_full_disk_raises_an_error_and_leaves_no_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(path)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="column 'b' must have room for 800 bytes on the disk") as actual:
            folder.allocate("b", (100,), I8)
    assert actual.value.errno == errno.ENOSPC
    assert not (path / "1.column").exists()
    folder.commit(b"3")
    assert list(folder.columns) == ["a"]


def test_a_file_size_limit_raises_an_error_instead_of_a_signal(path: Path) -> None:
    code = (
        "import resource, signal, sys, numpy as np\n"
        "from samplebatch.storage.buffers.folder import BufferFolder\n"
        f"folder = BufferFolder.create({str(path)!r}, {{}}, b'')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    folder.allocate('obs', (1 << 20,), np.dtype('f8'))\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "column 'obs' must have room for 8388608 bytes on the disk" in done.stdout, done.stderr
    assert done.returncode == 0


def test_rows_without_an_undo_copy_are_not_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(path)

    def full(fd: int, parts: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StorageError, match="must have room for the rows that a step overwrites"):
            folder.begin([(["a"], 0)])
    folder.begin([(["a"], 0)])
    folder.columns["a"][0] = 9
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(StorageError, match="must be writable to commit a step, and is closed"):
            folder.commit(b"3")
    with pytest.raises(StorageError, match="a step could not be committed"):
        folder.begin([])
    assert BufferFolder.open(path).columns["a"].tolist() == [4, 2, 3]


def test_columns_use_no_private_memory_of_the_process(path: Path) -> None:
    """A process limited to 300 MB of private memory writes to columns of 512 MB."""
    code = (
        "import resource, numpy as np\n"
        "from samplebatch.storage.buffers.folder import BufferFolder\n"
        f"folder = BufferFolder.create({str(path)!r}, {{}}, b'')\n"
        "limit = 300 << 20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "try:\n"
        "    np.ones(1 << 26)\n"
        "except MemoryError:\n"
        "    values = folder.allocate('obs', (1 << 26,), np.dtype('f8'))\n"
        "    values[:: 1 << 17] = 1\n"
        "    print(int(values[:: 1 << 17].sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "512\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY or done.returncode == 0


def test_large_states_and_many_columns_are_written_completely(path: Path) -> None:
    folder = BufferFolder.create(path, {}, b"")
    names = [f"c{i}" for i in range(700)]
    for name in names:
        folder.allocate(name, (2,), I8)[:] = 1
    folder.commit(b"s" * 100_000)
    folder.begin([(names, slice(0, 2))])
    for values in folder.columns.values():
        values[:] = 2
    crash(folder)
    folder = BufferFolder.open(path)
    assert folder.state == b"s" * 100_000
    assert all(values.tolist() == [1, 1] for values in folder.columns.values())
    folder.close()


def test_space_for_undo_copies_is_released_on_closing(path: Path) -> None:
    folder = BufferFolder.create(path, {}, b"")
    folder.allocate("a", (100_000,), I8)
    folder.commit(b"")
    folder.begin([(["a"], slice(0, 100_000))])
    folder.commit(b"")
    assert (path / "undo").stat().st_size == 800_000
    folder.close()
    assert (path / "undo").stat().st_size <= 4096


def test_the_description_of_a_folder_is_plain_json(path: Path) -> None:
    filled(path).close()
    assert json.loads((path / "buffer.json").read_text())["about"] == {"size": 3}


def test_a_killed_process_leaves_only_committed_rows(path: Path) -> None:
    create(str(path))
    rng = np.random.default_rng()
    undone = before = 0
    with nursery("tests.storage.buffer_folder.folder_writer") as children:
        for killed in range(400):
            if killed >= 40 and undone > 5 and before > 10 * SLOTS:
                break
            assert children.kill_after(float(rng.uniform(0, 0.02)), "write", str(path)) == 9
            undo = BufferFolder._undo

            def counting(self: BufferFolder, undo: Any = undo) -> None:
                nonlocal undone
                undone += self._commits.pending is not None
                undo(self)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BufferFolder, "_undo", counting)
                folder = BufferFolder.open(path)
            (count,) = struct.unpack("<q", folder.state)
            assert count >= before
            before = count
            rows = np.arange(max(0, count - SLOTS), count)
            for name, values in folder.columns.items():
                assert np.array_equal(values[rows % SLOTS], payload(rows, WIDTHS[name])), name
            crash(folder)
    assert before > 10 * SLOTS
    assert undone > 5
