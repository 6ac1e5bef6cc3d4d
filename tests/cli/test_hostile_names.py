"""Names from files, messages and policies reach terminals, pages, pictures and logs escaped."""

from __future__ import annotations

import io
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from samplebatch import Batch, MultiAgentBatch, MultiAgentReplayBuffer, ReplayBuffer, SampleBatch
from samplebatch.batch.summary import describe
from samplebatch.cli import application
from samplebatch.cli.serving import draw_tables
from samplebatch.cli.terminal import complain, say
from samplebatch.loggers.logger import Bar, Display, TensorboardLogger
from samplebatch.loggers.training_log import TrainingLog
from samplebatch.names import for_html, for_matplotlib, for_rich, for_terminal

HOSTILE = {
    "escape": "a\x1b]0;owned\x07\x1b[2J",
    "c1": "a\x9b31mred",
    "newline": "a\nError: forged\r\x0b\x85\u2028\u2029",
    "bidi": "a\u202egnp\u2066\u200f\u061cb\u200b\ufeff",
    "closing tag": "[/x]",
    "tag": "[bold red]a[/bold red][link=file:///etc]b[/link]\\",
    "html": "</td><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'",
    "dollars": r"$\bad{$",
    "dollar": r"\$ $\frac$ _{^",
    "long": "x" * 100_000,
    "long escapes": "\U000e0041" * 5000,
    "nul": "a\x00b\x7f\x08",
}
FORBIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}

hostile = pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(application(), [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    assert_plain(result.output)
    return result.output


def assert_plain(text: str, maximum: int = 20_000) -> None:
    """Check that text has no control characters of a terminal and no line longer than the limit."""
    bad = {hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in FORBIDDEN}
    assert not bad, bad
    assert not any(line.startswith("Error: forged") for line in text.splitlines())
    assert len(text) < maximum


def assert_page(html: str) -> None:
    assert "<script" not in html
    assert "<img src=x" not in html
    assert_plain(html, 400_000)


def steps(name: str, **more: Any) -> SampleBatch:
    return SampleBatch({name: [1.0, 2.0], **more})


def episodes(name: str) -> MultiAgentBatch:
    batch = SampleBatch(
        {name: np.zeros((2, 16, 16), np.uint8)},
        eps_id=[1, 1], t=[0, 1], agent_index=[0, 0], rewards=[1.0, 2.0], dones=[False, True],
    )  # fmt: skip
    return MultiAgentBatch({name: batch}, 2)


@hostile
def test_inspect_shows_columns_and_policies_as_text(name: str, tmp_path: Path) -> None:
    for i, batch in enumerate((steps(name), episodes(name), SampleBatch({name: {name: [1.0]}}))):
        path = tmp_path / f"{i}.arrow"
        batch.save(path)
        printed = invoke("inspect", path)
        if len(name) < 30:
            assert for_terminal(name) in printed
        compared = invoke("inspect", path, path)
        assert "The files are equal." in compared
        page, picture = tmp_path / f"{i}.html", tmp_path / f"{i}.png"
        sampled = ("--plot", picture) if i == 1 else ()
        invoke("inspect", path, "--html", page, *sampled)
        assert_page(page.read_text())
        assert i != 1 or picture.read_bytes()[1:4] == b"PNG"
        invoke("verify", path)


@hostile
def test_logs_of_trainings_show_figures_as_text(name: str, tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "log")
    for step in (1, 2):
        log.log_update_data({name: step / 2, "group": {name: 1.0}}, step)
        log.log_test_data({"returns_stat": {"mean": 1.0}}, step)
    log.finalize()
    invoke("inspect", tmp_path / "log", "--html", tmp_path / "log.html", "--plot", tmp_path / "log.png")
    assert_page((tmp_path / "log.html").read_text())


@hostile
def test_top_shows_tables_and_clients_as_text(name: str) -> None:
    counts = {"inserted": 1, "sampled": 2, "size": 3, "capacity": 4, "nbytes": 5}
    stored = {"who": name, "action": name, "since": 0.0, "why": name}
    info = {**counts, "items": name, "kind": name, "limits": {name: 1.0}, "held_back": [stored]}
    screen = Console(file=io.StringIO(), width=80, force_terminal=False)
    screen.print(draw_tables({name: info}, {name: info}, 1.0, name))
    assert_plain(screen.file.getvalue())  # type: ignore[attr-defined]


@hostile
def test_messages_are_lines_of_text(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    complain(f"column {name} must be there")
    say(f"Wrote {name}")
    Display(verbose=True).say(f"epoch 1: {name} 0.5")
    captured = capsys.readouterr()
    text = (captured.out + captured.err).replace("Error: forged", "forged")
    assert_plain(text)
    path = tmp_path / "a.arrow"
    steps("obs").save(path)
    missing = tmp_path / name.replace("/", "_").replace("\0", "_")[:60]
    invoke("inspect", missing)
    invoke("inspect", path, "--plot", missing)


@hostile
def test_the_bar_of_a_training_shows_figures_as_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar(verbose=True)
    screen = Console(file=io.StringIO(), width=200, force_terminal=False)
    monkeypatch.setattr(bar._progress.live, "console", screen)
    bar.begin(1, 0, 10)
    bar.advance(5, {name: 0.5})
    bar.say(f"epoch 1: {name} 0.5")
    bar.close()
    screen.print(bar._progress.get_renderable())
    assert_plain(screen.file.getvalue().replace("Error: forged", ""))  # type: ignore[attr-defined]


@hostile
def test_batches_and_buffers_print_names_as_text(name: str) -> None:
    nested = Batch({name: [1.0], "deep": Batch({name: [1.0]})})
    text: list[Any] = [steps(name), episodes(name), nested]
    for size in (4, 40):
        buffer = ReplayBuffer(size)
        step = {name: np.zeros(2), "obs": Batch({name: 1.0}), "act": 0, "rew": 0.0}
        buffer.add(Batch(step, terminated=False, truncated=False, info={name: 1}))
        text.append(buffer)
    agents = MultiAgentReplayBuffer(8)
    agents.add(MultiAgentBatch({name: SampleBatch(obs=[1.0], actions=[0], rewards=[0.0], dones=[True])}, 1))
    for value in [*text, agents]:
        assert_plain(str(value))
        assert_page(value._repr_html_())
        if len(name) < 1000:
            assert_plain(repr(value))


@hostile
def test_plots_draw_names_as_text(name: str, tmp_path: Path) -> None:
    for value in (steps(name), episodes(name).select("rewards")):
        value.plot().savefig(tmp_path / "plot.png")
        value.plot().savefig(tmp_path / "plot.svg")
        assert "<script" not in (tmp_path / "plot.svg").read_text()


def test_tensorboard_accepts_any_name(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorboardLogger(tmp_path / "events", update_interval=1)
    for step, name in enumerate([*HOSTILE.values(), "lone \ud800 surrogate"]):
        logger.log_update_data({name: 0.5}, step)
    logger.finalize()
    events = accumulators.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert len(tags) > len(HOSTILE)
    for tag in tags:
        assert_plain(tag, 1000)


@hostile
def test_each_medium_has_an_escape(name: str) -> None:
    assert_plain(for_terminal(name), 101)
    assert for_rich(name).plain == for_terminal(name)
    assert not {"<", ">"} & set(for_html(name))
    assert for_matplotlib(name).count("$") == for_matplotlib(name).count(r"\$")
    assert describe(steps(name)._all())[0].column == name
