"""The compiled fast `add` equals the general `add`, and accepts only batches with exactly the same layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, ReplayBuffer, ReplayBufferManager, VectorReplayBuffer
from samplebatch.buffer import table
from samplebatch.errors import SampleBatchError

F4 = np.float32


def step(n: int, rows: int | None, **changed: Any) -> dict[str, Any]:
    """Create one step, or one step per environment, with values that identify the step."""
    lead = () if rows is None else (rows,)
    numbers = np.full(lead, n) + (0 if rows is None else np.arange(rows) * 1000)
    image = np.zeros((*lead, 3, 2), F4) + np.expand_dims(numbers, (-1, -2)) if lead else np.full((3, 2), n, F4)
    values = {
        "obs": {"image": image, "inner": {"speed": numbers + 0.5}},
        "act": numbers.copy(),
        "rew": numbers + 0.25,
        "terminated": numbers % 5 == 4,
        "truncated": numbers % 7 == 6,
        "obs_next": {"image": image + 1, "inner": {"speed": numbers + 1.5}},
        "info": {"n": numbers * 2},
        "policy": {},
    }
    return values | changed


def shown(buffer: ReplayBuffer) -> str:
    rows = buffer[buffer._table.rings.chronological()]
    return f"{buffer!r} {len(buffer)} {rows!r} {buffer._table.rings.state_dict()}"


def pair(rows: int | None, **options: Any) -> tuple[ReplayBuffer, ReplayBuffer]:
    if rows is None:
        return ReplayBuffer(11, **options), ReplayBuffer(11, **options)
    return VectorReplayBuffer(11 * rows, rows, **options), VectorReplayBuffer(11 * rows, rows, **options)


def add_generally(buffer: ReplayBuffer, batch: Batch) -> Any:
    buffer._table.forget_fast_add()
    return buffer.add(batch)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "next observations not stored": {"ignore_obs_next": True},
    "last frames": {"save_only_last_obs": True},
    "last frames alone": {"save_only_last_obs": True, "ignore_obs_next": True},
}


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_fast_and_general_add_write_the_same_slots(name: str, rows: int | None) -> None:
    fast, general = pair(rows, **OPTIONS[name])
    for n in range(40):
        values = step(n, rows)
        if "last" in name:
            for obs in ("obs", "obs_next"):
                values[obs] = values[obs]["image"]
        actual, expected = fast.add(Batch(values)), add_generally(general, Batch(values))
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
        assert [part.dtype for part in actual] == [part.dtype for part in expected]
        assert fast._table.fast_add is not None
        assert shown(fast) == shown(general)


def test_a_row_with_a_leading_axis_is_one_step_of_one_ring() -> None:
    fast, general = pair(None)
    for n in range(30):
        batch = Batch(step(n, 1))
        actual, expected = fast.add(batch, buffer_ids=[0]), add_generally(general, batch[0])
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
        assert fast._table.fast_add is not None
    assert shown(fast) == shown(general)


@pytest.mark.parametrize("rows", [None, 2])
def test_vector_rewards_and_objects(rows: int | None) -> None:
    fast, general = pair(rows)
    lead = () if rows is None else (rows,)
    for n in range(25):
        rew = np.arange(2.0) + n + np.zeros((*lead, 2))
        words: Any = "é" * (n % 3) if rows is None else np.array([None, f"{n}"], object)
        batch = Batch(step(n, rows, rew=rew, info={"word": words}))
        actual, expected = fast.add(batch), add_generally(general, batch)
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
        assert fast._table.fast_add is not None
    assert shown(fast) == shown(general)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_some_environments_between_steps_of_all(name: str) -> None:
    """Steps of some environments end the shared cursor of the rings; a reset buffer shares it again."""
    fast, general = pair(3, **OPTIONS[name])
    rng = np.random.default_rng(5)
    for n in range(60):
        values = step(n, 3)
        if "last" in name:
            for obs in ("obs", "obs_next"):
                values[obs] = values[obs]["image"]
        batch, chosen = Batch(values), np.flatnonzero(rng.random(3) < 0.5)
        if n in (15, 35) and len(chosen):
            actual, expected = (buffer.add(batch[chosen], buffer_ids=chosen) for buffer in (fast, general))
        else:
            actual, expected = fast.add(batch), add_generally(general, batch)
        if n == 25:
            fast.reset()
            general.reset()
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
        assert shown(fast) == shown(general)
    assert fast._table.fast_add is not None


def test_any_nonzero_byte_is_a_true_flag() -> None:
    fast, general = pair(3)
    for n in range(8):
        flags = (np.array([0, 2, 0]) * (n % 3 == 2)).astype(np.uint8).view(np.bool_)
        batch = Batch(step(n, 3, truncated=flags, terminated=np.zeros(3, np.bool_)))
        actual, expected = fast.add(batch), add_generally(general, batch)
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
        assert actual[2].any() == (n % 3 == 2)


UNALIKE: dict[str, Any] = {
    "another dtype": {"act": np.array(7, np.int32)},
    "a number": {"act": 7},
    "whole rewards": {"rew": 3},
    "flags of numbers": {"terminated": 1, "truncated": 0.0},
    "done given": {"done": False},
    "one name less": {"info": {}},
    "a new name": {"extra": np.arange(3)},
    "a new name inside": {"info": {"n": 1, "m": 2.5}},
    "a name for another": {"info": {"m": 2.5}},
    "a tensor": None,
}


@pytest.mark.parametrize("name", UNALIKE)
def test_a_batch_in_another_layout_uses_the_general_add(name: str) -> None:
    import torch

    changed = {"act": torch.tensor(7)} if name == "a tensor" else UNALIKE[name]
    fast, general = pair(None)
    for n in range(6):
        batch = Batch(step(n, None, **(changed if n % 2 else {})))
        actual, expected = fast.add(batch), add_generally(general, batch)
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
    assert shown(fast) == shown(general)


REFUSED: dict[str, Any] = {
    "a shape that would be spread": {"obs": {"image": np.zeros((1, 2), F4), "inner": {"speed": 0.5}}},
    "a single element": {"act": np.zeros(1, int)},
    "lost digits": {"act": np.array(0.5)},
    "a mask": {"act": np.ma.masked_array(1, True)},
    "an array for a nested batch": {"info": np.array(1)},
    "a nested batch for an array": {"act": {"a": np.array(1)}},
    "several flags": {"terminated": np.zeros(2, bool)},
    "words for rewards": {"rew": "much"},
    "complex rewards": {"rew": 1j},
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_batches_are_rejected_by_fast_add(name: str) -> None:
    buffer = ReplayBuffer(4)
    for n in range(6):
        buffer.add(Batch(step(n, None)))
    before = shown(buffer)
    batch = Batch(step(9, None))
    batch.__dict__.update(Batch({k: v for k, v in REFUSED[name].items() if name != "a mask"}).__dict__)
    if name == "a mask":
        batch.__dict__.update(REFUSED[name])
    with pytest.raises(SampleBatchError):
        buffer.add(batch)
    assert shown(buffer) == before


def test_the_number_of_rows_must_equal_the_number_of_rings() -> None:
    buffer = VectorReplayBuffer(12, 3)
    for n in range(2):
        buffer.add(Batch(step(n, 3)))
    before = shown(buffer)
    for rows in (2, 4, 1):
        with pytest.raises(SampleBatchError):
            buffer.add(Batch(step(5, rows)))
    assert shown(buffer) == before


def test_columns_may_have_any_names() -> None:
    names = ["slot", "rings", "held", "v0", "_0", "a b", "'", "class", "done_memory", "__class__", "{keep}", "\n"]
    fast, general = pair(None)
    for n in range(15):
        batch = Batch(step(n, None, info={name: i + n for i, name in enumerate(names)}))
        fast.add(batch)
        add_generally(general, batch)
    assert fast._table.fast_add is not None
    assert shown(fast) == shown(general)


def test_fast_add_is_discarded_if_the_memory_moves() -> None:
    """Many final observations need new memory; each stored truncation has one."""
    buffer = ReplayBuffer(100, ignore_obs_next=True)
    for n in range(90):
        buffer.add(Batch(obs=n, act=0, rew=0.0, terminated=False, truncated=n % 2 == 0, obs_next=n + 1000))
    rows = buffer[:]
    assert rows.obs_next.tolist() == [n + 1000 if n % 2 == 0 or n == 89 else n + 1 for n in range(90)]


def test_fast_add_does_not_change_the_batch() -> None:
    batch = Batch(step(1, None, terminated=1))
    before = batch.to_dict()
    buffer = ReplayBuffer(3)
    for _ in range(3):
        buffer.add(batch)
    assert str(batch.to_dict()) == str(before)
    batch.obs.image[...] = -1
    assert buffer.obs.image.min() == 1


@pytest.mark.parametrize(
    ("fill", "rows"),
    [
        (lambda buffer, batch: buffer.add(Batch.cat([batch, batch]), buffer_ids=[0, 0]), 2),
        (lambda buffer, batch: buffer.add(batch[0].to_dict()), 1),
        (lambda buffer, batch: buffer.add(**batch[0]), 1),
        (lambda buffer, batch: ReplayBufferManager([buffer]).buffers[0].add(batch[0]), 1),
    ],
    ids=["rows of a collector", "a dict", "keywords", "part of another"],
)
def test_fast_add_is_compiled_only_when_add_calls_it(fill: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "compile_fast_add", lambda *_: pytest.fail("compiled, and never called"))
    buffer = ReplayBuffer(8)
    fill(buffer, Batch(step(3, 1)))
    assert buffer.act.tolist()[:rows] == [3] * rows
    assert len(buffer) == rows
