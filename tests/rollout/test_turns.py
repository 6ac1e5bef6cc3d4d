"""Turn-based agents: each agent observes the result of its last turn at its next turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import arena
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch, concat_samples
from samplebatch.env.registry import make_environment
from samplebatch.errors import EnvironmentSpecError
from samplebatch.rollout.aggregator import Aggregator
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.statistics import episode_statistics


def watched(make: Callable[[], Any], act: Callable[[Any], Any], seed: int | None = None) -> list[dict[str, Any]]:
    """Play an episode with `agent_iter` and `last`; record each agent's steps in the order of turns."""
    environment = make()
    environment.reset(seed=seed)
    rows: list[dict[str, Any]] = []
    last_row: dict[str, dict[str, Any]] = {}
    before: dict[str, Any] = {}
    t = 0
    for agent in environment.agent_iter():
        observation, reward, terminated, truncated, info = environment.last()
        observation = {name: np.array(value).tolist() for name, value in observation.items()}
        if agent in last_row:
            last_row.pop(agent).update(
                new_obs=observation,
                rewards=reward + before.pop(agent, 0),
                terminateds=terminated,
                truncateds=truncated,
                infos=dict(info),
            )
        else:
            before[agent] = reward
        if terminated or truncated:
            environment.step(None)
            continue
        action = act(observation)
        last_row[agent] = {"agent": agent, "t": t, "obs": observation, "actions": action}
        rows.append(last_row[agent])
        environment.step(action)
        t += 1
    return rows


def collected(batch: MultiAgentBatch, agents: list[str]) -> list[dict[str, Any]]:
    """Return the rows of a batch in the order of turns."""
    actual = []
    for steps in batch.policy_batches.values():
        for row in steps.rows():
            plain = {
                name: row[name] if name == "infos" else np.asarray(row[name]).tolist()
                for name in ("t", "actions", "rewards", "terminateds", "truncateds", "infos")
            }
            for name in ("obs", "new_obs"):
                plain[name] = {part: np.asarray(value).tolist() for part, value in row[name].items()}
            actual.append({"agent": agents[int(row["agent_index"])], **plain})
    return sorted(actual, key=lambda row: row["t"])


@pytest.mark.parametrize("cuts", [[9], [1] * 9, [3, 4, 2], [8, 1]])
def test_collected_turns_agree_with_the_recorded_game(cuts: list[int]) -> None:
    expected = watched(arena.Bazaar, lambda observation: observation["action_mask"].index(True))
    collector = MultiAgentCollector("random", arena.Bazaar, seed=0)
    fragments = [collector.collect(n_step=cut).batch for cut in cuts]
    assert [fragment.count for fragment in fragments] == [fragment.agent_steps() for fragment in fragments] == cuts
    batch = concat_samples(fragments)
    assert collected(batch, arena.Bazaar.possible_agents) == expected
    assert len(np.unique(batch["trader"]["eps_id"])) == 1
    # Every fragment goes on where the one before it stopped.
    times = [sorted(fragment["trader"]["t"].tolist()) for fragment in fragments]
    assert [t for part in times for t in part] == list(range(9))


def test_returns_include_all_rewards_of_an_agent() -> None:
    rows = watched(arena.Bazaar, lambda observation: observation["action_mask"].index(True))
    paid: dict[str, float] = {}
    for row in rows:
        paid[row["agent"]] = paid.get(row["agent"], 0) + row["rewards"]
    # trader_0 has two turns, of 20 and 30, and gets 1 before the first.
    assert paid["trader_0"] == 51
    statistics = episode_statistics(MultiAgentCollector("random", arena.Bazaar, seed=0).collect(n_episode=2).batch)
    assert statistics is not None
    assert sorted(statistics.policies["trader"].returns.tolist()) == sorted([*paid.values()] * 2)
    assert sorted(statistics.policies["trader"].lengths.tolist()) == [2, 2, 3, 3, 4, 4]


def test_turns_keep_their_order_in_lockstep() -> None:
    batch = MultiAgentCollector("random", arena.Bazaar, seed=0, policy_mapping=arena.whose).collect(n_step=9).batch
    order = [next(iter(part.policy_batches))[-1] for part in batch.timeslices(1)]
    assert "".join(order) == "200211212"
    assert [part.count for part in batch.timeslices(4)] == [4, 4, 1]


