"""Options of all collectors: infos, environment arguments, policies that swap agents."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import arena
import gymnasium
import gyms
import numpy as np
import pettingzoo
import pytest

from samplebatch import (
    AsyncCollector,
    Collector,
    MultiAgentBatch,
    MultiAgentCollector,
    MultiAgentReplayBuffer,
    ReplayBuffer,
    RolloutWorkers,
    VectorReplayBuffer,
    concat_samples,
)
from samplebatch.column import RaggedColumn
from samplebatch.errors import ArgumentError, EnvironmentSpecError, PolicySpecError
from samplebatch.rollout import Episode
from tests.ids import plain_repr
from tests.optional import torch

TALKING = {"number": 3, "length": 5, "with_infos": True}
COLLECTORS = {
    "one after the other": lambda env, **options: Collector("random", env, **options),
    "in processes of their own": lambda env, **options: AsyncCollector("random", env, start_method="fork", **options),
    "by a worker": lambda env, **options: RolloutWorkers("random", env, num_workers=1, backend="inline", **options),
}


@pytest.mark.parametrize("make", COLLECTORS.values(), ids=COLLECTORS)
def test_infos_may_be_omitted(make: Any) -> None:
    for infos in (True, False):
        with make(gyms.Ladder, env_kwargs=TALKING, infos=infos) as collector:
            batch = collector.collect(n_step=10).batch
        assert ("infos" in batch) == infos
        assert list(batch["obs"][:, 0]) == [3.0] * 10


class Visitor(gymnasium.Env[Any, Any]):
    """Environment that observes all visited positions: rows of varying shape, flat or in a dict."""

    def __init__(self, nested: bool = False) -> None:
        path = gymnasium.spaces.Sequence(gymnasium.spaces.Box(0, 9, (2,), np.float32), stack=True)
        self.nested = nested
        self.observation_space = gymnasium.spaces.Dict(path=path) if nested else path
        self.action_space = gymnasium.spaces.Discrete(2)
        self.time = 0

    def observe(self) -> Any:
        path = np.full((self.time, 2), self.time, np.float32)
        return {"path": path} if self.nested else path

    def reset(self, **_: Any) -> Any:
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return self.observe(), 1.0, self.time == 4, False, {}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("make", COLLECTORS.values(), ids=COLLECTORS)
def test_observations_of_varying_shape_are_a_ragged_column(make: Any, nested: bool) -> None:
    def pick(observations: Any) -> Any:
        return observations["path"] if nested else observations

    with make(Visitor, env_kwargs={"nested": nested}) as collector:
        batches = [collector.collect(n_step=steps).batch for steps in (8, 1, 8)]
    for batch, times in zip(batches, ([0, 1, 2, 3] * 2, [0], [1, 2, 3, 0, 1, 2, 3, 0]), strict=True):
        for name, shift in (("obs", 0), ("new_obs", 1)):
            column = pick(batch[name])
            assert isinstance(column, RaggedColumn)
            assert column.dtype == np.float32
            assert [row.tolist() for row in column] == [[[t + shift] * 2] * (t + shift) for t in times]
    assert isinstance(pick(concat_samples(batches)["obs"]), RaggedColumn)
    assert isinstance(pick(batches[0].as_batch()["obs"]), RaggedColumn)


def test_infos_of_several_agents_may_be_omitted() -> None:
    for infos in (True, False):
        for env in (arena.Relay, arena.Bazaar):
            batch = MultiAgentCollector("random", env, infos=infos).collect(n_step=10).batch
            assert all(("infos" in steps) == infos for steps in batch.policy_batches.values())


@pytest.mark.parametrize("kind", [Collector, AsyncCollector])
def test_buffers_may_omit_infos(kind: Any) -> None:
    for infos in (True, False):
        buffer = VectorReplayBuffer(20, 1)
        with kind("random", [gyms.Ladder], buffer, env_kwargs=TALKING, infos=infos) as collector:
            collector.collect(n_step=10)
        assert ("step" in buffer[:].info) == infos


@pytest.mark.parametrize("make", COLLECTORS.values(), ids=COLLECTORS)
def test_environments_are_created_with_arguments(make: Any) -> None:
    with make("CartPole-v1", env_kwargs={"max_episode_steps": 3}) as collector:
        assert set(collector.collect(n_episode=4).lens.tolist()) == {3}


def test_environments_of_several_agents_are_created_with_arguments() -> None:
    spread = "mpe2/simple_spread_v3"
    with MultiAgentCollector("random", [spread, spread], env_kwargs={"N": 2}) as collector:
        assert collector.collect(n_step=4).batch["agent"].count == 8
    with MultiAgentCollector("random", spread, num_envs=2, env_kwargs={"N": 4}) as collector:
        assert collector.collect(n_step=4).batch["agent"].count == 16


def test_arguments_for_existing_environments_are_rejected() -> None:
    words = "env_kwargs must be passed with a function or id as env, got a"
    with pytest.raises(ArgumentError, match=words):
        Collector("random", gyms.Ladder(0), env_kwargs=TALKING)
    with pytest.raises(ArgumentError, match=words):
        MultiAgentCollector("random", [arena.Relay()], env_kwargs=TALKING)


def seats(agent: str, episode: Episode) -> str:
    """Exchange the two policies in every episode."""
    return ("main", "rival")[(int(agent[-1]) + episode.number) % 2]


@pytest.mark.parametrize("env", [arena.Relay, arena.Bazaar])
def test_a_policy_mapping_may_accept_the_episode(env: Any) -> None:
    requested: list[tuple[str, Episode]] = []

    def mapping(agent: str, episode: Episode) -> str:
        requested.append((agent, episode))
        return seats(agent, episode)

    collector = MultiAgentCollector("random", env, policy_mapping=mapping, num_envs=2)
    batch = collector.collect(n_episode=6).batch
    observed = {(episode.env_id, episode.number): episode.eps_id for _, episode in requested}
    assert sorted(observed) == [(env_id, number) for env_id in (0, 1) for number in range(3)]
    # An agent is asked for once an episode.
    assert len(requested) == len(set(requested)) == 6 * 3
    number_of = {eps_id: number for (_, number), eps_id in observed.items()}
    for policy, steps in batch.policy_batches.items():
        for eps_id, agent in zip(steps["eps_id"].tolist(), steps["agent_index"].tolist(), strict=True):
            assert policy == seats(str(agent), Episode(eps_id, 0, number_of[eps_id]))
    assert {len(np.unique(steps["agent_index"])) for steps in batch.policy_batches.values()} == {3}


def test_workers_swap_seats_and_create_both_policies() -> None:
    policies = {"main": arena.steady, "rival": "random"}
    with RolloutWorkers(
        policies, arena.Relay, num_workers=1, policy_mapping=seats, start_method="fork", seed=1
    ) as workers:
        batch = workers.collect(n_episode=4).batch
    for policy, steps in batch.policy_batches.items():
        assert (set(steps["actions"].tolist()) == {1}) == (policy == "main")
        assert np.unique(steps["agent_index"]).tolist() == [0, 1, 2]


def test_a_buffer_accepts_agents_that_swap_policies() -> None:
    buffer = MultiAgentReplayBuffer(200)
    MultiAgentCollector("random", arena.Relay, buffer, policy_mapping=seats).collect(n_episode=4)
    batch = buffer.sample(0).batch
    assert len(buffer) == sum(steps.count for steps in batch.policy_batches.values()) == 4 * 12
    for steps in batch.policy_batches.values():
        assert (steps["new_obs"][:, 0] == steps["obs"][:, 0] + 1).all()


@pytest.mark.parametrize(
    "mapping",
    [
        lambda agent: "a",
        lambda agent, kind="a": kind,
        lambda agent, episode: "a" if episode.id_ == episode.eps_id else "b",
        lambda agent, *args, **kwargs: "a" if args else "b",
        lambda agent, episode=None: "a" if episode else "b",
        {"runner_0": "a"}.get,
    ],
)
def test_functions_receive_the_episode_if_they_have_a_parameter_for_it(mapping: Any) -> None:
    batch = MultiAgentCollector("random", arena.Relay, policy_mapping=mapping).collect(n_step=1).batch
    assert list(batch.policy_batches) == ["a"]


LADDER = partial(gyms.Ladder, 3)
EVERY_KIND = {
    **{name: (make, LADDER) for name, make in COLLECTORS.items()},
    "of several agents": (lambda env, **options: MultiAgentCollector("random", env, **options), arena.Relay),
    "of several agents by a worker": (COLLECTORS["by a worker"], arena.Relay),
}


@pytest.mark.parametrize(("make", "env"), EVERY_KIND.values(), ids=EVERY_KIND)
def test_every_collector_accepts_numpy_seeds(make: Any, env: Any) -> None:
    sampled = []
    for seed in (np.random.SeedSequence(3), np.random.SeedSequence(3), 3):
        with make(env, seed=seed) as collector:
            batch = collector.collect(n_step=9).batch
        steps = batch.values() if isinstance(batch, MultiAgentBatch) else [batch]
        sampled.append([item["actions"].tolist() for item in steps])
    assert sampled[0] == sampled[1] == sampled[2]


@pytest.mark.parametrize(("make", "env"), EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize("seed", [-1, "3", 0.5])
def test_every_collector_rejects_an_invalid_seed(make: Any, env: Any, seed: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^seed must be a non-negative integer, a SeedSequence or None, got"):
        make(env, seed=seed)


@pytest.mark.parametrize(("make", "env"), EVERY_KIND.values(), ids=EVERY_KIND)
@pytest.mark.parametrize(
    ("option", "value"), [("map_action", "tanh"), ("map_action", True), ("exploration_noise", "yes")]
)
def test_every_collector_rejects_options_that_have_no_effect(make: Any, env: Any, option: str, value: Any) -> None:
    with pytest.raises(PolicySpecError, match=f"^{option} must be .* or a function, got {value!r}"):
        make(env, **{option: value})


@pytest.mark.parametrize(("make", "env"), EVERY_KIND.values(), ids=EVERY_KIND)
def test_every_collector_rejects_an_invalid_buffer_before_it_steps(make: Any, env: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^buffer must be a .*ReplayBuffer or a ReplayClient .*, got a list$"):
        make(env, buffer=[])


def test_buffers_of_one_agent_and_of_several_are_distinguished() -> None:
    with pytest.raises(ArgumentError, match="environments of several agents, got a ReplayBuffer"):
        MultiAgentCollector("random", arena.Relay, buffer=ReplayBuffer(9))
    for kind in (Collector, AsyncCollector):
        with pytest.raises(ArgumentError, match="environments of one agent, got a MultiAgentReplayBuffer"):
            kind("random", [LADDER], MultiAgentReplayBuffer(9))


def test_num_envs_must_equal_the_number_of_environments() -> None:
    with pytest.raises(ArgumentError, match="num_envs must be 1, the number of environments in env, a Relay, got 2"):
        MultiAgentCollector("random", arena.Relay(), num_envs=2)
    with pytest.raises(ArgumentError, match="num_envs must be 2, the number of environments in env, a list, got 3"):
        MultiAgentCollector("random", [arena.Relay, arena.Relay], num_envs=3)
    with MultiAgentCollector("random", [arena.Relay, arena.Relay], num_envs=2) as collector:
        assert collector.num_envs == 2


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ([], "env must contain at least one environment, got none"),
        (None, "env must be a PettingZoo environment .*NoneType"),
    ],
)
def test_other_objects_than_multi_agent_environments_are_rejected(env: Any, words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        MultiAgentCollector("random", env)


def test_an_environment_of_several_agents_is_stepped_once() -> None:
    first = arena.Relay()
    with pytest.raises(EnvironmentSpecError, match="got environment 1 twice"):
        MultiAgentCollector("random", [first, first])


@pytest.mark.parametrize("make", [Collector, MultiAgentCollector])
def test_a_policy_that_cannot_be_called_is_reported(make: Any) -> None:
    env = LADDER if make is Collector else arena.Relay
    for policy, words in (("randon", "or 'random', got 'randon'"), (np.ndarray, "got the class ndarray")):
        options = {"policy": policy, "env": env}
        with pytest.raises(PolicySpecError, match=words), make(**options) as collector:
            collector.collect(n_step=1)


class Steered(gymnasium.Env[Any, Any]):
    """Environment that observes its last action, between -3 and 5."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-3, 5, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.asarray(action, np.float32), 0.0, False, False, {}


