"""The files of other libraries that are fuzzed: D4RL's, LeRobot's, RLlib's lines of JSON, rows and episodes."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lz4.frame

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.convert import (
    read_d4rl,
    read_lerobot,
    read_rllib_json,
    read_rllib_parquet,
    write_d4rl,
    write_lerobot,
    write_rllib_episodes,
    write_rllib_json,
    write_rllib_parquet,
)
from samplebatch.errors import FormatError
from tests.convert.experience import two_episodes
from tests.fuzz.driver import FileTarget, files_of, written
from tests.fuzz.formats import use_batch
from tests.fuzz.mutations import Files, mutate, mutate_files

Writer = Callable[[Any, Path], Any]

PACKED = re.compile(rb"BCJNG[A-Za-z0-9+/]+=*")
"""A value that RLlib has packed: a pickle in LZ4 in base64, which begins with LZ4's magic number."""


def experience() -> list[SampleBatch | MultiAgentBatch]:
    """Return experience of one policy with nested observations, and of two policies."""
    flat = two_episodes()
    return [flat, two_episodes(nested=True), MultiAgentBatch({"one": flat, "two": flat.slice(0, 3)}, len(flat))]


class Foreign(FileTarget):
    """File or folder of another library, written from the kinds of experience that it supports."""

    def __init__(self, read: Callable[[Path], Any], *sources: tuple[Writer, int]) -> None:
        self._read, self._sources = read, sources

    def samples(self, folder: Path) -> list[Files]:
        folder.mkdir()
        actual = []
        for number, (write, kind) in enumerate(self._sources):
            inside = folder / str(number)
            inside.mkdir()
            write(experience()[kind], inside / "data")
            actual.append(files_of(inside))
        return actual

    def read(self, sample: Files, folder: Path) -> None:
        use_batch(self._read(written(sample, folder) / "data"))


class Folder(Foreign):
    """Folder of another library; some files may be missing, which an OSError may report."""

    def read(self, sample: Files, folder: Path) -> None:
        try:
            super().read(sample, folder)
        except FileNotFoundError as error:
            if str(folder) in error.filename:
                raise FormatError("a file is missing") from error
            raise


class Packed(Foreign):
    """Lines of JSON; in half of the cases, packed values are damaged before packing."""

    def mutate(self, sample: Files, rng: Random) -> Files:
        places = list(PACKED.finditer(sample["data"]))
        if not places or rng.random() < 0.5:
            return mutate_files(sample, rng)
        position, data = rng.choice(places), sample["data"]
        value = mutate(lz4.frame.decompress(base64.b64decode(position[0])), rng)
        packed = base64.b64encode(lz4.frame.compress(value))
        return {"data": data[: position.start()] + packed + data[position.end() :]}


D4RL = Foreign(read_d4rl, (write_d4rl, 0))
LEROBOT = Folder(
    read_lerobot,
    (lambda batch, folder: write_lerobot(batch, folder, fps=10, task="walk"), 0),
    (lambda batch, folder: write_lerobot(batch, folder, fps=50, task="walk", robot="arm"), 0),
)
RLLIB_JSON = Packed(read_rllib_json, (write_rllib_json, 0), (write_rllib_json, 1), (write_rllib_json, 2))
RLLIB_ROWS = Foreign(
    read_rllib_parquet,
    (write_rllib_parquet, 0),
    (lambda batch, path: write_rllib_parquet(batch, path, compress_columns=("obs", "new_obs", "actions")), 1),
)
RLLIB_EPISODES = Foreign(read_rllib_parquet, (write_rllib_episodes, 0))

TARGETS = {
    name: f"tests.fuzz.foreign:{name}" for name in ("D4RL", "LEROBOT", "RLLIB_JSON", "RLLIB_ROWS", "RLLIB_EPISODES")
}
