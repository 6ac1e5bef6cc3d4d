"""Buffers in folders equal buffers in memory, and are restored after a process dies."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import CachedReplayBuffer, ReplayBufferManager, VectorReplayBuffer
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError, StorageError
from samplebatch.storage.buffers.folder import BufferFolder
from tests.storage import streams
from tests.storage.buffer_folder.buffer_writer import steps_in
from tests.storage.buffer_folder.nursery import ROOT, forked, nursery
from tests.storage.streams import BUFFERS, assert_go_on_alike, assert_same_rows, fill, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer"


def crash(buffer: Any) -> None:
    """Release the folder without closing it, like a process that dies."""
    buffer._journal.folder._abandon("crashed")


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_in_a_folder_agrees_with_a_buffer_in_memory(kind: str, path: Path) -> None:
    make, n = BUFFERS[kind]
    mapped, plain = make(storage=path), make()
    for start in range(0, 60, 12):
        for actual, expected in zip(fill(mapped, n, start, start + 12), fill(plain, n, start, start + 12), strict=True):
            assert all(map(np.array_equal, actual, expected))
        assert_go_on_alike(pickle.loads(pickle.dumps(mapped)), plain_copy(plain), n, start + 12)
        assert np.array_equal(mapped.sample_indices(7), plain.sample_indices(7))


def plain_copy(buffer: Any) -> Any:
    return pickle.loads(pickle.dumps(buffer))


@pytest.mark.parametrize("how", ["closed", "crashed", "garbage"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_an_opened_buffer_has_its_previous_contents(kind: str, how: str, path: Path) -> None:
    make, n = BUFFERS[kind]
    mapped, plain = make(storage=path), make()
    for start, stop in ((0, 0), (0, 3), (3, 17), (17, 46)):
        for buffer in (mapped, plain):
            fill(buffer, n, start, stop)
        if how == "closed":
            for buffer in (mapped, plain):
                if start:
                    buffer.sample(2)
            mapped.stack_num = plain.stack_num = 2
            mapped.close()
            assert_same_rows(mapped, plain)
        elif how == "crashed":
            crash(mapped)
        mapped = None
        gc.collect()
        mapped = type(plain).open(path)
        assert type(mapped) is type(plain)
        if how == "closed":
            assert mapped._rng.bit_generator.state == plain._rng.bit_generator.state
        assert_same_rows(mapped, plain)
        assert mapped._journal.folder.closed is False
    assert_go_on_alike(mapped, plain, n, 46)
    mapped.close()


@pytest.mark.parametrize("kind", ["plain", "stacked", "vector ignoring next", "prioritized vector"])
def test_a_killed_process_loses_no_committed_step(kind: str, path: Path) -> None:
    make, n = BUFFERS[kind]
    make(storage=path).close()
    oracle = make()
    rng = np.random.default_rng()
    undone = 0
    with nursery("tests.storage.buffer_folder.buffer_writer") as children:
        for killed in range(300):
            # A machine that is busy elsewhere needs more attempts.
            if killed >= 12 and undone and steps_in(oracle) > 60:
                break
            assert children.kill_after(float(rng.uniform(0, 0.02)), kind.replace(" ", "-"), str(path)) == 9
            undo = BufferFolder._undo

            def counting(self: BufferFolder, undo: Any = undo) -> None:
                nonlocal undone
                undone += self._commits.pending is not None
                undo(self)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BufferFolder, "_undo", counting)
                buffer = ReplayBuffer.open(path)
            for i in range(steps_in(oracle), steps_in(buffer)):
                oracle.add(step(i, n))
            assert steps_in(oracle) == steps_in(buffer)
            assert_same_rows(buffer, oracle)
            state, expected = buffer._table.rings.state_dict(), oracle._table.rings.state_dict()
            assert all(np.array_equal(state[name], expected[name]) for name in state)
            crash(buffer)
    assert steps_in(oracle) > 60
    assert undone


def test_any_change_is_committed_or_undone(path: Path) -> None:
    """A completed change of rows survives a crash; an interrupted change is undone."""
    other = ReplayBuffer(9)
    fill(other, 0, 100, 109)
    changes = {
        "update": lambda buffer: buffer.update(other),
        "set_batch": lambda buffer: buffer.set_batch(Batch(streams.numbers(50, 20))),
        "set_array": lambda buffer: buffer.set_array_at_key(np.arange(20.0), "rew"),
        "new array": lambda buffer: buffer.set_array_at_key(np.arange(20.0), "advantage"),
        "new column": lambda buffer: buffer.add(Batch(streams.numbers(5, 1) | {"more": {"of": np.ones((1, 2))}})[0]),
        "reset": lambda buffer: buffer.reset(),
        "reset, keeping": lambda buffer: buffer.reset(keep_statistics=True),
        "load": lambda buffer: buffer.load_state_dict(loaded.state_dict()),
    }
    for kind in ("plain", "stacked", "prioritized"):
        make, n = BUFFERS[kind]
        loaded = make()
        fill(loaded, n, 200, 260)
        for number, (_name, change) in enumerate(changes.items()):
            folder = path.with_name(f"{kind} {number}")
            mapped, plain = make(storage=folder), make()
            for buffer in (mapped, plain):
                fill(buffer, n, 0, 33)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BufferFolder, "commit", lambda folder, state: folder._abandon("crashed"))
                with contextlib.suppress(StorageError):
                    change(mapped)
            mapped = type(plain).open(folder)
            assert_same_rows(mapped, plain)
            for buffer in (mapped, plain):
                change(buffer)
            crash(mapped)
            mapped = type(plain).open(folder)
            assert_same_rows(mapped, plain)
            for buffer in (mapped, plain):
                fill(buffer, n, 33, 40)
            assert_same_rows(mapped, plain)
            mapped.close()


def test_a_rejected_step_does_not_change_the_buffer(path: Path) -> None:
    buffer = VectorReplayBuffer(12, 2, storage=path)
    fill(buffer, 2, 0, 5)
    before = pickle.dumps(buffer)
    wrong = [
        Batch(streams.numbers(5, 2) | {"act": np.ones((2, 3))}),
        Batch(streams.numbers(5, 2) | {"info": {"lives": np.array([0.5, 1.0])}}),
        Batch(streams.numbers(5, 2) | {"new": np.array(["a", "b"])}),
    ]
    for batch in wrong:
        with pytest.raises(SampleBatchError):
            buffer.add(batch)
        assert pickle.dumps(buffer) == before
    crash(buffer)
    buffer = VectorReplayBuffer.open(path)
    assert_go_on_alike(pickle.loads(pickle.dumps(buffer)), pickle.loads(before), 2, 5)
    buffer.close()


@pytest.mark.parametrize(
    ("changed", "actual"),
    [
        ({"info": {"text": "a"}}, r"column 'info\.text' must have numeric rows of one shape to be stored in a folder"),
        ({"info": {"what": None}}, r"column 'info\.what' must have numeric rows of one shape"),
        ({"obs": np.array([np.zeros(2), np.zeros(3)], object)[0]}, None),
    ],
)
def test_rows_that_are_not_numbers_of_one_shape_are_rejected(path: Path, changed: Any, actual: str | None) -> None:
    buffer = ReplayBuffer(6, storage=path)
    batch = Batch(streams.numbers(0, 1))[0]
    batch.update(changed)
    if actual is None:
        buffer.add(batch)
        batch.obs = np.zeros(3)
        with pytest.raises(SampleBatchError, match=r"column 'obs' must have rows of shape \(2,\), got \(3,\)"):
            buffer.add(batch)
    else:
        with pytest.raises(ColumnTypeError, match=actual):
            buffer.add(batch)
        assert len(buffer) == 0
    buffer.close()


def test_ragged_rows_are_rejected(path: Path) -> None:
    buffer = VectorReplayBuffer(6, 2, storage=path)
    with pytest.raises(ColumnTypeError, match=r"column 'obs\.cloud' must have numeric rows of one shape to be stored"):
        buffer.add(step(1, 2, streams.mixed))
    buffer.close()


def test_buffers_that_a_folder_cannot_store_are_rejected(path: Path) -> None:
    for option in ("compress", "ragged"):
        with pytest.raises(StorageError, match="remove"):
            ReplayBuffer(6, storage=path, **{option: "obs"})
        with pytest.raises(StorageError, match="remove"):
            VectorReplayBuffer(6, 2, storage=path, **{option: "obs"})
    assert not path.exists()
    with ReplayBuffer(6, storage=path) as mapped:
        with pytest.raises(StorageError, match="the parts of a buffer must be in memory, got one stored in a folder"):
            ReplayBufferManager([mapped, ReplayBuffer(6)])
        with pytest.raises(StorageError, match="the parts of a buffer must be in memory, got one stored in a folder"):
            CachedReplayBuffer(mapped, 2, 5)


def test_a_folder_is_created_once_and_opened_by_one_buffer(path: Path) -> None:
    buffer = ReplayBuffer(6, storage=path)
    with pytest.raises(StorageError, match=r"got an existing buffer; open it with open\(\)"):
        ReplayBuffer(6, storage=path)
    with pytest.raises(StorageError, match="must not be open elsewhere"):
        ReplayBuffer.open(path)
    code = f"from samplebatch import ReplayBuffer\nReplayBuffer.open({str(path)!r})\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "must not be open elsewhere" in done.stderr
    buffer.close()
    with ReplayBuffer.open(path) as buffer:
        assert len(buffer) == 0
    with pytest.raises(StorageError, match="must be the folder of a buffer"):
        ReplayBuffer.open(path.parent)


def test_a_closed_buffer_is_read_and_not_written(path: Path) -> None:
    buffer = VectorReplayBuffer(12, 2, storage=path)
    fill(buffer, 2, 0, 5)
    buffer.close()
    buffer.close()
    assert len(buffer.sample(3)[0]) == 3
    assert buffer.buffers[1][:].rew.tolist() == [1000.0 + i for i in range(5)]
    for change in (
        lambda: buffer.add(step(5, 2)),
        buffer.reset,
        buffer.flush,
        lambda: buffer.load_state_dict(buffer.state_dict()),
        lambda: buffer.buffers[0].add(step(5, 0)),
    ):
        with pytest.raises(StorageError, match="must be open to be written to: it was closed"):
            change()
    assert len(buffer) == 10


def test_closing_a_buffer_in_memory_has_no_effect() -> None:
    with ReplayBuffer(4) as buffer:
        fill(buffer, 0, 0, 2)
        buffer.flush()
    buffer.close()
    fill(buffer, 0, 2, 3)
    assert len(buffer) == 3


def test_parts_write_to_the_folder_of_the_entire_buffer(path: Path) -> None:
    buffer = VectorReplayBuffer(12, 2, storage=path)
    fill(buffer, 2, 0, 3)
    buffer.buffers[1].add(step(77, 0))
    crash(buffer)
    buffer = VectorReplayBuffer.open(path)
    assert buffer.buffers[1][:].rew.tolist() == [1000, 1001, 1002, 77]
    buffer.close()


def test_tensors_are_restored_as_tensors(path: Path) -> None:
    import torch

    with ReplayBuffer(4, storage=path) as buffer:
        for i in range(6):
            hidden = torch.full((1, 2), i, dtype=torch.bfloat16)
            buffer.add(Batch(streams.numbers(i, 1) | {"policy": {"h": hidden}})[0])
    with ReplayBuffer.open(path) as buffer:
        hidden = buffer[:].policy.h
        assert hidden.dtype == torch.bfloat16
        assert hidden[:, 0].tolist() == [2, 3, 4, 5]


def test_a_pickle_is_a_buffer_in_memory(path: Path) -> None:
    with VectorReplayBuffer(12, 2, storage=path) as buffer:
        fill(buffer, 2, 0, 9)
        other = pickle.loads(pickle.dumps(buffer))
        assert other._journal is None
        assert_same_rows(other, buffer)
        assert other.obs.x.base is not buffer.obs.x.base
        other.add(Batch(streams.numbers(9, 2) | {"note": np.array(["a", "b"])}))
        assert len(buffer) == 12
        assert "note" not in buffer[:]


def test_a_checkpoint_of_a_folder_is_a_buffer_in_memory(path: Path, tmp_path: Path) -> None:
    with VectorReplayBuffer(12, 2, storage=path, ignore_obs_next=True) as buffer:
        fill(buffer, 2, 0, 9)
        buffer.save(tmp_path / "buffer.arrow")
        other = VectorReplayBuffer.load(tmp_path / "buffer.arrow")
        assert other._journal is None
        assert_go_on_alike(other, plain_copy(buffer), 2, 9)


def test_the_rows_are_in_the_files(path: Path) -> None:
    with ReplayBuffer(1000, storage=path) as buffer:
        fill(buffer, 0, 0, 2)
        sizes = {entry.name: entry.stat().st_size for entry in path.glob("*.column")}
        assert sorted(sizes.values())[-1] == 1000 * 144
        buffer.obs.x[1] = 5.0
    with ReplayBuffer.open(path) as buffer:
        assert buffer[1].obs.x.tolist() == [5, 5, 5]


def changed_json(path: Path, change: Any) -> None:
    plain = json.loads(path.read_text())
    del plain["checksum"]
    change(plain)
    path.write_text(json.dumps(plain))


def other_owner(path: Path) -> None:
    (file,) = path.glob("layout.*")
    position = json.loads(file.read_text())["columns"]["obs_next/owner"]["file"]
    (path / f"{position}.column").write_bytes(np.full(22, 99).tobytes()[: (path / f"{position}.column").stat().st_size])


DAMAGE: dict[str, Any] = {
    "class": lambda path: changed_json(path / "buffer.json", lambda plain: plain["about"].update({"class": "os"})),
    "own": lambda path: changed_json(path / "buffer.json", lambda plain: plain["about"].pop("own")),
    "sizes": lambda path: changed_json(path / "buffer.json", lambda plain: plain["about"].update(maxsizes=[3, 3])),
    "options": lambda path: changed_json(path / "buffer.json", lambda plain: plain["about"]["own"].pop("options")),
    "notes": lambda path: changed_json(
        next(path.glob("layout.*")), lambda plain: plain["notes"]["columns"].update(act=["nothing", ""])
    ),
    "torch": lambda path: changed_json(
        next(path.glob("layout.*")), lambda plain: plain["notes"]["columns"].update(act=["act", "torch.load"])
    ),
    "no notes": lambda path: changed_json(next(path.glob("layout.*")), lambda plain: plain.update(notes=[1])),
    "owners": other_owner,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_detected_on_opening(path: Path, damage: str) -> None:
    with VectorReplayBuffer(12, 2, storage=path, ignore_obs_next=True) as buffer:
        fill(buffer, 2, 0, 9)
    DAMAGE[damage](path)
    for _ in range(2):
        with pytest.raises(FormatError):
            ReplayBuffer.open(path, verify=False)


def test_an_emptied_prioritized_buffer_that_crashed_draws_all_its_rows(path: Path) -> None:
    make, n = BUFFERS["prioritized vector"]
    buffer = make(storage=path)
    fill(buffer, n, 0, 5)
    buffer._sampler.mirror[:4] = 0.0
    crash(buffer)
    buffer = ReplayBuffer.open(path)
    assert (buffer.weight[buffer.sample_indices(0)] > 0).all()
    assert set(buffer.sample_indices(2000).tolist()) == set(buffer.sample_indices(0).tolist())
    buffer.close()


def test_a_forked_child_reads_and_does_not_write(path: Path) -> None:
    buffer = ReplayBuffer(6, storage=path)
    fill(buffer, 0, 0, 4)
    pid = forked()
    if not pid:
        code = 1
        try:
            ok = buffer[:].rew.tolist() == [0, 1, 2, 3]
            try:
                buffer.add(step(4, 0))
            except StorageError as error:
                code = 0 if ok and "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.add(step(4, 0))
    buffer.close()


def test_a_part_of_a_buffer_in_a_folder_neither_flushes_nor_closes_it(path: Path) -> None:
    with VectorReplayBuffer(12, 3, storage=path) as buffer:
        part = buffer.buffers[1]
        with part:
            part.add(step(0, 1)[0])
        part.flush()
        part.add(step(1, 1)[0])
        assert not buffer._journal.folder.closed
        buffer.close()
        with pytest.raises(StorageError, match="it was closed"):
            part.add(step(2, 1)[0])
        part.flush()
