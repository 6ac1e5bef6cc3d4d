"""Bytes and seconds of successive checkpoints of replay buffers, if 1 % of the rows change between checkpoints.

    python -m benchmarks.scripts checkpoints --rows 1000000

Vector rows contain observations and next observations of 17 numbers and actions of 6 numbers, in 8 rings. Images are
84 x 84 bytes, stored once and compressed, in one ring with a tenth of the rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scripts.replay_storage import frames
from samplebatch import Batch, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer

RINGS = 8


class Holder:
    """Stand-in for a trainer: its state is a replay buffer, without an algorithm."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": "Holder", "parts": {"buffer": self.buffer.state_dict()}, "why_reset": None}


def add_vectors(buffer: Any, count: int, rng: np.random.Generator) -> None:
    """Add rows with vector observations to all rings."""
    obs, flags = rng.normal(size=(count, 17)).astype(np.float32), np.zeros(count, bool)
    step = Batch(obs=obs, obs_next=obs, act=obs[:, :6], rew=obs[:, 0], terminated=flags, truncated=flags)
    buffer.add(step, buffer_ids=np.repeat(np.arange(RINGS), count // RINGS))


def add_images(buffer: Any, count: int, rng: np.random.Generator) -> None:
    """Add rows with image observations to one ring."""
    images = frames(min(count, 2000), int(rng.integers(1 << 30)))
    for index in range(count):
        buffer.add(Batch(obs=images[index % 2000], act=0, rew=0.0, terminated=index % 500 == 499, truncated=False))


def main() -> int:
    """Save three checkpoints of each buffer, and print the bytes and seconds of each."""
    from samplebatch.learn import save_checkpoint
    from samplebatch.learn.checkpoint import FILE, read_checkpoint

    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    kinds: dict[str, Any] = {
        "vectors": (VectorReplayBuffer(rows, RINGS), rows, add_vectors),
        "prioritized": (PrioritizedVectorReplayBuffer(rows, RINGS, alpha=0.6, beta=0.4), rows, add_vectors),
        "images": (ReplayBuffer(rows // 10, ignore_obs_next=True, compress="obs"), rows // 10, add_images),
    }
    for name, (buffer, count, add) in kinds.items():
        rng = np.random.default_rng(0)
        add(buffer, count, rng)
        with tempfile.TemporaryDirectory() as folder:
            for checkpoint in range(3):
                previous_names = {path.name for path in Path(folder).iterdir()}
                start = time.perf_counter()
                save_checkpoint(Holder(buffer), folder)
                seconds = time.perf_counter() - start
                new_paths = [
                    path for path in Path(folder).iterdir() if path.name == FILE or path.name not in previous_names
                ]
                nbytes = sum(path.stat().st_size for path in new_paths)
                print(f"{name:12} checkpoint {checkpoint + 1}: {nbytes / 1e6:8.2f} MB {seconds:6.2f} s", flush=True)
                add(buffer, count // 100, rng)
                if name == "prioritized":
                    changed = rng.integers(count, size=count // 10)
                    buffer.update_weight(changed, rng.random(len(changed)))
            start = time.perf_counter()
            read_checkpoint(folder)
            print(f"{name:12} read: {time.perf_counter() - start:.2f} s", flush=True)
    return 0
