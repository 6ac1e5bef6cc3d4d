"""Workers as actors of Ray, on a real cluster of several raylets: they do as processes do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import actors
import numpy as np
import pytest

from samplebatch import MultiAgentReplayBuffer, RolloutWorkers, SampleBatch, VectorReplayBuffer
from samplebatch.errors import ArgumentError, ChannelClosedError, ColumnTypeError, MissingExtraError, WorkerError
from samplebatch.policy.source import PickledPolicy
from samplebatch.rollout import GAE, RayOptions
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.workers.ray_backend import StoredFragments, pack

pytest.importorskip("ray.cluster_utils")

from tests.workers import ray_worlds
from tests.workers.ray_worlds import ENVIRONMENT, Pictures, SlowLadder, climb_here

SPREAD = "mpe2/simple_spread_v3"
TAG = "mpe2/simple_tag_v3"
UNLIKE = {"eps_id", "unroll_id"}
"""Columns whose values are unlike in any two runs."""

on_ray = partial(RolloutWorkers, backend="ray")


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Any]]:
    with ray_worlds.started_cluster({}, {"resources": {"far": 8}}) as (_, nodes):
        yield nodes


@pytest.fixture(autouse=True)
def _connected(nodes: list[Any]) -> None:
    """Start the cluster before any test."""


def check_alike(first: Any, other: Any) -> None:
    """Check that two batches are equal except for ids that differ between runs."""
    ones, others = (batch.as_multi_agent().policy_batches for batch in (first, other))
    assert ones.keys() == others.keys()
    for policy, steps in ones.items():
        expected = others[policy]
        assert steps.column_names == expected.column_names
        for name in set(steps.column_names) - UNLIKE:
            assert np.asarray(steps[name]).dtype == np.asarray(expected[name]).dtype, name
            assert np.asarray(steps[name]).tolist() == np.asarray(expected[name]).tolist(), name


@pytest.mark.parametrize(
    ("env", "policy", "backend"),
    [
        ("CartPole-v1", ray_worlds.draw, "process"),
        ("CartPole-v1", "actors:constant", "inline"),
        (SPREAD, "random", "inline"),
        pytest.param("arena:Bazaar", "random", "inline", marks=pytest.mark.long),
    ],
)
def test_reports_and_batches_agree_with_other_backends(env: str, policy: Any, backend: Any) -> None:
    options: Any = {"envs_per_worker": 2, "seed": 3}
    with on_ray(policy, env, **options) as workers, RolloutWorkers(policy, env, backend=backend, **options) as others:
        for amount in ({"n_step": 101}, {"n_episode": 3}, {"n_step": 40}):
            stats, expected = workers.collect(**amount), others.collect(**amount)
            check_alike(stats.batch, expected.batch)
            assert stats.n_collected_steps == expected.n_collected_steps
            assert stats.n_collected_episodes == expected.n_collected_episodes
            assert sorted(stats.returns) == sorted(expected.returns)
            assert sorted(stats.lens) == sorted(expected.lens)
        facts, other_facts = workers.worker_stats, others.worker_stats
    for name in ("fragments", "nbytes", "sent_steps", "queue_depth", "lost_steps", "restarts", "versions"):
        assert getattr(facts, name) == getattr(other_facts, name), name


@pytest.mark.parametrize("amount", [{"n_step": 505}, pytest.param({"n_episode": 11}, marks=pytest.mark.long)])
def test_iterations_agree_with_other_backends(amount: Any) -> None:
    actual = []
    for make in (on_ray, partial(RolloutWorkers, backend="inline")):
        with make("random", "CartPole-v1", envs_per_worker=2, seed=1) as workers:
            requested = workers.fragments(fragment_length=40, **amount)
            fragments = sorted(requested, key=lambda fragment: fragment["unroll_id"][0])
        actual.append((fragments, workers.stats))
    (ones, stats), (others, expected) = actual
    assert stats.n_collected_steps == expected.n_collected_steps
    assert stats.n_collected_episodes == expected.n_collected_episodes
    for first, other in zip(ones, others, strict=True):
        assert first["unroll_id"].tolist() == other["unroll_id"].tolist()
        check_alike(first, other)


def address_of(column: Any) -> int:
    return int(column.ctypes.data)


def mapping_at(address: int) -> str:
    """Return the name of the memory mapping of this process that contains an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.partition("/")[2]
    return ""


