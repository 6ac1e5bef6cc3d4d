"""Every step of any mixture of fragments is returned once, complete and in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.batch.concat import concat_samples
from samplebatch.column.ragged import RaggedColumn
from samplebatch.rollout.aggregator import Aggregator

POLICIES = ("red", "blue", "red")
"""The policy of each agent, by its index."""


@dataclass(frozen=True)
class Step:
    """Row of one agent in one environment step; all values follow from its number."""

    uid: int
    eps_id: int
    t: int
    agent: int
    done: bool


def as_batch(rows: list[Step]) -> SampleBatch:
    uid = np.array([row.uid for row in rows])
    return SampleBatch(
        uid=uid,
        obs={"far": np.stack([uid, -uid], 1).astype(np.float32), "near": uid.astype(np.uint8)},
        words=RaggedColumn.from_rows([np.full(i % 3, i) for i in uid], "words"),
        infos=[{"uid": int(i)} for i in uid],
        eps_id=[row.eps_id for row in rows],
        t=[row.t for row in rows],
        agent_index=[row.agent for row in rows],
        terminateds=[row.done for row in rows],
        truncateds=[False] * len(rows),
    )


@dataclass(frozen=True)
class Stream:
    """Environment steps of one source in order, and the bounds of its fragments."""

    steps: list[list[Step]]
    cuts: list[int]
    shuffled: bool
    flat: bool

    def fragments(self, rng: np.random.Generator) -> Iterator[SampleBatch | MultiAgentBatch]:
        bounds = sorted({0, *(cut % (len(self.steps) + 1) for cut in self.cuts), len(self.steps)})
        for first, stop in pairwise(bounds):
            rows = [row for step in self.steps[first:stop] for row in step]
            if self.flat:
                yield as_batch(rows)
                continue
            rows.sort(key=lambda row: (row.agent, row.t) if not self.shuffled else rng.random())
            yield MultiAgentBatch(
                {
                    policy: as_batch([row for row in rows if POLICIES[row.agent] == policy])
                    for policy in dict.fromkeys(POLICIES[row.agent] for row in rows)
                },
                stop - first,
            )


@st.composite
def streams(draw: st.DrawFn, *, flat: bool = False) -> list[Stream]:
    uids, ids = count(), iter(draw(st.permutations(range(100, 130))))
    actual = []
    for _ in range(draw(st.integers(1, 3))):
        steps: list[list[Step]] = []
        for _ in range(draw(st.integers(1, 3))):
            eps_id, length = next(ids), draw(st.integers(1, 6))
            ended = draw(st.booleans()) or _ < 2
            for t in range(length):
                acting = [0] if flat else sorted(draw(st.sets(st.integers(0, 2), min_size=1)))
                steps.append([Step(next(uids), eps_id, t, agent, ended and t == length - 1) for agent in acting])
        actual.append(Stream(steps, draw(st.lists(st.integers(0, 20), max_size=5)), draw(st.booleans()), flat))
    return actual


@st.composite
def arrivals(draw: st.DrawFn, *, flat: bool = False) -> tuple[list[Stream], list[SampleBatch | MultiAgentBatch]]:
    """Draw streams, and the order in which their fragments arrive."""
    sources = draw(streams(flat=flat))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    pending = [list(source.fragments(rng)) for source in sources]
    arrived = []
    while any(pending):
        pending = [queue for queue in pending if queue]
        arrived.append(pending[draw(st.integers(0, len(pending) - 1))].pop(0))
    return sources, arrived


def rows_of(batch: SampleBatch | MultiAgentBatch) -> dict[int, tuple[str, dict[str, Any]]]:
    """Return every row and its policy by row number."""
    actual = {}
    for policy, steps in batch.as_multi_agent().items():
        for row in steps.rows():
            assert row["uid"] not in actual
            actual[int(row["uid"])] = (policy, row)
    return actual


def check_rows(sources: list[Stream], batches: list[SampleBatch | MultiAgentBatch]) -> None:
    """Check that every step occurs once, unchanged, under its policy."""
    expected = {row.uid: row for source in sources for step in source.steps for row in step}
    actual = [rows_of(batch) for batch in batches]
    assert sorted(uid for rows in actual for uid in rows) == sorted(expected)
    for rows in actual:
        for uid, (policy, row) in rows.items():
            step = expected[uid]
            assert policy == ("default_policy" if sources[0].flat else POLICIES[step.agent])
            assert row["obs"]["far"].tolist() == [uid, -uid]
            assert row["obs"]["near"] == uid
            assert row["words"].tolist() == [uid] * (uid % 3)
            assert row["infos"] == {"uid": uid}
            assert (row["eps_id"], row["t"], row["agent_index"]) == (step.eps_id, step.t, step.agent)
            assert row["terminateds"] == step.done


def run(
    aggregator: Aggregator, arrived: list[SampleBatch | MultiAgentBatch], drains: list[bool]
) -> tuple[list[Any], Any]:
    """Add all fragments, remove full batches repeatedly; return the full batches and the remainder."""
    full: list[Any] = []
    for i, fragment in enumerate(arrived):
        aggregator.add(fragment)
        if drains[i % len(drains)]:
            full += aggregator.batches()
        received, went = arrived[: i + 1], full
        assert aggregator.env_steps == sum(b.env_steps() for b in received) - sum(b.env_steps() for b in went)
        assert aggregator.agent_steps == sum(b.agent_steps() for b in received) - sum(b.agent_steps() for b in went)
        assert (aggregator.nbytes > 0) == (aggregator.agent_steps > 0)
    full += aggregator.batches()
    remaining = aggregator.build_and_reset()
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.nbytes) == (0, 0, 0)
    assert (aggregator.fragments, aggregator.episodes) == (0, 0)
    assert sum(b.env_steps() for b in [*full, remaining]) == sum(b.env_steps() for b in arrived)
    return full, remaining


DRAINS = st.lists(st.booleans(), min_size=1, max_size=4)
SIZES = st.integers(1, 12)


@settings(max_examples=80)
@given(arrivals(), SIZES, st.sampled_from(["agent_steps", "env_steps"]), DRAINS)
def test_environment_steps_are_not_split_and_none_is_lost(
    example: tuple[list[Stream], list[Any]], size: int, mode: Any, drains: list[bool]
) -> None:
    sources, arrived = example
    full, remaining = run(Aggregator(size, mode), arrived, drains)
    check_rows(sources, [*full, remaining])
    steps = {(step[0].eps_id, step[0].t): step for source in sources for step in source.steps}
    for batch in [*full, remaining]:
        parts = batch.timeslices(1)
        assert len(parts) == batch.count
        for part in parts:
            (key,) = {(int(row["eps_id"]), int(row["t"])) for _, row in rows_of(part).values()}
            assert sorted(rows_of(part)) == sorted(row.uid for row in steps[key])
    for i, batch in enumerate(full):
        actual = batch.agent_steps() if mode == "agent_steps" else batch.count
        assert actual <= size or batch.count == 1
        # It was full: at least one step of what comes next would not have fitted.
        following = ([*full, remaining][i + 1]).timeslices(1)
        sizes = [part.agent_steps() if mode == "agent_steps" else 1 for part in following]
        assert actual >= size or actual + max(sizes) > size


@settings(max_examples=60)
@given(arrivals(), SIZES, DRAINS)
def test_an_agents_steps_are_in_order(example: tuple[list[Stream], list[Any]], size: int, drains: list[bool]) -> None:
    sources, arrived = example
    if any(source.shuffled for source in sources):
        return
    full, remaining = run(Aggregator(size), arrived, drains)
    observed: dict[tuple[int, int], list[int]] = {}
    for batch in [*full, remaining]:
        for _, row in rows_of(batch).values():
            observed.setdefault((int(row["eps_id"]), int(row["agent_index"])), []).append(int(row["t"]))
    assert all(times == sorted(times) for times in observed.values())


@settings(max_examples=80)
@given(arrivals(), SIZES, st.sampled_from(["agent_steps", "env_steps"]), DRAINS)
def test_unfinished_episodes_are_retained_until_they_end(
    example: tuple[list[Stream], list[Any]], size: int, mode: Any, drains: list[bool]
) -> None:
    sources, arrived = example
    aggregator = Aggregator(size, mode, complete_episodes=True)
    full, remaining = run(aggregator, arrived, drains)
    check_rows(sources, [*full, remaining])
    episodes: dict[int, list[Step]] = {}
    for source in sources:
        for step in source.steps:
            episodes.setdefault(step[0].eps_id, []).extend(step)
    for batch in full:
        rows = rows_of(batch)
        ids = {int(row["eps_id"]) for _, row in rows.values()}
        assert sorted(rows) == sorted(step.uid for eps_id in ids for step in episodes[eps_id])
        assert all(episodes[eps_id][-1].done for eps_id in ids)
        actual = len(rows) if mode == "agent_steps" else batch.count
        assert actual <= size or len(ids) == 1
        if not any(source.shuffled for source in sources):
            for steps in batch.policy_batches.values():
                changes = np.flatnonzero(np.diff(steps["eps_id"]) | np.diff(steps["agent_index"]))
                trajectories = len({*zip(steps["eps_id"].tolist(), steps["agent_index"].tolist(), strict=True)})
                assert len(changes) + 1 == trajectories


@settings(max_examples=50)
@given(arrivals(flat=True), SIZES, st.booleans(), DRAINS)
def test_flat_fragments_become_flat_batches_of_the_exact_size(
    example: tuple[list[Stream], list[Any]], size: int, complete: bool, drains: list[bool]
) -> None:
    sources, arrived = example
    full, remaining = run(Aggregator(size, complete_episodes=complete), arrived, drains)
    check_rows(sources, [*full, remaining])
    assert all(isinstance(batch, SampleBatch) for batch in full)
    if not complete:
        assert {len(batch) for batch in full} <= {size}
        assert len(remaining) < size
        assert concat_samples([*full, remaining]) == concat_samples(arrived) if len(remaining) else True


@settings(max_examples=40)
@given(arrivals(), arrivals(flat=True), st.integers(1, 12))
def test_flat_and_multi_agent_fragments_can_be_mixed(
    several: tuple[list[Stream], list[Any]], flat: tuple[list[Stream], list[Any]], size: int
) -> None:
    fragments = [fragment for pair in zip(several[1], flat[1], strict=False) for fragment in pair]
    full, remaining = run(Aggregator(size), fragments, [True])
    received, went = concat_samples(fragments).as_multi_agent(), concat_samples([*full, remaining]).as_multi_agent()
    assert {policy: sorted(steps["uid"]) for policy, steps in went.items()} == {
        policy: sorted(steps["uid"]) for policy, steps in received.items()
    }


@settings(max_examples=40)
@given(arrivals(), DRAINS)
def test_without_a_size_everything_is_one_batch(example: tuple[list[Stream], list[Any]], drains: list[bool]) -> None:
    _, arrived = example
    full, remaining = run(Aggregator(), arrived, drains)
    assert not full
    assert remaining == concat_samples(arrived)
