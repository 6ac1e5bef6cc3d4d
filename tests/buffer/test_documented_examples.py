"""Every example of the documents that specify the replay buffer, with the output they document.

Where a document shows what its own code cannot give (an earlier version's dtype or order), the test says so.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer, VectorReplayBuffer


def text(documented: str) -> str:
    return dedent(documented).strip("\n")


def slots_of(buffer: ReplayBuffer) -> str:
    """Print all slots like Tianshou's documentation; a buffer itself prints a summary."""
    return repr(buffer._meta).replace("Batch", "ReplayBuffer", 1)


# Basic concepts: the buffer


def first_buffer() -> ReplayBuffer:
    buf = ReplayBuffer(size=20)
    for i in range(3):
        buf.add(Batch(obs=i, act=i, rew=i, terminated=0, truncated=0, obs_next=i + 1, info={}))
    return buf


def second_buffer() -> ReplayBuffer:
    buf2 = ReplayBuffer(size=10)
    for i in range(15):
        terminated = i % 4 == 0
        buf2.add(Batch(obs=i, act=i, rew=i, terminated=terminated, truncated=False, obs_next=i + 1, info={}))
    return buf2


def test_add_and_attributes() -> None:
    buf = first_buffer()
    assert repr(buf.obs) == "array([0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])"
    assert len(buf) == 3


def test_only_the_newest_rows_are_stored() -> None:
    buf2 = second_buffer()
    assert len(buf2) == 10
    assert repr(buf2.obs) == "array([10, 11, 12, 13, 14,  5,  6,  7,  8,  9])"


def test_update_preserves_time_order() -> None:
    buf = first_buffer()
    buf.update(second_buffer())
    # The page breaks the line elsewhere.
    assert (
        repr(buf.obs).split()
        == text("""
        array([ 0,  1,  2,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14,  0,  0,  0,
                0,  0,  0,  0])""").split()
    )


def test_indices_previous_and_next() -> None:
    buf = first_buffer()
    buf.update(second_buffer())
    indices = buf.sample_indices(0)
    assert repr(indices) == "array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12])"
    assert repr(buf.prev(indices)) == "array([ 0,  0,  1,  2,  3,  4,  5,  7,  7,  8,  9, 11, 11])"
    assert repr(buf.next(indices)) == "array([ 1,  2,  3,  4,  5,  6,  6,  8,  9, 10, 10, 12, 12])"


def test_sample_returns_the_rows_at_its_indices() -> None:
    buf = first_buffer()
    buf.update(second_buffer())
    batch_data, indices = buf.sample(batch_size=4)
    assert repr(batch_data.obs == buf[indices].obs) == "array([ True,  True,  True,  True])"
    assert len(buf) == 13


def test_pickle_and_hdf5_files(tmp_path: Path) -> None:
    buf = first_buffer()
    with open(tmp_path / "buf.pkl", "wb") as file:
        pickle.dump(buf, file)
    buf.save_hdf5(str(tmp_path / "buf.hdf5"))
    buf.update(second_buffer())
    with open(tmp_path / "buf.pkl", "rb") as file:
        assert len(pickle.load(file)) == 3
    assert len(ReplayBuffer.load_hdf5(str(tmp_path / "buf.hdf5"))) == 3


def stacking_buffer() -> tuple[ReplayBuffer, str]:
    printed = []
    buf = ReplayBuffer(size=9, stack_num=4, ignore_obs_next=True)
    for i in range(16):
        terminated = i % 5 == 0
        _ptr, ep_rew, ep_len, _ep_idx = buf.add(
            Batch(obs={"id": i}, act=i, rew=i, terminated=terminated, truncated=False, obs_next={"id": i + 1})
        )
        printed.append(f"{i} {ep_len} {ep_rew}")
    return buf, "\n".join(printed)


def test_returns_of_episodes() -> None:
    assert stacking_buffer()[1] == text("""
        0 [1] [0.]
        1 [0] [0.]
        2 [0] [0.]
        3 [0] [0.]
        4 [0] [0.]
        5 [5] [15.]
        6 [0] [0.]
        7 [0] [0.]
        8 [0] [0.]
        9 [0] [0.]
        10 [5] [40.]
        11 [0] [0.]
        12 [0] [0.]
        13 [0] [0.]
        14 [0] [0.]
        15 [5] [65.]""")


