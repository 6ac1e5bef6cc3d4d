"""An asynchronous collector stores every step once and does not wait for slow environments."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import gyms
import numpy as np
import pytest
from checks import check_trajectories
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from samplebatch import AsyncCollector, Batch, Collector, ReplayBuffer, SampleBatch, VectorReplayBuffer, concat_samples
from samplebatch.errors import ArgumentError, ColumnMismatchError, EnvironmentSpecError, PolicySpecError, WorkerError
from tests.optional import torch

Async = partial(AsyncCollector, start_method="fork")
CONTEXT = multiprocessing.get_context("fork")
COMPARED = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "infos", "env_id", "t", "agent_index")


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), int)


def lean(obs: Any) -> Any:
    return (obs[:, 2] + obs[:, 3] > 0).astype(int)


def ladders(lengths: list[int], kind: Any = gyms.Ladder, **options: Any) -> list[Any]:
    return [partial(kind, n, length, **options) for n, length in enumerate(lengths)]


def cart_poles(count: int) -> list[Any]:
    return [lambda: gymnasium.make("CartPole-v1", max_episode_steps=30)] * count


@contextmanager
def gated(
    policy: Any, lengths: list[int], shut: list[int], **options: Any
) -> Iterator[tuple[AsyncCollector, Any, Any]]:
    """Collect from ladders, some of which wait in every step until a gate is opened.

    Yields
    ------
    The collector, the gate, and the number of steps of each environment.
    """
    gate, steps = CONTEXT.RawValue("b", 0), CONTEXT.RawArray("i", len(lengths))
    makers = [
        lambda n=n, length=length: gyms.Watched(n, length, steps=steps, gate=gate if n in shut else None)
        for n, length in enumerate(lengths)
    ]
    collector = Async(policy, makers, **options)
    try:
        yield collector, gate, steps
    finally:
        gate.value = 1
        collector.close()


def joined(batches: list[SampleBatch]) -> SampleBatch:
    """Concatenate the batches of several calls, and sort the steps by environment."""
    joined = concat_samples(batches)
    return joined[np.lexsort((np.arange(len(joined)), joined["env_id"]))]


# Who waits for whom


def test_a_slow_environment_does_not_delay_the_others() -> None:
    buffer = VectorReplayBuffer(9000, 3)
    with gated(stay, [4, 4, 4], [0], buffer=buffer) as (collector, gate, steps):
        counted = sum(collector.collect(n_step=30).n_collected_steps for _ in range(3))
        assert counted >= 90
        assert not len(buffer.buffers[0])
        gate.value = 1
        while not len(buffer.buffers[0]):
            counted += collector.collect(n_step=1).n_collected_steps
        collector.reset_env()
        # Every step that was made is there: those under way while nobody waited for them, too.
        assert [len(ring) for ring in buffer.buffers] == list(steps)
        counted += collector.collect(n_step=1).n_collected_steps
        assert counted == collector.collect_step == len(buffer)
    for ring in buffer.buffers:
        assert ring[:].obs[:, 2].tolist()[: len(ring) - 1] == [t % 4 for t in range(len(ring) - 1)]


def test_environments_step_at_their_own_speed() -> None:
    makers = [lambda n=n, s=s: gyms.Watched(n, 5, pause_s=s) for n, s in enumerate([0.2, 0.002, 0.002])]
    with Async(stay, makers) as collector:
        counts = np.bincount(collector.collect(n_step=100).batch["env_id"], minlength=3)
    # A step of the first environment lasts 100 times as long, less on a busy machine.
    assert counts[0] * 2 < counts[1:].min()


def test_the_policy_is_called_when_enough_environments_are_ready() -> None:
    for shut, wait_num, expected in (([0], 2, [3, 2, 2, 2]), ([], 3, [3, 3, 3]), ([0, 1], 1, [3, 1, 1, 1])):
        recorded: list[int] = []

        def policy(obs: Any, observed: list[int] = recorded) -> Any:
            observed.append(len(obs))
            return stay(obs)

        with gated(policy, [9, 9, 9], shut, wait_num=wait_num) as (collector, _, _):
            collector.collect(n_step=(3 - len(shut)) * len(expected))
            assert recorded == expected


def test_after_a_timeout_fewer_ready_environments_are_enough() -> None:
    recorded = []

    def policy(obs: Any) -> Any:
        recorded.append(obs[:, 0].tolist())
        return stay(obs)

    with gated(policy, [9, 9, 9], [0], timeout_s=0.05) as (collector, _, _):
        collector.collect(n_step=4)
    assert recorded[0] == [0, 1, 2]
    assert len(recorded) > 1
    assert not any(0 in envs for envs in recorded[1:])
    # However short the time: there must be one.
    with Async(stay, [lambda: gyms.Watched(0, 4, pause_s=0.05)], timeout_s=0.0) as collector:
        assert collector.collect(n_step=1).n_collected_steps == 1


# The same as Collector


def test_trajectories_agree_with_a_synchronous_collector() -> None:
    with Collector(lean, SyncVectorEnv(cart_poles(3)), seed=4) as collector:
        expected = collector.collect(n_step=300).batch
    with Async(lean, cart_poles(3), seed=4) as collector:
        actual = joined([collector.collect(n_step=steps).batch for steps in (100, 1, 199)])
    assert actual.column_names == expected.column_names
    check_trajectories(actual)
    both = 0
    for env in range(3):
        first, other = expected[expected["env_id"] == env], actual[actual["env_id"] == env]
        least = min(len(first), len(other))
        both += least
        for name in COMPARED:
            assert first[name].dtype == other[name].dtype
            assert first[name][:least].tolist() == other[name][:least].tolist(), name
    assert both > 100
    assert actual["truncateds"].any()


def test_one_step_per_environment_steps_all_environments() -> None:
    columns = []
    for result in (
        Collector(lean, SyncVectorEnv(cart_poles(3)), seed=4),
        Async(lean, cart_poles(3), seed=4, wait_num=3),
    ):
        with result as collector:
            batch = collector.collect(n_step=3).batch
            columns.append({name: batch[name].tolist() for name in batch.column_names if name != "eps_id"})
            obs, _ = collector.reset(gym_reset_kwargs={"seed": 3})
            columns[-1]["begun"] = obs.tolist()
            collector.collect(n_step=9)
            assert obs.tolist() == columns[-1]["begun"]
    assert columns[0] == columns[1]


# Episodes


@pytest.mark.parametrize(("lengths", "expected"), [([2, 5, 9], 3), ([2, 5, 9], 7), ([7, 2], 1)])
def test_every_started_episode_is_returned_and_no_more_are_started(lengths: list[int], expected: int) -> None:
    steps = CONTEXT.RawArray("i", len(lengths))
    env = ladders(lengths, gyms.Watched, steps=steps)
    with Async(stay, env) as collector:
        for _ in range(3):
            stats = collector.collect(n_episode=expected)
            assert stats.n_collected_episodes == expected
            assert stats.n_collected_steps == len(stats.batch) == stats.lens.sum()
            assert stats.batch["dones"].sum() == expected
            assert stats.batch["t"][0] == 0
            check_trajectories(stats.batch)
            assert set(stats.lens.tolist()) == set(lengths[:expected])
        # Nothing was done that is not there.
        assert sum(steps) == collector.collect_step


def test_episodes_in_progress_count_as_requested_or_are_retained() -> None:
    with gated(stay, [6, 6, 6], [2]) as (collector, gate, steps):
        first = collector.collect(n_step=4).batch
        second = collector.collect(n_episode=2)
        assert second.lens.tolist() == [6, 6]
        gate.value = 1
        third = collector.collect(n_episode=3)
        assert third.lens.tolist() == [6, 6, 6]
        batches = [first, second.batch, third.batch]
        assert sum(map(len, batches)) == sum(steps) == 30
    check_trajectories(joined(batches))


def test_long_episodes_count_as_much_as_short_ones() -> None:
    class Coin(gymnasium.Env):
        """Environment with random episodes of 1 or 20 steps."""

        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._left = 1 if self.np_random.random() < 0.5 else 20
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._left -= 1
            return np.zeros(1, np.float32), 1.0, self._left == 0, False, {}

    with Async(stay, [Coin] * 4, seed=4) as collector:
        lens = np.concatenate([collector.collect(n_episode=5).lens for _ in range(100)])
    assert len(lens) == 500
    # To take the first five that end would give 75 % short ones; the standard error is 2.2 %.
    assert abs((lens == 1).mean() - 0.5) < 0.09


def test_statistics_agree_with_the_batch() -> None:
    with Async(spaces.Discrete(2), cart_poles(3), seed=2) as collector:
        first = collector.collect(n_step=100)
        stats = collector.collect(n_step=200)
        joined = concat_samples([first.batch, stats.batch])
        ended = joined["eps_id"][joined["dones"] & (joined["unroll_id"] == 1)]
        lens = [int((joined["eps_id"] == item).sum()) for item in ended.tolist()]
        assert sorted(stats.lens.tolist()) == sorted(lens)
        assert stats.returns.tolist() == stats.lens.tolist()
        assert stats.n_collected_steps == len(stats.batch) >= 200
        assert stats.n_collected_steps <= 202
        assert stats.n_collected_episodes == len(ended) > 2
        assert collector.collect_step == len(joined)
        assert collector.collect_episode == joined["dones"].sum()
        assert collector.collect_time == pytest.approx(first.collect_time + stats.collect_time)
        collector.reset_stat()
        assert (collector.collect_step, collector.collect_episode, collector.collect_time) == (0, 0, 0.0)


def test_every_step_occurs_once_for_any_sequence_of_calls() -> None:
    rng = np.random.default_rng(3)
    lengths = [1, 4, 7]
    steps = CONTEXT.RawArray("i", 3)
    makers = [
        lambda n=n: gyms.Watched(n, lengths[n], steps=steps, pause_s=0.001 * n, with_infos=True) for n in range(3)
    ]
    buffer = VectorReplayBuffer(3 * 3000, 3)
    started = np.zeros(3, int)
    counted = episodes = 0
    with Async(stay, makers, buffer, wait_num=2) as collector:
        for call in range(40):
            kind = rng.integers(4)
            if kind == 0:
                collector.reset_env()
                assert [len(ring) for ring in buffer.buffers] == list(steps)
                started = np.array(steps)
                continue
            expected = int(rng.integers(1, 12))
            options = {"n_episode": expected} if kind == 1 else {"n_step": expected}
            # What was under way before a reset counts after it.
            stats = collector.collect(random=call % 5 == 0, **options)
            counted += stats.n_collected_steps
            episodes += stats.n_collected_episodes
            assert counted == len(buffer)
            assert (stats.lens <= 7).all()
        collector.reset_env()
    assert started.sum()
    for env, ring in enumerate(buffer.buffers):
        rows = ring[:]
        assert len(rows) == steps[env]
        assert (rows.obs[:, 0] == env).all()
        assert (rows.obs_next[:, 2] == rows.obs[:, 2] + 1).all()
        assert (rows.obs_next[:, 1] == rows.obs[:, 1]).all()
        assert (rows.info.step == rows.obs_next[:, 2]).all()
        assert (rows.terminated == (rows.obs_next[:, 2] == lengths[env])).all()
        # A step goes on from the one before, or begins a later episode after that one's end.
        ends = rows.done[:-1]
        assert (rows.obs[1:][~ends] == rows.obs_next[:-1][~ends]).all()
        assert (rows.obs[1:][ends][:, 2] == 0).all()
        assert (rows.obs[1:][ends][:, 1] > rows.obs[:-1][ends][:, 1]).all()
    assert episodes <= buffer[:].terminated.sum()


def test_final_observations_are_preserved_and_resets_are_not_steps() -> None:
    with Async(stay, ladders([2, 3], truncates=True, with_infos=True)) as collector:
        batches = [collector.collect(n_step=20).batch, collector.collect(n_episode=5).batch]
        collector.reset_env()
        batches.append(collector.collect(n_step=20).batch)
    for batch in batches:
        last = batch["truncateds"]
        assert batch["new_obs"][last][:, 2].tolist() == [[2.0, 3.0][env] for env in batch["env_id"][last]]
        assert (batch["new_obs"][:, 1] == batch["obs"][:, 1]).all()
        assert (batch["new_obs"][:, 2] == batch["obs"][:, 2] + 1).all()
        assert (batch["rewards"] == 100 * batch["env_id"] + batch["new_obs"][:, 2]).all()
        output = [{"step": t + 1, "name": f"step {t + 1}"} for t in batch["t"].tolist()]
        assert batch["infos"].tolist() == output
    assert (np.concatenate([batch["t"] == batch["obs"][:, 2] for batch in batches])).all()


# Spaces


def test_nested_observations_and_actions() -> None:
    space = gyms.Nested(0).action_space
    with Async(space, ladders([2, 3], kind=gyms.Nested), seed=1) as collector:
        batch = collector.collect(n_step=8).batch
    eye, step = batch["obs"]["eyes"]
    assert eye[:, 0].tolist() == batch["env_id"].tolist()
    assert step.tolist() == batch["t"].tolist()
    assert batch["obs"]["mouth"].tolist() == [f"{env}/{t}" for env, t in zip(batch["env_id"], batch["t"], strict=True)]
    assert batch["new_obs"]["eyes"][1].tolist() == (batch["t"] + 1).tolist()
    assert batch["actions"]["hands"].shape == (len(batch), 2)
    assert batch["actions"]["feet"][0].dtype == np.float32


class Seeing(gyms.Nested):
    """Nested ladder whose observations are all numbers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observation_space = spaces.Dict(eyes=self.observation_space["eyes"])

    def _observe(self) -> Any:
        return {"eyes": super()._observe()["eyes"]}


