"""Batches, buffers and files record the unit of their actions, and mixed units are rejected."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from samplebatch import (
    ActionUnit,
    AsyncCollector,
    Batch,
    CachedReplayBuffer,
    Collector,
    Dataset,
    MixedSampler,
    MultiAgentBatch,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    RolloutWorkers,
    SampleBatch,
    VectorReplayBuffer,
    channel,
    concat_samples,
    load,
)
from samplebatch.batch.action_unit import ENVIRONMENT, common_unit
from samplebatch.errors import ColumnMismatchError, FormatError
from samplebatch.policy.action_map import unit_of_actions

_SCALE = ActionUnit("scale", np.float32(-2.0), np.float32(2.0))


def steer(obs: Any) -> Any:
    """Return actions in [-1, 1], like a scaled policy."""
    return np.tanh(3.0 * obs[:, :1]).astype(np.float32)


def in_torques(obs: Any) -> Any:
    """Return actions in the environment's unit."""
    return 2.0 * steer(obs)


def halve(act: Any) -> Any:
    """Map actions by a function, which is not recorded."""
    return act / 2


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Environment that records its actions."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1"))
        self.taken: list[Any] = []

    def step(self, action: Any) -> Any:
        self.taken.append(np.array(action))
        return self.env.step(action)


def rows_that_lead_on(obs: Any, act: Any, new_obs: Any) -> int:
    """Step Pendulum from each observation with each action; count the rows that lead to `new_obs`."""
    pendulum: Any = gym.make("Pendulum-v1").unwrapped
    pendulum.reset(seed=0)
    actual = 0
    for before, action, after in zip(obs, act, new_obs, strict=True):
        pendulum.state = np.array([np.arctan2(before[1], before[0]), before[2]], np.float64)
        actual += np.allclose(pendulum.step(np.asarray(action))[0], after, atol=2e-5)
    return actual


def check_leads_on(batch: Any) -> None:
    converted = batch.to_environment_actions()
    assert converted.action_unit == ENVIRONMENT
    if isinstance(converted, Batch):
        converted = converted.as_sample_batch("rllib")
    rows = converted["obs"], converted["actions"], converted["new_obs"]
    assert rows_that_lead_on(*rows) == len(converted) > 0


def pendulum_rows(policy: Any = steer, *, random: bool = False, steps: int = 60, **options: Any) -> SampleBatch[Any]:
    with Collector(policy, "Pendulum-v1", num_envs=2, seed=3, **options) as collector:
        batch = collector.collect(n_step=steps, random=random).batch
    assert batch is not None
    return batch


@pytest.fixture(scope="module")
def scaled() -> SampleBatch[Any]:
    return pendulum_rows(map_action="scale")


@pytest.fixture(scope="module")
def sampled() -> SampleBatch[Any]:
    return pendulum_rows("random")


# What collectors record


@pytest.mark.parametrize(
    ("policy", "options", "unit"),
    [
        (steer, {"map_action": "scale"}, _SCALE),
        (in_torques, {}, ENVIRONMENT),
        (in_torques, {"map_action": "clip"}, ActionUnit("clip", np.float32(-2), np.float32(2))),
        ("random", {}, ENVIRONMENT),
        ("random", {"map_action": "scale"}, _SCALE),
        ("random", {"map_action": "clip"}, ENVIRONMENT),
    ],
)
@pytest.mark.parametrize("random", [False, True])
def test_stored_actions_reproduce_the_next_observations(
    policy: Any, options: Any, unit: ActionUnit, random: bool
) -> None:
    batch = pendulum_rows(policy, random=random, **options)
    assert batch.action_unit == (ENVIRONMENT if random and unit.mapping == "clip" else unit)
    check_leads_on(batch)


@pytest.mark.parametrize("random", [False, True])
def test_converted_actions_equal_the_actions_of_the_environment(random: bool) -> None:
    recorders: list[Any] = [Recorder(), Recorder()]
    with Collector(steer, recorders, seed=1, map_action="scale") as collector:
        batch = collector.collect(n_step=40, random=random).batch
    assert batch is not None
    np.testing.assert_array_equal(
        batch.to_environment_actions()["actions"], np.concatenate([item.taken for item in recorders])
    )