def test_next_observations_are_not_stored() -> None:
    # The page leaves out `terminated` and `truncated`, which the tutorial shows, and shows `True` without the second
    # blank that NumPy puts before it.
    assert slots_of(stacking_buffer()[0]) == text("""
        ReplayBuffer(
            obs: Batch(
                     id: array([ 9, 10, 11, 12, 13, 14, 15,  7,  8]),
                 ),
            act: array([ 9, 10, 11, 12, 13, 14, 15,  7,  8]),
            rew: array([ 9., 10., 11., 12., 13., 14., 15.,  7.,  8.]),
            terminated: array([False,  True, False, False, False, False,  True, False, False]),
            truncated: array([False, False, False, False, False, False, False, False, False]),
            done: array([False,  True, False, False, False, False,  True, False, False]),
        )""")


STACKED = text("""
    [[ 7  7  8  9]
     [ 7  8  9 10]
     [11 11 11 11]
     [11 11 11 12]
     [11 11 12 13]
     [11 12 13 14]
     [12 13 14 15]
     [ 7  7  7  7]
     [ 7  7  7  8]]""")


def test_stacked_frames() -> None:
    buf, _ = stacking_buffer()
    index = np.arange(len(buf))
    assert str(buf.get(index, "obs").id) == STACKED
    assert abs(buf.get(index, "obs")["id"] - buf[index].obs.id).sum().sum() == 0


def test_next_observations_are_derived() -> None:
    buf, _ = stacking_buffer()
    assert str(buf[:].obs_next.id) == text("""
        [[ 7  7  7  8]
         [ 7  7  8  9]
         [ 7  8  9 10]
         [ 7  8  9 10]
         [11 11 11 12]
         [11 11 12 13]
         [11 12 13 14]
         [12 13 14 15]
         [12 13 14 15]]""")
    full_index = np.array([7, 8, 0, 1, 2, 3, 4, 5, 6])
    assert np.allclose(buf[:].obs_next.id, buf[full_index].obs_next.id)


def test_buffer_of_three_environments() -> None:
    vec_buffer = VectorReplayBuffer(total_size=10000, buffer_num=3)
    assert vec_buffer.maxsize == 10002


# The tutorial on buffers


def flags(indent: int, *true: int) -> str:
    """Format ten flags on two lines, as NumPy prints them."""
    words = [" True" if i in true else "False" for i in range(10)]
    return f"array([{', '.join(words[:9])},\n{' ' * indent}{words[9].strip()}])"


def tutorial_buffer(obs: str, rew: str, obs_next: str, *ends: int) -> str:
    return text(f"""
ReplayBuffer(
    obs: array({obs}),
    act: array({obs}),
    rew: array({rew}),
    terminated: {flags(23, *ends)},
    truncated: {flags(22)},
    done: {flags(17, *ends)},
    obs_next: array({obs_next}),
    info: Batch(),
)""")


FULL = (
    "[10, 11, 12,  3,  4,  5,  6,  7,  8,  9]",
    "[10., 11., 12.,  3.,  4.,  5.,  6.,  7.,  8.,  9.]",
    "[11, 12, 13,  4,  5,  6,  7,  8,  9, 10]",
)


def dummy(n: int = 13) -> ReplayBuffer:
    dummy_buf = ReplayBuffer(size=10)
    for i in range(n):
        dummy_buf.add(Batch(obs=i, act=i, rew=i, terminated=0, truncated=0, done=0, obs_next=i + 1, info={}))
    return dummy_buf


def test_print_empty() -> None:
    dummy_buf = dummy(0)
    assert slots_of(dummy_buf) == "ReplayBuffer()"
    assert f"maxsize: {dummy_buf.maxsize}, data length: {len(dummy_buf)}" == "maxsize: 10, data length: 0"


def test_print_three_steps() -> None:
    dummy_buf = dummy(3)
    assert slots_of(dummy_buf) == tutorial_buffer(
        "[0, 1, 2, 0, 0, 0, 0, 0, 0, 0]",
        "[0., 1., 2., 0., 0., 0., 0., 0., 0., 0.]",
        "[1, 2, 3, 0, 0, 0, 0, 0, 0, 0]",
    )
    assert f"maxsize: {dummy_buf.maxsize}, data length: {len(dummy_buf)}" == "maxsize: 10, data length: 3"