def test_nested_observations_in_shared_memory() -> None:
    buffer = VectorReplayBuffer(60, 2)

    def policy(batch: Batch) -> Batch:
        rows = len(batch.obs.eyes["1"])
        feet = Batch({"0": np.zeros((rows, 2), np.float32), "1": np.ones(rows, int)})
        return Batch(act=Batch(hands=np.zeros((rows, 2), int), feet=feet))

    with Async(policy, ladders([2, 3], Seeing), buffer) as collector:
        collector.collect(n_step=20)
    for env, length in enumerate([2, 3]):
        stored = buffer.buffers[env][:]
        steps = np.arange(len(stored)) % length
        assert stored.obs.eyes["1"].tolist() == steps.tolist()
        assert stored.obs_next.eyes["1"].tolist() == (steps + 1).tolist()
        assert stored.obs.eyes["0"][:, 0].tolist() == [env] * len(stored)
        assert stored.act.feet["1"].tolist() == [1] * len(stored)


class Word(gymnasium.Space):
    """Space that Gymnasium does not define."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "word"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word)

    __hash__ = None  # type: ignore[assignment]


class Speaking(gyms.Ladder):
    """Ladder with strings as observations and actions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observation_space = Word()
        self.action_space = Word()

    def _observe(self) -> Any:
        return f"{self._number}/{self._step}"

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == "up"
        return super().step(action)


