"""Values from environments and policies are stored exactly, or rejected with column, environment and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import arena
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from samplebatch import AsyncCollector, Collector, MultiAgentCollector, RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import EnvironmentSpecError, PolicySpecError, SampleBatchError

GOOD = (np.zeros(3, np.float32), 0.0, False, False, {})
NAMES = ("obs", "rewards", "terminateds", "truncateds")


class Odd(gymnasium.Env):
    """Environment that returns a given value in its fifth step."""

    def __init__(self, position: int | None = None, value: Any = None, space: Any = None) -> None:
        self.observation_space = space or spaces.Box(-9, 9, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._position, self._value, self._num_steps = position, value, 0
        self._good = np.zeros(3, np.float32) if space is None else space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._good, {}

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        step: list[Any] = [self._good, *GOOD[1:]]
        if self._num_steps == 5 and self._position is not None:
            step[self._position] = self._value
        return tuple(step)


class OddVector(VectorEnv):
    """Custom vector of three environments that returns another array in its fifth step."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, position: int = 0, value: Any = None) -> None:
        self.num_envs = 3
        self.single_observation_space = spaces.Box(-9, 9, (3,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self._position, self._value, self._num_steps = position, value, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((3, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        self._num_steps += 1
        flags = np.zeros(3, bool)
        step: list[Any] = [np.zeros((3, 3), np.float32), np.zeros(3), flags, flags, {}]
        if self._num_steps == 5:
            step[self._position] = self._value
        return tuple(step)


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


REFUSED = [
    (0, None, "contain numbers, got a NoneType"),
    (0, 2.0, r"have rows of shape \(3,\), got \(\)"),
    (0, np.zeros(2, np.float32), r"have rows of shape \(3,\), got \(2,\)"),
    (0, np.zeros((1, 3), np.float32), r"have rows of shape \(3,\), got \(1, 3\)"),
    (0, [1.0, [2.0], 3.0], r"have rows of shape \(3,\), got lists of different lengths"),
    (0, np.array([1j, 0, 0]), "contain numbers, got rows of complex128"),
    (0, ["1", "2", "3"], "contain numbers, got rows of <U1"),
    (1, None, "contain numbers, got a NoneType"),
    (1, 1j, "contain numbers, got a complex"),
    (1, "7", "contain numbers, got a str"),
    (1, np.zeros(2), r"have rows of shape \(\), got \(2,\)"),
    (1, 2**53 + 1, "have dtype float64, got a value of int64 that does not fit"),
    (2, 0.5, "have dtype bool, got a value of float64"),
    (2, 2, "have dtype bool, got a value of int64"),
    (2, float("nan"), "have dtype bool, got a value of float64"),
    (2, "no", "contain numbers, got a str"),
    (3, None, "contain numbers, got a NoneType"),
    (3, np.array([True, False]), r"have rows of shape \(\), got \(2,\)"),
]


@pytest.mark.parametrize(("position", "value", "requirement"), REFUSED)
def test_values_that_would_change_are_rejected(position: int, value: Any, requirement: str) -> None:
    collector = Collector(stay, Odd(position, value))
    with pytest.raises(
        EnvironmentSpecError, match=f"^column '{NAMES[position]}' must {requirement}.* environment 0 in step 5$"
    ):
        collector.collect(n_step=9)


@pytest.mark.parametrize(("position", "value", "requirement"), REFUSED)
def test_environments_of_a_list_are_checked(position: int, value: Any, requirement: str) -> None:
    collector = Collector(stay, [Odd(), Odd(position, value), Odd()])
    with pytest.raises(
        EnvironmentSpecError, match=f"^column '{NAMES[position]}' must {requirement}.* environment 1 in step 5$"
    ):
        collector.collect(n_step=27)
    batch = collector.collect(n_step=3).batch
    assert batch["t"].tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize("buffered", [False, True])
def test_steps_before_a_rejected_one_are_preserved_completely(buffered: bool) -> None:
    buffer = VectorReplayBuffer(30, 3) if buffered else None
    collector = Collector(stay, OddVector(1, np.zeros(2)), buffer)
    with pytest.raises(EnvironmentSpecError, match="'rewards' must have 3 rows, got 2 in step 5"):
        collector.collect(n_step=27)
    if buffer is not None:
        assert len(buffer) == 12
    else:
        batch = collector.collect(n_step=3).batch
        assert batch["t"].tolist() == [0, 1, 2, 3] * 3


VECTOR_REFUSED = [
    (0, np.zeros((2, 3), np.float32), "'obs' must have 3 rows, got 2 in step 5"),
    (0, np.zeros((3, 2), np.float32), r"'obs' must have rows of shape \(3,\), got \(2,\) from environment 0"),
    (0, np.zeros((3, 3), complex), "'obs' must contain numbers, got rows of complex128 from environment 0"),
    (0, np.float32(0), "'obs' must have 3 rows, got a single ndarray in step 5"),
    (1, [0.0, None, 0.0], "'rewards' must contain numbers, got a NoneType from environment 1 in step 5"),
    (1, np.zeros((3, 2)), r"'rewards' must have rows of shape \(\), got \(2,\) from environment 0 in step 5"),
    (2, np.array([0.0, 1.0, 0.5]), "'terminateds' must have dtype bool, got a value of float64 .* 2 in step 5"),
    (3, np.array([0, 2, 0]), "'truncateds' must have dtype bool, got a value of int64 .* environment 1 in step 5"),
]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(("position", "value", "message"), VECTOR_REFUSED)
def test_arrays_of_vector_environments_are_checked(position: int, value: Any, message: str, random: bool) -> None:
    collector = Collector(stay, OddVector(position, value))
    with pytest.raises(EnvironmentSpecError, match=message):
        collector.collect(n_step=27, random=random)


def test_flags_and_rewards_of_other_dtypes_are_converted_exactly() -> None:
    for position, value in ((1, np.array([1, 2, 3], np.int8)), (2, np.array([0.0, 1.0, 0.0])), (3, [0, 1, 0])):
        batch = Collector(stay, OddVector(position, value)).collect(n_step=15).batch
        column = batch[NAMES[position]]
        assert column.dtype == (np.float64 if position == 1 else bool)
        assert column[batch["t"] == 4].tolist() == list(value)


def test_floats_wider_than_their_space_are_preserved() -> None:
    wide = np.array([0.1, 1e300, np.nan])
    for env in (Odd(0, wide), [Odd(0, wide), Odd()], OddVector(0, np.stack([wide] * 3))):
        batch = Collector(stay, env).collect(n_step=18).batch
        assert batch["new_obs"].dtype == np.float64
        np.testing.assert_array_equal(batch["new_obs"][batch["t"] == 4][0], wide)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(5), 2.0),
        (spaces.Discrete(5), np.uint8(3)),
        (spaces.Box(0, 255, (2,), np.uint8), [7, 255]),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([7.0, 255.0])),
        (spaces.MultiBinary(2), [True, False]),
        (spaces.Box(0, 9, (1,), np.float32), np.array([[5]])),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_values_that_their_space_holds_get_its_dtype(space: Any, value: Any, count: int) -> None:
    envs = [Odd(None, None, space) for _ in range(count - 1)]
    batch = Collector(stay, [*envs, Odd(0, value, space)]).collect(n_step=5 * count).batch
    assert batch["new_obs"].dtype == space.dtype
    np.testing.assert_array_equal(batch["new_obs"][-1], np.ravel(value).reshape(space.shape))


def test_values_that_fit_by_themselves_fit_together() -> None:
    space = spaces.Box(0, 2**60, (1,), np.int64)
    envs = [Odd(0, [2**53 + 1], space), Odd(0, [2.0], space), Odd(0, np.array([[7]]), space)]
    batch = Collector(stay, envs).collect(n_step=15).batch
    assert batch["new_obs"].dtype == np.int64
    assert batch["new_obs"][batch["t"] == 4].tolist() == [[2**53 + 1], [2], [7]]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(5), 2.5),
        (spaces.Box(0, 255, (2,), np.uint8), [7, 256]),
        (spaces.Box(0, 255, (2,), np.uint8), [7, -1]),
        (spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64), [2.0**63]),
        (spaces.Box(0, 9, (1,), np.float32), [2**24 + 1]),
        (spaces.Box(0, 9, (1,), np.uint8), [np.nan]),
    ],
)
def test_values_that_their_space_does_not_hold_are_rejected(space: Any, value: Any) -> None:
    with pytest.raises(EnvironmentSpecError, match=f"^column 'obs' must have dtype {space.dtype}, .* in step 5$"):
        Collector(stay, Odd(0, value, space)).collect(n_step=9)


