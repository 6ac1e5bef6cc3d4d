"""Looking into files: ids as ids, frames of images on the page, and two files side by side."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from samplebatch import Batch, Dataset, MultiAgentBatch, ReplayBuffer, SampleBatch, write_arrow, write_parquet
from samplebatch.cli import application
from samplebatch.cli.report import contact_sheet, count_lengths
from samplebatch.column import as_column
from samplebatch.learn import TrainingLog
from tests.optional import torch


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def steps(rewards: list[float]) -> SampleBatch:
    return SampleBatch(rewards=rewards, eps_id=np.full(len(rewards), 2**62 + 1), t=np.arange(len(rewards)))


def test_ids_are_shown_as_ids(tmp_path: Path) -> None:
    write_arrow(steps([1.0, 2.0]), tmp_path / "a.arrow")
    code, printed = invoke("inspect", tmp_path / "a.arrow")
    assert code == 0
    (line,) = [line for line in printed.splitlines() if "eps_id" in line]
    assert str(2**62 + 1) in line
    assert "1 ids" in line


def test_two_files_are_compared_column_by_column(tmp_path: Path) -> None:
    write_arrow(steps([1.0, 2.0]), tmp_path / "a.arrow")
    write_parquet(steps([1.0, 4.0]).rename({"t": "time"}), tmp_path / "b.parquet")
    code, printed = invoke("inspect", tmp_path / "a.arrow", tmp_path / "b.parquet")
    assert code == 0
    words = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in printed.splitlines() if "│" in line}
    assert words == {
        "rewards": "other values",
        "eps_id": "same",
        "t": "only in the first",
        "time": "only in the second",
    }
    assert "2 and 2 steps" in printed
    assert "1 to 4" in printed
    assert printed.endswith("The files differ.\n")


def test_a_file_compared_with_itself_has_no_differences(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(MultiAgentBatch({"walker": steps([1.0, 2.0]), "guard": steps([0.5])}, 2), path)
    code, printed = invoke("inspect", path, path)
    assert code == 0
    assert "policy walker: 2 and 2 steps" in printed
    assert printed.endswith("The files are equal.\n")


def test_columns_of_other_types_and_other_policies_differ(tmp_path: Path) -> None:
    write_arrow(SampleBatch(a=[1, 2]), tmp_path / "a.arrow")
    write_arrow(MultiAgentBatch({"other": SampleBatch(a=[1.0, 2.0])}, 2), tmp_path / "b.arrow")
    write_arrow(SampleBatch(a=[1.0, 2.0]), tmp_path / "c.arrow")
    assert "only in the first" in invoke("inspect", tmp_path / "a.arrow", tmp_path / "b.arrow")[1]
    assert "another type" in invoke("inspect", tmp_path / "a.arrow", tmp_path / "c.arrow")[1]
    code, printed = invoke("inspect", tmp_path / "a.arrow", tmp_path / "b.arrow", "--html", tmp_path / "x.html")
    assert code == 2
    assert "must not be given with two files" in " ".join(printed.split())


def pixels(uri: str) -> np.ndarray:
    assert uri.startswith("data:image/png;base64,")
    return (imread(BytesIO(base64.b64decode(uri.partition(",")[2])), "png") * 255).round().astype(np.uint8)


def test_a_contact_sheet_has_frames_side_by_side() -> None:
    frames = np.zeros((3, 8, 10, 3), np.uint8)
    frames[1, :, :, 0] = 200
    sheet = pixels(contact_sheet(as_column(frames, "obs")))
    assert sheet.shape[:2] == (8, 34)
    assert sheet[0, 0, :3].tolist() == [0, 0, 0]
    assert sheet[0, 10, :3].tolist() == [255, 255, 255]
    assert sheet[0, 12, :3].tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    ("shape", "size"),
    [((8, 9), (8, 9)), ((8, 9, 1), (8, 9)), ((4, 84, 84), (84, 84)), ((3, 8, 9), (8, 9)), ((8, 9, 4), (8, 9))],
    ids=str,
)
def test_images_have_several_layouts(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    assert pixels(contact_sheet(as_column(np.zeros((1, *shape), np.uint8), "obs"))).shape[:2] == size
    assert contact_sheet(as_column(torch.zeros((1, *shape), dtype=torch.uint8), "obs"))
    packed = SampleBatch(obs=np.zeros((1, *shape), np.uint8)).compress()
    assert contact_sheet(packed.column("obs"))


def test_long_columns_show_some_frames() -> None:
    sheet = pixels(contact_sheet(as_column(np.zeros((1000, 8, 8), np.uint8), "obs")))
    assert sheet.shape[:2] == (3 * 10 - 2, 8 * 10 - 2)


@pytest.mark.parametrize(
    "values",
    [np.zeros((3, 8, 8)), np.zeros((3, 4), np.uint8), np.zeros((3, 2, 9), np.uint8), np.zeros((0, 8, 8), np.uint8),
     np.zeros((3, 9, 9, 9), np.uint8)],
    ids=lambda values: f"{values.dtype}{values.shape}",
)  # fmt: skip
def test_rows_that_are_not_images_have_no_contact_sheet(values: np.ndarray) -> None:
    assert contact_sheet(as_column(values, "obs")) == ""


def test_the_page_shows_frames_under_an_escaped_name(tmp_path: Path) -> None:
    write_arrow(SampleBatch({"<b>": np.zeros((2, 8, 8), np.uint8), "rewards": [0.0, 1.0]}), tmp_path / "a.arrow")
    assert invoke("inspect", tmp_path / "a.arrow", "--html", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text()
    assert len(re.findall("<img ", page)) == 1
    assert "<figcaption>&lt;b&gt;</figcaption>" in page
    assert "<b>" not in page


def test_a_page_reports_the_file_type_and_counts_ids(tmp_path: Path) -> None:
    write_arrow(steps([1.0, 2.0]), tmp_path / "a.arrow")
    (tmp_path / "run").mkdir()
    Dataset(tmp_path / "data").extend(MultiAgentBatch({"walker": steps([1.0]), "guard": steps([0.5])}, 1))
    buffer = ReplayBuffer(10)
    for _ in range(2):
        buffer.add(Batch(obs=0.0, act=0, rew=1.0, terminated=False, truncated=False, obs_next=1.0, info={}))
    buffer.save(tmp_path / "replay")
    log = TrainingLog(tmp_path / "run" / "log")
    log.log_test_data({"returns_stat": {"mean": 1.0}}, 0)
    log.finalize()
    titles = {
        "a.arrow": "a.arrow: Arrow file, 2 steps of one policy",
        "data": "data: dataset, 1 steps of the policies walker, guard",
        "replay": "replay: replay buffer, 2 steps of one policy",
        "run": "run: training log, 1 metrics",
    }
    for name, title in titles.items():
        assert invoke("inspect", tmp_path / name, "--html", tmp_path / "page.html")[0] == 0
        page = (tmp_path / "page.html").read_text()
        assert f"<h1>{title}</h1>" in page
        assert f"<title>{title}</title>" in page
        assert " MB</p>" in page
        assert " bytes" not in page
    assert invoke("inspect", tmp_path / "a.arrow", "--html", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    (ids,) = re.findall(r"<tr><td>eps_id</td>(.*?)</tr>", page)
    assert re.findall(r"<td>(.*?)</td>", ids) == ["int64", "(2,)", "", "", "1 ids", ""]


def test_lengths_are_counted_without_uneven_bins() -> None:
    lengths = np.arange(1, 95)
    first, width, counts = count_lengths(lengths)
    assert (first, width, counts[:-1].tolist(), int(counts.sum())) == (1, 4, [4] * 23, 94)
    first, width, counts = count_lengths(np.array([200] * 7))
    assert (first, width, counts.tolist()) == (200, 1, [7])