def test_print_after_wrap_around() -> None:
    dummy_buf = dummy()
    assert slots_of(dummy_buf) == tutorial_buffer(*FULL)
    assert f"maxsize: {dummy_buf.maxsize}, data length: {len(dummy_buf)}" == "maxsize: 10, data length: 10"


def test_print_rows() -> None:
    dummy_buf = dummy()
    assert str(dummy_buf[-1]) == text("""
        Batch(
            obs: array(9),
            act: array(9),
            rew: array(9.),
            terminated: array(False),
            truncated: array(False),
            done: array(False),
            obs_next: array(10),
            info: Batch(),
            policy: Batch(),
        )""")
    assert str(dummy_buf[-3:]) == text("""
        Batch(
            obs: array([7, 8, 9]),
            act: array([7, 8, 9]),
            rew: array([7., 8., 9.]),
            terminated: array([False, False, False]),
            truncated: array([False, False, False]),
            done: array([False, False, False]),
            obs_next: array([ 8,  9, 10]),
            info: Batch(),
            policy: Batch(),
        )""")


def test_pickle() -> None:
    dummy_buf = dummy()
    _dummy_buf = pickle.loads(pickle.dumps(dummy_buf))
    assert slots_of(_dummy_buf) == slots_of(dummy_buf)
    assert _dummy_buf.prev(np.arange(10)).tolist() == dummy_buf.prev(np.arange(10)).tolist()


@pytest.mark.parametrize("extra", [{"extro_info": 0, "info": {}}, {"info": {"extro_info": 0}}])
def test_extra_information(extra: dict[str, Any]) -> None:
    buf = ReplayBuffer(size=10)
    buf.add(Batch(obs=0, act=0, rew=0, terminated=0, truncated=0, obs_next=1, **extra))
    actual = buf[0].extro_info if "extro_info" in extra else buf[0].info.extro_info
    assert actual == 0


def test_sample() -> None:
    dummy_buf = dummy()
    batch, indices = dummy_buf.sample(batch_size=5)
    assert list(batch.keys()) == [
        "obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info", "policy",
    ]  # fmt: skip
    assert indices.shape == (5,)
    rows = np.array([10, 11, 12, 3, 4, 5, 6, 7, 8, 9])[indices]
    assert batch.obs.tolist() == batch.act.tolist() == batch.rew.tolist() == rows.tolist()
    assert batch.obs_next.tolist() == (rows + 1).tolist()
    assert batch.rew.dtype == np.float64
    assert batch.done.dtype == bool


def trajectories() -> tuple[ReplayBuffer, list[str]]:
    trajectory_buffer = ReplayBuffer(size=10)
    printed = []
    for start, stop, end in ((0, 3, 2), (3, 8, 7), (8, 13, None)):
        lines = []
        for i in range(start, stop):
            result = trajectory_buffer.add(
                Batch(
                    obs=i,
                    act=i,
                    rew=i,
                    terminated=1 if i == end else 0,
                    truncated=0,
                    done=i == end,
                    obs_next=i + 1,
                    info={},
                ),
            )
            lines.append(str(result))
        lines.append(slots_of(trajectory_buffer))
        lines.append(f"maxsize: {trajectory_buffer.maxsize}, data length: {len(trajectory_buffer)}")
        printed.append("\n".join(lines))
    return trajectory_buffer, printed


def test_trajectories() -> None:
    _, (first, second, third) = trajectories()
    assert first == "\n".join(
        [
            "(array([0]), array([0.]), array([0]), array([0]))",
            "(array([1]), array([0.]), array([0]), array([0]))",
            "(array([2]), array([3.]), array([3]), array([0]))",
            tutorial_buffer(
                "[0, 1, 2, 0, 0, 0, 0, 0, 0, 0]",
                "[0., 1., 2., 0., 0., 0., 0., 0., 0., 0.]",
                "[1, 2, 3, 0, 0, 0, 0, 0, 0, 0]",
                2,
            ),
            "maxsize: 10, data length: 3",
        ]
    )
    assert second == "\n".join(
        [
            "(array([3]), array([0.]), array([0]), array([3]))",
            "(array([4]), array([0.]), array([0]), array([3]))",
            "(array([5]), array([0.]), array([0]), array([3]))",
            "(array([6]), array([0.]), array([0]), array([3]))",
            "(array([7]), array([25.]), array([5]), array([3]))",
            tutorial_buffer(
                "[0, 1, 2, 3, 4, 5, 6, 7, 0, 0]",
                "[0., 1., 2., 3., 4., 5., 6., 7., 0., 0.]",
                "[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]",
                2,
                7,
            ),
            "maxsize: 10, data length: 8",
        ]
    )
    assert third == "\n".join(
        [
            "(array([8]), array([0.]), array([0]), array([8]))",
            "(array([9]), array([0.]), array([0]), array([8]))",
            "(array([0]), array([0.]), array([0]), array([8]))",
            "(array([1]), array([0.]), array([0]), array([8]))",
            "(array([2]), array([0.]), array([0]), array([8]))",
            tutorial_buffer(*FULL, 7),
            "maxsize: 10, data length: 10",
        ]
    )