def test_the_error_contains_the_part_of_an_observation() -> None:
    space = spaces.Dict(camera=spaces.Box(0, 1, (2,)), arm=spaces.Discrete(3))
    good = space.sample()
    for unusual, message in (
        ({"camera": good["camera"]}, "'obs.arm' must have a value, got none"),
        ({**good, "arm": None}, "'obs.arm' must contain numbers, got a NoneType"),
        ({**good, "camera": np.zeros(3)}, "'obs.camera' must have rows of shape"),
    ):
        with pytest.raises(EnvironmentSpecError, match=f"{message}.* environment 0 in step 5"):
            Collector(lambda obs: np.zeros(1, int), Odd(0, unusual, space)).collect(n_step=9)


def odd_reset() -> Odd:
    env = Odd()
    env._good = np.zeros(4, np.float32)
    return env


def test_observations_of_resets_are_checked() -> None:
    with pytest.raises(EnvironmentSpecError, match=r"'obs' must have rows .* from environment 0 in a reset"):
        Collector(stay, odd_reset()).reset_env()


def test_steps_of_a_single_environment_are_counted_across_its_episodes() -> None:
    class Short(Odd):
        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return obs, reward, self._num_steps == 3, False, info

    with pytest.raises(EnvironmentSpecError, match=r"from environment 0 in step 5$"):
        Collector(stay, Short(1, None)).collect(n_step=9)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_shapes_that_gymnasium_cannot_join_are_rejected(mode: Any) -> None:
    makers: list[Callable[[], Odd]] = [Odd, lambda: Odd(0, np.zeros(2)), Odd]
    with pytest.raises(EnvironmentSpecError, match=r"'obs' must have rows of shape .* from environment 1 in step 5"):
        Collector(stay, SyncVectorEnv(makers, autoreset_mode=mode)).collect(n_step=30)


