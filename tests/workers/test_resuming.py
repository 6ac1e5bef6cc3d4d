"""Workers that load a state continue exactly like the workers that saved it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import actors
import arena
import gyms
import numpy as np
import pytest

from samplebatch import RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError, FormatError, SampleBatchError, UntrustedPickleError, WorkerError
from samplebatch.rollout.aggregator import policies_of
from tests.malice import Mark

inline = partial(RolloutWorkers, backend="inline")
# Forks begin at once; that workers can be spawned is seen where they are.
forked = partial(RolloutWorkers, start_method="fork")

SPREAD = "mpe2/simple_spread_v3"


def drawing(obs: Any) -> Any:
    """Act by the global random generator, like torch's distributions."""
    return np.random.randint(0, 2, len(obs))


MAKERS: dict[str, Callable[..., RolloutWorkers]] = {
    "CartPole": partial(forked, "random", "CartPole-v1", envs_per_worker=2, seed=5),
    "simple_spread": partial(forked, "random", SPREAD, envs_per_worker=2, seed=5),
    "drawing": partial(RolloutWorkers, drawing, "CartPole-v1", seed=5),
}


def columns(batch: Any) -> dict[str, Any]:
    """List the columns of a batch in order, except for the random episode ids."""
    return {
        f"{policy}.{name}": [] if name == "eps_id" else np.asarray(steps[name]).tolist()
        for policy, steps in policies_of(batch).items()
        for name in steps.column_names
    }


def observed(batch: Any) -> list[Any]:
    return [np.asarray(steps["obs"]).tolist() for steps in policies_of(batch).values()]


@pytest.mark.parametrize("name", MAKERS)
def test_resumed_workers_resume_exactly(name: str) -> None:
    with MAKERS[name]() as first, MAKERS[name]() as second:
        started = first.collect(n_step=50).batch
        state = pickle.loads(pickle.dumps(first.state_dict()))
        assert state["why_reset"] is None
        second.load_state_dict(state, allow_pickle=True)
        for amount in ({"n_step": 70}, {"n_episode": 5}, {"n_step": 61}):
            left, other = first.collect(**amount), second.collect(**amount)
            assert observed(other.batch) != observed(started), "the first data come again"
            assert str(list(columns(left.batch).items())) == str(list(columns(other.batch).items()))
            assert sorted(left.returns.tolist()) == sorted(other.returns.tolist())
            assert sorted(left.lens.tolist()) == sorted(other.lens.tolist())
        assert first.stats.n_collected_steps == second.stats.n_collected_steps
        assert first.stats.n_collected_episodes == second.stats.n_collected_episodes


_IN_ANOTHER_PROCESS = """
import pickle, sys
sys.path[:0] = [{here!r}, {root!r}, {rollout!r}]
import test_resuming
if __name__ == "__main__":
    state = pickle.loads(sys.stdin.buffer.read())
    with test_resuming.MAKERS[{name!r}]() as workers:
        workers.load_state_dict(state, allow_pickle=True)
        found = str(list(test_resuming.columns(workers.collect(n_step=60).batch).items()))
    sys.stdout.buffer.write(pickle.dumps(found))
"""


@pytest.mark.parametrize("name", ["CartPole", "simple_spread"])
def test_another_process_resumes(name: str, tmp_path: Path) -> None:
    with MAKERS[name]() as first:
        first.collect(n_step=30)
        state = pickle.dumps(first.state_dict())
        expected = str(list(columns(first.collect(n_step=60).batch).items()))
    here = Path(__file__).parent
    script = tmp_path / "resumed.py"
    paths = {"here": str(here), "root": str(here.parents[1]), "rollout": str(here.parent / "rollout")}
    script.write_text(_IN_ANOTHER_PROCESS.format(name=name, **paths))
    ended = subprocess.run([sys.executable, str(script)], input=state, capture_output=True, check=True)
    assert pickle.loads(ended.stdout) == expected


def test_episode_ids_and_fragment_numbers_continue() -> None:
    with inline("random", "CartPole-v1", seed=1) as first, inline("random", "CartPole-v1", seed=1) as second:
        first.collect(n_step=6)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        left, other = (workers.collect(n_step=2).batch for workers in (first, second))
        assert left["eps_id"].tolist() == other["eps_id"].tolist()
        assert left["t"].tolist() == [3, 3]
        assert left["unroll_id"].tolist() == other["unroll_id"].tolist() == [1, (1 << 32) + 1]


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_weights_and_their_versions_are_restored(backend: Any) -> None:
    make = partial(forked, actors.Marked, "CartPole-v1", backend=backend, seed=1, max_lag=1)
    with make() as first, make() as second:
        for mark in (3.0, 7.0):
            first.publish({"mark": np.full(1, mark)})
        first.collect(n_step=4)
        second.publish({"mark": np.zeros(1)})
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        for version in (2, 3):
            left, other = (workers.collect(n_step=4).batch for workers in (first, second))
            assert columns(left) == columns(other)
            assert other["weights_version"].tolist() == [version] * 4
            assert {workers.publish({"mark": np.full(1, 9.0)}) for workers in (first, second)} == {version + 1}