@pytest.mark.parametrize("bound_method", ["clip", "tanh", None])
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("random", [False, True])
def test_actions_of_library_policies_reproduce_the_next_observations(
    bound_method: Any, scaling: bool, random: bool
) -> None:
    torch = pytest.importorskip("torch")
    from samplebatch.learn.policy import Policy

    class Steering(Policy):
        def forward(self, batch: Batch, state: Any = None) -> Batch:
            return Batch(act=torch.tanh(torch.as_tensor(batch.obs)[:, :1]))

    space = spaces.Box(-2.0, 2.0, (1,))
    policy = Steering(space, action_scaling=scaling, action_bound_method=bound_method)
    recorders: list[Any] = [Recorder(), Recorder()]
    with Collector(policy, recorders, seed=1) as collector:
        batch = collector.collect(n_step=60, random=random).batch
    assert batch is not None
    assert batch.action_unit == policy.action_unit
    check_leads_on(batch)
    np.testing.assert_array_equal(
        batch.to_environment_actions()["actions"], np.concatenate([item.taken for item in recorders])
    )


def test_discrete_actions_have_no_unit() -> None:
    with Collector("random", "CartPole-v1", seed=1) as collector:
        batch = collector.collect(n_step=10).batch
    assert batch is not None
    assert batch.action_unit is None
    assert batch._flags is SampleBatch(a=[1])._flags, "nothing is added to batches that need it not"


def test_units_of_policies_and_spaces() -> None:
    box, choices = spaces.Box(np.float32(-2), np.float32(2), (1,)), spaces.Discrete(3, start=5)
    assert unit_of_actions(None, None, spaces.Tuple([spaces.Discrete(2), box])) == ENVIRONMENT
    assert unit_of_actions(None, None, spaces.MultiDiscrete([2, 3])) is None
    assert unit_of_actions(None, halve, box) == ActionUnit("function")

    class Mapping:
        map_action = staticmethod(halve)

    assert unit_of_actions(Mapping(), None, box) == ActionUnit("function")
    pytest.importorskip("torch")
    from torch import nn

    from samplebatch.learn.dqn import DiscreteQLearningPolicy

    policy = DiscreteQLearningPolicy(model=nn.Linear(2, 3), action_space=choices)
    assert policy.action_unit == ActionUnit("shift", 5)
    assert policy.action_unit.to_environment(np.array([0, 2])).tolist() == [5, 7]


def test_policies_of_tianshou_have_the_same_unit() -> None:
    pytest.importorskip("torch")
    tianshou = pytest.importorskip("tianshou.algorithm.modelfree.sac")
    from torch import nn

    class Actor(nn.Module):
        def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
            raise NotImplementedError

    theirs = tianshou.SACPolicy(actor=Actor(), action_space=spaces.Box(-2.0, 2.0, (1,)))
    assert unit_of_actions(theirs, None, theirs.action_space) == _SCALE


def test_random_actions_are_not_mixed_with_function_mapped_ones() -> None:
    with Collector(steer, "Pendulum-v1", map_action=halve, seed=1) as collector:
        first, second = collector.collect(n_step=5).batch, collector.collect(n_step=5, random=True).batch
    assert first is not None
    assert second is not None
    assert (first.action_unit, second.action_unit) == (ActionUnit("function"), ENVIRONMENT)
    check_leads_on(second)
    with pytest.raises(ColumnMismatchError, match="must be converted by that function"):
        first.to_environment_actions()
    with pytest.raises(ColumnMismatchError, match="must be in one unit"):
        concat_samples([first, second])


@pytest.mark.parametrize("random", [False, True])
def test_asynchronous_collectors_record_the_unit(random: bool) -> None:
    with AsyncCollector(steer, "Pendulum-v1", num_envs=2, map_action="scale", seed=1) as collector:
        batch = collector.collect(n_step=20, random=random).batch
    assert batch is not None
    assert batch.action_unit == _SCALE
    check_leads_on(batch)


