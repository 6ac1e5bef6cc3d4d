"""`extend` of buffers: names, rings, the order of rows, and episodes that do not continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    Dataset,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.batch.concat import join
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    RingError,
    SequenceError,
)


def steps(eps_id: int, t: range, *, done: bool = False, **columns: Any) -> SampleBatch:
    """Return steps of an episode; the observation is 100 * episode + time."""
    times = np.array(t)
    return SampleBatch(
        obs=100.0 * eps_id + times,
        new_obs=100.0 * eps_id + times + 1,
        actions=times,
        rewards=np.ones(len(times)),
        terminateds=(times == t[-1]) & done,
        truncateds=np.zeros(len(times), bool),
        eps_id=np.full(len(times), eps_id),
        t=times,
        **{name: np.full(len(times), value) for name, value in columns.items()},
    )


FORMS = {
    "SampleBatch": lambda batch: batch,
    "MultiAgentBatch": lambda batch: MultiAgentBatch({0: batch[:2], "p": batch[2:]}, 4),
    "Batch": lambda batch: batch.as_batch("tianshou"),
    "Batch, RLlib's names": lambda batch: batch.as_batch(),
    "dict": lambda batch: dict(batch),
    "dict, Tianshou's names": lambda batch: dict(batch.as_batch("tianshou").items()),
    "lists": lambda batch: {name: values.tolist() for name, values in batch.items()},
    "table": lambda batch: batch.to_arrow(),
    "plain table": lambda batch: pa.table({name: pa.array(values) for name, values in batch.items()}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_batch_is_accepted(form: str) -> None:
    batch = steps(7, range(4), done=True)
    buffer = ReplayBuffer(8)
    assert buffer.extend(FORMS[form](batch)).tolist() == [0, 1, 2, 3]
    rows = buffer[:]
    assert rows.obs.tolist() == [700, 701, 702, 703]
    assert rows.act.tolist() == [0, 1, 2, 3]
    assert rows.obs_next.tolist() == [701, 702, 703, 704]
    assert rows.terminated.tolist() == [False, False, False, True]
    assert rows.eps_id.tolist() == [7] * 4


@pytest.mark.filterwarnings("ignore")
def test_batches_of_rllib_are_accepted() -> None:
    rllib = pytest.importorskip("ray.rllib.policy.sample_batch", exc_type=ImportError)
    theirs = rllib.SampleBatch(dict(steps(7, range(3), done=True)))
    buffer = ReplayBuffer(8)
    buffer.extend(theirs)
    buffer.extend(rllib.MultiAgentBatch({0: theirs}, 3))
    assert buffer[:].obs.tolist() == [700, 701, 702] * 2
    several = MultiAgentReplayBuffer(8)
    several.extend(theirs)
    several.extend(rllib.MultiAgentBatch({0: theirs}, 3))
    assert {policy: len(part) for policy, part in several.buffers.items()} == {"default_policy": 3, 0: 3}


@pytest.mark.parametrize("form", [dict, Batch])
def test_names_without_values_are_preserved(form: Any) -> None:
    flags = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    empty = {"info": {"env": {}}, "extra": {}, "policy": {"hidden": np.ones((2, 3)), "mask": {}}}
    original = form({"obs": np.arange(2), "act": np.arange(2), "rew": np.zeros(2), **flags, **empty})
    extended, added = ReplayBuffer(4), ReplayBuffer(4)
    extended.extend(original)
    added.add(Batch(original), buffer_ids=[0, 0])
    for buffer in (extended, added):
        assert buffer[:].info == Batch(env=Batch())
        assert buffer[:].extra == Batch()
        assert list(buffer[:].policy.keys()) == ["hidden", "mask"]


def test_streams_are_added_one_by_one() -> None:
    mixed = join([steps(5, range(3)), steps(6, range(3), done=True)]).take([3, 0, 4, 1, 5, 2])
    buffer = ReplayBuffer(8)
    assert buffer.extend(mixed).tolist() == [0, 3, 1, 4, 2, 5]
    assert buffer[:].obs.tolist() == [600, 601, 602, 500, 501, 502]


def test_an_episode_followed_by_others_counts_as_truncated() -> None:
    buffer = ReplayBuffer(16)
    buffer.extend(join([steps(5, range(2)), steps(6, range(2), done=True), steps(7, range(2))]))
    assert buffer[:].truncated.tolist() == [False, True, False, False, False, False]
    assert buffer[:].done.tolist() == [False, True, False, True, False, False]
    # The newest goes on ...
    buffer.extend(steps(7, range(2, 4)))
    assert buffer.unfinished_index().tolist() == [7]
    assert buffer[:].done.tolist() == [False, True, False, True, False, False, False, False]
    # ... until another comes.
    buffer.extend(steps(8, range(2), done=True))
    assert buffer[:].done.tolist() == [False, True, False, True, False, False, False, True, False, True]
    assert buffer.next([6, 7]).tolist() == [7, 7]


def test_a_gap_in_time_ends_an_episode_too() -> None:
    buffer = ReplayBuffer(16)
    buffer.extend(steps(5, range(2)))
    buffer.extend(steps(5, range(3, 5)))
    assert buffer[:].truncated.tolist() == [False, True, False, False]


def test_an_episode_that_was_cut_does_not_count_for_the_next() -> None:
    buffer = ReplayBuffer(16)
    buffer.extend(steps(5, range(2)))
    buffer.extend(steps(6, range(2)))
    end = Batch(obs=602.0, act=2, rew=1.0, terminated=True, truncated=False, obs_next=603.0, eps_id=6, t=2)
    index, returned, length, start = buffer.add(end)
    assert (index.tolist(), returned.tolist(), length.tolist(), start.tolist()) == ([4], [3.0], [3], [2])


def test_rows_that_are_rejected_end_no_episode() -> None:
    buffer = VectorReplayBuffer(8, 2)
    buffer.extend(steps(5, range(2), env_id=1))
    images = dict(steps(6, range(2), env_id=1)) | {"obs": np.zeros((2, 3))}
    with pytest.raises(ColumnMismatchError, match="column 'obs' must have rows of shape"):
        buffer.extend(images)
    assert buffer[:].truncated.tolist() == [False, False]
    assert buffer.unfinished_index().tolist() == [5]
    buffer.extend(steps(5, range(2, 4), done=True, env_id=1))
    assert [len(episode) for episode in buffer.sample_episodes(0)[0]] == [4]


@pytest.mark.parametrize("kind", [VectorReplayBuffer, PrioritizedVectorReplayBuffer])
def test_each_environment_has_its_own_ring(kind: Any) -> None:
    options = {"alpha": 0.6, "beta": 0.4} if kind is PrioritizedVectorReplayBuffer else {}
    buffer = kind(30, 3, **options)
    batch = join([steps(5, range(2), env_id=2), steps(6, range(3), env_id=0)]).take([0, 2, 1, 3, 4])
    assert buffer.extend(batch).tolist() == [20, 0, 21, 1, 2]
    assert buffer.extend(steps(5, range(2, 4), env_id=2)).tolist() == [22, 23]
    assert not buffer[:].done.any()
    with pytest.raises(RingError, match=r"'env_id' must be in \[0, 3\), the rings, got 3"):
        buffer.extend(steps(9, range(2), env_id=3))


def test_episodes_without_env_ids_are_distributed_in_turn() -> None:
    buffer = VectorReplayBuffer(30, 2)
    buffer.extend(join([steps(5, range(2)), steps(3, range(2), done=True), steps(9, range(2))]))
    assert [part[:].obs.tolist() for part in buffer.buffers] == [[500, 501, 900, 901], [300, 301]]
    # Each goes on where it is, ahead of those that begin.
    buffer.extend(join([steps(1, range(2)), steps(9, range(2, 4))]))
    assert buffer.buffers[0][:].obs.tolist() == [500, 501, 900, 901, 902, 903, 100, 101]
    with pytest.raises(RingError, match="rows for 2 rings must have a column 'env_id' or 'eps_id'"):
        buffer.extend(steps(5, range(2)).drop("eps_id"))


def test_a_cached_buffer_accepts_episodes() -> None:
    buffer = CachedReplayBuffer(ReplayBuffer(20), cached_buffer_num=2, max_episode_length=5)
    buffer.extend(join([steps(5, range(3), done=True, env_id=1), steps(6, range(2), env_id=0)]))
    assert sorted(buffer[:].obs.tolist()) == [500, 501, 502, 600, 601]


def test_rows_without_ids_continue_in_order_of_arrival() -> None:
    buffer = ReplayBuffer(8)
    plain = steps(5, range(2)).drop("eps_id", "t", "truncateds")
    buffer.extend(plain)
    buffer.extend(plain)
    assert not buffer[:].done.any()
    done = plain.drop("terminateds")
    done["dones"] = [False, True]
    buffer.extend(done)
    assert buffer[:].terminated.tolist() == [False] * 5 + [True]


def test_a_dataset_is_added_episode_by_episode(tmp_path: Path) -> None:
    dataset = Dataset(tmp_path / "steps")
    for fragment in (steps(5, range(2)), steps(6, range(3), done=True), steps(5, range(2, 4), done=True)):
        dataset.extend(fragment)
    buffer = VectorReplayBuffer(20, 2)
    indices = buffer.extend(dataset)
    assert buffer.obs[indices].tolist() == [500, 501, 502, 503, 600, 601, 602]
    assert ReplayBuffer(4).extend(Dataset(tmp_path / "none")).tolist() == []
    several = MultiAgentReplayBuffer(20)
    several.extend(dataset)
    assert len(several.buffers["default_policy"]) == 7


def test_other_rows_are_rejected() -> None:
    buffer = ReplayBuffer(8)
    for other in (None, 3, [1, 2]):
        with pytest.raises(ColumnTypeError, match="a buffer must be extended by a batch, mapping, table or dataset"):
            buffer.extend(other)
    with pytest.raises(SequenceError, match="got sequences"):
        buffer.extend(steps(5, range(2)).to_sequences(2))
    with pytest.raises(ColumnMismatchError, match="column 'dones' must have flags"):
        buffer.extend(dict(steps(5, range(2)).drop("terminateds")) | {"dones": np.array([0, 2])})
    with pytest.raises(ColumnNotFoundError, match="a step must have column 'rew'"):
        buffer.extend(steps(5, range(2)).drop("rewards"))
    assert len(buffer) == 0
    assert buffer.extend(SampleBatch()).tolist() == []


# -- names in options of several policies' buffers ---------------------------------------------------------------------


def acts(**columns: Any) -> SampleBatch:
    return steps(5, range(4), done=True, **columns)


@pytest.mark.parametrize("option", ["compress", "ragged"])
def test_an_unknown_column_option_is_rejected_by_the_first_sample(option: str) -> None:
    options: dict[str, Any] = {option: "camra"}
    buffer = MultiAgentReplayBuffer(8, **options)
    buffer.add(MultiAgentBatch({0: acts(), "p": acts(camera=1.0)}, 4))
    with pytest.raises(ArgumentError, match=f"{option} must name columns of a step, got 'camra'; did you mean"):
        buffer.sample(2)


def test_a_column_option_may_apply_to_some_policies() -> None:
    buffer = MultiAgentReplayBuffer(8, compress=["camera", "new_obs"])
    buffer.add(MultiAgentBatch({0: acts()}, 4))
    buffer.add(MultiAgentBatch({"p": acts(camera=1.0)}, 4))
    buffer.sample(2)
    table = buffer.buffers["p"]._table.columns.tree
    assert (table["camera"].kind, table["obs_next"].kind) == ("compressed", "compressed")
    assert table["obs"].kind != "compressed"


def test_ragged_columns_are_preserved() -> None:
    buffer = MultiAgentReplayBuffer(8, ragged="visited")
    batch = acts()
    batch["visited"] = [[1], [1, 2], [], [3]]
    buffer.add(MultiAgentBatch({0: batch}, 4))
    assert [row.tolist() for row in buffer.sample(0).batch[0]["visited"]] == [[1], [1, 2], [], [3]]


def test_a_declared_policy_may_add_the_column_later() -> None:
    buffer = MultiAgentReplayBuffer({0: 8, "p": 8}, compress="camera")
    buffer.add(MultiAgentBatch({0: acts()}, 4))
    buffer.sample(2)
    buffer.add(MultiAgentBatch({"p": acts()}, 4))
    with pytest.raises(ArgumentError, match="got 'camera'"):
        buffer.sample(2)
    buffer.add(MultiAgentBatch({"p": acts(camera=1.0)}, 4))
    assert buffer.sample(2).batch["p"]["camera"].shape == (2,)


def test_episodes_whose_ids_are_strings_continue_in_the_next_batch() -> None:
    buffer = ReplayBuffer(100)
    for start in (0, 3):
        batch = steps(0, range(start, start + 3), done=start > 0)
        batch["eps_id"] = np.array(["run 1"] * 3, object)
        buffer.extend(batch)
    assert buffer[:].truncated.any() == 0
    assert len(buffer.sample_episodes(1)[0][0]) == 6


ODD_IDS = {
    "mixed": np.array([1, "a", None], object),
    "of two dimensions": np.zeros((3, 2), int),
}
ODD_TIMES = {
    **ODD_IDS,
    "strings": np.array(["a", "b", "c"]),
    "no number": np.array([0.0, np.nan, 2.0]),
    "complex": np.array([0, 1, 2j]),
    "dates": np.array([0, 1, 2], "datetime64[s]"),
}
ODD_ENVIRONMENTS = {**ODD_TIMES, "broken": np.array([0.0, 0.5, 1.0]), "objects": np.array(["a", "b", "a"], object)}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param(name, values, id=f"{name} {kind}")
        for name, unusual in (
            ("eps_id", ODD_IDS),
            ("agent_index", ODD_IDS),
            ("t", ODD_TIMES),
            ("env_id", ODD_ENVIRONMENTS),
        )
        for kind, values in unusual.items()
    ],
)
def test_id_columns_of_another_dtype_are_rejected(name: str, values: Any) -> None:
    buffer = VectorReplayBuffer(100, 2)
    batch = steps(0, range(3), env_id=0)
    batch[name] = values
    with pytest.raises(ColumnTypeError, match=f"column '{name}' must have one .* per row.*, got dtype "):
        buffer.extend(batch)
    assert len(buffer) == 0


def test_buffers_of_one_ring_accept_any_env_ids() -> None:
    buffer = ReplayBuffer(100)
    batch = steps(0, range(3))
    batch["env_id"] = np.array(["a", "a", "b"])
    buffer.extend(batch)
    assert buffer[:].env_id.tolist() == ["a", "a", "b"]
