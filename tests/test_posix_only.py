"""The library works where only POSIX is there: no memfd, epoll, futex, pidfd or `/proc`, and spawned processes.

The interpreters of these tests import `tests/posix_only/sitecustomize.py`, which removes what only Linux has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "posix_only" / "tour.py"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "tests" / "posix_only"), str(ROOT)]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def test_linux_calls_are_removed(tmp_path: Path) -> None:
    check = """
import os, pathlib, select
from samplebatch.transport import peers, region
print(hasattr(os, "memfd_create"), hasattr(select, "epoll"), pathlib.Path("/proc/self/stat").exists())
print(region._FUTEX, region._SEALS, region.free_nbytes(), peers._HAS_EPOLL)
"""
    done = run("-c", check, folder=tmp_path)
    assert done.stdout.split() == ["False", "False", "False", "None", "0", "None", "False"], done.stderr


@pytest.mark.parametrize(
    "part", ["batches", "files", "channel", "killed_sender", "broadcast", "queue", "workers", "service", "learning"]
)
def test_part_works_without_linux_calls(part: str, tmp_path: Path) -> None:
    if part == "learning":
        pytest.importorskip("torch")
    if part in {"workers", "learning"}:
        pytest.importorskip("gymnasium")
    done = run(str(SCRIPT), part, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{part}: passed", done.stdout + done.stderr
