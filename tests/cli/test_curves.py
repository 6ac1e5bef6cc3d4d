"""Learning curves of a training's log: in the terminal, as a picture, and on a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from samplebatch.cli import application
from samplebatch.cli.curves import blocks, draw_text
from samplebatch.learn import TrainingLog
from samplebatch.loggers.training_log import LearningCurve


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(application(), [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log of three tests, nine updates and a loss that is not finite."""
    log = TrainingLog(tmp_path / "log")
    for step in range(3):
        log.log_test_data({"returns_stat": {"mean": 100.0 * step, "std": 1.0}}, step * 10)
    for step in range(9):
        log.log_update_data({"loss": np.nan if step == 4 else float(-step)}, step)
    log.finalize()
    return tmp_path / "log"


def test_inspecting_a_log_draws_its_returns_and_lists_every_curve(log: Path) -> None:
    code, printed = invoke("inspect", log)
    assert code == 0
    lines = printed.splitlines()
    assert lines[0] == "test/returns_stat/mean over env_step"
    assert lines[1].strip().startswith("200 ┤")
    assert lines[1].endswith("•")
    (loss,) = [line for line in lines if "update/loss" in line]
    assert loss.split() == ["update/loss", "8", "0", "-8", "0", "█▇▆▅▄▃▂▁"]


def test_a_narrow_terminal_shows_integers_and_names(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log")
    for step in range(20):
        log.log_update_data({"smoothed_loss": {"gradient_steps_per_sample": -0.0078912 / (step + 1)}}, step)
    log.finalize()
    result = CliRunner().invoke(application(), ["inspect", str(tmp_path / "log")], env={"COLUMNS": "80"})
    lines = [line for line in result.output.splitlines() if line.strip()]
    (first,) = [number for number, line in enumerate(lines) if "-0.007891" in line]
    assert not any("…" in line for line in lines)
    assert "".join(line.split()[0] for line in lines[first:]) == "update/smoothed_loss/gradient_steps_per_sample"


def test_the_folder_of_a_run_selects_its_log(log: Path) -> None:
    assert invoke("inspect", log.parent) == invoke("inspect", log)


def test_a_log_is_drawn_as_a_picture_and_on_a_page(log: Path, tmp_path: Path) -> None:
    code, _ = invoke("inspect", log, "--plot", tmp_path / "curve.png", "--html", tmp_path / "page.html")
    assert code == 0
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "mean return" in page


def test_a_long_curve_is_drawn_by_means() -> None:
    values = np.repeat([0.0, 1.0], 500)
    assert blocks(values, width=4) == "▁▁██"
    assert draw_text("a", LearningCurve("epoch", np.arange(1000), values), 4, 2)[1:3] == [
        "           1 ┤  ••",
        "           0 ┤••",
    ]


def test_a_curve_without_numbers_is_reported() -> None:
    curve = LearningCurve("epoch", np.array([1]), np.array([np.nan]))
    assert draw_text("loss", curve) == ["loss over epoch: no finite values"]
    assert blocks(curve.values) == ""


def test_all_policies_have_curves_and_only_means_have_panels(tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log")
    for step in range(3):
        means = {"mean": float(step), "std": 1.0}
        policies = {policy: {"returns_stat": means} for policy in ("wolf", "sheep")}
        log.log_test_data({"returns_stat": means, "policies": policies}, step)
        summary = {name: float(step) for name in ("mean", "std", "min", "max")}
        log.log_update_data({"by_policy": {policy: {"loss": summary} for policy in ("wolf", "sheep")}}, step)
    log.finalize()
    code, _ = invoke("inspect", tmp_path / "log", "--html", tmp_path / "page.html")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    plot = page[page.index("<svg") : page.index("</svg>")]
    assert plot.count(">test, wolf<") == plot.count(">test, sheep<") == 1
    assert plot.count(">wolf<") == plot.count(">sheep<") == plot.count(">loss<") == 1
    assert ">loss/std<" not in plot
