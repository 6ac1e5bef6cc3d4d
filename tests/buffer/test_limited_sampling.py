"""Draws of the newest rows, of each row once, of episodes by an expression, of stretches by priority; updated rows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from samplebatch import Batch, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import (
    ArgumentError,
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    EmptyBufferError,
    RowIndexError,
)


def fill(buf: Any, steps: int, *, ends: tuple[int, ...] = (), start: int = 0) -> Any:
    for i in range(start, start + steps):
        buf.add(Batch(obs=i, act=0, rew=float(i), terminated=i in ends, truncated=False, obs_next=i + 1))
    return buf


@pytest.mark.parametrize("steps", [6, 13])
def test_max_age_draws_the_newest_rows(steps: int) -> None:
    buf = fill(ReplayBuffer(8), steps)
    assert np.unique(buf.sample(400, max_age=3).batch.obs).tolist() == list(range(steps - 3, steps))
    assert buf.sample(0, max_age=2).batch.obs.tolist() == [steps - 2, steps - 1]
    assert sorted(buf.sample(None, max_age=99).batch.obs) == list(range(max(0, steps - 8), steps))
    assert len(buf.sample(-1, max_age=2).indices) == 0


def test_max_age_counts_rows_of_each_ring() -> None:
    buf = VectorReplayBuffer(8, 2)
    flags = np.zeros(2, bool)
    for i in range(5):
        buf.add(Batch(obs=[i, 10 + i], act=[0, 0], rew=[0.0, 0.0], terminated=flags, truncated=flags))
    assert np.unique(buf.sample(100, max_age=1).batch.obs).tolist() == [4, 14]
    assert np.unique(buf.buffers[1].sample(100, max_age=2).batch.obs).tolist() == [13, 14]


def test_max_age_does_not_change_priorities() -> None:
    buf = fill(PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0), 8)
    buf.update_weight(np.arange(8), [100.0, 1, 1, 1, 1, 1, 1, 3])
    counts = np.bincount(buf.sample(8000, max_age=2).indices, minlength=8) / 8000
    assert counts[:6].sum() == 0
    assert counts[7] == pytest.approx(0.75, abs=0.03)


def test_once_draws_every_row_once_until_it_is_overwritten() -> None:
    buf = fill(ReplayBuffer(8), 8)
    sample = [buf.sample(3, once=True).batch.obs.tolist() for _ in range(3)]
    assert [len(rows) for rows in sample] == [3, 3, 2]
    assert sorted(np.concatenate(sample)) == list(range(8))
    with pytest.raises(EmptyBufferError, match="must have rows to sample within max_age and once, got none"):
        buf.sample(1, once=True)
    fill(buf, 3, start=8)
    assert buf.sample(0, once=True).batch.obs.tolist() == [8, 9, 10]
    assert len(buf.sample(0, once=True).indices) == 0
    assert len(buf.sample(20)[1]) == 20


def test_copies_and_files_record_which_rows_were_drawn(tmp_path: Path) -> None:
    buf = fill(ReplayBuffer(8), 8)
    first = buf.sample(5, once=True).batch.obs.tolist()
    buf.save(tmp_path / "rows.h5")
    for again in (pickle.loads(pickle.dumps(buf)), ReplayBuffer.load(tmp_path / "rows.h5")):
        assert sorted(again.sample(8, once=True).batch.obs.tolist() + first) == list(range(8))


def test_once_prefers_high_priorities() -> None:
    buf = fill(PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0), 8)
    buf.update_weight(np.arange(8), [1e-6] * 6 + [1e6, 1e6])
    assert set(buf.sample(2, once=True).indices) == {6, 7}
    assert len(buf.sample(20, once=True).indices) == 6


@pytest.mark.parametrize("max_age", [0, -1, 2.5, True])
def test_max_age_is_an_integer_from_1(max_age: Any) -> None:
    with pytest.raises(ArgumentError, match="max_age must be a whole number from 1"):
        fill(ReplayBuffer(8), 3).sample(1, max_age=max_age)


def test_episodes_are_selected_by_an_expression() -> None:
    buf = fill(ReplayBuffer(20), 12, ends=(2, 3, 9))
    episodes = lambda where: [e.obs.tolist() for e in buf.sample_episodes(0, where=where).batch]  # noqa: E731
    assert episodes(pc.field("length") > 1) == [[0, 1, 2], [4, 5, 6, 7, 8, 9]]
    assert episodes((pc.field("return") <= 3) & pc.field("terminated")) == [[0, 1, 2], [3]]
    assert episodes(pc.field("obs") == 3) == [[3]]
    assert episodes(pc.field("length") > 99) == []
    sample = buf.sample_episodes(50, where=pc.field("obs") >= 3).batch
    assert {int(e.obs[0]) for e in sample} == {3, 4}
    running = buf.sample_episodes(0, unfinished=True, where=~pc.field("terminated")).batch
    assert [e.obs.tolist() for e in running] == [[10, 11]]
    with pytest.raises(EmptyBufferError):
        buf.sample_episodes(1, where=pc.field("length") > 99)
    with pytest.raises(ColumnNotFoundError, match="where must name columns of episodes, act, done, length"):
        buf.sample_episodes(1, where=pc.field("reward") > 0)
    with pytest.raises(ColumnTypeError, match="where must be an Arrow expression, got a str"):
        buf.sample_episodes(1, where="length > 3")  # type: ignore[arg-type]


def test_selected_episodes_of_a_wrapped_ring_have_their_returns() -> None:
    buf = fill(ReplayBuffer(10), 23, ends=(12, 16, 20))
    actual = buf.sample_episodes(0, where=pc.field("return") == 13.0 + 14 + 15 + 16).batch
    assert [e.obs.tolist() for e in actual] == [] if buf[:].obs[0] > 13 else [[13, 14, 15, 16]]
    assert [e.obs.tolist() for e in buf.sample_episodes(0, where=pc.field("return") == 17.0 + 18 + 19 + 20).batch] == [
        [17, 18, 19, 20]
    ]


def test_ranges_of_steps_are_drawn_by_priority() -> None:
    buf = fill(PrioritizedReplayBuffer(16, alpha=1.0, beta=1.0), 12, ends=(5,))
    buf.update_weight(np.arange(12), [1, 3, 1, 1, 500, 1, 1, 1, 1, 1, 1, 500])
    _, indices = buf.sample_sequences(9000, 4, padded=False)
    starts = np.bincount(indices[:, 0], minlength=12) / 9000
    # Starts 4, 5, 10 and 11 have no four steps after them, whatever their priority.
    expected = np.array([1, 3, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]) / 8
    np.testing.assert_allclose(starts, expected, atol=0.03)
    batch, indices = buf.sample_sequences(4000, 3, burn_in=1, padded=False)
    assert batch.mask.all()
    assert (batch.burn_in.sum(1) == 1).all()
    assert np.bincount(indices[:, 1], minlength=12)[4] / 4000 > 0.9


def test_rows_are_updated_unless_they_were_overwritten() -> None:
    buf = fill(ReplayBuffer(4), 4)
    generation = buf.generation_of([0, 1, 2])
    fill(buf, 1, start=4)
    updated = buf.update_rows([0, 1, 2], generation, advantage=[7.0, 8.0, 9.0], rew=[0.5, 0.5, 0.5])
    assert updated.tolist() == [False, True, True]
    np.testing.assert_array_equal(buf.advantage, [np.nan, 8, 9, np.nan])
    assert buf.rew.tolist() == [4.0, 0.5, 0.5, 3.0]
    assert buf.update_rows([], rew=[]).tolist() == []
    fill(buf, 1, start=5)
    assert buf.advantage[1] == 0.0 or np.isnan(buf.advantage[1])


def test_nothing_is_updated_if_one_column_does_not_fit() -> None:
    buf = fill(ReplayBuffer(4), 2)
    before = buf[:].rew.tolist()
    with pytest.raises(ColumnLengthError, match="obs"):
        buf.update_rows([0, 1], rew=[9.0, 9.0], obs=[1])
    with pytest.raises(ColumnMismatchError, match="obs"):
        buf.update_rows([0, 1], rew=[9.0, 9.0], obs=[0.5, 1.5])
    with pytest.raises(ColumnMismatchError, match="done"):
        buf.update_rows([0, 1], rew=[9.0, 9.0], done=[True, True])
    with pytest.raises(RowIndexError, match="index 3 must have a row"):
        buf.update_rows([0, 3], rew=[9.0, 9.0])
    with pytest.raises(ColumnLengthError, match="column 'generation' must have 2 rows"):
        buf.update_rows([0, 1], [0], rew=[9.0, 9.0])
    assert buf[:].rew.tolist() == before


@pytest.mark.parametrize("name", ["obs", "obs_next", "rew"])
def test_nan_is_rejected_without_storing_any_row(name: str) -> None:
    buf = ReplayBuffer(4, raise_on_nan=True)
    step: dict[str, Any] = {"obs": 0.0, "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "obs_next": 1.0}
    for _ in range(3):
        buf.add(Batch(step))
    for again in (buf, pickle.loads(pickle.dumps(buf))):
        with pytest.raises(ColumnMismatchError, match=f"column '{name}' must have no NaN"):
            again.add(Batch(step | {name: np.nan}))
        with pytest.raises(ColumnMismatchError, match=f"column '{name}' must have no NaN"):
            again.add(Batch({key: [value] for key, value in (step | {name: np.nan}).items()}), buffer_ids=[0])
        assert len(again) == 3
    plain = ReplayBuffer(4)
    plain.add(Batch(step | {name: np.nan}))
    assert plain.hasnull()


def test_nan_is_rejected_by_restored_buffers(tmp_path: Path) -> None:
    buf = fill(ReplayBuffer(4, raise_on_nan=True), 2)
    buf.save(tmp_path / "rows")
    buf.save(tmp_path / "rows.arrow")
    vector = VectorReplayBuffer(8, 2, raise_on_nan=True)
    mapped, loaded = ReplayBuffer.open(tmp_path / "rows"), ReplayBuffer.load(tmp_path / "rows.arrow")
    for again in (mapped, loaded, vector.buffers[0]):
        with pytest.raises(ColumnMismatchError, match="column 'rew' must have no NaN"):
            again.add(Batch(obs=1, act=0, rew=np.nan, terminated=False, truncated=False, obs_next=2))
    mapped.close()
