"""Workers that collect as the other collectors do: reports, batches, buffers, and one version of the weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import actors
import arena
import gyms
import numpy as np
import pytest

from samplebatch import (
    Collector,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    RolloutWorkers,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.errors import ArgumentError, WorkerError

TAG = "mpe2/simple_tag_v3"
UNLIKE = {"eps_id", "unroll_id", "weights_version", "infos"}
"""Columns that differ between runs or collectors."""

inline = partial(RolloutWorkers, backend="inline")
# Forks begin at once; that workers can be spawned is seen where they are.
forked = partial(RolloutWorkers, start_method="fork")


def check_alike(first: SampleBatch, other: SampleBatch) -> None:
    assert set(first.column_names) - UNLIKE == set(other.column_names) - UNLIKE
    for name in set(first.column_names) - UNLIKE:
        assert first[name].tolist() == other[name].tolist(), name


def check_rings(buffer: Any) -> int:
    """Check that every ring contains the steps of one ladder in order; return the number of truncated episodes."""
    cut = 0
    for ring in buffer.buffers:
        rows = ring[:]
        assert (rows.obs_next == rows.obs + np.array([0, 0, 1])).all()
        goes_on = (rows.obs[1:] == rows.obs_next[:-1]).all(1)
        assert (goes_on | rows.done[:-1]).all()
        assert len(np.unique(np.column_stack([rows.policy.pid, rows.obs]), axis=0)) == len(rows)
        cut += int((rows.done & ~rows.terminated).sum())
    return cut


def climb_here(obs: Any) -> dict[str, Any]:
    """Act, and record the process id."""
    return {"act": np.zeros(len(obs), np.int64), "policy": {"pid": np.full(len(obs), os.getpid())}}


def ladder() -> gyms.Ladder:
    return gyms.Ladder(0, 7)


class SlowLadder(gyms.Ladder):
    """A slow ladder."""

    def __init__(self) -> None:
        super().__init__(0, 7)

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


class BrokenLadder(gyms.Ladder):
    """A ladder that breaks in the second call of `collect`."""

    def __init__(self) -> None:
        super().__init__(0, 7)

    def step(self, action: Any) -> Any:
        if len(self.made) == 15:
            raise RuntimeError("the rung broke")
        return super().step(action)


def test_the_report_agrees_with_a_collector() -> None:
    with (
        inline(actors.lean, "CartPole-v1", num_workers=1, envs_per_worker=3, seed=5) as workers,
        Collector(actors.lean, "CartPole-v1", num_envs=3, seed=5) as collector,
    ):
        for amount in ({"n_step": 200}, {"n_step": 100}, {"n_episode": 4}):
            stats, expected = workers.collect(**amount), collector.collect(**amount)
            check_alike(stats.batch, expected.batch)
            assert stats.n_collected_steps == expected.n_collected_steps
            assert stats.n_collected_episodes == expected.n_collected_episodes
            assert sorted(stats.returns) == sorted(expected.returns)
            assert sorted(stats.lens) == sorted(expected.lens)
            assert stats.returns_stat == expected.returns_stat
            assert stats.policies == {}
            assert stats.collect_speed > 0
        assert workers.stats.n_collected_steps == collector.collect_step
        assert workers.stats.n_collected_episodes == collector.collect_episode


def test_the_report_contains_every_policy() -> None:
    with (
        inline("random", TAG, num_workers=1, envs_per_worker=2, seed=5) as workers,
        MultiAgentCollector("random", TAG, num_envs=2, seed=5) as collector,
    ):
        for amount in ({"n_step": 60}, {"n_step": 31}, {"n_episode": 3}):
            stats, expected = workers.collect(**amount), collector.collect(**amount)
            assert stats.n_collected_steps == expected.n_collected_steps == stats.batch.count
            assert stats.n_collected_episodes == expected.n_collected_episodes
            assert stats.policies.keys() == expected.policies.keys()
            for policy, part in stats.policies.items():
                check_alike(part.batch, expected.policies[policy].batch)
                assert part.n_collected_steps == expected.policies[policy].n_collected_steps
                assert sorted(part.returns) == sorted(expected.policies[policy].returns)


@pytest.mark.parametrize("env", ["CartPole-v1", TAG, "arena:Bazaar"])
def test_a_batch_does_not_depend_on_the_number_of_workers(env: str) -> None:
    actual = []
    for workers, envs in ((1, 4), (2, 2)):
        with inline("random", env, num_workers=workers, envs_per_worker=envs, seed=3) as pool:
            actual.append([pool.collect(n_step=100).batch.as_multi_agent() for _ in range(2)])
    for first, other in zip(*actual, strict=True):
        assert first.count == other.count == 100
        for policy, steps in first.policy_batches.items():
            if env != "arena:Bazaar":
                check_alike(steps, other[policy])
            assert (np.diff(steps["env_id"]) >= 0).all()


@pytest.mark.parametrize("env", ["CartPole-v1", "arena:Relay"])
def test_every_batch_is_collected_with_one_version_of_the_weights(env: str) -> None:
    with forked("actors:Marked", env, seed=1, capacity_nbytes=1 << 16) as workers:
        for version in range(4):
            if version:
                assert workers.publish({"mark": np.array([10.0 * version])}) == version
            # More than half of an arena: a share comes in parts.
            batch = workers.collect(n_step=1500).batch.as_multi_agent()
            assert batch.count == 1500
            (steps,) = batch.policy_batches.values()
            assert set(steps["weights_version"].tolist()) == {version}
            assert set(steps["policy.mark"].tolist()) == {10.0 * version}
            stream = steps["env_id"] * 10 + steps["agent_index"]
            assert (np.diff(stream) >= 0).all()
        assert workers.worker_stats.fragments > 8


def test_publishing_waits_until_a_batch_is_complete() -> None:
    with forked("actors:Marked", SlowLadder, num_workers=1, seed=1) as workers:
        workers.collect(n_step=1)
        learner = threading.Timer(0.1, workers.publish, [{"mark": np.array([1.0])}])
        learner.start()
        batch = workers.collect(n_step=300).batch
        learner.join()
        assert set(batch["weights_version"].tolist()) == {0}
        assert set(workers.collect(n_step=5).batch["weights_version"].tolist()) == {1}


@pytest.mark.parametrize("kind", [VectorReplayBuffer, PrioritizedVectorReplayBuffer])
def test_a_buffer_has_a_ring_for_each_environment_of_all_workers(kind: Any) -> None:
    options = {"alpha": 0.6, "beta": 0.4} if kind is PrioritizedVectorReplayBuffer else {}
    buffer, expected = kind(4000, 4, **options), VectorReplayBuffer(4000, 4)
    with (
        forked(actors.lean, "CartPole-v1", buffer, envs_per_worker=2, seed=3) as workers,
        Collector(actors.lean, "CartPole-v1", expected, num_envs=4, seed=3) as collector,
    ):
        for _ in range(3):
            stats = workers.collect(n_step=200)
            assert stats.batch is None
            assert stats.n_collected_steps == 200
        collector.collect(n_step=600)
    for ring, other in zip(buffer.buffers, expected.buffers, strict=True):
        assert len(ring) == len(other) == 150
        for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
            assert (ring[:][name] == other[:][name]).all(), name
    assert set(expected.sample(1)[0].keys()) <= set(buffer.sample(1)[0].keys())


def test_iteration_fills_a_buffer() -> None:
    buffer = VectorReplayBuffer(4000, 4)
    with forked(climb_here, ladder, buffer, envs_per_worker=2) as workers:
        fragments = list(workers.fragments(n_step=402, fragment_length=30))
        assert sum(map(len, fragments)) == len(buffer) == 402
        check_rings(buffer)
        # The iteration left a step of some environments out: their episodes cannot go on.
        workers.collect(n_step=100)
    assert len(buffer) == 502
    assert check_rings(buffer) <= 4


def test_a_multi_agent_buffer_is_filled_like_by_a_collector() -> None:
    buffer, expected = MultiAgentReplayBuffer(1000), MultiAgentReplayBuffer(1000)
    with (
        inline("random", TAG, buffer, num_workers=1, envs_per_worker=2, seed=3) as workers,
        MultiAgentCollector("random", TAG, expected, num_envs=2, seed=3) as collector,
    ):
        for _ in range(3):
            stats = workers.collect(n_step=40)
            assert stats.batch is None
            assert {policy: part.n_collected_steps for policy, part in stats.policies.items()} == {
                "adversary": 120,
                "agent": 40,
            }
            collector.collect(n_step=40)
    assert len(buffer) == len(expected) == 480
    for policy, steps in buffer.sample(0).batch.items():
        check_alike(steps, expected.sample(0).batch[policy])


@pytest.mark.parametrize("envs", [1, 2])
def test_a_plain_buffer_accepts_one_environment(envs: int) -> None:
    buffer = ReplayBuffer(100)
    if envs == 1:
        with inline(climb_here, ladder, buffer, num_workers=1) as workers:
            workers.collect(n_step=30)
        assert len(buffer) == 30
    else:
        with pytest.raises(ArgumentError, match="must have a ring for each of 2 environments, got 1"):
            inline(climb_here, ladder, buffer, num_workers=envs)


def test_environments_that_do_not_fit_the_buffer_are_rejected() -> None:
    with (
        inline("random", "arena:vector_of_carts", VectorReplayBuffer(10, 1), num_workers=1) as workers,
        pytest.raises(ArgumentError, match="a ring for each of 2 environments"),
    ):
        workers.collect(n_step=2)
    with (
        inline("random", TAG, VectorReplayBuffer(10, 2)) as workers,
        pytest.raises(ArgumentError, match="must be a MultiAgentReplayBuffer for these environments"),
    ):
        workers.collect(n_step=2)
    with pytest.raises(ArgumentError, match="hooks must be empty with a buffer"):
        inline("random", ladder, ReplayBuffer(10), num_workers=1, hooks=[print])


def kill_soon(workers: RolloutWorkers, position: int, after_s: float) -> threading.Timer:
    timer = threading.Timer(after_s, os.kill, [workers.pids[position], signal.SIGKILL])
    timer.start()
    return timer


@pytest.mark.parametrize("collects", [True, False])
def test_killed_workers_cause_neither_gaps_nor_duplicates(collects: bool) -> None:
    buffer = VectorReplayBuffer(8000, 4)
    with forked(climb_here, SlowLadder, buffer, envs_per_worker=2, max_restarts=9) as workers:
        if collects:
            for position in (0, 1, 0):
                timer = kill_soon(workers, position, 0.1)
                assert workers.collect(n_step=400).n_collected_steps == 400
                timer.join()
        else:
            timers = []
            for number, _ in enumerate(workers.fragments(n_step=1200, fragment_length=20)):
                if number in (5, 15):
                    timers.append(kill_soon(workers, number % 2, 0.01))
            for timer in timers:
                timer.join()
        facts, stats = workers.worker_stats, workers.stats
    assert facts.restarts >= 2
    assert stats.n_collected_steps == len(buffer) == 1200
    # A worker may have died when the episodes of its environments had just ended.
    assert check_rings(buffer) <= 2 * facts.restarts


def test_a_replacement_worker_repeats_the_lost_steps() -> None:
    with forked("random", "arena:slow_relay", max_restarts=1, seed=1) as workers:
        workers.collect(n_step=2)
        timer = kill_soon(workers, 0, 0.1)
        batch = workers.collect(n_step=300).batch
        timer.join()
        (failure,) = workers.worker_stats.failures
        assert failure.how == "was killed by SIGKILL"
        assert 0 < failure.lost_steps <= 150
        assert batch.count == 300
        assert np.unique(batch["runner"]["env_id"]).tolist() == [0, 1]


def test_a_dead_idle_worker_is_replaced_by_the_next_call() -> None:
    with forked("random", ladder, max_restarts=1) as workers:
        workers.collect(n_step=2)
        os.kill(workers.pids[1], signal.SIGKILL)
        time.sleep(0.2)
        assert workers.collect(n_step=100).n_collected_steps == 100
        assert workers.worker_stats.restarts == 1


def test_a_failure_loses_no_received_steps() -> None:
    def make() -> gyms.Ladder:
        # Workers are made one after the other: the second one's breaks.
        created.append(None)
        return ladder() if len(created) == 1 else BrokenLadder()

    created: list[None] = []
    with inline("random", make, num_workers=2) as workers:
        assert workers.collect(n_step=20).n_collected_steps == 20
        with pytest.raises(WorkerError, match=r"worker 1 .* failed after sending 0 of 6 steps: RuntimeError: the rung"):
            workers.collect(n_step=12)
        assert workers.stats.n_collected_steps == 26
        with pytest.raises(WorkerError, match="they have been stopped"):
            workers.collect(n_step=1)
        assert [fragment["env_id"].tolist() for fragment in workers.fragments()] == [[0] * 6]


def test_an_interrupted_call_is_completed_by_the_next_one() -> None:
    def interrupt(*_: Any) -> None:
        raise TimeoutError

    with forked("random", SlowLadder) as workers:
        workers.collect(n_step=2)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.15)
            with pytest.raises(TimeoutError):
                workers.collect(n_step=1000)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert workers.collect(n_step=10).n_collected_steps == len(workers.collect(n_step=10).batch) == 10
        assert workers.stats.n_collected_steps == 2 + 1000 + 20
        fragments = workers.fragments()
        assert sum(len(next(fragments)) for _ in range(2)) == 1000


class ClosingLadder(gyms.Ladder):
    """A ladder that makes a file when it is closed, which takes a while."""

    def __init__(self, folder: str) -> None:
        super().__init__(0, 7)
        self._folder = folder

    def close(self) -> None:
        time.sleep(0.3)
        Path(self._folder, str(os.getpid())).touch()


def test_idle_workers_close_their_environments(tmp_path: Path) -> None:
    with forked("random", ClosingLadder, env_kwargs={"folder": str(tmp_path)}) as workers:
        pids = workers.pids
        workers.collect(n_step=10)
    assert {int(path.name) for path in tmp_path.iterdir()} == set(pids)


def test_collect_is_rejected_during_an_iteration() -> None:
    with inline("random", "CartPole-v1") as workers:
        fragments = workers.fragments(n_step=40, fragment_length=10)
        next(fragments)
        with pytest.raises(WorkerError, match="must be exhausted before workers collect"):
            workers.collect(n_step=1)
        assert sum(len(fragment) for fragment in fragments) == 30
        assert workers.collect(n_step=10).n_collected_steps == 10
        # The next iteration is another one.
        assert sum(len(fragment) for fragment in workers.fragments(n_step=40, fragment_length=10)) == 40
    with pytest.raises(WorkerError, match="with statement"):
        RolloutWorkers("random", "CartPole-v1").collect(n_step=1)
    with (
        inline("random", "CartPole-v1") as workers,
        pytest.raises(ArgumentError, match="exactly one of n_step and n_episode"),
    ):
        workers.collect(n_step=1, n_episode=1)


def test_fragments_that_are_too_old_are_dropped() -> None:
    versions: list[tuple[int, int]] = []
    with forked("actors:Marked", "CartPole-v1", num_workers=1, max_lag=1, capacity_nbytes=1 << 18) as workers:
        fragments = workers.fragments(fragment_length=20)
        next(fragments)
        newest = 0
        for _ in range(4):
            deadline = time.monotonic() + 10
            while workers.worker_stats.queue_depth < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            for _ in range(3):
                newest = workers.publish({"mark": np.array([1.0])})
            versions.append((newest, int(next(fragments)["weights_version"][0])))
        facts, stats = workers.worker_stats, workers.stats
    assert all(newest - version <= 1 for newest, version in versions)
    assert facts.stale_fragments >= 4
    assert facts.stale_steps == 20 * facts.stale_fragments
    assert stats.n_collected_steps == 20 * 5
    assert sum(facts.versions.values()) == stats.n_collected_steps + facts.stale_steps


def test_stale_fragments_leave_no_gap_in_a_buffer() -> None:
    buffer = VectorReplayBuffer(4000, 1)
    options = {"num_workers": 1, "max_lag": 0, "capacity_nbytes": 1 << 16}
    with RolloutWorkers(telling, SlowLadder, buffer, **options) as workers:
        for number, _ in enumerate(workers.fragments(fragment_length=20)):
            workers.publish({"mark": np.array([1.0])})
            if number == 10:
                break
        facts = workers.worker_stats
        assert len(buffer) == workers.stats.n_collected_steps == 11 * 20
    assert facts.stale_steps > 0
    assert check_rings(buffer) <= facts.stale_fragments


class telling(actors.Marked):
    """A policy that accepts weights and records its process id."""

    def __call__(self, obs: Any) -> dict[str, Any]:
        return climb_here(obs)


def test_noise_and_action_maps_apply_to_several_agents() -> None:
    def noisy(actions: Any, batch: Any) -> Any:
        return np.full_like(actions, 3)

    def mapped(actions: Any) -> Any:
        return actions - 1

    with inline(arena.steady, arena.Relay, num_workers=1, exploration_noise=noisy, map_action=mapped) as workers:
        assert set(workers.collect(n_step=20).batch["runner"]["actions"].tolist()) == {3}


@pytest.mark.parametrize(
    ("policy", "env"),
    [("CartPole-v1", "random"), ("mpe2/simple_tag_v3", {"agent": "random"}), (["CartPole-v1"] * 2, actors.lean)],
)
def test_swapped_policy_and_environment_are_reported(policy: Any, env: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^RolloutWorkers must be called with \(policy, env, buffer\), got env"):
        RolloutWorkers(policy, env)


def test_a_policy_and_an_environment_may_both_be_created_by_functions() -> None:
    with inline(lambda: actors.lean, lambda length=3: gyms.Ladder(0, length), num_workers=1) as workers:
        assert workers.collect(n_step=3).batch["terminated" + "s"].tolist() == [False, False, True]


def test_random_steps_and_reset_seeds_agree_with_a_collector() -> None:
    options: dict[str, Any] = {"random": True, "reset_before_collect": True, "gym_reset_kwargs": {"seed": 7}}
    with (
        inline("random", TAG, num_workers=2, envs_per_worker=2, seed=5) as workers,
        MultiAgentCollector("random", TAG, num_envs=4, seed=5) as collector,
    ):
        for item in (workers, collector):
            item.collect(n_step=40)
        workers.request(n_step=80, **options)
        actual, expected = workers.collect(n_step=80, **options), collector.collect(n_step=80, **options)
    for policy_id, steps in actual.batch.items():
        check_alike(steps, expected.batch[policy_id])


def test_workers_have_separate_resets_and_random_actions() -> None:
    starts = {"reset_before_collect": True, "gym_reset_kwargs": {"seed": 7}}
    with (
        inline(actors.lean, "CartPole-v1", envs_per_worker=2) as workers,
        Collector(actors.lean, "CartPole-v1", num_envs=4) as collector,
    ):
        for item in (workers, collector):
            item.collect(n_step=40)
        check_alike(workers.collect(n_step=80, **starts).batch, collector.collect(n_step=80, **starts).batch)
        sampled = workers.collect(n_step=200, random=True).batch
    actions = [sampled["actions"][sampled["env_id"] == env_id].tolist() for env_id in (0, 2)]
    assert actions[0] != actions[1]