def test_a_state_without_weights_is_loaded_before_any_are_published() -> None:
    with inline(actors.Marked, "CartPole-v1") as workers:
        state = workers.state_dict()
        workers.publish({"mark": np.zeros(1)})
        with pytest.raises(ArgumentError, match="without weights must be loaded before weights are published"):
            workers.load_state_dict(state, allow_pickle=True)


class Endless(gyms.Ladder):
    """Environment that cannot be pickled and whose observations depend on its seed."""

    def __init__(self) -> None:
        super().__init__(0, 10_000)
        self.unpicklable = (number for number in range(3))

    def _observe(self) -> Any:
        return self.np_random.random(3).astype(np.float32)


def test_environments_that_cannot_be_saved_are_reset_with_other_seeds() -> None:
    with forked("random", Endless, seed=3) as first, forked("random", Endless, seed=3) as second:
        before = first.collect(n_step=8).batch
        state = first.state_dict()
        assert "cannot pickle" in state["why_reset"]
        second.load_state_dict(state)
        after = second.collect(n_step=8).batch
        assert after["t"].tolist() == [0, 1, 2, 3] * 2, "episodes begin with the reset"
        assert not set(before["obs"].ravel().tolist()) & set(after["obs"].ravel().tolist())


def test_a_buffer_gets_the_same_steps() -> None:
    makers = [partial(inline, "random", "CartPole-v1", seed=1) for _ in range(2)]
    with makers[0](VectorReplayBuffer(200, 2)) as first, makers[1](VectorReplayBuffer(200, 2)) as second:
        first.collect(n_step=50)
        second.buffer.load_state_dict(first.buffer.state_dict())
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        for workers in (first, second):
            workers.collect(n_step=60)
        assert str(first.buffer[:]) == str(second.buffer[:])


def test_a_ring_has_no_gap_where_environments_could_not_be_saved() -> None:
    with inline("random", Endless, VectorReplayBuffer(200, 2)) as first:
        first.collect(n_step=10)
        with inline("random", Endless, VectorReplayBuffer(200, 2)) as second:
            second.buffer.load_state_dict(first.buffer.state_dict())
            second.load_state_dict(first.state_dict())
            second.collect(n_step=10)
            assert second.buffer.truncated[[4, 104]].tolist() == [True, True]
            assert second.buffer.truncated.sum() == 2


def test_a_replacement_after_a_resume_repeats_nothing() -> None:
    make = partial(forked, "random", Endless, seed=3, num_workers=1, max_restarts=1)
    recorded: list[list[float]] = []
    ids: list[int] = []

    def collect(workers: RolloutWorkers) -> None:
        batch = workers.collect(n_step=4).batch
        recorded.append(batch["obs"].ravel().tolist())
        ids.append(int(batch["unroll_id"][0]))

    with make() as first:
        collect(first)
        kill(first)
        collect(first)
        state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        collect(second)
        kill(second)
        collect(second)
    values = [value for part in recorded for value in part]
    assert len(values) == len(set(values)) == 4 * 4 * 3
    assert ids == sorted(set(ids))


def kill(workers: RolloutWorkers, position: int = 0) -> None:
    os.kill(workers.pids[position], signal.SIGKILL)
    time.sleep(0.2)


class Deadly(gyms.Ladder):
    """Environment whose process is killed while the environment is pickled."""

    def __getstate__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_while_saving_its_state_is_reported() -> None:
    with forked("random", partial(Deadly, 0), num_workers=1) as workers:
        workers.collect(n_step=4)
        with pytest.raises(WorkerError, match=r"worker 0 \(process \d+\) was killed by SIGKILL"):
            workers.state_dict()
        assert workers.pids == []


def test_a_dead_worker_is_replaced_when_the_state_is_saved() -> None:
    with forked("random", "CartPole-v1", max_restarts=1) as workers:
        workers.collect(n_step=4)
        kill(workers, 1)
        state = workers.state_dict()
        assert state["failures"] == workers.worker_stats.restarts == 1
        workers.load_state_dict(state, allow_pickle=True)
        assert workers.collect(n_step=4).n_collected_steps == 4