def test_fragments_are_read_without_copies() -> None:
    import ray

    batch = SampleBatch(obs=np.arange(400_000.0), terminateds=np.zeros(400_000, bool))
    reference = ray.put(pack(batch))
    first, other = (StoredFragments(1 << 30).open(ray.get(reference)) for _ in range(2))
    assert first == batch
    for name in batch:
        assert address_of(first[name]) == address_of(other[name])
        assert not first[name].flags.writeable


def test_fragments_beyond_half_of_the_capacity_are_copied() -> None:
    options: Any = {"num_workers": 1, "capacity_nbytes": 10 << 20}
    with on_ray("random", Pictures, **options) as workers:
        retained = list(workers.fragments(n_step=300, fragment_length=100))
    lies = ["plasma" in mapping_at(address_of(fragment["obs"])) for fragment in retained]
    # Each is 5.4 MiB with its next observations, of the 5 that may be held: only the first one is.
    assert lies == [True, False, False]
    observed = np.concatenate([fragment["obs"][:, 0, 0, 0] for fragment in retained])
    assert len(np.unique(observed)) > 200


@pytest.mark.long
def test_retained_fragments_do_not_fill_the_object_store() -> None:
    with on_ray("random", Pictures, seed=2) as workers:
        retained = list(workers.fragments(n_step=2000, fragment_length=100))
    # 54 MiB of pictures a hundred megabytes of store have room for, and twice that they have not.
    assert sum(fragment.size_bytes() for fragment in retained) > 100 << 20
    lying = sum("plasma" in mapping_at(address_of(fragment["obs"])) for fragment in retained)
    assert 2 <= lying <= 10
    with RolloutWorkers("random", Pictures, backend="inline", seed=2) as workers:
        result = workers.fragments(n_step=2000, fragment_length=100)
        expected = sorted(result, key=lambda fragment: fragment["unroll_id"][0])
    for first, other in zip(sorted(retained, key=lambda fragment: fragment["unroll_id"][0]), expected, strict=True):
        assert (first["obs"] == other["obs"]).all()


