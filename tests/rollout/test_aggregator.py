"""Train batches of the requested size, of complete steps or episodes, with one copy of every byte."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import arena
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch import MultiAgentBatch, SampleBatch, concat_samples
from samplebatch.batch.episodes import StepNumbers, distinct_ids, episode_ends, finished_by_number
from samplebatch.column import memory
from samplebatch.env.registry import make_environment
from samplebatch.errors import ColumnMismatchError, ColumnNotFoundError, ColumnTypeError, SequenceError
from samplebatch.rollout.aggregator import Aggregator, number_steps
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector
from samplebatch.rollout.statistics import episode_statistics


def steps(first: int, count: int, eps_id: int = 0, agent: int = 0, *, done: bool = False) -> SampleBatch:
    t = np.arange(first, first + count)
    return SampleBatch(
        obs=np.stack([t, np.full(count, agent)], 1).astype(np.float32),
        rewards=t / 2,
        eps_id=np.full(count, eps_id),
        t=t,
        agent_index=np.full(count, agent),
        terminateds=(t == first + count - 1) & done,
        truncateds=np.zeros(count, bool),
    )


def pair(first: int, count: int, eps_id: int = 0, *, done: bool = False) -> MultiAgentBatch:
    """Return fragments of equal length for two agents with separate policies."""
    left, right = (steps(first, count, eps_id, agent, done=done) for agent in range(2))
    return MultiAgentBatch({"left": left, "right": right}, count)


def test_a_fragment_is_split_in_lockstep() -> None:
    aggregator = Aggregator(6)
    aggregator.add(pair(0, 5))
    aggregator.add(pair(5, 2))
    (first, second) = aggregator.batches()
    assert [part["t"].tolist() for part in first.policy_batches.values()] == [[0, 1, 2]] * 2
    assert [part["t"].tolist() for part in second.policy_batches.values()] == [[3, 4, 5]] * 2
    assert (first.count, second.count) == (3, 3)
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.fragments) == (1, 2, 1)
    assert aggregator.build_and_reset() == MultiAgentBatch({"left": steps(6, 1), "right": steps(6, 1, agent=1)}, 1)
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.fragments, aggregator.nbytes) == (0, 0, 0, 0)


@pytest.mark.parametrize(("mode", "counts"), [("agent_steps", [3, 3]), ("env_steps", [7])])
def test_a_size_counts_agents_steps_or_environment_steps(mode: Any, counts: list[int]) -> None:
    aggregator = Aggregator(7, mode)
    aggregator.add(pair(0, 8))
    assert [batch.count for batch in aggregator.batches()] == counts


def test_every_byte_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fragments = [
        MultiAgentBatch({"a": SampleBatch(obs=np.ones((2000, 32)), eps_id=np.full(2000, i), t=np.arange(2000))}, 2000)
        for i in range(5)
    ]
    allocated = []
    allocate = memory._allocate
    monkeypatch.setattr(memory, "_allocate", lambda nbytes, *more: allocated.append(nbytes) or allocate(nbytes, *more))
    aggregator = Aggregator(1700)
    for fragment in fragments:
        aggregator.add(fragment)
    batches = [*aggregator.batches(), aggregator.build_and_reset()]
    assert [batch.count for batch in batches] == [1700] * 5 + [1500]
    nbytes = sum(batch.size_bytes() for batch in batches)
    assert nbytes <= sum(allocated) <= nbytes + 2000


def test_a_fragment_is_released_with_its_last_step() -> None:
    aggregator = Aggregator(10)
    fragment = pair(0, 8)
    reference = weakref.ref(fragment["left"]["obs"])
    aggregator.add(fragment)
    del fragment
    first = list(aggregator.batches())
    gc.collect()
    assert reference() is not None
    aggregator.add(pair(8, 4))
    second = list(aggregator.batches())
    gc.collect()
    assert reference() is None
    assert [batch.count for batch in first + second] == [5, 5]


def test_a_batch_does_not_change_with_the_fragment() -> None:
    aggregator = Aggregator(4)
    fragment = pair(0, 2)
    aggregator.add(fragment)
    (batch,) = aggregator.batches()
    fragment["left"]["obs"][:] = 99
    assert batch == pair(0, 2)


def test_a_step_larger_than_the_size_is_a_separate_batch() -> None:
    aggregator = Aggregator(1)
    aggregator.add(MultiAgentBatch({}, 0))
    aggregator.add(SampleBatch())
    aggregator.add(pair(0, 2))
    assert [batch.agent_steps() for batch in aggregator.batches()] == [2, 2]


@pytest.mark.parametrize(
    "fragment",
    [
        MultiAgentBatch({"a": SampleBatch(obs=[1, 2, 3]), "b": SampleBatch(obs=[4])}, 3),
        MultiAgentBatch({"a": steps(0, 4)}, 5),
        MultiAgentBatch({"a": SampleBatch(obs=[1, 2, 3], seq_lens=[1, 2]).right_zero_pad(2)}, 3),
    ],
    ids=["no ids", "steps that no row tells of", "padded"],
)
def test_fragments_without_step_numbers_are_not_split(fragment: MultiAgentBatch) -> None:
    aggregator = Aggregator(2)
    aggregator.add(fragment)
    aggregator.add(fragment)
    assert list(aggregator.batches()) == [fragment, fragment]


def test_split_sequences_get_new_lengths_and_states() -> None:
    recurrent = SampleBatch(obs=[1, 2, 3, 4, 5], state_in_0=[[0.5], [1.5]], seq_lens=[2, 3])
    aggregator = Aggregator(3)
    aggregator.add(recurrent)
    aggregator.add(recurrent)
    batches = [*aggregator.batches(), aggregator.build_and_reset()]
    assert [batch["seq_lens"].tolist() for batch in batches] == [[2, 1], [2, 1], [1, 2], [1]]
    assert [batch["obs"].tolist() for batch in batches] == [[1, 2, 3], [4, 5, 1], [2, 3, 4], [5]]


def test_an_incompatible_fragment_is_rejected_immediately() -> None:
    aggregator = Aggregator(3)
    aggregator.add(pair(0, 1))
    before = aggregator.env_steps, aggregator.agent_steps, aggregator.nbytes, aggregator.fragments
    bad = pair(1, 1)
    bad["right"]["obs"] = np.zeros((1, 3))
    with pytest.raises(ColumnMismatchError, match="'obs'") as caught:
        aggregator.add(bad)
    assert caught.value.__notes__ == ["in the batch of policy 'right'"]
    with pytest.raises(ColumnTypeError, match="got a dict"):
        aggregator.add({})  # type: ignore[arg-type]
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.nbytes, aggregator.fragments) == before
    aggregator.add(pair(1, 1))
    assert [batch["left"]["t"].tolist() for batch in aggregator.batches()] == [[0]]
    assert aggregator.build_and_reset()["left"]["t"].tolist() == [1]
    # Nothing is held now that it would have to be like.
    aggregator.add(bad)
    assert aggregator.build_and_reset() == bad


def test_wider_dtypes_are_joined_without_loss() -> None:
    aggregator = Aggregator(10)
    for values in (np.array([1], np.int8), np.array([300], np.int16), np.array([2], np.int8)):
        aggregator.add(SampleBatch(a=values))
    with pytest.raises(ColumnMismatchError, match="'a'"):
        aggregator.add(SampleBatch(a=np.array([1], np.uint64)))
    assert aggregator.build_and_reset() == SampleBatch(a=np.array([1, 300, 2], np.int16))


def test_unfinished_episodes_are_retained_until_they_end() -> None:
    aggregator = Aggregator(8, complete_episodes=True)
    aggregator.add(pair(0, 2, eps_id=7))
    aggregator.add(pair(0, 1, eps_id=9))
    aggregator.add(pair(2, 2, eps_id=7, done=True))
    assert (aggregator.fragments, aggregator.episodes, aggregator.env_steps) == (2, 1, 5)
    (batch,) = aggregator.batches()
    assert batch == pair(0, 4, eps_id=7, done=True)
    assert not list(aggregator.batches())
    aggregator.add(pair(0, 1, eps_id=11, done=True))
    assert aggregator.build_and_reset(unfinished=False) == pair(0, 1, eps_id=11, done=True)
    assert aggregator.env_steps == 1
    aggregator.add(pair(1, 1, eps_id=9, done=True))
    assert aggregator.build_and_reset() == pair(0, 2, eps_id=9, done=True)
    assert (aggregator.fragments, aggregator.nbytes, aggregator.env_steps) == (0, 0, 0)


def test_an_agent_that_leaves_early_does_not_end_the_episode() -> None:
    aggregator = Aggregator(complete_episodes=True)
    early = MultiAgentBatch({"left": steps(0, 2, done=True), "right": steps(0, 3, agent=1)}, 3)
    aggregator.add(early)
    assert aggregator.episodes == 0
    assert aggregator.build_and_reset(unfinished=False).agent_steps() == 0
    aggregator.add(MultiAgentBatch({"right": steps(3, 1, agent=1, done=True)}, 1))
    batch = aggregator.build_and_reset(unfinished=False)
    assert (batch.count, batch["right"]["t"].tolist()) == (4, [0, 1, 2, 3])


def test_episodes_that_will_never_end_are_dropped_and_counted() -> None:
    aggregator = Aggregator(complete_episodes=True)
    for env_id in range(3):
        fragment = pair(0, 2 + env_id, eps_id=env_id)
        for part in fragment.policy_batches.values():
            part["env_id"] = np.full(len(part), env_id)
        aggregator.add(fragment)
    assert aggregator.drop_unfinished(range(1, 3)) == 7
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.fragments) == (2, 4, 1)
    assert aggregator.drop_unfinished() == 2
    assert (aggregator.env_steps, aggregator.agent_steps, aggregator.fragments, aggregator.nbytes) == (0, 0, 0, 0)
    assert Aggregator().drop_unfinished() == 0


@pytest.mark.parametrize(
    ("fragment", "error", "words"),
    [
        (SampleBatch(obs=[1], dones=[True]), ColumnNotFoundError, "'eps_id'"),
        (MultiAgentBatch({"a": SampleBatch(eps_id=[1], dones=[True])}, 1), ColumnNotFoundError, "'t'.*policy 'a'"),
        (SampleBatch(eps_id=[1], terminateds=[True]), ColumnNotFoundError, "'truncateds'"),
        (
            SampleBatch(eps_id=[1, 1], dones=[False, True], seq_lens=[2]).right_zero_pad(3),
            SequenceError,
            "pad the train batch",
        ),
    ],
)
def test_fragments_that_do_not_identify_episodes_are_rejected(
    fragment: Any, error: type[Exception], words: str
) -> None:
    aggregator = Aggregator(3, complete_episodes=True)
    with pytest.raises(error, match=words):
        aggregator.add(fragment)
    assert (aggregator.fragments, aggregator.env_steps, aggregator.nbytes) == (0, 0, 0)


def test_environment_steps_without_rows_are_counted() -> None:
    aggregator = Aggregator(4, "env_steps", complete_episodes=True)
    aggregator.add(MultiAgentBatch({}, 2))
    aggregator.add(MultiAgentBatch({"a": steps(0, 2, done=True)}, 3))
    actual = [*aggregator.batches(), aggregator.build_and_reset()]
    assert sum(batch.count for batch in actual) == 5


def test_episodes_may_have_ids_of_any_kind() -> None:
    for ids in (np.array(["x", "y"], object), np.array(["x", "y"]), np.array([0.5, 1.5])):
        fragments = [pair(0, 3, eps_id=i, done=True) for i in range(2)]
        for fragment, eps_id in zip(fragments, ids, strict=True):
            for part in fragment.policy_batches.values():
                part["eps_id"] = np.full(len(part), eps_id, ids.dtype)
        for aggregator in (Aggregator(6, complete_episodes=True), Aggregator(6)):
            for fragment in fragments:
                aggregator.add(fragment)
            assert aggregator.episodes == 2
            assert list(aggregator.batches()) == fragments


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(ValueError, match="a whole number from 1, got 0"):
        Aggregator(0)
    with pytest.raises(ValueError, match="'steps'"):
        Aggregator(5, "steps")  # type: ignore[arg-type]


def collected(seed: int, batch_size: int) -> list[dict[str, Any]]:
    """Return the train batches of two collectors' fragments, without random ids."""
    aggregator = Aggregator(batch_size)
    collectors = [
        MultiAgentCollector("random", make_environment("mpe2/simple_tag_v3"), seed=seed),
        MultiAgentCollector("random", make_environment("mpe2/simple_tag_v3"), seed=seed + 1),
    ]
    actual: list[Any] = []
    for env_steps in (17, 30, 9):
        for collector in collectors:
            aggregator.add(collector.collect(n_step=env_steps).batch)
            actual += aggregator.batches()
    actual.append(aggregator.build_and_reset())
    assert sum(batch.agent_steps() for batch in actual) == 2 * 4 * 56
    return [
        {policy: [part["obs"].tolist(), part["rewards"].tolist()] for policy, part in batch.items()} for batch in actual
    ]


