"""`save` and `load`: every type in every format, parts of files, and rejected files."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

import samplebatch
from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    load,
)
from samplebatch.column.ragged import RaggedColumn
from samplebatch.errors import (
    ArgumentError,
    CapacityError,
    ColumnNotFoundError,
    FormatError,
    StorageError,
    UntrustedPickleError,
)
from tests.optional import torch
from tests.storage.test_parquet import recurrent, steps, tensors

FILES = ("arrow", "parquet", "hdf5")
FIXED_WIDTH_TEXT = Path(__file__).parent / "fixed_width_text"
"""One batch in each format as an earlier version wrote it: text of fixed width, in UTF-32."""

BATCHES: dict[str, Any] = {
    "flat": steps,
    "slice": lambda: steps()[1:4],
    "no rows": lambda: SampleBatch(a=np.zeros((0, 3)), b=np.zeros(0, bool)),
    "recurrent": recurrent,
    "padded": lambda: recurrent().right_zero_pad(4),
    "tensors": tensors,
    "maps": lambda: SampleBatch(maps=RaggedColumn.from_rows([np.ones((i, 2), "f4") for i in range(3)], "maps")),
    "maps as tensors": lambda: BATCHES["maps"]().to_torch(floats="bfloat16")[1:],
    "agents": lambda: MultiAgentBatch({"left/1": steps(3), "right": steps(5)}, 5),
    "no agents": lambda: MultiAgentBatch({}, 3),
    "nested": lambda: Batch(
        obs={"camera": np.zeros((4, 2, 2), np.uint8), "arm": np.arange(4.0)},
        rew=torch.arange(4),
        flags=np.arange(4) % 2 == 0,
        policy=Batch(),
        hidden=Batch(state=None, other=np.arange(4)),
        name=np.array(["a", "b", None, "d"], object),
    ),
}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_restored_with_its_type(tmp_path: Path, name: str, form: str) -> None:
    batch = BATCHES[name]()
    batch.save(tmp_path / f"batch.{form}")
    back = load(tmp_path / f"batch.{form}")
    assert type(back) is type(batch)
    assert back == batch
    assert os.listdir(tmp_path) == [f"batch.{form}"]


ROWS = 5
DTYPES = ("?", "i1", "i8", "u2", "f2", "f4", "f8", "c8", "c16", "M8[D]", "M8[s]", "m8[ms]", "S3", "U4")
columns = st.one_of(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(((), (3,), (2, 2), (0,)))).map(
        lambda pair: (np.arange(ROWS * int(np.prod(pair[1]))) % 3).astype("i8").astype(pair[0]).reshape(ROWS, *pair[1])
    ),
    st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS).map(
        lambda lengths: RaggedColumn.from_rows([np.arange(n, dtype="f4") for n in lengths], "ragged")
    ),
    st.lists(
        st.recursive(
            st.none() | st.integers(-9, 9) | st.text("ab", max_size=2), lambda x: st.lists(x, max_size=2), max_leaves=3
        ),
        min_size=ROWS,
        max_size=ROWS,
    ).map(lambda rows: np.fromiter(rows, object, ROWS)),
    st.sampled_from((torch.float32, torch.bfloat16, torch.bool)).map(lambda dtype: torch.ones(ROWS, 2).to(dtype)),
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(("obs", "t", "infos", "x.y")), columns, min_size=1), st.sampled_from(FILES))
def test_every_kind_of_column_is_restored_through_every_format(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], form: str
) -> None:
    batch = SampleBatch(values)
    path = tmp_path_factory.getbasetemp() / f"any.{form}"
    batch.save(path)
    back = load(path, allow_pickle=True)
    assert back == batch
    for name in batch.column_names:
        assert back.column(name).dtype == batch.column(name).dtype


def fill(buffer: Any, n: int = 0) -> Any:
    for i in range(30):
        many = max(n, 1)
        step = Batch(
            obs={"a": np.full((many, 2), i, "f4"), "image": np.full((many, 4, 4), i, np.uint8)},
            act=np.arange(many),
            rew=np.ones(many) * i,
            terminated=np.full(many, i % 7 == 6),
            truncated=np.zeros(many, bool),
            obs_next={"a": np.full((many, 2), i + 1, "f4"), "image": np.full((many, 4, 4), i + 1, np.uint8)},
            info={"lives": np.full(many, i)},
        )
        buffer.add(step if n else step[0])
    return buffer


def name_observations(buffer: Any) -> Any:
    for i in range(5):
        words = {"obs": np.array(f"room {i}", object), "obs_next": np.array(f"room {i + 1}", object)}
        buffer.add(Batch(words, act=i, rew=1.0, terminated=i == 4, truncated=False))
    return buffer


BUFFERS: dict[str, Any] = {
    "plain": lambda: fill(ReplayBuffer(20)),
    "no next": lambda: fill(ReplayBuffer(20, ignore_obs_next=True, stack_num=2)),
    "compressed": lambda: fill(ReplayBuffer(20, compress="obs")),
    "vector": lambda: fill(VectorReplayBuffer(20, 2), 2),
    "prioritized": lambda: fill(PrioritizedReplayBuffer(20, alpha=0.6, beta=0.4)),
    "prioritized vector": lambda: fill(PrioritizedVectorReplayBuffer(20, 2, alpha=0.6, beta=0.4), 2),
    "cached": lambda: fill(CachedReplayBuffer(ReplayBuffer(20), 2, 10), 2),
    "objects": lambda: name_observations(ReplayBuffer(20)),
    "empty": lambda: ReplayBuffer(20),
}


def draws(buffer: Any) -> Any:
    return copy.deepcopy(buffer).sample(16)


@pytest.mark.parametrize("form", [".arrow", ".parquet", ".hdf5", ""])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_restored_with_its_class_rows_and_next_draws(tmp_path: Path, name: str, form: str) -> None:
    buffer = BUFFERS[name]()
    path = tmp_path / f"buffer{form}"
    buffer.save(path)
    with load(path) as back:
        assert type(back) is type(buffer)
        if len(buffer):
            (batch, indices), (expected, expected_indices) = draws(back), draws(buffer)
            assert np.array_equal(indices, expected_indices)
            assert batch == expected
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def agents(i: int) -> MultiAgentBatch:
    def rows(n: int) -> SampleBatch:
        t = np.arange(n)
        return SampleBatch(
            obs=t + 10.0 * i, actions=t, rewards=t * 1.0, terminateds=t == n - 1, eps_id=np.full(n, i), t=t
        )

    return MultiAgentBatch({"walker": rows(4), "guard": rows(3)}, 4)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_buffer_of_several_agents_resumes_exactly(tmp_path: Path, lockstep: bool) -> None:
    buffer = MultiAgentReplayBuffer({"walker": 9, "guard": 20}, lockstep=lockstep, stack_num=2)
    for i in range(4):
        buffer.add(agents(i))
    for _ in range(2):
        buffer.save(tmp_path / "agents")
    back = load(tmp_path / "agents")
    assert sorted(entry.suffix for entry in (tmp_path / "agents").iterdir()) == [".arrow", ".arrow", ".json"]
    for part in (buffer, back):
        part.add(agents(4))
    assert back.sample(8).batch == buffer.sample(8).batch
    with pytest.raises(FormatError, match="folder"):
        buffer.save(tmp_path / "agents.arrow")
    next((tmp_path / "agents").glob("0-*.arrow")).unlink()
    with pytest.raises(FormatError, match="'walker'"):
        load(tmp_path / "agents")


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("make", [steps, lambda: fill(ReplayBuffer(20))], ids=["batch", "buffer"])
def test_only_durable_saves_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, form: str, durable: bool
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    value, path = make(), tmp_path / f"steps.{form}"
    value.save(path, durable=durable)
    assert len(waited) == durable
    assert len(load(path, verify=True)) == len(value)


def test_a_folder_is_always_durable(tmp_path: Path) -> None:
    for value in (steps(), fill(ReplayBuffer(20)), MultiAgentReplayBuffer(4)):
        with pytest.raises(ArgumentError, match="durable must be True for a folder"):
            value.save(tmp_path / "folder", durable=False)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_other_contents_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="other files"):
        MultiAgentReplayBuffer(4).save(tmp_path)


@pytest.mark.parametrize("name", ["compressed", "objects"])
def test_a_buffer_that_cannot_be_mapped_is_a_file_in_its_folder(tmp_path: Path, name: str) -> None:
    buffer, folder = BUFFERS[name](), tmp_path / "buffer"
    for _ in range(2):
        buffer.save(folder)
    assert os.listdir(folder) == ["buffer.arrow"]
    assert [(report.path.name, report.fault) for report in samplebatch.verify(folder)] == [("buffer.arrow", "")]
    with pytest.raises(StorageError, match=r"load .*buffer\.arrow"):
        ReplayBuffer.open(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="other files"):
        buffer.save(folder)


def test_loading_a_hindsight_buffer_requires_its_function(tmp_path: Path) -> None:
    def reward(achieved: Any, desired: Any) -> Any:
        return -np.abs(achieved - desired).sum(-1)

    buffer = HERReplayBuffer(10, compute_reward_fn=reward, horizon=5)
    goal = {"observation": np.zeros(2), "achieved_goal": np.ones(1), "desired_goal": np.zeros(1)}
    buffer.add(Batch(obs=goal, act=0, rew=0.0, terminated=False, truncated=False, obs_next=goal))
    buffer.save(tmp_path / "her.parquet")
    assert len(load(tmp_path / "her.parquet", compute_reward_fn=reward)) == 1
    with pytest.raises(FormatError, match="compute_reward_fn"):
        load(tmp_path / "her.parquet")


# Parts of files


def wide(n: int = 3000) -> SampleBatch:
    return SampleBatch(
        obs={"image": np.zeros((n, 8, 8), np.uint8), "arm": np.arange(n) / 7},
        rewards=np.arange(n) % 10 / 1.0,
        terminateds=np.arange(n) % 100 == 99,
        eps_id=np.arange(n) // 100,
        infos=[{"i": i} for i in range(n)],
    )


@pytest.mark.parametrize("form", FILES)
def test_columns_are_selected_by_name(tmp_path: Path, form: str) -> None:
    wide(100).save(tmp_path / f"x.{form}")
    part = load(tmp_path / f"x.{form}", columns=["rewards", "obs.arm"])
    assert sorted(part.column_names) == ["obs.arm", "rewards"]
    full = load(tmp_path / f"x.{form}", columns=["obs"])
    assert full == wide(100).select("obs")
    with pytest.raises(ColumnNotFoundError, match=r"'reward'.*'rewards'"):
        load(tmp_path / f"x.{form}", columns=["reward"])
    with pytest.raises(ArgumentError, match="list of names"):
        load(tmp_path / f"x.{form}", columns="rewards")


FILTERS: dict[str, tuple[Any, Any]] = {
    "number": ([("rewards", ">", 7.0)], lambda b: np.asarray(b["rewards"]) > 7.0),
    "flag": ([("terminateds", "==", True)], lambda b: np.asarray(b["terminateds"])),
    "both": (
        [("eps_id", "in", [3, 5]), ("rewards", "<=", 1)],
        lambda b: np.isin(b["eps_id"], [3, 5]) & (b["rewards"] <= 1),
    ),
    "either": ([[("eps_id", "=", 3)], [("rewards", "!=", 0)]], lambda b: (b["eps_id"] == 3) | (b["rewards"] != 0)),
    "none": ([("rewards", ">", 100.0)], lambda b: np.zeros(len(b), bool)),
}


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("name", FILTERS)
def test_rows_are_selected_by_conditions(tmp_path: Path, name: str, form: str) -> None:
    filters, mask = FILTERS[name]
    batch = wide(1000)
    batch.save(tmp_path / f"x.{form}")
    expected = batch.take(np.flatnonzero(mask(batch)))
    assert load(tmp_path / f"x.{form}", filters=filters) == expected
    assert load(tmp_path / f"x.{form}", filters=filters, columns=["infos"]) == expected.select("infos")


def test_row_groups_excluded_by_statistics_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samplebatch.storage.tables.parquet._GROUP_NBYTES", 20_000)
    path = tmp_path / "x.parquet"
    wide().save(path)
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    assert len(groups) > 5
    start = groups[0].column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 200] = bytes(200)
    path.write_bytes(data)
    assert load(path, filters=[("eps_id", "==", 29)]) == wide()[2900:]
    with pytest.raises(FormatError):
        load(path, filters=[("eps_id", "==", 0)])


def test_policies_without_selected_rows_are_omitted(tmp_path: Path) -> None:
    batch = MultiAgentBatch({"a": wide(50), "b": SampleBatch(rewards=[9.0, 1.0], x=[1, 2])}, 50)
    for form in FILES:
        batch.save(tmp_path / f"x.{form}")
        actual = load(tmp_path / f"x.{form}", filters=[("rewards", ">", 8.0)], columns=["rewards"])
        assert {policy: part["rewards"].tolist() for policy, part in actual.items()} == {"a": [9.0] * 5, "b": [9.0]}
        assert list(load(tmp_path / f"x.{form}", filters=[("policy_id", "==", "b")])) == ["b"]
        assert load(tmp_path / f"x.{form}", columns=["x"])["b"]["x"].tolist() == [1, 2]


def test_sequences_are_selected_completely(tmp_path: Path) -> None:
    batch = recurrent()
    for form in FILES:
        batch.save(tmp_path / f"x.{form}")
        assert load(tmp_path / f"x.{form}", filters=[("seq_lens", ">", 1)]) == batch.take_sequences([1, 2])
        with pytest.raises(ArgumentError, match="'obs'"):
            load(tmp_path / f"x.{form}", filters=[("obs", ">", 1)])


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ([], "got none"),
        ([("rewards", ">")], "must be tuples"),
        ([("rewards", "~", 1)], "must be tuples"),
        ([("rewards", ">", "x")], "values of their types"),
        ([("infos", "==", 1)], "'infos'"),
    ],
)
def test_invalid_filters_are_rejected(tmp_path: Path, filters: Any, words: str) -> None:
    wide(10).save(tmp_path / "x.parquet")
    with pytest.raises(ArgumentError, match=words):
        load(tmp_path / "x.parquet", filters=filters)


def test_columns_and_filters_are_rejected_for_buffers(tmp_path: Path) -> None:
    for form in (".arrow", ".parquet", ".hdf5", ""):
        fill(ReplayBuffer(5)).save(tmp_path / f"x{form}")
        with pytest.raises(ArgumentError, match="must be None for the buffer"):
            load(tmp_path / f"x{form}", columns=["obs"])


# Sizes


@pytest.mark.parametrize("form", ["arrow", "parquet", "hdf5"])
def test_a_compressed_buffer_saves_compressed(tmp_path: Path, form: str) -> None:
    buffer = ReplayBuffer(2000, compress="obs", ignore_obs_next=True)
    for i in range(2000):
        frame = np.zeros((84, 84), np.uint8)
        frame[i % 80 : i % 80 + 4] = 255
        buffer.add(Batch(obs=frame, act=0, rew=0.0, terminated=i % 100 == 99, truncated=False))
    buffer.save(tmp_path / f"buffer.{form}")
    # LZF, which every build of h5py has, finds half as much as LZ4.
    limit = 2.2 if form == "hdf5" else 1.2
    assert os.path.getsize(tmp_path / f"buffer.{form}") < limit * buffer.nbytes < 2000 * 84 * 84 / 10
    assert np.array_equal(load(tmp_path / f"buffer.{form}")[1500].obs, buffer[1500].obs)


@pytest.mark.parametrize(
    ("form", "codecs"), [("arrow", ("lz4", "zstd")), ("parquet", ("lz4", "gzip")), ("hdf5", ("gzip", "lzf"))]
)
def test_compression_is_an_argument(tmp_path: Path, form: str, codecs: tuple[str, ...]) -> None:
    path, batch = tmp_path / f"x.{form}", SampleBatch(a=np.zeros((1000, 50)))
    batch.save(path, compression="none")
    plain = path.stat().st_size
    for codec in codecs:
        batch.save(path, compression=codec)
        assert path.stat().st_size < plain / 3 or form == "parquet"
        assert load(path) == batch
    with pytest.raises(ValueError, match="compression"):
        batch.save(path, compression="rar")


def test_columns_compressed_in_memory_are_compressed_in_the_file(tmp_path: Path) -> None:
    batch = SampleBatch(obs=np.zeros((500, 1000), np.uint8))
    expected = batch.copy()
    batch.compress(bulk=True)
    for form in ("arrow", "hdf5"):
        batch.save(tmp_path / f"x.{form}")
        assert (tmp_path / f"x.{form}").stat().st_size < 50_000
        assert load(tmp_path / f"x.{form}") == expected


# Refusals


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x.pkl", "x.what", "x.npz"])
def test_extensions_of_other_formats_are_rejected(tmp_path: Path, name: str) -> None:
    values: list[Any] = [steps(), Batch(a=[1]), MultiAgentBatch({}, 0), ReplayBuffer(4)]
    for value in values:
        with pytest.raises(FormatError, match=name):
            value.save(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_a_format_is_not_written_with_the_extension_of_another(tmp_path: Path) -> None:
    writers: list[tuple[Any, str]] = [
        (samplebatch.write_arrow, "x.parquet"),
        (samplebatch.write_arrow, "x.csv"),
        (samplebatch.write_parquet, "x.arrow"),
        (lambda batch, path: ReplayBuffer(3).save_hdf5(path), "x.arrow"),
    ]
    for write, name in writers:
        with pytest.raises(FormatError, match=r"the suffix of .* must be"):
            write(SampleBatch(a=[1]), tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("form", FILES)
def test_the_format_of_a_file_is_detected_from_its_bytes(tmp_path: Path, form: str) -> None:
    for other in (f"x.{actual}" for actual in ("arrow", "parquet", "hdf5", "bin")):
        SampleBatch(a=[1]).save(tmp_path / f"x.{form}")
        os.rename(tmp_path / f"x.{form}", tmp_path / other)
        assert load(tmp_path / other) == SampleBatch(a=[1])


def foreign(folder: Path) -> list[Path]:
    table = pa.table({"a": [1, 2]})
    parquet.write_table(table, folder / "foreign.parquet")
    with pa.ipc.new_file(folder / "foreign.arrow", table.schema) as writer:
        writer.write_table(table)
    csv.write_csv(table, folder / "foreign.csv")
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "foreign.hdf5", "w") as file:
        file["a"] = [1, 2]
    for name in ("empty.arrow", "empty.parquet", "empty.hdf5"):
        (folder / name).touch()
    (folder / "folder").mkdir()
    return sorted(folder.iterdir())


def test_foreign_files_and_folders_are_rejected_with_their_path(tmp_path: Path) -> None:
    for path in foreign(tmp_path):
        with pytest.raises(FormatError, match=path.name):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.arrow")


@pytest.mark.parametrize("form", FILES)
def test_files_truncated_anywhere_are_rejected(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x.{form}"
    for value in (steps(), Batch(a=np.arange(3)), fill(ReplayBuffer(5))):
        value.save(path)
        data = path.read_bytes()
        for length in range(0, len(data), 1 + len(data) // 12):
            path.write_bytes(data[:length])
            with pytest.raises(FormatError, match=path.name):
                load(path)


@pytest.mark.parametrize("form", FILES)
def test_pickle_permission_and_memory_limit_apply_to_every_format(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x.{form}"
    SampleBatch(a=[1], infos=[{"x": {1, 2}, "y": complex}]).save(path)
    with pytest.raises(UntrustedPickleError, match="infos"):
        load(path)
    assert load(path, allow_pickle=True)["infos"][0]["y"] is complex
    SampleBatch(infos=[{"i": i} for i in range(1000)]).save(path)
    with pytest.raises(CapacityError):
        load(path, max_nbytes=1000)


def test_ragged_rows_with_invalid_elements_are_rejected(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "maps.hdf5"
    BATCHES["maps as tensors"]().save(path)
    with h5py.File(path, "r+") as file:
        file["maps"]["elements"].attrs["__data_type__"] = "ndarray"
    with pytest.raises(FormatError, match="column 'maps' must have elements in a tensor, got 'tensor'"):
        load(path, verify=False)


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [[1, 2, 3]], [[], []], [], [[1], []]], ids=str)
@pytest.mark.parametrize("suffix", FILES)
def test_ragged_columns_remain_ragged_for_any_lengths(suffix: str, rows: list[list[int]], tmp_path: Path) -> None:
    batch = SampleBatch(ids=rows, obs={"path": rows}, t=np.arange(len(rows)), ragged={"ids": "int64", "obs": "int32"})
    path = tmp_path / f"rows.{suffix}"
    batch.save(path)
    read = load(path)
    assert read == batch
    assert {name: read.column(name).kind for name in read.column_names} == {
        "ids": "ragged",
        "obs.path": "ragged",
        "t": "tensor",
    }


def test_arrow_lists_become_ragged_and_fixed_size_lists_tensors() -> None:
    lists = pa.table({"ids": pa.array([[1, 2], [3, 4]]), "box": pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))})
    batch = SampleBatch.from_arrow(lists)
    assert (batch.column("ids").kind, batch.column("box").kind) == ("ragged", "tensor")


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*FILES, "pickle"])
def test_files_with_text_of_fixed_width_are_read(form: str) -> None:
    path = FIXED_WIDTH_TEXT / f"batch.{form}"
    batch = pickle.loads(path.read_bytes()) if form == "pickle" else load(path, allow_pickle=form == "hdf5")
    assert {name: batch.column(name).to_numpy().tolist() for name in ("words", "codes", "grid", "long", "maybe")} == {
        "words": ["left", "", "naïve 漢字", "x"],
        "codes": [b"ab", b"", b"\x00\xff", b"c"],
        "grid": [["a", "bc"]] * 4,
        "long": ["a", "bb" * 20, "", "c"],
        "maybe": ["a", None, "", "c"],
    }
    assert {batch.column(name).kind for name in ("words", "codes", "grid")} == {"text"}
    assert [row.tolist() for row in batch["tokens"]] == [["a", "bc"], [], ["é"], ["x", "y", ""]]
    assert batch["t"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("form", FILES)
def test_text_is_restored_exactly(form: str, tmp_path: Path) -> None:
    batch = SampleBatch(
        words=["a" * 10_000, "b", "", "漢"],
        maybe=["a", None, "\0", ""],
        raw=[b"\0", b"a\0", b"", b"\xff"],
        some=[None, b"a", None, b""],
        grid=np.array([[["a", ""], ["\u6f22", "b"]]] * 4),
        nan=np.array(["a", np.nan, "", "b"], np.dtypes.StringDType(na_object=np.nan)),
    )
    for part in (batch, batch[1:3], batch[:0]):
        part.save(tmp_path / f"batch.{form}")
        back = load(tmp_path / f"batch.{form}")
        assert back == part
        assert {back.column(name).kind for name in back} == {"text"}
    assert os.path.getsize(tmp_path / f"batch.{form}") < 40_000


@pytest.mark.parametrize("part", ["data", "offsets", "present", "header"])
def test_inconsistent_parts_of_text_are_rejected(part: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    SampleBatch(tag=["a", None, "é"]).save(tmp_path / "batch.hdf5")
    with h5py.File(tmp_path / "batch.hdf5", "r+") as file:
        values = file["tag"].pop(part) if part == "header" else file["tag"][part][()]
        if part != "header":
            del file["tag"][part]
            file["tag"][part] = {"data": values[:-1], "offsets": values[::-1], "present": values[:0]}[part]
    with pytest.raises(FormatError):
        load(tmp_path / "batch.hdf5", verify=False)
