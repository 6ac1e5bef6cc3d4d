"""Cost of storing a replay buffer's rows compressed or in a folder, compared with uncompressed rows in memory.

    python -m benchmarks.scripts replay_storage --steps 20000

Frames have 84 x 84 bytes and resemble frames of Atari games: they show a static background, eight moving objects and a
score. Next observations are not stored. Times are minima over several rounds; the kinds of storage alternate in each
round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from samplebatch import Batch, ReplayBuffer

EPISODE = 500
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "memory": lambda folder: {},
    "compress": lambda folder: {"compress": "obs"},
    "storage": lambda folder: {"storage": folder / "buffer"},
}


def frames(count: int, seed: int = 0) -> np.ndarray:
    """Create the frames of a synthetic game, shape (count, 84, 84)."""
    rng = np.random.default_rng(seed)
    scene = np.repeat(rng.integers(0, 255, (12, 1), np.uint8), 7, 0) * np.ones((1, 84), np.uint8)
    for _ in range(20):
        y, x = rng.integers(0, 76, 2)
        scene[y : y + 8, x : x + 8] = rng.integers(0, 255)
    positions, speeds = rng.uniform(0, 76, (8, 2)), rng.uniform(-2, 2, (8, 2))
    objects = rng.integers(0, 255, (8, 6, 6), np.uint8)
    images = np.empty((count, 84, 84), np.uint8)
    for i in range(count):
        positions = (positions + speeds) % 76
        picture = scene.copy()
        picture[:6, :30] = np.unpackbits(np.frombuffer(i.to_bytes(4, "big"), np.uint8))[:30] * 255
        for (y, x), pixels in zip(positions.astype(int), objects, strict=True):
            picture[y : y + 6, x : x + 6] = pixels
        images[i] = picture
    return images


def steps_of(pictures: np.ndarray) -> list[Batch]:
    """Create one step per frame."""
    flags = np.zeros((), bool), np.ones((), bool)
    reward, action = np.array(1.0), np.array(3)
    return [
        Batch(obs=picture, act=action, rew=reward, terminated=flags[i % EPISODE == EPISODE - 1], truncated=flags[0])
        for i, picture in enumerate(pictures)
    ]


def shortest_times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time calls alternately; return the minimum duration of each call in seconds."""
    minima = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for kind, call in calls.items():
            start = time.perf_counter()
            call()
            minima[kind] = min(minima[kind], time.perf_counter() - start)
    return minima


def measure(count: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Measure every kind of storage; return the values by quantity (with its unit) and kind."""
    steps = steps_of(frames(count))
    results: dict[str, dict[str, float]] = {}
    buffers = {kind: ReplayBuffer(count, ignore_obs_next=True, **options(folder)) for kind, options in KINDS.items()}

    def add_to(buffer: ReplayBuffer) -> Callable[[], None]:
        def add() -> None:
            for step in steps:
                buffer.add(step)

        return add

    # The first round fills the buffers; the timed rounds overwrite the rows.
    shortest_times({kind: add_to(buffer) for kind, buffer in buffers.items()}, 1)
    seconds = shortest_times({kind: add_to(buffer) for kind, buffer in buffers.items()}, 2)
    results["add a step, us"] = {kind: 1e6 * s / count for kind, s in seconds.items()}
    results["bytes of a row"] = {kind: buffer.nbytes / count for kind, buffer in buffers.items()}

    def sample_of(buffer: ReplayBuffer, size: int, stack: int) -> Callable[[], Any]:
        def sample() -> Any:
            buffer.stack_num = stack
            return buffer.sample(size)

        return sample

    for size, stack in ((256, 1), (32, 4)):
        seconds = shortest_times({kind: sample_of(buffer, size, stack) for kind, buffer in buffers.items()}, rounds)
        name = f"sample {size}" + (f" of {stack} frames" if stack > 1 else "") + ", us"
        results[name] = {kind: 1e6 * s for kind, s in seconds.items()}
    files = {kind: folder / f"{kind}.arrow" for kind in buffers}
    seconds = shortest_times({kind: lambda kind=kind: buffers[kind].save(files[kind]) for kind in buffers}, 3)
    results["save, ms"] = {kind: 1e3 * s for kind, s in seconds.items()}
    seconds = shortest_times({kind: lambda kind=kind: ReplayBuffer.load(files[kind]) for kind in buffers}, 3)
    results["load, ms"] = {kind: 1e3 * s for kind, s in seconds.items()}
    buffers["storage"].close()
    seconds = shortest_times({"storage": lambda: ReplayBuffer.open(folder / "buffer").close()}, 3)
    results["open and close, ms"] = {kind: 1e3 * s for kind, s in seconds.items()}
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure all kinds and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts replay_storage", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="slots of each buffer")
    parser.add_argument("--rounds", type=int, default=200, help="samples per kind")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        timings = measure(options.steps, options.rounds, Path(folder))
    print(f"{'':24}" + "".join(f"{kind:>12}" for kind in KINDS))
    for work, by_kind in timings.items():
        print(f"{work:24}" + "".join(f"{by_kind[kind]:12.1f}" if kind in by_kind else f"{'-':>12}" for kind in KINDS))
    return 0
