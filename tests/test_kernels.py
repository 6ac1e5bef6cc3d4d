"""Kernels are compiled once, cached if numba can write a cache, and accept only the supported types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from samplebatch import kernels

PROGRAM = """
import json, sys
import numpy as np
from samplebatch import kernels
tree = np.zeros(8)
refused = kernels.tree_set(tree, 4, 4, 9.0, np.array([1, 3]), np.array([2.0, 5.0]))
found = np.empty(3, np.intp)
kernels.tree_find(tree, 4, np.array([1.0, 2.5, 7.0]), found)
values = np.arange(3.0)
flags = np.array([False, True, False])
advantages, returns = np.empty(3), np.empty(3)
kernels.gae(values, flags, flags, values, values, 0.5, 0.5, advantages, returns)
hits = [sum(getattr(kernels, name).stats.cache_hits.values()) for name in ("tree_set", "tree_find", "gae", "windows")]
print(json.dumps([kernels.__file__, refused, found.tolist(), returns.tolist(), hits]))
"""
RESULTS = [-1, [1, 3, 3], [0.0, 1.0, 3.0]]


def installed_in(folder: Path, *, read_only: bool) -> Path:
    """Copy the files that `kernels` requires into a folder, as an installation does."""
    package = folder / "samplebatch"
    package.mkdir(parents=True)
    shutil.copy(kernels.__file__, package)
    (package / "__init__.py").touch()
    if read_only:
        # A file where the folder should be stops the superuser as well.
        (package / "__pycache__").touch()
    return folder


def start(folder: Path, **environment: str) -> subprocess.Popen[str]:
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "PYTHON", "XDG"))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**surroundings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> bool:
    """Check the results of a process; return whether all of its kernels were loaded from the cache."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    home, *results, hits = json.loads(out)
    assert Path(home).parents[1] == folder
    assert results == RESULTS
    return all(hits)


@pytest.mark.long
def test_processes_that_compile_concurrently_leave_a_valid_cache(tmp_path: Path) -> None:
    folder = installed_in(tmp_path / "site", read_only=False)
    for process in [start(folder) for _ in range(3)]:
        finish(process, folder)
    assert finish(start(folder), folder)


def test_an_installation_that_cannot_be_written_to_is_cached_for_the_user(tmp_path: Path) -> None:
    folder, home = installed_in(tmp_path / "site", read_only=True), tmp_path / "home"
    home.mkdir()
    assert not finish(start(folder, HOME=str(home)), folder)
    assert finish(start(folder, HOME=str(home)), folder)
    assert list(home.rglob("*.nbc"))


def test_kernels_work_without_a_writable_folder(tmp_path: Path) -> None:
    folder = installed_in(tmp_path / "site", read_only=True)
    nowhere = tmp_path / "a file"
    nowhere.touch()
    assert not finish(start(folder, HOME=str(nowhere)), folder)


def test_other_dtypes_and_layouts_are_rejected_not_compiled_for() -> None:
    tree, actual = np.zeros(8), np.empty(1, np.intp)
    for values in (np.zeros(1, np.float32), np.zeros((1, 1)), np.zeros(4)[::2]):
        with pytest.raises(TypeError, match="No matching definition"):
            kernels.tree_find(tree, 4, values, actual)


def test_read_only_inputs_are_accepted() -> None:
    tree, values, actual = np.arange(8.0), np.ones(1), np.empty(1, np.intp)
    tree.flags.writeable = values.flags.writeable = False
    kernels.tree_find(tree, 4, values, actual)
    assert actual.tolist() == [0]


def test_kernels_release_the_interpreter() -> None:
    names = ("tree_set", "tree_find", "gae", "windows")
    assert all(getattr(kernels, name).targetoptions["nogil"] for name in names)
