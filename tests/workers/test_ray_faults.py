"""Ray actors that are killed during a run, alone or with their nodes, and learners that start and exit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import RolloutWorkers, VectorReplayBuffer
from samplebatch.rollout import RayOptions

pytest.importorskip("ray.cluster_utils")

from tests.workers import ray_worlds
from tests.workers.killing import kill_one
from tests.workers.ray_worlds import Pictures, SlowLadder, climb_here

pytestmark = pytest.mark.long

SPREAD_OUT = RayOptions(scheduling_strategy="SPREAD")


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with ray_worlds.started_cluster() as (cluster, _):
        yield cluster


@pytest.fixture
def cluster(started: Any) -> tuple[Any, list[Any]]:
    """Extend a cluster to three nodes besides its head; return the cluster and the nodes."""
    while len(started.worker_nodes) < 3:
        started.add_node(**ray_worlds.NODE)
    return started, list(started.worker_nodes)


def find_worker_with_node(workers: RolloutWorkers, nodes: list[Any]) -> tuple[int, Any]:
    """Find a worker that has reported from one of the nodes; return its index and that node."""
    assert workers._pool is not None
    # On a busy machine Ray may give up a node by itself, and the replacement of its worker may not have started yet.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert workers.worker_stats.queue_depth >= 0  # This reads the reports that have come.
        for index, worker in enumerate(workers._pool.workers):
            for node in nodes:
                if node.node_id == worker._newest.node:  # type: ignore[attr-defined]
                    return index, node
        time.sleep(0.05)
    pytest.fail("no worker has reported from a node")


def node_of(workers: RolloutWorkers, nodes: list[Any]) -> Any:
    """Return the node on which a worker runs."""
    return find_worker_with_node(workers, nodes)[1]


def check_rings(buffer: Any) -> None:
    """Check that every ring contains the steps of one ladder in order, once each, without gaps in episodes."""
    for ring in buffer.buffers:
        rows = ring[:]
        goes_on = (rows.obs[1:] == rows.obs_next[:-1]).all(1)
        assert (goes_on | rows.done[:-1]).all()
        assert len(np.unique(np.column_stack([rows.policy.pid, rows.obs]), axis=0)) == len(rows)


@pytest.mark.parametrize("collects", [False, True])
def test_a_lost_node_loses_only_its_own_steps(cluster: Any, collects: bool) -> None:
    cluster, nodes = cluster
    buffer = VectorReplayBuffer(40_000, 3)
    with RolloutWorkers(
        climb_here, SlowLadder, buffer, num_workers=3, max_restarts=3, backend="ray", ray_options=SPREAD_OUT, seed=1
    ) as workers:
        workers.collect(n_step=3)
        timer = threading.Timer(1.2, cluster.remove_node, [node_of(workers, nodes)], {"allow_graceful": False})
        timer.start()
        if collects:
            assert workers.collect(n_step=9000).n_collected_steps == 9000
        else:
            assert sum(len(fragment) for fragment in workers.fragments(n_step=9000, fragment_length=1500)) == 9000
        timer.join()
        facts, stats = workers.worker_stats, workers.stats
    # Ray may have put more than one of the actors there.
    assert 1 <= len(facts.failures) == facts.restarts <= 3
    # Ray may have sent a replacement there, too, before it knew that the node was lost.
    ends = {"died", "died with its node", "cannot be reached", "did not start"}
    assert {failure.how.partition(": ")[0] for failure in facts.failures} <= ends
    assert facts.lost_steps == sum(failure.lost_steps for failure in facts.failures) > 0
    assert stats.n_collected_steps == len(buffer) == 9003
    check_rings(buffer)


@pytest.mark.parametrize("collects", [False, True])
def test_steps_of_an_unplaceable_worker_are_collected_by_another(
    cluster: Any, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = cluster
    # How long a replacement waits for room.
    monkeypatch.setattr("samplebatch.workers.pool._PLACE_S", 5.0)
    seats = [cluster.add_node(**ray_worlds.NODE, resources={"seat": 1}) for _ in range(2)]
    arguments: Any = {"max_restarts": 3, "backend": "ray", "seed": 1}
    options = RayOptions(resources={"seat": 1})
    began = time.monotonic()
    try:
        with RolloutWorkers(climb_here, SlowLadder, ray_options=options, **arguments) as workers:
            workers.collect(n_step=2)
            timer = threading.Timer(0.5, cluster.remove_node, [node_of(workers, seats)], {"allow_graceful": False})
            timer.start()
            if collects:
                assert workers.collect(n_step=3000).n_collected_steps == 3000
                # The replacement still has no room.
                assert workers.collect(n_step=200).n_collected_steps == 200
            else:
                assert sum(len(fragment) for fragment in workers.fragments(n_step=3000, fragment_length=100)) == 3000
            timer.join()
            failures = workers.worker_stats.failures
    finally:
        for seat in set(seats) & set(cluster.worker_nodes):
            cluster.remove_node(seat, allow_graceful=False)
    assert time.monotonic() - began < 180
    assert failures[0].replaced
    assert not failures[-1].replaced
    assert f"no node has resources for it; worker {1 - failures[-1].index} collects its steps" in failures[-1].how


def test_fragments_that_are_lost_with_a_node_are_repeated(cluster: Any) -> None:
    cluster, nodes = cluster
    with RolloutWorkers(
        "random",
        Pictures,
        num_workers=3,
        max_restarts=3,
        backend="ray",
        ray_options=RayOptions(scheduling_strategy="SPREAD", in_flight=3),
        seed=1,
    ) as workers:
        fragments = workers.fragments(n_step=1200, fragment_length=50)
        steps = len(next(fragments))
        # Three fragments of each worker lie in the stores of their nodes, and no worker is in the middle of a fragment.
        deadline = time.monotonic() + 60
        while workers.worker_stats.queue_depth < 9 and time.monotonic() < deadline:
            time.sleep(0.05)
        index, node = find_worker_with_node(workers, nodes)
        cluster.remove_node(node, allow_graceful=False)
        steps += sum(len(fragment) for fragment in fragments)
        facts = workers.worker_stats
    assert steps == 1200
    assert 1 <= len(facts.failures) == facts.restarts <= 3
    assert any(failure.index == index and failure.lost_steps > 0 for failure in facts.failures), facts.failures
    # On a busy machine Ray may give up a node before the worker has started there, or a second node, whose worker's
    # fragments have all been received.
    assert all(failure.lost_steps in (0, 50, 100, 150) for failure in facts.failures), facts.failures


def test_repeatedly_killed_actors_lose_only_their_fragments(cluster: Any) -> None:
    buffer = VectorReplayBuffer(40_000, 2)
    with RolloutWorkers(climb_here, SlowLadder, buffer, max_restarts=30, backend="ray", seed=1) as workers:
        killed: set[int] = set()
        at, everybody = time.monotonic(), set()
        for _ in workers.fragments(n_step=4000, fragment_length=50):
            everybody.update(workers.pids)
            running = [pid for pid in workers.pids if pid not in killed]
            if time.monotonic() > at and len(killed) < 5 and running:
                killed |= kill_one(running)
                at = time.monotonic() + random.uniform(0.2, 2.0)
        facts, stats = workers.worker_stats, workers.stats
    assert 3 <= facts.restarts <= 5
    assert all(failure.how == "died" for failure in facts.failures)
    assert stats.n_collected_steps == len(buffer) == 4000
    check_rings(buffer)
    assert not wait_until_gone(everybody)


_SCRIPT = """
import sys
import numpy as np
from samplebatch import RolloutWorkers
from samplebatch.rollout import RayOptions