def test_batches_do_not_depend_on_episode_ids() -> None:
    assert collected(1, 50) == collected(1, 50)


def test_episodes_are_counted_once_for_any_fragment_boundaries() -> None:
    collector, aggregator = MultiAgentCollector("random", arena.Relay(), seed=0), Aggregator()
    for env_steps in (3, 5, 1, 2, 9, 12):
        aggregator.add(collector.collect(n_step=env_steps).batch)
    assert aggregator.episodes == 4
    actual = episode_statistics(aggregator.build_and_reset())
    assert actual is not None
    assert actual.episodes == 4


def test_without_a_size_everything_is_one_batch() -> None:
    aggregator = Aggregator()
    fragments = [pair(0, 2), pair(2, 3, done=True)]
    for fragment in fragments:
        aggregator.add(fragment)
    assert (aggregator.fragments, aggregator.env_steps, aggregator.agent_steps, aggregator.episodes) == (2, 5, 10, 1)
    assert aggregator.nbytes == sum(fragment.size_bytes() for fragment in fragments)
    assert not list(aggregator.batches())
    assert aggregator.build_and_reset() == concat_samples(fragments)
    assert aggregator.build_and_reset() == MultiAgentBatch({}, 0)


def test_fragments_of_one_row_shape_are_joined_to_ragged_ones() -> None:
    aggregator = Aggregator(None)
    parts = ([[1], [2, 3]], np.array([[4, 5]]), [[], []], [[], [6]])
    for rows in parts:
        aggregator.add(SampleBatch(ids=rows, eps_id=[0] * len(rows)))
    batch = aggregator.build_and_reset()
    assert (batch["ids"].kind, batch["ids"].dtype) == ("ragged", np.int64)
    assert [row.tolist() for row in batch["ids"]] == [[1], [2, 3], [4, 5], [], [], [], [6]]
    aggregator.add(SampleBatch(ids=[[], [1]], eps_id=[0, 0], ragged="ids"))
    with pytest.raises(ColumnMismatchError, match="column 'ids'"):
        aggregator.add(SampleBatch(ids=[[], [0.5]], eps_id=[0, 0], ragged="ids"))


