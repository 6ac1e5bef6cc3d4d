"""Workers find a cluster of Ray on this machine by themselves, one that asks for tokens and one that does not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.workers.ray_worlds import PATHS

pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.long

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

with RolloutWorkers("random", "CartPole-v1", backend="ray") as workers:
    print(workers.collect(n_step=20).n_collected_steps)
"""

_LOCAL = """
import ray
from samplebatch import RolloutWorkers
from samplebatch.rollout import RayOptions

# The second one runs on the cluster that the first one has started.
for _ in range(2):
    with RolloutWorkers("random", "CartPole-v1", backend="ray", ray_options=RayOptions(address="local")) as workers:
        print(workers.collect(n_step=20).n_collected_steps, ray.cluster_resources()["CPU"] > 0, end=" ")
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[dict[str, str]]:
    """Return the environment variables of processes on a simulated machine with a Ray token."""
    # Names of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    (folder / ".ray").mkdir()
    (folder / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield {**inherited, "PYTHONPATH": PATHS, "HOME": str(folder), "RAY_TMPDIR": str(folder)}
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_cluster(machine: dict[str, str], mode: str) -> Iterator[str]:
    """Start a cluster in a separate process; yield its address."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _CLUSTER], env={**machine, "RAY_AUTH_MODE": mode}, **pipes) as process:
        yield process.stdout.readline().strip()  # type: ignore[union-attr]
        process.communicate(timeout=60)


def learn(machine: dict[str, str], script: str = _LEARNER, **variables: str) -> tuple[str, str]:
    """Collect some steps in a separate process; return its output and errors."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env={**machine, **variables}, capture_output=True, text=True, timeout=120)
    return done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def cluster(machine: dict[str, str]) -> Iterator[str]:
    """Start a cluster without tokens on a machine that has a token."""
    with running_cluster(machine, "disabled") as address:
        yield address


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_tokens_is_detected_on_a_machine_that_has_one(machine: dict[str, str]) -> None:
    output, errors = learn(machine)
    assert output == "20", errors


def test_a_process_that_requires_tokens_rejects_a_cluster_without(machine: dict[str, str], cluster: str) -> None:
    _, errors = learn(machine, RAY_AUTH_MODE="token")
    assert "ArgumentError: RAY_AUTH_MODE must be 'disabled' from the start of the process" in errors
    assert f"on the cluster of Ray at {cluster}, which was started without tokens, got 'token'" in errors


def test_a_cluster_with_tokens_is_detected(machine: dict[str, str]) -> None:
    with running_cluster(machine, "token"):
        output, errors = learn(machine)
    assert output == "20", errors


def test_workers_start_a_local_cluster_and_keep_using_it(machine: dict[str, str]) -> None:
    output, errors = learn(machine, _LOCAL)
    assert output == "20 True 20 True", errors


def test_a_local_cluster_is_never_one_of_another_process(machine: dict[str, str], cluster: str) -> None:
    connected = f"import ray\nray.init(address={cluster!r})\n"
    _, errors = learn(machine, connected + _LOCAL, RAY_AUTH_MODE="disabled")
    assert f"address must be '{cluster}', the cluster that this process is connected to, got 'local'" in errors


def test_the_address_file_of_an_ended_cluster_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        path.write_text(f"127.0.0.1:{port}")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        began = time.monotonic()
        _, errors = learn({**inherited, "PYTHONPATH": PATHS, "RAY_TMPDIR": str(tmp_path)})
    assert time.monotonic() - began < 60
    last = errors.splitlines()[-1]
    assert last.startswith("samplebatch.errors.ArgumentError: the cluster of Ray that was started last on this machine")
    assert str(path) in last