class Always:
    def __call__(self, obs):
        return np.ones(len(obs), np.int64)

if __name__ == "__main__":
    options = RayOptions(address=sys.argv[1])
    with RolloutWorkers(Always(), "CartPole-v1", backend="ray", ray_options=options) as workers:
        print(set(workers.collect(n_step=100).batch["actions"].tolist()), *workers.pids, flush=True)
        if sys.argv[2] == "go on":
            list(workers.fragments())
"""


def run_script(cluster: Any, path: Path, how: str) -> subprocess.Popen[str]:
    path.write_text(_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": ray_worlds.PATHS}
    command = [sys.executable, str(path), cluster.address, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_until_gone(pids: Any, timeout_s: float = 30) -> list[int]:
    """Wait for processes to end, and return those that did not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.1)
    return left


def test_a_script_connects_by_address_and_defines_its_policy(cluster: Any, tmp_path: Path) -> None:
    with run_script(cluster[0], tmp_path / "learner.py", "end") as script:
        output, errors = script.communicate(timeout=120)
    assert output.startswith("{1} "), errors
    assert not wait_until_gone(map(int, output.split()[1:]))


def test_actors_end_when_their_learner_is_killed(cluster: Any, tmp_path: Path) -> None:
    with run_script(cluster[0], tmp_path / "learner.py", "go on") as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()[1:]]
        assert len(pids) == 2
        script.kill()
    assert not wait_until_gone(pids)
