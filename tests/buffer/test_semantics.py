"""What the documents leave out, and users of Tianshou's buffers rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    ReplayBufferManager,
    SegmentTree,
    VectorReplayBuffer,
)
from samplebatch.errors import SampleBatchError
from tests.buffer.oracle import step, steps

# What is stored


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("terminated", "truncated"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_done_is_terminated_or_truncated(given: bool, terminated: int, truncated: int) -> None:
    batch = step(0, terminated=terminated, truncated=truncated, done=given)
    before = batch.to_dict()
    buf = ReplayBuffer(3)
    buf.add(batch)
    assert buf.done[0] == (terminated or truncated)
    assert batch.to_dict() == before
    vector = VectorReplayBuffer(6, 2)
    vector.add(steps([0, 1], terminated=[terminated] * 2, truncated=[truncated] * 2, done=[given] * 2))
    assert vector.done[[0, 3]].tolist() == [bool(terminated or truncated)] * 2


@pytest.mark.parametrize("rew", [1, 1.5, np.float32(1.5), np.int8(1), True, np.array([1, 2]), np.ones(3, np.float32)])
def test_rewards_are_float64_and_flags_bool(rew: Any) -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0, rew=rew, terminated=np.int64(1), truncated=0.0))
    assert buf.rew.dtype == np.float64
    assert buf.rew.shape == (4, *np.shape(rew))
    assert buf.rew[0].tolist() == np.asarray(rew, float).tolist()
    assert [buf[0][name].dtype for name in ("terminated", "truncated", "done")] == [bool] * 3


def test_what_does_not_fit_without_loss_is_refused() -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0, act=1, info={"n": np.float32(1)}))
    for lossy in ({"act": 0.7}, {"act": "x"}, {"info": {"n": 0.1}}, {"act": [1, 2]}):
        with pytest.raises(SampleBatchError, match=r"'act'|'info\.n'"):
            buf.add(step(1, **lossy))
    buf.add(step(1, act=2.0, info={"n": 0.5}))
    assert (len(buf), buf.act.tolist(), buf.act.dtype) == (2, [1, 2, 0, 0], np.int64)


def test_new_keys_are_filled_in() -> None:
    buf = ReplayBuffer(4)
    buf.add(step(0))
    buf.add(step(1, info={"lives": 3}, policy={"logits": np.ones(2, np.float32)}, extra=7, name="x"))
    assert buf[:].info.lives.tolist() == [0, 3]
    assert buf[:].policy.logits.tolist() == [[0, 0], [1, 1]]
    assert buf[:].extra.tolist() == [0, 7]
    assert buf[:].name.tolist() == [None, "x"]
    buf.add(step(2))
    assert buf[:].info.lives.tolist() == [0, 3, 0]
    assert buf[:].extra.tolist() == [0, 7, 0]
    assert buf[:].name.tolist() == [None, "x", None]


def test_vector_buffers_keep_extra_keys() -> None:
    """Tianshou's drop them."""
    buf = VectorReplayBuffer(6, 2)
    buf.add(steps([0, 1], extra=[5, 6]))
    assert buf[[0, 3]].extra.tolist() == [5, 6]
    assert buf.buffers[1].extra.tolist() == [6, 0, 0]


# What add returns


def test_add_returns_four_arrays() -> None:
    buf = ReplayBuffer(4)
    for n, end in enumerate([False, False, True, False, True]):
        found = buf.add(step(n, rew=n + 1, terminated=end))
        expected = (
            [n % 4],
            [6.0 if n == 2 else 9.0 if end else 0.0],
            [3 if n == 2 else 2 if end else 0],
            [3 * (n > 2)],
        )
        assert tuple(part.tolist() for part in found) == expected
        assert [part.dtype.kind for part in found] == list("ifii")


def test_returns_of_vector_rewards() -> None:
    buf = ReplayBuffer(4)
    assert buf.add(step(0, rew=np.array([1.0, 2.0])))[1].tolist() == [[0.0, 0.0]]
    assert buf.add(step(1, rew=np.array([3.0, 5.0]), truncated=1))[1].tolist() == [[4.0, 7.0]]
    assert buf.add(step(2, rew=np.array([1.0, 1.0])))[1].tolist() == [[0.0, 0.0]]


