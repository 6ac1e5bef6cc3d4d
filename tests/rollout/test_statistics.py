"""Episode statistics against plain Python."""

from __future__ import annotations

import math
from typing import Any

import arena
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.statistics import SequenceSummaryStats, episode_statistics, finished_episodes


def test_statistics_of_the_relay_environment_are_correct() -> None:
    batch = MultiAgentCollector("random", arena.Relay(), policy_mapping=arena.whose, seed=0).collect(n_step=20).batch
    actual = episode_statistics(batch)
    assert actual is not None
    assert (actual.episodes, actual.unfinished) == (2, 1)
    for agent in range(3):
        policy = actual.policies[f"policy of runner_{agent}"]
        expected = sum(100 * t + agent for t in range(2 * agent, 2 * agent + 4))
        assert policy.episodes == 2
        assert policy.returns.tolist() == [expected] * 2
        assert (policy.mean_return, policy.mean_length) == (expected, 4.0)


def test_a_policy_whose_episodes_all_continue_has_no_mean() -> None:
    batch = MultiAgentCollector("random", arena.Relay(), seed=0).collect(n_step=5).batch
    actual = episode_statistics(batch)
    assert actual is not None
    assert (actual.episodes, actual.unfinished) == (0, 1)
    assert math.isnan(actual.policies["runner"].mean_return)
    assert math.isnan(actual.policies["runner"].mean_length)
    assert len(finished_episodes(batch)) == 0


def test_batches_without_episode_ids_have_no_statistics() -> None:
    plain = SampleBatch(obs=[1, 2], rewards=[1.0, 2.0])
    assert episode_statistics(plain) is None
    assert len(finished_episodes(plain)) == 0
    nothing = episode_statistics(MultiAgentBatch({}, 0))
    assert nothing is not None
    assert (nothing.episodes, nothing.policies) == (0, {})


def test_episodes_are_in_the_order_in_which_they_start() -> None:
    batch = SampleBatch(
        eps_id=[9, 9, 2, 5], t=[0, 1, 0, 0], agent_index=[0] * 4, rewards=[1.0, 2.0, 10.0, 20.0], dones=[0, 1, 1, 1]
    )
    actual = episode_statistics(batch)
    assert actual is not None
    assert actual.policies["default_policy"].returns.tolist() == [3.0, 10.0, 20.0]
    assert actual.policies["default_policy"].lengths.tolist() == [2, 1, 1]


def test_rewards_of_several_parts_are_summed_by_part() -> None:
    batch = SampleBatch(
        eps_id=[1, 1], t=[0, 1], agent_index=[0, 0], rewards=[[1.0, 10.0], [2.0, 20.0]], dones=[False, True]
    )
    actual = episode_statistics(batch)
    assert actual is not None
    assert actual.policies["default_policy"].returns.tolist() == [[3.0, 30.0]]


@st.composite
def rollouts(draw: Any) -> tuple[list[dict[str, Any]], int]:
    """Draw rows of complete and unfinished episodes of up to three agents, in random order."""
    rows = []
    for episode in range(draw(st.integers(0, 4))):
        length, ended = draw(st.integers(1, 5)), draw(st.booleans())
        for agent in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, length - 1)) if agent else 0
            rows += [
                {
                    "eps_id": 1000 - episode,
                    "t": t,
                    "agent_index": agent,
                    "rewards": float(draw(st.integers(-9, 9))),
                    "dones": ended and t == length - 1,
                    "policy": "ab"[agent % 2],
                }
                for t in range(first, length)
            ]
    return draw(st.permutations(rows)), draw(st.integers(1, 4))


def as_batch(rows: list[dict[str, Any]]) -> MultiAgentBatch:
    policies = {}
    for policy in "ab":
        ours = [row for row in rows if row["policy"] == policy]
        if ours:
            policies[policy] = SampleBatch(
                {name: np.array([row[name] for row in ours]) for name in ours[0] if name != "policy"}
            )
    return MultiAgentBatch(policies, len(rows))


@given(rollouts())
def test_statistics_agree_with_plain_python(example: tuple[list[dict[str, Any]], int]) -> None:
    rows, _ = example
    actual = episode_statistics(as_batch(rows))
    assert actual is not None
    last = {e: max(row["t"] for row in rows if row["eps_id"] == e) for e in {row["eps_id"] for row in rows}}
    ended = {e for e in last if all(row["dones"] for row in rows if row["eps_id"] == e and row["t"] == last[e])}
    assert (actual.episodes, actual.unfinished) == (len(ended), len(last) - len(ended))
    assert set(finished_episodes(as_batch(rows)).tolist()) == ended
    for policy, statistics in actual.policies.items():
        returns: dict[Any, float] = {}
        lengths: dict[Any, int] = {}
        for row in rows:
            if row["policy"] == policy and row["eps_id"] in ended:
                key = row["eps_id"], row["agent_index"]
                returns[key] = returns.get(key, 0) + row["rewards"]
                lengths[key] = lengths.get(key, 0) + 1
        assert statistics.returns.tolist() == list(returns.values())
        assert statistics.lengths.tolist() == list(lengths.values())
        assert statistics.episodes == len({episode for episode, _ in returns})


def test_a_report_is_printed_as_a_dict(capsys: pytest.CaptureFixture[str]) -> None:
    report = MultiAgentCollector("random", arena.Relay(), policy_mapping=arena.whose, seed=0).collect(n_step=20)
    report.pprint_asdict(exclude_fields=["batch", "collect_time", "collect_speed"])
    text = capsys.readouterr().out
    assert text.startswith("CollectStats\n---")
    assert "'n_collected_episodes': 2" in text
    assert "'returns_stat': {" in text
    assert "'policy of runner_1': {" in text
    assert "collect_time" not in text.partition("'policies'")[0]
    first = SequenceSummaryStats.from_single_value(3)
    assert (first.mean, first.std) == (3.0, 0.0)
    assert first.pprints_asdict(["mean", "max"]).endswith("{'min': 3.0, 'std': 0.0}")
