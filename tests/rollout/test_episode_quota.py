"""Counting of episodes; steps recorded together equal steps recorded one by one."""

from __future__ import annotations

import itertools
from typing import Any

import gyms
import numpy as np
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import VectorReplayBuffer
from samplebatch.rollout.collector import Collector, EpisodeQuota
from samplebatch.rollout.recorder import EpisodeCount


def stay(obs: Any) -> Any:
    return np.zeros(len(obs), int)


lengths_of = st.lists(st.integers(1, 7), min_size=1, max_size=4)
amounts_of = st.lists(st.tuples(st.sampled_from(["n_step", "n_episode"]), st.integers(1, 30)), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(
    ends=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=40)
    ),
    expected=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 40), max_size=3),
)
def test_each_started_episode_counts_until_its_end(
    ends: list[tuple[bool, ...]], expected: int, cuts: list[int]
) -> None:
    flags = np.array(ends, bool).reshape(len(ends), -1)
    count = flags.shape[1]
    quota = EpisodeQuota(count, expected)
    # As one would count by hand, step by step.
    running = [env < expected for env in range(count)]
    started = sum(running)
    dropped = []
    for step, over in enumerate(ends):
        for env, ended in enumerate(over):
            if not running[env]:
                dropped.append(step * count + env)
            elif ended and started < expected:
                started += 1
            elif ended:
                running[env] = False
    bounds = sorted({0, len(flags), *(cut for cut in cuts if cut < len(flags))})
    actual: list[int] = []
    for start, stop in itertools.pairwise(bounds):
        rows = quota.spend(flags[start:stop])
        actual += [] if rows is None else (rows + start * count).tolist()
    assert actual == dropped
    assert quota.running.tolist() == running
    assert quota.left == sum(running) + expected - started


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_of,
    mode=st.sampled_from(["NextStep", "SameStep", "Disabled"]),
    amounts=amounts_of,
    with_infos=st.booleans(),
    truncates=st.booleans(),
    slots=st.sampled_from([None, 3, 50]),
)
def test_steps_recorded_together_equal_single_steps(
    lengths: list[int],
    mode: str,
    amounts: list[tuple[str, int]],
    with_infos: bool,
    truncates: bool,
    slots: int | None,
) -> None:
    def collected(**hooks: Any) -> list[Any]:
        makers = [
            lambda n=n, length=length: gyms.Ladder(n, length, with_infos=with_infos, truncates=truncates)
            for n, length in enumerate(lengths)
        ]
        count = len(lengths)
        buffer = None if slots is None else VectorReplayBuffer(slots * count, count, ignore_obs_next=slots == 50)
        env = SyncVectorEnv(makers, autoreset_mode=mode)
        actual: list[Any] = []
        with Collector(stay, env, buffer, seed=1, **hooks) as collector:
            for name, amount in amounts:
                stats = collector.collect(**{name: amount})
                actual.append([stats.n_collected_steps, stats.returns.tolist(), stats.lens.tolist()])
                if name == "n_episode":
                    assert stats.n_collected_episodes == amount
                if stats.batch is not None:
                    assert stats.n_collected_steps == len(stats.batch)
                    actual.append({k: np.asarray(stats.batch[k]).tolist() for k in stats.batch if k != "eps_id"})
        if buffer is not None:
            rows = buffer[:]
            actual.append([rows.obs.tolist(), rows.obs_next.tolist(), rows.rew.tolist(), rows.done.tolist()])
            actual.append([buffer.last_index.tolist(), buffer.unfinished_index().tolist()])
            actual.append(rows.info.step.tolist() if with_infos else [])
        return actual

    assert collected() == collected(on_step_hook=lambda decided, transitions: None)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12), st.integers(0, 12))
def test_steps_of_all_environments_are_counted_as_steps_of_some(ends: list[list[bool]], switch: int) -> None:
    together, by_row = EpisodeCount(3), EpisodeCount(3)
    episodes: dict[int, int] = {}
    for step, over in enumerate(ends):
        done, rewards = np.array(over), np.arange(3.0) + 10 * step
        first, other = together.add(done, rewards), by_row.add(done, rewards, np.arange(3), steps=2)
        (ids, t), (other_ids, other_t) = first.number(), other.number()
        # Ids are random: the same episode has the same two of them in every step.
        pairs = zip(ids.tolist(), other_ids.tolist(), strict=True)
        assert all(episodes.setdefault(mine, its) == its for mine, its in pairs)
        assert t.tolist() == other_t.tolist()
        assert first.returns.tolist() == other.returns.tolist()
        assert first.lens.tolist() == other.lens.tolist() == [part + 1 for part in t[done].tolist()]
        ended, other_ended = ([] if part.ended is None else part.ended.tolist() for part in (first, other))
        assert ended == other_ended == np.flatnonzero(done).tolist()
        if step == switch:
            # Either goes on where the other way of counting left off.
            together, by_row = by_row, together
            episodes = {its: mine for mine, its in episodes.items()}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_ranges_of_one_environment_are_counted_like_single_steps(chunks: list[list[bool]]) -> None:
    by_run, by_step = EpisodeCount(1), EpisodeCount(1)
    episodes: dict[int, int] = {}
    for chunk in chunks:
        done, rewards, env = np.array(chunk), np.arange(float(len(chunk))), np.zeros(len(chunk), np.int64)
        ids, t = by_run.add(done, rewards, env, steps=2).number()
        single = [by_step.add(done[i : i + 1], rewards[i : i + 1]).number() for i in range(len(chunk))]
        assert t.tolist() == [int(other[0]) for _, other in single]
        for eps_id, (other, _) in zip(ids.tolist(), single, strict=True):
            assert episodes.setdefault(eps_id, int(other[0])) == int(other[0])
        first, other_state = by_run.state_dict(), by_step.state_dict()
        assert first["t"].tolist() == other_state["t"].tolist()
        assert first["returns"].tolist() == other_state["returns"].tolist()
        ended = [
            [part.tolist() for part in np.concatenate(item["ended"], 1)] if item["ended"] else []
            for item in (first, other_state)
        ]
        assert ended[0] == ended[1]