class Telling(gyms.Ladder):
    """Environment whose infos can be neither copied nor pickled."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"numbers": (number for number in range(3))}


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_workers_continue_if_their_state_cannot_be_saved(backend: Any) -> None:
    with forked("random", partial(Telling, 0), backend=backend, infos=False) as workers:
        workers.collect(n_step=3)
        with pytest.raises(WorkerError, match="worker 0 cannot save its state: TypeError: cannot pickle 'generator'"):
            workers.state_dict()
        assert workers.collect(n_step=4).n_collected_steps == 4


class Wide(gyms.Ladder):
    """Environment with a large state."""

    def __init__(self) -> None:
        super().__init__(0, 7)
        self.map = np.arange(3 << 20)


def test_a_state_larger_than_the_arena_is_sent_in_parts() -> None:
    make = partial(forked, "random", Wide, num_workers=1, capacity_nbytes=8 << 20, seed=1)
    with make() as first, make() as second:
        first.collect(n_step=5)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        assert columns(first.collect(n_step=9).batch) == columns(second.collect(n_step=9).batch)


def test_environments_are_not_unpickled_without_permission(mark: Path) -> None:
    with inline("random", "CartPole-v1") as workers:
        state = workers.state_dict()
        state["workers"][0]["task"]["collector"]["environments"][0]["saved"]["pickles"] = [pickle.dumps(Mark(mark))]
        with pytest.raises(UntrustedPickleError, match="the state of workers holds pickled objects"):
            workers.load_state_dict(state)
        workers.collect(n_step=3)


def test_states_that_do_not_fit_are_rejected_and_change_nothing() -> None:
    with inline("random", "CartPole-v1", seed=1) as workers, inline("random", "CartPole-v1", seed=1) as same:
        with pytest.raises(FormatError, match="the state of workers must have the entry 'workers'"):
            workers.load_state_dict({})
        with (
            inline("random", "CartPole-v1", num_workers=1) as others,
            pytest.raises(ArgumentError, match="of 2 workers with 1"),
        ):
            workers.load_state_dict(others.state_dict(), allow_pickle=True)
        with (
            inline("random", SPREAD) as others,
            pytest.raises(ArgumentError, match="a Collector of 1 environments, got a MultiAgentCollector"),
        ):
            workers.load_state_dict(others.state_dict(), allow_pickle=True)
        assert columns(workers.collect(n_step=20).batch) == columns(same.collect(n_step=20).batch)


def test_saving_the_state_is_rejected_during_an_iteration() -> None:
    with inline("random", "CartPole-v1", seed=1) as workers:
        next(workers.fragments(n_step=100, fragment_length=10))
        with pytest.raises(WorkerError, match="must be exhausted before workers save their state"):
            workers.state_dict()
        remaining = list(workers.fragments(n_step=100, fragment_length=10))
        assert sum(len(fragment) for fragment in remaining) == 90
        assert workers.state_dict()["received"]["run"]["env_steps"] == 100


def test_fragments_of_a_call_that_was_interrupted_are_in_the_state() -> None:
    def interrupt(*_: Any) -> None:
        raise TimeoutError

    slow = partial(arena.Relay, 0.005)
    with forked("random", slow, seed=1) as first, inline("random", slow, seed=1) as second:
        first.collect(n_step=2)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TimeoutError):
                first.collect(n_step=100)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        assert columns(first.collect(n_step=4).batch) == columns(second.collect(n_step=4).batch)
        fragments = second.fragments()
        assert sum(next(fragments).count for _ in range(2)) == 100


def test_workers_must_be_started() -> None:
    workers = inline("random", "CartPole-v1")
    with pytest.raises(WorkerError, match="use them in a with statement"):
        workers.state_dict()


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_rejected_with_advice(take: Any) -> None:
    with pytest.raises(
        SampleBatchError, match=r"a RolloutWorkers must not be copied or pickled, .* pass its state_dict"
    ):
        take(inline("random", "CartPole-v1"))


@pytest.mark.parametrize("environment", ["CartPole-v1", SPREAD])
def test_abandoned_episodes_do_not_increase_the_state_of_a_long_run(environment: str) -> None:
    with inline("random", environment, num_workers=1, envs_per_worker=2, seed=5) as workers:
        for _ in range(6):
            workers.collect(n_step=5)
            workers.collect(n_episode=1)
        assert len(workers.state_dict()["workers"][0]["task"]["episodes"]["open"]) <= 2