def test_steps_wait_for_an_inactive_agent_without_blocking() -> None:
    collector = MultiAgentCollector("random", arena.Bazaar, num_envs=3, seed=0)
    aggregator = Aggregator(complete_episodes=True)
    for env_steps in (1, 2, 5, 7, 12):
        aggregator.add(collector.collect(n_step=env_steps).batch)
    done = aggregator.build_and_reset(unfinished=False)
    remaining = aggregator.build_and_reset()
    assert done.count + remaining.count == 27
    ids, counts = np.unique(done["trader"]["eps_id"], return_counts=True)
    assert len(ids) >= 2
    assert counts.tolist() == [9] * len(ids)


@pytest.mark.parametrize("name", ["pettingzoo/classic/tictactoe_v3", "pettingzoo/classic/connect_four_v3"])
def test_actions_in_games_respect_the_masks(name: str) -> None:
    batch = MultiAgentCollector("random", name, num_envs=2, seed=3).collect(n_episode=6).batch
    (steps,) = batch.policy_batches.values()
    masks, actions = steps["obs"]["action_mask"], steps["actions"]
    assert masks[np.arange(len(steps)), actions].all()
    games = np.unique(steps["eps_id"])
    assert len(games) == 6
    for game in games:
        rows = steps[steps["eps_id"] == game]
        order = np.argsort(rows["t"])
        assert rows["t"][order].tolist() == list(range(len(rows)))
        assert rows["agent_index"][order].tolist() == [t % 2 for t in range(len(rows))]
        assert rows["rewards"].sum() == 0
        assert rows["dones"][order].tolist() == [False] * (len(rows) - 2) + [True, True]


def test_both_interfaces_give_the_same_game() -> None:
    def steps_of(name: str) -> SampleBatch:
        collector = MultiAgentCollector(lambda obs: obs % 3, make_environment(name), seed=2)
        return collector.collect(n_episode=1).batch["player"]

    together, in_turns = steps_of("pettingzoo.classic.rps_v2:parallel_env"), steps_of("pettingzoo.classic.rps_v2:env")
    for column in ("obs", "actions", "rewards", "agent_index", "dones"):
        assert together[column].tolist() == in_turns[column].tolist()
    assert (in_turns["t"] == 2 * together["t"] + together["agent_index"]).all()


class Mute(arena.Bazaar):
    """Bazaar that returns no observations for dead agents."""

    def observe(self, agent: str) -> Any:
        return None if self.terminations[agent] else super().observe(agent)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (arena.Immortal, "remove a dead agent.*got 'trader_0' again"),
        (arena.Abrupt, "a last turn before the episode ends, got none for 'trader_"),
        (Mute, "observation for the agent whose turn it is, got none for 'trader_0'"),
    ],
)
def test_an_environment_that_violates_its_interface_is_reported(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        MultiAgentCollector("random", make(), seed=0).collect(n_step=20)


def test_simultaneous_and_turn_based_agents_are_collected_together() -> None:
    mixed = MultiAgentCollector("random", [arena.Bazaar(), arena.Relay()], seed=0)
    fragments = [mixed.collect(n_step=n).batch for n in (1, 5, 7, 3)]
    assert [fragment.count for fragment in fragments] == [1, 5, 7, 3]
    joined = concat_samples(fragments)
    assert (joined["runner"]["obs"][:, 0] == joined["runner"]["t"]).all()
    assert (joined["trader"]["obs"]["observation"][:, 0] == joined["trader"]["t"]).all()


def test_steps_before_a_failure_satisfy_a_smaller_request() -> None:
    stages = [arena.Bazaar(), arena.Failing()]
    collector = MultiAgentCollector("random", stages, seed=0)
    with pytest.raises(RuntimeError, match="baton"):
        collector.collect(n_step=80)
    recorded = collector._recorded
    assert recorded > 50
    assert collector.collect(n_step=1).batch.count == recorded
    # The turn that was made in the step that failed is in the next batch, if it was complete.
    assert collector.collect(n_step=1).batch.count == 1
