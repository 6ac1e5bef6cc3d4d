"""Rows of buffers in checkpoints: changed groups are written, and a killed process leaves a complete checkpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import (
    Batch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.errors import FormatError, UntrustedPickleError
from samplebatch.learn import checkpoint as checkpoint_module
from samplebatch.learn import load_checkpoint, save_checkpoint
from samplebatch.learn.checkpoint import FILE, read_checkpoint

needs_safe_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6), reason="older releases of torch need permission"
)


class Holder:
    """Trainer of a buffer without an algorithm."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": "Holder", "parts": {"buffer": self.buffer.state_dict()}, "why_reset": None}

    def load_state_dict(self, state: Any, *, allow_pickle: bool = False) -> None:
        self.buffer.load_state_dict(state["parts"]["buffer"])


def add(buffer: Any, steps: int, first: int = 0) -> None:
    """Add steps of 8 environments whose rows contain the step number."""
    rings = getattr(buffer, "buffer_num", 0)
    for number in range(first, first + steps):
        obs = np.full((rings or 1, 60), number, np.float32)
        flags = np.zeros(rings or 1, bool)
        step = Batch(obs=obs, act=obs[:, :4], rew=np.full(rings or 1, float(number)), terminated=flags, truncated=flags)
        buffer.add(step, buffer_ids=None if rings else [0])


def written(folder: Path, before: dict[str, int]) -> int:
    return sum(size for name, size in sizes(folder).items() if name == FILE or name not in before)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def assert_equal_rows(first: Any, other: Any) -> None:
    assert len(first) == len(other)
    for name in ("obs", "act", "rew", "done"):
        np.testing.assert_array_equal(first[:][name], other[:][name])


