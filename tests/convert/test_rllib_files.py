"""RLlib's offline data in JSON and Parquet, written and read by RLlib."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.convert import (
    read_rllib_json,
    read_rllib_parquet,
    write_rllib_episodes,
    write_rllib_json,
    write_rllib_parquet,
)
from samplebatch.convert.rllib import pack
from samplebatch.errors import CapacityError, ColumnMismatchError, ColumnTypeError, FormatError, UntrustedPickleError
from tests.convert.experience import two_episodes
from tests.malice import Mark

pytest.importorskip("ray")
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.json_reader import JsonReader
from ray.rllib.offline.json_writer import JsonWriter
from ray.rllib.policy.sample_batch import MultiAgentBatch as TheirMultiAgentBatch
from ray.rllib.policy.sample_batch import SampleBatch as TheirSampleBatch
from ray.rllib.utils.compression import pack as rllib_pack
from ray.rllib.utils.compression import unpack as rllib_unpack


def theirs(batch: SampleBatch) -> TheirSampleBatch:
    return TheirSampleBatch({name: np.array(batch[name]) for name in batch})


def written_by_rllib(folder: Path, batch: Any) -> None:
    writer = JsonWriter(str(folder))
    writer.write(batch)
    writer.cur_file.close()


def read_by_rllib(path: Path, count: int) -> list[Any]:
    reader = JsonReader(str(path))
    batches = [reader.next() for _ in range(count)]
    reader.cur_file.close()
    return batches


def assert_same_values(actual: SampleBatch, expected: SampleBatch) -> None:
    assert set(actual.column_names) == set(expected.column_names)
    for path in expected.column_names:
        assert np.asarray(actual[path]).tolist() == expected[path].tolist()


def test_json_of_rllib_is_read(tmp_path: Path) -> None:
    written_by_rllib(tmp_path, theirs(two_episodes()))
    actual = read_rllib_json(tmp_path)
    assert isinstance(actual, SampleBatch)
    assert_same_values(actual, two_episodes())
    assert actual["obs"].dtype == np.float32


def test_json_of_rllib_with_several_policies_is_read(tmp_path: Path) -> None:
    written_by_rllib(tmp_path, TheirMultiAgentBatch({"a": theirs(two_episodes()), "b": theirs(two_episodes()[:2])}, 5))
    actual = read_rllib_json(tmp_path)
    assert isinstance(actual, MultiAgentBatch)
    assert actual.count == 5
    assert_same_values(actual["b"], two_episodes()[:2])


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("compress", [(), ("obs", "new_obs", "actions")], ids=["plain", "packed"])
def test_rllib_reads_written_json(tmp_path: Path, nested: bool, compress: tuple[str, ...]) -> None:
    batch = two_episodes(nested=nested)
    write_rllib_json([batch[:3], batch[3:]], tmp_path / "steps.json", compress_columns=compress)
    first, second = read_by_rllib(tmp_path / "steps.json", 2)
    assert [first.count, second.count] == [3, 2]
    assert np.asarray(first["rewards"]).tolist() == batch["rewards"][:3].tolist()
    obs = first["obs"]["x"] if nested else first["obs"]
    assert np.asarray(obs).tolist() == (batch["obs.x"] if nested else batch["obs"])[:3].tolist()
    actual = read_rllib_json(tmp_path / "steps.json")
    assert_same_values(actual, batch)


def test_several_policies_and_infos_are_restored_from_json(tmp_path: Path) -> None:
    batch = two_episodes()
    batch["infos"] = [{"lives": i} for i in range(5)]
    write_rllib_json(MultiAgentBatch({"p": batch}, 5), tmp_path / "steps.json")
    actual = read_rllib_json(tmp_path)
    assert actual["p"]["infos"].tolist() == batch["infos"].tolist()
    (read,) = read_by_rllib(tmp_path / "steps.json", 1)
    assert read.count == 5


def test_rllib_unpacks_packed_values() -> None:
    value = {"x": np.arange(6, dtype=np.int16).reshape(2, 3)}
    assert rllib_unpack(pack(value))["x"].tolist() == value["x"].tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1 of .* must be valid JSON"),
        ('{"type": "Episode"}', "line 1 of .* must be an RLlib SampleBatch or MultiAgentBatch"),
        ("[" * 100_000, "line 1 of .* must be valid JSON"),
        ("[1]", "line 1 of .* must be an RLlib SampleBatch or MultiAgentBatch"),
        ('{"type": "MultiAgentBatch", "policy_batches": {}, "count": "x"}', "must have a count of environment steps"),
        ('{"type": "MultiAgentBatch", "policy_batches": {"a": 3}, "count": 3}', "must contain columns by name"),
        (
            '{"type": "SampleBatch", "obs": "BCJNGGRA"}',
            "column 'obs' in line 1 of .* must have rows packed by RLlib",
        ),
        ('{"type": "SampleBatch", "obs": "é"}', "column 'obs' in line 1 of .* must have rows packed by RLlib"),
        ("", "must contain RLlib batches, got none"),
    ],
)
def test_damaged_json_is_rejected(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "steps.json").write_text(line)
    with pytest.raises(FormatError, match=message):
        read_rllib_json(tmp_path / "steps.json")


def test_packed_code_is_not_run(tmp_path: Path, mark: Path) -> None:
    line = json.dumps({"type": "SampleBatch", "obs": rllib_pack([Mark(mark)])})
    (tmp_path / "steps.json").write_text(line)
    with pytest.raises(UntrustedPickleError, match="column 'obs' in line 1"):
        read_rllib_json(tmp_path)
    table = pa.table({"obs": [rllib_pack(Mark(mark))], "rewards": [1.0]})
    parquet.write_table(table, tmp_path / "steps.parquet")
    with pytest.raises(UntrustedPickleError, match="column 'obs'"):
        read_rllib_parquet(tmp_path)


def test_packed_zeros_are_bounded(tmp_path: Path) -> None:
    bomb = base64.b64encode(lz4.frame.compress(pickle.dumps(np.zeros(1 << 20)))).decode()
    (tmp_path / "steps.json").write_text(json.dumps({"type": "SampleBatch", "obs": bomb}))
    with pytest.raises(CapacityError, match="column 'obs'"):
        read_rllib_json(tmp_path, max_nbytes=1 << 22)
    assert len(read_rllib_json(tmp_path)) == 1 << 20


def test_objects_that_json_cannot_represent_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ColumnTypeError, match="column 'infos' must contain values that JSON can represent"):
        write_rllib_json(SampleBatch(rewards=[1.0], infos=[{"x": {1, 2}}]), tmp_path / "steps.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_rows_of_parquet_are_restored(tmp_path: Path, nested: bool) -> None:
    batch = two_episodes(nested=nested)
    write_rllib_parquet(batch, tmp_path / "steps.parquet")
    actual = read_rllib_parquet(tmp_path)
    for path in batch.column_names:
        expected = batch[path] if path != "eps_id" else batch[path].astype(str)
        assert np.asarray(actual[path]).tolist() == expected.tolist()
    assert np.asarray(actual["obs.x" if nested else "obs"]).dtype == np.float32


def test_nested_columns_of_rows_must_be_packed(tmp_path: Path) -> None:
    with pytest.raises(
        ColumnTypeError, match="column 'obs' must be packed, got nested columns; add it to compress_columns"
    ):
        write_rllib_parquet(two_episodes(nested=True), tmp_path / "a.parquet", compress_columns=())


@pytest.mark.parametrize("other", [{"y": 1.0}, 3.0, {"x": (1.0, 2.0)}], ids=["name", "number", "tuple"])
def test_packed_rows_that_are_nested_in_different_ways_are_rejected(tmp_path: Path, other: Any) -> None:
    parquet.write_table(pa.table({"obs": [pack({"x": (1.0,)}), pack(other)]}), tmp_path / "a.parquet")
    with pytest.raises(ColumnMismatchError, match=r"column 'obs(\.x)?' must have the same structure in all rows"):
        read_rllib_parquet(tmp_path)


def test_rllib_creates_episodes_from_written_rows(tmp_path: Path) -> None:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.offline.offline_prelearner import SCHEMA, OfflinePreLearner

    write_rllib_parquet(two_episodes(), tmp_path / "steps.parquet")
    table = parquet.read_table(tmp_path / "steps.parquet")
    rows = {name: np.array(table[name].to_pylist()) for name in table.column_names}
    learner = OfflinePreLearner.__new__(OfflinePreLearner)
    learner.config = AlgorithmConfig()
    result = learner._map_to_episodes(
        rows, schema=SCHEMA, input_compress_columns=["obs", "new_obs"], is_multi_agent=False
    )["episodes"]
    assert len(result) == 5
    assert result[1].get_observations()[1].tolist() == two_episodes()["new_obs"][1].tolist()


def recorded() -> list[SingleAgentEpisode]:
    created = []
    for k in range(2):
        episode = SingleAgentEpisode(id_=f"e{k}")
        episode.add_env_reset(np.array([k, 0], np.float32))
        for i in range(3):
            episode.add_env_step(
                np.array([k, i + 1], np.float32), np.int64(i % 2), float(i), {"lives": i}, terminated=i == 2,
                extra_model_outputs={"action_logp": np.float32(-i)},
            )  # fmt: skip
        created.append(episode)
    return created


def test_packed_episodes_of_rllib_are_read(tmp_path: Path) -> None:
    msgpack, numpy_in_msgpack = pytest.importorskip("msgpack"), pytest.importorskip("msgpack_numpy")
    rows = [msgpack.packb(episode.get_state(), default=numpy_in_msgpack.encode) for episode in recorded()]
    parquet.write_table(pa.table({"item": rows}), tmp_path / "a.parquet")
    actual = read_rllib_parquet(tmp_path)
    assert actual["obs"].tolist() == [[k, i] for k in range(2) for i in range(3)]
    assert actual["new_obs"][:, 1].tolist() == [1, 2, 3, 1, 2, 3]
    assert actual["action_logp"].tolist() == [0, -1, -2] * 2
    assert actual["eps_id"].tolist() == ["e0"] * 3 + ["e1"] * 3
    assert actual["infos"][1] == {"lives": 1}


def test_rllib_reads_written_episodes(tmp_path: Path) -> None:
    msgpack, numpy_in_msgpack = pytest.importorskip("msgpack"), pytest.importorskip("msgpack_numpy")
    write_rllib_episodes(two_episodes(), tmp_path / "a.parquet")
    rows = parquet.read_table(tmp_path / "a.parquet")["item"].to_pylist()
    first, second = (
        SingleAgentEpisode.from_state(msgpack.unpackb(row, object_hook=numpy_in_msgpack.decode)) for row in rows
    )
    assert first.is_terminated
    assert second.get_observations().tolist() == [[10, 10.5], [11, 11.5], [12, 12.5]]
    actual = read_rllib_parquet(tmp_path)
    assert actual["rewards"].tolist() == two_episodes()["rewards"].tolist()


def test_damaged_episodes_are_rejected(tmp_path: Path, mark: Path) -> None:
    msgpack = pytest.importorskip("msgpack")
    code = {b"nd": True, b"type": [["", "|O"]], b"kind": b"O", b"shape": [1], b"data": pickle.dumps(Mark(mark))}
    state = recorded()[0].get_state() | {"observations": {"data": code, "lookback": 0}}
    for row, error in (
        (b"\xc1", FormatError),
        (msgpack.packb(3), FormatError),
        (msgpack.packb({"id_": "a"}), FormatError),
        (msgpack.packb(state, default=lambda value: value.item()), UntrustedPickleError),
    ):
        parquet.write_table(pa.table({"item": [row]}), tmp_path / "a.parquet")
        with pytest.raises(error, match="episode 0"):
            read_rllib_parquet(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(FormatError, match="must be an intact Parquet file"):
        read_rllib_parquet(tmp_path)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(FormatError, match=r"must be a folder with .parquet files, got none"):
        read_rllib_parquet(tmp_path)


def test_strings_of_invalid_utf_8_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    data = pa.py_buffer(b"ab\xff")
    text = pa.StringArray.from_buffers(3, pa.py_buffer(np.arange(4, dtype=np.int32)), data)
    parquet.write_table(pa.table({"eps_id": text, "rewards": pa.array([1.0, 2.0, 3.0])}), path)
    with pytest.raises(FormatError, match=r"steps.parquet' must contain valid values"):
        read_rllib_parquet(path)


def test_columns_that_occur_twice_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    write_rllib_parquet(two_episodes(), path)
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("t", table.column("t")), path)
    with pytest.raises(FormatError, match=r"steps.parquet' must contain column 't' only once, got a duplicate"):
        read_rllib_parquet(path)