class SteeredTogether(pettingzoo.ParallelEnv[str, Any, Any]):
    """`Steered` with two agents."""

    metadata: ClassVar[dict[str, Any]] = {"name": "steered"}
    possible_agents: ClassVar[list[str]] = ["left_0", "right_0"]

    def observation_space(self, agent: str) -> Any:
        return Steered.observation_space

    def action_space(self, agent: str) -> Any:
        return Steered.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        nothing = dict.fromkeys(self.agents, False)
        observed = {agent: np.asarray(actions[agent], np.float32) for agent in self.agents}
        return observed, dict.fromkeys(self.agents, 0.0), nothing, nothing, {agent: {} for agent in self.agents}

    def close(self) -> None:
        return None


STEERED = {name: (make, Steered) for name, make in COLLECTORS.items()} | {
    "of several agents": (lambda env, **options: MultiAgentCollector("random", env, **options), SteeredTogether)
}


def given_and_kept(batch: Any) -> tuple[Any, Any]:
    """Return the actions that environments received and the stored actions, in float64."""
    parts = batch.policy_batches.values() if isinstance(batch, MultiAgentBatch) else (batch,)
    performed, stored = (np.concatenate([part[name] for part in parts]) for name in ("new_obs", "actions"))
    return performed.astype(np.float64), stored.astype(np.float64)