@needs_safe_torch
@pytest.mark.parametrize("rows", [1_000_000, 300_000], ids=["full", "not full"])
def test_a_second_checkpoint_writes_only_changed_rows(rows: int, tmp_path: Path) -> None:
    buffer = VectorReplayBuffer(1_000_000, 8, random_seed=1)

    def collect(count: int, value: int) -> None:
        obs, flags = np.full((count, 8), value, np.float32), np.zeros(count, bool)
        obs[:, 0] = np.arange(count)
        step = Batch(obs=obs, obs_next=obs, act=obs[:, :2], rew=obs[:, 0], terminated=flags, truncated=flags)
        buffer.add(step, buffer_ids=np.repeat(np.arange(8), count // 8))

    collect(rows, 0)
    save_checkpoint(Holder(buffer), tmp_path)
    first = sum(sizes(tmp_path).values())
    assert first > 80 * rows
    for changed in range(1, 4):
        before = sizes(tmp_path)
        collect(rows // 100, changed)
        save_checkpoint(Holder(buffer), tmp_path)
        assert 0.01 * first < written(tmp_path, before) < 0.018 * first
    again = VectorReplayBuffer(1_000_000, 8)
    load_checkpoint(Holder(again), tmp_path)
    assert_equal_rows(again, buffer)
    np.testing.assert_array_equal(again.sample_indices(50), buffer.sample_indices(50))


def test_rows_changed_in_place_are_written(tmp_path: Path) -> None:
    buffer = VectorReplayBuffer(8000, 8)
    add(buffer, 1000)
    save_checkpoint(Holder(buffer), tmp_path)
    before = sizes(tmp_path)
    buffer.obs[5] = 77.0
    save_checkpoint(Holder(buffer), tmp_path)
    assert written(tmp_path, before) < 100_000
    again = VectorReplayBuffer(8000, 8)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    assert again.obs[5].tolist() == [77.0] * 60
    assert_equal_rows(again, buffer)


def test_segments_use_at_most_twice_the_size_of_the_rows(tmp_path: Path) -> None:
    buffer = PrioritizedReplayBuffer(20_000, alpha=0.6, beta=0.4, random_seed=3)
    add(buffer, 20_000)
    rng = np.random.default_rng(5)
    save_checkpoint(Holder(buffer), tmp_path)
    first = sum(sizes(tmp_path).values())
    for _ in range(12):
        buffer.obs[rng.integers(20_000, size=20)] += 1.0
        buffer.update_weight(rng.integers(20_000, size=500), rng.random(500))
        save_checkpoint(Holder(buffer), tmp_path)
        assert sum(sizes(tmp_path).values()) < 2.3 * first
    again = PrioritizedReplayBuffer(20_000, alpha=0.6, beta=0.4)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    assert_equal_rows(again, buffer)
    np.testing.assert_array_equal(again.sample(64)[0].weight, buffer.sample(64)[0].weight)


@needs_safe_torch
def test_columns_of_every_kind_are_restored_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_SEGMENTS_FROM_NBYTES", 1)
    buffer = ReplayBuffer(300, compress="obs.frame", ragged="obs.points", random_seed=2)
    rng = np.random.default_rng(4)
    for number in range(450):
        obs = {
            "frame": np.full((84, 84), number % 250, np.uint8),
            "points": rng.normal(size=(number % 5, 3)),
            "tensor": torch.full((2,), number, dtype=torch.bfloat16),
        }
        info = {"note": "text" if number % 3 else None, "plain": number}
        step = Batch(obs=obs, act=0, rew=[0.0, 1.0], terminated=number % 70 == 0, truncated=False, info=info)
        buffer.add(step)
        if number in (100, 449):
            save_checkpoint(Holder(buffer), tmp_path)
            again = ReplayBuffer(300, compress="obs.frame", ragged="obs.points")
            load_checkpoint(Holder(again), tmp_path)
            assert again[:] == buffer[:]
            assert again.obs.tensor.dtype == torch.bfloat16


def test_buffers_of_several_policies_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_SEGMENTS_FROM_NBYTES", 1)
    buffer = MultiAgentReplayBuffer(100)
    for policy in ("walker", "../runner"):
        rows = SampleBatch(
            obs=np.arange(60.0), actions=np.zeros(60), rewards=np.ones(60), terminateds=[False] * 60,
            eps_id=[3] * 60, t=np.arange(60),
        )  # fmt: skip
        buffer.add(rows.as_multi_agent(policy))
    save_checkpoint(Holder(buffer), tmp_path)
    again = MultiAgentReplayBuffer(100)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    for policy in ("walker", "../runner"):
        np.testing.assert_array_equal(again.buffers[policy].obs, buffer.buffers[policy].obs)


def test_objects_that_are_pickled_need_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_SEGMENTS_FROM_NBYTES", 1)
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, info={"path": Path("x")}))
    save_checkpoint(Holder(buffer), tmp_path)
    with pytest.raises(UntrustedPickleError):
        load_checkpoint(Holder(ReplayBuffer(4)), tmp_path)
    again = ReplayBuffer(4)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    assert again[0].info.path == Path("x")


@pytest.mark.parametrize("capacity", [0, 1])
def test_tiny_buffers_are_restored(capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_SEGMENTS_FROM_NBYTES", 1)
    buffer = ReplayBuffer(1)
    add(buffer, 3 * capacity)
    for _ in range(2):
        save_checkpoint(Holder(buffer), tmp_path)
    again = ReplayBuffer(1)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    assert len(again) == capacity
    assert not capacity or again.obs[0, 0] == 2.0


KILLED = """
import sys
sys.path[:0] = [{folder!r}]
from test_checkpoint_rows import Holder, add
from samplebatch import VectorReplayBuffer
from samplebatch.learn import save_checkpoint

buffer = VectorReplayBuffer(16_000, 8)
add(buffer, 2000)
save_checkpoint(Holder(buffer), {path!r})
print("saved", flush=True)
for number in range(2000, 100_000, 100):
    add(buffer, 100, number)
    save_checkpoint(Holder(buffer), {path!r})
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.06, 0.27])
def test_a_process_killed_while_saving_leaves_a_complete_checkpoint(delay_s: float, tmp_path: Path) -> None:
    script = KILLED.format(folder=str(Path(__file__).parent), path=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    assert child.stdout is not None
    assert child.stdout.readline() == b"saved\n"
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    again = VectorReplayBuffer(16_000, 8)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    newest = int(again.obs[:, 0].max())
    assert (newest + 1) % 100 == 0
    assert sorted(again[:].obs[:2000, 0].tolist()) == list(range(newest - 1999, newest + 1))
    # The next checkpoint removes what the killed process left.
    save_checkpoint(Holder(again), tmp_path)
    referenced = {f"rows-{number}.bin" for number in segments_of(tmp_path)}
    assert set(sizes(tmp_path)) == {FILE} | referenced


def manifest_of(folder: Path) -> tuple[Any, Any]:
    encoded = torch.load(folder / FILE, weights_only=True)
    return encoded, encoded["parts"]["buffer"]["table"]["columns"]["columns"]["manifest"]


def segments_of(folder: Path) -> set[int]:
    return set(manifest_of(folder)[1]["groups"][:, 0].tolist())


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Limit the size of files, which simulates a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [1_000, 200_000])
def test_a_full_disk_leaves_the_previous_checkpoint(room: int, tmp_path: Path) -> None:
    buffer = VectorReplayBuffer(8000, 8)
    add(buffer, 1000)
    save_checkpoint(Holder(buffer), tmp_path)
    before, expected = sizes(tmp_path), buffer[:]
    add(buffer, 500, 1000)
    with full_disk(room), pytest.raises(OSError, match="File too large") as caught:
        save_checkpoint(Holder(buffer), tmp_path)
    assert caught.value.errno == errno.EFBIG
    assert sizes(tmp_path) == before
    again = VectorReplayBuffer(8000, 8)
    load_checkpoint(Holder(again), tmp_path, allow_pickle=True)
    assert again[:] == expected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    buffer = VectorReplayBuffer(8000, 8)
    add(buffer, 1000)
    save_checkpoint(Holder(buffer), tmp_path)
    return tmp_path


def test_a_changed_byte_of_a_segment_is_detected(saved: Path) -> None:
    path = saved / "rows-0.bin"
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"rows-0.bin' must match its digests, got changed bytes"):
        read_checkpoint(saved, allow_pickle=True)


def test_a_missing_or_truncated_segment_is_an_error_and_written_again(saved: Path) -> None:
    buffer = VectorReplayBuffer(8000, 8)
    load_checkpoint(Holder(buffer), saved, allow_pickle=True)
    for damage in (lambda path: os.truncate(path, 1000), os.unlink):
        (segment,) = saved.glob("rows-*.bin")
        damage(segment)
        with pytest.raises(FormatError, match=r"rows-\d.bin' must (contain rows|have \d+ bytes)"):
            read_checkpoint(saved, allow_pickle=True)
        save_checkpoint(Holder(buffer), saved)
        read_checkpoint(saved, allow_pickle=True)


HOSTILE = {
    "negative": lambda groups: groups.__setitem__((0, 0), -1),
    "another file": lambda groups: groups.__setitem__((0, 0), 99),
    "beyond the file": lambda groups: groups.__setitem__((0, 2), 1 << 40),
    "repeated": lambda groups: groups.__setitem__(slice(None), groups[0].clone()),
    "huge": lambda groups: groups.__setitem__((0, 1), 1 << 62),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_manifests_are_rejected(attack: str, saved: Path) -> None:
    encoded, manifest = manifest_of(saved)
    HOSTILE[attack](manifest["groups"])
    torch.save(encoded, saved / FILE)
    with pytest.raises(FormatError):
        read_checkpoint(saved, allow_pickle=True)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": "../../etc/passwd"},
        {"rings": [-1, 2]},
        {"rings": 3},
        {"digests": torch.zeros(0, 16, dtype=torch.uint8)},
        {"digests": torch.zeros(3)},
        {"rows_per_group": "many"},
        {"groups": torch.zeros(0, 3, dtype=torch.int64), "digests": torch.zeros(0, 16, dtype=torch.uint8), "rings": []},
    ],
    ids=["path", "negative count", "one count", "no digests", "floats", "word", "no groups"],
)
def test_manifests_of_other_types_are_rejected_and_replaced(change: dict[str, Any], saved: Path) -> None:
    encoded, manifest = manifest_of(saved)
    manifest |= change
    torch.save(encoded, saved / FILE)
    with pytest.raises(FormatError, match="must have a valid manifest"):
        read_checkpoint(saved, allow_pickle=True)
    save_checkpoint(Holder(VectorReplayBuffer(8000, 8)), saved)
    read_checkpoint(saved, allow_pickle=True)
    assert list(sizes(saved)) == [FILE]


def test_a_device_file_in_place_of_a_segment_is_not_read(saved: Path) -> None:
    (saved / "rows-0.bin").unlink()
    os.mkfifo(saved / "rows-0.bin")
    with pytest.raises(FormatError, match="must contain rows of the checkpoint, got no file"):
        read_checkpoint(saved, allow_pickle=True)
