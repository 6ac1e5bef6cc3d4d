"""Steps, folder and queries of the rows of `bench_storage`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

N = 200_000
FIRST = 2_000
NUM_RANDOM, NUM_RANDOM_OF_FIRST = 16_384, 256
"""Number of random rows that are read from all steps, and from the first steps."""
EPISODE = 77
EPISODE_OF_FIRST = 1

Columns = dict[str, Any]
Setup = Callable[[Any, Any], Any]
"""Function that creates the argument of a call from a library and the columns."""


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="samplebatch-storage-")


def folder() -> Path:
    """Return the folder of all files; it is removed when the process exits."""
    return Path(_temporary().name)


def columns() -> Columns:
    """Create steps: floats compress little; flags and counters compress well."""
    rng = np.random.default_rng(0)
    t = np.arange(N)
    return {
        "obs": rng.normal(size=(N, 17)).astype("f4"),
        "new_obs": rng.normal(size=(N, 17)).astype("f4"),
        "actions": rng.normal(size=(N, 6)).astype("f4"),
        "rewards": rng.normal(size=N),
        "terminateds": t % 1000 == 999,
        "truncateds": np.zeros(N, bool),
        "eps_id": t // 1000,
        "t": t % 1000,
    }


def first_columns() -> Columns:
    """Create the columns of the first `FIRST` steps."""
    return {name: value[:FIRST] for name, value in columns().items()}


def random_rows(rows: int) -> Any:
    """Draw the random rows to read from `rows` rows."""
    return np.random.default_rng(1).integers(rows, size=NUM_RANDOM if rows == N else NUM_RANDOM_OF_FIRST)


def episode(rows: int) -> int:
    """Return the id of the episode to read from `rows` steps."""
    return EPISODE if rows == N else EPISODE_OF_FIRST


def files_at(path: Path) -> list[Path]:
    """List a file, or all files of a folder."""
    return [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]


def wait_for_disk(path: Path) -> None:
    """Flush a file, or all files of a folder, to disk."""
    for file in files_at(path):
        number = os.open(file, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def synced(setup: Setup) -> Setup:
    """Wrap a peer's setup so that a write flushes its files to disk before they replace the previous files.

    `setup` returns the write function and the path.
    """

    def waiting(lib: Any, data: Any) -> Any:
        write, path, *others = setup(lib, data)
        backup = path.with_name(f"{path.name}.kept")

        def write_and_wait() -> None:
            write()
            wait_for_disk(path)
            if backup.is_dir():
                shutil.rmtree(backup)
            path.replace(backup)

        return write_and_wait, path, *others

    return waiting