@pytest.mark.parametrize(("position", "value", "requirement"), REFUSED)
def test_asynchronous_environments_are_checked(position: int, value: Any, requirement: str) -> None:
    makers = [Odd, lambda: Odd(position, value)]
    with AsyncCollector(stay, makers, wait_num=2, start_method="fork") as collector:
        match = f"^column '{NAMES[position]}' must {requirement}.* environment 1 in step 5$"
        with pytest.raises(EnvironmentSpecError, match=match):
            collector.collect(n_step=30)
        # Steps before the refused one are kept whole, and another episode begins.
        batch = collector.collect(n_step=1).batch
    assert batch["t"][batch["env_id"] == 1][:4].tolist() == [0, 1, 2, 3]


# Several agents


class OddRelay(arena.Relay):
    """Relay whose sixth step returns another value for the runner that runs longest."""

    def __init__(self, position: int, value: Any) -> None:
        super().__init__()
        self._position, self._value = position, value

    def step(self, actions: Any) -> Any:
        step = super().step(actions)
        step[1].update({agent: float(reward) for agent, reward in step[1].items()})
        if self._step == 6:
            step[self._position]["runner_2"] = self._value
        return step


class OddBazaar(arena.Bazaar):
    """Bazaar that returns another value for a trader in the fifth turn."""

    def __init__(self, position: int, value: Any) -> None:
        super().__init__()
        self._position, self._value = position, value

    def last(self, observe: bool = True) -> Any:
        output = list(super().last(observe))
        if self.turn == 5:
            output[self._position] = self._value
        return tuple(output)