def test_buffer_ids_of_a_plain_buffer() -> None:
    buf = ReplayBuffer(4)
    index, _, length, start = buf.add(steps([7], terminated=[1]), buffer_ids=[0])
    assert (index.tolist(), length.tolist(), start.tolist()) == ([0], [1], [0])
    assert buf.add(steps([8]), buffer_ids=np.array([0]))[0].tolist() == [1]
    assert buf.add(step(9))[0].tolist() == [2]
    assert buf.obs.tolist() == [7, 8, 9, 0]
    for rows, ids in ((steps([7]), [1]), (steps([7, 8]), [0]), (steps([7, 8]), [0, 1]), (steps([7]), [])):
        with pytest.raises(ValueError, match=r"buffer_ids|rows"):
            buf.add(rows, buffer_ids=ids)
    assert len(buf) == 3


def test_vector_add_returns() -> None:
    buf = VectorReplayBuffer(9, 3)
    buf.add(steps([0, 1, 2], rew=[1, 2, 3]))
    found = buf.add(steps([3, 4], rew=[10, 20], terminated=[True, False]), buffer_ids=[2, 0])
    assert [part.tolist() for part in found] == [[7, 1], [13.0, 0.0], [2, 0], [6, 0]]
    found = buf.add(steps([5, 6, 7]))
    assert [part.tolist() for part in found] == [[2, 4, 8], [0.0] * 3, [0] * 3, [0, 3, 8]]


# Rows


def wrapped(**options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(10, **options)
    for n in range(13):
        buf.add(step(n, terminated=n == 6))
    return buf


def test_all_rows_come_in_time_order_and_slices_in_storage_order() -> None:
    buf = wrapped()
    assert buf.sample_indices(0).tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert buf[:].obs.tolist() == list(range(3, 13))
    assert buf.sample(0)[0].obs.tolist() == list(range(3, 13))
    assert buf[-3:].obs.tolist() == [7, 8, 9]
    assert buf[0:5].obs.tolist() == [10, 11, 12, 3, 4]
    assert buf[8:2:-3].obs.tolist() == [8, 5]
    assert buf.latest(3).obs.tolist() == [10, 11, 12]
    shuffled = [buf.sample_indices(None).tolist() for _ in range(5)]
    assert all(sorted(indices) == list(range(10)) for indices in shuffled)
    assert len(set(map(tuple, shuffled))) == 5


def test_indices() -> None:
    buf = wrapped()
    assert buf.sample_indices(-1).tolist() == []
    assert buf[[]].obs.tolist() == []
    assert buf[[2, 2, -1]].obs.tolist() == [12, 12, 9]
    assert buf[np.array([[0, 1], [3, 4]])].obs.tolist() == [[10, 11], [3, 4]]
    assert buf[-1].obs == 9
    for index in (10, 99, [0, 10], np.array([3, 12])):
        with pytest.raises(IndexError):
            buf[index]


def test_rows_always_have_info_and_policy() -> None:
    buf = ReplayBuffer(3)
    buf.add(Batch(obs=0, act=0, rew=0, terminated=0, truncated=0))
    assert buf[0].info.is_empty()
    assert buf[:].policy.is_empty()
    buf = ReplayBuffer(3)
    buf.add(step(0, policy={"h": np.ones(2)}))
    assert buf[:].policy.h.tolist() == [[1.0, 1.0]]


def test_only_observations_info_and_policy_are_stacked() -> None:
    buf = ReplayBuffer(8, stack_num=3)
    for n in range(5):
        buf.add(step(n, terminated=n == 1, info={"n": n * 10}, policy={"h": np.array([n, n])}))
    rows = buf[[0, 1, 2, 4]]
    frames = [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 4]]
    assert rows.obs.tolist() == frames
    assert rows.obs_next.tolist() == (np.array(frames) + 1).tolist()
    assert rows.info.n.tolist() == (np.array(frames) * 10).tolist()
    assert rows.policy.h.tolist() == [[[n, n] for n in frame] for frame in frames]
    assert rows.act.tolist() == rows.rew.tolist() == [0, 1, 2, 4]
    assert buf.get([4], "obs", stack_num=2).tolist() == [[3, 4]]
    assert buf.get(4, "obs", stack_num=2).tolist() == [3, 4]
    assert buf.get(np.array([4]), "obs", stack_num=1).tolist() == [4]
    assert buf.get([4], "rew").tolist() == [[2.0, 3.0, 4.0]]
    assert buf.get([4], "nothing", 5) == 5
    with pytest.raises(KeyError, match="nothing"):
        buf.get([4], "nothing")