def test_custom_spaces_are_supported() -> None:
    def policy(batch: Batch) -> Batch:
        return Batch(act=np.array(["up"] * len(batch.obs), object))

    with Async(policy, ladders([2, 3], kind=Speaking)) as collector:
        batch = collector.collect(n_step=10).batch
    assert batch["obs"].tolist() == [f"{env}/{t}" for env, t in zip(batch["env_id"], batch["t"], strict=True)]
    assert set(batch["actions"].tolist()) == {"up"}


class Wide(gyms.Ladder):
    """Ladder whose observations exceed the declared dtype from its third step."""

    def _observe(self) -> Any:
        observations = super()._observe()
        return observations.astype(np.float64) + 1e-12 if self._step > 2 else observations


def test_floats_wider_than_their_space_are_preserved() -> None:
    with Async(stay, ladders([5, 5], Wide)) as collector:
        batch = collector.collect(n_step=40).batch
    assert batch["new_obs"].dtype == np.float64
    step = batch["t"] + 1
    assert (batch["new_obs"][:, 2] == step + np.where(step > 2, 1e-12, 0)).all()


class Filming(gymnasium.Env):
    """Environment whose observations are images filled with the step number."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return self._film(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._film(), 0.0, False, self._step == 9, {}

    def _film(self) -> Any:
        return np.full((84, 84, 4), self._step, np.uint8)


def test_images_of_a_step_and_of_the_reset_after_it_are_not_mixed_up() -> None:
    with Async(stay, Filming, num_envs=3) as collector:
        batch = collector.collect(n_step=100).batch
    for name, text in (("obs", batch["t"]), ("new_obs", batch["t"] + 1)):
        assert (batch[name] == text[:, None, None, None]).all()


# Environments


def test_one_function_or_id_creates_all_environments() -> None:
    for env in ("CartPole-v1", partial(gymnasium.make, "CartPole-v1")):
        with Async(lean, env, num_envs=3) as collector:
            assert collector.num_envs == 3
            assert set(collector.collect(n_step=60).batch["env_id"].tolist()) == {0, 1, 2}
    with Async(lean, ["CartPole-v1", cart_poles(1)[0]]) as collector:
        assert collector.num_envs == 2
    with Async(lean, "CartPole-v1") as collector:
        assert collector.num_envs == 1


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_functions_are_sent_to_processes_of_any_start_method(start_method: str) -> None:
    length = 3
    makers = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=length), partial(gymnasium.make, "CartPole-v1")]
    with AsyncCollector(lean, makers, start_method=start_method, seed=1, wait_num=2) as collector:
        batch = collector.collect(n_step=30).batch
    check_trajectories(batch)
    assert batch["t"][batch["env_id"] == 0].max() == 2


def test_a_function_that_cannot_be_sent_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(EnvironmentSpecError, match="environment 1 must be passed as an id or a function that can be"):
        AsyncCollector(stay, [gyms.Walk, lambda: gyms.Ladder(0)])
    with AsyncCollector(stay, [partial(gymnasium.make, "Pendulum-v1")]) as collector:
        assert collector.num_envs == 1


def test_existing_environments_are_rejected() -> None:
    sync = SyncVectorEnv([gyms.Walk])
    together = AsyncVectorEnv([gyms.Walk], context="fork")
    for env, words in (
        (together, "got a AsyncVectorEnv; pass the functions that it was made of, its env_fns"),
        (sync, "got a SyncVectorEnv; pass the functions that it was made of, its env_fns"),
        (gyms.Walk(), "got a Walk; pass functions that make it"),
        ([gyms.Walk, gyms.Walk()], "got a Walk; pass functions that make it"),
    ):
        with pytest.raises(EnvironmentSpecError, match=f"env must be functions or ids, .* {words}"):
            AsyncCollector(stay, env)
    with Async(spaces.Box(-1, 1, (2,)), together.env_fns) as collector:
        assert collector.collect(n_step=3).n_collected_steps == 3
    sync.close()
    together.close()
    with pytest.raises(EnvironmentSpecError, match="env must contain at least one environment, got none"):
        AsyncCollector(stay, [])


def test_environments_must_be_single_ones_of_the_same_spaces() -> None:
    for makers, words in (
        (
            [gyms.Walk, partial(gyms.Ladder, 0)],
            "column 'obs' must have the space of environment 0, .*, got .* from environment 1",
        ),
        ([partial(SyncVectorEnv, [gyms.Walk])], "environment 0 must be a gymnasium.Env, got a SyncVectorEnv"),
        ([gyms.Walk, dict], "must create an environment: it must have an interface of Gymnasium"),
        (["CartPole-v7"], "no environment 'CartPole-v7'"),
    ):
        with pytest.raises(EnvironmentSpecError, match=words):
            Async(stay, makers)


# Policies


STATES = {
    "tensor": (lambda count: torch.tensor(count), lambda state: state, ["state_in_0"]),
    "tree": (
        lambda count: ({"h": count}, torch.tensor(count)),
        lambda state: state[0]["h"],
        ["state_in_0.h", "state_in_1"],
    ),
}


@pytest.mark.parametrize("form", STATES)
def test_a_recurrent_state_is_preserved_for_each_environment(form: str) -> None:
    """The state counts the steps: the policy receives `t` and returns `t + 1`."""
    make, read, names = STATES[form]

    def policy(batch: Batch, state: Any) -> dict[str, Any]:
        before = np.zeros(len(batch.obs), int) if state is None else np.asarray(read(state))
        return {"act": stay(batch.obs), "state": make(before + 1)}

    makers = [lambda n=n: gyms.Watched(n, 2 + n, pause_s=0.002 * (n == 1)) for n in range(3)]
    with Async(policy, makers) as collector:
        for expected in ({"n_step": 30}, {"n_episode": 2}, {"n_step": 10, "reset_before_collect": True}):
            batch = collector.collect(**expected).batch
            for name in names:
                assert batch[name].tolist() == batch["t"].tolist()
    buffer = VectorReplayBuffer(200, 3)
    with Async(policy, makers, buffer) as collector:
        collector.collect(n_step=40)
    stored = buffer[:].policy.hidden_state
    stored = stored if form == "tensor" else stored["0"].h
    assert np.asarray(stored).tolist() == buffer[:].obs_next[:, 2].tolist()
    rows = buffer[:].as_sample_batch()
    for name in names:
        assert np.asarray(rows[name]).tolist() == rows["obs"][:, 2].tolist()


def test_a_policy_receives_infos_environment_ids_and_times() -> None:
    recorded = []

    def policy(batch: Batch) -> Batch:
        info = batch.info
        recorded.extend(
            (env, info, step)
            for env, info, step in zip(
                info.env_id.tolist(), info.get("step", np.zeros(len(batch.obs))), batch.obs[:, 2], strict=True
            )
        )
        assert info.env_id.tolist() == batch.obs[:, 0].tolist()
        return Batch(act=np.zeros(len(batch.obs), int))

    with Async(policy, ladders([2, 3], with_infos=True)) as collector:
        collector.collect(n_step=30)
    assert all(info == step for _, info, step in recorded)
    assert {env for env, _, _ in recorded} == {0, 1}


def test_extra_outputs_of_a_policy_are_recorded_and_may_widen() -> None:
    calls = itertools.count()

    def policy(batch: Batch) -> Batch:
        t = batch.obs[:, 2].astype(int)
        act = (t + 300).astype(np.int32) if next(calls) % 2 else t.astype(np.uint8)
        return Batch(act=act, policy=Batch(env=batch.obs[:, 0]), action_logp=-batch.obs[:, 2])

    with Async(policy, ladders([3, 3, 3])) as collector:
        batch = collector.collect(n_step=60).batch
    assert (batch["actions"] % 300).tolist() == batch["t"].tolist()
    assert set((batch["actions"] // 300).tolist()) == {0, 1}
    assert batch["actions"].dtype == np.int32
    assert batch["policy"]["env"].tolist() == batch["env_id"].tolist()
    assert batch["action_logp"].tolist() == (-batch["t"]).tolist()


def test_random_steps_reset_the_recurrent_state() -> None:
    recorded = []

    def policy(obs: Any, state: Any) -> Any:
        before = np.zeros(len(obs), int) if state is None else state
        recorded.append(before.tolist())
        return stay(obs), before + 1

    with Async(policy, ladders([99, 99]), wait_num=2) as collector:
        for random in (False, True, False):
            collector.collect(n_step=4, random=random)
    assert recorded == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_extra_outputs_must_be_returned_in_every_step() -> None:
    calls = itertools.count()

    def policy(obs: Any) -> Any:
        return {"act": stay(obs), **({"policy": {"a": np.zeros(len(obs))}} if next(calls) == 0 else {})}

    with (
        Async(policy, ladders([9, 9])) as collector,
        pytest.raises(ColumnMismatchError, match=r"some without 'policy\.a'"),
    ):
        collector.collect(n_step=20)


def test_noise_action_mapping_and_random_actions_are_applied() -> None:
    class Noisy:
        def __call__(self, batch: Batch) -> Batch:
            return Batch(act=np.full((len(batch.obs), 2), 3.0))

        def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
            assert len(batch.obs) == len(act)
            return act + 0.5

    options = {"exploration_noise": True, "map_action": "clip", "seed": 3}
    with Async(Noisy(), [gyms.Walk] * 2, **options) as collector:
        batch = collector.collect(n_step=10).batch
        assert batch["actions"].tolist() == [[3.5, 3.5]] * len(batch)
        # A step pays what the first action says.
        assert batch["rewards"].tolist() == [2.0] * len(batch)
        sampled = collector.collect(n_step=10, random=True).batch
        # Two were under way.
        assert (sampled["actions"] != 3.5).any(1).sum() >= len(sampled) - 2
        assert sampled["unroll_id"].tolist() == [1] * len(sampled)


# Buffers and hooks


def test_a_buffer_is_filled_with_the_steps_of_each_environment() -> None:
    buffer = VectorReplayBuffer(300, 3)
    with Async(stay, ladders([2, 5, 9], with_infos=True), buffer) as collector:
        stats = [collector.collect(n_step=20), collector.collect(n_episode=4), collector.collect(n_step=20)]
    assert all(item.batch is None for item in stats)
    assert sum(item.n_collected_steps for item in stats) == len(buffer)
    assert sum(item.n_collected_episodes for item in stats) == buffer[:].done.sum()
    for env, length in enumerate([2, 5, 9]):
        rows = buffer.buffers[env][:]
        number = np.arange(len(rows))
        expected = np.stack([np.full(len(rows), env), number // length, number % length], 1)
        assert rows.obs.tolist() == expected.tolist()
        assert rows.obs_next.tolist() == (expected + np.array([0, 0, 1])).tolist()
        assert rows.rew.tolist() == (100 * env + rows.obs_next[:, 2]).tolist()
        assert rows.done.tolist() == (rows.obs_next[:, 2] == length).tolist()
        assert rows.info.step.tolist() == rows.obs_next[:, 2].tolist()


def test_abandoned_episodes_are_truncated_in_the_buffer() -> None:
    buffer = VectorReplayBuffer(60, 2)
    with Async(stay, ladders([9, 9]), buffer) as collector:
        counted = collector.collect(n_step=6).n_collected_steps
        collector.reset(reset_buffer=False)
        rows = [item[:] for item in buffer.buffers]
        assert all(item.truncated.tolist() == [False] * (len(item) - 1) + [True] for item in rows)
        # What was under way is there, and is counted.
        assert collector.collect_step == 0
        assert collector.collect(n_step=1).n_collected_steps == len(buffer) - counted
        collector.reset()
        assert (len(buffer), collector.collect_step) == (0, 0)
    with pytest.raises(ValueError, match="a ring for each of 2 environments, got 1"):
        Async(stay, ladders([2, 3]), ReplayBuffer(50))


def test_arguments_of_reset_are_passed_to_environments() -> None:
    class Told(gyms.Ladder):
        """Ladder whose start is an option of `reset`."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return np.array([seed or -1, (options or {}).get("level", -1), 0], np.float32), {}

    with Async(stay, ladders([9, 9], kind=Told), seed=1) as collector:
        obs, infos = collector.reset(gym_reset_kwargs={"options": {"level": 3}})
        assert obs[:, 1].tolist() == [3, 3]
        assert (obs[:, 0] != obs[::-1, 0]).all()
        assert infos == [{}, {}]
        assert collector.reset_env()[0].tolist() == [[-1, -1, 0]] * 2
        assert collector.reset_env({"seed": 11})[0][:, 0].tolist() == [11, 12]
        assert collector.reset_env({"seed": [7, 5]})[0][:, 0].tolist() == [7, 5]
        with pytest.raises(EnvironmentSpecError, match="one number for each of 2 environments, got 1"):
            collector.reset_env({"seed": [7]})
        with pytest.raises(WorkerError, match=r"environment 0 .* raised TypeError: .* 'level'"):
            collector.reset_env({"level": 3})
        assert collector.reset_env({"seed": 5})[0][:, 0].tolist() == [5, 6]