@given(st.data())
def test_small_train_batches_agree_with_the_general_split(data: st.DataObject) -> None:
    """Batches copied together from one fragment have the same rows as batches split one by one."""
    fragments: list[Any] = []
    for number in range(data.draw(st.integers(1, 3))):
        length, agents = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
        policies = {}
        for agent in range(agents):
            first = data.draw(st.integers(0, length - 1)) if agent else 0
            count = length - first
            rows = SampleBatch(eps_id=[number] * count, t=np.arange(first, length), agent_index=[agent] * count)
            policies[f"p{agent % 2}"] = concat_samples([policies.get(f"p{agent % 2}", SampleBatch()), rows])
        fragments.append(MultiAgentBatch(policies, length) if data.draw(st.booleans()) else policies["p0"])
    size, mode = data.draw(st.integers(1, 12)), data.draw(st.sampled_from(["agent_steps", "env_steps"]))
    together, apart = Aggregator(size, mode), Aggregator(size, mode)
    apart._copy_batches = lambda: False  # type: ignore[method-assign]
    for fragment in fragments:
        together.add(fragment)
        apart.add(fragment)
    pairs = list(zip(together.batches(), apart.batches(), strict=True))
    remaining = together.build_and_reset(), apart.build_and_reset()
    for left, other in (*pairs, remaining):
        assert type(left) is type(other)
        assert left.env_steps() == other.env_steps()
        parts = zip(
            left.as_multi_agent().policy_batches.items(), other.as_multi_agent().policy_batches.items(), strict=True
        )
        for (policy, rows), (same, others) in parts:
            assert policy == same
            assert {name: rows[name].tolist() for name in rows} == {name: others[name].tolist() for name in others}
    assert (together.env_steps, together.agent_steps, together.fragments, together.nbytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(100))