def test_stack_num_can_be_set_later() -> None:
    buf = wrapped()
    buf.stack_num = 2
    assert buf[[3, 4, 7]].obs.tolist() == [[3, 3], [3, 4], [7, 7]]
    vector = VectorReplayBuffer(6, 2)
    vector.add(steps([0, 1]))
    vector.add(steps([2, 3]))
    vector.stack_num = 3
    assert vector[[1, 4]].obs.tolist() == [[0, 0, 2], [1, 1, 3]]


def test_stacking_is_of_one_gather_whatever_the_shape() -> None:
    buf = ReplayBuffer(8, stack_num=4)
    for n in range(11):
        buf.add(step(n, obs=np.full((2, 3), n, np.uint8), obs_next=np.full((2, 3), n + 1, np.uint8)))
    rows = buf[[0, 2]]
    assert rows.obs.shape == (2, 4, 2, 3)
    assert rows.obs[:, :, 0, 0].tolist() == [[5, 6, 7, 8], [7, 8, 9, 10]]
    assert rows.obs.dtype == np.uint8


# Previous and next


def test_previous_and_next_stop_at_ends_and_at_the_last_write() -> None:
    buf = wrapped()
    assert buf.prev(np.arange(10)).tolist() == [9, 0, 1, 3, 3, 4, 5, 7, 7, 8]
    assert buf.next(np.arange(10)).tolist() == [1, 2, 2, 4, 5, 6, 6, 8, 9, 0]
    assert buf.prev(3) == 3
    assert buf.next(9) == 0
    assert buf.prev([4, 8]).tolist() == [3, 7]
    assert buf.last_index.tolist() == [2]
    assert buf.unfinished_index().tolist() == [2]


def managed(kind: type = VectorReplayBuffer) -> Any:
    buf = kind(9, 3) if kind is VectorReplayBuffer else kind([ReplayBuffer(3) for _ in range(3)])
    for n in range(4):
        buf.add(steps([n, n + 10, n + 20], terminated=[n == 1, False, n == 3]))
    buf.add(steps([4]), buffer_ids=[1])
    return buf


@pytest.mark.parametrize("kind", [VectorReplayBuffer, ReplayBufferManager])
def test_managers_take_lists_ints_and_negative_indices(kind: type) -> None:
    buf = managed(kind)
    assert buf.prev(list(range(9))).tolist() == [2, 1, 2, 5, 3, 5, 8, 7, 7]
    assert buf.next(np.arange(9)).tolist() == [0, 1, 0, 4, 4, 3, 6, 8, 6]
    assert buf.prev(0) == 2
    assert buf.next(3) == 4
    assert buf.prev(-1) == buf.prev(8)
    assert buf.next([-1, -2]).tolist() == buf.next([8, 7]).tolist()
    assert buf.last_index.tolist() == [0, 4, 6]
    assert buf.unfinished_index().tolist() == [0, 4]
    assert buf[-1].obs == 22
    assert buf.subbuffer_edges.tolist() == [0, 3, 6, 9]
    assert isinstance(buf, ReplayBufferManager)
    assert isinstance(buf, ReplayBuffer)


