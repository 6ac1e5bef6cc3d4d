"""Figures and pages are valid files that describe the batch."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import arena
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, SampleBatch
from samplebatch.cli.report import check_picture, draw_episodes, episodes_as_svg, write_html_report
from samplebatch.errors import FormatError, MissingExtraError
from samplebatch.rollout.multi_agent_collector import MultiAgentCollector

STEPS = SampleBatch(
    eps_id=[7, 7, 8, 9], t=[0, 1, 0, 0], agent_index=[0] * 4, rewards=[1.0, 2.0, 9.0, 1.0], dones=[0, 1, 1, 0]
)


class Page(HTMLParser):
    """Parser that collects the tags and the text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_file_extension_selects_the_format(ending: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"episodes.{ending}"
    draw_episodes(STEPS, path)
    assert path.read_bytes().startswith(begins)


def test_each_policy_has_a_row_in_the_picture() -> None:
    pytest.importorskip("matplotlib")
    from samplebatch.cli import report as pictures
    from samplebatch.rollout.statistics import episode_statistics

    batch = MultiAgentCollector("random", arena.Relay(), policy_mapping=arena.whose, seed=0).collect(n_step=20).batch
    statistics = episode_statistics(batch)
    assert statistics is not None
    figure = pictures._figure(statistics)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if "return" in title] == [
        f"{policy}: return of each episode" for policy in statistics.policies
    ]
    sampled = figure.axes[0].lines[0].get_ydata()
    assert np.array_equal(sampled, next(iter(statistics.policies.values())).returns)
    assert figure.get_suptitle() == "2 episodes ended, 1 did not"


def test_the_line_is_the_mean_of_the_last_episodes() -> None:
    pytest.importorskip("matplotlib")
    from samplebatch.cli import report as pictures

    values = np.random.default_rng(3).standard_normal(50)
    expected = [values[i : i + 20].mean() for i in range(31)]
    assert np.allclose(pictures._running_mean(values), expected)
    assert np.allclose(pictures._running_mean(values[:5]), [values[:5].mean()])


def test_pictures_of_batches_without_a_finished_episode_say_so() -> None:
    unfinished = STEPS.slice(3, 4)
    assert Page(episodes_as_svg(unfinished)).text.count("no episode ended") == 2
    assert "0 episodes ended, 0 did not" in Page(episodes_as_svg(MultiAgentBatch({}, 0))).text


def test_each_part_of_a_reward_has_a_line(tmp_path: Path) -> None:
    parts = SampleBatch(eps_id=[1, 1], t=[0, 1], agent_index=[0, 0], rewards=[[1.0, 9.0], [2.0, 8.0]], dones=[0, 1])
    draw_episodes(parts, tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_undrawable_batches_are_rejected_before_a_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"must end in one of .png, .svg.* got 'episodes.txt'"):
        draw_episodes(STEPS, tmp_path / "episodes.txt")
    with pytest.raises(FormatError, match="must have the columns 'eps_id'"):
        draw_episodes(SampleBatch(rewards=[1.0]), tmp_path / "episodes.png")
    with pytest.raises(FileNotFoundError):
        check_picture(tmp_path / "nowhere" / "episodes.png")
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'samplebatch\[plot\]'"):
        draw_episodes(STEPS, tmp_path / "episodes.png")


def test_no_window_system_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from samplebatch import SampleBatch; from samplebatch.cli.report import draw_episodes\n"
        "draw_episodes(SampleBatch(eps_id=[1], t=[0], agent_index=[0], rewards=[1.0], dones=[True]), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "one.png")], check=True)


def test_the_page_is_one_file_with_all_names(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    batch = MultiAgentCollector("random", arena.Relay(), policy_mapping=arena.whose, seed=0).collect(n_step=20).batch
    write_html_report(batch, path, title="relay <20 steps>")
    source = path.read_text()
    page = Page(source)
    assert page.tags.count("h1") == source.count("figure_1") == 1
    assert page.tags.count("table") == 1 + len(batch.policy_batches)
    assert "relay <20 steps>" in page.text
    assert "2 episodes ended, 1 did not" in page.text
    for policy in batch.policy_batches:
        assert policy in page.text
        assert any(f"policy {policy}" in text for text in page.text)
    assert {"obs", "rewards", "eps_id"} <= set(page.text)
    assert "<script" not in source
    assert "<link" not in source


def test_a_page_of_a_batch_without_episodes_has_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_html_report(SampleBatch(rewards=[1.0, 2.0]), path, title="two steps")
    page = Page(path.read_text())
    assert "figure_1" not in path.read_text()
    assert page.tags.count("polyline") == 1
    assert "2 steps" in page.text
    assert "1.5" in page.text
