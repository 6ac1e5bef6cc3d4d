"""Columns declared to have one row per sequence, such as a reward of a sequence."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samplebatch
from samplebatch import (
    Batch,
    Dataset,
    MultiAgentBatch,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    channel,
    concat_samples,
)
from samplebatch.convert import register_with_jax
from samplebatch.convert.experience import as_flat
from samplebatch.errors import ArgumentError, ColumnLengthError, ColumnMismatchError, FormatError, SequenceError
from samplebatch.transport import wire


def sequences(**columns: Any) -> SampleBatch:
    """Return six steps in sequences of 2, 3 and 1, with a score and a nested outcome per sequence."""
    return SampleBatch(
        obs=np.arange(6),
        eps_id=[0, 0, 1, 1, 1, 2],
        score=[1.0, 2.0, 3.0],
        outcome={"won": [True, False, True], "moves": [[1, 2], [3, 4], [5, 6]]},
        seq_lens=[2, 3, 1],
        per_sequence=["score", "outcome"],
        **columns,
    )


def scores(batch: SampleBatch) -> list[tuple[float, int, list[int]]]:
    """Return the score, first move and steps of each sequence; the two columns must correspond."""
    ends = np.cumsum(batch["seq_lens"]).tolist()
    steps = batch["obs"][batch.mask()].tolist()
    assert batch.per_sequence == ("outcome", "score")
    assert (batch["outcome"]["moves"][:, 1] == 2 * batch["score"]).all()
    parts = [steps[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return list(zip(batch["score"].tolist(), batch["outcome"]["moves"][:, 0].tolist(), parts, strict=True))


WHOLE = [(1.0, 1, [0, 1]), (2.0, 3, [2, 3, 4]), (3.0, 5, [5])]


def test_parts_keep_the_rows_of_their_sequences() -> None:
    batch = sequences()
    assert scores(batch) == WHOLE
    assert scores(batch[:3]) == WHOLE[:1]
    assert scores(batch.slice(1, 4)) == [(1.0, 1, [1]), (2.0, 3, [2, 3])]
    assert scores(batch.slice(1, 6).slice(1, 5)[:3]) == WHOLE[1:2]
    assert [scores(part) for part in batch.timeslices(3)] == [WHOLE[:1], WHOLE[1:]]
    assert [scores(part) for part in batch.split_by_episode()] == [[part] for part in WHOLE]
    assert scores(batch.take([5, 2, 3])) == [(3.0, 5, [5]), (2.0, 3, [2, 3])]
    assert scores(batch.take_sequences([2, 0])) == [WHOLE[2], WHOLE[0]]
    assert scores(batch.slice(-1, 2)) == [(1.0, 1, [0, 0, 1])]
    assert sorted(row for part in batch.minibatches(3, rng=1) for row in scores(part)) == WHOLE


@pytest.mark.parametrize("exclude_states", [False, True])
def test_padding_keeps_one_row_per_sequence(exclude_states: bool) -> None:
    batch = sequences(state_in_0=[7.0, 8.0, 9.0]).right_zero_pad(4, exclude_states=exclude_states)
    assert scores(batch) == WHOLE
    assert len(batch["state_in_0"]) == (3 if exclude_states else 12)
    assert scores(batch[2:]) == WHOLE[1:]
    assert scores(batch.slice(2, 6)) == WHOLE[1:]
    batch.shuffle(rng=3)
    assert scores(batch) != WHOLE
    assert sorted(scores(batch)) == WHOLE


def test_joined_batches_keep_the_declaration() -> None:
    batch = sequences()
    assert scores(concat_samples(batch.timeslices(3))) == WHOLE
    single = SampleBatch(obs=[9], eps_id=[4], score=[9.0], outcome={"won": [True], "moves": [[17, 18]]}, seq_lens=[1])
    # Sequences of one step have the same layout with and without the declaration.
    assert scores(concat_samples([single, batch])) == [(9.0, 17, [9]), *WHOLE]
    undeclared = batch.drop("score", "outcome").assign(score=np.arange(6.0))
    with pytest.raises(ColumnMismatchError, match="'score' must have one row per sequence in all batches"):
        concat_samples([batch.drop("outcome"), undeclared])
    filled = concat_samples([batch.drop("outcome"), batch.drop("outcome", "score")], missing="zero")
    assert filled["score"].tolist() == [1, 2, 3, 0, 0, 0]
    filled = concat_samples([batch.drop("outcome", "score"), batch.drop("outcome")], missing="zero")
    assert filled["score"].tolist() == [0, 0, 0, 1, 2, 3]
    assert filled[5:]["score"].tolist() == [0, 1, 2, 3]


def test_steps_are_divided_into_sequences_and_back() -> None:
    steps = SampleBatch(eps_id=[7, 7, 7, 8], score=[1.0, 1.0, 1.0, 2.0], per_sequence="score")
    assert steps[1:]["score"].tolist() == [1, 1, 2]
    batch = steps.to_sequences(2)
    assert batch["score"].tolist() == [1, 1, 2]
    assert [row["score"] for row in batch.rows()] == [1, 1, 1, 2]
    assert batch.to_pandas()["score"].tolist() == [1, 1, 1, 2]


def test_time_major_sequences() -> None:
    batch = SampleBatch(
        obs=np.arange(6).reshape(3, 2), score=[1.0, 2.0], seq_lens=[3, 2], per_sequence="score", _time_major=True
    )
    joined = concat_samples([batch, batch])
    assert joined["score"].tolist() == [1, 2, 1, 2]
    assert joined.to_batch_major()["score"].tolist() == [1, 2, 1, 2]
    with pytest.raises(ColumnLengthError, match="'score' must have 2 rows to match the sequences"):
        SampleBatch(obs=np.zeros((3, 2)), score=[1, 2, 3], seq_lens=[3, 2], per_sequence="score", _time_major=True)


def test_columns_per_sequence_are_renamed_selected_and_dropped() -> None:
    batch = sequences()
    assert batch.rename({"score": "reward", "outcome": "end"}).per_sequence == ("end", "reward")
    assert batch.rename({"outcome": "end"})[2:]["end"]["won"].tolist() == [False, True]
    assert batch.select("obs", "score", "seq_lens")[2:]["score"].tolist() == [2, 3]
    with pytest.raises(SequenceError, match="'score' has one row per sequence; drop it together with 'seq_lens'"):
        batch.drop("seq_lens", "outcome")
    assert batch.drop("seq_lens", "score", "outcome").per_sequence == ()
    batch["score"] = [4.0, 5.0, 6.0]
    with pytest.raises(ColumnLengthError, match="column 'score' must have 3 rows to match the sequences in 'seq_lens'"):
        batch["score"] = np.zeros(6)
    del batch["score"]
    batch["score"] = np.zeros(6)
    assert batch.per_sequence == ("outcome",)
    with pytest.raises(ColumnLengthError, match="column 'late' must have 6 rows"):
        batch["late"] = ["a", "b", "c"]
    batch.per_sequence = [*batch.per_sequence, "late"]
    batch["late"] = ["a", "b", "c"]
    assert batch[2:]["late"].tolist() == ["b", "c"]
    with pytest.raises(ColumnLengthError, match="column 'obs' must have 3 rows"):
        batch.per_sequence = "obs"
    assert "obs" not in batch.per_sequence
    batch.clear()
    assert batch.per_sequence == ()


def test_equality_compares_the_declaration() -> None:
    steps = {"obs": [1, 2], "score": [1.0, 2.0], "seq_lens": [1, 1]}
    assert SampleBatch(steps, per_sequence="score") == SampleBatch(steps, per_sequence=["score"])
    assert SampleBatch(steps, per_sequence="score") != SampleBatch(steps)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["b.arrow", "b.parquet", "b.hdf5", "folder"])
def test_files_preserve_columns_per_sequence(tmp_path: Path, name: str, padded: bool) -> None:
    batch = sequences().right_zero_pad(3) if padded else sequences()
    if name.endswith("hdf5"):
        pytest.importorskip("h5py")
    batch.save(tmp_path / name)
    loaded = samplebatch.load(tmp_path / name)
    assert loaded == batch
    assert scores(loaded[2:]) == WHOLE[1:]


def test_datasets_preserve_columns_per_sequence(tmp_path: Path) -> None:
    sequences().save(tmp_path / "folder")
    dataset = Dataset(tmp_path / "folder")
    dataset.extend(sequences().slice(1, 6))
    assert scores(dataset.take([1, 3])) == [WHOLE[1], (1.0, 1, [1])]
    dataset.compact()
    assert scores(dataset.read()) == [*WHOLE, (1.0, 1, [1]), *WHOLE[1:]]
    assert sum(len(part["score"]) for part in dataset.iter_batches(2)) == 6
    undeclared = sequences().drop("score").assign(score=np.arange(6.0))
    with pytest.raises(ColumnMismatchError, match="'score'"):
        dataset.extend(undeclared)


def test_sequences_of_a_dataset_have_the_first_row(tmp_path: Path) -> None:
    n = 8
    steps = SampleBatch(
        obs=np.arange(n),
        eps_id=np.arange(n) // 4,
        state_in_0=np.arange(n),
        score=np.arange(n) * 2,
        per_sequence="score",
    )
    steps.save(tmp_path / "steps")
    batch, rows = Dataset(tmp_path / "steps").sample_sequences(20, 3)
    assert batch["seq_lens"].tolist() == [3] * 20
    assert (batch["state_in_0"] == rows[:, 0]).all()
    assert (batch["score"] == 2 * rows[:, 0]).all()
    assert (batch["obs"] == rows.reshape(-1)).all()


def test_channels_and_pickles_preserve_columns_per_sequence() -> None:
    batch = sequences()
    for protocol in (2, 5):
        assert scores(pickle.loads(pickle.dumps(batch[2:], protocol))) == WHOLE[1:]
    unscored = batch.drop("score", "outcome")
    both = MultiAgentBatch({"a": batch, "b": unscored}, 6)
    producer, consumer = channel(1 << 20)
    with producer, consumer:
        for sent in (batch, batch[2:], both, unscored, batch):
            producer.send(sent)
            assert consumer.recv() == sent
        producer.send(both)
        assert scores(consumer.recv()["a"][2:]) == WHOLE[1:]


def test_jax_trees_preserve_columns_per_sequence() -> None:
    jax = pytest.importorskip("jax")
    register_with_jax()
    doubled = jax.tree.map(lambda values: values, SampleBatch(a=[1, 2, 3], s=[1, 2], seq_lens=[1, 2], per_sequence="s"))
    assert doubled.per_sequence == ("s",)


def test_names_of_missing_columns_and_other_values_are_rejected() -> None:
    with pytest.raises(ArgumentError, match="per_sequence must name columns of the batch, got 'scor'; did you"):
        SampleBatch(obs=[1, 2], score=[1.0], seq_lens=[2], per_sequence="scor")
    with pytest.raises(ArgumentError, match="per_sequence must contain column names, got a int"):
        SampleBatch(obs=[1, 2], per_sequence=[3])
    with pytest.raises(ArgumentError, match="per_sequence must contain column names, got a float"):
        SampleBatch(obs=[1, 2]).per_sequence = 3.0
    with pytest.raises(ColumnLengthError, match="column 'score' must have 1 rows to match the sequences"):
        SampleBatch(obs=[1, 2], score=[1.0, 2.0], seq_lens=[2], per_sequence="score")


@pytest.mark.parametrize("value", ["score", [1], {"score": 1}, [["score"]]])
def test_flags_of_foreign_bytes_are_validated(value: Any) -> None:
    table = sequences().to_arrow()
    about = table.schema.metadata[b"samplebatch"].decode()
    assert '"per_sequence": ["outcome", "score"]' in about
    damaged = about.replace('["outcome", "score"]', str(value).replace("'", '"'))
    with pytest.raises(FormatError):
        SampleBatch.from_arrow(table.replace_schema_metadata({b"samplebatch": damaged}))
    with pytest.raises(FormatError):
        wire.flags_of([None, False, 3, None, False, None, value])
    with pytest.raises(FormatError):
        wire.flags_of([None, False, 3, None, False, None, ["score"], 1])


def test_exports_repeat_values_per_sequence_for_each_step() -> None:
    assert as_flat(sequences(state_in_0=[1, 2, 3]))["score"].tolist() == [1, 1, 2, 2, 2, 3]
    assert list(as_flat(sequences(state_in_0=[1, 2, 3]))) == ["obs", "eps_id", "score", "outcome"]


@pytest.mark.parametrize("buffer", [ReplayBuffer(20), VectorReplayBuffer(20, 2), PrioritizedReplayBuffer(20, 0.6, 0.4)])
def test_sequences_of_a_buffer_have_the_first_row(buffer: ReplayBuffer) -> None:
    n = 10
    rows = {
        "obs": np.arange(n),
        "env_id": np.arange(n) // 5,
        "actions": np.zeros(n),
        "rewards": np.arange(n) / 2,
        "terminateds": np.arange(n) % 5 == 4,
        "truncateds": np.zeros(n, bool),
        "state_in_0": np.arange(3 * n).reshape(n, 3),
        "outcome": {"score": np.arange(n) * 2, "words": [f"step {i}" for i in range(n)]},
    }
    buffer.extend(SampleBatch(rows, per_sequence="outcome"))
    every = buffer.sample_indices(0)
    plain, indices = buffer.get_sequences(every, 4, burn_in=2)
    batch, same = buffer.get_sequences(every, 4, burn_in=2, per_sequence=["state_in_0", "outcome", "rew"])
    assert (same == indices).all()
    for name in ("obs", "act", "mask", "burn_in", "terminated"):
        assert (batch[name] == plain[name]).all()
    assert (batch.state_in_0 == plain.state_in_0[:, 0]).all()
    assert batch.state_in_0.shape == (n, 3)
    assert (batch.outcome.score == plain.outcome.score[:, 0]).all()
    assert (batch.outcome.words == plain.outcome.words[:, 0]).all()
    assert (batch.rew == plain.rew[:, 0]).all()
    for options in ({}, {"padded": False}, {"burn_in": 1}):
        batch, indices = buffer.sample_sequences(30, 3, per_sequence="state_in_0", **options)
        assert (batch.state_in_0[:, 0] == 3 * batch.obs[:, 0]).all()
        assert batch.obs.shape == (30, 3)
    assert buffer.sample_sequences(-1, 3, per_sequence="rew")[0].rew.shape == (0,)
    with pytest.raises(ArgumentError, match="per_sequence must name columns of the rows, got 'state'"):
        buffer.sample_sequences(3, 3, per_sequence="state")
    with pytest.raises(ArgumentError, match="per_sequence must contain column names, got a int"):
        buffer.get_sequences([0], 3, per_sequence=[1])


def test_stacked_first_rows() -> None:
    buffer = ReplayBuffer(10, stack_num=3, ignore_obs_next=True)
    for i in range(8):
        buffer.add(Batch(obs=i, act=0, rew=0.0, terminated=i == 3, truncated=False))
    plain, _ = buffer.get_sequences([1, 5], 3)
    batch, _ = buffer.get_sequences([1, 5], 3, per_sequence=("obs", "obs_next"))
    assert (batch.obs == plain.obs[:, 0]).all()
    assert (batch.obs_next == plain.obs_next[:, 0]).all()
    assert batch.obs.shape == batch.obs_next.shape == (2, 3)