@pytest.mark.parametrize("buffered", [False, True])
def test_the_step_hook_receives_transitions_and_may_add_columns(buffered: bool) -> None:
    rows = []

    def hook(action_batch: Batch, rollout_batch: Batch) -> None:
        assert action_batch.act.tolist() == rollout_batch.act.tolist() == rollout_batch.obs[:, 2].tolist()
        assert action_batch.act_normalized.tolist() == action_batch.act.tolist()
        assert action_batch.policy_entry.env.tolist() == rollout_batch.obs[:, 0].tolist()
        assert action_batch.dist.probs[:, 0].tolist() == rollout_batch.obs[:, 0].tolist()
        assert action_batch.hidden_state[0].tolist() == rollout_batch.obs[:, 0].tolist()
        assert rollout_batch.info.step.tolist() == rollout_batch.obs_next[:, 2].tolist()
        rollout_batch.doubled = rollout_batch.rew * 2
        rows.append(len(rollout_batch.rew))

    def policy(batch: Batch) -> dict[str, Any]:
        env = batch.obs[:, 0]
        dist = torch.distributions.Categorical(torch.stack([torch.tensor(env), 1 - torch.tensor(env)], 1))
        return {"act": batch.obs[:, 2].astype(int), "policy": {"env": env}, "dist": dist, "state": (env, env)}

    buffer = VectorReplayBuffer(200, 2) if buffered else None
    with Async(policy, ladders([3, 9], with_infos=True), buffer, on_step_hook=hook) as collector:
        stats = collector.collect(n_step=50)
    assert sum(rows) == stats.n_collected_steps
    stored, rewards = (
        (buffer[:].doubled, buffer[:].rew) if buffered else (stats.batch["doubled"], stats.batch["rewards"])
    )
    assert stored.tolist() == (rewards * 2).tolist()


