"""Datasets in LeRobot's layout, compared with the libraries that LeRobot's loader uses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from samplebatch import Collector, SampleBatch
from samplebatch.convert import lerobot, read_lerobot, write_lerobot
from samplebatch.errors import (
    ArgumentError,
    CapacityError,
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    FormatError,
    MissingExtraError,
    RowIndexError,
    StorageError,
)
from tests.convert.experience import two_episodes

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
KEPT = ("obs", "actions", "rewards", "terminateds", "truncateds", "eps_id", "t")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_lerobot(two_episodes(), tmp_path / "walk", fps=10, task="walk")
    return tmp_path / "walk"


def info_of(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((folder / "meta/info.json").read_text())
    return actual


def change_info(folder: Path, **changed: Any) -> None:
    (folder / "meta/info.json").write_text(json.dumps(info_of(folder) | changed))


def change_feature(folder: Path, name: str, **changed: Any) -> None:
    features = info_of(folder)["features"]
    features[name] = features.get(name, {}) | changed
    change_info(folder, features=features)


def change_column(path: Path, name: str, values: Any) -> None:
    table = parquet.read_table(path)
    at = table.schema.get_field_index(name)
    table = table.append_column(name, values) if at < 0 else table.set_column(at, name, values)
    parquet.write_table(table, path)


def add_images(folder: Path, images: list[Any], shape: list[int]) -> None:
    """Add images that are embedded as in LeRobot's datasets."""
    rows = [{"bytes": image, "path": f"frame-{i:06d}.png"} for i, image in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    change_column(folder / DATA, "observation.images.top", [pa.array(rows, kind)])
    change_feature(folder, "observation.images.top", dtype="image", shape=shape, names=["height", "width", "channels"])


def png(value: int, mode: str = "RGB") -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new(mode, (5, 2), (value,) * len(mode)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_is_restored_exactly(tmp_path: Path, nested: bool) -> None:
    write_lerobot(two_episodes(nested=nested), tmp_path / "walk", fps=10)
    actual, expected = read_lerobot(tmp_path / "walk"), two_episodes(nested=nested)
    assert actual.select(*KEPT[1:]) == expected.select(*KEPT[1:])
    for name in ("obs.x", "obs.camera", "obs.pair.0", "obs.pair.1") if nested else ("obs",):
        assert actual[name].dtype == expected[name].dtype
        assert np.array_equal(actual[name], expected[name])
    assert actual["timestamp"].tolist() == np.array([0, 0.1, 0.2, 0, 0.1], np.float32).tolist()
    assert "new_obs" not in actual


def test_scalars_and_vectors_of_length_one_are_distinguished(tmp_path: Path) -> None:
    batch = two_episodes()
    batch["obs"] = np.ones((5, 1), np.float32)
    write_lerobot(batch, tmp_path / "walk", fps=10)
    actual = read_lerobot(tmp_path / "walk")
    assert actual["obs"].shape == (5, 1)
    assert actual["actions"].shape == (5,)


def test_a_dataset_of_several_files_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot, "_CHUNK_FILES", 1)
    batch = two_episodes()
    batch["big"] = np.ones((5, 100, 1000))
    monkeypatch.setattr(lerobot, "_FILE_MIB", 2)
    write_lerobot(batch, tmp_path / "walk", fps=10)
    assert (tmp_path / "walk/data/chunk-001/file-000.parquet").is_file()
    assert read_lerobot(tmp_path / "walk").select(*KEPT) == two_episodes().select(*KEPT)
    assert read_lerobot(tmp_path / "walk", episodes=[1])["t"].tolist() == [0, 1]


def test_columns_are_selected_by_name_and_episodes_by_number(folder: Path) -> None:
    actual = read_lerobot(folder, columns=["action", "observation.state"], episodes=[1])
    assert set(actual) == {"obs", "actions", "eps_id", "t"}
    assert actual["obs"].tolist() == two_episodes()["obs"][3:].tolist()
    with pytest.raises(ColumnNotFoundError, match="no column 'actions'; did you mean 'action'"):
        read_lerobot(folder, columns=["actions"])
    with pytest.raises(RowIndexError, match="episode 2 must be one of the dataset's 2 episodes"):
        read_lerobot(folder, episodes=[2])


def test_a_done_flag_without_other_flags_becomes_dones(folder: Path) -> None:
    actual = read_lerobot(folder, columns=["next.done"])
    assert actual["dones"].tolist() == [False, False, True, False, True]
    assert "terminateds" not in actual


def test_an_unfinished_episode_is_written_as_truncated(tmp_path: Path) -> None:
    write_lerobot(two_episodes()[:2], tmp_path / "walk", fps=10)
    assert read_lerobot(tmp_path / "walk")["truncateds"].tolist() == [False, True]


def test_recordings_need_neither_rewards_nor_flags(tmp_path: Path) -> None:
    write_lerobot(two_episodes().select("obs", "actions", "eps_id"), tmp_path / "walk", fps=10)
    assert set(read_lerobot(tmp_path / "walk")) == {"obs", "actions", "eps_id", "t", "timestamp", "task_index"}


def test_several_tasks_are_preserved(tmp_path: Path) -> None:
    batch = two_episodes()
    batch["task_index"] = [0, 0, 0, 1, 1]
    write_lerobot(batch, tmp_path / "walk", fps=10, task=["walk", "run"])
    assert read_lerobot(tmp_path / "walk")["task_index"].tolist() == [0, 0, 0, 1, 1]
    assert parquet.read_table(tmp_path / "walk" / EPISODES)["tasks"].to_pylist() == [["walk"], ["run"]]
    with pytest.raises(ColumnMismatchError, match="column 'task_index' must contain indices of task, from 0 to 0"):
        write_lerobot(batch, tmp_path / "run", fps=10, task=["walk"])


# As LeRobot's loader reads them: JSON, pandas for tasks, `datasets` with features for episodes and data


def test_data_are_read_with_the_features_of_the_lerobot_loader(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_lerobot(two_episodes(nested=True), tmp_path / "walk", fps=10)
    features = {}
    for name, about in info_of(tmp_path / "walk")["features"].items():
        value = datasets.Value(about["dtype"])
        if about["shape"] == [1]:
            features[name] = value
        elif len(about["shape"]) == 1:
            features[name] = datasets.Sequence(length=about["shape"][0], feature=value)
        else:
            features[name] = datasets.Array2D(shape=tuple(about["shape"]), dtype=about["dtype"])
    actual = datasets.Dataset.from_parquet(
        [str(tmp_path / "walk" / DATA)], features=datasets.Features(features), cache_dir=str(tmp_path / "cache")
    )
    assert actual[3]["observation.x"] == [10.0, 10.5]
    assert np.shape(actual[3]["observation.camera"]) == (4, 1)
    assert actual["next.done"][:] == [False, False, True, False, True]
    assert actual["index"][:] == list(range(5))


def test_tasks_are_the_index_of_a_data_frame(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    tasks = pandas.read_parquet(folder / "meta/tasks.parquet")
    assert tasks.iloc[0].name == "walk"
    assert int(tasks.loc["walk"].task_index) == 0


def test_metadata_of_episodes_and_dataset_are_correct(folder: Path) -> None:
    first, second = parquet.read_table(folder / EPISODES).to_pylist()
    assert [second[f"dataset_{end}_index"] for end in ("from", "to")] == [3, 5]
    assert (first["length"], first["tasks"], first["data/file_index"]) == (3, ["walk"], 0)
    assert second["stats/observation.state/max"] == [11, 11.5]
    assert second["stats/next.reward/count"] == [2]
    info = info_of(folder)
    assert (info["total_frames"], info["total_episodes"], info["fps"]) == (5, 2, 10)
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [2], "names": ["state_0", "state_1"]}
    stats = json.loads((folder / "meta/stats.json").read_text())
    for key in ("mean", "std", "min", "max"):
        assert stats["next.reward"][key] == [pytest.approx(getattr(np, key)(two_episodes()["rewards"]))]
        full = getattr(np, key)(two_episodes()["obs"], axis=0).tolist()
        assert stats["observation.state"][key] == pytest.approx(full)
    assert stats["observation.state"]["count"] == [5]
    assert stats["observation.state"].keys() >= {"min", "std", "q01", "q10", "q50", "q90", "q99"}


# Images and videos


def test_embedded_images_become_arrays(folder: Path) -> None:
    add_images(folder, [png(i) for i in range(5)], [2, 5, 3])
    actual = read_lerobot(folder)
    assert actual["obs.images.top"].shape == (5, 2, 5, 3)
    assert actual["obs.images.top"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert actual["obs.state"].tolist() == two_episodes()["obs"].tolist()


def test_images_may_declare_channels_first(folder: Path) -> None:
    add_images(folder, [png(i, "L") for i in range(5)], [1, 2, 5])
    assert read_lerobot(folder)["obs.images.top"].shape == (5, 2, 5, 1)


def test_images_that_differ_from_their_description_are_rejected(folder: Path) -> None:
    pictures = [png(i) for i in range(5)]
    for images, shape, message in (
        (pictures, [3, 3, 3], "row 0 of column 'observation.images.top' must be an image of 3 by 3"),
        ([*pictures[:4], b"GIF89a"], [2, 5, 3], "row 4 .* must be an embedded PNG or JPEG"),
        ([*pictures[:4], None], [2, 5, 3], "row 4 .* must be an embedded PNG or JPEG"),
        ([*pictures[:4], pictures[4][:41]], [2, 5, 3], "row 4 .* must be an embedded PNG or JPEG"),
        (pictures, [2, 5, 7], "must have images of 1, 3 or 4 channels"),
        (pictures, [2, 5], "must have images of three dimensions"),
    ):
        add_images(folder, images, shape)
        with pytest.raises(FormatError, match=message):
            read_lerobot(folder)
    add_images(folder, pictures, [1 << 20, 1 << 20, 3])
    with pytest.raises(CapacityError, match=r"column 'observation.images.top' must fit into"):
        read_lerobot(folder)


def test_images_without_pillow_are_rejected_with_the_feature_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_images(folder, [png(i) for i in range(5)], [2, 5, 3])
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(
        MissingExtraError, match=r"'observation.images.top' must be decoded with Pillow: .*samplebatch\[lerobot\]"
    ):
        read_lerobot(folder)
    assert len(read_lerobot(folder, columns=["observation.state"])) == 5


def test_videos_are_rejected_with_the_feature_name_unless_omitted(folder: Path) -> None:
    change_feature(folder, "observation.images.top", dtype="video", shape=[2, 5, 3])
    with pytest.raises(ColumnTypeError, match=r"column 'observation.images.top' must not be a video"):
        read_lerobot(folder)
    assert read_lerobot(folder, columns=["observation.state"])["obs"].shape == (5, 2)


# Descriptions that are wrong or lie


@pytest.mark.parametrize(
    "path",
    [
        "../data/file-{file_index:03d}.parquet",
        "/etc/data.parquet",
        "data/{file_index.__class__}.parquet",
        "data/{file_index:0999999999d}.parquet",
        "data/{}.parquet",
        "data\\..\\x.parquet",
        "data/file.txt",
        7,
    ],
)
def test_paths_outside_the_folder_are_rejected(folder: Path, path: Any) -> None:
    change_info(folder, data_path=path)
    with pytest.raises(FormatError, match="must have a 'data_path' to Parquet files in the folder"):
        read_lerobot(folder)


def test_another_path_template_inside_the_folder_is_used(folder: Path) -> None:
    (folder / DATA).rename(folder / "rows-0-00.parquet")
    change_info(folder, data_path="rows-{chunk_index}-{file_index:02d}.parquet")
    assert len(read_lerobot(folder)) == 5


def test_an_invalid_description_is_rejected(folder: Path) -> None:
    for changed, message in (
        ({"codebase_version": "v2.1"}, "must have layout version 3"),
        ({"features": []}, "must have an object as 'features'"),
        (
            {"features": {"action": {"dtype": "float32", "shape": [0]}}},
            "must define a dtype and a shape of positive integers for feature 'action'",
        ),
        ({"features": {"action": {"dtype": "float32", "shape": [1]}}}, "must have feature 'episode_index'"),
    ):
        before = (folder / "meta/info.json").read_text()
        change_info(folder, **changed)
        with pytest.raises(FormatError, match=message):
            read_lerobot(folder)
        (folder / "meta/info.json").write_text(before)
    for text in ("{", "[]", "[" * 100_000):
        (folder / "meta/info.json").write_text(text)
        with pytest.raises(FormatError, match="must be"):
            read_lerobot(folder)


@pytest.mark.parametrize("entry", ["codebase_version", "data_path"])
@pytest.mark.parametrize("value", ["x" * 1_000_000, [["x"] * 100_000], None])
def test_errors_quote_only_the_start_of_an_entry(folder: Path, entry: str, value: Any) -> None:
    change_info(folder, **{entry: value})
    with pytest.raises(FormatError) as caught:
        read_lerobot(folder)
    assert len(str(caught.value)) < 600


def test_features_with_false_values_are_rejected_with_the_name(folder: Path) -> None:
    for name, changed, message in (
        ("observation.state", {"shape": [3]}, r"column 'observation.state' must have rows of shape \(3,\)"),
        ("observation.state", {"shape": [2, 1]}, r"column 'observation.state' must have rows of shape \(2, 1\)"),
        ("next.reward", {"shape": [2]}, r"column 'next.reward' must have rows of shape \(2,\)"),
        ("next.reward", {"dtype": "int64"}, "column 'next.reward' must contain int64, as declared in .* got double"),
        ("next.reward", {"dtype": "string"}, "column 'next.reward' must contain string, as declared in .* got double"),
        ("action", {"dtype": "image", "shape": [2, 5, 3]}, "column 'action' must contain images that are embedded"),
        ("effort", {"dtype": "float32", "shape": [1]}, "must have column 'effort', which meta/info.json lists"),
        ("action.x", {"dtype": "float32", "shape": [1]}, "column 'action.x' must not be nested in 'action'"),
        (
            "rewards",
            {"dtype": "float32", "shape": [1]},
            "column 'rewards' must not map to the same column as 'next.reward'",
        ),
    ):
        before = (folder / "meta/info.json").read_text()
        change_feature(folder, name, **changed)
        with pytest.raises(FormatError, match=message):
            read_lerobot(folder)
        (folder / "meta/info.json").write_text(before)
    change_feature(folder, "action", dtype="complex64")
    with pytest.raises(
        ColumnTypeError, match="column 'action' must contain numbers, strings or images, got 'complex64'"
    ):
        read_lerobot(folder)


def test_nulls_are_rejected_with_the_feature_name(folder: Path) -> None:
    change_column(folder / DATA, "next.reward", [pa.array([1.0, None, 1.0, 1.0, 1.0])])
    with pytest.raises(FormatError, match=r"column 'next.reward' must have no nulls"):
        read_lerobot(folder)


def test_strings_are_read_within_the_memory_limit(folder: Path) -> None:
    change_column(folder / DATA, "note", [pa.array(["a", "b", "c", "d", "é"])])
    change_feature(folder, "note", dtype="string", shape=[1], names=None)
    assert read_lerobot(folder)["note"].tolist() == ["a", "b", "c", "d", "é"]
    change_column(folder / DATA, "note", [pa.array(["a" * (1 << 24), "", "", "", ""])])
    with pytest.raises(CapacityError, match="column 'note' must fit into"):
        read_lerobot(folder, max_nbytes=1 << 27)


def test_rows_that_do_not_match_the_episodes_are_rejected(folder: Path) -> None:
    for lengths in ([3, 3], [1 << 62, 1 << 62], [2, 2]):
        change_column(folder / EPISODES, "length", [pa.array(lengths)])
        with pytest.raises(FormatError, match="must contain one row per frame of its episodes, got 5"):
            read_lerobot(folder)
    change_column(folder / EPISODES, "length", [pa.array([2, 3])])
    with pytest.raises(FormatError, match=r"'episode_index' of .* must agree with the episodes in meta/episodes"):
        read_lerobot(folder)
    for name, values, message in (
        ("length", [0, 5], "column 'length' of .* must contain only integers of at least 1"),
        ("data/file_index", [0, None], "column 'data/file_index' of .* must contain only integers of at least 0"),
        ("episode_index", [1, 1], "must list each episode once"),
    ):
        write = parquet.read_table(folder / EPISODES)
        change_column(folder / EPISODES, name, [pa.array(values, pa.int64())])
        with pytest.raises(FormatError, match=message):
            read_lerobot(folder)
        parquet.write_table(write, folder / EPISODES)


def test_frames_out_of_order_are_rejected(folder: Path) -> None:
    change_column(folder / DATA, "frame_index", [pa.array([0, 2, 1, 0, 1])])
    with pytest.raises(FormatError, match=r"column 'frame_index' of .* must agree with the episodes in meta/episodes"):
        read_lerobot(folder)


def test_the_error_contains_the_missing_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"info.json"):
        read_lerobot(tmp_path / "nothing")
    (folder / DATA).unlink()
    with pytest.raises(FileNotFoundError, match=r"file-000.parquet"):
        read_lerobot(folder)
    (folder / EPISODES).unlink()
    with pytest.raises(FormatError, match=r"must be a folder with .parquet files"):
        read_lerobot(folder)


def test_the_error_contains_the_damaged_file(folder: Path) -> None:
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-30])
    with pytest.raises(FormatError, match=r"file-000.parquet"):
        read_lerobot(folder)


