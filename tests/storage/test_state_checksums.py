"""A state that was changed after a buffer returned it is rejected with the name of the part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, MultiAgentBatch, MultiAgentReplayBuffer, SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.column.interface import Column
from samplebatch.errors import FormatError, SampleBatchError
from tests.optional import torch
from tests.storage.flips import COUNT
from tests.storage.streams import BUFFERS, OTHERS, assert_same_rows, fill, mixed, numbers

KINDS = {name: (BUFFERS | OTHERS)[name] for name in ("vector ignoring next", "prioritized", "compressed")}


def with_tensors(i: int, n: int) -> dict[str, Any]:
    return numbers(i, n) | {"policy": {"hidden": torch.full((n, 2), i, dtype=torch.bfloat16)}}


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_changed_byte_in_an_array_of_a_state_is_detected(kind: str) -> None:
    make, n = KINDS.get(kind) or (lambda: VectorReplayBuffer(21, 3), 3)
    buffer = make()
    fill(buffer, n, 0, 23, mixed if kind == "mixed" else numbers)
    buffers: list[pickle.PickleBuffer] = []
    # A pickle that is damaged elsewhere is a matter of its interpreter's.
    stream = pickle.dumps(buffer.state_dict(), 5, buffer_callback=buffers.append)
    memory = [bytearray(part.raw()) for part in buffers]
    sizes = np.array([len(part) for part in memory])
    rng = np.random.default_rng(0)
    for _ in range(COUNT):
        part = memory[int(rng.choice(len(memory), p=sizes / sizes.sum()))]
        at, by = int(rng.integers(len(part))), int(rng.integers(1, 256))
        part[at] ^= by
        with pytest.raises(SampleBatchError):
            make().load_state_dict(pickle.loads(stream, buffers=memory))
        part[at] ^= by
    other = make()
    other.load_state_dict(pickle.loads(stream, buffers=memory))
    assert_same_rows(other, buffer)


def leaves(actual: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the paths of all values in a state."""
    if isinstance(actual, dict | list):
        for key, inner in actual.items() if isinstance(actual, dict) else enumerate(actual):
            yield from leaves(inner, (*path, key))
    elif actual is not None:
        yield path


@pytest.mark.parametrize("kind", [*KINDS, "mixed", "tensors"])
def test_a_change_anywhere_in_a_state_is_detected(kind: str) -> None:
    make, n = KINDS.get(kind) or (lambda: VectorReplayBuffer(21, 3), 3)
    buffer = make()
    fill(buffer, n, 0, 23, {"mixed": mixed, "tensors": with_tensors}.get(kind, numbers))
    full = buffer.state_dict()
    for path in leaves(full):
        state = copy.deepcopy(full)
        damaged(state, path)
        with pytest.raises(SampleBatchError):
            make().load_state_dict(state)


def test_a_change_in_a_multi_agent_state_is_detected() -> None:
    buffer = MultiAgentReplayBuffer(8)
    at = np.arange(5)
    steps = SampleBatch(obs=at, actions=at, rewards=at * 1.0, terminateds=at < 0)
    buffer.add(MultiAgentBatch({"a": steps, "b": steps}, 5))
    full = buffer.state_dict()
    MultiAgentReplayBuffer(8).load_state_dict(full)
    for path in (("steps",), ("generator", "state", "state"), ("buffers", "b", "table", "columns", "columns", 0)):
        state = copy.deepcopy(full)
        damaged(state, path)
        with pytest.raises(FormatError, match=r"must match its checksums|must have one checksum per part"):
            MultiAgentReplayBuffer(8).load_state_dict(state)


def damaged(state: dict[str, Any], path: tuple[Any, ...]) -> None:
    """Change the value at a path of a state: a bit of a number, a character of a string, a row of a column."""
    actual: Any = state
    for key in path[:-1]:
        actual = actual[key]
    value = actual[path[-1]]
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.copy()
        value.reshape(-1).view(np.uint8)[:1] ^= 1
        assert value.size
    elif isinstance(value, torch.Tensor):
        value = value.clone()
        value.view(torch.uint8)[0] ^= 1
    elif isinstance(value, np.ndarray | Column):
        value = value[:-1]
    elif isinstance(value, dict):
        value = {**value, "more": 1}
    elif isinstance(value, tuple):
        value = (*value, 1)
    else:
        value = value + "x" if isinstance(value, str) else value + 1
    actual[path[-1]] = value


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("table.columns.columns.0", r"column '\w+(\.\w+)?'"),
        ("table.rings.returns", "'table.rings.returns'"),
        ("generator.state.state", "'generator.state.state'"),
        ("sampler.known.alpha", "'sampler.known.alpha'"),
        ("sampler.known.weights", "'sampler.known.weights'"),
        ("own.options.stack_num", "'own.options.stack_num'"),
    ],
)
def test_the_changed_part_is_reported_and_nothing_is_loaded(part: str, named: str) -> None:
    make, n = BUFFERS["prioritized"]
    buffer, other = make(), make()
    fill(buffer, n, 0, 23)
    fill(other, n, 0, 5)
    before = pickle.dumps(other)
    state = copy.deepcopy(buffer.state_dict())
    damaged(state, tuple(int(key) if key.isdigit() else key for key in part.split(".")))
    with pytest.raises(FormatError, match=f"the state of a buffer must match its checksums, got a changed {named}"):
        other.load_state_dict(state)
    assert pickle.dumps(other) == before


def test_missing_and_additional_parts_are_detected() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=1, act=0, rew=1.0, terminated=False, truncated=False))
    for change in (lambda rings: rings.pop("returns"), lambda rings: rings.update(more=1)):
        state = copy.deepcopy(buffer.state_dict())
        change(state["table"]["rings"])
        with pytest.raises(FormatError, match=r"must have one checksum per part, got an unmatched 'table\.rings\.\w+'"):
            ReplayBuffer(4).load_state_dict(state)
    with pytest.raises(FormatError, match="must be a dict, got"):
        ReplayBuffer(4).load_state_dict(buffer.state_dict() | {"checksums": 3})


def test_states_without_checksums_and_unverified_states_are_accepted() -> None:
    buffer = ReplayBuffer(4)
    buffer.add(Batch(obs=1, act=0, rew=1.0, terminated=False, truncated=False))
    state = buffer.state_dict()
    state["checksums"]["sampler.kind"] += 1
    with pytest.raises(FormatError, match=r"got a changed 'sampler\.kind'"):
        ReplayBuffer(4).load_state_dict(state)
    ReplayBuffer(4).load_state_dict(state, verify=False)
    del state["checksums"]
    ReplayBuffer(4).load_state_dict(state)


def test_checksums_are_unchanged_by_copies_and_pickles() -> None:
    for make, n in (BUFFERS | OTHERS).values():
        buffer = make()
        fill(buffer, n, 0, 23)
        state = buffer.state_dict()
        for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(state))))):
            other = make()
            other.load_state_dict(again)
            assert other.state_dict()["checksums"] == state["checksums"]