@pytest.mark.parametrize("in_flight", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_slow_learner_has_a_bounded_number_of_fragments_waiting(in_flight: int) -> None:
    options = RayOptions(in_flight=in_flight)
    with RolloutWorkers("random", "CartPole-v1", num_workers=2, backend="ray", ray_options=options, seed=1) as workers:
        fragments = workers.fragments(fragment_length=10)
        for _ in range(2):
            next(fragments)
            # While nobody comes for more, both workers fill what they may, and then wait.
            deadline = time.monotonic() + 60
            while workers.worker_stats.queue_depth < 2 * in_flight and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            facts = workers.worker_stats
            assert facts.queue_depth == 2 * in_flight
            assert facts.sent_steps == 10 * (facts.fragments + facts.queue_depth)


def test_weights_are_stored_once_per_version_and_received(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    puts: list[Any] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda *args, **options: puts.append(args) or put(*args, **options))
    with on_ray("actors:Marked", "CartPole-v1", num_workers=3, seed=1) as workers:
        for version in range(3):
            if version:
                assert workers.publish({"mark": np.array([10.0 * version])}) == version
            batch = workers.collect(n_step=60).batch
            assert set(batch["weights_version"].tolist()) == {version}
            assert set(batch["policy.mark"].tolist()) == {10.0 * version}
        with pytest.raises(ColumnTypeError, match="must have strings as names"):
            workers.publish({1: np.zeros(1)})
    assert len(puts) == 2
    with pytest.raises(ChannelClosedError, match="they have been stopped"):
        workers.publish({"mark": np.zeros(1)})


def test_new_weights_apply_after_fragments_already_requested() -> None:
    recorded = []
    with on_ray("actors:Marked", "CartPole-v1", num_workers=1, seed=1) as workers:
        for number, fragment in enumerate(workers.fragments(fragment_length=20, n_step=120)):
            (version,) = set(fragment["weights_version"].tolist())
            recorded.append(version)
            if number == 1:
                workers.publish({"mark": np.array([10.0])})
    assert recorded == [0, 0, 0, 0, 1, 1]


@pytest.mark.long
def test_a_torch_module_loads_a_copy_of_the_published_state() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(net.weight)
    net.bias.data = torch.tensor([1.0, 0.0])
    with on_ray(net, "CartPole-v1", num_workers=1) as workers:
        net.bias.data = torch.tensor([0.0, 1.0])
        assert set(workers.collect(n_step=20).batch["actions"].tolist()) == {0}
        workers.publish(net.state_dict())
        assert set(workers.collect(n_step=20).batch["actions"].tolist()) == {1}


@pytest.mark.long
def test_policies_by_id_and_hooks_agree_with_processes() -> None:
    policies = {"adversary": "actors:Marked", "agent": "random"}
    with on_ray(policies, TAG, num_workers=1, seed=1) as workers:
        workers.publish({"adversary": {"mark": np.array([4.0])}})
        batch = workers.collect(n_step=20).batch
    assert set(batch["adversary"]["policy.mark"].tolist()) == {4.0}
    hooks = [GAE(bootstrap=actors.first, gamma=0.9, lambda_=0.8)]
    options: Any = {"seed": 3, "hooks": hooks}
    with (
        on_ray("actors:Marked", "CartPole-v1", **options) as workers,
        RolloutWorkers("actors:Marked", "CartPole-v1", backend="inline", **options) as others,
    ):
        check_alike(workers.collect(n_step=50).batch, others.collect(n_step=50).batch)


@pytest.mark.long
def test_functions_that_cannot_be_imported_are_sent_to_actors_by_value() -> None:
    with on_ray(lambda obs: np.ones(len(obs), np.int64), lambda: SlowLadder(0.0), num_workers=1) as workers:
        assert set(workers.collect(n_step=10).batch["actions"].tolist()) == {1}


@pytest.mark.parametrize("kind", ["rings", pytest.param("several agents", marks=pytest.mark.long)])
def test_buffers_are_filled_like_by_other_backends(kind: str) -> None:
    env = "CartPole-v1" if kind == "rings" else TAG
    buffers: list[Any] = [
        VectorReplayBuffer(4000, 4) if kind == "rings" else MultiAgentReplayBuffer(1000) for _ in range(2)
    ]
    for buffer, make in zip(buffers, (on_ray, partial(RolloutWorkers, backend="inline")), strict=True):
        with make("random", env, buffer, num_workers=1, envs_per_worker=2, seed=3) as workers:
            for _ in range(2):
                assert workers.collect(n_step=40).batch is None
    first, other = (buffer.sample(0) for buffer in buffers)
    assert len(buffers[0]) == len(buffers[1]) > 0
    if kind == "rings":
        for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
            assert (first[0][name] == other[0][name]).all(), name
    else:
        for policy, steps in first.batch.items():
            check_alike(steps, other.batch[policy])


@pytest.mark.long
def test_actors_write_directly_to_a_replay_service() -> None:
    table = ReplayTable("replay", capacity=400, streams=4, seed=5)
    local = VectorReplayBuffer(400, 4, random_seed=5)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        for buffer, backend in ((client, "ray"), (local, "inline")):
            with RolloutWorkers("random", "CartPole-v1", buffer, envs_per_worker=2, seed=3, backend=backend) as workers:
                assert workers.collect(n_step=80).n_collected_steps == 80
        assert len(client) == len(local) == 80
        (actual, _), (expected, _) = client.sample(32), local.sample(32)
        for name in ("obs", "act", "rew", "terminated", "truncated"):
            assert (actual[name] == expected[name]).all(), name


@pytest.mark.long
def test_states_are_interchangeable_with_process_workers() -> None:
    options: Any = {"seed": 5, "envs_per_worker": 2}
    local = partial(RolloutWorkers, ray_worlds.draw, "CartPole-v1", **options, backend="process")
    remote = partial(on_ray, ray_worlds.draw, "CartPole-v1", **options)
    with local() as first, remote() as second, remote() as third:
        first.collect(n_step=50)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        check_alike(first.collect(n_step=60).batch, expected := second.collect(n_step=60).batch)
        assert len(expected) == 60
        third.load_state_dict(second.state_dict(), allow_pickle=True)
        check_alike(first.collect(n_step=61).batch, third.collect(n_step=61).batch)
        assert third.stats.n_collected_steps == first.stats.n_collected_steps


def test_a_killed_actor_is_replaced_and_the_steps_are_repeated() -> None:
    buffer = VectorReplayBuffer(4000, 2)
    with on_ray(climb_here, SlowLadder, buffer, max_restarts=1, seed=1) as workers:
        workers.collect(n_step=2)
        killed = workers.pids[0]
        for number, _ in enumerate(workers.fragments(n_step=600, fragment_length=100)):
            if number == 1:
                os.kill(killed, signal.SIGKILL)
        facts = workers.worker_stats
    (failure,) = facts.failures
    assert (failure.index, failure.pid, failure.how, failure.replaced) == (0, killed, "died", True)
    assert workers.stats.n_collected_steps == len(buffer) == 602
    for ring in buffer.buffers:
        rows = ring[:]
        goes_on = (rows.obs[1:] == rows.obs_next[:-1]).all(1)
        assert (goes_on | rows.done[:-1]).all()


@pytest.mark.long
def test_reported_steps_of_a_killed_actor_are_counted_as_lost() -> None:
    with on_ray("random", SlowLadder, max_restarts=1, seed=1) as workers:
        workers.collect(n_step=2)
        killed = workers.pids[1]
        timer = threading.Timer(0.8, os.kill, [killed, signal.SIGKILL])
        timer.start()
        stats = workers.collect(n_step=2000)
        timer.join()
        failures = workers.worker_stats.failures
    assert stats.n_collected_steps == 2000
    assert len(failures) == 1, failures
    (failure,) = failures
    assert (failure.index, failure.pid) == (1, killed)
    # A step takes a millisecond or more, and actors are asked four times a second.
    assert 50 < failure.lost_steps < 1000
    assert workers.worker_stats.lost_steps == failure.lost_steps


def test_an_environment_that_raises_is_reported_with_its_traceback() -> None:
    words = r"worker 0 \(process \d+\) failed after sending 24 of 100 steps: RuntimeError: the rung broke"
    with on_ray("random", ray_worlds.Breaking, num_workers=1) as workers:
        fragments = workers.fragments(n_step=100, fragment_length=8)
        assert [len(next(fragments)) for _ in range(3)] == [8, 8, 8]
        with pytest.raises(WorkerError, match=words) as caught:
            next(fragments)
    assert "ray_worlds.py" in caught.value.__notes__[0]


def test_a_hanging_actor_is_killed_and_reported() -> None:
    with on_ray("random", ray_worlds.Hanging, num_workers=1, stall_timeout_s=1) as workers:
        actual = []
        with pytest.raises(WorkerError, match=r"hangs \(it completed no step for 1 s\) after sending 24 of 100"):
            actual += workers.fragments(n_step=100, fragment_length=8)
    assert workers.stats.n_collected_steps == 24


def test_an_actor_that_no_node_has_room_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplebatch.workers.backend._START_S", 1.0)
    options = RayOptions(resources={"nowhere": 1})
    with (
        RolloutWorkers(
            "random", "CartPole-v1", num_workers=1, backend="ray", ray_options=options, stall_timeout_s=1
        ) as workers,
        pytest.raises(WorkerError, match=r"did not start after sending 0 .* no node may have the resources"),
    ):
        workers.collect(n_step=1)


def test_an_actor_that_is_cancelled_before_it_starts_is_replaced() -> None:
    import ray

    busy = ray.remote(num_cpus=0, resources={"far": 8})(ray_worlds.SlowLadder).remote()
    options = RayOptions(resources={"far": 1}, runtime_env=ENVIRONMENT)
    with RolloutWorkers(
        "random", "CartPole-v1", num_workers=1, max_restarts=1, backend="ray", ray_options=options
    ) as workers:
        assert workers._pool is not None
        ray.kill(workers._pool.workers[0]._actor)  # type: ignore[attr-defined]
        ray.kill(busy)
        assert workers.collect(n_step=20).n_collected_steps == 20
        (failure,) = workers.worker_stats.failures
    assert failure.how == "did not start: The actor is dead because it was killed by `ray.kill`."
    assert failure.lost_steps == 0


@pytest.mark.long
def test_stopping_closes_environments(tmp_path: Path) -> None:
    with on_ray("random", ray_worlds.Closing, env_kwargs={"folder": str(tmp_path)}) as workers:
        workers.collect(n_step=10)
        pids = workers.pids
    assert {int(path.name) for path in tmp_path.iterdir()} == set(pids)


def test_leaving_early_discards_fragments_and_closes_environments(tmp_path: Path) -> None:
    options: Any = {"env_kwargs": {"folder": str(tmp_path), "pause_s": 0.01}}
    with on_ray("random", ray_worlds.Closing, **options) as workers:
        workers.collect(n_step=10)
        pids = workers.pids
        threading.Timer(0.3, workers.request_stop).start()
        assert list(workers.fragments(fragment_length=10_000)) == []
    assert {int(path.name) for path in tmp_path.iterdir()} == set(pids)


def test_actors_are_placed_by_their_resources(nodes: list[Any]) -> None:
    options = RayOptions(num_cpus=0.5, resources={"far": 1}, runtime_env=ENVIRONMENT)
    with RolloutWorkers(ray_worlds.tell_node, "CartPole-v1", num_workers=2, backend="ray", ray_options=options) as far:
        actual = far.collect(n_step=20).batch["policy.node"]
    assert set(actual.tolist()) == {ray_worlds.node_number(nodes[1])}


@pytest.mark.long
def test_actors_are_placed_by_a_scheduling_strategy(nodes: list[Any]) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = RayOptions(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0].node_id, soft=False))
    with RolloutWorkers(
        ray_worlds.tell_node, "CartPole-v1", num_workers=1, backend="ray", ray_options=options
    ) as first:
        actual = first.collect(n_step=20).batch["policy.node"]
    assert set(actual.tolist()) == {ray_worlds.node_number(nodes[0])}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"address": "ray://head:10001"}, "address must be of a cluster with this machine as a node"),
        ({"num_cpus": -1}, "num_cpus must be a number from 0, got -1"),
        ({"resources": {"far": float("nan")}}, "far must be a number from 0, got nan"),
        ({"in_flight": 0}, "in_flight must be a whole number from 1, got 0"),
        ({"memory": 0.5}, "memory must be a whole number from 1"),
    ],
)
def test_options_that_have_no_effect_are_rejected(value: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        RayOptions(**value)


def test_ray_options_require_ray_and_the_connected_cluster() -> None:
    with pytest.raises(ArgumentError, match="ray_options must be None unless backend is 'ray'"):
        RolloutWorkers("random", "CartPole-v1", ray_options=RayOptions())
    with pytest.raises(ArgumentError, match="ray_options must be RayOptions, got a dict"):
        RolloutWorkers("random", "CartPole-v1", backend="ray", ray_options={"num_cpus": 1})
    elsewhere = RolloutWorkers("random", "CartPole-v1", backend="ray", ray_options=RayOptions(address="127.0.0.1:1"))
    with pytest.raises(ArgumentError, match="the cluster that this process is connected to, got"):
        elsewhere.__enter__()


def test_missing_ray_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"samplebatch\[ray\]"):
        RolloutWorkers("random", "CartPole-v1", backend="ray")


def test_policies_may_use_another_pickle_function() -> None:
    import ray

    result = PickledPolicy(lambda obs: obs + 1, ray.cloudpickle.dumps)
    assert result()(1) == 2