@pytest.mark.parametrize(("make", "env"), STEERED.values(), ids=STEERED)
@pytest.mark.parametrize("map_action", [None, "clip", "scale", np.negative], ids=str)
def test_random_actions_are_sampled_from_the_environment_space(make: Any, env: Any, map_action: Any) -> None:
    with make(env, seed=1, map_action=map_action) as collector:
        performed, stored = given_and_kept(collector.collect(n_step=300).batch)
    assert -3 <= performed.min() < -2.5
    assert 4.5 < performed.max() <= 5
    # All over the space: scaled twice, half of them would lie at its bounds.
    assert np.unique(performed).size > 290
    if map_action == "scale":
        assert np.abs(stored).max() <= 1
        assert np.allclose(-3 + (stored + 1) * 4, performed, atol=1e-5)
    else:
        assert np.array_equal(stored, performed)


def test_random_actions_are_stored_in_the_unit_of_the_policy() -> None:
    with Collector(lambda obs: obs * 0, Steered, seed=1, map_action="scale") as collector:
        performed, stored = given_and_kept(collector.collect(n_step=300, random=True).batch)
    assert -3 <= performed.min() < -2.5
    assert np.abs(stored).max() <= 1
    assert np.allclose(-3 + (stored + 1) * 4, performed, atol=1e-5)