def test_managers_cannot_be_updated() -> None:
    for buf in (managed(), managed(ReplayBufferManager), CachedReplayBuffer(ReplayBuffer(5), 2, 3)):
        with pytest.raises(NotImplementedError):
            buf.update(wrapped())


def test_the_buffers_of_a_manager_share_its_memory() -> None:
    buf = managed()
    assert [len(part) for part in buf.buffers] == [3, 3, 3]
    assert buf.buffers[1].obs.tolist() == buf.obs[3:6].tolist() == [13, 4, 12]
    assert np.shares_memory(buf.buffers[1].obs, buf.obs)
    buf.add(steps([77]), buffer_ids=[1])
    assert buf.buffers[1].obs.tolist() == [13, 4, 77]
    assert buf.buffers[1][:].obs.tolist() == [13, 4, 77]
    assert buf.buffers[1].prev(2) == 1
    assert buf.buffers[1].unfinished_index().tolist() == [2]


def test_interval_of_indices() -> None:
    buf = VectorReplayBuffer(10, 2)
    assert buf.get_buffer_indices(2, 4).tolist() == [2, 3]
    assert buf.get_buffer_indices(start=4, stop=2).tolist() == [4, 0, 1]
    assert buf.get_buffer_indices(start=8, stop=7).tolist() == [8, 9, 5, 6]
    for start, stop in ((1, 6), (8, 1)):
        with pytest.raises(ValueError, match=f"{start}"):
            buf.get_buffer_indices(start, stop)


# A buffer without rows


def test_attributes_and_items_of_an_empty_buffer() -> None:
    buf = ReplayBuffer(3)
    with pytest.raises(AttributeError, match="obs"):
        _ = buf.obs
    with pytest.raises(KeyError):
        buf[0]
    assert (np.array([buf]).dtype, np.array([buf]).shape) == (object, (1,))
    assert np.array([buf, VectorReplayBuffer(4, 2)], dtype=object).shape == (2,)
    assert buf.sample_indices(0).tolist() == []
    assert buf.unfinished_index().tolist() == []
    assert len(buf) == 0


def test_near_names_of_an_absent_column_are_looked_for_only_when_the_message_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buf = ReplayBuffer(3)
    buf.add(Batch(obs=0, act=0, rew=0.0, terminated=False, truncated=False, obs_next=1, info={}, goal=1))
    with pytest.raises(AttributeError, match=r"'ReplayBuffer' object has no attribute 'gaol': .* mean 'goal'\?"):
        _ = buf.gaol
    monkeypatch.setattr("difflib.get_close_matches", None)
    assert not hasattr(buf, "gaol")


def test_reserved_names_cannot_be_set() -> None:
    with pytest.raises((SampleBatchError, AttributeError), match="obs"):
        ReplayBuffer(3).obs = np.zeros(3)


def test_reset_leaves_the_data() -> None:
    buf = wrapped()
    buf.reset()
    assert len(buf) == 0
    assert buf.obs.tolist() == [10, 11, 12, 3, 4, 5, 6, 7, 8, 9]
    assert buf.sample_indices(0).tolist() == []
    assert [part.tolist() for part in buf.add(step(50, rew=2, terminated=1))] == [[0], [2.0], [1], [0]]
    assert buf.prev(0) == buf.next(0) == 0


def test_reset_keeps_the_running_episode_when_asked() -> None:
    buf = ReplayBuffer(5)
    for n in range(3):
        buf.add(step(n, rew=1))
    buf.reset(keep_statistics=True)
    assert [part.tolist() for part in buf.add(step(3, rew=1, terminated=1))] == [[0], [4.0], [4], [0]]


def test_total_size_is_rounded_up() -> None:
    buf = VectorReplayBuffer(10, 3)
    assert (buf.maxsize, buf.buffer_num, [part.maxsize for part in buf.buffers]) == (12, 3, [4, 4, 4])
    assert HERVectorReplayBuffer(10, 3, compute_reward_fn=lambda a, g: a, horizon=5).maxsize == 12
    assert PrioritizedVectorReplayBuffer(10, 3, alpha=0.6, beta=0.4).maxsize == 12


