"""Steps in slots: written once where they will be read, and elsewhere when they do not fit."""

from __future__ import annotations

from typing import Any

import actors
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, channel, concat_samples
from samplebatch.rollout.fragment_sender import FragmentSender
from samplebatch.rollout.postprocessing import Hook
from samplebatch.rollout.worker_board import FRAGMENTS, SENT
from samplebatch.rollout.worker_plan import Plan
from samplebatch.rollout.worker_task import task_of


def plan(environment: Any, policy: Any = "random", *, envs: int = 3, hooks: tuple[Hook, ...] = ()) -> Plan:
    return Plan(0, environment, lambda: policy, envs, None, None, 60, None, hooks, np.random.SeedSequence(1), 0)


def sent(of: Plan, fragments: int, capacity_bytes: int = 1 << 20) -> tuple[list[Any], FragmentSender]:
    """Send fragments through a channel, and return copies of what arrives."""
    line = np.zeros(8, np.int64)
    producer, consumer = channel(capacity_bytes, allow_pickle=True)
    arrived: list[Any] = []
    with producer, consumer:
        task, sender = task_of(of, lambda _: None), FragmentSender(producer, line)
        for _ in range(fragments):
            made = task.next(sender.reserve)
            assert made is not None
            sender.send(*made)
            del made
            while consumer.poll():
                fragment = consumer.recv()
                arrived.append(fragment.copy())
                del fragment
        task.close()
    assert line[SENT] == sum(fragment.env_steps() for fragment in arrived)
    assert line[FRAGMENTS] == fragments
    return arrived, sender


def made(of: Plan, fragments: int) -> list[Any]:
    """Make the same fragments without slots."""
    task = task_of(of, lambda _: None)
    found = [task.next(None) for _ in range(fragments)]
    task.close()
    return [fragment.batch for fragment in found if fragment is not None]


def check_same(some: list[Any], others: list[Any]) -> None:
    one, other = (concat_samples(part).as_multi_agent().policy_batches for part in (some, others))
    assert list(one) == list(other)
    for policy, steps in one.items():
        assert steps.column_names == other[policy].column_names
        for name in steps.column_names:
            if name != "eps_id":
                assert steps.column(name).dtype == other[policy].column(name).dtype
                assert steps[name].tolist() == other[policy][name].tolist(), name
        # Ids differ between runs, episodes do not.
        for ids in (steps["eps_id"], other[policy]["eps_id"]):
            assert len(np.unique(ids)) == len(np.unique(steps["eps_id"]))


@pytest.mark.parametrize(
    "environment", ["CartPole-v1", "gyms:Walk", "mpe2/simple_tag_v3", "arena:Relay", "arena:Bazaar"]
)
@pytest.mark.parametrize("envs", [1, 3])
def test_all_but_the_first_fragment_lie_in_slots_and_are_the_same(environment: str, envs: int) -> None:
    arrived, sender = sent(plan(environment, envs=envs), 6)
    assert (sender.in_place, sender.copied) == (5, 1)
    check_same(arrived, made(plan(environment, envs=envs), 6))


def test_columns_that_change_leave_the_slot() -> None:
    arrived, sender = sent(plan("CartPole-v1", actors.Fickle()), 4)
    # The 25th call is the fifth of the second fragment. Its two dtypes become the wider one.
    assert [fragment["actions"].dtype.name for fragment in arrived] == ["int64", "int64", "int32", "int32"]
    assert (sender.in_place, sender.copied) == (1, 3)
    check_same(arrived, made(plan("CartPole-v1", actors.Fickle()), 4))


def test_large_fragments_are_not_made_in_a_small_arena() -> None:
    arrived, sender = sent(plan("CartPole-v1"), 4, capacity_bytes=1 << 15)
    assert sender.in_place == 0
    check_same(arrived, made(plan("CartPole-v1"), 4))


def scaled(trajectory: Any, others: Any) -> None:
    trajectory.steps["rewards"] = trajectory.steps["rewards"] * 2.0
    trajectory.steps["twice"] = trajectory.steps["rewards"]


def reversed_time(trajectory: Any, others: Any) -> SampleBatch:
    return trajectory.steps.take(np.arange(len(trajectory.steps))[::-1])


def without_the_first(trajectory: Any, others: Any) -> SampleBatch:
    return trajectory.steps.slice(1, len(trajectory.steps))


@pytest.mark.parametrize("environment", ["CartPole-v1", "mpe2/simple_tag_v3"])
@pytest.mark.parametrize("hook", [scaled, reversed_time, without_the_first])
def test_hooks_may_change_what_lies_in_a_slot(environment: str, hook: Any) -> None:
    arrived, sender = sent(plan(environment, hooks=(hook,)), 4)
    assert sender.in_place == 3
    check_same(arrived, made(plan(environment, hooks=(hook,)), 4))


def test_policies_of_a_fragment_may_differ_from_those_before() -> None:
    producer, consumer = channel(1 << 16)
    sender = FragmentSender(producer, np.zeros(8, np.int64))
    one, both = {"a": SampleBatch(t=[1])}, {"a": SampleBatch(t=[2]), "b": SampleBatch(t=[3])}
    with producer, consumer:
        for policies in (one, both, one):
            slot = sender.reserve(dict.fromkeys(policies, 1))
            assert slot is None
            sender.send(MultiAgentBatch(policies, 1), slot)
            assert list(consumer.recv().policy_batches) == list(policies)
