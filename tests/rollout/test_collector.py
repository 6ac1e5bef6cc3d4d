"""A collector stores every environment step once and in order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import gymnasium
import gyms
import numpy as np
import pytest
from checks import check_trajectories
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from samplebatch import (
    Batch,
    NStepReturns,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    concat_samples,
    postprocess,
)
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    EnvironmentSpecError,
    PolicySpecError,
)
from samplebatch.policy.random import RandomPolicy
from samplebatch.rollout.collector import Collector
from tests.optional import torch

MODES = ["NextStep", "SameStep", "Disabled"]
COLUMNS = (
    "obs",
    "new_obs",
    "actions",
    "rewards",
    "terminateds",
    "truncateds",
    "infos",
    "eps_id",
    "env_id",
    "agent_index",
    "t",
    "unroll_id",
)


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), int)


def ladders(lengths: list[int], mode: str = "NextStep", kind: type[Any] = gyms.Ladder, **options: Any) -> Any:
    makers = [lambda n=n, length=length: kind(n, length, **options) for n, length in enumerate(lengths)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def cart_poles(count: int, mode: str = "NextStep") -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * count, autoreset_mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_steps_of_a_real_environment(mode: str) -> None:
    policy = RandomPolicy(gymnasium.make("CartPole-v1").action_space, seed=3)
    with Collector(policy, cart_poles(4, mode), seed=1) as collector:
        batches = [collector.collect(n_step=steps).batch for steps in (100, 3, 250)]
    assert [len(batch) - least for batch, least in zip(batches, (100, 3, 250), strict=True)] <= [3, 3, 3]
    assert all(len(batch) >= least for batch, least in zip(batches, (100, 3, 250), strict=True))
    assert [np.unique(batch["unroll_id"]).tolist() for batch in batches] == [[0], [1], [2]]
    assert batches[0].column_names == COLUMNS
    dtypes = [str(batches[0][name].dtype) for name in COLUMNS]
    assert dtypes == ["float32", "float32", "int64", "float64", "bool", "bool", "object", *["int64"] * 5]
    for batch in batches:
        check_trajectories(batch)
    joined = concat_samples(batches)
    check_trajectories(joined[np.lexsort((np.arange(len(joined)), joined["env_id"]))])
    assert (joined["eps_id"] >= 0).all()
    # CartPole falls within 12 degrees: where an episode ended, that is to be seen in what its last step led to.
    over = joined["terminateds"]
    outside = (abs(joined["new_obs"][:, 2]) > 12 * np.pi / 180) | (abs(joined["new_obs"][:, 0]) > 2.4)
    assert over.sum() > 5
    assert (outside == over).all()
    assert not joined["truncateds"].any()


@pytest.mark.parametrize("mode", MODES)
def test_the_final_observation_of_a_truncated_episode_is_preserved(mode: str) -> None:
    collector = Collector(stay, ladders([2, 3], mode, truncates=True))
    batch = collector.collect(n_step=20).batch
    check_trajectories(batch)
    last = batch["truncateds"]
    assert batch["new_obs"][last][:, 2].tolist() == [[2.0, 3.0][env] for env in batch["env_id"][last]]
    assert (batch["new_obs"][:, 1] == batch["obs"][:, 1]).all()
    assert (batch["new_obs"][:, 2] == batch["obs"][:, 2] + 1).all()
    assert not batch["terminateds"].any()


class SaysItTwice(gymnasium.vector.VectorWrapper):
    """Vector environment that also sets the end flags of resets."""

    over: Any = False

    def step(self, actions: Any) -> Any:
        obs, rewards, terminateds, truncateds, infos = super().step(actions)
        before, self.over = self.over, terminateds | truncateds
        return obs, rewards, terminateds | before, truncateds, infos


@pytest.mark.parametrize("expected", [1, 4, 20, 61])
def test_repeated_end_flags_of_a_reset_are_ignored(expected: int) -> None:
    lengths = [2, 3, 1]
    collector = Collector(stay, SaysItTwice(ladders(lengths)))
    for _ in range(3):
        batch = collector.collect(n_step=expected).batch
        assert expected <= len(batch) < expected + 3
        check_trajectories(batch)
        assert batch["terminateds"].tolist() == (batch["t"] + 1 == np.array(lengths)[batch["env_id"]]).tolist()


def without_ids(batch: SampleBatch) -> dict[str, Any]:
    return {name: batch[name].tolist() for name in COLUMNS if name != "eps_id"}


def test_every_autoreset_mode_and_vector_class_gives_the_same_data() -> None:
    def lean(obs: Any) -> Any:
        return (obs[:, 2] + obs[:, 3] > 0).astype(int)

    actual = []
    for mode in MODES:
        for kind in (SyncVectorEnv, AsyncVectorEnv):
            makers = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=20)] * 2
            options = {"context": "fork"} if kind is AsyncVectorEnv else {}
            with Collector(lean, kind(makers, autoreset_mode=mode, **options), seed=5) as collector:
                stats = collector.collect(n_episode=4)
            assert stats.lens.tolist() == [20] * 4
            actual.append(without_ids(stats.batch))
    assert all(other == actual[0] for other in actual)


@pytest.mark.parametrize("count", [1, 3])
def test_a_seed_determines_everything_except_episode_ids(count: int) -> None:
    def collect(seed: int | None) -> SampleBatch:
        env = cart_poles(count)
        return Collector(env.single_action_space, env, seed=seed).collect(n_step=120).batch

    first, second, other = collect(7), collect(7), collect(8)
    assert without_ids(first) == without_ids(second)
    assert without_ids(first) != without_ids(other)
    assert without_ids(collect(None)) != without_ids(collect(None))
    assert not set(first["eps_id"].tolist()) & set(second["eps_id"].tolist())


def test_seeds_do_not_depend_on_the_number_of_environments() -> None:
    starts = []
    for count in (1, 2, 5):
        batch = Collector(stay, cart_poles(count), seed=2).collect(n_step=count).batch
        starts.append(batch["obs"].tolist())
    assert starts[0] == starts[2][:1]
    assert starts[1] == starts[2][:2]


def test_a_single_environment_is_counted_exactly() -> None:
    env = gyms.Reusing(0, 4, with_infos=True)
    collector = Collector(stay, env)
    batches = [collector.collect(n_step=steps).batch for steps in (3, 1, 7)]
    assert list(map(len, batches)) == [3, 1, 7]
    joined = concat_samples(batches)
    check_trajectories(joined)
    assert joined["t"].tolist() == [0, 1, 2, 3] * 2 + [0, 1, 2]
    assert joined["infos"].tolist() == [{"step": t + 1, "name": f"step {t + 1}"} for t in joined["t"].tolist()]
    assert env.made == [0] * 11
    collector.close()
    collector.close()
    assert env.closed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("lengths", "expected"), [([2, 5, 9], 3), ([2, 5, 9], 4), ([2, 5, 9], 9), ([7, 2], 1)])
def test_every_started_episode_is_returned(mode: str, lengths: list[int], expected: int) -> None:
    with Collector(stay, ladders(lengths, mode)) as collector:
        stats = collector.collect(n_episode=expected)
        assert stats.n_collected_episodes == expected
        assert stats.n_collected_steps == len(stats.batch) == stats.lens.sum()
        assert stats.batch["dones"].sum() == expected
        check_trajectories(stats.batch)
        # The next collection begins with fresh episodes.
        again = collector.collect(n_episode=expected)
        assert sorted(again.lens.tolist()) == sorted(stats.lens.tolist())
        assert again.batch["t"][0] == 0
        check_trajectories(again.batch)
    assert set(stats.lens.tolist()) == set(lengths[:expected])


def test_long_episodes_count_as_much_as_short_ones() -> None:
    class Coin(gymnasium.Env):
        """Environment with random episodes of 1 or 20 steps."""

        observation_space = gymnasium.spaces.Box(0, 1, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self._left = 1 if self.np_random.random() < 0.5 else 20
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self._left -= 1
            return np.zeros(1, np.float32), 1.0, self._left == 0, False, {}

    collector = Collector(stay, SyncVectorEnv([Coin] * 16), seed=4)
    lens = np.concatenate([collector.collect(n_episode=24).lens for _ in range(40)])
    assert len(lens) == 960
    # To take the first 24 that end would give 70 % short ones; the standard error is 1.6 %.
    assert abs((lens == 1).mean() - 0.5) < 0.06


def test_statistics_agree_with_the_batch() -> None:
    collector = Collector(RandomPolicy(gymnasium.spaces.Discrete(2), seed=1), cart_poles(3), seed=2)
    first = collector.collect(n_step=100)
    stats = collector.collect(n_step=200)
    joined = concat_samples([first.batch, stats.batch])
    ended = joined["eps_id"][joined["dones"] & (joined["unroll_id"] == 1)]
    lens = {item: int((joined["eps_id"] == item).sum()) for item in ended.tolist()}
    assert sorted(stats.lens.tolist()) == sorted(lens.values())
    assert stats.returns.tolist() == stats.lens.tolist()
    assert stats.n_collected_steps == len(stats.batch)
    assert stats.n_collected_episodes == len(ended)
    assert stats.returns_stat is not None
    assert stats.lens_stat is not None
    assert stats.returns_stat.mean == pytest.approx(stats.returns.mean())
    assert stats.lens_stat.std == pytest.approx(stats.lens.std())
    assert (stats.lens_stat.min, stats.lens_stat.max) == (stats.lens.min(), stats.lens.max())
    assert stats.collect_speed == pytest.approx(stats.n_collected_steps / stats.collect_time)
    assert collector.collect_step == len(joined)
    assert collector.collect_episode == joined["dones"].sum()
    assert collector.collect_time == pytest.approx(first.collect_time + stats.collect_time)
    collector.reset_stat()
    assert (collector.collect_step, collector.collect_episode, collector.collect_time) == (0, 0, 0.0)


def test_statistics_are_converted_completely_to_dicts() -> None:
    stats = dataclasses.asdict(Collector(stay, ladders([2, 4]), VectorReplayBuffer(20, 2)).collect(n_episode=3))
    assert stats["lens_stat"] == {"mean": 8 / 3, "std": pytest.approx(8**0.5 / 3), "max": 4.0, "min": 2.0}
    assert stats["returns_stat"].keys() == stats["lens_stat"].keys()


def test_episodes_end_in_order_of_time() -> None:
    stats = Collector(stay, ladders([5, 2, 3], "SameStep")).collect(n_step=15)
    assert stats.lens.tolist() == [2, 3, 2, 5]
    assert stats.returns.tolist() == [203.0, 606.0, 203.0, 15.0]


def test_nested_observations_and_actions() -> None:
    collector = Collector(gyms.Nested(0).action_space, ladders([2, 3], kind=gyms.Nested), seed=1)
    batch = collector.collect(n_step=8).batch
    eye, step = batch["obs"]["eyes"]
    assert eye[:, 0].tolist() == batch["env_id"].tolist()
    assert step.tolist() == batch["t"].tolist()
    assert batch["obs"]["mouth"].tolist() == [f"{env}/{t}" for env, t in zip(batch["env_id"], batch["t"], strict=True)]
    assert batch["new_obs"]["eyes"][1].tolist() == (batch["t"] + 1).tolist()
    assert batch["actions"]["hands"].shape == (len(batch), 2)
    assert batch["actions"]["feet"][0].dtype == np.float32


def test_policies_and_buffers_receive_nested_observations_as_batches() -> None:
    recorded = []

    def policy(batch: Batch) -> Batch:
        recorded.append(batch.obs)
        rows = len(batch.obs.eyes["1"])
        feet = Batch({"0": np.zeros((rows, 2), np.float32), "1": np.ones(rows, int)})
        return Batch(act=Batch(hands=np.zeros((rows, 2), int), feet=feet))

    buffer = VectorReplayBuffer(20, 2)
    Collector(policy, ladders([2, 3], "SameStep", gyms.Nested), buffer).collect(n_step=4)
    assert recorded[0].eyes["0"].tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert buffer[:].obs.eyes["1"].tolist() == [0, 1, 0, 1]
    assert buffer[:].act.feet["1"].tolist() == [1] * 4


def test_infos_belong_to_the_steps_that_returned_them() -> None:
    for mode in MODES:
        batch = Collector(stay, ladders([2, 3], mode, with_infos=True)).collect(n_step=12).batch
        output = [{"step": t + 1, "name": f"step {t + 1}"} for t in batch["t"].tolist()]
        assert batch["infos"].tolist() == output
    plain = Collector(stay, ladders([2, 3])).collect(n_step=4).batch["infos"]
    assert plain.tolist() == [{}] * 4
    assert plain[0] is not plain[1]


def test_a_policy_receives_infos_environment_ids_and_times() -> None:
    recorded = []

    def policy(batch: Batch, state: Any) -> Batch:
        recorded.append(batch.info)
        return Batch(act=np.zeros(2, int))

    Collector(policy, ladders([2, 3], "SameStep", with_infos=True)).collect(n_step=6)
    assert recorded[0].episode_number.tolist() == [0, 0]
    assert recorded[1].step.tolist() == [1, 1]
    assert recorded[2].episode_number.tolist() == [1, 0]
    assert all(info.env_id.tolist() == [0, 1] for info in recorded)


# Policies


def test_extra_outputs_of_a_policy_are_recorded() -> None:
    def policy(batch: Batch) -> Batch:
        rows = len(batch.obs)
        retained = Batch(value=torch.ones(rows), deep=Batch(logits=np.zeros((rows, 3))))
        return Batch(act=torch.zeros(rows, dtype=torch.int64), policy=retained, action_logp=np.full(rows, -1.0), odd=5)

    batch = Collector(policy, ladders([2, 3])).collect(n_step=4).batch
    assert batch["policy"]["value"].tolist() == [1.0] * 4
    assert batch["policy.deep.logits"].shape == (4, 3)
    assert batch["action_logp"].tolist() == [-1.0] * 4
    assert "odd" not in batch
    buffer = VectorReplayBuffer(20, 2)
    Collector(policy, ladders([2, 3]), buffer).collect(n_step=4)
    assert buffer[:].policy.deep.logits.shape == (4, 3)
    assert buffer[:].action_logp.tolist() == [-1.0] * 4


def test_arrays_that_a_policy_reuses_are_copied() -> None:
    actions = np.zeros(2, int)

    def policy(obs: Any) -> Any:
        actions[:] += 1
        return actions

    batch = Collector(policy, ladders([9, 9], "SameStep")).collect(n_step=6).batch
    assert batch["actions"].tolist() == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("form", ["array", "tensor", "tuple", "batch"])
@pytest.mark.parametrize("mode", MODES)
def test_a_recurrent_state_restarts_with_each_episode(mode: str, form: str) -> None:
    """The state counts the steps: the policy receives `t` and returns `t + 1`."""
    make = {
        "array": lambda count: count[:, None],
        "tensor": lambda count: torch.from_numpy(count[:, None].copy()),
        "tuple": lambda count: (count.copy(), torch.from_numpy(count.copy())),
        "batch": lambda count: Batch(h=count.copy(), deep=Batch(c=count[:, None].copy())),
    }[form]
    read = {
        "array": lambda state: state[:, 0],
        "tensor": lambda state: state[:, 0].numpy(),
        "tuple": lambda state: state[0],
        "batch": lambda state: state.h,
    }[form]
    names = {"tuple": ["state_in_0", "state_in_1"], "batch": ["state_in.h", "state_in.deep.c"]}.get(
        form, ["state_in_0"]
    )

    def policy(batch: Batch, state: Any) -> dict[str, Any]:
        before = np.zeros(len(batch.obs), int) if state is None else read(state)
        return {"act": np.zeros(len(batch.obs), int), "state": make(before + 1)}

    collector = Collector(policy, ladders([1, 2, 5], mode))
    for _ in range(2):
        batch = collector.collect(n_step=20).batch
        for name in names:
            assert batch[name].reshape(-1).tolist() == batch["t"].tolist()
    buffer = VectorReplayBuffer(60, 3)
    Collector(policy, ladders([1, 2, 5], mode), buffer).collect(n_step=20)
    retained = buffer[:].policy.hidden_state
    retained = retained if form in ("array", "tensor") else retained["0"] if form == "tuple" else retained.h
    assert np.asarray(retained).reshape(-1).tolist() == buffer[:].obs_next[:, 2].tolist()
    # The state before each step has one name, in batches and in buffers, however it came there.
    extended = VectorReplayBuffer(60, 3)
    with Collector(policy, ladders([1, 2, 5], mode)) as fragments:
        extended.extend(fragments.collect(n_step=20).batch)
    for stored in (buffer, extended):
        rows = stored[:].as_sample_batch("rllib")
        for name in names:
            assert np.asarray(rows[name]).reshape(-1).tolist() == rows["obs"][:, 2].tolist()


def test_a_state_without_a_row_for_each_environment_is_rejected() -> None:
    def policy(batch: Batch, state: Any) -> Batch:
        # A Batch stacks the tensors of a tuple.
        return Batch(act=np.zeros(3, int), state=(torch.zeros(3, 4), torch.zeros(3, 4)))

    with pytest.raises(
        PolicySpecError, match=r"state must have one row for each of 3 environments, got shape \(2, 3, 4\)"
    ):
        Collector(policy, ladders([2, 2, 2])).collect(n_step=3)
    with pytest.raises(PolicySpecError, match="state must be an array, a tensor or a tree of both, got a str"):
        Collector(lambda obs, state: (stay(obs), "odd"), ladders([2, 2])).collect(n_step=3)


def test_exploration_noise() -> None:
    class Noisy:
        def __call__(self, batch: Batch) -> Batch:
            return Batch(act=np.zeros((len(batch.obs), 2)))

        def add_exploration_noise(self, act: Any, batch: Batch) -> Any:
            assert len(batch.obs) == len(act)
            return act + 0.5

    created = {}
    for noise in (False, True, lambda act, batch: act + 0.25):
        env = gyms.Walk()
        batch = Collector(Noisy(), env, exploration_noise=noise).collect(n_step=2).batch
        assert batch["actions"].tolist() == np.array(env.made).tolist()
        created[str(noise)[:5]] = batch["actions"][0, 0]
    assert list(created.values()) == [0.0, 0.5, 0.25]
    with pytest.raises(PolicySpecError, match="add_exploration_noise"):
        Collector(stay, gyms.Walk(), exploration_noise=True)


def test_actions_are_mapped_for_the_environment_and_stored_unmapped() -> None:
    class Mapping:
        def __call__(self, batch: Batch) -> Batch:
            return Batch(act=np.full((len(batch.obs), 2), 3.0))

        def map_action(self, act: Any) -> Any:
            return act * 10

        def map_action_inverse(self, act: Any) -> Any:
            return act / 10

    for how, performed in ((None, [30, 30]), ("clip", [2, 3]), ("scale", [2, 10]), (lambda act: act - 2, [1, 1])):
        env = gyms.Walk()
        batch = Collector(Mapping(), env, map_action=how).collect(n_step=2).batch  # type: ignore[arg-type]
        assert batch["actions"].tolist() == [[3.0, 3.0]] * 2
        assert env.made[0].tolist() == performed
    env = gyms.Walk()
    sampled = Collector(Mapping(), env, seed=0).collect(n_step=20, random=True).batch
    assert np.allclose(sampled["actions"] * 10, env.made)
    assert all(env.action_space.contains(result) for result in env.made)


def test_scaled_actions_cover_exactly_the_bounds() -> None:
    for value, performed in ((-1.0, [-2, 0]), (0.0, [0, 5]), (1.0, [2, 10]), (7.0, [2, 10])):
        env = gyms.Walk()
        Collector(lambda obs, value=value: np.full((1, 2), value), env, map_action="scale").collect(n_step=1)
        assert env.made[0].tolist() == performed


@pytest.mark.parametrize(
    ("how", "env", "words"),
    [
        ("clip", gyms.Ladder(0), "the action space must be a Box"),
        ("squash", gyms.Walk(), "'clip', 'scale' or a function, got 'squash'"),
    ],
)
def test_invalid_mappings_are_rejected(how: Any, env: Any, words: str) -> None:
    with pytest.raises(PolicySpecError, match=words):
        Collector(stay, env, map_action=how)


def test_random_actions_do_not_call_the_policy() -> None:
    def policy(obs: Any) -> Any:
        raise AssertionError

    stats = Collector(policy, cart_poles(2), seed=0).collect(n_step=40, random=True)
    assert set(stats.batch["actions"].tolist()) == {0, 1}


@pytest.mark.parametrize("policy", ["random", gymnasium.spaces.Discrete(3)])
def test_random_actions_do_not_depend_on_other_environments(policy: Any) -> None:
    full = Collector(policy, ladders([4, 4, 4]), seed=2).collect(n_step=1200).batch
    alone = Collector(policy, ladders([4]), seed=2, worker_index=2).collect(n_step=400).batch
    assert alone["actions"].tolist() == full["actions"][full["env_id"] == 2][:400].tolist()
    assert set(alone["env_id"].tolist()) == {2}


def test_a_number_of_actions_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(PolicySpecError, match=r"each of 2 environments, got actions of shape \(3,\)"):
        Collector(lambda obs: np.zeros(3, int), ladders([2, 2])).collect(n_step=2)


def test_actions_may_widen_their_dtype_without_loss() -> None:
    def of(*dtypes: Any) -> Any:
        kinds = iter(dtypes)
        return lambda obs: np.ones(len(obs), next(kinds))

    batch = Collector(of(np.int32, np.int64, np.uint8), ladders([9, 9])).collect(n_step=6).batch
    assert batch["actions"].dtype == np.int32
    shapes = iter([(2,), (2, 1)])
    with pytest.raises(PolicySpecError, match="'actions' must have rows of shape"):
        Collector(lambda obs: np.zeros(next(shapes)), ladders([9, 9])).collect(n_step=4)


def test_extra_outputs_must_be_returned_in_every_step() -> None:
    retained = iter([{"policy": {"a": np.zeros(2)}}, {}])
    collector = Collector(lambda obs: {"act": np.zeros(2, int), **next(retained)}, ladders([9, 9]))
    with pytest.raises(ColumnMismatchError, match=r"some without 'policy\.a'"):
        collector.collect(n_step=4)


# Buffers


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_is_filled_with_the_same_steps(mode: str) -> None:
    lengths = [2, 5, 9]
    reference = Collector(stay, ladders(lengths, mode, with_infos=True)).collect(n_step=40)
    batch = reference.batch
    buffer = VectorReplayBuffer(300, 3)
    stats = Collector(stay, ladders(lengths, mode, with_infos=True), buffer).collect(n_step=40)
    assert stats.batch is None
    assert stats.lens.tolist() == reference.lens.tolist()
    assert stats.returns.tolist() == reference.returns.tolist()
    assert stats.n_collected_steps == len(buffer) == len(batch)
    rows = buffer[:]
    assert rows.obs.tolist() == batch["obs"].tolist()
    assert rows.obs_next.tolist() == batch["new_obs"].tolist()
    assert rows.act.tolist() == batch["actions"].tolist()
    assert rows.rew.tolist() == batch["rewards"].tolist()
    assert rows.done.tolist() == batch["dones"].tolist()
    assert rows.info.step.tolist() == [info["step"] for info in batch["infos"]]


def test_plain_buffers_and_buffers_with_extra_rings_are_filled() -> None:
    plain = ReplayBuffer(50)
    Collector(stay, gyms.Ladder(0, 4), plain).collect(n_step=10)
    assert plain[:].obs[:, 2].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    larger = VectorReplayBuffer(50, 5)
    Collector(stay, ladders([2, 3], "SameStep"), larger).collect(n_step=8)
    assert [len(item) for item in larger.buffers] == [4, 4, 0, 0, 0]
    with pytest.raises(ValueError, match="a ring for each of 2 environments, got 1"):
        Collector(stay, ladders([2, 3]), ReplayBuffer(50))


@pytest.mark.parametrize("envs", ["one", "list", "vector"])
def test_observations_that_are_stacked_twice_are_rejected(envs: str) -> None:
    def stacked() -> Any:
        inner = gymnasium.make("CartPole-v1")
        return gymnasium.wrappers.ClipReward(gymnasium.wrappers.FrameStackObservation(inner, 3), 0.0, 1.0)

    make = {"one": stacked, "list": lambda: [stacked(), stacked()], "vector": lambda: SyncVectorEnv([stacked] * 2)}
    with pytest.raises(ArgumentError, match="FrameStackObservation and the buffer's stack_num=3"):
        Collector("random", make[envs](), VectorReplayBuffer(60, 2, stack_num=3))
    buffer = VectorReplayBuffer(60, 2, stack_num=3, save_only_last_obs=True)
    Collector("random", make[envs](), buffer, seed=0).collect(n_step=20)
    assert buffer.sample(4)[0].obs.shape == (4, 3, 4)


def test_reset_clears_buffer_and_counts_by_default() -> None:
    buffer = VectorReplayBuffer(40, 2)
    env = ladders([9, 9])
    collector = Collector(stay, env, buffer, seed=1)
    obs, infos = collector.reset(gym_reset_kwargs={"options": {"level": 3}})
    assert obs[:, 2].tolist() == [0, 0]
    assert not infos
    assert env.envs[1].resets[-1][1] == {"level": 3}
    collector.collect(n_step=4)
    assert len(buffer) == collector.collect_step == 4
    collector.reset(reset_buffer=False, reset_stats=False)
    assert len(buffer) == collector.collect_step == 4
    assert env.envs[0].resets[-1][0] is None
    collector.collect(n_step=2, reset_before_collect=True, gym_reset_kwargs={"seed": 11})
    assert [item.resets[-1][0] for item in env.envs] == [11, 12]
    assert len(buffer) == 6
    collector.reset_buffer(keep_statistics=True)
    assert len(buffer) == 0
    collector.reset()
    assert (len(buffer), collector.collect_step) == (0, 0)


def test_abandoned_episodes_are_truncated_in_the_buffer() -> None:
    buffer = VectorReplayBuffer(40, 2)
    collector = Collector(stay, ladders([4, 9], "SameStep"), buffer)
    collector.collect(n_step=6)
    stats = collector.collect(n_step=12, reset_before_collect=True)
    assert buffer[:].truncated.tolist() == ([False, False, True] + [False] * 6) * 2
    assert buffer[:].done.tolist() == [False, False, True] + [False] * 3 + [True] + [False] * 4 + [True] + [False] * 6
    assert buffer.next(np.array([2])).tolist() == [2]
    assert buffer[2].obs_next.tolist() == [0.0, 0.0, 3.0]
    assert stats.lens.tolist() == [4]


# Hooks


def test_the_step_hook_receives_transitions_and_may_add_columns() -> None:
    recorded: list[Any] = []

    def hook(action_batch: Batch, rollout_batch: Batch) -> None:
        recorded.append((action_batch, rollout_batch))
        rollout_batch.doubled = rollout_batch.rew * 2

    def policy(batch: Batch) -> Batch:
        dist = torch.distributions.Categorical(torch.ones(2, 3))
        return Batch(act=np.zeros(2, int), policy=Batch(logp=np.ones(2)), dist=dist, state=np.zeros((2, 1)))

    for buffer in (None, VectorReplayBuffer(60, 2)):
        recorded.clear()
        collector = Collector(policy, ladders([1, 9], with_infos=True), buffer, on_step_hook=hook)
        batch = collector.collect(n_step=7).batch
        rows = batch["doubled"].tolist() if batch is not None else buffer[:].doubled.tolist()
        assert rows == [2.0] * 3 + [202.0, 204.0, 206.0, 208.0, 210.0]
        action, rollout = recorded[0]
        assert sorted(action.__dict__) == ["act", "act_normalized", "dist", "hidden_state", "policy_entry"]
        assert action.policy_entry.logp.tolist() == [1.0, 1.0]
        assert recorded[1][0].dist.probs.shape == (1, 3)
        assert rollout.obs_next[:, 2].tolist() == [1.0, 1.0]
        assert rollout.info.step.tolist() == [1, 1]
        # In every second step the first environment is reset, and there is nothing to see of it.
        assert [len(rollout.rew) for _, rollout in recorded] == [2, 1, 2, 1, 2]
        assert [len(action.act) for action, _ in recorded] == [2, 1, 2, 1, 2]


def to_go(episode: Batch) -> dict[str, Any]:
    assert episode.done.tolist() == [False] * (len(episode) - 1) + [True]
    return {"to_go": np.cumsum(episode.rew[::-1])[::-1], "first": np.arange(len(episode)) == 0}


@pytest.mark.parametrize("mode", MODES)
def test_the_episode_hook_adds_columns_to_batches(mode: str) -> None:
    collector = Collector(stay, ladders([2, 5], mode), on_episode_done_hook=to_go)
    batch = collector.collect(n_step=16).batch
    for episode in batch.split_by_episode():
        if episode["dones"][-1]:
            assert episode["to_go"].tolist() == np.cumsum(episode["rewards"][::-1])[::-1].tolist()
            assert episode["first"].sum() == 1
        else:
            assert np.isnan(episode["to_go"]).all()
            assert not episode["first"].any()


@pytest.mark.parametrize("mode", MODES)
def test_the_episode_hook_adds_columns_to_buffers(mode: str) -> None:
    buffer = VectorReplayBuffer(16, 2)
    collector = Collector(stay, ladders([2, 5], mode), buffer, on_episode_done_hook=to_go)
    for _ in range(9):
        # More steps than the buffer holds, so that episodes lie across the ends of the rings.
        collector.collect(n_step=8)
        rows = buffer[:]
        done = np.flatnonzero(rows.done)
        for stop in done.tolist():
            length = 2 if rows.obs[stop, 0] == 0 else 5
            start = max(stop + 1 - length, 0 if rows.obs[stop, 0] == 0 else 8)
            expected = np.cumsum(rows.rew[start : stop + 1][::-1])[::-1].tolist()
            assert rows.to_go[start : stop + 1].tolist() == expected


def test_rows_unseen_by_an_episode_hook_have_missing_values() -> None:
    buffer = VectorReplayBuffer(16, 2)
    hook = lambda episode: {"steps": np.full(len(episode), len(episode))}  # noqa: E731
    Collector(stay, ladders([2, 5]), buffer, on_episode_done_hook=hook).collect(n_step=4)
    short = buffer[:].obs[:, 0] == 0
    assert buffer[:].steps[short].tolist() == [2.0] * 2
    assert np.isnan(buffer[:].steps[~short]).all()
    buffer.dropnull()
    assert len(buffer) == 2


def test_the_episode_hook_receives_stored_steps_of_finished_episodes() -> None:
    recorded = []
    buffer = VectorReplayBuffer(8, 2)
    hook = lambda episode: recorded.append(episode.obs[:, :].tolist())  # noqa: E731
    collector = Collector(stay, ladders([6, 3], "SameStep"), buffer, on_episode_done_hook=hook)
    collector.collect(n_step=4)
    collector.collect(n_step=12, reset_before_collect=True)
    ends = [[[row[1], row[2]] for row in episode] for episode in recorded]
    assert ends == [
        [[1, 0], [1, 1], [1, 2]],
        [[1, 2], [1, 3], [1, 4], [1, 5]],
        [[2, 0], [2, 1], [2, 2]],
    ]


def test_hooks_are_applied_to_the_trajectories_of_every_batch() -> None:
    hooks = [NStepReturns(gamma=0.5, n_step=2)]
    with Collector(stay, ladders([3, 5]), hooks=hooks) as collector, Collector(stay, ladders([3, 5])) as plain:
        for amount in ({"n_step": 7}, {"n_episode": 4}):
            actual, reference = collector.collect(**amount), plain.collect(**amount)
            expected = postprocess(reference.batch, hooks)
            assert actual.batch["returns"].tolist() == expected["returns"].tolist()
            assert actual.n_collected_steps == reference.n_collected_steps == len(actual.batch)
    with pytest.raises(ArgumentError, match="hooks"):
        Collector(stay, ladders([3]), VectorReplayBuffer(10, 1), hooks=hooks)


def test_an_episode_hook_must_return_one_row_per_step() -> None:
    collector = Collector(stay, ladders([2, 3]), on_episode_done_hook=lambda episode: {"x": [1.0]})
    with pytest.raises(ColumnLengthError, match="column 'x' must have 2 rows, got 1"):
        collector.collect(n_step=8)


# Behaviour


@pytest.mark.parametrize("amounts", [{}, {"n_step": 3, "n_episode": 1}, {"n_step": 0}, {"n_episode": -1}])
def test_exactly_one_amount_must_be_requested(amounts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"exactly one of n_step and n_episode|must be a whole number from 0"):
        Collector(stay, gyms.Ladder(0)).collect(**amounts)


def test_rendering() -> None:
    env = gyms.Ladder(0)
    Collector(stay, env).collect(n_step=3, render=0.001)
    assert env.renders == 3


def test_a_closed_collector_rejects_calls() -> None:
    for is_started in (False, True):
        collector = Collector(stay, gyms.Ladder(0))
        if is_started:
            collector.collect(n_step=1)
        collector.close()
        with pytest.raises(EnvironmentSpecError, match="has been closed"):
            collector.collect(n_step=1)


def test_errors_of_environments_are_raised_and_reset_them() -> None:
    env = gyms.Failing(0, 50)
    collector = Collector(stay, env)
    with pytest.raises(RuntimeError, match="the rung broke"):
        collector.collect(n_step=20)
    batch = collector.collect(n_step=20).batch
    assert len(env.resets) == 2
    # The nine steps that were made are there: nothing that an environment did is lost.
    assert batch["t"].tolist() == [*range(9), *range(11)]
    assert len(np.unique(batch["eps_id"])) == 2


@pytest.mark.parametrize("buffer", [None, VectorReplayBuffer(9, 1)])
def test_an_error_in_a_policy_after_a_reset_is_raised(buffer: Any) -> None:
    requested = itertools.count()

    def failing(obs: Any) -> Any:
        if next(requested) == 2:
            raise RuntimeError("the baton is lost")
        return stay(obs)

    collector = Collector(failing, ladders([1]), buffer)
    assert collector.collect(n_step=1).n_collected_steps == 1
    # Of this call, there is only the step that reset.
    with pytest.raises(RuntimeError, match="the baton is lost"):
        collector.collect(n_step=2)
    assert collector.collect(n_step=2).n_collected_steps == 2


def test_other_objects_than_environments_are_rejected() -> None:
    with pytest.raises(EnvironmentSpecError, match="got a int"):
        Collector(stay, 7)