def test_memory_is_bounded(folder: Path) -> None:
    with pytest.raises(CapacityError, match="column 'episode_index' must fit into"):
        read_lerobot(folder, max_nbytes=1)


# What is refused before anything is written


def test_columns_that_the_layout_cannot_store_are_rejected(tmp_path: Path) -> None:
    for changed, kind, message in (
        ({"infos": [{"a": 1}] * 5}, ColumnTypeError, "column 'infos.*' must be numeric in a LeRobot dataset"),
        ({"word": ["a"] * 5}, ColumnTypeError, "column 'word' must be numeric in a LeRobot dataset"),
        ({"a/b": np.ones(5)}, ColumnTypeError, "column 'a/b' must have no '/' in its name"),
        (
            {"big": np.ones((5, 1, 1, 1, 1, 1, 1))},
            ColumnTypeError,
            "column 'big' must have rows of at most 5 dimensions",
        ),
        ({"action": np.ones(5)}, ColumnMismatchError, "column 'action' must be unique"),
        ({"frame_index": np.ones(5)}, ColumnMismatchError, "column 'frame_index' must be unique"),
    ):
        batch = SampleBatch({**dict(two_episodes().items()), **changed})
        with pytest.raises(kind, match=message):
            write_lerobot(batch, tmp_path / "walk", fps=10)
    with pytest.raises(ColumnNotFoundError, match="column 'actions' must exist to be converted"):
        write_lerobot(two_episodes().drop("actions"), tmp_path / "walk", fps=10)
    for fps in (0, float("nan"), True):
        with pytest.raises(ArgumentError, match="fps must be positive"):
            write_lerobot(two_episodes(), tmp_path / "walk", fps=fps)
    for tasks, message in (([], "at least"), (["a", "a"], "each description only once")):
        with pytest.raises(ArgumentError, match=message):
            write_lerobot(two_episodes(), tmp_path / "walk", fps=10, task=tasks)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_not_modified(folder: Path) -> None:
    with pytest.raises(StorageError, match="must be a new or empty folder"):
        write_lerobot(two_episodes()[:3], folder, fps=10)
    assert len(read_lerobot(folder)) == 5


def test_a_dataset_is_written_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(lerobot, "_write_json", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_lerobot(two_episodes(), tmp_path / "walk", fps=10)
    assert not list(tmp_path.iterdir())


def test_empty_infos_of_a_collector_are_omitted(tmp_path: Path) -> None:
    batch = Collector("random", "CartPole-v1").collect(n_step=40).batch
    write_lerobot(batch, tmp_path / "steps", fps=30)
    assert read_lerobot(tmp_path / "steps")["obs"].tolist() == batch["obs"].tolist()
    batch["infos"] = [{"a": 1}] * 40
    with pytest.raises(ColumnTypeError, match="column 'infos' must be numeric"):
        write_lerobot(batch, tmp_path / "others", fps=30)