def test_finished_episodes_agree_with_sorted_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policies = {}
    flags = str(rng.choice(["eps_done", "dones", "terminateds", "none"]))
    for policy in range(int(rng.integers(1, 4))):
        count = int(rng.integers(0 if policy else 1, 12))
        columns: dict[str, Any] = {"eps_id": rng.integers(0, 4, count) * 7, "t": rng.integers(0, 4, count)}
        if flags in ("eps_done", "dones"):
            columns["dones"] = rng.random(count) < 0.5
        if flags == "eps_done":
            columns["eps_done"] = rng.random(count) < 0.3
        if flags == "terminateds":
            columns |= {"terminateds": rng.random(count) < 0.4, "truncateds": rng.random(count) < 0.3}
        policies[str(policy)] = SampleBatch(columns)
    ends, numbered = episode_ends(policies), number_steps(policies)
    assert numbered is not None
    step = np.concatenate(list(numbered.units.values()))
    finished = finished_by_number(policies, StepNumbers(step, numbered.episode))
    if ends is None or finished is None:
        assert ends is finished is None
        assert flags == "none"
        return
    assert finished.tolist() == ends.finished[np.searchsorted(ends.ids, numbered.ids)].tolist()


@pytest.mark.parametrize("seed", range(60))
def test_distinct_ids_agree_with_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 200))
    dtype = rng.choice(["i8", "u8", "i4", "f8"])
    limit = int(rng.choice([1, 5, 1 << 62])) if dtype != "i4" else 9
    ids = rng.integers(0, limit, count).astype(dtype).repeat(int(rng.integers(1, 30)))
    for actual, expected in zip(distinct_ids(ids), np.unique(ids, return_index=True, return_inverse=True), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.tolist() == expected.tolist()
