"""Steps of any source, episode by episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from samplebatch import ActionUnit, Batch, MultiAgentBatch, ReplayBuffer, SampleBatch, VectorReplayBuffer, convert
from samplebatch.convert.experience import as_steps, make_episode, observations_of
from samplebatch.errors import (
    ColumnLengthError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    EmptyBufferError,
    SequenceError,
)
from tests.convert.experience import LENGTHS, two_episodes


def buffer_of(batch: SampleBatch, buffer: Any = None) -> Any:
    buffer = ReplayBuffer(8) if buffer is None else buffer
    rows = batch.drop("eps_id", "t").as_batch(convention="tianshou")
    buffer.add(rows, buffer_ids=np.zeros(batch.count, int))
    return buffer


SOURCES: dict[str, Callable[[SampleBatch], Any]] = {
    "SampleBatch": lambda batch: batch,
    "without ids": lambda batch: batch.drop("eps_id", "t"),
    "MultiAgentBatch": lambda batch: MultiAgentBatch({"only": batch}, batch.count),
    "Batch": lambda batch: batch.as_batch(convention="tianshou"),
    "dict": dict,
    "fragments": lambda batch: [batch[:1], batch[1:4], batch[4:]],
    "generator": lambda batch: (batch[i : i + 1] for i in range(batch.count)),
    "shuffled": lambda batch: batch.take([0, 3, 1, 4, 2]),
    "sequences": lambda batch: SampleBatch({**batch, "seq_lens": [2, 1, 2], "state_in_0": np.zeros((3, 2))}),
    "padded": lambda batch: SampleBatch({**batch, "seq_lens": [2, 1, 2]}).right_zero_pad(4),
    "ReplayBuffer": buffer_of,
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_every_source_gives_its_episodes_in_time_order(make: Callable[[SampleBatch], Any], nested: bool) -> None:
    expected = two_episodes(nested=nested)
    steps = as_steps(make(expected.copy()))
    assert steps.bounds.tolist() == [0, 3, 5]
    assert [episode.count for episode in steps.episodes()] == list(LENGTHS)
    for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"):
        for path in expected.select(name).column_names:
            assert steps.batch[path].tolist() == expected[path].tolist()
    assert steps.numbers().tolist() == [0, 0, 0, 1, 1]
    assert steps.times().tolist() == [0, 1, 2, 0, 1]


def test_rows_in_order_are_shared() -> None:
    batch = two_episodes()
    assert as_steps(batch).batch is batch
    assert np.shares_memory(next(as_steps(batch).episodes())["obs"], batch["obs"])


def test_episodes_keep_the_order_in_which_they_start() -> None:
    batch = SampleBatch(rewards=[1.0, 2.0, 3.0], eps_id=[7, 3, 7], terminateds=[False, True, True])
    assert as_steps(batch).batch["eps_id"].tolist() == [7, 7, 3]


def test_agents_of_one_episode_have_separate_trajectories() -> None:
    batch = SampleBatch(rewards=[1.0, 2.0, 3.0, 4.0], eps_id=[7] * 4, agent_index=[0, 1, 0, 1], t=[0, 0, 1, 1])
    assert as_steps(batch).batch["rewards"].tolist() == [1.0, 3.0, 2.0, 4.0]


def test_environments_without_episode_ids_are_distinguished() -> None:
    batch = SampleBatch(rewards=np.arange(6.0), env_id=[4, 2, 4, 2, 4, 2], dones=[0, 0, 1, 0, 0, 1])
    steps = as_steps(batch)
    assert [part["rewards"].tolist() for part in steps.episodes()] == [[0, 2], [4], [1, 3, 5]]


def test_rings_that_have_wrapped_are_distinguished() -> None:
    buffer = VectorReplayBuffer(6, 2)
    for i in range(5):
        step = {"obs": [i, 10 + i], "act": [0, 0], "rew": [0.0, 0.0], "truncated": [False, False]}
        buffer.add(Batch(**step, terminated=[i == 3, False], obs_next=[i + 1, 11 + i]), buffer_ids=[0, 1])
    steps = as_steps(buffer)
    assert [part["obs"].tolist() for part in steps.episodes()] == [[2, 3], [4], [12, 13, 14]]
    assert [part["new_obs"].tolist() for part in steps.episodes()] == [[3, 4], [5], [13, 14, 15]]


def test_a_buffer_without_next_observations_has_the_final_ones() -> None:
    steps = as_steps(buffer_of(two_episodes(), ReplayBuffer(8, ignore_obs_next=True)))
    # Nothing is made of what follows a termination, and nothing is kept of it.
    retained = [0, 1, 3, 4]
    assert steps.batch["new_obs"][retained].tolist() == two_episodes()["new_obs"][retained].tolist()


def test_other_objects_than_experience_are_rejected() -> None:
    two = MultiAgentBatch({"a": two_episodes(), "b": two_episodes()}, 5)
    with pytest.raises(
        ColumnTypeError, match="must contain steps of one policy, got 'a', 'b'; convert each policy separately"
    ):
        as_steps(two)
    with pytest.raises(ColumnTypeError, match="must be a batch, a buffer or columns by name, got a str"):
        as_steps("steps.arrow")
    for empty in (SampleBatch(), ReplayBuffer(3), []):
        with pytest.raises(EmptyBufferError, match="must contain steps, got none"):
            as_steps(empty)  # type: ignore[arg-type]


def test_the_error_lists_required_columns() -> None:
    with pytest.raises(ColumnNotFoundError, match="column 'terminateds' must exist to be converted"):
        as_steps(SampleBatch(obs=[1, 2]))
    with pytest.raises(ColumnMismatchError, match="column 'terminateds' must have flags"):
        as_steps(SampleBatch(obs=[1, 2], terminateds=[0.5, 1.0]))
    with pytest.raises(SequenceError, match="column 't' must count the steps of each episode one by one"):
        as_steps(two_episodes().take([0, 2]))
    with pytest.raises(ColumnNotFoundError, match="column 'new_obs' must exist"):
        observations_of(two_episodes().drop("new_obs"))
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must have rows of equal shape to be converted"):
        observations_of(SampleBatch(obs=[[1], [1, 2]], new_obs=[[1], [1, 2]]))
    with pytest.raises(ColumnTypeError, match=r"column 'obs' must have rows of equal shape to be converted"):
        observations_of(SampleBatch(obs=[[1], [1, 2]], new_obs=[[1], [1, 2]]).to_torch())


def test_observations_of_an_episode_end_with_the_final_one() -> None:
    first = next(as_steps(two_episodes(nested=True)).episodes())
    actual = observations_of(first)
    assert actual["x"][:, 0].tolist() == [0, 1, 2, 3]
    assert actual["pair"][1].tolist() == [0.5, 1.5, 2.5, 3.5]


@given(obs=hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=1, max_dims=3, min_side=2, max_side=5)))
def test_shared_and_copied_observations_are_the_same(obs: np.ndarray) -> None:
    flags = {"terminated": True, "truncated": False}
    shared = make_episode(0, obs, {"rewards": np.zeros(len(obs) - 1)}, **flags)
    np.testing.assert_array_equal(observations_of(shared), obs)
    np.testing.assert_array_equal(observations_of(shared.copy()), obs)
    # Rows that overlap in another way than those of one array are no episode of it.
    other = SampleBatch(obs=obs[1:], new_obs=obs[:-1])
    np.testing.assert_array_equal(observations_of(other), np.concatenate([obs[1:], obs[-2:-1]]))


def test_an_episode_shares_its_observations() -> None:
    obs = np.arange(4.0)
    result = make_episode(7, obs, {"rewards": np.zeros(3)}, terminated=False, truncated=True)
    assert np.shares_memory(result["obs"], obs)
    assert np.shares_memory(result["new_obs"], obs)
    assert result["truncateds"].tolist() == [False, False, True]
    assert not result["terminateds"].any()
    with pytest.raises(ColumnLengthError, match="'rewards'"):
        make_episode(7, obs, {"rewards": np.zeros(4)}, terminated=False, truncated=True)


@pytest.mark.parametrize("name", ["rlds", "d4rl", "tensordict", "cpprb", "rllib_json", "rllib_parquet"])
def test_every_conversion_writes_actions_of_the_environment(name: str, tmp_path: Path) -> None:
    """Batches and buffers contain actions in the unit of a policy."""
    steps = two_episodes()
    steps["actions"] = np.linspace(-1.0, 1.0, len(steps), dtype=np.float32)[:, None]
    steps.action_unit = ActionUnit("scale", np.float32(-2), np.float32(6))
    buffer = ReplayBuffer(len(steps))
    buffer.extend(steps)
    expected = np.linspace(-2.0, 6.0, len(steps), dtype=np.float32)
    for source in (steps, buffer):
        actual = np.concatenate([np.ravel(part) for part in _written(name, source, tmp_path)])
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def _written(name: str, source: Any, folder: Path) -> Any:
    """Return the actions that a conversion writes, one part per action part."""
    if name == "rlds":
        return [episode["steps"]["action"][:-1] for episode in convert.to_rlds(source)]
    if name == "d4rl":
        h5py = pytest.importorskip("h5py")
        convert.write_d4rl(source, folder / "steps.hdf5")
        with h5py.File(folder / "steps.hdf5") as file:
            return [file["actions"][:]]
    if name == "tensordict":
        pytest.importorskip("tensordict")
        return [convert.to_tensordict(source)["action"]]
    if name == "cpprb":
        pytest.importorskip("cpprb")
        return [convert.to_cpprb(source).get_all_transitions()["act"]]
    if name == "rllib_json":
        convert.write_rllib_json(source, folder / "steps.json")
        return [convert.read_rllib_json(folder / "steps.json")["actions"]]
    convert.write_rllib_parquet(source, folder / "steps.parquet")
    return [np.stack([np.float32(row) for row in convert.read_rllib_parquet(folder / "steps.parquet")["actions"]])]