@pytest.mark.parametrize("buffered", [False, True])
def test_the_episode_hook_adds_columns(buffered: bool) -> None:
    def to_go(episode: Batch) -> dict[str, Any]:
        assert episode.done.tolist() == [False] * (len(episode) - 1) + [True]
        assert len(episode) == (2 if episode.obs[0, 0] == 0 else 5)
        return {"to_go": np.cumsum(episode.rew[::-1])[::-1]}

    buffer = VectorReplayBuffer(100, 2) if buffered else None
    with Async(stay, ladders([2, 5]), buffer, on_episode_done_hook=to_go) as collector:
        stats = collector.collect(n_episode=9)
    actual = (buffer[:].obs[:, 2], buffer[:].to_go) if buffered else (stats.batch["t"], stats.batch["to_go"])
    assert sorted(actual[1][actual[0] == 0].tolist()) == sorted(stats.returns.tolist())


def test_rendering() -> None:
    renders = CONTEXT.RawArray("i", 2)
    with Async(stay, ladders([9, 9], kind=gyms.Watched, renders=renders), wait_num=2) as collector:
        batch = collector.collect(n_step=6, render=0.001).batch
    assert len(batch) == 6
    assert list(renders) == [3, 3]


# What goes wrong


@pytest.mark.parametrize("amounts", [{}, {"n_step": 3, "n_episode": 1}, {"n_step": 0}, {"n_episode": -1}])
def test_exactly_one_amount_must_be_requested(amounts: dict[str, int]) -> None:
    with (
        Async(stay, ladders([2])) as collector,
        pytest.raises(ValueError, match=r"exactly one of n_step and|must be a whole number from 0"),
    ):
        collector.collect(**amounts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wait_num": 0}, "wait_num must be from 1 to 2, the number of environments, got 0"),
        ({"wait_num": 3}, "wait_num must be from 1 to 2, the number of environments, got 3"),
        ({"timeout_s": -1.0}, "timeout_s must not be negative, got -1.0"),
        ({"timeout_s": float("nan")}, "timeout_s must not be negative, got nan"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s must be positive, got 0.0"),
        ({"num_envs": 3}, "num_envs must be 2, the number of functions in env, got 3"),
        ({"num_envs": 0}, "num_envs must be a whole number from 1, got 0"),
    ],
)
def test_invalid_numbers_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Async(stay, ladders([2, 2]), **options)


