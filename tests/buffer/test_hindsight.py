"""Hindsight buffers: substituted goals and recomputed rewards."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    HERReplayBuffer,
    HERReplayBufferManager,
    HERVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
)
from samplebatch.errors import ArgumentError, FormatError, SampleBatchError, StorageError
from tests.buffer.oracle import laid_out, step, steps
from tests.optional import torch

NO_GOAL = -1.0


def distance(achieved: Any, desired: Any) -> Any:
    """Return rewards that encode both goals."""
    return (achieved[..., 0] * 1000 + desired[..., 0]).astype(float)


def at(n: float) -> dict[str, Any]:
    """Return the observation at position n, which achieves goal n."""
    return {"observation": np.array([n, 0.5]), "achieved_goal": np.array([n]), "desired_goal": np.array([NO_GOAL])}


class Walk:
    """Source of steps from one position to the next; records which positions follow each stored step."""

    def __init__(self, buf: Any, ends: str, env: int | None = None) -> None:
        self.reached: dict[int, list[int]] = {}
        position, running = 1000 * (env or 0), []
        for end in ends:
            row = {"obs": at(position), "obs_next": at(position + 1), "terminated": end == "t", "truncated": end == "c"}
            if env is None:
                buf.add(step(position, rew=0.25, **row))
            else:
                many = {name: [value] for name, value in row.items()}
                buf.add(steps([position], rew=[0.25], **many), buffer_ids=[env])
            running.append(position)
            position += 1
            for earlier in running:
                self.reached.setdefault(earlier, []).append(position)
            if end in "tc":
                running, position = [], position + 10


ENDS = "rrtrrrcrtrrrrrcrr"


def made(size: int = 12, *, horizon: int = 20, **options: Any) -> tuple[Any, dict[int, list[int]]]:
    buf = HERReplayBuffer(size, distance, horizon, **options)
    return buf, Walk(buf, ENDS).reached


OPTIONS = pytest.mark.parametrize("options", [{}, {"ignore_obs_next": True}, {"stack_num": 3}])


def newest(values: Any, options: dict[str, Any]) -> np.ndarray:
    return values[:, -1, 0] if options.get("stack_num", 1) > 1 else values[:, 0]


@OPTIONS
@pytest.mark.parametrize("size", [6, 12, 40])
@pytest.mark.parametrize("horizon", [1, 2, 20])
def test_goals_were_achieved_later_in_the_episode(size: int, horizon: int, options: dict[str, Any]) -> None:
    buf, reached = made(size, horizon=horizon, future_k=np.inf, **options)
    allowed = {position: set(later[:horizon]) for position, later in reached.items()}
    if options.get("ignore_obs_next"):
        # Of a terminated step the observation that came next is not known.
        for index in np.flatnonzero(buf.terminated[: len(buf)]):
            final = int(buf.obs.achieved_goal[index, 0])
            for later in allowed.values():
                if final + 1 in later:
                    later.remove(final + 1)
                    later.add(final)
    observed: dict[int, set[int]] = {}
    for _ in range(40):
        batch, indices = buf.sample(160)
        places = newest(batch.obs.achieved_goal, options)
        assert places.tolist() == batch.act.tolist() == buf.obs.achieved_goal[indices][:, 0].tolist()
        goals = newest(batch.obs.desired_goal, options)
        assert goals.tolist() == newest(batch.obs_next.desired_goal, options).tolist()
        assert batch.rew.tolist() == (newest(batch.obs_next.achieved_goal, options) * 1000 + goals).tolist()
        for location, goal in zip(places.tolist(), goals.tolist(), strict=True):
            observed.setdefault(int(location), set()).add(int(goal))
    # Steps whose episode goes on past what the ring holds cannot be told from those at its end.
    assert observed == {position: allowed[position] for position in observed}
    assert len(observed) == len(buf)


def test_goals_are_equally_likely() -> None:
    buf, reached = made(12, future_k=4.0)
    counts: dict[tuple[int, int], int] = {}
    rounds, n = 40, 12_000
    for _ in range(rounds):
        batch, _ = buf.sample(n)
        pairs, actual = np.unique(
            np.stack([batch.act, batch.obs.desired_goal[:, 0].astype(int)]), axis=1, return_counts=True
        )
        for pair, count in zip(pairs.T.tolist(), actual.tolist(), strict=True):
            counts[tuple(pair)] = counts.get(tuple(pair), 0) + count
    total = rounds * n
    for position in {pair[0] for pair in counts}:
        later = reached[position]
        expected = {goal: 0.75 / 12 / len(later) for goal in later} | {int(NO_GOAL): 0.25 / 12}
        assert {goal for result, goal in counts if result == position} == set(expected)
        for goal, likelihood in expected.items():
            spread = (total * likelihood) ** 0.5
            assert abs(counts[position, goal] - total * likelihood) < 5 * spread


def test_rows_that_keep_their_goal_are_unchanged() -> None:
    buf, _ = made(future_k=2.0)
    batch, indices = buf.sample(4000)
    retained = batch.obs.desired_goal[:, 0] == NO_GOAL
    assert abs(retained.mean() - 0.5) < 0.05
    assert buf.future_p == 0.5
    assert (batch.rew[retained] == 0.25).all()
    assert batch[retained] == buf[indices[retained]]
    assert (batch.rew[~retained] != 0.25).all()
    always, _ = made(future_k=1.0)
    assert always.future_p == 0.0
    batch, indices = always.sample(100)
    assert batch == always[indices]


@OPTIONS
@pytest.mark.parametrize("n_step", [1, 2, 3, 50])
def test_steps_that_represent_several(n_step: int, options: dict[str, Any]) -> None:
    gamma = 0.5
    buf, _ = made(12, future_k=3.0, **options)
    unchanged, indices = ReplayBuffer.sample(buf, 0, n_step=n_step, gamma=gamma)
    valid = dict(zip(indices.tolist(), range(len(indices)), strict=True))
    for _ in range(20):
        batch, indices = buf.sample(32, n_step=n_step, gamma=gamma)
        for i, index in enumerate(indices.tolist()):
            before = valid[index]
            assert batch.discount[i] == unchanged.discount[before]
            assert batch.obs_next.observation[i].tolist() == unchanged.obs_next.observation[before].tolist()
            goal = newest(batch.obs.desired_goal, options)[i]
            assert (batch.obs_next.desired_goal[i] == goal).all()
            assert (batch.obs.desired_goal[i] == goal).all()
            total, at_ = 0.0, index
            for k in range(n_step):
                row = buf[[at_]]
                brought = newest(row.obs_next.achieved_goal, options)[0] * 1000 + goal
                total += gamma**k * (brought if goal != NO_GOAL else 0.25)
                if k == 0:
                    assert batch.rew[i] == (brought if goal != NO_GOAL else 0.25)
                if buf.next(at_) == at_:
                    break
                at_ = int(buf.next(at_))
            assert batch.returns[i] == pytest.approx(total)


def test_sampling_changes_only_the_generator_of_the_buffer() -> None:
    buf, _ = made()
    before = laid_out({name: getattr(buf, name) for name in ("obs", "obs_next", "rew", "done")})
    rows = buf[:]
    generator_state = buf._rng.bit_generator.state
    buf.rewrite_transitions(np.arange(12))
    assert buf._rng.bit_generator.state != generator_state
    buf.sample(64)
    buf.restore_cache()
    assert laid_out({name: getattr(buf, name) for name in ("obs", "obs_next", "rew", "done")}) == before
    assert buf[:] == rows


def test_rewriting_given_rows() -> None:
    buf, reached = made(future_k=np.inf)
    rows = buf.rewrite_transitions([3, -1])
    assert rows.act.tolist() == buf.act[[3, -1]].tolist()
    assert all(goal in reached[position] for position, goal in zip(rows.act, rows.obs.desired_goal[:, 0], strict=True))
    with pytest.raises(IndexError):
        buf.rewrite_transitions([12])


@pytest.mark.parametrize("kind", [HERVectorReplayBuffer, HERReplayBufferManager])
def test_several_rings(kind: Any) -> None:
    if kind is HERVectorReplayBuffer:
        buf = HERVectorReplayBuffer(24, 3, distance, 20, future_k=np.inf)
    else:
        buf = HERReplayBufferManager([HERReplayBuffer(size, distance, 20, np.inf) for size in (5, 8, 11)])
    reached: dict[int, list[int]] = {}
    for env, ends in enumerate((ENDS, ENDS[4:], "rrr")):
        reached |= Walk(buf, ends, env).reached
    observed: dict[int, set[int]] = {}
    for _ in range(60):
        batch, indices = buf.sample(200)
        assert batch.act.tolist() == buf.act[indices].tolist()
        for position, goal in zip(batch.act.tolist(), batch.obs.desired_goal[:, 0].tolist(), strict=True):
            observed.setdefault(position, set()).add(int(goal))
    assert observed == {location: set(reached[location]) for location in observed}
    assert len(observed) == len(buf)
    assert isinstance(buf, ReplayBufferManager)
    part = buf.buffers[1]
    assert isinstance(part, HERReplayBuffer)
    batch, indices = part.sample(50)
    assert batch.act.tolist() == part.act[indices].tolist()
    assert (batch.obs.desired_goal != NO_GOAL).all()


@pytest.mark.parametrize("kind", ["pickle", "state", "file"])
def test_copies_and_restored_buffers_continue_with_the_same_draws(kind: str, tmp_path: Path) -> None:
    buf, _ = made()
    if kind == "pickle":
        again = pickle.loads(pickle.dumps(buf))
    elif kind == "state":
        again = HERReplayBuffer(12, distance, 20)
        again.load_state_dict(buf.state_dict())
    else:
        buf.save(tmp_path / "her.arrow")
        again = HERReplayBuffer.load(tmp_path / "her.arrow", compute_reward_fn=distance)
    assert (again.horizon, again.future_p) == (20, 0.875)
    for _ in range(3):
        (ours, indices), (theirs, others) = buf.sample(20), again.sample(20)
        assert ours == theirs
        assert indices.tolist() == others.tolist()


@pytest.mark.parametrize("chance", [0.0, 1 / 3, 0.8, 1.0])
def test_the_relabelling_probability_is_configurable(chance: float, tmp_path: Path) -> None:
    buf, _ = made(12)
    buf.future_p = chance
    assert buf.future_p == chance
    batch, _ = buf.sample(4000)
    relabelled = batch.obs.desired_goal[:, 0] != NO_GOAL
    assert abs(relabelled.mean() - chance) < 0.03
    buf.save(tmp_path / "her.arrow")
    again = HERReplayBuffer.load(tmp_path / "her.arrow", compute_reward_fn=distance)
    assert again.future_p == pickle.loads(pickle.dumps(buf)).future_p == chance
    assert HERReplayBufferManager([buf]).buffers[0].future_p == chance
    buf.future_k = 4.0
    assert buf.future_p == 0.75
    buf.horizon = 1
    for name, wrong in (("future_p", 1.5), ("future_p", np.nan), ("horizon", 0), ("future_k", 0.5)):
        with pytest.raises(ArgumentError, match=f"{name} must be"):
            setattr(buf, name, wrong)
    assert (buf.horizon, buf.future_k) == (1, 4.0)


@pytest.mark.parametrize("absent", ["horizon", "future_k", "compute_reward_fn"])
def test_a_pickle_without_an_attribute_of_hindsight_is_rejected(absent: str) -> None:
    buf, _ = made()
    state = buf.__getstate__()
    del state[absent]
    with pytest.raises(FormatError, match=f"must have '{absent}', got none"):
        HERReplayBuffer.__new__(HERReplayBuffer).__setstate__(state)


def test_goals_of_other_kinds() -> None:
    buf = HERReplayBuffer(8, lambda a, d: (a == d).all(-1).double(), horizon=4, future_k=np.inf)
    for n in range(5):
        obs, after = (
            {
                "observation": torch.tensor([position]),
                "achieved_goal": torch.tensor([position, position]),
                "desired_goal": torch.tensor([99, 99]),
            }
            for position in (n, n + 1)
        )
        buf.add(step(n, obs=obs, obs_next=after))
    batch, _ = buf.sample(100)
    assert isinstance(batch.obs.desired_goal, torch.Tensor)
    assert (batch.obs.desired_goal[:, 0].numpy() > batch.act).all()
    assert set(batch.rew.tolist()) == {0.0, 1.0}
    narrow = HERReplayBuffer(8, lambda a, d: np.zeros(len(a)), horizon=4, future_k=np.inf)
    for wide in (True, False):
        goals = {"achieved_goal": np.array([0.1 if wide else 0.5]), "desired_goal": np.zeros(1, np.float32)}
        narrow.reset()
        narrow.add(step(0, obs=goals, obs_next=goals))
        if wide:
            with pytest.raises(SampleBatchError, match=r"'obs\.desired_goal' must store .* float64 for float32"):
                narrow.sample(4)
        else:
            assert narrow.sample(4)[0].obs.desired_goal.tolist() == [[0.5]] * 4


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ({}, "'obs_next.achieved_goal'"),
        ({"obs_next": at(1)}, "'obs.desired_goal'"),
        ({"obs": at(0), "obs_next": {"achieved_goal": np.zeros(1)}}, "'obs_next.desired_goal'"),
    ],
)
def test_observations_without_goals(rows: dict[str, Any], match: str) -> None:
    buf = HERReplayBuffer(8, distance, horizon=4, future_k=np.inf)
    buf.add(step(0, **rows))
    with pytest.raises(SampleBatchError, match=match):
        buf.sample(4)


def test_invalid_arguments_and_rows_are_rejected(tmp_path: Path) -> None:
    for wrong in ({"horizon": 0}, {"horizon": 3, "future_k": 0.5}, {"horizon": 3, "future_k": float("nan")}):
        with pytest.raises(ValueError, match=r"horizon must|future_k must"):
            HERReplayBuffer(4, distance, **wrong)  # type: ignore[arg-type]
    buf = HERReplayBuffer(4, lambda achieved, desired: np.zeros(3), horizon=4, future_k=np.inf)
    buf.add(step(0, obs=at(0), obs_next=at(1)))
    with pytest.raises(SampleBatchError, match=r"compute_reward_fn must return rewards of shape \(2,\), got \(3,\)"):
        buf.sample(2)
    first = HERReplayBuffer(4, distance, 5)
    for other in (ReplayBuffer(4), HERReplayBuffer(4, distance, 6), HERReplayBuffer(4, lambda a, d: a, 5)):
        with pytest.raises(SampleBatchError, match="the parts"):
            HERReplayBufferManager([first, other])
    with pytest.raises(SampleBatchError, match="buffer_num"):
        HERVectorReplayBuffer(4, 0, distance, 5)
    for make in (
        lambda: HERReplayBuffer(4, distance, 5, storage=tmp_path / "x"),
        lambda: HERVectorReplayBuffer(4, 2, distance, 5, storage=tmp_path / "x"),
    ):
        with pytest.raises(StorageError, match="compute_reward_fn"):
            make()
        assert not (tmp_path / "x").exists()


# Against Tianshou


def theirs(size: int, future_k: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("tianshou.data").HERReplayBuffer(size, distance, 20, future_k)


@pytest.mark.parametrize("size", [8, 12, 40])
def test_goals_agree_with_tianshou(size: int) -> None:
    """Both libraries draw the same set of goals and compute rewards with the same function."""
    ours, other = HERReplayBuffer(size, distance, 20, np.inf), theirs(size, np.inf)
    Walk(ours, ENDS)
    position = 0
    for end in ENDS:
        rows = {"obs": at(position), "obs_next": at(position + 1), "terminated": end == "t", "truncated": end == "c"}
        other.add(sys.modules["tianshou.data"].Batch({**step(position, rew=0.25).to_dict(), **rows}))
        position += 11 if end in "tc" else 1
    np.random.seed(3)
    recorded: list[set[tuple[int, ...]]] = [set(), set()]
    for _ in range(1500):
        for pairs, buf in zip(recorded, (ours, other), strict=True):
            # There, all steps of an episode get a goal that is ahead of the newest of them.
            batch, _ = buf.sample(2)
            columns = (batch.act, batch.obs.desired_goal[:, 0], batch.obs_next.desired_goal[:, 0], batch.rew)
            pairs |= set(zip(*(column.astype(int).tolist() for column in columns), strict=True))
    assert recorded[0] == recorded[1]


def test_the_number_of_relabelled_steps_agrees_with_tianshou() -> None:
    """Tianshou relabels complete episodes, so episodes of one step are relabelled step by step."""
    future_k, n = 4.0, 400
    ours, other = HERReplayBuffer(n, distance, 20, future_k), theirs(n, future_k)
    make = sys.modules["tianshou.data"].Batch
    for position in range(n):
        rows = {"obs": at(2 * position), "obs_next": at(2 * position + 1), "terminated": True}
        ours.add(step(position, **rows))
        other.add(make({**step(position).to_dict(), **rows}))
    shares = []
    for buf in (ours, other):
        batches = [buf.sample(n)[0] for _ in range(30)]
        shares.append(np.mean([(batch.obs.desired_goal != NO_GOAL).mean() for batch in batches]))
    assert shares[0] == pytest.approx(0.75, abs=0.02)
    assert shares[1] == pytest.approx(0.75, abs=0.02)


def test_a_single_episode_is_relabelled() -> None:
    """Tianshou rounds the number of relabelled episodes down, so a single episode is never relabelled."""
    buf = HERReplayBuffer(10, distance, 20, 8.0)
    Walk(buf, "rrrrrr")
    batch, _ = buf.sample(800)
    assert abs((batch.obs.desired_goal != NO_GOAL).mean() - 0.875) < 0.05


def test_a_sample_of_size_zero() -> None:
    buf, _ = made()
    assert len(buf.sample(-1)[1]) == 0
    assert isinstance(buf.sample(-1, n_step=2)[0], Batch)
    with pytest.raises(SampleBatchError):
        HERReplayBuffer(3, distance, 2).sample(1)


def reach(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -(achieved != desired).any(-1).astype(float)


def goal(n: int) -> dict[str, np.ndarray]:
    return {"observation": np.array([n]), "achieved_goal": np.array([n, n]), "desired_goal": np.array([-1, -1])}


def test_relabelling_does_not_modify_stored_rows() -> None:
    buf = HERReplayBuffer(20, compute_reward_fn=reach, horizon=6, future_k=8.0)
    assert buf.future_p == 1 - 1 / 8
    for n in range(17):
        buf.add(step(n, obs=goal(n), obs_next=goal(n + 1), rew=-1, terminated=n % 5 == 4))
    for _ in range(20):
        batch, _ = buf.sample(12)
    assert (batch.obs.desired_goal != -1).any()
    assert (buf.obs.desired_goal[:17] == -1).all()
    assert (buf.obs_next.desired_goal[:17] == -1).all()
    assert (buf.rew[:17] == -1).all()
    buf.restore_cache()
    assert (buf[:].obs.desired_goal == -1).all()