AGENTS_REFUSED = [
    (0, None, "'new_obs' must contain an observation, got None"),
    (1, None, "'rewards' must contain numbers, got a NoneType"),
    (1, 1j, "'rewards' must contain numbers, got a complex"),
    (1, 2**53 + 1, "'rewards' must have dtype float64"),
    (2, 0.5, "'terminateds' must have dtype bool, got a value of float64"),
    (2, float("nan"), "'terminateds' must have dtype bool, got a value of float64"),
    (3, "no", "'truncateds' must contain numbers, got a str"),
]


@pytest.mark.parametrize("policies", ["random", arena.steady])
@pytest.mark.parametrize(("position", "value", "message"), AGENTS_REFUSED)
def test_parallel_agents_are_checked(position: int, value: Any, message: str, policies: Any) -> None:
    stages = [arena.Relay(), OddRelay(position, value)]
    collector = MultiAgentCollector(policies, stages, seed=1)
    with pytest.raises(SampleBatchError, match=f"{message}.* agent 'runner_2' from environment 1 in step 5"):
        collector.collect(n_step=40)


@pytest.mark.parametrize(("position", "value", "message"), AGENTS_REFUSED[1:])
def test_turn_based_agents_are_checked(position: int, value: Any, message: str) -> None:
    collector = MultiAgentCollector("random", OddBazaar(position, value), seed=1)
    with pytest.raises(EnvironmentSpecError, match=f"{message}.* agent 'trader_.' from environment 0 in step 5"):
        collector.collect(n_step=40)


@pytest.mark.parametrize(
    "make", [lambda: OddRelay(0, np.zeros(3, np.float32)), lambda: OddRelay(1, None), lambda: OddBazaar(1, None)]
)
def test_after_a_rejected_step_a_new_episode_starts(make: Callable[[], Any]) -> None:
    collector = MultiAgentCollector("random", make(), seed=1)
    with pytest.raises(EnvironmentSpecError, match="step 5"):
        collector.collect(n_step=40)
    (rows,) = collector.collect(n_step=6).batch.policy_batches.values()
    first, *_, last = dict.fromkeys(rows["eps_id"].tolist())
    before, after = (rows[rows["eps_id"] == eps_id] for eps_id in (first, last))
    assert before["t"].max() <= 4
    assert after["t"].min() == 0
    acted = [(before["t"] == t).sum() for t in range(before["t"].max() + 1)]
    assert acted in ([1, 1, 2, 2, 2], [1] * len(acted))


@pytest.mark.parametrize("value", [np.zeros(3, np.float32), np.float32(1)])
def test_observations_of_another_shape_are_rejected_before_policies(value: Any) -> None:
    collector = MultiAgentCollector(arena.steady, OddRelay(0, value), seed=1)
    with pytest.raises(SampleBatchError, match=r"obs' must have rows of shape \(2,\)"):
        collector.collect(n_step=40)


def test_a_step_is_recorded_for_all_policies_or_for_none() -> None:
    class Odd(arena.Relay):
        def step(self, actions: Any) -> Any:
            step = super().step(actions)
            if self._step == 3:
                step[0]["runner_1"] = np.array([1, 2**60 + 1])
            return step

    policies = {"runner_0": "first", "runner_1": "second", "runner_2": "second"}
    collector = MultiAgentCollector("random", [arena.Relay(), Odd()], policy_mapping=policies, seed=1)
    with pytest.raises(SampleBatchError, match="'new_obs' must contain float32"):
        collector.collect(n_step=8)
    batch = collector.collect(n_step=6).batch
    assert batch["first"]["t"].tolist() == [0, 1, 0] * 2
    assert "second" not in batch.policy_batches


def test_integers_are_accepted_as_flags() -> None:
    batch = MultiAgentCollector("random", OddRelay(2, np.int8(1)), seed=1).collect(n_episode=1).batch["runner"]
    ends = batch["terminateds"] & (batch["agent_index"] == 2)
    assert batch["t"][ends].tolist() == [5]


# Policies