# Cached buffers


def test_cached_buffers_move_finished_episodes() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=4, max_episode_length=5)
    assert buf.maxsize == 30
    assert buf.cached_buffer_num == 4
    found = buf.add(steps([1], rew=[1], terminated=[False]), buffer_ids=[1])
    assert [part.tolist() for part in found] == [[15], [0.0], [0], [15]]
    found = buf.add(steps([2], rew=[2], terminated=[True]), buffer_ids=[3])
    assert [part.tolist() for part in found] == [[0], [2.0], [1], [0]]
    found = buf.add(steps([3, 4], rew=[3, 4], terminated=[False, True]), buffer_ids=[3, 1])
    assert [part.tolist() for part in found] == [[25, 2], [0.0, 5.0], [0, 2], [25, 1]]
    assert [len(part) for part in buf.buffers] == [3, 0, 0, 0, 1]
    assert len(buf) == 4
    assert buf.main_buffer.obs[:3].tolist() == [2, 1, 4]
    assert len(buf.cached_buffers) == 4
    assert buf.unfinished_index().tolist() == [25]
    assert buf.sample_indices(0).tolist() == [0, 1, 2, 25]
    assert buf.prev([0, 1, 2, 25]).tolist() == [0, 1, 1, 25]


def test_cached_buffer_without_a_main_buffer() -> None:
    buf = CachedReplayBuffer(ReplayBuffer(0), 2, 5)
    buf.add(steps([0, 1], rew=[1, 1]))
    found = buf.add(steps([2, 3], rew=[1, 1], terminated=[True, False]))
    assert [part.tolist() for part in found] == [[-1, 6], [2.0, 0.0], [2, 0], [-1, 5]]
    assert len(buf) == 2


# Priorities


def prioritized(**options: Any) -> PrioritizedReplayBuffer:
    buf = PrioritizedReplayBuffer(6, alpha=0.5, beta=0.5, **options)
    for n in range(4):
        buf.add(step(n))
    return buf


def test_new_items_have_the_largest_priority_so_far() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    buf.add(step(9))
    weights = buf.get_weight(np.arange(5))
    assert weights[4] == pytest.approx(weights[0])
    assert weights[0] < weights[2] < weights[1]


def test_weights_are_divided_by_the_largest_of_the_batch() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    assert buf[[0, 1, 2]].weight.tolist() == pytest.approx([0.5, 1.0, 0.5**0.5], rel=1e-5)
    assert buf[[0, 2]].weight.tolist() == pytest.approx([0.5**0.5, 1.0], rel=1e-5)
    plain = prioritized(weight_norm=False)
    plain.update_weight(np.array([0, 1]), np.array([4.0, 0.25]))
    assert plain[[0, 1, 2]].weight.tolist() == pytest.approx(plain.get_weight(np.arange(3)).tolist())
    buf.set_beta(1.0)
    assert buf[[0, 1, 2]].weight.tolist() == pytest.approx([0.25, 1.0, 0.5], rel=1e-5)


def test_the_last_of_duplicate_priorities_wins() -> None:
    buf = prioritized()
    buf.update_weight(np.array([0, 1, 0]), np.array([9.0, 4.0, 4.0]))
    assert buf.get_weight(0) == pytest.approx(buf.get_weight(1))


def test_segment_tree() -> None:
    tree = SegmentTree(5)
    assert len(tree) == 5
    tree[np.arange(5)] = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    tree[1] = 0.5
    assert tree.reduce() == 13.5
    assert tree.reduce(end=-1) == 8.5
    assert tree.reduce(1, 3) == 3.5
    assert tree[1] == 0.5
    assert tree[np.array([0, 4])].tolist() == [1.0, 5.0]
    assert tree.get_prefix_sum_idx(1.2) == 1
    assert tree.get_prefix_sum_idx(np.array([0.0, 1.0, 1.5, 1.6, 13.49])).tolist() == [0, 0, 1, 2, 4]
    for value in (13.5, 14.0, -0.1, np.array([0.0, 13.5])):
        with pytest.raises(SampleBatchError):
            tree.get_prefix_sum_idx(value)