def test_a_number_of_actions_that_does_not_fit_is_rejected() -> None:
    with (
        Async(lambda obs: np.zeros(3, int), ladders([2, 2])) as collector,
        pytest.raises(PolicySpecError, match=r"each of 2 environments, got actions of shape \(3,\)"),
    ):
        collector.collect(n_step=2)


def test_a_closed_collector_rejects_calls() -> None:
    for is_started in (False, True):
        collector = Async(stay, ladders([2]))
        if is_started:
            collector.collect(n_step=1)
        collector.close()
        collector.close()
        with pytest.raises(EnvironmentSpecError, match="has been closed"):
            collector.collect(n_step=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_an_error_in_a_policy_loses_no_step(error: type[BaseException]) -> None:
    steps = CONTEXT.RawArray("i", 2)
    calls = itertools.count()
    buffer = VectorReplayBuffer(900, 2)

    def policy(obs: Any) -> Any:
        if next(calls) == 9:
            raise error
        return stay(obs)

    with Async(policy, ladders([5, 5], kind=gyms.Watched, steps=steps), buffer) as collector:
        with pytest.raises(error):
            collector.collect(n_step=40)
        # The environments are reset before they go on, and what was done until then is there.
        assert collector.collect(n_step=40).n_collected_steps == len(buffer)
        collector.reset_env()
        assert len(buffer) == sum(steps)
    for ring in buffer.buffers:
        obs = ring[:].obs
        begins = np.flatnonzero(np.diff(obs[:, 1])) + 1
        assert (obs[begins, 2] == 0).all()
        assert ring[:].truncated[begins - 1].sum() <= 1
        assert ring[:].done[begins - 1].all()


def test_steps_before_an_interrupt_are_in_the_next_batch() -> None:
    calls = itertools.count()

    def policy(obs: Any) -> Any:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return stay(obs)

    with Async(policy, ladders([5, 5])) as collector:
        with pytest.raises(KeyboardInterrupt):
            collector.collect(n_step=40)
        batch = collector.collect(n_step=40).batch
    assert (batch["t"] == batch["obs"][:, 2]).all()
    assert batch["obs"][0].tolist() == [0, 0, 0]
    for env in range(2):
        obs = batch["obs"][batch["env_id"] == env]
        assert (obs[np.flatnonzero(np.diff(obs[:, 1])) + 1, 2] == 0).all()
