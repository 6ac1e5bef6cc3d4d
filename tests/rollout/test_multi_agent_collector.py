"""A multi-agent collector stores every step of every agent in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import arena
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, MultiAgentReplayBuffer, SampleBatch, concat_samples
from samplebatch.env.registry import make_environment
from samplebatch.errors import ArgumentError, ColumnMismatchError, EnvironmentSpecError, PolicyNotFoundError
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector

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
    "eps_done",
    "unroll_id",
)


def trajectories(batch: SampleBatch) -> dict[tuple[int, int], SampleBatch]:
    """Split a batch into the steps of each agent in each episode, in time order."""
    actual = {}
    for episode in np.unique(batch["eps_id"]):
        for agent in np.unique(batch["agent_index"][batch["eps_id"] == episode]):
            rows = batch[(batch["eps_id"] == episode) & (batch["agent_index"] == agent)]
            actual[int(episode), int(agent)] = rows[np.argsort(rows["t"])]
    return actual


def test_a_real_environment_step_by_step() -> None:
    collector = MultiAgentCollector("random", make_environment("mpe2/simple_spread_v3"), seed=3)
    fragments = [collector.collect(n_step=steps).batch for steps in (10, 40, 10)]
    assert [fragment.count for fragment in fragments] == [10, 40, 10]
    assert [np.unique(fragment["agent"]["unroll_id"]).tolist() for fragment in fragments] == [[0], [1], [2]]
    batch = concat_samples(fragments)["agent"]
    assert batch.column_names == COLUMNS
    dtypes = [str(batch[name].dtype) for name in COLUMNS]
    assert dtypes == [
        "float32",
        "float32",
        "int64",
        "float64",
        "bool",
        "bool",
        "object",
        *["int64"] * 4,
        "bool",
        "int64",
    ]
    cut = trajectories(batch)
    assert sorted(len(item) for item in cut.values()) == [10] * 3 + [25] * 6
    for entry in cut.values():
        assert entry["t"].tolist() == list(range(len(entry)))
        assert (entry["new_obs"][:-1] == entry["obs"][1:]).all()
        assert not entry["truncateds"][:-1].any()
        assert entry["truncateds"][-1] == (len(entry) == 25)
    assert (batch["eps_id"] >= 0).all()


def test_actions_are_those_that_were_taken() -> None:
    created = []

    class Watched(arena.Relay):
        def step(self, actions: dict[str, Any]) -> arena.Step:
            created.append(actions["runner_0"])
            return super().step(actions)

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return super().reset(seed)

    batch = MultiAgentCollector("random", Watched(), seed=0).collect(n_step=3).batch["runner"]
    assert batch["actions"].tolist()[:3] == created


def test_agents_join_and_leave() -> None:
    environment = arena.Relay()
    collector = MultiAgentCollector("random", environment, seed=0)
    joined = concat_samples([collector.collect(n_step=steps).batch for steps in (3, 5, 1, 7)])
    assert joined.count == 16
    batch = joined["runner"]
    assert len(batch) == 2 * 12
    cut = trajectories(batch)
    assert len(cut) == 6
    for (_, agent), first in cut.items():
        t = np.arange(2 * agent, 2 * agent + 4)
        assert first["t"].tolist() == t.tolist()
        assert first["obs"].tolist() == [[step, agent] for step in t]
        assert first["new_obs"].tolist() == [[step + 1, agent] for step in t]
        assert first["rewards"].tolist() == (100.0 * t + agent).tolist()
        assert first["terminateds"].tolist() == [False, False, False, True]
        assert [info["now"] for info in first["infos"]] == t.tolist()
    assert len(np.unique(batch["eps_id"])) == 2
    assert not environment.closed


def test_agents_that_join_late_are_aligned_in_lockstep() -> None:
    batch = MultiAgentCollector("random", arena.Relay(), policy_mapping=arena.whose, seed=0).collect(n_step=8).batch
    who_acts = [sorted(part.policy_batches) for part in batch.timeslices(1)]
    assert [[name[-1] for name in names] for names in who_acts] == [
        ["0"], ["0"], ["0", "1"], ["0", "1"], ["1", "2"], ["1", "2"], ["2"], ["2"],
    ]  # fmt: skip


def test_observations_that_the_environment_overwrites_are_preserved() -> None:
    batch = MultiAgentCollector("random", arena.Nested(), seed=0).collect(n_step=8).batch["runner"]
    assert batch.column_names[:4] == ("obs.where", "obs.who", "new_obs.where", "new_obs.who")
    assert (batch["obs.where"][:, 0] == batch["t"]).all()
    assert (batch["new_obs.where"][:, 0] == batch["t"] + 1).all()
    assert (batch["obs.who"] == batch["agent_index"]).all()


def plain(batch: MultiAgentBatch) -> dict[tuple[Any, ...], list[Any]]:
    """Return the rows of each agent in each environment, in order, without random ids."""
    actual: dict[tuple[Any, ...], list[Any]] = {}
    for policy, steps in batch.policy_batches.items():
        names = [name for name in steps.column_names if name not in ("eps_id", "unroll_id")]
        columns = [steps[name].tolist() for name in names]
        keys = zip(steps["env_id"].tolist(), steps["agent_index"].tolist(), strict=True)
        for key, row in zip(keys, zip(*columns, strict=True), strict=True):
            actual.setdefault((policy, *key), []).append(dict(zip(names, row, strict=True)))
    return actual


def test_a_seed_determines_everything_except_episode_ids() -> None:
    def collect(seed: int | None) -> MultiAgentBatch:
        return MultiAgentCollector("random", "mpe2/simple_tag_v3", num_envs=2, seed=seed).collect(n_step=120).batch

    first, second, other = collect(7), collect(7), collect(8)
    assert plain(first) == plain(second)
    assert plain(first) != plain(other)
    assert plain(collect(None)) != plain(collect(None))
    ids = [set(batch["agent"]["eps_id"].tolist()) for batch in (first, second, other)]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("name", ["mpe2/simple_tag_v3", "arena:Bazaar"])
def test_environments_do_not_depend_on_each_other(name: str) -> None:
    full = MultiAgentCollector("random", name, num_envs=4, seed=5)
    halves = [MultiAgentCollector("random", name, num_envs=2, seed=5, worker_index=half) for half in range(2)]
    first = plain(concat_samples([full.collect(n_episode=4).batch, full.collect(n_episode=4).batch]))
    second: dict[tuple[Any, ...], list[Any]] = {}
    for half in halves:
        second |= plain(half.collect(n_episode=4).batch)
    assert first == second


def test_agents_sample_independent_actions() -> None:
    batch = (
        MultiAgentCollector("random", make_environment("mpe2/simple_spread_v3"), seed=1)
        .collect(n_step=100)
        .batch["agent"]
    )
    actions = batch["actions"].reshape(3, 100)
    assert not (actions[0] == actions[1]).all()
    assert set(actions.flat) == {0, 1, 2, 3, 4}


def test_agents_with_different_spaces_have_separate_policies() -> None:
    batch = MultiAgentCollector("random", arena.Mixed(), seed=0).collect(n_step=4).batch
    assert {policy: steps["obs"].shape for policy, steps in batch.policy_batches.items()} == {
        "robot_0": (4, 2),
        "robot_1": (4, 3),
        "lamp": (8, 1),
    }
    with pytest.raises(ColumnMismatchError, match="'obs'"):
        MultiAgentCollector("random", arena.Mixed(), policy_mapping=lambda agent: "all").collect(n_step=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [(arena.Forgetful, "a reward for every agent.*'runner_0'"), (arena.Deserted, "must have agents after reset")],
)
def test_an_environment_that_violates_its_interface_is_reported(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        MultiAgentCollector("random", make()).collect(n_step=10)


def test_an_error_of_an_environment_is_raised() -> None:
    with pytest.raises(RuntimeError, match="baton"):
        MultiAgentCollector("random", arena.Failing()).collect(n_step=40)


def test_steps_are_distributed_evenly_over_environments() -> None:
    collector = MultiAgentCollector("random", arena.Relay, num_envs=3, seed=0, worker_index=2)
    fragments = [collector.collect(n_step=steps).batch for steps in (4, 4, 1)]
    assert [fragment.count for fragment in fragments] == [4, 4, 1]
    steps = concat_samples(fragments)["runner"]
    assert {env: int(steps["t"][steps["env_id"] == env].max()) for env in (6, 7, 8)} == {6: 2, 7: 2, 8: 2}
    assert steps["unroll_id"].max() == (2 << 32) + 2


class Uneven(arena.Relay):
    """Relay with only the first runner, whose episodes have one step, two steps, and so on."""

    episode = 0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> arena.Step:
        observations, rewards, *_, infos = super().step(actions)
        self.agents = ["runner_0"] if self._step < self.episode else []
        return observations, rewards, {"runner_0": not self.agents}, {"runner_0": False}, infos


def lengths(batch: MultiAgentBatch) -> list[tuple[int, int]]:
    """Return environment and length of each episode, in order."""
    actual = trajectories(batch["runner"])
    return sorted((int(item["env_id"][0]), len(item)) for item in actual.values())


def test_episodes_that_start_first_are_returned() -> None:
    collector = MultiAgentCollector("random", Uneven, num_envs=2, seed=0)
    batch = collector.collect(n_episode=5).batch
    # Both are at their third episode when four have ended; the fifth to begin is the first environment's.
    assert lengths(batch) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert batch.count == 9
    batch = collector.collect(n_episode=1).batch
    assert lengths(batch) == [(0, 4)]
    assert lengths(collector.collect(n_episode=2).batch) == [(0, 5), (1, 3)]


def test_episodes_in_progress_are_completed_first() -> None:
    collector = MultiAgentCollector("random", Uneven, num_envs=2, seed=0)
    first = collector.collect(n_step=7).batch
    assert lengths(first) == [(0, 1), (0, 1), (0, 2), (1, 1), (1, 2)]
    remaining = collector.collect(n_episode=1).batch
    joined = concat_samples([first, remaining])
    assert lengths(joined) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert remaining["runner"]["t"].tolist() == [1, 2]


def test_a_reset_starts_new_episodes() -> None:
    collector = MultiAgentCollector("random", arena.Relay, num_envs=2, seed=0)
    before = collector.collect(n_step=6).batch["runner"]
    collector.reset()
    after = collector.collect(n_step=4).batch["runner"]
    assert after["t"].max() == 1
    assert not set(before["eps_id"].tolist()) & set(after["eps_id"].tolist())


def test_a_reset_clears_the_buffer_by_default() -> None:
    buffer = MultiAgentReplayBuffer(1000)
    collector = MultiAgentCollector("random", arena.Relay, buffer=buffer, num_envs=2, seed=0)
    collector.collect(n_step=6)
    count = len(buffer)
    collector.reset(reset_buffer=False)
    assert len(buffer) == count > 0
    collector.reset()
    assert len(buffer) == 0
    collector.collect(n_step=4)
    assert len(buffer) > 0


def test_environments_are_closed_on_request() -> None:
    collector = MultiAgentCollector("random", arena.Relay, num_envs=2, seed=0)
    collector.collect(n_step=2)
    assert not any(environment.closed for environment in collector.environments)
    collector.close()
    assert all(environment.closed for environment in collector.environments)


@pytest.mark.parametrize("options", [{}, {"n_step": 1, "n_episode": 1}, {"n_step": 0}, {"n_episode": -1}])
def test_steps_or_episodes_must_be_requested(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=r"exactly one of n_step and n_episode|must be a whole number"):
        MultiAgentCollector("random", arena.Relay()).collect(**options)


def test_steps_are_stored_in_a_buffer_if_one_is_given() -> None:
    buffer = MultiAgentReplayBuffer(1000)
    with MultiAgentCollector("random", "mpe2/simple_tag_v3", buffer=buffer, num_envs=2, seed=1) as collector:
        stats = [collector.collect(n_step=30), collector.collect(n_episode=2)]
    batches = [MultiAgentCollector("random", "mpe2/simple_tag_v3", num_envs=2, seed=1).collect(n_step=30).batch]
    assert [item.batch for item in stats] == [None, None]
    assert all(part.batch is None for item in stats for part in item.policies.values())
    assert {policy: len(part) for policy, part in buffer.buffers.items()} == {
        policy: sum(item.policies[policy].n_collected_steps for item in stats) for policy in ("adversary", "agent")
    }
    stored = buffer.buffers["agent"][:30]
    assert sorted(map(tuple, stored.obs.tolist())) == sorted(map(tuple, batches[0]["agent"]["obs"].tolist()))
    with pytest.raises(ArgumentError, match="hooks must be empty with a buffer"):
        MultiAgentCollector("random", arena.Relay, buffer=buffer, hooks=[lambda trajectory, others: None])


def test_reports_count_episodes_of_each_policy_over_several_calls() -> None:
    with MultiAgentCollector("random", "mpe2/simple_tag_v3", num_envs=2, seed=1) as collector:
        stats = [collector.collect(n_step=30), collector.collect(n_step=30), collector.collect(n_episode=2)]
    joined = concat_samples([item.batch for item in stats])
    assert sum(item.n_collected_steps for item in stats) == joined.count
    assert sum(item.n_collected_episodes for item in stats) == 4
    for policy, agents in (("adversary", 3), ("agent", 1)):
        ours = [item.policies[policy] for item in stats]
        assert sum(item.n_collected_steps for item in ours) == len(joined[policy])
        assert np.concatenate([item.lens for item in ours]).tolist() == [25] * 4 * agents
        actual = [part["rewards"].sum() for part in trajectories(joined[policy]).values()]
        np.testing.assert_allclose(sorted(np.concatenate([item.returns for item in ours])), sorted(actual))
    assert [len(item.returns) for item in stats] == [
        sum(len(part.returns) for part in item.policies.values()) for item in stats
    ]


def test_actions_are_mapped_by_policy_and_stored_unmapped() -> None:
    selected: list[Any] = []

    class Watched(arena.Relay):
        def step(self, actions: dict[str, Any]) -> arena.Step:
            selected.extend(actions.values())
            return super().step(actions)

    for how in (lambda act: act + 1, {"runner": lambda act: act + 1}):
        selected.clear()
        with MultiAgentCollector(arena.steady, Watched(), map_action=how) as collector:
            batch = collector.collect(n_step=8).batch
        assert set(selected) == {2}
        assert set(batch["runner"]["actions"].tolist()) == {1}
    with pytest.raises(PolicyNotFoundError, match="map_action must name policies, got 'walker'"):
        MultiAgentCollector({"runner": arena.steady}, Watched(), map_action={"walker": lambda act: act})


def test_a_closed_collector_rejects_calls() -> None:
    environment = arena.Relay()
    with MultiAgentCollector("random", environment) as collector:
        collector.collect(n_step=1)
    assert environment.closed
    with pytest.raises(EnvironmentSpecError, match="has been closed"):
        collector.collect(n_step=1)


def test_environments_of_one_agent_are_rejected_with_advice() -> None:
    with pytest.raises(EnvironmentSpecError, match="use a Collector"):
        MultiAgentCollector("random", "CartPole-v1")
    with pytest.raises(ValueError, match="envs must be a whole number from 1"):
        MultiAgentCollector("random", "mpe2/simple_tag_v3", num_envs=0)
