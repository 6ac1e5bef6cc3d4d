"""Steps of several agents go straight to their places in the slot, and out of it when they do not fit."""

from __future__ import annotations

from typing import Any

import arena
import numpy as np
import pytest
from fragments import check_same, made, plan, sent

from samplebatch import Batch, MultiAgentBatch, MultiAgentCollector, SampleBatch, channel, concat_samples
from samplebatch.batch.builder import SampleBatchBuilder
from samplebatch.column import memory
from samplebatch.errors import EnvironmentSpecError
from samplebatch.rollout.places import Forecast, Places
from samplebatch.workers.fragment_sender import FragmentSender
from samplebatch.workers.task import task_of


def telling(obs: Any) -> dict[str, Any]:
    """Act, and say more."""
    if isinstance(obs, Batch):
        return {"act": obs.action_mask.argmax(1), "vf_preds": obs.observation[:, 0]}
    return {
        "act": (obs[:, 0] > 0).astype(int),
        "policy": {"deep": {"who": np.arange(len(obs))}},
        "vf_preds": obs[:, 0],
    }


@pytest.mark.parametrize("policy", ["random", telling])
@pytest.mark.parametrize("name", ["mpe2/simple_spread_v3", "mpe2/simple_tag_v3", "arena:Relay", "arena:Bazaar"])
def test_no_memory_is_filled_but_the_slot(name: str, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, ...]] = []
    empty, copy_of = memory.empty, memory.copy_of
    producer, consumer = channel(1 << 20, allow_pickle=True)
    sender, task = FragmentSender(producer, np.zeros(8, np.int64)), task_of(plan(name, policy), lambda _: None)
    with producer, consumer:
        for turn in range(5):
            with monkeypatch.context() as patch:
                patch.setattr(memory, "empty", lambda *given: filled.append(given[0]) or empty(*given))
                patch.setattr(memory, "copy_of", lambda array: filled.append(array.shape) or copy_of(array))
                patch.setattr(SampleBatchBuilder, "add_values", None)
                patch.setattr(SampleBatchBuilder, "add_steps", None)
                fragment = task.next(sender.reserve)
            assert fragment is not None
            assert (fragment.slot is None) == (turn == 0)
            assert bool(filled) == (turn == 0)
            filled.clear()
            for policy_id, steps in fragment.batch.as_multi_agent().policy_batches.items():
                for column in steps.column_names if fragment.slot is not None else ():
                    if column != "infos":
                        assert steps[column].ctypes.data == fragment.slot[policy_id][column].ctypes.data, column
            sender.send(*fragment)
            del fragment, steps
            consumer.recv()
        task.close()
    assert (sender.in_place, sender.copied, sender.moved_nbytes) == (4, 1, 0)


