"""Final observations are stored exactly as long as their steps."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer, SampleBatch, VectorReplayBuffer
from samplebatch.buffer.final_observations import FinalObservations
from samplebatch.buffer.stores import Stores


def finals(rings: int = 2, slots: int = 20) -> FinalObservations:
    return FinalObservations(rings, slots, Stores(), lambda: None)


def write(store: FinalObservations, rings: list[int], slots: list[int], cut: list[bool]) -> None:
    rows = np.array(slots) * 10
    completed = store.fit({"a": rows}, len(rows), single=False)
    store.release(np.array(slots))
    store.write(completed, np.array(rings), np.array(slots), np.array(cut))


def found(store: FinalObservations, slots: list[int], rings: list[int]) -> list[int | None]:
    rows, is_valid = store.find(np.array(slots), np.array(rings))
    values = store.take(rows).a.tolist()
    return [value if valid else None for value, valid in zip(values, is_valid.tolist(), strict=True)]


def test_final_observations_exist_for_newest_and_truncated_steps() -> None:
    store = finals()
    assert not store.known
    write(store, [0, 1], [0, 10], [False, True])
    write(store, [0, 1], [1, 11], [True, False])
    write(store, [0], [2], [False])
    assert store.known
    assert found(store, [0, 1, 2, 10, 11], [0, 0, 0, 1, 1]) == [None, 10, 20, 100, 110]
    assert store.num_permanent == 2


def test_overwritten_rows_are_released() -> None:
    store = finals()
    for slot in range(8):
        write(store, [0], [slot], [True])
    assert store.num_permanent == 8
    write(store, [0], [3], [False])
    assert found(store, [3, 4], [0, 0]) == [30, 40]
    write(store, [0], [9], [False])
    assert found(store, [3, 4], [0, 0]) == [None, 40]
    assert store.num_permanent == 7
    store.forget(0, 10)
    assert store.num_permanent == 0
    assert found(store, [4, 9], [0, 0]) == [None, None]


def test_space_is_freed_and_reused() -> None:
    store = finals(1, 1000)
    for slot in range(300):
        write(store, [0], [slot], [True])
    room = store.columns.slots
    assert found(store, [0, 150, 299], [0, 0, 0]) == [0, 1500, 2990]
    for lap in range(5):
        for slot in range(300):
            write(store, [0], [slot], [(slot + lap) % 2 == 0])
    assert store.columns.slots == room < 1000
    assert store.num_permanent == 150


def test_rows_in_use_move_elsewhere() -> None:
    store = finals()
    for slot in range(0, 20, 10):
        write(store, [slot // 10], [slot + 3], [True])
        write(store, [slot // 10], [slot + 4], [False])
    again = finals()
    again.load_state_dict(store.state_dict(0, 20))
    assert found(again, [3, 4, 13, 14], [0, 0, 1, 1]) == [30, 40, 130, 140]
    single = finals(1, 10)
    single.load_state_dict(store.state_dict(10, 20, 1))
    assert found(single, [3, 4], [0, 0]) == [130, 140]
    write(single, [0], [5], [True])
    assert found(single, [3, 4, 5], [0, 0, 0]) == [130, None, 50]


@pytest.mark.parametrize("rings", [1, 3])
def test_memory_depends_on_the_number_of_live_final_observations(rings: int) -> None:
    buf = VectorReplayBuffer(50 * rings, rings, ignore_obs_next=True)
    for n in range(2000):
        obs = np.full((rings, 8), n, np.float32)
        ends = np.full(rings, n % 5 == 4)
        buf.add(Batch(obs=obs, obs_next=obs + 0.5, act=ends, rew=ends * 1.0, terminated=ends & False, truncated=ends))
    store = buf._table.finals
    assert store is not None
    assert store.num_permanent == 10 * rings
    assert store.columns.slots <= 64
    rows = buf[:]
    step = np.where(rows.truncated | (rows.obs[:, 0] == 1999), 0.5, 1.0)
    assert (rows.obs_next[:, 0] == rows.obs[:, 0] + step).all()


def test_steps_may_omit_the_next_observation_if_it_is_not_stored() -> None:
    buf = ReplayBuffer(5, ignore_obs_next=True)
    for n in range(8):
        buf.add(Batch(obs=n, act=0, rew=0, terminated=False, truncated=n == 6))
    assert buf[:].obs_next.tolist() == [4, 5, 6, 6, 7]
    buf.add(Batch(obs=8, act=0, rew=0, terminated=False, truncated=False, obs_next=50))
    assert buf[:].obs_next.tolist() == [5, 6, 6, 8, 50]


def test_an_interrupted_episode_keeps_its_final_observation() -> None:
    """`extend` ends a running episode that its rows do not continue."""
    buf = ReplayBuffer(8, ignore_obs_next=True)
    for first in (0, 100):
        obs = first + np.arange(3)
        flags = np.zeros(3, bool)
        columns = {"obs": obs, "new_obs": obs + 1, "actions": obs, "rewards": np.ones(3), "t": np.arange(3)}
        buf.extend(SampleBatch(columns | {"terminateds": flags, "eps_id": np.full(3, first)}))
    assert buf[:].obs_next.tolist() == [1, 2, 3, 101, 102, 103]
    assert buf[:].truncated.tolist() == [False, False, True, False, False, False]
