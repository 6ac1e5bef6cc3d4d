"""Closed folders are intact; copies of open folders, mixtures and damaged folders are rejected."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.column.checksum import BLOCK_NBYTES
from samplebatch.errors import FormatError, SampleBatchError
from samplebatch.storage.buffers import status
from samplebatch.storage.buffers.folder import BufferFolder
from samplebatch.storage.buffers.status import STATUS
from tests.storage.buffer_folder.folder_writer import SLOTS, WIDTHS, create
from tests.storage.buffer_folder.nursery import nursery, payload
from tests.storage.flips import COUNT
from tests.storage.streams import BUFFERS, assert_same_rows, fill

KILLS = int(os.environ.get("SAMPLEBATCH_KILLS", "12"))
"""Processes to kill."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


def closed(path: Path, kind: str = "vector ignoring next", steps: int = 23) -> Any:
    """Create a folder of a buffer and close it; return an equal buffer in memory."""
    make, n = BUFFERS[kind]
    mapped, plain = make(storage=path), make()
    for buffer in (mapped, plain):
        fill(buffer, n, 0, steps)
    mapped.close()
    return plain


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != "lock")


def flip(file: Path, at: int, by: int = 1) -> None:
    """Change a byte of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ by]))


@pytest.mark.parametrize("kind", ["vector ignoring next", "prioritized"])
def test_a_changed_byte_in_a_closed_folder_is_detected(kind: str, path: Path, tmp_path: Path) -> None:
    expected = closed(path, kind)
    rng = np.random.default_rng(0)
    sizes = {name: (path / name).stat().st_size for name in names(path)}
    unnoticed = []
    for trial in range(COUNT):
        name = list(sizes)[trial % len(sizes)]
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        at, by = int(rng.integers(sizes[name])), int(rng.integers(1, 256))
        flip(copy / name, at, by)
        try:
            with ReplayBuffer.open(copy) as buffer:
                assert_same_rows(buffer, expected)
                assert buffer._rng.bit_generator.state == expected._rng.bit_generator.state
        except SampleBatchError:
            pass
        except AssertionError:
            unnoticed.append((name, at))
        shutil.rmtree(copy)
    assert unnoticed == []


def test_a_byte_changed_in_place_is_detected_and_its_column_reported(path: Path) -> None:
    folder = BufferFolder.create(path, {}, b"")
    for name in ("a", "b"):
        folder.allocate(name, (3 << 17,), np.dtype("f8"))[:] = 1.0
    folder.commit(b"")
    folder.close()
    for _ in range(2):
        flip(path / "1.column", (2 << 20) + 9)
        with pytest.raises(FormatError, match=r"bytes of column 'b' .* first of them between 2097152 and 3145728; "):
            BufferFolder.open(path)
        flip(path / "1.column", (2 << 20) + 9)
        BufferFolder.open(path).close()


def test_a_closed_folder_may_be_copied_and_moved(path: Path, tmp_path: Path) -> None:
    expected = closed(path)
    shutil.copytree(path, tmp_path / "copy")
    path.rename(tmp_path / "moved")
    for name in ("copy", "moved"):
        for verify in (None, True, False):
            with ReplayBuffer.open(tmp_path / name, verify=verify) as buffer:
                assert_same_rows(buffer, expected)


def test_unmodified_files_are_checked_again_only_on_request(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed(path)
    monkeypatch.setattr(status, "_SETTLED_NS", 0)
    read: list[int] = []
    blocks = status._blocks
    monkeypatch.setattr(status, "_blocks", lambda fd, nbytes: read.append(nbytes) or blocks(fd, nbytes))
    shutil.copytree(path, tmp_path / "copy")
    columns = len(list(path.glob("*.column")))
    BufferFolder.open(path).close()
    assert len(read) <= 2, "opening and closing writes to the commits alone"
    for folder, verify in ((path, True), (tmp_path / "copy", None)):
        read.clear()
        BufferFolder.open(folder, verify=verify).close()
        assert len(read) >= columns
    read.clear()
    flip(path / "0.column", 3)
    with pytest.raises(FormatError, match=r"0\.column' must have the bytes"):
        BufferFolder.open(path)
    assert len(read) <= 2


def test_a_change_within_one_clock_tick_of_closing_is_detected(path: Path) -> None:
    for _ in range(20):
        folder = BufferFolder.create(path, {}, b"")
        values = folder.allocate("a", (4,), np.dtype("f8"))
        folder.commit(b"")
        folder.close()
        values[1] = 5.0
        with pytest.raises(FormatError, match=r"0\.column' must have the bytes of column 'a'"):
            BufferFolder.open(path)
        shutil.rmtree(path)


def zero_tail(folder: Path, name: str, rng: np.random.Generator) -> None:
    file = folder / name
    size = file.stat().st_size
    at = int(rng.integers(size))
    with file.open("r+b") as opened:
        opened.truncate(at)
        opened.truncate(size)


def cut_tail(folder: Path, name: str, rng: np.random.Generator) -> None:
    os.truncate(folder / name, int(rng.integers((folder / name).stat().st_size)))


@pytest.mark.parametrize("harm", [zero_tail, cut_tail])
def test_files_with_zeroed_or_missing_ends_are_rejected(harm: Callable[..., None], path: Path, tmp_path: Path) -> None:
    expected = closed(path)
    rng = np.random.default_rng(0)
    for trial in range(60):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        name = names(path)[trial % len(names(path))]
        harm(copy, name, rng)
        same = (copy / name).read_bytes() == (path / name).read_bytes()
        try:
            with ReplayBuffer.open(copy) as buffer:
                assert same
                assert_same_rows(buffer, expected)
        except FormatError:
            assert not same
        shutil.rmtree(copy)


def test_files_of_two_states_are_rejected(path: Path, tmp_path: Path) -> None:
    states = []
    make, n = BUFFERS["vector ignoring next"]
    make(storage=path).close()
    for i in range(2):
        with ReplayBuffer.open(path) as buffer:
            fill(buffer, n, 20 * i, 20 * i + 20)
        states.append(shutil.copytree(path, tmp_path / f"state {i}"))
    refused = 0
    for old in range(2):
        for name in names(states[old]):
            mixed = shutil.copytree(states[1 - old], tmp_path / "mixed")
            shutil.copy(states[old] / name, mixed)
            if (states[0] / name).read_bytes() == (states[1] / name).read_bytes():
                BufferFolder.open(mixed).close()
            else:
                with pytest.raises(FormatError):
                    BufferFolder.open(mixed)
                refused += 1
            shutil.rmtree(mixed)
    assert refused > 10


def test_a_copy_of_an_open_folder_is_rejected_and_the_folder_itself_recovers(path: Path, tmp_path: Path) -> None:
    make, n = BUFFERS["prioritized vector"]
    buffer = make(storage=path)
    fill(buffer, n, 0, 13)
    copy = shutil.copytree(path, tmp_path / "copy")
    buffer._journal.folder._abandon("crashed")
    for _ in range(2):
        with pytest.raises(FormatError, match="it was copied without being closed, so its rows may be torn; open with"):
            ReplayBuffer.open(copy)
    ReplayBuffer.open(copy, verify=False).close()
    for folder in (copy, path):
        with ReplayBuffer.open(folder) as again:
            assert_same_rows(again, buffer)


def test_copies_made_while_a_process_writes_are_rejected(path: Path, tmp_path: Path) -> None:
    create(str(path))
    copy = tmp_path / "copy"
    with nursery("tests.storage.buffer_folder.folder_writer") as children:
        pid = children.start("write", str(path))
        for _ in range(20):
            shutil.copytree(path, copy)
            with pytest.raises(FormatError, match="copied without being closed"):
                BufferFolder.open(copy)
            shutil.rmtree(copy)
            time.sleep(0.002)
        assert children.kill(pid) == 9
    BufferFolder.open(path).close()
    shutil.copytree(path, copy)
    BufferFolder.open(copy).close()


def test_a_folder_can_be_opened_after_a_kill_during_open_or_close(path: Path) -> None:
    create(str(path))
    rng = np.random.default_rng()
    count = was_closed = 0
    with nursery("tests.storage.buffer_folder.folder_writer") as children:
        for _ in range(KILLS):
            assert children.kill_after(float(rng.uniform(0, 0.04)), "reopen", str(path)) == 9
            was_closed += json.loads((path / STATUS).read_text())["closed"]
            folder = BufferFolder.open(path)
            before, count = count, *struct.unpack("<q", folder.state)
            assert count >= before
            rows = np.arange(max(0, count - SLOTS), count)
            for name, values in folder.columns.items():
                assert np.array_equal(values[rows % SLOTS], payload(rows, WIDTHS[name]))
            folder.close()
    assert count > 0
    assert KILLS < 100 or 0 < was_closed < KILLS


def test_a_folder_that_was_open_during_a_reboot_is_rejected(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, n = BUFFERS["plain"]
    for open_then in (True, False):
        buffer = make(storage=path)
        fill(buffer, n, 0, 12)
        if open_then:
            buffer._journal.folder._abandon("crashed")
        else:
            buffer.close()
        (tmp_path / "boot").write_text("another start of the machine\n")
        with monkeypatch.context() as patch:
            patch.setattr(status, "_BOOT", tmp_path / "boot")
            if open_then:
                with pytest.raises(FormatError, match="got an open folder whose unflushed rows may be lost"):
                    ReplayBuffer.open(path)
            with ReplayBuffer.open(path, verify=False if open_then else None) as again:
                assert_same_rows(again, buffer)
        shutil.rmtree(path)


def test_a_folder_without_its_status_is_rejected(path: Path) -> None:
    closed(path)
    for damage in ((path / STATUS).unlink, lambda: (path / STATUS).write_text('{"closed": true, "files": 3}')):
        damage()
        with pytest.raises(FormatError, match=r"status\.json' must"):
            ReplayBuffer.open(path)
    ReplayBuffer.open(path, verify=False).close()
    ReplayBuffer.open(path).close()


@pytest.mark.parametrize(
    ("files", "actual"),
    [
        (
            {"../other": [1, 1, 1, [1]]},
            r"status\.json' must list the files of a buffer: .*must be in the folder, got ",
        ),
        ({"/dev/zero": [1, 1, 1, [1]]}, "must be in the folder, got "),
        ({"0.column": [float("inf"), 1, 1, [1]]}, "must list the files of a buffer"),
        ({"0.column": [1, 1, 1]}, "must list the files of a buffer"),
        ({"nowhere": [1, 1, 1, [1]]}, "nowhere' must exist, as when it was closed"),
        ({"lock": [1, 1, 1, []]}, "lock' must have the bytes that it was closed with"),
    ],
)
def test_an_invalid_status_file_is_rejected(path: Path, files: dict[str, Any], actual: str) -> None:
    closed(path)
    (path / STATUS).write_text(json.dumps({"closed": True, "boot": "", "files": files}))
    with pytest.raises(FormatError, match=actual):
        ReplayBuffer.open(path)


@pytest.mark.parametrize("how", ["closed", "crashed"])
def test_a_folder_of_the_previous_version_is_upgraded_to_checksums(path: Path, how: str) -> None:
    make, n = BUFFERS["vector"]
    mapped, plain = make(storage=path), make()
    for buffer in (mapped, plain):
        fill(buffer, n, 0, 17)
    mapped.close() if how == "closed" else mapped._journal.folder._abandon("crashed")
    (path / STATUS).unlink()
    for file in path.glob("*.json"):
        content = json.loads(file.read_text())
        del content["checksum"]
        file.write_text(json.dumps(content | ({"version": 1} if file.name == "buffer.json" else {})))
    with ReplayBuffer.open(path) as buffer:
        assert_same_rows(buffer, plain)
    flip(path / "0.column", 0)
    with pytest.raises(FormatError, match=r"0\.column' must have the bytes"):
        ReplayBuffer.open(path)


def test_unwritten_parts_of_files_count_as_zeros(tmp_path: Path) -> None:
    sparse, full = tmp_path / "sparse", tmp_path / "full"
    nbytes = 5 * BLOCK_NBYTES + 777
    with sparse.open("wb") as file:
        file.truncate(nbytes)
        file.seek(2 * BLOCK_NBYTES + 100)
        file.write(b"rows")
    full.write_bytes(sparse.read_bytes())
    for path in (sparse, full):
        fd = os.open(path, os.O_RDONLY)
        blocks = status._blocks(fd, nbytes)
        os.close(fd)
        assert len(blocks) == 6
        assert blocks[0] == blocks[1] == blocks[3] == blocks[4] != blocks[2]
        assert blocks[5] != blocks[4]
    assert status._state(sparse, None).blocks == status._state(full, None).blocks