POLICIES_REFUSED = [
    ({"act": np.zeros(3)}, "an action for each of 2 environments"),
    ({"act": [None, None]}, "'actions' must contain numbers, got Python objects"),
    ({"act": np.zeros(2, complex)}, "'actions' must contain numbers, got complex128"),
    ({"act": np.zeros((2, 3), int)}, r"'actions' must have rows of shape \(\), like the action space, got \(3,\)"),
    ({"act": np.zeros(2, int), "vf_preds": np.zeros(3)}, "'vf_preds' must have 2 rows, .*, got 3"),
    ({"act": np.zeros(2, int), "action_logp": 0.5}, "'action_logp' must have 2 rows, .*, got a single"),
    ({"act": np.zeros(2, int), "action_logp": [None, 0.5]}, "'action_logp' must contain numbers, got Python objects"),
    ({"act": np.zeros(2, int), "policy": {"a": {"b": np.zeros(1)}}}, r"'policy\.a\.b' must have 2 rows, .*, got 1"),
]


@pytest.mark.parametrize(("decision", "message"), POLICIES_REFUSED)
def test_policies_are_checked(decision: dict[str, Any], message: str) -> None:
    pair = SyncVectorEnv([Odd, Odd])
    with pytest.raises(PolicySpecError, match=message):
        Collector(lambda obs: decision, pair).collect(n_step=4)
    with (
        AsyncCollector(lambda obs: decision, [Odd, Odd], wait_num=2, start_method="fork") as collector,
        pytest.raises(PolicySpecError, match=message),
    ):
        collector.collect(n_step=4)


@pytest.mark.parametrize(("decision", "message"), POLICIES_REFUSED[:4])
def test_policies_are_checked_when_their_actions_change(decision: dict[str, Any], message: str) -> None:
    decisions = iter([{"act": np.zeros(2, int)}] * 2 + [decision])
    collector = Collector(lambda obs: next(decisions), SyncVectorEnv([Odd, Odd]))
    collector.collect(n_step=4)
    with pytest.raises(PolicySpecError, match=message):
        collector.collect(n_step=2)


def test_a_missing_and_an_extra_row_are_not_combined() -> None:
    counts = iter([2, 1, 3, 2])
    policy = lambda obs: {"act": np.zeros(2, int), "policy": {"x": np.arange(next(counts))}}  # noqa: E731
    collector = Collector(policy, SyncVectorEnv([Odd, Odd]))
    with pytest.raises(PolicySpecError, match=r"'policy\.x' must have 2 rows, .*, got 1"):
        collector.collect(n_step=8)


def test_policies_of_several_agents_are_checked() -> None:
    policy = lambda obs: {"act": np.zeros(len(obs), int), "vf_preds": np.zeros(len(obs) + 1)}  # noqa: E731
    with pytest.raises(PolicySpecError, match="'vf_preds' must have 1 rows"):
        MultiAgentCollector(policy, arena.Relay()).collect(n_step=4)


class Herd:
    """Function that creates three environments, the second of which is invalid."""

    def __init__(self, position: int, value: Any) -> None:
        self._invalid, self._num_steps = (position, value), 0

    def __call__(self) -> Odd:
        self._num_steps += 1
        return Odd(*self._invalid) if self._num_steps == 2 else Odd()


def work(herd: Herd, envs: int) -> RolloutWorkers:
    options = {"num_workers": 1, "backend": "inline", "max_restarts": 0}
    return RolloutWorkers("random", herd, envs_per_worker=envs, **options)


@pytest.mark.parametrize(("position", "value", "requirement"), REFUSED)
def test_workers_report_the_rejected_value_and_its_environment(position: int, value: Any, requirement: str) -> None:
    match = f"column '{NAMES[position]}' must {requirement}.* from environment 1 in step 5"
    with pytest.raises(SampleBatchError, match=match), work(Herd(position, value), 3) as workers:
        list(workers.fragments(n_step=30, fragment_length=30))


def test_workers_preserve_floats_wider_than_their_space() -> None:
    wide = np.array([0.1, 1e300, np.nan])
    with work(Herd(0, wide), 3) as workers:
        (batch,) = list(workers.fragments(n_step=30, fragment_length=30))
    np.testing.assert_array_equal(batch["new_obs"][(batch["env_id"] == 1) & (batch["t"] == 4)], [wide])