def test_each_policy_may_scale_its_random_actions() -> None:
    policies, options = {"left": "random", "right": "random"}, {"map_action": {"left": "scale"}}
    batches = []
    for _ in range(2):
        with MultiAgentCollector(policies, SteeredTogether, seed=3, **options) as collector:
            batches.append(collector.collect(n_step=50).batch)
    for batch in batches:
        assert np.abs(batch["left"]["actions"]).max() <= 1
        assert np.array_equal(batch["right"]["actions"], batch["right"]["new_obs"])
        assert np.array_equal(batch["left"]["actions"], batches[0]["left"]["actions"])


def test_scaled_random_actions_resume_from_a_state() -> None:
    def make() -> MultiAgentCollector:
        return MultiAgentCollector("random", SteeredTogether, seed=3, map_action="scale")

    with make() as first, make() as other:
        first.collect(n_step=10)
        other.load_state_dict(first.state_dict(), allow_pickle=True)
        batches = [collector.collect(n_step=100).batch for collector in (first, other)]
    for policy_id, steps in batches[0].policy_batches.items():
        assert np.array_equal(steps["actions"], batches[1][policy_id]["actions"])


@pytest.mark.parametrize(("make", "env"), STEERED.values(), ids=STEERED)
def test_random_actions_have_no_noise(make: Any, env: Any) -> None:
    with pytest.raises(PolicySpecError, match=r"^exploration_noise must be False for a random policy$"):
        make(env, exploration_noise=lambda act, batch: act)


