"""The examples of README.md and docs/ do what they show.

Every python block holds `>>>` examples; the blocks of one page run in order and share their names. In bash blocks,
`make` targets must exist, and `samplebatch` commands are run in this process, in order, in an empty folder. A block
under `<!-- needs: minari -->` is left out where that package is not installed.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samplebatch.cli import application
from tests.examples import blocks, failures, python_examples

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

WITH_PROMPTS = [page for page in PAGES if page.parent.name != "tutorials"]  # tests/test_tutorials.py runs the others

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", WITH_PROMPTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    examples = python_examples(page)
    if any("tianshou.algorithm" in example.source for example in examples.examples):
        pytest.importorskip("tianshou.algorithm")
    report = failures(examples)
    assert not report, report


def check_commands(page: Path, monkeypatch: pytest.MonkeyPatch, *added: str) -> None:
    """Run the commands of a page; add words to trainings of the default number of steps."""
    pytest.importorskip("torch")
    for start, block in blocks(page, "bash"):
        commands = "\n".join(block).replace("\\\n", " ").split("\n")
        for number, line in enumerate(commands, start + 1):
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert words[1] in TARGETS, f"{page.name}:{number}: the Makefile has no target {words[1]!r}"
            elif words[:1] == ["samplebatch"]:
                if words[1] == "train":
                    # It sets torch's threads, which belong to all tests.
                    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
                    if "--steps" not in words and "--help" not in words:
                        words += added
                run = CliRunner().invoke(application(), words[1:])
                assert run.exit_code == 0, f"{page.name}:{number}: {line}\n{run.output}{run.exception}"


@each_page
def test_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_commands(page, monkeypatch, "--steps", "2048")


@pytest.mark.long
def test_trainings_of_the_readme_run_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_commands(ROOT / "README.md", monkeypatch)


@each_page
def test_modules_mentioned_on_pages_exist(page: Path) -> None:
    text = page.read_text()
    folders = "batch|buffer|column|convert|env|policy|rollout|storage|transport|workers"
    named = {f"samplebatch/{actual}" for actual in re.findall(rf"`(?:samplebatch/)?((?:{folders})/[\w/]*\.py)`", text)}
    named |= set(re.findall(r"tests/[\w/]+(?:\.py)?", text))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize(
    "page", ["batches", "buffers", "builders", "columns", "convert", "nested", "rollout", "files", "learn", "trainers"]
)
def test_reference_contains_no_private_module(page: str) -> None:
    listed = re.findall(r"^::: (\S+)\.(\w+)$", (ROOT / "docs" / "api" / page / "index.md").read_text(), re.MULTILINE)
    assert listed
    private = [f"{door}.{name}" for door, name in listed if name not in getattr(import_module(door), "__all__", ())]
    assert not private
