"""Advantages, n-step returns and custom hooks for each trajectory, also for parts of a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import arena
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import Collector, MultiAgentBatch, RolloutWorkers, SampleBatch
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    PolicyNotFoundError,
    SequenceError,
)
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.postprocessing import GAE, Hook, NStepReturns, Trajectory, in_order, postprocess
from tests.optional import torch

GAMMA, LAMBDA = 0.9, 0.8


def value(obs: np.ndarray) -> np.ndarray:
    """Estimate values that differ between observations."""
    return np.sin(np.asarray(obs, np.float64).reshape(len(obs), -1).sum(1))


def by_hand(steps: SampleBatch) -> tuple[list[float], list[float]]:
    """Return advantages and targets of a trajectory part, computed backwards step by step."""
    rows = list(steps.rows())
    values = [float(value(row["obs"][None])[0]) for row in rows]
    advantages: list[float] = []
    after = 0.0
    for i in reversed(range(len(rows))):
        row = rows[i]
        following = 0.0 if row["terminateds"] else float(value(row["new_obs"][None])[0])
        goes_on = i + 1 < len(rows) and not (row["terminateds"] or row["truncateds"])
        after = row["rewards"] + GAMMA * following - values[i] + (GAMMA * LAMBDA * after if goes_on else 0.0)
        advantages.insert(0, after)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def parts(steps: SampleBatch) -> list[SampleBatch]:
    """Split a batch into trajectories in a loop."""
    keys = {*zip(steps["eps_id"].tolist(), steps["agent_index"].tolist(), strict=True)}
    actual = []
    for eps_id, agent in sorted(keys):
        rows = steps[(steps["eps_id"] == eps_id) & (steps["agent_index"] == agent)]
        actual.append(rows[np.argsort(rows["t"])])
    return actual


@pytest.mark.parametrize("name", ["mpe2/simple_tag_v3", "arena:Relay"])
def test_advantages_agree_with_manual_results(name: str) -> None:
    hooks = [GAE(value, gamma=GAMMA, lambda_=LAMBDA)]
    collector = MultiAgentCollector("random", name, num_envs=2, seed=0, hooks=hooks)
    trajectories = 0
    # Fragments that cut episodes, end with them, and hold several.
    for env_steps in (7, 43, 100):
        for steps in collector.collect(n_step=env_steps).batch.policy_batches.values():
            for part in parts(steps):
                advantages, targets = by_hand(part)
                np.testing.assert_allclose(part["advantages"], advantages, rtol=1e-12)
                np.testing.assert_allclose(part["value_targets"], targets, rtol=1e-12)
                trajectories += 1
    assert trajectories > 20


def test_one_step_estimates_do_not_depend_on_fragment_boundaries() -> None:
    def collected(*cuts: int) -> np.ndarray:
        collector = MultiAgentCollector("random", "arena:Relay", seed=0, hooks=[GAE(value, gamma=GAMMA, lambda_=0.0)])
        actual = [collector.collect(n_step=cut).batch["runner"] for cut in cuts]
        keys = np.concatenate([part["agent_index"] + 10 * part["t"] for part in actual])
        return np.concatenate([part["advantages"] for part in actual])[np.argsort(keys)]

    np.testing.assert_allclose(collected(8), collected(1, 2, 1, 4), rtol=1e-12)
    assert not np.allclose(
        MultiAgentCollector("random", "arena:Relay", hooks=[GAE(value, lambda_=1.0)])
        .collect(n_step=8)
        .batch["runner"]["advantages"],
        MultiAgentCollector("random", "arena:Relay", hooks=[GAE(value, lambda_=0.0)])
        .collect(n_step=8)
        .batch["runner"]["advantages"],
    )


def test_value_estimates_are_computed_once_and_keep_their_dtype() -> None:
    requested = []

    def estimate(obs: np.ndarray) -> np.ndarray:
        requested.append(len(obs))
        return np.zeros((len(obs), 1), np.float32)

    batch = (
        MultiAgentCollector("random", "mpe2/simple_tag_v3", num_envs=3, seed=0, hooks=[GAE({"adversary": estimate})])
        .collect(n_step=60)
        .batch
    )
    # All steps of nine agents, and the last ones of each.
    assert requested == [180, 9]
    assert batch["adversary"]["advantages"].dtype == np.float32
    assert "advantages" not in batch["agent"]


@pytest.mark.parametrize("options", [{"values": {"adversry": value}}, {"bootstrap": {"adversry": value}}])
def test_value_estimates_for_a_missing_policy_are_rejected(options: dict[str, Any]) -> None:
    policies = {"adversary": "random", "agent": "random"}
    words = "GAE must name policies, got 'adversry'; did you mean 'adversary'"
    hooks = [GAE(**options)]
    with pytest.raises(PolicyNotFoundError, match=words):
        MultiAgentCollector(policies, "mpe2/simple_tag_v3", hooks=hooks)
    with pytest.raises(PolicyNotFoundError, match=words):
        RolloutWorkers(policies, "mpe2/simple_tag_v3", hooks=hooks)
    with pytest.raises(PolicyNotFoundError, match="got 'adversry'"):
        Collector("random", "CartPole-v1", hooks=[GAE(**options)])
    with pytest.raises(PolicyNotFoundError, match="got 'adversry'"):
        postprocess(SampleBatch(eps_id=[7]), [GAE(**options)])


def test_a_batch_may_lack_steps_of_an_existing_policy() -> None:
    batch = MultiAgentBatch({"adversary": SampleBatch(eps_id=[7], rewards=[1.0])}, 1)
    assert postprocess(batch, [GAE({"agent": value})])["adversary"].column_names == ("eps_id", "rewards")


def test_modules_and_columns_provide_value_estimates() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    by_module = (
        MultiAgentCollector("random", "arena:Relay", seed=0, hooks=[GAE(net)]).collect(n_step=12).batch["runner"]
    )

    def plain(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return net(torch.from_numpy(obs)).numpy()

    def with_predictions(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> None:
        trajectory.steps["vf_preds"] = plain(trajectory.steps["obs"])[:, 0]
        trajectory.steps["beyond"] = plain(trajectory.steps["new_obs"])[:, 0]

    for bootstrap in (plain, "beyond"):
        collector = MultiAgentCollector(
            "random", "arena:Relay", seed=0, hooks=[with_predictions, GAE(bootstrap=bootstrap)]
        )
        by_column = collector.collect(n_step=12).batch["runner"]
        np.testing.assert_allclose(by_column["advantages"], by_module["advantages"], rtol=1e-6)
    with pytest.raises(ColumnNotFoundError, match="give GAE a bootstrap"):
        MultiAgentCollector("random", "arena:Relay", hooks=[with_predictions, GAE()]).collect(n_step=7)
    # Whole episodes need none: all agents are terminated.
    assert (
        len(
            MultiAgentCollector("random", "arena:Relay", hooks=[with_predictions, GAE()])
            .collect(n_step=8)
            .batch["runner"]
        )
        == 12
    )
    with pytest.raises(ColumnNotFoundError, match="'vf_preds'"):
        MultiAgentCollector("random", "arena:Relay", hooks=[GAE()]).collect(n_step=8)


def test_functions_receive_nested_observations_as_batches() -> None:
    batch = (
        MultiAgentCollector("random", "arena:Nested", seed=0, hooks=[GAE(lambda obs: obs.where[:, 0] + obs.who)])
        .collect(n_step=5)
        .batch
    )
    runner = batch["runner"]
    np.testing.assert_allclose(
        runner["value_targets"] - runner["advantages"], runner["obs.where"][:, 0] + runner["obs.who"], rtol=1e-6
    )


@pytest.mark.parametrize("n_step", [1, 3, 20])
def test_nstep_returns_agree_with_manual_results(n_step: int) -> None:
    plain = MultiAgentCollector("random", "arena:Nested", num_envs=2, seed=0)
    summed = MultiAgentCollector(
        "random", "arena:Nested", num_envs=2, seed=0, hooks=[NStepReturns(n_step, gamma=GAMMA)]
    )
    for env_steps in (5, 24, 50):
        before, after = (
            parts(plain.collect(n_step=env_steps).batch["runner"]),
            parts(summed.collect(n_step=env_steps).batch["runner"]),
        )
        # Ids are random: agent and time tell which is which.
        for part in (before, after):
            part.sort(
                key=lambda first: (
                    int(first["env_id"][0]),
                    int(first["agent_index"][0]),
                    len(first),
                    int(first["t"][0]),
                )
            )
        for part, actual in zip(before, after, strict=True):
            assert part["t"].tolist() == actual["t"].tolist()
            for i in range(len(part)):
                last = min(i + n_step, len(part)) - 1
                window = part["rewards"][i : last + 1]
                assert actual["returns"][i] == pytest.approx(sum(GAMMA**k * r for k, r in enumerate(window)))
                over = part["terminateds"][last]
                assert actual["discount"][i] == pytest.approx(0 if over else GAMMA ** (last - i + 1))
                assert actual["new_obs.where"][i].tolist() == part["new_obs.where"][last].tolist()
                assert actual["rewards"][i] == part["rewards"][i]


def test_hooks_receive_the_other_agents_of_the_episode() -> None:
    recorded = []

    def team(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> SampleBatch:
        assert all(other.eps_id == trajectory.eps_id for other in others.values())
        assert trajectory.agent not in others
        recorded.append((trajectory.agent, trajectory.policy_id, sorted(others), trajectory.ended))
        steps = trajectory.steps
        steps["team"] = steps["rewards"] + sum(other.steps["rewards"] for other in others.values())
        return steps

    collector = MultiAgentCollector("random", "mpe2/simple_tag_v3", seed=0, hooks=[team])
    batch = collector.collect(n_step=30).batch
    everyone = {"adversary_0", "adversary_1", "adversary_2", "agent_0"}
    assert sorted(recorded) == sorted(
        (agent, agent.split("_")[0], sorted(everyone - {agent}), ended) for agent in everyone for ended in (True, False)
    )
    rewards = np.concatenate([steps["rewards"] for steps in batch.policy_batches.values()]).reshape(4, 30).sum(0)
    for steps in batch.policy_batches.values():
        np.testing.assert_allclose(steps["team"].reshape(-1, 30), np.tile(rewards, (len(steps) // 30, 1)))
    assert batch.count == 30


def test_each_hook_receives_the_result_of_the_previous_one() -> None:
    def drop_first(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> SampleBatch:
        return trajectory.steps[1:]

    def count(trajectory: Trajectory, others: Mapping[Any, Trajectory]) -> None:
        assert "count" not in next(iter(others.values())).steps if others else True
        trajectory.steps["count"] = [len(trajectory.steps)] * len(trajectory.steps)

    steps = SampleBatch(eps_id=[1, 1, 1, 2], agent_index=[0, 0, 1, 0], rewards=[1.0, 2.0, 3.0, 4.0])
    done = postprocess(steps, [drop_first, count])
    assert done["rewards"].tolist() == [2.0]
    assert done["count"].tolist() == [1]
    assert list(steps) == ["eps_id", "agent_index", "rewards"]
    assert postprocess(steps, []) == steps
    assert len(postprocess(steps, [lambda trajectory, others: trajectory.steps[:0]])) == 0


def test_episodes_may_have_ids_of_any_kind() -> None:
    recorded = []
    for ids in (np.array(["x", "y", "x"], object), np.array(["x", "y", "x"])):
        postprocess(SampleBatch(eps_id=ids), [lambda value, others: recorded.append((value.eps_id, len(value.steps)))])
    assert recorded == [("x", 2), ("y", 1)] * 2


def test_built_in_hooks_accept_single_trajectories() -> None:
    batch = MultiAgentCollector("random", "arena:Relay", seed=0).collect(n_step=21).batch
    for hook in (GAE(value), NStepReturns(3)):

        def one_by_one(trajectory: Trajectory, others: Mapping[Any, Trajectory], hook: Hook = hook) -> Any:
            return hook(trajectory, others)

        assert postprocess(batch, [hook]) == postprocess(batch, [one_by_one])


def test_the_original_batch_is_unchanged() -> None:
    batch = MultiAgentCollector("random", "arena:Relay", seed=0).collect(n_step=8).batch
    before = batch.copy()
    done = postprocess(batch, [GAE(value), NStepReturns(3)])
    assert batch == before
    assert done["runner"]["obs"] is batch["runner"]["obs"]
    assert isinstance(done, MultiAgentBatch)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=20), st.randoms(use_true_random=False))
def test_trajectories_are_sorted_by_time(keys: list[tuple[int, int]], random: Any) -> None:
    rows = [(eps_id, agent, keys[:i].count((eps_id, agent))) for i, (eps_id, agent) in enumerate(keys)]
    random.shuffle(rows)
    steps = SampleBatch({name: np.array([row[i] for row in rows], int) for i, name in enumerate(NAMES)})
    ordered, starts = in_order(steps)
    actual = [*zip(*(ordered[name].tolist() for name in NAMES), strict=True)]
    assert sorted(actual) == sorted(rows)
    cut = [actual[start:stop] for start, stop in pairwise([*starts, len(actual)])]
    for item in cut:
        assert len({row[:2] for row in item}) == 1
        assert [row[2] for row in item] == list(range(len(item)))
    assert [entry[0][:2] for entry in cut] == list(dict.fromkeys(row[:2] for row in rows))


NAMES = ("eps_id", "agent_index", "t")


@pytest.mark.parametrize(
    ("steps", "hook", "error", "words"),
    [
        (SampleBatch(rewards=[1.0]), GAE(value), ColumnNotFoundError, "'eps_id'"),
        (SampleBatch(eps_id=[1]), lambda *_: 3, ColumnTypeError, "must return a SampleBatch or None.*got a int"),
        (
            SampleBatch(eps_id=[1, 2], rewards=[1.0, 2.0]),
            lambda value, others: value.steps.select("eps_id") if value.eps_id == 1 else None,
            ColumnMismatchError,
            "'rewards'",
        ),
        (SampleBatch(eps_id=[1, 1], seq_lens=[2]).right_zero_pad(3), GAE(value), SequenceError, "padded"),
    ],
)
def test_batches_that_cannot_be_postprocessed_are_reported(
    steps: SampleBatch, hook: Callable[..., Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        postprocess(steps, [hook])


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(ValueError, match="n_step must be a whole number from 1"):
        NStepReturns(0)


def test_turns_are_postprocessed_agent_by_agent() -> None:
    hooks = [GAE(lambda obs: value(obs.observation), gamma=GAMMA, lambda_=LAMBDA)]
    batch = MultiAgentCollector("random", arena.Bazaar, seed=0, hooks=hooks).collect(n_step=14).batch["trader"]
    for part in parts(batch):
        flat = SampleBatch(
            {name: part[name] for name in ("rewards", "terminateds", "truncateds")},
            obs=part["obs.observation"],
            new_obs=part["new_obs.observation"],
        )
        np.testing.assert_allclose(part["advantages"], by_hand(flat)[0], rtol=1e-12)


@pytest.mark.parametrize("ends", [[False, False, True], [False, False, False]], ids=["within", "beyond"])
def test_estimates_of_another_shape_than_rewards_are_rejected(ends: list[bool]) -> None:
    steps = SampleBatch(
        eps_id=[1, 1, 1], obs=np.ones((3, 2)), new_obs=np.ones((3, 2)), rewards=np.ones(3), terminateds=ends,
        truncateds=[False] * 3,
    )  # fmt: skip
    actual = postprocess(steps.copy(), [GAE(lambda obs: obs[:, :1])])
    assert actual["advantages"].shape == (3,)
    with pytest.raises(ColumnLengthError, match=r"estimates must have the shape of the rewards, \(3,\), got \(3, 2\)"):
        postprocess(steps.copy(), [GAE(lambda obs: obs)])
    if not ends[-1]:
        with pytest.raises(
            ColumnLengthError, match=r"estimates must have the shape of the rewards, \(1,\), got \(1, 2\)"
        ):
            postprocess(steps.copy(), [GAE(lambda obs: obs[:, 0], bootstrap=lambda obs: obs)])


@pytest.mark.parametrize("hooks", [GAE(), "GAE", {"p": GAE()}, [3]], ids=["one", "word", "dict", "number"])
def test_hooks_must_be_a_sequence_of_functions(hooks: Any) -> None:
    batch = SampleBatch(eps_id=[1], rewards=[1.0])
    with pytest.raises(ArgumentError, match="hooks must be"):
        postprocess(batch, hooks)
    with pytest.raises(ArgumentError, match="hooks must be"):
        Collector("random", "CartPole-v1", hooks=hooks)
    with pytest.raises(ArgumentError, match="hooks must be"):
        MultiAgentCollector("random", "mpe2/simple_spread_v3", hooks=hooks)
    with pytest.raises(ArgumentError, match="hooks must be"):
        RolloutWorkers("random", "CartPole-v1", hooks=hooks)


def test_missing_value_estimates_are_reported_with_the_fix() -> None:
    steps = SampleBatch(
        eps_id=[1, 1], t=[0, 1], rewards=[1.0, 1.0], terminateds=[False, True], truncateds=[False, False]
    )
    with pytest.raises(
        ColumnNotFoundError, match=r"must be passed to GAE as a column, a function.*no column 'vf_preds'"
    ):
        postprocess(steps, [GAE()])
