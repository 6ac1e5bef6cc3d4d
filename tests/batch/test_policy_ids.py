"""Policy ids are strings or integers, and stay what they are wherever a batch of several agents goes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplebatch
from samplebatch import (
    MultiAgentBatch,
    MultiAgentBatchBuilder,
    MultiAgentReplayBuffer,
    SampleBatch,
    channel,
    concat_samples,
    read_arrow,
    read_parquet,
    to_hdf5,
    write_arrow,
    write_parquet,
)
from samplebatch.errors import ColumnTypeError, FormatError, PolicyNotFoundError, UnstorableError
from tests.batch.arrow_tables import tampered, through_ipc

IDS = (1, "1", "walker", 0, -3, "")


@pytest.fixture
def batch() -> MultiAgentBatch:
    """Return policies with integer and string ids, two of which print alike; rows identify their policy."""
    steps = np.arange(2)
    return MultiAgentBatch(
        {
            policy: SampleBatch(
                obs=steps + 10.0 * number,
                actions=steps,
                rewards=steps * 1.0,
                terminateds=np.zeros(2, bool),
                eps_id=np.full(2, 7),
                agent_index=np.full(2, number),
                t=steps,
            )
            for number, policy in enumerate(IDS)
        },
        env_steps=2,
    )


def in_file(write: Callable[..., Any], read: Callable[..., Any]) -> Callable[[MultiAgentBatch, Path], Any]:
    def through(batch: MultiAgentBatch, folder: Path) -> Any:
        write(batch, folder / "batch")
        return read(folder / "batch")

    return through


def through_channel(batch: MultiAgentBatch, folder: Path) -> Any:
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        # The second message refers to the schema of the first.
        producer.send(batch)
        producer.send(batch)
        consumer.recv()
        return consumer.recv().copy()


def through_buffer(batch: MultiAgentBatch, folder: Path) -> Any:
    buffer = MultiAgentReplayBuffer(4)
    buffer.add(batch)
    return buffer.sample(0).batch


def through_hdf5(batch: MultiAgentBatch, folder: Path) -> Any:
    batch.save(folder / "batch.hdf5")
    return samplebatch.load(folder / "batch.hdf5")


WAYS: dict[str, Callable[[MultiAgentBatch, Path], Any]] = {
    "copy": lambda batch, _: batch.copy(),
    "pickle": lambda batch, _: pickle.loads(pickle.dumps(batch)),
    "concat": lambda batch, _: concat_samples([batch]),
    "timeslices": lambda batch, _: batch.timeslices(2)[0],
    "arrow": lambda batch, _: MultiAgentBatch.from_arrow(batch.to_arrow()),
    "ipc": lambda batch, _: MultiAgentBatch.from_arrow(through_ipc(batch.to_arrow())),
    "arrow file": in_file(write_arrow, read_arrow),
    "parquet file": in_file(write_parquet, read_parquet),
    "hdf5 file": through_hdf5,
    "channel": through_channel,
    "replay buffer": through_buffer,
}


@pytest.mark.parametrize("way", WAYS)
def test_ids_are_preserved(way: str, batch: MultiAgentBatch, tmp_path: Path) -> None:
    actual = WAYS[way](batch, tmp_path)
    assert [(type(policy), policy) for policy in actual] == [(type(policy), policy) for policy in IDS]
    assert all(actual[policy]["obs"].tolist() == batch[policy]["obs"].tolist() for policy in IDS)


def test_policies_with_numpy_integer_ids_accept_python_integers(tmp_path: Path) -> None:
    batch = MultiAgentBatch({np.int64(3): SampleBatch(a=[1, 2])}, 2)
    assert batch[3]["a"].tolist() == [1, 2]
    for way in ("arrow file", "parquet file", "hdf5 file", "channel"):
        assert WAYS[way](batch, tmp_path)[3]["a"].tolist() == [1, 2]


@pytest.mark.parametrize("policy", [None, True, 1.5, ("a", 1), b"a"], ids=repr)
def test_other_ids_are_rejected(policy: Any) -> None:
    with pytest.raises(ColumnTypeError, match="a policy id must be a string or an integer, got a"):
        MultiAgentBatch({policy: SampleBatch(a=[1])}, 1)


def test_the_error_contains_the_missing_id_as_it_was_passed(batch: MultiAgentBatch) -> None:
    with pytest.raises(PolicyNotFoundError, match="no policy 11; did you mean"):
        batch[11]
    with pytest.raises(PolicyNotFoundError, match=r"no policy '7'; did you mean 7\?"):
        MultiAgentBatch({7: SampleBatch(a=[1])}, 1)["7"]


def test_tables_show_integer_ids_as_distinct_strings(batch: MultiAgentBatch) -> None:
    text = batch.to_arrow()["policy_id"].to_pylist()
    assert text[::2] == ["1_", "1", "walker", "0", "-3", ""]


@pytest.mark.parametrize("number", ["1", True, 1.0, None, [1]], ids=repr)
def test_an_id_that_collides_with_an_integer_id_is_rejected(batch: MultiAgentBatch, number: Any) -> None:
    table = tampered(batch.to_arrow(), lambda about: about["policies"]["walker"].update(id=number))
    with pytest.raises(FormatError, match=r"'walker' must have a unique id|must be complete"):
        MultiAgentBatch.from_arrow(table)


def test_builders_accept_integer_policy_ids() -> None:
    builder = MultiAgentBatchBuilder(lambda agent: agent % 2)
    for agent in range(3):
        builder.add_values(agent, obs=agent)
    builder.end_env_step()
    built = builder.build_and_reset()
    assert {policy: part["obs"].tolist() for policy, part in built.items()} == {0: [0, 2], 1: [1]}


@pytest.fixture(params=[False, True], ids=["by policy", "lockstep"])
def buffer(request: pytest.FixtureRequest, batch: MultiAgentBatch) -> Iterator[MultiAgentReplayBuffer]:
    buffer = MultiAgentReplayBuffer(dict.fromkeys(IDS, 4), lockstep=request.param)
    buffer.add(batch)
    return buffer


@pytest.mark.parametrize("change", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_the_state_of_a_buffer_preserves_ids(buffer: MultiAgentReplayBuffer, change: Callable[[Any], Any]) -> None:
    actual = change(buffer)
    assert list(actual) == list(IDS)
    expected = buffer.sample(8).batch
    sample = actual.sample(8).batch
    for policy in IDS:
        assert sample[policy]["obs"].tolist() == expected[policy]["obs"].tolist()


def test_a_saved_buffer_preserves_ids(buffer: MultiAgentReplayBuffer, tmp_path: Path) -> None:
    buffer.save(tmp_path / "buffer")
    actual = samplebatch.load(tmp_path / "buffer")
    assert [(type(policy), policy) for policy in actual] == [(type(policy), policy) for policy in IDS]
    expected = buffer.sample(8).batch
    sample = actual.sample(8).batch
    for policy in IDS:
        assert sample[policy]["obs"].tolist() == expected[policy]["obs"].tolist()


def test_names_in_hdf5_are_strings() -> None:
    h5py = pytest.importorskip("h5py")
    with (
        h5py.File(io.BytesIO(), "w") as file,
        pytest.raises(UnstorableError, match=r"names must be valid in HDF5 .*, got 1$"),
    ):
        to_hdf5({1: np.zeros(3)}, file)


def test_policies_with_similar_ids_have_separate_draws(batch: MultiAgentBatch) -> None:
    buffer = MultiAgentReplayBuffer(4)
    buffer.add(batch)
    sample = buffer.sample(32).batch
    assert (sample[1]["obs"] - 10 * IDS.index(1)).tolist() != (sample["1"]["obs"] - 10 * IDS.index("1")).tolist()


def test_damage_to_policies_with_similar_ids_is_detected(buffer: MultiAgentReplayBuffer) -> None:
    for policy in (1, "1"):
        state = pickle.loads(pickle.dumps(buffer.state_dict()))
        form, dtype = state["forms"][policy]
        state["forms"][policy] = form, dtype + "x"
        with pytest.raises(FormatError, match="got a changed "):
            buffer.load_state_dict(state)
