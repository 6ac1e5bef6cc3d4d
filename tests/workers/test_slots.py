"""Steps in slots: written once where they will be read, and elsewhere when they do not fit."""

from __future__ import annotations

from typing import Any

import actors
import numpy as np
import pytest
from fragments import check_same, made, plan, sent

from samplebatch import MultiAgentBatch, SampleBatch, channel
from samplebatch.workers.fragment_sender import FragmentSender


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