# Hindsight


def reach(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return -(achieved != desired).any(-1).astype(float)


def goal(n: int) -> dict[str, np.ndarray]:
    return {"observation": np.array([n]), "achieved_goal": np.array([n, n]), "desired_goal": np.array([-1, -1])}


def test_hindsight_never_rewrites_the_store() -> None:
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


@pytest.mark.parametrize("kind", ["her", "prioritized", "vector", "plain"])
def test_draws_come_from_the_buffers_own_generator(kind: str) -> None:
    def make(seed: int) -> ReplayBuffer:
        if kind == "her":
            return HERReplayBuffer(40, compute_reward_fn=reach, horizon=6, random_seed=seed)
        if kind == "prioritized":
            return PrioritizedReplayBuffer(40, alpha=0.6, beta=0.4, random_seed=seed)
        return VectorReplayBuffer(40, 1, random_seed=seed) if kind == "vector" else ReplayBuffer(40, random_seed=seed)

    def draws(seed: int, disturb: bool) -> list[Any]:
        buf = make(seed)
        for n in range(30):
            buf.add(
                steps([n], obs=[goal(n)], obs_next=[goal(n + 1)], rew=[-1], terminated=[n % 5 == 4]), buffer_ids=[0]
            )
        found = []
        for _ in range(3):
            if disturb:
                np.random.seed(7)
            batch, indices = buf.sample(16)
            found.append((indices.tolist(), batch.obs.desired_goal.tolist()))
        return found

    assert draws(1, False) == draws(1, True)
    assert draws(1, False) != draws(2, False)
    state = np.random.get_state()[1].tolist()
    draws(1, False)
    assert np.random.get_state()[1].tolist() == state


# Files, and the older form


def test_objects_cannot_be_stored_in_hdf5(tmp_path: Path) -> None:
    buf = ReplayBuffer(3)
    buf.add(step(0, info={"what": lambda: None}))
    with pytest.raises(NotImplementedError):
        buf.save_hdf5(str(tmp_path / "x.hdf5"))


def test_done_alone_stands_for_terminated() -> None:
    buf = ReplayBuffer(4)
    found = buf.add(obs=1, act=1, rew=2, done=True, obs_next=2, info={})
    assert [part.tolist() for part in found] == [[0], [2.0], [1], [0]]
    assert (buf.terminated[0], buf.truncated[0], buf.done[0]) == (True, False, True)
    buf.add(Batch(obs=1, act=1, rew=2, done=False, obs_next=2, info={}))
    assert buf.done.tolist() == [True, False, False, False]
    vector = VectorReplayBuffer(4, 2)
    vector.add(obs=[1, 2], act=[1, 2], rew=[0, 0], done=[0, 1], obs_next=[1, 2], info=[{}, {}])
    assert vector.terminated.tolist() == [False, False, True, False]


# Setting and dropping rows


def test_set_batch_and_from_data() -> None:
    rows = steps(list(range(5)), done=[0] * 5)
    buf = ReplayBuffer(5)
    buf.set_batch(rows)
    assert buf.obs.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SampleBatchError):
        ReplayBuffer(4).set_batch(rows)
    names = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")
    data = {name: np.asarray(rows[name]) for name in names}
    made = ReplayBuffer.from_data(**data)
    assert (len(made), made.maxsize) == (5, 5)
    assert made[:].obs_next.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(SampleBatchError):
        ReplayBuffer.from_data(**{**data, "act": data["act"][:3]})


def test_nulls() -> None:
    buf = ReplayBuffer(6)
    for n in range(4):
        buf.add(step(n, obs=float(n), obs_next=np.nan if n == 2 else float(n + 1)))
    assert buf.hasnull()
    assert buf.isnull().obs_next.tolist() == [False, False, True, False]
    buf.dropnull()
    assert len(buf) == 3
    assert buf[:].obs.tolist() == [0.0, 1.0, 3.0]
    assert not buf.hasnull()