@pytest.mark.parametrize("backend", ["inline", "process"])
@pytest.mark.parametrize("in_buffer", [False, True])
def test_workers_preserve_the_unit(backend: Any, in_buffer: bool) -> None:
    buffer = VectorReplayBuffer(200, 2) if in_buffer else None
    options: dict[str, Any] = {"backend": backend, "start_method": "fork", "seed": 1}
    with RolloutWorkers(steer, "Pendulum-v1", buffer, map_action="scale", **options) as workers:
        batch = workers.collect(n_step=40).batch
    if buffer is not None:
        assert buffer.action_unit == _SCALE
        batch, _ = buffer.sample(20)
    assert batch.action_unit == _SCALE
    check_leads_on(batch)


class Pendulums(ParallelEnv):  # type: ignore[type-arg, misc]
    """Three independent pendulums, one per agent."""

    metadata: ClassVar = {"name": "pendulums"}
    render_mode = None
    possible_agents: ClassVar = ["scaled", "free", "drawn"]

    def __init__(self) -> None:
        self._all: dict[str, Any] = {agent: gym.make("Pendulum-v1") for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return self._all[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self._all[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        actual = {agent: self._all[agent].reset(seed=seed) for agent in self.agents}
        return {agent: obs for agent, (obs, _) in actual.items()}, {agent: info for agent, (_, info) in actual.items()}

    def step(self, actions: Any) -> Any:
        actual = {agent: self._all[agent].step(action) for agent, action in actions.items()}
        return tuple({agent: part[i] for agent, part in actual.items()} for i in range(5))


def test_each_policy_of_several_agents_has_a_separate_unit() -> None:
    policies: dict[Any, Any] = {"scaled": steer, "free": in_torques, "drawn": "random"}
    buffer = MultiAgentReplayBuffer(100)
    options: dict[str, Any] = {"policy_mapping": str, "map_action": {"scaled": "scale"}, "seed": 1}
    with MultiAgentCollector(policies, Pendulums(), **options) as collector:
        batch = collector.collect(n_step=20).batch
    assert batch is not None
    units = {"scaled": _SCALE, "free": ENVIRONMENT, "drawn": ENVIRONMENT}
    buffer.add(batch)
    again = pickle.loads(pickle.dumps(buffer))
    for policy, unit in units.items():
        for actual in (batch, concat_samples([batch, batch]), buffer.sample(5).batch, again.sample(5).batch):
            assert actual[policy].action_unit == unit
            check_leads_on(actual[policy])


# Parts, copies and forms


def _forms(batch: SampleBatch[Any], folder: Path) -> Iterator[tuple[str, Any]]:
    yield "slice", batch[5:9]
    yield "take", batch.take([3, 1])
    yield "mask", batch[batch["rewards"] < 0]
    yield "copy", batch.copy()
    yield "shallow copy", batch.copy(shallow=True)
    yield "deepcopy", copy.deepcopy(batch)
    yield "select", batch.select("actions", "obs")
    yield "rename", batch.rename({"rewards": "r"})
    yield "concat", concat_samples([batch, batch])
    yield "episodes", batch.split_by_episode()[0]
    yield "timeslices", batch.timeslices(10)[0]
    yield "minibatches", next(iter(batch.minibatches(8)))
    yield "pickle", pickle.loads(pickle.dumps(batch))
    yield "arrow", SampleBatch.from_arrow(batch.to_arrow())
    yield "nested", batch.as_batch()
    yield "nested and back", batch.as_batch("tianshou").as_sample_batch("rllib")
    yield "several agents", MultiAgentBatch({"one": batch}, len(batch)).timeslices(10)[0]["one"]
    for suffix in ("arrow", "parquet", "h5"):
        batch.save(folder / f"steps.{suffix}")
        yield suffix, load(folder / f"steps.{suffix}")
    shuffled = batch.copy()
    shuffled.shuffle()
    yield "shuffle", shuffled
    producer, consumer = channel()
    with producer, consumer:
        producer.send(batch)
        yield "channel", consumer.recv().copy()
        producer.send(MultiAgentBatch({"one": batch}, len(batch)))
        yield "channel of several agents", consumer.recv()["one"].copy()
        producer.send(batch.as_batch())
        yield "channel of nested batches", consumer.recv().copy()


def test_every_part_and_copy_of_a_batch_preserves_the_unit(scaled: SampleBatch[Any], tmp_path: Path) -> None:
    lost = [form for form, part in _forms(scaled, tmp_path) if part.action_unit != _SCALE]
    assert not lost


def _nested_forms(batch: Batch, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "slice", batch[1:3]
    yield "row", batch[2]
    yield "indices", batch[np.array([1, 2])]
    yield "iteration", next(iter(batch))
    yield "copy", batch.copy()
    yield "deepcopy", copy.deepcopy(batch)
    yield "shallow copy", copy.copy(batch)
    yield "constructor", Batch(batch)
    yield "cat", Batch.cat([batch, batch])
    yield "stack", Batch.stack([batch, batch])
    yield "split", next(batch.split(3))
    yield "numpy", batch.to_numpy()
    yield "pickle", pickle.loads(pickle.dumps(batch))
    for suffix in ("arrow", "parquet", "h5"):
        batch.save(folder / f"nested.{suffix}")
        yield suffix, load(folder / f"nested.{suffix}")
    grown = Batch()
    grown.cat_(batch)
    yield "cat_", grown


def test_every_part_and_copy_of_a_sample_preserves_the_unit(scaled: SampleBatch[Any], tmp_path: Path) -> None:
    buffer = ReplayBuffer(100)
    buffer.extend(scaled.drop("infos"))
    sample, _ = buffer.sample(8)
    lost = [form for form, part in _nested_forms(sample, tmp_path) if part.action_unit != _SCALE]
    assert not lost
    check_leads_on(sample)


def test_a_column_named_action_unit_hides_the_attribute() -> None:
    batch = Batch(action_unit=[1, 2])
    assert batch.action_unit.tolist() == [1, 2]
    assert batch[:1].action_unit.tolist() == [1]


def test_assigned_actions_have_an_unknown_unit(scaled: SampleBatch[Any]) -> None:
    batch = scaled.copy()
    batch["rewards"] = batch["rewards"] / 2
    assert batch.action_unit == _SCALE
    batch["actions"] = batch["actions"] * 2
    assert batch.action_unit is None


# Mixing


def test_batches_with_different_units_are_not_joined(
    scaled: SampleBatch[Any], sampled: SampleBatch[Any], tmp_path: Path
) -> None:
    buffer, other = ReplayBuffer(200), ReplayBuffer(200)
    buffer.extend(scaled)
    other.extend(sampled)
    dataset = Dataset(tmp_path / "steps")
    dataset.extend(scaled)
    several = MultiAgentReplayBuffer(100)
    several.add(MultiAgentBatch({"one": scaled}, len(scaled)))
    mixes: list[Callable[[], Any]] = [
        lambda: concat_samples([scaled, sampled]),
        lambda: scaled.concat(sampled),
        lambda: Batch.cat([scaled.as_batch(), sampled.as_batch()]),
        lambda: buffer.extend(sampled),
        lambda: buffer.extend(sampled.as_batch()),
        lambda: buffer.update(other),
        lambda: buffer.add(other[:1], buffer_ids=[0]),
        lambda: dataset.extend(sampled),
        lambda: MixedSampler({"one": buffer, "other": other}),
        lambda: MixedSampler({"one": dataset, "other": other}),
        lambda: several.add(MultiAgentBatch({"one": sampled}, len(sampled))),
        lambda: Collector("random", "Pendulum-v1", buffer).collect(n_step=1),
    ]
    for mix in mixes:
        before = len(buffer), len(dataset), buffer.action_unit
        with pytest.raises(ColumnMismatchError, match="must be in one unit"):
            mix()
        assert (len(buffer), len(dataset), buffer.action_unit) == before
    several.add(MultiAgentBatch({"other": sampled}, len(sampled)))
    assert several.sample(4).batch["other"].action_unit == ENVIRONMENT


def test_converted_batches_may_be_mixed(scaled: SampleBatch[Any], sampled: SampleBatch[Any]) -> None:
    joined = concat_samples([scaled.to_environment_actions(), sampled])
    assert isinstance(joined, SampleBatch)
    assert joined.action_unit == ENVIRONMENT
    check_leads_on(joined)


def test_sources_whose_units_become_different_are_rejected(scaled: SampleBatch[Any], sampled: SampleBatch[Any]) -> None:
    first, other = ReplayBuffer(200), ReplayBuffer(200)
    sampler = MixedSampler({"one": first, "other": other})
    first.extend(scaled)
    other.extend(scaled)
    assert sampler.sample(8)[0].action_unit == sampler.action_unit == _SCALE
    check_leads_on(sampler.sample(8)[0])
    other.reset()
    other.extend(sampled)
    with pytest.raises(ColumnMismatchError, match="'one' has a policy's \\(scale\\), 'other' has the environment's"):
        sampler.sample(8)


def test_rows_of_unknown_unit_may_be_joined_to_any_unit(scaled: SampleBatch[Any]) -> None:
    plain = scaled.copy()
    plain.action_unit = None
    joined = concat_samples([plain, scaled])
    assert isinstance(joined, SampleBatch)
    assert joined.action_unit == _SCALE
    clip = ActionUnit("clip", -2.0, 2.0)
    assert common_unit([ENVIRONMENT, None, clip, ENVIRONMENT]) == clip
    with pytest.raises(ColumnMismatchError, match="of other bounds"):
        common_unit([_SCALE, ActionUnit("scale", -1.0, 1.0)])


# Buffers


@pytest.mark.parametrize(
    "make",
    [
        lambda: VectorReplayBuffer(200, 2),
        lambda: VectorReplayBuffer(200, 2, stack_num=2, ignore_obs_next=True),
        lambda: CachedReplayBuffer(ReplayBuffer(200), 2, 300),
    ],
)
def test_buffers_of_collectors_record_the_unit(make: Callable[[], Any]) -> None:
    buffer = make()
    collector = Collector(steer, "Pendulum-v1", buffer, num_envs=2, map_action="scale", seed=1)
    with collector:
        collector.collect(n_step=430)
        assert buffer.action_unit == buffer.buffers[0].action_unit == buffer.sample(3)[0].action_unit == _SCALE
        collector.reset_buffer()
        assert buffer.action_unit is None
        collector.collect(n_step=10, random=True)
        assert buffer.action_unit == _SCALE


def _buffer_forms(buffer: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    for suffix in ("arrow", "parquet", "h5"):
        buffer.save(folder / f"buffer.{suffix}")
        yield suffix, load(folder / f"buffer.{suffix}")
    yield "pickle", pickle.loads(pickle.dumps(buffer))
    yield "deepcopy", copy.deepcopy(buffer)
    again = type(buffer)(200)
    again.load_state_dict(buffer.state_dict())
    yield "state", again
    moved = type(buffer)(200)
    moved.update(buffer)
    yield "update", moved


@pytest.mark.parametrize("make", [ReplayBuffer, lambda size: PrioritizedReplayBuffer(size, alpha=0.6, beta=0.4)])
def test_every_copy_and_file_of_a_buffer_preserves_the_unit(
    make: Any, scaled: SampleBatch[Any], tmp_path: Path
) -> None:
    buffer = make(200)
    buffer.extend(scaled)
    forms = _buffer_forms(buffer, tmp_path) if make is ReplayBuffer else [("copy", copy.deepcopy(buffer))]
    lost = [form for form, actual in forms if actual.action_unit != _SCALE or actual.sample(2)[0].action_unit != _SCALE]
    assert not lost


def test_a_folder_preserves_the_unit(scaled: SampleBatch[Any], sampled: SampleBatch[Any], tmp_path: Path) -> None:
    with ReplayBuffer(200, storage=tmp_path / "rows") as buffer:
        buffer.extend(scaled.drop("infos"))
    with ReplayBuffer.open(tmp_path / "rows") as again:
        assert again.action_unit == _SCALE
        with pytest.raises(ColumnMismatchError, match="must be in one unit"):
            again.extend(sampled.drop("infos"))


def test_a_dataset_preserves_the_unit(scaled: SampleBatch[Any], tmp_path: Path) -> None:
    plain = scaled.copy()
    plain.action_unit = None
    dataset = Dataset(tmp_path / "steps")
    dataset.extend(plain)
    assert dataset.action_unit is None
    dataset.extend(scaled)
    again = Dataset(tmp_path / "steps")
    actual = [again, again.read(), again.take([0, 1]), again.sample(3)[0], next(again.iter_episodes())]
    actual += [next(iter(again.iter_batches(7))), next(iter(again.iter_batches(7, shuffle=True)))]
    again.compact()
    actual += [Dataset(tmp_path / "steps"), Dataset(tmp_path / "steps").read(), next(again.fragments())]
    assert [item.action_unit for item in actual] == [_SCALE] * len(actual)
    buffer = ReplayBuffer(200)
    buffer.extend(again)
    assert buffer.action_unit == _SCALE


def test_a_dataset_of_several_policies_preserves_their_units(
    scaled: SampleBatch[Any], sampled: SampleBatch[Any], tmp_path: Path
) -> None:
    dataset = Dataset(tmp_path / "steps")
    dataset.extend(MultiAgentBatch({"one": scaled, "other": sampled}, len(scaled)))
    with pytest.raises(ColumnMismatchError, match="must be in one unit"):
        dataset.extend(MultiAgentBatch({"one": sampled}, len(sampled)))
    batch = dataset.read()
    assert isinstance(batch, MultiAgentBatch)
    assert [batch["one"].action_unit, batch["other"].action_unit] == [_SCALE, ENVIRONMENT]
    assert Dataset(tmp_path / "steps", policy="one").sample(2)[0].action_unit == _SCALE


# What comes from outside


@pytest.mark.parametrize(
    "unit",
    [
        ENVIRONMENT,
        ActionUnit("function"),
        ActionUnit("shift", 3),
        ActionUnit("tanh"),
        ActionUnit("clip", np.array([[-np.inf, 0.0]], np.float32), np.array([[1.5, np.inf]], np.float32)),
        ActionUnit("scale", np.array([-1.0, -0.1]), np.array([0.3, 7.0])),
    ],
)
def test_descriptions_are_exact(unit: ActionUnit) -> None:
    import json

    again = ActionUnit.from_description(json.loads(json.dumps(unit.describe(), allow_nan=False)))
    assert again == unit
    assert hash(again) == hash(unit)
    assert [bound.dtype for bound in (again.low, again.high) if bound is not None] == [
        bound.dtype for bound in (unit.low, unit.high) if bound is not None
    ]
    assert pickle.loads(pickle.dumps(unit)) == unit


@pytest.mark.parametrize(
    "plain",
    [
        3,
        {"mapping": "eval"},
        {"mapping": ["scale"]},
        {"mapping": "scale"},
        {"mapping": "scale", "low": -1.0, "high": 1.0},
        {"mapping": "scale", "dtype": "object", "low": -1.0, "high": 1.0},
        {"mapping": "scale", "dtype": "float32", "low": [[-1.0], -1.0], "high": 1.0},
        {"mapping": "scale", "dtype": "float32", "low": [-1.0, -2.0], "high": [1.0, 2.0, 3.0]},
        {"mapping": "scale", "dtype": "float32", "low": float("nan"), "high": 1.0},
        {"mapping": "scale", "dtype": "float32", "low": "x", "high": 1.0},
        {"mapping": "shift", "dtype": "int8", "low": 10**30},
        {"mapping": "scale", "dtype": "float32", "low": [], "high": []},
        {"mapping": "scale", "dtype": "float32", "low": -1.0, "high": 1.0, "more": 1},
    ],
)
def test_untrusted_descriptions_are_validated(plain: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ActionUnit.from_description(plain)


def test_a_damaged_unit_in_a_table_is_rejected(scaled: SampleBatch[Any]) -> None:
    table = scaled.drop("infos").to_arrow()
    metadata = {key: value.replace(b'"scale"', b'"skale"') for key, value in (table.schema.metadata or {}).items()}
    with pytest.raises(FormatError):
        SampleBatch.from_arrow(table.replace_schema_metadata(metadata))


def test_bounds_must_fit_the_actions() -> None:
    unit = ActionUnit("scale", np.array([-1.0, -2.0]), np.array([1.0, 2.0]))
    with pytest.raises(ColumnMismatchError, match=r"rows of shape \(2,\)"):
        unit.to_environment(np.zeros((4, 3)))
