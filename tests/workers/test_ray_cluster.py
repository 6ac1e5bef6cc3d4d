"""Workers find a cluster of Ray on this machine by themselves, one that asks for tokens and one that does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.workers.ray_worlds import PATHS

pytest.importorskip("ray.cluster_utils")

_CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args=node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

_LEARNER = """
from samplebatch import RolloutWorkers

with RolloutWorkers("CartPole-v1", backend="ray") as workers:
    print(workers.collect(n_step=20).n_collected_steps)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[dict[str, str]]:
    """Return the environment of processes on a machine of their own, which has a token of Ray."""
    # Names of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    (folder / ".ray").mkdir()
    (folder / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield {**inherited, "PYTHONPATH": PATHS, "HOME": str(folder), "RAY_TMPDIR": str(folder)}
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_cluster(machine: dict[str, str], mode: str) -> Iterator[str]:
    """Start a cluster in a process of its own, and yield its address."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _CLUSTER], env={**machine, "RAY_AUTH_MODE": mode}, **pipes) as process:
        yield process.stdout.readline().strip()  # type: ignore[union-attr]
        process.communicate(timeout=60)


def learn(machine: dict[str, str], **variables: str) -> tuple[str, str]:
    """Collect some steps in a process of its own, and return what it said, and its errors."""
    command = [sys.executable, "-c", _LEARNER]
    done = subprocess.run(command, env={**machine, **variables}, capture_output=True, text=True, timeout=120)
    return done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def cluster(machine: dict[str, str]) -> Iterator[str]:
    """Start a cluster without tokens, on a machine that has one."""
    with running_cluster(machine, "disabled") as address:
        yield address


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_tokens_is_found_on_a_machine_that_has_one(machine: dict[str, str]) -> None:
    said, errors = learn(machine)
    assert said == "20", errors


def test_a_process_that_asks_for_tokens_is_told_that_the_cluster_has_none(
    machine: dict[str, str], cluster: str
) -> None:
    _, errors = learn(machine, RAY_AUTH_MODE="token")
    assert "ArgumentError: RAY_AUTH_MODE must be 'disabled' from the start of the process" in errors
    assert f"on the cluster of Ray at {cluster}, which was started without tokens, got 'token'" in errors


@pytest.mark.long
def test_a_cluster_with_tokens_is_found(machine: dict[str, str]) -> None:
    with running_cluster(machine, "token"):
        said, errors = learn(machine)
    assert said == "20", errors