class Growing(arena.Relay):
    """A relay whose episodes get longer and longer, and whose last runner is there from the third one on."""

    episode = 0

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self._step = 0
        self.agents = self.possible_agents[: 1 + (self.episode > 2)]
        return {agent: self._observe(agent) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self._step += 1
        over = self._step == 3 * self.episode
        acted, self.agents = self.agents, [] if over else self.agents
        return (
            {agent: self._observe(agent) for agent in acted},
            dict.fromkeys(acted, 0.5),
            dict.fromkeys(acted, over),
            dict.fromkeys(acted, False),
            {},
        )


def test_more_agents_and_longer_episodes_than_there_is_room_for() -> None:
    arrived, sender = sent(plan(Growing, envs=2), 6)
    assert sender.in_place >= 2
    check_same(arrived, made(plan(Growing, envs=2), 6))
    task = task_of(plan(Growing, envs=2), lambda _: None)
    lengths = [len(concat_samples([task._collector.collect(episodes=2)])["runner"]) for _ in range(4)]
    assert lengths == [6, 12, 36, 48]


class Shifting(arena.Relay):
    """A relay whose observations get another dtype, and whose rewards another type, in the hundredth step."""

    made = 0

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self.made += 1
        observations, rewards, *rest = super().step(actions)
        if self.made < 100:
            return observations, rewards, *rest
        wide = {agent: obs.astype(np.float64) + 0.1 for agent, obs in observations.items()}
        return wide, {agent: np.float32(reward) for agent, reward in rewards.items()}, *rest


def test_values_that_do_not_fit_leave_the_slot() -> None:
    arrived, sender = sent(plan(Shifting, envs=3), 8)
    dtypes = [[fragment["runner"][name].dtype.name for name in ("obs", "new_obs")] for fragment in arrived]
    narrow, wide = "float32", "float64"
    assert dtypes == [[narrow, narrow]] * 4 + [[narrow, wide]] + [[wide, wide]] * 3
    # There is a slot for such as the fifth only when the sixth is made, which is like the seventh.
    assert (sender.in_place, sender.copied) == (5, 3)
    others = made(plan(Shifting, envs=3), 8)
    for alike in (slice(4), slice(4, 5), slice(5, 8)):
        check_same(arrived[alike], others[alike])


class Poetic(arena.Relay):
    """A relay that gives its rewards out by name, from the fiftieth step on."""

    made = 0

    def step(self, actions: dict[str, Any]) -> arena.Step:
        self.made += 1
        observations, rewards, *rest = super().step(actions)
        return observations, dict.fromkeys(rewards, "a rose") if self.made == 50 else rewards, *rest


def test_what_no_column_can_hold_is_refused_by_name() -> None:
    task = task_of(plan(Poetic, envs=1), lambda _: None)
    with pytest.raises(EnvironmentSpecError, match="'rewards'"):
        task.next(None)


def twice(trajectory: Any, others: Any) -> SampleBatch:
    return concat_samples([trajectory.steps, trajectory.steps])


@pytest.mark.parametrize("environment", ["CartPole-v1", "mpe2/simple_tag_v3"])
def test_hooks_may_make_more_rows_than_the_slot_has(environment: str) -> None:
    arrived, sender = sent(plan(environment, hooks=(twice,)), 4)
    check_same(arrived, made(plan(environment, hooks=(twice,)), 4))
    assert sender.in_place + sender.copied == 4


def test_an_environment_that_raises_costs_no_steps_of_the_others() -> None:
    stages = [arena.Relay(), arena.Failing()]
    collector = MultiAgentCollector(stages, seed=0)
    with pytest.raises(RuntimeError, match="baton"):
        collector.collect(80)
    collector.reset()
    stages[1].made = 100
    batch = collector.collect(40)
    # The first made thirty steps before the second raised in its thirtieth; the last of these counts among the forty.
    assert batch.count == 29 + 29 + 40
    steps = batch["runner"]
    environment_steps = np.stack([steps[name] for name in ("eps_id", "env_id", "t")], 1)
    assert len(np.unique(environment_steps, axis=0)) == batch.count
    assert (steps["obs"][:, 0] == steps["t"]).all()
    assert [info["now"] for info in steps["infos"]] == steps["t"].tolist()


def test_places_without_gaps_stay_and_others_move() -> None:
    rooms = {(0, "a"): 3, (0, "b"): 2, (0, "c"): 2}
    grown: list[int] = []

    def make_room(rows: int) -> int:
        grown.append(rows)
        return rows

    places = Places(rooms.__getitem__, make_room, 7)
    a, b, c = (places.of((0, name), index) for index, name in enumerate("abc"))
    for place, count in ((a, 3), (b, 2), (c, 2)):
        place.row += count
    assert places.moves() == (7, [], None)
    places.more(b)
    assert (b.pieces, b.row, b.stop, grown) == ([(3, 5)], 7, 11, [11])
    b.row += 3
    count, moves, rest = places.moves()
    assert (count, moves) == (10, [(7, 10, 5)])
    assert rest is not None
    assert rest.tolist() == [5, 6]
    places.more(b)
    assert (b.row, b.stop) == (10, 15)


def test_what_is_not_known_is_guessed_from_the_others() -> None:
    nothing = Forecast(None, {}, {})
    assert (nothing.rows(), nothing.room("cat", (0, "tom"))) == ({}, 64)
    assert Forecast({0: 30}, {}, {}).room("cat", (0, "tom")) == 30
    last = {"cat": {(0, "tom"): 8, (0, "kit"): 3}}
    assert Forecast(None, last, {0: 10}).rows() == {"cat": 8 + 2 + 4 + 3 + 4}
    assert Forecast({0: 10}, last, {0: 10}).room("cat", (0, "new")) == 10
    assert Forecast({0: 0}, last, {0: 10}).rows() == {"cat": 2}


def test_a_fragment_that_lacks_a_policy_goes_by_itself() -> None:
    producer, consumer = channel(1 << 16)
    sender = FragmentSender(producer, np.zeros(8, np.int64))
    both = MultiAgentBatch({"a": SampleBatch(t=[1]), "b": SampleBatch(t=[2, 3])}, 2)
    with producer, consumer:
        sender.send(both)
        slot = sender.reserve({"a": 1, "b": 2})
        assert slot is not None
        sender.send(MultiAgentBatch({"a": SampleBatch(t=[4])}, 1), slot)
        assert [list(consumer.recv().policy_batches) for _ in range(2)] == [["a", "b"], ["a"]]
    assert (sender.in_place, sender.copied) == (0, 2)