def test_one_row_of_a_trajectory() -> None:
    data = trajectories()[0][6]
    assert str(data) == text("""
        Batch(
            obs: array(6),
            act: array(6),
            rew: array(6.),
            terminated: array(False),
            truncated: array(False),
            done: array(False),
            obs_next: array(7),
            info: Batch(),
            policy: Batch(),
        )""")


def test_episode_indices() -> None:
    trajectory_buffer, _ = trajectories()
    assert str(trajectory_buffer.prev(np.array([0, 1, 2, 3, 4, 5, 6]))) == "[9 0 1 3 3 4 5]"
    assert str(trajectory_buffer.next(np.array([4, 5, 6, 7, 8, 9]))) == "[5 6 7 7 9 0]"
    assert str(trajectory_buffer.unfinished_index()) == "[2]"


# The older page: keywords, and `done` alone. It shows numbers as floats, and `buf[:]` in the order of storage: the
# newer pages stand.


def test_older_form_of_add() -> None:
    buf = ReplayBuffer(size=20)
    for i in range(3):
        buf.add(obs=i, act=i, rew=i, done=i, obs_next=i + 1, info={})
    assert len(buf) == 3
    assert buf.obs.tolist() == [0.0, 1.0, 2.0] + [0.0] * 17
    assert buf.done[:3].tolist() == buf.terminated[:3].tolist() == [False, True, True]
    buf2 = ReplayBuffer(size=10)
    for i in range(15):
        buf2.add(obs=i, act=i, rew=i, done=i, obs_next=i + 1, info={})
    assert len(buf2) == 10
    assert buf2.obs.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    buf.update(buf2)
    assert buf.obs.tolist() == [
        0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    ]  # fmt: skip
    batch_data, indice = buf.sample(batch_size=4)
    assert (batch_data.obs == buf[indice].obs).tolist() == [True, True, True, True]


def test_older_form_of_stacking() -> None:
    buf = ReplayBuffer(size=9, stack_num=4, ignore_obs_next=True)
    for i in range(16):
        buf.add(obs={"id": i}, act=i, rew=i, done=i % 5 == 0, obs_next={"id": i + 1})
    assert buf.act.tolist() == buf.obs.id.tolist() == buf.rew.tolist() == [9, 10, 11, 12, 13, 14, 15, 7, 8]
    assert buf.done.tolist() == [0, 1, 0, 0, 0, 0, 1, 0, 0]
    index = np.arange(len(buf))
    assert str(buf.get(index, "obs").id) == STACKED
    assert abs(buf.get(index, "obs")["id"] - buf[index].obs.id).sum().sum() == 0.0
    assert buf[index].obs_next.id.tolist() == [
        [7, 8, 9, 10],
        [7, 8, 9, 10],
        [11, 11, 11, 12],
        [11, 11, 12, 13],
        [11, 12, 13, 14],
        [12, 13, 14, 15],
        [12, 13, 14, 15],
        [7, 7, 7, 8],
        [7, 7, 8, 9],
    ]


def test_indices_two_steps_ahead_agree_with_the_documented_example() -> None:
    buffer = ReplayBuffer(size=10)
    for i in range(10):
        buffer.add(obs=i, act=i, rew=i, done=False, obs_next=i + 1, info={})
    indice = np.array([0, 3, 7])
    buffer_len = len(buffer)
    batch_2 = buffer[(indice + 2) % buffer_len]
    assert batch_2.obs.tolist() == buffer.obs[(indice + 2) % buffer_len].tolist() == [2, 5, 9]
    assert (buffer[indice].rew + 0.5 * buffer.rew[(indice + 1) % buffer_len]).tolist() == [0.5, 5.0, 11.0]
