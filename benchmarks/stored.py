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
PICKED, PICKED_FIRST = 16_384, 256
"""Rows that are read at random, of all steps and of the first."""
EPISODE = 77
EPISODE_OF_FIRST = 1

Columns = dict[str, Any]
Setup = Callable[[Any, Any], Any]
"""Makes, from a library and the columns, what a way calls."""


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="samplebatch-storage-")


def folder() -> Path:
    """Return the folder of all files; it goes with the process."""
    return Path(_temporary().name)


def columns() -> Columns:
    """Make steps: floats that compress little, flags and counters that compress well."""
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
    """Make the first of the steps."""
    return {name: value[:FIRST] for name, value in columns().items()}


def picked(rows: int) -> Any:
    """Draw the rows that are read of so many."""
    return np.random.default_rng(1).integers(rows, size=PICKED if rows == N else PICKED_FIRST)


def episode(rows: int) -> int:
    """Return the episode that is looked for among so many steps."""
    return EPISODE if rows == N else EPISODE_OF_FIRST


def files_at(path: Path) -> list[Path]:
    """List a file, or all files of a folder."""
    return [path] if path.is_file() else [entry for entry in path.rglob("*") if entry.is_file()]


def wait_for_disk(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk."""
    for file in files_at(path):
        number = os.open(file, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def synced(setup: Setup) -> Setup:
    """Give a peer our guarantee: its files are flushed to disk before they replace the previous ones.

    The setup returns the write function and the path.
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
