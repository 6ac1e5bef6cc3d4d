"""Agents join and leave at random: every step of an agent is stored once and counted once."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Aggregator, MultiAgentBatch, MultiAgentCollector, broadcast, channel, concat_samples
from samplebatch.workers.task import Count, Request, Task, WorkerSpec, make_task

AGENTS = ("cat_0", "cat_1", "cat_2", "dog_0", "dog_1")

Scene = tuple[frozenset[str], frozenset[str], frozenset[str]]
"""Who acts in a step, whom it terminates, whom it truncates."""


class Stage:
    """Environment that replays scenes, and records every step of every agent by the number of its observation.

    An observation is (number, agent), written into one array per agent. From the number `wide_from`, the dtype is
    wider.
    """

    possible_agents: ClassVar = list(AGENTS)

    def __init__(self, episodes: list[list[Scene]], wide_from: int) -> None:
        self.episodes = episodes
        self.wide_from = wide_from
        self.episode = -1
        self.number = 0
        self.seen: dict[str, int] = {}
        self.buffers = {agent: [np.zeros(2, np.float32), np.zeros(2, np.float64)] for agent in AGENTS}
        self.rows: dict[int, tuple[Any, ...]] = {}
        self.steps = 0

    def observation_space(self, agent: str) -> Box:
        return Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(7)

    def observe(self, agent: str) -> Any:
        self.number += 1
        self.seen[agent] = self.number
        buffer = self.buffers[agent][self.number >= self.wide_from]
        buffer[:] = self.number, AGENTS.index(agent)
        return buffer

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self.scenes = list(self.episodes[self.episode % len(self.episodes)])
        self.agents = sorted(self.scenes[0][0])
        return {agent: self.observe(agent) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        acting, terminated, truncated = self.scenes.pop(0)
        assert list(actions) == self.agents == sorted(acting)
        before = dict(self.seen)
        self.agents = sorted(self.scenes[0][0]) if self.scenes else []
        observations = {agent: self.observe(agent) for agent in [*acting, *self.agents] if agent in acting}
        observations |= {agent: self.observe(agent) for agent in self.agents if agent not in acting}
        rewards = {agent: before[agent] / 4 for agent in acting}
        infos = {agent: {"number": before[agent]} for agent in acting if before[agent] % 2}
        for agent in acting:
            self.rows[before[agent]] = (
                self.seen[agent], int(actions[agent]), rewards[agent], agent in terminated, agent in truncated,
                infos.get(agent, {}), AGENTS.index(agent),
            )  # fmt: skip
        self.steps += 1
        flags = [{agent: agent in removed for agent in acting} for removed in (terminated, truncated)]
        return observations, rewards, *flags, infos

    def close(self) -> None:
        pass


def rows_of(batch: MultiAgentBatch) -> dict[int, tuple[Any, ...]]:
    """Return the rows of a batch in the form in which the stage records them."""
    actual = {}
    for policy, steps in batch.policy_batches.items():
        columns = [steps[name].tolist() for name in ("obs", "new_obs", "actions", "rewards", "terminateds")]
        columns += [steps[name].tolist() for name in ("truncateds", "infos", "agent_index")]
        for observed, after, action, reward, terminated, truncated, info, agent in zip(*columns, strict=True):
            assert observed[0] not in actual
            assert observed[1] == after[1] == agent
            assert AGENTS[agent].startswith(policy)
            actual[int(observed[0])] = (int(after[0]), action, reward, terminated, truncated, info, agent)
    return actual


def check_order(batch: MultiAgentBatch) -> None:
    """Check that the rows of each agent in an environment are contiguous, by episode, in time order."""
    for steps in batch.policy_batches.values():
        keys = list(zip(steps["env_id"].tolist(), steps["agent_index"].tolist(), strict=True))
        changes = [key for position, key in enumerate(keys) if not position or keys[position - 1] != key]
        assert len(changes) == len(set(changes))
        assert len(set(zip(steps["eps_id"].tolist(), keys, steps["t"].tolist(), strict=True))) == len(steps)
        for key in set(changes):
            rows = steps[[position for position, other in enumerate(keys) if other == key]]
            assert (np.diff(rows["obs"][:, 0]) > 0).all()
            assert (np.diff(rows["t"])[np.diff(rows["eps_id"]) == 0] > 0).all()


def telling(obs: Any) -> dict[str, Any]:
    """Return actions and an extra output with the dtype of the observations."""
    return {"act": obs[:, 0].astype(int) % 7, "policy": {"deep": {"seen": obs}}, "vf_preds": obs[:, 0] / 2}


some = st.frozensets(st.sampled_from(AGENTS), max_size=2)
scenes = st.tuples(st.frozensets(st.sampled_from(AGENTS), min_size=1), some, some)
episodes = st.lists(st.lists(scenes, min_size=1, max_size=9), min_size=1, max_size=4)
narrow = st.just(1 << 30)
policies = st.sampled_from(["random", telling])


@settings(max_examples=60, deadline=None)
@given(
    policies,
    episodes,
    narrow | st.integers(0, 60),
    st.integers(1, 3),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_a_batch_contains_every_recorded_step(
    policy: Any, episodes: list[list[Scene]], wide_from: int, envs: int, lengths: list[int]
) -> None:
    stages = [Stage(episodes, wide_from) for _ in range(envs)]
    collector = MultiAgentCollector(policy, stages, seed=0)
    batches = [collector.collect(n_step=length).batch for length in lengths] + [collector.collect(n_episode=2).batch]
    assert [batch.count for batch in batches[:-1]] == lengths
    assert sum(batch.count for batch in batches) == sum(stage.steps for stage in stages)
    for env_id, stage in enumerate(stages):
        ours: dict[int, tuple[Any, ...]] = {}
        for batch in batches:
            check_order(batch)
            of_env = {policy: steps[steps["env_id"] == env_id] for policy, steps in batch.policy_batches.items()}
            for steps in of_env.values() if policy is telling else ():
                assert steps["policy.deep.seen"].tolist() == steps["obs"].tolist()
            ours |= rows_of(MultiAgentBatch({policy: steps for policy, steps in of_env.items() if len(steps)}, 1))
        assert ours == stage.rows


def begin(spec: WorkerSpec, fragment_length: int, count_steps: Count) -> Task:
    """Create a task that collects fragments indefinitely."""
    task = make_task(spec, broadcast(1)[1], count_steps)
    task.begin(Request(fragment_length=fragment_length))
    return task


@settings(max_examples=60, deadline=None)
@given(policies, episodes, narrow | st.integers(0, 60), st.integers(1, 3), st.integers(1, 24), st.integers(1, 20))
def test_fragments_have_all_recorded_steps_and_counts_agree(
    policy: Any, episodes: list[list[Scene]], wide_from: int, envs: int, length: int, size: int
) -> None:
    stages: list[Stage] = []

    def stage() -> Stage:
        stages.append(Stage(episodes, wide_from))
        return stages[-1]

    spec = WorkerSpec(0, (stage,) * envs, lambda: policy, envs, None, False, None, (), np.random.SeedSequence(1))
    result = [0]

    def count(steps: int) -> None:
        result[0] += steps

    producer, consumer = channel(1 << 20, allow_pickle=True)
    arrived: list[Any] = []
    with producer, consumer:
        task = begin(spec, length, count)
        for _ in range(5):
            fragment = task.next()
            assert fragment is not None
            producer.send(fragment, split=True)
            del fragment
            while consumer.poll():
                arrived.append(consumer.recv().copy())
    used = stages[:]
    other = begin(spec, length, lambda _: None)
    for batch in arrived:
        same = other.next()
        assert same is not None
        assert batch.policy_batches.keys() == same.policy_batches.keys()
        for policy_id, steps in same.policy_batches.items():
            assert set(steps.column_names) == set(batch[policy_id].column_names)
            for name in {*steps.column_names} - {"eps_id"}:
                assert steps[name].dtype == batch[policy_id][name].dtype, name
                assert steps[name].tolist() == batch[policy_id][name].tolist(), name
    aggregator = Aggregator(train_batch_size=size)
    train: list[Any] = []
    for batch in arrived:
        aggregator.add(batch)
        train += aggregator.batches()
    train.append(aggregator.build_and_reset())
    rows = sum(len(stage.rows) for stage in used)
    assert result[0] == sum(stage.steps for stage in used) == sum(batch.count for batch in arrived)
    assert sum(batch.agent_steps() for batch in arrived) == sum(batch.agent_steps() for batch in train) == rows
    assert concat_samples(train).env_steps() == result[0]
