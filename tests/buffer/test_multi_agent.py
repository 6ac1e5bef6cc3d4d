"""Multi-agent buffers: stored rows, sampled rows and rows of the same environment step."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.buffer.env_steps import EnvSteps
from samplebatch.buffer.extending import Tail, find_streams
from samplebatch.errors import (
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    EmptyBufferError,
    PolicyNotFoundError,
    SampleBatchError,
    SequenceError,
    StorageError,
)
from tests.buffer.oracle import laid_out

Row = tuple[int, int, int, int, bool, bool]
"""Number, episode, agent, time, and both flags."""


def rows_of(rows: Sequence[Row]) -> SampleBatch:
    """Return rows as a batch; all values follow from the row numbers."""
    number, episode, agent, t, terminated, truncated = (np.array(part) for part in zip(*rows, strict=True))
    infos = np.empty(len(rows), object)
    infos[:] = [{"n": n} for n in number.tolist()]
    return SampleBatch(
        obs={"x": number, "y": np.stack([number, -number], 1).astype(np.float32)},
        new_obs={"x": number + 1, "y": np.stack([number + 1, -number - 1], 1).astype(np.float32)},
        actions=number % 5,
        rewards=(number / 4).astype(np.float32),
        terminateds=terminated.astype(bool),
        truncateds=truncated.astype(bool),
        infos=infos,
        eps_id=episode,
        agent_index=agent,
        t=t,
        logp=number * 0.5,
    )


class World:
    """Several environments with several agents; policies change between agents."""

    def __init__(self, seed: int, envs: int = 2, agents: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.number = 0
        self.episodes = 0
        self.agents = agents
        self.running: dict[int, tuple[int, int]] = {env: self.new_episode() for env in range(envs)}

    def new_episode(self) -> tuple[int, int]:
        self.episodes += 1
        return self.episodes * 7, 0

    def fragment(self, steps: int, *, shuffled: bool = False) -> tuple[MultiAgentBatch, dict[str, list[Row]]]:
        """Step every environment; return the batch, and the rows of each policy in stored order."""
        rows: dict[str, list[Row]] = {}
        count = 0
        for _ in range(steps):
            for env, (episode, t) in list(self.running.items()):
                count += 1
                ended = self.rng.random() < 0.15
                how = bool(self.rng.random() < 0.5)
                for agent in range(self.agents):
                    if agent and self.rng.random() < 0.1:
                        continue  # absent for a step
                    policy = "even" if (agent + episode) % 2 == 0 else "odd"
                    row = (self.number, episode, agent, t, ended and how, ended and not how)
                    rows.setdefault(policy, []).append(row)
                    self.number += 10
                self.running[env] = self.new_episode() if ended else (episode, t + 1)
        if shuffled:
            for part in rows.values():
                self.rng.shuffle(part)
        return MultiAgentBatch({policy: rows_of(part) for policy, part in rows.items()}, count), rows


def in_streams(rows: list[Row]) -> list[list[Row]]:
    """Split rows into runs of one agent in one episode without gaps in time."""
    streams: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        streams.setdefault(row[1:3], []).append(row)
    cut: list[list[Row]] = []
    for stream in streams.values():
        stream.sort(key=lambda row: row[3])
        cut.append([])
        for row in stream:
            if cut[-1] and row[3] != cut[-1][-1][3] + 1:
                cut.append([])
            cut[-1].append(row)
    return cut


def numbers(batch: SampleBatch) -> list[int]:
    return np.asarray(batch["obs.x"]).tolist()


def check_rows(batch: SampleBatch, added: dict[int, Row]) -> None:
    """Compare sampled rows with the added rows."""
    expected = rows_of([added[number] for number in numbers(batch)])
    for name in expected.column_names:
        actual, reference = batch[name], expected[name]
        assert actual.dtype == reference.dtype, name
        assert actual.tolist() == reference.tolist(), name
    assert set(batch.column_names) == set(expected.column_names)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ignore_obs_next", [False, True])
def test_added_rows_are_stored_and_sampled(seed: int, shuffled: bool, ignore_obs_next: bool) -> None:
    size = 40
    world, buf = World(seed), MultiAgentReplayBuffer(size, ignore_obs_next=ignore_obs_next)
    added: dict[str, list[Row]] = {}
    for round_ in range(8):
        batch, rows = world.fragment(1 + (seed + round_) % 4, shuffled=shuffled)
        before = laid_out({policy: dict(part.items()) for policy, part in batch.items()})
        buf.add(batch)
        assert laid_out({policy: dict(part.items()) for policy, part in batch.items()}) == before
        for policy, part in rows.items():
            added.setdefault(policy, []).extend(row for stream in in_streams(part) for row in stream)
    assert len(buf) == sum(min(len(rows), size) for rows in added.values())
    all_rows = buf.sample(0).batch
    for policy, rows in added.items():
        assert len(numbers(all_rows[policy])) == min(len(rows), size)
        by_number = {row[0]: row for row in rows}
        if not ignore_obs_next:
            check_rows(all_rows[policy], by_number)
            check_rows(buf.sample(32).batch[policy], by_number)
        else:
            following(all_rows[policy])
    sampled = buf.sample(16).batch
    assert sampled.env_steps() == 16
    assert {policy: part.count for policy, part in sampled.items()} == dict.fromkeys(added, 16)


def following(batch: SampleBatch) -> None:
    """Check next observations that are not stored; at a termination, they equal the observation itself."""
    number = np.asarray(batch["obs.x"])
    after = np.asarray(batch["new_obs.x"])
    ended = np.asarray(batch["terminateds"])
    valid = set(number.tolist())
    for n, m, over in zip(number.tolist(), after.tolist(), ended.tolist(), strict=True):
        # Of rows that follow each other it is the observation of the next one, which here has another number.
        assert m == n if over else m == n + 1 or (m in valid and m != n)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shuffled", [False, True])
def test_neighbouring_rows_belong_to_the_same_agent(seed: int, shuffled: bool) -> None:
    world, buf = World(seed, envs=3), MultiAgentReplayBuffer(60)
    for _ in range(7):
        buf.add(world.fragment(3, shuffled=shuffled)[0])
    for policy, part in buf.buffers.items():
        rows, after = part[:], part[part.next(part.sample_indices(0))]
        moved = part.next(part.sample_indices(0)) != part.sample_indices(0)
        for name in ("eps_id", "agent_index"):
            assert (rows[name][moved] == after[name][moved]).all(), policy
        assert (rows.t[moved] + 1 == after.t[moved]).all()
        # Within a fragment nothing is cut that could go on.
        assert moved.mean() > 0.2
        returns = buf.sample(0, n_step=3, gamma=0.5).batch[policy]
        by_key = {
            tuple(key): n for *key, n in zip(rows.eps_id, rows.agent_index, rows.t, range(len(rows)), strict=True)
        }
        indices = part.sample_indices(0)
        position = {index: i for i, index in enumerate(indices.tolist())}
        for i, index in enumerate(indices.tolist()):
            total, at, k = 0.0, index, 0
            while True:
                total += 0.5**k * rows.rew[position[at]]
                k += 1
                if k == 3 or part.next(at) == at:
                    break
                at = int(part.next(at))
            assert returns["returns"][i] == total
            last = position[at]
            assert returns["discount"][i] == (0.0 if rows.terminated[last] else 0.5**k)
            assert returns["new_obs.x"][i] == rows.obs_next.x[last]
        assert len(by_key) == len(rows)


def test_a_fragment_continues_the_previous_one() -> None:
    buf = MultiAgentReplayBuffer(10)

    def add(*rows: Row) -> None:
        buf.add(MultiAgentBatch({"p": rows_of(rows)}, len(rows)))

    add((0, 5, 0, 0, False, False), (10, 5, 0, 1, False, False))
    ours = buf.buffers["p"]
    assert (ours.truncated[:2].tolist(), ours.fragment_end[:2].tolist()) == ([False, True], [False, True])
    add((20, 5, 0, 2, False, False))
    assert ours.next([0, 1, 2]).tolist() == [1, 2, 2]
    assert ours.truncated[:3].tolist() == [False, False, True]
    add((30, 5, 1, 3, False, False))  # another agent
    add((40, 5, 1, 5, False, False))  # a step is missing
    add((50, 6, 1, 6, False, False), (60, 5, 1, 6, False, True))  # the second row goes on, so it comes first
    assert ours.obs.x[:7].tolist() == [0, 10, 20, 30, 40, 60, 50]
    assert ours.next(np.arange(7)).tolist() == [1, 2, 2, 3, 5, 5, 6]
    assert ours.truncated[:7].tolist() == [False, False, True, True, False, True, True]
    assert buf.sample(0).batch["p"]["truncateds"].tolist() == [False] * 5 + [True, False]
    assert ours.fragment_end[:7].tolist() == [False, False, True, True, False, False, True]
    buf.reset()
    add((70, 6, 1, 7, False, False))
    assert ours.prev(0) == 0
    assert len(buf) == 1


def test_streams() -> None:
    full = find_streams(3, None, None, None)
    assert (full.order, full.ends.tolist(), full.tail, full.goes_on) == (None, [False, False, True], None, False)
    names = np.array(["b", "b", "a"])
    assert find_streams(3, names, None, None).ends.tolist() == [False, True, True]
    assert find_streams(3, names, np.array([0, 1, 0]), np.arange(3)).ends.tolist() == [True, True, True]
    actual = find_streams(3, np.array([1, 1, 1]), None, np.array([5, 3, 4]), Tail(1, None, 4))
    assert actual.order is not None
    assert (actual.order.tolist(), actual.goes_on, actual.tail) == ([1, 2, 0], False, Tail(1, None, 5))
    assert find_streams(0, np.zeros(0, int), None, None).goes_on is False


# In lockstep


def whole_steps(buf: MultiAgentReplayBuffer, added: dict[tuple[int, int], dict[str, list[Row]]]) -> list[Any]:
    """Return the rows of every environment step whose rows are all stored, in order."""
    stored = {policy: set(part.obs.x[part.sample_indices(0)].tolist()) for policy, part in buf.buffers.items()}
    return [
        rows
        for rows in added.values()
        if all(row[0] in stored[policy] for policy, part in rows.items() for row in part)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [30, {"even": 9, "odd": 50}])
@pytest.mark.parametrize("shuffled", [False, True])
def test_steps_of_the_environment(seed: int, size: Any, shuffled: bool) -> None:
    world, buf = World(seed), MultiAgentReplayBuffer(size, lockstep=True)
    added: dict[tuple[int, int], dict[str, list[Row]]] = {}
    for round_ in range(12):
        batch, rows = world.fragment(1 + (seed * round_) % 7, shuffled=shuffled)
        buf.add(batch)
        keys = sorted({row[1:4:2] for part in rows.values() for row in part})
        for key in keys:
            added[key] = {policy: [row for row in part if row[1:4:2] == key] for policy, part in rows.items()}
        expected = whole_steps(buf, added)
        assert buf.env_steps() == len(expected)
        all_rows = buf.sample(0).batch
        assert all_rows.env_steps() == len(expected)
        for policy in buf.buffers:
            reference = [sorted(row[0] for row in rows.get(policy, ())) for rows in expected]
            actual = iter(numbers(all_rows[policy]) if policy in all_rows else [])
            assert [sorted(next(actual) for _ in part) for part in reference] == reference
            assert next(actual, None) is None
        again = pickle.loads(pickle.dumps(buf))
        if len(expected):
            sampled, other = buf.sample(5).batch, again.sample(5).batch
            assert {policy: numbers(part) for policy, part in sampled.items()} == {
                policy: numbers(part) for policy, part in other.items()
            }
            steps = {key for _, part in sampled.items() for key in zip(part["eps_id"], part["t"], strict=True)}
            assert len(steps) <= 5


def test_steps_are_equally_likely() -> None:
    world, buf = World(4), MultiAgentReplayBuffer({"even": 20, "odd": 35}, lockstep=True)
    for _ in range(10):
        buf.add(world.fragment(3)[0])
    n = 30_000
    batch = buf.sample(n).batch
    every = buf.sample(0).batch
    for policy, part in every.items():
        expected = Counter(zip(part["eps_id"].tolist(), part["t"].tolist(), strict=True))
        actual = Counter(zip(batch[policy]["eps_id"].tolist(), batch[policy]["t"].tolist(), strict=True))
        assert set(actual) == set(expected)
        share = n / every.env_steps()
        for key, rows in expected.items():
            assert abs(actual[key] / rows - share) < 5 * share**0.5
    shuffled = buf.sample(None).batch
    assert shuffled.env_steps() == every.env_steps()
    assert sorted(numbers(shuffled["even"])) == sorted(numbers(every["even"]))
    assert buf.sample(-1).batch.env_steps() == 0


def plain(n: int, first: int = 0) -> SampleBatch:
    at = np.arange(first, first + n)
    return SampleBatch(obs=at, actions=at, rewards=at * 1.0, terminateds=at < 0)


def test_steps_without_times_are_counted() -> None:
    buf = MultiAgentReplayBuffer(8, lockstep=True)
    buf.add(MultiAgentBatch({"a": plain(5), "b": plain(5, 100)}, 5))
    buf.add(MultiAgentBatch({"a": plain(5, 5), "b": plain(5, 105)}, 5))
    assert buf.env_steps() == 8
    batch = buf.sample(50).batch
    assert (batch["a"]["obs"] + 100 == batch["b"]["obs"]).all()
    before = laid_out(buf.state_dict())
    with pytest.raises(SequenceError, match="policy 'b' must have one row for each of 3 environment steps"):
        buf.add(MultiAgentBatch({"a": plain(3), "b": plain(2)}, 3))
    assert laid_out(buf.state_dict()) == before


def test_fragments_longer_than_the_buffer() -> None:
    for lockstep in (False, True):
        buf = MultiAgentReplayBuffer({"a": 4, "b": 9}, lockstep=lockstep)
        buf.add(MultiAgentBatch({"a": plain(7), "b": plain(7)}, 7))
        assert buf.buffers["a"][:].obs.tolist() == [3, 4, 5, 6]
        assert len(buf.buffers["b"]) == 7
        assert buf.env_steps() == 4 * lockstep
        assert sorted(buf.sample(0).batch["a"]["obs"].tolist()) == [3, 4, 5, 6]


def test_memory_of_overwritten_environment_steps_is_released() -> None:
    steps, rng = EnvSteps(), np.random.default_rng(0)
    size, next_slot = 100, 0
    for round_ in range(2000):
        slots = (next_slot + np.arange(3)) % size
        steps.lose("a", slots[slots < 3 * round_])
        steps.add(3, {"a": (np.arange(3), slots, size)})
        next_slot = (next_slot + 3) % size
    assert len(steps) in range(97, 101)
    assert len(pickle.dumps(steps)) < 12_000
    steps.lose("a", np.arange(size - 1))
    assert len(steps) == 1
    assert len(set(steps.draw(20, rng).tolist())) == 1
    steps.lose("a", np.arange(size))
    with pytest.raises(EmptyBufferError):
        steps.draw(1, rng)


# Priorities


def test_priorities() -> None:
    buf = MultiAgentReplayBuffer(8, kind=PrioritizedReplayBuffer, alpha=1.0, beta=1.0)
    buf.add(MultiAgentBatch({"a": plain(6), "b": plain(8)}, 8))
    batch = buf.sample(16).batch
    assert {"weights", "generation", "batch_indexes"} <= set(batch["a"].column_names)
    assert batch["a"]["obs"].tolist() == batch["a"]["batch_indexes"].tolist()
    buf.add(MultiAgentBatch({"a": plain(4, 50)}, 4))
    buf.update_priorities(batch, {"a": np.full(16, 9.0), "b": np.full(16, 0.5)})
    weights = buf.buffers["a"].weight
    sampled = set(batch["a"]["batch_indexes"].tolist())
    for slot in range(8):
        # Slots 6, 7, 0 and 1 have been written over.
        assert weights[slot] == pytest.approx(9.0 if slot in sampled - {0, 1, 6, 7} else 1.0)
    with pytest.raises(PolicyNotFoundError):
        buf.update_priorities(batch, {"c": np.ones(16)})
    uniform = MultiAgentReplayBuffer(8)
    uniform.add(MultiAgentBatch({"a": plain(6)}, 6))
    with pytest.raises(ColumnNotFoundError, match="batch_indexes"):
        uniform.update_priorities(uniform.sample(2).batch, {"a": np.ones(2)})
    with pytest.raises(ColumnTypeError, match="prioritized"):
        uniform.update_priorities(batch, {"a": np.ones(16)})


# Carrying on, seeds


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("how", ["pickle", "state"])
def test_copies_and_restored_buffers_continue_with_the_same_draws(lockstep: bool, how: str) -> None:
    world, buf = World(1), MultiAgentReplayBuffer(25, lockstep=lockstep)
    for _ in range(5):
        buf.add(world.fragment(3)[0])
    if how == "pickle":
        again = pickle.loads(pickle.dumps(buf))
    else:
        again = MultiAgentReplayBuffer(25, lockstep=lockstep)
        again.load_state_dict(pickle.loads(pickle.dumps(buf.state_dict())))
    for _ in range(4):
        batch = world.fragment(2)[0]
        buf.add(batch)
        again.add(batch)
        for size in (0, 6):
            ours, theirs = buf.sample(size).batch, again.sample(size).batch
            assert ours.env_steps() == theirs.env_steps()
            for policy, part in ours.items():
                assert part == theirs[policy]
    assert laid_out(buf.state_dict()) == laid_out(again.state_dict())


def test_draws_do_not_depend_on_the_order_of_policies() -> None:
    def draw(seed: int, *order: str) -> dict[str, list[int]]:
        buf = MultiAgentReplayBuffer(30, seed=seed)
        for policy in order:
            buf.add(MultiAgentBatch({policy: plain(20)}, 20))
        return {policy: buf.sample(10).batch[policy]["obs"].tolist() for policy in sorted(order)}

    assert draw(1, "a", "b") == draw(1, "b", "a")
    assert draw(1, "a", "b") != draw(2, "a", "b")
    actual = draw(1, "a", "b")
    assert actual["a"] != actual["b"]


# What is refused


def without(name: str) -> SampleBatch:
    return SampleBatch({key: value for key, value in plain(3).items() if key != name})


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (without("actions"), ColumnNotFoundError, "policy 'b' must have column 'actions'"),
        (without("terminateds"), ColumnNotFoundError, "'terminateds'"),
        (SampleBatch(dict(plain(3).items()) | {"actions": [0.5, 1.0, 2.0]}), SampleBatchError, "'act'"),
        (SampleBatch(dict(plain(3).items()) | {"obs": np.zeros((3, 2), int)}), ColumnMismatchError, "'obs'"),
        (SampleBatch(dict(plain(3).items()) | {"fragment_end": [1, 2, 3]}), ColumnMismatchError, "fragment_end"),
        (SampleBatch(dict(plain(3).items()) | {"seq_lens": [2, 1]}), SequenceError, "sequences"),
    ],
)
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_rejected_batch_changes_nothing(bad: SampleBatch, error: Any, match: str, lockstep: bool) -> None:
    buf = MultiAgentReplayBuffer(8, lockstep=lockstep)
    buf.add(MultiAgentBatch({"a": plain(3), "b": plain(3)}, 3))
    before = laid_out(buf.state_dict())
    with pytest.raises(error, match=match):
        buf.add(MultiAgentBatch({"new": plain(3), "a": plain(3), "b": bad}, 3))
    assert laid_out(buf.state_dict()) == before
    assert "new" not in buf
    assert list(buf) == ["a", "b"]


def test_invalid_arguments_and_rows_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="folder"):
        MultiAgentReplayBuffer(8, storage=tmp_path / "x")
    with pytest.raises((ColumnTypeError, TypeError)):
        MultiAgentReplayBuffer(8, kind=VectorReplayBuffer, buffer_num=2)
    buf = MultiAgentReplayBuffer({"walker": 8})
    with pytest.raises(PolicyNotFoundError, match="did you mean 'walker'"):
        buf.add(MultiAgentBatch({"walkers": plain(3)}, 3))
    for empty in (buf, MultiAgentReplayBuffer(8, lockstep=True)):
        with pytest.raises(EmptyBufferError):
            empty.sample(3)
        assert empty.sample(0).batch.env_steps() == 0
        empty.add(MultiAgentBatch({"walker": plain(3)[:0]}, 0))
        assert len(empty) == 0
    assert repr(buf) == "MultiAgentReplayBuffer()"
    buf.add(MultiAgentBatch({"walker": plain(3)}, 3))
    assert repr(buf) == "MultiAgentReplayBuffer(walker: 3/8)"
    assert buf.nbytes > 0


def test_integer_flags_become_bool_and_rewards_keep_their_dtype() -> None:
    buf = MultiAgentReplayBuffer(8)
    at = np.arange(3)
    rows = {"obs": at, "actions": at, "rewards": at.astype(np.float32), "dones": np.array([0, 1, 0])}
    buf.add(MultiAgentBatch({"a": SampleBatch(rows)}, 3))
    actual = buf.sample(0).batch["a"]
    assert set(actual.column_names) == set(rows)
    assert actual["dones"].tolist() == [False, True, False]
    assert actual["rewards"].dtype == np.float32
    assert buf.buffers["a"].next(np.arange(3)).tolist() == [1, 1, 2]