def make_cart_pole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ("CartPole-v1", "random"),
        ("mpe2/simple_tag_v3", lambda obs: obs),
        (make_cart_pole, lambda obs: obs),
        (lambda: make_cart_pole(), lambda o: o),
        (make_cart_pole(), lambda obs: obs),
        ([make_cart_pole()], lambda obs: obs),
        (["CartPole-v1"] * 2, lambda obs: obs),
        (make_cart_pole, gymnasium.spaces.Discrete(2)),
        (arena.Relay(), {"runner": "random"}),
        (arena.Relay, torch.nn.Linear(2, 2)),
    ],
    ids=plain_repr,
)
@pytest.mark.parametrize("make", [Collector, AsyncCollector, MultiAgentCollector])
def test_swapped_policy_and_environment_are_reported(make: Any, env: Any, policy: Any) -> None:
    words = rf"^{make.__name__} must be called with \(policy, env, buffer\), got env first and policy second$"
    with pytest.raises(ArgumentError, match=words):
        make(env, policy)


class Seeded(arena.Relay):
    """Relay that records the arguments of each reset and counts rendered frames."""

    def __init__(self) -> None:
        super().__init__()
        self.resets: list[Any] = []
        self.pictures = 0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append((seed, options))
        return super().reset(seed, options)

    def render(self) -> None:
        self.pictures += 1


def test_multi_agent_collectors_accept_all_arguments_of_collect() -> None:
    environments = [Seeded(), Seeded()]
    collector = MultiAgentCollector(lambda obs: np.zeros(len(obs), int), environments, seed=1)
    first = collector.collect(n_step=6, render=0.0)
    assert [env.pictures for env in environments] == [3, 3]
    assert not first.batch["runner"]["actions"].any()
    sampled = collector.collect(40, random=True, reset_before_collect=True, gym_reset_kwargs={"seed": 7, "options": {}})
    assert [env.resets[1] for env in environments] == [(7, {}), (8, {})]
    assert set(sampled.batch["runner"]["actions"].tolist()) == {0, 1, 2, 3, 4}
    assert sampled.batch["runner"]["t"].min() == 0
    assert (collector.collect_step, collector.collect_episode > 0) == (46, True)
    observations, infos = collector.reset()
    assert (
        [set(item) for item in observations]
        == [set(env.agents) for env in environments]
        == [set(item) for item in infos]
    )
    assert collector.collect_step == 0
    assert not collector.collect(n_episode=1).batch["runner"]["actions"].any()


def test_random_actions_of_several_agents_respect_masks() -> None:
    name = "pettingzoo/classic/tictactoe_v3"
    batch = (
        MultiAgentCollector(lambda obs: np.zeros(len(obs), int), name, seed=1).collect(n_episode=4, random=True).batch
    )
    for steps in batch.policy_batches.values():
        assert steps["obs.action_mask"][np.arange(len(steps)), steps["actions"]].all()


class Bounded:
    """Policy whose actions are in [-1, 1], like Tianshou's."""

    def __call__(self, obs: Any) -> Any:
        return np.zeros((len(obs), 1), np.float32)

    def map_action(self, act: Any) -> Any:
        return 1 + 4 * act

    def map_action_inverse(self, act: Any) -> Any:
        return (act - 1) / 4


def test_random_actions_of_several_agents_are_stored_in_policy_units() -> None:
    with MultiAgentCollector(Bounded(), SteeredTogether, seed=3) as collector:
        performed, stored = given_and_kept(collector.collect(n_step=50, random=True).batch)
    assert -3 <= performed.min() < -2.5
    assert np.allclose(1 + 4 * stored, performed, atol=1e-5)
